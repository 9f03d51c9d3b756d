"""FlashInfer's wrappers of shared prefixes: attention to parts of the keys, merged.

``jitattn.cascade`` plans levels together, without a state of each in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from jitattn.base.validate import check_count, check_flag
from jitattn.compat.flashinfer.common.arguments import Pair, check_workspace, refuse_unbuilt
from jitattn.compat.flashinfer.common.wrapper import OverAnother
from jitattn.compat.flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from jitattn.compat.flashinfer.merge import merge_state_in_place
from jitattn.compat.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from jitattn.compat.flashinfer.single import single_prefill_with_kv_cache

_BUFFERS = (
    "qo_indptr_buf",
    "paged_kv_indptr_buf",
    "paged_kv_indices_buf",
    "paged_kv_last_page_len_buf",
)


class MultiLevelCascadeAttentionWrapper:
    """Attention over levels of pages: those that many requests share, and those of each."""

    def __init__(
        self, num_levels: int, float_workspace_buffer: Tensor, kv_layout: str = "NHD",
        use_cuda_graph: bool = False, qo_indptr_buf_arr: Sequence[Tensor] | None = None,
        paged_kv_indptr_buf_arr: Sequence[Tensor] | None = None,
        paged_kv_indices_buf_arr: Sequence[Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: Sequence[Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Make a wrapper of each level.

        Args:
            num_levels: how many there are, the last of which is of requests' own pages.
            float_workspace_buffer: any tensor on the device of all others.
            kv_layout: "NHD" or "HND", the order of a page's dimensions.
            use_cuda_graph: runs are captured, with a buffer for each level.
            qo_indptr_buf_arr: int32 tensors, as of ``BatchPrefillWithPagedKVCacheWrapper``.
            paged_kv_indptr_buf_arr: likewise.
            paged_kv_indices_buf_arr: likewise.
            paged_kv_last_page_len_buf_arr: likewise.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        count = check_count("num_levels", num_levels, least=1)
        given = (
            qo_indptr_buf_arr, paged_kv_indptr_buf_arr, paged_kv_indices_buf_arr,
            paged_kv_last_page_len_buf_arr,
        )  # fmt: skip
        for name, buffers in zip(_BUFFERS, given, strict=True):
            if buffers is not None or use_cuda_graph:
                _check_levels(f"{name}_arr", buffers, count)
        self._use_cuda_graph = check_flag("use_cuda_graph", use_cuda_graph)
        self._levels = [
            BatchPrefillWithPagedKVCacheWrapper(
                float_workspace_buffer,
                kv_layout,
                use_cuda_graph,
                **{
                    name: None if buffers is None else buffers[i]
                    for name, buffers in zip(_BUFFERS, given, strict=True)
                },  # type: ignore[arg-type]
            )
            for i in range(count)
        ]

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether runs may be captured, over buffers that ``plan`` fills."""
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffers: Sequence[Tensor]
    ) -> None:
        """Check that tensors are on the wrapper's device; none is used.

        Args:
            float_workspace_buffer: any tensor.
            int_workspace_buffers: one for each level.

        Raises:
            TypeError, ValueError: no tensor, or on another device.
        """
        _check_levels("int_workspace_buffers", int_workspace_buffers, len(self._levels))
        for wrapper, buffer in zip(self._levels, int_workspace_buffers, strict=True):
            wrapper.reset_workspace_buffer(float_workspace_buffer, buffer)

    def plan(
        self, qo_indptr_arr: Sequence[Tensor], paged_kv_indptr_arr: Sequence[Tensor],
        paged_kv_indices_arr: Sequence[Tensor], paged_kv_last_page_len: Sequence[Tensor],
        num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, causal: bool = False,
        pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None, window_left: int = -1,
        logits_soft_cap: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """Plan each level, with tables as of ``BatchPrefillWithPagedKVCacheWrapper.plan``.

        The first four are a tensor for each level. ``causal`` is of the last level; queries see all
        of the others. A window is refused with more than one level: positions are a level's own.

        Raises:
            TypeError, ValueError, ConfigError: naming the argument.
        """
        refuse_unbuilt(locals())
        tables = (
            qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len,
        )  # fmt: skip
        names = "qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr", _BUFFERS[3][:-4]
        for name, table in zip(names, tables, strict=True):
            _check_levels(name, table, len(self._levels))
        window_left = check_count("window_left", window_left, least=-1)
        if window_left >= 0 and len(self._levels) > 1:
            raise ValueError(
                f"window_left is {window_left}: a level has positions of its own, expected -1"
            )
        check_flag("causal", causal)
        for i, wrapper in enumerate(self._levels):
            qo_indptr, *pages = (table[i] for table in tables)
            wrapper.plan(
                qo_indptr, pages[0], pages[1], pages[2], num_qo_heads, num_kv_heads, head_dim,
                page_size, causal=causal and wrapper is self._levels[-1], sm_scale=sm_scale,
                window_left=window_left, logits_soft_cap=logits_soft_cap, q_data_type=q_data_type,
                kv_data_type=kv_data_type,
            )  # fmt: skip

    begin_forward = plan

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Do nothing: strides of K and V are arguments of the same kernel."""
        self._levels[-1].prewarm_paged_kv_stride_variant(variant)

    def run(self, q: Tensor, paged_kv_cache: Pair) -> Tensor:
        """Attend the queries to all levels, on the current stream.

        Args:
            q: [num_tokens, num_qo_heads, head_dim].
            paged_kv_cache: as of ``BatchDecodeWithPagedKVCacheWrapper.run``.

        Returns:
            out, like ``q``. A row that sees no key has 0.

        Raises:
            TypeError, ValueError, ConfigError: naming the argument, before any launch.
        """
        out, lse = self._levels[-1].run(q, paged_kv_cache, return_lse=True)
        for wrapper in self._levels[:-1]:
            merge_state_in_place(out, lse, *wrapper.run(q, paged_kv_cache, return_lse=True))
        return out

    forward = run


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(OverAnother):
    """Decode over keys that all requests share, and pages of each."""

    _inner: BatchDecodeWithPagedKVCacheWrapper

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        """Make the wrapper of requests' own pages: arguments as of its class."""
        self._inner = BatchDecodeWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._kv_layout = kv_layout

    def begin_forward(
        self, unique_kv_indptr: Tensor, unique_kv_indices: Tensor,
        unique_kv_last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int, head_dim: int,
        page_size: int, data_type: str | torch.dtype = "float16",
    ) -> None:  # fmt: skip
        """Plan requests' own pages: arguments as of ``BatchDecodeWithPagedKVCacheWrapper.plan``."""
        self._inner.plan(
            unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len, num_qo_heads,
            num_kv_heads, head_dim, page_size, q_data_type=None, data_type=data_type,
        )  # fmt: skip

    def forward(
        self, q: Tensor, k_shared: Tensor, v_shared: Tensor, unique_kv_cache: Pair
    ) -> Tensor:
        """Attend each query to the shared keys and its request's pages.

        Args:
            q: [batch_size, num_qo_heads, head_dim].
            k_shared: [num_shared_tokens, num_kv_heads, head_dim] ("HND": heads first).
            v_shared: likewise.
            unique_kv_cache: as of ``BatchDecodeWithPagedKVCacheWrapper.run``.

        Returns:
            out, like ``q``.

        Raises:
            TypeError, ValueError, ConfigError: naming the argument, before any launch.
        """
        out, lse = single_prefill_with_kv_cache(
            q, k_shared, v_shared, kv_layout=self._kv_layout, return_lse=True
        )
        merge_state_in_place(out, lse, *self._inner.run(q, unique_kv_cache, return_lse=True))
        return out


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(OverAnother):
    """Prefill over keys that all requests share, and pages of each."""

    _inner: BatchPrefillWithPagedKVCacheWrapper

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        """Make the wrapper of requests' own pages: arguments as of its class."""
        check_workspace("float_workspace_buffer", float_workspace_buffer)
        self._inner = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._kv_layout = kv_layout

    def begin_forward(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int, head_dim: int,
        page_size: int,
    ) -> None:  # fmt: skip
        """Plan float16 queries over requests' own pages.

        Arguments are as of ``BatchPrefillWithPagedKVCacheWrapper.plan``; FlashInfer's has no types
        either.
        """
        self._inner.plan(
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
            num_kv_heads, head_dim, page_size,
        )  # fmt: skip

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Do nothing: strides of K and V are arguments of the same kernel."""
        self._inner.prewarm_paged_kv_stride_variant(variant)

    def forward(
        self, q: Tensor, k_shared: Tensor, v_shared: Tensor, unique_kv_cache: Pair,
        causal: bool = False, use_fp16_qk_reduction: bool = False, sm_scale: float | None = None,
        rope_scale: float | None = None, rope_theta: float | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend the queries to the shared keys and their request's pages.

        ``q`` is [num_tokens, num_qo_heads, head_dim], and tensors are as of
        ``BatchDecodeWithSharedPrefixPagedKVCacheWrapper.forward``. ``causal`` is of requests' own
        pages; queries see all shared keys.

        Returns:
            out, like ``q``.

        Raises:
            TypeError, ValueError, ConfigError: naming the argument, before any launch.
        """
        refuse_unbuilt(locals())
        out, lse = single_prefill_with_kv_cache(
            q, k_shared, v_shared, kv_layout=self._kv_layout, sm_scale=sm_scale, return_lse=True
        )
        own = self._inner.forward_return_lse(q, unique_kv_cache, causal, sm_scale=sm_scale)
        merge_state_in_place(out, lse, *own)
        return out


def _check_levels(name: str, tensors: Sequence[Tensor] | None, count: int) -> None:
    if not isinstance(tensors, list | tuple):
        raise TypeError(
            f"{name} is a {type(tensors).__name__}: expected a list of {count} tensors, one a level"
        )
    if len(tensors) != count:
        raise ValueError(f"{name} has {len(tensors)} tensors: expected {count}, one a level")
