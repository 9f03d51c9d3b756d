"""Specs of the decode and the prefill kernel."""

from __future__ import annotations

from typing import ClassVar

from jitattn.kernels.attention.tile import (
    NARROW_ROWS,
    DequantizeQueriesTile,
    decode_tile,
    decode_uses_tma,
    narrow_prefill_tile,
    prefill_tile,
    prefill_uses_tma,
)
from jitattn.kernels.common.spec import AttentionSpec
from jitattn.kernels.common.tile import DecodeTile, PrefillTile, WarpgroupTile
from jitattn.spec.arch import ARCHS
from jitattn.spec.dtype import FP8_QUERIES
from jitattn.spec.family import OnlySpec, Tile


class DecodeSpec(AttentionSpec):
    """The kernel of requests with few query rows, which only select ``row_tile``."""

    kernel: ClassVar[str] = "decode"

    row_tile: int  # query rows of one KV head that a CTA handles: 8, 16 or 32

    @property
    def symbol(self) -> str:
        """Name of the ``extern "C"`` kernel: unique per spec and readable in a profile."""
        return f"jitattn_decode_r{self.row_tile}_{self._suffix}"

    def tile(self, arch: str) -> DecodeTile:
        """Return the shape of a CTA on ``arch``."""
        return decode_tile(self, arch)

    def uses_tma(self, arch: str) -> bool:
        """Return whether TMA loads K and V of caches whose strides allow it."""
        return decode_uses_tma(self, arch)

    def template(self, arch: str) -> str:
        """Return the template on ``arch``."""
        return "attention/decode.cu.jinja"


class PrefillSpec(AttentionSpec):
    """The kernel of requests with many query rows."""

    kernel: ClassVar[str] = "prefill"

    @property
    def symbol(self) -> str:
        """Name of the ``extern "C"`` kernel: unique per spec and readable in a profile."""
        return f"jitattn_prefill_{self._suffix}"

    def tile(self, arch: str) -> PrefillTile | WarpgroupTile:
        """Return the shape of a CTA on ``arch``."""
        return prefill_tile(self, arch)

    def uses_tma(self, arch: str) -> bool:
        """Return whether TMA loads K and V of caches whose strides allow it."""
        return prefill_uses_tma(self, arch)

    def template(self, arch: str) -> str:
        """Return the template on ``arch``."""
        return f"attention/prefill_{'sm90' if ARCHS[arch].has_wgmma else 'sm80'}.cu.jinja"


class DequantizeQueriesSpec(OnlySpec):
    """The kernel that makes float16 queries of FP8 ones, before either of the others."""

    kernel: ClassVar[str] = "dequantize_queries"
    path: ClassVar[str] = "attention/dequantize_queries.cu.jinja"
    cta: ClassVar[Tile] = DequantizeQueriesTile()

    def config_text(self) -> str:
        """Return arguments that select the kernel."""
        return f"q_dtype={FP8_QUERIES},kv_dtype={FP8_QUERIES}"


class NarrowPrefillSpec(PrefillSpec):
    """The prefill kernel of requests with few query rows, which one consumer warpgroup has.

    Rows have the same bits in both.
    """

    @property
    def symbol(self) -> str:
        """Name of the ``extern "C"`` kernel: unique per spec and readable in a profile."""
        return f"jitattn_prefill_r{NARROW_ROWS}_{self._suffix}"

    def tile(self, arch: str) -> PrefillTile | WarpgroupTile:
        """Return the shape of a CTA on ``arch``, which has warpgroups."""
        return narrow_prefill_tile(self)
