"""Shapes of CTAs that choose tokens and pages. Torch-free."""

from __future__ import annotations

from typing import NamedTuple


class IndexLogitsTile(NamedTuple):
    """The shape of a CTA that scores keys: a tile of them for all heads, stages ahead."""

    tile_tokens: int
    num_stages: int
    """Of a warpgroup, where there are some."""
    head_tile: int
    """Heads of a product."""
    smem_bytes: int
    product: str = ""
    """The wrapper of a warpgroup's product, where there is one."""
    num_threads: int = 128
    ctas_per_sm: int = 1
    """For which a thread has registers."""
    keys_in_registers: bool = False
    """Whether products of a warpgroup read keys from registers, not from shared memory."""
    max_chunk_tokens: int = 1024
    """The most keys of a CTA."""
    num_places: int = 1024
    """Keys whose places it holds."""


class ChoiceTile(NamedTuple):
    """The shape of a CTA that chooses of a row, and how many keys a thread holds."""

    num_threads: int
    held_keys: int
    smem_bytes: int


def choice_tile(num_threads: int = 1024, held_keys: int = 8) -> ChoiceTile:
    """Return the tile with what ``Shared`` of choose.cu.jinja takes: bins, sums, positions."""
    words = 2048 + 2 * (num_threads // 32) + num_threads * held_keys + 3
    return ChoiceTile(num_threads, held_keys, 4 * words)


class PageBoundsTile(NamedTuple):
    """The shape of a CTA that bounds a page: a thread a dimension."""

    num_threads: int = 128
    smem_bytes: int = 0


class PageScoresTile(NamedTuple):
    """The shape of a CTA that scores pages: so many of a warp at a time."""

    num_threads: int = 128
    warp_pages: int = 8
    smem_bytes: int = 0
