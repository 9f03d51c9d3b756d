"""FlashInfer's prefill wrapper over K and V without pages."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from jitattn.base.validate import check_flag
from jitattn.compat.flashinfer.arguments import (
    LseForm,
    Scale,
    as_lengths,
    check_scales,
    ragged_cache,
    refuse_unbuilt,
)
from jitattn.compat.flashinfer.batch import (
    FixedBuffers,
    check_offsets,
)
from jitattn.compat.flashinfer.queries import (
    PrefillWrapper,
    check_rooms,
    forward_changes,
    prefill_arguments,
)
from jitattn.compat.flashinfer.wrapper import (
    Results,
)
from jitattn.tensors.page_tables import RaggedKV


class BatchPrefillWithRaggedKVCacheWrapper(PrefillWrapper):
    """Prefill over K and V whose tokens follow each other, without pages.

    Query i of a request with n queries and m keys sits at m - n + i. What differs from FlashInfer:
    docs/from-flashinfer.md.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        kv_indptr_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        """Remember the device and the buffers.

        Args:
            float_workspace_buffer: any tensor on the device of all others; nothing is written
                there.
            kv_layout: "NHD", or "HND" with heads before tokens in K and V.
            use_cuda_graph: as of ``BatchPrefillWithPagedKVCacheWrapper``.
            qo_indptr_buf: int32 [batch_size + 1], with ``use_cuda_graph`` as all of these.
            kv_indptr_buf: int32 [batch_size + 1].
            custom_mask_buf: uint8, as large as packed masks get; nothing is written there.
            mask_indptr_buf: int32 [batch_size + 1], with ``custom_mask_buf``; likewise.
            backend: a name that FlashInfer knows; all mean the same kernels.
            jit_args: refused unless None.
            jit_kwargs: likewise.
            variant_owns_mask: refused unless False.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
        self._start(locals(), _RAGGED_BUFFERS)

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
        uniform_q_len: int | None = None,
    ) -> None:  # fmt: skip
        """Plan a batch. It waits for the device only to learn the most queries of a request.

        ``kv_indptr`` int32 [batch_size + 1] says where the tokens of each request begin in K and V,
        on the device or the CPU; ``seq_lens``, where given, how many of them there are. Others are
        as of ``BatchPrefillWithPagedKVCacheWrapper.plan``. Besides what is refused there,
        ``v_indptr`` and ``o_indptr`` are unless None.

        Raises:
            TypeError, ValueError, ConfigError: naming the argument.
        """
        given = dict(locals())
        # Heads before tokens are a matter of strides.
        arguments = {**prefill_arguments(given, "NHD", "ragged"), "page_size": None}
        lens = _check_ragged(given, self._fixed)
        prepared = self._prepare(given, lens, arguments)
        if self._fixed is not None:
            qo_indptr, kv_indptr = (
                self._fixed.fill(name, given[name.removesuffix("_buf")], non_blocking)
                for name in _RAGGED_BUFFERS
            )
        else:
            qo_indptr, kv_indptr = (
                self._to_device(t, non_blocking) for t in (qo_indptr, kv_indptr)
            )
        lens = self._to_device(lens, non_blocking)
        self._adopt(arguments, prepared, RaggedKV(kv_indptr), lens, qo_indptr)

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        q_scale: float | None = None,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        o_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend the queries of each request to its keys, on the current stream.

        Args:
            q: [num_tokens, num_qo_heads, head_dim_qk]; rows past ``qo_indptr[-1]`` have out 0 and
                lse -inf.
            k: [num_kv_tokens, num_kv_heads, head_dim_qk] ("HND": heads before tokens), any strides
                but the last; of NVFP4 uint8 with head_dim / 2 bytes.
            v: likewise, with head_dim_vo.
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
        results = Results(out, lse, check_flag("return_lse", return_lse), form)
        return self._attend_ragged(q, (k, v), kv_cache_sf, (q_scale, k_scale, v_scale), {}, results)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Call ``run`` with these instead of ``plan``'s."""
        return self._forward(locals(), return_lse=False)

    def forward_return_lse(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Call ``forward`` and return lse, too."""
        return self._forward(locals(), return_lse=True)

    def _forward(
        self, given: Mapping[str, Any], *, return_lse: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        refuse_unbuilt(given)
        changes = forward_changes(given, self._batch())
        results = Results(None, None, return_lse, LseForm())
        no_scales = None, None, None
        return self._attend_ragged(
            given["q"], (given["k"], given["v"]), None, no_scales, changes, results
        )

    def _attend_ragged(
        self,
        q: Tensor,
        kv: tuple[Tensor, Tensor],
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None,
        scales: tuple[Scale | None, Scale | None, Scale | None],
        changes: Mapping[str, object],
        results: Results,
    ) -> Tensor | tuple[Tensor, Tensor]:
        arguments = self._batch().arguments
        kv_dtype = str(arguments["kv_dtype"])
        is_quantised = kv_dtype != arguments["q_dtype"]
        q_scale, k_scale, v_scale = scales
        bound = check_scales(is_quantised, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        cache = ragged_cache(kv, self._kv_layout, kv_dtype, kv_cache_sf)
        return self._call(q, cache, changes, bound, None, results)


_RAGGED_BUFFERS = ("qo_indptr_buf", "kv_indptr_buf")


def _check_ragged(given: Mapping[str, Any], fixed: FixedBuffers | None) -> Tensor:
    """Check offsets; return the KV tokens of each request."""
    qo_indptr, kv_indptr = given["qo_indptr"], given["kv_indptr"]
    check_offsets("qo_indptr", qo_indptr)
    check_offsets("kv_indptr", kv_indptr)
    if kv_indptr.shape != qo_indptr.shape:
        raise ValueError(
            f"kv_indptr has {kv_indptr.shape[0]} entries: expected {qo_indptr.shape[0]}, like "
            "qo_indptr"
        )
    lens: Tensor = kv_indptr.diff()
    if given["seq_lens"] is not None:
        given_lens = as_lengths("seq_lens", given["seq_lens"])
        if given_lens.shape != lens.shape:
            raise ValueError(
                f"seq_lens has shape {list(given_lens.shape)}: expected {list(lens.shape)}"
            )
        both_on_host = given_lens.device.type == lens.device.type == "cpu"
        if both_on_host and bool((given_lens > lens).any()):
            raise ValueError(f"seq_lens is {given_lens.tolist()}: kv_indptr has {lens.tolist()}")
        lens = given_lens
    check_rooms(given, fixed, _RAGGED_BUFFERS)
    return lens
