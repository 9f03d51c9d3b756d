"""Scores at the edge of float32: of 1e11, and of factors whose product is infinite."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

import jitattn
from jitattn.spec.config import MLAConfig
from tests.support.cases import Case
from tests.support.harness import attend, check, expected, same_bits
from tests.support.inputs import Inputs, make_inputs, random_tokens
from tests.support.mla import MLACase
from tests.support.mla import make_inputs as make_mla_inputs

Attend = Callable[[Inputs], tuple[Tensor, Tensor]]

LATENT_CASES = [
    MLACase(
        num_heads=num_heads,
        lengths=(900, 64, 0, 1),
        page_size=page_size,
        out_dtype="float32",
        sm_scale=1.0,
    )
    for num_heads, page_size in ((16, 1), (16, 64), (24, 64), (40, 64))
]
"""Latent attention of scores so large, for a card."""

_LARGE = 30_000.0
_K_SCALE, _SM_SCALE = 2.0**118, 2.0**10


def check_large_scores(case: Case, device: torch.device | str, run: Attend = attend) -> None:
    """Logits of -1e11: most are equal, those of every third token larger by 0.03 %."""
    case = replace(case, sm_scale=1.0)
    q, k, v = random_tokens(case, device)
    key = -256.0 if case.kv_dtype else -_LARGE
    k = torch.full(k.shape, key, device=k.device)
    k[::3, :, -1] = key / 2
    inputs = make_inputs(case, device, (torch.full_like(q, _LARGE), k.to(v.dtype), v))
    want = expected(inputs)
    out, lse = run(inputs)
    torch.testing.assert_close(lse.double(), want.lse, rtol=1e-6, atol=0)
    check(case, out, want.lse.float(), replace(want, lse=want.lse.float().double()))


def check_large_neighbour(case: Case, device: torch.device | str, run: Attend = attend) -> None:
    """A row whose scores become large leaves the bits of all others."""
    inputs = make_inputs(case, device)
    before = run(inputs)
    token, head = inputs.q.shape[0] // 2, 1
    inputs.q[token, head] *= _LARGE
    _check_others(before, run(inputs), (token, head))


def check_large_latent_neighbour(
    case: MLACase, device: str = "cpu", planner: jitattn.MLAPlanner | None = None
) -> None:
    """The same of latent attention; the planner is `batch_invariant`."""
    inputs = make_mla_inputs(case, device)
    before = inputs.run(planner)
    for queries in (inputs.q_nope, inputs.q_pe):
        queries[0, 1] *= _LARGE
    _check_others(before, inputs.run(planner), (0, 1))


def _check_others(
    before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor], row: tuple[int, int]
) -> None:
    lse, old_lse = after[1], before[1]
    assert float((lse[row] - old_lse[row]).abs()) > _LARGE / 10, "the row's scores are not large"
    for old, new in zip(before, after, strict=True):
        new[row] = old[row]
        assert same_bits(new, old)


def check_far_scales(case: Case, device: torch.device | str, run: Attend = attend) -> None:
    """``k_scale * sm_scale`` is infinite, logits are of magnitude 2."""
    case = replace(case, sm_scale=_SM_SCALE)
    q, k, v = random_tokens(case, device)
    q = (q.double() * 2.0**-113).to(q.dtype)
    inputs = make_inputs(case, device, (q, (k.float() * 2.0**-5).to(k.dtype), v))
    inputs.k_scale = _K_SCALE
    inputs.k = inputs.k.double() * _K_SCALE
    check(case, *run(inputs), expected(inputs))


def check_far_queries(case: Case, device: torch.device | str, run: Attend = attend) -> None:
    """Rows of q far below and above others; others ignore those of NaN and of infinities."""
    case = replace(case, sm_scale=2.0**-15)
    q, k, v = random_tokens(case, device)
    factors = torch.tensor([2.0**9, 2.0**-40, 2.0**12, 2.0**-100, 0.0], dtype=torch.float64)
    rows = torch.arange(q.shape[0] * q.shape[1], device=q.device).view(q.shape[:2])
    q = (q.double() * factors.to(q.device)[rows % len(factors)][..., None]).to(q.dtype)
    inputs = make_inputs(case, device, (q, k, v))
    want = expected(inputs)
    check(case, *run(inputs), want)
    inputs.q[5, 1, 3] = math.nan
    inputs.q[9, 0] = math.inf
    out, lse = run(inputs)
    for row in ((5, 1), (9, 0)):
        assert out[row].isnan().all() and lse[row].isnan()
        out[row], lse[row] = want.out[row].to(out.dtype), want.lse[row]
    check(case, out, lse, want)


def check_large_latent_scores(
    case: MLACase, device: str = "cpu", planner: jitattn.MLAPlanner | None = None
) -> None:
    """The same of latent attention: all logits are equal, -1e11 and less."""
    case = replace(case, sm_scale=1.0)
    inputs = make_mla_inputs(case, device)
    for queries in (inputs.q_nope, inputs.q_pe):
        queries.masked_fill_(~queries.isnan(), _LARGE)
    caches = inputs.kv if isinstance(inputs.kv, tuple) else (inputs.kv,)
    for cache in caches:
        cache.masked_fill_(~cache.isnan(), -_LARGE)
    out, lse = inputs.run(planner)
    number = float(torch.tensor(-_LARGE, dtype=inputs.q_nope.dtype))
    logit = -(number**2) * (case.kv_lora_rank + case.qk_rope_head_dim)
    for request, length in enumerate(case.lengths):
        if length > 0:
            want = torch.full_like(lse[request], logit + math.log(length))
            torch.testing.assert_close(lse[request], want, rtol=1e-6, atol=0)
            torch.testing.assert_close(out[request], torch.full_like(out[request], number))


def gpu_configs() -> list[MLAConfig]:
    """What tests/gpu/test_edge_numbers.py launches besides kernels that others do, for a bundle."""
    return [
        MLAConfig.from_arguments({**case.planner_arguments(), "batch_invariant": invariant})
        for case in LATENT_CASES
        for invariant in (False, True)
    ]
