"""The Video DC-AE alone on one GPU: forward + backward, encode and decode, with its Triton kernels and without.

    python tests/benchmarks/dc_ae_net.py                       # dc-ae-f32t4c128, 1x3x32x256x256, bf16
    python tests/benchmarks/dc_ae_net.py --profile kernels.txt # and where the time goes, by GPU kernel

Medians of one run, beside the rate of a bf16 matrix product of 8192^3 in the same run. The work is that of the net's
convolutions and matrix products as the architecture defines them (torch's flop counter, forward pass, times three);
the kernels do less of it, since upsampling is folded into its convolution, so the share is one of useful
work. Each form runs in a process of its own, so that peak memory and what is warm are its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from osora_cli.config.models.dc_ae import DcAeConfig
from osora_cli.model.dc_ae.autoencoder import DcAe


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    """Median by CUDA events after three runs to warm up."""
    for _ in range(3):
        run()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in marks:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in marks)


def make_net(name: str) -> DcAe:
    torch.manual_seed(0)
    with torch.device("cuda"):
        net = DcAe(DcAeConfig(model_name=name)).to(torch.bfloat16)
    with torch.no_grad():
        for key, value in net.named_parameters():
            if "norm" in key:
                value.fill_(0.3 if key.endswith("weight") else 0.0)
            else:
                value.normal_(0, 0.02)
    return net


def work(net: DcAe, x: Tensor) -> float:
    """TFLOP of forward + backward: three times the forward pass of the plain form, counted on the meta device."""
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        shape = DcAe(net.config).to(torch.bfloat16)
    clip = torch.empty(x.shape, dtype=x.dtype, device="meta")
    with FlopCounterMode(display=False) as counter:
        shape(clip)
    return 3 * counter.get_total_flops() / 1e12


def measure(args: argparse.Namespace) -> dict[str, float]:
    net, size = make_net(args.model), (args.batch, 3, args.frames, args.px, args.px)
    x = torch.randn(size, device="cuda").clamp(-1, 1).to(torch.bfloat16)

    def step() -> None:
        (net(x)[0] - x).abs().float().mean().backward()
        for parameter in net.parameters():
            parameter.grad = None

    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    found = {"first_s": first, "step_ms": milliseconds(step, args.repeats)}
    found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    with torch.no_grad():
        z = net.encode(x)
        found["encode_ms"] = milliseconds(lambda: net.encode(x), args.repeats)
        found["decode_ms"] = milliseconds(lambda: net.decode(z), args.repeats)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    found["matrix_tflops"] = 2 * 8192**3 / milliseconds(lambda: a @ b, 20) / 1e9
    found["work_tflop"] = work(net, x)
    if args.profile and os.environ.get("OSORA_KERNELS") != "0":
        write_profile(step, args.profile)
    return found


def write_profile(step: Callable[[], None], path: str) -> None:
    """GPU time of one step by kernel."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    rows = sorted(((e.self_device_time_total / 1e3, e.count, e.key) for e in found.key_averages()), reverse=True)
    with Path(path).open("w") as file:
        file.writelines(f"{ms:9.2f} ms {count:5d} x  {name[:160]}\n" for ms, count, name in rows if ms > 0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="dc-ae-f32t4c128")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--frames", type=int, default=32)
    parser.add_argument("--px", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--profile", metavar="FILE")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("needs a GPU")
    if args.one:
        print(json.dumps(measure(args)))
        return
    rows = {}
    for name, switch in (("plain", "0"), ("kernels", "1")):
        done = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--one"],
            env=os.environ | {"OSORA_KERNELS": switch}, stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        rows[name] = json.loads(done.stdout.splitlines()[-1])
    print(
        f"{'':10}{'fwd+bwd':>10}{'encode':>10}{'decode':>10}{'peak':>10}{'first':>10}{'TFLOP/s':>10}{'of matrix':>11}"
    )
    for name, row in rows.items():
        rate = row["work_tflop"] / row["step_ms"] * 1e3
        print(
            f"{name:10}{row['step_ms']:7.1f} ms{row['encode_ms']:7.1f} ms{row['decode_ms']:7.1f} ms"
            f"{row['peak_gib']:6.1f} GiB{row['first_s']:8.1f} s{rate:10.0f}{rate / row['matrix_tflops']:11.0%}"
        )
    print(
        f"work {rows['plain']['work_tflop']:.1f} TFLOP, matrix product {rows['kernels']['matrix_tflops']:.0f} TFLOP/s,",
        end=" ",
    )
    print(f"kernels {rows['plain']['step_ms'] / rows['kernels']['step_ms']:.2f}x")


if __name__ == "__main__":
    main()
