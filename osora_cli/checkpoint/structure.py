"""The structural checks of a checkpoint: all that can be told without reading the tensors. Knows no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from osora_cli.checkpoint import fsio, layout
from osora_cli.checkpoint.counters import Counters
from osora_cli.checkpoint.findings import Finding, Kind, Level
from osora_cli.checkpoint.headers import Header, HeaderError, layout_faults, read_header
from osora_cli.checkpoint.layout import GROUPS, GroupLayout
from osora_cli.checkpoint.manifest import LaterFormat, Manifest, ManifestError, parse_manifest
from osora_cli.checkpoint.steps import read_steps, step_entries

_MANY = 5  # findings of one sort per file before the rest is only counted


@dataclass
class Inspection:
    """What is known of a checkpoint so far. The checks fill it as they go."""

    path: Path
    level: Level
    counters: Counters | None = None
    manifest: Manifest | None = None
    headers: dict[str, Header] = field(default_factory=dict)
    spoiled: set[str] = field(default_factory=set)  # files that something was found to be wrong with
    bytes_read: int = 0

    @property
    def is_osoras(self) -> bool:
        """osora wrote it, even if its manifest is gone: only osora makes `rng/`."""
        return (self.path / layout.MANIFEST).exists() or (self.path / layout.RNG_DIR).is_dir()

    def files(self) -> Iterator[tuple[str, Path]]:
        """(path relative to the checkpoint, path) of all files but eval/ and the owner's."""
        for path in sorted(self.path.rglob("*")):
            name = path.relative_to(self.path).as_posix()
            if name.partition("/")[0] in (layout.EVAL, layout.OWNER):
                continue
            if path.is_symlink() or not path.is_dir():
                yield name, path


def limited(findings: list[Finding]) -> Iterator[Finding]:
    """The first few, then a count of the rest."""
    yield from findings[:_MANY]
    if len(findings) > _MANY:
        last = findings[-1]
        yield Finding(last.file, None, f"and {len(findings) - _MANY} more of the kind", last.kind)


def check_running_states(i: Inspection) -> Iterator[Finding]:
    """running_states.json parses and has its five fields."""
    name = layout.RUNNING_STATES
    try:
        i.counters = Counters.from_json(fsio.read_regular(i.path / name))
    except FileNotFoundError:
        yield Finding(name, None, "is missing", "missing")
    except ValueError as error:
        yield Finding(name, None, str(error))
    except OSError as error:
        yield Finding(name, None, f"cannot be read: {error.strerror}")


def check_name(i: Inspection) -> Iterator[Finding]:
    """The folder's name agrees with running_states.json."""
    if i.path.name.startswith(layout.STAGING_PREFIX):
        yield Finding("", None, "is the staging folder of a save that was never committed", "missing")
    numbers = layout.parse_folder_name(i.path.name)
    if numbers is None or i.counters is None:
        return
    told = (i.counters.epoch, i.counters.actual_update_step)
    if numbers != told:
        yield Finding(
            layout.RUNNING_STATES,
            None,
            f"is of epoch {told[0]}, update {told[1]}; the folder is named `{i.path.name}`",
        )


def check_manifest(i: Inspection) -> Iterator[Finding]:
    """The manifest is proven by its own digest, covers each of its files once, and is of this checkpoint."""
    name = layout.MANIFEST
    if not i.is_osoras:
        return
    try:
        i.manifest = parse_manifest(fsio.read_regular(i.path / name))
    except FileNotFoundError:
        yield Finding(name, None, "is missing", "missing")
        return
    except LaterFormat:
        raise
    except ManifestError as error:
        yield Finding(name, None, str(error))
        return
    except OSError as error:
        yield Finding(name, None, f"cannot be read: {error.strerror}")
        return
    if i.counters is not None and i.counters != i.manifest.counters:
        theirs = i.manifest.counters
        yield Finding(
            layout.RUNNING_STATES,
            None,
            f"has other counters than the manifest: update {i.counters.actual_update_step} here,"
            f" {theirs.actual_update_step} there" + ("" if _same_update(i.counters, theirs) else " (of another step)"),
        )
    for file, record in i.manifest.files.items():
        if _escapes(file):
            yield Finding(name, None, f"names `{file}`, a path outside of the folder")
        elif (gaps := record.gaps()) is not None:
            yield Finding(name, None, f"does not cover `{file}`: {gaps}")


