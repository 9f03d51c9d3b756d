"""FlashInfer's TensorRT-LLM function over K and V without pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jitattn.base.validate import check_count, check_flag, check_number
from jitattn.compat.flashinfer.common.arguments import (
    Q_DTYPES,
    LseForm,
    as_lengths,
    check_queries,
    check_workspace,
    ragged_cache,
    refuse_unbuilt,
)
from jitattn.compat.flashinfer.common.batch import check_equal, check_offsets
from jitattn.compat.flashinfer.common.calls import window_change
from jitattn.compat.flashinfer.trtllm.attention import sinks_of
from jitattn.compat.gradients import refuse_gradients
from jitattn.kernels.attention.functional import planner_of
from jitattn.kernels.common.planner_base import plan_for_call
from jitattn.tensors.page_tables import RaggedKV
from jitattn.tensors.scales import ScaleLike
from jitattn.tensors.tensor_checks import check_tensor


def trtllm_ragged_attention_deepseek(
    query: Tensor, key: Tensor, value: Tensor, workspace_buffer: Tensor, seq_lens: Tensor,
    max_q_len: int, max_kv_len: int, bmm1_scale: ScaleLike, bmm2_scale: ScaleLike,
    o_sf_scale: float | None, batch_size: int, window_left: int, cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor, enable_pdl: bool | None, is_causal: bool, return_lse: bool,
    attention_sinks: Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None, out: Tensor | None = None,
    lse: Tensor | None = None,
    sage_attn_sfs: tuple[Tensor | None, ...] = (None, None, None, None),
    num_elts_per_sage_attn_blk: tuple[int, ...] = (0, 0, 0, 0), backend: str = "trtllm-gen",
    q_seq_lens_cpu: Tensor | None = None, kv_seq_lens_cpu: Tensor | None = None,
    use_fp16_softmax: bool | None = None, uses_spcompress: bool | None = None,
    skip_all_rows_active_check: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attend the queries of requests that follow each other to their keys.

    ``query`` is [num_tokens, num_heads, head_dim], float16 or bfloat16, ``key`` and ``value``
    [num_kv_tokens, num_kv_heads, ..], like it. ``cum_seq_lens_q`` and ``cum_seq_lens_kv`` are int32
    [batch_size + 1], where the queries, at most ``max_q_len``, and the keys of each request begin;
    ``seq_lens`` [batch_size] are those keys, at most ``max_kv_len``. Query i of n sits at
    ``seq_lens`` - n + i. ``bmm1_scale`` is all that multiplies scores, a number; ``bmm2_scale`` is
    1, and ``o_sf_scale`` None, 1 or below 0, none. ``attention_sinks`` has a number for each head.
    ``lse`` is float32 [num_tokens, num_heads], base 2. ``workspace_buffer`` is not written,
    ``q_seq_lens_cpu`` and ``kv_seq_lens_cpu`` [batch_size] are copies on the CPU. Skipped tiles and
    quantised queries (``sage_attn_sfs``) are refused.

    Returns:
        out [num_tokens, num_heads, head_dim of value], or (out, lse). A row that sees no key has
        out 0 and lse -inf.

    Raises:
        TypeError, ValueError, ConfigError: naming the argument, before any launch.
    """
    given = dict(locals())
    refuse_unbuilt({**given, "o_sf_scale": None})
    _check_ragged(given)
    return _attend_ragged(given)


def _attend_ragged(given: dict[str, Any]) -> Tensor | tuple[Tensor, Tensor]:
    query, key, value = given["query"], given["key"], given["value"]
    sinks = sinks_of("attention_sinks", given["attention_sinks"], query)
    arguments: dict[str, object] = {
        "num_qo_heads": query.shape[1],
        "num_kv_heads": key.shape[1],
        "head_dim": query.shape[2],
        "head_dim_vo": value.shape[2],
        "page_size": None,
        "q_dtype": query.dtype,
        "kv_dtype": key.dtype,
        "page_table": "ragged",
        "causal": check_flag("is_causal", given["is_causal"]),
        "sm_scale": check_number("bmm1_scale", given["bmm1_scale"]),
        "use_sinks": sinks is not None,
        **window_change(given["window_left"]),
    }
    planner = planner_of(arguments, query.device)
    offsets = given["cum_seq_lens_kv"]
    limits = {n: check_count(n, given[n], least=0) for n in ("max_q_len", "max_kv_len")}
    plan = plan_for_call(
        planner, RaggedKV(offsets), offsets.diff(), given["cum_seq_lens_q"], **limits
    )
    form = LseForm()
    lse = form.new(query, given["lse"], given["return_lse"])
    found = plan.run(query, planner.bind((key, value)), out=given["out"], lse=lse, sinks=sinks)
    assert isinstance(found, Tensor)
    return form.results(found, lse, return_lse=given["return_lse"])


def _check_ragged(given: dict[str, Any]) -> None:
    query = given["query"]
    check_queries("query", query)
    check_tensor("query", query, tuple(getattr(torch, name) for name in Q_DTYPES))
    refuse_gradients({"query": query})
    check_workspace("workspace_buffer", given["workspace_buffer"], query.device)
    for name in ("key", "value"):
        check_queries(name, given[name])
        check_tensor(name, given[name], (query.dtype,))
    ragged_cache((given["key"], given["value"]), "NHD", str(query.dtype)[len("torch.") :], None)
    size = check_count("batch_size", given["batch_size"], least=0)
    for name in ("cum_seq_lens_q", "cum_seq_lens_kv"):
        check_offsets(name, given[name])
        if given[name].shape[0] != size + 1:
            raise ValueError(f"{name} has {given[name].shape[0]} entries: expected {size + 1}")
    lens = given["cum_seq_lens_kv"].diff()
    check_equal("seq_lens", as_lengths("seq_lens", given["seq_lens"]), lens, "cum_seq_lens_kv's")
    check_equal("kv_seq_lens_cpu", given["kv_seq_lens_cpu"], lens, "cum_seq_lens_kv's")
    q_lens = given["cum_seq_lens_q"].diff()
    check_equal("q_seq_lens_cpu", given["q_seq_lens_cpu"], q_lens, "cum_seq_lens_q's")
    if any(sf is not None for sf in given["sage_attn_sfs"]):
        raise ValueError("sage_attn_sfs are given: q is not quantised, expected None four times")
    if any(given["num_elts_per_sage_attn_blk"]):
        raise ValueError("num_elts_per_sage_attn_blk is given: q is not quantised, expected zeros")
    check_flag("skip_all_rows_active_check", given["skip_all_rows_active_check"])
    if (scale := check_number("bmm2_scale", given["bmm2_scale"])) != 1.0:
        raise ValueError(f"bmm2_scale is {scale}: V is not quantised, expected 1")
    given_scale = given["o_sf_scale"]
    scale = 1.0 if given_scale is None else check_number("o_sf_scale", given_scale)
    if scale > 0.0 and scale != 1.0:
        raise ValueError(f"o_sf_scale is {scale}: outputs have no scale, expected None, 1 or -1")
