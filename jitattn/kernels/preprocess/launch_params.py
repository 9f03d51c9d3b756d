"""Parameters of the kernel of ``preprocess_qkv`` and ``append_kv``, filled of a checked call."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from jitattn.base.validate import check_number
from jitattn.kernels.common.launch_cache import CallTensors, Source
from jitattn.kernels.preprocess.check import PreprocessCall, TokenCall
from jitattn.kernels.preprocess.params import PREPROCESS_ADDRESSES
from jitattn.kernels.preprocess.spec import PreprocessSpec
from jitattn.spec.dtype import DType
from jitattn.spec.layout import Layout, Loader
from jitattn.spec.params import FLOAT_CODES
from jitattn.tensors.cache_views import CacheView
from jitattn.tensors.rope import Rope
from jitattn.tensors.tensor_checks import row_strides

_FLOAT_CODES = {DType(name).torch_dtype: code for name, code in FLOAT_CODES.items()}
# Addresses that a launch writes, the first of PreprocessParams: not those of a Rope, which stay.
_NUM_ADDRESSES = PREPROCESS_ADDRESSES.index("turns")
_SCALES = ("q_scale", "k_scale", "v_scale")


def spec_of(call: TokenCall, layout: Layout | None, loader: Loader) -> PreprocessSpec:
    """Return the kernel that a call needs where its addresses allow this loader."""
    rope, given = call.given.rope, call.given
    return PreprocessSpec(
        head_dim=call.k.shape[2],
        head_dim_vo=call.v.shape[2],
        page_size=call.page_size,
        qkv_dtype=DType.of(call.k.dtype),
        out_dtype=DType.of(call.out_dtype),
        kv_dtype=call.kv_dtype,
        page_table=layout,
        pairing=call.pairing,
        use_mrope=rope is not None and bool(rope.axes),
        use_bias=call.biases is not None,
        use_norm=given.q_norm is not None or given.k_norm is not None,
        use_qk_hadamard=given.qk_transform is not None,
        use_v_hadamard=given.v_transform is not None,
        loader=loader,
    )


def address_sources(
    call: TokenCall, given: CallTensors, names: Sequence[str]
) -> dict[str, Source | None]:
    """Return which of the tensors ``names`` each address is of; of None it is null."""

    def place(name: str, view: Tensor | None, number: int = 0) -> Source | None:
        """Find a view in the argument ``name``, or in its tensor ``number``."""
        if view is None:
            return None
        name = name if name in names else f"{name}[{number}]"
        return name, view.data_ptr() - given.tensors[names.index(name)].data_ptr()

    def own(name: str) -> Source | None:
        return (name, 0) if name in names else None

    first = 0 if call.q is None else 1  # K's number in (q, k, v) or (k, v)
    caches = (call.k_cache, call.v_cache, call.k_blocks, call.v_blocks)
    places = [
        place("qkv", call.q),
        place("qkv", call.k, first),
        place("qkv", call.v, first + 1),
        own("q_out"),
        *(
            place("kv_cache", None if view is None else view.tensor, i)
            for i, view in enumerate(caches)
        ),
        *(own(name) for name in PREPROCESS_ADDRESSES[8:13]),
        *(place("bias", bias, i) for i, bias in enumerate(call.biases or (None, None, None))),
        own("q_norm"),
        own("k_norm"),
    ]
    sources = dict(zip(PREPROCESS_ADDRESSES[:_NUM_ADDRESSES], places, strict=True))
    return sources | {f"{name}.values": own(name) for name in scales_of(call)}


def scales_of(call: TokenCall) -> list[str]:
    """Return the names of the scales that count."""
    is_quantised = call.kv_dtype.is_quantised
    counts = dict.fromkeys(_SCALES, is_quantised)
    counts["q_scale"] = call.q is not None and call.out_dtype is not call.k.dtype
    return [name for name in _SCALES if counts[name]]


def alignment(
    call: TokenCall, sources: Mapping[str, Source | None], names: Sequence[str]
) -> tuple[bool, list[tuple[int, int]]]:
    """Return whether rows can begin at multiples of their vectors, and which tensors then do.

    Each as its number in ``names`` and the bits of its address that are to be 0.
    """
    vector = _cache_vector_bytes(call.kv_dtype)
    masks = dict.fromkeys(("q", "k", "v", "q_out", "q_bias", "k_bias", "v_bias"), 15)
    masks |= {"k_cache": vector - 1, "v_cache": vector - 1}
    found: dict[int, int] = {}
    is_possible = _has_aligned_strides(call)
    for field, mask in masks.items():
        source = sources[field]
        if source is not None:
            name, offset = source
            is_possible = is_possible and not offset & mask
            index = names.index(name)
            found[index] = found.get(index, 0) | mask
    return is_possible, list(found.items())


def _cache_vector_bytes(kv_dtype: DType) -> int:
    """Return the bytes of eight elements."""
    return kv_dtype.bits


def _has_aligned_strides(call: TokenCall) -> bool:
    """Whether every row is a multiple of its vectors away from the first."""
    rope = call.given.rope
    if rope is not None and not rope.interleaved and rope.rotary_dim % 16:
        return False  # pairs are no whole vectors apart
    sources = [call.k, call.v, *([] if call.q is None else [call.q])]
    if call.q is not None and call.given.q_out is not None:
        sources.append(call.given.q_out)
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


def write_rope(op: ctypes.Structure, rope: Rope, device: torch.device) -> None:
    """Write what a Rope has on a device, where it stays."""
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


def write_call(op: ctypes.Structure, call: TokenCall) -> None:
    """Write all that is the same for tensors that lie alike."""
    given = call.given
    op.num_tokens = call.num_tokens
    op.num_qo_heads = 0 if call.q is None else call.q.shape[1]
    op.num_kv_heads = call.num_kv_heads
    op.num_k_pages = call.k_cache.tensor.shape[0]
    op.num_v_pages = call.v_cache.tensor.shape[0]
    op.max_kv_len = call.max_kv_len
    op.batch_size = _batch_size(given)
    op.zero_tail = given.zero_tail
    op.norm_eps = check_number("norm_eps", given.norm_eps)
    for name in _SCALES:
        getattr(op, name).value = 1.0  # where it is a tensor, or doesn't count
    for name in scales_of(call):
        getattr(op, name).stride = getattr(call, name).stride
    _write_strides(op, call)
    _write_vectors(op, given)
    for name in ("q_norm", "k_norm"):
        weights = getattr(given, name)
        if weights is not None:
            setattr(op, f"{name}_code", _FLOAT_CODES[weights.dtype])


def _batch_size(given: PreprocessCall) -> int:
    if given.seq_lens is not None:
        return given.seq_lens.shape[0]
    return 0 if given.qo_indptr is None else given.qo_indptr.shape[0] - 1


def _write_strides(op: ctypes.Structure, call: TokenCall) -> None:
    q_out = call.given.q_out
    rows = (("q_strides", call.q), ("k_strides", call.k), ("v_strides", call.v))
    for name, tensor in (*rows, ("out_strides", q_out)):
        if tensor is not None:
            getattr(op, name).token, getattr(op, name).head = row_strides(tensor)
    if q_out is None and call.q is not None:  # a new one
        _, num_heads, head_dim = call.q.shape
        op.out_strides.token, op.out_strides.head = num_heads * head_dim, head_dim
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


def _write_vectors(op: ctypes.Structure, given: PreprocessCall) -> None:
    vectors = (
        ("seq_lens", "seq_lens_stride", "seq_lens_are_int64"),
        ("slots", "slots_stride", "slots_are_int64"),
        ("positions", "position_stride", "positions_are_int64"),
        ("position_delta", "delta_stride", "deltas_are_int64"),
        ("qo_indptr", "qo_indptr_stride", ""),
    )
    for name, stride, is_wide in vectors:
        tensor = getattr(given, name)
        if tensor is None:
            continue
        setattr(op, stride, tensor.stride(-1))
        if is_wide:
            setattr(op, is_wide, tensor.dtype is torch.int64)
    if given.positions is not None and given.positions.dim() == 2:
        op.axis_stride = given.positions.stride(0)