def _same_update(a: Counters, b: Counters) -> bool:
    return a.actual_update_step == b.actual_update_step


def _escapes(name: str) -> bool:
    path = PurePosixPath(name)
    return path.is_absolute() or ".." in path.parts or "\\" in name or not name


def check_files(i: Inspection) -> Iterator[Finding]:
    """The files are those of the manifest, at their sizes; none lies outside of the folder."""
    present = dict(i.files())
    root = i.path.resolve()
    for name, path in present.items():
        # realpath, since a link that leads to itself makes resolve() fail before Python 3.13.
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root):
            yield Finding(name, None, "is a link to a file outside of the folder")
    if i.manifest is None:
        return
    for name, record in i.manifest.files.items():
        if _escapes(name):
            continue
        present.pop(name, None)
        found = i.path / name
        if not found.exists():
            yield Finding(name, None, "is missing", "missing")
        elif not found.is_file():
            yield Finding(name, None, "is no regular file")
        elif (size := found.stat().st_size) != record.size:
            state = "is empty (0 bytes)" if size == 0 else f"has {size} bytes"
            yield Finding(name, None, f"{state}, the manifest says {record.size}")
    present.pop(layout.MANIFEST, None)
    for name in present:
        inside = name.partition("/")[0] in {g.folder for g in GROUPS.values() if g.folder}
        what = "is not part of this checkpoint (the manifest does not list it)"
        yield Finding(name, None, what, "damage" if inside or name.endswith(".safetensors") else "note")


def without_bytes(i: Inspection, manifest: Manifest) -> set[str]:
    """Files whose bytes need not be read to know that they are not those of the manifest (`check_files` says why)."""

    def whole(name: str, size: int) -> bool:
        path = i.path / name
        return not _escapes(name) and path.is_file() and path.stat().st_size == size

    return {name for name, record in manifest.files.items() if not whole(name, record.size)}


def check_headers(i: Inspection) -> Iterator[Finding]:
    """Every safetensors file: header readable, offsets contiguous, file size exact."""
    for name, path in i.files():
        if not name.endswith(".safetensors") or not path.is_file():
            continue
        try:
            header = read_header(path)
        except HeaderError as error:
            yield Finding(name, None, str(error))
            continue
        except OSError as error:
            yield Finding(name, None, f"cannot be read: {error.strerror}")
            continue
        i.headers[name] = header
        faults = [Finding(name, tensor, what) for tensor, what in layout_faults(header, path.stat().st_size)]
        yield from limited(faults)


def check_indexes(i: Inspection) -> Iterator[Finding]:
    """In each folder of shards one index, which agrees with the headers both ways."""
    for group in GROUPS.values():
        folder = i.path / group.folder
        if group.folder and folder.is_dir():
            yield from _check_index(i, group, folder)


def find_index(folder: Path) -> list[Path]:
    """All that Open-Sora's loader takes for an index; there must be one."""
    return sorted(folder.glob("*.index.*json"))


def read_index(path: Path) -> dict[str, str]:
    """The weight map of an index: key (or parameter number) -> file name.

    Raises:
        ValueError: no index, or one that names a path instead of a file.
        OSError: not readable.
    """
    try:
        content: Any = json.loads(fsio.read_regular(path))
    except RecursionError as error:
        raise ValueError(f"is no JSON ({error})") from None
    except ValueError as error:
        raise ValueError(f"is no JSON ({error})") from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise ValueError("has no `weight_map` of names to files")
    for file in weight_map.values():
        if _escapes(file) or "/" in file:
            raise ValueError(f"names `{file}`, a path outside of its folder")
    return weight_map


