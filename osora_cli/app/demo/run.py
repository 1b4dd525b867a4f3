"""The demo's course: clips, table, training, a kill in the middle of a save, resume, second stage, verify, pictures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from osora_cli.app.ckpt import verify_path
from osora_cli.app.data_meta import make_meta
from osora_cli.app.demo.clips import DemoClips, make_clips
from osora_cli.app.reconstruct import ReconstructResult, reconstruct
from osora_cli.checkpoint.layout import STAGING_PREFIX, checkpoint_folders
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
    """

    folder: Path
    rows: list[DemoRow] = field(default_factory=list)
    psnr: dict[str, float] = field(default_factory=dict)
    picture: Path | None = None
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "folder": str(self.folder),
            "rows": [vars(row) for row in self.rows],
            "psnr": self.psnr,
            "picture": str(self.picture) if self.picture else None,
            "seconds": round(self.seconds, 1),
        }


def run_demo(
    directory: Path,
    *,
    quiet: bool = False,
    tell: Callable[[str], None] | None = None,
    training: Sequence[str] = (),
    second_stage: Sequence[str] = (),
) -> DemoResult:
    """Run every step in `directory`, which must be empty or new.

    Args:
        quiet: the trainings' own lines are left out.
        tell: is given one line when a step begins.
        training: more arguments for the first training, to make it shorter. It must save three times.
        second_stage: more arguments for the second.

    Raises:
        UsageError: the folder is in use.
        RunError: a step did not do what it is there to show.
    """
    if directory.exists() and any(directory.iterdir()):
        raise UsageError(
            f"the folder `{directory}` is not empty",
            hint=f"take another: `osora demo --dir {directory}-2`",
        )
    demo = _Demo(DemoResult(directory), quiet, tell or (lambda _: None), training, second_stage)
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
    train_table: Path = Path()
    held_out_table: Path = Path()
    clips: DemoClips = field(init=False)

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
        return [
            DemoStep("clips", self._clips),
            DemoStep("data meta", self._meta),
            DemoStep("train vae --async-io, kill -9 in a save", self._train_and_kill),
            DemoStep("resume", self._resume),
            DemoStep("train vae-disc", self._train_disc),
            DemoStep("ckpt verify", self._verify),
            DemoStep("infer reconstruct", self._reconstruct),
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
        child = self._start(command)
        try:
            staging = self._wait_for_save(child)
        finally:
            if child.poll() is None:
                os.kill(child.pid, signal.SIGKILL)
        child.wait()
        left = len(list(self.run_folder.glob(f"{STAGING_PREFIX}*")))
        good = verify_path(self.run_folder)
        return (
            f"killed at update {_last_step(self.run_folder)} while {staging} was written, {left} unfinished save left; "
            f"resume would take {_name(good.resume_from)}"
        )

    def _wait_for_save(self, child: subprocess.Popen[bytes]) -> str:
        while child.poll() is None:
            if len(checkpoint_folders(self.run_folder) if self.run_folder.is_dir() else []) >= 2:
                found = next(self.run_folder.glob(f"{STAGING_PREFIX}*"), None)
                if found is not None:
                    return found.name
            time.sleep(0.001)
        raise RunError(
            f"the training ended by itself (exit code {child.returncode}) before it could be killed in a save",
            hint=f"its log: {self.run_folder / 'log.txt'}",
        )

    def _resume(self) -> str:
        before = _last_step(self.run_folder)
        child = self._start(["resume", str(self.run_folder)])
        if child.wait() != 0:
            raise RunError(f"the resume ended with exit code {child.returncode}")
        steps = [record["step"] for record in _logged(self.run_folder)]
        if len(steps) != len(set(steps)):
            raise RunError("a step stands twice in metrics.jsonl")
        return f"logged up to update {before} before, went on to update {steps[-1]}; no update stands twice"

    def _train_disc(self) -> str:
        """The second stage, from the newest checkpoint of the first."""
        child = self._start([
            "train", "vae-disc", DISC_PRESET, "--from-pretrained", str(self.run_folder), "--dataset.data-path",
            str(self.train_table), "--outputs", str(self.disc_folder.parent), "--exp-name", DISC_NAME, "--async-io",
            *self.second_stage,
        ])  # fmt: skip
        if child.wait() != 0:
            raise RunError(f"the second stage ended with exit code {child.returncode}")
        logged = _logged(self.disc_folder)
        first, last = logged[0], logged[-1]
        apart = [record["logits_real"] - record["logits_fake"] for record in (first, last)]
        return (
            f"from {checkpoint_folders(self.run_folder)[-1].name}, {last['step']} updates against a fresh "
            f"discriminator: its logits of clips and reconstructions {apart[0]:.2f} apart at update {first['step']}, "
            f"{apart[1]:.2f} at the end; adaptive weight {last['d_weight']:.3g}"
        )

    def _verify(self) -> str:
        count, verdicts = 0, set()
        for run in (self.run_folder, self.disc_folder):
            report = verify_path(run)
            if report.exit_code:
                raise RunError("a checkpoint of the run does not verify", hint=f"osora ckpt verify {run}")
            count += len(checkpoint_folders(run))
            verdicts.add(str(report.verdict))
        return f"{count} checkpoints of both runs, every byte against its digest: {', '.join(sorted(verdicts))}"

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

    def _start(self, arguments: list[str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "osora_cli", *arguments, *(["--quiet"] if self.quiet else [])]
        environment = {
            # A process that is killed cannot give back its semaphores; Python's own helper does, and says so.
            "PYTHONWARNINGS": "ignore:resource_tracker:UserWarning",
            **os.environ,
        }
        # Only the demo's own table goes to stdout.
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment)


def _logged(run: Path) -> list[dict[str, Any]]:
    """The records of updates in metrics.jsonl; a line that a kill cut does not count."""
    records = []
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if "kind" not in record:
            records.append(record)
    return records


def _last_step(run: Path) -> int:
    """The last update in metrics.jsonl."""
    logged = _logged(run)
    return int(logged[-1]["step"]) if logged else 0


def _mean(result: ReconstructResult, name: str) -> float:
    value = result.mean[name]
    if value is None:
        raise RunError(f"the reconstruction has no {name}", hint=f"its numbers: {result.metrics}")
    return value


def _name(path: Any) -> str:
    return Path(path).name if path else "nothing"
