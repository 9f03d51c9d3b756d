"""FlashInfer on each rank's tokens, and a merge by hand: what one builds without `ContextParallel`.

Its documentation has `return_lse` and `merge_states` for it; what travels is the caller's work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.contenders import SkipError
from bench.mla_cases import LATENT_DIM, ROPE_DIM, SM_SCALE
from bench.parallel_cases import PAGE, Step
from bench.rivals import flashinfer, workspace
from jitattn.parallel import ContextParallel


def merge_by_hand(
    step: Step, cp: ContextParallel, own: Sequence[Tensor]
) -> Callable[[Tensor], Tensor]:
    """Return what computes a layer from a pool, every rank at once: out of this rank's heads.

    Raises:
        SkipError: FlashInfer is not here, or doesn't take the case; the same on every rank.
    """
    if step.device.type == "cpu":
        raise SkipError("FlashInfer has no CPU backend")
    make = _latent if step.case.is_mla else _grouped
    attend = make(step, cp.local_lens(step.seq_lens))
    merge = flashinfer().merge_states
    num_ranks = cp.num_ranks

    def run(pool: Tensor) -> Tensor:
        gathered = []
        for q in own:
            found = q.new_empty((num_ranks, *q.shape))
            dist.all_gather_into_tensor(found.flatten(0, 1), q)
            gathered.append(found.transpose(0, 1).flatten(1, 2))
        came = [_swapped(state, num_ranks) for state in attend(gathered, pool)]
        out, _ = merge(*came)
        return out  # type: ignore[no-any-return]

    return run


def _swapped(state: Tensor, num_ranks: int) -> Tensor:
    """Give each rank its heads; returns [num_tokens, num_ranks, heads of this rank, ..]."""
    sent = state.unflatten(1, (num_ranks, -1)).transpose(0, 1).contiguous()
    found = torch.empty_like(sent)
    dist.all_to_all_single(found, sent)
    return found.transpose(0, 1).contiguous()


def _pages(step: Step, lens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return offsets, page ids and tokens of the last page of each request."""
    counts = (lens + PAGE - 1) // PAGE
    starts = torch.zeros(len(lens) + 1, dtype=torch.int32, device=step.device)
    starts[1:] = counts.cumsum(0)
    ids = torch.cat([row[:count] for row, count in zip(step.table, counts.tolist(), strict=True)])
    return starts, ids, (lens - (counts - 1) * PAGE).int()


def _grouped(step: Step, lens: Tensor) -> Callable[[Sequence[Tensor], Tensor], tuple[Any, Any]]:
    case = step.case
    wrapper = flashinfer().BatchDecodeWithPagedKVCacheWrapper(
        workspace("by-hand", step.device), "NHD", use_tensor_cores=True, backend="fa2"
    )
    wrapper.plan(
        *_pages(step, lens),
        case.heads,
        case.kv_heads,
        case.head_dim,
        PAGE,
        q_data_type=torch.bfloat16,
        kv_data_type=getattr(torch, case.kv_dtype),
    )
    return lambda q, pool: wrapper.run(q[0], pool, return_lse=True)


def _latent(step: Step, lens: Tensor) -> Callable[[Sequence[Tensor], Tensor], tuple[Any, Any]]:
    if step.case.is_fp8:
        raise SkipError("FlashInfer's FP8 latents are 2 to 4 times as slow on this card")
    module = flashinfer().mla
    wrapper = module.BatchMLAPagedAttentionWrapper(workspace("by-hand", step.device), backend="fa3")
    starts, ids, _ = _pages(step, lens)
    rows = torch.arange(len(lens) + 1, dtype=torch.int32, device=step.device)
    wrapper.plan(
        metadata=module.MLAPlanMetadata.csr(
            qo_indptr=rows, kv_indptr=starts, kv_indices=ids, kv_len_arr=lens.int()
        ),
        num_heads=step.case.heads,
        head_dim_ckv=LATENT_DIM,
        head_dim_kpe=ROPE_DIM,
        page_size=PAGE,
        causal=False,
        sm_scale=SM_SCALE,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
        query_layout="split",
        lse_mode="base2",
        kv_cache_layout="split",
    )
    parts: dict[int, tuple[Tensor, ...]] = {}

    def attend(q: Sequence[Tensor], pool: Tensor) -> Any:
        if pool.data_ptr() not in parts:
            split = pool.split((LATENT_DIM, ROPE_DIM), dim=-1)
            parts[pool.data_ptr()] = tuple(part.contiguous() for part in split)
        return wrapper.run(query=tuple(q), kv_cache=parts[pool.data_ptr()], return_lse=True)

    return attend
