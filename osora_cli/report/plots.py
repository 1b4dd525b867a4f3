"""Plots of a run as PNG, with matplotlib's objects: no display, and nothing of its global state is touched."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from osora_cli.errors import SetupError
from osora_cli.report.history import History

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]

_SIZE = (9.0, 4.2)  # inches
_DPI = 100
_SMOOTHED = 50  # windows that a curve is averaged over
_LOSSES = ("loss", "rec_per_pixel", "perceptual", "kl", "disc_loss", "d_weight", "flow", "eval_loss")
_PSNR = (("eval/psnr_ema", "average of weights"), ("eval/psnr_raw", "weights"))
_YARDSTICKS = (
    ("eval/psnr_block_means", "block means, as many numbers", "--"),
    ("eval/psnr_constant_colour", "best constant colour", ":"),
)


def plots(history: History) -> dict[str, bytes]:
    """PNG of each plot that the run has numbers for, by name: losses, scores, learning_rate, save_stalls, step_time.

    Raises:
        SetupError: matplotlib is not installed.
    """
    drawers: dict[str, Callable[[Axes, History], bool]] = {
        "losses": _losses,
        "scores": _scores,
        "learning_rate": _learning_rate,
        "save_stalls": _save_stalls,
        "step_time": _step_time,
    }
    found = {name: _draw(draw, history) for name, draw in drawers.items()}
    return {name: image for name, image in found.items() if image is not None}


def _draw(draw: Callable[[Axes, History], bool], history: History) -> bytes | None:
    """One plot; None where `draw` has nothing to draw."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SetupError(f"plots need the package `matplotlib`: {error}", hint="pip install matplotlib") from error
    figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if not draw(axes, history):
        return None
    axes.set_xlabel("update")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def _finite(steps: list[int], values: list[float], *, positive: bool = False) -> tuple[Floats, Floats]:
    x, y = np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64)
    good = np.isfinite(y) & ((y > 0) if positive else True)
    return x[good], y[good]


def _losses(axes: Axes, history: History) -> bool:
    """Each loss, faint, and its mean over stretches; relative to its own first such mean, so that all fit one axis."""
    drawn = False
    for name in _LOSSES:
        x, y = _finite(*history.series(name), positive=True)
        if len(x) < 2:
            continue
        parts = np.array_split(np.arange(len(x)), min(_SMOOTHED, len(x)))
        means = np.array([y[part].mean() for part in parts])
        (line,) = axes.plot([x[part].mean() for part in parts], means / means[0], label=f"{name} / {means[0]:.4g}")
        axes.plot(x, y / means[0], color=line.get_color(), alpha=0.2, linewidth=0.6)
        drawn = True
    axes.set_yscale("log")
    axes.set_ylabel("relative to its start")
    axes.set_title("losses")
    found = history.trend()
    if found.status == "flat" and found.since is not None:
        axes.axvline(found.since, color="black", linestyle=":", label="flat from here")
    return drawn


def _scores(axes: Axes, history: History) -> bool:
    drawn = False
    for name, label in _PSNR:
        x, y = _finite(*history.series(name))
        if len(x):
            axes.plot(x, y, marker="o", markersize=3, label=label)
            drawn = True
    for name, label, style in _YARDSTICKS:
        _, y = _finite(*history.series(name))
        if len(y):
            axes.axhline(y[-1], linestyle=style, color="gray", label=f"{label}: {y[-1]:.2f} dB")
    axes.set_ylabel("PSNR, dB")
    axes.set_title("PSNR on the fixed validation clips")
    return drawn


def _learning_rate(axes: Axes, history: History) -> bool:
    x, y = _finite(*history.series("lr"))
    axes.plot(x, y)
    axes.set_ylabel("learning rate")
    axes.set_title("learning rate")
    return len(x) > 0


def _save_stalls(axes: Axes, history: History) -> bool:
    x, y = history.series("save/stall")
    axes.plot(x, y, marker="o", linestyle="", label="training stood still")
    axes.plot(*history.series("save/seconds"), marker="x", linestyle="", label="the save took")
    axes.set_ylabel("seconds")
    axes.set_ylim(bottom=0)
    axes.set_title("saves")
    return bool(x)


def _step_time(axes: Axes, history: History) -> bool:
    x, y = _finite(*history.series("step_s"), positive=True)
    axes.plot(x, y, linewidth=0.8, label="update")
    waits = _finite(*history.series("data_wait_s"))
    axes.plot(*waits, linewidth=0.8, label="of it waiting for data")
    if len(y):  # the first update holds start-up costs: it would flatten everything else
        axes.set_ylim(0, 1.5 * float(np.percentile(y, 99)))
    axes.set_ylabel("seconds")
    axes.set_title("time of an update")
    return len(x) > 0
