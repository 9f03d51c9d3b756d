"""Instructions that kernels may have: seconds to compile them would depend on the machine.

ptxas takes about 10 ms for each 64 of them. A kernel of one decode family costs half a second, and
that should not change by accident. Who means to change it edits the table.
"""

from __future__ import annotations

import pytest

from jitattn.jit import nvrtc
from jitattn.jit.cubin import resources_of
from jitattn.jit.cutlass import WRAPPERS, wrapper_headers
from jitattn.kernels.registry import specs_of
from jitattn.spec.config import PlannerConfig
from jitattn.spec.family import KernelSpec
from jitattn.tools.explain import count_opcodes
from tests.support.compiler import compile_kernel

# Of the compiler that CI installs. Others make somewhat different code.
MEASURED_WITH = (13, 5)
MARGIN = 0.05
MARGIN_OF_OTHER_COMPILERS = 0.2

EVERYDAY = "head_dim=128"
FP8 = "head_dim=128,kv_dtype=float8_e4m3fn"
INT4 = "head_dim=128,kv_dtype=int4_g32"
SMALL_PAGES = "head_dim=128,page_size=1,page_table=separate"
SOFT_CAP = "head_dim=128,logits_soft_cap=30"
MASK = "head_dim=128,use_custom_mask=true"
TWO_DIMS = "head_dim=192,head_dim_vo=128"
# Instructions by configuration, arch, kernel. Prefill over quantised caches has vectors in
# registers, so that loops over them are unrolled, and converts Q in two places. Decode over four
# bits takes twice as many tokens a step as over 8.
BUDGETS: dict[tuple[str, str, str], int] = {
    (EVERYDAY, "sm_90a", "decode tensor"): 2808,
    (EVERYDAY, "sm_90a", "decode plain"): 2752,
    (EVERYDAY, "sm_90a", "decode tensor wide"): 3048,
    ("head_dim=64", "sm_90a", "decode tensor wide"): 3096,
    ("head_dim=64", "sm_80", "decode vector wide"): 3144,
    (EVERYDAY, "sm_90a", "prefill tensor"): 5752,
    ("head_dim=64", "sm_90a", "prefill tensor"): 5032,
    ("head_dim=96", "sm_90a", "prefill tensor"): 5616,
    ("head_dim=256", "sm_90a", "prefill tensor"): 6032,
    (TWO_DIMS, "sm_90a", "prefill tensor"): 5872,
    (SOFT_CAP, "sm_90a", "prefill tensor"): 6312,
    (MASK, "sm_90a", "prefill tensor"): 5560,
    (SMALL_PAGES, "sm_90a", "prefill vector"): 6032,
    (EVERYDAY, "sm_90a", "schedule"): 3584,
    (EVERYDAY, "sm_90a", "merge"): 928,
    (EVERYDAY, "sm_90a", "gather"): 1056,
    (FP8, "sm_90a", "gather"): 1320,
    (EVERYDAY, "sm_90a", "copy_pages"): 1880,
    (EVERYDAY, "sm_90a", "block_table"): 1072,
    (EVERYDAY, "sm_90a", "batch_info"): 888,
    (EVERYDAY, "sm_90a", "layer_tables"): 288,
    (EVERYDAY, "sm_80", "decode vector"): 2480,
    (EVERYDAY, "sm_120f", "decode vector"): 2768,
    (FP8, "sm_90a", "decode tensor"): 3320,
    (FP8, "sm_90a", "prefill vector"): 6944,
    (FP8, "sm_80", "decode vector"): 3112,
    (INT4, "sm_90a", "decode vector"): 4792,
    (INT4, "sm_90a", "prefill vector"): 8336,
    (INT4, "sm_80", "decode vector"): 3560,
    (SMALL_PAGES, "sm_90a", "decode vector"): 3200,
    ("head_dim=64,num_qo_heads=64", "sm_90a", "decode tensor"): 2856,
    ("head_dim=256,num_qo_heads=16", "sm_90a", "decode tensor"): 2880,
}

_INSTRUCTION_BYTES = 16


def kernel_of(config: str, arch: str, kernel: str) -> KernelSpec:
    family, loader, width = (*kernel.split(), "", "")[:3]
    found = [
        spec
        for spec in specs_of(PlannerConfig.parse(config), arch)
        if spec.kernel == family and getattr(spec, "loader", "") == loader
    ]
    return found[width == "wide"]  # the narrow one comes first


def instructions_of(key: tuple[str, str, str]) -> int:
    config, arch, kernel = key
    spec = kernel_of(config, arch, kernel)
    resources = resources_of(compile_kernel(spec, arch).cubin, spec.symbol, arch)
    return resources.code_bytes // _INSTRUCTION_BYTES


@pytest.mark.parametrize("key", BUDGETS, ids=" ".join)
def test_a_kernel_stays_within_its_budget(key: tuple[str, str, str]) -> None:
    margin = MARGIN if nvrtc.version() == MEASURED_WITH else MARGIN_OF_OTHER_COMPILERS
    assert instructions_of(key) <= BUDGETS[key] * (1 + margin)


def test_every_family_has_a_budget() -> None:
    families = {kernel.partition(" ")[0] for _, _, kernel in BUDGETS}
    assert {spec.kernel for spec in specs_of(PlannerConfig.parse(EVERYDAY), "sm_90a")} <= families


# ---------------------------------------------------------------------------- wgmma wrappers

# Bytes of header that the wrappers pull in, of which most is the list of instructions. What drags
# in cute/tensor.hpp or cuda::std costs seconds and is several times as much.
WRAPPER_BYTES = 1_046_936
PRODUCT_INSTRUCTIONS = 96

_REGISTERS = ", ".join(f"d[{i}]" for i in range(64))
PRODUCT = f"""
#include <cuda/std/cstdint>
#include <{WRAPPERS[0]}>
#include <{WRAPPERS[1]}>
extern "C" __global__ void __launch_bounds__(128) product(float* c) {{
  extern __shared__ __align__(1024) char smem[];
  using namespace cute::SM90::GMMA;
  float d[64];
  for (int i = 0; i < 64; i++) d[i] = 0.f;
  uint64_t a = __cvta_generic_to_shared(smem) >> 4, b = a + 1024;
  cute::warpgroup_arrive();
  MMA_64x128x16_F32BF16BF16_SS<Major::K, Major::K>::fma(a, b, {_REGISTERS});
  cute::warpgroup_commit_batch();
  cute::warpgroup_wait<0>();
  for (int i = 0; i < 64; i++) c[threadIdx.x * 64 + i] = d[i];
}}
"""


def test_the_wrappers_of_wgmma_compile_without_toolkit_headers() -> None:
    compiled = nvrtc.compile_cubin(
        PRODUCT,
        name="product.cu",
        headers=dict(wrapper_headers(PRODUCT)),
        options=nvrtc.options("sm_90a"),
    )
    resources = resources_of(compiled.cubin, "product", "sm_90a")
    assert resources.spill_bytes == 0
    assert resources.code_bytes // _INSTRUCTION_BYTES <= PRODUCT_INSTRUCTIONS * (1 + MARGIN)
    opcodes = count_opcodes(compiled.cubin)
    if opcodes is not None:
        assert opcodes["HGMMA"] == 1


def test_the_wrappers_of_wgmma_include_little() -> None:
    texts = dict(wrapper_headers(PRODUCT))
    assert "cute/tensor.hpp" not in texts
    assert sum(len(text.encode()) for text in texts.values()) <= WRAPPER_BYTES * (1 + MARGIN)
