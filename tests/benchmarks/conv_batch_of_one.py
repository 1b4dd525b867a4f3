"""How much quicker one small clip gets through a convolution on the CPU, against torch's own choice of kernel.

    python tests/benchmarks/conv_batch_of_one.py [--repeats 5]

For each shape the median of `repeats` calls in milliseconds: torch's F.conv3d with a batch of one, the same with a
batch of two (per clip), model/conv.py with a batch of one; and the ratio of the first to the last. Seen on one core of
an AVX-512 machine with torch 2.13: 2 to 12 below 20,480 channels x frames x rows, 1 above. bf16 has no such step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from osora_cli.model.conv import Conv3d

SHAPES = [(3, 8, 8, 64), (8, 8, 8, 64), (32, 32, 4, 32), (64, 64, 4, 24), (128, 128, 4, 12), (128, 128, 8, 64)]


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    call()
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return 1000 * statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description="Convolution of one small clip on the CPU.")
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    print(f"{'channels':>10} {'clip':>12} {'torch, 1':>10} {'torch, 2':>10} {'osora, 1':>10} {'ratio':>7}")
    for c_in, c_out, frames, edge in SHAPES:
        conv = Conv3d(c_in, c_out, 3, padding=1)
        one = torch.randn(1, c_in, frames, edge, edge)
        two = torch.cat([one, one])
        with torch.no_grad():
            alone = milliseconds(lambda conv=conv, x=one: F.conv3d(x, conv.weight, conv.bias, padding=1), repeats)
            pair = milliseconds(lambda conv=conv, x=two: F.conv3d(x, conv.weight, conv.bias, padding=1), repeats) / 2
            ours = milliseconds(lambda conv=conv, x=one: conv(x), repeats)
        size = f"{frames}x{edge}x{edge}"
        print(f"{c_in:>4} ->{c_out:>4} {size:>12} {alone:10.2f} {pair:10.2f} {ours:10.2f} {alone / ours:7.1f}")


if __name__ == "__main__":
    main()
