"""Whole run folders, damaged at random, and every command that reads them.

Whatever is in a run's folder, a command ends with an exit code of its own and says what is wrong: no internal error, no
hang, no checkpoint called `ok` whose tensors are not those that were saved, and nothing in the folder is changed.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main
from support.checkpoints import save
from support.process import osora
from support.tiny import make_table, write_config

from osora_cli.app.reconstruct.find import find_autoencoder
from osora_cli.cli.main import run as run_command
from osora_cli.config.models.dc_ae import DcAeConfig
from osora_cli.errors import OsoraError

LONGEST_S = 60
SMALL = ("latest", "run.json", "config.yaml", "config.txt", "metrics.jsonl")
BAD_TEXTS = (
    b"", b"\0" * 40, b"null", b"[]", b"[[1, 2], {}]", b"7", b'"text"', b"{}", b'{"a": ', b"\xff\xfe\x00", b"[" * 50_000,
    b'{"epoch": {}, "step": [], "files": 3, "weight_map": [1]}', b"../../etc/passwd\n", b"a: [1\nb: &x {c: *x}\n",
    b'{"step": "x", "loss": []}\n{"kind": []}\n[]\n3\n', b'{"step": 1e999, "loss": NaN}\n{"step": -1}\n', b"9" * 5_000,
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def commands_made_once() -> Iterator[None]:
    """Typer makes its commands anew for each command line, which takes longer than most of what they do here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield


@dataclass(frozen=True)
class Home:
    """A trained run with three checkpoints, one of another run and model, and the table that a resume reads."""

    folder: Path
    run: Path
    foreign: Path

    def originals(self) -> list[Path]:
        return [*self.run.glob("epoch*"), self.foreign]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    folder = tmp_path_factory.mktemp("folders")
    make_table(folder)
    config = write_config(folder, ckpt_every=2, max_steps=6, tensorboard=False, eval={"at_ends": False})
    argv = ("train", "vae", config, "--exp-name", "run", "--outputs", folder, "--async-io")
    finished = osora(*argv, cwd=folder)
    assert finished.code == 0, finished.stderr
    return Home(folder, folder / "run", save(folder / "other", 4)[0])


# ---- the damage -----------------------------------------------------------------------------------------------------


def entries(run: Path) -> list[Path]:
    return sorted(path for path in run.rglob("*") if path.parent != run or path.name != ".lock")


def pick(run: Path, rng: random.Random) -> Path:
    """A file or folder of the run: often one of its small files, else one anywhere."""
    named = [run / name for name in SMALL if os.path.lexists(run / name)]
    return rng.choice(named) if named and rng.random() < 0.3 else rng.choice(entries(run))


def gone(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def checkpoints(run: Path) -> list[Path]:
    return sorted(path for path in run.glob("epoch*") if path.is_dir() and not path.is_symlink())


def delete(run: Path, rng: random.Random, home: Home) -> None:
    gone(pick(run, rng))


def rewrite(run: Path, rng: random.Random, home: Home) -> None:
    """Cut, emptied, a byte changed, a piece doubled, garbage."""
    path = pick(run, rng)
    if not path.is_file():
        return
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data)) if data else 0
    kind = rng.randrange(4)
    if kind == 0:
        del data[at:]
    elif kind == 1 and data:
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 2:
        data[at:at] = data[at : at + 40]
    else:
        data = bytearray(rng.choice(BAD_TEXTS))
    path.unlink()
    path.write_bytes(data)


def in_its_place(run: Path, rng: random.Random, home: Home) -> None:
    """A folder, a pipe, or a link to itself, to nothing, to the folder above, to another file."""
    path = pick(run, rng)
    gone(path)
    kind = rng.randrange(6)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        os.mkfifo(path)
    else:
        targets = [path.name, "nothing", "..", str(home.folder / "clips.csv")]
        path.symlink_to(targets[kind - 2])


