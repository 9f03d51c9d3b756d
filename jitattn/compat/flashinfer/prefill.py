"""FlashInfer's prefill wrapper over pages: queries of requests that follow each other."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from jitattn.compat.flashinfer.absent import names_of
from jitattn.compat.flashinfer.common.arguments import LseForm, refuse_unbuilt
from jitattn.compat.flashinfer.common.calls import (
    ForwardArguments,
    PlanArguments,
    Results,
    RunArguments,
    ScoreArguments,
    forward_of,
    sizes_of,
    window_change,
)
from jitattn.compat.flashinfer.common.paged_table import PagedTable, TableNames
from jitattn.compat.flashinfer.common.queries import PrefillWrapper, QueryArguments
from jitattn.compat.flashinfer.ragged import BatchPrefillWithRaggedKVCacheWrapper
from jitattn.compat.flashinfer.single import (
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from jitattn.compat.flashinfer.trtllm.attention import trtllm_batch_context_with_kv_cache
from jitattn.compat.flashinfer.trtllm.latents import trtllm_prefill_with_kv_cache_mla
from jitattn.compat.flashinfer.trtllm.ragged import trtllm_ragged_attention_deepseek
from jitattn.tensors.scales import ScaleLike

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_prefill_with_kv_cache_mla",
    "trtllm_ragged_attention_deepseek",
]

__getattr__ = names_of(__name__, __all__)

_NAMES = TableNames("paged_kv_", "_buf")


class BatchPrefillWithPagedKVCacheWrapper(PrefillWrapper):
    """Prefill and append over pages listed one request after the other.

    Query i of a request with n queries and m keys sits at m - n + i. What differs from FlashInfer:
    docs/from-flashinfer.md.
    """

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD",
        use_cuda_graph: bool = False, qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None, paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None, custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None, backend: str = "auto",
        jit_args: list[Any] | None = None, jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False, max_total_num_rows: int | None = None,
    ) -> None:  # fmt: skip
        """Remember the device and the buffers.

        Args:
            float_workspace_buffer: any tensor on the device of all others; nothing is written
                there.
            kv_layout: "NHD" or "HND", the order of a page's dimensions.
            use_cuda_graph: runs are captured: the batch size and ``plan``'s arguments stay, the
                first plan's queries are the most, and ``plan``, outside the graph, brings captured
                runs up to date.
            qo_indptr_buf: int32 [batch_size + 1], with ``use_cuda_graph`` as all of these.
            paged_kv_indptr_buf: int32 [batch_size + 1].
            paged_kv_indices_buf: int32, room for the most pages.
            paged_kv_last_page_len_buf: int32 [batch_size].
            custom_mask_buf: uint8, as large as packed masks get; nothing is written there.
            mask_indptr_buf: int32 [batch_size + 1], with ``custom_mask_buf``; likewise.
            backend: a name that FlashInfer knows; all mean the same kernels.
            jit_args: refused unless None.
            jit_kwargs: likewise.
            variant_owns_mask: refused unless False.
            max_total_num_rows: with ``use_cuda_graph``, the most queries of any captured batch;
                None: those of the first plan.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        refuse_unbuilt(locals())
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
        tables = paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf
        buffers = dict(zip(_NAMES.buffers(), tables, strict=True))
        self._start({"qo_indptr_buf": qo_indptr_buf, **buffers}, custom_mask_buf, mask_indptr_buf)
        self._bound_rows(max_total_num_rows)

    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int,
        page_size: int, head_dim_vo: int | None = None, custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None, causal: bool = False,
        pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None, window_left: int = -1,
        logits_soft_cap: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None, non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None, token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0, max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None, seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None, max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None, fixed_split_size: int | None = None,
        disable_split_kv: bool = False, uniform_q_len: int | None = None,
        use_token_head_sf: bool = False,
    ) -> None:  # fmt: skip
        """Plan a batch. It waits for the device only to learn the most queries of a request.

        Arguments that ``BatchDecodeWithPagedKVCacheWrapper.plan`` has, too, are the same there.
        Those of multi-item scoring, of positions, of reductions in float16 and of tokens' scales
        are refused.

        Tables, on the device or the CPU: ``qo_indptr`` int32 [batch_size + 1], where the queries of
        each request begin; ``paged_kv_indptr`` int32 [batch_size + 1], ``paged_kv_indices`` int32
        [>= paged_kv_indptr[-1]] and ``paged_kv_last_page_len`` int32 [batch_size]; ``block_tables``
        int32 [batch_size, max_pages], read instead of the indices; ``seq_lens`` [batch_size], read
        instead of the last pages; ``seq_lens_q``, which must be what ``qo_indptr`` says.

        Masks: ``custom_mask`` bool [sum of q_len * kv_len] or ``packed_custom_mask`` uint8, the
        same bits from the lowest up, each request's from a byte of its own on. Then ``causal`` says
        nothing, as in FlashInfer, and the window counts. Without: ``causal``.

        Bounds: ``max_token_per_sequence``, with which nothing waits; ``max_sequence_kv``; and with
        ``use_cuda_graph`` ``uniform_q_len``, the most queries of a request in any captured batch,
        which ``max_token_per_sequence`` or else all rows of the first plan are without it.

        Raises:
            TypeError, ValueError, ConfigError: naming the argument.
        """
        refuse_unbuilt(locals())
        scores = ScoreArguments(window_left, logits_soft_cap, sm_scale)
        given = PlanArguments(
            num_qo_heads, num_kv_heads, page_size, q_data_type, kv_data_type, o_data_type, scores,
            fixed_split_size, disable_split_kv,
        )  # fmt: skip
        queries = QueryArguments(
            qo_indptr, head_dim_qk, head_dim_vo, custom_mask, packed_custom_mask, causal,
            seq_lens_q, max_token_per_sequence, max_sequence_kv, uniform_q_len,
        )  # fmt: skip
        table = PagedTable(
            _NAMES, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size,
            block_tables, seq_lens,
        )  # fmt: skip
        self._plan_pages(given, queries, table, non_blocking)

    begin_forward = plan
    workspace_size = sizes_of(plan, "non_blocking", "use_token_head_sf")

    def run(
        self, q: Tensor, paged_kv_cache: Tensor | tuple[Tensor, Tensor], *args: object,
        q_scale: ScaleLike | None = None, k_scale: ScaleLike | None = None,
        v_scale: ScaleLike | None = None,
        out: Tensor | None = None, lse: Tensor | None = None, return_lse: bool = False,
        lse_base: str = "log2", lse_layout: str = "NH", enable_pdl: bool | None = None,
        window_left: int | None = None, sinks: Tensor | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None, uses_spcompress: bool | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Attend the queries of each request to its pages, on the current stream.

        Args:
            q: [num_tokens, num_qo_heads, head_dim_qk]; rows past ``qo_indptr[-1]`` have out 0 and
                lse -inf.
            paged_kv_cache: as of ``BatchDecodeWithPagedKVCacheWrapper.run``.
            args: refused: they are for kernels of ``jit_args``.
            q_scale: refused unless None or 1.
            k_scale: of FP8 and NVFP4: a number, or float32 [], [1] or [num_kv_heads].
            v_scale: likewise.
            out: filled and returned where given.
            lse: float32, filled where given.
            return_lse: return lse, too.
            lse_base: "log2" or "ln".
            lse_layout: "NH" is [num_tokens, num_qo_heads], "HN" the other way round.
            enable_pdl: no effect.
            window_left: of this call; None: that of ``plan``.
            sinks: [num_qo_heads], whose exp is added to each sum.
            kv_cache_sf: the scales of NVFP4 blocks, as of the decode wrapper.
            skip_softmax_threshold_scale_factor: refused unless None.
            use_fp16_softmax: refused unless None or False.
            uses_spcompress: likewise.

        Returns:
            out, or (out, lse). A row that sees no key has out 0 and lse -inf.

        Raises:
            TypeError, ValueError, ConfigError: naming the argument, before any launch.
        """
        return self._run(locals(), {})

    def _run(self, given: Mapping[str, Any], changes: Mapping[str, object]) -> Results:
        """Do what ``run`` does of its arguments, under ``changes`` of the planned ones."""
        refuse_unbuilt(given, but=("kv_cache_sf",))
        names = "q", "q_scale", "k_scale", "v_scale", "out", "lse", "return_lse", "sinks"
        form = LseForm(given["lse_base"], given["lse_layout"])
        call = RunArguments(*(given[name] for name in (*names, "kv_cache_sf")))._replace(form=form)
        changes = {**changes, **window_change(given["window_left"])}
        return self._attend_pages(given["paged_kv_cache"], call, changes)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def _read_forward(
        self, q: Tensor, paged_kv_cache: Tensor | tuple[Tensor, Tensor], causal: bool = False,
        pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False,
        k_scale: ScaleLike | None = None, v_scale: ScaleLike | None = None, window_left: int = -1,
        logits_soft_cap: float | None = None, sm_scale: float | None = None,
        rope_scale: float | None = None, rope_theta: float | None = None,
    ) -> ForwardArguments:  # fmt: skip
        refuse_unbuilt(locals())
        call = RunArguments(q, None, k_scale, v_scale)
        scores = ScoreArguments(window_left, logits_soft_cap, sm_scale)
        return ForwardArguments(call, paged_kv_cache, scores, causal)

    def _forward(self, given: ForwardArguments) -> Results:
        return self._attend_pages(given.kv_cache, given.run, self._forward_changes(given))

    forward = forward_of(
        _read_forward, "Call ``run`` with these instead of ``plan``'s.", return_lse=False
    )
    forward_return_lse = forward_of(
        _read_forward, "Call ``forward`` and return lse, too.", return_lse=True
    )
