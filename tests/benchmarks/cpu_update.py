"""An update of the demo's autoencoder on the CPU, with freed memory kept and given back: pairs in one run.

python tests/benchmarks/cpu_update.py [--updates 12] [--threads 2]
"""

from __future__ import annotations

import argparse
import ctypes
import resource
import statistics
import time

import torch

from osora_cli.config.load import load_config
from osora_cli.config.schema import TrainVaeConfig
from osora_cli.model.build import build_model
from osora_cli.trainer.numerics import keep_freed_memory, subnormals_flushed


def give_back() -> None:
    """glibc's own thresholds, and what is free returned to the system."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 128 << 10)
    libc.mallopt(-1, 128 << 10)
    libc.malloc_trim(0)


@subnormals_flushed()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=12, help="of each kind")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    config = load_config("demo/vae", TrainVaeConfig).config
    net = build_model(config.model)
    net.reset_parameters(0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=True)
    clip = torch.rand(2, 3, 16, 64, 64) * 2 - 1

    def update() -> tuple[float, int]:
        faults, began = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
        rec, _, _ = net(clip)
        (rec - clip).abs().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults

    seen: dict[str, list[tuple[float, int]]] = {"kept": [], "given back": []}
    for _ in range(args.updates):
        for name, setting in (("kept", keep_freed_memory), ("given back", give_back)):
            setting()
            update()  # the first one after a change pays for it
            seen[name].append(update())
    for name, rows in seen.items():
        seconds, faults = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{name:12} {seconds * 1e3:7.0f} ms an update, {faults:7.0f} page faults")
    ratios = [kept[0] / back[0] for kept, back in zip(seen["kept"], seen["given back"], strict=True)]
    print(f"kept / given back: {statistics.median(ratios):.3f} (median of pairs)")


if __name__ == "__main__":
    main()
