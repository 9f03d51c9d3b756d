"""Cases of attention as plain values. No torch here: a build machine precompiles the list.

`KERNELS` are the combinations that have machine code of their own; `decode_cases` puts launch
arguments, shapes and layouts on top of them, drawn so that every value of every axis is used
about equally often. `tests/support/inputs.py` turns a case into tensors.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from jitattn.kernels.attention.spec import DecodeSpec
from jitattn.kernels.registry import specs_of
from jitattn.spec.config import PlannerConfig
from jitattn.spec.dtype import BlockFormat, DType
from jitattn.spec.family import KernelSpec
from jitattn.spec.layout import Layout, Loader
from tests.support.variants import VARIANTS

CASES_PER_KERNEL = 10
LAYOUTS = tuple(table.value for table in Layout)
TABLES = ("shared", "separate", "csr", "token")
"""The layouts that have pages."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of attention: what the planner is given and how the memory looks.

    Attributes:
        lengths: KV tokens of each request; zero or less is padding.
        q_lens: query tokens of each request, or None for one each and no qo_indptr.
        spare_rows: rows of q past the last request.
        mask: the form of a custom mask, "bool", "packed" or "ragged"; see tests/support/queries.py.
        mask_width: last keys that a "bool" or "packed" mask covers, a multiple of 8.
        cache: the name of a builder in `tests.support.inputs.CACHES`.
        block_cache: likewise of the scales of NVFP4 blocks; None: the cache's own.
        kv_dtype: the type of a quantised cache, or None for one of ``dtype``.
        scales: the form of k_scale and v_scale, a key of `SCALES`; see
            `tests.support.inputs.make_scale`.
        kv_layout: the order in which the cache's dimensions are named, whatever their strides.
        q_view, out_view: how q and out lie in memory; see `tests.support.inputs.ROW_VIEWS`.
        variant: the name of a variant of tests/support/variants.py, or None.
        sinks: their dtype, or None; a name ending in "-column" is a strided column of a matrix.
        page_size: tokens of a page, and 1 with page_table "ragged".
        rows: the dtype of the row indices of a block or token table, or None for row b = request b.
        call: "buffers" gives out= and lse=; "returned" lets the call allocate out and lse.
    """

    head_dim: int = 128
    head_dim_vo: int | None = None
    page_size: int = 16
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    out_dtype: str | None = None
    page_table: str = "shared"
    logits_soft_cap: float = 0.0
    batch_invariant: bool = False
    num_kv_heads: int = 2
    group_size: int = 4
    lengths: tuple[int, ...] = (37,)
    q_lens: tuple[int, ...] | None = None
    spare_rows: int = 0
    mask: str | None = None
    mask_width: int = 64
    cache: str = "pair_nhd"
    block_cache: str | None = None
    kv_layout: str = "NHD"
    q_view: str = "contiguous"
    out_view: str = "contiguous"
    window_left: int = -1
    causal: bool = True
    sm_scale: float | None = None
    sinks: str | None = None
    variant: str | None = None
    scales: str | None = None
    rows: str | None = None
    lengths_dtype: str = "int32"
    call: str = "buffers"
    seed: int = 0

    @property
    def num_qo_heads(self) -> int:
        return self.num_kv_heads * self.group_size

    @property
    def scale(self) -> float:
        """sm_scale with its default filled in."""
        return self.head_dim**-0.5 if self.sm_scale is None else self.sm_scale

    @property
    def value_dim(self) -> int:
        """head_dim_vo with its default filled in."""
        return self.head_dim_vo or self.head_dim

    @property
    def stored_dtype(self) -> str:
        """kv_dtype with its default filled in."""
        return self.kv_dtype or self.dtype

    @property
    def is_dequantised(self) -> bool:
        """Whether the cache has another type than q."""
        return self.stored_dtype != self.dtype

    @property
    def blocks(self) -> BlockFormat | None:
        """The blocks of a cache of four bits."""
        return DType(self.stored_dtype).blocks

    @property
    def queries(self) -> tuple[int, ...]:
        """q_lens with its default filled in."""
        return (1,) * len(self.lengths) if self.q_lens is None else self.q_lens

    @property
    def num_tokens(self) -> int:
        """Rows of q."""
        return sum(self.queries) + self.spare_rows

    @property
    def has_rows(self) -> bool:
        """Whether the layout is a table of rows, which `rows` may select."""
        return self.page_table not in ("csr", "ragged")

    def planner_arguments(self) -> dict[str, object]:
        """The arguments of AttentionPlanner but for device objects."""
        return {
            "num_qo_heads": self.num_qo_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "head_dim_vo": self.head_dim_vo,
            "page_size": None if self.page_table == "ragged" else self.page_size,
            "q_dtype": self.dtype,
            "kv_dtype": self.stored_dtype,
            "out_dtype": self.out_dtype,
            "kv_layout": self.kv_layout,
            "page_table": self.page_table,
            "causal": self.causal,
            "window_left": self.window_left,
            "logits_soft_cap": self.logits_soft_cap,
            "sm_scale": self.sm_scale,
            "use_sinks": self.sinks is not None,
            "use_custom_mask": self.mask is not None,
            "variant": None if self.variant is None else VARIANTS[self.variant],
            "batch_invariant": self.batch_invariant,
        }

    def config(self) -> PlannerConfig:
        return PlannerConfig.from_arguments(self.planner_arguments())

    @property
    def _dims(self) -> str:
        return f"d{self.head_dim}" + (f"x{self.head_dim_vo}" if self.head_dim_vo else "")

    def __str__(self) -> str:
        parts = [
            f"{self._dims}-p{self.page_size}-{self.dtype}-{self.page_table}",
            f"g{self.group_size}x{self.num_kv_heads}-{self.cache}-{self.kv_layout}",
            f"b{len(self.lengths)}-max{max(self.lengths)}",
        ]
        if self.kv_dtype:
            parts.append(f"{self.kv_dtype.removeprefix('float8_')}-scales_{self.scales}")
        if self.block_cache:
            parts.append(f"blocks_{self.block_cache}")
        if self.q_lens is not None:
            parts.append(f"q{sum(self.q_lens)}-max{max(self.q_lens)}")
        if self.mask:
            parts.append(self.mask)
        if self.window_left >= 0:
            parts.append(f"w{self.window_left}")
        if self.logits_soft_cap > 0:
            parts.append(f"cap{self.logits_soft_cap:g}")
        parts += [self.variant] if self.variant else []
        parts += [f"sinks_{self.sinks}"] if self.sinks else []
        if self.rows:
            parts.append("rows")
        if self.batch_invariant:
            parts.append("invariant")
        return "-".join(parts) + f"-s{self.seed}"


def loader_of(case: Case) -> Loader:
    """How the K and V of a decode launch are loaded on sm_90a, for caches of CACHES."""
    if case.cache.startswith("odd") or (case.block_cache or "").startswith("odd"):
        return Loader.PLAIN
    decode = specs_of(PlannerConfig.from_arguments(case.planner_arguments()), "sm_90a")[0]
    assert isinstance(decode, DecodeSpec)
    return decode.loader


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """What selects machine code; the loaders of it are exercised by the cache layouts."""

    head_dim: int
    page_size: int
    head_dim_vo: int | None = None
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    out_dtype: str | None = None
    page_table: str = "shared"
    soft_cap: bool = False
    band: int = 8  # of group sizes, a key of GROUPS
    mask: bool = False

    def case(self, **features: Any) -> Case:
        """A case of this kernel."""
        names = {field.name for field in fields(self)} & {field.name for field in fields(Case)}
        return Case(**{name: getattr(self, name) for name in names - {"mask"}}, **features)


GROUPS = {
    8: (1, 2, 3, 4, 5, 6, 7, 8),
    16: (9, 10, 12, 13, 16),
    32: (17, 20, 24, 32, 40, 48, 64, 71),
}
"""Bands of group sizes, by the row tile that holds them whole; a smaller tile takes row blocks."""


def _kernel(
    head_dim: int,
    page_size: int,
    dtype: str,
    page_table: str,
    band: int,
    *,
    soft_cap: bool = False,
    out: str | None = None,
    vo: int | None = None,
    mask: bool = False,
    kv: str | None = None,
) -> Kernel:
    return Kernel(
        head_dim=head_dim,
        head_dim_vo=vo,
        page_size=page_size,
        dtype={"bf16": "bfloat16", "fp16": "float16"}[dtype],
        kv_dtype=kv and {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}.get(kv, kv),
        out_dtype=out,
        page_table=page_table,
        soft_cap=soft_cap,
        band=band,
        mask=mask,
    )


# Every head_dim, page sizes of every kind (1, odd, even, powers of two, larger than a tile), both
# dtypes, all outputs, every layout, all bands. The named cases below use some of them.
KERNELS: tuple[Kernel, ...] = (
    _kernel(128, 16, "bf16", "shared", 8),
    _kernel(128, 16, "bf16", "separate", 8),
    _kernel(64, 16, "bf16", "shared", 8),
    _kernel(128, 32, "bf16", "shared", 8),
    _kernel(128, 16, "fp16", "shared", 8),
    _kernel(128, 16, "bf16", "shared", 32),
    _kernel(128, 16, "bf16", "separate", 16, soft_cap=True),
    _kernel(128, 1, "bf16", "shared", 16),
    _kernel(128, 3, "fp16", "separate", 8),
    _kernel(128, 8, "fp16", "shared", 8, soft_cap=True, out="bfloat16"),
    _kernel(128, 24, "bf16", "shared", 32, soft_cap=True),
    _kernel(128, 64, "fp16", "separate", 32, out="float32"),
    _kernel(128, 128, "bf16", "shared", 16, out="float16"),
    _kernel(64, 1, "fp16", "separate", 8, soft_cap=True),
    _kernel(64, 24, "bf16", "separate", 16),
    _kernel(64, 64, "fp16", "shared", 32),
    _kernel(16, 1, "bf16", "shared", 8),
    _kernel(16, 128, "fp16", "separate", 32, soft_cap=True),
    _kernel(32, 2, "bf16", "separate", 16),
    _kernel(32, 16, "fp16", "shared", 8, soft_cap=True),
    _kernel(48, 5, "bf16", "shared", 32),
    _kernel(48, 32, "fp16", "separate", 8),
    _kernel(80, 7, "fp16", "shared", 16, soft_cap=True),
    _kernel(80, 16, "bf16", "separate", 8),
    _kernel(96, 3, "bf16", "separate", 32, out="float32"),
    _kernel(96, 32, "bf16", "shared", 8),
    _kernel(112, 24, "fp16", "shared", 8),
    _kernel(112, 1, "bf16", "separate", 32),
    _kernel(144, 8, "bf16", "separate", 16),
    _kernel(160, 16, "fp16", "shared", 8),
    _kernel(176, 4, "bf16", "shared", 8, soft_cap=True),
    _kernel(192, 12, "fp16", "shared", 16),
    _kernel(192, 128, "bf16", "separate", 8),
    _kernel(208, 16, "fp16", "separate", 16),
    _kernel(224, 48, "bf16", "shared", 8),
    _kernel(240, 100, "bf16", "separate", 8, soft_cap=True),
    _kernel(256, 1, "bf16", "separate", 8),
    _kernel(256, 3, "fp16", "separate", 16, soft_cap=True),
    _kernel(256, 16, "bf16", "shared", 8),
    _kernel(256, 64, "bf16", "shared", 16, out="float32"),
    # CSR
    _kernel(128, 16, "bf16", "csr", 8),
    _kernel(128, 16, "fp16", "csr", 8),
    _kernel(128, 16, "bf16", "csr", 16),
    _kernel(128, 3, "fp16", "csr", 8),
    _kernel(256, 16, "bf16", "csr", 8),
    _kernel(64, 16, "bf16", "csr", 8),
    _kernel(64, 1, "fp16", "csr", 32, soft_cap=True),
    _kernel(96, 5, "bf16", "csr", 16),
    _kernel(48, 128, "fp16", "csr", 32, out="float32"),
    _kernel(192, 64, "bf16", "csr", 8, vo=128),
    _kernel(64, 24, "fp16", "csr", 16, vo=256),
    # Token tables
    _kernel(128, 16, "bf16", "token", 8),
    _kernel(128, 16, "fp16", "token", 8),
    _kernel(128, 16, "bf16", "token", 16),
    _kernel(128, 3, "fp16", "token", 8),
    _kernel(256, 16, "bf16", "token", 8),
    _kernel(64, 16, "bf16", "token", 8),
    _kernel(128, 1, "bf16", "token", 8, soft_cap=True),
    _kernel(32, 8, "fp16", "token", 32),
    _kernel(224, 24, "fp16", "token", 16),
    _kernel(192, 1, "bf16", "token", 8, vo=128),
    _kernel(128, 64, "bf16", "token", 32, vo=64, out="float32"),
    # Ragged K and V
    _kernel(128, 1, "bf16", "ragged", 8),
    _kernel(128, 1, "fp16", "ragged", 16),
    _kernel(64, 1, "bf16", "ragged", 32),
    _kernel(16, 1, "fp16", "ragged", 8, soft_cap=True),
    _kernel(80, 1, "bf16", "ragged", 8, out="float32"),
    _kernel(256, 1, "bf16", "ragged", 8),
    _kernel(192, 1, "bf16", "ragged", 16, vo=128),
    _kernel(64, 1, "fp16", "ragged", 8, vo=256),
    # K and V of different widths
    _kernel(192, 16, "bf16", "shared", 8, vo=128),
    _kernel(128, 16, "bf16", "shared", 8, vo=64),
    _kernel(64, 16, "fp16", "shared", 16, vo=256, soft_cap=True),
    _kernel(192, 32, "bf16", "separate", 16, vo=128),
    _kernel(16, 3, "bf16", "separate", 32, vo=64),
    _kernel(256, 1, "fp16", "separate", 8, vo=16, out="bfloat16"),
    # The widest
    _kernel(512, 16, "bf16", "shared", 8),
    _kernel(512, 1, "fp16", "separate", 16, soft_cap=True),
    _kernel(512, 24, "bf16", "csr", 8, vo=128),
    _kernel(64, 8, "fp16", "token", 8, vo=512),
    _kernel(512, 1, "bf16", "ragged", 8),
    _kernel(256, 16, "bf16", "shared", 8, vo=512),
)

# Custom masks make kernels of their own.
MASKED_KERNELS: tuple[Kernel, ...] = (
    _kernel(128, 16, "bf16", "shared", 8, mask=True),
    _kernel(128, 16, "bf16", "separate", 8, mask=True),
    _kernel(128, 1, "fp16", "csr", 8, mask=True),
    _kernel(128, 3, "bf16", "token", 16, mask=True),
    _kernel(128, 1, "bf16", "ragged", 8, mask=True),
    _kernel(64, 16, "fp16", "shared", 32, mask=True, soft_cap=True),
    _kernel(64, 64, "bf16", "csr", 8, mask=True),
    _kernel(80, 5, "bf16", "separate", 16, mask=True, out="float32"),
    _kernel(192, 32, "bf16", "shared", 8, mask=True, vo=128),
    _kernel(256, 16, "bf16", "shared", 8, mask=True),
    _kernel(256, 1, "fp16", "token", 8, mask=True, soft_cap=True),
    _kernel(512, 16, "bf16", "shared", 8, mask=True),
)

# 8-bit caches: both types of FP8 with both types of q, rows of an odd and an even number of
# vectors, every layout; int8.
BYTE_KERNELS: tuple[Kernel, ...] = (
    _kernel(128, 16, "bf16", "shared", 8, kv="e4m3"),
    _kernel(128, 16, "bf16", "separate", 8, kv="e4m3"),
    _kernel(128, 16, "bf16", "shared", 8, kv="e5m2"),
    _kernel(128, 16, "fp16", "shared", 8, kv="e4m3"),
    _kernel(128, 3, "fp16", "separate", 16, kv="e5m2", soft_cap=True),
    _kernel(128, 64, "bf16", "csr", 16, kv="e4m3", out="float32"),
    _kernel(128, 1, "bf16", "token", 8, kv="e4m3"),
    _kernel(128, 1, "bf16", "ragged", 8, kv="e4m3"),
    _kernel(64, 16, "bf16", "shared", 8, kv="e4m3"),
    _kernel(64, 16, "bf16", "separate", 32, kv="e5m2"),
    _kernel(16, 1, "bf16", "shared", 32, kv="e4m3"),
    _kernel(48, 5, "fp16", "csr", 16, kv="e5m2", soft_cap=True),
    _kernel(80, 24, "bf16", "token", 16, kv="e5m2"),
    _kernel(112, 16, "fp16", "separate", 8, kv="e4m3"),
    _kernel(192, 16, "bf16", "shared", 8, kv="e4m3", vo=128),
    _kernel(240, 8, "bf16", "separate", 8, kv="e4m3"),
    _kernel(256, 16, "bf16", "shared", 8, kv="e4m3"),
    _kernel(256, 1, "fp16", "ragged", 8, kv="e5m2", vo=48),
    _kernel(512, 16, "bf16", "shared", 8, kv="e4m3"),
    _kernel(128, 16, "bf16", "shared", 8, kv="int8"),
    _kernel(64, 24, "fp16", "csr", 16, kv="int8"),
)
MASKED_BYTE_KERNELS: tuple[Kernel, ...] = (
    _kernel(128, 16, "bf16", "shared", 8, kv="e4m3", mask=True),
    _kernel(64, 3, "fp16", "separate", 16, kv="e5m2", mask=True, soft_cap=True),
)
# NVFP4: rows of an even and an odd number of blocks, scales that are copied one by one and in
# vectors of every size, every layout.
BLOCK_KERNELS: tuple[Kernel, ...] = (
    _kernel(128, 16, "bf16", "shared", 8, kv="nvfp4"),
    _kernel(128, 16, "fp16", "shared", 8, kv="nvfp4"),
    _kernel(128, 16, "bf16", "separate", 16, kv="nvfp4"),
    _kernel(128, 3, "fp16", "separate", 8, kv="nvfp4", soft_cap=True),
    _kernel(128, 1, "bf16", "token", 8, kv="nvfp4"),
    _kernel(128, 1, "bf16", "ragged", 8, kv="nvfp4"),
    _kernel(64, 16, "bf16", "shared", 8, kv="nvfp4"),
    _kernel(64, 24, "fp16", "separate", 32, kv="nvfp4", soft_cap=True),
    _kernel(16, 1, "bf16", "shared", 32, kv="nvfp4"),
    _kernel(48, 5, "fp16", "csr", 16, kv="nvfp4", soft_cap=True, out="float32"),
    _kernel(80, 16, "bf16", "token", 16, kv="nvfp4"),
    _kernel(96, 16, "fp16", "shared", 8, kv="nvfp4"),
    _kernel(192, 16, "bf16", "shared", 8, kv="nvfp4", vo=128),
    _kernel(240, 8, "bf16", "separate", 8, kv="nvfp4"),
    _kernel(256, 16, "bf16", "shared", 8, kv="nvfp4"),
    _kernel(256, 1, "fp16", "ragged", 8, kv="nvfp4", vo=48),
    _kernel(512, 16, "bf16", "shared", 8, kv="nvfp4"),
)
MASKED_BLOCK_KERNELS: tuple[Kernel, ...] = (
    _kernel(128, 16, "bf16", "shared", 8, kv="nvfp4", mask=True),
    _kernel(64, 3, "fp16", "separate", 16, kv="nvfp4", mask=True, soft_cap=True),
    _kernel(80, 16, "bf16", "csr", 8, kv="nvfp4", mask=True),
)
SCALES = (None, "float", "0-d", "[1]", "heads", "heads-column")
"""Forms of a scale: none, a number, or a tensor for all heads or for each; a column is strided."""

CACHES_SHARED = (
    "one_nhd",
    "one_hnd",
    "pair_nhd",
    "pair_hnd",
    "interleaved",
    "layer_inside",
    "cross_layer",
    "packed",
    "heads_outside",
    "tokens_outside",
    "unequal",
    "padded",
    "odd_base",
    "odd_strides",
    "odd_values",
    "size_1",
)
CACHES_SEPARATE = (*CACHES_SHARED, "twice")
_BLOCK_CACHES = (*CACHES_SHARED, *(None for _ in CACHES_SHARED))
# One tensor with K and V halves holds one head_dim and is never ragged: the rest takes pairs of
# views of it.
LENGTHS = ("page_edges", "tile_edges", "ragged", "padding", "single", "many", "long", "longest")


def lengths_of(kind: str, page_size: int, rng: random.Random) -> tuple[int, ...]:
    """The KV lengths of a batch of this kind."""
    if kind == "page_edges":
        edges = {1, page_size - 1, page_size, page_size + 1, 2 * page_size, 5 * page_size + 1}
        return tuple(sorted(edges))
    if kind == "tile_edges":
        return (1, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
    if kind == "ragged":
        return tuple(rng.randint(1, 1500) for _ in range(rng.randint(2, 9)))
    if kind == "padding":
        return (0, -1, rng.randint(1, 300), 0, 1, -7, rng.randint(200, 600), -(2**31))
    if kind == "single":
        return (rng.choice((1, 13, 200, 8192)),)
    if kind == "many":
        return tuple(rng.randint(0, 90) for _ in range(rng.choice((97, 150, 300))))
    if kind == "long":
        return (rng.randint(4000, 9000), 3, rng.randint(10000, 20000), 0, rng.randint(1, 999))
    if kind == "longest":
        return (rng.randint(0, 40), rng.randint(65537, 70000), 1)
    raise ValueError(kind)


@dataclass
class _Deck:
    """Deals every card equally often, in an order that depends on the seed only."""

    cards: Sequence[object]
    rng: random.Random
    _pile: list[object] = field(default_factory=list)

    def deal(self) -> object:
        if not self._pile:
            self._pile = list(self.cards)
            self.rng.shuffle(self._pile)
        return self._pile.pop()


def _decks(rng: random.Random) -> dict[str, _Deck]:
    axes: dict[str, Sequence[object]] = {
        **{f"cache {layout}": CACHES_SHARED for layout in LAYOUTS},
        "cache separate": CACHES_SEPARATE,
        "lengths": LENGTHS,
        "batch_invariant": (False, False, True),
        "num_kv_heads": (1, 2, 3, 8),
        "kv_layout": ("NHD", "HND"),
        "q_view": ("contiguous", "qkv", "padded", "odd"),
        "out_view": ("contiguous", "padded", "odd", "heads_outside"),
        # As many cards without a window as with one, so that long contexts are read in full too.
        "window_left": (-1, 0, -1, 1, -1, 15, -1, 16, -1, 127, -1, 1000, -1, 10**9),
        "soft cap": (0.5, 5.0, 30.0),
        "causal": (True, True, True, False),
        "sm_scale": (None, None, 0.05, 0.6),
        "sinks": (
            *(None, "float32", None, "bfloat16", None, "float16", None, "float64"),
            *("float32-column", None, "bfloat16-column"),
        ),
        "rows": (None, "int32", None, "int64"),
        "lengths_dtype": ("int32", "int64"),
        "call": ("buffers", "buffers", "returned"),
    } | {f"group {band}": sizes for band, sizes in GROUPS.items()}
    return _shuffled(axes, rng)


def _query_decks(rng: random.Random) -> dict[str, _Deck]:
    axes: dict[str, Sequence[object]] = {
        "queries": tuple(QUERIES),
        "spare_rows": (0, 0, 3, 200),
        "mask": ("bool", "packed", "ragged"),
        "mask_width": (8, 64, 200, 1000),
    }
    return _shuffled(axes, rng)


def _shuffled(axes: dict[str, Sequence[object]], rng: random.Random) -> dict[str, _Deck]:
    return {name: _Deck(cards, random.Random(rng.random())) for name, cards in axes.items()}


def decode_cases() -> tuple[Case, ...]:
    """The cases of tests/gpu/test_decode.py: the same ones in every process."""
    rng = random.Random(20)
    decks = _decks(rng)
    cases = []
    for kernel in KERNELS:
        for _ in range(CASES_PER_KERNEL):
            cases.append(_fit(_deal(kernel, decks, rng, seed=len(cases))))
    forms = _Deck(SCALES, random.Random(21))
    for kernel in BYTE_KERNELS:
        for _ in range(CASES_PER_KERNEL):
            case = _deal(kernel, decks, rng, seed=len(cases))
            cases.append(_fit(replace(case, scales=forms.deal())))
    blocks = _Deck(_BLOCK_CACHES, random.Random(22))
    for kernel in BLOCK_KERNELS:
        for _ in range(CASES_PER_KERNEL):
            case = _deal(kernel, decks, rng, seed=len(cases))
            case = replace(case, scales=forms.deal(), block_cache=blocks.deal())
            cases.append(_fit(case))
    return tuple(cases)


def _deal(kernel: Kernel, decks: dict[str, _Deck], rng: random.Random, seed: int) -> Case:
    same = {name: decks[name].deal() for name in _SAME_NAME}
    return kernel.case(
        logits_soft_cap=decks["soft cap"].deal() if kernel.soft_cap else 0.0,
        group_size=decks[f"group {kernel.band}"].deal(),
        cache=decks[f"cache {kernel.page_table}"].deal(),
        lengths=lengths_of(str(decks["lengths"].deal()), kernel.page_size, rng),
        seed=seed,
        **same,
    )


_SAME_NAME = (
    *("num_kv_heads", "kv_layout", "q_view", "out_view", "window_left", "causal"),
    *("sm_scale", "sinks", "rows", "lengths_dtype", "call", "batch_invariant"),
)


def _fit(case: Case) -> Case:
    """Make the case possible, and small enough for a float64 reference in milliseconds."""
    if case.cache == "twice":
        case = replace(case, block_cache=None)  # one id for both
    if "size_1" in (case.cache, case.block_cache):
        case = replace(case, num_kv_heads=1)
    if not case.has_rows:
        case = replace(case, rows=None)
    if case.page_table == "ragged":
        case = replace(case, kv_layout="NHD")
    num_scores = max(q * n for q, n in zip(case.queries, case.lengths, strict=True))
    heavy = num_scores * case.group_size * case.num_kv_heads > 2_000_000
    return replace(case, num_kv_heads=1) if heavy else case


def of(case: Case, *pairs: tuple[int, int], **changes: object) -> Case:
    """The case with these (q_len, kv_len)."""
    q_lens, lengths = zip(*pairs, strict=True)
    return replace(case, q_lens=q_lens, lengths=lengths, **changes)


# --- cases of the other GPU tests -----------------------------------------------------------------

EDGES = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
Draw = Callable[[int, int], int]
Lengths = list[tuple[int, int]]
QUERIES: dict[str, Callable[[Draw], Lengths]] = {
    # Query tokens and KV tokens of each request. "single" goes through qo_indptr too.
    "single": lambda draw: [(1, draw(1, 900)) for _ in range(draw(1, 9))],
    "draft": lambda draw: [(draw(2, 16), draw(16, 1500)) for _ in range(draw(2, 9))],
    "chunks": lambda draw: [
        (q, q + draw(0, 1200)) for q in (draw(100, 400), draw(17, 99), draw(17, 300))
    ],
    "prompt": lambda draw: [(q, q) for q in (1, draw(2, 16), draw(65, 500), 64, 128)],
    "edges": lambda draw: [(n, n + EDGES[draw(0, 16)]) for n in EDGES],
    "mixed": lambda draw: [
        *((1, draw(1, 700)) for _ in range(draw(0, 8))),
        (draw(100, 500), draw(500, 900)),
        *((draw(2, 16), draw(16, 700)) for _ in range(3)),
        *((1, draw(1, 700)) for _ in range(draw(0, 8))),
    ],
    "more than keys": lambda draw: [
        *((5, 2), (130, 129), (7, 0), (300, draw(1, 40)), (2, 1), (64, 65), (1, 1))
    ],
    "thousands": lambda draw: [
        *((draw(1000, 2500), draw(2500, 3500)), (1, draw(1, 3000)), (draw(2, 16), 900))
    ],
    # Few over long caches.
    "split": lambda draw: [
        *((draw(2, 4), draw(8000, 20000)), (draw(9, 40), draw(3000, 9000)), (1, 5000))
    ],
    "many": lambda draw: [(draw(0, 5), draw(5, 90)) for _ in range(draw(60, 150))],
    "padding": lambda draw: [
        *((0, 0), (0, 40), (3, 0), (draw(1, 90), -1), (draw(1, 90), 90), (0, -(2**31)))
    ],
}
"""Kinds of batches by their query tokens."""


MIXED_CASES_PER_KERNEL = 5


def mixed_cases() -> tuple[Case, ...]:
    """The cases of tests/gpu/test_mixed.py: the same ones in every process."""
    rng = random.Random(40)
    decks = _decks(rng) | _query_decks(rng)
    forms = _Deck(SCALES, random.Random(41))
    blocks = _Deck(_BLOCK_CACHES, random.Random(42))
    kernels = (*KERNELS, *MASKED_KERNELS, *BYTE_KERNELS, *MASKED_BYTE_KERNELS)
    cases = []
    for kernel in (*kernels, *BLOCK_KERNELS, *MASKED_BLOCK_KERNELS):
        for _ in range(MIXED_CASES_PER_KERNEL):
            case = _deal(kernel, decks, rng, seed=len(cases))
            kind = QUERIES[str(decks["queries"].deal())]
            q_lens, lengths = zip(*kind(rng.randint), strict=True)
            case = replace(
                case,
                lengths=lengths,
                q_lens=q_lens,
                spare_rows=decks["spare_rows"].deal(),
                mask=decks["mask"].deal() if kernel.mask else None,
                mask_width=decks["mask_width"].deal(),
                scales=forms.deal() if kernel.kv_dtype else None,
                block_cache=blocks.deal() if kernel.kv_dtype == "nvfp4" else None,
            )
            cases.append(_fit(case))
    return tuple(cases)


# The other tests run on these kernels, whatever else they change.
D64 = Case(head_dim=64)
D128 = Case(head_dim=128)
D128_SEPARATE = Case(head_dim=128, page_table="separate")
D128_CSR = Case(head_dim=128, page_table="csr")
D128_TOKEN = Case(head_dim=128, page_table="token")
RAGGED = Case(head_dim=128, page_table="ragged", page_size=1)
D128_PAGE_32 = Case(head_dim=128, page_size=32)
D128_FP16 = Case(head_dim=128, dtype="float16")
D128_PAGE_3 = Case(head_dim=128, page_size=3, dtype="float16", page_table="separate")
D128_FLOAT = Case(head_dim=128, out_dtype="float32")
D256 = Case(head_dim=256)
D512 = Case(head_dim=512)
D192X128 = Case(head_dim=192, head_dim_vo=128)
PAGE_1 = Case(head_dim=256, page_size=1, page_table="separate")
SOFT_CAP = Case(
    head_dim=64, page_size=1, dtype="float16", page_table="separate", logits_soft_cap=5.0
)
WIDE = Case(head_dim=128, group_size=16)
MASKED_D64 = Case(head_dim=64, page_size=32, mask="bool")
MASKED_D128 = Case(head_dim=128, mask="bool")
E4M3 = Case(head_dim=128, kv_dtype="float8_e4m3fn", scales="heads")
E4M3_SEPARATE = replace(E4M3, page_table="separate")
E4M3_FP16 = replace(E4M3, dtype="float16")
E4M3_RAGGED = replace(E4M3, page_table="ragged", page_size=1)
E4M3_D256 = replace(E4M3, head_dim=256)
E5M2 = replace(E4M3, kv_dtype="float8_e5m2")
INT8 = replace(E4M3, kv_dtype="int8")
BYTE_FAMILIES = (E4M3, E4M3_SEPARATE, E4M3_FP16, E4M3_RAGGED, E4M3_D256, E5M2, INT8)
NVFP4 = replace(E4M3, kv_dtype="nvfp4")
NVFP4_SEPARATE = replace(NVFP4, page_table="separate")
NVFP4_D256 = replace(NVFP4, head_dim=256)
BLOCK_FAMILIES = (
    NVFP4,
    NVFP4_SEPARATE,
    replace(NVFP4, dtype="float16"),
    replace(NVFP4, page_table="ragged", page_size=1),
    NVFP4_D256,
    replace(NVFP4, head_dim=80),  # an odd number of blocks
)
INT4 = replace(E4M3, kv_dtype="int4")
INT4_FP16 = replace(INT4, dtype="float16")
INT4_FAMILIES = (
    INT4,
    replace(INT4, kv_dtype="int4_g32", dtype="float16", page_table="separate"),
    replace(INT4, kv_dtype="int4_g64"),
    replace(INT4, kv_dtype="int4_g32", head_dim=64, page_table="token"),
    replace(INT4, head_dim=80, page_table="csr", page_size=5),  # half a step
    replace(INT4, kv_dtype="int4_g64", head_dim=256, page_table="ragged", page_size=1),
    replace(INT4, kv_dtype="int4_g32", head_dim=96, page_size=3, logits_soft_cap=30.0),
)
QUANTISED_FAMILIES = (*BYTE_FAMILIES, *BLOCK_FAMILIES)

EVERY_LAYOUT = (D128, D128_SEPARATE, D128_CSR, D128_TOKEN, RAGGED)
"""One case of each layout."""

DRAFTS = (
    *EVERY_LAYOUT,
    D64,
    Case(head_dim=64, page_size=64),  # boxes of 32 tokens
    Case(head_dim=64, page_size=1, page_table="separate", kv_dtype="float8_e4m3fn", scales="heads"),
    Case(head_dim=16, page_size=3, dtype="float16"),
    Case(head_dim=96, page_size=24, out_dtype="float32"),
    Case(head_dim=128, head_dim_vo=64),
    replace(E4M3, page_size=64),
    NVFP4,
    SOFT_CAP,
    MASKED_D64,
    MASKED_D128,
)
"""Kernels of a few query tokens a request: groups of up to 8 query heads have a wide row tile."""

TWINS = (D128, D128_FP16, replace(D128_PAGE_3, page_table="shared"), D256, WIDE, D64)
"""Cases that run with every table layout, to the same bits."""

BOX_PAGES = tuple(Case(head_dim=128, page_size=size) for size in (8, 16, 24, 48, 64))
"""Kernels with tensor maps, by how pages fall into the slices of warps."""

BOX_DIMS = (
    Case(head_dim=64, page_size=24, page_table="separate", group_size=16),
    Case(head_dim=64, page_size=64, dtype="float16", group_size=32),
    Case(head_dim=192, page_size=128, page_table="separate"),
    D192X128,
    D128_FLOAT,
    D256,
    E4M3_SEPARATE,
    replace(E4M3, page_size=64, page_table="csr", group_size=16, out_dtype="float32"),
    E4M3_D256,
    E5M2,
)
"""Kernels with tensor maps, by what boxes hold."""


def twins_of(case: Case) -> tuple[Case, ...]:
    """The case through every layout that has pages."""
    return tuple(replace(case, page_table=table) for table in TABLES)


def all_cases() -> tuple[Case, ...]:
    """One case at least for every kernel that the GPU tests launch."""
    named = (D128_PAGE_32, D128_PAGE_3, D192X128, D512, PAGE_1, SOFT_CAP, *EVERY_LAYOUT)
    named += (*QUANTISED_FAMILIES, *twins_of(E4M3), *twins_of(NVFP4))
    named += (*INT4_FAMILIES, INT4_FP16)
    named += (*BOX_PAGES, *BOX_DIMS, *DRAFTS)
    return (
        *decode_cases(),
        *mixed_cases(),
        *named,
        *(twin for case in TWINS for twin in twins_of(case)),
    )


def kernel_configs(arch: str) -> tuple[PlannerConfig, ...]:
    """The planner arguments that cover every kernel of the GPU tests, none twice."""
    configs: dict[tuple[KernelSpec, ...], PlannerConfig] = {}
    for case in all_cases():
        config = case.config()
        configs.setdefault(specs_of(config, arch), config)
    return tuple(configs.values())
