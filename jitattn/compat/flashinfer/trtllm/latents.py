"""FlashInfer's TensorRT-LLM function of latent attention: one call plans and runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from jitattn.base.validate import check_count, check_number, shown
from jitattn.compat.flashinfer.common.arguments import (
    Q_DTYPES,
    LseForm,
    as_lengths,
    check_workspace,
    refuse_unbuilt,
)
from jitattn.compat.flashinfer.common.batch import check_offsets
from jitattn.compat.flashinfer.common.latents import check_dims, latent_planner
from jitattn.compat.flashinfer.trtllm.attention import check_length_of, check_table
from jitattn.compat.gradients import refuse_gradients
from jitattn.kernels.common.planner_base import plan_for_call
from jitattn.kernels.mla.config import KV_LORA_RANKS, QK_ROPE_HEAD_DIMS
from jitattn.spec.dtype import dtype_name
from jitattn.tensors.page_tables import BlockTable
from jitattn.tensors.scales import ScaleLike
from jitattn.tensors.tensor_checks import check_device, check_tensor

_FP8 = torch.float8_e4m3fn


def trtllm_batch_decode_with_kv_cache_mla(
    query: Tensor, kv_cache: Tensor, workspace_buffer: Tensor, qk_nope_head_dim: int,
    kv_lora_rank: int, qk_rope_head_dim: int, block_tables: Tensor, seq_lens: Tensor | None,
    max_seq_len: int, sparse_mla_top_k: int = 0, out: Tensor | None = None,
    bmm1_scale: ScaleLike = 1.0, bmm2_scale: ScaleLike = 1.0, sinks: list[Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None, enable_pdl: bool | None = None,
    backend: str = "auto", is_var_seq: bool = True, uses_shared_paged_kv_idx: bool = True,
    lse: Tensor | None = None, return_lse: bool = False, cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto", cum_seq_lens_q: Tensor | None = None,
    max_q_len: int | None = None, multi_ctas_kv_counter_buffer: Tensor | None = None,
    sparse_mla_top_k_lens: Tensor | None = None, enable_dcp: bool = False, cp_world: int = 1,
    cp_rank: int = 0, causal_seqlens_kv_global: Tensor | None = None,
    use_fp16_softmax: bool | None = None, return_lse_base: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attend a few queries of each request to its latents; each sees no later one.

    ``query`` is [batch_size, q_len, num_heads, kv_lora_rank + qk_rope_head_dim], float16 or
    bfloat16, or with ``cum_seq_lens_q`` (int32 [batch_size + 1]) [num_tokens, num_heads, ..], at
    most ``max_q_len`` rows of a request (None: the device is waited for). ``kv_cache`` is
    [num_pages, page_size, kv_lora_rank + qk_rope_head_dim] or [num_pages, 1, ..], any strides but
    the last, like ``query`` or float8_e4m3fn. ``block_tables`` is int32 [batch_size, max_pages],
    or without ``uses_shared_paged_kv_idx`` [batch_size, 2, max_pages], of which row 0 counts: both
    rows must be the same pages, which is checked on the CPU. ``seq_lens`` [batch_size] are at most
    ``max_seq_len``. ``qk_nope_head_dim`` is that of the model, and has no effect.

    ``bmm1_scale`` is all that multiplies scores and ``bmm2_scale`` what multiplies values, numbers;
    of 16 bits the latter is 1, and of FP8 what a stored latent is multiplied with. ``lse`` is
    float32 [num_tokens, num_heads] or [batch_size, q_len, num_heads], base 2 unless
    ``return_lse_base`` is "basee". ``workspace_buffer`` and ``multi_ctas_kv_counter_buffer`` are
    not written; ``backend``, ``cute_dsl_impl``, ``enable_pdl`` and ``is_var_seq`` have no effect.
    Sparse attention, sinks, skipped tiles and context parallelism are refused.

    Returns:
        out [.., num_heads, kv_lora_rank], like ``query`` in front, or (out, lse). A row that sees
        no latent has out 0 and lse -inf.

    Raises:
        TypeError, ValueError, ConfigError: naming the argument, before any launch.
    """
    given = dict(locals())
    refuse_unbuilt(given)
    if sinks is not None:
        raise ValueError("sinks are given: latent attention has none, expected None")
    if return_lse_base not in (None, "basee", "base2"):
        raise ValueError(
            f"return_lse_base is {shown(return_lse_base)}: expected 'basee', 'base2' or None"
        )
    check_tensor("query", query, tuple(getattr(torch, name) for name in Q_DTYPES))
    if cum_seq_lens_q is not None:
        check_offsets("cum_seq_lens_q", cum_seq_lens_q)
    check_count("qk_nope_head_dim", qk_nope_head_dim)
    check_workspace("workspace_buffer", workspace_buffer, query.device)
    if multi_ctas_kv_counter_buffer is not None:
        check_workspace("multi_ctas_kv_counter_buffer", multi_ctas_kv_counter_buffer, query.device)
    check_dims("kv_lora_rank", kv_lora_rank, KV_LORA_RANKS)
    check_dims("qk_rope_head_dim", qk_rope_head_dim, QK_ROPE_HEAD_DIMS)
    return _attend_latents(given)


