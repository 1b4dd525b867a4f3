"""Numbers too small to matter cost nothing while training; freed memory is kept."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from osora_cli.trainer.numerics import subnormals_flushed

BODY = """
import resource
import numpy as np
from osora_cli.trainer.numerics import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        np.ones(1 << 22)  # 32 MiB, touched, freed
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first = faults()
keep_freed_memory()
faults()
print(first, faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc")
def test_buffers_of_an_update_are_used_again() -> None:
    done = subprocess.run([sys.executable, "-c", BODY], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert after < before / 10


def test_subnormal_numbers_are_zeros_inside_and_numbers_again_afterwards() -> None:
    small = torch.tensor([1e-30])
    with subnormals_flushed():
        assert (small * 1e-10).item() == 0
    assert 0 < (small * 1e-10).item() < 1e-39
    with pytest.raises(ValueError, match="x"), subnormals_flushed():
        raise ValueError("x")
    assert (small * 1e-10).item() > 0
