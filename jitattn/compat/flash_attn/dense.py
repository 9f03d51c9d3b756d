"""flash-attn's functions over sequences of one length, and those of packed K and V."""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor

from jitattn.compat.flash_attn.common import Q_DTYPES, even_indptr
from jitattn.compat.flash_attn.options import VarlenOptions
from jitattn.compat.flash_attn.varlen import Results, flash_attn_varlen_func
from jitattn.tensors.tensor_checks import check_tensor


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, **options: Unpack[VarlenOptions],
) -> Results:  # fmt: skip
    """Attend the queries of sequences to their keys, all of one length.

    Query i of ``seqlen_q`` sits at ``seqlen_k`` - ``seqlen_q`` + i.

    Args:
        q: [batch_size, seqlen_q, nheads, head_dim], float16 or bfloat16.
        k: [batch_size, seqlen_k, nheads_k, head_dim], like q.
        v: likewise; its heads may have another size.
        dropout_p: as of ``flash_attn_varlen_func``, as the others are.
        softmax_scale: see there.
        causal: see there.
        window_size: see there.
        softcap: see there.
        alibi_slopes: see there.
        deterministic: see there.
        return_attn_probs: return lse and an empty tensor, too.
        options: see there; those of lengths and tables are refused.

    Returns:
        out [batch_size, seqlen_q, nheads, head_dim of V], or (out, lse, empty), lse float32
        [batch_size, nheads, seqlen_q], natural. A row that sees no key has out 0 and lse -inf.

    Raises:
        TypeError, ValueError, ConfigError: naming the argument, before any launch.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor, Q_DTYPES)
        if tensor.dim() != 4 or tensor.shape[0] != q.shape[0]:
            wanted = f"[{q.shape[0]}, length, heads, head_dim]"
            raise ValueError(f"{name} has shape {list(tensor.shape)}: expected {wanted}")
    if v.shape[1] != k.shape[1]:
        raise ValueError(f"v has {v.shape[1]} tokens: k has {k.shape[1]}")
    given: dict[str, Any] = {**options}
    for name in ("page_table", "seqused_k", "out"):
        if given.get(name) is not None:
            raise ValueError(f"{name} is given: flash_attn_varlen_func has it, expected None")
    batch_size, seqlen_q = q.shape[:2]
    found = flash_attn_varlen_func(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1),
        even_indptr(batch_size, seqlen_q, q.device), even_indptr(batch_size, k.shape[1], q.device),
        seqlen_q, k.shape[1], dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs, **options,
    )  # fmt: skip
    if isinstance(found, Tensor):
        return found.view(batch_size, seqlen_q, *found.shape[1:])
    out, lse = found[0], found[1]
    out = out.view(batch_size, seqlen_q, *out.shape[1:])
    by_sequence = lse.view(-1, batch_size, seqlen_q).transpose(0, 1).contiguous()
    return (out, by_sequence, *found[2:])


def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:  # fmt: skip
    """Do what ``flash_attn_func`` does: ``kv`` is [batch_size, seqlen_k, 2, nheads_k, head_dim]."""
    k, v = _unpacked("kv", kv, 2, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:  # fmt: skip
    """Do what ``flash_attn_func`` does: ``qkv`` is [batch_size, seqlen, 3, nheads, head_dim]."""
    q, k, v = _unpacked("qkv", qkv, 3, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:  # fmt: skip
    """Do what ``flash_attn_varlen_func`` does: ``kv`` is [total_k, 2, nheads_k, head_dim]."""
    k, v = _unpacked("kv", kv, 2, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:  # fmt: skip
    """Do what ``flash_attn_varlen_func`` does: ``qkv`` is [total, 3, nheads, head_dim]."""
    q, k, v = _unpacked("qkv", qkv, 3, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def _unpacked(name: str, packed: Tensor, parts: int, num_dims: int) -> tuple[Tensor, ...]:
    check_tensor(name, packed, Q_DTYPES)
    if packed.dim() != num_dims or packed.shape[-3] != parts:
        front = "batch_size, seqlen" if num_dims == 5 else "total"
        raise ValueError(
            f"{name} has shape {list(packed.shape)}: expected [{front}, {parts}, heads, head_dim]"
        )
    return packed.unbind(-3)
