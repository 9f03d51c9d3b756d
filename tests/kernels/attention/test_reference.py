"""The reference against formulas it doesn't share: SDPA, pure Python, and numbers done by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from jitattn.kernels.attention import reference
from jitattn.kernels.common import reference_plan

PLAIN = {"causal": True, "window_left": -1, "logits_soft_cap": 0.0, "sm_scale": 0.25}


def normal(*shape: int, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=rng, dtype=torch.float64)


def single(q: Tensor, k: Tensor, v: Tensor, **changes: object) -> tuple[Tensor, Tensor]:
    """The reference on one request."""
    indptr = [0, q.shape[0]], [0, k.shape[0]]
    return reference.attention(q, k, v, *indptr, **(PLAIN | changes))


def mask_by_hand(q_len: int, kv_len: int, causal: bool, window_left: int) -> Tensor:
    """The visibility rule, cell by cell."""
    rows = []
    for i in range(q_len):
        p = kv_len - q_len + i
        rows.append(
            [
                (not causal or j <= p) and (window_left < 0 or j >= p - window_left)
                for j in range(kv_len)
            ]
        )
    return torch.tensor(rows)


@pytest.mark.parametrize("window_left", [-1, 0, 1, 5, 100])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 33), (4, 33), (12, 12)])
def test_agrees_with_sdpa(q_len: int, kv_len: int, causal: bool, window_left: int) -> None:
    q, k, v = normal(q_len, 6, 16), normal(kv_len, 2, 16, seed=1), normal(kv_len, 2, 24, seed=2)
    out, lse = single(q, k, v, causal=causal, window_left=window_left)
    mask = mask_by_hand(q_len, kv_len, causal, window_left)
    heads = (q.transpose(0, 1), *(x.repeat_interleave(3, dim=1).transpose(0, 1) for x in (k, v)))
    want = scaled_dot_product_attention(*heads, attn_mask=mask, scale=0.25).transpose(0, 1)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    scores = (0.25 * heads[0] @ heads[1].transpose(1, 2)).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1).T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("soft_cap", [0.0, 0.5, 30.0])
@pytest.mark.parametrize("sink", [None, -1.5, 4.0])
def test_agrees_with_pure_python(soft_cap: float, sink: float | None) -> None:
    q, k, v = normal(3, 2, 4), normal(7, 1, 4, seed=1), normal(7, 1, 3, seed=2)
    sinks = None if sink is None else torch.tensor([sink, 2 * sink])
    out, lse = single(q, k, v, window_left=4, logits_soft_cap=soft_cap, sinks=sinks)
    for i in range(3):
        for h in range(2):
            weights = {}
            for j in range(7):
                if not 4 + i - 4 <= j <= 4 + i:
                    continue
                dot = sum(float(a) * float(b) for a, b in zip(q[i, h], k[j, 0], strict=True))
                score = 0.25 * dot
                if soft_cap:
                    score = soft_cap * math.tanh(score / soft_cap)
                weights[j] = math.exp(score)
            total = sum(weights.values()) + (0 if sink is None else math.exp(sink * (1 + h)))
            assert float(lse[i, h]) == pytest.approx(math.log(total), abs=1e-12)
            for d in range(3):
                want = sum(w * float(v[j, 0, d]) for j, w in weights.items()) / total
                assert float(out[i, h, d]) == pytest.approx(want, abs=1e-12)


def test_two_keys_by_hand() -> None:
    q = torch.ones(1, 1, 2)
    k = torch.tensor([[[0.0, 0.0]], [[2.0, 2.0]]])
    v = torch.tensor([[[1.0]], [[3.0]]])
    out, lse = single(q, k, v)  # scores 0 and 1
    assert float(lse) == pytest.approx(math.log(1 + math.e), abs=1e-15)
    assert float(out) == pytest.approx((1 + 3 * math.e) / (1 + math.e), abs=1e-15)


@pytest.mark.parametrize(("q_len", "kv_len"), [(3, 128), (2, 5), (5, 2), (1, 1), (64, 65), (7, 0)])
def test_counts_visible_keys(q_len: int, kv_len: int) -> None:
    q, k, v = torch.zeros(q_len, 1, 8), normal(kv_len, 1, 8), normal(kv_len, 1, 8, seed=1)
    out, lse = single(q, k, v)
    counts = torch.tensor([[max(0, kv_len - q_len + i + 1)] for i in range(q_len)])
    torch.testing.assert_close(lse.exp(), counts.double())
    blind = counts[:, 0] == 0
    assert bool((lse[blind] == -torch.inf).all())
    assert bool((out[blind] == 0).all())
    assert bool(torch.isfinite(out).all())


def test_group_of_query_heads_shares_its_kv_head() -> None:
    k, v = torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)
    v += torch.tensor([10.0, 20.0, 30.0])[None, :, None]
    out, _ = single(torch.zeros(1, 6, 4), k, v)
    assert out[0, :, 0].tolist() == [10, 10, 20, 20, 30, 30]


def test_ragged_batch_is_its_requests() -> None:
    q, k, v = normal(9, 4, 8), normal(40, 2, 8, seed=1), normal(40, 2, 8, seed=2)
    q_starts, kv_starts = [0, 3, 3, 4, 8], [0, 20, 26, 26, 40]
    indptr = torch.tensor(q_starts, dtype=torch.int32), torch.tensor(kv_starts)
    out, lse = reference.attention(q, k, v, *indptr, **(PLAIN | {"window_left": 6}))
    for b in range(4):
        rows, keys = slice(*q_starts[b : b + 2]), slice(*kv_starts[b : b + 2])
        alone = single(q[rows], k[keys], v[keys], window_left=6)
        torch.testing.assert_close((out[rows], lse[rows]), alone, rtol=0, atol=0)
    assert bool((out[8:] == 0).all())
    assert bool((lse[8:] == -torch.inf).all())


def test_sink_is_a_key_without_value() -> None:
    q, k, v = normal(2, 2, 8), normal(5, 1, 8, seed=1), normal(5, 1, 8, seed=2)
    sinks = torch.tensor([0.7, -3.0], dtype=torch.bfloat16)
    out, lse = single(q, k, v, causal=False, sinks=sinks)
    plain_out, plain_lse = single(q, k, v, causal=False)
    want = torch.logaddexp(plain_lse, sinks.double())
    torch.testing.assert_close(lse, want)
    torch.testing.assert_close(out, plain_out * (plain_lse - want).exp()[..., None])


def test_sink_alone() -> None:
    q, nothing = normal(2, 2, 8), torch.zeros(0, 1, 8)
    out, lse = single(q, nothing, nothing, sinks=torch.tensor([0.5, -torch.inf]))
    assert lse.tolist() == [[0.5, -math.inf]] * 2
    assert bool((out == 0).all())


def test_sink_of_minus_infinity_is_none() -> None:
    q, k, v = normal(2, 2, 8), normal(5, 1, 8, seed=1), normal(5, 1, 8, seed=2)
    with_sink = single(q, k, v, sinks=torch.full((2,), -torch.inf))
    torch.testing.assert_close(with_sink, single(q, k, v), rtol=0, atol=0)


def test_sink_does_not_overflow_beside_tiny_scores() -> None:
    q, k, v = torch.full((1, 1, 64), 5.0), torch.full((9, 1, 64), -5.0), normal(9, 1, 64)
    out, lse = single(q, k, v, sm_scale=0.125, sinks=torch.tensor([5.0]))  # every score is -200
    assert float(lse) == 5.0
    assert float(out.abs().max()) < 1e-85


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_a_row_cannot_see_does_not_reach_it(poison: float) -> None:
    q, k, v = normal(3, 2, 8), normal(9, 1, 8, seed=1), normal(9, 1, 8, seed=2)
    clean_out, clean_lse = single(q, k, v, window_left=3)
    k[4] = v[4] = poison  # rows 0 and 1 see keys 3 to 6 and 4 to 7, row 2 sees 5 to 8
    out, lse = single(q, k, v, window_left=3)
    torch.testing.assert_close((out[2], lse[2]), (clean_out[2], clean_lse[2]), rtol=0, atol=0)
    assert bool(torch.isnan(out[:2]).all())


def test_large_scores_take_rows_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = normal(10, 2, 8), normal(30, 1, 8, seed=1), normal(30, 1, 8, seed=2)
    whole = single(q, k, v, window_left=7)
    monkeypatch.setattr(reference, "_MAX_SCORES", 3 * 30 * 2)
    torch.testing.assert_close(single(q, k, v, window_left=7), whole, rtol=0, atol=1e-14)


def test_indptr_must_agree() -> None:
    q, k = normal(2, 1, 8), normal(2, 1, 8)
    with pytest.raises(ValueError, match="qo_indptr has 2 entries, kv_indptr 3"):
        reference.attention(q, k, k, [0, 2], [0, 1, 2], **PLAIN)


def test_gather_reads_live_pages_in_order() -> None:
    cache = normal(6, 4, 2, 8)
    ids = torch.tensor([5, 0, 3, -1, 99], dtype=torch.int32)
    tokens = reference_plan.gather(cache, ids, 10)
    assert torch.equal(tokens, torch.cat((cache[5], cache[0], cache[3]))[:10])


def test_gather_skips_pages_before_start() -> None:
    cache = normal(6, 4, 2, 8)
    tokens = reference_plan.gather(cache, torch.tensor([-1, 2**31 - 1, 3]), 10, start=9)
    assert bool(torch.isnan(tokens[:8]).all())
    assert torch.equal(tokens[8:], cache[3, :2])


@pytest.mark.parametrize("kv_len", [0, -1, -(2**31)])
def test_gather_of_nothing(kv_len: int) -> None:
    assert reference_plan.gather(normal(1, 4, 2, 8), torch.tensor([7]), kv_len).shape == (0, 2, 8)


def test_gather_refuses_lengths_beyond_the_table() -> None:
    with pytest.raises(ValueError, match="kv_len 9 needs 3 pages of 4, got 2 ids"):
        reference_plan.gather(normal(6, 4, 2, 8), torch.tensor([1, 2]), 9)


@pytest.mark.parametrize("stride", [0, 3, 2**40])
def test_gather_with_a_meaningless_head_stride(stride: int) -> None:
    cache = normal(6, 4, 1, 8)
    strange = cache.as_strided(cache.shape, (32, 8, stride, 1))
    ids = torch.tensor([2, 4])
    assert torch.equal(reference_plan.gather(strange, ids, 7), reference_plan.gather(cache, ids, 7))
