"""Copy the tokens of a batch out of their pages: ``gather_kv``."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jitattn.kernels.common.device_kernels import card_of, is_capturing, launch_on, load, tile_of
from jitattn.kernels.common.launch_cache import (
    PagedTable,
    Recent,
    asks_for_checks,
    checking,
    lengths_of,
    on_cpu,
    page_list_of,
)
from jitattn.kernels.pages.block_table import slots_of
from jitattn.kernels.pages.gather_check import Arguments, Batch, Outs, check_total, checked
from jitattn.kernels.pages.params import GatherParams, GatherSide
from jitattn.kernels.pages.spec import GatherSpec
from jitattn.kernels.pages.tile import GatherTile
from jitattn.spec.dtype import DType
from jitattn.spec.params import Divisor, Lengths, PageList
from jitattn.spec.params import Scale as Scales
from jitattn.tensors.cache_views import BoundCache
from jitattn.tensors.overlap import Apart, refuse_shared_bytes
from jitattn.tensors.page_tables import CsrPages, Pages
from jitattn.tensors.quantization import KVCache, dequantize_kv, saturated

if TYPE_CHECKING:
    from jitattn.device.driver import Launch

_VECTOR_BYTES = 16
# Vectors of a CTA: four a thread, all under way at once.
_TILE_VECTORS = 1024
# Addresses that a launch writes: of a cache, of what it goes to and of its blocks' scales; others.
_SIDE, _POINTER = struct.Struct("3P"), struct.Struct("P")
_K_AT, _V_AT = GatherParams.k.offset, GatherParams.v.offset
_ENTRIES_AT = GatherParams.pages.offset + PageList.entries.offset
_LENS_AT = GatherParams.seq_lens.offset + Lengths.values.offset
_INDPTR_AT = GatherParams.kv_indptr.offset


def gather_kv(
    kv: BoundCache | KVCache,
    pages: Pages,
    seq_lens: Tensor,
    *,
    kv_layout: str = "NHD",
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    out: Outs | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Copy the K and V of all requests out of their pages, one request after the other.

    A quantised cache is dequantised on the way: a stored value times its scale, in float32, rounded
    once to ``out_dtype``; what that has no room for is its largest number. One launch on the
    current stream. Without ``out`` it waits for the device, which alone knows how many tokens there
    are; with ``out`` it can be captured.

    Args:
        kv: from ``planner.bind``, whose layout and scales count, or a cache as ``bind`` takes it:
            [num_pages, 2, page_size, num_kv_heads, head_dim], or a pair of such tensors without
            the second dimension, of float16, bfloat16, FP8 or int8; or a QuantizedKV. Any strides
            with a contiguous last dimension.
        pages: the pages of each request; a BlockTable, CsrPages or TokenTable.
        seq_lens: int32 or int64 [batch_size], tokens of each request; zero and less is none.
        kv_layout: the order of a raw cache's dimensions, "NHD" or "HND".
        k_scale: of a raw quantised cache: what a stored K times it is the value of; a number or a
            float32 tensor, [], [1] or [num_kv_heads]. None is 1.
        v_scale: likewise, of V.
        out_dtype: float16, bfloat16, float32, or, but for NVFP4, the cache's own, which copies what
            is stored and takes no scales. None is the cache's own where it isn't quantised, else
            the ``q_dtype`` of the planner that bound it, bfloat16 for a raw one.
        out: (k, v) or (k, v, kv_indptr) to write, as returned; k and v contiguous, of any number
            of rows that is at least the tokens there are. Rows past those stay as they are. None
            of them may share memory with another tensor of the call.

    Returns:
        k [num_kv_tokens, num_kv_heads, head_dim], v likewise, and kv_indptr, int32
        [batch_size + 1]: where the tokens of each request begin in them, as RaggedKV takes it.

    Raises:
        TypeError, ValueError: an argument that doesn't fit. On the CPU also a length beyond the
            table or ``out``, and an entry outside the cache; on the device such tokens are NaN (0
            in int8), and what ``out`` has no row for is left out.
    """
    facts: tuple[object, ...]
    tensors: list[Tensor]
    if type(kv) is Tensor and type(out) is tuple and k_scale is None and v_scale is None:
        # As below, in less time.
        facts = type(pages), kv_layout, out_dtype, len(out)
        tensors = [kv, *getattr(pages, "tensors", ()), seq_lens, *out]
    else:
        arguments = Arguments(kv, pages, seq_lens, kv_layout, k_scale, v_scale, out_dtype, out)
        facts, tensors = arguments.facts(), arguments.tensors()
    call = _recent.find(facts, tensors)
    if call is None:
        arguments = Arguments(kv, pages, seq_lens, kv_layout, k_scale, v_scale, out_dtype, out)
        batch = checked(arguments)
        if (card := card_of(batch.device)) is None:
            return _gather_by_definition(batch, out)
        call = _recent.add(facts, tensors, _Gather(batch, card, arguments))
    return call(tensors, pages, seq_lens, out)


