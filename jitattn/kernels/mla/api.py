"""Multi-head latent attention: ``MLAPlanner`` and ``MLAPlan``.

Heads share one latent a token, which is key and value at once, and a rope part that turns keys
only. Whoever calls has multiplied the projection of keys into q, and multiplies that of values
into out.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from jitattn.base.validate import check_flag
from jitattn.device.workspace import Workspace
from jitattn.kernels.common.planner_base import (
    Q_VECTOR,
    Kernels,
    PlanBackend,
    PlanBase,
    PlannerBase,
    make_readable,
)
from jitattn.kernels.common.reference_plan import ReferenceKernels
from jitattn.kernels.mla.check import (
    BoundMLACache,
    LatentViews,
    MLACall,
    check_q_pe,
    refuse_scale,
    scale_of,
    view_latents,
)
from jitattn.kernels.mla.config import check_rules
from jitattn.kernels.mla.reference_plan import MLAListsReferencePlan, MLAReferencePlan
from jitattn.spec.config import MLAConfig
from jitattn.spec.layout import ListLayout
from jitattn.spec.variant import AttentionVariant
from jitattn.tensors.bound_cache import CacheForm, LeadingForm, plain_tensors
from jitattn.tensors.overlap import refuse_shared_bytes
from jitattn.tensors.page_table_base import PlannedTable
from jitattn.tensors.scales import ScaleLike
from jitattn.tensors.tensor_layouts import NO_LAYOUT, Batch, RowLayout
from jitattn.tensors.token_lists import IndexLists
from jitattn.tensors.variant_params import VariantParams, refuse_compiled

MLACache = Tensor | tuple[Tensor, Tensor]


class _Arguments(PlannerBase["MLAPlan"]):
    config: MLAConfig
    kernels: _Kernels


make_readable(_Arguments, MLAConfig)


class MLAPlanner(_Arguments):
    """Multi-head latent attention of one configuration on one device, for decode and prefill.

    Thread-safe.

    Args:
        sm_scale: multiplies scores. It has no default, since it goes by the head dim before
            projections are multiplied in: DeepSeek's is (128 + 64) ** -0.5, times what YaRN
            adds.
        num_heads: heads of q and out on this device.
        kv_lora_rank: elements of a latent.
        qk_rope_head_dim: elements of a rope part.
        page_size: tokens of a page; None for a ragged cache.
        q_dtype: a torch dtype or its name.
        kv_dtype: likewise, of the cache: ``q_dtype``, or float8_e4m3fn for any of the FP8
            caches that ``bind`` takes.
        out_dtype: likewise, of out; None is ``q_dtype``.
        page_table: a name of ``Layout``, "shared" or another: the layout of the tables
            that plans get. Of a separate table row 0 has the ids of latents and row 1 those of
            rope parts; where one tensor holds both, row 0 counts and row 1 is not read.
        causal: query tokens see no later ones; the last of a request is its last key.
        variant: an ``AttentionVariant``, or the name of a ready one ("alibi",
            "relative_bias"): what becomes of each logit; ``run`` gets ``variant_params``.
        batch_invariant: a query token has the same bits of out and lse whatever is in the batch,
            however its request is cut into prefill chunks, verified tokens and decode steps, and
            wherever its pages lie.
        fp8_products: of an FP8 cache: "exact" or "fast", as of ``AttentionPlanner``; the same.
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
        sm_scale: float,
        num_heads: int = 128,
        kv_lora_rank: int = 512,
        qk_rope_head_dim: int = 64,
        page_size: int | None = 64,
        q_dtype: torch.dtype | str = "bfloat16",
        kv_dtype: torch.dtype | str = "bfloat16",
        out_dtype: torch.dtype | str | None = None,
        page_table: str = "shared",
        causal: bool = True,
        variant: AttentionVariant | str | None = None,
        batch_invariant: bool = False,
        fp8_products: str = "exact",
        num_sms: int | None = None,
        workspace: Workspace | None = None,
        device: torch.device | str | int | None = None,
        backend: str = "auto",
    ) -> None:
        """Check the arguments.

        Raises:
            ConfigError: with every reason why the configuration has no kernel.
            CompileError, KernelNotFoundError: a kernel can't be had.
        """
        config = MLAConfig.among(locals())
        check_rules(config)
        super().__init__(
            config,
            make_plan=MLAPlan,
            out_row_shape=(config.num_heads, config.kv_lora_rank),
            device=device,
            backend=backend,
            workspace=workspace,
        )
        self.kernels = _kernels_of(self.backend, config, self.device)

    def bind(
        self, kv: MLACache, *, k_scale: ScaleLike | None = None, v_scale: ScaleLike | None = None
    ) -> BoundMLACache:
        """Check a cache and reduce it to strides, once per layer.

        Args:
            kv: [num_pages, page_size, kv_lora_rank + qk_rope_head_dim], the latent first, or a pair
                (latent, rope) of [num_pages, page_size, kv_lora_rank] and [num_pages, page_size,
                qk_rope_head_dim]; for "ragged" likewise with [num_kv_tokens, ..]. Any strides with
                a contiguous last dimension, those of a pair each its own. FP8 may come as uint8.
                The rope part of a pair with an FP8 latent may be of ``q_dtype``. One tensor
                [.., kv_lora_rank + kv_lora_rank / 32 + 2 * qk_rope_head_dim] of bytes has rows that
                hold their scales, DeepSeek's 656 bytes: an FP8 latent, a float32 scale for each 128
                elements of it, and a bfloat16 rope part.
            k_scale: of an FP8 cache whose rows hold no scales: what a stored latent times it is the
                value of, as key and as value, and a rope part that is FP8, too; a number or a
                float32 tensor, [] or [1], read whenever a kernel runs. None is 1.
            v_scale: refused: a value is the latent, which has one scale.

        Raises:
            TypeError, ValueError: the cache or a scale doesn't fit the planner, or a cache that is
                not quantised has a scale.
        """
        if v_scale is not None:
            raise ValueError(
                "v_scale is given, but a value is the latent: k_scale is its only scale"
            )
        config, device = self.config, self.device
        refuse_scale(k_scale, config)
        tensors = plain_tensors(kv)
        form = self.known_forms.find(tensors)
        if form is None:
            views = view_latents(kv, k_scale, config, device)
            form = CacheForm.of(tensors, views.parts, *self.kernels.bind(views))
            self.known_forms.add(tensors, form)
        else:
            views = LatentViews(*form.views(tensors))
        scale = scale_of(k_scale, views, config, device)
        return BoundMLACache(
            config,
            device,
            views,
            is_pair=not isinstance(kv, Tensor),
            k_scale=scale,
            kernels=form.kernels,
            tensor_maps=None if form.leading is None else form.leading(views),
            source=tensors or ((kv,) if isinstance(kv, Tensor) else tuple(kv)),
        )


