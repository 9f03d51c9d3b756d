"""Copy the tokens of a batch out of their pages: ``gather_kv``."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jitattn.binding import BoundCache, CacheView, Scale, view_caches, view_scale
from jitattn.config import QUANTISED_DTYPES, PlannerConfig, dtype_name
from jitattn.overlap import Apart, refuse_shared_bytes
from jitattn.pages import (
    BlockTable,
    CsrPages,
    Pages,
    TokenTable,
    check_device,
    check_tensor,
)
from jitattn.params import Divisor, GatherParams, GatherSide, Lengths, PageList
from jitattn.params import Scale as Scales
from jitattn.prepared import (
    PagedTable,
    Recent,
    asks_for_checks,
    card_of,
    checking,
    is_capturing,
    launch_on,
    lengths_of,
    load,
    on_cpu,
    page_list_of,
    tile_of,
)
from jitattn.quantization import (
    CACHE_DTYPES,
    NVFP4_BLOCK,
    KVCache,
    QuantizedKV,
    dequantize_kv,
    saturated,
)
from jitattn.scalars import INT32_MAX
from jitattn.spec import DType, GatherSpec
from jitattn.tables import check_offsets, check_per_request, slots_of
from jitattn.tiling import GatherTile

if TYPE_CHECKING:
    from jitattn.driver import Launch

Outs = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]

_PLAIN_DTYPES = tuple(getattr(torch, name) for name in CACHE_DTYPES if name != "nvfp4")
_OUT_DTYPES = ("float16", "bfloat16", "float32")
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
        arguments = _Arguments(kv, pages, seq_lens, kv_layout, k_scale, v_scale, out_dtype, out)
        facts, tensors = arguments.facts(), arguments.tensors()
    call = _recent.find(facts, tensors)
    if call is None:
        arguments = _Arguments(kv, pages, seq_lens, kv_layout, k_scale, v_scale, out_dtype, out)
        batch = _checked(arguments)
        if (card := card_of(batch.device)) is None:
            return _gather_by_definition(batch, out)
        call = _recent.add(facts, tensors, _Gather(batch, card, arguments))
    return call(tensors, pages, seq_lens, out)


@dataclass(slots=True)
class _Arguments:
    """The arguments of ``gather_kv`` as they were given."""

    kv: BoundCache | KVCache
    pages: Pages
    seq_lens: Tensor
    kv_layout: str
    k_scale: float | Tensor | None
    v_scale: float | Tensor | None
    out_dtype: torch.dtype | str | None
    out: Outs | None
    scales: tuple[float | Tensor | None, float | Tensor | None] = (None, None)  # that count

    def __post_init__(self) -> None:
        self.scales = self.k_scale, self.v_scale
        if isinstance(self.kv, BoundCache) and self.kv.k_scale is not None:
            k, v = self.kv.k_scale, self.kv.v_scale
            assert v is not None
            self.scales = (
                k.value if k.tensor is None else k.tensor,
                v.value if v.tensor is None else v.tensor,
            )

    def tensors(self) -> list[Tensor]:
        """All tensors among them: of caches, pages, lengths, scales and out."""
        kv, out = self.kv, self.out
        found: list[Tensor]
        if isinstance(kv, Tensor):
            found = [kv]
        elif isinstance(kv, BoundCache):
            found = [view.tensor for view in (kv.k, kv.v, *(kv.block_scales or ()))]
        elif isinstance(kv, QuantizedKV):
            found = [kv.k, kv.v, kv.k_block_scales, kv.v_block_scales]
        else:
            found = [*kv] if isinstance(kv, (tuple, list)) else [kv]
        found += [*getattr(self.pages, "tensors", ()), self.seq_lens]
        found += [scale for scale in self.scales if isinstance(scale, Tensor)]
        return [*found, *out] if isinstance(out, (tuple, list)) else found

    def names(self) -> list[str]:
        """Say of each of ``tensors`` which argument it is of."""
        num_outs = len(self.out) if isinstance(self.out, (tuple, list)) else 0
        scales = [
            name
            for name, scale in zip(("k_scale", "v_scale"), self.scales, strict=True)
            if isinstance(scale, Tensor)
        ]
        own = ["pages"] * len(self.pages.tensors) + ["seq_lens", *scales]
        own += [f"out[{i}]" for i in range(num_outs)]
        return ["kv"] * (len(self.tensors()) - len(own)) + own

    def facts(self) -> tuple[object, ...]:
        """All that isn't a tensor: calls of equal facts whose tensors lie alike are alike."""
        kv, out = self.kv, self.out
        bound: tuple[object, ...] = ()
        if isinstance(kv, BoundCache):
            config = kv.config
            # It takes no other scales.
            bound = (config.q_dtype, config.kv_layout, config.page_table)
            bound += (self.k_scale is None, self.v_scale is None, kv.block_scales is None)
        k_scale, v_scale = self.scales
        return (
            type(kv),
            type(self.pages),
            bound,
            self.kv_layout,
            # With their types, since True is equal to 1.
            *(type(k_scale), None if isinstance(k_scale, Tensor) else k_scale),
            *(type(v_scale), None if isinstance(v_scale, Tensor) else v_scale),
            self.out_dtype,
            len(out) if isinstance(out, (tuple, list)) else type(out),
        )


