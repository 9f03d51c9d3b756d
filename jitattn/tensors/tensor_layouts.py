"""Shapes and strides that passed their checks: tensors of the same layout pass them, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jitattn.tensors.overlap import span_of
from jitattn.tensors.page_table_base import PlannedTable
from jitattn.tensors.tensor_checks import row_strides

try:
    # What TorchDynamo guards its traces with: one call instead of ten.
    from torch._C._dynamo.guards import TensorGuards as _TensorGuards
except ImportError:
    _TensorGuards = None  # type: ignore[assignment,misc]


class RowLayout:
    """How a tensor lies in memory that passed its checks: those that lie alike pass them, too.

    Attributes:
        shape: its shape, rows of the batch first.
        strides: in elements.
        alignment: bytes of which the address of a tensor is a multiple when each of its rows
            begins at a multiple of a vector; 0 when the strides allow none.
        span: bytes from its first element to its last.
    """

    __slots__ = ("_device", "_dtype", "_recognises", "alignment", "shape", "span", "strides")

    def __init__(self, tensor: Tensor | None, *, vector: int = 1) -> None:
        """Describe ``tensor``, with vectors of ``vector`` elements; None is like no tensor."""
        self.shape: tuple[int, ...] = ()
        self.strides: tuple[int, ...] = ()
        self.alignment = 0
        self.span = 0
        self._dtype: torch.dtype | None = None
        self._device: torch.device | None = None
        self._recognises: Callable[..., bool] | None = None
        if tensor is not None:
            self.shape, self.strides = tensor.shape, tensor.stride()
            self._dtype, self._device = tensor.dtype, tensor.device
            self.span = span_of(tensor)
            if all(stride % vector == 0 for stride in row_strides(tensor)):
                self.alignment = vector * tensor.element_size()

    def fits(self, tensor: object) -> bool:
        """Whether ``tensor`` is a tensor that lies like this one."""
        # A guard that meets a nested tensor ends the process.
        if type(tensor) is not Tensor or tensor.is_nested:
            return False
        if self._recognises is not None and self._recognises(tensor):
            return True
        fits = (
            tensor.dtype is self._dtype
            and tensor.layout is torch.strided
            and tensor.shape == self.shape
            and tensor.stride() == self.strides
            and tensor.device == self._device
            and not tensor.is_neg()
        )
        if fits and self._recognises is None and _TensorGuards is not None:
            self._recognises = recogniser((tensor,))
        return fits

    def is_aligned(self, pointer: int) -> bool:
        """Whether the rows of a tensor at ``pointer`` begin at multiples of a vector."""
        return self.alignment > 0 and pointer % self.alignment == 0


NO_LAYOUT = RowLayout(None)
"""The layout that no tensor has."""


def recogniser(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return what says of as many tensors whether each lies like its counterpart.

    As ``RowLayout.fits`` does, in half the time, and it may deny it of some that do lie alike.
    """
    if _TensorGuards is not None:
        guards = _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        check: Callable[..., bool] = guards.check
        return check
    layouts = [RowLayout(tensor) for tensor in tensors]
    return lambda *others: all(map(RowLayout.fits, layouts, others))


@dataclass(slots=True)  # frozen ones take four times as long to make
class Batch:
    """What a plan is made of, checked.

    ``max_kv_len`` and ``max_q_len`` bound the requests; ``qo_indptr`` is None for one query token
    a request, and ``seq_lens`` for lists, which say themselves what is seen. Of one ``layout``,
    tables and lengths differ in their addresses only.
    """

    pages: PlannedTable
    batch_size: int
    seq_lens: Tensor | None
    qo_indptr: Tensor | None
    max_kv_len: int
    max_q_len: int
    layout: BatchLayout


class BatchLayout:
    """How a page table and lengths lie that passed their checks: those that lie alike do, too.

    Attributes:
        batch_size: their requests.
        capacity: the most tokens of a request.
    """

    __slots__ = ("_lie_alike", "_num_tensors", "_table", "batch_size", "capacity")

    def __init__(self, pages: PlannedTable | None, seq_lens: Tensor | None, capacity: int) -> None:
        """Describe both; without them it is like nothing."""
        self.capacity = capacity
        self.batch_size = 0
        self._table: type[PlannedTable] | None = None
        if pages is not None:
            self.batch_size = pages.batch_size
            self._table = type(pages)
            self._num_tensors = len(pages.tensors)
            lens = () if seq_lens is None else (seq_lens,)
            self._lie_alike = recogniser((*lens, *pages.tensors))

    def fits(self, pages: PlannedTable, seq_lens: Tensor) -> bool:
        """Whether these lie like those."""
        return (
            type(pages) is self._table
            and len(pages.tensors) == self._num_tensors
            and not getattr(seq_lens, "is_nested", True)  # which would end the process
            and self._lie_alike(seq_lens, *pages.tensors)
        )

    def fits_lists(self, pages: PlannedTable) -> bool:
        """Whether lists without lengths lie like those."""
        return (
            type(pages) is self._table
            and len(pages.tensors) == self._num_tensors
            and self._lie_alike(*pages.tensors)
        )


NO_BATCH = BatchLayout(None, None, 0)
"""The layout that no batch has."""