class MLAPlan(PlanBase[MLACall]):
    """A batch of an ``MLAPlanner``. For one thread at a time, and one stream."""

    __slots__ = ("_pe_layout",)

    planner: MLAPlanner

    def __init__(self, planner: MLAPlanner, batch: Batch, backend: PlanBackend[MLACall]) -> None:
        """Made by ``MLAPlanner.plan``."""
        super().__init__(planner, batch, backend)
        self._pe_layout = NO_LAYOUT

    def run(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        kv: BoundMLACache | MLACache,
        *,
        pages: PlannedTable | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        q_scale: ScaleLike | None = None,
        out_scale: ScaleLike | None = None,
        variant_params: VariantParams | None = None,
        extra: tuple[IndexLists, BoundMLACache | MLACache] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend the query tokens of each request to its latents, on the current stream.

        Args:
            q_nope: [num_tokens, num_heads, kv_lora_rank], q_dtype, with the projection of keys
                multiplied in; the last dimension contiguous. Without ``qo_indptr`` num_tokens is
                batch_size.
            q_pe: [num_tokens, num_heads, qk_rope_head_dim], likewise, after the rotary embedding.
                Both may be parts of one tensor.
            kv: from ``bind``, or a cache, which is bound on the spot.
            pages: a table to read instead of the plan's, of the same layout and size.
            out: [num_tokens, num_heads, kv_lora_rank], out_dtype; allocated when None.
            lse: float32 [num_tokens, num_heads], any strides; filled when given.
            return_lse: return lse as well, allocated when None.
            q_scale: for quantised queries, which are not built yet.
            out_scale: for quantised outputs, which are not built yet.
            variant_params: with a ``variant`` that has params: a number or tensor for each. Numbers
                are read now, tensors when the kernel runs, in a graph at each replay.
            extra: with ``page_table="indices"``: other lists, and their cache, in the same softmax;
                not in compiled functions.

        Returns:
            out, or (out, lse) with ``return_lse``. lse is the natural logarithm of the sum of
            exp(score) over visible keys, score = sm_scale * (q_nope . latent + q_pe . rope). A row
            without visible keys and rows past the last request have out 0 and lse -inf.

        Raises:
            TypeError, ValueError: an argument that doesn't fit the planner, before any launch.

        Defined by: jitattn/kernels/mla/reference.py::latent_attention.
        """
        if is_dynamo_compiling():
            from jitattn.kernels.mla.torch_op import trace_mla_attention

            self._refuse(q_scale=q_scale, out_scale=out_scale, extra=extra)
            refuse_compiled(variant_params)
            return trace_mla_attention(self, q_nope, q_pe, kv, pages, out, lse, return_lse)
        check_flag("return_lse", return_lse)
        if q_scale is not None or out_scale is not None:
            self._refuse(q_scale=q_scale, out_scale=out_scale)
        if extra is not None:
            self._refuse(variant_params=variant_params)
            return self._run_extra(q_nope, q_pe, kv, extra, pages, out, lse, return_lse)
        call = self._checked_call(q_nope, q_pe, kv, pages, out, lse, return_lse, variant_params)
        self.backend.run(call)
        return (call.out, call.lse) if return_lse else call.out  # type: ignore[return-value]

    def _run_extra(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        kv: BoundMLACache | MLACache,
        extra: tuple[IndexLists, BoundMLACache | MLACache],
        pages: PlannedTable | None,
        out: Tensor | None,
        lse: Tensor | None,
        return_lse: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        check_flag("return_lse", return_lse)
        self._check_queries(q_nope, q_pe)
        bound = self._bound(kv, BoundMLACache)
        out = self._out_for(q_nope, q_pe, out)[0]
        lse = self._lse(lse)[0] if lse is not None or return_lse else None
        self._run_both((q_nope, q_pe), bound, extra, pages, out, lse)
        return (out, lse) if return_lse else out  # type: ignore[return-value]

    def _out_for(
        self, q_nope: Tensor, q_pe: Tensor, out: Tensor | None
    ) -> tuple[Tensor, RowLayout]:
        if out is None:
            return self._new_out(q_nope)
        out, out_layout = self._checked_out("q_nope", q_nope, out)
        if -out_layout.span < out.data_ptr() - q_pe.data_ptr() < self._pe_layout.span:
            refuse_shared_bytes([("out", out)], [("q_pe", q_pe)])
        return out, out_layout

    def _checked_call(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        kv: BoundMLACache | MLACache,
        pages: PlannedTable | None,
        out: Tensor | None,
        lse: Tensor | None,
        return_lse: bool,
        variant_params: VariantParams | None,
    ) -> MLACall:
        config = self.planner.config
        self._check_queries(q_nope, q_pe)
        if (
            not isinstance(kv, BoundMLACache)
            or kv.config is not config
            or kv.device is not self.planner.device
        ):
            kv = self._bound(kv, BoundMLACache)  # not bound by this planner
        pages = self.batch.pages if pages is None else self._checked_pages(pages)
        out, out_layout = self._out_for(q_nope, q_pe, out)
        lse_layout = NO_LAYOUT
        if lse is not None or return_lse:
            lse, lse_layout = self._lse(lse)
        if self._checked_lens is not None:
            self._check_values(pages, kv.pools, q_nope.shape[0])
        if variant_params is not None or config.variant is not None:
            variant_params = self._checked_params(variant_params)
        return MLACall(
            q_nope,
            self._q_layout,
            q_pe,
            self._pe_layout,
            kv,
            pages,
            out,
            out_layout,
            lse,
            lse_layout,
            config.score_scale,
            variant_params,
        )

    def _check_queries(self, q_nope: Tensor, q_pe: Tensor) -> None:
        config = self.planner.config
        num_heads, rank = config.num_heads, config.kv_lora_rank
        if not self._q_layout.fits(q_nope):
            self._q_layout = self._check_rows_of("q_nope", q_nope, num_heads, rank)
            self._pe_layout = NO_LAYOUT
            self._forget_outputs()
        if not self._pe_layout.fits(q_pe):
            dtype, device = self.planner.tensor_dtypes.q, self.planner.device
            check_q_pe(q_pe, config, dtype, device, num_tokens=q_nope.shape[0])
            self._pe_layout = RowLayout(q_pe, vector=Q_VECTOR)


class _Kernels(Kernels[PlanBackend[MLACall]], Protocol):
    def bind(self, kv: LatentViews, /) -> tuple[object, LeadingForm | None]:
        """Return the kernels that the strides of a cache allow, and what makes its maps."""
        ...


def _kernels_of(backend: str, config: MLAConfig, device: torch.device) -> _Kernels:
    if backend == "cuda":
        from jitattn.kernels.mla.kernels import MLAKernels

        return MLAKernels(config, device)
    is_list = config.page_table == ListLayout.INDICES
    return ReferenceKernels(config, MLAListsReferencePlan if is_list else MLAReferencePlan)
