"""Page tables and lengths as parameters of the kernels that read them token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from jitattn.kernels.common.value_checks import PagedTable
from jitattn.spec.params import Divisor, Lengths, PageList
from jitattn.tensors.page_tables import BlockTable, CsrPages, TokenTable


def lengths_of(lengths: Tensor) -> Lengths:
    """Return the parameters of a vector of lengths."""
    params = Lengths(None, lengths.stride(0), lengths.dtype is torch.int64, lengths.shape[0])
    params.values = lengths.data_ptr()
    return params


def page_list_of(pages: PagedTable, page_size: int) -> PageList:
    """Return the parameters of a page table."""
    if isinstance(pages, CsrPages):
        params = PageList(
            entries=pages.kv_indices.data_ptr(),
            indptr=pages.kv_indptr.data_ptr(),
            indptr_stride=pages.kv_indptr.stride(0),
            entry_stride=pages.kv_indices.stride(0),
            num_entries=pages.kv_indices.shape[0],
        )
    else:
        params = slot_rows_of(
            pages.table if isinstance(pages, BlockTable) else pages.slots, pages.rows
        )
    params.page_size = Divisor.of(page_size)
    params.are_slots = isinstance(pages, TokenTable)
    return params


def slot_rows_of(table: Tensor, rows: Tensor | None) -> PageList:
    """Return the parameters of a table with a row for each request, or those that ``rows`` says."""
    return PageList(
        entries=table.data_ptr(),
        rows=None if rows is None else rows.data_ptr(),
        row_stride=table.stride(0),
        value_stride=table.stride(1) if table.dim() == 3 else 0,
        entry_stride=table.stride(-1),
        rows_stride=0 if rows is None else rows.stride(0),
        num_rows=table.shape[0],
        num_entries=table.shape[-1],
        entries_are_int64=table.dtype is torch.int64,
        rows_are_int64=rows is not None and rows.dtype is torch.int64,
    )


def page_sources(name: str, pages: PagedTable) -> dict[str, str]:
    """Return the sources of the addresses of the ``PageList`` ``name``, made of that argument."""
    fields = ("indptr", "entries") if isinstance(pages, CsrPages) else ("entries", "rows")
    count = len(pages.tensors)
    return {f"{name}.{field}": f"{name}[{i}]" for i, field in enumerate(fields[:count])}
