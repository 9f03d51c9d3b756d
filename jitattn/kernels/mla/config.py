"""What ``MLAPlanner`` supports, and the kernels of its arguments. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jitattn.base.errors import ConfigError
from jitattn.kernels.common.spec import ScheduleSpec
from jitattn.kernels.mla.spec import MLASpec
from jitattn.kernels.mla.tile import NARROW_ROWS, has_warpgroup_tile, mla_row_tile
from jitattn.spec.arch import check_arch
from jitattn.spec.config import MLAConfig
from jitattn.spec.constraint import (
    VARIANT_RANGE,
    Rule,
    broken,
    fp8_products_rule,
    not_with_lists,
    one_of,
    page_size_rule,
    rule,
)
from jitattn.spec.dtype import OUT_DTYPES, Q_DTYPES, DType
from jitattn.spec.family import KernelSpec
from jitattn.spec.layout import LISTS, PAGE_TABLES, ListLayout, Loader, layout_of

KV_LORA_RANKS = (256, 512)
QK_ROPE_HEAD_DIMS = (32, 64)
MAX_HEADS = 128
SCALE_BLOCK = 128
"""Elements of the latent that share a float32 scale, where rows hold their scales."""
RULES: tuple[Rule[MLAConfig], ...] = (
    rule(
        "num_heads",
        f"1 to {MAX_HEADS}",
        lambda c: 1 <= c.num_heads <= MAX_HEADS,
        f"is not from 1 to {MAX_HEADS}",
    ),
    rule(
        "kv_lora_rank",
        ", ".join(map(str, KV_LORA_RANKS)),
        lambda c: c.kv_lora_rank in KV_LORA_RANKS,
        f"is not one of {', '.join(map(str, KV_LORA_RANKS))}",
    ),
    rule(
        "qk_rope_head_dim",
        ", ".join(map(str, QK_ROPE_HEAD_DIMS)),
        lambda c: c.qk_rope_head_dim in QK_ROPE_HEAD_DIMS,
        f"is not one of {', '.join(map(str, QK_ROPE_HEAD_DIMS))}",
    ),
    page_size_rule(),
    one_of("q_dtype", Q_DTYPES, " (FP8 queries of latents are not built yet)"),
    rule(
        "kv_dtype",
        "the same as q_dtype, float8_e4m3fn",
        lambda c: c.kv_dtype in (c.q_dtype, "float8_e4m3fn"),
        "is neither q_dtype nor float8_e4m3fn",
    ),
    rule(
        "out_dtype",
        "None (q_dtype), " + ", ".join(OUT_DTYPES),
        lambda c: c.out_dtype is None or c.out_dtype in OUT_DTYPES,
        f"is not one of {', '.join(OUT_DTYPES)}",
    ),
    one_of("page_table", (*PAGE_TABLES, ListLayout.INDICES.value)),
    not_with_lists("variant", default=None, choices=VARIANT_RANGE),
    fp8_products_rule((DType.FLOAT8_E4M3FN.value,), "which are the same"),
    rule(
        "num_sms",
        "None (all), 1 and up",
        lambda c: c.num_sms is None or c.num_sms >= 1,
        "is not at least 1",
    ),
)
MLA_RANGES: Mapping[str, str] = {
    "planner": f"{MLAConfig.family}: jitattn.MLAPlanner",
    **{rule.argument: rule.allowed for rule in RULES},
    "causal": "True, False",
    "sm_scale": "any finite float32; the planner has no default",
    "batch_invariant": "True, False",
    "query tokens per request": "1 and up",
}
"""What planners take, for the support table."""


def mla_specs(config: MLAConfig, arch: str) -> tuple[KernelSpec, ...]:
    """Return the kernels that plans of a planner launch, those of its own cache first.

    Raises:
        ConfigError: with every reason why there are none.
    """
    check_arch(arch)
    check_rules(config)
    return (*cache_specs(config, arch), ScheduleSpec(has_lists=config.page_table in LISTS))


def check_rules(config: MLAConfig) -> None:
    """Raise ConfigError with every reason why ``config`` has no kernel on any architecture."""
    if reasons := broken(RULES, config):
        raise ConfigError(reasons)


def cache_specs(config: MLAConfig, arch: str) -> tuple[MLASpec, ...]:
    """Return the kernels of every cache that ``bind`` takes, aligned ones before others.

    Where a token's rows have a kernel of their own, that of any number of rows follows each.
    """
    q_dtype, kv_dtype = DType(config.q_dtype), DType(config.kv_dtype)
    forms = [(kv_dtype, False)]
    if kv_dtype is not q_dtype:
        forms.append((q_dtype, False))
        if q_dtype is DType.BFLOAT16:
            forms.append((q_dtype, True))
    base = MLASpec(
        head_dim=config.head_dim,
        head_dim_vo=config.head_dim_vo,
        page_size=config.page_size or 1,
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
        out_dtype=DType(config.kernel_out_dtype),
        page_table=layout_of(config.page_table),
        loader=Loader.VECTOR,
        use_logits_soft_cap=False,
        use_custom_mask=False,
        variant=None if config.variant is None else config.variant.code,
        row_tile=mla_row_tile(config.num_heads, q_dtype, kv_dtype, arch),
        k_pe_dtype=kv_dtype,
        has_scales=False,
    )
    fast = Loader.TENSOR if base.uses_tma(arch) else Loader.VECTOR
    return tuple(
        replace(base, row_tile=row_tile, loader=loader, k_pe_dtype=k_pe_dtype, has_scales=scales)
        for k_pe_dtype, scales in forms
        for loader in (fast, Loader.PLAIN)
        for row_tile in _row_tiles(config, base, arch)
    )


def _row_tiles(config: MLAConfig, base: MLASpec, arch: str) -> tuple[int, ...]:
    """Return the query rows of the kernels of a cache, those of one token first."""
    # A token's bits are those of one kernel where they must not depend on its neighbours.
    if config.batch_invariant or not has_warpgroup_tile(base.q_dtype, base.kv_dtype, arch):
        return (base.row_tile,)
    few = [rows for rows in NARROW_ROWS if config.num_heads <= rows]
    if few and config.page_table in LISTS:  # whose tokens are planned alone
        return (few[0],)
    return (*few, base.row_tile)
