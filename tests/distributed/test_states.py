"""States of runs over ranks: saved at one number of ranks and plugin, loaded at another, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.distributed import RankServer
from torch import Tensor

from osora_cli.checkpoint.verify import verify

WAYS = [(1, "none"), (2, "ddp"), (2, "zero1"), (2, "zero3"), (3, "zero1"), (3, "zero2")]
CHECKPOINT = "epoch0-global_step3"
SAME_FILES = ("model", "optimizer", "ema.safetensors", "master.safetensors")

Groups = dict[str, dict[str, Tensor]]


def whole(parts: list[dict[str, list[tuple[str, int, Tensor]]]]) -> Groups:
    """All groups' tensors, flat, from what the ranks hold."""
    out: Groups = {}
    for group in parts[0]:
        held: dict[str, dict[int, Tensor]] = {}
        for rank in parts:
            for key, start, tensor in rank[group]:
                found = held.setdefault(key, {})
                if tensor.numel():
                    assert start not in found or torch.equal(found[start], tensor), (group, key)
                    found[start] = tensor
        out[group] = {key: torch.cat([found[s] for s in sorted(found)]) for key, found in held.items()}
    return out


def assert_same(got: Groups, expected: Groups) -> None:
    assert got.keys() == expected.keys()
    for group, tensors in expected.items():
        assert list(got[group]) == list(tensors)  # the order of the files
        for key, tensor in tensors.items():
            assert torch.equal(got[group][key], tensor), (group, key)


@pytest.fixture(scope="module")
def saved(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], tuple[Path, Groups]]:
    """A checkpoint of each way, with the state it is of."""
    out = {}
    for world_size, plugin in WAYS:
        run = tmp_path_factory.mktemp("saved") / f"{plugin}-{world_size}"
        state = whole(ranks.run(world_size, "save", str(run), plugin, "bf16"))
        out[world_size, plugin] = (run / CHECKPOINT, state)
    return out


@pytest.mark.parametrize(("world_size", "plugin"), WAYS)
def test_every_way_loads_every_other(
    ranks: RankServer, saved: dict[tuple[int, str], tuple[Path, Groups]], world_size: int, plugin: str
) -> None:
    for checkpoint, state in saved.values():
        assert_same(whole(ranks.run(world_size, "load", str(checkpoint), plugin, "bf16")), state)


def test_checkpoints_of_ranks_verify(saved: dict[tuple[int, str], tuple[Path, Groups]]) -> None:
    for (world_size, _), (checkpoint, state) in saved.items():
        assert verify(checkpoint).verdict == "ok"
        assert json.loads((checkpoint / "manifest.json").read_text())["ranks"] == world_size
        assert len(list((checkpoint / "rng").iterdir())) == world_size
        assert (len(state["model"]), len(state["master"])) == (14, 10)  # buffers and a frozen parameter are no masters


def files_of(checkpoint: Path) -> dict[str, bytes]:
    """The files that must not depend on who wrote them."""
    return {
        str(path.relative_to(checkpoint)): path.read_bytes()
        for name in SAME_FILES
        for path in ([checkpoint / name] if (checkpoint / name).is_file() else sorted((checkpoint / name).iterdir()))
    }


def test_saved_again_without_a_step_it_is_the_same_bytes(
    ranks: RankServer, saved: dict[tuple[int, str], tuple[Path, Groups]], tmp_path: Path
) -> None:
    source, _ = saved[2, "zero3"]
    expected = files_of(source)
    assert len(expected) == 7
    for world_size, plugin in [*WAYS, (3, "ddp"), (2, "zero2")]:
        run = tmp_path / f"{plugin}-{world_size}"
        ranks.run(world_size, "load", str(source), plugin, "bf16", save_to=str(run))
        assert files_of(run / CHECKPOINT) == expected, (world_size, plugin)


def test_a_checkpoint_of_fp32_compute_loads_sharded_in_bf16_and_back(ranks: RankServer, tmp_path: Path) -> None:
    state = whole(ranks.run(2, "save", str(tmp_path / "a"), "zero2", "fp32"))
    held = whole(ranks.run(3, "load", str(tmp_path / "a" / CHECKPOINT), "zero3", "bf16", save_to=str(tmp_path / "b")))
    assert all(torch.equal(held["master"][key], state["model"][key]) for key in held["master"])
    back = whole(ranks.run(1, "load", str(tmp_path / "b" / CHECKPOINT), "none", "fp32"))
    trained = held["master"].keys()
    assert all(torch.equal(back["model"][key], state["model"][key]) for key in trained)
    assert_same({"optimizer": back["optimizer"], "ema": back["ema"]}, {g: state[g] for g in ("optimizer", "ema")})


def test_replicas_that_have_drifted_apart_are_not_saved(ranks: RankServer, tmp_path: Path) -> None:
    told = ranks.run(3, "save_drifted", str(tmp_path), "ddp")
    assert len(set(told)) == 1
    assert "of `model`: ranks 0, 1 and rank 2 hold different values" in told[0]
    assert not list(tmp_path.glob("epoch*"))
    assert ranks.run(2, "save_drifted", str(tmp_path), "zero3") == ["saved"] * 2, "a shard has no twin"


def test_nothing_is_gathered(ranks: RankServer, tmp_path: Path) -> None:
    """A sharded state of 192 MiB, saved with 4 MiB of buffers: no rank's memory grows by a rank's share, even."""
    megabytes = 192
    answers: list[dict[str, int]] = ranks.run(2, "peak_of_save", str(tmp_path), megabytes)
    grown = [(a["peak"] - a["before"]) / 2**20 for a in answers]
    written = sum(f.stat().st_size for f in tmp_path.rglob("*.safetensors"))
    assert written > 0.9 * megabytes * 2**20
    assert max(grown) < megabytes / 4, grown
    assert verify(tmp_path / "epoch0-global_step1").verdict == "ok"
