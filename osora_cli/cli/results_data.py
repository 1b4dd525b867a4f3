"""Results of `osora data cache` and `osora data latent-stats` as lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from osora_cli.cli.results import SHOWN, duration, table

_MIB = 2**20


def cache_lines(result: Mapping[str, Any]) -> list[str]:
    """What was made and what was there already."""
    ranks = int(result.get("ranks") or 1)
    share = f", of this process's share among {ranks}" if ranks > 1 else ""
    unreadable = len(result["unreadable"])
    return table(
        [
            ("cache", result["cache"]),
            ("latents", f"{result['clips_made']} made, {_there(result, 'clips', unreadable)} there already{share}"),
            ("captions", f"{result['captions_made']} made, {_there(result, 'captions', 0)} there already{share}"),
            ("left out", f"{unreadable} clips that cannot be read" if unreadable else None),
            ("written", f"{result['bytes'] / _MIB:.1f} MiB"),
            ("time", duration(float(result["seconds"]))),
        ]
    )


def _there(result: Mapping[str, Any], what: str, left_out: int) -> int:
    return max(0, int(result[what]) - int(result[f"{what}_made"]) - left_out)


def latent_lines(result: Mapping[str, Any]) -> list[str]:
    """Mean, deviation and the factors for the config; the channels that are furthest from the rest."""
    channels = result["channels"]
    stds = sorted(channel["std"] for channel in channels)
    factors = ", ".join(f"ae.{name}: {value:g}" for name, value in result["ae"].items())
    odd = sorted(range(len(channels)), key=lambda c: -abs(channels[c]["std"] - stds[len(stds) // 2]))[: min(3, SHOWN)]
    named = ", ".join(f"{c} (mean {channels[c]['mean']:.3g}, deviation {channels[c]['std']:.3g})" for c in odd)
    return table(
        [
            ("clips", f"{result['clips']}, {result['frames']} frames"),
            ("values", f"{result['values']} in {len(channels)} channels"),
            ("mean", f"{result['mean']:.6g}"),
            ("deviation", f"{result['std']:.6g}, by channel {stds[0]:.3g} to {stds[-1]:.3g}"),
            ("furthest channels", named),
            ("for the config", factors),
            ("as it is now", f"latents have a deviation of {result['present_std']:.4g}"),
            ("written", result["written"]),
            ("time", duration(float(result["seconds"]))),
        ]
    )
