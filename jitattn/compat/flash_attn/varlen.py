"""``flash_attn_varlen_func``: attention of requests that follow each other."""

from __future__ import annotations

import torch
from torch import Tensor

from jitattn.base.validate import check_count, check_flag, check_number
from jitattn.compat.flash_attn.common import (
    Q_DTYPES,
    Window,
    check_keys,
    check_table,
    planner_for,
    refuse_alibi,
    softmax_scale_of,
)
from jitattn.compat.gradients import refuse_gradients
from jitattn.kernels.common.planner_base import plan_for_call
from jitattn.tensors.page_table_base import PageTable
from jitattn.tensors.page_tables import BlockTable, RaggedKV
from jitattn.tensors.tensor_checks import check_device, check_indptr, check_tensor


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Attend the queries of requests that follow each other to their keys.

    Query i of a request with n queries and m keys sits at m - n + i.

    Args:
        q: [total_q, nheads, head_dim], float16 or bfloat16. Rows past ``cu_seqlens_q[-1]`` have out
            0 and lse -inf.
        k: [total_k, nheads_k, head_dim], or with ``block_table`` [num_blocks, block_size, nheads_k,
            head_dim] of any block size; like q.
        v: likewise; its heads may have another size.
        cu_seqlens_q: int32 [batch_size + 1], where the queries of each request begin.
        cu_seqlens_k: likewise of the keys; with ``block_table`` only the lengths count.
        max_seqlen_q: the most queries of a request; one with more is a ValueError on the CPU and
            NaN on the device.
        max_seqlen_k: the most keys, likewise.
        dropout_p: refused unless 0.
        softmax_scale: None: head_dim ** -0.5.
        causal: queries see no later keys.
        window_size: see ``flash_attn_with_kvcache``.
        softcap: score becomes softcap * tanh(score / softcap); 0 is off.
        alibi_slopes: refused unless None.
        deterministic: of flash-attn's backward pass. The forward pass always is: no effect.
        return_attn_probs: return lse and an empty tensor, too: probabilities come with dropout
            alone.
        block_table: int32 [batch_size, blocks_per_request], or None.

    Returns:
        out [total_q, nheads, head_dim of V], or (out, lse, empty), lse float32 [nheads, total_q],
        natural. A row that sees no key has out 0 and lse -inf (flash-attn: inf).

    Raises:
        TypeError, ValueError, ConfigError: naming the argument, before any launch.
    """
    refuse_gradients({"q": q, "k": k, "v": v})
    refuse_alibi(alibi_slopes)
    if dropout_p != 0:
        raise ValueError(f"dropout_p is {dropout_p}: there is no dropout here, expected 0")
    check_flag("causal", causal)
    check_flag("deterministic", deterministic)
    check_flag("return_attn_probs", return_attn_probs)
    _check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, block_table)
    max_q_len = min(check_count("max_seqlen_q", max_seqlen_q, least=0), q.shape[0])
    max_kv_len = check_count("max_seqlen_k", max_seqlen_k, least=0)
    window = Window.of(causal, window_size, max_q_len)
    scores = {
        "sm_scale": softmax_scale_of(softmax_scale),
        "logits_soft_cap": check_number("softcap", softcap, least=0.0),
    }
    return _attend_varlen(
        (q, k, v), (cu_seqlens_q, cu_seqlens_k), (max_q_len, max_kv_len), block_table, window,
        scores, return_lse=return_attn_probs,
    )  # fmt: skip


def _attend_varlen(
    qkv: tuple[Tensor, Tensor, Tensor],
    indptrs: tuple[Tensor, Tensor],
    limits: tuple[int, int],
    block_table: Tensor | None,
    window: Window,
    scores: dict[str, float | None],
    *,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Plan and run a call whose arguments were checked."""
    (q, k, v), (qo_indptr, kv_indptr), (max_q_len, max_kv_len) = qkv, indptrs, limits
    pages: PageTable = RaggedKV(kv_indptr) if block_table is None else BlockTable(block_table)
    page_size = None if block_table is None else k.shape[1]
    planner = planner_for(q, k, v, pages, window, page_size=page_size, **scores)
    plan = plan_for_call(
        planner, pages, kv_indptr.diff(), qo_indptr, max_q_len=max_q_len, max_kv_len=max_kv_len
    )
    mask = window.mask_of(qo_indptr, q.shape[0], max_q_len)
    lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    out = plan.run(q, (k, v), lse=lse.t(), custom_mask=mask)
    assert isinstance(out, Tensor)
    return (out, lse, q.new_empty(0)) if return_lse else out


def _check_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    block_table: Tensor | None,
) -> None:
    check_tensor("q", q, Q_DTYPES)
    if q.dim() != 3:
        raise ValueError(f"q has shape {list(q.shape)}: expected [total_q, nheads, head_dim]")
    for name, tensor in (("k", k), ("v", v)):
        check_keys(name, tensor, q, None if block_table is None else "block_table")
    for name, indptr in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_indptr(name, indptr)
        check_device(name, indptr, q.device)
    if block_table is not None:
        check_table(block_table, cu_seqlens_k.shape[0] - 1)
