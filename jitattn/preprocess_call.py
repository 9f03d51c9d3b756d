"""The arguments of ``preprocess_qkv`` and ``append_kv``: what was given, and what it comes to.

Launches nothing and computes nothing. Everything that doesn't fit is refused here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import NamedTuple

import torch
from torch import Tensor

from jitattn.binding import CacheView, Scale, check_last_stride, check_writable, scale_value
from jitattn.config import HEAD_DIMS, MAX_KV_LEN, dtype_name
from jitattn.pages import (
    BlockTable,
    CsrPages,
    Pages,
    RaggedKV,
    TokenTable,
    check_device,
    check_indptr,
    check_supported,
    check_tensor,
    check_vector,
)
from jitattn.quantization import NVFP4_BLOCK, QUANTISED, QuantizedKV
from jitattn.rotary import Rope
from jitattn.spec import DType, Pairing

QkvParts = tuple[Tensor, Tensor, Tensor]
KVCache = Tensor | tuple[Tensor, Tensor] | QuantizedKV

_FLOATS = (torch.float16, torch.bfloat16)
_NORM_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_CACHES = {
    **{getattr(torch, name.value): name for name in (DType.FLOAT16, DType.BFLOAT16, DType.INT8)},
    **{getattr(torch, name.value): name for name in (DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2)},
}
_OF_BYTES = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
_OF_BYTES["int8"] = torch.int8
_MAX_PAGE_SIZE = 2**20
_INT32_MAX = 2**31 - 1
_SMALLEST_FLOAT = torch.finfo(torch.float32).tiny  # of full precision


class Arguments(NamedTuple):
    """What a caller gave, in any order that is the same for all calls.

    ``append_kv`` has ``qkv`` (k, v), and no ``num_qo_heads``.
    """

    qkv: Tensor | QkvParts | tuple[Tensor, Tensor]
    kv_cache: KVCache
    pages: Pages | None
    seq_lens: Tensor | None
    qo_indptr: Tensor | None
    slots: Tensor | None
    positions: Tensor | None
    position_delta: Tensor | None
    bias: Tensor | QkvParts | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    q_out: Tensor | None
    q_scale: float | Tensor | None
    k_scale: float | Tensor | None
    v_scale: float | Tensor | None
    rope: Rope | None
    norm_eps: float
    num_qo_heads: int | None
    num_kv_heads: int | None
    head_dim: int | None
    kv_layout: str
    kv_dtype: torch.dtype | str | None
    zero_tail: bool


@dataclass(slots=True)
class TokenCall:
    """A call that was checked, its tensors seen in one way whatever they were given as."""

    arguments: Arguments
    device: torch.device
    q: Tensor | None  # [num_tokens, num_qo_heads, head_dim]
    k: Tensor  # [num_tokens, num_kv_heads, head_dim]
    v: Tensor  # [num_tokens, num_kv_heads, head_dim_vo]
    biases: tuple[Tensor, Tensor, Tensor] | None  # of one dimension
    k_cache: CacheView  # [num_pages, page_size, num_kv_heads, head_dim]; of NVFP4 head_dim / 2
    v_cache: CacheView
    k_blocks: CacheView | None  # scales of NVFP4: [.., head_dim / 16]
    v_blocks: CacheView | None
    kv_dtype: DType
    q_scale: Scale
    k_scale: Scale
    v_scale: Scale

    @property
    def num_tokens(self) -> int:
        """Rows of q, k and v."""
        return self.k.shape[0]

    @property
    def num_kv_heads(self) -> int:
        """Heads of K and V."""
        return self.k.shape[1]

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.k_cache.tensor.shape[1]

    @property
    def out_dtype(self) -> torch.dtype:
        """Of q as it is returned."""
        q_out = self.arguments.q_out
        return self.k.dtype if q_out is None else q_out.dtype

    @property
    def pairing(self) -> Pairing:
        """What the rotary embedding turns together."""
        rope = self.arguments.rope
        if rope is None:
            return Pairing.NONE
        return Pairing.INTERLEAVED if rope.interleaved else Pairing.NEOX

    @property
    def max_kv_len(self) -> int:
        """The most tokens of a request that its pages hold."""
        pages = self.arguments.pages
        return MAX_KV_LEN if pages is None else pages.capacity(self.page_size)


def check(arguments: Arguments) -> TokenCall:
    """Return the call that ``arguments`` describe.

    Raises:
        TypeError, ValueError: naming the argument, what was given and what is wanted.
    """
    q, k, v = _parts(arguments)
    device = k.device
    check_supported(device)
    k_cache, v_cache, k_blocks, v_blocks, kv_dtype = _caches(arguments, k, v)
    for name, view in (("kv_cache", k_cache), ("kv_cache", v_cache)):
        check_device(name, view.tensor, device)
    call = TokenCall(
        arguments=arguments,
        device=device,
        q=q,
        k=k,
        v=v,
        biases=_biases(arguments.bias, q, k, v),
        k_cache=k_cache,
        v_cache=v_cache,
        k_blocks=k_blocks,
        v_blocks=v_blocks,
        kv_dtype=kv_dtype,
        q_scale=_query_scale(arguments, device),
        k_scale=_cache_scale("k_scale", arguments.k_scale, kv_dtype, k.shape[1], device),
        v_scale=_cache_scale("v_scale", arguments.v_scale, kv_dtype, k.shape[1], device),
    )
    _check_places(arguments, call)
    _check_rotation(arguments, call)
    _check_norms(arguments, call)
    _check_output(arguments, call)
    if device.type == "cpu":
        check_values(call)
    return call


# --- Q, K and V -----------------------------------------------------------------------------------


def _parts(arguments: Arguments) -> tuple[Tensor | None, Tensor, Tensor]:
    qkv = arguments.qkv
    if isinstance(qkv, Tensor):
        return _unpacked(arguments, qkv)
    if arguments.num_qo_heads is None:
        k, v = qkv  # type: ignore[misc]
        k, v = _check_heads((("k", k, None, None), ("v", v, None, None)))
        return None, k, v
    if not isinstance(qkv, (tuple, list)) or len(qkv) != 3:
        raise TypeError(f"qkv is a {type(qkv).__name__}: expected a tensor or (q, k, v)")
    counts = _head_counts(arguments)
    parts = [
        (name, part, count, counts[2])
        for name, part, count in zip("qkv", qkv, (counts[0], *[counts[1]] * 2), strict=True)
    ]
    q, k, v = _check_heads(parts)
    return q, k, v


def _head_counts(arguments: Arguments) -> tuple[int, int, int]:
    counts = {
        name: _count(name, getattr(arguments, name))
        for name in ("num_qo_heads", "num_kv_heads", "head_dim")
    }
    num_qo_heads, num_kv_heads, head_dim = counts.values()
    if num_qo_heads % num_kv_heads:
        raise ValueError(
            f"num_qo_heads is {num_qo_heads}: expected a multiple of num_kv_heads, {num_kv_heads}"
        )
    return num_qo_heads, num_kv_heads, head_dim


def _unpacked(arguments: Arguments, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    num_qo_heads, num_kv_heads, head_dim = _head_counts(arguments)
    check_tensor("qkv", qkv, _FLOATS)
    width = (num_qo_heads + 2 * num_kv_heads) * head_dim
    if qkv.dim() != 2 or qkv.shape[1] != width:
        raise ValueError(
            f"qkv has shape {list(qkv.shape)}: expected [num_tokens, (num_qo_heads + 2 * "
            f"num_kv_heads) * head_dim = {width}], or a tuple (q, k, v)"
        )
    check_last_stride("qkv", qkv)
    heads = qkv.view(qkv.shape[0], width // head_dim, head_dim)
    _check_head_dim("head_dim", head_dim)
    end = num_qo_heads + num_kv_heads
    return heads[:, :num_qo_heads], heads[:, num_qo_heads:end], heads[:, end:]


def _check_heads(parts: object) -> tuple[Tensor, ...]:
    """Return each of (name, tensor, heads, head_dim) as [num_tokens, heads, head_dim].

    Heads and head_dim that are None are any, but K and V have as many heads.
    """
    checked: list[Tensor] = []
    for name, part, num_heads, head_dim in parts:  # type: ignore[attr-defined]
        check_tensor(name, part, _FLOATS)
        if part.dim() == 2 and head_dim is not None and part.shape[1] == num_heads * head_dim:
            check_last_stride(name, part)
            part = part.view(part.shape[0], num_heads, head_dim)
        first = checked[0] if checked else part
        wanted_heads = num_heads or (checked[0].shape[1] if checked and num_heads is None else None)
        if (
            part.dim() != 3
            or (wanted_heads is not None and part.shape[1] != wanted_heads)
            or (head_dim is not None and part.shape[2] != head_dim)
            or part.shape[0] != first.shape[0]
        ):
            tokens = first.shape[0] if checked else "num_tokens"
            wanted = f"[{tokens}, {wanted_heads or 'num_kv_heads'}, {head_dim or 'head_dim'}]"
            raise ValueError(f"{name} has shape {list(part.shape)}: expected {wanted}")
        check_last_stride(name, part)
        _check_head_dim(name, part.shape[2])
        if part.dtype != first.dtype:
            raise TypeError(f"{name} has dtype {part.dtype}: expected {first.dtype}, as the others")
        check_device(name, part, first.device)
        checked.append(part)
    return tuple(checked)


def _check_head_dim(name: str, head_dim: int) -> None:
    if head_dim not in HEAD_DIMS:
        what = "head_dim is" if name == "head_dim" else f"{name} has a head_dim of"
        raise ValueError(f"{what} {head_dim}: expected a multiple of 16 up to 256, or 512")


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is a {type(value).__name__}: expected an int")
    if value < 1:
        raise ValueError(f"{name} is {value}: expected at least 1")
    return int(value)


def _biases(
    bias: Tensor | QkvParts | None, q: Tensor | None, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    if bias is None:
        return None
    assert q is not None
    widths = [part.shape[1] * part.shape[2] for part in (q, k, v)]
    if isinstance(bias, Tensor):
        _check_vector_of("bias", bias, sum(widths), (k.dtype,), k.device)
        end = widths[0] + widths[1]
        return bias[: widths[0]], bias[widths[0] : end], bias[end:]
    if not isinstance(bias, (tuple, list)) or len(bias) != 3:
        raise TypeError(f"bias is a {type(bias).__name__}: expected a tensor or one for q, k and v")
    for i, (part, width) in enumerate(zip(bias, widths, strict=True)):
        _check_vector_of(f"bias[{i}]", part, width, (k.dtype,), k.device)
    return bias[0], bias[1], bias[2]


def _check_vector_of(
    name: str, value: Tensor, size: int, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    check_tensor(name, value, dtypes)
    if tuple(value.shape) != (size,):
        raise ValueError(f"{name} has shape {list(value.shape)}: expected [{size}]")
    check_last_stride(name, value)
    check_device(name, value, device)


# --- the cache ------------------------------------------------------------------------------------

Caches = tuple[CacheView, CacheView, CacheView | None, CacheView | None, DType]


def _caches(arguments: Arguments, k: Tensor, v: Tensor) -> Caches:
    if arguments.kv_layout not in ("NHD", "HND"):
        raise ValueError(f"kv_layout is {arguments.kv_layout!r}: expected 'NHD' or 'HND'")
    kv_cache = arguments.kv_cache
    if isinstance(kv_cache, QuantizedKV):
        return _block_caches(arguments, kv_cache, k, v)
    if isinstance(kv_cache, Tensor):
        if kv_cache.dim() != 5 or kv_cache.shape[1] != 2:
            raise ValueError(
                f"kv_cache has shape {list(kv_cache.shape)}: expected "
                f"[num_pages, 2, {_page_dims(arguments)}, head_dim], or a pair (k_cache, v_cache)"
            )
        named = (("kv_cache", kv_cache[:, 0], k), ("kv_cache", kv_cache[:, 1], v))
    elif isinstance(kv_cache, (tuple, list)) and len(kv_cache) == 2:
        named = (("k_cache", kv_cache[0], k), ("v_cache", kv_cache[1], v))
    else:
        raise TypeError(
            f"kv_cache is a {type(kv_cache).__name__}: expected a tensor, (k_cache, v_cache) or a "
            "QuantizedKV"
        )
    dtypes = [_cache_dtype(name, cache, arguments.kv_dtype) for name, cache, _ in named]
    if dtypes[0] is not dtypes[1]:
        raise TypeError(f"v_cache has dtype {dtypes[1].value}: expected {dtypes[0].value}, as K")
    views = [
        _cache_view(name, cache.view(getattr(torch, dtypes[0].value)), part.shape[2], arguments, k)
        for name, cache, part in named
    ]
    _check_same_pages(arguments, *views)
    return views[0], views[1], None, None, dtypes[0]


def _page_dims(arguments: Arguments) -> str:
    return "page_size, num_kv_heads" if arguments.kv_layout == "NHD" else "num_kv_heads, page_size"


def _cache_dtype(name: str, cache: object, kv_dtype: torch.dtype | str | None) -> DType:
    check_tensor(name, cache, (*_CACHES, torch.uint8))
    assert isinstance(cache, Tensor)
    wanted = None if kv_dtype is None else dtype_name(kv_dtype)
    if cache.dtype is torch.uint8:
        if wanted == "nvfp4":
            raise ValueError(
                "kv_dtype is nvfp4: give a QuantizedKV, which has the scales of blocks"
            )
        if wanted not in _OF_BYTES:
            raise ValueError(
                f"{name} has dtype uint8, and kv_dtype is {wanted}: say what its bytes are with "
                f"kv_dtype, one of {', '.join(_OF_BYTES)}"
            )
        return DType(wanted)
    given = _CACHES[cache.dtype]
    if wanted not in (None, given.value):
        raise ValueError(f"kv_dtype is {wanted}: {name} has dtype {given.value}")
    return given


def _cache_view(
    name: str, cache: Tensor, row_elements: int, arguments: Arguments, k: Tensor
) -> CacheView:
    """Return a cache of rows of so many elements as [pages, tokens, heads, elements]."""
    if cache.dim() != 4:
        ragged = " (K and V without pages are written by copying)" if cache.dim() == 3 else ""
        raise ValueError(
            f"{name} has shape {list(cache.shape)}: expected [num_pages, "
            f"{_page_dims(arguments)}, head_dim]{ragged}"
        )
    view = cache if arguments.kv_layout == "NHD" else cache.transpose(1, 2)
    wanted = (k.shape[1], row_elements)
    if tuple(view.shape[2:]) != wanted:
        raise ValueError(
            f"{name} has shape {list(cache.shape)} with kv_layout={arguments.kv_layout}: rows of "
            f"num_kv_heads, elements = {list(view.shape[2:])}, expected {list(wanted)}"
        )
    if not 1 <= view.shape[1] <= _MAX_PAGE_SIZE:
        raise ValueError(f"{name} has pages of {view.shape[1]} tokens: expected 1 to 2**20")
    if view.shape[0] > _INT32_MAX:
        raise ValueError(f"{name} has {view.shape[0]} pages: expected fewer than 2**31")
    check_last_stride(name, view)
    check_writable(name, view)
    page, token, head = (
        stride if size > 1 else 0
        for stride, size in zip(view.stride()[:3], view.shape[:3], strict=True)
    )
    return CacheView(view, page, token, head)


def _check_same_pages(arguments: Arguments, k: CacheView, v: CacheView) -> None:
    if k.tensor.shape[1] != v.tensor.shape[1]:
        raise ValueError(
            f"v_cache has pages of {v.tensor.shape[1]} tokens: expected {k.tensor.shape[1]}, as K"
        )
    is_separate = isinstance(arguments.pages, BlockTable) and arguments.pages.layout == "separate"
    if not is_separate and k.tensor.shape[0] != v.tensor.shape[0]:
        raise ValueError(
            f"k_cache has {k.tensor.shape[0]} pages and v_cache {v.tensor.shape[0]}: one id stands "
            "for both"
        )
    where = k.tensor.data_ptr()
    if not is_separate and where and where == v.tensor.data_ptr():
        raise ValueError(
            "kv_cache has K and V in the same memory, and one id for both: V would overwrite K"
        )


def _block_caches(arguments: Arguments, cache: QuantizedKV, k: Tensor, v: Tensor) -> Caches:
    wanted = None if arguments.kv_dtype is None else dtype_name(arguments.kv_dtype)
    if wanted not in (None, "nvfp4"):
        raise ValueError(f"kv_dtype is {wanted}: kv_cache is a QuantizedKV of nvfp4")
    rope = arguments.rope
    if rope is not None and not rope.interleaved and rope.rotary_dim % 32:
        raise ValueError(
            f"rope has rotary_dim={rope.rotary_dim}: into an NVFP4 cache it is to be a multiple of "
            "32, so that blocks of 16 elements are turned as a whole"
        )
    views = [
        _cache_view(name, tensor, part.shape[2] // divisor, arguments, k)
        for name, tensor, part, divisor in (
            ("kv_cache.k", cache.k, k, 2),
            ("kv_cache.v", cache.v, v, 2),
            ("kv_cache.k_block_scales", cache.k_block_scales, k, NVFP4_BLOCK),
            ("kv_cache.v_block_scales", cache.v_block_scales, v, NVFP4_BLOCK),
        )
    ]
    _check_same_pages(arguments, views[0], views[1])
    return views[0], views[1], views[2], views[3], DType.NVFP4


# --- scales ---------------------------------------------------------------------------------------


def _cache_scale(
    name: str,
    scale: float | Tensor | None,
    kv_dtype: DType,
    num_kv_heads: int,
    device: torch.device,
) -> Scale:
    if kv_dtype.value not in QUANTISED:
        if scale is not None:
            raise ValueError(f"{name} is given, but a cache of {kv_dtype.value} is not quantised")
        return Scale(1.0)
    return _scale(name, scale, num_kv_heads, device)


def _query_scale(arguments: Arguments, device: torch.device) -> Scale:
    q_out = arguments.q_out
    if not isinstance(q_out, Tensor) or q_out.dtype not in _FP8:
        if arguments.q_scale is not None:
            raise ValueError("q_scale is given, but q_out is not of an FP8 type")
        return Scale(1.0)
    return _scale("q_scale", arguments.q_scale, 1, device)


def _scale(name: str, scale: float | Tensor | None, num_heads: int, device: torch.device) -> Scale:
    if scale is None:
        return Scale(1.0)
    if not isinstance(scale, Tensor):
        return Scale(divisor_value(name, scale))
    check_tensor(name, scale, (torch.float32,))
    if tuple(scale.shape) not in ((), (1,), (num_heads,)):
        heads = f" or [{num_heads}], one for each KV head" if name != "q_scale" else ""
        raise ValueError(f"{name} has shape {list(scale.shape)}: expected [], [1]{heads}")
    check_device(name, scale, device)
    return Scale(1.0, scale, scale.stride(0) if scale.numel() > 1 else 0)


def divisor_value(name: str, scale: object) -> float:
    """Return a scale that is a number and that values are divided by.

    Raises:
        TypeError: it is none.
        ValueError: it is 0, or no finite float32 of full precision.
    """
    value = scale_value(name, scale)
    if abs(value) < _SMALLEST_FLOAT:
        raise ValueError(
            f"{name} is {value}: values are divided by it, expected a magnitude of at "
            f"least {_SMALLEST_FLOAT:.3g}"
        )
    return value


# --- where tokens go ------------------------------------------------------------------------------


def _check_places(arguments: Arguments, call: TokenCall) -> None:
    pages, slots, device = arguments.pages, arguments.slots, call.device
    if (pages is None) == (slots is None):
        given = "neither is" if pages is None else "both are"
        raise ValueError(f"pages or slots: {given} given, expected one of them")
    if isinstance(pages, RaggedKV):
        raise ValueError("pages is a RaggedKV: K and V without pages are written by copying")
    if pages is not None and not isinstance(pages, BlockTable | TokenTable | CsrPages):
        raise TypeError(
            f"pages is a {type(pages).__name__}: expected a BlockTable, TokenTable or CsrPages"
        )
    if pages is not None:
        check_device("pages", pages, device)
        if arguments.seq_lens is None:
            raise ValueError("seq_lens is None: pages need the lengths of requests")
    if slots is not None:
        check_vector("slots", slots, device=device)
        if slots.shape[0] != call.num_tokens:
            raise ValueError(f"slots has {slots.shape[0]} entries: expected {call.num_tokens}")
    if not isinstance(arguments.zero_tail, bool):
        raise TypeError(f"zero_tail is a {type(arguments.zero_tail).__name__}: expected a bool")
    if arguments.zero_tail and not isinstance(pages, BlockTable | CsrPages):
        raise ValueError("zero_tail is True: it needs pages, a BlockTable or CsrPages")
    _check_lengths(arguments, call, None if pages is None else pages.batch_size)


def _check_lengths(arguments: Arguments, call: TokenCall, batch_size: int | None) -> None:
    seq_lens, qo_indptr = arguments.seq_lens, arguments.qo_indptr
    if qo_indptr is not None:
        check_indptr("qo_indptr", qo_indptr)
        check_device("qo_indptr", qo_indptr, call.device)
        batch_size = qo_indptr.shape[0] - 1 if batch_size is None else batch_size
        if qo_indptr.shape[0] != batch_size + 1:
            raise ValueError(
                f"qo_indptr has {qo_indptr.shape[0]} entries: expected {batch_size + 1}"
            )
    if seq_lens is None:
        return
    check_vector("seq_lens", seq_lens, device=call.device)
    batch_size = seq_lens.shape[0] if batch_size is None else batch_size
    if seq_lens.shape[0] != batch_size:
        raise ValueError(f"seq_lens has {seq_lens.shape[0]} entries: expected {batch_size}")
    if qo_indptr is None and batch_size != call.num_tokens:
        raise ValueError(
            f"seq_lens has {batch_size} requests and qkv {call.num_tokens} tokens: without "
            "qo_indptr a request has one token"
        )


# --- rotation, norms and output -------------------------------------------------------------------


def _check_rotation(arguments: Arguments, call: TokenCall) -> None:
    rope, positions = arguments.rope, arguments.positions
    if rope is None:
        for name in ("positions", "position_delta"):
            if getattr(arguments, name) is not None:
                raise ValueError(f"{name} is given, but rope is None: nothing depends on positions")
        return
    if not isinstance(rope, Rope):
        raise TypeError(f"rope is a {type(rope).__name__}: expected a jitattn.Rope")
    if rope.head_dim != call.k.shape[2]:
        raise ValueError(f"rope has head_dim={rope.head_dim}: expected {call.k.shape[2]}")
    if positions is not None:
        _check_positions(positions, rope, call)
    elif arguments.seq_lens is None:
        raise ValueError("positions is None: rope needs them where there are no seq_lens")
    if arguments.position_delta is not None:
        _check_delta(arguments.position_delta, arguments)


def _check_delta(delta: Tensor, arguments: Arguments) -> None:
    seq_lens = arguments.seq_lens
    if arguments.positions is not None or seq_lens is None:
        raise ValueError("position_delta is given, and so are positions: add it to them")
    check_vector("position_delta", delta, device=seq_lens.device)
    if delta.shape != seq_lens.shape:
        raise ValueError(
            f"position_delta has {delta.shape[0]} entries: expected {seq_lens.shape[0]}, one for "
            "each request"
        )


def _check_positions(positions: Tensor, rope: Rope, call: TokenCall) -> None:
    check_tensor("positions", positions, (torch.int32, torch.int64))
    check_device("positions", positions, call.device)
    wanted = [(call.num_tokens,)] + [(3, call.num_tokens)] * bool(rope.axes)
    if tuple(positions.shape) not in wanted:
        raise ValueError(
            f"positions has shape {list(positions.shape)}: expected "
            f"{' or '.join(str(list(shape)) for shape in wanted)}"
            + ("" if rope.axes else " (three rows are for a Rope with mrope_section)")
        )


def _check_norms(arguments: Arguments, call: TokenCall) -> None:
    for name in ("q_norm", "k_norm"):
        weights = getattr(arguments, name)
        if weights is not None:
            _check_vector_of(name, weights, call.k.shape[2], _NORM_FLOATS, call.device)
    eps = arguments.norm_eps
    if isinstance(eps, bool) or not isinstance(eps, Real):
        raise TypeError(f"norm_eps is a {type(eps).__name__}: expected a number")
    if not 0 <= float(eps) < math.inf:
        raise ValueError(f"norm_eps is {eps}: expected a finite number, 0 or more")


def _check_output(arguments: Arguments, call: TokenCall) -> None:
    q_out, q = arguments.q_out, call.q
    if q_out is None or q is None:
        return
    check_tensor("q_out", q_out, (q.dtype, *_FP8))
    if q_out.shape != q.shape:
        raise ValueError(f"q_out has shape {list(q_out.shape)}: expected {list(q.shape)}")
    check_device("q_out", q_out, call.device)
    check_last_stride("q_out", q_out)
    check_writable("q_out", q_out)
    is_in_place = (
        q_out.data_ptr() == q.data_ptr() and q_out.stride() == q.stride() and q_out.dtype is q.dtype
    )
    if not is_in_place:
        for name, part in (("q", q), ("k", call.k), ("v", call.v)):
            if _overlap(q_out, part):
                raise ValueError(
                    f"q_out shares memory with {name}: give the view that q is, or another tensor"
                )


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the memory of two tensors of tokens overlaps; strides other than b's: their span."""
    if a.numel() == 0 or b.numel() == 0:
        return False
    begins = [tensor.data_ptr() for tensor in (a, b)]
    spans = [_span(tensor) for tensor in (a, b)]
    if begins[0] >= begins[1] + spans[1] or begins[1] >= begins[0] + spans[0]:
        return False
    strides = [tensor.stride(0) * tensor.element_size() for tensor in (a, b)]
    rows = [_span(tensor[0]) for tensor in (a, b)]
    if strides[0] != strides[1] or max(rows) > strides[0]:
        return True
    # Columns of one matrix: apart if neither begins inside the other, once around.
    ahead = (begins[0] - begins[1]) % strides[0]
    return ahead < rows[1] or strides[0] - ahead < rows[0]


