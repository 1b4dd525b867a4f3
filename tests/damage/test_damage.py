"""Real damage to real files: each must be told, with the file's name, and the checkpoint before must be taken."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.checkpoints import save

from osora_cli.app.ckpt.verify import verify_path
from osora_cli.checkpoint.headers import build_header, read_header
from osora_cli.checkpoint.manifest import dump_manifest, parse_manifest, whole_record
from osora_cli.checkpoint.resolve import resolve_load
from osora_cli.checkpoint.verify import verify, verify_run

NEWEST, BEFORE = "epoch0-global_step5", "epoch0-global_step4"
MODEL = "model/model-00001.safetensors"
OPTIM = "optimizer/optimizer-00001.safetensors"
INDEX = "model/model.safetensors.index.json"
STATES = "running_states.json"


@pytest.fixture(scope="module", params=[True, False], ids=["async", "sync"])
def pristine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("pristine")
    save(run, 4, 5, async_io=request.param)
    return run


@pytest.fixture
def run(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine, tmp_path / "run")


# --- the damage -------------------------------------------------------------------------------------------------


def rewrite(file: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(c: Path) -> None:
        (c / file).write_bytes(change((c / file).read_bytes()))

    return damage


def flipped(data: bytes, position: int, bit: int = 3) -> bytes:
    out = bytearray(data)
    out[position] ^= 1 << bit
    return bytes(out)


def data_start(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


def remove(file: str) -> Callable[[Path], None]:
    return lambda c: (c / file).unlink()


def from_step_4(file: str) -> Callable[[Path], None]:
    return lambda c: (c / file).write_bytes((c.parent / BEFORE / file).read_bytes())


def states_of_step(update: int, *, manifest: bool = False, name: bool = False) -> Callable[[Path], None]:
    """Another step in running_states.json; made consistent with manifest and folder name if asked."""

    def damage(c: Path) -> None:
        states = json.loads((c / STATES).read_text()) | {"actual_update_step": update}
        data = json.dumps(states).encode()
        (c / STATES).write_bytes(data)
        if manifest:
            old = parse_manifest((c / "manifest.json").read_bytes())
            files = old.files | {STATES: whole_record(data)}
            counters = replace(old.counters, actual_update_step=update)
            (c / "manifest.json").write_bytes(dump_manifest(replace(old, files=files, counters=counters)))
        if name:
            c.rename(c.with_name(f"epoch0-global_step{update}"))

    return damage


def second_index(c: Path) -> None:
    shutil.copy(c / INDEX, c / "model/pytorch.index.copy.json")


def extra_shard(c: Path) -> None:
    shutil.copy(c / MODEL, c / "model/model-00002.safetensors")


def path_outside(c: Path) -> None:
    index = json.loads((c / INDEX).read_text())
    index["weight_map"]["mid.weight"] = "../../../etc/passwd"
    (c / INDEX).write_text(json.dumps(index))


def dropped_from_index(c: Path) -> None:
    index = json.loads((c / INDEX).read_text())
    del index["weight_map"]["mid.weight"]
    (c / INDEX).write_text(json.dumps(index))


def other_names(c: Path) -> None:
    """The header names one tensor differently: same sizes, same bytes."""
    data = (c / MODEL).read_bytes()
    header = read_header(c / MODEL)
    entries = [(e.key.replace("mid.weight", "mad.weight"), e.dtype, e.shape) for e in header.entries]
    raw, _ = build_header(entries)
    assert len(raw) == data_start(data)
    (c / MODEL).write_bytes(raw + data[len(raw) :])


def linked_to_itself(folder: Path) -> None:
    (folder / MODEL).unlink()
    (folder / MODEL).symlink_to(Path(MODEL).name)


def linked_away(c: Path) -> None:
    target = c.parent / "elsewhere.safetensors"
    shutil.move(c / MODEL, target)
    (c / MODEL).symlink_to(target)


def made_a_folder(c: Path) -> None:
    (c / MODEL).unlink()
    (c / MODEL).mkdir()


def with_hole(c: Path) -> None:
    """Full size, the data never written: what a killed write in place leaves."""
    data = (c / OPTIM).read_bytes()
    with (c / OPTIM).open("r+b") as file:
        file.truncate(data_start(data))
        file.truncate(len(data))


def swap_optimizer_states(c: Path) -> None:
    """exp_avg and exp_avg_sq of one parameter change places: sizes and sums stay."""
    data = bytearray((c / OPTIM).read_bytes())
    entries = {e.key: e for e in read_header(c / OPTIM).entries}
    a, b = entries["state.2.exp_avg"], entries["state.2.exp_avg_sq"]
    data[a.begin : a.end], data[b.begin : b.end] = data[b.begin : b.end], data[a.begin : a.end]
    (c / OPTIM).write_bytes(data)


@dataclass(frozen=True)
class Case:
    name: str
    damage: Callable[[Path], None]
    verdict: str
    file: str
    text: str
    quick: bool = True  # whether the structure alone shows it


CASES = [
    Case("cut shard", rewrite(MODEL, lambda d: d[:-1000]), "damaged", MODEL, "the manifest says"),
    Case("shard cut in its header", rewrite(MODEL, lambda d: d[:50]), "damaged", MODEL, "length is out of bounds"),
    Case("padded shard", rewrite(MODEL, lambda d: d + b"\0"), "damaged", MODEL, "behind its last tensor"),
    Case("emptied shard", rewrite(MODEL, lambda d: b""), "damaged", MODEL, "is empty (0 bytes)"),
    Case("zeroed shard", rewrite(MODEL, lambda d: bytes(len(d))), "damaged", MODEL, "begins with zeros"),
    Case(
        "zeroed data",
        rewrite(OPTIM, lambda d: d[: data_start(d)] + bytes(len(d) - data_start(d))),
        "damaged",
        OPTIM,
        "are all zeros",
    ),
    Case("missing shard", remove(MODEL), "incomplete", MODEL, "is missing"),
    Case("missing masters", remove("master.safetensors"), "incomplete", "master.safetensors", "is missing"),
    Case("flipped bit in data", rewrite(MODEL, lambda d: flipped(d, -5)), "damaged", MODEL, "digest", quick=False),
    Case("flipped bit in a header", rewrite(OPTIM, lambda d: flipped(d, 90)), "damaged", OPTIM, ""),
    Case("flipped bit in an index", rewrite(INDEX, lambda d: flipped(d, 40)), "damaged", INDEX, ""),
    Case("flipped bit in the groups", rewrite("optimizer/pytorch_optim_group.bin", lambda d: flipped(d, 99)), "damaged",
         "optimizer/pytorch_optim_group.bin", "do not match"),
    Case("flipped bit in the schedule", rewrite("lr_scheduler", lambda d: flipped(d, 99)), "damaged",
         "lr_scheduler", ""),
    Case("flipped bit in the manifest", rewrite("manifest.json", lambda d: flipped(d, 300, 0)), "damaged",
         "manifest.json", ""),
    Case("flipped bit in the RNG states", rewrite("rng/rank-00000.json", lambda d: flipped(d, 5, 0)), "damaged",
         "rng/rank-00000.json", ""),
    Case("missing index", remove(INDEX), "incomplete", INDEX, "is missing"),
    Case("missing running states", remove(STATES), "incomplete", STATES, "is missing"),
    Case("missing manifest", remove("manifest.json"), "incomplete", "manifest.json", "is missing"),
    Case("missing groups", remove("optimizer/pytorch_optim_group.bin"), "incomplete",
         "optimizer/pytorch_optim_group.bin", "is missing"),
    Case("missing schedule", remove("lr_scheduler"), "incomplete", "lr_scheduler", "is missing"),
    Case("missing sampler", remove("sampler"), "incomplete", "sampler", "is missing"),
    Case("missing optimizer", lambda c: shutil.rmtree(c / "optimizer"), "incomplete", OPTIM, "is missing"),
    Case("running states of another step", states_of_step(999), "damaged", STATES, "of another step"),
    Case("... with the manifest made to fit", states_of_step(999, manifest=True), "damaged", STATES,
         "the optimizer in `optimizer/` is at 5"),
    Case("... and the folder's name", states_of_step(999, manifest=True, name=True), "damaged", STATES,
         "the optimizer in `optimizer/` is at 5"),
    Case("folder renamed to another step", lambda c: c.rename(c.with_name("epoch0-global_step8")) and None, "damaged",
         STATES, "the folder is named `epoch0-global_step8`"),
    Case("running states cut", rewrite(STATES, lambda d: d[:20]), "damaged", STATES, "is no JSON"),
    Case("model shard of another step", from_step_4(MODEL), "damaged", MODEL, "digest", quick=False),
    Case("optimizer shard of another step", from_step_4(OPTIM), "damaged", OPTIM, "digest"),
    Case("masters of another step", from_step_4("master.safetensors"), "damaged",
         "master.safetensors", "", quick=False),
    Case("sampler of another step", from_step_4("sampler"), "damaged", "sampler", "do not match"),
    Case("whole manifest of another step", from_step_4("manifest.json"), "damaged", STATES, "other counters"),
    Case("Git LFS pointer", rewrite(MODEL, lambda d: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
         "damaged", MODEL, "Git LFS pointer"),
    Case("web page", rewrite(MODEL, lambda d: b"<!doctype html><title>404</title>"), "damaged", MODEL, "web page"),
    Case("second index", second_index, "damaged", "model/pytorch.index.copy.json", "second index"),
    Case("extra shard", extra_shard, "damaged", "model/model-00002.safetensors", "not part of this checkpoint"),
    Case("path outside of the folder", path_outside, "damaged", INDEX, "a path outside of its folder"),
    Case("tensor dropped from the index", dropped_from_index, "damaged", MODEL, "is not listed"),
    Case("tensor renamed in the header", other_names, "damaged", MODEL, "`model/model.safetensors.index.json` lists"),
    Case("shard linked to itself", linked_to_itself, "incomplete", MODEL, "is missing"),
    Case("shard linked away", linked_away, "damaged", MODEL, "a link to a file outside"),
    Case("folder in place of a shard", made_a_folder, "damaged", MODEL, "no regular file"),
    Case("hole", with_hole, "damaged", OPTIM, "are all zeros"),
    Case("moments swapped", swap_optimizer_states, "damaged", OPTIM, "digest", quick=False),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_damage_is_told_with_the_files_name(run: Path, case: Case) -> None:
    case.damage(run / NEWEST)
    (hurt,) = [p for p in run.iterdir() if p.name.startswith("epoch") and p.name != BEFORE]
    report = verify(hurt)
    assert report.verdict == case.verdict, [str(f) for f in report.findings]
    told = [str(f) for f in report.findings]
    assert any(f.file == case.file and case.text in f.what for f in report.findings), told
    quick = verify(hurt, "structure")
    assert quick.verdict == (case.verdict if case.quick else "complete"), [str(f) for f in quick.findings]
    assert verify_path(hurt).exit_code == 4
    resolved = resolve_load([str(run)])
    assert resolved.path.name == BEFORE
    assert [p.name for p, _, _ in resolved.passed_over] == [hurt.name]
    whole = verify_run(run)
    assert whole.resume_from == run / BEFORE
    assert verify_path(run).exit_code == (4 if case.verdict == "damaged" else 0)


def test_every_part_is_missed(run: Path) -> None:
    """Whatever single file goes, the checkpoint is not good any more."""
    newest = run / NEWEST
    for path in [p for p in newest.rglob("*") if p.is_file()]:
        data = path.read_bytes()
        path.unlink()
        for level in ("structure", "digest"):
            report = verify(newest, level)
            assert report.verdict == "incomplete", path
            assert path.relative_to(newest).as_posix() in {f.file for f in report.findings}
        path.write_bytes(data)
    assert verify(newest).verdict == "ok"


def test_a_flip_anywhere_is_caught(run: Path) -> None:
    """A few hundred single bits, over all files."""
    newest = run / NEWEST
    rng = random.Random(7)
    for path in sorted(p for p in newest.rglob("*") if p.is_file()):
        data = path.read_bytes()
        for _ in range(12):
            path.write_bytes(flipped(data, rng.randrange(len(data)), rng.randrange(8)))
            report = verify(newest, threads=1)
            assert not report.is_good, path
            assert path.relative_to(newest).as_posix() in {f.file for f in report.findings}
        path.write_bytes(data)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One of the things that happen to text files: bytes changed, cut, doubled, dropped, swapped; JSON values too."""
    out = bytearray(data)
    kind = rng.randrange(7)
    a, b = sorted((rng.randrange(len(data)), rng.randrange(len(data))))
    if kind == 0:
        for _ in range(rng.randint(1, 4)):
            out[rng.randrange(len(out))] = rng.randrange(256)
    elif kind == 1:
        del out[a:]
    elif kind == 2:
        del out[a : min(b, a + 40)]
    elif kind == 3:
        out[a:a] = out[a : min(b, a + 40)]
    elif kind == 4:
        out[a : a + 8] = bytes(8)
    elif kind == 5:
        digits = [i for i, byte in enumerate(out) if 48 <= byte <= 57]
        out[rng.choice(digits) if digits else a] = rng.randrange(48, 58)
    else:
        out += bytes(rng.randrange(256) for _ in range(rng.randint(1, 9)))
    return bytes(out)


