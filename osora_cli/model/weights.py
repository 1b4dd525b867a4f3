"""Weights from files into a network, with one readable report of what did not fit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from osora_cli.errors import CheckpointError
from osora_cli.model.hub import hub_download
from osora_cli.tensors import plain_key

HUB = "hf://"
_SHOWN = 20
_PICKLED = (".pt", ".pth", ".bin", ".ckpt")


@dataclass
class LoadReport:
    """What a file had for a network.

    Attributes:
        loaded: keys that were filled.
        missing: keys of the network that the file lacks.
        unexpected: keys of the file that the network lacks.
        misshapen: keys with the shape in the file and the one in the network.
    """

    source: str
    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return not (self.missing or self.unexpected or self.misshapen)

    def text(self) -> str:
        """All that did not fit, long lists cut with a count."""
        lines = [f"the weights in `{self.source}` are not those of this model"]
        lines += _listed("missing in the file", self.missing)
        lines += _listed("unknown to the model", self.unexpected)
        shapes = [f"{key}: {list(there)} in the file, {list(here)} in the model" for key, there, here in self.misshapen]
        lines += _listed("of another shape", shapes)
        return "\n  ".join(lines)


def load_weights(network: nn.Module, source: str | Path, strict: bool = True) -> LoadReport:
    """Fill a network from a safetensors file, a folder of shards, a checkpoint, a torch file, or the hub.

    Prefixes of wrappers are dropped from the keys; values are cast to the network's dtypes. Nothing is unpickled but
    tensors and plain values. A source is local unless it begins with `hf://` (`hf://org/repo/path/file`).

    Raises:
        CheckpointError: the source is missing or cannot be read, or with `strict` does not fit key for key.
    """
    path = _local(str(source))
    report = LoadReport(str(source))
    targets = network.state_dict()
    with torch.no_grad():
        for key, value in _tensors(path):
            key = plain_key(key)
            target = targets.get(key)
            if target is None:
                report.unexpected.append(key)
            elif target.shape != value.shape:
                report.misshapen.append((key, tuple(value.shape), tuple(target.shape)))
            else:
                target.copy_(value)
                report.loaded.append(key)
    seen = {*report.loaded, *(key for key, *_ in report.misshapen)}
    report.missing = [key for key in targets if key not in seen]
    if strict and not report.fits:
        raise CheckpointError(
            report.text(), where="from_pretrained", hint="`strict_load: false` takes what fits and leaves the rest"
        )
    return report


def _local(source: str) -> Path:
    if source.startswith(HUB):
        match = re.fullmatch(r"hf://([^/]+/[^/]+)/(.+)", source)
        if match is None:
            raise CheckpointError(f"`{source}` names no file of the hub", allowed="hf://org/repo/path/to/file")
        return hub_download(match[1], match[2])
    path = Path(source).expanduser()
    if not path.exists():
        raise CheckpointError(f"the weights `{source}` do not exist", where="from_pretrained")
    return path


def _tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    if path.is_dir():
        for shard in _shards(path):
            yield from _tensors(shard)
    elif path.suffix in _PICKLED:
        yield from _pickled(path).items()
    else:
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 - not a mapping
                    yield key, file.get_tensor(key)
        except (OSError, SafetensorError, ValueError) as error:
            raise CheckpointError(f"`{path}` is no safetensors file: {_what_it_is(path) or error}") from error


def _shards(folder: Path) -> list[Path]:
    """The files of a checkpoint's `model/`, of a folder with one index, or the one weights file of a folder."""
    if (folder / "model").is_dir():
        folder = folder / "model"
    indexes = sorted(folder.glob("*.index*.json"))
    if len(indexes) > 1:
        raise CheckpointError(f"`{folder}` has {len(indexes)} indexes: {', '.join(p.name for p in indexes)}")
    if not indexes:
        files = [p for p in sorted(folder.iterdir()) if p.suffix == ".safetensors" or p.suffix in _PICKLED]
        if len(files) != 1:
            raise CheckpointError(f"`{folder}` has no index, and {len(files)} files that may be weights")
        return files
    try:
        names = set(json.loads(indexes[0].read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"`{indexes[0]}` is no index of weights: {error}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"`{indexes[0]}` names `{name}`, which is not beside it")
        if not (folder / name).is_file():
            raise CheckpointError(f"`{folder / name}` is missing, `{indexes[0].name}` names it")
    return [folder / name for name in sorted(names)]


def _pickled(path: Path) -> Mapping[str, torch.Tensor]:
    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever its readers do
        reason = _what_it_is(path) or (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"`{path}` cannot be read as weights: {reason}") from error
    for level in ("state_dict", "model", "ema"):
        if isinstance(data, Mapping) and isinstance(data.get(level), Mapping):
            data = data[level]
    if not isinstance(data, Mapping) or not all(isinstance(v, torch.Tensor) for v in data.values()):
        raise CheckpointError(f"`{path}` holds no state dict")
    return data


def _what_it_is(path: Path) -> str | None:
    """What often lies where weights should, or None."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(200)
    except OSError:
        return None
    if size == 0:
        return "it is empty"
    if head.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, not the file itself"
    if head.lstrip()[:1] == b"<":
        return "it is a web page"
    if not any(head):
        return "it begins with zeros"
    return None


def _listed(what: str, items: list[str]) -> list[str]:
    if not items:
        return []
    more = [f"  and {len(items) - _SHOWN} more"] if len(items) > _SHOWN else []
    return [f"{len(items)} {what}:", *(f"  {item}" for item in items[:_SHOWN]), *more]
