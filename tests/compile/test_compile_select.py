"""The kernels that choose tokens and pages, compiled for every architecture."""

from __future__ import annotations

import re

import pytest

from jitattn.jit.cubin import resources_of
from jitattn.kernels.select.spec import IndexLogitsSpec, every_config
from jitattn.spec.arch import ARCHITECTURES, ARCHS
from jitattn.spec.family import KernelSpec
from tests.support.compiler import compile_kernel

CODE_BYTES = 56 * 1024  # what the largest has: 10 ms of ptxas for each KiB
SPECS = {arch: [*dict.fromkeys(s for c in every_config() for s in c.specs(arch))] for arch in ARCHS}
SAMPLED = 19  # of kernels whose numbers alone differ, for each architecture
# All that have an own template for sm_90a, and the indexer of DeepSeek everywhere.
JOBS = tuple(
    (spec, arch)
    for i, arch in enumerate(ARCHITECTURES)
    for n, spec in enumerate(SPECS[arch])
    if n % SAMPLED == i
    or (arch == "sm_90a" and not isinstance(spec, IndexLogitsSpec))
    or spec.symbol.endswith("d128_h64_t1")
    or (arch == "sm_90a" and spec.symbol.endswith("d128_h64_t4"))
)


@pytest.mark.parametrize(("spec", "arch"), JOBS, ids=lambda x: getattr(x, "symbol", x))
def test_kernel(spec: KernelSpec, arch: str) -> None:
    kernel = compile_kernel(spec, arch)
    resources = resources_of(kernel.cubin, spec.symbol, arch)
    assert resources.spill_bytes == 0
    assert resources.registers * spec.tile(arch).num_threads <= 64 * 1024
    assert resources.smem_bytes + spec.tile(arch).smem_bytes <= ARCHS[arch].smem_bytes
    assert resources.code_bytes <= CODE_BYTES
    # Products of a warpgroup that wait for each other are no warning.
    assert not re.findall(r".*\b(?:warning|serialized)\b.*", kernel.log)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_cta_fits(arch: str) -> None:
    specs = SPECS[arch]
    assert len({spec.symbol for spec in specs}) == len(specs)
    assert all(spec.tile(arch).smem_bytes <= ARCHS[arch].smem_bytes for spec in specs)
