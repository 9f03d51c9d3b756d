"""What engines' steps have in common: plans of a batch for all its layers, and bound caches.

Nothing here knows an engine. A step is made when an engine describes a batch, and its plans when
the first layer of their kind attends, since only layers know heads, windows and scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from jitattn.kernels.attention.api import AttentionPlanner
from jitattn.kernels.attention.functional import planner_of
from jitattn.kernels.mla.api import MLAPlanner
from jitattn.tensors.bound_cache import BoundCache
from jitattn.tensors.page_table_base import PlannedTable
from jitattn.tensors.scales import ScaleLike

Planner = AttentionPlanner | MLAPlanner
TableT = TypeVar("TableT", bound=PlannedTable)

FP8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


class Step:
    """The requests of a batch, and the plans that layers made of them.

    Attributes:
        seq_lens: int32 or int64 [batch_size], KV tokens of each request, this step's included; of
            lists the number of query tokens.
        qo_indptr: int32 [batch_size + 1], where the query tokens of each request begin; None is one
            a request.
        max_q_len: the most query tokens of a request.
    """

    __slots__ = ("_made", "max_q_len", "qo_indptr", "seq_lens")

    def __init__(self, seq_lens: Tensor | int, qo_indptr: Tensor | None, max_q_len: int) -> None:
        """Hold them; nothing is planned."""
        self.seq_lens = seq_lens
        self.qo_indptr = qo_indptr
        self.max_q_len = max_q_len
        self._made: dict[Planner, _Made] = {}

    def plan_of(self, planner: Planner, pages: TableT) -> tuple[Any, TableT | None]:
        """Return the plan of ``planner``, made when it is first asked for.

        Returns:
            The planner's ``Plan`` or ``MLAPlan``, and the table to give to its ``run``: None where
            it is the plan's own.

        Raises:
            TypeError, ValueError: the batch doesn't fit the planner.
        """
        made = self._made.get(planner)
        if made is None:
            made = self._made[planner] = self._make(planner, pages)
        return made.plan, None if pages is made.pages else pages

    def plan_for(self, layer: object, planner: Planner, pages: TableT) -> tuple[Any, TableT | None]:
        """Return the plan as ``plan_of`` does, up to date.

        The first layer that comes for a plan begins a pass over the model whenever it comes again:
        lengths may have changed in place since, and a capture is to hold the schedule of its own.
        """
        is_new = planner not in self._made
        result = self.plan_of(planner, pages)
        made = self._made[planner]
        if made.first is None:
            made.first = layer
        if made.first is layer and not is_new:
            made.plan.refresh()
        return result

    def refresh(self) -> None:
        """Make the schedules of all plans anew, on the current stream; can be captured."""
        for made in self._made.values():
            made.plan.refresh()

    def _make(self, planner: Planner, pages: PlannedTable) -> _Made:
        max_q_len = None if self.qo_indptr is None else self.max_q_len
        plan = planner.plan(pages, self.seq_lens, self.qo_indptr, max_q_len=max_q_len)
        return _Made(plan, pages)


class _Made:
    """A plan, the table it was made with, and the layer that comes first for it."""

    __slots__ = ("first", "pages", "plan")

    def __init__(self, plan: Any, pages: PlannedTable) -> None:
        self.plan = plan
        self.pages = pages
        self.first: object = None


class LayerPlanners:
    """The planners of a layer, whose heads, scale and mask never change.

    Attributes:
        fixed: the planner's arguments that don't change.
    """

    def __init__(self, fixed: Mapping[str, object]) -> None:
        """Hold the arguments; nothing is loaded."""
        self.fixed = dict(fixed)
        self._found: dict[tuple[object, ...], AttentionPlanner] = {}

    def of(
        self,
        *,
        head_dim_vo: int,
        q_dtype: torch.dtype,
        kv_dtype: torch.dtype,
        page_size: int | None,
        page_table: str,
        causal: bool,
        device: torch.device,
    ) -> AttentionPlanner:
        """Return the planner of a batch, loaded when it is first asked for.

        Raises:
            ConfigError: with every reason why the configuration has no kernel.
        """
        key = head_dim_vo, q_dtype, kv_dtype, page_size, page_table, causal, device
        planner = self._found.get(key)
        if planner is None:
            arguments: dict[str, object] = {
                **self.fixed,
                "head_dim_vo": head_dim_vo,
                "q_dtype": q_dtype,
                "kv_dtype": kv_dtype,
                "page_size": page_size,
                "page_table": page_table,
                "causal": causal,
            }
            planner = self._found[key] = planner_of(arguments, device)
        return planner


class BoundCaches:
    """A layer's cache as its planners have bound it, until it lies elsewhere."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._bound: dict[AttentionPlanner, _Bound] = {}

    def of(
        self,
        planner: AttentionPlanner,
        k_cache: Tensor,
        v_cache: Tensor,
        k_scale: ScaleLike | None,
        v_scale: ScaleLike | None,
    ) -> BoundCache:
        """Return what ``planner.bind`` returns, from the last call where nothing has moved.

        Raises:
            TypeError, ValueError: the cache or a scale doesn't fit the planner.
        """
        found = self._bound.get(planner)
        if found is not None and found.is_of(k_cache, v_cache, k_scale, v_scale):
            return found.cache
        parts = k_cache, v_cache, k_scale, v_scale
        places = tuple(map(place_of, parts))
        if found is None or found.places != places:
            cache = planner.bind((k_cache, v_cache), k_scale=k_scale, v_scale=v_scale)
        else:
            cache = found.cache
        self._bound[planner] = _Bound(cache, parts, places)
        return cache


class _Bound:
    """A bound cache, and how to know its parts again.

    Attributes:
        cache: what ``bind`` returned.
        places: of K, V and their scales.
    """

    __slots__ = ("_k_at", "_parts", "_v_at", "cache", "places")

    def __init__(
        self,
        cache: BoundCache,
        parts: tuple[Tensor, Tensor, ScaleLike | None, ScaleLike | None],
        places: tuple[object, ...],
    ) -> None:
        self.cache, self._parts, self.places = cache, parts, places
        self._k_at, self._v_at = parts[0].data_ptr(), parts[1].data_ptr()

    def is_of(
        self, k_cache: Tensor, v_cache: Tensor, k_scale: ScaleLike | None, v_scale: ScaleLike | None
    ) -> bool:
        """Whether the parts are the same tensors, where they were; not of others that lie there.

        It takes a fraction of the time of their places.
        """
        k, v, scale_of_k, scale_of_v = self._parts
        return (
            k_cache is k
            and v_cache is v
            and k_scale is scale_of_k
            and v_scale is scale_of_v
            and k.data_ptr() == self._k_at
            and v.data_ptr() == self._v_at
        )


def place_of(part: ScaleLike | None) -> object:
    """Return what says where a tensor lies, or the number that is given instead."""
    if isinstance(part, Tensor):
        return part.data_ptr(), part.shape, part.stride(), part.dtype
    return part


def is_quantised(dtype: torch.dtype) -> bool:
    """Whether a cache of ``dtype`` has scales."""
    return dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
