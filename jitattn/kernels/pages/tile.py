"""Shapes of CTAs that move tokens and pages and make tables."""

from __future__ import annotations

from typing import NamedTuple


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
