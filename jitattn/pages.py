"""Page tables: values that hold their tensors, so that a layout needs no flag."""

from __future__ import annotations

import torch
from torch import Tensor

from jitattn.spec import PageTable

_INTEGERS = (torch.int32, torch.int64)


class BlockTable:
    """Page ids of each request, a row per request; the rank of the table is its layout.

    Attributes:
        table: int32 [num_rows, width], one page id for K and V (layout "shared"), or int32
            [num_rows, 2, width], row 0 K ids and row 1 V ids (layout "separate"). Any strides.
            Entries past a request's last page are never read.
        rows: int32 or int64 [batch_size], the row of each request, or None when request b uses
            row b.
    """

    __slots__ = ("layout", "rows", "table")

    def __init__(self, table: Tensor, *, rows: Tensor | None = None) -> None:
        """Hold ``table`` and ``rows``; nothing is copied.

        Raises:
            TypeError: an argument is no tensor or has another dtype.
            ValueError: the rank, the second dimension of a 3-D table, or a device doesn't fit.
        """
        check_tensor("table", table, (torch.int32,))
        if table.dim() not in (2, 3):
            raise ValueError(
                f"table has shape {list(table.shape)}: expected [rows, width] (one page id for K "
                "and V) or [rows, 2, width] (K ids, V ids)"
            )
        if table.dim() == 3 and table.shape[1] != 2:
            raise ValueError(
                f"table has shape {list(table.shape)}: the second dimension of a 3-D table is 2, "
                "row 0 K ids and row 1 V ids"
            )
        if rows is not None:
            check_vector("rows", rows, device=table.device)
        self.table = table
        self.rows = rows
        self.layout = PageTable.SHARED if table.dim() == 2 else PageTable.SEPARATE

    def __repr__(self) -> str:
        """Show the layout and the shapes."""
        rows = "" if self.rows is None else f", rows={list(self.rows.shape)}"
        return f"BlockTable({self.layout.value}, table={list(self.table.shape)}{rows})"

    @property
    def width(self) -> int:
        """Pages that a row can hold."""
        return int(self.table.shape[-1])

    @property
    def batch_size(self) -> int:
        """Requests that the table lists."""
        return int((self.table if self.rows is None else self.rows).shape[0])

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.table.device


def check_tensor(name: str, value: object, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise TypeError unless ``value`` is a tensor of one of ``dtypes``."""
    wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}: expected a tensor of {wanted}")
    if value.dtype not in dtypes:
        given = str(value.dtype).removeprefix("torch.")
        raise TypeError(f"{name} has dtype {given}: expected {wanted}")


def check_vector(name: str, value: Tensor, *, device: torch.device) -> None:
    """Raise unless ``value`` is a 1-D int32 or int64 tensor on ``device``."""
    check_tensor(name, value, _INTEGERS)
    if value.dim() != 1:
        raise ValueError(f"{name} has shape {list(value.shape)}: expected one dimension")
    check_device(name, value, device)


def check_device(name: str, value: Tensor, device: torch.device) -> None:
    """Raise ValueError unless ``value`` is on ``device``."""
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}: expected {device}, like the other tensors")
