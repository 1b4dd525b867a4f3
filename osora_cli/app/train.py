"""Training: from a config to a finished run. What is trained is a `Training`, looked up by its command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from osora_cli.app.dry_run.fit import device_bytes, fit_warning
from osora_cli.app.observers import make_observers
from osora_cli.app.position import start_position
from osora_cli.app.recipes import check_training
from osora_cli.app.runs import RunPlan, plan_run, set_aside_later
from osora_cli.app.schedules import total_updates
from osora_cli.app.team import Team, agree_on_start, run_folder, share_data, shared_plan, team
from osora_cli.app.training import Training, WarmsUp
from osora_cli.app.vae.advice import WARNING
from osora_cli.checkpoint.comm import together
from osora_cli.checkpoint.layout import checkpoint_folders
from osora_cli.checkpoint.leftovers import clean_leftovers
from osora_cli.checkpoint.reader import CheckpointReader
from osora_cli.checkpoint.store import CheckpointStore, require_writer
from osora_cli.config.freeze import to_plain, write_config
from osora_cli.config.schema import TrainConfig
from osora_cli.data.loader import prepare_workers
from osora_cli.data.sampler import Position
from osora_cli.engine.base import Engine
from osora_cli.engine.native import make_engine
from osora_cli.engine.settings import MILLION, PluginSettings
from osora_cli.errors import Interrupted, UsageError
from osora_cli.report.base import ObserverGroup, RunStart
from osora_cli.report.console import ConsoleReport
from osora_cli.trainer.feed import Feed
from osora_cli.trainer.loop import LoopSettings, Outcome, Trainer
from osora_cli.trainer.numerics import keep_freed_memory, subnormals_flushed
from osora_cli.trainer.rng import seed_everything, seed_rank
from osora_cli.trainer.skips import skips_in
from osora_cli.trainer.state import Progress

SCHEMA_VERSION = 1
GIB = 2**30


@dataclass(frozen=True)
class TrainResult:
    """How a training ended.

    Attributes:
        run: the run's folder.
        steps: optimizer updates done in all.
        last_loss: loss of the last update; None if this call made none.
        checkpoint: the newest checkpoint of the run.
        seconds: time spent in the training loop.
    """

    run: Path
    steps: int
    last_loss: float | None
    checkpoint: Path | None
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "run": str(self.run),
            "steps": self.steps,
            "last_loss": self.last_loss,
            "checkpoint": str(self.checkpoint) if self.checkpoint else None,
            "seconds": round(self.seconds, 3),
        }


def train(
    command: str,
    config: TrainConfig,
    *,
    config_name: str,
    resume_auto: bool = False,
    load: Sequence[str] | None = None,
    quiet: bool = False,
    json_mode: bool = False,
) -> TrainResult:
    """Train from the start, or go on from the checkpoint that `load` names.

    Whatever can be wrong with the input is found before a folder is made and before the model is built.

    Args:
        command: `train vae` and so on: what the config is one of.
        resume_auto: go on if the run exists and has a checkpoint that verifies, else start.
        quiet, json_mode: only warnings and errors are said.

    Raises:
        OsoraError: with the exit code of its kind.
    """
    given = [config.load] if isinstance(config.load, str) else (config.load or [])

    def make_plan() -> RunPlan:
        return plan_run(
            outputs=config.outputs,
            exp_name=config.exp_name,
            command=command,
            config_name=config_name,
            load=given if load is None else load,
            resume_auto=resume_auto,
        )

    with team(config) as members:
        training = check_training(command, config)
        return run(training, shared_plan(members, make_plan), members, quiet=quiet or json_mode)


@subnormals_flushed()  # before torch has started its threads
def run(training: Training, plan: RunPlan, members: Team, *, quiet: bool) -> TrainResult:
    """Train in the planned folder. The input has been checked."""
    config = training.config
    share_data(training.sampler, members.ranks)
    reader = CheckpointReader(plan.start) if plan.start else None
    training.check_start(reader)
    agree_on_start(members, training.notes)
    position = start_position(config, training.sampler, reader)
    training.report.require_batches()  # after the position, which tells a table that has changed
    _check_something_left(config, plan, reader)
    require_writer(config.async_io_backend)
    engine = make_engine(
        engine=config.engine,
        plugin=config.plugin,
        dtype=config.dtype,
        device=config.device,
        deterministic=config.deterministic,
        ranks=members.ranks,
        settings=plugin_settings(config),
    )
    if engine.device.type == "cpu":
        keep_freed_memory()
    with run_folder(members, plan):
        if config.num_workers:
            prepare_workers()  # their server starts while the network is built
        return _train(training, plan, engine, reader, position, members, quiet=quiet)


def _check_something_left(config: TrainConfig, plan: RunPlan, reader: CheckpointReader | None) -> None:
    """To ask for fewer updates than are done is a slip. Exactly as many is a run that is complete."""
    done = reader.counters.actual_update_step if reader is not None else 0
    most = config.max_steps
    if most is not None and (done > most or (done == most and not plan.in_place)):
        raise UsageError(
            f"`max_steps` is `{most}`, and the checkpoint has {done} updates done already",
            where=str(plan.start),
            hint=f"--max-steps {done + most} for {most} more",
        )


def _train(
    training: Training,
    plan: RunPlan,
    engine: Engine,
    reader: CheckpointReader | None,
    position: Position,
    members: Team,
    *,
    quiet: bool,
) -> TrainResult:
    config = training.config
    observer = ObserverGroup([ConsoleReport()])
    if members.ranks.is_lead:
        observer = make_observers(config, plan.info.command, plan.folder, quiet=quiet)
    store: CheckpointStore | None = None
    feed: Feed | None = None
    try:
        if members.ranks.is_lead:
            _tell_fit(training, plan, engine, observer)
        seed_everything(config.seed)
        state = training.build(engine, reader)
        seed_rank(config.seed, engine.rank)
        plan.notes += [*training.notes, *state.task.notes(), *_engine_notes(config, engine)]
        progress = Progress()
        if reader is not None:
            progress = Progress.of(reader.counters)
            plan.notes += state.load(reader, engine.ranks, config.seed)
        feed = training.feed(engine, position)
        progress.epoch, progress.step = position.epoch, feed.start_step
        store = _store(config, plan, observer, members)
        when = "in the background" if config.async_io else "while the training waits"
        plan.notes.append(f"checkpoints: {when}, writer {store.writer_name}")
        _begin_records(training, plan, progress, observer, members)
        if isinstance(training, WarmsUp):
            training.warm_up(engine, state, lambda text: observer.on_event("note", text, {}))
        trainer = Trainer(
            settings=_loop_settings(config),
            engine=engine,
            state=state,
            feed=feed,
            store=store,
            observer=observer,
            provenance=_provenance(training, engine, plan),
            evaluator=training.evaluator(engine, state, plan.folder),
            progress=progress,
            skipped_before=skips_in(reader.small("sampler")) if reader else {},
            on_progress=members.progress,
        )
        outcome = trainer.run()
    except Interrupted as stop:
        if stop.at_once:
            feed = None  # its workers end when this process does; the store has given up
        raise
    finally:
        if feed is not None:
            feed.close()
        if store is not None:
            store.close()
        observer.close()
    return _result(plan, outcome)


def _tell_fit(training: Training, plan: RunPlan, engine: Engine, observer: ObserverGroup) -> None:
    """Warn of a training that its GPU will not hold while there is nothing on it yet."""
    warning = fit_warning(plan.info.command, training, engine.world_size, device_bytes(engine.device))
    if warning is not None:
        observer.on_event("warning", warning, {})


def _engine_notes(config: TrainConfig, engine: Engine) -> list[str]:
    notes = [f"engine {engine.name} on {engine.device}, compute in {config.dtype}, parameters and optimizer in fp32"]
    if engine.world_size == 1 and config.plugin != "none":
        notes.append(f"plugin {config.plugin}: one process, so nothing is sharded")
    if engine.world_size > 1:
        shared = {"ddp": "nothing", "zero1": "the optimizer", "zero2": "parameters, gradients and optimizer"}
        what = shared.get(engine.plugin, shared["zero2"])
        notes.append(f"plugin {config.plugin}: {engine.world_size} ranks, {what} sharded; other ranks log to ranks/")
    return [*notes, *engine.notes]


def plugin_settings(config: TrainConfig) -> PluginSettings:
    """`plugin_config` as the engine takes it."""
    given = config.plugin_config
    return PluginSettings(
        bucket_elements=given.reduce_bucket_size_in_m * MILLION,
        overlap_allgather=given.overlap_allgather,
        replicate=given.replicate,
        cpu_offload=given.cpu_offload,
        sp_size=given.sp_size,
        zero_stage=given.zero_stage,
    )


def _loop_settings(config: TrainConfig) -> LoopSettings:
    sizes = {size for lengths in config.bucket_config.values() for _, size in lengths.values()}
    return LoopSettings(
        seed=config.seed,
        epochs=config.epochs,
        max_steps=config.max_steps,
        accumulation=config.accumulation_steps,
        log_every=config.log_every,
        ckpt_every=config.ckpt_every,
        max_nonfinite=config.max_nonfinite_steps,
        on_save_error=config.on_save_error,
        batch_size=sizes.pop() if len(sizes) == 1 else None,
        ckpt_every_minutes=config.ckpt_every_minutes,
        eval_at_ends=config.eval.at_ends,
    )


def _store(config: TrainConfig, plan: RunPlan, observer: ObserverGroup, members: Team) -> CheckpointStore:
    return CheckpointStore(
        plan.folder,
        async_io=config.async_io,
        backend=config.async_io_backend,
        keep_n_latest=config.keep_n_latest,
        keep_every=config.keep_every,
        buffer_bytes=int(config.async_io_buffer_gib * GIB),
        protected=plan.start if plan.in_place else None,
        on_event=observer.on_save,
        comm=members.save_comm,
    )


def _begin_records(
    training: Training, plan: RunPlan, progress: Progress, observer: ObserverGroup, members: Team
) -> None:
    """From here on the run's records change: leftovers, what is newer than the start, config, metrics beyond it.

    Rank 0 alone changes them, the others wait for it.
    """
    if members.ranks.is_lead:
        _clear_folder(plan)
        _write_config(training, plan)
    together(members.comm, lambda: None)
    total = total_updates(training.config, training.sampler)
    observer.on_start(RunStart(plan.folder, progress.update, total, to_plain(training.config)))
    if plan.start is not None:
        plan.notes.insert(0, f"going on from {plan.start}: epoch {progress.epoch}, update {progress.update}")
    for note in plan.notes:
        kind = "warning" if note.startswith(WARNING) else "note"
        observer.on_event(kind, note.removeprefix(WARNING), {})


def _clear_folder(plan: RunPlan) -> None:
    """Remove what ended processes left, and set aside what is newer than the start."""
    removed = clean_leftovers(plan.folder)
    if removed:
        plan.notes.append(f"removed what an ended process had left: {', '.join(p.name for p in removed)}")
    if plan.in_place and plan.start is not None:
        moved = set_aside_later(plan.folder, plan.start)
        if moved:
            plan.notes.append(f"newer checkpoints were set aside, not deleted: {', '.join(moved)}")


def _write_config(training: Training, plan: RunPlan) -> None:
    config = training.config
    # How this call was started is not the run's config: a later resume must not repeat it.
    # Nor must it hang on the folder that it is started in.
    table = str(Path(str(config.dataset.data_path)).expanduser().resolve())
    dataset = config.dataset.model_copy(update={"data_path": table})
    once = {"load": None, "start_epoch": None, "start_step": None, "restart_disc": False}
    asked = {key: value for key, value in once.items() if key in type(config).model_fields}
    kept = config.model_copy(update={**asked, "dataset": dataset})
    write_config(kept, plan.folder, title=f"osora {plan.info.command}, run {plan.info.run_id}")


def _provenance(training: Training, engine: Engine, plan: RunPlan) -> dict[str, Any]:
    config = training.config
    return {
        "engine": engine.name,
        "plugin": config.plugin,
        "dtype": config.dtype,
        "run_id": plan.info.run_id,
        "command": plan.info.command,
        "table_digest": training.table.digest,
        "bucket_digest": training.sampler.bucket_digest,
        "seed": config.seed,
        "resumed_from": plan.start.name if plan.start else None,
    }


def _result(plan: RunPlan, outcome: Outcome) -> TrainResult:
    folders = checkpoint_folders(plan.folder)
    return TrainResult(
        run=plan.folder,
        steps=outcome.progress.update,
        last_loss=outcome.last_loss,
        checkpoint=folders[-1] if folders else None,
        seconds=outcome.seconds,
    )
