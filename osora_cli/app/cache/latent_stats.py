"""`osora data latent-stats`: mean and standard deviation of an autoencoder's latents, and the factor that they give."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from osora_cli.app.cache.plan import clip_shapes, compute_device
from osora_cli.app.cache.run import Progress
from osora_cli.app.data.input import check_buckets, load_table, make_sampler
from osora_cli.app.frozen_parts import build_frozen_parts, resolve_autoencoder
from osora_cli.config.diffusion import TrainDiffusionConfig
from osora_cli.config.freeze import values_to_yaml
from osora_cli.config.models.dc_ae import DcAeConfig
from osora_cli.config.models.hunyuan_vae import HunyuanVaeConfig
from osora_cli.data.cache import ClipShape
from osora_cli.data.draws import draw_rng
from osora_cli.data.loader import ClipBatch, ClipLoader
from osora_cli.data.plan import Batch
from osora_cli.data.table import ClipTable
from osora_cli.data.transforms import normalize
from osora_cli.errors import DataError, SetupError, UsageError
from osora_cli.model.latents import Autoencoder, encode_latents
from osora_cli.tensors import DTYPES
from osora_cli.words import counted

SCHEMA_VERSION = 1


@dataclass
class Moments:
    """Count, mean and variance by channel, joined batch by batch in fp64 (Chan et al. 1979)."""

    count: int = 0
    mean_C: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    squares_C: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))

    def add(self, latents_BCTHW: torch.Tensor) -> None:
        """Take in latents. Raises ValueError for values that are not finite."""
        values_CN = latents_BCTHW.double().transpose(0, 1).flatten(1).cpu()
        if not torch.isfinite(values_CN).all():
            raise ValueError("latents that are not finite")
        count, mean_C = values_CN.shape[1], values_CN.mean(dim=1)
        squares_C = (values_CN - mean_C[:, None]).square().sum(dim=1)
        if self.count == 0:
            self.count, self.mean_C, self.squares_C = count, mean_C, squares_C
            return
        total, apart_C = self.count + count, mean_C - self.mean_C
        self.squares_C = self.squares_C + squares_C + apart_C.square() * (self.count * count / total)
        self.mean_C = self.mean_C + apart_C * (count / total)
        self.count = total

    @property
    def std_C(self) -> torch.Tensor:
        """Of each channel about its own mean."""
        return (self.squares_C / max(1, self.count)).sqrt()

    @property
    def mean(self) -> float:
        """Over all values."""
        return float(self.mean_C.mean())

    @property
    def std(self) -> float:
        """Of all values about the mean of all."""
        within, between = self.squares_C.mean() / max(1, self.count), (self.mean_C - self.mean_C.mean()).square().mean()
        return math.sqrt(float(within + between))


@dataclass
class LatentStats:
    """What was measured.

    Attributes:
        clips, frames: that were encoded; frames of pixels.
        raw: of latents as they come out of the encoder, without scale and shift.
        factors: values for the config's section `ae`, with which latents have a standard deviation of 1.
        present: standard deviation of the latents as the config scales them now.
        unreadable: path and reason of clips that could not be read.
        written: the config with these factors, where one was asked for.
    """

    clips: int
    frames: int
    raw: Moments
    factors: dict[str, float]
    present: float
    unreadable: list[tuple[str, str]]
    notes: list[str]
    seconds: float = 0.0
    written: Path | None = None

    def to_json(self) -> dict[str, Any]:
        means, stds = self.raw.mean_C.tolist(), self.raw.std_C.tolist()
        return {
            "schema_version": SCHEMA_VERSION,
            "clips": self.clips,
            "frames": self.frames,
            "values": self.raw.count * len(means),
            "mean": self.raw.mean,
            "std": self.raw.std,
            "channels": [{"mean": mean, "std": std} for mean, std in zip(means, stds, strict=True)],
            "present_std": self.present,
            "ae": self.factors,
            "unreadable": [{"path": path, "reason": reason} for path, reason in self.unreadable],
            "written": None if self.written is None else str(self.written),
            "notes": self.notes,
            "seconds": round(self.seconds, 3),
        }


def latent_stats(
    config: TrainDiffusionConfig,
    *,
    number: int = 256,
    write: Path | None = None,
    progress: Progress | None = None,
) -> LatentStats:
    """Encode a sample of a config's table, one window of each clip, and measure.

    Args:
        number: clips, drawn once for the config's seed from all that are in a bucket.
        write: a config to write, as the given one but with the factors found.

    Raises:
        ConfigError: the config asks for what its autoencoder cannot do.
        DataError: the table cannot be used, or no clip can be read.
        UsageError: `number` is below 1, or `write` exists already.
        SetupError: the config cannot be written.
    """
    began = time.perf_counter()
    if number < 1:
        raise UsageError(f"`--number` is `{number}`", where="--number", allowed="at least 1")
    if write is not None and write.exists():
        raise UsageError(f"`{write}` exists already", where="--write", hint="name another file, or remove it")
    resolved = resolve_autoencoder(config)
    table = load_table(config.dataset)
    check_buckets(resolved.config)
    pairs = clip_shapes(make_sampler(table, resolved.config), 1)
    if not pairs:
        raise DataError(f"no clip of table `{table.source}` is in a bucket", where="bucket_config")
    chosen = sorted(
        draw_rng(config.seed, "latent stats").sample(pairs, min(number, len(pairs))),
        key=lambda pair: (pair[1], pair[0]),
    )
    notes = [*table.notes, *resolved.notes]
    device = compute_device(config)
    ae = build_frozen_parts(resolved.config, device, DTYPES[config.dtype], text=False, notes=notes).ae
    assert ae is not None
    moments, unreadable, frames = Moments(), list[tuple[str, str]](), 0
    for done, (row, batch) in enumerate(_read(table, config, chosen), 1):
        if isinstance(batch, str):
            unreadable.append((table.path_of(row), batch))
        else:
            moments.add(_raw(ae, resolved.config.ae, encode_latents(ae, normalize(batch.video.to(device)))))
            frames += batch.video.shape[2]
        if progress is not None:
            progress(done, len(chosen))
    if not moments.count:
        raise DataError(f"none of {counted(len(chosen), 'clip')} can be read: {unreadable[0][0]}: {unreadable[0][1]}")
    factors, present = _factors(resolved.config.ae, moments)
    found = LatentStats(len(chosen) - len(unreadable), frames, moments, factors, present, unreadable, notes)
    if write is not None:
        # The factor belongs to these weights: the config names them, not the run, which may be trained on.
        weights = {"from_pretrained": resolved.config.ae.from_pretrained} if config.ae.from_pretrained else {}
        found.written = _write(config, {**weights, **factors}, found, write)
    found.seconds = time.perf_counter() - began
    return found


def _read(
    table: ClipTable, config: TrainDiffusionConfig, chosen: list[tuple[int, ClipShape]]
) -> Iterator[tuple[int, ClipBatch | str]]:
    """Each row with its clip, or with the reason why it cannot be read."""
    data = config.dataset
    loader = ClipLoader(
        table,
        seed=config.seed,
        fps_max=data.fps_max,
        num_workers=config.num_workers,
        prefetch_factor=config.prefetch_factor,
        rand_sample_interval=data.rand_sample_interval,
    )
    left = list(chosen)
    try:
        while left:
            batches = [Batch((row,), s.frames, s.height, s.width, (row,)) for row, s in left]
            try:
                for batch in loader.read(batches, 0):
                    yield left.pop(0)[0], batch
            except DataError as error:
                yield left.pop(0)[0], error.message
    finally:
        loader.close()


@torch.no_grad()
def _raw(ae: Autoencoder, section: DcAeConfig | HunyuanVaeConfig, latents: torch.Tensor) -> torch.Tensor:
    """Latents without the scale and shift that the config gives them."""
    if isinstance(section, HunyuanVaeConfig):
        return latents.double() / section.scale_factor + section.shift_factor
    factor = getattr(ae, "scaling_factor", None)
    return latents.double() if factor is None else latents.double() * factor


def _factors(section: DcAeConfig | HunyuanVaeConfig, raw: Moments) -> tuple[dict[str, float], float]:
    """The section's values that bring latents to unit deviation, and what the present ones bring them to.

    A DC-AE divides by `scaling_factor`; the Hunyuan VAE subtracts `shift_factor` and multiplies by `scale_factor`.
    """
    std = raw.std
    if not std > 0:
        raise DataError("the latents are all the same: the autoencoder is not trained, or the clips are one colour")
    if isinstance(section, HunyuanVaeConfig):
        return {"scale_factor": _rounded(1 / std), "shift_factor": _rounded(raw.mean)}, std * section.scale_factor
    return {"scaling_factor": _rounded(std)}, std / (section.scaling_factor or 1.0)


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _write(config: TrainDiffusionConfig, section: dict[str, object], found: LatentStats, path: Path) -> Path:
    # Only what was given: a default that is written down would count as the user's wish from then on.
    values = config.model_dump(mode="python", exclude_unset=True)
    values["ae"] = {**values["ae"], **section}
    title = (
        f"factors of ae from `osora data latent-stats` over {found.clips} clips of {config.dataset.data_path}: "
        f"latents have mean {found.raw.mean:.4g} and standard deviation {found.raw.std:.4g} without them"
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(values_to_yaml(values, title), encoding="utf-8")
    except OSError as error:
        raise SetupError(f"`{path}` cannot be written: {error}", where="--write") from error
    return path