def _span(tensor: Tensor) -> int:
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


# --- values, where they can be looked at ----------------------------------------------------------


def check_values(call: TokenCall) -> None:
    """Raise ValueError for what a kernel would skip; everything that is looked at is on the CPU."""
    arguments = call.arguments
    _check_length_values(call)
    tokens = _tokens_that_count(call)
    if arguments.slots is not None:
        num_slots = call.k_cache.tensor.shape[0] * call.page_size
        slots = arguments.slots.tolist()
        for i in tokens:
            if slots[i] >= num_slots:
                raise ValueError(f"slots[{i}] is {slots[i]}: the cache ends at {num_slots}")
    rope = arguments.rope
    if rope is not None and rope.max_position is not None and tokens:
        highest = _highest_position(arguments, tokens)
        if highest >= rope.max_position:
            raise ValueError(
                f"positions reach {highest}: rope has max_position={rope.max_position}"
            )


def _tokens_that_count(call: TokenCall) -> list[int]:
    """The rows of qkv that belong to a request; nothing of others is read."""
    arguments, num_tokens = call.arguments, call.num_tokens
    ends = None if arguments.qo_indptr is None else arguments.qo_indptr.tolist()
    if arguments.seq_lens is None:
        return list(range(num_tokens if ends is None else ends[-1]))
    starts = range(num_tokens + 1) if ends is None else ends
    lengths = enumerate(arguments.seq_lens.tolist())
    return [i for b, n in lengths if n > 0 for i in range(starts[b], starts[b + 1])]


