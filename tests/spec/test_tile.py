"""Tiles: what the launches of a plan rely on."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

from jitattn.jit import cutlass
from jitattn.jit.build import headers_of
from jitattn.jit.render import render
from jitattn.kernels.attention.spec import DecodeSpec, PrefillSpec
from jitattn.kernels.attention.tile import STATIC_BYTES
from jitattn.kernels.common.tile import MAX_WORK_TILES, DecodeTile, PrefillTile, WarpgroupTile
from jitattn.kernels.registry import specs_of
from jitattn.spec.arch import ARCHITECTURES, ARCHS
from jitattn.spec.config import HEAD_DIMS, PlannerConfig
from jitattn.spec.dtype import DType
from jitattn.spec.layout import Layout, Loader
from tests.support.sample_specs import sample_specs
from tests.support.warpgroups import warpgroup_specs


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_both_loaders_of_a_configuration_have_one_tile(arch: str) -> None:
    """A plan is made for one of them, and its parameters serve the other."""
    for head_dim, head_dim_vo, cap, mask in itertools.product(
        HEAD_DIMS, HEAD_DIMS, (0.0, 30.0), (False, True)
    ):
        config = PlannerConfig(
            head_dim=head_dim, head_dim_vo=head_dim_vo, logits_soft_cap=cap, use_custom_mask=mask
        )
        for spec in specs_of(config, arch):
            if isinstance(spec, DecodeSpec | PrefillSpec):
                twin = replace(spec, loader=Loader.PLAIN).tile(arch)
                tile = spec.tile(arch)
                # Boxes leave no padding between rows.
                twin = twin._replace(smem_bytes=tile.smem_bytes)
                if isinstance(tile, WarpgroupTile):  # who brings elements needs more registers
                    tile, twin = (
                        t._replace(producer_registers=0, consumer_registers=0) for t in (tile, twin)
                    )
                assert tile == twin, spec.symbol


def decode_spec(**arguments: object) -> DecodeSpec:
    """The decode kernel of an aligned cache on sm_90a."""
    return next(
        spec
        for spec in specs_of(PlannerConfig.from_arguments(arguments), "sm_90a")
        if isinstance(spec, DecodeSpec)
    )


@pytest.mark.parametrize(
    ("arguments", "has_boxes"),
    [
        *(({"page_size": size}, size % 8 == 0) for size in (1, 2, 4, 8, 12, 16, 24, 48, 64, 2**20)),
        *(({"page_table": table}, table != "token") for table in ("shared", "separate", "csr")),
        ({"page_table": "token"}, False),
        ({"page_table": "ragged", "page_size": None}, False),
        *(({"head_dim": dim}, dim % 64 == 0) for dim in HEAD_DIMS),
        *(({"head_dim": 128, "head_dim_vo": dim}, dim % 64 == 0) for dim in HEAD_DIMS),
        *(
            ({"head_dim": dim, "kv_dtype": dtype}, dim % 128 == 0)
            for dim in HEAD_DIMS
            for dtype in ("float8_e4m3fn", "float8_e5m2")
        ),
        *(({"head_dim": dim, "kv_dtype": "nvfp4"}, False) for dim in (64, 128, 256)),
        ({"q_dtype": "float16", "kv_dtype": "float16"}, True),
        ({"batch_invariant": True, "window_left": 7, "logits_soft_cap": 3.0}, True),
        ({"num_qo_heads": 64, "num_kv_heads": 1, "use_custom_mask": True}, True),
    ],
    ids=str,
)
def test_what_takes_boxes(arguments: dict[str, object], has_boxes: bool) -> None:
    spec = decode_spec(**arguments)
    assert spec.loader is (Loader.TENSOR if has_boxes else Loader.VECTOR)
    assert spec.uses_tma("sm_90a") == has_boxes
    tile = spec.tile("sm_90a")
    assert isinstance(tile, DecodeTile)
    if has_boxes:
        # A box lies in one page, and a slice is some boxes.
        slice_tokens = tile.tile_tokens // tile.num_warps
        assert tile.tma_tokens in (8, 16, 32)
        assert spec.page_size % tile.tma_tokens == slice_tokens % tile.tma_tokens == 0
    for arch in set(ARCHITECTURES) - {"sm_90a"}:
        assert not spec.uses_tma(arch)
        loaders = {found.loader for found in resolve_decode(arguments, arch)}
        assert loaders == {Loader.VECTOR, Loader.PLAIN}


def resolve_decode(arguments: dict[str, object], arch: str) -> list[DecodeSpec]:
    specs = specs_of(PlannerConfig.from_arguments(arguments), arch)
    return [spec for spec in specs if isinstance(spec, DecodeSpec)]


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256, 512])
@pytest.mark.parametrize("page_table", [table for table in Layout if table != "ragged"])
def test_tiles_do_not_go_by_pages(head_dim: int, page_table: Layout) -> None:
    """So that results have the same bits through every table and page size."""
    tiles = set()
    for page_size in (1, 3, 8, 16, 24, 64):
        spec = decode_spec(head_dim=head_dim, page_size=page_size, page_table=page_table.value)
        tile = spec.tile("sm_90a")
        assert isinstance(tile, DecodeTile)
        tiles.add(tile._replace(smem_bytes=0, tma_tokens=0))
    assert len(tiles) == 1


# --- warpgroups -----------------------------------------------------------------------------------

WARPGROUPS = tuple(
    dict.fromkeys(
        (
            *warpgroup_specs(),
            *(spec for spec in sample_specs("sm_90a") if isinstance(spec, PrefillSpec)),
        )
    )
)


def warpgroup_tile(spec: PrefillSpec) -> WarpgroupTile:
    tile = spec.tile("sm_90a")
    assert isinstance(tile, WarpgroupTile)
    return tile


def prefill_spec(arch: str, **arguments: object) -> PrefillSpec:
    """The prefill kernel of an aligned cache."""
    return next(
        spec
        for spec in specs_of(PlannerConfig.from_arguments(arguments), arch)
        if isinstance(spec, PrefillSpec)
    )


@pytest.mark.parametrize(
    ("arguments", "loader"),
    [
        *(({"head_dim": n}, "tensor") for n in HEAD_DIMS),
        *(({"head_dim": 192, "head_dim_vo": n}, "tensor") for n in (64, 128, 256)),
        ({"head_dim": 192, "head_dim_vo": 48}, "tensor"),
        ({"page_size": 12}, "vector"),
        ({"page_size": 1, "page_table": "token"}, "vector"),
        ({"page_size": None, "page_table": "ragged"}, "tensor"),
        ({"page_size": 24, "page_table": "separate"}, "tensor"),
        ({"q_dtype": "float16", "kv_dtype": "float16", "out_dtype": "float32"}, "tensor"),
        ({"use_custom_mask": True, "logits_soft_cap": 30.0}, "tensor"),
        ({"head_dim": 512, "page_size": 4}, "vector"),
        ({"head_dim": 512, "variant": "alibi", "use_custom_mask": True}, "tensor"),
        ({"head_dim": 128, "head_dim_vo": 512}, "tensor"),
        ({"head_dim": 512, "head_dim_vo": 128}, "tensor"),
        ({"kv_dtype": "float8_e4m3fn"}, "vector"),
        ({"kv_dtype": "float8_e5m2", "head_dim": 256}, "vector"),
        ({"kv_dtype": "float8_e5m2", "head_dim": 512}, "vector"),
        ({"kv_dtype": "nvfp4", "head_dim_vo": 512}, "vector"),
        ({"kv_dtype": "nvfp4"}, "vector"),
        ({"kv_dtype": "nvfp4", "head_dim": 80}, "vector"),
    ],
    ids=str,
)
def test_who_has_warpgroups(arguments: dict[str, object], loader: str) -> None:
    """``loader`` is that of an aligned cache."""
    spec = prefill_spec("sm_90a", **{"head_dim": 128} | arguments)
    assert spec.loader == loader
    assert spec.uses_tma("sm_90a") == (loader == "tensor")
    assert isinstance(spec.tile("sm_90a"), WarpgroupTile)
    assert spec.template("sm_90a") == "attention/prefill_sm90.cu.jinja"
    for arch in set(ARCHITECTURES) - {"sm_90a"}:
        other = prefill_spec(arch, **{"head_dim": 128} | arguments)
        assert other.loader is Loader.VECTOR
        assert other.template(arch) == "attention/prefill_sm80.cu.jinja"
        assert isinstance(other.tile(arch), PrefillTile)


def test_warpgroups_are_sampled() -> None:
    assert {spec.head_dim for spec in WARPGROUPS} == set(HEAD_DIMS)
    assert {spec.loader for spec in WARPGROUPS} == set(Loader)
    assert {warpgroup_tile(spec).num_warps for spec in WARPGROUPS} == {4, 8, 12}


@pytest.mark.parametrize("spec", WARPGROUPS, ids=lambda spec: spec.symbol)
def test_a_tile_of_warpgroups_fits(spec: PrefillSpec) -> None:
    tile = warpgroup_tile(spec)
    # Pieces that it claims are noted nowhere.
    assert tile.smem_bytes + STATIC_BYTES - 4 * MAX_WORK_TILES <= ARCHS["sm_90a"].smem_bytes
    groups, rest = divmod(tile.num_warps, 4)
    assert rest == 0
    assert tile.value_dim == spec.head_dim_vo if spec.head_dim_vo <= 256 else 256
    # Parts of a tile of K have whole segments.
    assert tile.key_parts == 1 or spec.head_dim % (64 * tile.key_parts) == 0
    assert tile.row_tile == 64 * groups
    assert tile.num_threads == 128 * (groups + tile.num_producers)
    # A launch takes as many of an SM's registers as all its threads may have; warpgroups that want
    # more than is left of these wait for ever.
    launched = 64 * 1024 // tile.num_threads // 8 * 8 * tile.num_threads
    kept = tile.num_producers * tile.producer_registers + groups * tile.consumer_registers
    if tile.query_registers:  # of the last warpgroup
        kept += tile.query_registers - tile.producer_registers
    assert 128 * kept <= launched
    assert tile.query_registers % 8 == 0
    assert tile.producer_registers % 8 == tile.consumer_registers % 8 == 0
    # What is accumulated, probabilities and scores, half a register a token and column each.
    held = (tile.value_dim + tile.tile_tokens) // 2 + tile.tile_tokens // 4
    assert held < (tile.consumer_registers or launched // tile.num_threads)
    # Segments that are as wide as the swizzle, in parts that begin where it does.
    assert tile.smem_bytes % 1024 == 0
    assert tile.tile_tokens % tile.tma_tokens == 0
    if spec.loader is Loader.TENSOR:
        assert spec.page_table is Layout.RAGGED or spec.page_size % tile.tma_tokens == 0
        assert tile.tile_tokens // tile.tma_tokens <= 32, "each lane finds one page"
        # A TMA tile of V has all columns of the product, and one of K a segment. Products read V 16
        # rows at a time, which lie in one TMA tile, or in two of eight.
        assert tile.value_dim == tile.output_columns
        assert tile.tma_tokens == 8 or tile.tma_tokens % 16 == 0
        assert tile.key_tma_columns == (128 if spec.has_fp8_queries else 64)


@pytest.mark.parametrize("spec", WARPGROUPS, ids=lambda spec: spec.symbol)
def test_the_products_are_those_that_there_are(spec: PrefillSpec) -> None:
    tile = warpgroup_tile(spec)
    source = render(spec, "sm_90a")
    short = {DType.BFLOAT16: "BF16", DType.FLOAT16: "F16", DType.FLOAT8_E4M3FN: "E4M3"}[
        DType(tile.product_dtype)
    ]
    depth, end = (32, "_TN") if spec.has_fp8_queries else (16, "")
    wanted = {
        f"MMA_64x{tile.tile_tokens}x{depth}_F32{short}{short}_SS{end}",
        f"MMA_64x{tile.value_dim}x{depth}_F32{short}{short}_RS{end}",
    }
    assert set(re.findall(r"\bMMA_\w+", source)) == wanted
    text = headers_of(source)[cutlass.WRAPPERS[0]]
    # Those of integers are there in any case.
    found = re.findall(r"^struct (MMA_\w+_F32(?:B?F16B?F16|E4M3E4M3)_\w+)$", text, re.MULTILINE)
    assert set(found) == wanted


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256, 512])
def test_tiles_of_warpgroups_do_not_go_by_pages(head_dim: int) -> None:
    tiles = set()
    for page_size, page_table in itertools.product((1, 3, 8, 16, 24, 64, 256), Layout):
        if page_table is Layout.RAGGED:
            continue
        spec = prefill_spec(
            "sm_90a", head_dim=head_dim, page_size=page_size, page_table=page_table.value
        )
        # Registers go by the loader, and have no say in the bits.
        same = dict.fromkeys(
            ("tma_tokens", "num_producers", "producer_registers", "consumer_registers"), 0
        )
        tiles.add(warpgroup_tile(spec)._replace(**same))
    assert len(tiles) == 1
