"""Shapes of CTAs of multi-head latent attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitattn.kernels.common.tile import PrefillTile, WarpgroupTile, row_bytes
from jitattn.spec.arch import ARCHS
from jitattn.spec.dtype import DType
from jitattn.spec.layout import SEGMENT_BYTES, Loader

if TYPE_CHECKING:
    from jitattn.kernels.mla.spec import MLASpec


# Elements of a latent that share a scale, where rows hold theirs.
_SCALE_DIMS = 128
# Left for static shared memory. It ends at a multiple of 1024 bytes, where stages begin; barriers
# of more stages than that need another.
_STATIC_BYTES = 3 * 1024
_MOST_STAGES_OF_THESE = 10
_MORE_STATIC_BYTES = 1024


# Rows of the kernels whose warps multiply few of them, where others have products of warpgroups.
NARROW_ROWS = (16, 32)


def mla_row_tile(num_heads: int, q_dtype: DType, kv_dtype: DType, arch: str) -> int:
    """Return the query rows of a CTA of latent attention: those of a token, if they are few.

    Where warpgroups compute, those of the kernel that takes any number.
    """
    if has_warpgroup_tile(q_dtype, kv_dtype, arch):
        return 64
    # Without FP8 instructions, dequantisation takes the registers of more rows.
    dequantises_slowly = not ARCHS[arch].has_fp8_conversions and kv_dtype is not q_dtype
    return 16 if num_heads <= 16 or dequantises_slowly else 32


def has_warpgroup_tile(q_dtype: DType, kv_dtype: DType, arch: str) -> bool:
    """Return whether warpgroups compute the kernel, whatever its pages and loader."""
    return ARCHS[arch].has_wgmma and kv_dtype in (q_dtype, DType.FLOAT8_E4M3FN)


def uses_tma(spec: MLASpec, arch: str) -> bool:
    """Return whether TMA loads latents and k_pe of caches whose strides allow it."""
    is_whole = (spec.head_dim - spec.head_dim_vo) * spec.kv_dtype.num_bytes == SEGMENT_BYTES
    return (
        has_warpgroup_tile(spec.q_dtype, spec.kv_dtype, arch)
        and not spec.dequantises
        and is_whole
        and spec.page_table.lists_pages
        and spec.page_size % 8 == 0
    )


def mla_tile(spec: MLASpec, arch: str) -> PrefillTile | WarpgroupTile:
    """Return the tile of latent attention."""
    if not has_warpgroup_tile(spec.q_dtype, spec.kv_dtype, arch):
        return _warp_tile(spec, arch)
    return _narrow_tile(spec, arch) if spec.is_narrow(arch) else _warpgroup_tile(spec)


# Registers of three warpgroups, a thread of each: what a kernel of 384 threads is given, 168 each.
_SM_REGISTERS = 3 * 168
# Of consumers, and of tiles, on compute capability 9.0.
_NUM_WARPS = 8
_TILE_TOKENS = 64


def _warpgroup_tile(spec: MLASpec) -> WarpgroupTile:
    num_stages = 2
    # TMA needs few registers, vector loads hold addresses, dequantisation half a tile. Consumers
    # get the rest, which variants need.
    producer_registers = 72 if spec.loader is Loader.TENSOR else 104
    if spec.dequantises:
        producer_registers = 120 if spec.variant is None else 72
    # Tiles have the type of Q.
    return _sm90_tile(
        spec,
        num_stages=num_stages,
        smem_bytes=num_stages * _TILE_TOKENS * _query_row_bytes(spec) + _query_bytes(spec),
        product_dtype=_product_dtype(spec),
        num_value_parts=2,
        tma_tokens=_TILE_TOKENS,
        key_tma_columns=spec.head_dim_vo // 2,
        producer_registers=producer_registers,
    )


def _narrow_tile(spec: MLASpec, arch: str) -> WarpgroupTile:
    # A tile is two stages; twin: jitattn/mla/stages.cuh.
    stage_tokens = _TILE_TOKENS // 2
    latent_bytes = spec.kv_dtype.num_bytes * spec.head_dim_vo
    stage_bytes = stage_tokens * (latent_bytes + SEGMENT_BYTES + _scale_bytes(spec))
    # Of each sixteen rows 16 bytes of each thread. Where there are more than sixteen, these lie in
    # the place of probabilities of 16 bits, a segment a row.
    num_row_blocks = spec.row_tile // 16
    exchange_bytes = 512 * _NUM_WARPS * num_row_blocks
    probability_bytes = spec.row_tile * SEGMENT_BYTES if num_row_blocks == 1 else 0
    other_bytes = _query_bytes(spec) + probability_bytes + exchange_bytes
    room = ARCHS[arch].smem_bytes - _STATIC_BYTES - other_bytes
    num_stages = room // stage_bytes
    if num_stages > _MOST_STAGES_OF_THESE:
        num_stages = (room - _MORE_STATIC_BYTES) // stage_bytes
    return _sm90_tile(
        spec,
        num_stages=num_stages,
        smem_bytes=num_stages * stage_bytes + other_bytes,
        product_dtype=_latent_dtype(spec),
        num_value_parts=_NUM_WARPS,
        tma_tokens=stage_tokens,
        key_tma_columns=spec.head_dim_vo,
        producer_registers=88,
    )


def _sm90_tile(
    spec: MLASpec,
    *,
    num_stages: int,
    smem_bytes: int,
    product_dtype: str,
    num_value_parts: int,
    tma_tokens: int,
    key_tma_columns: int,
    producer_registers: int,
) -> WarpgroupTile:
    """Return what both kernels of compute capability 9.0 have: ``tma_tokens`` is the most."""
    sizes = (n for n in (64, 32, 16, 8) if n <= tma_tokens)
    return WarpgroupTile(
        num_warps=_NUM_WARPS,
        tile_tokens=_TILE_TOKENS,
        num_stages=num_stages,
        num_query_stages=1,
        num_landings=0,
        shares_tiles=True,
        ctas_per_sm=1,
        value_dim=spec.head_dim_vo,
        smem_bytes=smem_bytes,
        row_tile=spec.row_tile,
        merge_rows=1,
        product_dtype=product_dtype,
        output_columns=spec.head_dim_vo // num_value_parts,
        merge_splits=8,
        merge_loads=0,
        # TMA does not load pages of other sizes.
        tma_tokens=next((n for n in sizes if spec.page_size % n == 0), 8),
        key_tma_columns=key_tma_columns,
        num_producers=1,
        producer_registers=producer_registers,
        consumer_registers=(_SM_REGISTERS - producer_registers) // 2,
        packs_partials=spec.out_dtype.num_bytes == 2,
    )


def _query_row_bytes(spec: MLASpec) -> int:
    # k_pe has a segment to itself.
    return spec.q_dtype.num_bytes * spec.head_dim_vo + SEGMENT_BYTES


def _query_bytes(spec: MLASpec) -> int:
    return spec.row_tile * _query_row_bytes(spec)


def _scale_bytes(spec: MLASpec) -> int:
    # Of a token.
    return 4 * spec.head_dim_vo // _SCALE_DIMS if spec.has_scales else 0


def _latent_dtype(spec: MLASpec) -> str:
    # FP8 becomes float16 in fewer steps than bfloat16; a variant reads scores in the type of q.
    is_float16 = spec.dequantises and spec.variant is None
    return (DType.FLOAT16 if is_float16 else spec.q_dtype).value


def _product_dtype(spec: MLASpec) -> str:
    # FP8 becomes float16 in fewer steps than bfloat16. A k_pe of 16 bits may exceed float16, and a
    # variant reads scores in the type of q.
    is_narrow = spec.dequantises and spec.k_pe_dtype is spec.kv_dtype and spec.variant is None
    return (DType.FLOAT16 if is_narrow else spec.q_dtype).value


def _warp_tile(spec: MLASpec, arch: str) -> PrefillTile:
    # Four warps for each 16 tokens.
    tile_tokens = 32
    k_pe_dim = spec.head_dim - spec.head_dim_vo
    token_bytes = (
        row_bytes(spec.kv_dtype.num_bytes * spec.head_dim_vo)
        + row_bytes(spec.k_pe_dtype.num_bytes * k_pe_dim)
        + _scale_bytes(spec)
    )
    score_bytes = 4 * 4 * spec.row_tile * (tile_tokens + 8)
    room = ARCHS[arch].smem_bytes - _STATIC_BYTES - score_bytes
    # One is consumed, and the others are under way.
    num_stages = min(room // (tile_tokens * token_bytes), 4)
    return PrefillTile(
        num_warps=tile_tokens // 16 * 4,
        tile_tokens=tile_tokens,
        num_stages=num_stages,
        shares_tiles=True,
        ctas_per_sm=1,
        value_dim=spec.head_dim_vo,
        smem_bytes=num_stages * tile_tokens * token_bytes + score_bytes,
        row_tile=spec.row_tile,
        merge_splits=8,
        product_dtype=spec.q_dtype.value,
        merge_loads=4,
    )
