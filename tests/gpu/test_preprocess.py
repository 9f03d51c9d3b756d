"""preprocess_qkv on a card, against its definition: layouts, types, tables, positions, graphs.

Every byte of pools and outputs is compared, those that nothing may write to, too. The kernels are
those of tests/gpu/bundle_tokens.py.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import jitattn
from tests.gpu.device import DEVICE, side_by_side
from tests.support.examples import examples
from tests.support.token_cases import (
    CACHE_DTYPES,
    MEMORY,
    POISON,
    TABLES,
    TokenCase,
    check_tokens,
    make_token_inputs,
)
from tests.support.token_sets import APPENDS, KINDS, kinds_of

pytestmark = pytest.mark.gpu
BASE = KINDS["bf16"]
on_the_device = pytest.mark.skipif(DEVICE != "cuda", reason="graphs are the device's")


@pytest.mark.parametrize("name", KINDS)
def test_kinds(name: str) -> None:
    for seed, wide in itertools.product(range(3), (False, True)):
        check_tokens(replace(KINDS[name], seed=seed, wide_integers=wide), DEVICE)


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_dtype", CACHE_DTYPES)
def test_memory(kv_dtype: str, kv_layout: str, memory: str) -> None:
    scales = "none" if kv_dtype in ("bfloat16", "float16") else "heads"
    case = replace(BASE, kv_dtype=kv_dtype, scales=scales, kv_layout=kv_layout, memory=memory)
    check_tokens(case, DEVICE)


@pytest.mark.parametrize("page_table", TABLES)
@pytest.mark.parametrize("rows", [False, True])
def test_tables(page_table: str, rows: bool) -> None:
    if rows and page_table in ("csr", "slots"):
        pytest.skip("has no rows")
    check_tokens(replace(BASE, page_table=page_table, rows=rows), DEVICE)
    memory = "interleaved" if page_table == "separate" else "layers"
    check_tokens(replace(BASE, page_table=page_table, rows=rows, memory=memory), DEVICE)


@pytest.mark.parametrize("q_out", ["new", "given", "in place"])
@pytest.mark.parametrize("qkv", ["packed", "strided", "tuple"])
def test_inputs_and_outputs(qkv: str, q_out: str) -> None:
    check_tokens(replace(BASE, qkv=qkv, q_out=q_out), DEVICE)


@pytest.mark.parametrize("scales", ["none", "number", "tensor", "heads"])
def test_c22_scales(scales: str) -> None:
    case = replace(KINDS["e4m3"], scales=scales)
    check_tokens(case, DEVICE)


@pytest.mark.parametrize("positions", ["lengths", "given", "delta"])
@pytest.mark.parametrize("name", ["bf16", "mrope", "interleaved", "plain"])
def test_positions_up_to_a_million(name: str, positions: str) -> None:
    for wide in (False, True):
        check_tokens(replace(KINDS[name], positions=positions, wide_integers=wide), DEVICE)


def test_angles_are_within_rounding() -> None:
    """Of bf16, at positions up to a million: cos and sin themselves are what is stored."""
    num_tokens, head_dim = 4096, 128
    rope = jitattn.Rope(head_dim, base=5e5)
    positions = torch.linspace(0, 1_000_000, num_tokens, dtype=torch.float64).long()
    qkv = torch.zeros(num_tokens, 3 * head_dim, dtype=torch.float16)
    qkv[:, : head_dim // 2] = 1.0
    cache = torch.zeros(num_tokens, 2, 16, 1, head_dim, dtype=torch.float16, device=DEVICE)
    q = jitattn.preprocess_qkv(
        *(qkv.to(DEVICE), cache),
        num_qo_heads=1,
        num_kv_heads=1,
        head_dim=head_dim,
        slots=torch.full((num_tokens,), -1, device=DEVICE),
        rope=rope,
        positions=positions.to(DEVICE),
    )
    angles = positions[:, None].double() * rope.inv_freq.double()
    want = torch.cat((angles.cos(), angles.sin()), dim=1)
    error = (q[:, 0].cpu().double() - want).abs()
    # Half of a step of float16 below 1, and what angles are exact to.
    assert bool((error <= 2.0**-12 + 1.5e-6).all())
    assert not cache.any()


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2", "int8", "nvfp4"])
def test_c52_fused_is_what_the_steps_are(kv_dtype: str) -> None:
    """Rotary, then quantised, then appended: the bytes of one call."""
    case = replace(KINDS["e4m3"], kv_dtype=kv_dtype, scales="heads")
    fused = make_token_inputs(case).to(DEVICE)
    q = fused.run()
    steps = make_token_inputs(replace(case, kv_dtype="bfloat16", q_out="given", scales="none")).to(
        DEVICE
    )
    q_steps = steps.run()
    assert q is not None
    assert q_steps is not None
    cache = fused.arguments["kv_cache"]
    for side, name in enumerate(("k", "v")):
        values = steps.arguments["kv_cache"][side].cpu()
        live = (values.view(torch.int16) != -1).any(-1)
        scale = fused.arguments[f"{name}_scale"].cpu()
        want = jitattn.quant.quantize_kv(values, kv_dtype, scale=scale)
        if isinstance(want, tuple):
            found = getattr(cache, name).cpu(), getattr(cache, f"{name}_block_scales").cpu()
        else:
            want, found = (want,), (cache[side].cpu(),)
        for a, b in zip(found, want, strict=True):
            assert torch.equal(a.view(torch.uint8)[live], b.view(torch.uint8)[live])
    live = (q_steps.view(torch.int16) != -1).any(-1)
    want_q = jitattn.quant.quantize_kv(
        q_steps.contiguous(), q.dtype, scale=fused.arguments["q_scale"]
    )
    assert isinstance(want_q, Tensor)
    assert torch.equal(q.view(torch.uint8)[live], want_q.view(torch.uint8)[live])


def test_rows_past_the_end_and_padding() -> None:
    """NaN everywhere that doesn't count; nothing of it is written or read into what does."""
    for pairs in (((1, 0), (1, -3), (1, 5)), ((2, 0), (0, 9), (3, 3)), ((1, 0),), ()):
        check_tokens(replace(BASE, pairs=pairs, extra_rows=7, q_out="given"), DEVICE)