@dataclass(frozen=True, slots=True)
class _Batch:
    """What is gathered, checked."""

    k: CacheView
    v: CacheView
    k_scale: Scale | None
    v_scale: Scale | None
    pages: PagedTable
    seq_lens: Tensor
    kv_dtype: str
    out_dtype: str
    block_scales: tuple[CacheView, CacheView] | None = None  # of NVFP4

    @property
    def device(self) -> torch.device:
        return self.seq_lens.device

    @property
    def page_size(self) -> int:
        return int(self.k.tensor.shape[1])

    @property
    def copies_bits(self) -> bool:
        """Whether stored elements are copied as they are."""
        return self.kv_dtype == self.out_dtype

    def row_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of a token's K and V."""
        per_element = 2 if self.block_scales else 1
        k, v = (
            (*view.tensor.shape[2:-1], per_element * view.tensor.shape[-1])
            for view in (self.k, self.v)
        )
        return k, v


# --- checks of arguments


def _checked(arguments: _Arguments) -> _Batch:
    pages, seq_lens = arguments.pages, arguments.seq_lens
    if not isinstance(pages, BlockTable | CsrPages | TokenTable):
        raise TypeError(
            f"pages is {pages!r}: expected a BlockTable, CsrPages or TokenTable (ragged K and V "
            "lie one request after the other already)"
        )
    check_per_request("seq_lens", seq_lens, pages.batch_size, pages.device)
    batch = _viewed(arguments, pages)
    if batch.out_dtype not in (*_OUT_DTYPES, batch.kv_dtype) or batch.out_dtype == "nvfp4":
        own = "" if batch.block_scales else f" or that of the cache, {batch.kv_dtype}"
        raise ValueError(f"out_dtype is {batch.out_dtype}: expected {', '.join(_OUT_DTYPES)}{own}")
    given = (arguments.k_scale, arguments.v_scale)
    if batch.copies_bits and any(scale is not None for scale in given):
        raise ValueError(
            f"k_scale or v_scale is given, but out_dtype={batch.out_dtype} copies what is stored"
        )
    if arguments.out is not None:
        _check_out(arguments.out, batch)
        tensors = [*zip(arguments.names(), arguments.tensors(), strict=True)]
        count = len(arguments.out)
        refuse_shared_bytes(tensors[-count:], tensors[:-count])
    return batch


