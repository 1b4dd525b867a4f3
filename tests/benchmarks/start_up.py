"""What osora takes before it does anything: help against a bare start, and a quick verification of many files.

    python tests/benchmarks/start_up.py [--rounds 11] [--files 100]

Processes are started by turns: a script that imports typer, rich, pydantic and yaml and prints its help, `osora --help`
and `osora train --help`; then `osora ckpt verify --quick` of a checkpoint of so many files against `python -c pass`.
Medians of the clock's and the processor's seconds. Limits: 1.5 times the bare script, and 1 s.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

BARE = """
import pydantic, rich.console, rich.table, typer, yaml
app = typer.Typer(rich_markup_mode=None)
class Config(pydantic.BaseModel):
    lr: float = 1e-4
@app.command()
def main(config: str, lr: float = 1e-4) -> None:
    "Train."
app()
"""
KIB = 1024


@dataclass(frozen=True)
class Cost:
    """Median seconds of one process: on the clock, and of the processor."""

    wall: float
    processor: float


def once(argv: Sequence[str]) -> Cost:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    subprocess.run(argv, stdout=subprocess.DEVNULL, check=True)
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Cost(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def by_turns(commands: Mapping[str, Sequence[str]], rounds: int) -> dict[str, Cost]:
    """Each command once a round, after one round that fills the page cache."""
    found: dict[str, list[Cost]] = {name: [] for name in commands}
    for turn in range(rounds + 1):
        for name, argv in commands.items():
            cost = once(argv)
            if turn:
                found[name].append(cost)
    return {
        name: Cost(statistics.median(c.wall for c in costs), statistics.median(c.processor for c in costs))
        for name, costs in found.items()
    }


def make_checkpoint(run: Path, files: int) -> Path:
    """A checkpoint whose tensors are split over so many files in all."""
    import torch

    from osora_cli.checkpoint.contents import CheckpointContents, Counters
    from osora_cli.checkpoint.store import CheckpointStore
    from osora_cli.tensors import TensorShard

    shards = [TensorShard.whole(f"block.{n}.weight", torch.randn(64, KIB)) for n in range(files)]
    store = CheckpointStore(run, async_io=False, shard_limit=256 * KIB)
    store.save(CheckpointContents(Counters(0, 1, 1, None, 1), {"model": shards}))
    store.close()
    checkpoint = run / "epoch0-global_step1"
    count = sum(path.is_file() for path in checkpoint.rglob("*"))
    assert count >= files, f"{count} files"
    print(f"checkpoint: {count} files, {files} tensors, "
          f"{sum(p.stat().st_size for p in checkpoint.rglob('*') if p.is_file()) / 1e6:.0f} MB")  # fmt: skip
    return checkpoint


def print_costs(costs: Mapping[str, Cost], base: str) -> None:
    for name, cost in costs.items():
        ratio = f"{cost.wall / costs[base].wall:5.2f}x {cost.processor / costs[base].processor:5.2f}x"
        print(f"{name:<34} {cost.wall:7.3f} s on the clock {cost.processor:7.3f} s of the processor   {ratio}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--files", type=int, default=100)
    args = parser.parse_args()
    osora = [sys.executable, "-m", "osora_cli"]
    with tempfile.TemporaryDirectory() as folder:
        bare = Path(folder) / "bare.py"
        bare.write_text(BARE)
        base = "bare typer + rich + pydantic + yaml"
        helps = {
            base: [sys.executable, str(bare), "--help"],
            "osora --help": [*osora, "--help"],
            "osora train --help": [*osora, "train", "--help"],
        }
        print(f"{os.cpu_count()} cores, python {sys.version.split()[0]}, {args.rounds} rounds, by turns; goal <= 1.5x")
        print_costs(by_turns(helps, args.rounds), base)
        checkpoint = make_checkpoint(Path(folder) / "run", args.files)
        said = subprocess.run(
            [*osora, "ckpt", "verify", str(checkpoint), "--quick", "--json"], stdout=subprocess.PIPE, check=True
        )
        assert json.loads(said.stdout)["verdict"] == "complete"
        verify = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "osora ckpt verify --quick": [*osora, "ckpt", "verify", str(checkpoint), "--quick"],
        }
        print("goal < 1 s")
        print_costs(by_turns(verify, args.rounds), "python -c pass")


if __name__ == "__main__":
    main()
