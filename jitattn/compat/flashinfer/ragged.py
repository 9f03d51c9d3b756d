"""FlashInfer's prefill wrapper over K and V without pages."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from jitattn.base.validate import check_flag
from jitattn.compat.flashinfer.common.arguments import (
    LseForm,
    Pair,
    as_lengths,
    ragged_cache,
    refuse_unbuilt,
)
from jitattn.compat.flashinfer.common.calls import (
    ForwardArguments,
    PlanArguments,
    Results,
    RunArguments,
    ScoreArguments,
    forward_of,
)
from jitattn.compat.flashinfer.common.queries import PrefillWrapper, QueryArguments, check_copy
from jitattn.tensors.page_tables import RaggedKV
from jitattn.tensors.quantization import KVCache
from jitattn.tensors.scales import ScaleLike


class BatchPrefillWithRaggedKVCacheWrapper(PrefillWrapper):
    """Prefill over K and V whose tokens follow each other, without pages.

    Query i of a request with n queries and m keys sits at m - n + i. What differs from FlashInfer:
    docs/from-flashinfer.md.
    """

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD",
        use_cuda_graph: bool = False, qo_indptr_buf: Tensor | None = None,
        kv_indptr_buf: Tensor | None = None, custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None, backend: str = "auto",
        jit_args: list[Any] | None = None, jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:  # fmt: skip
        """Remember the device and the buffers.

        The arguments are those of ``BatchPrefillWithPagedKVCacheWrapper``, without its tables:
        ``kv_indptr_buf`` is int32 [batch_size + 1], and "HND" has heads before tokens in K and V.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        refuse_unbuilt(locals())
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
        buffers = {"qo_indptr_buf": qo_indptr_buf, "kv_indptr_buf": kv_indptr_buf}
        self._start(buffers, custom_mask_buf, mask_indptr_buf)

    def plan(
        self, qo_indptr: Tensor, kv_indptr: Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim_qk: int, head_dim_vo: int | None = None, custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None, causal: bool = False,
        pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False,
        window_left: int = -1, logits_soft_cap: float | None = None,
        sm_scale: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None, non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None, token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0, max_item_len_ptr: Tensor | None = None,
        fixed_split_size: int | None = None, disable_split_kv: bool = False,
        seq_lens: Tensor | None = None, seq_lens_q: Tensor | None = None,
        max_token_per_sequence: int | None = None, max_sequence_kv: int | None = None,
        v_indptr: Tensor | None = None, o_indptr: Tensor | None = None,
        qo_indptr_cpu: Tensor | None = None, kv_indptr_cpu: Tensor | None = None,
        uniform_q_len: int | None = None, use_token_head_sf: bool = False,
    ) -> None:  # fmt: skip
        """Plan a batch. It waits for the device only to learn the most queries of a request.

        ``kv_indptr`` int32 [batch_size + 1] says where the tokens of each request begin in K and V,
        on the device or the CPU; ``seq_lens``, where given, how many of them there are. Others are
        as of ``BatchPrefillWithPagedKVCacheWrapper.plan``. ``qo_indptr_cpu`` and ``kv_indptr_cpu``
        are copies on the CPU, with which nothing waits for the device. Besides what is refused
        there, ``v_indptr`` and ``o_indptr`` are unless None.

        Raises:
            TypeError, ValueError, ConfigError: naming the argument.
        """
        refuse_unbuilt(locals())
        scores = ScoreArguments(window_left, logits_soft_cap, sm_scale)
        given = PlanArguments(
            num_qo_heads, num_kv_heads, None, q_data_type, kv_data_type, o_data_type, scores,
            fixed_split_size, disable_split_kv,
        )  # fmt: skip
        queries = QueryArguments(
            qo_indptr, head_dim_qk, head_dim_vo, custom_mask, packed_custom_mask, causal,
            seq_lens_q, max_token_per_sequence, max_sequence_kv, uniform_q_len, qo_indptr_cpu,
        )  # fmt: skip
        check_copy("kv_indptr_cpu", kv_indptr_cpu, kv_indptr)
        self._plan(given, queries, kv_indptr, seq_lens, non_blocking)

    begin_forward = plan

    def _plan(
        self,
        given: PlanArguments,
        queries: QueryArguments,
        kv_indptr: Tensor,
        seq_lens: Tensor | None,
        non_blocking: bool,
    ) -> None:
        """Check a batch, copy it to the device, and plan it or refresh the plan."""
        # Heads before tokens are a matter of strides.
        arguments = {**given.checked("NHD"), **queries.checked(), "page_table": "ragged"}
        queries.check_offsets("kv_indptr", kv_indptr)
        lens = _check_lens(seq_lens, kv_indptr.diff())
        check_flag("non_blocking", non_blocking)
        self._check_room("qo_indptr_buf", queries.qo_indptr)
        self._check_room("kv_indptr_buf", kv_indptr)
        prepared = self._prepare(queries, lens, arguments)
        qo_indptr = self._placed("qo_indptr_buf", queries.qo_indptr, non_blocking)
        pages = RaggedKV(self._placed("kv_indptr_buf", kv_indptr, non_blocking))
        self._adopt(arguments, prepared, pages, self._to_device(lens, non_blocking), qo_indptr)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, *args: object, q_scale: float | None = None,
        k_scale: ScaleLike | None = None, v_scale: ScaleLike | None = None,
        o_scale: float | None = None,
        out: Tensor | None = None, lse: Tensor | None = None, return_lse: bool = False,
        lse_base: str = "log2", lse_layout: str = "NH", enable_pdl: bool | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Attend the queries of each request to its keys, on the current stream.

        Args:
            q: [num_tokens, num_qo_heads, head_dim_qk]; rows past ``qo_indptr[-1]`` have out 0 and
                lse -inf.
            k: [num_kv_tokens, num_kv_heads, head_dim_qk] ("HND": heads before tokens), any strides
                but the last; of NVFP4 uint8 with head_dim / 2 bytes.
            v: likewise, with head_dim_vo.
            args: refused: they are for kernels of ``jit_args``.
            q_scale: refused unless None or 1.
            k_scale: of FP8 and NVFP4: a number, or float32 [], [1] or [num_kv_heads].
            v_scale: likewise.
            o_scale: refused unless None or 1.
            out: filled and returned where given.
            lse: float32, filled where given.
            return_lse: return lse, too.
            lse_base: "log2" or "ln".
            lse_layout: "NH" is [num_tokens, num_qo_heads], "HN" the other way round.
            enable_pdl: no effect.
            kv_cache_sf: of NVFP4, a pair of float8_e4m3fn like k and v with head_dim / 16 elements.

        Returns:
            out, or (out, lse). A row that sees no key has out 0 and lse -inf.

        Raises:
            TypeError, ValueError, ConfigError: naming the argument, before any launch.
        """
        refuse_unbuilt(locals(), but=("kv_cache_sf",))
        form = LseForm(lse_base, lse_layout)
        call = RunArguments(
            q, q_scale, k_scale, v_scale, out, lse, return_lse, None, kv_cache_sf, form
        )
        return self._attend(self._cache_of((k, v), kv_cache_sf), call, {})

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def _read_forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool = False,
        pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False, window_left: int = -1,
        logits_soft_cap: float | None = None, sm_scale: float | None = None,
        rope_scale: float | None = None, rope_theta: float | None = None,
    ) -> ForwardArguments:  # fmt: skip
        refuse_unbuilt(locals())
        scores = ScoreArguments(window_left, logits_soft_cap, sm_scale)
        return ForwardArguments(RunArguments(q), (k, v), scores, causal)

    def _forward(self, given: ForwardArguments) -> Results:
        assert isinstance(given.kv_cache, tuple)
        kv = self._cache_of(given.kv_cache, None)
        return self._attend(kv, given.run, self._forward_changes(given))

    forward = forward_of(
        _read_forward, "Call ``run`` with these instead of ``plan``'s.", return_lse=False
    )
    forward_return_lse = forward_of(
        _read_forward, "Call ``forward`` and return lse, too.", return_lse=True
    )

    def _cache_of(self, kv: tuple[Tensor, Tensor], kv_cache_sf: Pair | None) -> KVCache:
        kv_dtype = str(self._batch().arguments["kv_dtype"])
        return ragged_cache(kv, self._kv_layout, kv_dtype, kv_cache_sf)


def _check_lens(seq_lens: Tensor | None, lens: Tensor) -> Tensor:
    """Return the KV tokens of each request: those given, or all that offsets have room for."""
    if seq_lens is None:
        return lens
    given = as_lengths("seq_lens", seq_lens)
    if given.shape != lens.shape:
        raise ValueError(f"seq_lens has shape {list(given.shape)}: expected {list(lens.shape)}")
    if given.device.type == lens.device.type == "cpu" and bool((given > lens).any()):
        raise ValueError(f"seq_lens is {given.tolist()}: kv_indptr has {lens.tolist()}")
    return given