def check_mutation(run: Path, name: str, seed: int) -> None:
    """Caught, or harmless: a mutation that still verifies must leave the very same content."""
    path = run / NEWEST / name
    original = path.read_bytes()
    try:
        path.write_bytes(mutate(original, random.Random(seed)))
        report = verify(run / NEWEST, threads=1)
        if report.verdict == "ok":
            assert name == "manifest.json" or path.read_bytes() == original
            if name == "manifest.json":
                assert parse_manifest(path.read_bytes()) == parse_manifest(original)
    finally:
        path.write_bytes(original)


TEXTS = ["manifest.json", INDEX, "optimizer/optimizer.safetensors.index.json", STATES, MODEL, OPTIM]


@pytest.fixture(scope="module")
def mutable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("mutable")
    save(run, 5)
    return run


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from([*TEXTS, "async_file_io.log"]), seed=st.integers(0, 1 << 30))
def test_mutations_are_caught_or_harmless(mutable: Path, name: str, seed: int) -> None:
    check_mutation(mutable, name, seed)


@pytest.mark.sweep
@pytest.mark.timeout(7200)
@settings(max_examples=10_000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from([*TEXTS, "async_file_io.log"]), seed=st.integers(0, 1 << 30))
def test_ten_thousand_mutations(mutable: Path, name: str, seed: int) -> None:
    check_mutation(mutable, name, seed)


