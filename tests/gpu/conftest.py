"""What several GPU tests need."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.gpu.device import DEVICE


@pytest.fixture(scope="module")
def large_pool() -> Iterator[Tensor]:
    """8.6 GB: 131,074 pages of 16 tokens, 8 heads and 128 columns, K and V interleaved."""
    shape = (131_074, 2, 16, 8, 128)
    if DEVICE != "cuda":
        pytest.skip("8.6 GB for one test is for a GPU")
    if torch.cuda.mem_get_info()[0] < 2 * math.prod(shape) + 2**30:
        pytest.skip("needs 10 GB of device memory")
    pool = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
    yield pool
    del pool
    torch.cuda.empty_cache()
