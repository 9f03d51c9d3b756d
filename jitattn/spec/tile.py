"""How a spec is cut into warps, tokens and pipeline stages on an architecture: a table, as code."""

from __future__ import annotations

from typing import NamedTuple

from jitattn.spec.kernel_spec import (
    AttentionSpec,
    CopyPagesSpec,
    DecodeSpec,
    DType,
    GatherSpec,
    KernelSpec,
    Loader,
    MergeSpec,
    MLASpec,
    PageTable,
    PrefillSpec,
    PreprocessSpec,
    ScheduleSpec,
    TableSpec,
)

# Shared memory one CTA may use, in bytes. sm_80 code also runs on compute capability 8.6 and 8.9,
# whose limit is the smaller one.
SMEM_LIMIT = {
    "sm_80": 99 * 1024,
    "sm_90a": 227 * 1024,
    "sm_100f": 227 * 1024,
    "sm_120f": 99 * 1024,
}

# Bytes of K and V in flight that one CTA aims at. Two CTAs share an SM, and 64 KiB an SM saturate
# an H100's memory; the rest covers the stages that are being consumed.
_RING_BYTES = 64 * 1024
_MERGE_BYTES = 8 * 1024
# The same where boxes bring them and an SM has one CTA: 64 KiB saturate, the rest covers pauses,
# and what is left of the SM has room for the next launch's CTA.
_BOX_RING_BYTES = 128 * 1024
# The tables whose pages they bring.
_BOX_TABLES = (PageTable.SHARED, PageTable.SEPARATE, PageTable.CSR)
# A row as tensor maps see it: segments of so many bytes.
SEGMENT_BYTES = 128
_VECTOR_BYTES = 16
# Elements of a latent that share a scale, where rows hold theirs.
_SCALE_DIMS = 128
# Dims of a product, and of a block of NVFP4.
_BLOCK_DIMS = 16
# The most pieces of work that a launch may let its CTAs claim.
MAX_PIECES = 1024
# Static shared memory of the attention kernels, with room to spare.
_STATIC_BYTES = 2 * 1024 + 4 * MAX_PIECES
# The same of kernels of latent attention, whose CTAs claim nothing.
_LATENT_STATIC_BYTES = 3 * 1024
# What two CTAs of an SM of sm_90 or sm_100 may use each.
_HALF_SM_SMEM = 113 * 1024
# Query rows of a prefill CTA, 16 a warp.
_PREFILL_ROWS = 64
# Columns of V whose accumulator fits the registers; wider V takes several CTAs.
_MAX_VALUE_DIM = 256
# The same where the scores take more registers than those of short tiles do.
_BUSY_VALUE_DIM = 224


# Named tuples: every process makes these classes, and dataclasses take six times as long to make.
class DecodeTile(NamedTuple):
    """The shape of a decode CTA. Its fields are template variables."""

    num_warps: int
    tile_tokens: int  # KV tokens of one step of all warps, and of one tile of the schedule
    num_stages: int  # steps of K and V in a ring
    shares_tiles: bool  # all warps read every token of a tile, not only those they loaded
    ctas_per_sm: int
    value_dim: int  # columns of V and out that a CTA computes
    smem_bytes: int  # dynamic shared memory of a CTA
    merge_dims: int  # columns of the output that warps merge at a time
    merge_splits: int  # of a row that are merged at a time, which has a say in its bits
    max_pieces: int = MAX_PIECES  # of a launch whose CTAs claim them
    merge_loads: int = 0  # of those that are loaded at a time; 0: all
    box_tokens: int = 0  # of a slice that a tensor map brings at a time; 0 where no cache has maps
    key_box_columns: int = 0  # of K that it brings at a time; 0: all

    @property
    def num_threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.num_warps


class PrefillTile(NamedTuple):
    """The shape of a CTA of prefill or latent attention; fields as in ``DecodeTile``."""

    num_warps: int
    tile_tokens: int
    num_stages: int
    shares_tiles: bool
    ctas_per_sm: int
    value_dim: int
    smem_bytes: int
    row_tile: int  # query rows of a CTA
    merge_splits: int
    merge_loads: int = 0
    box_tokens: int = 0
    key_box_columns: int = 0

    @property
    def num_threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.num_warps


