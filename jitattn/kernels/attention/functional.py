"""``jitattn.attention``: one call for scripts and notebooks, with planners cached behind it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import fields

import torch
from torch import Tensor

from jitattn.base.validate import check_flag, check_name
from jitattn.kernels.attention.api import AttentionPlanner
from jitattn.kernels.common.planner_base import plan_for_call
from jitattn.spec.config import PlannerConfig
from jitattn.tensors.page_table_base import PageTable
from jitattn.tensors.page_tables import check_page_table
from jitattn.tensors.quantization import KVCache, QuantizedKV
from jitattn.tensors.scales import ScaleLike
from jitattn.tensors.tensor_checks import check_memory


def attention(
    q: Tensor,
    kv_cache: KVCache,
    pages: PageTable,
    seq_lens: Tensor,
    qo_indptr: Tensor | None = None,
    *,
    max_q_len: int | None = None,
    kv_layout: str = "NHD",
    causal: bool = True,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    sm_scale: float | None = None,
    sinks: Tensor | None = None,
    custom_mask: Tensor | None = None,
    q_scale: ScaleLike | None = None,
    k_scale: ScaleLike | None = None,
    v_scale: ScaleLike | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend a batch once: construct a planner, or reuse one of the same configuration, and run.

    The arguments are those of ``AttentionPlanner``, ``bind``, ``plan`` and ``run``; head counts,
    head dims, page size, dtypes and the table's layout are read off the tensors. Serving code
    plans once per step instead.

    Returns:
        out, or (out, lse) with ``return_lse``.

    Raises:
        TypeError, ValueError, ConfigError: as the calls behind it.
    """
    check_flag("return_lse", return_lse)
    config = _config_of(q, kv_cache, pages, kv_layout)
    planner = planner_of(
        {
            **config,
            "kv_layout": kv_layout,
            "causal": causal,
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
            "sm_scale": sm_scale,
            "use_sinks": sinks is not None,
            "use_custom_mask": custom_mask is not None,
        },
        q.device,
    )
    plan = plan_for_call(planner, pages, seq_lens, qo_indptr, max_q_len=max_q_len)
    kv = planner.bind(kv_cache, k_scale=k_scale, v_scale=v_scale)
    return plan.run(
        q, kv, return_lse=return_lse, q_scale=q_scale, sinks=sinks, custom_mask=custom_mask
    )


def _config_of(q: Tensor, kv_cache: KVCache, pages: PageTable, kv_layout: str) -> dict[str, object]:
    """Read off the tensors what a planner wants to know; it checks the rest."""
    if isinstance(q, Tensor):
        check_memory("q", q)
    if not isinstance(q, Tensor) or q.dim() != 3:
        raise ValueError("q: expected a tensor [num_tokens, num_qo_heads, head_dim]")
    check_page_table(pages)
    per_element, kv_dtype = 1, None
    if isinstance(kv_cache, QuantizedKV):
        k, v, per_element, kv_dtype = kv_cache.k, kv_cache.v, 2, kv_cache.kv_dtype
    elif isinstance(kv_cache, (tuple, list)) and len(kv_cache) == 2:
        k, v = kv_cache
    elif isinstance(kv_cache, Tensor) and kv_cache.dim() == 5:
        k = v = kv_cache[:, 0]
    else:
        raise TypeError(
            "kv_cache: expected a tensor of 5 dimensions, a pair (k_cache, v_cache) or a "
            "QuantizedKV"
        )
    if not isinstance(k, Tensor) or not isinstance(v, Tensor):
        raise TypeError("kv_cache: expected a pair of tensors (k_cache, v_cache)")
    check_memory("k_cache", k)
    check_memory("v_cache", v)
    is_ragged = pages.layout.value == "ragged"
    for name, part in (("k_cache", k), ("v_cache", v)):
        if part.dim() != (3 if is_ragged else 4):
            raise ValueError(f"{name} has shape {list(part.shape)}, with pages {pages!r}")
    kv_layout = check_name("kv_layout", kv_layout, ("NHD", "HND"))
    token_dim, head_dim = (1, 2) if kv_layout == "NHD" else (2, 1)
    return {
        "num_qo_heads": q.shape[1],
        "num_kv_heads": k.shape[1 if is_ragged else head_dim],
        "head_dim": q.shape[2],
        "head_dim_vo": per_element * v.shape[-1],
        "page_size": None if is_ragged else k.shape[token_dim],
        "q_dtype": q.dtype,
        "kv_dtype": kv_dtype or k.dtype,
        "page_table": pages.layout.value,
    }


def planner_of(arguments: Mapping[str, object], device: torch.device) -> AttentionPlanner:
    """Return the planner of some arguments on a device; equal ones share it.

    Raises:
        ConfigError: as its constructor.
    """
    return _planner(PlannerConfig.from_arguments(arguments), device)


@functools.lru_cache(maxsize=64)
def _planner(config: PlannerConfig, device: torch.device) -> AttentionPlanner:
    arguments = {field.name: getattr(config, field.name) for field in fields(config)}
    return AttentionPlanner(**arguments, device=device)
