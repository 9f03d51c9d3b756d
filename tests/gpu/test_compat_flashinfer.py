"""FlashInfer's stand-in on a card: against itself on the CPU, in graphs, and against FlashInfer."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from jitattn.compat import flashinfer as ours
from jitattn.compat import trtllm
from tests.gpu.device import DEVICE
from tests.support.flashinfer_pairs import (
    GROUPS,
    HEAD_DIM,
    PAGE_SIZE,
    Pages,
    Pair,
    normal,
    pairs,
    workspace,
)
from tests.support.scattered import indptr_of

PAIRS = pairs()


@pytest.fixture(scope="module")
def theirs() -> SimpleNamespace:
    try:
        package = importlib.import_module("flashinfer")
        functions = importlib.import_module("flashinfer.decode")
        latents = importlib.import_module("flashinfer.mla._batch_mla")
    except Exception as error:  # of a package that is not there, or not for this machine
        pytest.skip(f"flashinfer can't be imported: {error!r}")
    return SimpleNamespace(**{**vars(functions), **vars(package), **vars(latents)})


def compare(found: list[Tensor], wanted: list[Tensor], *, bound: float) -> None:
    assert len(found) == len(wanted)
    for own, other in zip(found, wanted, strict=True):
        assert own.shape == other.shape
        assert own.dtype == other.dtype
        # A scale of 1: numbers are about as large.
        torch.testing.assert_close(own.cpu(), other.cpu(), rtol=bound, atol=bound)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_results_are_those_of_the_cpu(pair: Pair) -> None:
    compare(pair.results(ours, DEVICE), pair.results(ours, "cpu"), bound=2.0**-6)


@pytest.mark.filterwarnings("ignore")  # it has some of its own
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_results_are_flashinfers(pair: Pair, theirs: SimpleNamespace) -> None:
    compare(pair.results(ours, DEVICE), pair.results(theirs, DEVICE), bound=2.0**-6)


@pytest.mark.parametrize("group", GROUPS)
def test_captured_decodes_follow_plan(group: int) -> None:
    rng, batch, room = random.Random(group), 4, 200
    sizes = batch + 1, room, batch
    buffers = [torch.zeros(n, dtype=torch.int32, device=DEVICE) for n in sizes]
    wrapper = ours.BatchDecodeWithPagedKVCacheWrapper(
        workspace(DEVICE), "NHD", True, True, *buffers
    )
    cache = normal(rng, DEVICE, room, 2, PAGE_SIZE, 2, HEAD_DIM)
    q = normal(rng, DEVICE, batch, 2 * group, HEAD_DIM)
    shapes = 2 * group, 2, HEAD_DIM, PAGE_SIZE
    replay = None
    for lens in ([700, 1, 64, 300], [16, 700, 700, 17], [1, 1, 1, 1], [800, 33, 5, 400]):
        pages = Pages.of(rng, lens, DEVICE)
        tables = pages.indptr, pages.indices, pages.last
        wrapper.plan(*tables, *shapes, q_data_type=torch.bfloat16)
        if replay is None:
            wrapper.run(q, cache)
            replay, graph = captured(lambda: wrapper.run(q, cache, return_lse=True))
        graph.replay()
        eager = ours.BatchDecodeWithPagedKVCacheWrapper(workspace(DEVICE))
        eager.plan(*tables, *shapes, q_data_type=torch.bfloat16)
        for found, wanted in zip(replay, eager.run(q, cache, return_lse=True), strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("with_mask", [False, True])
def test_captured_prefills_follow_plan(with_mask: bool) -> None:
    rng, batch, room = random.Random(7), 3, 200
    sizes = batch + 1, batch + 1, room, batch
    buffers = [torch.zeros(n, dtype=torch.int32, device=DEVICE) for n in sizes]
    masks = [
        torch.zeros(4000, dtype=torch.uint8, device=DEVICE),
        torch.zeros(batch + 1, dtype=torch.int32, device=DEVICE),
    ]
    wrapper = ours.BatchPrefillWithPagedKVCacheWrapper(
        workspace(DEVICE), "NHD", True, *buffers, *(masks if with_mask else [])
    )
    cache = normal(rng, DEVICE, room, 2, PAGE_SIZE, 2, HEAD_DIM)
    q = normal(rng, DEVICE, 60, 8, HEAD_DIM)
    shapes = 8, 2, HEAD_DIM, PAGE_SIZE
    replay = None
    for q_lens, lens in (([20, 20, 20], [300, 20, 64]), ([1, 50, 3], [1, 400, 33])):
        pages = Pages.of(rng, lens, DEVICE)
        tables = indptr_of(q_lens).to(DEVICE), pages.indptr, pages.indices, pages.last
        given: dict[str, object] = {"causal": True, "q_data_type": torch.bfloat16}
        if with_mask:
            size = sum(a * b for a, b in zip(q_lens, lens, strict=True))
            given["custom_mask"] = normal(rng, DEVICE, size) > -0.5
        wrapper.plan(*tables, *shapes, **given)
        if replay is None:
            wrapper.run(q, cache)
            replay, graph = captured(lambda: wrapper.run(q, cache, return_lse=True))
        graph.replay()
        eager = ours.BatchPrefillWithPagedKVCacheWrapper(workspace(DEVICE))
        eager.plan(*tables, *shapes, **given)
        for found, wanted in zip(replay, eager.run(q, cache, return_lse=True), strict=True):
            assert torch.equal(found, wanted)


def test_addresses_of_pools_are_read_where_they_are() -> None:
    rng, layers, heads, pages, batch = random.Random(3), 3, 2, 40, 4
    pool = normal(rng, DEVICE, pages, layers, 2, heads, PAGE_SIZE, HEAD_DIM)
    shape = {"num_kv_heads": heads, "tokens_per_block": PAGE_SIZE, "head_dim": HEAD_DIM}
    layer = trtllm.layer_pool(
        pool.data_ptr(), 1, dtype=pool.dtype, num_blocks=pages * layers * 2, device=pool.device,
        **shape,
    )  # fmt: skip
    assert layer.blocks.data_ptr() == pool[0, 1].data_ptr()
    ids = torch.tensor([rng.sample(range(pages), 8) for _ in range(batch)], dtype=torch.int32)
    entries = 2 * layers * ids
    offsets = torch.stack((entries, entries + 1), dim=1)[None].to(DEVICE)
    lens = torch.tensor([1, 128, 40, 0], dtype=torch.int32, device=DEVICE)
    trtllm.check_block_offsets(
        offsets[0], lens, PAGE_SIZE, layer.blocks.shape[0], uses_shared_paged_kv_idx=True
    )
    q = normal(rng, DEVICE, batch, 4 * heads, HEAD_DIM)
    table = trtllm.block_table(offsets, 0, uses_shared_paged_kv_idx=True).table
    kv = layer.kv(uses_shared_paged_kv_idx=True)
    common = workspace(DEVICE), table, lens, 128
    found = ours.trtllm_batch_decode_with_kv_cache(q, kv, *common, bmm1_scale=0.1)
    halves = pool[:, 1, 0], pool[:, 1, 1]
    own = common[0], ids.to(DEVICE), lens, 128
    wanted = ours.trtllm_batch_decode_with_kv_cache(q, halves, *own, bmm1_scale=0.1)
    assert torch.equal(found, wanted)
    assert not found[3].any()


def captured(
    run: Callable[[], tuple[Tensor, Tensor]],
) -> tuple[tuple[Tensor, Tensor], torch.cuda.CUDAGraph]:
    """Capture a call and return what it returns, which replays fill."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return results, graph