def _check_index(i: Inspection, group: GroupLayout, folder: Path) -> Iterator[Finding]:
    found = find_index(folder)
    if not found:
        yield Finding(group.index or group.folder, None, "is missing", "missing")
        return
    names = [f"{group.folder}/{path.name}" for path in found]
    if len(found) > 1:
        yield Finding(names[1], None, f"is a second index beside `{found[0].name}`")
    try:
        weight_map = read_index(found[0])
    except ValueError as error:
        yield Finding(names[0], None, str(error))
        return
    except OSError as error:
        yield Finding(names[0], None, f"cannot be read: {error.strerror}")
        return
    for file in sorted(set(weight_map.values())):
        if not (folder / file).exists():
            yield Finding(f"{group.folder}/{file}", None, "is missing", "missing")
    for shard in sorted([*folder.glob("*.safetensors"), *folder.glob("*-[0-9]*.bin")]):
        if shard.name not in weight_map.values():
            yield Finding(f"{group.folder}/{shard.name}", None, f"is a shard that `{found[0].name}` does not list")
    yield from _both_ways(i, group, names[0], weight_map)


def _both_ways(i: Inspection, group: GroupLayout, index: str, weight_map: dict[str, str]) -> Iterator[Finding]:
    """Each name of the index is in its file, each tensor of a file is in the index."""
    held: dict[str, set[str]] = {}
    for name, header in i.headers.items():
        folder, _, file = name.rpartition("/")
        if folder == group.folder:
            held[file] = {_index_key(group, entry.key) for entry in header.entries}
    absent = [
        Finding(f"{group.folder}/{file}", key, f"is missing, `{index}` lists it here")
        for key, file in weight_map.items()
        if file in held and key not in held[file]
    ]
    extra = [
        Finding(f"{group.folder}/{file}", key, f"is not listed here by `{index}`")
        for file, keys in held.items()
        for key in sorted(keys)
        if file in weight_map.values() and weight_map.get(key) != file
    ]
    yield from limited(absent)
    yield from limited(extra)


def _index_key(group: GroupLayout, key: str) -> str:
    state = layout.parse_state_key(key) if group.optimizer else None
    return str(state[0]) if state else key


def check_optimizer(i: Inspection) -> Iterator[Finding]:
    """Every parameter has the same states, and the optimizer's own step is that of running_states.json."""
    for name, group in GROUPS.items():
        if group.optimizer and (i.path / group.folder).is_dir():
            yield from _same_states(i, group)
            yield from _check_steps(i, name, group)


def _same_states(i: Inspection, group: GroupLayout) -> Iterator[Finding]:
    states: dict[int, dict[str, tuple[int, ...]]] = {}
    where: dict[int, str] = {}
    for file, header in i.headers.items():
        if file.rpartition("/")[0] != group.folder:
            continue
        for entry in header.entries:
            state = layout.parse_state_key(entry.key)
            if state is None:
                yield Finding(file, entry.key, "is no optimizer state of the form `state.0.exp_avg`")
                continue
            states.setdefault(state[0], {})[state[1]] = entry.shape
            where[state[0]] = file
    every = set().union(*states.values()) if states else set()
    faults = []
    for number, held in states.items():
        for lacking in sorted(every - set(held)):
            faults.append(Finding(where[number], f"state.{number}.{lacking}", "is missing", "missing"))
        if "exp_avg" in held and "exp_avg_sq" in held and held["exp_avg"] != held["exp_avg_sq"]:
            what = f"has shape {list(held['exp_avg_sq'])}, exp_avg has {list(held['exp_avg'])}"
            faults.append(Finding(where[number], f"state.{number}.exp_avg_sq", what))
    yield from limited(faults)


