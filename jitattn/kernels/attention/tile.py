"""Shapes of CTAs of the decode and the prefill kernel: a table, as code."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from jitattn.kernels.common.spec import AttentionSpec
from jitattn.kernels.common.tile import (
    MAX_WORK_TILES,
    DecodeTile,
    PrefillTile,
    WarpgroupTile,
    row_bytes,
)
from jitattn.spec.arch import ARCHS
from jitattn.spec.dtype import DType
from jitattn.spec.layout import SEGMENT_BYTES, Layout, Loader

if TYPE_CHECKING:
    from jitattn.kernels.attention.spec import DecodeSpec


# Bytes of K and V in flight that one CTA aims at. Two CTAs share an SM, and 64 KiB an SM saturate
# an H100's memory; the rest covers the stages that are being consumed.
_RING_BYTES = 64 * 1024
_MERGE_BYTES = 8 * 1024
# The same with TMA, where an SM has one CTA: 64 KiB saturate, the rest covers pauses, and the next
# launch's CTA has room beside it.
_TMA_RING_BYTES = 128 * 1024
# Dims of a product.
_PRODUCT_DIMS = 16
# Static shared memory of the attention kernels, with room to spare.
STATIC_BYTES = 2 * 1024 + 4 * MAX_WORK_TILES
# What two CTAs of an SM of sm_90 or sm_100 may use each.
_HALF_SM_SMEM = 113 * 1024
# Query rows of a prefill CTA without warpgroups (prefill_sm80.cu.jinja), 16 a warp.
_SM80_PREFILL_ROWS = 64
# Splits of a row that decode merges at a time: all kernels alike, so that rows have the same bits.
_DECODE_MERGE_SPLITS = 16
# Columns of V whose accumulator fits the registers; wider V takes several CTAs.
_MAX_VALUE_DIM = 256
# The same where the scores take more registers than those of short tiles do.
_BUSY_VALUE_DIM = 224


def max_row_tile(head_dim: int, head_dim_vo: int) -> int:
    """Return the most query rows whose query and accumulator fit a decode warp's registers."""
    widest = max(head_dim, head_dim_vo)
    return 32 if widest <= 64 else 16 if widest <= 128 else 8


def row_tile_for(head_dim: int, head_dim_vo: int, group_size: int) -> int:
    """Return the row tile for a group of query heads; larger groups take several row blocks."""
    most = max_row_tile(head_dim, head_dim_vo)
    return next((rows for rows in (8, 16, 32) if group_size <= rows <= most), most)


class DequantizeQueriesTile(NamedTuple):
    """The shape of a CTA that dequantises queries: a thread a vector."""

    num_threads: int = 128
    smem_bytes: int = 0


def decode_tile(spec: DecodeSpec, arch: str) -> DecodeTile:
    """Return the decode tile of ``spec``: as many warps as its shared memory allows."""
    if _has_tma_tile(spec, arch):
        num_warps = next(
            n
            for n in (8, 4, 2, 1)
            if _tma_tile(spec, n, is_padded=True).smem_bytes + STATIC_BYTES
            <= ARCHS[arch].smem_bytes
        )
        return _tma_tile(spec, num_warps, is_padded=spec.loader is not Loader.TENSOR)
    has_large_smem = ARCHS[arch].smem_bytes >= 2 * _HALF_SM_SMEM
    tiles = (_decode_tile(spec, num_warps, has_large_smem) for num_warps in (4, 2, 1))
    return next(t for t in tiles if t.smem_bytes + STATIC_BYTES <= ARCHS[arch].smem_bytes)