class WarpgroupTile(NamedTuple):
    """The same of a CTA whose warpgroups compute together.

    ``num_producers`` warpgroups that ``num_warps`` doesn't count bring Q, K and V.
    """

    num_warps: int
    tile_tokens: int
    num_stages: int
    num_query_stages: int  # tiles of Q in shared memory
    shares_tiles: bool
    ctas_per_sm: int
    value_dim: int
    smem_bytes: int
    row_tile: int
    merge_rows: int  # that a thread merges at a time
    merge_splits: int
    merge_loads: int
    box_tokens: int
    key_box_columns: int  # of K that a tensor map brings at a time; 0: all
    num_producers: int
    producer_registers: int  # of a thread that brings, and of one that computes
    consumer_registers: int

    @property
    def num_threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.num_warps + 128 * self.num_producers


class ScheduleTile(NamedTuple):
    """The shape of the schedule kernel: one CTA."""

    num_threads: int = 512
    smem_bytes: int = 0


class MergeTile(NamedTuple):
    """The shape of a CTA that merges states: a warp per row."""

    num_threads: int = 128
    smem_bytes: int = 0


class PreprocessTile(NamedTuple):
    """The shape of a CTA that puts Q, K and V where attention reads them."""

    lanes: int  # threads of a row, which have 16 elements each
    ctas_per_sm: int  # at least: what bounds registers
    num_threads: int = 128
    smem_bytes: int = 0

    @property
    def groups(self) -> int:
        """Rows that a CTA has at a time."""
        return self.num_threads // self.lanes


class GatherTile(NamedTuple):
    """The shape of a CTA that gathers: rows of K or of V, as many as it pays to have together."""

    num_threads: int = 256
    max_tile_rows: int = 64
    smem_bytes: int = 0


class CopyPagesTile(NamedTuple):
    """The shape of a CTA that copies parts of pages."""

    num_threads: int = 256
    part_words: int = 1024
    smem_bytes: int = 0


class TableTile(NamedTuple):
    """The shape of a CTA that makes tables: a thread a token, or some an entry."""

    num_threads: int = 256
    smem_bytes: int = 0


AttentionTile = DecodeTile | PrefillTile | WarpgroupTile
TransferTile = GatherTile | CopyPagesTile | TableTile
Tile = AttentionTile | ScheduleTile | MergeTile | PreprocessTile | TransferTile


def max_row_tile(head_dim: int, head_dim_vo: int) -> int:
    """Return the most query rows whose query and accumulator fit a decode warp's registers."""
    widest = max(head_dim, head_dim_vo)
    return 32 if widest <= 64 else 16 if widest <= 128 else 8


def row_tile_for(head_dim: int, head_dim_vo: int, group_size: int) -> int:
    """Return the row tile for a group of query heads; larger groups take several row blocks."""
    most = max_row_tile(head_dim, head_dim_vo)
    return next((rows for rows in (8, 16, 32) if group_size <= rows <= most), most)


def tile_for(spec: KernelSpec, arch: str) -> Tile:
    """Return the tile of ``spec`` on ``arch``, one of ``SMEM_LIMIT``."""
    if isinstance(spec, ScheduleSpec):
        return ScheduleTile()
    if isinstance(spec, MergeSpec):
        return MergeTile()
    if isinstance(spec, PreprocessSpec):
        return preprocess_tile_for(spec)
    if isinstance(spec, GatherSpec):
        return GatherTile()
    if isinstance(spec, CopyPagesSpec):
        return CopyPagesTile()
    if isinstance(spec, TableSpec):
        return TableTile()
    return attention_tile_for(spec, arch)