def test_mutations_without_the_manifest_never_crash(mutable: Path) -> None:
    """The structural checks alone, on headers and indexes that nothing else vouches for."""
    rng = random.Random(3)
    manifest = (mutable / NEWEST / "manifest.json").read_bytes()
    (mutable / NEWEST / "manifest.json").unlink()
    try:
        for name in TEXTS[1:]:
            path = mutable / NEWEST / name
            original = path.read_bytes()
            for _ in range(40):
                path.write_bytes(mutate(original[:2000], rng) + original[2000:])
                assert verify(mutable / NEWEST, "structure").verdict in ("incomplete", "damaged")
            path.write_bytes(original)
    finally:
        (mutable / NEWEST / "manifest.json").write_bytes(manifest)


def test_a_later_format_is_not_called_damage(run: Path) -> None:
    path = run / NEWEST / "manifest.json"
    path.write_bytes(dump_manifest(replace(parse_manifest(path.read_bytes()), format_version=2)))
    report = verify(run / NEWEST)
    assert report.verdict == "foreign"
    assert "format version 2, this osora reads up to 1" in report.reason


def test_what_is_no_checkpoint_is_foreign(tmp_path: Path) -> None:
    folder = tmp_path / "epoch0-global_step5"
    folder.mkdir()
    assert verify(folder).verdict == "foreign"
    (folder / "notes.txt").write_text("x")
    assert verify(folder).verdict == "foreign"
    assert verify_path(folder).exit_code == 4


