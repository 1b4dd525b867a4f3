"""Many processes that become the ranks of one run: started by torchrun, by another launcher, or by `--nproc`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from osora_cli.engine.native import pick_device
from osora_cli.engine.ranks import SINGLE_RANK, Ranks
from osora_cli.engine.watch import Watch
from osora_cli.errors import Followed, Interrupted, OsoraError, RunError, SetupError

JOIN_TIMEOUT_S = 300
SAVE_TIMEOUT_S = 3600  # a save's ranks wait for the slowest disk
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_RECORDED = 20000
_DUMPS = "TORCH_NCCL_DUMP_ON_TIMEOUT"
_DUMP_S = 60.0
_DROP_S = 0.2
_LOST_WAIT_S = 3.0  # for the rank that is the cause to say so
# How the errors of a collective read whose other side is gone.
_LOST_WORDS = ("connection", "closed by peer", "timed out", "timeout", "gloo", "nccl", "broken pipe", "socket")


def launched() -> bool:
    """Whether a launcher has started this process as one of several."""
    return os.environ.get("WORLD_SIZE", "1") not in ("", "1")


@contextmanager
def joined(device: str, timeout_s: float) -> Iterator[Ranks]:
    """The ranks of this run, this process among them; alone, where no launcher has started several.

    Args:
        device: `auto`, `cpu` or `cuda`: NCCL where ranks have GPUs, gloo on the CPU.
        timeout_s: longest that a collective, or an update, may take.

    Raises:
        SetupError: a launcher's variable is missing, a rank without a GPU, or ranks that did not come.
    """
    if not launched():
        yield SINGLE_RANK
        return
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))
    place = pick_device(device, local_rank)
    yield _join(place, local_rank, timeout_s)
    # gloo's threads drop what the last collective used. torch 2.6 waits for them with Python's lock held, which they
    # need for that.
    time.sleep(_DROP_S)
    # Not after an error: with a rank gone the groups may never come apart, and the process ends anyway.
    dist.destroy_process_group()


def _join(place: torch.device, local_rank: int, timeout_s: float) -> Ranks:
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise SetupError(
            f"several processes were started, but {', '.join(missing)} is not set",
            where="the environment",
            hint="start them with `torchrun --nproc-per-node N -m osora_cli ...` or `--nproc N`",
        )
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = "gloo"
    if place.type == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(place)
        _record_flights()
    try:
        dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s))
        host_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=max(timeout_s, JOIN_TIMEOUT_S)))
        dist.barrier(group=host_group)
    except (RuntimeError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise SetupError(
            f"rank {rank} of {world_size} did not find the others: {first}",
            where=f"MASTER_ADDR {os.environ['MASTER_ADDR']}, MASTER_PORT {os.environ['MASTER_PORT']}",
        ) from error
    return Ranks(rank, world_size, local_rank, host_group, _store())


def _store() -> Store:
    """A way to the launcher's store of its own: the watching thread must not wait behind a collective's set-up."""
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=10),
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"osora/{os.environ.get('TORCHELASTIC_RUN_ID', 'run')}/{attempt}", store)


def _record_flights() -> None:
    """Have NCCL keep what each rank's last collectives were, and write it down when one takes too long."""
    os.environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", str(_RECORDED))
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(_RECORDED))
    os.environ.setdefault(_DUMPS, "1")


def record_flights_in(folder: str) -> None:
    """Where NCCL's records go: one file a rank. Without NCCL there are none."""
    if _DUMPS in os.environ:
        for name in ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE"):
            os.environ.setdefault(name, f"{folder}/nccl-trace-rank")


def save_group(ranks: Ranks) -> dist.ProcessGroup | None:
    """A gloo group for checkpoints, None for one process. All ranks call it."""
    if ranks.world_size == 1:
        return None
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=SAVE_TIMEOUT_S))


@contextmanager
def watched(ranks: Ranks, timeout_s: float) -> Iterator[Watch | None]:
    """While entered, a rank that fails or dies ends all, with one rank's message.

    An error that leaves is marked `speaks` if this rank is the one to say it; else it is a `Followed`.
    """
    if ranks.world_size == 1:
        yield None
        return
    # NCCL's own timeout comes first: it writes its record down and ends the process.
    watch = Watch(ranks, timeout_s + _DUMP_S if _DUMPS in os.environ else timeout_s)
    watch.start()
    try:
        try:
            yield watch
        except Interrupted as stop:
            if not stop.at_once:  # agreed on: all ranks end so
                _leave_together(ranks, watch)
            raise stop
        _leave_together(ranks, watch)
    except Interrupted:
        raise
    # From here on the watch goes on: whatever hangs while this rank is put away, it ends.
    except OsoraError as error:
        raise _settled(watch, ranks, error) from error
    except Exception as error:
        raise _settled(watch, ranks, _explained(watch, ranks, error)) from error


def _leave_together(ranks: Ranks, watch: Watch) -> None:
    """Nobody leaves, and takes the store along, while another still works."""
    dist.barrier(group=ranks.host_group)
    watch.stop()


def _explained(watch: Watch, ranks: Ranks, error: Exception) -> OsoraError:
    """A lost rank shows as an error of whatever collective was under way."""
    text = str(error).lower()
    if isinstance(error, RuntimeError) and any(word in text for word in _LOST_WORDS):
        first = str(error).strip().splitlines()[0]
        return RunError(
            f"rank {ranks.rank} of {ranks.world_size} lost another rank in update {watch.update + 1}: {first}",
            hint="a rank that was killed says nothing; look for the kernel's out-of-memory killer, "
            "then go on with `osora resume RUN`",
        )
    return OsoraError(
        f"internal error on rank {ranks.rank}: {type(error).__name__}: {error}",
        hint="run it again with `--debug` for the traceback",
    )


def _settled(watch: Watch, ranks: Ranks, error: OsoraError) -> OsoraError:
    """The error to raise here: this rank's own, or that it follows another's."""
    lost = isinstance(error, RunError) and "lost another rank" in error.message
    # What all ranks find out alike, rank 0 says.
    earlier = watch.failure(wait_s=_LOST_WAIT_S if lost else 1.0 if ranks.rank else 0.0)
    if earlier is None and not watch.post(error.message, error.exit_code):
        earlier = watch.failure()
    watch.wait_until_heard()
    if earlier is not None and earlier.rank != ranks.rank:
        return Followed(f"rank {earlier.rank}: {earlier.message}", earlier.exit_code)
    if ranks.rank and not lost:
        error.message = f"rank {ranks.rank}: {error.message}"
    error.speaks = True
    return error
