"""The wording of a run's log, one function a kind of line. Numbers carry units."""

from __future__ import annotations

from datetime import timedelta

from osora_cli.report.base import Record, SaveEvent

GB = 1e9


# Key of a record, and how it stands in a line; in this order, left out where the record has no such number.
_PARTS: tuple[tuple[str, str], ...] = (
    ("loss", "loss {:.5g}"),
    ("lr", "lr {:.3g}"),
    ("grad_norm", "grad norm {:.5g}"),
    ("step_s", "{:.3f} s/update"),
    ("data_wait_s", "data wait {:.3f} s"),
    ("frames_per_s", "{:.4g} frames/s"),
    ("tokens_per_s", "{:.4g} tokens/s"),
    ("tflops", "{:.4g} TFLOP/s"),
    ("peak_tflops", "{:.4g} TFLOP/s possible"),
    ("peak_memory_gib", "peak memory {:.2f} GiB"),
)


def time_left(seconds: float) -> str:
    """`1:02:03`, or `2 days, 1:02:03`."""
    return str(timedelta(seconds=round(max(0.0, seconds))))


def update_line(record: Record, total: int | None, left: float | None) -> str:
    """A logged update: `update 120/2000, epoch 3: loss ..., lr ..., ...`."""
    parts = [wording.format(record[key]) for key, wording in _PARTS if isinstance(record.get(key), (int, float))]
    if record.get("skipped_updates"):
        parts.append(f"{record['skipped_updates']} non-finite updates skipped so far")
    if left is not None:
        parts.append(f"{time_left(left)} left")
    of_total = f"/{total}" if total else ""
    return f"update {record['step']}{of_total}, epoch {record['epoch']}: {', '.join(parts)}"


def save_line(event: SaveEvent) -> str:
    """A stage of a save. The words of the committed line are fixed: people search logs for them."""
    where = f"epoch {event.epoch}, step {event.step}, global_step {event.global_step}"
    if event.phase == "submitted":
        return f"Saving checkpoint at {where} to {event.path}, in flight"
    if event.phase == "failed":
        return f"the save at {where} to {event.path} failed: {event.reason or 'no reason known'}"
    facts = []
    if event.bytes is not None:
        facts.append(f"{event.bytes / GB:.3f} GB")
    if event.seconds is not None:
        facts.append(f"{event.seconds:.2f} s")
        if event.bytes is not None and event.seconds > 0:
            facts.append(f"{event.bytes / GB / event.seconds:.2f} GB/s")
    if event.stall is not None:
        facts.append(f"stall {event.stall:.3f} s")
    return f"Saved checkpoint at {where} to {event.path}" + (f" ({', '.join(facts)})" if facts else "")


def event_line(kind: str, text: str) -> str:
    return text if kind == "note" else f"{kind}: {text}"
