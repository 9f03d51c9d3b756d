"""The kernels of lists, run on the CPU by the code that launches them."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import replace
from typing import Any

import pytest
import torch

import jitattn
from tests.emulator.attention import EmulatedCuda
from tests.support.harness import same_bits
from tests.support.lists import ListCase, check_lists, extra_inputs, make_inputs

TOKENS = ListCase(outside=(3,))
PAGES = ListCase(page_lists=True, page_size=16, num_pages=40, k=4, q_lens=3, outside=(3,))
LATENT = ListCase(latent=5, k=150, page_size=7, outside=(4,))
CASES = {
    "shared lists": replace(TOKENS, counts="head", sinks=True),
    "lists of heads": replace(
        TOKENS, own=True, counts="head", kv_dtype="float8_e4m3fn", scales=True, head_dim=128
    ),
    "no counts": replace(TOKENS, counts=None, cache="padded", logits_soft_cap=5.0, k=130),
    "pages": replace(PAGES, sinks=True),
    "pages of 5": replace(PAGES, page_size=5, window_left=9, kv_dtype="float8_e4m3fn"),
    "latent": LATENT,
    "latent, 8 bits": replace(LATENT, form="fp8", scales=True),
    "latent rows": replace(LATENT, form="rows", latent=20),
    "latent, a first tile of holes": replace(LATENT, first_holes=70),
    "latent of 20, a first tile of holes": replace(LATENT, latent=20, first_holes=70),
    "latent of 20, 8 bits": replace(
        LATENT, latent=20, form="fp8", first_holes=70, dtype="float16", out_dtype="float32"
    ),
    "latent of 70, two tiles of holes": replace(
        LATENT, latent=70, first_holes=130, num_tokens=4, counts=None, outside=()
    ),
    "many query tokens": replace(PAGES, q_lens=16, group_size=4, window_left=60, num_tokens=3),
    "long pages": replace(PAGES, page_size=64, k=3, causal=False, batch_invariant=True),
    "pair": replace(LATENT, form="pair", latent=70, num_tokens=3),
    "many rows": replace(TOKENS, group_size=12, num_tokens=3, k=300),
}


def planner_of(host: EmulatedCuda, case: ListCase) -> Any:
    return (host.mla_planner if case.latent else host.planner)(**case.planner_arguments())


def check_case(host: EmulatedCuda, case: ListCase) -> None:
    inputs = make_inputs(case)
    check_lists(inputs, inputs.run(planner_of(host, case)))


@pytest.mark.parametrize("name", CASES)
def test_sm_90a(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_case(EmulatedCuda(monkeypatch, "sm_90a"), CASES[name])


@pytest.mark.parametrize("name", ["lists of heads", "pages of 5", "latent rows"])
def test_sm_80(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_case(EmulatedCuda(monkeypatch, "sm_80"), CASES[name])


@pytest.mark.parametrize("name", ["lists of heads", "pages", "latent, 8 bits", "latent"])
def test_any_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(CASES[name], seed=5)
    inputs = make_inputs(case)
    host = EmulatedCuda(monkeypatch, "sm_90a", seed=3)
    check_lists(inputs, inputs.run(planner_of(host, case)))


@pytest.mark.parametrize("name", ["shared lists", "latent"])
def test_placement_changes_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(CASES[name], outside=())
    inputs = make_inputs(case)
    planner = planner_of(EmulatedCuda(monkeypatch, "sm_90a"), case)
    first = inputs.run(planner)
    check_lists(inputs, first)
    num_slots, size = case.num_pages * case.page_size, case.page_size
    order = torch.randperm(num_slots, generator=torch.Generator().manual_seed(1))
    slots = inputs.lists.slots
    is_slot = (slots >= 0) & (slots < num_slots)
    moved = torch.where(is_slot, order[slots.clamp(0, num_slots - 1).long()], slots).int()
    kv = inputs.kv.clone()
    places, sources = (order // size, order % size), torch.arange(num_slots)
    if case.latent:
        kv[places] = inputs.kv[sources // size, sources % size]
    else:
        kv[places[0], :, places[1]] = inputs.kv[sources // size, :, sources % size]
    other = replace(inputs, lists=jitattn.IndexLists(moved, inputs.lists.counts), kv=kv)
    for one, two in zip(first, other.run(planner), strict=True):
        assert same_bits(one, two)


@pytest.mark.parametrize("name", ["lists of heads", "shared lists", "latent, 8 bits"])
def test_extra_lists(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One softmax over both, the sink once; a plan goes on serving both."""
    inputs, other = extra_inputs(CASES[name])
    host = EmulatedCuda(monkeypatch, "sm_90a")
    planner = planner_of(host, inputs.case)
    host.know(planner.exact())
    plan, kv = inputs.plan(planner), planner.bind(other.kv, **other.scales)
    for _ in range(2):
        result = inputs.run(planner, plan, extra=(other.lists, kv))
        check_lists(inputs, result, other)
        plan.refresh()


@pytest.mark.parametrize("name", ["shared lists", "latent"])
def test_refresh_and_other_lists(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan serves other lists of its size; counts beyond those planned have rows of NaN."""
    case = replace(CASES[name], outside=(), counts="token")
    inputs, other = make_inputs(case), make_inputs(replace(case, seed=9))
    planner = planner_of(EmulatedCuda(monkeypatch, "sm_90a"), case)
    other = replace(other, sinks=inputs.sinks)
    plan = inputs.plan(planner)
    counts = inputs.lists.counts.clone()
    for tensor, new in zip(inputs.lists.tensors, other.lists.tensors, strict=True):
        tensor.copy_(new)
    more = inputs.lists.counts.clamp(0, case.k) > counts.clamp(0, case.k)
    assert bool(more.any())
    out, lse = other.run(planner, plan, pages=inputs.lists)
    assert torch.equal(lse.isnan().all(dim=1), more)
    assert torch.equal(out.isnan().flatten(1).all(dim=1), more)
    plan.refresh()
    check_lists(other, other.run(planner, plan))


def at_the_end_of_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that nothing may be read behind: the next page faults."""
    size = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * size)
    second = ctypes.addressof(ctypes.c_char.from_buffer(memory, size))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(second), ctypes.c_size_t(size), 0) == 0
    offset = size - tensor.nbytes
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
    return copy.view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_page_lists_narrower_than_those_planned(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing behind their ends is read, though the plan has tiles there."""
    inputs = make_inputs(replace(PAGES, counts=None, outside=()))
    planner = planner_of(EmulatedCuda(monkeypatch, arch), inputs.case)
    plan = inputs.plan(planner)
    tensors = (at_the_end_of_memory(tensor[..., :1]) for tensor in inputs.lists.tensors)
    narrow = replace(inputs, lists=jitattn.PageLists(*tensors))
    for one, two in zip(
        narrow.run(planner, plan, pages=narrow.lists), narrow.run(planner), strict=True
    ):
        torch.testing.assert_close(one, two)
