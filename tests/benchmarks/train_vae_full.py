"""The full dc-ae-f32t4c128 on one GPU: step time, memory, save times; then verify and resume.

    python tests/benchmarks/train_vae_full.py TABLE [--updates 50] [--perceptual 0.5] [--dir DIR]

Trains configs/vae/train/video_dc_ae.yaml (256 px, 32 frames, batch 1, bf16) on a table of clips with async saves, and
prints medians over the updates after the first ten. Needs a GPU of about 80 GB, and the LPIPS weights unless
`--perceptual 0`.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path


def osora(*argv: str) -> str:
    """`osora ARGV...`; its stderr, or an end with what it said."""
    done = subprocess.run([sys.executable, "-m", "osora_cli", *argv], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"osora {' '.join(argv)}: exit code {done.returncode}\n{done.stderr[-4000:]}")
    return done.stdout + done.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table")
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--perceptual", default="0.5")
    parser.add_argument("--dir", default="bench-full")
    args = parser.parse_args()
    run = Path(args.dir) / "run"
    every = args.updates * 2 // 5
    osora(
        "train", "vae", "vae/train/video_dc_ae", "--dataset.data-path", args.table, "--outputs", args.dir,
        "--exp-name", "run", "--async-io", "--max-steps", str(args.updates), "--log-every", "1",
        "--ckpt-every", str(every), "--num-workers", "6",
        "--vae-loss-config.perceptual-loss-weight", args.perceptual,
    )  # fmt: skip
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    records = [record for record in lines if "kind" not in record]
    steady = [r for r in records if r["step"] > 10]
    saving = [r for r in steady if r["step"] % every in range(1, 4) and r["step"] > every]
    log = (run / "log.txt").read_text()
    print(f"updates             {records[-1]['step']}, loss {records[0]['loss']:.4g} -> {records[-1]['loss']:.4g}")
    print(f"update, median      {statistics.median(r['step_s'] for r in steady):.3f} s")
    if saving:
        print(f"  right after a save {statistics.median(r['step_s'] for r in saving):.3f} s")
    print(f"data wait, median   {statistics.median(r['data_wait_s'] for r in steady):.4f} s")
    print(f"peak memory         {max(float(m) for m in re.findall(r'peak memory ([0-9.]+) GiB', log)):.2f} GiB")
    for line in re.findall(r"Saved checkpoint .*? global_step (\d+) to \S+ \((.*)\)", log):
        print(f"save at {line[0]:>4}        {line[1]}")
    began = time.perf_counter()
    print(osora("ckpt", "verify", str(run)).strip().splitlines()[-2], f"({time.perf_counter() - began:.1f} s)")
    osora("resume", str(run), "--max-steps", str(args.updates + 5))
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    resumed = [record["step"] for record in lines if "kind" not in record]
    print(f"resumed             to update {resumed[-1]}, each once: {len(resumed) == len(set(resumed))}")


if __name__ == "__main__":
    main()
