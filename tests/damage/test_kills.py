"""SIGKILL at every step of the protocol: the newest whole checkpoint is always found, and nothing else is left."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.checkpoints import save, tensors
from support.kill_server import KillServer, delay

from osora_cli.checkpoint.leftovers import clean_leftovers
from osora_cli.checkpoint.resolve import newest_verified
from osora_cli.checkpoint.verify import verify

OLD, NEW = 4, 5


@dataclass(frozen=True)
class Scenario:
    """A save that dies. `update` OLD replaces the checkpoint that is there; `swap`: whether names can be swapped."""

    name: str
    async_io: bool
    update: int
    keep: int = -1
    swap: bool = True


SCENARIOS = [
    Scenario("async", True, NEW, keep=1),
    Scenario("sync", False, NEW, keep=1),
    Scenario("replace", True, OLD),
    Scenario("replace without swap", True, OLD, swap=False),
]


@pytest.fixture(scope="module")
def server() -> Iterator[KillServer]:
    server = KillServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints; the older one is what is left should the newer be hurt."""
    run = tmp_path_factory.mktemp("before")
    save(run, OLD)
    return run


def folder(run: Path, update: int) -> Path:
    return run / f"epoch0-global_step{update}"


def holds(checkpoint: Path, update: int) -> bool:
    """The bytes are those of that update (not only in accord with the manifest)."""
    data = (checkpoint / "master.safetensors").read_bytes()
    weight = tensors(update)["master"]["decoder.weight"]
    return weight.view(-1).view(torch.uint8).numpy().tobytes() in data


def die(server: KillServer, run: Path, scenario: Scenario, **when: float) -> list[str]:
    answer = server.order(
        run,
        scenario.update,
        async_io=scenario.async_io,
        keep=scenario.keep,
        no_exchange=not scenario.swap,
        **when,
    )
    assert answer["status"] in (-9, 0), answer
    return answer["phases"]


def check(run: Path, scenario: Scenario, phases: list[str]) -> None:
    """After a death with these phases begun (the last of them not done)."""
    done = phases[:-1]
    if scenario.swap:
        survivor = newest_verified(run)
        assert survivor is not None, "without any clean-up there is a good checkpoint"
    clean_leftovers(run)
    left = [p.name for p in run.iterdir() if p.name.startswith((".staging", ".trash"))]
    assert left == [], phases[-1]
    resolved = newest_verified(run)
    assert resolved is not None
    assert resolved.passed_over == []
    committed = "commit-rename" in done
    assert resolved.path == folder(run, scenario.update if committed else OLD)
    assert verify(resolved.path).verdict == "ok"
    assert holds(resolved.path, scenario.update if committed else OLD)
    latest = (run / "latest").read_text().strip()
    assert (run / latest).is_dir(), "`latest` names a checkpoint that is there"


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_killed_at_every_step(server: KillServer, before: Path, tmp_path: Path, scenario: Scenario) -> None:
    shutil.copytree(before, tmp_path / "probe")
    steps = die(server, tmp_path / "probe", scenario)
    assert steps.count("write") > 5
    replaces = scenario.update == OLD
    assert ("replace" in steps) == replaces
    # Up to there a save that replaces does what the others do.
    first = steps.index("cover-check") if replaces else 0
    for number, name in list(enumerate(steps))[first:]:
        run = shutil.copytree(before, tmp_path / f"run-{number}")
        phases = die(server, run, scenario, die_at=number)
        assert len(phases) == number + 1
        # With few buffers the order of these two follows the disk.
        assert phases[-1] == name or {phases[-1], name} == {"snapshot", "write"}
        check(run, scenario, phases)
        shutil.rmtree(run)


def test_a_run_goes_on_after_a_death(server: KillServer, before: Path, tmp_path: Path) -> None:
    """Die in the middle of three saves one after the other, then save: two good ones, nothing left over."""
    run = shutil.copytree(before, tmp_path / "run")
    for number in (9, 20, 30):
        die(server, run, SCENARIOS[0], die_at=number)
    assert len([p for p in run.iterdir() if p.name.startswith(".staging")]) == 3
    clean_leftovers(run)
    save(run, NEW)
    assert sorted(p.name for p in run.iterdir()) == [folder(run, OLD).name, folder(run, NEW).name, "latest"]
    assert all(verify(folder(run, update)).verdict == "ok" for update in (OLD, NEW))


def random_death(server: KillServer, before: Path, run: Path, seed: int, longest: float) -> str:
    """Killed from outside at a random moment; returns the step it was in."""
    scenario = SCENARIOS[seed % 3]
    shutil.copytree(before, run)
    phases = die(server, run, scenario, die_after=delay(seed, longest))
    survivor = newest_verified(run)
    assert survivor is not None
    assert survivor.passed_over == []
    clean_leftovers(run)
    resolved = newest_verified(run)
    assert resolved is not None
    fresh = [p for p in run.iterdir() if p.name.startswith((".staging", ".trash"))]
    # Only a folder that died before it had its owner's name is kept for a while.
    assert all(not (p / ".owner.json").exists() for p in fresh)
    shutil.rmtree(run)
    return phases[-1] if phases else "before"


def test_killed_at_random_moments(server: KillServer, before: Path, tmp_path: Path) -> None:
    started = time.monotonic()
    shutil.copytree(before, tmp_path / "timed")
    die(server, tmp_path / "timed", SCENARIOS[0])
    longest = time.monotonic() - started
    for seed in range(15):
        random_death(server, before, tmp_path / f"run-{seed}", seed, longest)


@pytest.mark.sweep
@pytest.mark.timeout(7200)
def test_a_thousand_kills(server: KillServer, before: Path, tmp_path: Path) -> None:
    """Every step at least 20 times, the rest at random moments; printed by step."""
    seen: Counter[str] = Counter()
    for scenario in SCENARIOS:
        shutil.copytree(before, tmp_path / "probe")
        steps = die(server, tmp_path / "probe", scenario)
        shutil.rmtree(tmp_path / "probe")
        for number, name in enumerate(steps):
            for _ in range(max(1, 20 // steps.count(name))):
                run = shutil.copytree(before, tmp_path / "run")
                check(run, scenario, die(server, run, scenario, die_at=number))
                seen[name] += 1
                shutil.rmtree(run)
    for seed in range(max(0, 1000 - seen.total())):
        seen["random: " + random_death(server, before, tmp_path / "run", seed, 0.3)] += 1
    print(f"\n{seen.total()} kills: " + ", ".join(f"{name} {count}" for name, count in sorted(seen.items())))


def test_a_save_in_flight_is_finished_when_the_interpreter_ends(tmp_path: Path) -> None:
    """No finish(), no close(): the script just ends."""
    import subprocess
    import sys

    code = (
        "from pathlib import Path; from support.checkpoints import contents;"
        "from osora_cli.checkpoint.store import CheckpointStore;"
        f"CheckpointStore(Path({str(tmp_path)!r}), async_io=True).save(contents(3))"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, timeout=60)
    assert verify(folder(tmp_path, 3)).verdict == "ok"
