"""The tensor maps that a launch is given, and what else plans hand to kernels that claim pieces."""

from __future__ import annotations

import ctypes
import itertools
import struct
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import jitattn
from jitattn.device.workspace import SLICE_BYTES, aligned
from jitattn.kernels.common import tma
from jitattn.kernels.common.kernel_launch import KernelLaunch
from jitattn.kernels.common.params import (
    ATTENTION_OFFSET,
    BOUNDARY_BYTES,
    COST_BYTES,
    FIRST_ITEM_BYTES,
    QUERY_TILE_BEGIN_BYTES,
    QUERY_TILE_BYTES,
    REQUEST_BYTES,
)
from jitattn.kernels.common.tile import MAX_WORK_TILES
from jitattn.kernels.common.tma import TmaTile
from jitattn.spec.params import TENSOR_MAP_BYTES
from jitattn.tensors.cache_views import CacheView
from tests.emulator import launch_recorder
from tests.emulator.launch_recorder import LaunchRecorder, Recorded

B, HQ, HKV, PAGE, PAGES, WIDTH = 3, 16, 8, 16, 6, 5
LENS = torch.tensor([5, 9, 0], dtype=torch.int32)
OFFSETS = torch.tensor([0, 3, 4, 6], dtype=torch.int32)
SHAPE = {"num_qo_heads": HQ, "num_kv_heads": HKV, "head_dim": 128, "page_size": PAGE}
Pair = tuple[Tensor, Tensor]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> LaunchRecorder:
    return launch_recorder.install(monkeypatch)


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def table(*, batch_size: int = B, separate: bool = False) -> jitattn.BlockTable:
    shape = (batch_size, 2, WIDTH) if separate else (batch_size, WIDTH)
    return jitattn.BlockTable(torch.zeros(shape, dtype=torch.int32))


@dataclass(frozen=True)
class Map:
    """What the driver was asked to encode: see ``launch_recorder.encode_tensor_map``."""

    pointer: int
    item_bytes: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    fetch_bytes: int

    @classmethod
    def of(cls, encoded: bytes) -> Map:
        numbers = struct.unpack("<11Q5IH18x", encoded)
        return cls(*numbers[:2], numbers[2:7], numbers[7:11], numbers[11:16], numbers[16])


def maps_of(launch: Recorded) -> tuple[Map, Map]:
    """The maps of K and V that a launch was given."""
    assert launch.symbol.endswith("_tensor"), launch.symbol
    both = ctypes.string_at(ctypes.addressof(launch.params), ATTENTION_OFFSET)
    return Map.of(both[:TENSOR_MAP_BYTES]), Map.of(both[TENSOR_MAP_BYTES:])


# --- bytes ----------------------------------------------------------------------------------------


def hnd() -> Tensor:
    return zeros(PAGES, 2, HKV, PAGE, 128)


