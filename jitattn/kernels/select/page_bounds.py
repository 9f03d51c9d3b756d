"""The least and largest keys of pages, kept as pages fill: ``page_bounds``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from jitattn.base.validate import check_name, type_name
from jitattn.kernels.common.launch_cache import CallTensors, LaunchCache, new_call
from jitattn.kernels.common.value_checks import checking
from jitattn.kernels.select.launch import KernelCall, OneOutput, new_params
from jitattn.kernels.select.params import PageBoundsParams
from jitattn.kernels.select.query_rows import OfBatch, QueryBatch, check_batch, note_page_size
from jitattn.kernels.select.reference import page_bounds_by_definition
from jitattn.kernels.select.spec import KEY_DTYPES, PageBoundsSpec
from jitattn.spec.dtype import DType
from jitattn.spec.layout import Layout
from jitattn.tensors.bound_cache import BoundCache
from jitattn.tensors.cache_views import CacheView, cache_view
from jitattn.tensors.overlap import refuse_shared_bytes
from jitattn.tensors.page_table_base import PageTable
from jitattn.tensors.tensor_checks import (
    check_device,
    check_last_stride,
    check_rows,
    check_tensor,
    check_writable,
)

_TORCH_DTYPES = tuple(dtype.torch_dtype for dtype in KEY_DTYPES)


def page_bounds(
    kv_cache: BoundCache | Tensor | tuple[Tensor, Tensor],
    pages: PageTable,
    seq_lens: Tensor,
    qo_indptr: Tensor | None = None,
    *,
    max_q_len: int | None = None,
    max_kv_len: int | None = None,
    kv_layout: str = "NHD",
    out: Tensor | None = None,
) -> Tensor:
    """Keep the least and the largest value of each dimension over the keys of every page.

    Without ``out`` those of all pages of the requests are found. With ``out``, as an earlier call
    returned it, only pages that have changed are read: those that hold a token of this step, which
    are the last ones of each request. One launch on the current stream, to be captured.

    Args:
        kv_cache: from ``planner.bind``, or a cache as ``bind`` takes it: [num_pages, 2, page_size,
            num_kv_heads, head_dim], or a pair of such tensors without the second dimension, of
            which K is read; of 16 bits or 8, any strides with a contiguous last
            dimension.
        pages: the pages of each request; a table of page ids that K and V share.
        seq_lens: int32 or int64 [batch_size], all tokens of each request; zero and less is none.
        qo_indptr: with ``out``: int32 [batch_size + 1], whose steps are the tokens that this step
            adds to each request; None: one each.
        max_q_len: the most of them; needed with ``qo_indptr``.
        max_kv_len: the most tokens of a request; None is what the table has room for.
        kv_layout: the order of a raw cache's dimensions, "NHD" or "HND".
        out: what an earlier call returned, to be brought up to date.

    Returns:
        [num_pages, 2, num_kv_heads, head_dim], the least values and the largest; in the dtype of
        K, or bfloat16 for 8 bits. They are those of stored values, of which a scale changes no
        order. Pages that no request lists have inf and -inf. Of a page that requests share, the
        bounds are those of one that sees the most of it only where all of them do.

    Raises:
        TypeError, ValueError: an argument that doesn't fit. On the CPU also a request that is
            longer than its table, or has a page outside the cache; on the device such pages are
            left out.
    """
    given = kv_cache, pages, seq_lens, qo_indptr, max_q_len, max_kv_len, kv_layout, out
    if is_dynamo_compiling():
        from jitattn.kernels.select.torch_op import trace_bounds

        return trace_bounds(PageBoundsCall(*given))
    return LAUNCHES.run(new_call(PageBoundsCall, given))


class PageBoundsCall(NamedTuple):
    """The arguments of ``page_bounds``, as they were given."""

    kv_cache: BoundCache | Tensor | tuple[Tensor, Tensor]
    pages: PageTable
    seq_lens: Tensor
    qo_indptr: Tensor | None
    max_q_len: int | None
    max_kv_len: int | None
    kv_layout: str
    out: Tensor | None


@dataclass(frozen=True, slots=True)
class _Call(OfBatch):
    """The arguments, checked."""

    keys: CacheView
    batch: QueryBatch
    out: Tensor | None

    @property
    def spec(self) -> PageBoundsSpec:
        return PageBoundsSpec(kv_dtype=DType.of(self.keys.tensor.dtype))

    def new_out(self) -> Tensor:
        """Return the bounds of pages that hold nothing."""
        num_pages, _, *row = self.keys.tensor.shape
        dtype = self.spec.bounds_dtype.torch_dtype
        out = torch.empty((num_pages, 2, *row), dtype=dtype, device=self.device)
        out[:, 0].fill_(torch.inf)
        out[:, 1].fill_(-torch.inf)
        return out


def _check(call: PageBoundsCall) -> _Call:
    kv_layout = check_name("kv_layout", call.kv_layout, ("NHD", "HND"))
    keys = _keys_of(call.kv_cache, kv_layout)
    if call.out is None:
        for name, value in (("qo_indptr", call.qo_indptr), ("max_q_len", call.max_q_len)):
            if value is not None:
                raise ValueError(f"{name} is given without out: then all pages are read")
    batch = check_batch(
        call.pages,
        call.seq_lens,
        call.qo_indptr,
        max_q_len=call.max_q_len,
        max_kv_len=call.max_kv_len,
        num_tokens=None,
        page_size=keys.tensor.shape[1],
        without=(Layout.SEPARATE, Layout.TOKEN),
    )
    check_device("kv_cache", keys.tensor, batch.device)
    checked = _Call(keys, batch, call.out)
    if call.out is not None:
        num_pages, _, *row = keys.tensor.shape
        dtype = checked.spec.bounds_dtype.torch_dtype
        check_rows("out", call.out, (num_pages, 2, *row), dtype, batch.device)
        check_last_stride("out", call.out)
        check_writable("out", call.out)
        read = [("kv_cache", keys.tensor), *(("pages", one) for one in call.pages.tensors)]
        refuse_shared_bytes([("out", call.out)], read)
    return checked


def _keys_of(kv_cache: object, kv_layout: str) -> CacheView:
    """Return K as [num_pages, page_size, num_kv_heads, head_dim]."""
    if isinstance(kv_cache, BoundCache):
        if kv_cache.config.page_table == "ragged":
            raise ValueError("kv_cache was bound as ragged K and V, which have no pages")
        if kv_layout not in ("NHD", kv_cache.config.kv_layout):
            raise ValueError(f"kv_layout is {kv_layout!r}: kv_cache was bound as another")
        check_tensor("kv_cache", kv_cache.k.tensor, _TORCH_DTYPES)
        return kv_cache.k
    name, keys, num_dims = "kv_cache", kv_cache, 5
    if isinstance(kv_cache, (tuple, list)) and len(kv_cache) == 2:
        name, keys, num_dims = "kv_cache[0]", kv_cache[0], 4
    elif not isinstance(kv_cache, Tensor):
        raise TypeError(
            f"kv_cache is a {type_name(kv_cache)}: expected a tensor, (k_cache, v_cache) or what "
            "planner.bind returns"
        )
    check_tensor(name, keys, _TORCH_DTYPES)
    assert isinstance(keys, Tensor)
    is_pair = num_dims == 4
    if keys.dim() != num_dims or (not is_pair and keys.shape[1] != 2) or 0 in keys.shape[1:]:
        page = "page_size, num_kv_heads" if kv_layout == "NHD" else "num_kv_heads, page_size"
        wanted = f"[num_pages, {'' if is_pair else '2, '}{page}, head_dim]"
        raise ValueError(f"{name} has shape {list(keys.shape)}: expected {wanted}")
    view = keys if is_pair else keys[:, 0]
    check_last_stride(name, view)
    return cache_view(view if kv_layout == "NHD" else view.transpose(1, 2))


def _define(call: _Call) -> Tensor:
    out = call.new_out() if call.out is None else call.out
    is_update = call.out is not None
    page_bounds_by_definition(call.keys.tensor, call.batch, out, is_update=is_update)
    note_page_size(out, call.batch.page_size)
    return out


class _Launcher(OneOutput[PageBoundsCall]):
    """Launches for calls whose tensors lie alike."""

    def __init__(self, call: _Call, given: CallTensors, card: int) -> None:
        batch, keys = call.batch, call.keys
        self._params = new_params(PageBoundsParams)
        params = self._params.struct
        batch.fill(params.rows)
        params.pages = batch.pages.page_list(batch.page_size)
        params.num_pages, _, params.num_kv_heads, params.head_dim = keys.tensor.shape
        params.page_stride, params.token_stride, params.head_stride = keys.strides
        head_dim = params.head_dim
        strides = (2 * params.num_kv_heads * head_dim, params.num_kv_heads * head_dim, head_dim)
        if call.out is not None:
            strides = call.out.stride(0), call.out.stride(1), call.out.stride(2)
        params.bounds_stride, params.bounds_side_stride, params.bounds_head_stride = strides
        params.is_update = call.out is not None
        params.num_parts = -(-batch.max_kv_len // batch.page_size)
        if call.out is not None:  # the first page may have tokens that were there before
            params.num_parts = min(params.num_parts, -(-batch.max_q_len // batch.page_size) + 1)
        super().__init__(given, call.new_out, _verify, batch.page_size)
        names = self.calls.names
        first = next(name for name in names if name.startswith("kv_cache"))
        source = next(tensor for name, tensor in given.named() if name == first)
        offset = keys.tensor.data_ptr() - source.data_ptr()
        sources: dict[str, str | tuple[str, int] | None] = {
            "keys": (first, offset),
            "bounds": "out",
            **batch.sources(),
        }
        self._params.connect(sources, names)
        grid = batch.batch_size * params.num_parts * params.num_kv_heads
        self.calls.add(KernelCall(call.spec, card, self._params, grid))


def _verify(call: PageBoundsCall) -> None:
    """Refuse what would be left out."""
    with checking():
        checked = _check(call)
        batch = checked.batch.to_cpu()
        for request, _, _, kv_len in batch.on_cpu():
            batch.known_slots(request, kv_len, checked.keys.tensor.shape[0])


LAUNCHES = LaunchCache(_check, _define, _Launcher)
