"""Results as lines of text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

SHOWN = 10  # of things that were left out; the rest is counted


def table(pairs: Sequence[tuple[str, Any]]) -> list[str]:
    """`label  value` lines, the labels padded; pairs without a value are left out."""
    shown = [(label, value) for label, value in pairs if value is not None]
    width = max((len(label) for label, _ in shown), default=0)
    return [f"{label:<{width}}  {value}" for label, value in shown]


def duration(seconds: float) -> str:
    """`12.3 s`, `4 min 05 s`, `2 h 03 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours} h {minutes_left:02d} min" if hours else f"{minutes} min {rest:02d} s"


def size(count: int) -> str:
    """`12.9 GB`, `3.4 MB`: in powers of ten."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} bytes"


def train_lines(result: Mapping[str, Any]) -> list[str]:
    """How a training ended."""
    loss = result.get("last_loss")
    return table(
        [
            ("run", result.get("run")),
            ("updates", result.get("steps")),
            ("last loss", None if loss is None else f"{loss:.6g}"),
            ("checkpoint", result.get("checkpoint")),
            ("time", duration(float(result.get("seconds") or 0.0))),
        ]
    )


def reconstruct_lines(result: Mapping[str, Any]) -> list[str]:
    """The mean numbers of a reconstruction, and where all of it lies."""
    mean = result.get("mean") or {}
    clips, left_out = result.get("clips") or [], result.get("left_out") or []
    lines = table(
        [
            ("clips", f"{len(clips)}" + (f", {len(left_out)} left out" if left_out else "")),
            ("weights", result.get("weights")),
            ("PSNR", _number(mean.get("psnr"), "dB, mean over clips")),
            ("  best constant colour", _number(mean.get("constant_colour_psnr"), "dB")),
            ("  block means", _number(mean.get("block_mean_psnr"), "dB, as many numbers as the latent")),
            ("SSIM", _number(mean.get("ssim"), "", digits=4)),
            ("LPIPS", _number(mean.get("lpips"), "", digits=4)),
            ("flicker", _number(mean.get("flicker"), "of [0, 1], error of frame differences", digits=4)),
            ("checkerboard", _checkerboard(result)),
            ("picture", result.get("picture")),
            ("numbers", result.get("metrics")),
            ("time", duration(float(result.get("seconds") or 0.0))),
        ]
    )
    lines += [f"left out: {clip['path']}: {clip['reason']}" for clip in left_out[:SHOWN]]
    if len(left_out) > SHOWN:
        lines.append(f"left out: {len(left_out) - SHOWN} more, in {result.get('metrics')}")
    return lines


def _checkerboard(result: Mapping[str, Any]) -> str | None:
    """The energy at the up-sampling period, in space and time."""
    mean, periods = result.get("mean") or {}, (result.get("protocol") or {}).get("checkerboard_periods") or {}
    parts = []
    for axis, unit, short in (("space", "pixels", "px"), ("time", "frames", "frames")):
        share, ratio = mean.get(f"checkerboard_{axis}"), mean.get(f"checkerboard_{axis}_ratio")
        if isinstance(share, float) and isinstance(ratio, float):
            period = f"{periods.get(unit)} {short}"
            parts.append(f"{100 * share:.2f} % of the error at {period}, {ratio:.2f} x its surroundings")
    return "; ".join(parts) or None


def _number(value: Any, unit: str, digits: int = 2) -> str | None:
    if value is None:
        return None
    text = f"{value:.{digits}f}" if isinstance(value, (int, float)) else str(value)
    return f"{text} {unit}".rstrip()


def verify_lines(result: Mapping[str, Any]) -> list[str]:
    """The verdict on a checkpoint with its checks; of a run, a line for each checkpoint and the one to resume from."""
    checkpoints = result.get("checkpoints")
    if checkpoints is None:
        return [f"{result['verdict']}  {result['path']}", *_checks(result, passed=True)]
    lines = []
    for checkpoint in checkpoints:
        lines += [f"{checkpoint['verdict']}  {checkpoint['path']}", *_checks(checkpoint, passed=False)]
    if not checkpoints:
        lines.append("no checkpoint")
    lines.append(f"verdict: {result['verdict']}")
    lines.append(f"resume from: {result.get('resume_from') or 'nothing'}")
    return lines


def _checks(checkpoint: Mapping[str, Any], *, passed: bool) -> list[str]:
    lines = []
    for check in checkpoint.get("checks") or ():
        if passed or check["status"] != "passed":
            detail = f": {check['detail']}" if check.get("detail") else ""
            lines.append(f"  {check['status']:<7}  {check['name']}{detail}")
        for finding in check["findings"]:
            tensor = f" tensor `{finding['tensor']}`" if finding.get("tensor") else ""
            lines.append(f"           {finding['file'] or 'the folder'}:{tensor} {finding['what']}")
    return lines


def demo_lines(result: Mapping[str, Any]) -> list[str]:
    """What happened in the demo, a line for each step, the PSNR before and after, and the picture."""
    rows = result.get("rows") or []
    width = max((len(row["step"]) for row in rows), default=0)
    indent = " " * (width + 2)
    lines = []
    for row in rows:
        text = f"{row['outcome']} ({duration(row['seconds'])})"
        lines += textwrap.wrap(f"{row['step']:<{width}}  {text}", 100, subsequent_indent=indent, break_long_words=False)
    names = {
        "constant": "best constant colour of each clip",
        "block_means": "block means, as many numbers as the latent",
        "before": "first checkpoint",
        "after": "trained, first stage",
        "stage2": "after the second stage",
    }
    psnr = result.get("psnr") or {}
    lines += ["", "PSNR on clips that were not trained on, mean over clips:"]
    lines += ["  " + line for line in table([(names[key], _number(psnr.get(key), "dB")) for key in names])]
    lines += _diffusion_lines(result.get("diffusion") or {})
    paths = [(name, result.get(name)) for name in ("picture", "samples", "folder")]
    lines += ["", *table(paths)]
    return [*lines, f"done in {duration(float(result.get('seconds') or 0.0))}"]


def _diffusion_lines(scores: Mapping[str, float]) -> list[str]:
    """What the demo's diffusion model has learnt."""
    if not scores:
        return []
    shown = table(
        [
            ("before", _number(scores.get("flow_loss_before"), "")),
            ("after", _number(scores.get("flow_loss"), "")),
            ("samples to the clip that is meant", _number(scores.get("sample_psnr"), "dB PSNR")),
            ("samples to the nearest other clip", _number(scores.get("sample_psnr_others"), "dB PSNR")),
        ]
    )
    return ["", "Flow loss of four clips that were learnt by heart, and samples from their captions:"] + [
        "  " + line for line in shown
    ]


def meta_lines(rows: int, output: str, seconds: float, bad: Mapping[str, int], report: str | None) -> list[str]:
    """What a table of metadata holds, and how many files could not be read. `bad`: count by what became of them."""
    counts = [(what, count or None) for what, count in bad.items()]
    lines = table([("table", output), ("clips", rows), *counts, ("time", duration(seconds))])
    return [*lines, f"why, file by file: {report}"] if report else lines
