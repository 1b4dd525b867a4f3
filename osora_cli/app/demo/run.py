"""The demo's course: clips, table, training, a kill in a save, resume, second stage, verify, pictures; diffusion."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from osora_cli.app.data.meta import make_meta
from osora_cli.app.demo.clips import DemoClips, make_clips
from osora_cli.app.demo.diffusion import DiffusionDemo
from osora_cli.app.demo.processes import kill_in_save, logged, resume, run_to_end, verify
from osora_cli.app.reconstruct.run import ReconstructResult, reconstruct
from osora_cli.checkpoint.layout import checkpoint_folders
from osora_cli.config.load import load_config
from osora_cli.config.overrides import Override
from osora_cli.config.schema import ReconstructConfig
from osora_cli.errors import RunError, UsageError

SCHEMA_VERSION = 1
VAE_PRESET = "demo/vae"
DISC_PRESET = "demo/vae_disc"
RECONSTRUCT_PRESET = "demo/reconstruct"
RUN_NAME = "vae"
DISC_NAME = "vae-disc"


@dataclass(frozen=True)
class DemoStep:
    """One step of the demo: its name, and what does it and says what came of it."""

    name: str
    act: Callable[[], str]


@dataclass(frozen=True)
class DemoRow:
    """One step of the demo: what was done, what came of it, and how long it took."""

    step: str
    outcome: str
    seconds: float


@dataclass
class DemoResult:
    """All that happened.

    Attributes:
        psnr: dB over the held-out windows, mean over clips: `constant`, `block_means`, `before`, `after`, `stage2`.
        picture: originals above reconstructions, of the model after the second stage.
        diffusion: the diffusion model's scores, see `DiffusionDemo`.
        samples: clips above the samples that follow their captions.
    """

    folder: Path
    rows: list[DemoRow] = field(default_factory=list)
    psnr: dict[str, float] = field(default_factory=dict)
    picture: Path | None = None
    diffusion: dict[str, float] = field(default_factory=dict)
    samples: Path | None = None
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "folder": str(self.folder),
            "rows": [vars(row) for row in self.rows],
            "psnr": self.psnr,
            "picture": str(self.picture) if self.picture else None,
            "diffusion": self.diffusion,
            "samples": str(self.samples) if self.samples else None,
            "seconds": round(self.seconds, 1),
        }


def run_demo(
    directory: Path,
    *,
    quiet: bool = False,
    tell: Callable[[str], None] | None = None,
    training: Sequence[str] = (),
    second_stage: Sequence[str] = (),
    diffusion: Sequence[str] = (),
) -> DemoResult:
    """Run every step in `directory`, which must be empty or new.

    Args:
        quiet: the trainings' own lines are left out.
        tell: is given one line when a step begins.
        training: more arguments for the first training, to make it shorter. It must save three times.
        second_stage: more arguments for the second.
        diffusion: more arguments for the training of the diffusion model, which must save three times, too.

    Raises:
        UsageError: the folder is in use.
        RunError: a step did not do what it is there to show.
    """
    if directory.exists() and any(directory.iterdir()):
        raise UsageError(
            f"the folder `{directory}` is not empty",
            hint=f"take another: `osora demo --dir {directory}-2`",
        )
    demo = _Demo(DemoResult(directory), quiet, tell or (lambda _: None), training, second_stage, diffusion)
    started = time.perf_counter()
    demo.run()
    demo.result.seconds = time.perf_counter() - started
    return demo.result


@dataclass
class _Demo:
    result: DemoResult
    quiet: bool
    tell: Callable[[str], None]
    training: Sequence[str]
    second_stage: Sequence[str]
    diffusion: Sequence[str]
    train_table: Path = Path()
    held_out_table: Path = Path()
    clips: DemoClips = field(init=False)
    second_half: DiffusionDemo = field(init=False)

    @property
    def folder(self) -> Path:
        return self.result.folder

    @property
    def run_folder(self) -> Path:
        return self.folder / "runs" / RUN_NAME

    @property
    def disc_folder(self) -> Path:
        return self.folder / "runs" / DISC_NAME

    def steps(self) -> list[DemoStep]:
        """All that the demo does, in order."""
        return [*self._autoencoder_steps(), *self._diffusion_steps()]

    def _autoencoder_steps(self) -> list[DemoStep]:
        return [
            DemoStep("clips", self._clips),
            DemoStep("data meta", self._meta),
            DemoStep("train vae --async-io, kill -9 in a save", self._train_and_kill),
            DemoStep("resume", self._resume),
            DemoStep("train vae-disc", self._train_disc),
            DemoStep("ckpt verify", self._verify),
            DemoStep("infer reconstruct", self._reconstruct),
        ]

    def _diffusion_steps(self) -> list[DemoStep]:
        """The first stage's autoencoder as a latent space. Its table is known once the steps before are done."""
        part = DiffusionDemo(self.folder, self.run_folder, lambda: self.train_table, self.quiet, self.diffusion)
        self.second_half = part
        return [
            DemoStep("data latent-stats", part.measure),
            DemoStep("data cache", part.cache),
            DemoStep("train diffusion --async-io, kill -9 in a save", part.train_and_kill),
            DemoStep("resume of the diffusion run", part.resume),
            DemoStep("ckpt verify of the diffusion run", part.verify),
            DemoStep("samples", self._samples),
        ]

    def run(self) -> None:
        for step in self.steps():
            self.tell(step.name)
            started = time.perf_counter()
            outcome = step.act()
            self.result.rows.append(DemoRow(step.name, outcome, round(time.perf_counter() - started, 1)))

    def _clips(self) -> str:
        self.clips = made = make_clips(self.folder / "clips")
        return f"{made.train_clips} clips to train on, {made.held_out_clips} held out, cut from {made.source}"

    def _meta(self) -> str:
        self.train_table, self.held_out_table = (self._table(t) for t in (self.clips.train, self.clips.held_out))
        return f"frames, size and rate into {self.train_table.name} and {self.held_out_table.name}"

    def _table(self, table: Path) -> Path:
        output = table.with_name(f"{table.stem}_meta.csv")
        made = make_meta(table, output, num_workers=0)
        if made.bad:
            raise RunError(f"{len(made.bad)} of the demo's own clips could not be read: {made.bad[0]}")
        return output

    def _train_and_kill(self) -> str:
        """Start the training, and kill it once a later save is on its way to the disk."""
        command = [
            "train", "vae", VAE_PRESET, "--dataset.data-path", str(self.train_table),
            "--outputs", str(self.run_folder.parent), "--exp-name", RUN_NAME, "--async-io", *self.training,
        ]  # fmt: skip
        return kill_in_save(command, self.run_folder, quiet=self.quiet)

    def _resume(self) -> str:
        return resume(self.run_folder, quiet=self.quiet)

    def _train_disc(self) -> str:
        """The second stage, from the newest checkpoint of the first."""
        run_to_end([
            "train", "vae-disc", DISC_PRESET, "--from-pretrained", str(self.run_folder), "--dataset.data-path",
            str(self.train_table), "--outputs", str(self.disc_folder.parent), "--exp-name", DISC_NAME, "--async-io",
            *self.second_stage,
        ], quiet=self.quiet)  # fmt: skip
        records = logged(self.disc_folder)
        first, last = records[0], records[-1]
        apart = [record["logits_real"] - record["logits_fake"] for record in (first, last)]
        return (
            f"from {checkpoint_folders(self.run_folder)[-1].name}, {last['step']} updates against a fresh "
            f"discriminator: its logits of clips and reconstructions {apart[0]:.2f} apart at update {first['step']}, "
            f"{apart[1]:.2f} at the end; adaptive weight {last['d_weight']:.3g}"
        )

    def _verify(self) -> str:
        return verify([self.run_folder, self.disc_folder])

    def _samples(self) -> str:
        outcome = self.second_half.samples()
        self.result.diffusion, self.result.samples = self.second_half.scores, self.second_half.picture
        return outcome

    def _reconstruct(self) -> str:
        checkpoints = checkpoint_folders(self.run_folder)
        before = self._measure(checkpoints[0], "before")
        after = self._measure(checkpoints[-1], "after")
        stage2 = self._measure(checkpoint_folders(self.disc_folder)[-1], "stage2")
        self.result.picture = stage2.picture
        self.result.psnr = {
            "constant": _mean(after, "constant_colour_psnr"),
            "block_means": _mean(after, "block_mean_psnr"),
            "before": _mean(before, "psnr"),
            "after": _mean(after, "psnr"),
            "stage2": _mean(stage2, "psnr"),
        }
        p = self.result.psnr
        return (
            f"{len(after.clips)} windows not trained on: PSNR {p['before']:.2f} dB at {checkpoints[0].name}, "
            f"{p['after']:.2f} dB at {checkpoints[-1].name}, {p['stage2']:.2f} dB after the second stage; "
            f"best constant colour {p['constant']:.2f} dB, block means with as many numbers as the latent "
            f"{p['block_means']:.2f} dB"
        )

    def _measure(self, checkpoint: Path, name: str) -> ReconstructResult:
        overrides = [
            Override(("dataset", "data_path"), str(self.held_out_table), "--dataset.data-path"),
            Override(("save_dir",), str(self.folder / "reconstruct" / name), "--save-dir"),
            Override(("model", "from_pretrained"), str(checkpoint), "--model.from-pretrained"),
            Override(("lpips",), False, "--no-lpips"),
        ]
        return reconstruct(load_config(RECONSTRUCT_PRESET, ReconstructConfig, overrides).config)


def _mean(result: ReconstructResult, name: str) -> float:
    value = result.mean[name]
    if value is None:
        raise RunError(f"the reconstruction has no {name}", hint=f"its numbers: {result.metrics}")
    return value
