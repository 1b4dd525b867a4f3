"""An update that is not logged reads nothing back from the device: the host is free to run ahead of a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.syncs import HostReads
from support.tiny_task import clips, made, perceptual

from osora_cli.checkpoint.store import CheckpointStore
from osora_cli.data.loader import ClipBatch
from osora_cli.engine.native import NativeEngine
from osora_cli.report.base import SilentObserver
from osora_cli.trainer.ema import Ema
from osora_cli.trainer.loop import LoopSettings, Trainer
from osora_cli.trainer.meter import Meter
from osora_cli.trainer.saving import RunState
from osora_cli.trainer.wishes import Wishes

UPDATES = 2
# A logged update reads the losses, the counts of skipped updates, and how many were skipped in a row.
READS_OF_A_LOG = 3


class Clips:
    """A feed of the same few clips."""

    start_step = 0

    def steps(self, epoch: int) -> int:
        return UPDATES

    def batches(self, epoch: int, step: int) -> Iterator[ClipBatch]:
        return iter([clips(seed, 1) for seed in range(step, self.steps(epoch))])

    def state(self, epoch: int, step: int) -> dict[str, Any]:
        return {"epoch": epoch, "step": step}

    def close(self) -> None:
        return


class Watched(Trainer):
    """A trainer whose micro-batches and updates are watched; `reads` are lists of places, one an update."""

    reads: list[list[str]]

    def _micro_step(self, batch: ClipBatch, micro: int) -> dict[str, torch.Tensor]:
        if micro == 0:
            self.reads.append([])
        with HostReads() as found:
            values = super()._micro_step(batch, micro)
        self.reads[-1] += found.places
        return values

    def _update(self, meter: Meter, signals: Wishes) -> None:
        with HostReads() as found:
            super()._update(meter, signals)
        self.reads[-1] += found.places


def run(folder: Path, stage: int, dtype: str, log_every: int) -> list[list[str]]:
    task = made(stage, dtype, lpips=perceptual() if dtype == "fp32" else None)
    network = task.networks["model"]
    trainer = Watched(
        LoopSettings(
            seed=1, epochs=1, max_steps=UPDATES, accumulation=1, log_every=log_every, ckpt_every=0, max_nonfinite=5,
            on_save_error="stop", batch_size=1,
        ),
        NativeEngine(torch.device("cpu"), dtype, "none"),
        RunState(task, Ema(network.master_shards(), 0.9), True),
        Clips(),  # type: ignore[arg-type]
        CheckpointStore(folder, async_io=False),
        SilentObserver(),
        {},
    )  # fmt: skip
    trainer.reads = []
    trainer.run()
    return trainer.reads


@pytest.mark.parametrize(("stage", "dtype"), [(1, "fp32"), (2, "bf16")])
def test_an_update_reads_nothing_back(stage: int, dtype: str, tmp_path: Path) -> None:
    assert run(tmp_path, stage, dtype, log_every=100) == [[]] * UPDATES


def test_a_logged_update_reads_three_times(tmp_path: Path) -> None:
    logged = run(tmp_path, 2, "fp32", log_every=2)
    assert [len(reads) for reads in logged] == [0, READS_OF_A_LOG], logged


def test_the_counter_sees_each_kind_of_read() -> None:
    value = torch.ones(3)
    reads = {
        "item": lambda: value[0].item(),
        "float": lambda: float(value[0]),
        "bool": lambda: bool(value[0]),
        "tolist": value.tolist,
        "cpu": value.cpu,
        "numpy": value.numpy,
        "nonzero": lambda: value.nonzero(),
        "by mask": lambda: value[value > 0],
        "equal": lambda: torch.equal(value, value),
        "made on a device": lambda: torch.tensor(1.0, device=torch.device("cpu")),
    }
    for name, read in reads.items():
        with HostReads() as found:
            read()
        assert found.places, name
    with HostReads() as found:
        (value * 2).sum().add_(1)
    assert found.places == []