@pytest.mark.parametrize("num_tokens", [1, 19, 1024, 5000])
def test_numbers_of_tokens(num_tokens: int) -> None:
    """Of one request and of many, so that launches differ in what a group of threads does."""
    one = ((num_tokens, num_tokens + 17),)
    check_tokens(replace(BASE, pairs=one, num_qo_heads=8), DEVICE)
    many = tuple((1, 1 + i % 40) for i in range(num_tokens))
    check_tokens(replace(BASE, pairs=many, extra_rows=0, num_qo_heads=8), DEVICE)


@pytest.mark.parametrize("name", ["hadamard nvfp4", "hadamard in place", "hadamard plain"])
def test_transforms_of_rows_by_turns(name: str) -> None:
    """A group of threads has up to four rows, of which each moves through the same memory."""
    many = replace(KINDS[name], pairs=((5000, 5017), (1, 0), (3, 17)), num_kv_heads=4)
    check_tokens(replace(many, num_qo_heads=28), DEVICE)


@pytest.mark.parametrize("kv_dtype", CACHE_DTYPES)
def test_transforms_into_every_cache(kv_dtype: str) -> None:
    scales = "none" if kv_dtype in ("bfloat16", "float16") else "heads"
    for memory in MEMORY:
        case = replace(KINDS["hadamard e4m3"], kv_dtype=kv_dtype, scales=scales, memory=memory)
        check_tokens(case, DEVICE)


@pytest.mark.parametrize("head", [(1, 1), (32, 8), (28, 4), (64, 1), (5, 5)])
def test_numbers_of_heads(head: tuple[int, int]) -> None:
    check_tokens(replace(BASE, num_qo_heads=head[0], num_kv_heads=head[1]), DEVICE)


@on_the_device  # on the CPU it is refused
def test_what_lies_outside_is_not_written() -> None:
    """Ids beyond the cache, lengths beyond the table, slots beyond the cache."""
    case = replace(BASE, pairs=((1, 20),), extra_rows=0)
    inputs = make_token_inputs(case)

    def is_untouched(**others: object) -> bool:
        other = inputs.to(DEVICE)
        other.arguments |= others
        assert other.run() is not None
        return all(bool((pool == POISON).all()) for pool in other.pools)

    for ids in ([[0, 10**6]], [[0, -1]], [[0]]):
        pages = jitattn.BlockTable(torch.tensor(ids, dtype=torch.int32, device=DEVICE))
        assert is_untouched(pages=pages)
    good = torch.tensor([[-1, 0]], dtype=torch.int32, device=DEVICE)
    assert not is_untouched(pages=jitattn.BlockTable(good))
    slots_case = replace(case, page_table="slots")
    inputs = make_token_inputs(slots_case)
    for slot in (10**6, -1, 2**40):
        assert is_untouched(slots=torch.tensor([slot], device=DEVICE))


@on_the_device
def test_graphs() -> None:
    """Lengths, tables, tokens and scales change in place between replays."""
    case = replace(KINDS["e4m3"], scales="heads", pairs=((1, 5), (1, 20), (1, 16), (1, 40)))
    case = replace(case, extra_rows=0, q_out="given")
    first = make_token_inputs(case).to(DEVICE)
    first.run()
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        first.run()
    for seed, pairs in enumerate((case.pairs, ((1, 33), (1, 0), (1, 1), (1, 40)))):
        # Of the same pools: the number of pages follows from the longest request.
        other_case = replace(case, seed=seed, pairs=pairs)
        inputs = make_token_inputs(other_case)
        eager = inputs.to(DEVICE)
        q = eager.run()
        for name in ("qkv", "seq_lens", "k_scale", "v_scale", "q_scale"):
            if isinstance(first.arguments.get(name), Tensor):
                first.arguments[name].copy_(inputs.arguments[name])
        first.arguments["pages"].table.copy_(inputs.arguments["pages"].table)
        for pool in first.pools:
            pool.fill_(POISON)
        first.arguments["q_out"].view(torch.uint8).fill_(POISON)
        graph.replay()
        torch.cuda.synchronize()
        for a, b in zip(first.pools, eager.pools, strict=True):
            assert torch.equal(a, b)
        assert q is not None
        assert torch.equal(first.arguments["q_out"].view(torch.uint8), q.view(torch.uint8))


