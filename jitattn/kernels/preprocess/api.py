"""Tokens on their way in: ``preprocess_qkv`` and ``append_kv``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from jitattn.kernels.preprocess.check import Arguments, QkvParts
from jitattn.kernels.preprocess.dispatch import dispatch
from jitattn.tensors.cache_views import view_of
from jitattn.tensors.page_table import PageTable
from jitattn.tensors.page_tables import check_view
from jitattn.tensors.quantization import KVCache
from jitattn.tensors.rope import Rope

Scale = float | Tensor


def preprocess_qkv(
    qkv: Tensor | QkvParts,
    kv_cache: KVCache,
    *,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    pages: PageTable | None = None,
    seq_lens: Tensor | None = None,
    qo_indptr: Tensor | None = None,
    slots: Tensor | None = None,
    rope: Rope | None = None,
    positions: Tensor | None = None,
    position_delta: Tensor | None = None,
    bias: Tensor | QkvParts | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 1e-6,
    q_out: Tensor | None = None,
    q_scale: Scale | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    kv_layout: str = "NHD",
    kv_dtype: torch.dtype | str | None = None,
    zero_tail: bool = False,
) -> Tensor:
    """Write K and V of new tokens into the cache and return their q, in one launch.

    Token i of a request has the position seq_len - q_len + i and is written there. What a row goes
    through, what is skipped and what is undefined: docs/preprocessing.md.

    Args:
        qkv: [num_tokens, (num_qo_heads + 2 * num_kv_heads) * head_dim], float16 or bfloat16, any
            token stride; or (q, k, v), each [num_tokens, heads, head_dim], where v may have a
            head_dim of its own, as a latent has (docs/concepts.md).
        kv_cache: [num_pages, 2, page_size, num_kv_heads, head_dim] (NHD), a pair of 4-D tensors, or
            a ``QuantizedKV``, any strides but the last; 16 bits, FP8, int8, or uint8 bytes.
        num_qo_heads: heads of q.
        num_kv_heads: heads of K and V.
        head_dim: elements of a head.
        pages: a table of any layout but ragged; or else ``slots``.
        seq_lens: int32 or int64 [batch_size], this step's tokens included; ``pages`` need it.
        qo_indptr: int32 [batch_size + 1]; None: a token a request, or ``slots`` alone.
        slots: int32 or int64 [num_tokens], page * page_size + place; -1: only q is computed.
        rope: turns q and K.
        positions: int32 or int64 [num_tokens], or [3, num_tokens] for a ``Rope`` with sections.
        position_delta: int32 or int64 [batch_size], added to positions that are not given.
        bias: [(num_qo_heads + 2 * num_kv_heads) * head_dim] or one for each of (q, k, v).
        q_norm: [head_dim], float16, bfloat16 or float32: weights of an RMS norm.
        k_norm: likewise of K.
        norm_eps: is added to the mean square.
        q_out: [num_tokens, num_qo_heads, head_dim], like ``qkv`` or FP8; may be q's view of it.
        q_scale: of an FP8 ``q_out``: a number, or float32 [] or [1].
        k_scale: of a quantised cache: a number, or float32 [], [1] or [num_kv_heads].
        v_scale: likewise of V.
        kv_layout: "NHD" or "HND", the order in which the cache's dimensions are named.
        kv_dtype: what the bytes of a uint8 cache are: "float8_e4m3fn", "float8_e5m2" or "int8".
        zero_tail: write zeros after the last token of each request, to the end of its page.

    Returns:
        ``q_out``, allocated when None.

    Raises:
        TypeError, ValueError: naming the argument, before any launch.

    Defined by: jitattn/kernels/preprocess/reference.py::preprocess,
    jitattn/tensors/quantization.py.
    """
    # fmt: off
    given = (
        qkv, kv_cache, pages, seq_lens, qo_indptr, slots, positions, position_delta, bias,
        q_norm, k_norm, q_out, q_scale, k_scale, v_scale, rope, norm_eps,
        num_qo_heads, num_kv_heads, head_dim, kv_layout, kv_dtype, zero_tail,
    )
    # fmt: on
    q = _preprocess(given, qkv if isinstance(qkv, Tensor) else _first(qkv), pages)
    assert q is not None
    return q


def _first(parts: object) -> object:
    return parts[0] if isinstance(parts, (tuple, list)) and parts else None


def append_kv(
    k: Tensor,
    v: Tensor,
    kv_cache: KVCache,
    *,
    pages: PageTable | None = None,
    seq_lens: Tensor | None = None,
    qo_indptr: Tensor | None = None,
    slots: Tensor | None = None,
    kv_layout: str = "NHD",
    kv_dtype: torch.dtype | str | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    zero_tail: bool = False,
) -> None:
    """Write K and V of new tokens into the cache, in one launch.

    Where tokens go, what is not written and what is stored: docs/preprocessing.md.

    Args:
        k: [num_tokens, num_kv_heads, head_dim], float16 or bfloat16, any strides but the last,
            which is 1.
        v: [num_tokens, num_kv_heads, head_dim_vo], likewise; head_dim_vo may differ (the latent and
            the rope part of a token of multi-head latent attention are such a pair).
        kv_cache: see ``preprocess_qkv``.
        pages: see ``preprocess_qkv``, as for the arguments after it.
        seq_lens: int32 or int64 [batch_size], this step's tokens included.
        qo_indptr: int32 [batch_size + 1].
        slots: int32 or int64 [num_tokens].
        kv_layout: "NHD" or "HND".
        kv_dtype: what the bytes of a uint8 cache are.
        k_scale: of a quantised cache.
        v_scale: likewise of V.
        zero_tail: write zeros after the last token of each request, to the end of its page.

    Raises:
        TypeError, ValueError: naming the argument, before any launch.

    Defined by: jitattn/kernels/preprocess/reference.py::preprocess,
    jitattn/tensors/quantization.py.
    """
    # fmt: off
    given = (
        (k, v), kv_cache, pages, seq_lens, qo_indptr, slots, None, None, None,
        None, None, None, None, k_scale, v_scale, None, 0.0,
        None, None, None, kv_layout, kv_dtype, zero_tail,
    )
    # fmt: on
    _preprocess(given, k, pages)


def _preprocess(given: tuple[Any, ...], first: object, pages: PageTable | None) -> Tensor | None:
    """Take ``given``, in the order of ``Arguments``, to the device of ``first``."""
    if is_dynamo_compiling():
        from jitattn.kernels.preprocess.torch_op import trace_preprocess

        return trace_preprocess(Arguments(*given))
    if getattr(pages, "view", None) is not None:
        check_view(pages, view_of(Arguments(*given).kv_cache))
    return dispatch(given, first)
