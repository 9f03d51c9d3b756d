"""copy_pages on a device and across the bus: exactly the pages of the pairs change, to the byte."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from torch import Tensor

import jitattn
from tests.gpu.device import DEVICE
from tests.support.examples import examples
from tests.support.harness import forbid_waiting
from tests.support.transfers import POOLS, Copy, check_copy, copies

PAGE = (2, 16, 8, 128)
PAIRS = ((0, 3), (5, 0), (2, 1), (-1, 2), (4, -1), (6, 6))


@examples(150)
@given(copies())
def test_random_copies(example: Copy) -> None:
    check_copy(example, DEVICE)


@examples(40)
@given(copies())
def test_random_copies_to_the_host(example: Copy) -> None:
    check_copy(example, DEVICE, dst_pinned=True)


@examples(40)
@given(copies())
def test_random_copies_from_the_host(example: Copy) -> None:
    check_copy(example, DEVICE, src_pinned=True)


@pytest.mark.parametrize("pairs_on_cpu", [False, True])
@pytest.mark.parametrize("kind", POOLS)
def test_every_pool(kind: str, pairs_on_cpu: bool) -> None:
    for other in POOLS:
        example = Copy(PAGE, ((kind, other),), (7, 8), torch.bfloat16, PAIRS)
        check_copy(example, DEVICE, pairs_on_cpu=pairs_on_cpu)


@pytest.mark.parametrize("count", [1, 63, 127, 128, 129, 300])
def test_many_pools_and_two_layouts(count: int) -> None:
    kinds = tuple(("plain", "plain") if i % 3 else ("odd", "layer_inside") for i in range(count))
    check_copy(Copy((4, 2, 32), kinds, (7, 8), torch.bfloat16, PAIRS), DEVICE)


def test_many_pairs() -> None:
    rng = random.Random(1)
    targets = list(range(5000))
    rng.shuffle(targets)
    pairs = tuple((rng.randrange(3000), target) for target in targets[:4000])
    check_copy(Copy((2, 4, 64), (("plain", "plain"),), (3000, 5000), torch.bfloat16, pairs), DEVICE)


def test_large_pages() -> None:
    page = (2, 256, 8, 128)  # a megabyte
    check_copy(
        Copy(page, (("plain", "transposed"),), (5, 6), torch.bfloat16, ((4, 0), (1, 5))), DEVICE
    )


def pool(num_pages: int = 9) -> Tensor:
    rng = torch.Generator(DEVICE).manual_seed(num_pages)
    shape = (num_pages, *PAGE)
    return torch.randn(shape, generator=rng, device=DEVICE).to(torch.bfloat16)


def pairs_of(*pairs: tuple[int, int]) -> Tensor:
    return torch.tensor(pairs, dtype=torch.int32, device=DEVICE)


def test_inside_one_pool() -> None:
    """Defragmentation, and the copy of a page before it is written."""
    cache = pool()
    want = cache.clone()
    want[[0, 1, 8]] = want[[7, 5, 2]]
    jitattn.copy_pages(cache, cache, pairs_of((7, 0), (5, 1), (2, 8), (3, 3)))
    assert torch.equal(cache, want)


def test_ids_outside_are_skipped() -> None:
    cache, want = pool(), pool()
    jitattn.copy_pages(cache, cache, pairs_of((9, 1), (1, 9), (2**31 - 1, 2), (-(2**31), 3)))
    assert torch.equal(cache, want)


def test_no_pairs() -> None:
    cache, want = pool(), pool()
    jitattn.copy_pages(cache, cache, torch.empty((0, 2), dtype=torch.int64, device=DEVICE))
    assert torch.equal(cache, want)


@pytest.mark.parametrize(
    ("pairs", "match"),
    [
        ([[0, 1], [1, 2]], r"page 1 of src\[0\] is a destination, too"),
        ([[0, 1], [2, 1]], "destination twice"),
        ([[0, 9]], r"dst\[0\] has 9 pages"),
    ],
)
def test_pairs_on_the_cpu_are_checked(pairs: list[list[int]], match: str) -> None:
    cache, want = pool(), pool()
    jitattn.copy_pages(cache, cache, torch.tensor([[0, 0]]))  # nor is a later call spared
    with pytest.raises(ValueError, match=match):
        jitattn.copy_pages(cache, cache, torch.tensor(pairs))
    assert torch.equal(cache, want)


def test_host_memory_must_be_pinned() -> None:
    cache = pool()
    pinned, other = (
        torch.zeros_like(cache, device="cpu").pin_memory(),
        torch.zeros_like(cache, device="cpu"),
    )
    pairs = pairs_of((1, 2))
    jitattn.copy_pages(cache, pinned, pairs)
    with pytest.raises(ValueError, match=r"dst\[0\] is in host memory that isn't pinned"):
        jitattn.copy_pages(cache, other, pairs)
    with pytest.raises(ValueError, match=r"src\[0\] is in host memory that isn't pinned"):
        jitattn.copy_pages(other, cache, pairs)
    torch.cuda.synchronize()
    assert torch.equal(pinned[2], cache[1].cpu())


def test_offload_and_reload_on_a_side_stream() -> None:
    caches = [pool(), pool(8), pool(7)]
    host = [torch.zeros((4, *PAGE), dtype=torch.bfloat16).pin_memory() for _ in caches]
    want = [cache.clone() for cache in caches]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        jitattn.copy_pages(caches, host, pairs_of((5, 0), (3, 2)))
    side.synchronize()
    for cache, stored in zip(caches, host, strict=True):
        assert torch.equal(stored[0], cache[5].cpu())
        assert torch.equal(stored[2], cache[3].cpu())
        cache[[3, 5]] = 0
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        jitattn.copy_pages(host, caches, pairs_of((0, 5), (2, 3)))
    torch.cuda.current_stream().wait_stream(side)
    for cache, before in zip(caches, want, strict=True):
        assert torch.equal(cache, before)


def test_replays_with_other_pairs() -> None:
    source, target = pool(), pool(6)
    pairs = pairs_of((0, 0), (0, 1), (0, 2))
    jitattn.copy_pages(source, target, pairs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        jitattn.copy_pages(source, target, pairs)
    for some in (((1, 5), (2, 4), (3, 3)), ((8, 0), (-1, 1), (7, -1)), ((-1, -1),) * 3):
        source.normal_()
        pairs.copy_(pairs_of(*some))
        want = target.clone()
        for s, d in some:
            if s >= 0 and d >= 0:
                want[d] = source[s]
        graph.replay()
        assert torch.equal(target, want)


def test_a_capture_takes_pairs_of_the_device_only() -> None:
    cache = pool()
    jitattn.copy_pages(cache, cache, torch.tensor([[0, 0]]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.add_(0)  # torch warns of graphs of nothing
        with pytest.raises(ValueError, match="pairs are on the CPU in a capture"):
            jitattn.copy_pages(cache, cache, torch.tensor([[0, 0]]))


def test_nothing_waits() -> None:
    cache, pairs = pool(), pairs_of((1, 2))
    jitattn.copy_pages(cache, cache, pairs)
    with forbid_waiting():
        jitattn.copy_pages(cache, cache, pairs)


def test_c07_offsets_beyond_32_bits(large_pool: Tensor) -> None:
    large_pool[[131_073, 65_536, 0]] = 3.0
    large_pool[65_536] = 5.0
    large_pool[1] = 9.0
    jitattn.copy_pages(large_pool, large_pool, pairs_of((65_536, 131_073), (1, 0)))
    assert bool((large_pool[131_073] == 5).all())
    assert bool((large_pool[0] == 9).all())
    assert bool((large_pool[65_536] == 5).all())