@on_the_device
def test_a_capture_of_something_new_is_refused() -> None:
    from jitattn.kernels.common import device_kernels
    from jitattn.kernels.preprocess import api

    case = replace(BASE, page_table="token")
    inputs = make_token_inputs(case).to(DEVICE)
    api.LAUNCHES.clear()
    device_kernels.unload()
    graph, scratch = torch.cuda.CUDAGraph(), torch.zeros(1, device=DEVICE)
    with torch.cuda.graph(graph):
        scratch.fill_(1.0)  # a graph of nothing is warned about
        with pytest.raises(ValueError, match="before it"):
            inputs.run()
    check_tokens(case, DEVICE)


@on_the_device
def test_a_capture_finds_the_matrix_of_a_transform() -> None:
    """Of a dim that nothing else here has."""
    x = torch.randn(5, 56, device=DEVICE)
    graph, out = torch.cuda.CUDAGraph(), torch.zeros_like(x)
    with torch.cuda.graph(graph):
        out.fill_(1.0)
        with pytest.raises(ValueError, match="before it"):
            jitattn.quant.hadamard_transform(x)
    jitattn.quant.hadamard_transform(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(jitattn.quant.hadamard_transform(x))
    x.normal_()
    graph.replay()
    want = jitattn.quant.hadamard_transform(x.cpu().double())
    torch.testing.assert_close(out.cpu().double(), want, rtol=1e-5, atol=1e-5)


@on_the_device
def test_other_streams_and_threads() -> None:
    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for repeat in range(5):
                check_tokens(replace(BASE, seed=10 * seed + repeat), DEVICE)

    side_by_side(work, 4)


@on_the_device
def test_high_pages(large_pool: Tensor) -> None:
    """C07: offsets beyond 2**31 elements, of K and of V."""
    num_pages = large_pool.shape[0]
    ids = torch.tensor([[num_pages - 1, 0], [3, num_pages - 2]], dtype=torch.int32, device=DEVICE)
    k, v = torch.randn(2, 2, 8, 128, device=DEVICE, dtype=torch.bfloat16).unbind()
    lengths = torch.tensor([16, 20], device=DEVICE)
    jitattn.append_kv(k, v, large_pool, pages=jitattn.BlockTable(ids), seq_lens=lengths)
    assert torch.equal(large_pool[num_pages - 1, 0, 15], k[0])
    assert torch.equal(large_pool[num_pages - 1, 1, 15], v[0])
    assert torch.equal(large_pool[num_pages - 2, 0, 3], k[1])
    assert torch.equal(large_pool[num_pages - 2, 1, 3], v[1])


@st.composite
def random_cases(draw: st.DrawFn) -> TokenCase:
    """Launch arguments of any kind, of the kernels that the fixed cases have."""
    case = draw(st.sampled_from([*KINDS.values(), *APPENDS.values()]))
    num_kv_heads = draw(st.sampled_from((1, 2, 3, 8)))
    lengths = st.tuples(st.integers(0, 40), st.integers(0, 90)).map(
        lambda pair: (pair[0], pair[1] + pair[0] if pair[1] else 0)
    )
    is_quantised = case.is_quantised
    has_rows = case.page_table in ("shared", "separate", "token")
    forms = ("packed", "strided") if case.is_append else ("packed", "tuple")
    if case.head_dim_vo not in (None, case.head_dim):  # rows of one tensor have one width
        forms = (case.qkv,)
    return replace(
        case,
        pairs=tuple(draw(st.lists(lengths, min_size=1, max_size=7))),
        num_qo_heads=num_kv_heads * draw(st.integers(1, 5)),
        num_kv_heads=num_kv_heads,
        memory=draw(st.sampled_from(MEMORY)),
        kv_layout=draw(st.sampled_from(("NHD", "HND"))),
        rows=has_rows and draw(st.booleans()),
        wide_integers=draw(st.booleans()),
        qkv=draw(st.sampled_from(forms)),
        scales=draw(st.sampled_from(("none", "number", "tensor", "heads")))
        if is_quantised
        else "none",
        positions=draw(st.sampled_from(("lengths", "given", "delta")))
        if case.rope is not None
        else "lengths",
        zero_tail=case.page_table in ("shared", "separate", "csr") and draw(st.booleans()),
        extra_rows=draw(st.integers(0, 9)),
        seed=draw(st.integers(0, 10**6)),
    )


@examples(100)
@given(random_cases())
def test_random(case: TokenCase) -> None:
    check_tokens(case, DEVICE)


def test_kernels_are_few() -> None:
    """What a bundle of these tests holds."""
    assert len(kinds_of()) < 90
