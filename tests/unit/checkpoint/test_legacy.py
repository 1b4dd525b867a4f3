"""Checkpoints of Open-Sora's own: judged without a manifest, and read."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from support.checkpoints import SHAPES, optimizer_state, weights, whole
from support.opensora import write_async, write_safetensors, write_sync

from osora_cli.checkpoint.findings import Report
from osora_cli.checkpoint.reader import CheckpointReader
from osora_cli.checkpoint.steps import NotPlain, plain_value
from osora_cli.checkpoint.verify import verify

NAME = "epoch0-global_step6"


@pytest.mark.parametrize("write", [write_async, write_sync])
def test_whole_ones_are_complete_not_ok(tmp_path: Path, write) -> None:
    report = verify(write(tmp_path / NAME, 6))
    assert report.verdict == "complete", [str(f) for f in report.findings]
    assert [check.name for check in report.checks if check.status == "skipped"] == ["digests"]


@pytest.mark.parametrize("write", [write_async, write_sync])
def test_they_can_be_read(tmp_path: Path, write) -> None:
    reader = CheckpointReader(write(tmp_path / NAME, 6))
    assert reader.manifest is None
    assert reader.counters.actual_update_step == 6
    expected = {
        "model": weights(6, torch.bfloat16),
        "master": weights(6),
        "ema": weights(506, torch.bfloat16),
        "optimizer": optimizer_state(6),
    }
    for group, table in expected.items():
        assert set(reader.tensors(group)) == set(table), group
        got = whole({key: torch.full_like(value, 3) for key, value in table.items()})
        reader.read_into(group, got)
        assert all(torch.equal(shard.tensor, table[shard.key]) for shard in got), group
    assert reader.tensors("optimizer")["state.0.step"] == (torch.float32, ())
    assert reader.param_groups("optimizer")[0]["params"] == list(range(len(SHAPES)))
    assert reader.small("sampler") == {"seed": 42, "epoch": 0, "last_micro_batch_access_index": 6}


def found(report: Report, file: str, text: str, tensor: str | None = None) -> bool:
    return any(f.file == file and text in f.what and (tensor is None or f.tensor == tensor) for f in report.findings)


def test_a_flat_ema_is_reported_as_not_loadable(tmp_path: Path) -> None:
    report = verify(write_sync(tmp_path / NAME, 6, flat_ema=True))
    assert report.verdict == "damaged"
    assert found(report, "ema.pt", "flat part alone")


def test_fewer_log_lines_than_files(tmp_path: Path) -> None:
    folder = write_async(tmp_path / NAME, 6)
    log = folder / "async_file_io.log"
    log.write_text("All tasks are completed\n" * 4)
    report = verify(folder)
    assert report.verdict == "incomplete"
    assert found(report, "async_file_io.log", "4 lines")
    log.write_text("All tasks are completed\n" * 7)
    assert verify(folder).verdict == "damaged"
    log.unlink()
    assert found(verify(folder), "async_file_io.log", "is missing")


def test_a_hole_is_named_with_its_tensors(tmp_path: Path) -> None:
    folder = write_async(tmp_path / NAME, 6)
    path = folder / "master.safetensors"
    big = {f"module.t{n}": torch.ones(50_000) for n in range(4)}
    write_safetensors(path, big)
    data = path.read_bytes()
    with path.open("r+b") as file:  # written in part: the size is right, the middle never came
        file.truncate(0)
        file.truncate(len(data))
        file.seek(0)
        file.write(data[:4096])
        file.seek(700_000)
        file.write(data[700_000:])
    report = verify(folder)
    if path.stat().st_blocks * 512 >= len(data):
        pytest.skip("this filesystem keeps no holes")
    assert report.verdict == "damaged"
    assert found(report, "master.safetensors", "a hole", "module.t0")


def test_optimizer_of_another_step(tmp_path: Path) -> None:
    folder = write_async(tmp_path / NAME, 6)
    other = write_async(tmp_path / "epoch0-global_step4", 4)
    shard = "optimizer/optimizer-00002.safetensors"
    (folder / shard).write_bytes((other / shard).read_bytes())
    report = verify(folder)
    assert report.verdict == "damaged"
    assert found(report, shard, "of optimizer step 4")


@pytest.mark.parametrize("write", [write_async, write_sync])
def test_running_states_of_another_step(tmp_path: Path, write) -> None:
    """Consistent with the folder's name: only the optimizer knows better."""
    folder = write(tmp_path / "epoch0-global_step8", 6)
    states = json.loads((folder / "running_states.json").read_text())
    states["actual_update_step"] = 8
    (folder / "running_states.json").write_text(json.dumps(states))
    report = verify(folder)
    assert report.verdict == "damaged"
    assert found(report, "running_states.json", "the optimizer in `optimizer/` is at 6")


class Payload:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("import pathlib; pathlib.Path('pwned').touch()",)


@pytest.mark.parametrize("file", ["lr_scheduler", "ema.pt", "optimizer/pytorch_optim-00001.bin", "sampler"])
def test_a_pickle_that_would_run_code_is_a_finding(tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_sync(tmp_path / NAME, 6)
    torch.save({"x": Payload()}, folder / file)
    report = verify(folder)
    assert report.verdict == "damaged"
    assert found(report, file, "holds more than tensors and plain values")
    assert not (tmp_path / "pwned").exists()


def test_a_pickled_step_that_would_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_async(tmp_path / NAME, 6)
    shard = folder / "optimizer/optimizer-00001.safetensors"
    state = {key: value for key, value in optimizer_state(6).items() if int(key.split(".")[1]) < 3}
    write_safetensors(shard, {**state, "state.1.step": Payload()})
    report = verify(folder)
    assert report.verdict == "damaged"
    assert found(report, "optimizer/optimizer-00001.safetensors", "no plain value")
    assert not (tmp_path / "pwned").exists()


def test_plain_values_and_what_is_none() -> None:
    value = {"a": [1, 2.5, True, None, (1,)], "b": "x"}
    assert plain_value(pickle.dumps(value)) == value
    for data in (b"", b"\x80", pickle.dumps(Payload()), pickle.dumps(Path("x")), b"x" * 70_000, b"cos\nsystem\n."):
        with pytest.raises(NotPlain):
            plain_value(data)


def test_what_the_config_promises_must_be_there(tmp_path: Path) -> None:
    folder = write_async(tmp_path / NAME, 6)
    (folder / "ema.safetensors").unlink()
    (folder / "async_file_io.log").write_text("All tasks are completed\n" * 4)
    assert verify(folder).verdict == "complete"
    (tmp_path / "config.txt").write_text(json.dumps({"ema_decay": 0.99}))
    report = verify(folder)
    assert report.verdict == "incomplete"
    assert found(report, "ema.safetensors", "promises `ema`")
