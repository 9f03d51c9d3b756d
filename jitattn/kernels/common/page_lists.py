"""Page tables and lengths as parameters of the kernels that read them token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from jitattn.spec.params import Lengths
from jitattn.tensors.page_table_base import PageTable


def lengths_of(lengths: Tensor) -> Lengths:
    """Return the parameters of a vector of lengths."""
    params = Lengths(None, lengths.stride(0), lengths.dtype is torch.int64, lengths.shape[0])
    params.values = lengths.data_ptr()
    return params


def page_sources(name: str, pages: PageTable) -> dict[str, str]:
    """Return the sources of the addresses of the ``PageList`` ``name``, made of that argument."""
    fields = pages.page_list_fields[: len(pages.tensors)]
    return {f"{name}.{field}": f"{name}[{i}]" for i, field in enumerate(fields)}
