"""What ``AttentionPlanner`` supports, and the kernels of its arguments. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from jitattn.base.errors import ConfigError
from jitattn.kernels.attention.spec import (
    DecodeSpec,
    DequantizeQueriesSpec,
    NarrowPrefillSpec,
    PrefillSpec,
)
from jitattn.kernels.attention.tile import (
    has_fp8_tile,
    has_narrow_tile,
    max_row_tile,
    row_tile_for,
)
from jitattn.kernels.common.spec import ScheduleSpec
from jitattn.spec.arch import ARCHS, check_arch
from jitattn.spec.config import HEAD_DIMS, PlannerConfig
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
from jitattn.spec.dtype import (
    BYTE_DTYPES,
    FP8_QUERIES,
    KV_DTYPES,
    OUT_DTYPES,
    Q_DTYPES,
    QUANTISED_DTYPES,
    DType,
    row_multiple,
)
from jitattn.spec.family import KernelSpec
from jitattn.spec.layout import LISTS, PAGE_TABLES, Layout, ListLayout, Loader, layout_of

KV_LAYOUTS = ("NHD", "HND")

_MAX_FIXED_CAP = 50.0


def _not_built(argument: str, default: object, what: str, instead: str) -> Rule[PlannerConfig]:
    return rule(
        argument,
        str(default),
        lambda config: getattr(config, argument) == default,
        f"is refused: {what} not built yet; leave it {default}: {instead}",
    )


def _kv_layout_fits(config: PlannerConfig) -> bool:
    has_pages = config.page_table != Layout.RAGGED
    return config.kv_layout in (KV_LAYOUTS if has_pages else KV_LAYOUTS[:1])


def _blocks_rule(
    argument: str, first: str, dim_of: Callable[[PlannerConfig], int | None]
) -> Rule[PlannerConfig]:
    def fits(c: PlannerConfig) -> bool:
        dim = dim_of(c)
        # Of those that the rule before lets pass.
        return dim is None or dim not in HEAD_DIMS or dim % row_multiple(c.kv_dtype) == 0

    wide = {name: row_multiple(name) for name in KV_DTYPES if row_multiple(name) > 16}
    kinds = ", ".join(f"of {multiple} with kv_dtype={name}" for name, multiple in wide.items())
    return rule(
        argument,
        f"{first}multiples of 16 from 16 to 256, and 512; {kinds}",
        fits,
        f"does not fit kv_dtype, whose blocks divide a row: a multiple {kinds}",
    )


RULES: tuple[Rule[PlannerConfig], ...] = (
    rule(
        "num_qo_heads",
        "any multiple of num_kv_heads",
        lambda c: c.num_qo_heads >= 1 and c.num_qo_heads % max(c.num_kv_heads, 1) == 0,
        "is not a positive multiple of num_kv_heads",
    ),
    rule("num_kv_heads", "1 and up", lambda c: c.num_kv_heads >= 1, "is not at least 1"),
    rule(
        "head_dim",
        "multiples of 16 from 16 to 256, and 512",
        lambda c: c.head_dim in HEAD_DIMS,
        "is not a multiple of 16 from 16 to 256, nor 512",
    ),
    rule(
        "head_dim_vo",
        "None (head_dim), multiples of 16 from 16 to 256, and 512",
        lambda c: c.head_dim_vo is None or c.head_dim_vo in HEAD_DIMS,
        "is not a multiple of 16 from 16 to 256, nor 512",
    ),
    _blocks_rule("head_dim", "", lambda c: c.head_dim),
    _blocks_rule("head_dim_vo", "None (head_dim), ", lambda c: c.head_dim_vo),
    page_size_rule(),
    one_of("q_dtype", (*Q_DTYPES, FP8_QUERIES)),
    rule(
        "kv_dtype",
        "the same as q_dtype, " + ", ".join(QUANTISED_DTYPES),
        lambda c: c.kv_dtype in (c.q_dtype, *QUANTISED_DTYPES),
        f"is neither q_dtype nor one of {', '.join(QUANTISED_DTYPES)}",
    ),
    rule(
        "kv_dtype",
        f"the same as q_dtype, {', '.join(QUANTISED_DTYPES)}; {FP8_QUERIES} with "
        f"q_dtype={FP8_QUERIES}",
        lambda c: not c.has_fp8_queries or c.kv_dtype == FP8_QUERIES,
        f"does not fit q_dtype={FP8_QUERIES}: FP8 queries have a cache of their type",
    ),
    rule(
        "out_dtype",
        "None (q_dtype), " + ", ".join(OUT_DTYPES),
        lambda c: c.out_dtype is None or c.out_dtype in OUT_DTYPES,
        f"is not one of {', '.join(OUT_DTYPES)}",
    ),
    rule(
        "out_dtype",
        f"None (q_dtype), {', '.join(OUT_DTYPES)}; None (bfloat16), {', '.join(Q_DTYPES)} with "
        f"q_dtype={FP8_QUERIES}",
        lambda c: not c.has_fp8_queries or c.out_dtype in (None, *Q_DTYPES),
        f"does not fit q_dtype={FP8_QUERIES}: give {' or '.join(Q_DTYPES)}",
    ),
    rule(
        "kv_layout",
        ", ".join(KV_LAYOUTS) + "; NHD with page_table=ragged",
        _kv_layout_fits,
        f"does not fit: {' or '.join(KV_LAYOUTS)} with pages, NHD with page_table=ragged, where K "
        "and V are [num_kv_tokens, num_kv_heads, head_dim]",
    ),
    one_of("page_table", (*PAGE_TABLES, *LISTS)),
    rule(
        "window_left",
        "-1 (off), 0 and up",
        lambda c: c.window_left >= -1,
        "is less than -1: give -1 for no window, 0 for the own token only",
    ),
    rule(
        "window_left",
        "-1 (off), 0 and up; -1 with page_table=indices",
        lambda c: c.window_left < 0 or c.page_table != ListLayout.INDICES,
        "does not fit page_table=indices: what a list has is seen, wherever it lies; give -1",
    ),
    not_with_lists("use_custom_mask", default=False, choices="True, False"),
    not_with_lists("variant", default=None, choices=VARIANT_RANGE),
    not_with_lists("early_kv", default=False, choices="True, False"),
    rule(
        "logits_soft_cap",
        "0.0 (off), positive",
        lambda c: c.logits_soft_cap >= 0.0,
        "is negative: give 0.0 for no soft cap",
    ),
    fp8_products_rule(
        BYTE_DTYPES,
        f"of 8 bits in prefill of q_dtype={FP8_QUERIES} on sm_90a: head dims a multiple of 32, of "
        "Q and K up to 224, of V up to 128, no lists, no variant; else the same",
    ),
    rule(
        "num_sms",
        "None (all), 1 and up",
        lambda c: c.num_sms is None or c.num_sms >= 1,
        "is not at least 1",
    ),
    _not_built(
        "skip_softmax_threshold",
        None,
        "leaving out KV tiles whose scores are all that far below the running maximum is",
        "then every visible key counts",
    ),
)
# Both values of these work in every kernel.
_ANY = {
    "causal": "True, False",
    "sm_scale": "any finite float32",
    "use_sinks": "True, False",
    "batch_invariant": "True, False",
}
_RANGES = {rule.argument: rule.allowed for rule in RULES} | _ANY
SUPPORT = {
    DecodeSpec.kernel: _RANGES | {"query tokens per request": "1, and as many as fill a row tile"},
    PrefillSpec.kernel: _RANGES | {"query tokens per request": "2 and up"},
}
"""What each argument may be, for the support table."""


def check_rules(config: PlannerConfig) -> None:
    """Raise ConfigError with every reason why ``config`` has no kernel on any architecture."""
    if reasons := broken(RULES, config):
        raise ConfigError(reasons)


def attention_specs(config: PlannerConfig, arch: str) -> tuple[KernelSpec, ...]:
    """Return the kernels that plans of a planner launch, the decode kernel first.

    Raises:
        ConfigError: with every reason why there is none.
    """
    check_arch(arch)
    check_rules(config)
    head_dim_vo = config.head_dim_vo or config.head_dim
    out_dtype = DType(config.kernel_out_dtype)
    is_fp8 = has_fp8_products(config, arch)
    row_tile = row_tile_for(config.head_dim, head_dim_vo, config.group_size)
    fields = {
        "head_dim": config.head_dim,
        "head_dim_vo": head_dim_vo,
        "page_size": config.page_size or 1,
        "q_dtype": DType(config.q_dtype if is_fp8 else config.kernel_q_dtype),
        "kv_dtype": DType(config.kv_dtype),
        "out_dtype": out_dtype,
        "page_table": layout_of(config.page_table),
        "use_logits_soft_cap": config.logits_soft_cap > 0.0,
        "use_custom_mask": config.use_custom_mask,
        "variant": None if config.variant is None else config.variant.code,
    }
    decode = DecodeSpec(row_tile=row_tile, loader=Loader.VECTOR, **fields)  # type: ignore[arg-type]
    wide_tile = wide_row_tile(config)
    wide = [replace(decode, row_tile=wide_tile)] if wide_tile else []
    # Of lists decode kernels take everything, and of lists of tokens nothing has several.
    is_list = config.page_table in LISTS
    fields["fixed_maximum"] = fixes_maximum(config, arch)
    prefill = [] if is_list else [PrefillSpec(loader=Loader.VECTOR, **fields)]  # type: ignore[arg-type]
    few = NarrowPrefillSpec(loader=Loader.VECTOR, **fields)  # type: ignore[arg-type]
    narrow = [few] if not is_list and has_narrow_tile(few, arch) else []
    return (
        *specs_of_loaders(decode, arch),
        *(spec for prefill in prefill for spec in specs_of_loaders(prefill, arch)),
        *(spec for decode in wide for spec in specs_of_loaders(decode, arch)),
        *(spec for few in narrow for spec in specs_of_loaders(few, arch)),
        ScheduleSpec(has_lists=is_list),
        *([DequantizeQueriesSpec()] if config.has_fp8_queries and not is_fp8 else []),
    )


def has_fp8_products(config: PlannerConfig, arch: str) -> bool:
    """Return whether products of prefill have 8 bits, and kernels read FP8 queries themselves."""
    is_fast = config.has_fp8_queries and config.fp8_products == "fast"
    is_plain = config.page_table not in LISTS and config.variant is None
    has_tile = has_fp8_tile(config.head_dim, config.head_dim_vo or config.head_dim)
    return is_fast and is_plain and has_tile and ARCHS[arch].has_wgmma


def fixes_maximum(config: PlannerConfig, arch: str) -> bool:
    """Return whether 0 serves prefill by warpgroups as the maximum of every row's scores.

    A soft cap of 50 leaves probabilities between 2 ** -72 and 2 ** 72, which bfloat16 has and
    float16 has not; what a variant makes of a capped score has no bound. Sums of their products
    with V stay finite for V up to 2 ** 56 over the number of tokens. Reading a mask leaves no
    registers for larger tiles, which are what it gains most by.
    """
    return (
        ARCHS[arch].has_wgmma
        and 0.0 < config.logits_soft_cap <= _MAX_FIXED_CAP
        and config.kernel_q_dtype == DType.BFLOAT16.value
        and not config.use_custom_mask
        and config.variant is None
    )


def wide_row_tile(config: PlannerConfig) -> int:
    """Return the row tile of the decode kernel for a few query tokens a request; 0: there is none.

    A plan has it where some request may be longer than the tile for its group holds. Rows have the
    same bits in both, whose tiles differ in nothing else: so a result doesn't depend on what a plan
    was made for. Batch-invariant planners have none: prefill takes what decode's tile doesn't hold.
    """
    head_dim_vo = config.head_dim_vo or config.head_dim
    narrow = row_tile_for(config.head_dim, head_dim_vo, config.group_size)
    has_room = narrow == 8 and max_row_tile(config.head_dim, head_dim_vo) >= 16
    has_rows = config.page_table != ListLayout.INDICES  # these have one query token
    return 16 if has_room and has_rows and not config.batch_invariant else 0


def specs_of_loaders(
    spec: DecodeSpec | PrefillSpec, arch: str
) -> tuple[DecodeSpec | PrefillSpec, DecodeSpec | PrefillSpec]:
    """Return the kernels of caches that are aligned and of others."""
    fast = Loader.TENSOR if spec.uses_tma(arch) else Loader.VECTOR
    return replace(spec, loader=fast), replace(spec, loader=Loader.PLAIN)
