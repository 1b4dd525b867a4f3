from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.checkpoints import SHAPES, save, tensors, whole

from osora_cli.checkpoint.contents import Counters
from osora_cli.checkpoint.reader import CheckpointReader
from osora_cli.errors import CheckpointError
from osora_cli.tensors import TensorShard


@pytest.fixture(scope="module", params=[True, False], ids=["async", "sync"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    (path,) = save(tmp_path_factory.mktemp("run"), 3, async_io=request.param)
    return path


def test_everything_comes_back(folder: Path) -> None:
    reader = CheckpointReader(folder)
    assert reader.counters == Counters(0, 6, 6, None, 3)
    assert reader.manifest is not None
    assert reader.groups() == ["model", "optimizer", "ema", "master"]
    for group, table in tensors(3).items():
        assert reader.tensors(group) == {k: (v.dtype, tuple(v.shape)) for k, v in table.items()}
        got = whole({k: torch.full_like(v, 9) for k, v in table.items()})
        reader.read_into(group, got)
        assert all(torch.equal(shard.tensor, table[shard.key]) for shard in got)
    assert reader.param_groups("optimizer")[0]["params"] == list(range(len(SHAPES)))
    assert reader.small("lr_scheduler") == {"last_epoch": 3}
    assert reader.small("disc_lr_scheduler") is None
    assert reader.rng(0) == {"torch": [3, 1, 2]}


def test_tensors_of_another_layout_are_filled_in_place(folder: Path) -> None:
    key = "encoder.conv.weight"
    target = torch.zeros(SHAPES[key]).to(memory_format=torch.channels_last_3d)
    parameter = torch.nn.Parameter(torch.zeros(SHAPES["mid.weight"]))
    shards = [TensorShard.whole(f"module.{key}", target), TensorShard.whole("_orig_mod.mid.weight", parameter)]
    CheckpointReader(folder).read_into("master", shards)
    assert torch.equal(target, tensors(3)["master"][key])
    assert target.is_contiguous(memory_format=torch.channels_last_3d)
    assert torch.equal(parameter.detach(), tensors(3)["master"]["mid.weight"])


def test_casting_has_to_be_asked_for(folder: Path) -> None:
    reader = CheckpointReader(folder)
    target = whole({"mid.weight": torch.zeros(SHAPES["mid.weight"])})
    with pytest.raises(CheckpointError, match=r"`mid.weight` has dtype BF16, wanted F32"):
        reader.read_into("model", target)
    reader.read_into("model", target, cast=True)
    assert torch.equal(target[0].tensor, tensors(3)["model"]["mid.weight"].float())


def test_all_that_does_not_fit_is_listed_at_once(folder: Path) -> None:
    target = torch.full(SHAPES["mid.weight"], 5.0)
    wanted = whole({"a": torch.zeros(1), "b": torch.zeros(2), "decoder.scale": torch.zeros(3), "mid.weight": target})
    with pytest.raises(CheckpointError) as caught:
        CheckpointReader(folder).read_into("master", wanted)
    assert caught.value.exit_code == 4
    for text in ("`a` is missing", "`b` is missing", "`decoder.scale` has shape [2], wanted [3]"):
        assert text in str(caught.value)
    assert torch.all(target == 5.0), "nothing is filled when something does not fit"


def test_missing_groups_and_no_checkpoint(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no `discriminator`"):
        CheckpointReader(folder).tensors("discriminator")
    with pytest.raises(CheckpointError, match=r"it has no `running_states\.json`"):
        CheckpointReader(tmp_path)
    (tmp_path / "running_states.json").write_text('{"epoch": 1}')
    with pytest.raises(CheckpointError, match="lacks the fields `step`"):
        CheckpointReader(tmp_path)


def test_a_file_cut_after_the_check_is_an_error_with_its_name(tmp_path: Path) -> None:
    (folder,) = save(tmp_path, 3)
    reader = CheckpointReader(folder)
    reader.tensors("master")
    with (folder / "master.safetensors").open("r+b") as file:
        file.truncate(30_000)
    with pytest.raises(CheckpointError, match=r"`master.safetensors` ends at byte 30000, inside tensor `module\."):
        reader.read_into("master", whole({k: torch.empty_like(v) for k, v in tensors(3)["master"].items()}))
