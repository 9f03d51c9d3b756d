"""Scores of keys for each query token, by an indexer of few bytes: ``index_logits``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from jitattn.base.errors import ConfigError
from jitattn.kernels.common import device_kernels
from jitattn.kernels.common.launch_cache import CallTensors, LaunchCache, new_call
from jitattn.kernels.common.value_checks import checking
from jitattn.kernels.select.index_cache import IndexCacheView, view_index_cache
from jitattn.kernels.select.launch import KernelCall, OneOutput, new_params
from jitattn.kernels.select.params import IndexLogitsParams
from jitattn.kernels.select.query_rows import OfBatch, QueryBatch, check_batch, note_page_size
from jitattn.kernels.select.reference import index_logits_by_definition
from jitattn.kernels.select.spec import index_logits_spec, index_reasons
from jitattn.kernels.select.tile import IndexLogitsTile
from jitattn.tensors.overlap import refuse_shared_bytes
from jitattn.tensors.page_table_base import PageTable
from jitattn.tensors.tensor_checks import (
    check_device,
    check_last_stride,
    check_rows,
    check_tensor,
    check_writable,
    new_tensor,
)

_CTAS_PER_SM = 8  # so that the last ones to run are few among all


def index_logits(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    pages: PageTable,
    seq_lens: Tensor,
    qo_indptr: Tensor | None = None,
    *,
    max_q_len: int | None = None,
    max_kv_len: int | None = None,
    scale_layout: str = "page",
    out: Tensor | None = None,
) -> Tensor:
    """Score the keys that each query token sees: the indexer of DeepSeek's sparse attention.

    The logit of query token t and key j is ``scale[j] * sum over heads h of weights[t, h] *
    relu(q[t, h] . k[j])``. Query tokens are the last ones of their requests, and token i of a
    request sees the keys up to its own position, seq_len - q_len + i. One launch on the current
    stream, which reads each key once for all heads and for up to four query tokens of a request.
    Products are exact and sums in float32; those of 8 bits on compute capability 9.0 are as its
    tensor cores have them, within 2**-12 of the sum of magnitudes.

    Args:
        q: float8_e4m3fn [num_tokens, num_heads, head_dim]; 1 to 128 heads of 32, 64, 96 or 128
            dimensions, the last one contiguous.
        weights: float32 [num_tokens, num_heads], any strides; a scale of q is a factor of them.
        k_cache: uint8 or float8_e4m3fn [num_pages, page_size, head_dim + 4] or [num_pages,
            page_size, 1, head_dim + 4], the bytes of a page in the order of ``scale_layout``; with
            "page" also [num_pages, page_size * (head_dim + 4)]. Begin and strides are multiples of
            4 bytes; of 16, it is fast.
        pages: the pages of each request; a table of any layout but ragged, of which K's ids count.
        seq_lens: int32 or int64 [batch_size], all tokens of each request; zero and less is none.
        qo_indptr: int32 [batch_size + 1], where the query tokens of each request begin in q; None:
            one each.
        max_q_len: the most query tokens of a request; needed with ``qo_indptr``.
        max_kv_len: the most tokens of a request: the width of the result. None is that of ``out``,
            or what the table has room for.
        scale_layout: "page": the keys of a page, e4m3 [page_size, head_dim], then its scales,
            float32 [page_size], as DeepGEMM, vLLM and SGLang have it; "token": each key with its
            scale behind it, at any stride of tokens.
        out: float32 [num_tokens, max_kv_len] to write; rows contiguous, at any stride.

    Returns:
        ``out``, or a new tensor: -inf where a token is not seen, in rows behind qo_indptr[-1] too.

    Raises:
        TypeError, ValueError: an argument that doesn't fit. On the CPU also a request that is
            longer than its table or the result, that has more query tokens than ``max_q_len``, or
            whose keys lie outside the cache; on the device such logits are NaN.
        ConfigError: a size that no kernel has.
    """
    given = (
        *(q, weights, k_cache, pages, seq_lens, qo_indptr),
        *(max_q_len, max_kv_len, scale_layout, out),
    )
    if is_dynamo_compiling():
        from jitattn.kernels.select.torch_op import trace_logits

        return trace_logits(IndexLogitsCall(*given))
    return LAUNCHES.run(new_call(IndexLogitsCall, given))


class IndexLogitsCall(NamedTuple):
    """The arguments of ``index_logits``, as they were given."""

    q: Tensor
    weights: Tensor
    k_cache: Tensor
    pages: PageTable
    seq_lens: Tensor
    qo_indptr: Tensor | None
    max_q_len: int | None
    max_kv_len: int | None
    scale_layout: str
    out: Tensor | None


@dataclass(frozen=True, slots=True)
class _Call(OfBatch):
    """The arguments, checked."""

    q: Tensor
    weights: Tensor
    cache: IndexCacheView
    batch: QueryBatch
    out: Tensor | None

    def new_out(self) -> Tensor:
        shape = self.batch.num_tokens, self.batch.max_kv_len
        return new_tensor("max_kv_len", shape, torch.float32, self.device)


def _check(call: IndexLogitsCall) -> _Call:
    check_tensor("q", call.q, (torch.float8_e4m3fn,))
    if call.q.dim() != 3:
        raise ValueError(
            f"q has shape {list(call.q.shape)}: expected [num_tokens, num_heads, head_dim]"
        )
    num_tokens, num_heads, head_dim = call.q.shape
    if reasons := index_reasons(head_dim, num_heads):
        raise ConfigError(reasons)
    check_last_stride("q", call.q)
    check_rows("weights", call.weights, (num_tokens, num_heads), torch.float32, call.q.device)
    cache = view_index_cache(call.k_cache, head_dim, call.scale_layout, call.q.device)
    width = call.max_kv_len
    if call.out is not None:
        check_tensor("out", call.out, (torch.float32,))
        if width is None and call.out.dim() == 2:
            width = call.out.shape[1]
    batch = check_batch(
        call.pages,
        call.seq_lens,
        call.qo_indptr,
        max_q_len=call.max_q_len,
        max_kv_len=width,
        num_tokens=num_tokens,
        page_size=cache.page_size,
    )
    check_device("pages", call.pages, call.q.device)
    if call.out is not None:
        check_rows("out", call.out, (num_tokens, batch.max_kv_len), torch.float32, batch.device)
        check_last_stride("out", call.out)
        check_writable("out", call.out)
        read = [("q", call.q), ("weights", call.weights), ("k_cache", call.k_cache)]
        read += [("pages", tensor) for tensor in call.pages.tensors]
        refuse_shared_bytes([("out", call.out)], read)
    return _Call(call.q, call.weights, cache, batch, call.out)


def _define(call: _Call) -> Tensor:
    call.cache.is_aligned(call.cache.tensor.data_ptr())
    out = call.new_out() if call.out is None else call.out
    index_logits_by_definition(call.q, call.weights, call.cache, call.batch, out)
    note_page_size(out, call.cache.page_size)
    return out


class _Launcher(OneOutput[IndexLogitsCall]):
    """Launches for calls whose tensors lie alike."""

    def __init__(self, call: _Call, given: CallTensors, card: int) -> None:
        batch, cache, q = call.batch, call.cache, call.q
        spec = index_logits_spec(
            cache.head_dim, q.shape[1], batch.max_q_len, device_kernels.arch_on(card)
        )
        tile = device_kernels.tile_of(spec, card)
        assert isinstance(tile, IndexLogitsTile)
        self._params = new_params(IndexLogitsParams)
        params = self._params.struct
        batch.fill(params.rows)
        cache.fill(params.cache)
        params.pages = batch.pages.page_list(batch.page_size)
        params.q_token_stride, params.q_head_stride = q.stride()[:2]
        params.weights_token_stride, params.weights_head_stride = call.weights.stride()
        params.out_stride = batch.max_kv_len if call.out is None else call.out.stride(0)
        params.num_heads = q.shape[1]
        num_groups = batch.num_tokens
        if batch.qo_indptr is not None:
            # Each request, and what is behind the last, may have a group that isn't full.
            num_groups = batch.num_tokens // spec.query_tokens + batch.batch_size + 1
        params.chunk_tokens = chunk_tokens(
            batch.max_kv_len, num_groups, tile, device_kernels.num_sms(card)
        )
        params.num_chunks = -(-batch.max_kv_len // params.chunk_tokens)
        super().__init__(given, call.new_out, _verify, cache.page_size)
        self._cache = cache
        names = self.calls.names
        self._k_at = names.index("k_cache")
        sources: dict[str, str | tuple[str, int] | None] = {
            **{name: name for name in ("q", "weights", "out")},
            "cache.keys": "k_cache",
            "cache.scales": ("k_cache", cache.scale_offset),
            **batch.sources(),
        }
        self._params.connect(sources, names)
        grid = num_groups * params.num_chunks if batch.num_tokens else 0
        self.calls.add(KernelCall(spec, card, self._params, grid, self._align))

    def _align(self, pointers: Sequence[int]) -> None:
        self._params.struct.cache.is_aligned = self._cache.is_aligned(pointers[self._k_at])


def chunk_tokens(max_kv_len: int, num_groups: int, tile: IndexLogitsTile, num_sms: int) -> int:
    """Return the keys of a CTA: enough CTAs for the card, and no more than places are held for."""
    wanted = max_kv_len * num_groups // (_CTAS_PER_SM * num_sms)
    most = tile.max_chunk_tokens
    return max(tile.tile_tokens, min(most, -(-wanted // tile.tile_tokens) * tile.tile_tokens))


def _verify(call: IndexLogitsCall) -> None:
    """Refuse what would be NaN."""
    with checking():
        checked = _check(call)
        batch = checked.batch.to_cpu()
        for request, _, _, kv_len in batch.on_cpu():
            batch.known_slots(request, kv_len, checked.cache.num_pages)


LAUNCHES = LaunchCache(_check, _define, _Launcher)
