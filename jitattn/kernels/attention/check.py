"""The arguments of ``Plan.run``, checked: what a call hands to the code that computes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from jitattn.spec.config import PlannerConfig
from jitattn.tensors.bound_cache import BoundCache
from jitattn.tensors.masks import Mask, view_mask
from jitattn.tensors.page_table_base import PlannedTable
from jitattn.tensors.tensor_checks import (
    check_device,
    check_tensor,
)
from jitattn.tensors.tensor_layouts import RowLayout
from jitattn.tensors.variant_params import VariantParams

CustomMask = Tensor | tuple[Tensor, Tensor]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Call(NamedTuple):
    """The tensors of one ``run``, checked, and how those lie that differ from run to run."""

    q: Tensor
    q_layout: RowLayout
    kv: BoundCache
    pages: PlannedTable
    out: Tensor
    out_layout: RowLayout
    lse: Tensor | None
    lse_layout: RowLayout
    sinks: Tensor | None
    mask: Mask | None
    variant_params: VariantParams | None


def check_mask(
    custom_mask: CustomMask | None,
    config: PlannerConfig,
    device: torch.device,
    *,
    num_tokens: int,
    batch_size: int,
) -> Mask | None:
    """Return a custom mask, which is given if the planner has one.

    Raises:
        TypeError, ValueError: it doesn't fit, or is given without a use, or missing.
    """
    if (custom_mask is not None) != config.use_custom_mask:
        given = "given" if custom_mask is not None else "not given"
        raise ValueError(
            f"custom_mask is {given}, but the planner has use_custom_mask={config.use_custom_mask}"
        )
    if custom_mask is None:
        return None
    return view_mask(custom_mask, num_tokens, batch_size, device)


def check_sinks(sinks: Tensor | None, config: PlannerConfig, device: torch.device) -> None:
    """Raise unless sinks fit, which are given if the planner has some.

    Raises:
        TypeError, ValueError: they don't fit, or are given without a use, or missing.
    """
    if (sinks is not None) != config.use_sinks:
        given = "given" if sinks is not None else "not given"
        raise ValueError(f"sinks are {given}, but the planner has use_sinks={config.use_sinks}")
    if sinks is None:
        return
    check_tensor("sinks", sinks, _FLOATS)
    if tuple(sinks.shape) != (config.num_qo_heads,):
        raise ValueError(f"sinks has shape {list(sinks.shape)}: expected [{config.num_qo_heads}]")
    check_device("sinks", sinks, device)
