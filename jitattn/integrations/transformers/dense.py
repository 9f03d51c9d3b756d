"""Attention of ``generate`` and of plain forward passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jitattn.base.validate import INT32_MAX
from jitattn.integrations.transformers.arguments import (
    planner_for,
    refuse_unsupported,
    score_arguments,
)
from jitattn.integrations.transformers.masks import (
    STEP_ATTRIBUTE,
    MaskedStep,
    step_of_mask,
    step_without_mask,
)
from jitattn.kernels.attention.api import AttentionPlanner, Plan
from jitattn.tensors.page_tables import RaggedKV


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, is_causal: bool | None = None,
    **others: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attend, as transformers asks: q [batch_size, heads, q_len, head_dim], K and V likewise.

    The mask decides what is seen, as it does for eager attention; ``sliding_window`` and
    ``is_causal`` count where there is none.

    Returns:
        out [batch_size, q_len, num_qo_heads, head_dim of V], and no weights.
    """
    refuse_unsupported(dropout, others, query, key, value)
    shape = query.shape[0], query.shape[2], key.shape[2]
    if attention_mask is None:
        step = step_without_mask(module, shape, is_causal, sliding_window)
    else:
        step = getattr(attention_mask, STEP_ATTRIBUTE, None) or step_of_mask(attention_mask, shape)
        if step.shape != shape:
            raise ValueError(
                f"attention_mask is for {list(step.shape)} (batch, queries, keys): q and K have "
                f"{list(shape)}"
            )
    k, v, row = _as_tokens(key, value)
    config = (
        ("num_qo_heads", query.shape[1]),
        ("num_kv_heads", key.shape[1]),
        ("head_dim", query.shape[3]),
        ("head_dim_vo", value.shape[3]),
        ("q_dtype", query.dtype),
        ("kv_dtype", key.dtype),
        *score_arguments(scaling, softcap, s_aux, step.window_left, causal=step.causal),
        ("use_custom_mask", step.bits is not None),
    )
    plan = step.plans.get((config, row))
    if plan is None:
        planner = planner_for(
            (*config, ("page_table", "ragged"), ("page_size", None)), query.device
        )
        plan = step.plans[config, row] = _plan(planner, step, row)
    q = query.transpose(1, 2).reshape(-1, query.shape[1], query.shape[3])
    out = plan.run(q, (k, v), sinks=s_aux, custom_mask=step.bits)
    assert isinstance(out, Tensor)
    return out.view(shape[0], shape[1], *out.shape[1:]), None


def _plan(planner: AttentionPlanner, step: MaskedStep, row: int) -> Plan:
    """Plan a step whose rows of K and V begin ``row`` tokens after each other.

    A request without tokens goes before the others, since offsets begin with 0 and the first row
    may begin with padding.
    """
    batch_size, q_length, kv_length = step.shape
    device = planner.device
    last = (batch_size - 1) * row + kv_length
    if last > INT32_MAX:
        raise ValueError(f"key has {last} tokens from first to last: expected at most {INT32_MAX}")
    begins = torch.arange(batch_size, device=device) * row
    lens = torch.zeros(batch_size, dtype=torch.int64, device=device) + step.end
    if step.starts is not None:
        begins, lens = begins + step.starts, lens - step.starts
    kv_indptr = torch.nn.functional.pad(begins, (1, 0))
    kv_indptr = torch.nn.functional.pad(kv_indptr, (0, 1), value=last).int()
    offsets = (torch.arange(-1, batch_size + 1, device=device).clamp(min=0) * q_length).int()
    return planner.plan(
        RaggedKV(kv_indptr),
        torch.nn.functional.pad(lens, (1, 0)),
        offsets,
        max_q_len=q_length,
        max_kv_len=kv_length,
    )


def _as_tokens(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, int]:
    """View [batch_size, heads, length, head_dim] as [tokens, heads, head_dim].

    Tokens between the rows are those of other heads. Nothing is copied unless the rows of K and V
    begin at different multiples of a token's stride, or at no multiple.

    Returns:
        K, V, and how many tokens after each other their rows begin.
    """
    rows = {_row_tokens(tensor) for tensor in (key, value)}
    strides = [(tensor.stride(2), tensor.stride(1), 1) for tensor in (key, value)]
    row = rows.pop()
    if rows or row is None:
        key, value = key.contiguous(), value.contiguous()
        row = key.shape[1] * key.shape[2]
        # Not those of a contiguous tensor, which may be any where a size is 1.
        strides = [(t.shape[3], t.shape[2] * t.shape[3], 1) for t in (key, value)]
    size = (key.shape[0] - 1) * row + key.shape[2]
    k, v = (
        tensor.as_strided((size, tensor.shape[1], tensor.shape[3]), stride)
        for tensor, stride in zip((key, value), strides, strict=True)
    )
    return k, v, row


def _row_tokens(tensor: Tensor) -> int | None:
    """How many tokens after each other rows begin; None where that is no number."""
    row, _, token, element = tensor.stride()
    if tensor.shape[3] > 1 and element != 1:
        return None
    if tensor.shape[0] == 1:
        return tensor.shape[2]
    if token <= 0 or row % token or row // token < tensor.shape[2]:
        return None
    return row // token