def preprocess_tile_for(spec: PreprocessSpec) -> PreprocessTile:
    """Return the tile of a kernel that takes tokens in, the same on every architecture."""
    num_units = max(spec.head_dim, spec.head_dim_vo) // 16
    # A power of two, so that the threads of a row are in one warp and sum in a few exchanges.
    return PreprocessTile(
        lanes=1 << (num_units - 1).bit_length(),
        # Elements that are found one by one take registers for their places.
        ctas_per_sm=4 if spec.loader is Loader.VECTOR else 2,
    )


def attention_tile_for(spec: AttentionSpec, arch: str) -> AttentionTile:
    """Return the tile of an attention kernel on ``arch``."""
    if isinstance(spec, PrefillSpec):
        return prefill_tile_for(spec, arch)
    if isinstance(spec, MLASpec):
        return latent_tile_for(spec, arch)
    assert isinstance(spec, DecodeSpec)
    return decode_tile_for(spec, arch)


def decode_tile_for(spec: DecodeSpec, arch: str) -> DecodeTile:
    """Return the decode tile of ``spec``: as many warps as its shared memory allows."""
    if _has_box_tile(spec, arch):
        num_warps = next(
            n
            for n in (8, 4, 2, 1)
            if _box_tile(spec, n, is_padded=True).smem_bytes + _STATIC_BYTES <= SMEM_LIMIT[arch]
        )
        return _box_tile(spec, num_warps, is_padded=spec.loader is not Loader.TENSOR)
    has_large_smem = SMEM_LIMIT[arch] >= 2 * _HALF_SM_SMEM
    tiles = (_decode_tile(spec, num_warps, has_large_smem) for num_warps in (4, 2, 1))
    return next(t for t in tiles if t.smem_bytes + _STATIC_BYTES <= SMEM_LIMIT[arch])


def latent_row_tile(num_heads: int, q_dtype: DType, kv_dtype: DType, arch: str) -> int:
    """Return the query rows of a CTA of latent attention: those of a token, if they are few."""
    if _has_latent_warpgroups(q_dtype, kv_dtype, arch):
        return 64
    # Where instructions for FP8 are missing, conversions take the registers of more rows.
    converts_slowly = arch == "sm_80" and kv_dtype is not q_dtype
    return 16 if num_heads <= 16 or converts_slowly else 32


def _has_latent_warpgroups(q_dtype: DType, kv_dtype: DType, arch: str) -> bool:
    return arch == "sm_90a" and kv_dtype in (q_dtype, DType.FLOAT8_E4M3FN)


def takes_latent_boxes(spec: MLASpec, arch: str) -> bool:
    """Return whether tensor maps bring the latents and rope parts of caches that allow it."""
    is_whole = (spec.head_dim - spec.head_dim_vo) * spec.kv_dtype.num_bytes == SEGMENT_BYTES
    return (
        _has_latent_warpgroups(spec.q_dtype, spec.kv_dtype, arch)
        and spec.kv_dtype is spec.q_dtype
        and is_whole
        and spec.page_table in _BOX_TABLES
        and spec.page_size % 8 == 0
    )


def latent_tile_for(spec: MLASpec, arch: str) -> PrefillTile | WarpgroupTile:
    """Return the tile of latent attention."""
    if _has_latent_warpgroups(spec.q_dtype, spec.kv_dtype, arch):
        return _latent_warpgroup_tile(spec)
    return _latent_tile(spec, arch)


# Registers of three warpgroups, a thread of each: what a kernel of 384 threads is given, 168 each.
_SM_REGISTERS = 3 * 168


