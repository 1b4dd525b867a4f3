"""Whether a training compiles its blocks, for which shapes, and what it says when it cannot."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_diffusion import CAUSAL, CONFIG

from osora_cli.app.diffusion import compiling
from osora_cli.app.diffusion.compiling import Compilation, compilation, latent_sizes
from osora_cli.app.diffusion.start import build_mmdit
from osora_cli.config.diffusion import TrainDiffusionConfig
from osora_cli.data.sampler import BucketSampler
from osora_cli.errors import SetupError
from osora_cli.model.mmdit import MMDiT

CPU = torch.device("cpu")
BUCKETS = {"64px_ar3:2": {1: [1.0, 2], 9: [1.0, 3], 17: [1.0, 1]}}


def config_with(**changes: Any) -> TrainDiffusionConfig:
    return TrainDiffusionConfig.model_validate({**CONFIG, **CAUSAL, "bucket_config": BUCKETS, **changes})


def sampler_of(config: TrainDiffusionConfig, ranks: int = 1) -> BucketSampler:
    """Stills and clips of 9 to 16 frames, none of the longest bucket."""
    frames = np.repeat([1, 12], 8)
    size, fps = np.full(16, 64), np.full(16, 24.0)
    return BucketSampler(
        frames,
        size,
        size,
        fps,
        bucket_config=config.bucket_config,
        spatial_compression=16,
        fps_max=24,
        num_replicas=ranks,
        drop_last=False,
    )


def made(config: TrainDiffusionConfig, device: torch.device = CPU) -> tuple[MMDiT, Compilation | None, list[str]]:
    notes: list[str] = []
    model = build_mmdit(config, None, CPU, notes)
    return model, compilation(config, model, sampler_of(config), device, notes), notes


def is_compiled(model: MMDiT) -> set[bool]:
    return {block.compiled is not None for block in (*model.double_blocks, *model.single_blocks)}


class Rehearsals:
    """In place of a task: keeps what it was asked for, and fails while blocks are compiled if it is told to."""

    def __init__(self, model: MMDiT, error: Exception | None = None) -> None:
        self.model, self.error, self.sizes = model, error, list[tuple[int, ...]]()

    def rehearse(self, size: tuple[int, ...]) -> None:
        self.sizes.append(size)
        if self.error is not None and is_compiled(self.model) == {True}:
            raise self.error


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_sizes_are_those_of_the_first_epochs_batches_on_all_ranks_alike(ranks: int) -> None:
    config = config_with()
    assert latent_sizes(config, sampler_of(config, ranks)) == [(2, 4, 1, 8, 8), (3, 4, 3, 8, 8)]


@pytest.mark.parametrize(
    ("given", "word", "on"),
    [(False, "false", False), ("auto", "auto", False), (True, "true", True), ("True", "true", True)],
)
def test_on_a_cpu_it_is_asked_for(given: object, word: str, on: bool) -> None:
    config = config_with(compile=given)
    assert config.compile == word
    model, found, notes = made(config)
    assert (found is not None) == on
    assert is_compiled(model) == {on}
    assert notes == []


def test_it_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = config_with(compile=True, plugin="hybrid", plugin_config={"sp_size": 2})
    model, found, notes = made(shared)
    assert (found, is_compiled(model), len(notes)) == (None, {False}, 1)
    assert "sp_size" in notes[0]

    monkeypatch.setattr(compiling, "obstacle", lambda device: f"no compiler for {device.type}")
    model, found, notes = made(config_with(compile="auto"), torch.device("cuda"))
    assert (found, is_compiled(model)) == (None, {False})
    assert notes == ["compile: the blocks run as they are: no compiler for cuda"]
    _, _, notes = made(config_with(compile="true"))
    assert notes == ["warning: compile: the blocks run as they are: no compiler for cpu"]


def test_all_sizes_are_compiled_ahead_and_later_ones_are_named() -> None:
    model, found, _ = made(config_with(compile=True))
    assert found is not None
    said: list[str] = []
    task: Any = Rehearsals(model)
    found.ahead(task, 1, said.append)
    assert task.sizes == found.sizes
    assert said[:2] == ["compiling shape 1 of 2: latents 2x4x1x8x8", "compiling shape 2 of 2: latents 3x4x3x8x8"]
    assert said[2].startswith("compiled 2 shapes in ")
    found.compiler.graphs.append("SingleStreamBlock 1 x 99")
    found.compiler.on_graph("SingleStreamBlock 1 x 99")
    assert said[3] == "compiling SingleStreamBlock 1 x 99 tokens: not among the shapes known ahead, recompilation 1"


def test_a_compiler_that_fails_leaves_the_blocks_as_they_are() -> None:
    model, found, _ = made(config_with(compile=True))
    assert found is not None
    said: list[str] = []
    task: Any = Rehearsals(model, RuntimeError("nvcc is\nnot there"))
    found.ahead(task, 1, said.append)
    assert is_compiled(model) == {False}
    assert task.sizes == [found.sizes[0]] * 2  # the second time without a compiler: it clears what there was
    assert said[1:] == ["compile: the blocks run as they are, compiling them failed with RuntimeError: nvcc is"]


def test_where_other_ranks_wait_it_is_an_error_and_memory_is_never_the_compilers() -> None:
    model, found, _ = made(config_with(compile=True))
    assert found is not None
    task: Any = Rehearsals(model, RuntimeError("nvcc"))
    with pytest.raises(SetupError, match="cannot be compiled: RuntimeError: nvcc"):
        found.ahead(task, 2, lambda text: None)
    task = Rehearsals(model, torch.OutOfMemoryError("full"))
    with pytest.raises(torch.OutOfMemoryError):
        found.ahead(task, 1, lambda text: None)
