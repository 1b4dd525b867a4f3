"""The wording of a run's log, one function a kind of line. Numbers carry units."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from osora_cli.metrics.plateau import CONFIDENCE, MATERIAL, Trend
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


def evaluation_line(update: int, scores: Mapping[str, float]) -> str:
    """An evaluation: `scored at update 120: psnr_ema 21.34 dB, ...`; names as in metrics.jsonl."""
    parts = []
    for name, value in scores.items():
        if name == "time_s":
            parts.append(f"{value:.1f} s")
        else:
            parts.append(f"{name} {value:.2f} dB" if name.startswith("psnr") else f"{name} {value:.4g}")
    return f"scored at update {update}: {', '.join(parts)}"


def trend_line(found: Trend, loss: str, advice: str | None) -> str | None:
    """What a loss does at the end of its curve; None where there is too little of it to say anything."""
    if found.fall is None or found.low is None or found.high is None:
        return None
    over = f"over updates {found.first} to {found.last}"
    low, high = (-found.high, -found.low) if found.status == "rising" else (found.low, found.high)
    band = f"{CONFIDENCE:.0%}: {100 * low:.2g} to {100 * high:.2g}"
    rate = f"by {100 * abs(found.fall):.2g} % per 1,000 updates ({band}) {over}"
    if found.status == "falling":
        return f"{loss} is still falling {rate}"
    if found.status == "rising":
        return f"{loss} is rising {rate}"
    if found.status == "flat":
        then = f": {advice}" if advice else ""
        return f"{loss} is flat since update {found.since}, it fell by less than {MATERIAL:.0%} {over}{then}"
    between = f"by {100 * low:.2g} to {100 * high:.2g} % per 1,000 updates ({CONFIDENCE:.0%}; below 0 it rises)"
    return f"no telling yet whether {loss} still falls: {between} {over}"


def save_line(event: SaveEvent) -> str:
    """A stage of a save. The words of the committed line are fixed: people search logs for them."""
    if event.counters is None:
        return (
            f"Removed checkpoint {event.path}" if event.error is None else f"cannot remove {event.path}: {event.error}"
        )
    c = event.counters
    where = f"epoch {c.epoch}, step {c.step}, global_step {c.actual_update_step}"
    if event.kind == "submitted":
        return f"Saving checkpoint at {where} to {event.path}, in flight"
    if event.kind == "failed":
        return f"the save at {where} to {event.path} failed: {event.error or 'no reason known'}"
    rate = f", {event.bytes / GB / event.seconds:.2f} GB/s" if event.seconds > 0 else ""
    facts = f"{event.bytes / GB:.3f} GB, {event.seconds:.2f} s{rate}, stall {event.stall_seconds:.3f} s"
    return f"Saved checkpoint at {where} to {event.path} ({facts})"


def event_line(kind: str, text: str) -> str:
    return text if kind == "note" else f"{kind}: {text}"
