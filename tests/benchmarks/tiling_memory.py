"""Peak memory of encode and decode, tiled against whole; each in a process of its own.

    python tests/benchmarks/tiling_memory.py [--batch 2] [--frames 32] [--height 192] [--width 256]
        [--space-tile 64] [--time-tile 16] [--overlap 0.25] [--device cpu|cuda]

A small Video DC-AE (space / 4, time / 2, random weights: memory does not depend on them). On the CPU the peak is of
resident memory (getrusage) above what the process holds before, clips and net included; on CUDA that of
torch.cuda.max_memory_allocated, less what is allocated before. Prints both peaks, their ratio, and the same of time.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

import torch

from osora_cli.config.models.dc_ae import DcAeConfig
from osora_cli.model.dc_ae.autoencoder import DcAe
from osora_cli.model.dc_ae.padding import reconstruct_any_size

MIB = 2**20
TEMPORAL = [True, False, False]
SIDE = {"width_list": [16, 32, 64], "depth_list": [1, 1, 1], "block_type": ["ResBlock", "ResBlock", "EViTS5_GLU"]}


@dataclass
class Peak:
    """Bytes above the start, and seconds."""

    memory: int
    seconds: float


def build(args: argparse.Namespace, tiled: bool) -> DcAe:
    model = DcAe(
        DcAeConfig.model_validate(
            {
                "latent_channels": 16,
                "encoder": {**SIDE, "temporal_downsample": TEMPORAL},
                "decoder": {**SIDE, "temporal_upsample": TEMPORAL},
                "use_spatial_tiling": tiled,
                "use_temporal_tiling": tiled,
                "spatial_tile_size": args.space_tile,
                "temporal_tile_size": args.time_tile,
                "tile_overlap_factor": args.overlap,
            }
        )
    )
    model.reset_parameters(seed=0)
    return model.to(args.device).eval()


def resident_peak() -> int:
    """Bytes; the system counts in KiB, on macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(args: argparse.Namespace, tiled: bool) -> Peak:
    model = build(args, tiled)
    generator = torch.Generator().manual_seed(0)
    clip = torch.rand((args.batch, 3, args.frames, args.height, args.width), generator=generator).mul_(2).sub_(1)
    clip = clip.to(args.device)
    with torch.no_grad():
        # Libraries and their buffers come with the first call: a clip of two latents, far below any tile.
        reconstruct_any_size(model, clip[:, :, :4, :16, :16])
        if args.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if args.device == "cuda" else resident_peak()
        began = time.perf_counter()
        rec, _ = reconstruct_any_size(model, clip)
        if args.device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    if rec.shape != clip.shape:
        sys.exit(f"{tuple(clip.shape)} came back as {tuple(rec.shape)}")
    after = torch.cuda.max_memory_allocated() if args.device == "cuda" else resident_peak()
    return Peak(after - before, seconds)


def in_own_process(way: str) -> Peak:
    argv = [sys.executable, __file__, *sys.argv[1:], "--way", way]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{way}: exit code {done.returncode}\n{done.stderr[-4000:]}")
    return Peak(**json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=2, help="clips; torch is slow on a CPU with one")
    parser.add_argument("--frames", type=int, default=32)
    parser.add_argument("--height", type=int, default=192)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--space-tile", type=int, default=64, help="pixels")
    parser.add_argument("--time-tile", type=int, default=16, help="frames")
    parser.add_argument("--overlap", type=float, default=0.25, help="share of a tile")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--way", choices=["whole", "tiled"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(asdict(measure(args, args.way == "tiled"))))
        return
    whole, tiled = in_own_process("whole"), in_own_process("tiled")
    size = args.batch * args.frames * args.height * args.width * 3 * 4 / MIB
    print(f"clips  {args.batch} of {args.frames} frames of {args.height}x{args.width} px, {size:.0f} MiB in fp32")
    print(f"whole  {whole.memory / MIB:8.0f} MiB {whole.seconds:8.2f} s")
    print(f"tiled  {tiled.memory / MIB:8.0f} MiB {tiled.seconds:8.2f} s")
    print(f"whole / tiled: memory {whole.memory / tiled.memory:.1f}, time {whole.seconds / tiled.seconds:.2f}")


if __name__ == "__main__":
    main()