def _latent_warpgroup_tile(spec: MLASpec) -> WarpgroupTile:
    tile_tokens, num_stages, row_tile = 64, 2, 64
    # Of those who bring: boxes ask for few, vectors have their places there, conversions half a
    # tile. The others' are for those who compute, and variants need them.
    producer_registers = 72 if spec.loader is Loader.TENSOR else 104
    if spec.kv_dtype is not spec.q_dtype:
        producer_registers = 120 if spec.variant is None else 72
    # Tiles have the type of Q. A rope part has a segment to itself.
    row_bytes = spec.q_dtype.num_bytes * spec.head_dim_vo + SEGMENT_BYTES
    return WarpgroupTile(
        num_warps=8,
        tile_tokens=tile_tokens,
        num_stages=num_stages,
        num_query_stages=1,
        shares_tiles=True,
        ctas_per_sm=1,
        value_dim=spec.head_dim_vo,
        smem_bytes=(num_stages * tile_tokens + row_tile) * row_bytes,
        row_tile=row_tile,
        merge_rows=1,
        merge_splits=8,
        merge_loads=0,
        # Pages of other sizes are not brought in boxes.
        box_tokens=next((n for n in (64, 32, 16, 8) if spec.page_size % n == 0), 8),
        key_box_columns=spec.head_dim_vo // 2,
        num_producers=1,
        producer_registers=producer_registers,
        consumer_registers=(_SM_REGISTERS - producer_registers) // 2,
    )


def _latent_tile(spec: MLASpec, arch: str) -> PrefillTile:
    # Four warps for each 16 tokens.
    tile_tokens = 32
    rope_dim = spec.head_dim - spec.head_dim_vo
    scale_bytes = 4 * spec.head_dim_vo // _SCALE_DIMS if spec.has_scales else 0
    token_bytes = (
        _row_bytes(spec.kv_dtype.num_bytes * spec.head_dim_vo)
        + _row_bytes(spec.rope_dtype.num_bytes * rope_dim)
        + scale_bytes
    )
    score_bytes = 4 * 4 * spec.row_tile * (tile_tokens + 8)
    room = SMEM_LIMIT[arch] - _LATENT_STATIC_BYTES - score_bytes
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
        merge_loads=4,
    )


def template_for(spec: KernelSpec, arch: str) -> str:
    """Return the template of ``spec`` on ``arch``."""
    if isinstance(spec, PrefillSpec) and has_warpgroup_tile(spec, arch):
        return "prefill_wgmma.cu.jinja"
    if isinstance(spec, MLASpec) and isinstance(latent_tile_for(spec, arch), WarpgroupTile):
        return "mla_wgmma.cu.jinja"
    return spec.template


def takes_boxes(spec: DecodeSpec | PrefillSpec, arch: str) -> bool:
    """Return whether tensor maps bring the K and V of caches whose strides allow it."""
    if isinstance(spec, PrefillSpec):
        return _warpgroups_take_boxes(spec, arch)
    has_pages = spec.page_table in _BOX_TABLES and spec.page_size % 8 == 0
    return _has_box_tile(spec, arch) and has_pages


def _warpgroups_take_boxes(spec: PrefillSpec, arch: str) -> bool:
    # Of any head dim: the hardware fills the last segment of a row up with zeros. Tokens without
    # pages follow each other, so that a tile of them is one box.
    if not (has_warpgroup_tile(spec, arch) and spec.kv_dtype is spec.q_dtype):
        return False
    if spec.page_table is PageTable.RAGGED:
        return True
    return spec.page_table in _BOX_TABLES and spec.page_size % 8 == 0


def has_warpgroup_tile(spec: PrefillSpec, arch: str) -> bool:
    """Return whether warpgroups compute a prefill kernel, whatever its pages and loader."""
    is_narrow = max(spec.head_dim, spec.head_dim_vo) <= 256
    return arch == "sm_90a" and is_narrow


def _has_box_tile(spec: DecodeSpec | PrefillSpec, arch: str) -> bool:
    # Whatever the pages and the loader: results have the same bits.
    if spec.kv_dtype is DType.NVFP4:  # the scales of its blocks come beside its rows
        return False
    dims = (spec.head_dim, spec.head_dim_vo)
    return arch == "sm_90a" and all(
        spec.kv_dtype.num_bytes * dim % SEGMENT_BYTES == 0 for dim in dims
    )


