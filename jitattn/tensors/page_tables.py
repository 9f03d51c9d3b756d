"""Page tables: values that hold their tensors, so that a layout needs no flag.

A table has ``layout``, ``device``, ``batch_size``, its ``tensors`` and ``capacity(page_size)``, the
most tokens that a request can have; the host knows it without reading the device.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from jitattn.spec.config import MAX_KV_LEN
from jitattn.spec.layout import Layout

INTEGERS = (torch.int32, torch.int64)


class _Fixed:
    """An object that keeps the attributes it was made with, since plans have read them."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        if hasattr(self, name):
            kind = type(self).__name__
            raise AttributeError(
                f"{kind}.{name} can't be replaced: give another {kind} to run(pages=...), or write "
                "into the tensor"
            )
        object.__setattr__(self, name, value)


class BlockTable(_Fixed):
    """Page ids of each request, a row per request; the rank of the table is its layout.

    Attributes:
        table: int32 [num_rows, width], one page id for K and V (layout "shared"), or int32
            [num_rows, 2, width], row 0 K ids and row 1 V ids (layout "separate"). Any strides.
            Entries past a request's last page are never read.
        rows: int32 or int64 [batch_size], the row of each request, or None when request b uses
            row b.
    """

    __slots__ = ("layout", "rows", "table", "tensors")

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
        self.tensors = (table,) if rows is None else (table, rows)
        self.layout = Layout.SHARED if table.dim() == 2 else Layout.SEPARATE

    def __repr__(self) -> str:
        """Show the layout and the shapes."""
        rows = "" if self.rows is None else f", rows={list(self.rows.shape)}"
        return f"BlockTable({self.layout.value}, table={list(self.table.shape)}{rows})"

    @property
    def batch_size(self) -> int:
        """Requests that the table lists."""
        return (self.table if self.rows is None else self.rows).shape[0]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.table.device

    def capacity(self, page_size: int) -> int:
        """Return the most tokens of a request."""
        return min(self.table.shape[-1] * page_size, MAX_KV_LEN)


class ViewTable(BlockTable):
    """A block table whose ids count in caches of one view: those of a page manager.

    Attributes:
        view: what a cache has that the table is for, as ``view_of`` finds it; None is any.
    """

    __slots__ = ("view",)

    def __init__(self, table: Tensor, *, rows: Tensor | None = None, view: object = None) -> None:
        """Hold them; nothing is copied."""
        super().__init__(table, rows=rows)
        self.view = view


class TokenTable(_Fixed):
    """The slot of every token: a request-to-token pool. Layout "token".

    Attributes:
        slots: int32 [num_rows, width], page_id * page_size + place in the page. Any strides.
            Entries past a request's last token are never read.
        rows: int32 or int64 [batch_size], the row of each request, or None when request b uses
            row b.
    """

    __slots__ = ("layout", "rows", "slots", "tensors")

    def __init__(self, slots: Tensor, *, rows: Tensor | None = None) -> None:
        """Hold ``slots`` and ``rows``; nothing is copied.

        Raises:
            TypeError: an argument is no tensor or has another dtype.
            ValueError: the rank or a device doesn't fit.
        """
        check_tensor("slots", slots, (torch.int32,))
        if slots.dim() != 2:
            raise ValueError(f"slots has shape {list(slots.shape)}: expected [rows, tokens]")
        if rows is not None:
            check_vector("rows", rows, device=slots.device)
        self.slots = slots
        self.rows = rows
        self.tensors = (slots,) if rows is None else (slots, rows)
        self.layout = Layout.TOKEN

    def __repr__(self) -> str:
        """Show the shapes."""
        rows = "" if self.rows is None else f", rows={list(self.rows.shape)}"
        return f"TokenTable(slots={list(self.slots.shape)}{rows})"

    @property
    def batch_size(self) -> int:
        """Requests that the table lists."""
        return (self.slots if self.rows is None else self.rows).shape[0]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.slots.device

    def capacity(self, page_size: int) -> int:
        """Return the most tokens of a request."""
        del page_size  # an entry is a token
        return min(int(self.slots.shape[1]), MAX_KV_LEN)


class CsrPages(_Fixed):
    """The pages of all requests, one request after the other. Layout "csr".

    Attributes:
        kv_indptr: int32 [batch_size + 1], where the pages of each request begin; entry b + 1
            bounds what request b may read.
        kv_indices: int32 [at least kv_indptr[-1]], page ids for K and V.
    """

    __slots__ = ("kv_indices", "kv_indptr", "layout", "tensors")

    def __init__(self, kv_indptr: Tensor, kv_indices: Tensor) -> None:
        """Hold both; nothing is copied.

        Raises:
            TypeError: an argument is no tensor or has another dtype.
            ValueError: a rank or device doesn't fit, or, on the CPU, ``kv_indptr`` is not a
                rising row of offsets from 0 into ``kv_indices``.
        """
        check_indptr("kv_indptr", kv_indptr)
        check_tensor("kv_indices", kv_indices, (torch.int32,))
        if kv_indices.dim() != 1:
            raise ValueError(f"kv_indices has shape {list(kv_indices.shape)}: expected [num_pages]")
        check_device("kv_indices", kv_indices, kv_indptr.device)
        if kv_indptr.device.type == "cpu" and int(kv_indptr[-1]) > kv_indices.shape[0]:
            raise ValueError(
                f"kv_indptr[-1] is {int(kv_indptr[-1])}: kv_indices has {kv_indices.shape[0]} "
                "entries"
            )
        self.kv_indptr = kv_indptr
        self.kv_indices = kv_indices
        self.tensors = (kv_indptr, kv_indices)
        self.layout = Layout.CSR

    def __repr__(self) -> str:
        """Show the shapes."""
        return f"CsrPages({list(self.kv_indptr.shape)}, {list(self.kv_indices.shape)})"

    @property
    def batch_size(self) -> int:
        """Requests that the table lists."""
        return self.kv_indptr.shape[0] - 1

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.kv_indptr.device

    def capacity(self, page_size: int) -> int:
        """Return the most tokens of a request: all pages there are."""
        return min(int(self.kv_indices.shape[0]) * page_size, MAX_KV_LEN)


