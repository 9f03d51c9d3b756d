"""FlashInfer's wrappers of prefill and decode together, which are two launches here.

One ``jitattn.AttentionPlanner`` plans requests of both kinds as one batch, in one launch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jitattn.base.validate import check_flag
from jitattn.compat.flashinfer.absent import names_of
from jitattn.compat.flashinfer.common.arguments import Pair, refuse_unbuilt
from jitattn.compat.flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from jitattn.compat.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from jitattn.compat.flashinfer.single import single_prefill_with_kv_cache
from jitattn.tensors.scales import ScaleLike

__all__ = ["BatchPODWithPagedKVCacheWrapper", "PODWithPagedKVCacheWrapper"]

__getattr__ = names_of(__name__, __all__)


class PODWithPagedKVCacheWrapper:
    """Prefill of one request without pages, and decode of a batch over pages."""

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD",
        use_cuda_graph: bool = False, paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None, jit_args: list[Any] | None = None,
    ) -> None:  # fmt: skip
        """Make the decode wrapper: arguments as of ``BatchDecodeWithPagedKVCacheWrapper``."""
        self._decode = BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer, kv_layout, use_cuda_graph, False, paged_kv_indptr_buffer,
            paged_kv_indices_buffer, paged_kv_last_page_len_buffer, jit_args=jit_args,
        )  # fmt: skip
        self._kv_layout = kv_layout

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether runs may be captured, over buffers that ``plan`` fills."""
        return self._decode.is_cuda_graph_enabled

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor
    ) -> None:
        """Check that both are on the wrapper's device; neither is used."""
        self._decode.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, pos_encoding_mode: str = "NONE",
        window_left: int = -1, q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None, sm_scale: float | None = None,
        rope_scale: float | None = None, rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:  # fmt: skip
        """Plan the decode: arguments as of ``BatchDecodeWithPagedKVCacheWrapper.plan``."""
        self._decode.plan(
            indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
            pos_encoding_mode, window_left, None, q_data_type, kv_data_type, None, data_type,
            sm_scale, rope_scale, rope_theta, non_blocking,
        )  # fmt: skip

    begin_forward = plan

    def run(
        self, q_p: Tensor, k_p: Tensor, v_p: Tensor, q_d: Tensor, paged_kv_cache_d: Pair,
        custom_mask_p: Tensor | None = None, packed_custom_mask_p: Tensor | None = None,
        causal_p: bool = False, kv_layout_p: str = "NHD", pos_encoding_mode_p: str = "NONE",
        sm_scale_p: float | None = None, window_left_p: int = -1,
        rope_scale_p: float | None = None, rope_theta_p: float | None = None,
        return_lse_p: bool = False, custom_mask_d: Tensor | None = None,
        packed_custom_mask_d: Tensor | None = None, causal_d: bool = False,
        kv_layout_d: str = "NHD", pos_encoding_mode_d: str = "NONE",
        sm_scale_d: float | None = None, window_left_d: int = -1,
        rope_scale_d: float | None = None, rope_theta_d: float | None = None,
        q_scale: float | None = None, k_scale: ScaleLike | None = None,
        v_scale: ScaleLike | None = None, return_lse_d: bool = False,
        use_fp16_qk_reduction: bool = False, enable_pdl: bool | None = None, *args: object,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Attend one request's queries to its keys, and decode queries to their pages.

        Those that end in ``_p`` are as of ``single_prefill_with_kv_cache``, ``q_d`` [batch_size,
        num_qo_heads, head_dim], ``paged_kv_cache_d`` and the scales as of
        ``BatchDecodeWithPagedKVCacheWrapper.run``. A decode query sees all keys: ``causal_d`` has
        no effect. The layout, window and scale of the decode are those of the constructor and of
        ``plan``, and others in ``_d`` are refused, as masks are. As FlashInfer's, this method
        returns no lse: ``return_lse_p`` and ``return_lse_d`` are refused.

        Returns:
            (out of prefill, out of decode).

        Raises:
            TypeError, ValueError, ConfigError: naming the argument, before any launch.
        """
        refuse_unbuilt(locals())
        check_flag("causal_d", causal_d)
        # What FlashInfer takes and does not look at.
        _refuse_others(
            custom_mask_d=(custom_mask_d, None), window_left_d=(window_left_d, -1),
            packed_custom_mask_d=(packed_custom_mask_d, None), sm_scale_d=(sm_scale_d, None),
            return_lse_p=(return_lse_p, False), return_lse_d=(return_lse_d, False),
            pos_encoding_mode_d=(pos_encoding_mode_d, "NONE"), rope_scale_d=(rope_scale_d, None),
            rope_theta_d=(rope_theta_d, None), kv_layout_d=(kv_layout_d, "NHD", self._kv_layout),
        )  # fmt: skip
        out_p = single_prefill_with_kv_cache(
            q_p, k_p, v_p, custom_mask=custom_mask_p, packed_custom_mask=packed_custom_mask_p,
            causal=causal_p, kv_layout=kv_layout_p, pos_encoding_mode=pos_encoding_mode_p,
            sm_scale=sm_scale_p, window_left=window_left_p, rope_scale=rope_scale_p,
            rope_theta=rope_theta_p,
        )  # fmt: skip
        out_d = self._decode.run(
            q_d, paged_kv_cache_d, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale
        )
        assert isinstance(out_p, Tensor)
        assert isinstance(out_d, Tensor)
        return out_p, out_d


class BatchPODWithPagedKVCacheWrapper:
    """Prefill of a batch and decode of another, both over pages."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        """Make a prefill wrapper of each: arguments as of its class."""
        self._prefill = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._decode = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """False: its runs aren't captured."""
        return False

    def plan(
        self, qo_indptr_p: Tensor, kv_indptr_p: Tensor, kv_indices_p: Tensor,
        last_page_len_p: Tensor, qo_indptr_d: Tensor, kv_indptr_d: Tensor, kv_indices_d: Tensor,
        last_page_len_d: Tensor, num_qo_heads: int, num_kv_heads: int, head_dim: int,
        page_size: int, pos_encoding_mode: str = "NONE", window_left: int = -1,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None, sm_scale: float | None = None,
        rope_scale: float | None = None, rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:  # fmt: skip
        """Remember both batches, which the first ``run`` plans, when it is told the mask.

        Arguments are as of ``BatchPrefillWithPagedKVCacheWrapper.plan``; ``data_type`` stands for
        ``q_data_type`` and ``kv_data_type`` where they are None.

        Raises:
            TypeError, ValueError, ConfigError: naming the argument.
        """
        refuse_unbuilt(locals())
        q_type = q_data_type or data_type or "float16"
        others: dict[str, Any] = {
            "q_data_type": q_type, "kv_data_type": kv_data_type or data_type,
            "window_left": window_left, "sm_scale": sm_scale, "non_blocking": non_blocking,
        }  # fmt: skip
        sizes = num_qo_heads, num_kv_heads, head_dim, page_size
        tables = qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p
        self._planned = tables, sizes, others
        self._is_causal: bool | None = None
        self._decode.plan(
            qo_indptr_d, kv_indptr_d, kv_indices_d, last_page_len_d, *sizes,
            **others,
        )  # fmt: skip
        self._plan_prefill(causal=False)

    begin_forward = plan

    def _plan_prefill(self, *, causal: bool, **masks: Any) -> None:
        """Plan the prefill anew unless it was planned like this."""
        has_mask = any(mask is not None for mask in masks.values())
        if self._is_causal is causal and not has_mask:
            return
        (qo_indptr, indptr, indices, last), sizes, others = self._planned
        self._prefill.plan(
            qo_indptr, indptr, indices, last, *sizes, causal=causal, **{**others, **masks}
        )
        self._is_causal = None if has_mask else causal

    def run(
        self, q_p: Tensor, paged_kv_cache_p: Pair, q_d: Tensor, paged_kv_cache_d: Pair,
        custom_mask_p: Tensor | None = None, packed_custom_mask_p: Tensor | None = None,
        causal_p: bool = False, q_scale: float | None = None, k_scale: ScaleLike | None = None,
        v_scale: ScaleLike | None = None, return_lse: bool = False,
        use_fp16_qk_reduction: bool = False, enable_pdl: bool | None = None,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Attend both batches' queries to their pages, on the current stream.

        ``q_p`` and ``q_d`` are [num_tokens, num_qo_heads, head_dim], the caches and scales as of
        ``BatchPrefillWithPagedKVCacheWrapper.run``, and the masks of prefill as of its ``plan``. A
        mask, or another ``causal_p`` than the last, plans the prefill anew. Decode queries see all
        keys of their request.

        Returns:
            (out of prefill, out of decode), or ((both outs), (both lse)), base 2.

        Raises:
            TypeError, ValueError, ConfigError: naming the argument, before any launch.
        """
        refuse_unbuilt(locals())
        if not hasattr(self, "_planned"):
            raise RuntimeError("run was called before plan")
        self._plan_prefill(
            causal=check_flag("causal_p", causal_p), custom_mask=custom_mask_p,
            packed_custom_mask=packed_custom_mask_p,
        )  # fmt: skip
        scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        how: dict[str, Any] = {**scales, "return_lse": check_flag("return_lse", return_lse)}
        found_p = self._prefill.run(q_p, paged_kv_cache_p, **how)
        found_d = self._decode.run(q_d, paged_kv_cache_d, **how)
        if not return_lse:
            return found_p, found_d
        return (found_p[0], found_d[0]), (found_p[1], found_d[1])


def _refuse_others(**given: tuple[object, ...]) -> None:
    """Raise unless each value is one of those that follow it."""
    for name, (value, *allowed) in given.items():
        if not any(value is one or (type(value) is type(one) and value == one) for one in allowed):
            raise ValueError(f"{name} is given: expected {allowed[0]}, what plan was given counts")
