"""What each exit code stands for, by real command lines: the code, the cause on stderr, nothing else on stdout."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.process import start
from support.small_disk import small_disk
from support.tiny import make_table, records, write_config

from osora_cli import errors
from osora_cli.checkpoint import fsio
from osora_cli.cli.main import run

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ("train", "vae", "tiny.yaml", "--outputs", "{out}", "--exp-name", "run")
RECONSTRUCT = ("infer", "reconstruct", "demo/reconstruct", "--dataset.data-path", "clips.csv", "--save-dir", "{out}/r")
SIGNALS = {130: signal.SIGINT, 143: signal.SIGTERM}


@dataclass(frozen=True)
class Case:
    """A command line and how it ends. `cause`: in the message; `cure`: in what is said below it."""

    code: int
    argv: tuple[str, ...]
    cause: str
    cure: str = ""
    unless: str = ""
    """What would let it succeed here."""

    def __str__(self) -> str:
        return f"{self.code}-{self.cause[:40]}"


CASES = [
    Case(1, (*TRAIN, "--lr", "1e30", "--grad-clip", "0", "--max-nonfinite-steps", "2", "--max-steps", "9"),
         "the gradients of 2 updates in a row were not finite", "lower `--lr`"),
    Case(2, (*TRAIN, "--lrr", "1"), "`--lrr` is not an option", "did you mean `--lr`?"),
    Case(2, (*TRAIN, "--optim.betas", "[0.5, 7]"), "`optim.betas.1` is `7`", "2 numbers >= 0 and < 1"),
    Case(2, ("train", "vea"), "`vea` is not a command of `osora train`", "vae"),
    Case(2, ("train", "vae", "none.yaml"), "the config `none.yaml` does not exist"),
    Case(3, (*TRAIN, "--dataset.data-path", "none.csv"), "none.csv"),
    Case(3, (*TRAIN, "--dataset.data-path", "bare.csv"), "num_frames", "osora data meta --input"),
    Case(3, (*TRAIN, "--dataset.data-path", "comma.csv"), "the row has 9 fields, the header 8", "comma.csv:3"),
    Case(3, ("data", "meta", "--input", "noise", "--output", "{out}/t.csv", "--num-workers", "0"),
         "no file of `noise` can be used"),
    Case(4, ("resume", "{damaged}"), "no checkpoint of", "osora ckpt verify"),
    Case(4, ("ckpt", "export", "{damaged}", "{out}/w.safetensors"), "verifies"),
    Case(4, (*RECONSTRUCT, "--from-pretrained", "{damaged}", "--no-lpips"), "verifies"),
    Case(4, ("resume", "clips.csv"), "`clips.csv`"),
    Case(5, (*TRAIN, "--engine", "colossalai"), "colossalai is not installed", "pip install", unless="colossalai"),
    Case(5, (*TRAIN, "--device", "cuda"), "torch sees no GPU", "--device cpu", unless="cuda"),
    Case(5, ("train", "vae", "tiny.yaml", "--outputs", "clips.csv/here"), "clips.csv/here"),
]  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clips and tables good and bad, a config, and `damaged`: a run whose only checkpoint has one bit changed."""
    home = tmp_path_factory.mktemp("codes")
    table = make_table(home, clips=3).read_text().splitlines()
    (home / "bare.csv").write_text("path,text\nclip0.mp4,a clip\n")
    (home / "comma.csv").write_text("\n".join([*table[:2], table[2].replace("clip 1", "a dog, a cat")]) + "\n")
    (home / "noise").mkdir()
    (home / "noise" / "a.mp4").write_bytes(b"no film")
    write_config(home, max_steps=1, tensorboard=False)
    return home