# Caches of 8 heads of 128 in pages of 16, but where they say otherwise. The strides in bytes of
# tokens, heads and pages; those of V where they differ.
CACHES: dict[str, tuple[dict[str, object], Tensor | Pair, tuple[int, ...], tuple[int, ...]]] = {
    "shared": ({}, zeros(PAGES, 2, PAGE, HKV, 128), (2048, 256, 65536), ()),
    "HND": ({"kv_layout": "HND"}, hnd(), (256, 4096, 65536), ()),
    "HND in memory": ({}, hnd().transpose(2, 3), (256, 4096, 65536), ()),
    "pair": ({}, (zeros(4, PAGE, HKV, 128), zeros(4, PAGE, HKV, 128)), (2048, 256, 32768), ()),
    "cross-layer": ({}, zeros(PAGES, 3, 2, PAGE, HKV, 128)[:, 1], (2048, 256, 196608), ()),
    "layer inside": (
        {},
        zeros(PAGES, PAGE, 3, 2, HKV, 128)[:, :, 1].transpose(1, 2),
        (12288, 256, 196608),
        (),
    ),
    "separate": (
        {"page_table": "separate"},
        (zeros(4, PAGE, HKV, 128), zeros(9, 2, PAGE, HKV, 128)[:, 1]),
        (2048, 256, 32768),
        (2048, 256, 65536),
    ),
    # A stride that nobody steps along may be anything; it is never 0, which the driver refuses.
    "one page": ({}, zeros(1, 2, PAGE, HKV, 128), (2048, 256, 128), ()),
    "one head": (
        {"num_kv_heads": 1, "num_qo_heads": 8},
        zeros(PAGES, 2, PAGE, 1, 128).as_strided(
            (PAGES, 2, PAGE, 1, 128), (4096, 2048, 128, 2**40 + 1, 1)
        ),
        (256, 128, 8192),
        (),
    ),
    "FP8": (
        {"kv_dtype": "float8_e5m2"},
        zeros(PAGES, 2, PAGE, HKV, 128, dtype=torch.uint8),
        (1024, 128, 32768),
        (),
    ),
    "narrow": ({"head_dim": 64}, zeros(PAGES, 2, PAGE, HKV, 64), (1024, 128, 32768), ()),
    "narrow V": (
        {"head_dim": 192, "head_dim_vo": 128},
        (zeros(4, PAGE, HKV, 192), zeros(4, PAGE, HKV, 128)),
        (3072, 384, 49152),
        (2048, 256, 32768),
    ),
    "wide V": (
        {"head_dim": 128, "head_dim_vo": 512},
        (zeros(4, PAGE, HKV, 128), zeros(4, PAGE, HKV, 512)),
        (2048, 256, 32768),
        (8192, 1024, 131072),
    ),
}


