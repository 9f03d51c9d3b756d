"""The arguments of ``preprocess_qkv`` and ``append_kv``: what was given, and what it comes to.

Launches nothing and computes nothing. Everything that doesn't fit is refused here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from jitattn.base.validate import check_count, check_flag, check_name, check_number
from jitattn.kernels.preprocess.check_cache import WrittenCache, as_divisor
from jitattn.spec.config import HEAD_DIMS, MAX_KV_LEN
from jitattn.spec.dtype import DType
from jitattn.spec.hadamard import hadamard_of, no_hadamard
from jitattn.spec.layout import Layout, Pairing
from jitattn.tensors.cache_views import CacheView, view_of
from jitattn.tensors.overlap import refuse_shared_bytes
from jitattn.tensors.page_table_base import PageTable
from jitattn.tensors.page_tables import (
    check_view,
    is_page_table,
    table_names,
)
from jitattn.tensors.quantization import KVCache
from jitattn.tensors.rope import Rope
from jitattn.tensors.scales import Scale, ScaleLike, check_scale
from jitattn.tensors.tensor_checks import (
    check_device,
    check_indptr,
    check_last_stride,
    check_supported,
    check_tensor,
    check_vector,
    check_writable,
)

QkvParts = tuple[Tensor, Tensor, Tensor]

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

_FLOATS = (torch.float16, torch.bfloat16)
_NORM_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class PreprocessCall(NamedTuple):
    """A call as it was given; ``append_kv`` has ``qkv`` (k, v), and none of the last fields."""

    qkv: Tensor | QkvParts | tuple[Tensor, Tensor]
    kv_cache: KVCache
    pages: PageTable | None
    seq_lens: Tensor | None
    qo_indptr: Tensor | None
    slots: Tensor | None
    kv_layout: str
    kv_dtype: torch.dtype | str | None
    k_scale: ScaleLike | None
    v_scale: ScaleLike | None
    zero_tail: bool
    num_qo_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    rope: Rope | None = None
    positions: Tensor | None = None
    position_delta: Tensor | None = None
    bias: Tensor | QkvParts | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    norm_eps: float = 0.0
    q_out: Tensor | None = None
    q_scale: ScaleLike | None = None
    qk_transform: str | None = None
    v_transform: str | None = None


@dataclass(frozen=True, slots=True)
class TokenCall:
    """A call that was checked, its tensors seen in one way whatever they were given as."""

    given: PreprocessCall
    device: torch.device
    q: Tensor | None  # [num_tokens, num_qo_heads, head_dim]
    k: Tensor  # [num_tokens, num_kv_heads, head_dim]
    v: Tensor  # [num_tokens, num_kv_heads, head_dim_vo]
    biases: tuple[Tensor, Tensor, Tensor] | None  # of one dimension
    k_cache: CacheView  # [num_pages, page_size, num_kv_heads, head_dim]; of 4 bits head_dim / 2
    v_cache: CacheView
    k_blocks: CacheView | None  # bytes of scales: [.., bytes of a row]
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
        q_out = self.given.q_out
        return self.k.dtype if q_out is None else q_out.dtype

    @property
    def pairing(self) -> Pairing:
        """What the rotary embedding turns together."""
        rope = self.given.rope
        if rope is None:
            return Pairing.NONE
        return Pairing.INTERLEAVED if rope.interleaved else Pairing.NEOX

    @property
    def max_kv_len(self) -> int:
        """The most tokens of a request that its pages hold."""
        pages = self.given.pages
        return MAX_KV_LEN if pages is None else pages.capacity(self.page_size)


def check(given: PreprocessCall) -> TokenCall:
    """Return a call with its tensors in one form.

    Raises:
        TypeError, ValueError: naming the argument, what was given and what is wanted.
    """
    check_view(given.pages, view_of(given.kv_cache))
    q, k, v = _parts(given)
    device = k.device
    check_supported(device)
    cache = WrittenCache.of(
        given.kv_cache,
        k,
        v,
        kv_layout=given.kv_layout,
        kv_dtype=given.kv_dtype,
        is_separate=_is_separate(given.pages),
    )
    check_device("kv_cache", cache.k.tensor, device)
    check_device("kv_cache", cache.v.tensor, device)
    call = TokenCall(
        given=given,
        device=device,
        q=q,
        k=k,
        v=v,
        biases=_biases(given.bias, q, k, v),
        k_cache=cache.k,
        v_cache=cache.v,
        k_blocks=cache.k_blocks,
        v_blocks=cache.v_blocks,
        kv_dtype=cache.kv_dtype,
        q_scale=_query_scale(given, device),
        k_scale=cache.scale("k_scale", given.k_scale, device),
        v_scale=cache.scale("v_scale", given.v_scale, device),
    )
    _check_places(given, call)
    _check_rotation(given, call)
    _check_norms(given, call)
    _check_transforms(given, call)
    _check_output(given, call)
    _check_memory(given, call, cache)
    return call


# --- Q, K and V -----------------------------------------------------------------------------------


def _parts(given: PreprocessCall) -> tuple[Tensor | None, Tensor, Tensor]:
    qkv = given.qkv
    if isinstance(qkv, Tensor):
        return _unpacked(given, qkv)
    if given.num_qo_heads is None:
        if not isinstance(qkv, (tuple, list)) or len(qkv) != 2:
            raise TypeError("num_qo_heads is None: expected an int, since qkv has queries")
        k, v = qkv
        k, v = _check_heads((("k", k, None, None), ("v", v, None, None)))
        return None, k, v
    if not isinstance(qkv, (tuple, list)) or len(qkv) != 3:
        raise TypeError(f"qkv is a {type(qkv).__name__}: expected a tensor or (q, k, v)")
    num_qo_heads, num_kv_heads, head_dim = _head_counts(given)
    counts = (num_qo_heads, head_dim), (num_kv_heads, head_dim), (num_kv_heads, None)
    parts = [(name, part, *count) for name, part, count in zip("qkv", qkv, counts, strict=True)]
    q, k, v = _check_heads(parts)
    return q, k, v


def _head_counts(given: PreprocessCall) -> tuple[int, int, int]:
    counts = {
        name: check_count(name, getattr(given, name))
        for name in ("num_qo_heads", "num_kv_heads", "head_dim")
    }
    num_qo_heads, num_kv_heads, head_dim = counts.values()
    if num_qo_heads % num_kv_heads:
        raise ValueError(
            f"num_qo_heads is {num_qo_heads}: expected a multiple of num_kv_heads, {num_kv_heads}"
        )
    return num_qo_heads, num_kv_heads, head_dim


def _check_values(name: str, values: object) -> None:
    """Raise unless ``values`` are of 16 bits: what a float32 becomes is its maker's to say."""
    if isinstance(values, Tensor) and values.dtype is torch.float32:
        raise TypeError(
            f"{name} has dtype float32: expected float16 or bfloat16, which kernels read; round it "
            f"first, with {name}.to()"
        )
    check_tensor(name, values, _FLOATS)


