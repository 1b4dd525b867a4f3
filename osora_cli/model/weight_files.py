"""What files hold in the way of weights: names and shapes first, values when they are asked for."""

from __future__ import annotations

import json
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from osora_cli.errors import CheckpointError

_PICKLED = (".pt", ".pth", ".bin", ".ckpt")
_SAFETENSORS = ".safetensors"
# Levels that training scripts put around a state dict.
_LEVELS = ("state_dict", "model", "ema")
_HEADER_LENGTH = 8


@dataclass(frozen=True)
class Stored:
    """A tensor of a file: its key as it stands there, its shape, and how to get it."""

    key: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def open_weights(path: Path, stack: ExitStack, *, ema: bool = False) -> list[Stored]:
    """All tensors of a file or folder; what is opened for them is closed with `stack`.

    Args:
        path: a safetensors file; a .pt, .pth, .bin or .ckpt file, unpickled with nothing but tensors and plain values
            (a level named `state_dict`, `model` or `ema` is opened); an index; a folder with one index, or with one
            such file; a checkpoint, whose `model/` is one; a run, by the checkpoint that its `latest` names.
        ema: of a checkpoint the average of weights, and of a torch file the level `ema`.

    Raises:
        CheckpointError: nothing there is weights, files are missing, damaged or something else, a name in an index
            leads elsewhere, or two files hold one tensor.
    """
    held: dict[str, Stored] = {}
    for file in _files(path, ema):
        for stored in _open_file(file, stack, ema):
            if stored.key in held:
                raise CheckpointError(f"`{path}` holds `{stored.key}` twice, the second time in `{file.name}`")
            held[stored.key] = stored
    return list(held.values())


def _files(path: Path, ema: bool) -> list[Path]:
    """The files that together are the weights."""
    if not path.exists():
        raise CheckpointError(f"the weights `{path}` do not exist")
    if path.suffix == ".json":
        return _of_index(path)
    if path.is_file():
        return [path]
    latest = path / "latest"
    if latest.is_file():
        name = latest.read_text(encoding="utf-8").strip()
        _check_beside(name, latest)
        return _files(path / name, ema)
    if ema:
        return [_average(path)]
    folder = path / "model" if (path / "model").is_dir() else path
    indexes = sorted(folder.glob("*.index*.json"))
    if len(indexes) > 1:
        raise CheckpointError(f"`{folder}` has {len(indexes)} indexes: {', '.join(p.name for p in indexes)}")
    if indexes:
        return _of_index(indexes[0])
    files = [p for p in sorted(folder.iterdir()) if p.suffix == _SAFETENSORS or p.suffix in _PICKLED]
    if len(files) != 1:
        names = f": {', '.join(p.name for p in files)}" if files else ""
        raise CheckpointError(
            f"`{folder}` has no index, and {len(files)} files that may be weights{names}",
            allowed=f"one index, or one file {_SAFETENSORS}, {', '.join(_PICKLED)}",
        )
    return files


def _average(folder: Path) -> Path:
    for name in ("ema.safetensors", "ema.pt"):
        if (folder / name).is_file():
            return folder / name
    raise CheckpointError(f"`{folder}` has no average of weights", allowed="ema.safetensors or ema.pt in it")


def _of_index(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError, OSError) as error:
        raise CheckpointError(f"`{index}` is no index of weights: {what_it_is(index) or error}") from error
    for name in names:
        _check_beside(name, index)
    missing = sorted(name for name in names if not (index.parent / name).is_file())
    if missing:
        raise CheckpointError(f"`{index.parent}` lacks {len(missing)} files of its index: {', '.join(missing)}")
    return [index.parent / name for name in sorted(names)]


def _check_beside(name: Any, source: Path) -> None:
    # An index comes with the weights: it must not lead to other files of the machine.
    if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
        raise CheckpointError(f"`{source}` names `{name}`, which is not beside it")


def _open_file(path: Path, stack: ExitStack, ema: bool) -> Iterable[Stored]:
    if path.suffix not in _PICKLED:
        return _open_safetensors(path, stack)
    state = _unpickle(path, ema)
    return [Stored(str(key), tuple(value.shape), _given(value)) for key, value in state.items()]


def _given(value: Tensor) -> Callable[[], Tensor]:
    return lambda: value


def _open_safetensors(path: Path, stack: ExitStack) -> list[Stored]:
    try:
        file = stack.enter_context(safe_open(path, framework="pt"))
        return [
            Stored(key, tuple(file.get_slice(key).get_shape()), _reader(path, file, key))
            for key in file.keys()  # noqa: SIM118 - not a mapping
        ]
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"`{path}` is no safetensors file: {what_it_is(path) or error}") from error


def _reader(path: Path, file: Any, key: str) -> Callable[[], Tensor]:
    def read() -> Tensor:
        try:
            value: Tensor = file.get_tensor(key)
            return value
        except (OSError, SafetensorError, ValueError) as error:
            raise CheckpointError(f"`{key}` cannot be read from `{path}`: {error}") from error

    return read


def _unpickle(path: Path, ema: bool) -> Mapping[Any, Tensor]:
    try:
        # A zip archive is mapped into memory; torch's older format has to be read whole.
        with warnings.catch_warnings():  # of pickles that it may not read: what comes of it is told
            warnings.simplefilter("ignore", UserWarning)
            data = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except UnpicklingError as error:  # torch's own words advise to run what is in there
        reason = (
            what_it_is(path) or "it is no torch file of tensors and plain values alone, and other pickles can run code"
        )
        raise CheckpointError(f"`{path}` cannot be read as weights: {reason}") from error
    except Exception as error:  # torch raises whatever its readers do
        reason = what_it_is(path) or (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"`{path}` cannot be read as weights: {reason}") from error
    levels = tuple(reversed(_LEVELS)) if ema else _LEVELS
    while inner := [data[n] for n in levels if isinstance(data, Mapping) and isinstance(data.get(n), Mapping)]:
        data = inner[0]
    if not isinstance(data, Mapping) or not data or not all(isinstance(v, Tensor) for v in data.values()):
        raise CheckpointError(f"`{path}` holds no state dict", allowed="tensors by name, perhaps under `state_dict`")
    return data


def what_it_is(path: Path) -> str | None:
    """What often lies where weights should, or None."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(200)
    except OSError as error:
        return str(error)
    if size == 0:
        return "it is empty"
    if head.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, not the file itself (`git lfs pull` gets it)"
    if head.lstrip()[:1] == b"<":
        return "it is a web page"
    if not any(head):
        return "it begins with zeros"
    if head.startswith(b"PK") and not zipfile.is_zipfile(path):
        return f"it is cut short: a zip archive without its end, {size} bytes"
    return _cut_safetensors(path, size) if path.suffix == _SAFETENSORS else None


def _cut_safetensors(path: Path, size: int) -> str | None:
    """Whether the header speaks of more bytes than there are."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_HEADER_LENGTH), "little")
        if _HEADER_LENGTH + length > size:
            return f"it is cut short, or of another kind: {size} bytes, the header alone would take {length}"
        try:
            header = json.loads(file.read(length))
            end = max((v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            return None
    whole = _HEADER_LENGTH + length + int(end)
    return f"it is cut short: {size} of {whole} bytes" if size < whole else None
