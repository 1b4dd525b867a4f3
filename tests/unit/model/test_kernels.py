"""The Triton kernels' arithmetic, by Triton's interpreter on the CPU; on a GPU see tests/gpu/test_kernels.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

from osora_cli.model.dc_ae import kernels

TESTS = Path(__file__).parents[2]


def triton_version() -> tuple[int, int]:
    try:
        major, minor, *_ = version("triton").split(".")
    except PackageNotFoundError:
        return 0, 0
    return int(major), int(minor)


@pytest.mark.skipif(
    triton_version() < (3, 6), reason="Triton 3.6 or newer is not installed; interpreters before lack much"
)
@pytest.mark.parametrize("which", ["few", pytest.param("all", marks=pytest.mark.sweep)])
def test_kernels_are_torch_in_output_and_gradients(which: str) -> None:
    """In a process of its own: the interpreter is chosen when a kernel's module is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "support.kernel_cases", which], cwd=TESTS, capture_output=True, text=True, timeout=300,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    errors = json.loads(done.stdout)
    assert len(errors) >= 17
    assert {case: found for case, found in errors.items() if not max(found) < 1e-5} == {}


def test_the_cpu_keeps_to_the_plain_form() -> None:
    assert not kernels.usable(torch.zeros(1))