def beside(run: Path, rng: random.Random, home: Home) -> None:
    """A new entry: a name as long as they get, one that is no text, folders left of a save, links."""
    where = rng.choice([run, *checkpoints(run)])
    names = [b"x" * 255, b"caf\xe9.json", b"epoch0-global_step", b"epoch-1-global_step3", b".staging-0-4-0a0b0c0d",
             b".trash-epoch0-global_step4-0a0b0c0d", b"epoch0-global_step" + b"9" * 60, b"new\nline",
             b"model-00009.safetensors", b"epoch0-global_step77"]  # fmt: skip
    path = os.path.join(os.fsencode(where), rng.choice(names))  # names that are no text
    if os.path.lexists(path):
        return
    kind = rng.randrange(3)
    if kind == 0:
        os.mkdir(path)
    elif kind == 1:
        os.symlink(b".", path)
    else:
        with open(path, "wb") as file:  # noqa: PTH123
            file.write(rng.choice(BAD_TEXTS))


def checkpoint_as_another(run: Path, rng: random.Random, home: Home) -> None:
    """Renamed, stored twice, or another run's."""
    found = checkpoints(run)
    if not found:
        return
    source = rng.choice(found)
    name = rng.choice(
        [
            "epoch9-global_step4",
            "epoch0-global_step99",
            "epoch0-global_step" + "9" * 25,
            "mine",
            "epoch01-global_step06",
        ]
    )
    target = run / name
    if os.path.lexists(target):
        return
    kind = rng.randrange(3)
    if kind == 0:
        source.rename(target)
    elif kind == 1:
        shutil.copytree(source, target, symlinks=True, copy_function=copy_plain)
    else:
        shutil.copytree(
            home.foreign, run / f"epoch0-global_step{rng.choice([4, 44])}", dirs_exist_ok=True, copy_function=copy_plain
        )


def copy_plain(source: str, target: str) -> None:
    if os.path.isfile(source) and not os.path.isdir(target):
        Path(target).unlink(missing_ok=True)
        shutil.copy2(source, target)


MUTATIONS: tuple[Callable[[Path, random.Random, Home], None], ...] = (
    delete, rewrite, rewrite, in_its_place, beside, checkpoint_as_another,
)  # fmt: skip


# ---- what is read, and what must hold -------------------------------------------------------------------------------


def state(run: Path) -> dict[bytes, tuple[int, int, int, str]]:
    """All that can be seen of the folder but for access times."""
    found: dict[bytes, tuple[int, int, int, str]] = {}
    for path in [run, *run.rglob("*")]:
        status = path.lstat()
        link = str(path.readlink()) if path.is_symlink() else ""
        found[os.fsencode(path)] = (status.st_mode, status.st_size, status.st_mtime_ns, link)
    return found


class Hung(BaseException):
    pass


