"""vLLM's attention layer over planners, without vLLM: backend.py gives it the base class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jitattn.integrations.steps import FP8, BoundCaches, LayerPlanners, is_quantised
from jitattn.integrations.vllm.metadata import CACHE_DTYPES, Metadata, Tensors
from jitattn.kernels.attention.api import AttentionPlanner
from jitattn.kernels.merge.api import merge_states
from jitattn.kernels.preprocess.api import append_kv
from jitattn.spec.config import HEAD_DIMS

# [num_pages, num_kv_heads, page_size, head_dim + head_dim_vo], in this order of names.
_CACHE_RANK = 4
# Of a group of ranks: q of all of their heads from one's, and one's (out, lse) from all of theirs.
Gather = Callable[[Tensor], Tensor]
Combine = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Layer:
    """Attention of one layer: writes K and V, and attends.

    Attributes:
        num_heads: query heads.
        head_size: elements of a head of q and K.
        scale: multiplies scores.
        num_kv_heads: heads of K and V.
        kv_cache_dtype: vLLM's name of the cache's dtype.
        sinks: [num_heads], or None.
    """

    dcp_world_size: int = 1

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Hold what a layer is; no kernel is loaded.

        Args:
            num_heads: query heads.
            head_size: elements of a head.
            scale: multiplies scores.
            num_kv_heads: heads of K and V; None is ``num_heads``.
            alibi_slopes: refused.
            sliding_window: tokens that a query sees, itself included; None is all.
            kv_cache_dtype: one of ``CACHE_DTYPES``.
            logits_soft_cap: score becomes cap * tanh(score / cap); None and 0 are off.
            attn_type: "decoder"; others are refused.
            kv_sharing_target_layer_name: a layer whose cache this one reads; vLLM hands that cache
                over and writes nothing.
            sinks: [num_heads], any float dtype.

        Raises:
            ValueError: naming what is not supported.
        """
        _refuse_layer(alibi_slopes, attn_type, head_size, kv_cache_dtype)
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self._window_left = -1 if sliding_window is None else sliding_window - 1
        self._soft_cap = float(logits_soft_cap or 0.0)
        if sinks is not None and tuple(sinks.shape) != (num_heads,):
            raise ValueError(f"sinks has shape {list(sinks.shape)}: expected [{num_heads}]")
        if self.dcp_world_size > 1:
            self._refuse_context_parallelism()
        self._planners = LayerPlanners(self._arguments(num_heads, kv_layout="HND"))
        self._context_planners = LayerPlanners(
            self._arguments(num_heads * self.dcp_world_size, kv_layout="HND")
        )
        self._new_planners = LayerPlanners(self._arguments(num_heads, kv_layout="NHD"))
        self._caches = BoundCaches()
        self._context_caches = BoundCaches()
        self._views: tuple[Tensor, int, Tensor, Tensor] | None = None

    def _refuse_context_parallelism(self) -> None:
        if self._window_left >= 0:
            raise ValueError(
                f"sliding_window is {self._window_left + 1}: decode context parallelism is not "
                "supported with a window"
            )
        if self.sinks is not None:
            raise ValueError(
                "sinks are given: decode context parallelism is not supported with them"
            )

    def _arguments(self, num_heads: int, *, kv_layout: str) -> dict[str, object]:
        return {
            "num_qo_heads": num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_size,
            "kv_layout": kv_layout,
            "window_left": self._window_left,
            "logits_soft_cap": self._soft_cap,
            "sm_scale": self.scale,
            "use_sinks": self.sinks is not None,
            "batch_invariant": self._is_batch_invariant(),
        }

    def _is_batch_invariant(self) -> bool:
        return False

    # --- planners ---------------------------------------------------------------------------------

    def planner(self, tensors: Tensors, *, causal: bool) -> AttentionPlanner:
        """Return the planner of this layer's batches.

        Raises:
            ConfigError: with every reason why the configuration has no kernel.
            ValueError: a window that also ends ahead of a query.
        """
        if not causal and self._window_left >= 0:
            raise ValueError(
                f"causal is False and sliding_window {self._window_left + 1}: windows are of "
                "causal attention"
            )
        return self._paged(self._planners, tensors, causal=causal)

    def _paged(
        self, planners: LayerPlanners, tensors: Tensors, *, causal: bool
    ) -> AttentionPlanner:
        return planners.of(
            head_dim_vo=tensors.head_dim_vo,
            q_dtype=tensors.q_dtype,
            kv_dtype=FP8.get(self.kv_cache_dtype, tensors.kv_dtype),
            page_size=tensors.page_size,
            page_table="shared",
            causal=causal,
            device=tensors.device,
        )

    def _of_new_tokens(self, tensors: Tensors, *, causal: bool) -> AttentionPlanner:
        """Return the planner of this step's K and V, which have no pages and the dtype of q."""
        return self._new_planners.of(
            head_dim_vo=tensors.head_dim_vo,
            q_dtype=tensors.q_dtype,
            kv_dtype=tensors.q_dtype,
            page_size=None,
            page_table="ragged",
            causal=causal,
            device=tensors.device,
        )

    def load(self, tensors: Tensors) -> None:
        """Load the kernels of causal batches.

        Raises:
            ConfigError: with every reason why the configuration has no kernel.
        """
        if self.dcp_world_size == 1:
            self.planner(tensors, causal=True)
            return
        self._paged(self._context_planners, tensors, causal=False)
        self._of_new_tokens(tensors, causal=True)

    def plan(self, metadata: Metadata, tensors: Tensors) -> None:
        """Make the plans that ``forward`` will ask for, as captures need them.

        Raises:
            ConfigError, TypeError, ValueError: as ``forward``.
        """
        causal, context = metadata.causal, metadata.context
        if context is None:
            metadata.step.plan_of(self.planner(tensors, causal=causal), metadata.pages)
            return
        planner = self._paged(self._context_planners, tensors, causal=False)
        context.cached.plan_of(planner, metadata.pages)
        context.new.plan_of(self._of_new_tokens(tensors, causal=causal), context.new_pages)

    # --- the cache --------------------------------------------------------------------------------

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write K and V of this step's tokens, in one launch.

        Args:
            layer: has ``_k_scale`` and ``_v_scale``, float32 [], [1] or [num_kv_heads], which
                are read when the kernel runs.
            key: [at least num_tokens, num_kv_heads, head_size].
            value: likewise, with V's elements.
            kv_cache: [num_pages, num_kv_heads, page_size, head_size and V's].
            slot_mapping: int64 [num_tokens], page * page_size + place; -1 is not written.

        Raises:
            TypeError, ValueError: naming what doesn't fit, before any launch.
        """
        k_cache, v_cache = self._split(kv_cache)
        k_scale, v_scale = self._scales(layer, k_cache)
        num_tokens = slot_mapping.shape[0]
        if key.shape[0] != num_tokens:
            key, value = key[:num_tokens], value[:num_tokens]
        append_kv(
            key,
            value,
            (k_cache, v_cache),
            slots=slot_mapping,
            kv_layout="HND",
            k_scale=k_scale,
            v_scale=v_scale,
        )

    def _split(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V of the cache, made once for as long as it lies where it does."""
        views = self._views
        if views is not None and views[0] is kv_cache and views[1] == kv_cache.data_ptr():
            return views[2], views[3]
        size = self.head_size
        if kv_cache.dim() != _CACHE_RANK or kv_cache.shape[-1] <= size:
            raise ValueError(
                f"kv_cache has shape {list(kv_cache.shape)}: expected [num_pages, num_kv_heads, "
                f"page_size, {size} and V's elements]"
            )
        dtype = FP8.get(self.kv_cache_dtype, kv_cache.dtype)
        bytes_of = kv_cache if kv_cache.dtype == dtype else kv_cache.view(dtype)
        k_cache, v_cache = bytes_of[..., :size], bytes_of[..., size:]
        self._views = kv_cache, kv_cache.data_ptr(), k_cache, v_cache
        return k_cache, v_cache

    def _scales(self, layer: Any, cache: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if not is_quantised(cache.dtype):
            return None, None  # the layer has scales all the same, of 1
        return layer._k_scale, layer._v_scale

    # --- attention --------------------------------------------------------------------------------

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend the query tokens of each request to its pages, and write ``output``.

        Args:
            layer: has the scales of an FP8 cache.
            query: [num_tokens, num_heads, head_size], any strides but the last.
            key: this step's, which the cache has already; read with context parallelism alone.
            value: likewise.
            kv_cache: as of ``do_kv_cache_update``.
            attn_metadata: from the builder; None is a run that measures memory: zeros.
            output: [num_tokens, num_heads, V's elements], written whole: rows past the last
                request are 0.
            output_scale: refused.
            output_block_scale: refused.

        Returns:
            ``output``.

        Raises:
            TypeError, ValueError: naming what doesn't fit, before any launch.

        Defined by: jitattn/kernels/attention/reference.py::attention.
        """
        for name, scale in (
            ("output_scale", output_scale),
            ("output_block_scale", output_block_scale),
        ):
            if scale is not None:
                raise ValueError(f"{name} is given: quantised outputs are not supported")
        if attn_metadata is None:
            return output.fill_(0)
        k_cache, v_cache = self._split(kv_cache)
        k_scale, v_scale = self._scales(layer, k_cache)
        if attn_metadata.context is not None:
            return self._attend_in_parts(
                query, key, value, (k_cache, v_cache), (k_scale, v_scale), attn_metadata, output
            )
        planner = self.planner(Tensors.of(query, k_cache, v_cache), causal=attn_metadata.causal)
        plan, pages = attn_metadata.step.plan_for(self, planner, attn_metadata.pages)
        kv = self._caches.of(planner, k_cache, v_cache, k_scale, v_scale)
        plan.run(query, kv, out=output, pages=pages, sinks=self.sinks)
        return output

    # --- decode context parallelism ---------------------------------------------------------------

    def _attend_in_parts(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        caches: tuple[Tensor, Tensor],
        scales: tuple[Tensor | None, Tensor | None],
        metadata: Metadata,
        output: Tensor,
    ) -> Tensor:
        if key is None or value is None:
            raise ValueError("key is None: decode context parallelism attends to this step's K")
        gather, combine = self._group()
        context = self.context_state(gather(query), caches, scales, metadata)
        new = self._new_state(query, key, value, metadata)
        parts = combine(*context), new
        outs, lses = (torch.stack([part[i] for part in parts]) for i in (0, 1))
        output.copy_(merge_states(outs, lses)[0])
        return output

    def _group(self) -> tuple[Gather, Combine]:
        raise NotImplementedError

    def context_state(
        self,
        query: Tensor,
        caches: tuple[Tensor, Tensor],
        scales: tuple[Tensor | None, Tensor | None],
        metadata: Metadata,
    ) -> tuple[Tensor, Tensor]:
        """Attend to what this rank has of earlier steps.

        Args:
            query: [num_tokens, heads of all ranks, head_size].
            caches: K and V, [num_pages, num_kv_heads, page_size, elements].
            scales: those of K and V, or None.
            metadata: of the step, with a ``context``.

        Returns:
            out [num_tokens, heads of all ranks, V's elements] and lse float32 [num_tokens, heads],
            natural logarithms; 0 and -inf where this rank has no keys of a request.
        """
        assert metadata.context is not None
        tensors = Tensors.of(query, *caches)
        planner = self._paged(self._context_planners, tensors, causal=False)
        plan, pages = metadata.context.cached.plan_for(self, planner, metadata.pages)
        kv = self._context_caches.of(planner, *caches, *scales)
        return plan.run(query, kv, pages=pages, return_lse=True)  # type: ignore[no-any-return]

    def _new_state(
        self, query: Tensor, key: Tensor, value: Tensor, metadata: Metadata
    ) -> tuple[Tensor, Tensor]:
        context = metadata.context
        assert context is not None
        tensors = Tensors(value.shape[2], query.dtype, key.dtype, 1, query.device)
        planner = self._of_new_tokens(tensors, causal=metadata.causal)
        plan, pages = context.new.plan_for(self, planner, context.new_pages)
        return plan.run(query, (key, value), pages=pages, return_lse=True)  # type: ignore[no-any-return]


def _refuse_layer(
    alibi_slopes: list[float] | None, attn_type: str, head_size: int, kv_cache_dtype: str
) -> None:
    if alibi_slopes is not None:
        raise ValueError("alibi_slopes are given: ALiBi is not supported")
    kind = getattr(attn_type, "value", attn_type)
    if kind != "decoder":
        raise ValueError(f"attn_type is {kind!r}: only 'decoder' is supported")
    if head_size not in HEAD_DIMS:
        raise ValueError(f"head_size is {head_size}: expected a multiple of 16 up to 256, or 512")
    if kv_cache_dtype not in CACHE_DTYPES:
        raise ValueError(
            f"kv_cache_dtype is {kv_cache_dtype!r}: expected one of {', '.join(CACHE_DTYPES)}"
        )
