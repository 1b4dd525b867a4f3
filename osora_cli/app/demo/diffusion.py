"""The demo's second half: its own autoencoder as the latent space of a diffusion model, which learns four clips."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from osora_cli.app.cache.latent_stats import latent_stats
from osora_cli.app.cache.run import make_cache
from osora_cli.app.demo.processes import kill_in_save, records, resume, verify
from osora_cli.config.diffusion import TrainDiffusionConfig
from osora_cli.config.load import load_config
from osora_cli.config.overrides import Override
from osora_cli.errors import RunError

PRESET = "demo/diffusion"
RUN_NAME = "diffusion"
_CLIPS = 4


@dataclass
class DiffusionDemo:
    """Its steps, each a method that says what came of it.

    Attributes:
        folder: the demo's.
        autoencoder: the run that trained it.
        table: gives the clips that it was trained on.
        training: more arguments for the training, to make it shorter. It must save three times.
        scores: of the first and the last scoring: `flow_loss_before`, `flow_loss`, `sample_psnr`, `sample_psnr_others`.
        picture: clips above the samples that follow their captions.
    """

    folder: Path
    autoencoder: Path
    table: Callable[[], Path]
    quiet: bool = False
    training: Sequence[str] = ()
    scores: dict[str, float] = field(default_factory=dict)
    picture: Path | None = None

    @property
    def run(self) -> Path:
        return self.folder / "runs" / RUN_NAME

    @property
    def config(self) -> Path:
        return self.folder / "diffusion.yaml"

    def measure(self) -> str:
        """Four clips with a caption each, and the deviation of their latents, written into a config."""
        few = self._few_clips()
        overrides = [
            Override(("dataset", "data_path"), str(few), "--dataset.data-path"),
            Override(("ae", "from_pretrained"), str(self.autoencoder), "--ae.from-pretrained"),
        ]
        found = latent_stats(load_config(PRESET, TrainDiffusionConfig, overrides).config, write=self.config)
        ((name, factor),) = found.factors.items()
        return (
            f"latents of {found.clips} clips have mean {found.raw.mean:.3g} and deviation {found.raw.std:.3g}: "
            f"ae.{name} {factor:g} into {self.config.name}"
        )

    def cache(self) -> str:
        """Latents and text embeddings of the clips."""
        made = make_cache(load_config(self.config, TrainDiffusionConfig).config)
        again = make_cache(load_config(self.config, TrainDiffusionConfig).config)
        if again.clips_made or again.captions_made:
            raise RunError("what is cached was made again", hint=f"the cache: {made.folder}")
        return (
            f"{made.clips_made} clips and {made.captions_made} captions into {made.folder.name}, "
            f"{made.bytes / 2**10:.0f} KiB; a second call found all of it"
        )

    def train_and_kill(self) -> str:
        """Start the training from the cache, and kill it in a save."""
        return kill_in_save(
            [
                "train", "diffusion", str(self.config), "--cached-video", "--cached-text", "--async-io",
                "--outputs", str(self.run.parent), "--exp-name", RUN_NAME, *self.training,
            ],
            self.run,
            quiet=self.quiet,
        )  # fmt: skip

    def resume(self) -> str:
        return resume(self.run, quiet=self.quiet)

    def verify(self) -> str:
        return verify([self.run])

    def samples(self) -> str:
        """What the model makes of the captions, as its last scoring has it."""
        scored = [record for record in records(self.run) if record.get("kind") == "eval"]
        pictures = sorted((self.run / "eval").glob("*-samples.png"))
        if not scored or not pictures:
            raise RunError("the run was not scored", hint=f"its log: {self.run / 'log.txt'}")
        first, last = (_scores(record) for record in (scored[0], scored[-1]))
        self.picture = pictures[-1]
        self.scores = {
            "flow_loss_before": first["flow_loss_ema"],
            "flow_loss": last["flow_loss_ema"],
            **{name: last[name] for name in ("sample_psnr", "sample_psnr_others", "sample_matches")},
        }
        s = self.scores
        return (
            f"flow loss at fixed times and noise {s['flow_loss_before']:.3g} before, {s['flow_loss']:.3g} after; "
            f"samples from captions: PSNR {s['sample_psnr']:.2f} dB to the clip that is meant, "
            f"{s['sample_psnr_others']:.2f} dB to the nearest other, {s['sample_matches']:.0%} nearest to their own"
        )

    def _few_clips(self) -> Path:
        """A table of the first pieces of each source, and the last one of the table, with captions of their own."""
        table = self.table()
        with table.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        chosen: dict[str, dict[str, str]] = {}
        for row in rows:
            chosen.setdefault(row["text"], row)
        picked = [*chosen.values(), *reversed(rows)][:_CLIPS]
        few = table.with_name("few_meta.csv")
        with few.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows({**row, "text": f"number {i}, {row['text']}"} for i, row in enumerate(picked))
        return few


def _scores(record: dict[str, Any]) -> dict[str, float]:
    """The scores of an evaluation's record, without the prefix they are logged under."""
    return {key.removeprefix("eval/"): value for key, value in record.items() if isinstance(value, float | int)}
