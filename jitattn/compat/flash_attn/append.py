"""New tokens of a call: checks, the rotary embedding by flash-attn's tables, the append."""

from __future__ import annotations

import torch
from torch import Tensor

from jitattn.compat.flash_attn.cache import CachedCall, PagedCache
from jitattn.compat.flash_attn.common import even_indptr
from jitattn.compat.rotation import rotate
from jitattn.kernels.common.reference_plan import what_is_read_wrong
from jitattn.kernels.preprocess.api import append_kv
from jitattn.tensors.bound_cache import BoundCache
from jitattn.tensors.tensor_checks import check_device, check_tensor


def append_new_tokens(
    given: CachedCall, cache: PagedCache, cached: Tensor, kv: BoundCache
) -> tuple[Tensor, Tensor]:
    """Append k and v, if any; q, turned, and [batch_size], the tokens of each request then.

    ``kv`` is the cache as attention reads it: on the CPU, what that refuses is refused here.
    """
    q, k, v = given.q, given.k, given.v
    tables = given.rotary_cos, given.rotary_sin
    if k is None or v is None:
        _refuse_without_k(k=k, v=v, rotary_cos=tables[0], rotary_sin=tables[1])
        return q, cached
    seqlen_new = _check_new_tokens(k, v, given)
    if tables != (None, None):
        cos, sin = _check_rotary(*tables, q, cache.capacity)
        how = cos, sin, given.rotary_interleaved
        # A token turns by its place in the row, in front of which padding counts.
        first = cached if given.cache_leftpad is None else cached + given.cache_leftpad
        k = _rotate(k, first, *how, step=1)
        is_moving = given.causal or any(0 <= n < cache.capacity for n in given.window_size)
        q = _rotate(q, first, *how, step=int(is_moving))
    seq_lens = torch.where(cached < 0, 0, cached + seqlen_new)
    if q.device.type == "cpu":
        for request, kv_len in enumerate(seq_lens.tolist()):
            wrong = what_is_read_wrong(
                cache.pages, kv.pools, kv.config, request, kv_len, q.shape[1]
            )
            if wrong:
                raise ValueError(wrong)
    append_kv(
        k.contiguous().flatten(0, 1),
        v.contiguous().flatten(0, 1),
        (cache.k, cache.v),
        pages=cache.pages,
        seq_lens=seq_lens,
        qo_indptr=even_indptr(q.shape[0], seqlen_new, q.device),
    )
    return q, seq_lens


def _refuse_without_k(**others: Tensor | None) -> None:
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"{name} is given: it needs k and v, which are appended together")


def _check_new_tokens(k: Tensor, v: Tensor, given: CachedCall) -> int:
    """Check what is appended; how many tokens a request."""
    batch_size = given.q.shape[0]
    for name, tensor, cache in (("k", k, given.k_cache), ("v", v, given.v_cache)):
        check_tensor(name, tensor, (cache.dtype,))
        wanted = (batch_size, k.shape[1] if k.dim() == 4 else None, *cache.shape[2:])
        if tuple(tensor.shape) != wanted:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}: expected [{batch_size}, seqlen_new, "
                f"{cache.shape[2]}, {cache.shape[3]}]"
            )
        check_device(name, tensor, cache.device)
    return k.shape[1]


def _check_rotary(
    cos: Tensor | None, sin: Tensor | None, q: Tensor, capacity: int
) -> tuple[Tensor, Tensor]:
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        if table is None:
            raise ValueError(f"{name} is None: rotary_cos and rotary_sin come together")
        check_tensor(name, table, (q.dtype,))
        check_device(name, table, q.device)
        if table.dim() != 2 or not 0 < 2 * table.shape[1] <= q.shape[3]:
            raise ValueError(
                f"{name} has shape {list(table.shape)}: expected [seqlen_ro, rotary_dim / 2], "
                f"rotary_dim at most {q.shape[3]}"
            )
        if table.shape[0] < capacity:
            raise ValueError(
                f"{name} has {table.shape[0]} rows: expected {capacity}, for all tokens of a "
                "request that the cache holds"
            )
    assert cos is not None
    assert sin is not None
    if cos.shape != sin.shape:
        raise ValueError(f"rotary_sin has shape {list(sin.shape)}: expected {list(cos.shape)}")
    return cos, sin


def _rotate(
    x: Tensor, first: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, step: int
) -> Tensor:
    """Turn [batch_size, length, heads, head_dim] by the positions ``first`` + ``step`` * i."""
    positions = first.long()[:, None] + step * torch.arange(x.shape[1], device=x.device)
    positions = positions.clamp(0, max(cos.shape[0] - 1, 0))  # those of padding are any
    c, s = (table[positions].float() for table in (cos, sin))
    return rotate(x, c, s, interleaved=interleaved)
