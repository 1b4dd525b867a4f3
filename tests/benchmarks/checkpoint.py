"""What a save costs the training, and how long until it is on the disk: osora beside torch and TensorNVMe.

    python tests/benchmarks/checkpoint.py --folder DISK            # one H200, 12.9 GB of state, steps of 0.33 s
    python tests/benchmarks/checkpoint.py --folder DISK --small    # any machine, a minute

Goals (H200): visible time of a save in steady state at most 1 % of a step, durable within 1.1x of a raw write and
fsync of the same bytes, steps beside a save at most 3 % longer. Digests and verification: checkpoint_io.py.

A step is a chain of matrix products followed by an update of every parameter and moment in place, ended by a
synchronization, so that each step's time can be told. Visible is what the step with the save takes longer than the
median of those without; `all visible` sums that over all steps up to the commit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from checkpoint_io import raw_write  # beside this file
from checkpoint_methods import METHODS, Method, State

from osora_cli.errors import SetupError


@dataclass
class Work:
    """A training to save: its state, and what a step does."""

    device: torch.device
    side: int
    products: int
    state: State = field(default_factory=dict)

    def make_state(self, tensors: int, rows: int) -> None:
        """fp32 weights and two moments of AdamW, `tensors` matrices of [rows, rows] each."""
        for n in range(tensors):
            for name in ("model", "optimizer"):
                self.state.setdefault(name, {})
            self.state["model"][f"layer{n}.weight"] = torch.randn(rows, rows, device=self.device)
            for moment in ("exp_avg", "exp_avg_sq"):
                self.state["optimizer"][f"state.{n}.{moment}"] = torch.rand(rows, rows, device=self.device)
            self.state["optimizer"][f"state.{n}.step"] = torch.zeros((), device=self.device)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self._a = torch.randn(self.side, self.side, device=self.device, dtype=dtype)
        self._b = torch.randn(self.side, self.side, device=self.device, dtype=dtype)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for table in self.state.values() for t in table.values())

    def forward(self) -> None:
        for _ in range(self.products):
            torch.mm(self._a, self._b)

    def update(self) -> None:
        torch._foreach_mul_([t for table in self.state.values() for t in table.values()], 0.9999)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def step(self, method: Method | None, save: bool = False) -> float:
        """Seconds of one step; the save comes first, as after the update before."""
        started = time.perf_counter()
        if method is not None and save:
            method.save()
        self.forward()
        if method is not None:
            method.before_update()
        self.update()
        self.wait()
        return time.perf_counter() - started

    def calibrate(self, seconds: float) -> float:
        """Choose the number of products; returns the median of a step without any save."""
        for _ in range(3):
            self.step(None)
        self.products, base = 0, min(self.step(None) for _ in range(3))
        self.products = 8
        each = (min(self.step(None) for _ in range(3)) - base) / 8
        self.products = max(1, round((seconds - base) / max(each, 1e-6)))
        return statistics.median(self.step(None) for _ in range(15))


@dataclass
class Save:
    """One save: the step that it came with, the steps beside it, and all the time that it cost."""

    visible: float
    beside: list[float]
    all_visible: float


def measure(work: Work, method: Method, saves: int, idle: int) -> Iterator[tuple[Save, float]]:
    """A save, the steps until it is durable, some idle ones; yields it with the median of the steps without one."""
    quiet = [work.step(method) for _ in range(idle)]
    for _ in range(saves):
        baseline = statistics.median(quiet[-4 * idle :])
        with_save = work.step(method, save=True)
        beside = []
        while method.in_flight:
            beside.append(work.step(method))
        method.finish()
        lost = with_save - baseline + sum(t - baseline for t in beside)
        yield Save(with_save - baseline, beside, lost), baseline
        quiet += [work.step(method) for _ in range(idle)]


def one_method(name: str, work: Work, folder: Path, saves: int, idle: int) -> dict[str, object]:
    target = folder / "method"
    target.mkdir()
    method = None
    try:
        method = METHODS[name](target, work.state)
        seen = list(measure(work, method, saves, idle))
    except (SetupError, ImportError) as error:
        return {"method": name, "left_out": str(error).splitlines()[0]}
    except Exception as error:  # of another's code, such as torch's stager on a torch that it does not fit
        return {"method": name, "left_out": f"it failed: {type(error).__name__}: {error}"}
    finally:
        if method is not None:
            method.close()
        shutil.rmtree(target)
        if work.device.type == "cuda" and hasattr(torch._C, "_host_emptyCache"):
            torch._C._host_emptyCache()  # pinned buffers of one method are no burden to the next
    first, steady = seen[0], seen[1:]
    baseline = statistics.median(base for _, base in seen)
    beside = [t / base for save, base in steady for t in save.beside[:-1]]
    return {
        "method": name,
        "step_s": baseline,
        "first_visible_s": first[0].visible,
        "visible_s": statistics.median(save.visible for save, _ in steady),
        "visible_share": statistics.median(save.visible / base for save, base in steady),
        "all_visible_s": statistics.median(save.all_visible for save, _ in steady),
        "beside": statistics.median(beside) if beside else None,
        "durable_s": statistics.median(method.durable[1:]),
    }


def show_head(raw: float, total: int) -> None:
    print(f"\nstate {total / 1e9:.2f} GB; raw write + fsync {raw:.2f} s ({total / 1e9 / raw:.2f} GB/s)")
    head = ("", "visible, first", "steady", "of a step", "all visible", "steps beside", "durable", "of raw")
    print("{:<20}{:>15}{:>10}{:>11}{:>13}{:>14}{:>10}{:>8}".format(*head), flush=True)


def show(row: dict[str, object], raw: float) -> None:
    if "left_out" in row:
        print(f"{row['method']!s:<20}  left out: {row['left_out']}", flush=True)
        return
    beside = f"{row['beside']:.3f}x" if row["beside"] is not None else "-"
    print(
        f"{row['method']!s:<20}{row['first_visible_s']:>13.3f} s{row['visible_s']:>8.4f} s"
        f"{row['visible_share']:>11.1%}{row['all_visible_s']:>11.3f} s{beside:>14}"
        f"{row['durable_s']:>8.2f} s{row['durable_s'] / raw:>7.2f}x",  # type: ignore[operator]
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="on the disk that is meant (default: the system's temporary folder)")
    parser.add_argument(
        "--small", action="store_true", help="100 MB and steps of 50 ms, on the CPU where there is no GPU"
    )
    parser.add_argument("--saves", type=int, default=4, help="saves a method, the first apart")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS), metavar="NAME")
    parser.add_argument("--json", help="write the numbers here too")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not args.small:
        parser.error("no GPU: use --small")
    if args.saves < 2:
        parser.error("--saves: at least 2, the first stands apart")
    folder = Path(tempfile.mkdtemp(prefix="osora-bench-", dir=args.folder))
    try:
        work = Work(device, side=8192 if device.type == "cuda" else 256, products=1)
        work.make_state(*((8, 1024) if args.small else (64, 4096)))
        step = work.calibrate(0.05 if args.small else 0.33)
        print(f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}, step {step:.3f} s, {folder}")
        raw_write(folder / "raw", work.nbytes, 8)  # the first one also makes the files' place on the disk
        raw = raw_write(folder / "raw", work.nbytes, 8)
        show_head(raw, work.nbytes)
        rows = []
        for name in args.methods:
            rows.append(one_method(name, work, folder, args.saves, idle=4))
            show(rows[-1], raw)
        again = raw_write(folder / "raw", work.nbytes, 8)
        print(f"raw write + fsync once more: {again:.2f} s")
        if args.json:
            Path(args.json).write_text(
                json.dumps({"raw_s": raw, "raw_after_s": again, "bytes": work.nbytes, "rows": rows}, indent=2)
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
