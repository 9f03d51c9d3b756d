"""The kernels that move tokens and pages and make tables, compiled for every architecture."""

from __future__ import annotations

import re

import pytest

from jitattn.jit.cubin import resources_of
from jitattn.kernels.pages.spec import GatherSpec, TransferSpec, every_config
from jitattn.spec.arch import ARCHITECTURES, ARCHS
from jitattn.spec.dtype import DType
from tests.support.compiler import compile_kernel

# What the largest has, and some more: 10 ms of ptxas for each KiB.
CODE_BYTES = 44 * 1024
# Gathers of int4 differ in an address.
_LIKE_INT4 = {DType.INT4_G64.value, DType.INT4_G32.value}
JOBS = tuple(
    (spec, arch)
    for i, arch in enumerate(ARCHITECTURES)
    for n, config in enumerate(every_config())
    for spec in config.specs(arch)
    # All for sm_90a; of the others a third each, and those of which there is one.
    if arch == "sm_90a" or n % 3 == i % 3 or not isinstance(spec, GatherSpec)
    if config.kv_dtype not in _LIKE_INT4 or (arch, config.out_dtype) == ("sm_90a", "bfloat16")
)


@pytest.mark.parametrize(("spec", "arch"), JOBS, ids=lambda x: getattr(x, "symbol", x))
def test_kernel(spec: TransferSpec, arch: str) -> None:
    kernel = compile_kernel(spec, arch)
    resources = resources_of(kernel.cubin, spec.symbol, arch)
    assert resources.spill_bytes == 0
    # Four CTAs of an SM hide each other's waits.
    assert resources.registers <= 80
    assert resources.smem_bytes + spec.tile(arch).smem_bytes <= ARCHS[arch].smem_bytes // 4
    assert resources.code_bytes <= CODE_BYTES
    assert not re.findall(r".*\bwarning\b.*", kernel.log)


def test_symbols_are_distinct() -> None:
    specs = [spec for spec, arch in JOBS if arch == "sm_90a"]
    assert len({spec.symbol for spec in specs}) == len(specs)
    assert GatherSpec(kv_dtype=DType.NVFP4, out_dtype=DType.FLOAT16) in specs
