"""Plan a batch on the device, then run its layers: ``AttentionPlanner``, ``BoundCache``, ``Plan``.

``AttentionPlanner`` chooses and loads kernels; ``bind`` checks a cache once; ``plan`` asks the
device to split the batch; ``run`` patches a struct and launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from jitattn.base.validate import check_flag
from jitattn.device.workspace import Workspace
from jitattn.kernels.attention.check import (
    Call,
    CustomMask,
    check_mask,
    check_sinks,
)
from jitattn.kernels.attention.config import check_rules
from jitattn.kernels.attention.queries import (
    FP8,
    FP8_VECTOR,
    QueryDequantizer,
    QueryScale,
    QueryScales,
    check_fp8_queries,
    load_kernel,
)
from jitattn.kernels.attention.reference_plan import AttentionReferencePlan, ListsReferencePlan
from jitattn.kernels.common.planner_base import (
    Kernels,
    PlanBackend,
    PlanBase,
    PlannerBase,
    make_readable,
)
from jitattn.kernels.common.reference_plan import ReferenceKernels
from jitattn.spec.config import PlannerConfig
from jitattn.spec.layout import LISTS
from jitattn.spec.variant import AttentionVariant
from jitattn.tensors.bound_cache import (
    BoundCache,
    CacheForm,
    KnownForms,
    LeadingForm,
    plain_tensors,
)
from jitattn.tensors.cache_views import (
    BlockCaches,
    CacheView,
    view_block_caches,
    view_caches,
    view_of,
)
from jitattn.tensors.page_table_base import PlannedTable
from jitattn.tensors.page_tables import check_view
from jitattn.tensors.quantization import KVCache, QuantizedKV, tensors_of
from jitattn.tensors.scales import Scale, ScaleLike, view_scale
from jitattn.tensors.tensor_layouts import NO_LAYOUT, Batch, RowLayout
from jitattn.tensors.token_lists import IndexLists
from jitattn.tensors.variant_params import VariantParams, refuse_compiled

if TYPE_CHECKING:
    from jitattn.kernels.common.kernel_launch import Replay
    from jitattn.kernels.common.kernel_loader import BoundKernels


class _Arguments(PlannerBase["Plan"]):
    config: PlannerConfig
    kernels: _Kernels


make_readable(_Arguments, PlannerConfig)


class AttentionPlanner(_Arguments):
    """The kernels of one attention configuration on one device.

    Constructing it compiles or loads its kernels. The prefill kernel and the wide decode kernel,
    for requests of a few query tokens, go on compiling in the background, and the first plan with
    requests for them waits. Thread-safe.

    Args:
        num_qo_heads: query heads, a multiple of ``num_kv_heads``.
        num_kv_heads: heads of K and V.
        head_dim: elements of a head.
        page_size: tokens of a page; None for ragged K and V.
        head_dim_vo: elements of a head of V and out; None is ``head_dim``.
        q_dtype: a torch dtype or its name: bfloat16, float16, or with an e4m3 cache float8_e4m3fn.
        kv_dtype: likewise, of the cache; "nvfp4", "int4", "int4_g64" or "int4_g32" for a
                ``QuantizedKV``.
        out_dtype: likewise, of out; None is ``q_dtype``, and bfloat16 of FP8 queries.
        kv_layout: the order of a page's dimensions, "NHD" (token, head) or "HND".
        page_table: a name of ``Layout``, "shared" or another: the layout of the tables
            that plans get.
        causal: query tokens see no later ones; the last of a request is its last key.
        window_left: earlier tokens that a query sees besides itself; -1 is all.
        logits_soft_cap: score becomes cap * tanh(score / cap); 0 is off.
        sm_scale: multiplies q.k; None is ``head_dim ** -0.5``.
        use_sinks: ``run`` gets ``sinks``.
        use_custom_mask: ``run`` gets ``custom_mask``.
        variant: an ``AttentionVariant``, or the name of a ready one ("alibi",
            "relative_bias"): what becomes of each logit; ``run`` gets ``variant_params``.
        skip_softmax_threshold: not built yet: leave out a KV tile whose every score lies more
            than this below the running maximum; None is never.
        batch_invariant: a query token has the same bits of out and lse whatever is in the batch,
            however its request is cut into prefill chunks, verified tokens and decode steps, and
            wherever its pages lie.
        early_kv: a promise: before the previous kernel on the stream began, all keys and values
            but those of each request's query tokens were complete, and so were the tables. Then
            they may be read before that kernel has ended (programmatic dependent launch).
        fp8_products: of an 8-bit cache: "exact" computes as if K and V were dequantised, with
            products in 16 bits and sums in float32. "fast" allows products of 8 bits, whose P is
            rounded to e4m3: prefill of FP8 queries has them on compute capability 9.0, with head
            dims that are multiples of 32, of Q and K up to 224 and of V up to 128, without lists or
            a variant. Elsewhere, and in decode steps without ``batch_invariant``, it makes no
            difference.
        num_sms: multiprocessors to use; None is all.
        workspace: scratch memory; None is one for each device and stream.
        device: None is the current CUDA device, or the CPU without one.
        backend: "auto" is "cuda" on a CUDA device and "reference" on the CPU.

    Attributes:
        config: the arguments, with dtypes as names.
        device: where its tensors must be.
        backend: "cuda" or "reference".
    """

    def __init__(
        self,
        *,
        num_qo_heads: int = 32,
        num_kv_heads: int = 8,
        head_dim: int = 128,
        page_size: int | None = 16,
        head_dim_vo: int | None = None,
        q_dtype: torch.dtype | str = "bfloat16",
        kv_dtype: torch.dtype | str = "bfloat16",
        out_dtype: torch.dtype | str | None = None,
        kv_layout: str = "NHD",
        page_table: str = "shared",
        causal: bool = True,
        window_left: int = -1,
        logits_soft_cap: float = 0.0,
        sm_scale: float | None = None,
        use_sinks: bool = False,
        use_custom_mask: bool = False,
        variant: AttentionVariant | str | None = None,
        skip_softmax_threshold: float | None = None,
        batch_invariant: bool = False,
        early_kv: bool = False,
        fp8_products: str = "exact",
        num_sms: int | None = None,
        workspace: Workspace | None = None,
        device: torch.device | str | int | None = None,
        backend: str = "auto",
    ) -> None:
        """Choose and load the kernels.

        Raises:
            ConfigError: with every reason why the configuration has no kernel.
            CompileError, KernelNotFoundError: a kernel can't be had (jitattn.base.errors). Of the
                prefill kernel ``plan`` and ``build_info`` say that it doesn't compile.
        """
        config = PlannerConfig.among(locals())
        check_rules(config)
        super().__init__(
            config,
            make_plan=FP8QueryPlan if config.has_fp8_queries else Plan,
            out_row_shape=(config.num_qo_heads, config.head_dim_vo or config.head_dim),
            device=device,
            backend=backend,
            workspace=workspace,
        )
        self._layout_keys: dict[object, object] = {}
        self._known_scales: KnownForms[tuple[int, int]] = KnownForms()
        self.kernels = _kernels_of(self.backend, config, self.device)
        if config.has_fp8_queries:
            self._prepare_queries()

    def exact(self) -> AttentionPlanner:
        """Return a planner whose outputs are float32, of parts that are merged; this one, if it is.

        Its queries are what kernels get for those of this one.
        """
        exact = super().exact()
        assert isinstance(exact, AttentionPlanner)
        exact.make_plan = Plan
        return exact

    def _prepare_queries(self) -> None:
        kernels: Any = self.kernels
        if self.backend != "cuda":
            self.tensor_dtypes = self.tensor_dtypes._replace(q=torch.float64)
        elif kernels.reads_fp8_queries:
            self.make_plan = FP8ProductsPlan
            self.tensor_dtypes = self.tensor_dtypes._replace(q=FP8)
        else:
            load_kernel(self.device)

    def bind(
        self,
        kv_cache: KVCache,
        *,
        k_scale: ScaleLike | None = None,
        v_scale: ScaleLike | None = None,
    ) -> BoundCache:
        """Check a cache and reduce it to pointers and strides, once per layer.

        Args:
            kv_cache: [num_pages, 2, page_size, num_kv_heads, head_dim] ("HND": heads before
                tokens), or a pair of such tensors without the second dimension, or for "ragged" a
                pair of [num_kv_tokens, num_kv_heads, head_dim]; of four bits a
                ``QuantizedKV`` of such a pair. Any strides with a contiguous last dimension. FP8
                and int8 may come as uint8.
            k_scale: of a quantised cache: what a stored K times it is the value of (of four
                bits besides the scale of its block); a number or a float32 tensor, [], [1] or
                [num_kv_heads] of any stride, read whenever a kernel runs. None is 1.
            v_scale: likewise, of V.

        Raises:
            TypeError, ValueError: the cache or a scale doesn't fit the planner, or a cache that is
                not quantised has a scale.
        """
        k_factor, v_factor = self._scales(k_scale, v_scale)
        tensors = plain_tensors(kv_cache)
        form = self.known_forms.find(tensors)
        if form is None:
            views, form = self._checked_form(kv_cache, tensors)
            self.known_forms.add(tensors, form)
        else:
            views = form.views(tensors)
        k, v, *block_scales = views
        view = self._checked_view(kv_cache)
        return BoundCache(
            self.config,
            self.device,
            k,
            v,
            form.kernels,
            layout_key=self._layout_key(form, view),
            tensor_maps=None if form.leading is None else form.leading(views),
            k_scale=k_factor,
            v_scale=v_factor,
            block_scales=(block_scales[0], block_scales[1]) if block_scales else None,
            view=view,
            source=tensors or tensors_of(kv_cache),
        )

    def _scales(
        self, k_scale: ScaleLike | None, v_scale: ScaleLike | None
    ) -> tuple[Scale | None, Scale | None]:
        tensors = plain_tensors((k_scale, v_scale))
        strides = self._known_scales.find(tensors)
        if strides is not None:
            return Scale(1.0, tensors[0], strides[0]), Scale(1.0, tensors[1], strides[1])
        config, device = self.config, self.device
        num_heads, kv_dtype = config.num_kv_heads, config.kv_dtype
        k = view_scale("k_scale", k_scale, kv_dtype, device, num_kv_heads=num_heads)
        v = view_scale("v_scale", v_scale, kv_dtype, device, num_kv_heads=num_heads)
        if k is not None and v is not None:
            self._known_scales.add(tensors, (k.stride, v.stride))
        return k, v

    def _checked_form(
        self, kv_cache: KVCache, tensors: Sequence[Tensor]
    ) -> tuple[Sequence[CacheView], CacheForm]:
        """Check a cache; return its views, and what is known of those that lie like it."""
        blocks = view_block_caches(kv_cache, self.config, self.device)
        if blocks is not None:
            views: tuple[CacheView, ...] = blocks
        else:
            assert not isinstance(kv_cache, QuantizedKV)
            views = view_caches(kv_cache, self.config, self.device)
        k, v, *_ = views
        kernels, leading = self.kernels.bind(k, v, blocks)
        facts: tuple[object, ...] = kernels, k.strides, v.strides
        if self.config.page_table in LISTS:
            facts = *facts, k.tensor.shape[0]  # its pages are counted
        return views, CacheForm.of(tensors, views, kernels, leading, facts)

    def _checked_view(self, kv_cache: KVCache) -> object:
        view = view_of(kv_cache)
        if self.config.early_kv and getattr(view, "has_scratch", False):
            raise ValueError(
                f"kv_cache is of {view}, where layers write scratch pages that earlier layers have "
                "read: a planner with early_kv=True can't read them before its predecessor ends"
            )
        return view

    def _layout_key(self, form: CacheForm, view: object) -> object:
        """Return one object for all caches that lie alike."""
        if self.config.page_table == "ragged":
            return object()  # its tokens are counted, and few come twice
        facts = form.layout, view
        return self._layout_keys.setdefault(facts, facts)


class Plan(PlanBase[Call]):
    """A batch, split over the card. For one thread at a time, and one stream.

    Defined by: jitattn/kernels/attention/reference.py::attention.
    """

    __slots__ = ()

    planner: AttentionPlanner

    def run(
        self,
        q: Tensor,
        kv: BoundCache | KVCache,
        *,
        pages: PlannedTable | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        q_scale: ScaleLike | None = None,
        out_scale: ScaleLike | None = None,
        sinks: Tensor | None = None,
        custom_mask: CustomMask | None = None,
        variant_params: VariantParams | None = None,
        extra: tuple[IndexLists, BoundCache | KVCache] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend the query tokens of each request to its pages, on the current stream.

        Args:
            q: [num_tokens, num_qo_heads, head_dim], q_dtype, the last dimension contiguous.
            kv: from ``bind``, or a cache, which is bound once, as long as its tensors live.
            pages: a table to read instead of the plan's, of the same layout and size.
            out: [num_tokens, num_qo_heads, head_dim_vo], out_dtype; allocated when None.
            lse: float32 [num_tokens, num_qo_heads], any strides; filled when given.
            return_lse: return lse as well, allocated when None.
            q_scale: of FP8 queries, 1 when None: a number, or float32 [], [1], [num_qo_heads] or
                [num_tokens, num_qo_heads], read by the kernel; docs/quantisation.md has how.
            out_scale: for quantised outputs, which are not built yet.
            sinks: [num_qo_heads], any float dtype and stride, with ``use_sinks``.
            custom_mask: with ``use_custom_mask``: bool [tokens, width] or packed uint8 [tokens,
                width / 8] (lowest bit first) over the last keys of a request; or (packed,
                mask_indptr) over all, rows padded to bytes, request b from byte mask_indptr[b] on.
            variant_params: those of ``variant``: numbers are read now, tensors by the kernel.
            extra: with ``page_table="indices"``: other lists, and their cache, in the same softmax.

        Returns:
            out, or (out, lse) with ``return_lse``. lse is the natural logarithm of the sum of
            exp(score) over visible keys, plus exp(sink). A row without visible keys has out 0 and
            lse -inf, or its sink; rows past the last request have out 0 and lse -inf.

        Raises:
            TypeError, ValueError: an argument that doesn't fit the planner, before any launch.
        """
        if q_scale is not None or out_scale is not None:
            self._refuse(q_scale=q_scale, out_scale=out_scale)
        if extra is not None:
            others = custom_mask, variant_params
            return self._run_extra(q, kv, extra, pages, out, lse, return_lse, sinks, *others)
        if is_dynamo_compiling():
            refuse_compiled(variant_params)
            return self._traced(q, kv, pages, out, lse, return_lse, sinks, custom_mask)
        kv = kv if type(kv) is BoundCache else self._bound(kv, BoundCache)
        is_plain = return_lse is False and (
            pages is lse is sinks is custom_mask is variant_params is None  # type: ignore[comparison-overlap]
        )
        if is_plain and self._replay and (done := self._replay(q, kv, out)) is not None:
            return done
        given = q, kv, pages, out, lse, return_lse, sinks, custom_mask, variant_params
        call = self._checked_call(*given)
        return self._run_call(call, return_lse, is_plain=is_plain, has_out=out is not None)

    def _traced(self, *arguments: Any) -> Tensor | tuple[Tensor, Tensor]:
        from jitattn.kernels.attention.torch_op import trace_attention

        return trace_attention(self, *arguments)

    def _run_extra(
        self,
        q: Tensor,
        kv: BoundCache | KVCache,
        extra: tuple[IndexLists, BoundCache | KVCache],
        pages: PlannedTable | None,
        out: Tensor | None,
        lse: Tensor | None,
        return_lse: bool,
        sinks: Tensor | None,
        custom_mask: CustomMask | None,
        variant_params: VariantParams | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if self.planner.has_lengths or is_dynamo_compiling():
            self._refuse(extra=extra)
        self._refuse(custom_mask=custom_mask, variant_params=variant_params)
        check_flag("return_lse", return_lse)
        self._replay = None
        check_sinks(sinks, self.planner.config, self.planner.device)
        self._check_q(q)
        bound = self._bound(kv, BoundCache)
        out = self._new_out(q)[0] if out is None else self._checked_out("q", q, out)[0]
        lse = self._lse(lse)[0] if lse is not None or return_lse else None
        self._run_both((q,), bound, extra, pages, out, lse, sinks)
        return (out, lse) if return_lse else out  # type: ignore[return-value]

    def _run_call(
        self, call: Call, return_lse: bool, *, is_plain: bool, has_out: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        # Most calls of a step are like the one before, but for addresses.
        self._replay = None
        self.backend.run(call)
        if is_plain and (has_out or self._out_is_like_q) and self._checked_lens is None:
            self._replay = self.backend.replay_of(call)
        return (call.out, call.lse) if return_lse else call.out  # type: ignore[return-value]

    def _checked_call(
        self,
        q: Tensor,
        kv: BoundCache | KVCache,
        pages: PlannedTable | None,
        out: Tensor | None,
        lse: Tensor | None,
        return_lse: bool,
        sinks: Tensor | None,
        custom_mask: CustomMask | None,
        variant_params: VariantParams | None,
    ) -> Call:
        check_flag("return_lse", return_lse)
        planner, batch = self.planner, self.batch
        config, device = planner.config, planner.device
        if sinks is not None or config.use_sinks:
            check_sinks(sinks, config, device)
        if not self._q_layout.fits(q):
            self._check_q(q)
        if not isinstance(kv, BoundCache) or kv.config is not config or kv.device is not device:
            kv = self._bound(kv, BoundCache)  # not bound by this planner
        pages = batch.pages if pages is None else self._checked_pages(pages)
        if kv.view is not None:
            check_view(pages, kv.view)
        out, out_layout = self._new_out(q) if out is None else self._checked_out("q", q, out)
        lse_layout = NO_LAYOUT
        if lse is not None or return_lse:
            lse, lse_layout = self._lse(lse)
        mask = None
        if custom_mask is not None or config.use_custom_mask:
            mask = check_mask(
                custom_mask, config, device, num_tokens=q.shape[0], batch_size=batch.batch_size
            )
        if self._checked_lens is not None:
            self._check_values(pages, kv.pools, q.shape[0])
        if variant_params is not None or config.variant is not None:
            variant_params = self._checked_params(variant_params)
        return Call(
            q,
            self._q_layout,
            kv,
            pages,
            out,
            out_layout,
            lse,
            lse_layout,
            sinks,
            mask,
            variant_params,
        )

    def _check_q(self, q: Tensor) -> None:
        config = self.planner.config
        self._q_layout = self._check_rows_of("q", q, config.num_qo_heads, config.head_dim)
        self._forget_outputs()


class FP8QueryPlan(Plan):
    """A batch of FP8 queries, which each run dequantises, in front of attention."""

    __slots__ = ("_again", "_dequantizer", "_pending")

    def __init__(self, planner: AttentionPlanner, batch: Batch, backend: PlanBackend[Call]) -> None:
        """Made by ``plan``."""
        super().__init__(planner, batch, backend)
        self._dequantizer = QueryDequantizer()
        # Queries of the current call, their scale, and where their values go.
        self._pending: tuple[Tensor, QueryScale, Tensor] | None = None
        # What attends again to values, for caches that lie like that of the last call.
        self._again: tuple[Replay, object] | None = None

    def run(
        self,
        q: Tensor,
        kv: BoundCache | KVCache,
        *,
        pages: PlannedTable | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        q_scale: ScaleLike | None = None,
        out_scale: ScaleLike | None = None,
        sinks: Tensor | None = None,
        custom_mask: CustomMask | None = None,
        variant_params: VariantParams | None = None,
        extra: tuple[IndexLists, BoundCache | KVCache] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend: arguments, results and errors are those of ``Plan.run``."""
        others: dict[str, Any] = {
            **{"pages": pages, "out": out, "lse": lse, "return_lse": return_lse},
            **{"out_scale": out_scale, "sinks": sinks, "custom_mask": custom_mask},
            **{"variant_params": variant_params, "extra": extra},
        }
        if is_dynamo_compiling():
            from jitattn.kernels.attention.torch_op import trace_dequantize

            return super().run(trace_dequantize(self, q, q_scale), kv, **others)
        again, self._again = self._again, None
        if not self._dequantizer.knows(q):
            again = None
            self._check_fp8_queries(q)
        scale = self._dequantizer.scale_of(q, q_scale)
        values = torch.empty(q.shape, dtype=self.planner.tensor_dtypes.q, device=q.device)
        is_plain = return_lse is False and (
            pages is lse is out_scale is sinks is custom_mask is variant_params is extra is None  # type: ignore[comparison-overlap]
        )
        self._pending = q, scale, values
        try:
            if is_plain and again and (done := self._run_again(again, values, kv, out)) is not None:
                return done
            return super().run(values, kv, **others)
        finally:
            self._pending = None

    def _run_again(
        self, again: tuple[Replay, object], values: Tensor, kv: object, out: Tensor | None
    ) -> Tensor | None:
        """Run like the last call; return None where something differs."""
        replay, layout_key = again
        if type(kv) is not BoundCache or kv.layout_key is not layout_key:
            return None
        if out is None:
            out = self._new_out(values)[0]
        elif not self._out_layout.fits(out):
            return None
        # What is refused is ruled out by now.
        self._dequantize()
        if (done := replay(values, kv, out)) is not None:
            self._again = again
        return done

    def _check_fp8_queries(self, q: Tensor) -> None:
        config, batch = self.planner.config, self.batch
        num_tokens = batch.batch_size if batch.qo_indptr is None else -1
        shape = num_tokens, config.num_qo_heads, config.head_dim
        self._dequantizer.check(q, shape, self.planner.device)

    def _dequantize(self) -> None:
        """Launch what writes the queries, once a call, whose arguments have passed their checks."""
        pending, self._pending = self._pending, None
        if pending is not None:  # a compiled function has an operator for it
            self._dequantizer.launch(*pending)

    def _run_call(
        self, call: Call, return_lse: bool, *, is_plain: bool, has_out: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        self._dequantize()
        found = super()._run_call(call, return_lse, is_plain=is_plain, has_out=True)
        # It attends to values: run says when.
        replay, self._replay = self._replay, None
        self._again = None if replay is None else (replay, call.kv.layout_key)
        return found

    def _run_both(self, queries: tuple[Tensor, ...], *others: Any) -> None:
        self._dequantize()
        super()._run_both(queries, *others)


class FP8ProductsPlan(Plan):
    """A batch of FP8 queries, which attention kernels read, and their scales."""

    __slots__ = ("_scales",)

    backend: Any

    def __init__(self, planner: AttentionPlanner, batch: Batch, backend: PlanBackend[Call]) -> None:
        """Made by ``plan``."""
        super().__init__(planner, batch, backend)
        self._scales = QueryScales()

    def run(
        self,
        q: Tensor,
        kv: BoundCache | KVCache,
        *,
        pages: PlannedTable | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        q_scale: ScaleLike | None = None,
        out_scale: ScaleLike | None = None,
        sinks: Tensor | None = None,
        custom_mask: CustomMask | None = None,
        variant_params: VariantParams | None = None,
        extra: tuple[IndexLists, BoundCache | KVCache] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend: arguments, results and errors are those of ``Plan.run``."""
        others: dict[str, Any] = {
            **{"pages": pages, "out": out, "lse": lse, "return_lse": return_lse},
            **{"out_scale": out_scale, "sinks": sinks, "custom_mask": custom_mask},
            **{"variant_params": variant_params, "extra": extra},
        }
        if is_dynamo_compiling():
            self._refuse(out_scale=out_scale, extra=extra)
            refuse_compiled(variant_params)
            return self._traced(q, kv, pages, out, lse, return_lse, sinks, custom_mask, q_scale)
        if not self._q_layout.fits(q):
            self._check_q(q)
        self.backend.write_query_scale(self._scales.of(q, q_scale))
        return super().run(q, kv, **others)

    def _check_q(self, q: Tensor) -> None:
        check_fp8_queries(q)
        super()._check_q(q)
        self._q_layout = RowLayout(q, vector=FP8_VECTOR)
        self._scales.forget()


class _Kernels(Kernels[PlanBackend[Call]], Protocol):
    def bind(
        self, k: CacheView, v: CacheView, blocks: BlockCaches | None, /
    ) -> tuple[BoundKernels | None, LeadingForm | None]:
        """Return the kernels whose loaders the strides of K and V allow, and what makes maps."""
        ...


def _kernels_of(backend: str, config: PlannerConfig, device: torch.device) -> _Kernels:
    if backend == "cuda":
        from jitattn.kernels.attention.kernels import AttentionKernels

        return AttentionKernels(config, device)
    is_list = config.page_table in LISTS
    return ReferenceKernels(config, ListsReferencePlan if is_list else AttentionReferencePlan)