@pytest.fixture(scope="module")
def damaged(home: Path) -> Path:
    before = Path.cwd()
    os.chdir(home)
    try:
        assert run(["train", "vae", "tiny.yaml", "--outputs", "runs", "--exp-name", "damaged", "--quiet"]) == 0
    finally:
        os.chdir(before)
    shard = next((home / "runs" / "damaged").glob("epoch*/model/*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-5] ^= 4
    shard.write_bytes(data)
    return home / "runs" / "damaged"


def filled(case: Case, out: Path, damaged: Path) -> list[str]:
    out.mkdir()
    return [word.replace("{out}", str(out)).replace("{damaged}", str(damaged)) for word in case.argv]


def skip_where_it_would_succeed(case: Case) -> None:
    if case.unless == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    if case.unless == "colossalai" and find_spec("colossalai") is not None:
        pytest.skip("colossalai is installed here")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_failure(
    case: Case,
    home: Path,
    damaged: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    skip_where_it_would_succeed(case)
    monkeypatch.chdir(home)
    capsys.readouterr()
    assert run(filled(case, tmp_path / "text", damaged)) == case.code
    said = capsys.readouterr()
    assert said.out == ""
    message = said.err[said.err.index("error: ") :]
    assert case.cause in message
    assert case.cure in message
    assert "Traceback" not in said.err
    assert run([*filled(case, tmp_path / "json", damaged), "--json"]) == case.code
    told = json.loads(capsys.readouterr().out)["error"]
    assert told["exit_code"] == case.code
    assert case.cause in told["message"]


def test_a_save_that_fails(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 1: there was room when the run asked, and the disk is full when it writes."""
    monkeypatch.chdir(home)
    with small_disk(tmp_path / "disk", 1.5) as disk:
        monkeypatch.setattr(fsio, "free_bytes", lambda folder: 1 << 40)
        assert run(["train", "vae", "tiny.yaml", "--outputs", str(disk), "--exp-name", "run"]) == 1
        assert not list((disk / "run").glob("epoch*"))
    said = capsys.readouterr()
    assert said.out == ""
    assert "error: checkpoint `epoch" in said.err
    assert "was not saved: No space left on device" in said.err
    assert "--keep-n-latest" in said.err


def test_done(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(home)
    assert run(["train", "vae", "tiny.yaml", "--outputs", str(tmp_path), "--exp-name", "run", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["steps"] == 1
    assert run(["ckpt", "verify", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "ok"


def test_a_verdict_is_a_result_whatever_its_code(
    damaged: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert run(["ckpt", "verify", str(damaged), "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["verdict"] == "damaged"


@pytest.mark.parametrize("code", SIGNALS)
def test_signal(code: int, home: Path, tmp_path: Path) -> None:
    """A training without an end is told to stop: it saves, says so, and nothing is lost."""
    line = ("train", "vae", "tiny.yaml", "--max-steps", "100000", "--outputs", tmp_path, "--exp-name", "run", "--json")
    process, out, err = start(*line, cwd=home)
    begun = tmp_path / "run" / "metrics.jsonl"
    end = time.monotonic() + 120
    while not (begun.exists() and begun.stat().st_size):
        assert process.exitcode is None, err.read_text()
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, SIGNALS[code])
    process.join(120)
    assert process.exitcode == code, err.read_text()
    told = json.loads(out.read_text())["error"]
    last = records(tmp_path / "run")[-1]["step"]
    assert told["exit_code"] == code
    assert f"{SIGNALS[code].name}: stopped after update {last}, saved" in told["message"]
    assert (tmp_path / "run" / "latest").read_text().strip().endswith(f"global_step{last}")


# ---- that none is left out -------------------------------------------------------------------------------------------


def kinds(base: type[Any] = errors.OsoraError) -> set[type[Any]]:
    return {base}.union(*(kinds(kind) for kind in base.__subclasses__()))


def test_every_code_is_tested_and_told() -> None:
    tested = {case.code for case in CASES} | set(SIGNALS) | {0}
    assert tested == {0, 130, 143} | {kind.exit_code for kind in kinds() if kind.__module__ == errors.__name__}
    table = re.findall(r"^\| (\d+) \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    assert sorted(map(int, table)) == sorted(tested)
    (sentence,) = re.findall(r"^Exit codes: (.*?)\.\n", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert {int(number) for number in re.findall(r"\b\d+\b", sentence)} == tested
