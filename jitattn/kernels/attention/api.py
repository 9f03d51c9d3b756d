"""Plan a batch on the device, then run its layers: ``AttentionPlanner``, ``BoundCache``, ``Plan``.

``AttentionPlanner`` chooses and loads kernels; ``bind`` checks a cache once; ``plan`` asks the
device to split the batch; ``run`` patches a struct and launches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from jitattn.base.validate import check_flag
from jitattn.device.workspace import Workspace
from jitattn.kernels.attention.config import check_rules
from jitattn.kernels.attention.reference_plan import ReferencePlan
from jitattn.kernels.common.planner_base import (
    Q_VECTOR,
    Backend,
    PlanBase,
    PlannerBase,
    is_capturing,
    make_readable,
)
from jitattn.spec.config import PlannerConfig
from jitattn.spec.variant import AttentionVariant
from jitattn.tensors.block_caches import view_block_caches
from jitattn.tensors.cache_views import (
    NO_LAYOUT,
    Again,
    BoundCache,
    Call,
    Mask,
    RowLayout,
    view_caches,
    view_mask,
    view_of,
    view_scale,
)
from jitattn.tensors.device_checks import check_page_ids, check_queries
from jitattn.tensors.page_table import PageTable
from jitattn.tensors.page_tables import check_view
from jitattn.tensors.quantization import KVCache, QuantizedKV, tensors_of
from jitattn.tensors.tensor_checks import check_device, check_last_stride, check_rows, check_tensor
from jitattn.tensors.variant_params import VariantParams, refuse_compiled

if TYPE_CHECKING:
    from jitattn.kernels.attention.kernels import KernelInfo
    from jitattn.kernels.attention.loaded_kernels import BoundKernels
    from jitattn.kernels.mla.api import MLAPlanner
    from jitattn.tensors.cache_views import TensorMaps


Scale = float | Tensor
CustomMask = Tensor | tuple[Tensor, Tensor]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class _Arguments(PlannerBase):
    config: PlannerConfig


make_readable(_Arguments, PlannerConfig)


class AttentionPlanner(_Arguments):
    """The kernels of one attention configuration on one device.

    Constructing it compiles or loads its kernels. The prefill kernel and the wide decode kernel,
    for requests of a few query tokens, go on compiling in the background, and the first plan with
    requests for them waits. Thread-safe.

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
        num_sms: int | None = None,
        workspace: Workspace | None = None,
        device: torch.device | str | int | None = None,
        backend: str = "auto",
    ) -> None:
        """Choose and load the kernels.

        Args:
            num_qo_heads: query heads, a multiple of ``num_kv_heads``.
            num_kv_heads: heads of K and V.
            head_dim: elements of a head.
            page_size: tokens of a page; None for ragged K and V.
            head_dim_vo: elements of a head of V and out; None is ``head_dim``.
            q_dtype: a torch dtype or its name.
            kv_dtype: likewise, of the cache; "nvfp4" for a ``QuantizedKV``.
            out_dtype: likewise, of out; None is ``q_dtype``.
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
            batch_invariant: a request's bits depend on nothing but its own values and length.
            early_kv: a promise: before the previous kernel on the stream began, all keys and values
                but those of each request's query tokens were complete, and so were the tables. Then
                they may be read before that kernel has ended (programmatic dependent launch).
            num_sms: multiprocessors to use; None is all.
            workspace: scratch memory; None is one for each device and stream.
            device: None is the current CUDA device, or the CPU without one.
            backend: "auto" is "cuda" on a CUDA device and "reference" on the CPU.

        Raises:
            ConfigError: with every reason why the configuration has no kernel.
            CompileError, KernelNotFoundError: a kernel can't be had (jitattn.base.errors). Of the
                prefill kernel ``plan`` and ``build_info`` say that it doesn't compile.
        """
        config = PlannerConfig.among(locals())
        check_rules(config)
        super().__init__(config, device=device, backend=backend, workspace=workspace)
        self._use_sinks = config.use_sinks
        self._use_custom_mask = config.use_custom_mask
        self._kinds: dict[object, object] = {}
        if self.backend == "cuda":
            from jitattn.kernels.attention.kernels import KernelSet

            self._kernels = KernelSet(self.config, self.device)

    def bind(
        self, kv_cache: KVCache, *, k_scale: Scale | None = None, v_scale: Scale | None = None
    ) -> BoundCache:
        """Check a cache and reduce it to pointers and strides, once per layer.

        Args:
            kv_cache: [num_pages, 2, page_size, num_kv_heads, head_dim] ("HND": heads before
                tokens), or a pair of such tensors without the second dimension, or for "ragged" a
                pair of [num_kv_tokens, num_kv_heads, head_dim]; with kv_dtype "nvfp4" a
                ``QuantizedKV`` of such a pair. Any strides with a contiguous last dimension. FP8
                and int8 may come as uint8.
            k_scale: of a quantised cache: what a stored K times it is the value of (of NVFP4
                besides the scale of its block); a number or a float32 tensor, [], [1] or
                [num_kv_heads] of any stride, read whenever a kernel runs. None is 1.
            v_scale: likewise, of V.

        Raises:
            TypeError, ValueError: the cache or a scale doesn't fit the planner, or a cache that is
                not quantised has a scale.
        """
        scales = [
            view_scale(
                name,
                scale,
                self.config.kv_dtype,
                self.device,
                num_kv_heads=self.config.num_kv_heads,
            )
            for name, scale in (("k_scale", k_scale), ("v_scale", v_scale))
        ]
        blocks = view_block_caches(kv_cache, self.config, self.device)
        if blocks is not None:
            k, v = blocks.k, blocks.v
        else:
            assert not isinstance(kv_cache, QuantizedKV)
            k, v = view_caches(kv_cache, self.config, self.device)
        kernels: BoundKernels | None = None
        tensor_maps: TensorMaps | None = None
        if self._kernels is not None:
            if blocks is not None:
                kernels, tensor_maps = self._kernels.bind_blocks(blocks)
            else:
                kernels, tensor_maps = self._kernels.bind(k, v)
        view = view_of(kv_cache)
        if self.config.early_kv and getattr(view, "has_scratch", False):
            raise ValueError(
                f"kv_cache is of {view}, where layers write scratch pages that earlier layers have "
                "read: a planner with early_kv=True can't read them before its predecessor ends"
            )
        kind: object = (kernels, k.strides, v.strides, view)
        if self.config.page_table == "ragged":
            kind = object()  # its tokens are counted, and few come twice
        else:
            kind = self._kinds.setdefault(kind, kind)
        return BoundCache(
            self.config,
            self.device,
            k,
            v,
            kernels,
            kind=kind,
            tensor_maps=tensor_maps,
            k_scale=scales[0],
            v_scale=scales[1],
            block_scales=None if blocks is None else (blocks.k_scales, blocks.v_scales),
            view=view,
            source=tensors_of(kv_cache),
        )

    def plan(
        self,
        pages: PageTable,
        seq_lens: Tensor,
        qo_indptr: Tensor | None = None,
        *,
        max_q_len: int | None = None,
        max_kv_len: int | None = None,
    ) -> Plan:
        """Split a batch over the card, on the device, once per step.

        The lengths are snapshot; the tables are read when ``run`` runs. Nothing is copied to the
        host, and nothing waits for the device.

        Args:
            pages: the pages of each request, in the planner's ``page_table`` layout.
            seq_lens: int32 or int64 [batch_size], KV tokens of each request, this step's included.
                Zero and less is padding. A request longer than its table or ``max_kv_len`` gets
                NaN (the reference backend on the CPU raises ValueError).
            qo_indptr: int32 [batch_size + 1], where the query tokens of each request begin in q;
                None is one query token a request. Rows of q past its last entry are padding.
            max_q_len: the most query tokens of a request; needed with ``qo_indptr``. A request
                with more gets NaN (ValueError on the CPU). No result depends on it.
            max_kv_len: the longest length that occurs; None is what the table can hold.

        Raises:
            TypeError, ValueError: an argument that doesn't fit the planner.
            CompileError, KernelNotFoundError: the batch needs a kernel that can't be had.
        """
        batch = self._batch(pages, seq_lens, qo_indptr, max_q_len, max_kv_len)
        backend: _Backend
        if self._kernels is None:
            backend = ReferencePlan(self.config, batch)
        else:
            backend = self._kernels.plan(self._workspace, batch)
        return Plan(self, batch, backend)


