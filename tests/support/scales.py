"""What stored bytes stand for, and what each form of a scale must do to out and lse.

C22 are scales that are accepted and ignored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tests.support.cases import SCALES, Case, of
from tests.support.harness import attend, same_bits
from tests.support.inputs import (
    Inputs,
    Tokens,
    make_inputs,
    random_tokens,
    stored,
    uniform_probe,
    zeros_of,
)

FORMS = [form for form in SCALES if form is not None]
NUM_KV_HEADS, GROUP_SIZE = 4, 2
K_SCALES = ((0.125, 0.25, 0.5, 1.0), (0.25, 0.125, 1.0, 7.0))
V_SCALES = ((1.0, 2.0, 4.0, 8.0), (0.5, 0.125, 1.0, 16.0), (0.0, 0.0, 2.0, 0.0))


def scale_of(form: str, scales: Sequence[float], device: torch.device | str) -> object:
    """A scale of several KV heads in a form of `SCALES`; the forms of one number take the first."""
    if form == "float":
        return scales[0]
    per_head = form.startswith("heads")
    column = torch.tensor(scales if per_head else scales[:1], device=device)
    if form == "heads-column":
        return torch.stack((column * math.nan, column, column * math.nan), dim=1)[:, 1]
    return column[0] if form == "0-d" else column


def of_query_heads(form: str, scales: Sequence[float], device: torch.device | str) -> Tensor:
    """The number that counts for each query head, float64 [num_qo_heads]."""
    numbers = scales if form.startswith("heads") else scales[:1]
    each = torch.tensor(numbers, dtype=torch.float64, device=device).expand(NUM_KV_HEADS)
    return each.repeat_interleave(GROUP_SIZE)


def codes(case: Case, which: Sequence[int] | Tensor, device: torch.device | str) -> Tensor:
    """Numbers of a quantised cache by their bytes."""
    numbers = torch.as_tensor(which, device=device).to(torch.uint8)
    return numbers.view(getattr(torch, case.stored_dtype))


def every_byte_of_v(
    case: Case, q_len: int, device: torch.device | str, firsts: Sequence[int] = range(256)
) -> tuple[Inputs, Tensor]:
    """Requests of one key, and out, which is its row of V, bit for bit.

    Outputs saturate: an infinite value is the largest number of their type, and NaN stays NaN.
    ``firsts`` are the bytes that rows of V begin with; the others follow.
    """
    pairs = [(q_len, 1)] * len(firsts)
    case = of(replace(case, num_kv_heads=1, scales=None, causal=False), *pairs)
    q, k, v = uniform_probe(case, device)
    request = torch.tensor(firsts, device=device)[:, None, None]
    column = torch.arange(case.value_dim, device=device)
    v = codes(case, (request + column).expand(v.shape) % 256, device)
    dtype = getattr(torch, case.out_dtype or case.dtype)
    largest = torch.finfo(dtype).max
    rows = v.to(dtype).clamp(-largest, largest).repeat_interleave(q_len, 0)
    want = rows.expand(-1, case.num_qo_heads, -1)
    return make_inputs(case, device, (q, torch.zeros_like(k), v)), want


def ones_probe(case: Case, device: torch.device | str) -> Tokens:
    """A uniform probe whose V is 1 everywhere."""
    q, k, v = uniform_probe(case, device)
    return q, k, stored(case, q, zeros_of(k, case.kv_dtype), zeros_of(v, case.kv_dtype) + 1)[2]


def check_v_scale(
    case: Case, form: str, q_len: int, length: int, device: torch.device | str
) -> None:
    """V is 1 everywhere: out is the scale of the KV head, to the bit, and lse knows nothing."""
    case = of(replace(case, group_size=GROUP_SIZE, num_kv_heads=NUM_KV_HEADS), (q_len, length))
    inputs = make_inputs(replace(case, scales=None), device, ones_probe(case, device))
    out, lse = attend(inputs)
    assert bool((out[:q_len] == 1).all())
    for scales in V_SCALES:
        inputs.v_scale = scale_of(form, scales, device)
        out, scaled_lse = attend(inputs)
        want = of_query_heads(form, scales, device)[None, :, None].to(out.dtype)
        assert torch.equal(out, want.expand_as(out))
        assert same_bits(scaled_lse, lse)


def check_k_scale(case: Case, form: str, q_len: int, device: torch.device | str) -> None:
    """Two keys whose scores are 0 and 1 before scaling: lse = ln(1 + e^k_scale)."""
    shape = {"group_size": GROUP_SIZE, "num_kv_heads": NUM_KV_HEADS}
    case = of(replace(case, **shape, sm_scale=0.5, causal=False), (q_len, 2))
    _, k, v = random_tokens(case, device)
    q, keys = (zeros_of(x, case.kv_dtype) for x in random_tokens(case, device)[:2])
    q[..., 3], keys[1, :, 3] = 2.0, 1.0
    q, k, _ = stored(case, q, keys, zeros_of(v, case.kv_dtype))
    tokens = q, k, v
    inputs = make_inputs(replace(case, scales=None), device, tokens)
    for scales in K_SCALES:
        inputs.k_scale = scale_of(form, scales, device)
        want = of_query_heads(form, scales, device).exp().log1p()
        _, lse = attend(inputs)
        torch.testing.assert_close(lse.double(), want.expand_as(lse), rtol=0, atol=1e-3)
