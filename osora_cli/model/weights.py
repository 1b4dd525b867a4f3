"""Weights from files into a network, with one readable report of what did not fit."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import nn

from osora_cli.errors import CheckpointError
from osora_cli.model.hub import hub_download
from osora_cli.model.weight_files import Stored, open_weights
from osora_cli.tensors import plain_key

HUB = "hf://"
Shape = tuple[int, ...]


@dataclass
class LoadReport:
    """What a file had for a network.

    Attributes:
        loaded: keys that were filled.
        missing: keys and shapes of the network that the file lacks.
        allowed_missing: those among them that the network can do without, not counted as missing.
        unexpected: keys and shapes of the file that the network lacks.
        misshapen: keys with the shape in the file and the one in the network.
        rearranged: keys of the network that are made of rows of others in the file.
    """

    source: str
    loaded: list[str] = field(default_factory=list)
    missing: dict[str, Shape] = field(default_factory=dict)
    allowed_missing: dict[str, Shape] = field(default_factory=dict)
    unexpected: dict[str, Shape] = field(default_factory=dict)
    misshapen: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)
    rearranged: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return not (self.missing or self.unexpected or self.misshapen)

    def text(self) -> str:
        """Every key that did not fit, with its shapes."""
        if self.fits:
            return f"all {len(self.loaded)} tensors loaded from `{self.source}`"
        lines = [f"the weights in `{self.source}` are not those of this model"]
        lines += _listed("missing in the file", {k: f"{list(s)}" for k, s in self.missing.items()})
        lines += _listed("unknown to the model", {k: f"{list(s)}" for k, s in self.unexpected.items()})
        shapes = {
            k: f"{list(there)} in the file, {list(here)} in the model" for k, (there, here) in self.misshapen.items()
        }
        return "\n  ".join(lines + _listed("of another shape", shapes))


def load_weights(network: nn.Module, source: str | Path, strict: bool = True, *, ema: bool = False) -> LoadReport:
    """Fill a network from a safetensors or torch file, an index, a folder of shards, a checkpoint, a run, or the hub.

    Levels that wrappers put into keys are dropped on both sides; values are cast to the network's dtypes. With
    `strict` nothing is touched unless everything fits.

    Args:
        network: on any device but "meta". The keys in its `optional_keys`, where it has such, may be missing in the
            source; they keep their values. Its `stored_rows(shapes)`, where it has such, says which of its tensors are
            made of rows of stored tensors that the source has in another layout.
        source: local unless it begins with `hf://` (`hf://org/repo/path/file`). What it may be: `open_weights`.
        strict: whether missing, unexpected and misshapen keys are errors; else what fits is loaded and reported.
        ema: take the average of weights that a checkpoint has beside them.

    Raises:
        CheckpointError: the source is missing, cannot be read or has values that are not finite, or with `strict` does
            not fit key for key.
        SetupError: the hub's client is not installed, or the hub does not give the file.
    """
    with ExitStack() as stack, torch.no_grad():
        targets, stored, report = _matched(network, source, stack, ema)
        if strict and not report.fits:
            raise CheckpointError(
                report.text(), where="from_pretrained", hint="`strict_load: false` takes what fits and leaves the rest"
            )
        for key in report.loaded:
            targets[key].copy_(_sound(stored[key].read(), key, source))
    return report


def _sound(value: torch.Tensor, key: str, source: str | Path) -> torch.Tensor:
    """The value, if it is not what a training that went wrong leaves behind."""
    # Formats of 8 bits have no such test in torch.
    if value.is_floating_point() and value.element_size() > 1 and not bool(torch.isfinite(value).all()):
        raise CheckpointError(
            f"the weights in `{source}` are spoilt: `{key}` holds values that are not finite", where="from_pretrained"
        )
    return value


def check_weights(network: nn.Module, source: str | Path, *, ema: bool = False) -> LoadReport:
    """What `load_weights` would find, from names and shapes alone; the network may be on "meta".

    Raises:
        CheckpointError, SetupError: as `load_weights`, but not for what does not fit.
    """
    with ExitStack() as stack:
        return _matched(network, source, stack, ema)[2]


def _matched(
    network: nn.Module, source: str | Path, stack: ExitStack, ema: bool
) -> tuple[dict[str, torch.Tensor], dict[str, Stored], LoadReport]:
    """The network's tensors, those of the source by the same keys, and how they fit."""
    report = LoadReport(str(source))
    targets = {plain_key(key): value for key, value in network.state_dict().items()}
    stored = {plain_key(tensor.key): tensor for tensor in open_weights(_local(str(source)), stack, ema=ema)}
    held = set(stored)
    stored = _rearranged(network, stored)
    report.rearranged = [key for key in stored if key not in held]
    _compare(report, {k: s.shape for k, s in stored.items()}, targets, getattr(network, "optional_keys", ()))
    return targets, stored, report


def _rearranged(network: nn.Module, stored: dict[str, Stored]) -> dict[str, Stored]:
    """What is stored, with the tensors that the network makes of others' rows in place of those others."""
    rows_of = getattr(network, "stored_rows", None)
    made: dict[str, list[tuple[str, int, int]]] = rows_of({k: s.shape for k, s in stored.items()}) if rows_of else {}
    used = {key for rows in made.values() for key, _, _ in rows}
    out = {key: tensor for key, tensor in stored.items() if key not in used}
    for key, rows in made.items():
        shape = (sum(stop - start for _, start, stop in rows), *stored[rows[0][0]].shape[1:])
        out[key] = Stored(key, shape, partial(_join, [(stored[source], start, stop) for source, start, stop in rows]))
    return out


def _join(rows: list[tuple[Stored, int, int]]) -> torch.Tensor:
    return torch.cat([stored.read()[start:stop] for stored, start, stop in rows])


def _compare(
    report: LoadReport, there: Mapping[str, Shape], here: Mapping[str, torch.Tensor], optional: Collection[str]
) -> None:
    report.unexpected = {key: shape for key, shape in there.items() if key not in here}
    for key, target in here.items():
        shape = tuple(target.shape)
        if key not in there:
            lacking = report.allowed_missing if key in optional else report.missing
            lacking[key] = shape
        elif there[key] != shape:
            report.misshapen[key] = (there[key], shape)
        else:
            report.loaded.append(key)


def _local(source: str) -> Path:
    if not source.startswith(HUB):
        return Path(source).expanduser()
    match = re.fullmatch(r"hf://([^/]+/[^/]+)/(.+)", source)
    if match is None:
        raise CheckpointError(f"`{source}` names no file of the hub", allowed="hf://org/repo/path/to/file")
    return hub_download(match[1], match[2])


def _listed(what: str, items: Mapping[str, str]) -> list[str]:
    return [f"{len(items)} {what}:", *(f"  {key} {text}" for key, text in items.items())] if items else []
