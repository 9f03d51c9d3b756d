"""Arguments that both attention functions take: planners, scores, refusals."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jitattn.kernels.attention.api import AttentionPlanner
from jitattn.kernels.attention.functional import planner_of

# Arguments that say nothing about attention, or say again what the mask says.
_IGNORED = frozenset(
    (
        *("position_ids", "position_embeddings", "cache_position", "use_cache", "return_dict"),
        *("output_hidden_states", "logits_to_keep", "num_items_in_batch", "token_type_ids"),
        *("logits_indices", "logits_processor_args", "output_router_logits", "input_ids"),
        *("num_logits_to_keep",),
    )
)
PlannerArguments = tuple[tuple[str, object], ...]


def planner_for(config: PlannerArguments, device: torch.device) -> AttentionPlanner:
    """Return the planner of some arguments; equal ones share it.

    Raises:
        ConfigError: with every reason why they have no kernel.
    """
    return planner_of(dict(config), device)


def score_arguments(
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    window_left: int,
    *,
    causal: bool,
) -> PlannerArguments:
    """Return the planner's arguments that turn products into scores."""
    return (
        ("sm_scale", scaling),
        ("logits_soft_cap", softcap or 0.0),
        ("use_sinks", sinks is not None),
        ("window_left", window_left),
        ("causal", causal),
    )


def refuse_unsupported(dropout: float, others: dict[str, Any], *tensors: Tensor) -> None:
    """Raise ValueError for dropout, gradients and arguments that change attention."""
    if dropout:
        raise ValueError(f"dropout is {dropout}: jitattn has none; call model.eval()")
    for name, value in others.items():
        if value is not None and value is not False and name not in _IGNORED:
            raise ValueError(f"{name} is given: jitattn's attention does not support it")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ValueError("q, K or V requires a gradient: jitattn has none; use torch.no_grad()")
