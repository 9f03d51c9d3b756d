"""What is supported and why not: the one table behind validation, precompiling, tests and docs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

from jitattn.base.errors import ConfigError
from jitattn.base.record import Value
from jitattn.spec.arch import ARCHS, check_arch
from jitattn.spec.config import HEAD_DIMS, PlannerConfig
from jitattn.spec.constraint import VARIANT_RANGE, Rule, broken, one_of, page_size_rule, rule
from jitattn.spec.dtype import OUT_DTYPES, Q_DTYPES, QUANTISED_DTYPES, DType
from jitattn.spec.kernel_spec import (
    BatchInfoSpec,
    BlockTableSpec,
    CopyPagesSpec,
    DecodeSpec,
    GatherSpec,
    KernelSpec,
    LayerTablesSpec,
    MergeSpec,
    PrefillSpec,
    PreprocessSpec,
    ScheduleSpec,
)
from jitattn.spec.layout import PAGE_TABLES, Layout, Loader
from jitattn.spec.mla_config import MLA_RANGES, MLAConfig
from jitattn.spec.preprocess_config import PREPROCESS_RANGES, PreprocessConfig
from jitattn.spec.tile import max_row_tile, row_tile_for, takes_boxes
from jitattn.spec.transfer_config import TRANSFER_RANGES, TransferConfig

KV_LAYOUTS = ("NHD", "HND")


class Support(Value):
    """The answer to "is this supported?": the kernel that serves it, or every reason why not."""

    supported: bool
    kernel: str | None
    reasons: list[str]


class Config(Value):
    """A range of supported planner arguments, the kernel that serves it, and where it was run."""

    kernel: str
    tested_on: str
    fields: dict[str, str]


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
    page_size_rule(),
    one_of("q_dtype", Q_DTYPES, " (FP8 queries are not built yet)"),
    rule(
        "kv_dtype",
        "the same as q_dtype, " + ", ".join(QUANTISED_DTYPES),
        lambda c: c.kv_dtype in (c.q_dtype, *QUANTISED_DTYPES),
        f"is neither q_dtype nor one of {', '.join(QUANTISED_DTYPES)}",
    ),
    rule(
        "out_dtype",
        "None (q_dtype), " + ", ".join(OUT_DTYPES),
        lambda c: c.out_dtype is None or c.out_dtype in OUT_DTYPES,
        f"is not one of {', '.join(OUT_DTYPES)}",
    ),
    rule(
        "kv_layout",
        ", ".join(KV_LAYOUTS) + "; NHD with page_table=ragged",
        _kv_layout_fits,
        f"does not fit: {' or '.join(KV_LAYOUTS)} with pages, NHD with page_table=ragged, where K "
        "and V are [num_kv_tokens, num_kv_heads, head_dim]",
    ),
    one_of("page_table", PAGE_TABLES),
    rule(
        "window_left",
        "-1 (off), 0 and up",
        lambda c: c.window_left >= -1,
        "is less than -1: give -1 for no window, 0 for the own token only",
    ),
    rule(
        "logits_soft_cap",
        "0.0 (off), positive",
        lambda c: c.logits_soft_cap >= 0.0,
        "is negative: give 0.0 for no soft cap",
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
    "sm_scale": "any finite number",
    "use_sinks": "True, False",
    "use_custom_mask": "True, False",
    "variant": VARIANT_RANGE,
    "batch_invariant": "True, False",
    "early_kv": "True, False",
}


def check_config(arch: str = "sm_90a", **planner_arguments: object) -> Support:
    """Say whether a planner with these arguments is supported on ``arch``, and why not.

    Args:
        arch: one of ``ARCHITECTURES``.
        **planner_arguments: what would be given to ``AttentionPlanner``, or with ``planner="mla"``
            to ``MLAPlanner``; dtypes or their names.
    """
    try:
        specs = specs_of(config_of(planner_arguments), arch)
    except ConfigError as error:
        return Support(supported=False, kernel=None, reasons=list(error.reasons))
    return Support(supported=True, kernel=specs[0].symbol, reasons=[])


def supported_configs(arch: str = "sm_90a") -> list[Config]:
    """Return the supported ranges on ``arch``, one row a kernel family.

    Raises:
        ConfigError: ``arch`` is unknown.
    """
    check_arch(arch)
    ranges = {rule.argument: rule.allowed for rule in RULES} | _ANY
    preprocess = Config(
        kernel=PreprocessSpec.family,
        tested_on=ARCHS[arch].tested_on["preprocess"],
        fields=dict(PREPROCESS_RANGES),
    )
    transfers = Config(
        kernel="transfers", tested_on=ARCHS[arch].tested_on["pages"], fields=dict(TRANSFER_RANGES)
    )
    mla = Config(
        kernel=MLAConfig.family, tested_on=ARCHS[arch].tested_on["mla"], fields=dict(MLA_RANGES)
    )
    return [
        Config(
            kernel=family,
            tested_on=ARCHS[arch].tested_on["attention"],
            fields=ranges | {"query tokens per request": queries},
        )
        for family, queries in (
            (DecodeSpec.family, "1, and as many as fill a row tile"),
            (PrefillSpec.family, "2 and up"),
        )
    ] + [mla, preprocess, transfers]


def check_rules(config: PlannerConfig) -> None:
    """Raise ConfigError with every reason why ``config`` has no kernel on any architecture."""
    if reasons := broken(RULES, config):
        raise ConfigError(reasons)


def resolve(config: PlannerConfig, arch: str) -> tuple[KernelSpec, ...]:
    """Return every kernel that users of a planner of ``config`` launch, the main one first.

    Raises:
        ConfigError: with every reason why there is none.
    """
    check_arch(arch)
    check_rules(config)
    head_dim_vo = config.head_dim_vo or config.head_dim
    out_dtype = DType(config.out_dtype or config.q_dtype)
    row_tile = row_tile_for(config.head_dim, head_dim_vo, config.group_size)
    fields = {
        "head_dim": config.head_dim,
        "head_dim_vo": head_dim_vo,
        "page_size": config.page_size or 1,
        "q_dtype": DType(config.q_dtype),
        "kv_dtype": DType(config.kv_dtype),
        "out_dtype": out_dtype,
        "page_table": Layout(config.page_table),
        "use_logits_soft_cap": config.logits_soft_cap > 0.0,
        "use_custom_mask": config.use_custom_mask,
        "variant": None if config.variant is None else config.variant.code,
    }
    decode = DecodeSpec(row_tile=row_tile, loader=Loader.VECTOR, **fields)  # type: ignore[arg-type]
    wide_tile = wide_row_tile(config)
    wide = [replace(decode, row_tile=wide_tile)] if wide_tile else []
    return (
        *_fast_and_plain(decode, arch),
        *_fast_and_plain(PrefillSpec(loader=Loader.VECTOR, **fields), arch),  # type: ignore[arg-type]
        *(spec for decode in wide for spec in _fast_and_plain(decode, arch)),
        ScheduleSpec(),
        MergeSpec(dtype=out_dtype),
        *_transfers(config, out_dtype),
    )


def _transfers(config: PlannerConfig, out_dtype: DType) -> tuple[KernelSpec, ...]:
    """Return the kernels that move tokens and pages of a cache, and make tables of a batch."""
    # Dequantised for attention elsewhere, or copied as they are stored.
    kv_dtype = DType(config.kv_dtype)
    out_dtypes = dict.fromkeys((DType(config.q_dtype), out_dtype, kv_dtype))
    out_dtypes.pop(DType.NVFP4, None)
    gathers = (GatherSpec(kv_dtype=kv_dtype, out_dtype=dtype) for dtype in out_dtypes)
    return (*gathers, CopyPagesSpec(), BlockTableSpec(), BatchInfoSpec(), LayerTablesSpec())


OtherConfig = MLAConfig | PreprocessConfig | TransferConfig
"""Selects kernels that ``AttentionPlanner`` doesn't need."""