def _viewed(arguments: _Arguments, pages: PagedTable) -> _Batch:
    """Return the caches and their scales, but for ``out_dtype`` checked."""
    kv, device = arguments.kv, pages.device
    blocks = None
    if isinstance(kv, BoundCache):
        _check_bound(kv, arguments)
        config, k, v = kv.config, kv.k, kv.v
        k_scale, v_scale = kv.k_scale, kv.v_scale
        blocks = kv.block_scales
    else:
        config = _config_of(kv, pages, arguments.kv_layout)
        if isinstance(kv, QuantizedKV):
            stored = replace(config, kv_dtype="uint8")
            k, v = view_caches((kv.k, kv.v), stored, device)
            per_block = NVFP4_BLOCK // 2
            stored = replace(
                config,
                kv_dtype="float8_e4m3fn",
                head_dim=kv.k.shape[-1] // per_block,
                head_dim_vo=kv.v.shape[-1] // per_block,
            )
            blocks = view_caches((kv.k_block_scales, kv.v_block_scales), stored, device)
        else:
            k, v = view_caches(kv, config, device)
        k_scale, v_scale = (
            view_scale(name, scale, config.kv_dtype, device, num_kv_heads=config.num_kv_heads)
            for name, scale in (("k_scale", arguments.k_scale), ("v_scale", arguments.v_scale))
        )
    if arguments.out_dtype is not None:
        out_dtype = dtype_name(arguments.out_dtype)
    else:
        out_dtype = config.q_dtype if config.kv_dtype in QUANTISED_DTYPES else config.kv_dtype
    return _Batch(
        k, v, k_scale, v_scale, pages, arguments.seq_lens, config.kv_dtype, out_dtype, blocks
    )


def _check_bound(kv: BoundCache, arguments: _Arguments) -> None:
    config, pages = kv.config, arguments.pages
    if config.page_table == "ragged":
        raise ValueError("kv was bound as ragged K and V, which have no pages to gather from")
    if (pages.layout == "separate") != (config.page_table == "separate"):
        raise ValueError(
            f"pages is {pages!r} of the layout {pages.layout.value!r}: kv was bound with "
            f"page_table={config.page_table!r}"
        )
    if arguments.kv_layout not in ("NHD", config.kv_layout):
        raise ValueError(f"kv_layout is {arguments.kv_layout!r}: kv was bound as another")
    for name, scale in (("k_scale", arguments.k_scale), ("v_scale", arguments.v_scale)):
        if scale is not None:
            raise ValueError(f"{name} is given, but a bound cache has its own: give it to bind")
    if kv.device != pages.device:
        raise ValueError(f"kv is on {kv.device}: expected {pages.device}, like pages")


def _config_of(kv: object, pages: Pages, kv_layout: str) -> PlannerConfig:
    """Read off the tensors what ``view_caches`` compares them with; it checks the rest."""
    if kv_layout not in ("NHD", "HND"):
        raise ValueError(f"kv_layout is {kv_layout!r}: expected 'NHD' or 'HND'")
    kv_dtypes = _PLAIN_DTYPES
    one, k, v = kv, kv, kv
    if isinstance(kv, QuantizedKV):
        one, k, v, kv_dtypes = kv.k, kv.k, kv.v, (torch.uint8,)
    elif isinstance(kv, (tuple, list)) and len(kv) == 2:
        one, k, v = kv[0], kv[0], kv[1]
    elif not isinstance(kv, Tensor):
        raise TypeError(
            f"kv is a {type(kv).__name__}: expected a tensor, (k_cache, v_cache), a "
            "QuantizedKV or what planner.bind returns"
        )
    for name, cache in (("kv" if k is v else "kv[0]", k), ("kv" if k is v else "kv[1]", v)):
        check_tensor(name, cache, kv_dtypes)
    assert isinstance(one, Tensor)
    assert isinstance(v, Tensor)
    num_dims = 5 if one is kv else 4
    if one.dim() != num_dims:
        page = "page_size, num_kv_heads" if kv_layout == "NHD" else "num_kv_heads, page_size"
        wanted = f"[num_pages, {'2, ' if num_dims == 5 else ''}{page}, head_dim]"
        raise ValueError(f"kv has shape {list(one.shape)}: expected {wanted}")
    if 0 in (*one.shape[1:], v.shape[-1]):
        raise ValueError(f"kv has shape {list(one.shape)}: a page of it holds nothing")
    token_dim, head_dim = (-3, -2) if kv_layout == "NHD" else (-2, -3)
    return PlannerConfig.from_arguments(
        {
            "num_qo_heads": one.shape[head_dim],
            "num_kv_heads": one.shape[head_dim],
            "head_dim": one.shape[-1],
            "head_dim_vo": v.shape[-1],
            "page_size": one.shape[token_dim],
            "kv_dtype": "nvfp4" if isinstance(kv, QuantizedKV) else one.dtype,
            "kv_layout": kv_layout,
            "page_table": pages.layout.value,
        }
    )


