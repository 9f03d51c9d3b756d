"""``preprocess_qkv`` and ``append_kv`` on a CUDA device: kernels, and launches that are remembered.

A model calls them once a layer, with tensors that lie like those of the layer before: such a call
writes addresses into parameters that are there, and launches.
"""

from __future__ import annotations

import ctypes
import operator
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import _C, Tensor

from jitattn import knobs
from jitattn.binding import CacheView, recogniser, row_strides
from jitattn.build import build
from jitattn.config import QUANTISED_DTYPES
from jitattn.cuda_backend import arch_of
from jitattn.driver import Launch, LoadedKernel, device_facts, load_kernel
from jitattn.overlap import Apart
from jitattn.pages import BlockTable, CsrPages, Pages, TokenTable
from jitattn.params import (
    FLOAT_CODES,
    PREPROCESS_ADDRESSES,
    PREPROCESS_PARAMS,
    Divisor,
    PreprocessParams,
)
from jitattn.prepared import on_cpu
from jitattn.preprocess_cache import divisor_value
from jitattn.preprocess_call import Arguments, TokenCall, check, memory_pairs, names_of, parts_of
from jitattn.preprocess_config import config_of
from jitattn.preprocess_reference import places_of
from jitattn.preprocess_values import check_values
from jitattn.rotary import Rope
from jitattn.scalars import INT32_MAX
from jitattn.spec import DType, Loader, PageTable, PreprocessSpec
from jitattn.tiling import preprocess_tile_for

# Rows of a token that a group of threads takes one after the other, so that it computes angles
# once; fewer where that leaves SMs without work.
_MAX_ROWS = 4
_CTAS_PER_SM = 16
# Layouts that are remembered of calls with arguments of the same kinds.
_MAX_LAYOUTS = 64
_FLOAT_CODES = {getattr(torch, name): code for name, code in FLOAT_CODES.items()}

# Addresses that a launch writes, the first of PreprocessParams: not those of a Rope, which stay.
_NUM_ADDRESSES = PREPROCESS_ADDRESSES.index("turns")
_SCALES = ("q_scale", "k_scale", "v_scale")
_SCALE = struct.Struct("Pqf")
_TABLE = struct.Struct("2P")  # with which every page table begins
# Arguments from here on are no tensors.
_NUM_TENSOR_FIELDS = Arguments._fields.index("rope")

_kernels: dict[tuple[PreprocessSpec, int], LoadedKernel] = {}
_lock = threading.Lock()


class _Memory(threading.local):
    """A thread's launches: they have parameters, which one thread at a time writes."""

    def __init__(self) -> None:
        self.families: dict[object, _Family] = {}


_memory = _Memory()


def preprocess(arguments: Arguments) -> Tensor | None:
    """Check, launch and return q; None where there is none.

    Raises:
        TypeError, ValueError: an argument doesn't fit.
    """
    # Tensors are recognised by how they lie, once the kinds of arguments and all others agree.
    key = tuple(map(type, arguments)), arguments[_NUM_TENSOR_FIELDS:]
    try:
        family = _memory.families.get(key)
    except TypeError:  # something has no hash
        check(arguments)
        raise
    if family is None:
        family = _Family(arguments)
    tensors = family.tensors_of(arguments)
    prepared = family.find(tensors)
    if prepared is None:
        prepared = _Prepared(check(arguments), names_of(arguments), tensors)
        family.remember(prepared, tensors)
        _memory.families[key] = family
    return prepared.run(arguments, tensors)


# --- what is remembered ---------------------------------------------------------------------------