# --- by definition


def _gather_by_definition(batch: Batch, out: Outs | None) -> tuple[Tensor, Tensor, Tensor]:
    lens = [max(int(n), 0) for n in batch.seq_lens.tolist()]
    check_total(sum(lens))
    ends = torch.tensor([0, *lens], dtype=torch.int64, device="cpu").cumsum(0)
    total = int(ends[-1])
    if out is not None and total > out[0].shape[0]:
        raise ValueError(f"out has {out[0].shape[0]} rows: seq_lens have {total} tokens together")
    rows = [
        [_rows_of(batch, which, b, kv_len) for b, kv_len in enumerate(lens)] for which in (0, 1)
    ]
    dtype = getattr(torch, batch.out_dtype)
    if out is None:
        k, v = (torch.empty((total, *row), dtype=dtype, device="cpu") for row in batch.row_shapes())
        indptr = torch.empty(len(lens) + 1, dtype=torch.int32, device="cpu")
    else:
        k, v = out[0], out[1]
        indptr = (
            out[2] if len(out) == 3 else torch.empty(len(lens) + 1, dtype=torch.int32, device="cpu")
        )
    for target, parts in zip((k, v), rows, strict=True):
        if parts:
            target[:total] = torch.cat(parts)
    indptr.copy_(ends)
    return k, v, indptr


