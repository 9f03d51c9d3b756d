"""Base of the wrappers over ``AttentionPlanner``: their state, and a run of their plan."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from jitattn.base.validate import check_flag, check_name
from jitattn.compat.flashinfer.common.arguments import (
    Pair,
    check_layout,
    check_queries,
    check_scales,
    check_workspace,
    paged_cache,
)
from jitattn.compat.flashinfer.common.batch import Batch, FixedBuffers, refuse_changes
from jitattn.compat.flashinfer.common.calls import Results, RunArguments
from jitattn.compat.gradients import refuse_gradients
from jitattn.kernels.attention.functional import planner_of
from jitattn.tensors.quantization import KVCache, QuantizedKV


class Wrapper:
    """A device, the buffers of captured runs, and the batch that was planned last."""

    _planned: Batch | None = None
    _fixed: FixedBuffers | None = None

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str, use_cuda_graph: bool
    ) -> None:
        """Check what all wrappers are given; ``_fix`` follows where runs are captured."""
        check_workspace("float_workspace_buffer", float_workspace_buffer)
        self.device = float_workspace_buffer.device
        self._kv_layout = check_layout(kv_layout)
        self._use_cuda_graph = check_flag("use_cuda_graph", use_cuda_graph)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether runs may be captured, over buffers that ``plan`` fills."""
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor
    ) -> None:
        """Check that both are on the wrapper's device; neither is used.

        Args:
            float_workspace_buffer: any tensor.
            int_workspace_buffer: any tensor.

        Raises:
            TypeError, ValueError: no tensor, or on another device.
        """
        check_workspace("float_workspace_buffer", float_workspace_buffer, self.device)
        check_workspace("int_workspace_buffer", int_workspace_buffer, self.device)

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Do nothing: strides of K and V are arguments of the same kernel.

        Args:
            variant: "independent".

        Raises:
            ValueError: it is another.
        """
        check_name("variant", variant, ("independent",))

    def _to_device(self, tensor: Tensor, non_blocking: bool) -> Tensor:
        return tensor.to(self.device, non_blocking=non_blocking)

    def _batch(self) -> Batch:
        if self._planned is None:
            raise RuntimeError("run was called before plan")
        return self._planned

    def _keep(self, arguments: Mapping[str, object]) -> Batch | None:
        """Return the batch of captured runs, whose arguments these must be; None if none is."""
        if self._planned is None or not self._use_cuda_graph:
            planner_of(arguments, self.device)  # says what is wrong before anything is copied
            return None
        refuse_changes(self._planned.arguments, arguments)
        return self._planned

    def _attend_pages(
        self, kv_cache: Pair, call: RunArguments, changes: Mapping[str, object]
    ) -> Results:
        """Run over a cache in pages, under ``changes`` of the planned arguments."""
        arguments = self._batch().arguments
        kv_dtype = str(arguments["kv_dtype"])
        kv = paged_cache("paged_kv_cache", kv_cache, self._kv_layout, kv_dtype, call.kv_cache_sf)
        _check_pages(kv, arguments)
        return self._attend(kv, call, changes)

    def _attend(self, kv: KVCache, call: RunArguments, changes: Mapping[str, object]) -> Results:
        """Run the plan of the batch under ``changes``, and bring lse into its form."""
        batch, q = self._batch(), call.q
        is_quantised = batch.arguments["kv_dtype"] != batch.arguments["q_dtype"]
        scales = check_scales(
            is_quantised, q_scale=call.q_scale, k_scale=call.k_scale, v_scale=call.v_scale
        )
        return_lse = check_flag("return_lse", call.return_lse)
        check_queries("q", q)
        refuse_gradients({"q": q})
        if batch.num_rows is not None and q.shape[0] < batch.num_rows:
            raise ValueError(f"q has {q.shape[0]} rows: plan was given {batch.num_rows} queries")
        lse = call.form.new(q, call.lse, return_lse)
        if call.sinks is not None:
            changes = {**changes, "use_sinks": True}
        planner, plan = batch.plan_with(changes)
        out = plan.run(
            q,
            planner.bind(kv, **scales),
            out=call.out,
            lse=call.form.view(lse),
            sinks=call.sinks,
            custom_mask=batch.mask,
        )
        assert isinstance(out, Tensor)
        return call.form.results(out, lse, return_lse=return_lse)


def _check_pages(kv: KVCache, arguments: Mapping[str, object]) -> None:
    """Raise ValueError unless pages are as ``plan`` was told."""
    names = ["page_size", "num_kv_heads"]
    if arguments["kv_layout"] == "HND":
        names.reverse()
    wanted = [arguments[name] for name in names]
    parts = (kv[:, 0], kv[:, 1]) if isinstance(kv, Tensor) else kv
    pair = (parts.k, parts.v) if isinstance(parts, QuantizedKV) else parts
    for part, dim_name in zip(pair, ("head_dim", "head_dim_vo"), strict=True):
        dim = arguments.get(dim_name, arguments["head_dim"])
        stored = int(str(dim)) // 2 if isinstance(parts, QuantizedKV) else dim
        if list(part.shape[1:]) != [*wanted, stored]:
            raise ValueError(
                f"paged_kv_cache has pages of {list(part.shape[1:])}: plan was given "
                f"{', '.join(names)}, {dim_name} = {[*wanted, dim]}"
            )


class OverAnother:
    """A wrapper that plans and runs another one."""

    _inner: Wrapper

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor
    ) -> None:
        """Check that both are on the wrapper's device; neither is used."""
        self._inner.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)
