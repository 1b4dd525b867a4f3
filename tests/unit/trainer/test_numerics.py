"""Freed memory is kept: an update is not paid for in page faults again."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
