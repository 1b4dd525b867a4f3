"""The one training loop: order, counters, saving, reporting. What a step means is the task's affair."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from osora_cli.checkpoint.store import CheckpointStore
from osora_cli.data.loader import ClipBatch
from osora_cli.engine.base import Engine, UpdateResult
from osora_cli.errors import OsoraError, RunError, SetupError
from osora_cli.report.base import Observer
from osora_cli.trainer.clock import SaveClock
from osora_cli.trainer.evaluation import Evaluator
from osora_cli.trainer.feed import Feed
from osora_cli.trainer.meter import Meter
from osora_cli.trainer.saving import RunState
from osora_cli.trainer.signals import Signals
from osora_cli.trainer.skips import Skips
from osora_cli.trainer.state import Progress
from osora_cli.trainer.stopping import cut_short, stopped
from osora_cli.trainer.task import StepContext
from osora_cli.trainer.wishes import Wishes


@dataclass(frozen=True)
class LoopSettings:
    """How long to train, and how often to log and save. Counts are optimizer updates."""

    seed: int
    epochs: int
    max_steps: int | None
    accumulation: int
    log_every: int
    ckpt_every: int
    max_nonfinite: int
    on_save_error: str
    batch_size: int | None
    ckpt_every_minutes: float | None = None
    eval_at_ends: bool = True


@dataclass
class Outcome:
    """How a run ended: the counters, the last update's loss, and the seconds spent in the loop."""

    progress: Progress
    last_loss: float | None
    seconds: float


