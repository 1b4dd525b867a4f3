"""`osora data check` on a table of a million rows: seconds and memory; and the rules one row at a time, for the ratio.

    python tests/benchmarks/data_check.py [--rows 1000000] [--sample 20000]

The command runs in a process of its own, with every probability 1 and with probabilities that have to be drawn, from
one generator per row as Open-Sora does. On a sample of the rows the same rules are followed in plain Python, with
numpy's own generators: the buckets must be the same, and the time is scaled to the whole table. Sampler, buckets and
epoch order are timed by themselves as well. Limits: 10 s and 30 s, 1 GB; where other programs want the same cores,
the processor's seconds say more than those on the clock.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from osora_cli.data.aspect import ratio_value, resolve_resolution
from osora_cli.data.fps import map_target_fps
from osora_cli.data.sampler import BucketSampler

STEP, FPS_MAX, SEED = 32, 24, 42
SURE = {"256px": {1: [1.0, 8], 32: [1.0, 2]}, "768px": {64: [1.0, 1]}}
DRAWN = {"256px": {1: [0.7, 8], 16: [[0.9, 0.3], 4], 32: [0.8, 2]}, "768px": {64: [0.5, 1]}}


def make_columns(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "num_frames": rng.integers(1, 400, rows),
        "height": rng.integers(100, 2000, rows),
        "width": rng.integers(100, 2000, rows),
        "fps": rng.choice([23.976, 24.0, 25.0, 29.97, 30.0, 60.0], rows),
    }


def write_table(path: Path, columns: dict[str, np.ndarray]) -> None:
    lists = [column.tolist() for column in columns.values()]
    with path.open("w") as file:
        file.write("path,text,num_frames,height,width,aspect_ratio,resolution,fps\n")
        for i, (frames, height, width, fps) in enumerate(zip(*lists, strict=True)):
            text = f'"a caption of some length, about what is seen in clip {i}, with commas"'
            numbers = f"{frames},{height},{width},{height / width!r},{height * width},{fps}"
            file.write(f"clips/{i // 1000:04d}/clip_{i:07d}.mp4,{text},{numbers}\n")


def by_rule(config: dict[str, Any], clip: tuple[int, int, int, float], seed: int) -> tuple[str, int, str] | None:
    """One clip's bucket in plain Python: the rule of the reference, one generator a row."""
    frames, height, width, fps = clip
    rng = np.random.default_rng(seed)
    used = frames // map_target_fps(fps, FPS_MAX)[1]
    for name in sorted(config, key=lambda key: resolve_resolution(key, STEP).pixels, reverse=True):
        resolution, lengths = resolve_resolution(name, STEP), config[name]
        if height * width < 0.8 * resolution.pixels:
            continue
        ratio = min(resolution.sizes, key=lambda key: abs(height / width - ratio_value(key)))
        if used == 1:
            if 1 in lengths and (lengths[1][0] >= 1 or rng.random() < lengths[1][0]):
                return name, 1, ratio
            continue
        for length in sorted(lengths, reverse=True):
            chance = lengths[length][0]
            if used < length or length == 1:
                continue
            if isinstance(chance, list):
                chance, skip = chance
                if skip >= 1 or rng.random() <= skip:
                    continue
            if chance >= 1 or rng.random() <= chance:
                return name, length, ratio
            break
    return None


@dataclass
class Run:
    """What a command took: seconds on the clock and of the processor, MB at most; and what it wrote to stdout."""

    wall: float
    processor: float
    memory: float
    out: str


def run_command(table: Path, config: dict[str, Any], *more: str) -> Run:
    argv = [sys.executable, "-m", "osora_cli", "data", "check", str(table), "vae/train/video_dc_ae", "--ranks", "8"]
    argv += ["--bucket-config", json.dumps(config), "--dataset.fps-max", str(FPS_MAX), "--seed", str(SEED), *more]
    code = (
        "import resource, subprocess, sys; done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE); "
        "sys.stdout.buffer.write(done.stdout); used = resource.getrusage(resource.RUSAGE_CHILDREN); "
        "print(used.ru_utime + used.ru_stime, used.ru_maxrss, file=sys.stderr); sys.exit(done.returncode)"
    )
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=False)
    wall = time.perf_counter() - began
    assert done.returncode in (0, 3), done.stderr
    processor, memory = map(float, done.stderr.split()[-2:])
    return Run(wall, processor, memory * (1 if sys.platform == "darwin" else 1024) / 1e6, done.stdout)


def check_rules(columns: dict[str, np.ndarray], config: dict[str, Any], sample: int) -> tuple[float, float]:
    """Asserts that the sample's buckets are those of the rule; seconds a row of the rule and of the sampler."""
    sampler = BucketSampler(
        *columns.values(), bucket_config=config, spatial_compression=STEP, fps_max=FPS_MAX, seed=SEED
    )
    began = time.perf_counter()
    sampler.epoch_batches(0)
    vectorised = time.perf_counter() - began
    ids, buckets = sampler.bucket_ids(0), sampler.table.buckets
    clips = list(zip(*(column[:sample].tolist() for column in columns.values()), strict=True))
    began = time.perf_counter()
    found = [by_rule(config, clip, SEED + row * len(buckets)) for row, clip in enumerate(clips)]
    spent = time.perf_counter() - began
    mine = [
        None if i < 0 else (buckets[i].resolution, buckets[i].frames, buckets[i].ratio) for i in ids[:sample].tolist()
    ]
    assert mine == found, "not the buckets of the rule"
    return spent / sample, vectorised / len(ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--sample", type=int, default=20_000)
    args = parser.parse_args()
    columns = make_columns(args.rows)
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "table.csv"
        write_table(table, columns)
        for label, config, limit in (("probabilities 1", SURE, 10), ("probabilities drawn", DRAWN, 30)):
            for what, more in (
                ("as text", ["--no-files"]),
                ("files looked for", []),
                ("--json", ["--no-files", "--json"]),
            ):
                run = run_command(table, config, *more)
                print(f"{args.rows} rows, {label}, {what}: {run.wall:.1f} s, {run.processor:.1f} s of the processor "
                      f"(limit {limit} s), {run.memory:.0f} MB (limit 1000 MB)", flush=True)  # fmt: skip
            said = json.loads(run.out)
            assert said["clips"] == args.rows
            assert sum(b["clips"] for b in said["buckets"]) + len(said["left_out"]) == args.rows
            alone, together = check_rules(columns, config, min(args.sample, args.rows))
            print(f"  buckets and order alone: {together * args.rows:.2f} s; row by row {alone * args.rows:.0f} s "
                  f"({alone / together:.0f} times), the same buckets", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
