"""The tensors of one attention call, checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from jitattn.tensors.bound_cache import BoundCache
from jitattn.tensors.masks import Mask
from jitattn.tensors.page_table import PageTable
from jitattn.tensors.tensor_layouts import RowLayout
from jitattn.tensors.variant_params import VariantParams


@dataclass(slots=True)
class Call:
    """The tensors of one ``run``, checked, and how those lie that differ from run to run."""

    q: Tensor
    q_layout: RowLayout
    kv: BoundCache
    pages: PageTable
    out: Tensor
    out_layout: RowLayout
    lse: Tensor | None
    lse_layout: RowLayout
    sinks: Tensor | None
    mask: Mask | None
    variant_params: VariantParams | None = None

    @property
    def is_aligned(self) -> bool:
        """Whether the rows of q and out begin at multiples of their vectors."""
        return self.q_layout.is_aligned(self.q.data_ptr()) and self.out_layout.is_aligned(
            self.out.data_ptr()
        )


Again = Callable[[object, object, object], Tensor | None]
"""Repeats a call with another q, bound cache and out, or a new out for None.

Returns out; does nothing and returns None where something differs that is not an address.
"""