@dataclass
class Trainer:
    """Runs a task over a feed until the run's end, a signal, or an error."""

    settings: LoopSettings
    engine: Engine
    state: RunState
    feed: Feed
    store: CheckpointStore
    observer: Observer
    provenance: dict[str, Any]
    evaluator: Evaluator | None = None
    progress: Progress = field(default_factory=Progress)
    skipped_before: Mapping[str, int] = field(default_factory=dict)
    on_progress: Callable[[int | None], object] = lambda update: None
    """Told the updates done after each micro-batch: a sign that this rank moves. None: before what may take long."""

    def __post_init__(self) -> None:
        self._saved_update: int | None = self.progress.update if self.progress.update else None
        self._start_update = self.progress.update
        self._clock = SaveClock(self.settings.ckpt_every_minutes, self.settings.log_every, self.engine)
        # What a checkpoint says: micro-batches after the last update are not in the weights, a resume takes them again.
        self._at_update = replace(self.progress)
        self._last: tuple[Meter, dict[str, UpdateResult]] | None = None
        self._evaluated: int | None = None
        self._bad_rows: set[int] = set()
        self._skips = Skips(self.state.task.networks, self.skipped_before, self.engine.device)
        self._put_off = False  # a save was due while gradients were not finite

    def run(self) -> Outcome:
        started = time.perf_counter()
        if self.engine.device.type == "cuda":
            self.store.reserve(self.state.contents(self._at_update, {}, None, {}).sharded)
        with Signals() as local:
            try:
                self._run(Wishes(local, self.engine.ranks))
            except KeyboardInterrupt:
                update, saved = self._at_update.update, self.store.give_up()
                raise cut_short(update, saved, self._start_update, self.store.run_dir) from None
        return Outcome(self.progress, self._last_loss(), time.perf_counter() - started)

    # -- order ----------------------------------------------------------------------------------------------------

    def _limit(self) -> str:
        if self.settings.max_steps is None:
            return f", `epochs` is {self.settings.epochs}"
        return f", `max_steps` is {self.settings.max_steps}: a higher `--max-steps` goes on"

    def _run(self, signals: Wishes) -> None:
        if self._done(signals):
            self._event("note", f"nothing left to do: {self.progress.update} updates are done already{self._limit()}")
        else:
            self._check_room()
            if self.progress.update == 0 and self.settings.eval_at_ends:
                self._evaluate()
        self._train(signals)
        if signals.stop_code is None and self._last is not None and self.settings.eval_at_ends:
            self._evaluate()
        self._end(signals)

    def _train(self, signals: Wishes) -> None:
        meter, micro = Meter(), 0
        while not self._done(signals):
            for batch in self._epoch():
                meter.add(batch, self._micro_step(batch, micro))
                self._report_bad_clips(batch)
                self.progress.step += 1
                self.progress.global_step += 1
                micro += 1
                if micro == self.settings.accumulation:
                    self._update(meter, signals)
                    meter, micro = Meter(), 0
                    if self._done(signals):
                        return
        if micro:
            self._event("note", f"{micro} micro-batches were left over at the end, less than one update: not used")

    def _micro_step(self, batch: ClipBatch, micro: int) -> dict[str, torch.Tensor]:
        """Forward and backward; gradients travel between ranks with an update's last micro-batch only."""
        with ExitStack() as stack:
            if micro + 1 < self.settings.accumulation:
                for network in self.state.task.networks.values():
                    stack.enter_context(network.no_sync())
            values = self.state.task.micro_step(batch, self._context(micro))
        self.on_progress(self.progress.update)
        return values

    def _epoch(self) -> Iterator[ClipBatch]:
        """The rest of the current epoch; after it the next one begins."""
        if self.progress.step < self.feed.steps(self.progress.epoch):
            yield from self.feed.batches(self.progress.epoch, self.progress.step)
        self.progress.epoch += 1
        self.progress.step = 0

    def _done(self, signals: Wishes) -> bool:
        if signals.stop_code is not None:
            return True
        maximum = self.settings.max_steps
        return self.progress.epoch >= self.settings.epochs or (maximum is not None and self.progress.update >= maximum)

    def _context(self, micro: int) -> StepContext:
        s, ranks = self.settings, self.engine.ranks
        # Ranks that share a sample's tokens draw alike.
        return StepContext(s.seed, self.progress.update, micro, s.accumulation, ranks.data_rank, ranks.data_replicas)

    # -- an update ------------------------------------------------------------------------------------------------

    def _update(self, meter: Meter, signals: Wishes) -> None:
        self.store.before_update()
        update = self.progress.update
        results = self.state.task.update(update)
        if self.state.ema is not None:
            self.state.ema.update(results["model"].skipped)
        self._skips.add(results)
        self.progress.update += 1
        self._at_update = replace(self.progress)
        self._last = (meter, results)
        self._report(meter, results, update)
        if self.evaluator is not None and self.progress.update % self.evaluator.every == 0:
            self._evaluate()
        self._poll()
        signals.exchange()
        every = self.settings.ckpt_every
        if (
            signals.save_wanted
            or self._put_off
            or (every > 0 and self.progress.update % every == 0)
            or self._clock.is_up(self.progress.update)
        ):
            signals.saved()
            self._save_if_sound()

    def _report(self, meter: Meter, results: dict[str, UpdateResult], update: int) -> None:
        task = self.state.task
        head = {"step": self.progress.update, "epoch": self.progress.epoch, "lr": task.learning_rate(update)}
        for name, schedule in task.schedule_states(update).items():
            if name != "lr_scheduler":  # `disc_lr_scheduler`: logged as `lr_disc`
                head[f"lr_{name.removesuffix('_lr_scheduler')}"] = schedule["_last_lr"][0]
        self.observer.on_update(head)
        if self.progress.update % self.settings.log_every:
            return
        record = {**head, **meter.read(self.engine, results), **self._skips.counts()}
        self.observer.on_log(record)
        self._stop_if_stuck()

    def _evaluate(self) -> None:
        """Score the networks as they are, once an update."""
        update = self.progress.update
        if self.evaluator is None or self._evaluated == update:
            return
        self.on_progress(None)
        self.store.before_update()  # an evaluator may move weights about, and a save may still be copying them
        found = self.evaluator.evaluate(update)
        self._evaluated = update
        self.observer.on_evaluation(update, found.scores, found.pictures)

    def _stop_if_stuck(self) -> None:
        in_row = self._skips.in_row()
        if in_row >= self.settings.max_nonfinite:
            raise RunError(
                f"the gradients of {in_row} updates in a row were not finite, up to update {self.progress.update}",
                hint="lower `--lr`, or look at the clips of these updates in metrics.jsonl; "
                "the last checkpoint is from before them",
            )

    # -- saving ---------------------------------------------------------------------------------------------------

    def _save_if_sound(self) -> None:
        """Save, or put it off to the first update that takes effect.

        Weights that give no finite gradient may be spoilt: they must not push out the last good checkpoint.
        """
        put_off = self._skips.in_row() > 0
        if not put_off:
            self._save()
        else:
            self._stop_if_stuck()
            if not self._put_off:
                text = "a save is put off: the gradients of the last update were not finite"
                self._event("warning", f"update {self.progress.update}: {text}")
        self._put_off = put_off

    def _check_room(self) -> None:
        """A disk or buffers without room for a checkpoint are said now, not hours later."""
        shortage = self.store.shortage(self.state.held_bytes())
        if shortage is not None:
            self._event("warning", shortage)
        try:
            self.store.require_room(self.state.nbytes())
        except SetupError as error:
            if self.settings.on_save_error == "stop":
                raise
            self._event("warning", f"{error.message}: saves will fail until there is room")

    def _save(self) -> None:
        self.on_progress(None)
        self._guard_save(self._submit)

    def _submit(self) -> None:
        self._stop_if_stuck()
        at = self._at_update
        self._clock.saved()
        position = self.feed.state(at.epoch, at.step)
        position.update(self._skips.counts())
        self.store.save(self.state.contents(at, position, self.settings.batch_size, self.provenance))
        self._saved_update = at.update

    def _poll(self) -> None:
        self._guard_save(self.store.poll)

    def _guard_save(self, act: Callable[[], None]) -> None:
        """A failed save ends the run, or with `on_save_error: continue` is told and passed over."""
        try:
            act()
        except OsoraError as error:
            if self.settings.on_save_error == "stop":
                raise
            self._event("warning", f"a save failed and the run goes on: {error.message}")

    def _end(self, signals: Wishes) -> None:
        """The last save must succeed, whatever `on_save_error` says of those before it."""
        self.on_progress(None)
        signals.settle()
        update = self._at_update.update
        self._tell_what_ended_it(signals)
        if self._saved_update != update and update > 0:
            self._guard_save(self.store.finish)
            self._submit()
            if in_row := self._skips.in_row():
                text = "had no effect, for their gradients were not finite: the checkpoint may be of no use"
                self._event("warning", f"the last updates before the end ({in_row}) {text}")
        self.store.finish()
        if signals.stop_code is not None:
            raise stopped(signals.stop_code, update, self.store.run_dir)

    # -- telling --------------------------------------------------------------------------------------------------

    def _tell_what_ended_it(self, signals: Wishes) -> None:
        """A run that was asked for more updates than its epochs hold is not silent about it."""
        done, asked = self._at_update.update, self.settings.max_steps
        if signals.stop_code is None and asked is not None and done < asked:
            text = f"ended by `epochs` ({self.settings.epochs}), {done} updates of `max_steps` ({asked}) are done"
            self._event("warning", text)

    def _last_loss(self) -> float | None:
        if self._last is None:
            return None
        meter, results = self._last
        return float(meter.read(self.engine, results)["loss"])

    def _report_bad_clips(self, batch: ClipBatch) -> None:
        """Each clip once: a small table meets it again every epoch."""
        for what, clips in (("could not be read, another was taken", batch.replaced), ("is short", batch.shortened)):
            for row, reason in clips:
                if row not in self._bad_rows:
                    self._bad_rows.add(row)
                    count = f"{len(self._bad_rows)} clips so far"
                    self._event("warning", f"the clip of row {row} {what}: {reason} ({count})")

    def _event(self, kind: str, text: str) -> None:
        self.observer.on_event(kind, text, {})