def trtllm_prefill_with_kv_cache_mla(
    query: Tensor, kv_cache: Tensor, workspace_buffer: Tensor, qk_nope_head_dim: int,
    kv_lora_rank: int, qk_rope_head_dim: int, block_tables: Tensor, seq_lens: Tensor | None,
    max_seq_len: int, sparse_mla_top_k: int = 0, out: Tensor | None = None,
    bmm1_scale: ScaleLike = 1.0, bmm2_scale: ScaleLike = 1.0, sinks: list[Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None, enable_pdl: bool | None = None,
    backend: str = "auto", is_var_seq: bool = True, uses_shared_paged_kv_idx: bool = True,
    lse: Tensor | None = None, return_lse: bool = False, cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto", cum_seq_lens_q: Tensor | None = None,
    max_q_len: int | None = None, multi_ctas_kv_counter_buffer: Tensor | None = None,
    sparse_mla_top_k_lens: Tensor | None = None, enable_dcp: bool = False, cp_world: int = 1,
    cp_rank: int = 0, causal_seqlens_kv_global: Tensor | None = None,
    use_fp16_softmax: bool | None = None, return_lse_base: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Do what ``trtllm_batch_decode_with_kv_cache_mla`` does, of as many queries as there are."""
    return trtllm_batch_decode_with_kv_cache_mla(**locals())


def _attend_latents(given: Mapping[str, Any]) -> Tensor | tuple[Tensor, Tensor]:
    rank, query = given["kv_lora_rank"], given["query"]
    cache = _latents(given)
    lens, most = _lens(given)
    rows, offsets, q_len = _rows(given)
    sm_scale, scales = _mla_scales(given, cache)
    table = given["block_tables"]
    arguments = {
        "num_heads": rows.shape[1],
        "kv_lora_rank": rank,
        "qk_rope_head_dim": given["qk_rope_head_dim"],
        "page_size": cache.shape[1],
        "sm_scale": sm_scale,
        "q_dtype": dtype_name(query.dtype),
        "kv_dtype": dtype_name(cache.dtype),
        "page_table": "shared",
        "causal": True,
    }
    planner = latent_planner(arguments, query.device)
    bound = planner.bind(cache, **scales)
    pages = BlockTable(table if table.dim() == 2 else table[:, 0])
    plan = plan_for_call(planner, pages, lens, offsets, max_q_len=q_len, max_kv_len=most)
    out, lse = _outputs_of(given, rows, rank)
    found = plan.run(rows[..., :rank], rows[..., rank:], bound, out=out, lse=lse)
    assert isinstance(found, Tensor)
    LseForm("ln" if given["return_lse_base"] == "basee" else "log2").finish(lse)
    result: Tensor = (
        given["out"] if given["out"] is not None else found.view(*query.shape[:-1], rank)
    )
    if not given["return_lse"]:
        return result
    filled = lse if given["lse"] is None else given["lse"]
    assert filled is not None
    return result, filled


def _latents(given: Mapping[str, Any]) -> Tensor:
    """Return the cache as [num_pages, page_size, kv_lora_rank + qk_rope_head_dim]."""
    query, cache = given["query"], given["kv_cache"]
    check_tensor("kv_cache", cache, (query.dtype, _FP8))
    refuse_gradients({"query": query, "kv_cache": cache})
    check_device("kv_cache", cache, query.device)
    width = given["kv_lora_rank"] + given["qk_rope_head_dim"]
    view: Tensor = cache.squeeze(1) if cache.dim() == 4 and cache.shape[1] == 1 else cache
    if view.dim() != 3 or view.shape[2] != width:
        raise ValueError(
            f"kv_cache has shape {list(cache.shape)}: expected [num_pages, page_size, {width}]"
        )
    return view


def _lens(given: Mapping[str, Any]) -> tuple[Tensor, int]:
    """Return lengths and the most there are, with tables that fit them."""
    table = given["block_tables"]
    check_table("block_tables", table, given["uses_shared_paged_kv_idx"], given["query"].device)
    if given["seq_lens"] is None:
        raise ValueError("seq_lens is None: that is for sparse attention, which is not built")
    check_length_of(given["seq_lens"], table)
    lens = as_lengths("seq_lens", given["seq_lens"])
    most = check_count("max_seq_len", given["max_seq_len"], least=0)
    if lens.device.type != "cpu":
        return lens, most
    if bool((lens > most).any()):
        raise ValueError(f"max_seq_len is {most}: seq_lens has {int(lens.max())}")
    if table.dim() == 3:
        page_size = given["kv_cache"].shape[-2]
        for b, n in enumerate(lens.tolist()):
            k_ids, v_ids = table[b, :, : -(-max(n, 0) // page_size)]
            if not torch.equal(k_ids, v_ids):
                raise ValueError(
                    f"block_tables[{b}] has other pages for values than for keys: a latent is both"
                )
    return lens, most


def _rows(given: Mapping[str, Any]) -> tuple[Tensor, Tensor | None, int]:
    """Return query rows, where those of each request begin, and the most of them."""
    query, offsets, most = given["query"], given["cum_seq_lens_q"], given["max_q_len"]
    width = given["kv_lora_rank"] + given["qk_rope_head_dim"]
    batch_size = given["block_tables"].shape[0]
    num_dims = 4 if offsets is None else 3
    if query.dim() != num_dims or query.shape[-1] != width:
        front = "batch_size, q_len" if offsets is None else "num_tokens"
        raise ValueError(
            f"query has shape {list(query.shape)}: expected [{front}, num_heads, {width}]"
        )
    if offsets is not None:
        check_device("cum_seq_lens_q", offsets, query.device)
        if offsets.shape[0] != batch_size + 1:
            raise ValueError(
                f"cum_seq_lens_q has {offsets.shape[0]} entries: expected {batch_size + 1}"
            )
        if most is None:
            return query, offsets, int(max(offsets.diff().tolist(), default=0))
        return query, offsets, check_count("max_q_len", most, least=0)
    if most is not None:
        raise ValueError("max_q_len is given: it belongs to cum_seq_lens_q, which is None")
    if query.shape[0] != batch_size:
        raise ValueError(f"query has {query.shape[0]} requests: block_tables has {batch_size}")
    q_len = query.shape[1]
    if q_len == 1:
        return query.flatten(0, 1), None, 1
    steps = torch.arange(batch_size + 1, dtype=torch.int32, device=query.device)
    return query.flatten(0, 1), steps * q_len, q_len


def _mla_scales(given: Mapping[str, Any], cache: Tensor) -> tuple[float, dict[str, ScaleLike]]:
    """Return ``sm_scale`` and the scale of the cache, which keys and values share."""
    for name in ("bmm1_scale", "bmm2_scale"):
        if isinstance(given[name], Tensor):
            raise TypeError(f"{name} is a tensor: expected a number")
    bmm1, bmm2 = (check_number(name, given[name]) for name in ("bmm1_scale", "bmm2_scale"))
    if cache.dtype != _FP8:
        if bmm2 != 1.0:
            raise ValueError(f"bmm2_scale is {bmm2}: latents are not quantised, expected 1")
        return bmm1, {}
    if bmm2 == 0.0:
        raise ValueError("bmm2_scale is 0: it is what a stored latent is multiplied with")
    return bmm1 / bmm2, {"k_scale": bmm2}


def _outputs_of(
    given: Mapping[str, Any], rows: Tensor, rank: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return views of out and lse by rows; lse is new where it is wanted and not given."""
    query, out, lse = given["query"], given["out"], given["lse"]
    if out is not None:
        check_tensor("out", out, (query.dtype,))
        if tuple(out.shape) != (*query.shape[:-1], rank):
            raise ValueError(
                f"out has shape {list(out.shape)}: expected {[*query.shape[:-1], rank]}"
            )
        out = _by_rows("out", out, rows.shape[0], 3)
    if lse is not None:
        check_tensor("lse", lse, (torch.float32,))
        shapes = list(rows.shape[:2]), list(query.shape[:-1])
        if list(lse.shape) not in shapes:
            raise ValueError(
                f"lse has shape {list(lse.shape)}: expected {shapes[0]} or {shapes[1]}"
            )
        lse = _by_rows("lse", lse, rows.shape[0], 2)
    return out, LseForm().new(rows, lse, given["return_lse"])


def _by_rows(name: str, tensor: Tensor, num_rows: int, num_dims: int) -> Tensor:
    """View [batch_size, q_len, ..] as rows, so that what is written there is seen."""
    if tensor.dim() == num_dims:
        return tensor
    try:
        return tensor.view(num_rows, *tensor.shape[2:])
    except RuntimeError:
        raise ValueError(
            f"{name} has strides {list(tensor.stride())}: its rows must be evenly apart"
        ) from None
