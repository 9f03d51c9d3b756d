"""A wrapper's page table: FlashInfer's CSR lists, and the block table that may stand for them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from jitattn.base.validate import check_count
from jitattn.compat.flashinfer.common.arguments import as_lengths
from jitattn.compat.flashinfer.common.batch import (
    FixedBuffers,
    check_block_tables,
    check_equal,
    check_indices,
    check_last_pages,
    check_offsets,
    csr_lens,
)
from jitattn.spec.config import MAX_PAGE_SIZE
from jitattn.tensors.page_table_base import PageTable
from jitattn.tensors.page_tables import BlockTable, CsrPages

_FIELDS = ("indptr", "indices", "last_page_len")


class TableNames(NamedTuple):
    """A wrapper's names of its tables: what stands before arguments and behind buffers."""

    prefix: str
    suffix: str

    def buffers(self) -> tuple[str, ...]:
        """Return the names of the constructor's buffers."""
        return tuple(f"paged_kv_{field}{self.suffix}" for field in _FIELDS)

    def arguments(self) -> tuple[str, ...]:
        """Return the names of the tables that ``plan`` takes."""
        return tuple(f"{self.prefix}{field}" for field in _FIELDS)


class PagedTable(NamedTuple):
    """The pages of a batch as ``plan`` is given them, on the device or the CPU.

    Attributes:
        names: what the caller calls them.
        indptr: int32 [batch_size + 1], where the pages of each request begin.
        indices: int32 [>= indptr[-1]], page ids.
        last_page_len: int32 [batch_size], tokens in the last page.
        page_size: tokens of a page.
        block_tables: int32 [batch_size, max_pages], read instead of ``indices``, or None.
        seq_lens: [batch_size], read instead of ``last_page_len``, or None.
    """

    names: TableNames
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    page_size: int
    block_tables: Tensor | None
    seq_lens: Tensor | None

    @property
    def layout(self) -> str:
        """The planner's name of the layout."""
        return "csr" if self.block_tables is None else "shared"

    def check(self, fixed: FixedBuffers | None) -> Tensor:
        """Check the tables, on the host where they lie there; return KV tokens of each request.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        indptr_name, indices_name, last_name = self.names.arguments()
        check_count("page_size", self.page_size, most=MAX_PAGE_SIZE)
        offsets = check_offsets(indptr_name, self.indptr)
        batch_size = self.indptr.shape[0] - 1
        check_indices(indices_name, self.indices, indptr_name, offsets)
        check_last_pages(last_name, self.last_page_len, offsets, batch_size, self.page_size)
        lens = csr_lens(self.indptr, self.last_page_len, self.page_size)
        if self.seq_lens is not None:
            check_equal("seq_lens", self.seq_lens, lens, f"what {last_name} says")
            lens = as_lengths("seq_lens", self.seq_lens)
        if self.block_tables is not None:
            check_block_tables(self.block_tables, batch_size, fixed)
        if fixed is not None:
            for buffer, name, values in self._buffered():
                fixed.check_room(buffer, name, values, exact=values is not self.indices)
        return lens

    def on_device(
        self, device: torch.device, fixed: FixedBuffers | None, non_blocking: bool
    ) -> PageTable:
        """Return the table on a device, in the buffers of captured runs where there are some."""
        if fixed is not None:
            indptr, indices, _ = (
                fixed.fill(buffer, values, non_blocking) for buffer, _, values in self._buffered()
            )
            return CsrPages(indptr, indices)
        if self.block_tables is not None:
            return BlockTable(self.block_tables.to(device, non_blocking=non_blocking))
        indptr, indices = (
            values.to(device, non_blocking=non_blocking) for values in (self.indptr, self.indices)
        )
        return CsrPages(indptr, indices)

    def _buffered(self) -> list[tuple[str, str, Tensor]]:
        values = self.indptr, self.indices, self.last_page_len
        return [*zip(self.names.buffers(), self.names.arguments(), values, strict=True)]
