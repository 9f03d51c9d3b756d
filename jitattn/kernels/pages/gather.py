"""Copy the tokens of a batch out of their pages: ``gather_kv``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jitattn.kernels.common import device_kernels
from jitattn.kernels.common.launch_cache import (
    CallParams,
    CallTensors,
    LaunchCache,
    address_of,
    new_call,
)
from jitattn.kernels.common.page_lists import lengths_of, page_sources
from jitattn.kernels.common.value_checks import asks_for_checks, checking
from jitattn.kernels.pages.gather_check import Batch, GatherCall, Outs, check, check_total
from jitattn.kernels.pages.params import GatherParams
from jitattn.kernels.pages.spec import GatherSpec
from jitattn.kernels.pages.tile import GatherTile
from jitattn.spec.dtype import DType
from jitattn.spec.params import Divisor
from jitattn.tensors.bound_cache import BoundCache
from jitattn.tensors.overlap import Apart, refuse_shared_bytes
from jitattn.tensors.page_table_base import PageTable
from jitattn.tensors.quantization import KVCache, dequantize_kv, saturated
from jitattn.tensors.scales import ScaleLike

if TYPE_CHECKING:
    from jitattn.device.driver import Launch

_VECTOR_BYTES = 16
# Vectors of a CTA: four a thread, all under way at once.
_TILE_VECTORS = 1024
_OUTPUTS = ("out[0]", "out[1]", "out[2]")  # K, V and offsets


def gather_kv(
    kv: BoundCache | KVCache,
    pages: PageTable,
    seq_lens: Tensor,
    *,
    kv_layout: str = "NHD",
    k_scale: ScaleLike | None = None,
    v_scale: ScaleLike | None = None,
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
        pages: the pages of each request; a table of any layout but ragged.
        seq_lens: int32 or int64 [batch_size], tokens of each request; zero and less is none.
        kv_layout: the order of a raw cache's dimensions, "NHD" or "HND".
        k_scale: of a raw quantised cache: what a stored K times it is the value of; a number or a
            float32 tensor, [], [1] or [num_kv_heads]. None is 1.
        v_scale: likewise, of V.
        out_dtype: float16, bfloat16, float32, or, but for four bits, the cache's own, which copies
            what is stored and takes no scales. None is the cache's own where it isn't quantised,
            else the ``q_dtype`` of the planner that bound it (of FP8 queries float16), bfloat16 for
            a raw one.
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
    given = kv, pages, seq_lens, kv_layout, k_scale, v_scale, out_dtype, out
    return LAUNCHES.run(new_call(GatherCall, given))


# --- by definition


def _gather_by_definition(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    out = batch.out
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
    num_pages: int, pages: PageTable, request: int, kv_len: int, page_size: int, which: int
) -> Tensor:
    """The slots of a request in K (``which`` 0) or V (1), which has so many pages."""
    slots = pages.slots_of(request, kv_len, page_size, which=which)
    wrong = slots[(slots < 0) | (slots >= num_pages * page_size)]
    if wrong.numel():
        raise ValueError(
            f"request {request} has a token at slot {int(wrong[0])} of {'KV'[which]}: the cache "
            f"has {num_pages} pages of {page_size} tokens"
        )
    return slots


# --- on the device


class _GatherLauncher:
    """Launches for batches whose tensors lie alike."""

    def __init__(self, batch: Batch, given: CallTensors, card: int) -> None:
        kv_dtype, out_dtype = DType(batch.kv_dtype), DType(batch.out_dtype)
        spec = GatherSpec(kv_dtype=kv_dtype, out_dtype=out_dtype)
        tile = device_kernels.tile_of(spec, card)
        assert isinstance(tile, GatherTile)
        self._kernel, self._tile = (
            device_kernels.load(spec, card),
            tile,
        )
        self._card, self._device = card, batch.device
        self._batch_size = batch.seq_lens.shape[0]
        self._row_shapes = batch.row_shapes()
        self._dtype: torch.dtype = getattr(torch, batch.out_dtype)
        self._vector = _VECTOR_BYTES // out_dtype.num_bytes
        self._may_be_aligned = _rows_are_aligned(batch, self._vector)
        self._checks = asks_for_checks()
        self._page_size = batch.page_size
        self._num_pages = batch.k.tensor.shape[0], batch.v.tensor.shape[0]
        self._params = _params_of(batch)
        self._is_all_given = batch.out is not None and len(batch.out) == 3
        # What is not given, but made, comes last.
        self._names = given.names
        names = [*given.names, *(name for name in _OUTPUTS if name not in given.names)]
        sources, self._v_offset = _sources(batch, given)
        self._params.connect(sources, names)
        self._k_and_v = [names.index(name) for name in _cache_names(given)]
        self._num_read = len(names) - len(_OUTPUTS)
        every = range(len(given.names))
        pairs = [(i, j) for i in every[self._num_read :] for j in every[:i]]
        self._apart = Apart(given.tensors, pairs)
        self._apart.learn(given.pointers())
        self._num_rows, self._is_aligned = -1, False
        self._launch: Launch

    def __call__(self, call: GatherCall, tensors: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Launch for these, which lie like those it was made with."""
        out = call.out
        if self._checks and not device_kernels.is_capturing(self._device):
            self._verify(call)
        pointers = tuple(map(address_of, tensors))
        if self._is_all_given:
            assert out is not None
            image = self._params.images.get(pointers)
            if image is None:
                self._params.keep(pointers, self._fill(tensors, pointers, out[0].shape[0]))
                image = self._params.images[pointers]
            launch, self._params.image[:] = image
            assert launch is not None
            found = out[0], out[1], out[-1]
        else:
            found = self._outs(call.seq_lens, out)
            new: tuple[Tensor, ...] = found[2:] if out is not None else found
            launch = self._fill(
                tensors, [*pointers, *(one.data_ptr() for one in new)], found[0].shape[0]
            )
        device_kernels.launch_on(self._card, launch)
        return found

    def _fill(self, tensors: list[Tensor], pointers: Sequence[int], num_rows: int) -> Launch:
        """Fill the parameters for these addresses, and return the launch."""
        if not self._apart.holds(pointers):
            named = [*zip(map(_argument_of, self._names), tensors, strict=True)]
            refuse_shared_bytes(named[self._num_read :], named[: self._num_read])
            self._apart.learn(pointers)
        k_at, v_at = self._k_and_v
        bits = pointers[k_at] | (pointers[v_at] + self._v_offset) | pointers[-3] | pointers[-2]
        is_aligned = self._may_be_aligned and not bits % _VECTOR_BYTES
        self._set_rows(num_rows, is_aligned=is_aligned)
        self._params.write(pointers)
        return self._launch

    def _verify(self, call: GatherCall) -> None:
        """Refuse what would be NaN or left out."""
        out = call.out
        with checking():
            table = call.pages.to_cpu()
            lens = call.seq_lens.cpu().clamp(min=0).tolist()
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
        if device_kernels.is_capturing(device):
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
        from jitattn.device.driver import Launch

        if num_rows == self._num_rows and is_aligned is self._is_aligned:
            return
        vector = self._vector if is_aligned else 1
        params, widest = self._params.struct, 1
        sides = params.k, params.v
        for side, (num_heads, head_dim) in zip(sides, self._row_shapes, strict=True):
            side.head_vectors = Divisor.of(head_dim // vector)
            side.row_vectors = Divisor.of(num_heads * head_dim // vector)
            widest = max(widest, num_heads * head_dim // vector)
        params.tile_rows = max(1, min(_TILE_VECTORS // widest, self._tile.max_tile_rows))
        params.num_tokens, params.is_aligned = num_rows, is_aligned
        grid = 2 * max(1, -(-num_rows // params.tile_rows))
        self._launch = Launch(self._kernel, params, grid, self._tile.num_threads)
        self._num_rows, self._is_aligned = num_rows, is_aligned


def _rows_are_aligned(batch: Batch, vector: int) -> bool:
    """Whether every row of an aligned cache begins at a multiple of ``vector`` elements."""
    stored = vector // 2 if batch.block_scales else vector  # as the caches count them
    return all(
        offset % stored == 0
        for view in (batch.k, batch.v)
        for offset in (*view.strides, view.tensor.shape[-1])
    )


def _params_of(batch: Batch) -> CallParams[GatherParams]:
    """Return the parameters that are the same for tensors that lie alike."""
    call_params = CallParams(GatherParams)
    params = call_params.struct
    params.pages = batch.pages.page_list(batch.page_size)
    params.seq_lens = lengths_of(batch.seq_lens)
    for side, view, scale in (
        (params.k, batch.k, batch.k_scale),
        (params.v, batch.v, batch.v_scale),
    ):
        side.page_stride, side.token_stride, side.head_stride = view.strides
        side.num_pages = view.tensor.shape[0]
        side.scale.value = 1.0 if scale is None else scale.value
        side.scale.stride = 0 if scale is None else scale.stride
    for side, view in zip((params.k, params.v), batch.block_scales or (), strict=False):
        side.block_page_stride, side.block_token_stride, side.block_head_stride = view.strides
    return call_params


def _sources(
    batch: Batch, given: CallTensors
) -> tuple[dict[str, str | tuple[str, int] | None], int]:
    """Return which tensors the addresses are of, and the bytes from K to V where these are one."""
    k_name, v_name = _cache_names(given)
    v_offset = 0
    if k_name == v_name:
        v_offset = batch.v.tensor.data_ptr() - batch.k.tensor.data_ptr()
    sources: dict[str, str | tuple[str, int] | None] = {
        "seq_lens.values": "seq_lens",
        "kv_indptr": _OUTPUTS[2],
        **page_sources("pages", batch.pages),
    }
    sides = (("k", k_name, 0, batch.k_scale), ("v", v_name, v_offset, batch.v_scale))
    for i, (side, name, offset, scale) in enumerate(sides):
        sources[f"{side}.cache"] = name, offset
        sources[f"{side}.out"] = _OUTPUTS[i]
        sources[f"{side}.block_scales"] = f"kv[{2 + i}]" if batch.block_scales else None
        if scale is not None and scale.tensor is not None:
            own = [known for known, tensor in given.named() if tensor is scale.tensor]
            sources[f"{side}.scale.values"] = (
                f"{side}_scale" if f"{side}_scale" in given.names else own[0]
            )
    return sources, v_offset


def _cache_names(given: CallTensors) -> tuple[str, str]:
    """Return which tensors K and V are in."""
    return ("kv", "kv") if "kv" in given.names else ("kv[0]", "kv[1]")


def _argument_of(name: str) -> str:
    """Return what an error calls a tensor."""
    return name if name.startswith("out") else name.partition("[")[0]


LAUNCHES = LaunchCache(check, _gather_by_definition, _GatherLauncher)
