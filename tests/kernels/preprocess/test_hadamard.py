"""Hadamard transforms of heads: matrices, what they leave as it is, and what takes them back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import jitattn
from jitattn.spec.config import HEAD_DIMS
from jitattn.spec.hadamard import hadamard_of
from tests.kernels.preprocess.test_preprocess import arguments

DIMS = [dim for dim in HEAD_DIMS if dim != 208]


def matrix_of(dim: int) -> Tensor:
    return jitattn.quant.hadamard_transform(torch.eye(dim, dtype=torch.float64)).T


@pytest.mark.parametrize("dim", DIMS)
def test_matrices(dim: int) -> None:
    """Orthogonal, and of one magnitude: no other matrix spreads an outlier so evenly."""
    matrix = matrix_of(dim)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim, dtype=torch.float64))
    assert bool(((matrix.abs() - dim**-0.5).abs() < 1e-12).all())
    x = torch.randn(3, 2, dim)
    y = jitattn.quant.hadamard_transform(x)
    torch.testing.assert_close(y.double(), x.double() @ matrix.T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(jitattn.quant.hadamard_transform(y, inverse=True), x)


def test_powers_of_two_are_sylvesters() -> None:
    counts = torch.tensor([[bin(i & j).count("1") for j in range(64)] for i in range(64)])
    assert torch.equal(matrix_of(64), (-1.0) ** counts.double() / 8)


def test_others_are_products() -> None:
    """Of 12 and 8: the blocks of a matrix of 96 are that of 8, with the signs of that of 12."""
    blocks = matrix_of(96).view(12, 8, 12, 8).transpose(1, 2)
    signs = blocks[:, :, 0, 0].sign()
    want = matrix_of(8) * 8**0.5 * 96**-0.5
    torch.testing.assert_close(blocks, signs[..., None, None] * want)
    assert hadamard_of(96) == (96, 12)
    assert hadamard_of(208) is None


def written(**others: Any) -> tuple[Tensor, Tensor]:
    """q, and the cache that a call wrote."""
    given = arguments(**others)
    torch.manual_seed(0)
    given["qkv"].normal_()
    return jitattn.preprocess_qkv(**given), given["kv_cache"]


def test_scores_stay_and_so_does_the_other_side() -> None:
    rope = jitattn.Rope(32)
    q, cache = written(rope=rope)
    turned_q, turned = written(rope=rope, qk_transform="hadamard")
    assert torch.equal(turned[:, 1], cache[:, 1])
    keys, turned_keys = (c[:, 0].double().flatten(0, 1) for c in (cache, turned))
    want = torch.einsum("qhd,khd->qhk", q.double()[:, :2], keys)
    found = torch.einsum("qhd,khd->qhk", turned_q.double()[:, :2], turned_keys)
    torch.testing.assert_close(found, want, rtol=0, atol=0.1)  # both are rounded to bfloat16
    transformed = jitattn.quant.hadamard_transform(q.float())
    torch.testing.assert_close(turned_q.float(), transformed, rtol=2**-7, atol=0.02)
    only_v = written(rope=rope, v_transform="hadamard")
    assert torch.equal(only_v[0], q)
    assert torch.equal(only_v[1][:, 0], cache[:, 0])
    values = jitattn.quant.hadamard_transform(cache[:, 1])
    assert torch.equal(only_v[1][:, 1], values)


def test_what_nothing_else_is_done_to_is_rounded_once() -> None:
    q, cache = written()
    turned_q, turned = written(qk_transform="hadamard", v_transform="hadamard")
    assert torch.equal(turned_q, jitattn.quant.hadamard_transform(q))
    assert torch.equal(turned, jitattn.quant.hadamard_transform(cache))


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "int8"])
def test_it_comes_before_the_cache_rounds(kv_dtype: str) -> None:
    dtype = getattr(torch, kv_dtype)
    cache = torch.zeros(4, 2, 16, 2, 32).to(dtype)
    scales = {"k_scale": 0.125, "v_scale": torch.tensor([0.25, 0.5])}
    transforms = {"qk_transform": "hadamard", "v_transform": "hadamard"}
    _, values = written(**transforms)
    _, found = written(**transforms, **scales, kv_cache=cache)
    for side, scale in enumerate(scales.values()):
        want = jitattn.quant.quantize_kv(values[:, side], kv_dtype, scale=scale)
        assert isinstance(want, Tensor)
        assert torch.equal(found[:, side].view(torch.uint8), want.view(torch.uint8))


def test_nvfp4_takes_pairs_that_it_refuses_untransformed() -> None:
    """Blocks are of the transformed row, however its pairs lay before."""
    data = torch.zeros(4, 16, 2, 24, dtype=torch.uint8)
    blocks = torch.zeros(4, 16, 2, 3, dtype=torch.float8_e4m3fn)
    qkv = torch.randn(4, 8 * 48).bfloat16()
    rope = jitattn.Rope(48, rotary_dim=16)
    caches = [jitattn.QuantizedKV(data, data.clone(), blocks, blocks.clone())]
    caches += [torch.zeros(4, 2, 16, 2, 48, dtype=torch.bfloat16)]
    for cache in caches:
        given = arguments(qkv=qkv, kv_cache=cache, head_dim=48, rope=rope)
        jitattn.preprocess_qkv(**given, qk_transform="hadamard")
    want = jitattn.quant.quantize_kv(caches[1][2, 0, 4], "nvfp4")  # the second request's token
    assert torch.equal(data[2, 4], want[0])
    assert torch.equal(blocks[2, 4].view(torch.uint8), want[1].view(torch.uint8))


def test_v_is_undone_after_attention_or_in_the_projection() -> None:
    torch.manual_seed(1)
    weight = torch.randn(24, 4 * 32, dtype=torch.float64)
    folded = jitattn.quant.fold_hadamard(weight, head_dim=32)
    out = torch.randn(5, 4, 32, dtype=torch.float64)
    turned = jitattn.quant.hadamard_transform(out)
    torch.testing.assert_close(turned.flatten(1) @ folded.T, out.flatten(1) @ weight.T)
    torch.testing.assert_close(jitattn.quant.hadamard_transform(turned, inverse=True), out)
    half = jitattn.quant.fold_hadamard(weight.bfloat16(), head_dim=32)
    torch.testing.assert_close(half, folded.bfloat16(), rtol=0, atol=0.1)


def attended(kv_dtype: str, qkv: Tensor, **transforms: str) -> Tensor:
    """Out of a prompt of a request, whose K and V are read from a cache."""
    num_tokens, pages = len(qkv), jitattn.BlockTable(torch.arange(3, dtype=torch.int32)[None])
    lengths = torch.tensor([num_tokens], dtype=torch.int32)
    qo_indptr = torch.tensor([0, num_tokens], dtype=torch.int32)
    cache: Any = torch.zeros(3, 2, 16, 2, 96, dtype=torch.bfloat16)
    if kv_dtype == "int4":
        codes = torch.zeros(2, 3, 16, 2, 48, dtype=torch.uint8)
        cache = jitattn.QuantizedKV(*codes, *torch.zeros(2, 3, 16, 2, 1, 2, dtype=torch.float16))
    q = jitattn.preprocess_qkv(
        qkv, cache, num_qo_heads=4, num_kv_heads=2, head_dim=96, pages=pages, seq_lens=lengths,
        qo_indptr=qo_indptr, rope=jitattn.Rope(96, rotary_dim=64), **transforms,  # type: ignore[arg-type]
    )  # fmt: skip
    planner = jitattn.AttentionPlanner(
        num_qo_heads=4, num_kv_heads=2, head_dim=96, page_size=16, kv_dtype=kv_dtype,
        logits_soft_cap=20.0, device="cpu",
    )  # fmt: skip
    out = planner.plan(pages, lengths, qo_indptr, max_q_len=num_tokens).run(q, cache)
    assert isinstance(out, Tensor)
    return jitattn.quant.hadamard_transform(out, inverse=True) if transforms else out


def test_attention_over_a_rotated_cache_is_that_over_a_plain_one() -> None:
    """But for rounding, of which four bits have less where a channel is large."""
    rng = torch.Generator().manual_seed(5)
    heads = torch.randn(40, 8, 96, generator=rng)
    heads[:, 4:6, 70] += 12  # of K, behind the elements that turn
    heads[:, 6:, 3] *= 9
    qkv = heads.flatten(1).bfloat16()
    transforms = {"qk_transform": "hadamard", "v_transform": "hadamard"}
    right = attended("bfloat16", qkv).float()
    rotated = attended("bfloat16", qkv, **transforms).float()
    size = right.square().mean().sqrt()
    assert (rotated - right).square().mean().sqrt() < 0.02 * size
    plain, better = (
        (attended("int4", qkv, **given).float() - right).square().mean().sqrt() / size
        for given in ({}, transforms)
    )
    assert better < 0.7 * plain


def plain(x: Tensor) -> Tensor:
    return x.double() @ matrix_of(x.shape[-1]).T


def test_first_calls_of_tracers_and_modes_leave_nothing_that_later_calls_meet() -> None:
    """Of dims that nothing else has, so that each is the first call."""
    transform = jitattn.quant.hadamard_transform
    with FakeTensorMode():
        assert transform(torch.empty(3, 28)).shape == (3, 28)
    real = torch.randn(3, 28)
    torch.testing.assert_close(transform(real).double(), plain(real), rtol=1e-5, atol=1e-5)
    with FakeTensorMode():  # after a real one
        assert transform(torch.empty(3, 28)).shape == (3, 28)
    with torch.inference_mode():
        transform(torch.ones(2, 44))
    weight = torch.nn.Parameter(torch.ones(2, 88))
    for made in (jitattn.quant.fold_hadamard(weight, head_dim=44), transform(weight[:, :44])):
        made.sum().backward()
    assert weight.grad is not None


def test_autocast_leaves_sums_in_float32() -> None:
    x = torch.randn(3, 128)
    want = jitattn.quant.hadamard_transform(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(jitattn.quant.hadamard_transform(x), want)


def test_compiled_functions_hold_the_matrix() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    def undone(x: Tensor) -> Tensor:
        return jitattn.quant.hadamard_transform(x, inverse=True)

    compiled = torch.compile(undone, backend=keep, fullgraph=True, dynamic=True)
    for num_tokens in (3, 5):
        x = torch.randn(num_tokens, 4, 36)
        assert torch.equal(compiled(x), undone(x))
    assert len(graphs) == 1
    assert "kron" not in graphs[0].code


def test_refused() -> None:
    x = torch.zeros(2, 208)
    with pytest.raises(ValueError, match="x has a head_dim of 208: there is a Hadamard matrix of"):
        jitattn.quant.hadamard_transform(x)
    with pytest.raises(ValueError, match=r"x has a head_dim of 4096: .*up to 512"):  # several heads
        jitattn.quant.hadamard_transform(torch.zeros(2, 4096))
    assert jitattn.quant.fold_hadamard(x[:0, :64], head_dim=32).shape == (0, 64)
    with pytest.raises(ValueError, match="x has no dimension"):
        jitattn.quant.hadamard_transform(x[0, 0])
    with pytest.raises(TypeError, match="x has dtype int64"):
        jitattn.quant.hadamard_transform(x.long())
    with pytest.raises(TypeError, match="inverse is a int"):
        jitattn.quant.hadamard_transform(x[:, :16], inverse=1)
    with pytest.raises(ValueError, match=r"weight has shape \[2, 208\]: expected .* \* 32\]"):
        jitattn.quant.fold_hadamard(x, head_dim=32)
    with pytest.raises(ValueError, match="head_dim is 104: there is"):
        jitattn.quant.fold_hadamard(x, head_dim=104)
