"""The demo's course: clips, table, training, a kill in the middle of a save, resume, verify, reconstruct."""

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
RECONSTRUCT_PRESET = "demo/reconstruct"
RUN_NAME = "vae"


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
        psnr: dB over the held-out windows, mean over clips: `constant`, `block_means`, `before`, `after`.
        picture: originals above reconstructions, of the trained model.
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
) -> DemoResult:
    """Run every step in `directory`, which must be empty or new.

    Args:
        quiet: the trainings' own lines are left out.
        tell: is given one line when a step begins.
        training: more arguments for the training, to make it shorter. It must save three times.

    Raises:
        UsageError: the folder is in use.
        RunError: a step did not do what it is there to show.
    """
    if directory.exists() and any(directory.iterdir()):
        raise UsageError(
            f"the folder `{directory}` is not empty",
            hint=f"take another: `osora demo --dir {directory}-2`",
        )
    demo = _Demo(DemoResult(directory), quiet, tell or (lambda _: None), training)
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

    @property
    def folder(self) -> Path:
        return self.result.folder

    @property
    def run_folder(self) -> Path:
        return self.folder / "runs" / RUN_NAME

    def run(self) -> None:
        clips = self._step("clips", lambda: make_clips(self.folder / "clips"), _clips_outcome)
        tables = self._step("data meta", lambda: self._meta(clips), _meta_outcome)
        self._step("train vae --async-io, kill -9 in a save", lambda: self._train_and_kill(tables[0]), str)
        self._step("resume", self._resume, str)
        self._step("ckpt verify", self._verify, str)
        self._step("infer reconstruct", lambda: self._reconstruct(tables[1]), str)

    def _step(self, name: str, act: Callable[[], Any], outcome: Callable[[Any], str]) -> Any:
        self.tell(name)
        started = time.perf_counter()
        value = act()
        self.result.rows.append(DemoRow(name, outcome(value), round(time.perf_counter() - started, 1)))
        return value

    def _meta(self, clips: DemoClips) -> tuple[Path, Path]:
        tables = []
        for table in (clips.train, clips.held_out):
            output = table.with_name(f"{table.stem}_meta.csv")
            made = make_meta(table, output, num_workers=0)
            if made.bad:
                raise RunError(f"{len(made.bad)} of the demo's own clips could not be read: {made.bad[0]}")
            tables.append(output)
        return tables[0], tables[1]

    def _train_and_kill(self, table: Path) -> str:
        """Start the training, and kill it once a later save is on its way to the disk."""
        command = [
            "train", "vae", VAE_PRESET, "--dataset.data-path", str(table), "--outputs", str(self.run_folder.parent),
            "--exp-name", RUN_NAME, "--async-io", *self.training,
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
        records = [json.loads(line) for line in _metrics(self.run_folder)]
        steps = [record["step"] for record in records if "kind" not in record]
        if len(steps) != len(set(steps)):
            raise RunError("a step stands twice in metrics.jsonl")
        return f"logged up to update {before} before, went on to update {steps[-1]}; no update stands twice"

    def _verify(self) -> str:
        report = verify_path(self.run_folder)
        if report.exit_code:
            raise RunError("a checkpoint of the run does not verify", hint=f"osora ckpt verify {self.run_folder}")
        count = len(checkpoint_folders(self.run_folder))
        return f"{count} checkpoints, every byte against its digest: {report.verdict}"

    def _reconstruct(self, table: Path) -> str:
        checkpoints = checkpoint_folders(self.run_folder)
        before = self._measure(table, checkpoints[0], "before")
        after = self._measure(table, checkpoints[-1], "after")
        self.result.picture = after.picture
        self.result.psnr = {
            "constant": _mean(after, "constant_colour_psnr"),
            "block_means": _mean(after, "block_mean_psnr"),
            "before": _mean(before, "psnr"),
            "after": _mean(after, "psnr"),
        }
        p = self.result.psnr
        return (
            f"{len(after.clips)} windows not trained on: PSNR {p['before']:.2f} dB at {checkpoints[0].name}, "
            f"{p['after']:.2f} dB at {checkpoints[-1].name}; best constant colour {p['constant']:.2f} dB, block means "
            f"with as many numbers as the latent {p['block_means']:.2f} dB"
        )

    def _measure(self, table: Path, checkpoint: Path, name: str) -> ReconstructResult:
        overrides = [
            Override(("dataset", "data_path"), str(table), "--dataset.data-path"),
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


def _clips_outcome(clips: DemoClips) -> str:
    return f"{clips.train_clips} clips to train on, {clips.held_out_clips} held out, cut from {clips.source}"


def _meta_outcome(tables: tuple[Path, Path]) -> str:
    return f"frames, size and rate into {tables[0].name} and {tables[1].name}"


def _metrics(run: Path) -> list[str]:
    return (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()


def _last_step(run: Path) -> int:
    """The last update in metrics.jsonl; a line that the kill cut does not count."""
    for line in reversed(_metrics(run)):
        try:
            return int(json.loads(line)["step"])
        except ValueError:
            continue
    return 0


def _mean(result: ReconstructResult, name: str) -> float:
    value = result.mean[name]
    if value is None:
        raise RunError(f"the reconstruction has no {name}", hint=f"its numbers: {result.metrics}")
    return value


def _name(path: Any) -> str:
    return Path(path).name if path else "nothing"
