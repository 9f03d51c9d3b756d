"""``flash_attn_varlen_func``: attention of requests that follow each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor

from jitattn.base.validate import as_float, check_count, check_flag, check_number, shown
from jitattn.compat.flash_attn.common import (
    Q_DTYPES,
    Window,
    check_keys,
    check_table,
    check_vector,
    planner_for,
    refuse_alibi,
    softmax_scale_of,
)
from jitattn.compat.flash_attn.options import (
    VarlenOptions,
    check_options,
    sinks_of,
    splits_of,
    table_of,
    wants_lse,
)
from jitattn.compat.gradients import refuse_gradients
from jitattn.kernels.common.planner_base import plan_for_call
from jitattn.tensors.page_table_base import PageTable
from jitattn.tensors.page_tables import BlockTable, RaggedKV
from jitattn.tensors.tensor_checks import INTEGERS, check_device, check_indptr, check_tensor

Results = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]
_HONOURED = (
    *("page_table", "seqused_k", "s_aux", "learnable_sink", "out", "return_softmax_lse"),
    "num_splits",
)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Tensor | None = None,
    **options: Unpack[VarlenOptions],
) -> Results:  # fmt: skip
    """Attend the queries of requests that follow each other to their keys.

    Query i of a request with n queries and m keys sits at m - n + i.

    Args:
        q: [total_q, nheads, head_dim], float16 or bfloat16. Rows past ``cu_seqlens_q[-1]`` have out
            0 and lse -inf.
        k: [total_k, nheads_k, head_dim], or with ``block_table`` [num_blocks, block_size, nheads_k,
            head_dim] of any block size; like q.
        v: likewise; its heads may have another size.
        cu_seqlens_q: int32 [batch_size + 1], where the queries of each request begin.
        cu_seqlens_k: likewise of the keys; with ``block_table`` only the lengths count. None where
            ``seqused_k`` has them, with a table.
        max_seqlen_q: the most queries of a request, needed; one with more is a ValueError on the
            CPU and NaN on the device.
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
        options: keywords of flash-attn 3 and vLLM, see docs/from-flash-attn.md.

    Returns:
        out [total_q, nheads, head_dim of V], or (out, lse, empty), lse float32 [nheads, total_q],
        natural. A row that sees no key has out 0 and lse -inf (flash-attn: inf).

    Raises:
        TypeError, ValueError, ConfigError: naming the argument, before any launch.
    """
    given: dict[str, Any] = {**locals(), "options": None}
    return _attend_call(given, check_options(options, _HONOURED))


def _attend_call(given: Mapping[str, Any], chosen: Mapping[str, Any]) -> Results:
    """Check a call, and run it; ``chosen`` are the options that say something."""
    q, k, v = given["q"], given["k"], given["v"]
    refuse_gradients({"q": q, "k": k, "v": v})
    refuse_alibi(given["alibi_slopes"])
    if as_float(given["dropout_p"]) != 0:
        shown_p = shown(given["dropout_p"])
        raise ValueError(f"dropout_p is {shown_p}: there is no dropout here, expected 0")
    for name in ("causal", "deterministic", "return_attn_probs"):
        check_flag(name, given[name])
    block_table = table_of(given["block_table"], chosen)
    seqused_k: Tensor | None = chosen.get("seqused_k")
    indptrs = given["cu_seqlens_q"], _offsets_of_keys(given["cu_seqlens_k"], seqused_k, block_table)
    _check_varlen(q, k, v, *indptrs, block_table)
    check_vector("seqused_k", seqused_k, indptrs[1].shape[0] - 1, q.device)
    max_q_len = min(check_count("max_seqlen_q", given["max_seqlen_q"], least=0), q.shape[0])
    limits = max_q_len, check_count("max_seqlen_k", given["max_seqlen_k"], least=0)
    window = Window.of(given["causal"], given["window_size"], max_q_len)
    scores = {
        "sm_scale": softmax_scale_of(given["softmax_scale"]),
        "logits_soft_cap": check_number("softcap", given["softcap"], least=0.0),
        "batch_invariant": splits_of(chosen),
    }
    out, lse = _attend_varlen(
        (q, k, v), indptrs, limits, block_table, window, scores, seqused_k=seqused_k,
        sinks=sinks_of(chosen, q), out=chosen.get("out"),
    )  # fmt: skip
    if wants_lse(chosen):
        return out, lse
    return (out, lse, q.new_empty(0)) if given["return_attn_probs"] else out


def _offsets_of_keys(
    cu_seqlens_k: Tensor | None, seqused_k: Tensor | None, block_table: Tensor | None
) -> Tensor:
    """Return where the keys of each request begin; with a table their lengths do, too.

    Raises:
        TypeError, ValueError: naming what is missing.
    """
    if cu_seqlens_k is not None:
        return cu_seqlens_k
    if seqused_k is None or block_table is None:
        raise ValueError(
            "cu_seqlens_k is None: that is for block_table or page_table with seqused_k"
        )
    check_tensor("seqused_k", seqused_k, INTEGERS)
    return torch.nn.functional.pad(seqused_k.cumsum(0), (1, 0)).int()


def _attend_varlen(
    qkv: tuple[Tensor, Tensor, Tensor],
    indptrs: tuple[Tensor, Tensor],
    limits: tuple[int, int],
    block_table: Tensor | None,
    window: Window,
    scores: dict[str, float | None],
    *,
    seqused_k: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Plan and run a call whose arguments were checked; out, and lse [nheads, total_q]."""
    (q, k, v), (qo_indptr, kv_indptr), (max_q_len, max_kv_len) = qkv, indptrs, limits
    pages: PageTable = RaggedKV(kv_indptr) if block_table is None else BlockTable(block_table)
    page_size = None if block_table is None else k.shape[1]
    planner = planner_for(
        q, k, v, pages, window, page_size=page_size, use_sinks=sinks is not None, **scores
    )
    lens = kv_indptr.diff() if seqused_k is None else seqused_k
    plan = plan_for_call(
        planner, pages, lens, qo_indptr, max_q_len=max_q_len, max_kv_len=max_kv_len
    )
    mask = window.mask_of(qo_indptr, q.shape[0], max_q_len)
    lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    found = plan.run(q, (k, v), out=out, lse=lse.t(), custom_mask=mask, sinks=sinks)
    assert isinstance(found, Tensor)
    return found, lse


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