def test_a_staging_folder_is_no_checkpoint(run: Path) -> None:
    (run / NEWEST).rename(run / ".staging-0-5-aaaaaaaa")
    report = verify(run / ".staging-0-5-aaaaaaaa")
    assert report.verdict == "incomplete"
    assert "never committed" in report.reason


def test_verification_writes_nothing(run: Path) -> None:
    def state() -> dict[str, tuple[int, int]]:
        return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in [run, *run.rglob("*")]}

    before = state()
    verify_run(run)
    verify(run / NEWEST, "structure")
    assert state() == before


def test_a_copy_under_any_name_and_read_only_verifies(run: Path) -> None:
    copy = shutil.copytree(run / NEWEST, run.parent / "my best one")
    for path in copy.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    assert verify(copy).verdict == "ok"
    assert verify_path(copy, strict=True).exit_code == 0


def test_notes_beside_the_files_do_no_harm(run: Path) -> None:
    (run / NEWEST / "README.txt").write_text("my notes")
    (run / NEWEST / "eval").mkdir()
    (run / NEWEST / "eval/a.safetensors").write_bytes(b"not ours")
    report = verify(run / NEWEST)
    assert report.verdict == "ok"
    assert [str(f) for f in report.findings] == [
        "README.txt: is not part of this checkpoint (the manifest does not list it)"
    ]


def test_a_file_that_cannot_be_read_is_named(run: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    (run / NEWEST / MODEL).chmod(0)
    report = verify(run / NEWEST)
    assert report.verdict == "damaged"
    assert any(f.file == MODEL and "Permission denied" in f.what for f in report.findings)