def plan_for_call(
    planner: AttentionPlanner,
    pages: PageTable,
    seq_lens: Tensor,
    qo_indptr: Tensor | None = None,
    *,
    max_q_len: int | None = None,
    max_kv_len: int | None = None,
) -> Plan:
    """Return a plan that is run by the call that makes it and dropped then.

    So it may be captured: each replay plans anew, from what is at the tensors' addresses then.

    Args:
        planner: the planner.
        pages: as of ``AttentionPlanner.plan``, like the arguments that follow.
        seq_lens: likewise.
        qo_indptr: likewise.
        max_q_len: likewise.
        max_kv_len: likewise.

    Raises:
        TypeError, ValueError: as ``AttentionPlanner.plan``, or a kernel is not loaded in a capture.
    """
    kernels = planner._kernels
    if kernels is None or not torch.cuda.is_current_stream_capturing():
        return planner.plan(pages, seq_lens, qo_indptr, max_q_len=max_q_len, max_kv_len=max_kv_len)
    batch = planner._batch(pages, seq_lens, qo_indptr, max_q_len, max_kv_len)
    return Plan(planner, batch, kernels.plan_in_capture(batch))


class Plan(PlanBase):
    """A batch, split over the card. For one thread at a time, and one stream."""

    __slots__ = ()

    _planner: AttentionPlanner
    _backend: _Backend

    def run(
        self,
        q: Tensor,
        kv: BoundCache | KVCache,
        *,
        pages: PageTable | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        q_scale: Scale | None = None,
        out_scale: Scale | None = None,
        sinks: Tensor | None = None,
        custom_mask: CustomMask | None = None,
        variant_params: VariantParams | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend the query tokens of each request to its pages, on the current stream.

        Args:
            q: [num_tokens, num_qo_heads, head_dim], q_dtype; the last dimension contiguous. Without
                ``qo_indptr`` num_tokens is batch_size.
            kv: from ``bind``, or a cache, which is bound on the spot.
            pages: a table to read instead of the plan's, of the same layout and size.
            out: [num_tokens, num_qo_heads, head_dim_vo], out_dtype; allocated when None.
            lse: float32 [num_tokens, num_qo_heads], any strides; filled when given.
            return_lse: return lse as well, allocated when None.
            q_scale: for quantised queries, which are not built yet.
            out_scale: for quantised outputs, which are not built yet.
            sinks: [num_qo_heads], any float dtype and stride, with ``use_sinks``.
            custom_mask: with ``use_custom_mask``, combined with causal and window by AND: bool
                [num_tokens, width] or packed uint8 [num_tokens, width / 8] (the lowest bit first)
                over the last ``width`` keys of each request, or (packed, mask_indptr) over all
                keys, the rows of request b from byte mask_indptr[b] on, each padded to bytes.
            variant_params: with a ``variant`` that has params: a number or tensor for each. Numbers
                are read now, tensors when the kernel runs, in a graph at each replay.

        Returns:
            out, or (out, lse) with ``return_lse``. lse is the natural logarithm of the sum of
            exp(score) over visible keys, plus exp(sink). A row without visible keys has out 0 and
            lse -inf, or its sink; rows past the last request have out 0 and lse -inf.

        Raises:
            TypeError, ValueError: an argument that doesn't fit the planner, before any launch.

        Defined by: jitattn/kernels/attention/reference.py::attention.
        """
        if is_dynamo_compiling():
            from jitattn.kernels.attention.torch_op import trace_attention

            self._refuse(q_scale=q_scale, out_scale=out_scale)
            refuse_compiled(variant_params)
            return trace_attention(self, q, kv, pages, out, lse, return_lse, sinks, custom_mask)
        is_plain = return_lse is False and (
            pages is lse is sinks is custom_mask is q_scale is out_scale is variant_params is None  # type: ignore[comparison-overlap]
        )
        # Most calls of a step are like the one before, but for addresses.
        if is_plain and self._again is not None:
            done = self._again(q, kv, out)
            if done is not None:
                return done
        self._again = None
        check_flag("return_lse", return_lse)
        if q_scale is not None or out_scale is not None:
            self._refuse(q_scale=q_scale, out_scale=out_scale)
        call = self._checked_call(q, kv, pages, out, lse, return_lse, sinks, custom_mask)
        call.variant_params = self._checked_params(variant_params)
        self._backend.run(call)
        if is_plain and (out is not None or self._out_is_like_q) and self._checked_lens is None:
            self._again = self._backend.again(call)
        if return_lse:
            assert call.lse is not None
            return call.out, call.lse
        return call.out

    def _checked_call(
        self,
        q: Tensor,
        kv: BoundCache | KVCache,
        pages: PageTable | None,
        out: Tensor | None,
        lse: Tensor | None,
        return_lse: bool,
        sinks: Tensor | None,
        custom_mask: CustomMask | None,
    ) -> Call:
        planner = self._planner
        if sinks is not None or planner._use_sinks:
            self._check_sinks(sinks)
        if not self._q_layout.fits(q):
            self._check_q(q)
        if (
            not isinstance(kv, BoundCache)
            or kv.config is not planner.config
            or kv.device is not planner.device
        ):  # not bound by this planner
            kv = self._bound(kv)
        pages = self._batch.pages if pages is None else self._checked_pages(pages)
        if kv.view is not None:
            check_view(pages, kv.view)
        out, out_layout = self._new_out(q) if out is None else self._checked_out(out, q)
        lse_layout = NO_LAYOUT
        if lse is not None or return_lse:
            lse, lse_layout = self._lse(lse)
        mask = None
        if custom_mask is not None or planner._use_custom_mask:
            mask = self._mask(custom_mask, q.shape[0])
        if self._checked_lens is not None and not is_capturing(planner.device):
            check_queries(self._checked_queries, q.shape[0])
            check_page_ids(
                pages, self._checked_lens, self._checked_queries, kv.pools, planner.config
            )
        return Call(q, self._q_layout, kv, pages, out, out_layout, lse, lse_layout, sinks, mask)

    def _check_q(self, q: Tensor) -> None:
        planner, config = self._planner, self._planner.config
        check_tensor("q", q, (planner._q_dtype,))
        one_each = self._batch.qo_indptr is None
        num_tokens = self._batch.batch_size if one_each else q.shape[0] if q.dim() else 0
        shape = num_tokens, config.num_qo_heads, config.head_dim
        check_rows("q", q, shape, planner._q_dtype, planner.device)
        check_last_stride("q", q)
        self._q_layout = RowLayout(q, vector=Q_VECTOR)
        self._forget_outputs()

    def _bound(self, kv: BoundCache | KVCache) -> BoundCache:
        planner = self._planner
        bound = kv if isinstance(kv, BoundCache) else planner.bind(kv)
        if bound.config is not planner.config and bound.config != planner.config:
            raise ValueError(
                "kv was bound by a planner of another configuration: bind it with this one"
            )
        if bound.device != planner.device:
            raise ValueError(f"kv is on {bound.device}: expected {planner.device}")
        return bound

    def _mask(self, custom_mask: CustomMask | None, num_tokens: int) -> Mask | None:
        config = self._planner.config
        if (custom_mask is not None) != config.use_custom_mask:
            given = "given" if custom_mask is not None else "not given"
            raise ValueError(
                f"custom_mask is {given}, but the planner has "
                f"use_custom_mask={config.use_custom_mask}"
            )
        if custom_mask is None:
            return None
        return view_mask(custom_mask, num_tokens, self._batch.batch_size, self._planner.device)

    def _check_sinks(self, sinks: Tensor | None) -> None:
        config = self._planner.config
        if (sinks is not None) != config.use_sinks:
            given = "given" if sinks is not None else "not given"
            raise ValueError(f"sinks are {given}, but the planner has use_sinks={config.use_sinks}")
        if sinks is None:
            return
        check_tensor("sinks", sinks, _FLOATS)
        if tuple(sinks.shape) != (config.num_qo_heads,):
            raise ValueError(
                f"sinks has shape {list(sinks.shape)}: expected [{config.num_qo_heads}]"
            )
        check_device("sinks", sinks, self._planner.device)

    def _out_shape(self) -> tuple[int, int, int]:
        config = self._planner.config
        num_tokens = self._q_layout.shape[0]
        return num_tokens, config.num_qo_heads, config.head_dim_vo or config.head_dim


class _Backend(Backend, Protocol):
    """What a plan needs of the code that computes."""

    def run(self, call: Call) -> None: ...

    def again(self, call: Call) -> Again | None: ...


def build_info(planner: AttentionPlanner | MLAPlanner) -> list[KernelInfo]:
    """Return what is known of each kernel of ``planner``; none on "reference".

    Waits for those that still compile in the background.

    Raises:
        CompileError: one of them doesn't compile.
    """
    return [] if planner._kernels is None else planner._kernels.infos()
