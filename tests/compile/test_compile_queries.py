"""The kernel that dequantises queries, compiled for every architecture."""

from __future__ import annotations

import re

import pytest

from jitattn.jit.cubin import resources_of
from jitattn.kernels.attention.spec import DequantizeQueriesSpec
from jitattn.spec.arch import ARCHITECTURES
from tests.support.compiler import compile_kernel

SPEC = DequantizeQueriesSpec()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernel(arch: str) -> None:
    kernel = compile_kernel(SPEC, arch)
    resources = resources_of(kernel.cubin, SPEC.symbol, arch)
    assert resources.spill_bytes == 0
    # Three quarters of the threads that an SM has hide each other's waits.
    assert resources.registers <= 40
    assert resources.smem_bytes == SPEC.tile(arch).smem_bytes == 0
    assert not re.findall(r".*\bwarning\b.*", kernel.log)