def _highest_position(arguments: Arguments, tokens: list[int]) -> int:
    if arguments.positions is not None:
        return int(arguments.positions[..., tokens].max())
    assert arguments.seq_lens is not None
    positions = arguments.seq_lens.long() - 1
    if arguments.position_delta is not None:
        positions = positions + arguments.position_delta.long()
    return int(positions[arguments.seq_lens > 0].max())


def _check_length_values(call: TokenCall) -> None:
    arguments, pages = call.arguments, call.arguments.pages
    ends = None if arguments.qo_indptr is None else arguments.qo_indptr.tolist()
    if ends is not None and ends[-1] > call.num_tokens:
        raise ValueError(f"qo_indptr[-1] is {ends[-1]}: there are {call.num_tokens} tokens")
    lengths = [] if arguments.seq_lens is None else arguments.seq_lens.tolist()
    for b, length in enumerate(lengths):
        q_len = 1 if ends is None else ends[b + 1] - ends[b]
        limit = call.max_kv_len
        if isinstance(pages, CsrPages):
            limit = int(pages.kv_indptr[b + 1] - pages.kv_indptr[b]) * call.page_size
        if length > limit:
            raise ValueError(f"seq_lens[{b}] is {length}: its pages hold {limit} tokens")
        if length > 0 and isinstance(pages, BlockTable | TokenTable):
            _check_row(pages, b)
        if 0 < length < q_len:
            raise ValueError(f"seq_lens[{b}] is {length}: the request has {q_len} new tokens")


def _check_row(pages: BlockTable | TokenTable, request: int) -> None:
    if pages.rows is None:
        return
    row = int(pages.rows[request])
    num_rows = (pages.table if isinstance(pages, BlockTable) else pages.slots).shape[0]
    if not 0 <= row < num_rows:
        raise ValueError(f"rows[{request}] is {row}: the table has {num_rows} rows")