def parse_config(text: str) -> PlannerConfig | OtherConfig:
    """Return a configuration as the command line takes it.

    Raises:
        ConfigError: an argument is unknown or has a value that is not supported.
    """
    name, _, value = text.partition(",")[0].replace(" ", "").partition("=")
    if name == "planner":
        _check_planner(value)
        return MLAConfig.parse(text)
    if name == "kernel":
        family = PreprocessConfig if value == PreprocessSpec.family else TransferConfig
        return family.parse(text)
    return PlannerConfig.parse(text)


def config_of(arguments: Mapping[str, object]) -> PlannerConfig | MLAConfig:
    """Return the configuration of a planner's arguments and ``planner``, which says of which one.

    Raises:
        ConfigError: an argument is unknown or of a wrong type.
    """
    if "planner" not in arguments:
        return PlannerConfig.from_arguments(arguments)
    _check_planner(arguments["planner"])
    return MLAConfig.from_arguments({k: v for k, v in arguments.items() if k != "planner"})


def _check_planner(name: object) -> None:
    if name != MLAConfig.family:
        raise ConfigError([f"planner={name} is not {MLAConfig.family}; leave it out for attention"])


def resolve_text(text: str, arch: str) -> tuple[KernelSpec, ...]:
    """Return the kernels of a configuration as the command line takes it.

    Raises:
        ConfigError: it has none.
    """
    return specs_of(parse_config(text), arch)