def _rows_of(batch: Batch, which: int, request: int, kv_len: int) -> Tensor:
    """The values of a request's K (``which`` 0) or V (1)."""
    view, scale = ((batch.k, batch.k_scale), (batch.v, batch.v_scale))[which]
    size = batch.page_size
    slots = _slots_in(view.tensor.shape[0], batch.pages, request, kv_len, size, which)
    tokens = view.tensor[slots // size, slots % size]
    if batch.copies_bits:
        return tokens
    values = dequantize_kv(
        tokens,
        dtype=batch.kv_dtype,
        scale=None if scale is None else scale.value if scale.tensor is None else scale.tensor,
        block_scales=None
        if batch.block_scales is None
        else batch.block_scales[which].tensor[slots // size, slots % size],
    )
    return saturated(values, getattr(torch, batch.out_dtype))


def _slots_in(
    num_pages: int, pages: PagedTable, request: int, kv_len: int, page_size: int, which: int
) -> Tensor:
    """The slots of a request in K (``which`` 0) or V (1), which has so many pages."""
    slots = slots_of(pages, request, kv_len, page_size, which=which)
    wrong = slots[(slots < 0) | (slots >= num_pages * page_size)]
    if wrong.numel():
        raise ValueError(
            f"request {request} has a token at slot {int(wrong[0])} of {'KV'[which]}: the cache "
            f"has {num_pages} pages of {page_size} tokens"
        )
    return slots


# --- on the device


class _Gather:
    """A launch for batches whose tensors lie alike."""

    def __init__(self, batch: Batch, card: int, arguments: Arguments) -> None:
        from jitattn.device.driver import Launch

        kv_dtype, out_dtype = DType(batch.kv_dtype), DType(batch.out_dtype)
        spec = GatherSpec(kv_dtype=kv_dtype, out_dtype=out_dtype)
        tile = tile_of(spec, card)
        assert isinstance(tile, GatherTile)
        self._make_launch = Launch
        self._kernel = load(spec, card)
        self._tile = tile
        self._card, self._device = card, batch.device
        self._batch_size = batch.seq_lens.shape[0]
        self._row_shapes = batch.row_shapes()
        self._dtype: torch.dtype = getattr(torch, batch.out_dtype)
        self._vector = _VECTOR_BYTES // out_dtype.num_bytes
        self._may_be_aligned = _rows_are_aligned(batch, self._vector)
        self._params = GatherParams()
        self._params.pages = page_list_of(batch.pages, batch.page_size)
        self._params.seq_lens = lengths_of(batch.seq_lens)
        self._sides = (self._params.k, self._params.v)
        sources = ((batch.k, batch.k_scale), (batch.v, batch.v_scale))
        for side, (view, scale) in zip(self._sides, sources, strict=True):
            side.page_stride, side.token_stride, side.head_stride = view.strides
            side.num_pages = view.tensor.shape[0]
            side.scale.value = 1.0 if scale is None else scale.value
            side.scale.stride = 0 if scale is None else scale.stride
        for side, view in zip(self._sides, batch.block_scales or (), strict=False):
            side.block_page_stride, side.block_token_stride, side.block_head_stride = view.strides
        self._checks = asks_for_checks()
        self._page_size = batch.page_size
        self._num_pages = batch.k.tensor.shape[0], batch.v.tensor.shape[0]
        self._has_out = arguments.out is not None
        self._names, tensors = arguments.names(), arguments.tensors()
        self._num_read = len(tensors) - len(arguments.out or ())
        every = range(len(tensors))
        self._apart = Apart(tensors, [(i, j) for i in every[self._num_read :] for j in every[:i]])
        self._apart.learn([tensor.data_ptr() for tensor in tensors])
        self._find_addresses(batch, arguments)
        self._num_rows, self._is_aligned = -1, False
        self._launch: Launch
        self._set_rows(arguments.out[0].shape[0] if arguments.out else 0, is_aligned=False)

    def _find_addresses(self, batch: Batch, arguments: Arguments) -> None:
        """Say where the tensors of a call are in ``arguments.tensors()``, but for those of out."""
        is_one = isinstance(arguments.kv, Tensor)  # K and V side by side
        self._v = 0 if is_one else 1
        k_at, v_at = batch.k.tensor.data_ptr(), batch.v.tensor.data_ptr()
        self._v_offset = v_at - k_at if is_one else 0
        self._has_blocks = batch.block_scales is not None
        at = 1 if is_one else 4 if self._has_blocks else 2
        # Those that not every call has, and where they go.
        self._others: list[tuple[int, int]] = []
        self._entries = at
        if isinstance(batch.pages, CsrPages):
            self._entries = at + 1
            self._others.append((at, GatherParams.pages.offset + PageList.indptr.offset))
        elif len(batch.pages.tensors) > 1:
            self._others.append((at + 1, GatherParams.pages.offset + PageList.rows.offset))
        self._lens = at + len(batch.pages.tensors)
        at = self._lens + 1
        for side, scale in zip((_K_AT, _V_AT), arguments.scales, strict=True):
            if isinstance(scale, Tensor):
                self._others.append((at, side + GatherSide.scale.offset + Scales.values.offset))
                at += 1

    def __call__(
        self, tensors: list[Tensor], pages: Pages, seq_lens: Tensor, out: Outs | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Launch for these, which lie like those it was made with."""
        if self._checks and not is_capturing(self._device):
            self._verify(pages, seq_lens, out)
        pointers = [tensor.data_ptr() for tensor in tensors]
        if not self._apart.holds(pointers):
            named = [*zip(self._names, tensors, strict=True)]
            refuse_shared_bytes(named[self._num_read :], named[: self._num_read])
            self._apart.learn(pointers)
        if out is not None and len(out) == 3:
            k, v, kv_indptr = out
        else:
            k, v, kv_indptr = self._outs(seq_lens, out)
            new = (kv_indptr,) if out is not None else (k, v, kv_indptr)
            pointers += [tensor.data_ptr() for tensor in new]
        k_at, v_at = pointers[0], pointers[self._v] + self._v_offset
        k_out, v_out, indptr_at = pointers[-3:]
        is_aligned = self._may_be_aligned and not (k_at | v_at | k_out | v_out) % _VECTOR_BYTES
        # Those of out lie like those before, which have as many rows.
        if is_aligned is not self._is_aligned or not self._has_out:
            self._set_rows(k.shape[0], is_aligned=is_aligned)
        params = self._params
        k_blocks, v_blocks = pointers[2:4] if self._has_blocks else (0, 0)
        _SIDE.pack_into(params, _K_AT, k_at, k_out, k_blocks)
        _SIDE.pack_into(params, _V_AT, v_at, v_out, v_blocks)
        _POINTER.pack_into(params, _ENTRIES_AT, pointers[self._entries])
        _POINTER.pack_into(params, _LENS_AT, pointers[self._lens])
        _POINTER.pack_into(params, _INDPTR_AT, indptr_at)
        for i, offset in self._others:
            _POINTER.pack_into(params, offset, pointers[i])
        launch_on(self._card, self._launch)
        return k, v, kv_indptr

    def _verify(self, pages: Pages, seq_lens: Tensor, out: Outs | None) -> None:
        """Refuse what would be NaN or left out."""
        with checking():
            table = on_cpu(pages)  # type: ignore[arg-type]
            lens = seq_lens.cpu().clamp(min=0).tolist()
            for request, kv_len in enumerate(lens):
                for which, num_pages in enumerate(self._num_pages):
                    _slots_in(num_pages, table, request, kv_len, self._page_size, which)
            if out is not None and sum(lens) > out[0].shape[0]:
                raise ValueError(
                    f"out has {out[0].shape[0]} rows: seq_lens have {sum(lens)} tokens together"
                )

    def _outs(self, seq_lens: Tensor, out: Outs | None) -> tuple[Tensor, Tensor, Tensor]:
        device = self._device
        kv_indptr = torch.empty(self._batch_size + 1, dtype=torch.int32, device=device)
        if out is not None:
            return out[0], out[1], kv_indptr
        if is_capturing(device):
            raise ValueError(
                "out is None in a capture: only the device knows how many tokens there are; give "
                "out=(k, v)"
            )
        total = int(seq_lens.clamp(min=0).sum())
        check_total(total)
        k, v = (
            torch.empty((total, *row), dtype=self._dtype, device=device) for row in self._row_shapes
        )
        return k, v, kv_indptr

    def _set_rows(self, num_rows: int, *, is_aligned: bool) -> None:
        if num_rows == self._num_rows and is_aligned is self._is_aligned:
            return
        vector = self._vector if is_aligned else 1
        params, widest = self._params, 1
        for side, (num_heads, head_dim) in zip(self._sides, self._row_shapes, strict=True):
            side.head_vectors = Divisor.of(head_dim // vector)
            side.row_vectors = Divisor.of(num_heads * head_dim // vector)
            widest = max(widest, num_heads * head_dim // vector)
        params.tile_rows = max(1, min(_TILE_VECTORS // widest, self._tile.max_tile_rows))
        params.num_tokens, params.is_aligned = num_rows, is_aligned
        grid = 2 * max(1, -(-num_rows // params.tile_rows))
        self._launch = self._make_launch(self._kernel, params, grid, self._tile.num_threads)
        self._num_rows, self._is_aligned = num_rows, is_aligned


def _rows_are_aligned(batch: Batch, vector: int) -> bool:
    """Whether every row of an aligned cache begins at a multiple of ``vector`` elements."""
    stored = vector // 2 if batch.block_scales else vector  # as the caches count them
    return all(
        offset % stored == 0
        for view in (batch.k, batch.v)
        for offset in (*view.strides, view.tensor.shape[-1])
    )


_recent: Recent[_Gather] = Recent()
