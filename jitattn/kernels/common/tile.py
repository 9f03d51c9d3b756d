"""Shapes of CTAs that attention and MLA share."""

from __future__ import annotations

from typing import NamedTuple

VECTOR_BYTES = 16
# Most work tiles of a launch whose CTAs claim them.
MAX_WORK_TILES = 1024


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
    product_dtype: str  # of the operands of products
    max_work_tiles: int = MAX_WORK_TILES  # of a launch whose CTAs claim them
    merge_loads: int = 0  # of those that are loaded at a time; 0: all
    tma_tokens: int = 0  # of a TMA tile; 0 where no cache has tensor maps
    key_tma_columns: int = 0  # of K in a TMA tile; 0: all
    num_producers: int = 0  # warpgroups beside ``num_warps`` that load

    @property
    def num_threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.num_warps

    @property
    def fetches_pairs(self) -> bool:
        """Whether L2 loads the segments of rows in pairs."""
        return False


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
    product_dtype: str
    merge_loads: int = 0
    tma_tokens: int = 0
    key_tma_columns: int = 0
    num_producers: int = 0

    @property
    def num_threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.num_warps

    @property
    def fetches_pairs(self) -> bool:
        """Whether L2 loads the segments of rows in pairs."""
        return False


class WarpgroupTile(NamedTuple):
    """The shape of a CTA of producer and consumer warpgroups.

    ``num_producers`` warpgroups load Q, K and V; ``num_warps`` counts consumers only.
    """

    num_warps: int
    tile_tokens: int
    num_stages: int
    num_query_stages: int  # tiles of Q in shared memory
    num_landings: int  # tiles that are on their way to be dequantised; 0: none is
    shares_tiles: bool
    ctas_per_sm: int
    value_dim: int
    smem_bytes: int
    row_tile: int
    merge_rows: int  # that a thread merges at a time
    merge_splits: int
    merge_loads: int
    tma_tokens: int
    key_tma_columns: int  # of K in a TMA tile; 0: all
    num_producers: int
    producer_registers: int  # per thread
    consumer_registers: int
    product_dtype: str
    output_columns: int  # of out that a warpgroup accumulates
    probability_bits: int = 0  # powers of two that probabilities are larger by in products
    query_registers: int = 0  # of producers of Q alone; 0: as many as of the others
    key_parts: int = 1  # of columns, in which a tile of K comes and goes
    packs_partials: bool = False  # partial rows have float16 numbers, with a scale

    @property
    def num_threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.num_warps + 128 * self.num_producers

    @property
    def fetches_pairs(self) -> bool:
        """Whether L2 loads the segments of rows in pairs."""
        return True


class ScheduleTile(NamedTuple):
    """The shape of the schedule kernel: one CTA."""

    num_threads: int = 512
    smem_bytes: int = 0


AttentionTile = DecodeTile | PrefillTile | WarpgroupTile


def row_bytes(num_bytes: int) -> int:
    """Return the pitch of a row in shared memory: padded_row() of parts/constants.cuh.jinja."""
    return (-(-num_bytes // VECTOR_BYTES) | 1) * VECTOR_BYTES
