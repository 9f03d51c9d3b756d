"""Tiles: what the launches of a plan rely on."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from jitattn.config import PlannerConfig
from jitattn.spec import DecodeSpec, Loader, PageTable, PrefillSpec
from jitattn.support import ARCHITECTURES, HEAD_DIMS, resolve
from jitattn.tiling import DecodeTile, takes_boxes, tile_for


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_both_loaders_of_a_configuration_have_one_tile(arch: str) -> None:
    """A plan is made for one of them, and its parameters serve the other."""
    for head_dim, head_dim_vo, cap, mask in itertools.product(
        HEAD_DIMS, HEAD_DIMS, (0.0, 30.0), (False, True)
    ):
        config = PlannerConfig(
            head_dim=head_dim, head_dim_vo=head_dim_vo, logits_soft_cap=cap, use_custom_mask=mask
        )
        for spec in resolve(config, arch):
            if isinstance(spec, DecodeSpec | PrefillSpec):
                twin = tile_for(replace(spec, loader=Loader.PLAIN), arch)
                # Boxes leave no padding between rows.
                twin = twin._replace(smem_bytes=tile_for(spec, arch).smem_bytes)
                assert tile_for(spec, arch) == twin, spec.symbol


def decode_spec(**arguments: object) -> DecodeSpec:
    """The decode kernel of an aligned cache on sm_90a."""
    return next(
        spec
        for spec in resolve(PlannerConfig.from_arguments(arguments), "sm_90a")
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
        ({"q_dtype": "float16", "kv_dtype": "float16"}, True),
        ({"batch_invariant": True, "window_left": 7, "logits_soft_cap": 3.0}, True),
        ({"num_qo_heads": 64, "num_kv_heads": 1, "use_custom_mask": True}, True),
    ],
    ids=str,
)
def test_what_takes_boxes(arguments: dict[str, object], has_boxes: bool) -> None:
    spec = decode_spec(**arguments)
    assert spec.loader is (Loader.TENSOR if has_boxes else Loader.VECTOR)
    assert takes_boxes(spec, "sm_90a") == has_boxes
    tile = tile_for(spec, "sm_90a")
    assert isinstance(tile, DecodeTile)
    if has_boxes:
        # A box lies in one page, and a slice is some boxes.
        slice_tokens = tile.tile_tokens // tile.num_warps
        assert tile.box_tokens in (8, 16, 32)
        assert spec.page_size % tile.box_tokens == slice_tokens % tile.box_tokens == 0
    for arch in set(ARCHITECTURES) - {"sm_90a"}:
        assert not takes_boxes(spec, arch)
        loaders = {found.loader for found in resolve_decode(arguments, arch)}
        assert loaders == {Loader.VECTOR, Loader.PLAIN}


def resolve_decode(arguments: dict[str, object], arch: str) -> list[DecodeSpec]:
    specs = resolve(PlannerConfig.from_arguments(arguments), arch)
    return [spec for spec in specs if isinstance(spec, DecodeSpec)]


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256, 512])
@pytest.mark.parametrize("page_table", [table for table in PageTable if table != "ragged"])
def test_tiles_do_not_go_by_pages(head_dim: int, page_table: PageTable) -> None:
    """So that results have the same bits through every table and page size."""
    tiles = set()
    for page_size in (1, 3, 8, 16, 24, 64):
        spec = decode_spec(head_dim=head_dim, page_size=page_size, page_table=page_table.value)
        tile = tile_for(spec, "sm_90a")
        assert isinstance(tile, DecodeTile)
        tiles.add(tile._replace(smem_bytes=0, box_tokens=0))
    assert len(tiles) == 1
