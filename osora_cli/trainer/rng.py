"""Generator states, as plain JSON values.

No draw of osora's own hangs on them (each comes from a hash of seed and position, see data/draws.py). They are kept
for what libraries draw by themselves, dropout for one.
"""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch

from osora_cli.data.draws import draw_seed


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, numpy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_rank(seed: int, rank: int, *place: str | int) -> None:
    """Seed the generators for one rank's own draws (dropout): rank 0 as `seed_everything` does, unless a place in
    the run is given."""
    seed_everything(seed if rank == 0 and not place else draw_seed(seed, "rank", rank, *place))


def capture() -> dict[str, Any]:
    """States of all generators that exist in this process."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, state, gauss_next = random.getstate()
    return {
        "python": [version, list(state), gauss_next],
        "numpy": [str(kind), [int(k) for k in keys], int(position), int(has_gauss), float(gauss)],
        "torch": _encode(torch.get_rng_state()),
        "cuda": [_encode(s) for s in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
    }


def restore(states: dict[str, Any]) -> None:
    """Put back what `capture` gave. CUDA states are taken only where the number of GPUs is the same."""
    version, state, gauss_next = states["python"]
    random.setstate((version, tuple(state), gauss_next))
    kind, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(_decode(states["torch"]))
    cuda = states.get("cuda", [])
    if cuda and torch.cuda.is_available() and len(cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_decode(s) for s in cuda])


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
