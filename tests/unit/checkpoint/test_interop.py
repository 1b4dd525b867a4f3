"""Between Open-Sora and osora, both ways: what its loader reads of ours, and what we read of its modes and plugins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import SHAPES, contents, optimizer_state, save, tensors, weights, whole
from support.opensora import add_discriminator, load_as_opensora, write_async, write_sync

from osora_cli.checkpoint.contents import CheckpointContents
from osora_cli.checkpoint.reader import CheckpointReader
from osora_cli.checkpoint.store import CheckpointStore
from osora_cli.checkpoint.verify import verify
from osora_cli.tensors import TensorShard


def same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return got.keys() == wanted.keys() and all(
        torch.equal(got[k], v) and got[k].dtype == v.dtype for k, v in wanted.items()
    )


@pytest.mark.parametrize("async_io", [True, False])
def test_its_loader_reads_ours(tmp_path: Path, async_io: bool) -> None:
    (folder,) = save(tmp_path, 3, async_io=async_io)
    got = load_as_opensora(folder)
    table = tensors(3)
    assert same(got["model"], table["model"])
    assert same(got["ema"], table["ema"])
    assert same({k.removeprefix("module."): v for k, v in got["master"].items()}, table["master"])
    assert all(k.startswith("module.") for k in got["master"])
    flat = {f"state.{n}.{name}": value for n, state in got["states"].items() for name, value in state.items()}
    assert same(flat, table["optimizer"])
    assert got["param_groups"][0]["params"] == list(range(len(SHAPES)))
    states = got["running_states"]
    assert states == {"epoch": 0, "step": 6, "global_step": 6, "batch_size": None, "actual_update_step": 3}
    assert got["sampler"]["seed"] == 42


def test_its_states_fit_torchs_optimizer(tmp_path: Path) -> None:
    """By torch's own load_state_dict: groups and states are the table that it wants, and it steps on from there."""
    (folder,) = save(tmp_path, 3)
    got = load_as_opensora(folder)
    parameters = [torch.nn.Parameter(value) for value in weights(3).values()]
    adam = torch.optim.AdamW(parameters)
    groups = [{**adam.state_dict()["param_groups"][0], **got["param_groups"][0]}]
    adam.load_state_dict({"state": got["states"], "param_groups": groups})
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    adam.step()
    assert float(adam.state[parameters[0]]["step"]) == 4.0


def test_its_loader_reads_our_second_stage(tmp_path: Path) -> None:
    """The discriminator as safetensors: the index's name tells its loader."""
    made = contents(3)
    disc = {"main.0.weight": torch.randn(4, 3)}
    made.sharded |= {
        "discriminator": whole(disc),
        "disc_optimizer": whole({"state.0.exp_avg": torch.ones(4, 3), "state.0.step": torch.tensor(3.0)}),
    }
    made.param_groups["disc_optimizer"] = [{"lr": 1e-4, "params": [0]}]
    made.small["disc_lr_scheduler"] = {"last_epoch": 3}
    folder = store(tmp_path, made)
    got = load_as_opensora(folder, model="discriminator", optimizer="disc_optimizer")
    assert same(got["model"], disc)
    assert torch.equal(got["states"][0]["exp_avg"], torch.ones(4, 3))


def store(run: Path, made: CheckpointContents) -> Path:
    saver = CheckpointStore(run, async_io=True)
    saver.save(made)
    saver.finish()
    saver.close()
    return run / made.counters.folder


def filled(reader: CheckpointReader, group: str) -> dict[str, torch.Tensor]:
    out = {key: torch.full(shape, -1, dtype=dtype) for key, (dtype, shape) in reader.tensors(group).items()}
    reader.read_into(group, [TensorShard.whole(key, value) for key, value in out.items()])
    return out


@pytest.mark.parametrize("adam", ["hybrid", "torch"])
@pytest.mark.parametrize("write", [write_async, write_sync])
def test_we_read_its_two_modes_and_plugins(tmp_path: Path, write: Any, adam: Any) -> None:
    folder = write(tmp_path / "epoch0-global_step7", 7, adam=adam)
    disc = add_discriminator(folder, 7, adam=adam)
    report = verify(folder)
    assert report.verdict == "complete", report.findings
    reader = CheckpointReader(folder)
    assert reader.manifest is None
    assert set(reader.groups()) == {"model", "optimizer", "ema", "master", "discriminator", "disc_optimizer"}
    assert same(filled(reader, "model"), weights(7, torch.bfloat16))
    assert same(filled(reader, "master"), weights(7))
    assert same(filled(reader, "ema"), weights(507, torch.bfloat16))
    assert same(filled(reader, "optimizer"), optimizer_state(7))
    assert same(filled(reader, "discriminator"), disc)
    state = filled(reader, "disc_optimizer")
    assert torch.equal(state["state.2.exp_avg_sq"], disc["main.2.weight"] ** 2)
    assert float(state["state.0.step"]) == 7.0
    assert reader.param_groups("disc_optimizer")[0]["betas"] == (0.5, 0.9)
    assert reader.small("disc_lr_scheduler") == {"last_epoch": 7}


def test_what_was_read_and_saved_again_is_read_by_its_loader(tmp_path: Path) -> None:
    """There and back: bit for bit, although the layout of the shards is ours."""
    theirs = write_async(tmp_path / "theirs/epoch0-global_step7", 7)
    reader = CheckpointReader(theirs)
    made = CheckpointContents(
        counters=reader.counters,
        sharded={group: whole(filled(reader, group)) for group in reader.groups()},
        param_groups={"optimizer": reader.param_groups("optimizer")},
        small={name: reader.small(name) or {} for name in ("lr_scheduler", "sampler")},
    )
    folder = store(tmp_path / "ours", made)
    assert verify(folder).verdict == "ok"
    got, before = load_as_opensora(folder), load_as_opensora(theirs)
    for part in ("model", "ema", "master"):
        assert same(got[part], before[part])
    assert got["param_groups"] == before["param_groups"]
    assert got["running_states"] == before["running_states"]
    for number, state in before["states"].items():
        assert torch.equal(got["states"][number]["exp_avg"], state["exp_avg"])


class Payload:
    """Runs code when it is unpickled freely."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (Path.mkdir, (Path("pickle-was-run"),))  # type: ignore[return-value]


@pytest.mark.parametrize(
    "file",
    ["discriminator/pytorch_model-00002.bin", "disc_optimizer/pytorch_optim-00001.bin", "disc_lr_scheduler",
     "disc_optimizer/pytorch_optim_group.bin"],
)  # fmt: skip
def test_no_code_runs_from_the_second_stages_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_sync(tmp_path / "epoch0-global_step7", 7)
    add_discriminator(folder, 7)
    torch.save({0: Payload()}, folder / file)
    report = verify(folder)
    assert report.verdict == "damaged"
    assert any(finding.file == file for finding in report.findings)
    assert not (tmp_path / "pickle-was-run").exists()
