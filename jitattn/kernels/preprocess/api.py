"""Tokens on their way in: ``preprocess_qkv`` and ``append_kv``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from jitattn.kernels.common.launch_cache import CallTensors, LaunchCache, new_call
from jitattn.kernels.preprocess.check import PreprocessCall, QkvParts, TokenCall, check
from jitattn.kernels.preprocess.check_values import check_values
from jitattn.kernels.preprocess.reference import preprocess as preprocess_by_definition
from jitattn.tensors.page_table_base import PageTable
from jitattn.tensors.quantization import KVCache
from jitattn.tensors.rope import Rope
from jitattn.tensors.scales import ScaleLike


# fmt: off
def preprocess_qkv(
    qkv: Tensor | QkvParts, kv_cache: KVCache, *, num_qo_heads: int, num_kv_heads: int,
    head_dim: int, pages: PageTable | None = None, seq_lens: Tensor | None = None,
    qo_indptr: Tensor | None = None, slots: Tensor | None = None, rope: Rope | None = None,
    positions: Tensor | None = None, position_delta: Tensor | None = None,
    bias: Tensor | QkvParts | None = None, q_norm: Tensor | None = None,
    k_norm: Tensor | None = None, norm_eps: float = 1e-6, q_out: Tensor | None = None,
    q_scale: ScaleLike | None = None, k_scale: ScaleLike | None = None,
    v_scale: ScaleLike | None = None, qk_transform: str | None = None,
    v_transform: str | None = None, kv_layout: str = "NHD",
    kv_dtype: torch.dtype | str | None = None, zero_tail: bool = False,
) -> Tensor:
    """Write K and V of new tokens into the cache and return their q: docs/preprocessing.md.

    Args:
        qkv: [num_tokens, (num_qo_heads + 2 * num_kv_heads) * head_dim], float16 or bfloat16, any
            token stride; or (q, k, v), each [num_tokens, heads, head_dim], that of v any.
        kv_cache: [num_pages, 2, page_size, num_kv_heads, head_dim] (NHD), a pair of 4-D tensors, or
            a ``QuantizedKV``, any strides but the last; 16 bits, FP8, int8, or uint8 bytes.
        num_qo_heads: heads of q.
        num_kv_heads: heads of K and V.
        head_dim: elements of a head.
        pages: a table of any layout but ragged, token i goes to seq_len - q_len + i; or ``slots``.
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
        qk_transform: "hadamard" rotates heads of q and K, after rope: scores are what they were.
        v_transform: "hadamard" rotates heads of V, and so out: ``quant.fold_hadamard`` undoes it.
        kv_layout: "NHD" or "HND", the order in which the cache's dimensions are named.
        kv_dtype: what the bytes of a uint8 cache are: "float8_e4m3fn", "float8_e5m2" or "int8".
        zero_tail: write zeros after the last token of each request, to the end of its page.

    Returns:
        ``q_out``, allocated when None.

    Raises:
        TypeError, ValueError: naming the argument, before any launch.

    Defined by: jitattn/kernels/preprocess/reference.py::preprocess.
    """
    call = new_call(PreprocessCall, (
        qkv, kv_cache, pages, seq_lens, qo_indptr, slots, kv_layout, kv_dtype, k_scale, v_scale,
        zero_tail, num_qo_heads, num_kv_heads, head_dim, rope, positions, position_delta, bias,
        q_norm, k_norm, norm_eps, q_out, q_scale, qk_transform, v_transform))
    if is_dynamo_compiling():
        from jitattn.kernels.preprocess.torch_op import trace_preprocess

        return trace_preprocess(call)
    return LAUNCHES.run(call)  # type: ignore[return-value]
# fmt: on


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
    k_scale: ScaleLike | None = None,
    v_scale: ScaleLike | None = None,
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
    into = kv_cache, pages, seq_lens, qo_indptr, slots
    stored = kv_layout, kv_dtype, k_scale, v_scale, zero_tail
    call = new_call(PreprocessCall, ((k, v), *into, *stored, *_NO_QUERIES))
    if is_dynamo_compiling():
        from jitattn.kernels.preprocess.torch_op import trace_append

        trace_append(call)
    else:
        LAUNCHES.run(call)


def _define(call: TokenCall) -> Tensor | None:
    check_values(call)
    return preprocess_by_definition(call)


def _prepare(
    call: TokenCall, given: CallTensors, card: int
) -> Callable[[PreprocessCall, list[Tensor]], Tensor | None]:
    from jitattn.kernels.preprocess.launch import PreprocessLauncher

    return PreprocessLauncher(call, given, card)


_NO_QUERIES = tuple(PreprocessCall._field_defaults.values())
LAUNCHES = LaunchCache(check, _define, _prepare, unfixed=("q_scale", "k_scale", "v_scale"))
