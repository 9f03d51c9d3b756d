"""Plans whose memory is counted."""

from __future__ import annotations

import torch

import jitattn


def plan_of(
    planner: jitattn.AttentionPlanner, batch_size: int, max_q_len: int, device: str = "cpu"
) -> jitattn.types.Plan:
    """A plan of so many requests of one token, for ``max_q_len`` query tokens each at the most."""
    pages = jitattn.BlockTable(torch.zeros((batch_size, 4), dtype=torch.int32, device=device))
    lens = torch.ones(batch_size, dtype=torch.int32, device=device)
    if max_q_len == 1:
        return planner.plan(pages, lens)
    indptr = torch.arange(batch_size + 1, dtype=torch.int32, device=device)
    return planner.plan(pages, lens, indptr, max_q_len=max_q_len)
