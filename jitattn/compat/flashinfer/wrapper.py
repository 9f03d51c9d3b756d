"""What the wrappers over ``AttentionPlanner`` have in common: state, and a call of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from jitattn.base.validate import INT32_MAX, check_count, check_flag, check_number
from jitattn.compat.flashinfer.arguments import (
    LseForm,
    Scale,
    check_layout,
    check_queries,
    check_scales,
    check_workspace,
    data_types,
    paged_cache,
    refuse_unbuilt,
)
from jitattn.compat.flashinfer.batch import Batch, FixedBuffers, refuse_changes
from jitattn.compat.gradients import refuse_gradients
from jitattn.kernels.attention.functional import planner_of
from jitattn.spec.config import HEAD_DIMS
from jitattn.tensors.quantization import KVCache, QuantizedKV


class Results(NamedTuple):
    """Where a call's results go, and in which form."""

    out: Tensor | None
    lse: Tensor | None
    return_lse: bool
    form: LseForm


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

    def _to_device(self, tensor: Tensor, non_blocking: bool) -> Tensor:
        return tensor.to(self.device, non_blocking=check_flag("non_blocking", non_blocking))

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
        self, given: Mapping[str, Any], changes: Mapping[str, object], form: LseForm
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Run for the arguments of a wrapper over pages, those that it has not left out."""
        refuse_unbuilt(given, but=("kv_cache_sf",))
        arguments = self._batch().arguments
        kv_dtype = str(arguments["kv_dtype"])
        kv = paged_cache(
            "paged_kv_cache",
            given["paged_kv_cache"],
            self._kv_layout,
            kv_dtype,
            given.get("kv_cache_sf"),
        )
        _check_pages(kv, arguments)
        scales = check_scales(
            kv_dtype != arguments["q_dtype"],
            **{name: given.get(name) for name in ("q_scale", "k_scale", "v_scale")},
        )
        return_lse = check_flag("return_lse", given.get("return_lse", False))
        results = Results(given.get("out"), given.get("lse"), return_lse, form)
        return self._call(given["q"], kv, changes, scales, given.get("sinks"), results)

    def _call(
        self,
        q: Tensor,
        kv: KVCache,
        changes: Mapping[str, object],
        scales: Mapping[str, Scale | None],
        sinks: Tensor | None,
        results: Results,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Run the plan of the batch under ``changes``, and bring lse into its form."""
        check_queries("q", q)
        refuse_gradients({"q": q})
        batch = self._batch()
        if batch.num_rows is not None and q.shape[0] < batch.num_rows:
            raise ValueError(f"q has {q.shape[0]} rows: plan was given {batch.num_rows} queries")
        lse = results.form.new(q, results.lse, results.return_lse)
        if sinks is not None:
            changes = {**changes, "use_sinks": True}
        planner, plan = batch.plan_with(changes)
        out = plan.run(
            q,
            planner.bind(kv, **scales),
            out=results.out,
            lse=results.form.view(lse),
            sinks=sinks,
            custom_mask=batch.mask,
        )
        assert isinstance(out, Tensor)
        return results.form.results(out, lse, return_lse=results.return_lse)


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


def window_change(window_left: int | None) -> dict[str, object]:
    """Return what a window of one call changes in its planner's arguments."""
    if window_left is None:
        return {}
    return {"window_left": max(check_count("window_left", window_left, least=-INT32_MAX), -1)}


def planner_arguments(given: Mapping[str, object], kv_layout: str) -> dict[str, object]:
    """Return the planner's arguments of what ``plan`` was given, its tables left out.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    refuse_unbuilt(given)
    counts = {
        name: check_count(name, given[name])
        for name in ("num_qo_heads", "num_kv_heads", "page_size")
        if name in given
    }
    if counts["num_qo_heads"] % counts["num_kv_heads"]:
        raise ValueError(
            f"num_qo_heads is {counts['num_qo_heads']}: expected a multiple of num_kv_heads, "
            f"{counts['num_kv_heads']}"
        )
    types = data_types(given["q_data_type"], given["kv_data_type"], given["o_data_type"])
    return {
        **counts,
        **types,
        **score_arguments(given),
        "kv_layout": kv_layout,
        "batch_invariant": _is_unsplit(given["fixed_split_size"], given["disable_split_kv"]),
    }


def score_arguments(given: Mapping[str, object]) -> dict[str, object]:
    """Return what becomes of a product of q and k: window, soft cap and scale.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    window_left = check_count("window_left", given["window_left"], least=-INT32_MAX)
    cap, scale = given["logits_soft_cap"], given["sm_scale"]
    return {
        "window_left": max(window_left, -1),
        "logits_soft_cap": 0.0 if cap is None else check_number("logits_soft_cap", cap, least=0.0),
        "sm_scale": None if scale is None else check_number("sm_scale", scale),
    }


def check_head_dim(name: str, value: object) -> int:
    """Return a head dim that there are kernels for.

    Raises:
        TypeError, ValueError: naming it.
    """
    head_dim = check_count(name, value)
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"{name} is {head_dim}: expected a multiple of 16 up to 256, or 512")
    return head_dim


def _is_unsplit(fixed_split_size: object, disable_split_kv: object) -> bool:
    """Whether the caller wants bits that don't depend on the rest of the batch."""
    is_fixed = False
    if fixed_split_size is not None:
        # FlashInfer's own default inside is -1.
        is_fixed = check_count("fixed_split_size", fixed_split_size, least=-1) > 0
    return check_flag("disable_split_kv", disable_split_kv) or is_fixed
