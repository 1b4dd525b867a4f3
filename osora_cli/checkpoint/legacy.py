"""What Open-Sora itself writes: checkpoints without a manifest, and `.bin` files that only torch reads.

torch is imported only where such a file has to be opened, and always with `weights_only=True`: a pickle that would
run code is a finding, not a program.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osora_cli.checkpoint import layout
from osora_cli.checkpoint.findings import Finding
from osora_cli.checkpoint.headers import Header
from osora_cli.checkpoint.layout import GROUPS
from osora_cli.checkpoint.steps import decode_step
from osora_cli.checkpoint.structure import Inspection, find_index, limited, read_index, step_findings

if TYPE_CHECKING:
    import torch


def load_plain(path: Path) -> Any:
    """torch.load of tensors and plain values only, mapped where the format allows it.

    Raises:
        ValueError: the file would run code, or is broken; the message says which.
        OSError: not readable.
    """
    import pickle

    import torch

    with path.open("rb") as file:
        zipped = file.read(4) == b"PK\x03\x04"
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        raise ValueError(f"is refused, it holds more than tensors and plain values: {_first_line(error)}") from None
    except OSError:
        raise
    except Exception as error:  # torch raises what it likes on broken input
        raise ValueError(f"cannot be read ({type(error).__name__}: {_first_line(error)})") from None


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    for line in text.splitlines():
        if "Unsupported" in line or "GLOBAL" in line:
            return line.strip()
    return text.splitlines()[0] if text else "no reason given"


def state_tensors(state: dict[Any, Any]) -> dict[str, torch.Tensor]:
    """{number: {step, exp_avg, exp_avg_sq}} of the synchronous mode as `state.{i}.{name}`, steps as 0-d F32."""
    import torch

    out: dict[str, torch.Tensor] = {}
    for number, values in state.items():
        for name, value in values.items():
            if not isinstance(value, torch.Tensor):
                value = torch.tensor(float(value))
            out[f"state.{number}.{name}"] = value.to(torch.float32).reshape(()) if name == "step" else value
    return out


def check_holes(i: Inspection) -> Iterator[Finding]:
    """Bytes that no write ever reached read as zeros and look like weights.

    A filesystem may punch real zeros, so this is evidence and no proof; with a manifest the digests decide instead.
    """
    for name, header in i.headers.items():
        path = i.path / name
        try:
            hole = _hole(path)
        except OSError:
            continue  # a filesystem that does not tell
        if hole is None:
            continue
        hit = [entry.key for entry in header.covering(*hole)]
        what = f"was never written from byte {hole[0]} to {hole[1]} (a hole, which reads as zeros)"
        if len(hit) > 1:
            what += f"; {len(hit)} tensors are hit, up to `{hit[-1]}`"
        yield Finding(name, hit[0] if hit else None, what)


def _hole(path: Path) -> tuple[int, int] | None:
    """The first hole of a file, None where all of it has data."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        begin = os.lseek(fd, 0, os.SEEK_HOLE) if size else size
        if begin >= size:
            return None
        try:
            return begin, os.lseek(fd, begin, os.SEEK_DATA)
        except OSError:  # ENXIO: a hole up to the end
            return begin, size
    finally:
        os.close(fd)


def check_pickles(i: Inspection) -> Iterator[Finding]:
    """Every `.bin`, schedule and `ema.pt` opens with tensors and plain values alone, and holds what it should."""
    for name, path in i.files():
        top = "/" not in name
        if not path.is_file() or not (name.endswith(".bin") or (top and name in (*layout.SMALL_NAMES, layout.EMA_PT))):
            continue
        try:
            content = load_plain(path)
        except ValueError as error:
            yield Finding(name, None, str(error))
            continue
        except OSError as error:
            yield Finding(name, None, f"cannot be read: {error.strerror}")
            continue
        if name == layout.EMA_PT:
            yield from _check_ema(i, content)


def _check_ema(i: Inspection, content: Any) -> Iterator[Finding]:
    """Under ZeRO Open-Sora's synchronous mode stores rank 0's flat part of each tensor, which nobody can load."""
    shapes = {e.key: e.shape for n, h in i.headers.items() if n.startswith("model/") for e in h.entries}
    if not isinstance(content, dict):
        yield Finding(layout.EMA_PT, None, "holds no table of tensors")
        return
    faults = []
    for key, tensor in content.items():
        shape = tuple(getattr(tensor, "shape", ()))
        wanted = shapes.get(str(key))
        if wanted is None or shape == wanted:
            continue
        flat = " (rank 0's flat part alone: it cannot be loaded)" if len(shape) == 1 else ""
        faults.append(Finding(layout.EMA_PT, str(key), f"has shape {list(shape)}, the model {list(wanted)}{flat}"))
    yield from limited(faults)
    for key in sorted(set(shapes) - set(map(str, content)))[:1]:
        yield Finding(layout.EMA_PT, key, "is missing", "missing")


def check_bin_shards(i: Inspection) -> Iterator[Finding]:
    """The `.bin` shards of the synchronous mode against their index, and the optimizer's step."""
    for name, group in GROUPS.items():
        folder = i.path / group.folder
        if not group.folder or not folder.is_dir() or any(folder.glob("*.safetensors")):
            continue
        try:
            weight_map = read_index(find_index(folder)[0])
            shards = {file: load_plain(folder / file) for file in sorted(set(weight_map.values()))}
        except (ValueError, OSError, IndexError):
            continue  # reported by the checks of indexes and pickles
        held = {file: {str(key) for key in content} for file, content in shards.items() if isinstance(content, dict)}
        absent = [(key, file) for key, file in weight_map.items() if key not in held.get(file, set())]
        yield from limited([Finding(f"{group.folder}/{file}", key, "is missing") for key, file in absent])
        if group.optimizer:
            try:
                steps = [_bin_step(value) for content in shards.values() for value in content.values()]
            except (ValueError, TypeError, AttributeError) as error:
                yield Finding(f"{group.folder}/{next(iter(shards), '')}", None, f"holds an optimizer step that {error}")
                continue
            yield from step_findings(i, name, group.folder, max((s for s in steps if s is not None), default=None))


def _bin_step(value: dict[str, Any]) -> float | None:
    step = value.get("step")
    if step is None:
        return None
    return float(step.item()) if hasattr(step, "item") else float(step)


def non_tensor_keys(header: Header) -> set[str]:
    """Keys whose bytes are a pickled plain value (HybridAdam's int `step`)."""
    import json

    try:
        keys = json.loads(header.metadata.get("non_tensor_keys", "[]"))
    except (ValueError, RecursionError):
        return set()
    return {str(key) for key in keys} if isinstance(keys, list) else set()


def pickled_step(data: bytes) -> float:
    """The step in a U8 tensor of pickled bytes."""
    return decode_step(data, "U8")
