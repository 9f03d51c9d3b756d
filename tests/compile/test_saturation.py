"""Floats become 16-bit numbers by the saturating instruction in every kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from jitattn.kernels.common.spec import ScheduleSpec
from jitattn.kernels.merge.spec import MergeSpec
from jitattn.kernels.pages.spec import GatherSpec
from jitattn.kernels.registry import specs_of
from jitattn.spec.config import PlannerConfig
from jitattn.spec.dtype import DType
from jitattn.spec.family import KernelSpec
from tests.support.compiler import compile_kernel, opcodes

F16 = DType.FLOAT16
KERNELS: dict[tuple[str, str], KernelSpec] = {
    (arch, spec.symbol): spec
    for arch in ("sm_80", "sm_90a")
    for spec in (
        GatherSpec(kv_dtype=DType.BFLOAT16, out_dtype=F16),
        GatherSpec(kv_dtype=DType.FLOAT8_E5M2, out_dtype=F16),
        MergeSpec(dtype=F16),
        *specs_of(PlannerConfig(head_dim=64, q_dtype="float16", kv_dtype="float16"), arch)[:3],
    )
    if not isinstance(spec, ScheduleSpec)
}


@pytest.mark.parametrize(("arch", "symbol"), KERNELS)
def test_conversions_to_float16(arch: str, symbol: str, tmp_path: Path) -> None:
    found = opcodes(compile_kernel(KERNELS[arch, symbol], arch).cubin, tmp_path)
    conversions = [code for code in found if code.startswith("F2FP")]
    assert conversions
    assert [code for code in conversions if "SATFINITE" not in code] == []