class _Family:
    """Launches for arguments of the same kinds, by how their tensors lie."""

    def __init__(self, arguments: Arguments) -> None:
        single = [i for i, value in enumerate(arguments) if isinstance(value, Tensor)]
        self._single = _getter(single)
        # Arguments of a family are of the same types.
        self._several = [
            (i, parts)
            for i, value in enumerate(arguments)
            if (parts := parts_of(type(value)))(value)
        ]
        # By how many tensors there are: tables may have rows.
        self._layouts: dict[int, list[tuple[Callable[..., bool], _Prepared]]] = {}

    def tensors_of(self, arguments: Arguments) -> list[Any]:
        """Return the tensors of ``arguments``, in the order of ``names_of``."""
        tensors = [*self._single(arguments)]
        for i, parts in self._several:
            tensors += parts(arguments[i])
        return tensors

    def find(self, tensors: list[Any]) -> _Prepared | None:
        """Return the launch for tensors that lie like these."""
        layouts = self._layouts.get(len(tensors), [])
        for i, (lie_alike, prepared) in enumerate(layouts):
            try:
                is_found = lie_alike(*tensors)
            except TypeError:  # some are no tensors: that is for the checks to say
                return None
            if is_found:
                if i > 0:
                    layouts.insert(0, layouts.pop(i))
                return prepared
        return None

    def remember(self, prepared: _Prepared, tensors: list[Any]) -> None:
        """Keep a launch, and forget those that were not used for long."""
        layouts = self._layouts.setdefault(len(tensors), [])
        layouts.insert(0, (recogniser(tensors), prepared))
        del layouts[_MAX_LAYOUTS:]


def _getter(indices: Sequence[int]) -> Callable[[Any], Any]:
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda values: [values[i] for i in indices]


# --- a launch -------------------------------------------------------------------------------------