def _check_out(out: object, batch: _Batch) -> None:
    if not isinstance(out, (tuple, list)) or len(out) not in (2, 3):
        raise TypeError(f"out is a {type(out).__name__}: expected (k, v) or (k, v, kv_indptr)")
    dtype = getattr(torch, batch.out_dtype)
    for i, (tensor, row) in enumerate(zip(out, batch.row_shapes(), strict=False)):
        check_tensor(f"out[{i}]", tensor, (dtype,))
        num_rows = out[0].shape[0] if out[0].dim() else 0
        if tuple(tensor.shape) != (num_rows, *row):
            raise ValueError(
                f"out[{i}] has shape {list(tensor.shape)}: expected {[num_rows, *row]}"
            )
        if num_rows > INT32_MAX:
            raise ValueError(f"out[{i}] has {num_rows} rows: expected at most {INT32_MAX}")
        if not tensor.is_contiguous():
            raise ValueError(
                f"out[{i}] has strides {list(tensor.stride())}: expected a contiguous tensor"
            )
        check_device(f"out[{i}]", tensor, batch.device)
    if len(out) == 3:
        check_offsets("out[2]", out[2], batch.seq_lens.shape[0], batch.device)


# --- by definition


def _gather_by_definition(batch: _Batch, out: Outs | None) -> tuple[Tensor, Tensor, Tensor]:
    lens = [max(int(n), 0) for n in batch.seq_lens.tolist()]
    _check_total(sum(lens))
    ends = torch.tensor([0, *lens], dtype=torch.int64).cumsum(0)
    total = int(ends[-1])
    if out is not None and total > out[0].shape[0]:
        raise ValueError(f"out has {out[0].shape[0]} rows: seq_lens have {total} tokens together")
    rows = [
        [_rows_of(batch, which, b, kv_len) for b, kv_len in enumerate(lens)] for which in (0, 1)
    ]
    dtype = getattr(torch, batch.out_dtype)
    if out is None:
        k, v = (torch.empty((total, *row), dtype=dtype) for row in batch.row_shapes())
        indptr = torch.empty(len(lens) + 1, dtype=torch.int32)
    else:
        k, v = out[0], out[1]
        indptr = out[2] if len(out) == 3 else torch.empty(len(lens) + 1, dtype=torch.int32)
    for target, parts in zip((k, v), rows, strict=True):
        if parts:
            target[:total] = torch.cat(parts)
    indptr.copy_(ends)
    return k, v, indptr


def _rows_of(batch: _Batch, which: int, request: int, kv_len: int) -> Tensor:
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


def _check_total(num_tokens: int) -> None:
    if num_tokens > INT32_MAX:
        raise ValueError(f"seq_lens have {num_tokens} tokens together: at most {INT32_MAX}")


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

    def __init__(self, batch: _Batch, card: int, arguments: _Arguments) -> None:
        from jitattn.driver import Launch

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

    def _find_addresses(self, batch: _Batch, arguments: _Arguments) -> None:
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
        _check_total(total)
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


def _rows_are_aligned(batch: _Batch, vector: int) -> bool:
    """Whether every row of an aligned cache begins at a multiple of ``vector`` elements."""
    stored = vector // 2 if batch.block_scales else vector  # as the caches count them
    return all(
        offset % stored == 0
        for view in (batch.k, batch.v)
        for offset in (*view.strides, view.tensor.shape[-1])
    )


_recent: Recent[_Gather] = Recent()