@pytest.mark.parametrize("name", CACHES)
def test_a_launch_gets_the_maps_of_its_cache(cuda: LaunchRecorder, name: str) -> None:
    arguments, cache, k_strides, v_strides = CACHES[name]
    planner = cuda.planner(
        **{"num_qo_heads": HQ, "num_kv_heads": HKV, "page_size": PAGE} | arguments
    )
    config = planner.config
    plan = planner.plan(table(separate=name == "separate"), LENS)
    q = zeros(B, config.num_qo_heads, config.head_dim)
    bound = planner.bind(cache)
    plan.run(q, bound)
    halves = (cache[:, 0], cache[:, 1]) if isinstance(cache, Tensor) else cache
    value_dim = config.head_dim_vo or config.head_dim
    for found, half, strides, dim, box_dim in zip(
        maps_of(cuda.last()),
        halves,
        (k_strides, v_strides or k_strides),
        (config.head_dim, value_dim),
        (config.head_dim, min(value_dim, 256)),
        strict=True,
    ):
        item_bytes = half.element_size()
        segment = 128 // item_bytes
        token, head, page = strides
        assert found == Map(
            pointer=half.data_ptr(),
            item_bytes=item_bytes,
            dims=(segment, PAGE, dim // segment, config.num_kv_heads, half.shape[0]),
            strides=(token, 128, head, page),
            box=(segment, PAGE, box_dim // segment, 1, 1),
            fetch_bytes=128,
        )


@pytest.mark.parametrize(
    ("page_size", "head_dim", "tma_tokens"),
    [(8, 128, 8), (24, 128, 8), (48, 128, 16), (64, 128, 16), (64, 64, 32), (48, 64, 16)],
)
def test_boxes_lie_in_one_page(
    cuda: LaunchRecorder, page_size: int, head_dim: int, tma_tokens: int
) -> None:
    """The largest that divide it, up to a warp's slice."""
    planner = cuda.planner(num_qo_heads=4, num_kv_heads=4, head_dim=head_dim, page_size=page_size)
    plan = planner.plan(table(), LENS)
    plan.run(zeros(B, 4, head_dim), planner.bind(zeros(2, 2, page_size, 4, head_dim)))
    for found in maps_of(cuda.last()):
        assert (found.dims[1], found.box[1]) == (page_size, tma_tokens)


@pytest.mark.parametrize("head_dim", [32, 96, 160])
def test_prefill_cuts_rows_that_end_inside_a_segment(cuda: LaunchRecorder, head_dim: int) -> None:
    """The first dimension is the whole row, of which a tile has 64 columns."""
    planner = cuda.planner(num_qo_heads=4, num_kv_heads=4, head_dim=head_dim, page_size=PAGE)
    plan = planner.plan(table(), LENS, OFFSETS, max_q_len=64)
    q = zeros(int(OFFSETS[-1]), 4, head_dim)
    plan.run(q, planner.bind(zeros(PAGES, 2, PAGE, 4, head_dim)))
    launch = next(found for found in cuda.launches if "_prefill_" in found.symbol)
    for found in maps_of(launch):
        assert found.dims == (head_dim, PAGE, 1, 4, PAGES)
        assert found.box == (64, PAGE, 1, 1, 1)


def test_tokens_without_pages_are_one_page(cuda: LaunchRecorder) -> None:
    planner = cuda.planner(
        num_qo_heads=4, num_kv_heads=4, head_dim=128, page_size=None, page_table="ragged"
    )
    starts = torch.tensor([0, 5, 14, 14], dtype=torch.int32)
    plan = planner.plan(jitattn.RaggedKV(starts), LENS, OFFSETS, max_q_len=64)
    k, v = zeros(20, 4, 128), zeros(20, 4, 128)
    plan.run(zeros(int(OFFSETS[-1]), 4, 128), planner.bind((k, v)))
    launch = next(found for found in cuda.launches if "_prefill_" in found.symbol)
    for found, columns in zip(maps_of(launch), (1, 2), strict=True):
        assert found.dims == (64, 20, 2, 4, 1)
        assert found.strides[0] == 4 * 128 * 2
        assert found.box == (64, 64, columns, 1, 1)


def test_kernels_without_boxes_get_no_maps(cuda: LaunchRecorder) -> None:
    for arguments in ({"page_size": 4}, {"page_size": 12}, {"page_table": "token"}):
        planner = cuda.planner(
            **{"num_qo_heads": HQ, "num_kv_heads": HKV, "head_dim": 128, "page_size": 16}
            | arguments
        )
        config = planner.config
        bound = planner.bind(zeros(PAGES, 2, config.page_size, HKV, config.head_dim))
        assert bound.tensor_maps is None
        assert bound.kernels is planner.kernels.kernels


# --- strides that have no map ---------------------------------------------------------------------


def expanded(dim: int) -> Tensor:
    """A cache whose dimension ``dim`` is one entry, seen many times."""
    shape = [PAGES, 2, PAGE, HKV, 128]
    shape[dim] = 1
    return zeros(*shape).expand(PAGES, 2, PAGE, HKV, 128)


UNMAPPED: dict[str, Tensor | Pair] = {
    "odd base": zeros(PAGES * 2 * PAGE * HKV * 128 + 1)[1:].view(PAGES, 2, PAGE, HKV, 128),
    "odd rows": zeros(PAGES, 2, PAGE, HKV, 129)[..., :128],
    "odd V": (zeros(PAGES, PAGE, HKV, 128), zeros(PAGES, PAGE, HKV, 132)[..., :128]),
    # These are aligned, and the step from one entry to the next is none.
    "one page many times": expanded(0),
    "one token many times": expanded(2),
    "one head many times": expanded(3),
}


@pytest.mark.parametrize("name", UNMAPPED)
def test_strides_without_a_map_are_for_the_plain_loader(cuda: LaunchRecorder, name: str) -> None:
    planner = cuda.planner(num_qo_heads=HQ, num_kv_heads=HKV, head_dim=128, page_size=PAGE)
    plan, q, out = planner.plan(table(), LENS), zeros(B, HQ, 128), zeros(B, HQ, 128)
    mapped, bound = planner.bind(zeros(PAGES, 2, PAGE, HKV, 128)), planner.bind(UNMAPPED[name])
    assert bound.tensor_maps is None
    for kv, loader in ((mapped, "tensor"), (bound, "plain")) * 2:
        for _ in range(3):
            plan.run(q, kv, out=out)
            assert cuda.last().symbol.endswith(f"_{loader}")
            attention = cuda.last().params.attention
            assert attention.k == kv.k.tensor.data_ptr()
            strides = (
                attention.k_page_stride,
                attention.k_token_stride,
                attention.k_head_stride,
            )
            assert strides == kv.k.strides


def test_a_cache_without_pages_has_no_map(
    cuda: LaunchRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(pointer: int, item_bytes: int, dims: tuple[int, ...], *rest: object, **kw: object):
        return (
            None
            if 0 in dims
            else launch_recorder.encode_tensor_map(pointer, item_bytes, dims, *rest, **kw)
        )

    monkeypatch.setattr(tma, "encode_tensor_map", encode)
    planner = cuda.planner(num_qo_heads=HQ, num_kv_heads=HKV, head_dim=128, page_size=PAGE)
    plan = planner.plan(table(), torch.zeros(B, dtype=torch.int32))
    plan.run(zeros(B, HQ, 128), planner.bind(zeros(0, 2, PAGE, HKV, 128)))
    assert cuda.last().symbol.endswith("_plain")


# --- memory that moves ----------------------------------------------------------------------------


def move(pool: Tensor) -> None:
    """Give the storage of ``pool`` other memory: it grows, and has both while it is copied."""
    storage, before = pool.untyped_storage(), pool.data_ptr()
    storage.resize_(storage.nbytes() + 4096)
    assert pool.data_ptr() != before


def test_memory_that_moved_is_encoded_again(cuda: LaunchRecorder) -> None:
    planner = cuda.planner(num_qo_heads=HQ, num_kv_heads=HKV, head_dim=128, page_size=PAGE)
    plan, q, out = planner.plan(table(), LENS), zeros(B, HQ, 128), zeros(B, HQ, 128)
    pool = zeros(PAGES, 2, PAGE, HKV, 128)
    kv = planner.bind(pool)
    for given in ({"out": out}, {"out": out}, {}, {"return_lse": True}):
        for _ in range(3):  # the call after a move is that of a repeated run
            plan.run(q, kv, **given)
            k_map, v_map = maps_of(cuda.last())
            assert (k_map.pointer, v_map.pointer) == (pool.data_ptr(), pool[:, 1].data_ptr())
        move(pool)


def test_nothing_is_encoded_that_stayed(
    cuda: LaunchRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = cuda.planner(num_qo_heads=HQ, num_kv_heads=HKV, head_dim=128, page_size=PAGE)
    plan, out = planner.plan(table(), LENS), zeros(B, HQ, 128)
    kv = planner.bind(zeros(PAGES, 2, PAGE, HKV, 128))
    monkeypatch.setattr(tma, "encode_tensor_map", None)
    monkeypatch.setattr(tma, "move_tensor_map", None)
    for _ in range(3):
        plan.run(zeros(B, HQ, 128), kv, out=out)
        plan.run(zeros(B, HQ, 128), kv)


@pytest.mark.parametrize("runs_before", [0, 1, 3])
def test_a_move_that_the_driver_refuses_is_an_error(
    cuda: LaunchRecorder, monkeypatch: pytest.MonkeyPatch, runs_before: int
) -> None:
    planner = cuda.planner(num_qo_heads=HQ, num_kv_heads=HKV, head_dim=128, page_size=PAGE)
    plan, q, out = planner.plan(table(), LENS), zeros(B, HQ, 128), zeros(B, HQ, 128)
    pool = zeros(PAGES, 2, PAGE, HKV, 128)
    kv = planner.bind(pool)
    for _ in range(runs_before):
        plan.run(q, kv, out=out)
    num_launches = len(cuda.launches)
    move(pool)
    with monkeypatch.context() as patch:
        for name in ("encode_tensor_map", "move_tensor_map"):
            patch.setattr(tma, name, lambda *given, **named: None)
        for _ in range(2):
            with pytest.raises(ValueError, match="the driver maps no tensor of strides"):
                plan.run(q, kv, out=out)
    assert len(cuda.launches) == num_launches
    for _ in range(2):
        plan.run(q, kv, out=out)
        assert [found.pointer for found in maps_of(cuda.last())] == [
            pool.data_ptr(),
            pool[:, 1].data_ptr(),
        ]


# --- caches in turn -------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("max_q_len", [None, 2, 8, 40])
def test_layers_in_turn_get_their_own_maps(
    cuda: LaunchRecorder, kv_dtype: str, max_q_len: int | None
) -> None:
    """The repeated call of a plan, over caches that differ in addresses and in pages."""
    planner = cuda.planner(
        num_qo_heads=HQ, num_kv_heads=HKV, head_dim=128, page_size=PAGE, kv_dtype=kv_dtype
    )
    dtype = getattr(torch, kv_dtype)
    layers = [zeros(pages, 2, PAGE, HKV, 128, dtype=dtype) for pages in (6, 6, 9, 6)]
    bound = [planner.bind(layer) for layer in layers]
    assert len({id(kv.layout_key) for kv in bound}) == 1
    offsets, num_tokens = (None, B) if max_q_len is None else (OFFSETS, 6)
    plan = planner.plan(table(), LENS, offsets, max_q_len=max_q_len)
    q, out = zeros(num_tokens, HQ, 128), zeros(num_tokens, HQ, 128)
    for given in ({"out": out}, {}):
        for kv, layer in [*zip(bound, layers, strict=True)] * 3:
            del cuda.launches[:]
            plan.run(q, kv, **given)
            assert len(cuda.launches) == (2 if max_q_len == 40 else 1)
            for launch in cuda.launches:
                attention = launch.params.attention
                places = layer.data_ptr(), layer[:, 1].data_ptr()
                assert (attention.k, attention.v) == places
                if launch.symbol.endswith("_tensor"):
                    found = maps_of(launch)
                    assert tuple(half.pointer for half in found) == places
                    assert {half.dims[-1] for half in found} == {layer.shape[0]}


# --- kernels that bring different boxes -----------------------------------------------------------


def view(cache: Tensor) -> tuple[CacheView, CacheView]:
    k, v = cache[:, 0], cache[:, 1]
    return CacheView(k, *k.stride()[:3]), CacheView(v, *v.stride()[:3])


def maps_for(k: CacheView, v: CacheView, tiles: dict[str, TmaTile]) -> tma.TensorMaps:
    return tma.MapForm(k, v, tiles)((k, v))


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> list[Map]:
    """What the driver is asked to encode or to move, in order."""
    asked: list[Map] = []

    def encode(*given: object, **named: object) -> bytes | None:
        encoded = launch_recorder.encode_tensor_map(*given, **named)  # type: ignore[arg-type]
        asked.append(Map.of(encoded))
        return encoded

    def move(encoded: bytes, pointer: int) -> bytes | None:
        moved = launch_recorder.move_tensor_map(encoded, pointer)
        asked.append(Map.of(moved))
        return moved

    monkeypatch.setattr(tma, "encode_tensor_map", encode)
    monkeypatch.setattr(tma, "move_tensor_map", move)
    return asked


BOXES = {
    "decode": TmaTile(16, 128, 128),
    "prefill": TmaTile(16, 64, 128, fetches_pairs=True),
    "decode_multi_token": TmaTile(16, 128, 128),
}


def test_roles_of_the_same_box_share_their_maps(encodings: list[Map]) -> None:
    maps = maps_for(*view(zeros(PAGES, 2, PAGE, HKV, 128)), BOXES)
    assert len(encodings) == 2, "only the first role's, until others are asked for"
    for _ in range(2):
        decode, prefill, wide = (maps.at(role, 128, 256) for role in BOXES)
        assert wide is decode
        assert prefill != decode
    # Where the memory was at first, and then at another place for each of two boxes.
    assert len(encodings) == 2 + 2 * 2
    assert [found.box[:3] for found in encodings[2:]] == [
        (64, 16, 2), (64, 16, 2), (64, 16, 1), (64, 16, 2)
    ]  # fmt: skip


def test_each_role_follows_memory_that_moves(encodings: list[Map]) -> None:
    k, v = view(zeros(PAGES, 2, PAGE, HKV, 128))
    maps = maps_for(k, v, BOXES)
    places = [(4096 * n, 4096 * n + 128) for n in range(1, 4)]
    for role in (
        "prefill",
        "decode",
        "decode_multi_token",
    ):
        # Each at every place, then back at the first.
        for k_at, v_at in (*places, places[0]):
            for _ in range(2):
                encoded = maps.at(role, k_at, v_at)
            halves = encoded[:TENSOR_MAP_BYTES], encoded[TENSOR_MAP_BYTES:]
            found = [Map.of(half) for half in halves]
            assert [half.pointer for half in found] == [k_at, v_at]
            tokens, *columns = BOXES[role][:3]
            assert [half.box[:3] for half in found] == [(64, tokens, n // 64) for n in columns]
    # The first pair, three and four places of two boxes, and none for a role whose box is there.
    assert len(encodings) == 2 * (1 + 3 + 4 + 3)


def test_who_computes_too_fetches_two_lines_at_a_time(encodings: list[Map]) -> None:
    maps = maps_for(*view(zeros(PAGES, 2, PAGE, HKV, 128)), BOXES)
    maps.at("prefill", 128, 256)
    assert [found.fetch_bytes for found in encodings] == [128, 128, 256, 256]
    encodings.clear()
    narrow = maps_for(
        *view(zeros(PAGES, 2, PAGE, HKV, 64)), {"prefill": TmaTile(16, 64, 64, fetches_pairs=True)}
    )
    narrow.at("prefill", 128, 256)
    assert {found.fetch_bytes for found in encodings} == {128}, "beside a line is another head's"


def test_latents_arrive_in_groups_of_eight_tokens(encodings: list[Map]) -> None:
    rows = zeros(PAGES, 3, 32, 1, 576)[:, 1]
    k, v = (
        CacheView(part, *(rows.stride(0), rows.stride(1), 0))
        for part in (rows[..., :512], rows[..., 512:])
    )
    maps_for(k, v, {"decode": TmaTile(32, 256, 64, is_grouped=True)})
    latent, rope = encodings
    strides = (1152, 128, 8 * 1152, 3 * 32 * 1152)
    assert latent.dims == (64, 8, 8, 4, PAGES)
    assert rope.dims == (64, 8, 1, 4, PAGES)
    assert latent.strides == rope.strides == strides
    assert latent.box == (64, 8, 4, 4, 1), "half of the segments of each group"
    assert rope.box == (64, 8, 1, 4, 1)
    assert rope.pointer == latent.pointer + 1024


def test_a_role_without_boxes_gets_those_of_the_first(encodings: list[Map]) -> None:
    boxes = {"decode": BOXES["decode"]}
    maps = maps_for(*view(zeros(PAGES, 2, PAGE, HKV, 128)), boxes)
    assert maps.at("prefill", 128, 256) is maps.at("decode", 128, 256)
    assert len(encodings) == 2 + 2


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"page_size": 8},
        {"page_size": 256},
        {"head_dim": 64, "page_size": 64},
        {"head_dim": 192, "page_size": 32},
        {"head_dim": 192, "head_dim_vo": 128},
        {"head_dim": 256, "page_size": 64},
    ],
    ids=str,
)
def test_both_kernels_of_a_batch_get_their_own_boxes(
    cuda: LaunchRecorder, encodings: list[Map], arguments: dict[str, object]
) -> None:
    """Through repeated runs, and after the memory has moved."""
    planner = cuda.planner(**SHAPE | arguments)
    config, kernels = planner.config, planner.kernels.kernels
    value_dim = config.head_dim_vo or config.head_dim
    # Tokens of a box, and segments of a box of K and of V: prefill brings K segment by segment.
    boxes = [
        (kernels.prefill.tile.tma_tokens, 1, value_dim // 64),
        (kernels.decode.tile.tma_tokens, config.head_dim // 64, value_dim // 64),
    ]
    assert not [tokens for tokens, *_ in boxes if config.page_size % tokens]
    plan = planner.plan(table(), LENS, OFFSETS, max_q_len=40)
    k = zeros(4, config.page_size, HKV, config.head_dim)
    v = zeros(4, config.page_size, HKV, value_dim)
    kv = planner.bind((k, v))
    q = zeros(6, HQ, config.head_dim)
    for num_places in (1, 2):
        for _ in range(3):
            plan.run(q, kv)
            for launch, (tokens, *segments) in zip(cuda.launches[-2:], boxes, strict=True):
                found = maps_of(launch)
                assert [half.pointer for half in found] == [k.data_ptr(), v.data_ptr()]
                assert [half.box[:3] for half in found] == [(64, tokens, n) for n in segments]
        assert len(encodings) == 2 * len(set(boxes)) * num_places
        move(k)


def test_a_kernel_that_uses_no_maps_runs_beside_one_that_does(
    cuda: LaunchRecorder, encodings: list[Map]
) -> None:
    """Prefill of FP8 caches copies vectors."""
    for head_dim in (128, 512):
        arguments = {"kv_dtype": "float8_e4m3fn", "head_dim": head_dim}
        planner = cuda.planner(**SHAPE | arguments)
        dtype = getattr(torch, planner.config.kv_dtype)
        cache = zeros(PAGES, 2, PAGE, HKV, planner.config.head_dim, dtype=dtype)
        plan = planner.plan(table(), LENS, OFFSETS, max_q_len=40)
        kv = planner.bind(cache)
        encodings.clear()
        for _ in range(3):
            plan.run(zeros(6, HQ, planner.config.head_dim), kv)
            symbols = [launch.symbol for launch in cuda.launches[-2:]]
            assert [name.rsplit("_", 1)[1] for name in symbols] == ["vector", "tensor"]
        assert encodings == []


# --- claims, rounds, promises ---------------------------------------------------------------------


def launches_of(cuda: LaunchRecorder, **arguments: object) -> dict[str, Recorded]:
    """The launches of a mixed batch, by what they are."""
    planner = cuda.planner(**SHAPE | arguments)
    config = planner.config
    plan = planner.plan(table(), LENS, OFFSETS, max_q_len=40)
    cache = zeros(PAGES, 2, config.page_size, config.num_kv_heads, config.head_dim)
    plan.run(zeros(6, config.num_qo_heads, config.head_dim), planner.bind(cache))
    names = "schedule", "prefill", "decode"
    found = dict(zip(names, cuda.launches[-3:], strict=True))
    for name, launch in found.items():
        assert launch.symbol.startswith(f"jitattn_{name}")
    return found


@pytest.mark.parametrize("early_kv", [False, True])
def test_early_kv_reaches_both_kernels(cuda: LaunchRecorder, early_kv: bool) -> None:
    found = launches_of(cuda, early_kv=early_kv)
    for name in ("decode", "prefill"):
        assert found[name].params.attention.early_kv == early_kv


@pytest.mark.parametrize(
    ("arguments", "claims"),
    [
        ({}, True),
        ({"num_sms": 5}, True),
        ({"page_table": "shared", "early_kv": True}, True),
        ({"batch_invariant": True}, False),
        # One round has as many pieces as a launch may let its CTAs claim, or more.
        ({"num_kv_heads": 1024, "num_qo_heads": 1024}, False),
        ({"num_kv_heads": 2000, "num_qo_heads": 2000}, False),
    ],
)
def test_claims_of_work_tiles(
    cuda: LaunchRecorder, arguments: dict[str, object], claims: bool
) -> None:
    found = launches_of(cuda, **arguments)
    assert found["decode"].params.attention.claims_work_tiles == claims
    prefill, decode = found["schedule"].parts
    assert (decode.max_waves > 1) == claims
    assert found["prefill"].params.attention.claims_work_tiles == 0
    assert prefill.max_waves == 1


@pytest.mark.parametrize("num_sms", [None, 1, 2, 5, 1000])
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(
    ("num_kv_heads", "group_size", "head_dim"),
    [(1, 1, 128), (8, 4, 128), (3, 71, 128), (2, 8, 512), (64, 1, 64), (256, 1, 64), (512, 1, 64)],
)
def test_buffers_hold_every_slot(
    cuda: LaunchRecorder,
    num_sms: int | None,
    batch_invariant: bool,
    num_kv_heads: int,
    group_size: int,
    head_dim: int,
) -> None:
    planner = cuda.planner(
        num_qo_heads=num_kv_heads * group_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=PAGE,
        num_sms=num_sms,
        batch_invariant=batch_invariant,
    )
    plan = planner.plan(table(), LENS, OFFSETS, max_q_len=100)
    kernels = planner.kernels.kernels
    decode = kernels.decode_multi_token or kernels.decode
    partials_at, counters_at = (buffer.data_ptr() for buffer in plan.backend.launches[0].buffers)
    for part, kernel in zip(plan.backend.launches, (kernels.prefill, decode), strict=True):
        attention, schedule = part.params.attention, part.schedule_params
        slots = schedule.wave_slots * schedule.max_waves
        blocks = attention.num_head_blocks.value
        check_schedule_room(part, slots)
        assert schedule.num_head_blocks == blocks
        if part.role == "prefill":  # whole units use every CTA
            num_ctas = 132 * kernel.tile.ctas_per_sm if num_sms is None else min(num_sms, 132)
            assert schedule.num_ctas == num_ctas
        partials, counters = part.buffers
        places = 2 * slots * blocks
        if attention.max_splits:  # of slots, and of CTAs
            assert attention.max_slots == slots
            places = (slots * blocks + schedule.num_ctas) * attention.max_splits
        rows = places * kernel.row_tile
        values = rows * kernel.tile.value_dim
        # Outputs of the splits, then their maxima and sums, two floats a row.
        assert attention.partials == partials_at
        assert attention.partial_sums == partials_at + 4 * values
        partials_at += aligned(4 * (values + 2 * rows))
        assert partials_at <= partials.data_ptr() + partials.nbytes
        # The first counter is that of the claims.
        assert attention.num_claimed == counters_at
        # In slices of their own.
        assert attention.counters == counters_at + SLICE_BYTES
        counters_at += aligned(SLICE_BYTES + 4 * slots * blocks)
        assert counters_at <= counters.data_ptr() + counters.nbytes
        assert not counters.any()
        if attention.claims_work_tiles:
            # One CTA may do all pieces but the others' first; it notes those, one ask in vain, and
            # that there is room for another.
            assert slots * blocks - schedule.num_ctas + 2 <= MAX_WORK_TILES


def check_schedule_room(part: KernelLaunch, slots: int) -> None:
    """Assert that the parts of a schedule lie in its memory, one after the other."""
    params = part.schedule_params
    begins = [getattr(params.schedule, name) for name, _ in params.schedule._fields_]
    memory, num_units = part.memory, B
    if part.role == "prefill":
        num_units = B * -(
            -100 * part.schedule_params.group_size // part.schedule_params.prefill_rows
        )
    begins.append(memory.data_ptr() + memory.numel())
    sizes = (
        16,
        REQUEST_BYTES * B,
        QUERY_TILE_BYTES * num_units,
        BOUNDARY_BYTES * (slots + 1),
        QUERY_TILE_BEGIN_BYTES * (B + 1),
        COST_BYTES * (num_units + 1),
        FIRST_ITEM_BYTES * part.schedule_params.num_first_items,
    )
    assert begins[0] == memory.data_ptr()
    for (begin, end), size in zip(itertools.pairwise(begins), sizes, strict=True):
        assert begin % 16 == memory.data_ptr() % 16
        assert end - begin >= size


def test_padding_is_that_of_each_batch(cuda: LaunchRecorder) -> None:
    """Only offsets let q have rows past the last request; plans take over what others left."""
    planner = cuda.planner(**SHAPE)
    kv = planner.bind(zeros(PAGES, 2, PAGE, HKV, 128))
    for offsets, max_q_len in ((None, None), (OFFSETS, 2), (None, None), (OFFSETS, 40)) * 2:
        num_tokens = B if offsets is None else 9
        plan = planner.plan(table(), LENS, offsets, max_q_len=max_q_len)
        del cuda.launches[:]
        for _ in range(3):
            plan.run(zeros(num_tokens, HQ, 128), kv)
        for launch in cuda.launches:
            assert launch.params.attention.has_padding == (offsets is not None)
        del plan
