"""Kernels of variants compile for every architecture without spills. Needs NVRTC and no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from jitattn.jit.cubin import resources_of
from jitattn.kernels.common.spec import AttentionSpec
from jitattn.kernels.mla.spec import MLASpec
from jitattn.kernels.registry import specs_of
from jitattn.spec.arch import ARCHITECTURES, ARCHS
from jitattn.spec.config import MLAConfig, PlannerConfig
from jitattn.spec.layout import Loader
from tests.compile.test_compile_all import Job
from tests.support.compiler import compile_kernel
from tests.support.variants import EVERYTHING

EVERYWHERE = (PlannerConfig(), MLAConfig(num_heads=16))
# Prefill of warps and with conversions, latents of warps, and what needs most registers.
ON_HOPPER = (
    PlannerConfig(head_dim=512, logits_soft_cap=30.0),
    PlannerConfig(head_dim=512, kv_dtype="float8_e4m3fn", logits_soft_cap=30.0),
    PlannerConfig(head_dim=256, kv_dtype="float8_e4m3fn", use_custom_mask=True),
    MLAConfig(kv_dtype="float8_e4m3fn"),
)


def jobs() -> Iterator[Job]:
    for arch in ARCHITECTURES:
        for config in (*EVERYWHERE, *(ON_HOPPER if arch == "sm_90a" else ())):
            specs = specs_of(replace(config, variant=EVERYTHING), arch)
            for spec in specs:
                if isinstance(spec, AttentionSpec) and spec.loader is not Loader.PLAIN:
                    yield Job(spec, arch)


@pytest.mark.parametrize("job", list(jobs()), ids=str)
def test_kernel(job: Job) -> None:
    result = compile_kernel(job.spec, job.arch)
    found = resources_of(result.cubin, job.spec.symbol, job.arch)
    # Latents of 8 bits leave two registers too few once a job, four where rows hold scales.
    allowed = 0
    if isinstance(job.spec, MLASpec) and job.spec.dequantises:
        allowed = 16 if job.spec.has_scales else 8
    assert found.spill_bytes <= allowed
    smem_bytes = found.smem_bytes + job.spec.tile(job.arch).smem_bytes
    assert smem_bytes <= ARCHS[job.arch].smem_bytes
    assert "serialized" not in result.log
    assert not [line for line in result.log.splitlines() if "variant" in line and "warning" in line]