class _Prepared:
    """A launch for tensors that lie alike. Holds none of them."""

    def __init__(self, call: TokenCall, names: list[str], tensors: list[Tensor]) -> None:
        arguments, rope = call.arguments, call.arguments.rope
        self._device, self._index = call.device, call.device.index or 0
        self._num_tokens = call.num_tokens
        self._new_shape = None if call.q is None or arguments.q_out is not None else call.q.shape
        self._dtype = call.k.dtype
        layout = None if arguments.pages is None else arguments.pages.layout
        self._params = PREPROCESS_PARAMS[layout]()
        self._rope = rope  # owns what the parameters point to
        if rope is not None:
            _write_rope(self._params.op, rope, call.device)
        _write_call(self._params.op, call)
        if arguments.pages is not None:
            _write_pages(self._params.pages, arguments.pages)
        self._table_at = self._params.__class__.pages.offset if layout else 0
        self._table = [i for i, name in enumerate(names) if name.startswith("pages[")]
        sources = _sources(call, names, tensors)
        # Zeros where there is no tensor.
        self._pack = struct.Struct("".join("8x" if at is None else "P" for at in sources)).pack_into
        # Pointers of tensors come first, then what lies behind them, as V does in a cache of both.
        found = [at for at in sources if at is not None]
        self._behind = [(i, offset) for i, offset in found if offset]
        count = len(names) + (self._new_shape is not None)
        places = {at: count + number for number, at in enumerate(self._behind)}
        self._addresses = _getter([places.get(at, at[0]) for at in found])
        self._scales = _scales_of(call, names)
        self._can_be_aligned, self._aligned = _alignment(call, sources)
        # Both loaders' kernels, of which the addresses choose.
        self._specs = {
            True: spec_of(call, layout, Loader.VECTOR),
            False: spec_of(call, layout, Loader.PLAIN),
        }
        self._launches: dict[bool, Launch] = {}
        self._apart = Apart(tensors, memory_pairs(names, arguments.pages))
        self._apart.learn([tensor.data_ptr() for tensor in tensors])
        self._verifies = knobs.load().check

    def run(self, arguments: Arguments, tensors: list[Tensor]) -> Tensor | None:
        """Launch for other tensors, on the current stream of their device."""
        if self._verifies and not torch.cuda.is_current_stream_capturing():
            verify(arguments)
        pointers = [tensor.data_ptr() for tensor in tensors]
        if not self._apart.holds(pointers):
            check(arguments)  # which refuses those that share bytes
            self._apart.learn(pointers)
        out = arguments.q_out
        if self._new_shape is not None:
            out = torch.empty(self._new_shape, dtype=self._dtype, device=self._device)
            pointers.append(out.data_ptr())
        if self._num_tokens == 0:
            return out
        params = self._params
        for i, offset in self._behind:
            pointers.append(pointers[i] + offset)
        self._pack(params, 0, *self._addresses(pointers))
        for at, name, index, stride in self._scales:
            address = 0 if index is None else pointers[index]
            _SCALE.pack_into(params, at, address, stride, _number(name, getattr(arguments, name)))
        if self._table:
            first, *more = self._table
            rows = pointers[more[0]] if more else 0
            _TABLE.pack_into(params, self._table_at, pointers[first], rows)
        is_aligned = self._can_be_aligned
        for i, mask in self._aligned:
            if pointers[i] & mask:
                is_aligned = False
                break
        self._launch(self._launches.get(is_aligned) or self._new_launch(is_aligned))
        return out

    def _launch(self, launch: Launch) -> None:
        stream = _C._cuda_getCurrentRawStream(self._index)
        if _C._cuda_getDevice() == self._index:
            launch(stream)
        else:
            with torch.cuda.device(self._index):
                launch(stream)

    def _new_launch(self, is_aligned: bool) -> Launch:
        spec = self._specs[is_aligned]
        kernel = _kernel(spec, self._index)
        tile = preprocess_tile_for(spec)
        op = self._params.op
        num_rows = op.num_qo_heads + 2 * op.num_kv_heads
        num_sms = device_facts(self._index).num_sms
        num_items = items_per_token(num_rows, self._num_tokens, tile.groups, num_sms)
        op.items_per_token = Divisor.of(num_items)
        grid = -(-self._num_tokens * num_items // tile.groups)
        launch = self._launches[is_aligned] = Launch(kernel, self._params, grid, tile.num_threads)
        return launch


def verify(arguments: Arguments) -> None:
    """Wait for the device and raise ValueError for what a kernel would skip: JITATTN_CHECK."""
    names = ("seq_lens", "qo_indptr", "slots", "positions", "position_delta")
    given = {name: getattr(arguments, name) for name in names}
    copies: dict[str, Any] = {
        name: None if value is None else value.cpu() for name, value in given.items()
    }
    call = check(arguments)
    try:
        pages = arguments.pages
        if isinstance(pages, BlockTable | TokenTable | CsrPages):
            pages = on_cpu(pages)
        call = replace(call, arguments=arguments._replace(pages=pages, **copies))
        check_values(call)
        places_of(call)
    except ValueError as error:
        raise ValueError(f"JITATTN_CHECK: {error}") from None


def items_per_token(num_rows: int, num_tokens: int, groups: int, num_sms: int) -> int:
    """Return to how many groups of threads the rows of a token are dealt.

    ``groups`` are those of a CTA. Launches of few tokens deal each row to one.
    """
    ctas = num_tokens * num_rows // groups
    rows = max(1, min(_MAX_ROWS, ctas // (num_sms * _CTAS_PER_SM)))
    num_items = -(-num_rows // rows)
    if num_tokens * num_items + groups > INT32_MAX:
        raise ValueError(f"qkv has {num_tokens} tokens of {num_rows} heads: too many for a launch")
    return num_items


def _number(name: str, scale: float | Tensor | None) -> float:
    """Return a scale that is a number; 1 in place of others."""
    return 1.0 if scale is None or isinstance(scale, Tensor) else divisor_value(name, scale)


def _kernel(spec: PreprocessSpec, index: int) -> LoadedKernel:
    kernel = _kernels.get((spec, index))
    if kernel is not None:
        return kernel
    if torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"{spec.symbol} is not loaded, and a capture can't load it: make such a call before it"
        )
    with _lock:
        arch = arch_of(device_facts(index))
        built = build(spec, arch, knobs.load(), hint=config_of(spec).arguments_text())
        kernel = load_kernel(built.cubin, built.symbol, index, 0)
        _kernels[spec, index] = kernel
    return kernel


# --- parameters -----------------------------------------------------------------------------------


def spec_of(call: TokenCall, layout: PageTable | None, loader: Loader) -> PreprocessSpec:
    """Return the kernel that a call needs where its addresses allow this loader."""
    rope, arguments = call.arguments.rope, call.arguments
    return PreprocessSpec(
        head_dim=call.k.shape[2],
        head_dim_vo=call.v.shape[2],
        page_size=call.page_size,
        qkv_dtype=_dtype_of(call.k.dtype),
        out_dtype=_dtype_of(call.out_dtype),
        kv_dtype=call.kv_dtype,
        page_table=layout,
        pairing=call.pairing,
        use_mrope=rope is not None and bool(rope.axes),
        use_bias=call.biases is not None,
        use_norm=arguments.q_norm is not None or arguments.k_norm is not None,
        loader=loader,
    )


def _dtype_of(dtype: torch.dtype) -> DType:
    return DType(str(dtype).removeprefix("torch."))


Source = tuple[int, int]
"""Which of the pointers of ``run``, and how many bytes behind it."""


def _sources(call: TokenCall, names: list[str], tensors: list[Tensor]) -> list[Source | None]:
    """Return where each address comes from, in the order of ``PREPROCESS_ADDRESSES``."""

    def place(name: str, view: Tensor | None, number: int = 0) -> Source | None:
        """Find a view in the argument ``name``, or in its tensor ``number``."""
        if view is None:
            return None
        index = names.index(name if name in names else f"{name}[{number}]")
        return index, view.data_ptr() - tensors[index].data_ptr()

    def own(name: str) -> Source | None:
        return (names.index(name), 0) if name in names else None

    first = 0 if call.q is None else 1  # K's number in (q, k, v) or (k, v)
    blocks = [None if view is None else view.tensor for view in (call.k_blocks, call.v_blocks)]
    new_q = None if call.q is None else (len(names), 0)
    places = [
        place("qkv", call.q),
        place("qkv", call.k, first),
        place("qkv", call.v, first + 1),
        own("q_out") or new_q,
        place("kv_cache", call.k_cache.tensor, 0),
        place("kv_cache", call.v_cache.tensor, 1),
        place("kv_cache", blocks[0], 2),
        place("kv_cache", blocks[1], 3),
        *(own(name) for name in PREPROCESS_ADDRESSES[8:13]),
        *(place("bias", bias, i) for i, bias in enumerate(call.biases or (None, None, None))),
        own("q_norm"),
        own("k_norm"),
    ]
    assert len(places) == _NUM_ADDRESSES
    return places


def _scales_of(call: TokenCall, names: list[str]) -> list[tuple[int, str, int | None, int]]:
    """Return of each scale that counts: its offset, its name, its pointer if any, its stride."""
    counts = dict.fromkeys(_SCALES, call.kv_dtype.value in QUANTISED_DTYPES)
    counts["q_scale"] = call.q is not None and call.out_dtype is not call.k.dtype
    return [
        (
            getattr(PreprocessParams, name).offset,
            name,
            names.index(name) if name in names else None,
            getattr(call, name).stride,
        )
        for name in _SCALES
        if counts[name]
    ]


def _alignment(call: TokenCall, sources: list[Source | None]) -> tuple[bool, list[tuple[int, int]]]:
    """Return whether rows can begin at multiples of their vectors, and which pointers then do.

    Each as its number and the bits that are to be 0.
    """
    vector = _cache_vector_bytes(call.kv_dtype)
    masks = dict.fromkeys(("q", "k", "v", "q_out", "q_bias", "k_bias", "v_bias"), 15)
    masks |= {"k_cache": vector - 1, "v_cache": vector - 1}
    found: dict[int, int] = {}
    is_possible = _has_aligned_strides(call)
    for name, source in zip(PREPROCESS_ADDRESSES, sources, strict=False):
        if source is not None and name in masks:
            index, offset = source
            is_possible = is_possible and not offset & masks[name]
            found[index] = found.get(index, 0) | masks[name]
    return is_possible, list(found.items())


def _cache_vector_bytes(kv_dtype: DType) -> int:
    """Return the bytes of eight elements."""
    return 4 if kv_dtype is DType.NVFP4 else 8 * kv_dtype.num_bytes


def _has_aligned_strides(call: TokenCall) -> bool:
    """Whether every row is a multiple of its vectors away from the first."""
    rope = call.arguments.rope
    if rope is not None and not rope.interleaved and rope.rotary_dim % 16:
        return False  # pairs are no whole vectors apart
    sources = [call.k, call.v, *([] if call.q is None else [call.q])]
    if call.q is not None and call.arguments.q_out is not None:
        sources.append(call.arguments.q_out)
    rows = [
        stride * tensor.element_size() % 16 for tensor in sources for stride in row_strides(tensor)
    ]
    vector = _cache_vector_bytes(call.kv_dtype)
    pages = [
        stride * view.tensor.element_size() % vector
        for view in (call.k_cache, call.v_cache)
        for stride in view.strides
    ]
    return not any(rows + pages)


def _write_rope(op: ctypes.Structure, rope: Rope, device: torch.device) -> None:
    if not rope.is_on(device) and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "rope was not used on this device yet, and a capture can't copy its frequencies: make "
            "such a call before it"
        )
    axes = rope.axes_on(device)
    op.turns = rope.turns_on(device).data_ptr()
    op.axes = None if axes is None else axes.data_ptr()
    op.rotary_dim = rope.rotary_dim
    op.attention_factor = rope.attention_factor


def _write_call(op: ctypes.Structure, call: TokenCall) -> None:
    arguments = call.arguments
    op.num_tokens = call.num_tokens
    op.num_qo_heads = 0 if call.q is None else call.q.shape[1]
    op.num_kv_heads = call.num_kv_heads
    op.num_k_pages = call.k_cache.tensor.shape[0]
    op.num_v_pages = call.v_cache.tensor.shape[0]
    op.max_kv_len = call.max_kv_len
    op.batch_size = _batch_size(arguments)
    op.zero_tail = arguments.zero_tail
    op.norm_eps = arguments.norm_eps
    for name in _SCALES:
        getattr(op, name).value = 1.0  # where it doesn't count
    _write_strides(op, call)
    for name in ("q_norm", "k_norm"):
        weights = getattr(arguments, name)
        if weights is not None:
            setattr(op, f"{name}_code", _FLOAT_CODES[weights.dtype])


def _batch_size(arguments: Arguments) -> int:
    if arguments.seq_lens is not None:
        return arguments.seq_lens.shape[0]
    return 0 if arguments.qo_indptr is None else arguments.qo_indptr.shape[0] - 1


def _write_strides(op: ctypes.Structure, call: TokenCall) -> None:
    arguments = call.arguments
    q_out = arguments.q_out if arguments.q_out is not None else None
    rows = (("q_strides", call.q), ("k_strides", call.k), ("v_strides", call.v))
    for name, tensor in (*rows, ("out_strides", q_out)):
        if tensor is not None:
            getattr(op, name).token, getattr(op, name).head = row_strides(tensor)
    if q_out is None and call.q is not None:  # a new one
        op.out_strides.token, op.out_strides.head = (
            call.q.shape[1] * call.q.shape[2],
            call.q.shape[2],
        )
    views: tuple[tuple[str, CacheView | None], ...] = (
        ("k_cache_strides", call.k_cache),
        ("v_cache_strides", call.v_cache),
        ("k_block_strides", call.k_blocks),
        ("v_block_strides", call.v_blocks),
    )
    for name, view in views:
        if view is not None:
            strides = getattr(op, name)
            strides.page, strides.token, strides.head = view.strides
    vectors = (
        ("seq_lens", "seq_lens_stride", "seq_lens_are_int64"),
        ("slots", "slots_stride", "slots_are_int64"),
        ("positions", "position_stride", "positions_are_int64"),
        ("position_delta", "delta_stride", "deltas_are_int64"),
        ("qo_indptr", "qo_indptr_stride", ""),
    )
    for name, stride, is_wide in vectors:
        tensor = getattr(arguments, name)
        if tensor is None:
            continue
        setattr(op, stride, tensor.stride(-1))
        if is_wide:
            setattr(op, is_wide, tensor.dtype is torch.int64)
    if arguments.positions is not None and arguments.positions.dim() == 2:
        op.axis_stride = arguments.positions.stride(0)


def _write_pages(table: ctypes.Structure, pages: Pages) -> None:
    """Write all but the two addresses with which a table begins."""
    if isinstance(pages, CsrPages):
        table.indptr_stride = pages.kv_indptr.stride(0)
        table.indices_stride = pages.kv_indices.stride(0)
        table.num_entries = pages.kv_indices.shape[0]
        return
    assert isinstance(pages, BlockTable | TokenTable)
    entries, rows = pages.tensors[0], pages.rows
    table.row_stride, table.column_stride = entries.stride(0), entries.stride(-1)
    if entries.dim() == 3:
        table.kv_stride = entries.stride(1)
    table.rows_stride = 0 if rows is None else rows.stride(0)
    table.rows_are_int64 = rows is not None and rows.dtype is torch.int64
