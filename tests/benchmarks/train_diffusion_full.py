"""The MMDiT at full width and reduced depth on one GPU: step time, share of the GPU's peak, saves; verify and resume.

    python tests/benchmarks/train_diffusion_full.py model [--shape 256px long high_compression] [--compile both|on|off]
                                                          [--keep-activations] [--updates 12] [--attention flash]
    python tests/benchmarks/train_diffusion_full.py run   [--shape 256px] [--updates 30] [--dir DIR]

`model` times updates on random latents and text embeddings, blocks compiled and not, by events on the device:
`fwd+bwd` is forward, loss and backward, `update` all from the batch to the new weights. A variant that fails
is named with its error, and the others go on. `run` is `osora train diffusion` on clips that the script makes, with the
full autoencoder at random weights and hashed texts of the full widths; it saves in the background, verifies, resumes.

FLOPs are those of the matrix products of linear layers and attention, 2 for a multiplication with its addition: a
forward, and twice as many in the backward. `model` FLOPs leave recomputed activations out (what is compared between
ways of training), `hardware` FLOPs count them. The share is of 788 TFLOP/s, which other figures of osora are compared
with as well; the data sheet of an H200 says 989 for dense bf16. Beside it stands the rate of a bf16 product of
8192 x 8192 matrices, measured in the same run.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.attention import SDPBackend

from osora_cli.config.models.flux import FluxConfig
from osora_cli.data.cached_batch import CachedBatch
from osora_cli.data.media import write_video
from osora_cli.engine.base import OptimSettings
from osora_cli.engine.native import NativeEngine, pick_device
from osora_cli.model.build import build_model
from osora_cli.model.latents import FrozenParts, TextBundle
from osora_cli.model.mmdit import MMDiT, attention
from osora_cli.model.mmdit.compiled import BlockCompiler, obstacle
from osora_cli.trainer.conditions import LatentRules
from osora_cli.trainer.diffusion import DiffusionTask, DiffusionTaskSettings
from osora_cli.trainer.schedule import Schedule
from osora_cli.trainer.task import StepContext

PEAK = 788e12
TEXT_TOKENS = 512
KERNELS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


@dataclass(frozen=True)
class Shape:
    """What is trained on: the preset, a bucket, and the latent that it has."""

    preset: str
    bucket: dict[str, Any]
    clip: tuple[int, int, int]  # frames, height, width
    latent: tuple[int, int, int, int]  # channels, frames, rows, columns
    batch: int
    patch: int
    cond: bool


SHAPES = {
    "256px": Shape("stage1", {"256px_ar1:1": {"129": [1.0, 3]}}, (132, 256, 256), (16, 33, 32, 32), 3, 2, False),
    # 79 x 16 x 16 image tokens and 512 of text: 20,736 in all.
    "long": Shape("stage1", {"256px_ar1:1": {"313": [1.0, 1]}}, (316, 256, 256), (16, 79, 32, 32), 1, 2, False),
    "high_compression": Shape(
        "high_compression", {"768px_ar1:1": {"128": [1.0, 2]}}, (130, 768, 768), (128, 32, 24, 24), 2, 1, True
    ),
}


def network(shape: Shape, depth: list[int], tiny: bool) -> FluxConfig:
    """The presets' network at another depth; `tiny`: at a width to try the script with."""
    width = {"hidden_size": 32, "num_heads": 2, "axes_dim": [4, 6, 6], "vec_in_dim": 8, "context_in_dim": 16}
    full = {"hidden_size": 3072, "num_heads": 24, "axes_dim": [16, 56, 56], "vec_in_dim": 768, "context_in_dim": 4096}
    return FluxConfig(
        in_channels=shape.latent[0] * shape.patch**2, patch_size=shape.patch, cond_embed=shape.cond, fused_qkv=False,
        use_liger_rope=True, depth=depth[0], depth_single_blocks=depth[1], **(width if tiny else full),
    )  # fmt: skip


def forward_flops(config: FluxConfig, image: int, text: int, batch: int) -> tuple[float, float]:
    """FLOPs of a forward: of all, and of the blocks alone, which are what is recomputed."""
    width, mlp, tokens = config.hidden_size, config.mlp_dim, image + text
    attention = 4 * tokens**2 * width
    double = 2 * tokens * (4 * width**2 + 2 * width * mlp) + attention + 2 * 12 * width**2
    single = 2 * tokens * (width * (3 * width + mlp) + (width + mlp) * width) + attention + 2 * 3 * width**2
    blocks = config.depth * double + config.depth_single_blocks * single
    ends = 2 * image * width * (2 * config.in_channels + config.cond_embed * config.cond_channels)
    ends += 2 * text * width * config.context_in_dim
    return batch * (blocks + ends), batch * blocks


