"""From a config to the evaluation of a diffusion training: which clips, and how they are scored and sampled."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from osora_cli.app.data.eval_clips import draw_eval_clips
from osora_cli.app.data.input import spatial_step
from osora_cli.config.diffusion import TrainDiffusionConfig
from osora_cli.config.models.autoencoder import compression, is_causal
from osora_cli.config.sampling import SamplingOption
from osora_cli.data.fixed_clips import FixedClip, read_fixed_clips
from osora_cli.data.fps import add_caption_suffix, map_target_fps
from osora_cli.data.table import ClipTable
from osora_cli.engine.base import Engine
from osora_cli.model.latents import FrozenParts, TextBundle
from osora_cli.model.sampling import SamplingSettings
from osora_cli.trainer.conditions import LatentRules
from osora_cli.trainer.diffusion_eval import DiffusionEvalSettings, DiffusionEvaluator, EvalClip
from osora_cli.trainer.saving import RunState
from osora_cli.words import counted


@dataclass(frozen=True)
class DiffusionEvalInput:
    """The checked input of an evaluation: clips that are not read yet, with their captions and rates."""

    clips: list[FixedClip]
    captions: list[str]
    rates: list[float]
    notes: list[str] = field(default_factory=list)


def check_diffusion_eval(config: TrainDiffusionConfig, training_table: ClipTable) -> DiffusionEvalInput | None:
    """Draw the clips; None where nothing is to be scored.

    Raises:
        ConfigError: sizes or rows that cannot be.
        DataError: no clip fits, or the held-out table cannot be used.
    """
    if config.eval_every == 0:
        return None
    drawn = draw_eval_clips(config, training_table, spatial_step(config))
    clips, table, notes = drawn.clips, drawn.table, drawn.notes
    rates = [map_target_fps(float(table.fps[clip.row]), config.dataset.fps_max)[0] for clip in clips]
    captions = [_caption(config, table, clip.row, rate) for clip, rate in zip(clips, rates, strict=True)]
    own = "clips that are trained on as well: name held-out ones with `--eval.table`"
    where = "held-out clips" if drawn.held_out else own
    notes.append(
        f"every {config.eval_every} updates the flow loss of {counted(len(clips), 'window')} of {drawn.frames} frames, "
        f"and {min(config.eval.pictures, len(clips))} samples of {config.sampling_option.num_steps} steps; {where}"
    )
    return DiffusionEvalInput(clips, captions, rates, notes)


def make_diffusion_evaluator(
    config: TrainDiffusionConfig,
    given: DiffusionEvalInput,
    engine: Engine,
    state: RunState,
    parts: FrozenParts,
    null: TextBundle,
    folder: Path,
) -> DiffusionEvaluator:
    """The evaluator of a run in `folder`; the clips are read here, once. Raises DataError where one cannot be."""
    videos = read_fixed_clips(given.clips)
    clips = [
        EvalClip(f"sample{number}", video, caption, rate)
        for number, (video, caption, rate) in enumerate(zip(videos, given.captions, given.rates, strict=True))
    ]
    settings = DiffusionEvalSettings(
        every=config.eval_every,
        patch_size=config.model.patch_size,
        cond_embed=config.model.cond_embed,
        guidance=config.guidance if config.model.guidance_embed else None,
        sigma_min=config.sigma_min,
        rules=LatentRules(compression(config.ae)[0], is_causal(config.ae)),
        sampling=sampling_settings(config.sampling_option, config.guidance),
        image_to_video=_shows_first_frame(config),
        seed=config.sampling_option.seed,
        batch_size=config.eval.batch_size,
        pictures=config.eval.pictures,
        raw_too=config.eval.raw_weights,
    )
    return DiffusionEvaluator(settings, clips, engine, state, parts, null, folder)


def sampling_settings(option: SamplingOption, embedded_guidance: float) -> SamplingSettings:
    """The section as the sampler takes it."""
    return SamplingSettings(
        num_steps=option.num_steps,
        guidance=option.guidance,
        guidance_img=option.guidance_img,
        text_osci=option.text_osci,
        image_osci=option.image_osci,
        scale_temporal_osci=option.scale_temporal_osci,
        flow_shift=option.flow_shift,
        shift=option.shift,
        embedded_guidance=embedded_guidance,
    )


def _shows_first_frame(config: TrainDiffusionConfig) -> bool:
    """Whether the model is trained to go on from a first frame: then that is what is looked at."""
    weights = config.condition_config
    return weights is not None and weights.get("i2v_head", 0.0) > 0


def _caption(config: TrainDiffusionConfig, table: ClipTable, row: int, rate: float) -> str:
    scores = table.score_vmafmotion
    score = float(scores[row]) if config.dataset.vmaf and scores is not None else None
    return add_caption_suffix(table.text_of(row), rate, config.dataset.fps_max, score)
