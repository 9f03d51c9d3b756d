"""The shape of a CTA that merges attention states."""

from __future__ import annotations

from typing import NamedTuple


class MergeTile(NamedTuple):
    """The shape of a CTA that merges states: a warp per row."""

    num_threads: int = 128
    smem_bytes: int = 0
