"""FlashInfer's TensorRT-LLM functions over block tables: one call plans and runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jitattn.base.validate import as_int, check_count, check_flag, check_number, shown
from jitattn.compat.flashinfer.common.arguments import (
    Q_DTYPES,
    LseForm,
    as_lengths,
    cache_pair,
    check_layout,
    check_queries,
    check_workspace,
    refuse_unbuilt,
)
from jitattn.compat.flashinfer.common.batch import check_equal, check_offsets
from jitattn.compat.flashinfer.common.calls import window_change
from jitattn.compat.gradients import refuse_gradients
from jitattn.kernels.attention.functional import planner_of
from jitattn.kernels.common.planner_base import plan_for_call
from jitattn.spec.dtype import FP8_DTYPES, dtype_name
from jitattn.tensors.page_tables import BlockTable
from jitattn.tensors.scales import ScaleLike
from jitattn.tensors.tensor_checks import check_device, check_tensor

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def trtllm_batch_decode_with_kv_cache(
    query: Tensor, kv_cache: Tensor | tuple[Tensor, Tensor], workspace_buffer: Tensor,
    block_tables: Tensor, seq_lens: Tensor, max_seq_len: int, bmm1_scale: ScaleLike = 1.0,
    bmm2_scale: ScaleLike = 1.0, window_left: int = -1, out: Tensor | None = None,
    out_dtype: torch.dtype | str | None = None, o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None, sinks: list[Tensor] | Tensor | None = None,
    kv_layout: str = "HND", enable_pdl: bool | None = None, backend: str = "auto",
    q_len_per_req: int | None = 1, o_scale: float | None = 1.0, mask: Tensor | None = None,
    max_q_len: int | None = None, cum_seq_lens_q: Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: tuple[Tensor, Tensor] | None = None, uses_shared_paged_kv_idx: bool = True,
    lse: Tensor | None = None, return_lse: bool = False, bmm1_scale_log2: Tensor | None = None,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
    enable_block_sparse_attention: bool = False, cp_world: int = 1, cp_rank: int = 0,
    causal_seqlens_kv_global: Tensor | None = None,
    bf16q_fp8kv_transform_mode: str | None = None, request_order: Tensor | None = None,
    request_order_plan: object = None, sparse_top_k: int = 0,
    length_aware_schedule: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attend a few queries of each request to its pages; each sees no later key.

    ``query`` is [num_tokens, num_heads, head_dim], float16 or bfloat16: ``q_len_per_req`` rows of
    each request, or those from ``cum_seq_lens_q`` (int32 [batch_size + 1]) on, at most
    ``max_q_len``. ``kv_cache`` is [num_pages, 2, num_kv_heads, page_size, head_dim] ("NHD": tokens
    before heads), or with 1 where K is V, or a pair without that dimension, any strides but the
    last; 16 bits like ``query``, or FP8. ``block_tables`` is int32 [batch_size, max_pages], or
    without ``uses_shared_paged_kv_idx`` [batch_size, 2, max_pages], K ids and V ids; entries past a
    request's last page are never read. ``seq_lens`` [batch_size] are at most ``max_seq_len``.

    ``bmm1_scale`` is all that multiplies q.k and ``bmm2_scale`` what multiplies values: numbers, or
    of FP8 caches float32 tensors of one element, too; other caches have a ``bmm2_scale`` of 1.
    ``sinks`` is a tensor of a number for each head, or a list of that tensor. ``lse`` is float32
    [num_tokens, num_heads], base 2, filled where given. ``workspace_buffer`` and
    ``multi_ctas_kv_counter_buffer`` are not written; ``backend``, ``enable_pdl``,
    ``length_aware_schedule`` and ``bf16q_fp8kv_transform_mode`` have no effect. ``mask``,
    ``kv_cache_sf``, scales of outputs, skipped tiles, sparse attention, context parallelism and
    orders of requests are refused.

    Returns:
        out like ``query``, or (out, lse). A row that sees no key has out 0 and lse -inf.

    Raises:
        TypeError, ValueError, ConfigError: naming the argument, before any launch.
    """
    given = dict(locals())
    _check_common(given)
    most, offsets = _queries_of(given)
    call = _Call.of(given, BlockTable(block_tables), max_seq_len, offsets, most)
    return call.run(given, causal=True)