def prefill_tile(spec: AttentionSpec, arch: str) -> PrefillTile | WarpgroupTile:
    """Return the prefill tile of ``spec``: long tiles first, then two stages."""
    if spec.has_fp8_queries:
        return _fp8_tile(spec)
    if ARCHS[arch].has_wgmma:
        return _warpgroup_tile(spec, _warpgroup_row(spec))
    tiles = (
        _prefill_tile(spec, arch, tile_tokens, num_stages)
        for tile_tokens, num_stages in (
            (64, 2),
            (32, 2),
            (64, 1),
            (32, 1),
            (16, 4),
            (16, 2),
            (16, 1),
        )
    )
    # Two CTAs on an SM hide each other's barriers, where their shared memory allows it.
    limit = min(ARCHS[arch].smem_bytes, _HALF_SM_SMEM)
    return next(
        tile
        for tile in tiles
        if tile.smem_bytes + STATIC_BYTES <= limit
        # A wide accumulator leaves registers for the scores of short tiles only.
        and (tile.value_dim <= _MAX_VALUE_DIM // 2 or tile.tile_tokens <= 32)
        and (tile.value_dim <= _BUSY_VALUE_DIM or tile.tile_tokens <= 16)
    )


def has_fp8_tile(head_dim: int, head_dim_vo: int) -> bool:
    """Return whether products of 8 bits have a tile of warpgroups."""
    # A product takes 32 elements of a row, and two warps transpose 16 columns of V at a time. Wider
    # outputs leave no registers for the sums of a tile beside them.
    is_whole = head_dim % 32 == head_dim_vo % 32 == 0
    return is_whole and head_dim <= 224 and head_dim_vo <= 128


def has_narrow_tile(spec: AttentionSpec, arch: str) -> bool:
    """Return whether requests of few query rows have a prefill kernel of their own.

    One of two consumers without rows costs less than a kernel; two of three cost much, and beside
    one consumer there is room for another warpgroup that dequantises (docs/perf-log.md).
    """
    if not ARCHS[arch].has_wgmma or spec.has_fp8_queries:
        return False
    return spec.dequantises or _warpgroup_row(spec).num_consumers > 2


def narrow_prefill_tile(spec: AttentionSpec) -> WarpgroupTile:
    """Return the tile of the prefill kernel of few query rows: that of many, with one consumer."""
    row = _warpgroup_row(spec)
    num_query_stages = 2 if _dequantises_registers(spec) else 1
    # It waits for memory more than for products: more of it is under way.
    key_bytes, value_bytes = _segment_bytes(spec.head_dim), _segment_bytes(spec.head_dim_vo)
    stage_bytes = row.tile_tokens(spec) * (key_bytes + value_bytes)
    num_stages = row.num_stages
    if not spec.dequantises:
        num_stages = max(num_stages, _NARROW_RING_BYTES // stage_bytes)
    return _warpgroup_tile(
        spec,
        row._replace(num_consumers=1, num_stages=num_stages, num_query_stages=num_query_stages),
    )


def decode_uses_tma(spec: AttentionSpec, arch: str) -> bool:
    """Return whether TMA loads K and V of caches whose strides allow it."""
    has_pages = spec.page_table.lists_pages and spec.page_size % 8 == 0
    return _has_tma_tile(spec, arch) and has_pages


def prefill_uses_tma(spec: AttentionSpec, arch: str) -> bool:
    """Return whether TMA loads K and V of caches whose strides allow it."""
    return ARCHS[arch].has_wgmma and not spec.dequantises and _has_boxes(spec)


def _has_boxes(spec: AttentionSpec) -> bool:
    # Of any head dim: the hardware fills the last segment of a row up with zeros. Tokens without
    # pages follow each other, as those of one page do.
    has_pages = spec.page_table.lists_pages and spec.page_size % 8 == 0
    return has_pages or spec.page_table is Layout.RAGGED


def _has_tma_tile(spec: AttentionSpec, arch: str) -> bool:
    # Whatever the pages and the loader: results have the same bits.
    if spec.kv_dtype.blocks is not None:  # whose scales come beside its rows
        return False
    dims = (spec.head_dim, spec.head_dim_vo)
    return ARCHS[arch].has_wgmma and all(
        spec.kv_dtype.num_bytes * dim % SEGMENT_BYTES == 0 for dim in dims
    )


class _WarpgroupRow(NamedTuple):
    """A tile of warpgroups for heads of at most so many columns of Q and K, and of V."""

    max_head_dim: int
    max_head_dim_vo: int
    num_consumers: int
    num_producers: int
    plain_tokens: int
    """KV tokens of a tile; fewer where a soft cap or a variant needs registers."""
    soft_cap_tokens: int
    variant_tokens: int
    num_stages: int
    """Of K and V."""
    num_query_stages: int
    key_parts: int = 1
    """Parts of columns in which a tile of K comes and goes, so that one stage is enough."""

    def tile_tokens(self, spec: AttentionSpec) -> int:
        # A mask leaves fewer registers than a variant beside wide rows.
        widest = max(spec.head_dim, spec.head_dim_vo)
        is_wide = widest > 128 if spec.dequantises else widest > 256 and spec.use_logits_soft_cap
        is_busy = spec.use_custom_mask and is_wide
        if spec.variant is not None or is_busy:
            return self.variant_tokens
        # Without a maximum a cap takes registers only beside what dequantises, or gathers wide rows
        # or by two warpgroups. All loaders have one tile.
        has_room = spec.head_dim <= 192 and not _is_gathered_by_two(spec)
        has_registers = spec.head_dim > 64 and (_has_boxes(spec) or has_room)
        is_light = spec.fixed_maximum and not spec.dequantises and has_registers
        if spec.use_logits_soft_cap and not is_light:
            return self.soft_cap_tokens
        return self.plain_tokens


# Shared memory of a CTA of warpgroups, but for its static part.
_WARPGROUP_SMEM = 226 * 1024
# Of quantised K and V that are to be under way.
_LANDING_BYTES = 64 * 1024
# Query rows of the prefill kernel of one consumer warpgroup.
NARROW_ROWS = 64
# Room for K and V of that kernel, which waits for memory more than for products.
_NARROW_RING_BYTES = 192 * 1024


class _Registers(NamedTuple):
    """Registers of a thread."""

    producer: int
    consumer: int
    query: int = 0
    """Of producers of Q alone."""


# The first row that is wide enough counts. Scores take half a register a token and the output half
# a register a column; what is left of 227 KiB of shared memory has no room for more stages.
_WARPGROUP_TILES = (
    _WarpgroupRow(64, 64, 3, 1, 112, 80, 64, 3, 2),
    _WarpgroupRow(128, 128, 2, 1, 128, 112, 112, 2, 2),
    _WarpgroupRow(192, 128, 2, 1, 128, 128, 112, 2, 1),
    _WarpgroupRow(192, 192, 2, 1, 96, 80, 80, 2, 1),
    _WarpgroupRow(256, 256, 2, 1, 80, 64, 48, 2, 1),
    _WarpgroupRow(256, 512, 2, 1, 64, 48, 48, 2, 1),
    _WarpgroupRow(512, 512, 2, 1, 64, 64, 48, 1, 1, key_parts=4),
)
# The same of quantised caches, which registers or shared memory hold before they are dequantised.
_DEQUANT_TILES = (
    _WarpgroupRow(64, 64, 2, 2, 128, 128, 112, 3, 2),
    _WarpgroupRow(128, 128, 2, 2, 128, 96, 96, 2, 2),
    _WarpgroupRow(192, 128, 2, 2, 96, 96, 80, 2, 2),
    _WarpgroupRow(256, 256, 2, 1, 64, 64, 48, 2, 1),
    _WarpgroupRow(256, 512, 2, 1, 64, 48, 48, 2, 1),
    _WarpgroupRow(512, 512, 2, 1, 32, 32, 32, 1, 1),
)
# The same of queries, K and V of 8 bits, whose V lands in shared memory before it is transposed.
_FP8_TILES = (
    _WarpgroupRow(32, 32, 2, 1, 192, 160, 160, 2, 2),
    _WarpgroupRow(64, 64, 3, 1, 96, 64, 64, 2, 2),
    _WarpgroupRow(128, 128, 2, 1, 128, 64, 64, 2, 2),
    _WarpgroupRow(224, 128, 2, 1, 96, 64, 64, 2, 1),
)
# Bytes of a row of K and one of V up to which the registers of consumers leave room for a second
# warpgroup of producers, where pages are too small for TMA.
_GATHERED_BYTES = (192 + 128) * 2
# By (consumer, producer) warpgroups.
_WARPGROUP_REGISTERS = {
    (2, 1): _Registers(producer=72, consumer=216),
    (2, 2): _Registers(producer=64, consumer=192),
    (3, 1): _Registers(producer=56, consumer=152),
    (1, 3): _Registers(producer=96, consumer=216),
    (1, 2): _Registers(producer=128, consumer=240),
    (1, 1): _Registers(producer=0, consumer=0),  # as many as the compiler takes
}
# The same where tiles of few tokens leave consumers registers, and wide K takes producers' more.
_WIDE_REGISTERS = _Registers(producer=88, consumer=208)
# The same of a warpgroup that dequantises beside one that loads Q.
_DEQUANT_REGISTERS = _Registers(producer=88, consumer=192, query=40)
# The same where tiles or outputs take fewer of consumers.
_SHORT_DEQUANT_REGISTERS = _Registers(producer=96, consumer=184, query=48)

# The same of two warpgroups whose V is transposed.
_FP8_REGISTERS = _Registers(producer=56, consumer=224)


def _stored_bytes(spec: AttentionSpec, dim: int) -> int:
    """Return the bytes of a row of K or V, but for the scales of its blocks."""
    return spec.kv_dtype.bits * dim // 8


def _block_bytes(spec: AttentionSpec, dim: int) -> int:
    """Return the bytes of the scales of a row's blocks."""
    blocks = spec.kv_dtype.blocks
    return 0 if blocks is None else blocks.row_bytes(dim)


def _pitch(spec: AttentionSpec, dim: int) -> int:
    """Return what a row of K or V and the scales of its blocks take in shared memory."""
    return row_bytes(_stored_bytes(spec, dim)) + _block_bytes(spec, dim)


def _step_dims(spec: AttentionSpec) -> int:
    """Return the dims that products take at a time: rows of others are filled up with zeros."""
    return _PRODUCT_DIMS if spec.kv_dtype.blocks is None else 2 * _PRODUCT_DIMS


def _query_row_bytes(spec: AttentionSpec) -> int:
    step = _step_dims(spec)
    return row_bytes(2 * -(-spec.head_dim // step) * step)


def _value_dim(spec: AttentionSpec, most: int) -> int:
    """Return the columns of V that a CTA computes: all, or an even part of at most ``most``."""
    # In whole tiles of 16 columns.
    num_tiles = spec.head_dim_vo // 16
    blocks = next(n for n in range(1, 33) if num_tiles % n == 0 and num_tiles // n * 16 <= most)
    return num_tiles // blocks * 16


def _tma_tile(spec: DecodeSpec, num_warps: int, *, is_padded: bool) -> DecodeTile:
    value_dim = _value_dim(spec, _MAX_VALUE_DIM)
    item_bytes = spec.kv_dtype.num_bytes
    key_bytes, value_bytes = item_bytes * spec.head_dim, item_bytes * value_dim
    # As much as 16 tokens of 256-byte rows, unless the scores of many rows fill the registers.
    is_narrow = max(key_bytes, value_bytes) <= SEGMENT_BYTES
    warp_tokens = 32 if is_narrow and spec.row_tile <= 16 else 16
    tile_tokens = num_warps * warp_tokens
    num_stages = max(2, _TMA_RING_BYTES // (tile_tokens * (key_bytes + value_bytes)))
    if is_padded:
        key_bytes, value_bytes = row_bytes(key_bytes), row_bytes(value_bytes)
    ring_bytes = num_stages * tile_tokens * (key_bytes + value_bytes)
    merge_bytes = 4 * num_warps * spec.row_tile * (value_dim + 4)
    query_bytes = spec.row_tile * row_bytes(2 * spec.head_dim)
    return DecodeTile(
        num_warps=num_warps,
        tile_tokens=tile_tokens,
        num_stages=num_stages,
        shares_tiles=False,
        ctas_per_sm=1,
        value_dim=value_dim,
        merge_dims=value_dim,
        smem_bytes=ring_bytes + max(merge_bytes, query_bytes),
        merge_splits=_DECODE_MERGE_SPLITS,
        product_dtype=_decode_product_dtype(spec),
        tma_tokens=_tma_tokens(spec, warp_tokens),
    )


def _decode_product_dtype(spec: DecodeSpec) -> str:
    if spec.has_fp8_queries:  # which become float16 with their scales
        return DType.FLOAT16.value
    # float16 holds every dequantised number, and the conversion is shorter than that to bfloat16.
    # Rows of q in another type take registers, which wide kernels have none of.
    has_registers = spec.head_dim <= 256 and spec.row_tile <= 16
    return (DType.FLOAT16 if spec.dequantises and has_registers else spec.q_dtype).value


def _tma_tokens(spec: DecodeSpec, warp_tokens: int) -> int:
    """Return the tokens of a warp's slice that one page has; 0 without TMA."""
    sizes = (n for n in (32, 16, 8) if n <= warp_tokens and spec.page_size % n == 0)
    return next(sizes, 0)


def _decode_tile(spec: DecodeSpec, num_warps: int, has_large_smem: bool) -> DecodeTile:
    value_dim = _value_dim(spec, _MAX_VALUE_DIM)
    widest = max(spec.head_dim, spec.head_dim_vo)
    warp_tokens = _warp_tokens(spec, widest, has_large_smem)
    tile_tokens = num_warps * warp_tokens
    dims = spec.head_dim, value_dim
    token_bytes = sum(_stored_bytes(spec, dim) + _block_bytes(spec, dim) for dim in dims)
    num_stages = max(2, min(4, _RING_BYTES // (tile_tokens * token_bytes)))
    ring_bytes = num_stages * tile_tokens * sum(_pitch(spec, dim) for dim in dims)
    # All columns at once where two CTAs of an SM have the room.
    spare_bytes = _HALF_SM_SMEM - STATIC_BYTES - ring_bytes if has_large_smem else 0
    column_bytes = 4 * num_warps * spec.row_tile
    most = max(spare_bytes // column_bytes - 4, _MERGE_BYTES // column_bytes)
    step = _step_dims(spec)
    merge_dims = min(max(most // step, 1), -(-value_dim // step)) * step
    merge_bytes = column_bytes * (merge_dims + 4)
    query_bytes = spec.row_tile * _query_row_bytes(spec)
    smem_bytes = ring_bytes + max(merge_bytes, query_bytes)
    # Two of four warps have all the registers that a thread can; wide rows take memory, too.
    fits_twice = has_large_smem and num_warps <= 4 and smem_bytes + STATIC_BYTES <= _HALF_SM_SMEM
    return DecodeTile(
        num_warps=num_warps,
        tile_tokens=tile_tokens,
        num_stages=num_stages,
        shares_tiles=False,
        ctas_per_sm=2 if widest <= 128 or fits_twice else 1,
        value_dim=value_dim,
        merge_dims=merge_dims,
        merge_splits=_DECODE_MERGE_SPLITS,
        product_dtype=_decode_product_dtype(spec),
        smem_bytes=smem_bytes,
    )


def _warp_tokens(spec: DecodeSpec, widest: int, has_large_smem: bool) -> int:
    """Return the tokens of a warp's slice, which share what a slice costs however long it is."""
    if spec.kv_dtype.blocks is None:
        return 32 if widest <= 64 else 16
    # Four bits take longest. Of lists, a lane has one token; 32 rows have no registers for as many
    # scores. Rows of 8 and of 16 have the same slices, and so the same bits.
    is_long = has_large_smem and spec.row_tile <= 16 and not spec.page_table.is_list
    if widest <= 128:
        return 64 if is_long else 32
    return 32 if widest <= 256 and has_large_smem else 16


def _warpgroup_row(spec: AttentionSpec) -> _WarpgroupRow:
    rows = _DEQUANT_TILES if spec.dequantises else _WARPGROUP_TILES
    return next(
        row
        for row in (_FP8_TILES if spec.has_fp8_queries else rows)
        if spec.head_dim <= row.max_head_dim and spec.head_dim_vo <= row.max_head_dim_vo
    )


def _segment_bytes(columns: int, item_bytes: int = 2) -> int:
    """Return the bytes of a row of products' operands, in whole segments."""
    return -(-item_bytes * columns // SEGMENT_BYTES) * SEGMENT_BYTES


def _is_gathered_by_two(spec: AttentionSpec) -> bool:
    """Return whether two warpgroups of producers bring rows of 16 bits, where TMA doesn't."""
    row_bytes = _segment_bytes(spec.head_dim) + _segment_bytes(spec.head_dim_vo)
    return spec.head_dim_vo <= 192 and row_bytes <= _GATHERED_BYTES


def _dequantises_registers(spec: AttentionSpec) -> bool:
    """Return whether vectors of a quantised cache are in registers before they are dequantised."""
    # Wide rows leave no warpgroup of producers beside those that dequantise.
    return spec.dequantises and spec.head_dim <= 192 and spec.head_dim_vo <= 128


def _warpgroup_registers(spec: AttentionSpec, groups: int, num_producers: int) -> _Registers:
    if groups == 2 and _dequantises_registers(spec):
        is_short = spec.head_dim_vo < 128 or spec.head_dim > 128
        return _SHORT_DEQUANT_REGISTERS if is_short else _DEQUANT_REGISTERS
    if groups == 2 and spec.head_dim > 256:
        return _WIDE_REGISTERS
    return _WARPGROUP_REGISTERS[groups, num_producers]


def _warpgroup_product_dtype(spec: AttentionSpec) -> DType:
    # float16 holds every dequantised number, and the conversion is shorter than that to bfloat16;
    # but probabilities without a maximum need the exponents of bfloat16.
    is_float16 = _dequantises_registers(spec) and not spec.fixed_maximum
    return DType.FLOAT16 if is_float16 else spec.q_dtype


def _probability_bits(spec: AttentionSpec) -> int:
    """Return the powers of two that probabilities are larger by in products."""
    if spec.has_fp8_queries:  # of at most 448
        return 8
    return 15 if _warpgroup_product_dtype(spec) is not spec.q_dtype else 0  # of at most 2**16


def _warpgroup_tile(spec: AttentionSpec, row: _WarpgroupRow) -> WarpgroupTile:
    groups, num_producers = row.num_consumers, row.num_producers
    value_dim = _value_dim(spec, _MAX_VALUE_DIM)
    gathers = spec.loader is Loader.VECTOR and not spec.dequantises
    if gathers and groups <= 2 and _is_gathered_by_two(spec):
        num_producers = 2
    if spec.dequantises and groups == 1:
        num_producers = 3 if spec.head_dim_vo <= 128 else 2
    registers = _warpgroup_registers(spec, groups, num_producers)
    row = row._replace(num_producers=num_producers)
    tile_tokens = row.tile_tokens(spec)
    row_bytes = _segment_bytes(spec.head_dim) + _segment_bytes(value_dim)
    smem_bytes = row.num_stages * tile_tokens * row_bytes
    smem_bytes += 64 * groups * row.num_query_stages * _segment_bytes(spec.head_dim)
    num_landings = 0
    if spec.dequantises and not _dequantises_registers(spec):
        # Half of the producer warps load eight rows of K at a time, the others of V.
        step = 8 * 2 * num_producers
        landing_bytes = -(-tile_tokens // step) * step * row_bytes // 2
        room = (_WARPGROUP_SMEM - smem_bytes) // landing_bytes
        num_landings = max(1, min(room, -(-_LANDING_BYTES // landing_bytes)))
        smem_bytes += num_landings * landing_bytes
    return _tile_of(spec, row, registers, tile_tokens, value_dim, smem_bytes, num_landings)


def _fp8_tile(spec: AttentionSpec) -> WarpgroupTile:
    """Return the tile of products of 8 bits."""
    row = _warpgroup_row(spec)
    is_busy = spec.use_logits_soft_cap or spec.use_custom_mask
    tile_tokens = row.soft_cap_tokens if is_busy else row.plain_tokens
    key_bytes = _segment_bytes(spec.head_dim, item_bytes=1)
    landing_bytes = tile_tokens * _segment_bytes(spec.head_dim_vo, item_bytes=1)
    # A column of V has all tokens of a tile, in whole segments.
    value_bytes = spec.head_dim_vo * _segment_bytes(tile_tokens, item_bytes=1)
    smem_bytes = row.num_stages * (tile_tokens * key_bytes + value_bytes + landing_bytes)
    smem_bytes += 64 * row.num_consumers * row.num_query_stages * key_bytes
    registers = _FP8_REGISTERS
    if row.num_consumers > 2:
        registers = _WARPGROUP_REGISTERS[row.num_consumers, row.num_producers]
    value_dim, num_landings = spec.head_dim_vo, row.num_stages
    return _tile_of(spec, row, registers, tile_tokens, value_dim, smem_bytes, num_landings)


def _tile_of(
    spec: AttentionSpec,
    row: _WarpgroupRow,
    registers: _Registers,
    tile_tokens: int,
    value_dim: int,
    smem_bytes: int,
    num_landings: int,
) -> WarpgroupTile:
    groups = row.num_consumers
    # A segment: that puts all rows of a tile one after the other.
    columns = 0 if spec.dequantises else SEGMENT_BYTES // spec.kv_dtype.num_bytes
    return WarpgroupTile(
        num_warps=4 * groups,
        tile_tokens=tile_tokens,
        num_stages=row.num_stages,
        num_query_stages=row.num_query_stages,
        num_landings=num_landings,
        shares_tiles=True,
        ctas_per_sm=1,
        value_dim=value_dim,
        smem_bytes=smem_bytes,
        row_tile=64 * groups,
        merge_rows=2 if spec.changes_scores else 4,
        merge_splits=8,
        merge_loads=2 if spec.changes_scores or groups > 2 else 4,
        tma_tokens=_prefill_tma_tokens(spec, tile_tokens),
        key_tma_columns=columns,
        num_producers=row.num_producers,
        producer_registers=registers.producer,
        consumer_registers=registers.consumer,
        query_registers=registers.query,
        probability_bits=_probability_bits(spec),
        product_dtype=_warpgroup_product_dtype(spec).value,
        output_columns=value_dim,
        key_parts=row.key_parts,
    )


def _prefill_tma_tokens(spec: AttentionSpec, tile_tokens: int) -> int:
    if spec.dequantises:
        return 16  # nobody loads TMA tiles, and dequantised rows lie as if
    if spec.page_table is Layout.RAGGED:  # several, which arrive sooner than one
        return next(n for n in (64, 48, 32, 16) if tile_tokens % n == 0)
    # TMA does not load pages of other sizes.
    sizes = (n for n in (128, 64, 32, 16, 8) if spec.page_size % n == tile_tokens % n == 0)
    return next(sizes, 16)


def _prefill_tile(spec: AttentionSpec, arch: str, tile_tokens: int, num_stages: int) -> PrefillTile:
    # As wide an accumulator as the compiler fits in registers without spilling. It can't depend on
    # the loader: a plan's launches with either share their parameters.
    most = _MAX_VALUE_DIM
    is_busy = spec.changes_scores or spec.use_custom_mask
    if arch == "sm_80" or is_busy or spec.head_dim_vo > 256:
        most = _BUSY_VALUE_DIM
    if spec.head_dim > 256:
        most = 128
    value_dim = _value_dim(spec, most)
    row_bytes = _pitch(spec, spec.head_dim) + _pitch(spec, value_dim)
    query_bytes = _SM80_PREFILL_ROWS * _query_row_bytes(spec)
    return PrefillTile(
        num_warps=_SM80_PREFILL_ROWS // 16,
        tile_tokens=tile_tokens,
        num_stages=num_stages,
        shares_tiles=True,
        ctas_per_sm=2 if value_dim <= 192 else 1,
        value_dim=value_dim,
        row_tile=_SM80_PREFILL_ROWS,
        merge_splits=8 if value_dim <= 128 else 4 if value_dim <= 192 else 2,
        product_dtype=spec.q_dtype.value,
        smem_bytes=num_stages * tile_tokens * row_bytes + query_bytes,
    )