# Tiles of warpgroups by the most columns of Q and V: warpgroups that compute and that bring, tokens
# of a tile without more, with a soft cap, and with a variant, whose computations need registers,
# stages of K and V, and of Q. Scores take half a register a token and the output half a register a
# column; what is left of 227 KiB of shared memory has no room for more stages.
_WARPGROUP_TILES = (
    (64, 64, 3, 1, 112, 80, 64, 3, 2),
    (128, 128, 2, 1, 128, 112, 112, 2, 2),
    (192, 128, 2, 1, 128, 128, 112, 2, 1),
    (192, 192, 2, 1, 96, 80, 80, 2, 1),
    (256, 256, 2, 1, 80, 64, 48, 2, 1),
)
# The same of quantised caches, a tile of which lands in shared memory before it is converted.
_CONVERT_TILES = (
    (64, 64, 2, 2, 128, 128, 112, 3, 2),
    (128, 128, 2, 2, 128, 96, 96, 2, 2),
    (192, 128, 2, 2, 96, 96, 96, 2, 1),
    (256, 256, 2, 1, 64, 64, 48, 2, 1),
)
# Rows of K and V that registers of those who compute leave room for a second warpgroup to gather.
_GATHERED_BYTES = (192 + 128) * 2
# Registers of a thread that brings and of one that computes, by the warpgroups of either kind.
_WARPGROUP_REGISTERS = {(2, 1): (72, 216), (2, 2): (64, 192), (3, 1): (56, 152)}


