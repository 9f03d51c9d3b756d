"""The specs whose kernels have warpgroups: more than `sample_specs` has."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace

from jitattn.kernels.attention.spec import PrefillSpec
from jitattn.kernels.registry import specs_of
from jitattn.spec.config import HEAD_DIMS, PlannerConfig
from jitattn.spec.dtype import DType
from jitattn.spec.layout import Layout, Loader

ARCH = "sm_90a"

FP8_PRODUCTS = "q_dtype=float8_e4m3fn,kv_dtype=float8_e4m3fn,fp8_products=fast"
# Both kernels of each: every tile, boxes of every size, and what needs most registers.
CONFIGS = (
    "head_dim=64",
    "head_dim=64,page_size=24,logits_soft_cap=30",
    "head_dim=128",
    "head_dim=128,page_size=8,page_table=separate,q_dtype=float16,kv_dtype=float16",
    "head_dim=128,page_size=8",
    "head_dim=128,page_size=24,page_table=csr",
    "head_dim=192,head_dim_vo=64,page_size=24,page_table=csr",
    "head_dim=128,page_size=64,logits_soft_cap=30",
    "head_dim=128,page_size=256,use_custom_mask=true,logits_soft_cap=30",
    "head_dim=128,page_size=1,page_table=token",
    "head_dim=64,head_dim_vo=128",
    "head_dim=192,head_dim_vo=128,page_size=128",
    "head_dim=192,page_table=csr,logits_soft_cap=30,use_custom_mask=true",
    "head_dim=256",
    "head_dim=256,page_size=64,logits_soft_cap=30,use_custom_mask=true",
    "head_dim=256,page_table=ragged,page_size=none",
    "head_dim=512",
    "head_dim=512,page_size=1,page_table=token,out_dtype=float32",
    "head_dim=512,page_size=64,logits_soft_cap=30,use_custom_mask=true",
    "head_dim=256,head_dim_vo=512,page_table=ragged,page_size=none",
    "head_dim=64,kv_dtype=float8_e4m3fn,logits_soft_cap=30",
    "head_dim=128,kv_dtype=float8_e4m3fn",
    "head_dim=128,page_size=1,q_dtype=float16,kv_dtype=float8_e4m3fn,logits_soft_cap=30",
    "head_dim=192,head_dim_vo=128,page_table=separate,kv_dtype=float8_e5m2",
    "head_dim=192,page_size=24,kv_dtype=float8_e4m3fn",
    "head_dim=256,page_table=csr,kv_dtype=float8_e5m2,logits_soft_cap=30,use_custom_mask=true",
    "head_dim=64,kv_dtype=nvfp4",
    "head_dim=512,kv_dtype=float8_e4m3fn",
    "head_dim=256,head_dim_vo=512,kv_dtype=nvfp4,logits_soft_cap=30",
    "head_dim=128,kv_dtype=nvfp4,logits_soft_cap=30",
    "head_dim=256,page_table=token,q_dtype=float16,kv_dtype=nvfp4,use_custom_mask=true",
    f"head_dim=128,{FP8_PRODUCTS}",
    f"head_dim=224,head_dim_vo=128,page_size=4,use_custom_mask=true,logits_soft_cap=30,{FP8_PRODUCTS}",
)


@functools.cache
def warpgroup_specs() -> tuple[PrefillSpec, ...]:
    """Both kernels of each configuration, and one of every head dim."""
    return tuple(dict.fromkeys((*_configured(), *_of_each_head_dim())))


def _configured() -> Iterator[PrefillSpec]:
    for text in CONFIGS:
        for spec in specs_of(PlannerConfig.parse(text), ARCH):
            if isinstance(spec, PrefillSpec):
                yield spec


def _of_each_head_dim() -> Iterator[PrefillSpec]:
    # Fields whose numbers of values have no factor in common meet in every combination, in time.
    turns = zip(
        [head_dim for head_dim in HEAD_DIMS if head_dim <= 256],
        itertools.cycle((None, 48, 256, 112, 128)),
        itertools.cycle((3, 16, 48, 128)),
        itertools.cycle((Layout.SEPARATE, Layout.CSR, Layout.TOKEN)),
        itertools.cycle((DType.BFLOAT16, DType.FLOAT16, DType.FLOAT16, DType.BFLOAT16)),
        itertools.cycle((None, None, DType.FLOAT8_E4M3FN, None, DType.FLOAT8_E5M2)),
        itertools.cycle((DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)),
        itertools.cycle(((False, False), (True, False), (False, True), (True, True), (True, True))),
        itertools.cycle((False, True)),
        strict=False,
    )
    for turn in turns:
        head_dim, value_dim, page_size, page_table, dtype, fp8, out_dtype, uses, is_aligned = turn
        spec = PrefillSpec(
            head_dim=head_dim,
            head_dim_vo=value_dim or head_dim,
            page_size=page_size,
            q_dtype=dtype,
            kv_dtype=fp8 or dtype,
            out_dtype=out_dtype,
            page_table=page_table,
            loader=Loader.PLAIN,
            use_logits_soft_cap=uses[0],
            use_custom_mask=uses[1],
        )
        fast = Loader.TENSOR if spec.uses_tma(ARCH) else Loader.VECTOR
        yield replace(spec, loader=fast) if is_aligned else spec