class RaggedKV(_Fixed):
    """K and V without pages: the tokens of all requests, one after the other. Layout "ragged".

    Attributes:
        kv_indptr: int32 [batch_size + 1], where the tokens of each request begin in K and V;
            entry b + 1 bounds what request b may read.
    """

    __slots__ = ("kv_indptr", "layout", "tensors")

    def __init__(self, kv_indptr: Tensor) -> None:
        """Hold ``kv_indptr``; nothing is copied.

        Raises:
            TypeError: no tensor, or another dtype.
            ValueError: the rank doesn't fit, or, on the CPU, it is no rising row of offsets from 0.
        """
        check_indptr("kv_indptr", kv_indptr)
        self.kv_indptr = kv_indptr
        self.tensors = (kv_indptr,)
        self.layout = Layout.RAGGED

    def __repr__(self) -> str:
        """Show the shape."""
        return f"RaggedKV({list(self.kv_indptr.shape)})"

    @property
    def batch_size(self) -> int:
        """Requests that the table lists."""
        return self.kv_indptr.shape[0] - 1

    @property
    def device(self) -> torch.device:
        """Where the tensor is."""
        return self.kv_indptr.device

    def capacity(self, page_size: int) -> int:
        """Return the most tokens of a request: only the device knows the offsets."""
        del page_size
        return MAX_KV_LEN


Pages = BlockTable | TokenTable | CsrPages | RaggedKV


_VIEW = "jitattn_view"


def mark_view(tensor: Tensor, view: object) -> None:
    """Note on the first tensor of a cache which tables it is for."""
    setattr(tensor, _VIEW, view)


def view_of(kv_cache: object) -> object:
    """Return what a page manager noted on a cache; None where it comes from elsewhere."""
    first = kv_cache[0] if isinstance(kv_cache, (tuple, list)) and kv_cache else kv_cache
    return getattr(getattr(first, "k", first), _VIEW, None)


def check_view(pages: object, view: object) -> None:
    """Raise ValueError where a table counts pages otherwise than the cache of ``view``."""
    wanted = getattr(pages, "view", None)
    if wanted is not None and view is not None and wanted != view:
        raise ValueError(f"pages is a table for {wanted}: the cache is of {view}")


def check_indptr(name: str, indptr: Tensor) -> None:
    """Raise unless ``indptr`` is int32 [batch_size + 1], and on the CPU rises from 0."""
    check_tensor(name, indptr, (torch.int32,))
    if indptr.dim() != 1 or indptr.shape[0] == 0:
        raise ValueError(f"{name} has shape {list(indptr.shape)}: expected [batch_size + 1]")
    if indptr.device.type != "cpu":
        return
    values = indptr.tolist()
    if values[0] != 0:
        raise ValueError(f"{name}[0] is {values[0]}: expected 0")
    for b, (begin, end) in enumerate(itertools.pairwise(values)):
        if end < begin:
            raise ValueError(f"{name}[{b + 1}] is {end}, less than {name}[{b}], {begin}")


def check_tensor(name: str, value: object, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise TypeError unless ``value`` is a strided tensor of one of ``dtypes``."""
    if isinstance(value, Tensor) and value.dtype in dtypes:
        if value.layout is not torch.strided:
            raise TypeError(f"{name} has the layout {value.layout}: expected torch.strided")
        return
    wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}: expected a tensor of {wanted}")
    given = str(value.dtype).removeprefix("torch.")
    raise TypeError(f"{name} has dtype {given}: expected {wanted}")


def check_vector(name: str, value: Tensor, *, device: torch.device) -> None:
    """Raise unless ``value`` is a 1-D int32 or int64 tensor on ``device``."""
    check_tensor(name, value, INTEGERS)
    if value.dim() != 1:
        raise ValueError(f"{name} has shape {list(value.shape)}: expected one dimension")
    check_device(name, value, device)


def check_supported(device: torch.device) -> None:
    """Raise ValueError unless ``device`` is the CPU or a CUDA device."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"the tensors are on {device}: expected a CUDA device or the CPU")


def check_device(name: str, value: Tensor | Pages, device: torch.device) -> None:
    """Raise ValueError unless ``value`` is on ``device``."""
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}: expected {device}, like the other tensors")
