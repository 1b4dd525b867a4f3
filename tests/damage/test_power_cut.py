"""Power cuts: the operations of real saves, recorded; then every state that the disk may be in, after each of them.

(A kill alone proves nothing about fsync: the page cache survives it.)
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.checkpoints import save
from support.io_shim import Operation, build_shim, read_trace
from support.kill_server import KillServer
from support.power_cut import Tree, states, without_syncs, write_tree

from osora_cli.checkpoint.leftovers import clean_leftovers
from osora_cli.checkpoint.resolve import newest_verified
from osora_cli.checkpoint.verify import verify
from osora_cli.errors import CheckpointError

OLD, NEW = 4, 5


@dataclass(frozen=True)
class Scenario:
    """A save of `update` beside OLD; where it is OLD it takes its place, swapping names or not."""

    name: str
    async_io: bool
    update: int
    keep: int = -1
    swap: bool = True


SCENARIOS = [
    Scenario("async, the old one goes", True, NEW, keep=1),
    Scenario("sync, the old one goes", False, NEW, keep=1),
    Scenario("replace", True, OLD),
    Scenario("replace without swap", True, OLD, swap=False),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillServer]:
    server = KillServer(build_shim(tmp_path_factory.mktemp("shim")))
    yield server
    server.close()


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("before")
    save(run, OLD)
    return run


def record(server: KillServer, before: Path, folder: Path, scenario: Scenario) -> tuple[Path, list[Operation]]:
    run = Path(shutil.copytree(before, folder / "run"))
    answer = server.order(
        run,
        scenario.update,
        async_io=scenario.async_io,
        keep=scenario.keep,
        no_exchange=not scenario.swap,
        trace=str(folder / "trace"),
    )
    assert answer["status"] == 0, answer
    return run, list(read_trace(folder / "trace"))


def tensors_of(checkpoint: Path) -> dict[str, bytes]:
    files = [p for p in checkpoint.rglob("*") if p.suffix in (".safetensors", ".pt")]
    return {p.relative_to(checkpoint).as_posix(): p.read_bytes() for p in files}


class Judge:
    """Holds what each checkpoint must contain, byte for byte."""

    def __init__(self, before: Path, after: Path, folder: Path) -> None:
        self._folder = folder
        self._right = {f"epoch0-global_step{OLD}": [tensors_of(before / f"epoch0-global_step{OLD}")]}
        for checkpoint in after.glob("epoch*"):
            self._right.setdefault(checkpoint.name, []).append(tensors_of(checkpoint))

    def resumes_from(self, tree: Tree, *, clean: bool) -> str:
        """Judge one state; returns the name of the checkpoint that a resume takes.

        `clean`: what ended processes left is cleaned up first, ten minutes later.
        """
        run = self._folder / "state"
        write_tree(tree, run)
        try:
            if clean:
                for left in [*run.glob(".*/.owner.json"), *run.glob(".*")]:
                    os.utime(left, (0, 0))
                clean_leftovers(run)
                assert list(run.glob(".*")) == []
            resolved = newest_verified(run)
            assert resolved is not None
            for checkpoint in run.iterdir():
                if checkpoint.is_dir() and verify(checkpoint).verdict == "ok":
                    name = checkpoint.name
                    if name.startswith(".trash-"):
                        name = name.removeprefix(".trash-").rpartition("-")[0]
                    elif name.startswith(".staging-"):
                        raise AssertionError("a staging folder is no checkpoint")
                    assert tensors_of(checkpoint) in self._right[name], f"{checkpoint.name} says ok and is not"
            return resolved.path.name
        finally:
            shutil.rmtree(run)


def cut_everywhere(
    server: KillServer, before: Path, folder: Path, scenario: Scenario, rounds: int, *, whole: bool
) -> tuple[int, int]:
    """Returns the numbers of operations and of states."""
    run, operations = record(server, before, folder, scenario)
    judge = Judge(before, run, folder)
    count = 0
    for number, tree in states(before, retarget(operations, run, before), rounds, whole=whole):
        # Only where names cannot be swapped there is a moment at which the clean-up has to put the old one back.
        for clean in (False, True) if scenario.swap else (True,):
            taken = judge.resumes_from(tree, clean=clean)
            if number == len(operations):
                assert taken == f"epoch0-global_step{scenario.update}", "it was told to be saved"
        count += 1
    return len(operations), count


def retarget(operations: list[Operation], run: Path, before: Path) -> list[Operation]:
    """The operations as if they had been made in `before`, whose contents they began with."""

    def moved(path: str) -> str:
        return path.replace(str(run), str(before), 1)

    return [Operation(op.kind, moved(op.path), moved(op.other), op.offset, op.data) for op in operations]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_a_cut_after_every_operation(server: KillServer, before: Path, tmp_path: Path, scenario: Scenario) -> None:
    operations, count = cut_everywhere(server, before, tmp_path, scenario, rounds=1, whole=False)
    assert operations > 60
    assert count > 8


@pytest.mark.sweep
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_many_states_after_every_operation(
    server: KillServer, before: Path, tmp_path: Path, scenario: Scenario
) -> None:
    operations, count = cut_everywhere(server, before, tmp_path, scenario, rounds=40, whole=True)
    print(f"\n{scenario.name}: {operations} operations, {count} states")


def test_without_syncs_the_states_show_the_loss(server: KillServer, before: Path, tmp_path: Path) -> None:
    """That the model can tell: the same operations, had nothing been synced, may cost both checkpoints."""
    run, operations = record(server, before, tmp_path, SCENARIOS[0])
    judge = Judge(before, run, tmp_path)
    bare = without_syncs(retarget(operations, run, before))
    lost = 0
    for _, tree in states(before, bare, 0, whole=False):
        try:
            judge.resumes_from(tree, clean=False)
        except (CheckpointError, AssertionError):
            lost += 1
    assert lost > 0
