"""Where a step of autoencoder training goes: medians of its parts, and the least each could take on this machine.

    python tests/benchmarks/step_parts.py [--stage 1|2|both] [--steps 20] [--frames 32] [--px 256] [--profile FILE]
    python tests/benchmarks/step_parts.py --tiny          (CPU, seconds: does the script run)

Takes the real steps of the tasks, with random weights and a random clip: batch 1, no stills among the clips, no
gradient checkpointing unless `--grad-checkpoint`. Each part is timed where it stands in the step (CUDA events, parts
inside a part taken off), `host` is the time until the host had issued it. `least` is what the part's floating-point
operations cost at the rate of a bf16 matrix product of 8192, or its bytes at the rate of a copy of 2 GiB, both
measured in this run. "the rest" is what a step does outside the named parts.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import osora_cli.trainer.vae as stage_1
import osora_cli.trainer.vae_gan as stage_2
from osora_cli.app.vae.start import build_autoencoder
from osora_cli.app.vae.train import optim_settings, task_settings
from osora_cli.app.vae.train_disc import disc_optim_settings, gan_settings
from osora_cli.config.load import load_config
from osora_cli.config.schema import TrainVaeConfig
from osora_cli.config.vae_disc import TrainVaeDiscConfig
from osora_cli.data.loader import ClipBatch
from osora_cli.engine import adamw
from osora_cli.engine.native import NativeEngine, NativeTrained
from osora_cli.model.build import build_model
from osora_cli.model.losses import LastConvRecorder
from osora_cli.model.perceptual import LPIPS
from osora_cli.tensors import DTYPES
from osora_cli.trainer.ema import Ema
from osora_cli.trainer.schedule import Schedule
from osora_cli.trainer.task import StepContext, TrainTask

FORWARD, BACKWARD, LPIPS_PART, LOSS = "forward", "backward", "LPIPS, with its gradient", "other losses"
ADVERSARIAL, DISC_STEP = "adversarial term", "discriminator's step"
NORM, CLIP, ADAMW, WORKING, EMA = "gradient norm", "clipping", "AdamW", "bf16 working copy", "EMA"
STEP, REST = "whole step", "the rest"
# Bytes a parameter: reads and writes of fp32 masters, gradients and moments, and of the bf16 copy.
BYTES = {NORM: 4, CLIP: 8, ADAMW: 28, WORKING: 6, EMA: 12}


class Clock:
    """Times spans that may lie in each other. The time of a span is without that of the spans in it."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._open: list[str] = []
        self._marks: list[tuple[str, Any, float]] = []  # (the span that goes on from here, device's mark, host's)

    def _mark(self) -> None:
        now = time.perf_counter()
        event: Any = now
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self._marks.append((self._open[-1] if self._open else "", event, now))

    def begin(self, name: str) -> None:
        self._open.append(name)
        self._mark()

    def end(self) -> None:
        self._open.pop()
        self._mark()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        self.begin(name)
        try:
            yield
        finally:
            self.end()

    def wraps(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.span(name):
                return function(*args, **kwargs)

        return timed

    def watch(self, name: str, module: nn.Module) -> None:
        """Time each forward of a module."""
        module.register_forward_pre_hook(lambda *_: self.begin(name))
        module.register_forward_hook(lambda *_: self.end())

    def take(self) -> tuple[dict[str, float], dict[str, float]]:
        """(seconds by part on the device, on the host) since the last call."""
        if self._cuda:
            torch.cuda.synchronize()
        device: dict[str, float] = {}
        host: dict[str, float] = {}
        for (name, a, began), (_, b, ended) in zip(self._marks, self._marks[1:], strict=False):
            if name:
                device[name] = device.get(name, 0.0) + (a.elapsed_time(b) / 1e3 if self._cuda else b - a)
                host[name] = host.get(name, 0.0) + ended - began
        self._marks.clear()
        return device, host


@dataclass
class Stage:
    """A stage of training, ready to step, and what its parts cost at the least."""

    task: TrainTask
    ema: Ema
    batch: ClipBatch
    clock: Clock
    flops: dict[str, float]
    parameters: int
    disc_parameters: int = 0
    update: int = 0
    device_s: list[dict[str, float]] = field(default_factory=list)
    host_s: list[dict[str, float]] = field(default_factory=list)

    def step(self) -> None:
        self.clock.begin(REST)
        self.task.micro_step(self.batch, StepContext(0, self.update, 0, 1, 0, 1))
        results = self.task.update(self.update)
        with self.clock.span(EMA):
            self.ema.update(results["model"].skipped)
        self.clock.end()
        self.update += 1

    def measure(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
            device, host = self.clock.take()
            self.device_s.append(device)
            self.host_s.append(host)


def make_stage(number: int, args: argparse.Namespace, device: torch.device) -> Stage:
    config = _config(number, args)
    torch.manual_seed(0)
    clock = Clock(device)
    engine = NativeEngine(device, config.dtype, "none")
    module = build_autoencoder(config, None)
    recorder = LastConvRecorder.of(module, module.get_last_layer())
    network = engine.prepare(module, optim_settings(config))
    assert isinstance(network, NativeTrained)
    perceptual = _random_lpips(DTYPES[config.dtype], device)
    if args.compile_lpips:
        perceptual.compile(dynamic=False)
    clock.watch(FORWARD, network.module)
    clock.watch(LPIPS_PART, perceptual)
    _time(clock, network, {"backward": BACKWARD, "_refresh_working": WORKING})
    frames, px = args.frames, args.px
    flops = _flops(config, frames, px)
    parameters = sum(p.numel() for p in module.parameters() if p.requires_grad)
    settings = task_settings(config)
    disc_parameters = 0
    task: TrainTask
    if number == 1:
        task = stage_1.VaeTask(network, engine, Schedule(1e-5), settings, perceptual)
    else:
        assert isinstance(config, TrainVaeDiscConfig)
        disc = build_model(config.discriminator.model_copy(update={"from_pretrained": None}), device="cpu", seed=0)
        disc_parameters = sum(p.numel() for p in disc.parameters())
        discriminator = engine.prepare(disc, disc_optim_settings(config))
        task = stage_2.VaeGanTask(
            network, discriminator, engine, Schedule(1e-5), Schedule(1e-5), recorder, settings, gan_settings(config),
            perceptual,
        )  # fmt: skip
        _time(clock, discriminator, {"_refresh_working": WORKING})
        _time(clock, task, {"_train_discriminator": DISC_STEP})
        flops |= _disc_flops(config, frames, px)
    video = torch.randint(0, 256, (1, 3, frames, px, px), dtype=torch.uint8)
    if device.type == "cuda":
        video = video.pin_memory()
    batch = ClipBatch(video, (0,), (0,), ("",), (24.0,), (math.nan,), (), (), 0.0)
    ema = Ema(network.master_shards(), config.ema_decay or 0.99)
    return Stage(task, ema, batch, clock, flops, parameters, disc_parameters)


@contextmanager
def timed_functions(clock: Clock) -> Iterator[None]:
    """Times what the tasks and engines call by its module's name."""
    spans: list[tuple[Any, str, str]] = [
        (adamw, "global_norm", NORM),
        (adamw, "clip", CLIP),
        (adamw, "step", ADAMW),
        (stage_1, "vae_loss", LOSS),
        (stage_2, "vae_gan_loss", ADVERSARIAL),
    ]
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in spans]
    try:
        for owner, name, part in spans:
            setattr(owner, name, clock.wraps(part, getattr(owner, name)))
        yield
    finally:
        for owner, name, function in kept:
            setattr(owner, name, function)


def _time(clock: Clock, owner: Any, methods: dict[str, str]) -> None:
    for name, part in methods.items():
        setattr(owner, name, clock.wraps(part, getattr(owner, name)))


def _config(number: int, args: argparse.Namespace) -> TrainVaeConfig:
    preset = args.preset or ("demo/vae" if args.tiny else "vae/train/video_dc_ae")
    disc_preset = args.disc_preset or ("demo/vae_disc" if args.tiny else "vae/train/video_dc_ae_disc")
    config: TrainVaeConfig
    if number == 1:
        config = load_config(preset, TrainVaeConfig).config
    else:
        config = load_config(disc_preset, TrainVaeDiscConfig).config
    losses = config.vae_loss_config
    if losses.perceptual_loss_weight == 0:
        losses = losses.model_copy(update={"perceptual_loss_weight": 0.5})
    return config.model_copy(
        update={"grad_checkpoint": args.grad_checkpoint, "mixed_strategy": None, "vae_loss_config": losses}
    )


def _random_lpips(dtype: torch.dtype, device: torch.device) -> LPIPS:
    net = LPIPS(compute_dtype=dtype)
    for name, p in net.named_parameters():
        if name.startswith("lin"):
            p.data.abs_()
        elif p.dim() > 1:
            nn.init.kaiming_normal_(p)
    return net.to(device)


# -- the least it could take ------------------------------------------------------------------------------------------


def _flops(config: TrainVaeConfig, frames: int, px: int) -> dict[str, float]:
    """Floating-point operations by part; what cannot be counted is left out."""
    forward = _count(build_model(_unloaded(config.model), device="meta"), (1, 3, frames, px, px))
    with torch.device("meta"):
        lpips = LPIPS()
    # Target and reconstruction forward, the reconstruction backward to the input.
    vgg = _count(lpips.net, (1, 3, px, px)) * frames * 3
    # A gradient at the input and one at the weights.
    return {FORWARD: forward, BACKWARD: 2 * forward, LPIPS_PART: vgg}


def _disc_flops(config: TrainVaeDiscConfig, frames: int, px: int) -> dict[str, float]:
    once = _count(build_model(_unloaded(config.discriminator), device="meta"), (1, 3, frames, px, px))
    # For the generator: forward and gradient at the input. For itself: both clips, forward and two gradients.
    return {ADVERSARIAL: 2 * once, DISC_STEP: 6 * once}


def _unloaded(section: Any) -> Any:
    return section.model_copy(update={"from_pretrained": None})


def _count(module: nn.Module, shape: tuple[int, ...]) -> float:
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            module(torch.empty(shape, device="meta"))
    except Exception as error:  # a kernel without a rule for shapes: the column stays empty
        print(f"operations of {type(module).__name__} not counted: {type(error).__name__}")
        return math.nan
    return float(counter.get_total_flops())


def matrix_rate(device: torch.device) -> float:
    """FLOP/s of a bf16 matrix product (fp32 and small on the CPU)."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    return 2 * size**3 / _median_s(lambda: a @ b, device)


def copy_rate(device: torch.device) -> float:
    """Bytes/s of a copy, read and written bytes together."""
    size = 2**31 if device.type == "cuda" else 2**26
    a = torch.empty(size, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    return 2 * size / _median_s(lambda: b.copy_(a), device)


def _median_s(action: Callable[[], object], device: torch.device, repeat: int = 15) -> float:
    clock = Clock(device)
    seconds = []
    for _ in range(repeat):
        with clock.span("it"):
            action()
        seconds.append(clock.take()[0]["it"])
    return statistics.median(seconds[3:])


# -- telling ----------------------------------------------------------------------------------------------------------


def report(number: int, stage: Stage, flop_rate: float, byte_rate: float) -> float:
    """Print the table. Returns the median step in seconds."""
    order = [FORWARD, LPIPS_PART, LOSS, ADVERSARIAL, BACKWARD, DISC_STEP, NORM, CLIP, ADAMW, WORKING, EMA, REST]
    whole = statistics.median(sum(s.values()) for s in stage.device_s)
    print(f"\nstage {number}{'':<22} {'ms':>9} {'share':>7} {'host ms':>9} {'least ms':>9}")
    median: dict[str, float] = {}
    for part in order:
        values = [s.get(part, 0.0) for s in stage.device_s]
        if not any(values):
            continue
        median[part] = statistics.median(values)
        host = statistics.median(s.get(part, 0.0) for s in stage.host_s)
        least = _least(stage, part, flop_rate, byte_rate)
        shown = "" if math.isnan(least) else f"{1e3 * least:9.2f}"
        print(f"{part:<29} {1e3 * median[part]:9.2f} {median[part] / whole:7.1%} {1e3 * host:9.2f} {shown:>9}")
    host = statistics.median(sum(s.values()) for s in stage.host_s)
    spread = [f"{1e3 * sum(s.values()):.1f}" for s in (_fastest(stage), _slowest(stage))]
    net = median[FORWARD] + median[BACKWARD]
    print(f"{STEP:<29} {1e3 * whole:9.2f} {1:7.1%} {1e3 * host:9.2f}           ({' to '.join(spread)})")
    print(f"{whole / net:.3f} x the net's forward and backward ({1e3 * net:.1f} ms)")
    return whole


def _fastest(stage: Stage) -> dict[str, float]:
    return min(stage.device_s, key=lambda s: sum(s.values()))


def _slowest(stage: Stage) -> dict[str, float]:
    return max(stage.device_s, key=lambda s: sum(s.values()))


def _least(stage: Stage, part: str, flop_rate: float, byte_rate: float) -> float:
    if part in stage.flops:
        return stage.flops[part] / flop_rate
    # The average is of the autoencoder alone.
    count = stage.parameters + (0 if part == EMA else stage.disc_parameters)
    return BYTES[part] * count / byte_rate if part in BYTES else math.nan


def profile(stage: Stage, path: Path, device: torch.device, *, append: bool) -> None:
    """One step under torch's profiler: operators by their own time."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, record_shapes=True) as traced:
        stage.step()
        stage.clock.take()
    key = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    with path.open("a" if append else "w", encoding="utf-8") as file:
        for by_shape in (False, True):
            averages = traced.key_averages(group_by_input_shape=by_shape)
            file.write(averages.table(sort_by=key, row_limit=60, max_name_column_width=70) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=("1", "2", "both"), default="both")
    parser.add_argument("--preset", help="of stage 1; vae/train/video_dc_ae")
    parser.add_argument("--disc-preset", help="of stage 2; vae/train/video_dc_ae_disc")
    parser.add_argument("--frames", type=int)
    parser.add_argument("--px", type=int)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--grad-checkpoint", action="store_true")
    parser.add_argument("--compile-lpips", action="store_true")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="a table of operators goes here")
    parser.add_argument("--tiny", action="store_true", help="the demo's presets, small, also on the CPU")
    args = parser.parse_args()
    args.frames = args.frames or (8 if args.tiny else 32)
    args.px = args.px or (64 if args.tiny else 256)
    if not torch.cuda.is_available() and not args.tiny:
        parser.error("no GPU: take --tiny")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    flop_rate, byte_rate = matrix_rate(device), copy_rate(device)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}: matrix product {flop_rate / 1e12:.3g} TFLOP/s", end=", ")
    print(f"copy {byte_rate / 1e12:.3g} TB/s; clip 1x3x{args.frames}x{args.px}x{args.px}, {args.steps} steps")
    medians = []
    for number in (1, 2) if args.stage == "both" else (int(args.stage),):
        stage = make_stage(number, args, device)
        with timed_functions(stage.clock):
            for _ in range(args.warm_up):
                stage.step()
                stage.clock.take()
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            stage.measure(args.steps)
            medians.append(report(number, stage, flop_rate, byte_rate))
            if device.type == "cuda":
                print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
            if args.profile is not None:
                profile(stage, args.profile, device, append=len(medians) > 1)
        del stage
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if len(medians) == 2:
        print(f"\nstage 2 is {medians[1] / medians[0]:.3f} x stage 1")


if __name__ == "__main__":
    main()
