"""The Triton kernels' arithmetic, by Triton's interpreter on the CPU; on a GPU see tests/gpu/test_kernels.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from osora_cli.model.dc_ae import kernels

TESTS = Path(__file__).parents[2]


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_are_torch_in_output_and_gradients() -> None:
    """In a process of its own: the interpreter is chosen when a kernel's module is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "support.kernel_cases"], cwd=TESTS, capture_output=True, text=True, timeout=300,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    errors = json.loads(done.stdout)
    assert len(errors) > 15
    assert {case: found for case, found in errors.items() if not max(found) < 1e-5} == {}


def test_the_cpu_keeps_to_the_plain_form() -> None:
    assert not kernels.usable(torch.zeros(1))
