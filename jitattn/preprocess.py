"""Tokens on their way in: ``preprocess_qkv`` and ``append_kv``."""

from __future__ import annotations

import torch
from torch import Tensor

from jitattn.pages import Pages
from jitattn.preprocess_call import Arguments, KVCache, QkvParts, check
from jitattn.preprocess_reference import preprocess as preprocess_by_definition
from jitattn.rotary import Rope

Scale = float | Tensor


def preprocess_qkv(
    qkv: Tensor | QkvParts,
    kv_cache: KVCache,
    *,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    pages: Pages | None = None,
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

    A row gets its bias, is scaled to a mean square of 1 and by its norm's weights (q and K), is
    turned by its position (q and K), and is rounded to the type of ``qkv``. K and V are stored as
    that, or quantised: what is stored is the same as if each step had been a call.

    Token i of a request has the position seq_len - q_len + i and is written there. Nothing is done
    to rows from qo_indptr[-1] on and to requests without a positive length. K and V are not written
    where a slot or page id is negative or beyond the cache, nor of a request longer than its table
    (on the CPU: ValueError). If two tokens have one slot, it holds a mixture of both.

    Args:
        qkv: [num_tokens, (num_qo_heads + 2 * num_kv_heads) * head_dim], float16 or bfloat16, q
            before K before V, any token stride; or (q, k, v), each [num_tokens, heads, head_dim]
            with any strides but the last, which is 1.
        kv_cache: [num_pages, 2, page_size, num_kv_heads, head_dim] (NHD), or (k_cache, v_cache) of
            four dimensions, or a ``QuantizedKV``; any strides but the last. float16, bfloat16,
            float8_e4m3fn, float8_e5m2, int8, or uint8 with ``kv_dtype``.
        num_qo_heads: heads of q.
        num_kv_heads: heads of K and V.
        head_dim: elements of a head: a multiple of 16 up to 256, or 512.
        pages: ``BlockTable``, ``TokenTable`` or ``CsrPages``; or else ``slots``.
        seq_lens: int32 or int64 [batch_size], this step's tokens included. Needed with ``pages``.
        qo_indptr: int32 [batch_size + 1], where the tokens of each request begin; None: a token a
            request, or all tokens where there are only ``slots``.
        slots: int32 or int64 [num_tokens], page * page_size + place in the page; -1: K and V of
            this token are not written. q is.
        rope: turns q and K.
        positions: int32 or int64 [num_tokens], where a token's position is not the one it is
            written at (trees of draft tokens); [3, num_tokens] for a ``Rope`` with sections.
        position_delta: int32 or int64 [batch_size], added to the positions that follow from
            ``seq_lens``: a model with sections decodes text at its position plus such a number
            (``mrope_position_deltas`` in transformers), on all axes.
        bias: [(num_qo_heads + 2 * num_kv_heads) * head_dim], or one for each of (q, k, v), in the
            type of ``qkv``.
        q_norm: [head_dim], float16, bfloat16 or float32: weights of the RMS norm of each head of
            q. Gemma multiplies by 1 + weight: give ``1 + weight.float()``, made once.
        k_norm: likewise of K.
        norm_eps: is added to the mean square.
        q_out: [num_tokens, num_qo_heads, head_dim], in the type of ``qkv``, or an FP8 type, which
            stores value / q_scale. It may be the view of ``qkv`` that holds q. Allocated when None.
        q_scale: of an FP8 ``q_out``: a number, or float32 [] or [1].
        k_scale: of a quantised cache, whose stored value times this is the value: a number, or
            float32 [], [1] or [num_kv_heads], which is read when the kernel runs.
        v_scale: likewise of V.
        kv_layout: "NHD" or "HND", the order in which the cache's dimensions are named.
        kv_dtype: what the bytes of a uint8 cache are: "float8_e4m3fn", "float8_e5m2" or "int8".
        zero_tail: write zeros after the last token of each request, to the end of its page.

    Returns:
        ``q_out``. Rows that nothing is done to stay as they are, and are undefined in a new tensor.

    Raises:
        TypeError, ValueError: naming the argument, before any launch. In a capture: the kernel of
            such a call has not been loaded yet; make one before.

    Defined by: jitattn/preprocess_reference.py::preprocess, jitattn/quantization.py.
    """
    # fmt: off
    given = Arguments(
        qkv, kv_cache, pages, seq_lens, qo_indptr, slots, positions, position_delta, bias,
        q_norm, k_norm, q_out, q_scale, k_scale, v_scale, rope, norm_eps,
        num_qo_heads, num_kv_heads, head_dim, kv_layout, kv_dtype, zero_tail,
    )
    # fmt: on
    first = qkv if isinstance(qkv, Tensor) else qkv[0] if isinstance(qkv, (tuple, list)) else None
    q = _preprocess(given, first)
    assert q is not None
    return q


def append_kv(
    k: Tensor,
    v: Tensor,
    kv_cache: KVCache,
    *,
    pages: Pages | None = None,
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

    Where tokens go, what is not written and what is stored: see ``preprocess_qkv``.

    Args:
        k: [num_tokens, num_kv_heads, head_dim], float16 or bfloat16, any strides but the last,
            which is 1.
        v: [num_tokens, num_kv_heads, head_dim_vo], likewise; head_dim_vo may differ (the latent and
            the rotary part of a token of multi-head latent attention are such a pair).
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

    Defined by: jitattn/preprocess_reference.py::preprocess, jitattn/quantization.py.
    """
    # fmt: off
    given = Arguments(
        (k, v), kv_cache, pages, seq_lens, qo_indptr, slots, None, None, None,
        None, None, None, None, k_scale, v_scale, None, 0.0,
        None, None, None, kv_layout, kv_dtype, zero_tail,
    )
    # fmt: on
    _preprocess(given, k)


def _preprocess(arguments: Arguments, first: object) -> Tensor | None:
    if not isinstance(first, Tensor) or not first.is_cuda:
        return preprocess_by_definition(check(arguments))
    from jitattn.preprocess_cuda import preprocess

    return preprocess(arguments)
