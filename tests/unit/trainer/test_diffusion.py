"""A diffusion step on small networks: its draws, dropout, conditions, masked loss, accumulation, cached input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.clips import real_clip
from support.tiny_diffusion import CONFIG, DC_AE, HUNYUAN, MODEL
from torch import Tensor

from osora_cli.data.cached_batch import CachedBatch
from osora_cli.data.loader import ClipBatch
from osora_cli.data.media import read_frames
from osora_cli.data.transforms import normalize, resize_crop_uint8
from osora_cli.engine.base import OptimSettings
from osora_cli.engine.native import NativeEngine
from osora_cli.model.build import build_model
from osora_cli.model.latents import FrozenParts, encode_latents, null_text
from osora_cli.trainer.conditions import LatentRules
from osora_cli.trainer.diffusion import DiffusionTask, DiffusionTaskSettings
from osora_cli.trainer.schedule import Schedule
from osora_cli.trainer.task import StepContext

CPU = torch.device("cpu")
SETTINGS = DiffusionTaskSettings(
    patch_size=2, rules=LatentRules(2, causal=False), sigma_min=1e-5, dropout_t5=0.0, dropout_clip=0.0,
    condition_weights=None, no_reference_loss=False, guidance=None, grad_clip=0.0,
)  # fmt: skip
AT = StepContext(seed=1, update=3, micro=0, accumulation=1, rank=0, world_size=1)
IMAGES = {"i2v_head": 1.0, "i2v_tail": 1.0, "i2v_loop": 1.0}


def batch_of(frames: int, size: int = 32, count: int = 3) -> ClipBatch:
    video = torch.randint(0, 256, (count, 3, frames, size, size), generator=torch.Generator().manual_seed(5))
    rows = tuple(range(count))
    return ClipBatch(
        video=video.to(torch.uint8), rows=rows, positions=rows, texts=tuple(f"a clip {i}" for i in rows),
        fps=(24.0,) * count, motion_scores=(float("nan"),) * count, replaced=(), shortened=(), wait_s=0.0,
    )  # fmt: skip


def parts_with(ae: dict[str, Any]) -> FrozenParts:
    networks: Any = [build_model(section, seed=2) for section in (ae, CONFIG["t5"], CONFIG["clip"])]
    return FrozenParts(*networks)


def task_with(
    ae: dict[str, Any] = DC_AE,
    parts: FrozenParts | None = None,
    model: dict[str, Any] | None = None,
    lr: float = 1e-3,
    **changes: Any,
) -> DiffusionTask:
    parts = parts or parts_with(ae)
    settings = replace(SETTINGS, **changes)
    section = {**MODEL, "cond_embed": settings.condition_weights is not None, **(model or {})}
    engine = NativeEngine(CPU, "fp32", "none")
    network = engine.prepare(build_model(section, seed=3), OptimSettings(lr, (0.9, 0.999), 1e-15, 0.0))
    return DiffusionTask(network, engine, Schedule(lr, 10), settings, parts, null_text(parts))


def loss_of(task: DiffusionTask, batch: ClipBatch, context: StepContext = AT) -> float:
    return float(task.loss(task.prepare(batch, context), context).detach())


def gradients(task: DiffusionTask) -> dict[str, Tensor]:
    module = task.networks["model"].module
    return {key: p.grad.clone() for key, p in module.named_parameters() if p.grad is not None}


def test_a_step_hangs_on_its_place_only() -> None:
    task, batch = task_with(dropout_t5=0.5, dropout_clip=0.5), batch_of(8)
    first = loss_of(task, batch)
    torch.manual_seed(99)
    torch.rand(7)
    assert loss_of(task, batch) == first
    for other in (replace(AT, update=4), replace(AT, micro=1), replace(AT, rank=1), replace(AT, seed=2)):
        assert loss_of(task, batch, other) != first
    assert loss_of(task, batch, replace(AT, accumulation=4, world_size=8)) == first


def test_the_global_generator_is_left_alone() -> None:
    task, batch = task_with(HUNYUAN, rules=LatentRules(4, causal=True), condition_weights=IMAGES), batch_of(9, 64)
    torch.manual_seed(7)
    want = torch.rand(3)
    torch.manual_seed(7)
    task.micro_step(batch, AT)
    assert torch.equal(torch.rand(3), want)


def test_dropped_texts_are_the_empty_one() -> None:
    batch = batch_of(8)
    empty = replace(batch, texts=("", "", ""))
    kept, gone = task_with(), task_with(dropout_t5=1.0, dropout_clip=1.0)
    assert loss_of(gone, batch) == loss_of(kept, empty)
    assert loss_of(gone, batch) != loss_of(kept, batch)
    # Each embedder's draw is its own.
    text = task_with(dropout_t5=1.0).prepare(batch, AT).text
    assert torch.equal(text.t5, task_with().prepare(empty, AT).text.t5)
    assert torch.equal(text.clip, task_with().prepare(batch, AT).text.clip)


def test_the_share_of_dropped_texts() -> None:
    task, batch = task_with(dropout_t5=0.31622777, dropout_clip=0.31622777), batch_of(1, 8, 50)
    null = task.prepare(replace(batch, texts=("",) * 50), AT).text
    gone_t5, gone_clip, both = 0, 0, 0
    for update in range(40):
        text = task.prepare(batch, replace(AT, update=update)).text
        t5 = (text.t5 == null.t5).flatten(1).all(dim=1)
        clip = (text.clip == null.clip).flatten(1).all(dim=1)
        gone_t5, gone_clip, both = gone_t5 + int(t5.sum()), gone_clip + int(clip.sum()), both + int((t5 & clip).sum())
    assert gone_t5 / 2000 == pytest.approx(0.316, abs=0.035)
    assert gone_clip / 2000 == pytest.approx(0.316, abs=0.035)
    assert both / 2000 == pytest.approx(0.1, abs=0.03)


def test_tokens_divide_over_the_ranks_that_share_them() -> None:
    batch = batch_of(8)
    one, three = task_with(), task_with(sequence_ranks=3, dropout_t5=0.5)
    image_tokens = 4 * 8 * 8
    assert one.prepare(batch, AT).text.t5.shape[1] == 8
    padded = three.prepare(batch, AT).text.t5
    assert padded.shape[1] == 8 + -(8 + image_tokens) % 3
    assert loss_of(three, batch) > 0


@pytest.mark.parametrize(("ae", "frames", "size", "causal"), [(DC_AE, 8, 32, False), (HUNYUAN, 9, 64, True)])
def test_frames_that_are_shown_give_no_gradient_where_they_are_left_out(
    ae: dict[str, Any], frames: int, size: int, causal: bool
) -> None:
    rules = LatentRules(2 if ae is DC_AE else 4, causal)
    task = task_with(ae, rules=rules, condition_weights=IMAGES, no_reference_loss=True)
    module, batch = task.networks["model"].module, batch_of(frames, size)
    seen: list[Tensor] = []
    module.register_forward_hook(lambda _m, _a, out: out.retain_grad() or seen.append(out))
    sample = task.prepare(batch, AT)
    assert sample.cond is not None
    shown = sample.cond[:, 0, :, 0, 0]
    task.loss(sample, AT).backward()
    grad = seen[0].grad
    assert grad is not None
    per_frame = grad.unflatten(1, (shown.shape[1], -1)).abs().sum(dim=(2, 3))
    assert torch.equal(per_frame == 0, shown == 1)
    assert bool(shown.any(dim=1).all())
    plain = task_with(ae, rules=rules, condition_weights=IMAGES)
    assert loss_of(plain, batch) != loss_of(task, batch)


def test_a_model_with_guidance_is_told_its_strength() -> None:
    batch, model = batch_of(8), {"guidance_embed": True}
    assert loss_of(task_with(model=model, guidance=4.0), batch) != loss_of(task_with(model=model, guidance=1.0), batch)
    with pytest.raises(ValueError, match="guidance_embed"):
        loss_of(task_with(model=model), batch)


def test_micro_batches_add_up_to_their_mean() -> None:
    batch, task = batch_of(8), task_with()
    places = [replace(AT, micro=m, accumulation=2) for m in (0, 1)]
    for place in places:
        task.micro_step(batch, place)
    got = gradients(task)
    want: dict[str, Tensor] = {}
    for place in places:
        single = task_with()
        single.micro_step(batch, replace(place, accumulation=1))
        want = {key: want.get(key, 0) + value / 2 for key, value in gradients(single).items()}
    assert all(torch.allclose(got[key], value, atol=1e-6) for key, value in want.items())


@pytest.mark.parametrize("cached_text", [False, True])
def test_cached_latents_are_trained_on_like_the_clips_that_they_are_of(cached_text: bool) -> None:
    """The Video DC-AE draws nothing, so that latents from before are exactly those of now."""
    parts = parts_with(DC_AE)
    task, batch = task_with(parts=parts, condition_weights={"t2v": 1.0, **IMAGES}, dropout_t5=0.5), batch_of(8)
    assert parts.ae is not None
    video = normalize(batch.video)
    frozen = task_with(parts=parts).prepare(batch, AT)
    cached = CachedBatch(
        **{**batch.__dict__, "video": torch.empty(batch.video.shape, dtype=torch.uint8, device="meta")},
        latents=encode_latents(parts.ae, video),
        parts={("head", 1): encode_latents(parts.ae, video[:, :, :1]),
               ("tail", 1): encode_latents(parts.ae, video[:, :, -1:])},
        t5=frozen.text.t5 if cached_text else None,
        clip=frozen.text.clip if cached_text else None,
    )  # fmt: skip
    for update in range(4):
        place = replace(AT, update=update)
        assert loss_of(task, cached, place) == pytest.approx(loss_of(task, batch, place), rel=1e-5)


def test_stills_have_no_condition() -> None:
    task, batch = task_with(condition_weights={"i2v_head": 1.0}), batch_of(1)
    sample = task.prepare(batch, AT)
    assert sample.cond is not None
    assert not bool(sample.cond.any())
    assert loss_of(task, batch) > 0


def real_clips(size: int, frames: int) -> Tensor:
    """Four windows of real clips, uint8 [4, 3, T, size, size]."""
    windows = (("bigbuckbunny", 0), ("bigbuckbunny", 100), ("bikes", 30), ("carphone_pristine", 10))
    clips = []
    for name, start in windows:
        pixels = read_frames(real_clip(name), range(start, start + frames))
        clips.append(resize_crop_uint8(torch.from_numpy(pixels).permute(0, 3, 1, 2), (size, size)).transpose(0, 1))
    return torch.stack(clips)


def test_four_real_clips_are_learned_by_heart() -> None:
    """The loss at fixed noise and times falls to a fifth in a few seconds."""
    batch = replace(batch_of(8, 16, 4), video=real_clips(16, 8))
    raw = task_with().prepare(batch, AT).latents
    parts = parts_with({**DC_AE, "scaling_factor": float(raw.std())})
    task = task_with(parts=parts, lr=2e-3, model={"hidden_size": 128, "num_heads": 4, "axes_dim": [8, 12, 12]})
    places = [replace(AT, update=1000 + k) for k in range(8)]

    def score() -> float:
        with torch.no_grad():
            return sum(loss_of(task, batch, place) for place in places) / len(places)

    before = score()
    for update in range(150):
        task.micro_step(batch, replace(AT, update=update))
        task.update(update)
    assert score() < before / 5


@pytest.mark.parametrize("conditions", [None, IMAGES])
def test_a_rehearsal_changes_nothing(conditions: dict[str, float] | None) -> None:
    twins = [task_with(HUNYUAN, rules=LatentRules(4, causal=True), condition_weights=conditions) for _ in range(2)]
    batch = batch_of(9, 64)
    for update in range(2):
        for task in twins:
            task.micro_step(batch, replace(AT, update=update))
            task.update(update)
        before = twins[0].networks["model"].param_groups()
        twins[0].rehearse((2, 4, 3, 8, 8))
        assert twins[0].networks["model"].param_groups() == before
    assert gradients(twins[0]) == {}
    one, other = (task.networks["model"] for task in twins)
    for shards in ("model_shards", "master_shards", "optimizer_shards"):
        for a, b in zip(getattr(one, shards)(), getattr(other, shards)(), strict=True):
            assert torch.equal(a.tensor, b.tensor), a.key