def make_batch(shape: Shape, config: FluxConfig, device: torch.device) -> CachedBatch:
    """Random latents and text embeddings."""
    channels, frames, rows, columns = shape.latent
    count = shape.batch
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device)

    first: dict[tuple[Literal["head", "tail"], int], torch.Tensor] = {
        ("head", 1): draw(count, channels, 1, rows, columns)
    }
    return CachedBatch(
        video=torch.empty(count, 3, *shape.clip, dtype=torch.uint8, device="meta"), rows=tuple(range(count)),
        positions=tuple(range(count)), texts=("",) * count, fps=(24.0,) * count, motion_scores=(float("nan"),) * count,
        replaced=(), shortened=(), wait_s=0.0, latents=draw(count, channels, frames, rows, columns), parts=first,
        t5=draw(count, TEXT_TOKENS, config.context_in_dim), clip=draw(count, config.vec_in_dim),
    )  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """One variant: medians in seconds, the first update with what it compiled, peak memory in bytes (0: not known)."""

    forward_backward: float
    update: float
    first: float
    loss: float
    peak: int
    graphs: int
    parameters: int


class Clock:
    """Times on the device: events on a GPU, which the host does not wait for until they are read."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        if not self._on_gpu:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def seconds(self, first: int, last: int) -> float:
        """Between two marks, counted from 0. Waits for the device."""
        if not self._on_gpu:
            return float(self._marks[last] - self._marks[first])
        torch.cuda.synchronize()
        return float(self._marks[first].elapsed_time(self._marks[last])) / 1e3


def matrix_rate(device: torch.device, size: int, runs: int = 20) -> float:
    """FLOP/s of a bf16 product of two `size` x `size` matrices: the median of `runs`."""
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    times = []
    for _ in range(runs + 3):
        clock = Clock(device)
        clock.mark()
        a @ b
        clock.mark()
        times.append(clock.seconds(0, 1))
    return 2 * size**3 / statistics.median(times[3:])


def make_network(config: FluxConfig, device: torch.device) -> MMDiT:
    """Random weights, drawn on the device: those of a seed are drawn on the host, which takes longer than all else."""
    module = build_model(config, device="meta")
    assert isinstance(module, MMDiT)
    module.to_empty(device=device)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if p.ndim > 1:
                p.uniform_(-(p.shape[1] ** -0.5), p.shape[1] ** -0.5)
            else:
                p.fill_(float(name.endswith(".scale")))
    return module


def make_task(
    shape: Shape, config: FluxConfig, args: argparse.Namespace, compiler: BlockCompiler | None
) -> DiffusionTask:
    """The task of a training on batches of `make_batch`."""
    module = make_network(config, pick_device("auto"))
    module.enable_grad_checkpoint(not args.keep_activations)
    if compiler is not None:
        compiler.attach(module, 1)
    engine = NativeEngine(pick_device("auto"), args.dtype, "none")
    trained = engine.prepare(module, OptimSettings(1e-5, (0.9, 0.999), 1e-15, 0.0))
    settings = DiffusionTaskSettings(
        patch_size=shape.patch, rules=LatentRules(4, not shape.cond), sigma_min=1e-5, dropout_t5=0.316,
        dropout_clip=0.316, condition_weights={"t2v": 1.0, "i2v_head": 7.0} if shape.cond else None,
        no_reference_loss=False, guidance=None, grad_clip=1.0,
    )  # fmt: skip
    null = TextBundle(torch.zeros(1, TEXT_TOKENS, config.context_in_dim), torch.zeros(1, config.vec_in_dim))
    return DiffusionTask(trained, engine, Schedule(1e-5), settings, FrozenParts(None, None, None), null)


def time_updates(shape: Shape, args: argparse.Namespace, compiled: bool) -> Measured:
    """Updates on random latents, one after the other; the first three are left out of the medians."""
    device = pick_device("auto")
    reason = obstacle(device) if compiled else None
    if reason is not None:
        raise RuntimeError(f"not compiled: {reason}")
    config = network(shape, args.depth, args.tiny)
    compiler = BlockCompiler() if compiled else None
    task = make_task(shape, config, args, compiler)
    trained, batch = task.networks["model"], make_batch(shape, config, device)
    whole, part, first = [], [], 0.0
    for update in range(args.updates):
        context, clock, began = StepContext(0, update, 0, 1, 0, 1), Clock(device), time.perf_counter()
        clock.mark()
        sample = task.prepare(batch, context)
        clock.mark()
        loss = task.loss(sample, context)
        trained.backward(loss)
        clock.mark()
        task.update(update)
        clock.mark()
        whole.append(clock.seconds(0, 3))
        part.append(clock.seconds(1, 2))
        first = first or time.perf_counter() - began
    return Measured(
        forward_backward=statistics.median(part[3:] or part), update=statistics.median(whole[3:] or whole), first=first,
        loss=float(loss.detach()), peak=torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
        graphs=len(compiler.graphs) if compiler is not None else 0,
        parameters=sum(p.numel() for p in trained.module.parameters()),
    )  # fmt: skip


def clean_up() -> None:
    """Nothing of a variant, compiled code included, is left for the next one."""
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def time_model(names: list[str], args: argparse.Namespace) -> None:
    """All variants of all shapes, and a table of them at the end."""
    device = pick_device("auto")
    size = 8192 if device.type == "cuda" else 512
    rate = matrix_rate(device, size)
    print(f"matrix rate         {rate / 1e12:.1f} TFLOP/s, bf16 {size}^3, measured here; 788 is what shares are of")
    ways = {"both": (False, True), "on": (True,), "off": (False,)}[args.compile]
    kept = "kept" if args.keep_activations else "recomputed"
    rows = [
        f"{'shape':<17} {'blocks':<9} {'fwd+bwd s':>10} {'of 788':>7} {'of rate':>8} {'update s':>9} {'GiB':>6} "
        f"{'first s':>8}"
    ]
    for name in names:
        for compiled in ways:
            way = "compiled" if compiled else "eager"
            clean_up()
            try:
                measured = time_updates(SHAPES[name], args, compiled)
            except Exception as error:
                print(f"\n{name}, {way}: FAILED, {type(error).__name__}: {str(error)[:600]}")
                rows.append(f"{name:<17} {way:<9} failed: {type(error).__name__}")
                continue
            flops = report_model(f"{name}, {way}, activations {kept}", SHAPES[name], args, measured)
            speed = flops / measured.forward_backward
            rows.append(
                f"{name:<17} {way:<9} {measured.forward_backward:10.4f} {speed / PEAK:7.1%} {speed / rate:8.1%} "
                f"{measured.update:9.4f} {measured.peak / 2**30:6.1f} {measured.first:8.1f}"
            )
    print(
        f"\nmodel FLOPs, activations {kept}, {args.dtype}, attention {args.attention or 'by osora'}\n" + "\n".join(rows)
    )


def report_model(title: str, shape: Shape, args: argparse.Namespace, measured: Measured) -> float:
    """Say what one variant took; its model FLOPs, forward and backward."""
    config = network(shape, args.depth, args.tiny)
    _, frames, rows, columns = shape.latent
    image = frames * (rows // shape.patch) * (columns // shape.patch)
    forward, blocks = forward_flops(config, image, TEXT_TOKENS, shape.batch)
    model = 3 * forward
    hardware = model + (0 if args.keep_activations else blocks)
    print(f"\n{title}")
    size = f"{measured.parameters / 1e9:.3f} billion"
    print(f"network             {config.depth} + {config.depth_single_blocks} blocks, {size}")
    tokens = f"{image + TEXT_TOKENS} tokens ({image} image + {TEXT_TOKENS} text)"
    print(f"batch               {shape.batch} x {tokens}, {args.dtype}, loss {measured.loss:.4g}")
    print(f"first update        {measured.first:.1f} s, {measured.graphs} graphs compiled")
    print(f"peak memory         {measured.peak / 2**30:.1f} GiB")
    for what, seconds in (("forward + backward", measured.forward_backward), ("whole update", measured.update)):
        print(f"{what:<19} {seconds:.4f} s, {shape.batch * image / seconds:,.0f} image tokens/s")
        for name, flops in (("model", model), ("hardware", hardware)):
            speed = flops / seconds
            print(f"  {name:<9} FLOPs   {flops / 1e12:.1f} T, {speed / 1e12:.0f} TFLOP/s, {speed / PEAK:.1%} of 788")
    return model


def osora(*argv: str) -> str:
    """`osora ARGV...`; what it printed, or an end with what it said."""
    done = subprocess.run([sys.executable, "-m", "osora_cli", *argv], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"osora {' '.join(argv)}: exit code {done.returncode}\n{done.stderr[-4000:]}")
    return done.stdout + done.stderr


def make_table(folder: Path, shape: Shape, count: int) -> Path:
    """Clips of drifting stripes, and their table."""
    folder.mkdir(parents=True, exist_ok=True)
    frames, height, width = shape.clip
    rows, columns = np.mgrid[0:height, 0:width]
    lines = ["path,text"]
    for number in range(count):
        waves = [np.sin((columns * (number + 1) + rows * 2 + 3 * t) / 23) for t in range(frames)]
        grey = np.stack([(127 + 100 * wave).astype(np.uint8) for wave in waves])
        write_video(folder / f"{number}.mp4", np.repeat(grey[..., None], 3, axis=-1), 24.0)
        lines.append(f"{number}.mp4,stripes number {number}")
    (folder / "plain.csv").write_text("\n".join(lines) + "\n")
    osora("data", "meta", "--input", str(folder / "plain.csv"), "--output", str(folder / "clips.csv"))
    return folder / "clips.csv"


def time_run(shape: Shape, args: argparse.Namespace) -> None:
    """The command itself, with saves in the background, a verdict on them, and a resume."""
    folder = Path(args.dir)
    table = make_table(folder / "clips", shape, 4 * shape.batch)
    every = max(1, args.updates // 3)
    texts = [json.dumps({"type": "text_embedder", "kind": "hashed_ngrams", "width": width, "max_length": length})
             for width, length in ((4096, TEXT_TOKENS), (768, 77))]  # fmt: skip
    osora(
        "train", "diffusion", shape.preset, "--dataset.data-path", str(table), "--model.depth", str(args.depth[0]),
        "--model.depth-single-blocks", str(args.depth[1]), "--ae.from-pretrained", "null", "--t5", texts[0],
        "--clip", texts[1], "--bucket-config", json.dumps(shape.bucket), "--outputs", str(folder), "--exp-name", "run",
        "--async-io", "--max-steps", str(args.updates), "--log-every", "1", "--ckpt-every", str(every),
        "--num-workers", "6", "--dtype", args.dtype, "--warmup-ae",
    )  # fmt: skip
    run = folder / "run"
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    records = [record for record in lines if "kind" not in record]
    steady = [r for r in records if r["step"] > 3] or records
    log = (run / "log.txt").read_text()
    print(f"updates             {records[-1]['step']}, loss {records[0]['loss']:.4g} -> {records[-1]['loss']:.4g}")
    print(f"update, median      {statistics.median(r['step_s'] for r in steady):.3f} s, autoencoder and data included")
    print(f"data wait, median   {statistics.median(r['data_wait_s'] for r in steady):.4f} s")
    memory = re.findall(r"peak memory ([0-9.]+) GiB", log)
    print(f"peak memory         {max(map(float, memory)):.2f} GiB" if memory else "peak memory         not told")
    for step, how in re.findall(r"Saved checkpoint .*? global_step (\d+) to \S+ \((.*)\)", log):
        print(f"save at {step:>4}        {how}")
    began = time.perf_counter()
    osora("ckpt", "verify", str(run))
    print(f"verified            {time.perf_counter() - began:.1f} s")
    osora("resume", str(run), "--max-steps", str(args.updates + 2))
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    steps = [record["step"] for record in lines if "kind" not in record]
    print(f"resumed             to update {steps[-1]}, each once: {len(steps) == len(set(steps))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["model", "run"])
    parser.add_argument("--shape", choices=list(SHAPES), nargs="+", default=["256px"], help="`run` takes the first")
    parser.add_argument("--compile", choices=["both", "on", "off"], default="both", help="of `model`: the blocks")
    parser.add_argument("--attention", choices=list(KERNELS), help="of `model`: this kernel first, else osora's order")
    parser.add_argument("--depth", type=int, nargs=2, default=[4, 8], metavar=("DOUBLE", "SINGLE"))
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--keep-activations", action="store_true", help="recompute nothing")
    parser.add_argument("--tiny", action="store_true", help="of `model`: a small width, to try it without a GPU")
    parser.add_argument("--dir", default="bench-diffusion")
    args = parser.parse_args()
    if args.attention is not None:
        first = KERNELS[args.attention]
        attention.KERNEL_ORDER[:] = [first, *(kernel for kernel in attention.KERNEL_ORDER if kernel != first)]
    if args.what == "model":
        time_model(args.shape, args)
    else:
        time_run(SHAPES[args.shape[0]], args)


if __name__ == "__main__":
    main()
