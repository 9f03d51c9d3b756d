"""FP8 caches on the reference backend: scales of every form, bytes for numbers, tiles."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import jitattn
from jitattn.kernels.attention.tile import decode_tile, prefill_tile
from tests.support.cases import E4M3, E5M2, QUANTISED_FAMILIES, SCALES, Case, of
from tests.support.harness import assert_same, attend, planner_for
from tests.support.inputs import K_SCALES, V_SCALES, Inputs, make_inputs
from tests.support.scales import FORMS, check_k_scale, check_v_scale

PAIRS = ((1, 40), (1, 1), (5, 33), (2, 0))


def factors(form: str | None, scales: tuple[float, ...], num_kv_heads: int) -> Tensor:
    """What a form of `tests.support.inputs.make_scale` means for each KV head."""
    if form is None:
        return torch.ones(num_kv_heads, dtype=torch.float64)
    count = num_kv_heads if form.startswith("heads") else 1
    values = torch.tensor([scales[i % 4] for i in range(count)], dtype=torch.float32)
    return values.expand(num_kv_heads).double()


def by_hand(inputs: Inputs, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Out and lse of each row, one key at a time, the scales applied to scores and sums."""
    case = inputs.case
    k_factor = factors(case.scales, K_SCALES, case.num_kv_heads)
    v_factor = factors(case.scales, V_SCALES, case.num_kv_heads)
    out = torch.zeros(sum(case.queries), case.num_qo_heads, case.value_dim, dtype=torch.float64)
    lse = torch.full(out.shape[:2], -math.inf, dtype=torch.float64)
    first_row = 0
    for b, (q_len, kv_len) in enumerate(zip(case.queries, case.lengths, strict=True)):
        base = inputs.kv_indptr[b]
        for i in range(q_len):
            for head in range(case.num_qo_heads):
                kv_head, row = head // case.group_size, first_row + i
                keys = slice(base, base + kv_len - q_len + i + 1)
                scores = k[keys, kv_head].double() @ inputs.q[row, head].double()
                scores = scores * case.scale * k_factor[kv_head]
                if scores.numel() > 0:
                    lse[row, head] = scores.logsumexp(0)
                    weighted = scores.softmax(0) @ v[keys, kv_head].double()
                    out[row, head] = weighted * v_factor[kv_head]
        first_row += q_len
    return out, lse


@pytest.mark.parametrize("form", SCALES)
@pytest.mark.parametrize("case", QUANTISED_FAMILIES, ids=str)
def test_scales_by_hand(case: Case, form: str | None) -> None:
    case = replace(of(case, *PAIRS), scales=form, num_kv_heads=3, group_size=2)
    inputs = make_inputs(case, "cpu")
    # The stored numbers, which the inputs hold scaled.
    k = inputs.k / factors(form, K_SCALES, 3)[:, None]
    v = inputs.v / factors(form, V_SCALES, 3)[:, None]
    out, lse = attend(inputs)
    want_out, want_lse = by_hand(inputs, k, v)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.double(), want_out, rtol=2.0**-8, atol=2.0**-12)


@pytest.mark.parametrize("q_len", [1, 5, 40])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", QUANTISED_FAMILIES, ids=str)
def test_c22_scales_to_the_bit(case: Case, form: str, q_len: int) -> None:
    check_v_scale(case, form, q_len, 40, "cpu")
    check_k_scale(case, form, q_len, "cpu")


@pytest.mark.parametrize("case", [E4M3, E5M2], ids=str)
def test_bytes_are_fp8(case: Case) -> None:
    inputs = make_inputs(of(case, *PAIRS), "cpu")
    want = attend(inputs)
    inputs.cache = tuple(cache.view(torch.uint8) for cache in inputs.cache)
    assert_same(attend(inputs), want)


def test_a_scale_is_read_when_a_plan_runs() -> None:
    inputs = make_inputs(of(replace(E4M3, scales="heads-column"), *PAIRS), "cpu")
    planner = planner_for(inputs.case, "cpu")
    pages = inputs.pages()
    plan = planner.plan(pages, inputs.seq_lens, inputs.qo_indptr, max_q_len=5)
    kv = inputs.bind(planner)
    before = plan.run(inputs.q, kv)
    assert isinstance(inputs.v_scale, Tensor)
    inputs.v_scale.mul_(2.0)
    assert torch.equal(plan.run(inputs.q, kv), 2 * before)


def test_no_scale_is_one() -> None:
    inputs = make_inputs(of(replace(E4M3, scales=None), *PAIRS), "cpu")
    want = attend(inputs)
    for one in (1, 1.0, torch.ones(()), torch.ones(1), torch.ones(2)):
        inputs.k_scale = inputs.v_scale = one
        assert_same(attend(inputs), want)


def test_what_bind_holds() -> None:
    """Numbers travel as arguments; tensors by address, whatever their stride."""
    planner = jitattn.AttentionPlanner(kv_dtype="float8_e4m3fn", device="cpu")
    cache = torch.zeros(4, 2, 16, 8, 128, dtype=torch.float8_e4m3fn)
    kv = planner.bind(cache, k_scale=0.5, v_scale=torch.ones(8, 3)[:, 1])
    assert kv.k_scale is not None
    assert kv.v_scale is not None
    assert (kv.k_scale.value, kv.k_scale.tensor) == (0.5, None)
    assert kv.v_scale.stride == 3
    one = planner.bind(cache, k_scale=torch.ones(1), v_scale=torch.ones(()))
    assert one.k_scale is not None
    assert (one.k_scale.stride, one.v_scale.stride) == (0, 0)  # type: ignore[union-attr]
    plain = jitattn.AttentionPlanner(device="cpu").bind(cache.to(torch.bfloat16))
    assert plain.k_scale is plain.v_scale is None


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100f", "sm_120f"])
def test_as_many_bytes_are_under_way(arch: str) -> None:
    """Of 8-bit caches a ring holds twice the tokens, where it held few."""
    wide = jitattn.kernels.registry.specs_of(E4M3.config(), arch)
    tile = decode_tile(wide[0], arch)  # type: ignore[arg-type]
    narrow = decode_tile(replace(wide[0], kv_dtype=wide[0].q_dtype), arch)  # type: ignore
    assert tile.tile_tokens * tile.num_stages >= 2 * narrow.tile_tokens * narrow.num_stages
    if arch != "sm_90a":  # where warpgroups have long tiles anyway
        assert prefill_tile(wide[2], arch).tile_tokens == 64  # type: ignore[arg-type]