@contextlib.contextmanager
def deadline(what: str) -> Iterator[None]:
    def too_late(*_: object) -> None:
        raise Hung(what)

    before = signal.signal(signal.SIGALRM, too_late)
    signal.alarm(LONGEST_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def call(argv: list[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with deadline(" ".join(argv)), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run_command(argv)
    return code, out.getvalue(), err.getvalue()


def truthful(checkpoint: Path, home: Home) -> bool:
    """Whether its tensor files are, all of them and byte by byte, those of one save."""
    for original in home.originals():
        files = [path.relative_to(original) for path in original.rglob("*.safetensors")]
        if all(
            (checkpoint / f).is_file() and (checkpoint / f).read_bytes() == (original / f).read_bytes() for f in files
        ):
            return True
    return False


def check_folder(home: Home, folder: Path, seed: int) -> Counter[str]:
    """Damage a copy of the run in its own way and let every command read it."""
    rng = random.Random(seed)
    run = folder / "run"
    shutil.copytree(home.run, run)
    seen: Counter[str] = Counter()
    for mutate in rng.choices(MUTATIONS, k=rng.randint(1, 3)):
        mutate(run, rng, home)
        seen[f"mutation {mutate.__name__}"] += 1
    before = state(run)
    target = str(run)
    chosen = rng.choice(checkpoints(run) or [run])
    commands = {
        "list": ["ckpt", "list", target, "--json"],
        "verify": ["ckpt", "verify", target, "--json"],
        "verify one": ["ckpt", "verify", str(chosen), "--json"],
        "prune": ["ckpt", "prune", target, "--keep-n-latest", "1", "--json"],
        "export": ["ckpt", "export", target, str(folder / "out.safetensors"), "--json"],
        "report": ["report", target, "--output", str(folder / "report"), "--json"],
        "resume": ["resume", target, "--print-config"],
        "resume, as far as its checks": ["resume", target, "--max-steps", "1", "--json"],
    }
    if seed % 20 != 7:  # drawing costs most of the time
        del commands["report"]
    for name, argv in commands.items():
        code, out, err = call(argv)
        told = f"seed {seed}: osora {' '.join(argv)}: {code}\n{out[-600:]}\n{err[-2000:]}"
        assert code in (0, 2, 3, 4, 5), told
        assert "internal error" not in err, told
        assert "Traceback" not in err, told
        seen[f"{name}: {code}"] += 1
        if argv[-1] == "--json":
            payload = json.loads(out)
            if name.startswith("verify"):
                check_verdicts(payload, home, told, seen)
    with deadline("find_autoencoder"):
        try:
            find_autoencoder(DcAeConfig(from_pretrained=target))
            seen["reconstruct finds it"] += 1
        except OsoraError as error:
            seen[f"reconstruct: {error.exit_code}"] += 1
    assert state(run) == before, f"seed {seed}: something in the run was changed"
    return seen


def check_verdicts(payload: dict[str, Any], home: Home, told: str, seen: Counter[str]) -> None:
    for checkpoint in payload.get("checkpoints") or ([payload] if payload.get("kind") == "checkpoint" else []):
        seen[f"verdict {checkpoint['verdict']}"] += 1
        if checkpoint["verdict"] == "ok":
            assert truthful(Path(checkpoint["path"]), home), told


def sweep(home: Home, folder: Path, seeds: range) -> Counter[str]:
    total: Counter[str] = Counter()
    for seed in seeds:
        case = folder / f"case{seed}"
        case.mkdir()
        total += check_folder(home, case, seed)
        shutil.rmtree(case)
    return total


def test_damaged_runs_are_told_and_left_as_they_are(home: Home, tmp_path: Path) -> None:
    seen = sweep(home, tmp_path, range(12))
    assert seen["verdict ok"] >= 8
    assert seen["verdict damaged"] >= 2


@pytest.mark.sweep
@pytest.mark.timeout(7200)
def test_two_thousand_damaged_runs(home: Home, tmp_path: Path) -> None:
    seen = sweep(home, tmp_path, range(1000, 3000))
    for name, count in sorted(seen.items()):
        print(f"{count:6} {name}")
    assert seen["verdict ok"] >= 1000
    assert seen["verdict damaged"] >= 250


def test_a_pipe_in_a_files_place_is_not_waited_for(home: Home, tmp_path: Path) -> None:
    """Each file in turn that is no tensors': nobody ever writes to the pipe."""
    run = tmp_path / "run"
    shutil.copytree(home.run, run)
    newest = checkpoints(run)[-1]
    files = [run / name for name in SMALL] + [p for p in newest.rglob("*") if p.is_file()]
    for path in files:
        data = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        for argv in (["ckpt", "list"], ["ckpt", "verify"], ["resume"]):
            code, _, err = call([*argv, str(run), *(["--max-steps", "1"] if argv == ["resume"] else [])])
            assert code in (0, 2, 4), f"{path.name}: {argv}: {err}"
            assert "internal error" not in err, f"{path.name}: {argv}: {err}"
        path.unlink()
        path.write_bytes(data)