def _unpacked(given: PreprocessCall, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    num_qo_heads, num_kv_heads, head_dim = _head_counts(given)
    _check_values("qkv", qkv)
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
        _check_values(name, part)
        if part.dim() == 2 and num_heads and _is_row(part.shape[1], num_heads, head_dim):
            check_last_stride(name, part)
            part = part.view(part.shape[0], num_heads, part.shape[1] // num_heads)
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


def _is_row(width: int, num_heads: int, head_dim: int | None) -> bool:
    """Return whether so many elements are all heads of a token."""
    return width % num_heads == 0 if head_dim is None else width == num_heads * head_dim


def _check_head_dim(name: str, head_dim: int) -> None:
    if head_dim not in HEAD_DIMS:
        what = "head_dim is" if name == "head_dim" else f"{name} has a head_dim of"
        raise ValueError(f"{what} {head_dim}: expected a multiple of 16 up to 256, or 512")


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


# --- where tokens go ------------------------------------------------------------------------------


def _check_places(given: PreprocessCall, call: TokenCall) -> None:
    pages, slots, device = given.pages, given.slots, call.device
    if (pages is None) == (slots is None):
        count = "neither is" if pages is None else "both are"
        raise ValueError(f"pages or slots: {count} given, expected one of them")
    if pages is not None and not is_page_table(pages):
        raise TypeError(
            f"pages is a {type(pages).__name__}: expected a {table_names(without=[Layout.RAGGED])}"
        )
    if pages is not None and not pages.layout.has_pages:
        raise ValueError("pages is a RaggedKV: K and V without pages are written by copying")
    if pages is not None:
        check_device("pages", pages, device)
        if given.seq_lens is None:
            raise ValueError("seq_lens is None: pages need the lengths of requests")
    if slots is not None:
        check_vector("slots", slots, device=device)
        if slots.shape[0] != call.num_tokens:
            raise ValueError(f"slots has {slots.shape[0]} entries: expected {call.num_tokens}")
    lists_pages = pages is not None and pages.layout.lists_pages
    if check_flag("zero_tail", given.zero_tail) and not lists_pages:
        names = table_names(without=[Layout.RAGGED, Layout.TOKEN])
        raise ValueError(f"zero_tail is True: it needs pages, a {names}")
    _check_lengths(given, call, None if pages is None else pages.batch_size)


def _check_lengths(given: PreprocessCall, call: TokenCall, batch_size: int | None) -> None:
    seq_lens, qo_indptr = given.seq_lens, given.qo_indptr
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


# --- rotation, norms, transforms and output -------------------------------------------------------


def _check_rotation(given: PreprocessCall, call: TokenCall) -> None:
    rope, positions = given.rope, given.positions
    if rope is None:
        for name in ("positions", "position_delta"):
            if getattr(given, name) is not None:
                raise ValueError(f"{name} is given, but rope is None: nothing depends on positions")
        return
    if not isinstance(rope, Rope):
        raise TypeError(f"rope is a {type(rope).__name__}: expected a jitattn.Rope")
    if rope.head_dim != call.k.shape[2]:
        raise ValueError(f"rope has head_dim={rope.head_dim}: expected {call.k.shape[2]}")
    _check_pairs(rope, call)
    if positions is not None:
        _check_positions(positions, rope, call)
    elif given.seq_lens is None:
        raise ValueError("positions is None: rope needs them where there are no seq_lens")
    if given.position_delta is not None:
        _check_delta(given.position_delta, given)


def _check_pairs(rope: Rope, call: TokenCall) -> None:
    """Refuse pairs that are no whole vectors of a block apart; transformed rows have others."""
    blocks = call.kv_dtype.blocks
    if blocks is None or rope.interleaved or call.given.qk_transform is not None:
        return
    if rope.rotary_dim % blocks.neox_multiple:
        raise ValueError(
            f"rope has rotary_dim={rope.rotary_dim}: into a cache of {call.kv_dtype.value} NeoX "
            f"pairs turn a multiple of {blocks.neox_multiple}, so that blocks have whole vectors"
        )


def _check_delta(delta: Tensor, given: PreprocessCall) -> None:
    seq_lens = given.seq_lens
    if given.positions is not None or seq_lens is None:
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


def _check_norms(given: PreprocessCall, call: TokenCall) -> None:
    for name in ("q_norm", "k_norm"):
        weights = getattr(given, name)
        if weights is not None:
            _check_vector_of(name, weights, call.k.shape[2], _NORM_FLOATS, call.device)
    check_number("norm_eps", given.norm_eps, least=0.0)


def _check_transforms(given: PreprocessCall, call: TokenCall) -> None:
    for name, heads in (("qk_transform", call.k), ("v_transform", call.v)):
        if getattr(given, name) is None:
            continue
        check_name(name, getattr(given, name), ("hadamard",))
        if hadamard_of(heads.shape[2]) is None:
            raise ValueError(f"{name} is 'hadamard', but {no_hadamard(heads.shape[2])}")


def _check_output(given: PreprocessCall, call: TokenCall) -> None:
    q_out, q = given.q_out, call.q
    if q_out is None or q is None:
        return
    check_tensor("q_out", q_out, (q.dtype, *FP8))
    if q_out.shape != q.shape:
        raise ValueError(f"q_out has shape {list(q_out.shape)}: expected {list(q.shape)}")
    check_device("q_out", q_out, call.device)
    check_last_stride("q_out", q_out)
    check_writable("q_out", q_out)


def _query_scale(given: PreprocessCall, device: torch.device) -> Scale:
    q_out = given.q_out
    if not isinstance(q_out, Tensor) or q_out.dtype not in FP8:
        if given.q_scale is not None:
            raise ValueError("q_scale is given, but q_out is not of an FP8 type")
        return Scale(1.0)
    return as_divisor("q_scale", check_scale("q_scale", given.q_scale, device))


# --- memory ---------------------------------------------------------------------------------------


def memory_pairs(names: Sequence[str], pages: PageTable | None) -> list[tuple[int, int]]:
    """Return which of the tensors of a call, by their names, are to be apart.

    One of each pair is written. Tables and the like are not among them: who could want that.
    """
    caches = [i for i, name in enumerate(names) if name.startswith("kv_cache")]
    inputs = [i for i, name in enumerate(names) if name.startswith("qkv")]
    outputs = [i for i, name in enumerate(names) if name == "q_out"]
    pairs = [*itertools.product(outputs, caches), *itertools.product([*outputs, *caches], inputs)]
    # With ids of its own V may be where K is.
    twins = {(0, 1), (2, 3)} if _is_separate(pages) else set()
    numbers = itertools.combinations(range(len(caches)), 2)
    return pairs + [(caches[i], caches[j]) for i, j in numbers if (i, j) not in twins]


def _is_separate(pages: PageTable | None) -> bool:
    return getattr(pages, "layout", None) == Layout.SEPARATE


def _check_memory(given: PreprocessCall, call: TokenCall, cache: WrittenCache) -> None:
    """Refuse that anything is written where something else is written or read.

    Rows are written while others are read, but for a row of q that is written in its own place.
    """
    packed = "qkv's " if isinstance(given.qkv, Tensor) else ""
    q, q_out, written = call.q, given.q_out, cache.named
    inputs = [(f"{packed}k", call.k), (f"{packed}v", call.v)]
    if q is not None:
        inputs.insert(0, (f"{packed}q", q))
    if q is not None and q_out is not None:
        is_in_place = (
            q_out.data_ptr() == q.data_ptr()
            and q_out.stride() == q.stride()
            and q_out.dtype is q.dtype
        )
        refuse_shared_bytes([("q_out", q_out)], [*inputs[is_in_place:], *written])
    for i, one in enumerate(written):
        # With ids of its own V may be where K is.
        is_free = _is_separate(given.pages) and i % 2 == 0
        refuse_shared_bytes([one], [*written[i + 1 + is_free :], *inputs])