def _check_steps(i: Inspection, name: str, group: GroupLayout) -> Iterator[Finding]:
    if any(file.rpartition("/")[0] == group.folder for file in i.spoiled):
        return  # what a damaged file says of its step tells nothing more
    highest: dict[str, float] = {}
    for file, header in sorted(i.headers.items()):
        if file.rpartition("/")[0] != group.folder or not step_entries(header):
            continue
        try:
            highest[file] = max(step for _, step in read_steps(i.path / file, header))
        except (ValueError, OSError) as error:
            yield Finding(file, None, f"holds an optimizer step that cannot be read: {error}")
            return
    if i.manifest is None:  # with one, digests tell which shard is of another save
        newest = max(highest.values(), default=0.0)
        for file, step in highest.items():
            if step != newest:
                yield Finding(file, None, f"is of optimizer step {int(step)}, other shards are of {int(newest)}")
    yield from step_findings(i, name, group.folder, max(highest.values(), default=None))


def step_findings(i: Inspection, group: str, folder: str, highest: float | None) -> Iterator[Finding]:
    """Compare the optimizer's step with running_states.json.

    A manifest knows by how much they differ by right (skipped updates, a discriminator that started later); without
    one the main optimizer must be at the run's own update.
    """
    if highest is None or i.counters is None:
        return
    if i.manifest is not None:
        lag = i.manifest.optimizer_lag.get(group)
    else:
        lag = 0 if group == "optimizer" else None
    if lag is not None and highest + lag != i.counters.actual_update_step:
        what = f"says update {i.counters.actual_update_step}, the optimizer in `{folder}/` is at {int(highest) + lag}"
        yield Finding(layout.RUNNING_STATES, None, what)


def check_log(i: Inspection) -> Iterator[Finding]:
    """The async log has a line for each file written in the background (without a manifest: exactly one)."""
    path = i.path / layout.ASYNC_LOG
    files = sum(name.endswith(".safetensors") for name, _ in i.files())
    if not path.is_file():
        if i.manifest is None and _written_in_background(i.path):
            told = f"is missing: {files} files were written in the background"
            yield Finding(layout.ASYNC_LOG, None, told, "missing")
        return
    lines = fsio.read_regular(path).decode(errors="replace").splitlines()
    done = sum(layout.ASYNC_LOG_LINE in line for line in lines)
    told = f"has {done} lines `{layout.ASYNC_LOG_LINE}` for {files} files"
    if done < files:
        yield Finding(layout.ASYNC_LOG, None, f"{told}: not all writes ended", "missing")
    elif done > files and i.manifest is None:
        yield Finding(layout.ASYNC_LOG, None, f"{told}: a file is lost, or several saves went into one folder")


def _written_in_background(path: Path) -> bool:
    """Only the asynchronous mode writes these two as safetensors."""
    return (path / "ema.safetensors").exists() or any((path / "optimizer").glob("optimizer-*.safetensors"))


def part_path(path: Path, part: str) -> Path | None:
    """The file or folder that a part stands for, None where it is not there."""
    if part == "ema":
        names = ["ema.safetensors", layout.EMA_PT]
    elif part in GROUPS:
        names = [GROUPS[part].folder or f"{GROUPS[part].stem}.safetensors"]
    else:
        names = [part]
    return next((path / name for name in names if (path / name).exists()), None)


def check_parts(i: Inspection) -> Iterator[Finding]:
    """Everything is there that the manifest (or, without one, the run's config) promises."""
    kind: Kind = "missing"
    for part in promised_parts(i):
        if part_path(i.path, part) is None:
            group = GROUPS.get(part)
            file = group.folder or f"{group.stem}.safetensors" if group else part
            yield Finding(file, None, f"is missing: the checkpoint promises `{part}`", kind)


def promised_parts(i: Inspection) -> list[str]:
    """The parts that must be there."""
    if i.manifest is not None:
        return sorted({*i.manifest.parts, *i.manifest.provenance.get("promised_parts", [])})
    parts = ["model" if not (i.path / "lora").is_dir() else "lora", "optimizer"]
    try:
        config: Any = json.loads(fsio.read_regular(i.path.parent / "config.txt"))
    except (OSError, ValueError, RecursionError):
        return parts
    if isinstance(config, dict):
        parts += ["ema"] if config.get("ema_decay") is not None else []
        parts += ["discriminator", "disc_optimizer"] if config.get("discriminator") else []
    return parts
