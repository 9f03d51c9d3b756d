"""How a spec is cut into warps, tokens and pipeline stages on an architecture: a table, as code."""

from __future__ import annotations

from dataclasses import dataclass

from jitattn.spec import DecodeSpec, KernelSpec, MergeSpec, ScheduleSpec

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
_VECTOR_BYTES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeTile:
    """The shape of a decode CTA. Its fields are template variables."""

    num_warps: int
    warp_tokens: int  # KV tokens a warp consumes per step
    num_stages: int  # steps of K and V in each warp's ring
    ctas_per_sm: int
    merge_dims: int  # columns of the output that warps merge at a time
    smem_bytes: int  # dynamic shared memory of a CTA

    @property
    def num_threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.num_warps

    @property
    def tile_tokens(self) -> int:
        """KV tokens of one scheduling tile: one step of all warps."""
        return self.num_warps * self.warp_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleTile:
    """The shape of the schedule kernel: one CTA."""

    num_threads: int = 512
    smem_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeTile:
    """The shape of a CTA that merges states: a warp per row."""

    num_threads: int = 128
    smem_bytes: int = 0

    @property
    def num_warps(self) -> int:
        """Rows of a CTA."""
        return self.num_threads // 32


Tile = DecodeTile | ScheduleTile | MergeTile


def max_row_tile(head_dim: int, head_dim_vo: int) -> int:
    """Return the most query rows whose query and accumulator fit the registers."""
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
    return next(
        tile
        for num_warps in (4, 2)
        if (tile := _decode_tile(spec, num_warps)).smem_bytes <= SMEM_LIMIT[arch]
    )


def _decode_tile(spec: DecodeSpec, num_warps: int) -> DecodeTile:
    warp_tokens = 32 if max(spec.head_dim, spec.head_dim_vo) <= 64 else 16
    step_tokens = num_warps * warp_tokens
    row_bytes = 2 * (spec.head_dim + spec.head_dim_vo)
    num_stages = max(2, min(4, _RING_BYTES // (step_tokens * row_bytes)))
    # One vector of padding a row puts the eight rows of an ldmatrix into different banks.
    ring_bytes = num_stages * step_tokens * (row_bytes + 2 * _VECTOR_BYTES)
    merge_dims = min(_MERGE_BYTES // (4 * num_warps * spec.row_tile), spec.head_dim_vo)
    merge_bytes = 4 * num_warps * spec.row_tile * (merge_dims + 4)
    query_bytes = spec.row_tile * (2 * spec.head_dim + _VECTOR_BYTES)
    return DecodeTile(
        num_warps=num_warps,
        warp_tokens=warp_tokens,
        num_stages=num_stages,
        ctas_per_sm=2 if max(spec.head_dim, spec.head_dim_vo) <= 128 else 1,
        merge_dims=merge_dims,
        smem_bytes=ring_bytes + max(merge_bytes, query_bytes),
    )