def prefill_tile_for(spec: PrefillSpec, arch: str) -> PrefillTile | WarpgroupTile:
    """Return the prefill tile of ``spec``: long tiles first, then two stages."""
    if has_warpgroup_tile(spec, arch):
        return _warpgroup_tile(spec)
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
    limit = min(SMEM_LIMIT[arch], _HALF_SM_SMEM)
    return next(
        tile
        for tile in tiles
        if tile.smem_bytes + _STATIC_BYTES <= limit
        # A wide accumulator leaves registers for the scores of short tiles only.
        and (tile.value_dim <= _MAX_VALUE_DIM // 2 or tile.tile_tokens <= 32)
        and (tile.value_dim <= _BUSY_VALUE_DIM or tile.tile_tokens <= 16)
    )


def _row_bytes(num_bytes: int) -> int:
    """Return the pitch of a row in shared memory: padded_row() of constants.cuh.jinja."""
    return (-(-num_bytes // _VECTOR_BYTES) | 1) * _VECTOR_BYTES


def _stored_bytes(spec: AttentionSpec, dim: int) -> int:
    """Return the bytes of a row of K or V, but for the scales of its blocks."""
    return dim // 2 if spec.kv_dtype is DType.NVFP4 else spec.kv_dtype.num_bytes * dim


def _block_bytes(spec: AttentionSpec, dim: int) -> int:
    """Return the bytes of the scales of a row's blocks."""
    return dim // _BLOCK_DIMS if spec.kv_dtype is DType.NVFP4 else 0


def _pitch(spec: AttentionSpec, dim: int) -> int:
    """Return what a row of K or V and the scales of its blocks take in shared memory."""
    return _row_bytes(_stored_bytes(spec, dim)) + _block_bytes(spec, dim)


def _step_dims(spec: AttentionSpec) -> int:
    """Return the dims that products take at a time: rows of others are filled up with zeros."""
    return 2 * _BLOCK_DIMS if spec.kv_dtype is DType.NVFP4 else _BLOCK_DIMS


def _query_row_bytes(spec: AttentionSpec) -> int:
    step = _step_dims(spec)
    return _row_bytes(2 * -(-spec.head_dim // step) * step)


def _value_dim(spec: AttentionSpec, most: int) -> int:
    """Return the columns of V that a CTA computes: all, or an even part of at most ``most``."""
    # In whole tiles of 16 columns.
    num_tiles = spec.head_dim_vo // 16
    blocks = next(n for n in range(1, 33) if num_tiles % n == 0 and num_tiles // n * 16 <= most)
    return num_tiles // blocks * 16


def _box_tile(spec: DecodeSpec, num_warps: int, *, is_padded: bool) -> DecodeTile:
    value_dim = _value_dim(spec, _MAX_VALUE_DIM)
    item_bytes = spec.kv_dtype.num_bytes
    key_bytes, value_bytes = item_bytes * spec.head_dim, item_bytes * value_dim
    # As much as 16 tokens of 256-byte rows, unless the scores of many rows fill the registers.
    is_narrow = max(key_bytes, value_bytes) <= SEGMENT_BYTES
    warp_tokens = 32 if is_narrow and spec.row_tile <= 16 else 16
    tile_tokens = num_warps * warp_tokens
    num_stages = max(2, _BOX_RING_BYTES // (tile_tokens * (key_bytes + value_bytes)))
    if is_padded:
        key_bytes, value_bytes = _row_bytes(key_bytes), _row_bytes(value_bytes)
    ring_bytes = num_stages * tile_tokens * (key_bytes + value_bytes)
    merge_bytes = 4 * num_warps * spec.row_tile * (value_dim + 4)
    query_bytes = spec.row_tile * _row_bytes(2 * spec.head_dim)
    merge_splits = _box_merge_splits(spec, value_dim)
    return DecodeTile(
        num_warps=num_warps,
        tile_tokens=tile_tokens,
        num_stages=num_stages,
        shares_tiles=False,
        ctas_per_sm=1,
        value_dim=value_dim,
        merge_dims=value_dim,
        smem_bytes=ring_bytes + max(merge_bytes, query_bytes),
        merge_splits=merge_splits,
        merge_loads=_merge_loads(spec, value_dim, merge_splits),
        box_tokens=_box_tokens(spec, warp_tokens),
    )


def _box_merge_splits(spec: DecodeSpec, value_dim: int) -> int:
    # What a warp keeps of Q and accumulates leaves registers for so many; but row tiles of 16 merge
    # as many as those of 8, in smaller loads: rows have the same bits in both.
    if spec.row_tile == 32 or spec.head_dim > 256:
        return 4
    return 16 if value_dim <= 128 else 8


def _merge_loads(spec: DecodeSpec, value_dim: int, merge_splits: int) -> int:
    # Wide states leave registers for few.
    is_wide = spec.row_tile == 16 and max(value_dim, spec.head_dim) > 64
    return min(4, merge_splits) if is_wide else 0


def _box_tokens(spec: DecodeSpec, warp_tokens: int) -> int:
    """Return the tokens of a warp's slice that one page has; 0 where there are no boxes."""
    sizes = (n for n in (32, 16, 8) if n <= warp_tokens and spec.page_size % n == 0)
    return next(sizes, 0)


def _decode_tile(spec: DecodeSpec, num_warps: int, has_large_smem: bool) -> DecodeTile:
    value_dim = _value_dim(spec, _MAX_VALUE_DIM)
    widest = max(spec.head_dim, spec.head_dim_vo)
    # Four bits of twice as many tokens are under way as fast.
    warp_tokens = 32 if widest <= (128 if spec.kv_dtype is DType.NVFP4 else 64) else 16
    tile_tokens = num_warps * warp_tokens
    dims = spec.head_dim, value_dim
    token_bytes = sum(_stored_bytes(spec, dim) + _block_bytes(spec, dim) for dim in dims)
    num_stages = max(2, min(4, _RING_BYTES // (tile_tokens * token_bytes)))
    ring_bytes = num_stages * tile_tokens * sum(_pitch(spec, dim) for dim in dims)
    # All columns at once where two CTAs of an SM have the room.
    spare_bytes = _HALF_SM_SMEM - _STATIC_BYTES - ring_bytes if has_large_smem else 0
    column_bytes = 4 * num_warps * spec.row_tile
    most = max(spare_bytes // column_bytes - 4, _MERGE_BYTES // column_bytes)
    step = _step_dims(spec)
    merge_dims = min(max(most // step, 1), -(-value_dim // step)) * step
    merge_bytes = column_bytes * (merge_dims + 4)
    query_bytes = spec.row_tile * _query_row_bytes(spec)
    merge_splits = _decode_merge_splits(spec, value_dim)
    return DecodeTile(
        num_warps=num_warps,
        tile_tokens=tile_tokens,
        num_stages=num_stages,
        shares_tiles=False,
        ctas_per_sm=2 if widest <= 128 else 1,
        value_dim=value_dim,
        merge_dims=merge_dims,
        merge_splits=merge_splits,
        merge_loads=_merge_loads(spec, value_dim, merge_splits),
        smem_bytes=ring_bytes + max(merge_bytes, query_bytes),
    )


def _warpgroup_tile(spec: PrefillSpec) -> WarpgroupTile:
    converts = spec.kv_dtype is not spec.q_dtype
    groups, num_producers, *tokens, num_stages, num_query_stages = next(
        shape
        for most_keys, most_values, *shape in (_CONVERT_TILES if converts else _WARPGROUP_TILES)
        if spec.head_dim <= most_keys and spec.head_dim_vo <= most_values
    )
    tile_tokens = tokens[2 if spec.variant is not None else spec.use_logits_soft_cap]
    key_bytes, value_bytes = (
        -(-2 * columns // SEGMENT_BYTES) * SEGMENT_BYTES
        for columns in (spec.head_dim, spec.head_dim_vo)
    )
    smem_bytes = num_stages * tile_tokens * (key_bytes + value_bytes)
    smem_bytes += 64 * groups * num_query_stages * key_bytes
    if (
        spec.loader is Loader.VECTOR
        and not converts
        and groups == 2
        and key_bytes + value_bytes <= _GATHERED_BYTES
    ):
        num_producers = 2
    producer_registers, consumer_registers = _WARPGROUP_REGISTERS[groups, num_producers]
    if converts:  # half of the warps that bring take eight rows of K at a time, the others of V
        step = 8 * 2 * num_producers
        smem_bytes += -(-tile_tokens // step) * step * (key_bytes + value_bytes) // 2
    # Pages of other sizes are not brought in boxes.
    box_tokens = next(
        (n for n in (128, 64, 32, 16, 8) if spec.page_size % n == tile_tokens % n == 0), 16
    )
    if spec.page_table is PageTable.RAGGED:
        # Smaller ones than a tile's arrive sooner: docs/perf-log.md.
        box_tokens = next(n for n in (64, 48, 32, 16) if tile_tokens % n == 0)
    return WarpgroupTile(
        num_warps=4 * groups,
        tile_tokens=tile_tokens,
        num_stages=num_stages,
        num_query_stages=num_query_stages,
        shares_tiles=True,
        ctas_per_sm=1,
        value_dim=spec.head_dim_vo,
        smem_bytes=smem_bytes,
        row_tile=64 * groups,
        merge_rows=2 if spec.changes_scores or spec.head_dim_vo > 192 else 4,
        merge_splits=8,
        merge_loads=0,
        box_tokens=box_tokens,
        # A segment: that puts all rows of a tile one after the other.
        key_box_columns=0 if converts else SEGMENT_BYTES // spec.kv_dtype.num_bytes,
        num_producers=num_producers,
        producer_registers=producer_registers,
        consumer_registers=consumer_registers,
    )


def _decode_merge_splits(spec: DecodeSpec, value_dim: int) -> int:
    # As of boxes.
    if spec.row_tile == 32:
        return 4
    return 8 if value_dim <= 128 else 4 if spec.head_dim <= 256 else 2


def _prefill_tile(spec: PrefillSpec, arch: str, tile_tokens: int, num_stages: int) -> PrefillTile:
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
    query_bytes = _PREFILL_ROWS * _query_row_bytes(spec)
    return PrefillTile(
        num_warps=_PREFILL_ROWS // 16,
        tile_tokens=tile_tokens,
        num_stages=num_stages,
        shares_tiles=True,
        ctas_per_sm=2 if value_dim <= 192 else 1,
        value_dim=value_dim,
        row_tile=_PREFILL_ROWS,
        merge_splits=8 if value_dim <= 128 else 4 if value_dim <= 192 else 2,
        smem_bytes=num_stages * tile_tokens * row_bytes + query_bytes,
    )