def specs_of(config: PlannerConfig | OtherConfig, arch: str) -> tuple[KernelSpec, ...]:
    """Return the kernels of any configuration.

    Raises:
        ConfigError: it has none.
    """
    return resolve(config, arch) if isinstance(config, PlannerConfig) else config.specs(arch)


def wide_row_tile(config: PlannerConfig) -> int:
    """Return the row tile of the decode kernel for a few query tokens a request; 0: there is none.

    A plan has it where some request may be longer than the tile for its group holds. Rows have the
    same bits in both, whose tiles differ in nothing else: so a result doesn't depend on what a plan
    was made for. Batch-invariant planners have none: prefill takes what decode's tile doesn't hold.
    """
    head_dim_vo = config.head_dim_vo or config.head_dim
    narrow = row_tile_for(config.head_dim, head_dim_vo, config.group_size)
    has_room = narrow == 8 and max_row_tile(config.head_dim, head_dim_vo) >= 16
    return 16 if has_room and not config.batch_invariant else 0


def _fast_and_plain(
    spec: DecodeSpec | PrefillSpec, arch: str
) -> tuple[DecodeSpec | PrefillSpec, DecodeSpec | PrefillSpec]:
    """Return the kernels of caches that are aligned and of others."""
    fast = Loader.TENSOR if takes_boxes(spec, arch) else Loader.VECTOR
    return replace(spec, loader=fast), replace(spec, loader=Loader.PLAIN)


# The values from which the compile tests draw. Page sizes stand for their kind: one token, odd,
# smaller than a warp's slice, a multiple of it that is no power of two, powers of two.
_SAMPLE: dict[str, tuple[object, ...]] = {
    "head_dim": HEAD_DIMS,
    "head_dim_vo": (None, 64, 128, 256),  # None: head_dim
    "page_size": (1, 3, 8, 16, 48, 64, 128),
    "row_tile": (8, 16, 32, None),  # None: the prefill kernel
    "q_dtype": (DType.BFLOAT16, DType.FLOAT16),
    # None: q_dtype
    "kv_dtype": (None, *map(DType, QUANTISED_DTYPES)),
    "out_dtype": (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32),
    "page_table": tuple(Layout),
    "is_aligned": (True, False),
    "use_logits_soft_cap": (False, True),
    "use_custom_mask": (False, True),
}


def sample_specs(arch: str) -> list[DecodeSpec | PrefillSpec]:
    """Return attention specs in which every pair of field values that can meet does meet."""
    check_arch(arch)
    names = list(_SAMPLE)
    wanted = {
        pair
        for a, b in itertools.combinations(names, 2)
        for pair in itertools.product(((a, x) for x in _SAMPLE[a]), ((b, y) for y in _SAMPLE[b]))
        if _can_meet(dict(pair))
    }
    rows = []
    while wanted:
        row = _greedy_row(wanted)
        wanted -= set(_pairs(row))
        rows.append(_spec_of(row, arch))
    return rows


def _greedy_row(wanted: set[tuple[tuple[str, object], tuple[str, object]]]) -> dict[str, object]:
    # Start from a missing pair, then give each other field the value that meets most missing ones.
    row = dict(min(wanted, key=repr))
    for name in _SAMPLE:
        if name in row:
            continue
        choices = [v for v in _SAMPLE[name] if _can_meet(row | {name: v})]
        row[name] = max(
            choices,
            key=lambda v, name=name: sum(p in wanted for p in _pairs(row | {name: v})),  # type: ignore[misc]
        )
    return row


def _pairs(row: dict[str, object]) -> Iterator[tuple[tuple[str, object], tuple[str, object]]]:
    items = [(name, row[name]) for name in _SAMPLE if name in row]
    yield from itertools.combinations(items, 2)


def _can_meet(row: dict[str, object]) -> bool:
    head_dim, row_tile = row.get("head_dim", 16), row.get("row_tile", 8)
    dims = head_dim, row.get("head_dim_vo") or head_dim
    if row.get("page_table") == Layout.RAGGED and row.get("page_size", 1) != 1:
        return False
    return row_tile is None or row_tile_for(*dims, row_tile) == row_tile  # type: ignore[arg-type]


def _spec_of(row: dict[str, object], arch: str) -> DecodeSpec | PrefillSpec:
    fields = row | {
        "head_dim_vo": row["head_dim_vo"] or row["head_dim"],
        "kv_dtype": row["kv_dtype"] or row["q_dtype"],
    }
    row_tile, is_aligned = fields.pop("row_tile"), fields.pop("is_aligned")
    fields["loader"] = Loader.VECTOR
    spec = PrefillSpec(**fields) if row_tile is None else DecodeSpec(row_tile=row_tile, **fields)  # type: ignore[arg-type]
    return _fast_and_plain(spec, arch)[not is_aligned]
