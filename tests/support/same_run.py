"""Whether two runs ended in the same state: every record, and every tensor of the newest checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from support.tiny import records


def tensors(run: Path) -> dict[str, torch.Tensor]:
    """Everything of the newest checkpoint that training changes, by file and key."""
    newest = run / (run / "latest").read_text().strip()
    found: dict[str, torch.Tensor] = {}
    for path in sorted(newest.rglob("*.safetensors")):
        found |= {f"{path.relative_to(newest)}/{k}": t for k, t in load_file(path).items()}
    if (newest / "ema.pt").exists():
        average = torch.load(newest / "ema.pt", weights_only=True)
        found |= {f"ema.safetensors/{k}": t for k, t in average.items()}
    return found


def assert_same_run(straight: Path, broken: Path, updates: int) -> None:
    """The records of both go from 1 to `updates` and are equal, and so is every tensor, bit for bit."""
    a, b = records(straight), records(broken)
    assert [r["step"] for r in b] == list(range(1, updates + 1))
    assert a == b
    left, right = tensors(straight), tensors(broken)
    assert left.keys() == right.keys()
    assert {k.split("/")[0] for k in left} >= {"model", "optimizer", "ema.safetensors"}
    assert [k for k in left if not torch.equal(left[k], right[k])] == []
