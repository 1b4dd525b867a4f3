"""What a disk may hold after a power cut, from the recorded operations of a process.

The model is harder than any journaling filesystem in use: until a file is synced each write to it (and each change of
its size) may be lost or kept by itself; until a folder is synced its changes of names may be lost from any one on,
each folder by itself. A sync of a file says nothing of its name.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from support.io_shim import Operation

Tree = dict[str, bytes | None]  # path below the root -> content, None for a folder


@dataclass
class File:
    """Contents that are on the disk, and what was done since the last sync: (offset, bytes) or a new size."""

    data: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes] | int] = field(default_factory=list)

    def sync(self) -> None:
        for change in self.pending:
            _apply(self.data, change)
        self.pending.clear()


@dataclass
class Folder:
    """Names that are on the disk, and the changes since: each sets several names at once."""

    names: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[dict[str, File | Folder | None]] = field(default_factory=list)

    def now(self, kept: int | None = None) -> dict[str, File | Folder]:
        names = dict(self.names)
        for change in self.pending[:kept]:
            for name, node in change.items():
                if node is None:
                    names.pop(name, None)
                else:
                    names[name] = node
        return names

    def sync(self) -> None:
        self.names = self.now()
        self.pending.clear()


def _apply(data: bytearray, change: tuple[int, bytes] | int) -> None:
    if isinstance(change, int):
        if change < len(data):
            del data[change:]
        else:
            data.extend(bytes(change - len(data)))
        return
    offset, written = change
    if len(data) < offset + len(written):
        data.extend(bytes(offset + len(written) - len(data)))
    data[offset : offset + len(written)] = written


class Disk:
    """A folder's tree while the operations go on."""

    def __init__(self, root: Path) -> None:
        self._prefix = str(root)
        self.root = _load(root)

    def _find(self, path: str) -> File | Folder:
        node: File | Folder = self.root
        for part in PurePosixPath(path[len(self._prefix) :].lstrip("/")).parts:
            assert isinstance(node, Folder)
            node = node.now()[part]
        return node

    def _parent(self, path: str) -> tuple[Folder, str]:
        above, _, name = path.rpartition("/")
        node = self._find(above)
        assert isinstance(node, Folder)
        return node, name

    def do(self, op: Operation) -> None:
        if op.kind in ("create", "mkdir"):
            folder, name = self._parent(op.path)
            held = folder.now().get(name)
            if held is None:
                folder.pending.append({name: File() if op.kind == "create" else Folder()})
            elif op.offset and isinstance(held, File):  # O_TRUNC
                held.pending.append(0)
        elif op.kind in ("write", "truncate"):
            node = self._find(op.path)
            assert isinstance(node, File)
            node.pending.append((op.offset, op.data) if op.kind == "write" else op.offset)
        elif op.kind == "sync":
            self._find(op.path).sync()
        elif op.kind == "unlink":
            folder, name = self._parent(op.path)
            folder.pending.append({name: None})
        else:
            self._rename(op)

    def _rename(self, op: Operation) -> None:
        folder, old = self._parent(op.path)
        target, new = self._parent(op.other)
        assert folder is target, "names move within one folder"
        names = folder.now()
        folder.pending.append({new: names[old], old: names[new] if op.kind == "exchange" else None})

    def after_cut(self, choose: Choice) -> Tree:
        """One state that the disk may be in if the power goes now."""
        return dict(_tree(self.root, "", choose))


@dataclass(frozen=True)
class Choice:
    """How much of what is not synced survives: how many changes of names of so many, and whether a write does."""

    names: Callable[[int], int]
    write: Callable[[], bool]


def choices(seed: int, rounds: int) -> Iterator[Choice]:
    """Nothing, everything, names without data, data without names, and some at random."""
    yield Choice(lambda count: 0, lambda: False)
    yield Choice(lambda count: count, lambda: True)
    yield Choice(lambda count: count, lambda: False)
    yield Choice(lambda count: 0, lambda: True)
    for number in range(rounds):
        dice = random.Random(seed * 1000 + number)
        yield Choice(lambda count, dice=dice: dice.randint(0, count), lambda dice=dice: dice.random() < 0.5)  # type: ignore[misc]


def _tree(folder: Folder, path: str, choose: Choice) -> Iterator[tuple[str, bytes | None]]:
    for name, node in folder.now(choose.names(len(folder.pending))).items():
        below = f"{path}/{name}".lstrip("/")
        if isinstance(node, Folder):
            yield below, None
            yield from _tree(node, below, choose)
            continue
        data = bytearray(node.data)
        for change in node.pending:
            if choose.write():
                _apply(data, change)
        yield below, bytes(data)


def _load(path: Path) -> Folder:
    folder = Folder()
    for entry in path.iterdir():
        folder.names[entry.name] = _load(entry) if entry.is_dir() else File(bytearray(entry.read_bytes()))
    return folder


def write_tree(tree: Tree, root: Path) -> None:
    root.mkdir()
    for path, data in tree.items():
        if data is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(data)


def states(
    root: Path, operations: Sequence[Operation], rounds: int, *, whole: bool = True
) -> Iterator[tuple[int, Tree]]:
    """(number of operations done, state) for a cut after each of them, each state once.

    `root` holds what was on the disk before the first. With `whole` off, states that differ in staging folders alone
    count as one.
    """
    disk = Disk(root)
    seen: set[int] = set()
    for number, op in enumerate([None, *operations]):
        if op is not None:
            disk.do(op)
        for choose in choices(number, rounds):
            tree = disk.after_cut(choose)
            shown = {path: data for path, data in tree.items() if whole or not path.startswith(".staging")}
            mark = hash(tuple(sorted((path, -1 if data is None else hash(data)) for path, data in shown.items())))
            if mark not in seen:
                seen.add(mark)
                yield number, tree


def without_syncs(operations: Iterable[Operation]) -> list[Operation]:
    """As if nobody had asked the disk to keep anything."""
    return [op for op in operations if op.kind != "sync"]
