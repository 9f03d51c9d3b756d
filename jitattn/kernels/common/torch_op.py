"""What operators that ``torch.compile`` puts into its graphs share between families.

A family's ``torch_op.py`` defines its operators, ``torch.ops.jitattn.*``, and has functions that
TorchDynamo traces, which put calls of them into a graph. Plans, bound caches and rotary embeddings
come as handles, tables as their tensors. What an operator writes it is given, and declares. Eager
calls reach none of it: they go past the dispatcher.

TorchDynamo reads attributes and makes tensors, and nothing else: what arguments hold is checked
when the operator runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from jitattn.spec.layout import LISTS, ListLayout
from jitattn.tensors.cache_views import view_of
from jitattn.tensors.page_table_base import PlannedTable
from jitattn.tensors.page_tables import check_view, table_from_tensors
from jitattn.tensors.quantization import KVCache, QuantizedKV, cache_of, tensors_of
from jitattn.tensors.scales import ScaleLike
from jitattn.tensors.tensor_handles import find
from jitattn.tensors.token_lists import lists_from_tensors

# Parts of schemas.
PLAN = "Tensor plan, "
CACHE = "Tensor[] kv_cache, Tensor? kv, Tensor? k_scale, "
PAGES = "Tensor[] pages, str? page_table, "
OUTPUTS = "Tensor(a!) out, Tensor(b!)? lse) -> ()"

_LIBRARY: Any = torch.library.Library("jitattn", "DEF")  # type: ignore[no-untyped-call]


# --- definitions ----------------------------------------------------------------------------------


def define(function: Callable[..., None], schema: str) -> None:
    """Define an operator that runs ``function`` on every device, and does nothing to fake tensors.

    A schema, and no annotations, since those of lists that are written are unknown to torch 2.6.
    """
    name = function.__name__
    tags = [torch.Tag.pt2_compliant_tag]
    # Plans change from step to step, and with them what launches read: graphs of torch's own making
    # leave the operators out. Who captures a step captures it whole.
    if hasattr(torch.Tag, "cudagraph_unsafe"):
        tags.append(torch.Tag.cudagraph_unsafe)
    _LIBRARY.define(f"{name}({schema}", tags=tags)
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"jitattn::{name}", _do_nothing, lib=_LIBRARY)


def _do_nothing(*arguments: object) -> None:
    """Say of fake tensors what an operator returns."""


# --- objects of an operator's tensors -------------------------------------------------------------


def planned_table(tensors: Sequence[Tensor], layout: str | None) -> PlannedTable | None:
    """Return the table or the lists that an operator gets as tensors and a layout."""
    if tensors and layout in LISTS:
        return lists_from_tensors(tensors, ListLayout(layout))
    return table_from_tensors(tensors, layout)


def scale_of(tensor: Tensor | None, factor: float | None) -> ScaleLike | None:
    """Return a scale: a tensor, or else a number, or neither."""
    return factor if tensor is None else tensor


def bound_of(
    plan: Any, tensors: Sequence[Tensor], kv: Tensor | None, kind: str, **scales: Tensor | None
) -> object:
    """Return the bound cache of a handle, or bind tensors that are not where its own are.

    A graph may keep a cache that it writes elsewhere until it ends.
    """
    if kv is None:
        return cache_of(tensors)
    bound: Any = find("kv", kv, kind)
    given = {name: _own_scale(getattr(bound, name)) for name in scales}
    own = [*bound.source, *(scale for scale in given.values() if isinstance(scale, Tensor))]
    now = [*tensors, *(scale for scale in scales.values() if scale is not None)]
    if len(own) == len(now) and all(map(_lies_like, own, now)):
        return bound
    for name, scale in scales.items():
        given[name] = given[name] if scale is None else scale
    return plan.planner.bind(cache_of(tensors), **given)


def _own_scale(scale: Any) -> ScaleLike | None:
    return None if scale is None else scale_of(scale.tensor, scale.value)


def _lies_like(one: Tensor, other: Tensor) -> bool:
    return one is other or (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
    )


# --- tensors of a traced call's objects -----------------------------------------------------------


def cache_tensors(
    kv: Any, pages: PlannedTable | None
) -> tuple[list[Tensor], Tensor | None, Tensor | None, Tensor | None]:
    """Return the tensors of a cache; of a bound one its handle and tensors of scales, too."""
    if isinstance(kv, (Tensor, tuple, list, QuantizedKV)):
        if pages is not None:
            check_view(pages, view_of(kv))
        return list(tensors_of(cast(KVCache, kv))), None, None, None
    if pages is not None:
        check_view(pages, getattr(kv, "view", None))
    k, v = kv.k_scale, kv.v_scale
    return (
        list(kv.source),
        kv.handle,
        None if k is None else k.tensor,
        None if v is None else v.tensor,
    )


def pages_tensors(pages: PlannedTable | None) -> tuple[list[Tensor], str | None]:
    """Return the tensors of a page table, and its layout."""
    if pages is None:
        return [], None
    return list(pages.tensors), pages.layout.value


def new_outputs(
    q: Tensor,
    width: int,
    dtype: torch.dtype,
    out: Tensor | None,
    lse: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return ``out`` and ``lse``, new ones where they are None and wanted."""
    if out is None:
        out = torch.empty((*q.shape[:2], width), dtype=dtype, device=q.device)
    if lse is None and return_lse:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    return out, lse


def scale_parts(scale: ScaleLike | None) -> tuple[Tensor | None, float | None]:
    """Return a scale as a tensor and a number, one of which is None."""
    if scale is None or isinstance(scale, Tensor):
        return scale, None
    return None, float(scale)


def refuse_gradients(tensors: Mapping[str, Tensor | None]) -> None:
    """Refuse what would be differentiated: there is no backward pass, and eager calls have none."""
    if torch.is_grad_enabled():
        for name, tensor in tensors.items():
            if tensor is not None and tensor.requires_grad:
                raise ValueError(
                    f"{name} requires a gradient, and attention has none here: compile under "
                    "torch.no_grad() or torch.inference_mode()"
                )