def trtllm_batch_context_with_kv_cache(
    query: Tensor, kv_cache: Tensor | tuple[Tensor, Tensor], workspace_buffer: Tensor,
    block_tables: Tensor, seq_lens: Tensor, max_q_len: int, max_kv_len: int, bmm1_scale: ScaleLike,
    bmm2_scale: ScaleLike, batch_size: int, cum_seq_lens_q: Tensor, cum_seq_lens_kv: Tensor,
    window_left: int = -1, out: Tensor | None = None, out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None, o_sf_vec_size: int | None = None, kv_layout: str = "HND",
    enable_pdl: bool | None = None, sinks: list[Tensor] | Tensor | None = None,
    kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    uses_shared_paged_kv_idx: bool = True, causal: bool = True, lse: Tensor | None = None,
    return_lse: bool = False, multi_ctas_kv_counter_buffer: Tensor | None = None,
    use_fp16_softmax: bool | None = None, uses_spcompress: bool | None = None,
    backend: str = "trtllm-gen", window_right: int = -1,
    variable_window_token_starts: Tensor | None = None,
    variable_window_token_ends: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attend the queries of requests, which follow each other, to their pages.

    Arguments that ``trtllm_batch_decode_with_kv_cache`` has, too, are the same there. The queries
    of a request are those from ``cum_seq_lens_q`` (int32 [batch_size + 1]) on, at most
    ``max_q_len``; query i of n sits at ``seq_lens`` - n + i. ``cum_seq_lens_kv`` are the sums of
    ``seq_lens``, which on the CPU is checked and on the device not looked at. ``window_right`` is
    -1, or 0 with ``causal``.

    Returns:
        out like ``query``, or (out, lse), base 2. A row that sees no key, and rows past
        ``cum_seq_lens_q[-1]``, have out 0 and lse -inf.

    Raises:
        TypeError, ValueError, ConfigError: naming the argument, before any launch.
    """
    given = dict(locals())
    _check_common(given, but=("window_right",))
    check_flag("causal", causal)
    if as_int(window_right) not in ((-1, 0) if causal else (-1,)):
        raise ValueError(
            f"window_right is {shown(window_right)}: expected -1, or 0 with causal; others are not "
            "built"
        )
    size = check_count("batch_size", batch_size, least=0)
    if block_tables.shape[0] != size:
        raise ValueError(f"batch_size is {size}: block_tables has {block_tables.shape[0]} rows")
    most = check_count("max_q_len", max_q_len, least=0)
    check_offsets("cum_seq_lens_q", cum_seq_lens_q)
    check_offsets("cum_seq_lens_kv", cum_seq_lens_kv)
    for name in ("cum_seq_lens_q", "cum_seq_lens_kv"):
        if given[name].shape[0] != size + 1:
            raise ValueError(f"{name} has {given[name].shape[0]} entries: expected {size + 1}")
    lens = as_lengths("seq_lens", seq_lens)
    check_equal("seq_lens", lens, cum_seq_lens_kv.diff(), "what cum_seq_lens_kv says")
    call = _Call.of(given, BlockTable(block_tables), max_kv_len, cum_seq_lens_q, most)
    return call.run(given, causal=causal)


def _check_common(given: Mapping[str, Any], but: tuple[str, ...] = ()) -> None:
    """Check what both functions are given."""
    refuse_unbuilt(given, but=but)
    query, block_tables = given["query"], given["block_tables"]
    check_queries("query", query)
    check_tensor("query", query, tuple(getattr(torch, name) for name in Q_DTYPES))
    refuse_gradients({"query": query})
    check_layout(given["kv_layout"])
    check_workspace("workspace_buffer", given["workspace_buffer"], query.device)
    if given["multi_ctas_kv_counter_buffer"] is not None:
        buffer = given["multi_ctas_kv_counter_buffer"]
        check_workspace("multi_ctas_kv_counter_buffer", buffer, query.device)
    check_table("block_tables", block_tables, given["uses_shared_paged_kv_idx"], query.device)
    check_length_of(given["seq_lens"], block_tables)


def check_table(name: str, table: Tensor, uses_shared_ids: bool, device: torch.device) -> None:
    """Raise unless a block table is int32 with as many dimensions as its ids need.

    Raises:
        TypeError, ValueError: naming it.
    """
    is_shared = check_flag("uses_shared_paged_kv_idx", uses_shared_ids)
    check_tensor(name, table, (torch.int32,))
    wanted = "[batch_size, max_pages]" if is_shared else "[batch_size, 2, max_pages]"
    if table.dim() != (2 if is_shared else 3) or (not is_shared and table.shape[1] != 2):
        raise ValueError(
            f"{name} has shape {list(table.shape)}: expected {wanted} with "
            f"uses_shared_paged_kv_idx={is_shared}"
        )
    check_device(name, table, device)


def check_length_of(seq_lens: Tensor, table: Tensor) -> None:
    """Raise unless there is a length for each row of a table.

    Raises:
        TypeError, ValueError: naming ``seq_lens``.
    """
    lens = as_lengths("seq_lens", seq_lens)
    if lens.shape[0] != table.shape[0]:
        raise ValueError(f"seq_lens has {lens.shape[0]} entries: expected {table.shape[0]}")
    check_device("seq_lens", lens, table.device)


def _queries_of(given: Mapping[str, Any]) -> tuple[int, Tensor | None]:
    """Return the most queries of a request, and where they begin unless each has one."""
    query, most, offsets = given["query"], given["max_q_len"], given["cum_seq_lens_q"]
    if (most is None) != (offsets is None):
        name = "max_q_len" if most is None else "cum_seq_lens_q"
        raise ValueError(f"{name} is None: max_q_len and cum_seq_lens_q come together")
    batch_size = given["block_tables"].shape[0]
    q_len = given["q_len_per_req"]
    if offsets is not None:
        if q_len not in (None, 1):
            raise ValueError(f"q_len_per_req is {q_len}: cum_seq_lens_q says where queries begin")
        check_offsets("cum_seq_lens_q", offsets)
        if offsets.shape[0] != batch_size + 1:
            raise ValueError(
                f"cum_seq_lens_q has {offsets.shape[0]} entries: expected {batch_size + 1}"
            )
        return check_count("max_q_len", most, least=0), offsets
    q_len = check_count("q_len_per_req", 1 if q_len is None else q_len)
    if query.shape[0] != batch_size * q_len:
        raise ValueError(
            f"query has {query.shape[0]} rows: expected {batch_size} * {q_len}, q_len_per_req rows "
            "of each request"
        )
    if q_len == 1:
        return 1, None
    steps = torch.arange(batch_size + 1, dtype=torch.int32, device=query.device)
    return q_len, steps * q_len


class _Call(NamedTuple):
    """Pages, lengths and queries of a call, checked."""

    pages: BlockTable
    seq_lens: Tensor
    max_kv_len: int
    qo_indptr: Tensor | None
    max_q_len: int
    kv: tuple[Tensor, Tensor]

    @classmethod
    def of(
        cls,
        given: Mapping[str, Any],
        pages: BlockTable,
        max_kv_len: int,
        qo_indptr: Tensor | None,
        max_q_len: int,
    ) -> _Call:
        name = "max_seq_len" if "max_seq_len" in given else "max_kv_len"
        most = check_count(name, max_kv_len, least=0)
        lens = as_lengths("seq_lens", given["seq_lens"])
        if lens.device.type == "cpu" and bool((lens > most).any()):
            raise ValueError(f"{name} is {most}: seq_lens has {int(lens.max())}")
        kv = cache_pair("kv_cache", given["kv_cache"], given["kv_layout"])
        dtypes = tuple(dict.fromkeys((given["query"].dtype, *_fp8())))
        for part in kv:
            check_tensor("kv_cache", part, dtypes)
            check_device("kv_cache", part, pages.device)
        return cls(pages, lens, most, qo_indptr, max_q_len, kv)

    def run(self, given: Mapping[str, Any], *, causal: bool) -> Tensor | tuple[Tensor, Tensor]:
        """Plan, run, and turn lse to base 2."""
        query, (k, v) = given["query"], self.kv
        sinks = sinks_of("sinks", given["sinks"], query)
        sm_scale, scales = _scales(given, k.dtype in _fp8())
        heads = 2 if given["kv_layout"] == "NHD" else 1
        arguments: dict[str, object] = {
            "num_qo_heads": query.shape[1],
            "num_kv_heads": k.shape[heads],
            "head_dim": query.shape[2],
            "head_dim_vo": v.shape[3],
            "page_size": k.shape[3 - heads],
            "q_dtype": query.dtype,
            "kv_dtype": k.dtype,
            "out_dtype": _out_dtype(given),
            "kv_layout": given["kv_layout"],
            "page_table": self.pages.layout.value,
            "causal": causal,
            "sm_scale": sm_scale,
            "use_sinks": sinks is not None,
            **window_change(given["window_left"]),
        }
        planner = planner_of(arguments, query.device)
        kv = planner.bind((k, v), **scales)
        form = LseForm()
        lse = form.new(query, given["lse"], given["return_lse"])
        plan = plan_for_call(
            planner,
            self.pages,
            self.seq_lens,
            self.qo_indptr,
            max_q_len=self.max_q_len,
            max_kv_len=self.max_kv_len,
        )
        out = plan.run(query, kv, out=given["out"], lse=lse, sinks=sinks)
        assert isinstance(out, Tensor)
        return form.results(out, lse, return_lse=given["return_lse"])


def _fp8() -> tuple[torch.dtype, ...]:
    return tuple(getattr(torch, name) for name in FP8_DTYPES)


def _scales(
    given: Mapping[str, Any], is_quantised: bool
) -> tuple[float, dict[str, float | Tensor]]:
    """Return ``sm_scale`` and the scales of a cache.

    Those of an FP8 cache are its own, so that layers with other scales share a planner.
    """
    if is_quantised:
        names = ("bmm1_scale", "bmm2_scale")
        k_scale, v_scale = (scale_of(name, given[name], given["query"].device) for name in names)
        return 1.0, {"k_scale": k_scale, "v_scale": v_scale}
    for name in ("bmm1_scale", "bmm2_scale"):
        if isinstance(given[name], Tensor):
            raise TypeError(f"{name} is a tensor: those are for FP8 caches, expected a number")
    if (scale := check_number("bmm2_scale", given["bmm2_scale"])) != 1.0:
        raise ValueError(f"bmm2_scale is {scale}: V is not quantised, expected 1")
    return check_number("bmm1_scale", given["bmm1_scale"]), {}


def scale_of(name: str, scale: object, device: torch.device) -> float | Tensor:
    """Return a number or a float32 tensor of one element.

    Raises:
        TypeError, ValueError: naming it.
    """
    if not isinstance(scale, Tensor):
        return check_number(name, scale)
    check_tensor(name, scale, (torch.float32,))
    if scale.numel() != 1:
        raise ValueError(f"{name} has shape {list(scale.shape)}: expected one element")
    check_device(name, scale, device)
    return scale.reshape(1)


def sinks_of(name: str, sinks: list[Tensor] | Tensor | None, query: Tensor) -> Tensor | None:
    """Return [num_heads] of a tensor with a number for each head, or of a list of one.

    Raises:
        TypeError, ValueError: naming it.
    """
    if isinstance(sinks, Sequence):
        if len(sinks) != 1:
            raise ValueError(
                f"{name} is a list of {len(sinks)}: expected a tensor, or a list of it"
            )
        sinks = sinks[0]
    if sinks is None:
        return None
    check_tensor(name, sinks, _FLOATS)
    if sinks.numel() != query.shape[1] or sinks.dim() not in (1, 2):
        raise ValueError(f"{name} has shape {list(sinks.shape)}: expected [{query.shape[1]}]")
    return sinks.reshape(-1)


def _out_dtype(given: Mapping[str, Any]) -> str:
    out, out_dtype, query = given["out"], given["out_dtype"], given["query"]
    if out is not None and not isinstance(out, Tensor):
        raise TypeError(f"out is a {type(out).__name__}: expected a tensor")
    if out_dtype is None:
        out_dtype = query.dtype if out is None else out.dtype
    try:
        name = dtype_name(out_dtype, "out_dtype")
    except TypeError:
        name = shown(out_dtype)
    if name not in (*Q_DTYPES, "float32"):
        raise ValueError(f"out_dtype is {name}: expected float16, bfloat16 or float32")
    return name
