"""fp32 is fp32 in these tests: without TF32, which torch allows in convolutions by default."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _exact_fp32() -> Iterator[None]:
    convolutions, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = convolutions.allow_tf32, products.allow_tf32
    convolutions.allow_tf32 = products.allow_tf32 = False
    yield
    convolutions.allow_tf32, products.allow_tf32 = before
