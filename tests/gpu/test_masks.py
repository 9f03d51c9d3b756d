"""Custom masks on the device: their three forms, and trees of draft tokens."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.gpu.device import DEVICE
from tests.support.cases import MASKED_KERNELS, Case, Kernel, of
from tests.support.harness import assert_same, attend, check, expected
from tests.support.inputs import Inputs, Tokens, make_inputs, random_tokens, uniform_probe
from tests.support.queries import (
    MaskOf,
    Rows,
    mask_of_last_keys,
    pack,
    ragged_mask,
    request_and_place,
)

FORMS = ("bool", "packed", "ragged")


def case_of(kernel: Kernel) -> Case:
    return kernel.case(
        logits_soft_cap=5.0 if kernel.soft_cap else 0.0,
        group_size={8: 4, 16: 9, 32: 20}[kernel.band],
        num_kv_heads=2,
        mask="bool",
    )


CASES = tuple(case_of(kernel) for kernel in MASKED_KERNELS)
PLAIN = CASES[0]
# Those whose kernels without a mask other tests use as well.
WITH_UNMASKED_TWIN = (CASES[0], CASES[1], CASES[4], CASES[9], CASES[11])
BATCH = ((1, 300), (2, 40), (3, 9000), (64, 700), (70, 70), (0, 9), (5, 3), (4, 0), (300, 333))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window_left", [-1, 0, 50])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_random_masks(case: Case, window_left: int, causal: bool, form: str) -> None:
    """Combined by AND with causality and the window."""
    case = of(case, *BATCH, window_left=window_left, causal=causal, mask=form, mask_width=200)
    case = replace(case, sinks="float32", spare_rows=5)
    inputs = make_inputs(case, DEVICE)
    check(case, *attend(inputs), expected(inputs))


@pytest.mark.parametrize("mask_width", [8, 64, 72, 1000, 9000, 9008])
@pytest.mark.parametrize("case", [PLAIN, CASES[4], CASES[5]], ids=str)
def test_forms_give_the_same_bits(case: Case, mask_width: int) -> None:
    """One mask as bool, packed and over all keys; strides between rows don't matter."""
    case = of(case, *BATCH, causal=False, mask_width=mask_width)
    inputs = make_inputs(case, DEVICE)
    want = attend(inputs)
    bits = inputs.mask.given
    given = [bits.contiguous(), pack(bits), ragged_mask(inputs.mask.seen)]
    rng = torch.Generator(DEVICE).manual_seed(1)
    given.append(ragged_mask(inputs.mask.seen, rng))  # with room between requests
    for form in given:
        assert_same(attend(inputs, custom_mask=form), want)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_visible_key_is_counted_once(case: Case) -> None:
    case = of(case, *BATCH, mask="ragged", num_kv_heads=1)
    inputs = make_inputs(case, DEVICE, uniform_probe(case, DEVICE))
    out, lse = attend(inputs)
    counted = lse.double().exp()
    rows = Rows.of(case, DEVICE)
    counts = torch.zeros(case.num_tokens, dtype=torch.float64, device=DEVICE)
    for request, seen in enumerate(inputs.mask.seen):
        mine = rows.request == request
        key = torch.arange(seen.shape[1], device=DEVICE)
        inside = (key >= rows.first[mine, None]) & (key < rows.last[mine, None])
        counts[mine] = (inside & seen).sum(1).double()
    torch.testing.assert_close(counted, counts[:, None].expand_as(counted), rtol=1e-5, atol=0)
    assert bool((out[counts == 0] == 0).all())


@pytest.mark.parametrize("sinks", [None, "float32"])
@pytest.mark.parametrize("case", [PLAIN, CASES[5], CASES[9]], ids=str)
def test_rows_that_a_mask_blinds(case: Case, sinks: str | None) -> None:
    """Every second row sees no key, whole tiles and splits included."""
    case = of(case, *BATCH, mask="ragged", sinks=sinks)
    inputs = make_inputs(case, DEVICE)
    seen = [rows.clone() for rows in inputs.mask.seen]
    for rows in seen:
        rows[::2] = False
    inputs.mask = MaskOf(ragged_mask(seen), seen)
    out, lse = attend(inputs)
    check(case, out, lse, expected(inputs))
    blind = request_and_place(case, DEVICE)[1] % 2 == 0
    assert bool((out[blind] == 0).all())
    want = torch.full_like(lse[0], -torch.inf) if sinks is None else inputs.sinks.float()
    torch.testing.assert_close(lse[blind], want.expand_as(lse[blind]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", [PLAIN, CASES[5], CASES[9]], ids=str)
def test_one_key_far_back(case: Case) -> None:
    """A row whose only key lies tiles or splits before the others it may not see."""
    pairs = ((64, 5000), (3, 9000), (1, 700))
    case = of(case, *pairs, mask="ragged")
    inputs = make_inputs(case, DEVICE)
    rng = random.Random(3)
    seen = []
    for q_len, kv_len in pairs:
        rows = torch.zeros((q_len, kv_len), dtype=torch.bool, device=DEVICE)
        for place in range(q_len):
            rows[place, rng.randint(0, kv_len - q_len)] = True
        seen.append(rows)
    inputs.mask = MaskOf(ragged_mask(seen), seen)
    out, lse = attend(inputs)
    check(case, out, lse, expected(inputs))
    starts = torch.tensor(inputs.kv_indptr[:-1], device=DEVICE)
    keys = torch.cat(
        [rows.int().argmax(1) + start for rows, start in zip(seen, starts, strict=True)]
    )
    want = inputs.v[keys].repeat_interleave(case.group_size, dim=1)
    assert torch.equal(out, want.to(out.dtype))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_mask_of_ones_changes_nothing(case: Case, form: str) -> None:
    """Against what no mask gives."""
    case = of(case, *BATCH, mask=None)
    tokens = random_tokens(case, DEVICE)
    want = expected(make_inputs(case, DEVICE, tokens))
    masked = make_inputs(replace(case, mask=form), DEVICE, tokens)
    parts = masked.mask.given if isinstance(masked.mask.given, tuple) else (masked.mask.given,)
    parts[0].fill_(True if form == "bool" else 0xFF)
    check(masked.case, *attend(masked), want)


# --- trees of draft tokens ------------------------------------------------------------------------

NUM_DRAFT = 64


def random_tree(rng: random.Random) -> list[int]:
    """The parent of each of 64 draft tokens, -1 for the root; parents come first."""
    return [-1, *(rng.randint(max(0, i - 12), i - 1) for i in range(1, NUM_DRAFT))]


def path_to(parents: list[int], node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def leaves(parents: list[int]) -> list[int]:
    return [node for node in range(NUM_DRAFT) if node not in parents]


def tree_inputs(case: Case, parents: list[list[int]], form: str) -> Inputs:
    """Requests that end with a tree each; the mask has a column for every draft token."""
    case = replace(case, mask=form, mask_width=NUM_DRAFT)
    bits = torch.zeros((case.num_tokens, NUM_DRAFT), dtype=torch.bool)
    for request, tree in enumerate(parents):
        for node in range(NUM_DRAFT):
            bits[request * NUM_DRAFT + node, path_to(tree, node)] = True
    inputs = make_inputs(case, DEVICE)
    inputs.mask = mask_of_last_keys(
        replace(case, mask="packed" if form == "packed" else "bool"), bits.to(DEVICE)
    )
    if form == "ragged":
        inputs.mask = MaskOf(ragged_mask(inputs.mask.seen), inputs.mask.seen)
    return inputs


def paths_of(inputs: Inputs, parents: list[list[int]]) -> tuple[Case, Tokens, list[int]]:
    """Each root-to-leaf path as a causal request of its own, and the rows of q that it has."""
    pieces: list[list[Tensor]] = [[], [], []]
    pairs, rows = [], []
    for request, tree in enumerate(parents):
        start, stop = inputs.kv_indptr[request : request + 2]
        prefix = stop - start - NUM_DRAFT
        for leaf in leaves(tree):
            path = path_to(tree, leaf)
            mine = [request * NUM_DRAFT + node for node in path]
            keys = [*range(start, start + prefix), *(start + prefix + node for node in path)]
            pieces[0].append(inputs.q[mine])
            pieces[1].append(inputs.k[keys])
            pieces[2].append(inputs.v[keys])
            pairs.append((len(path), prefix + len(path)))
            rows += mine
    tokens = tuple(torch.cat(piece) for piece in pieces)
    case = of(inputs.case, *pairs, mask=None)
    return case, (tokens[0], tokens[1], tokens[2]), rows


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("case_of_tree", CASES, ids=str)
def test_a_tree_is_its_paths(case_of_tree: Case, causal: bool, form: str) -> None:
    """64 draft tokens in one request, against every path run on its own without a mask."""
    rng = random.Random(64)
    parents = [random_tree(rng) for _ in range(4)]
    prefixes = (0, 1, 100, 1500)
    pairs = [(NUM_DRAFT, prefix + NUM_DRAFT) for prefix in prefixes]
    case = of(case_of_tree, *pairs, causal=causal, num_kv_heads=1, call="returned")
    inputs = tree_inputs(case, parents, form)
    out, lse = attend(inputs)
    check(inputs.case, out, lse, expected(inputs))
    path_case, tokens, rows = paths_of(inputs, parents)
    path_case = replace(path_case, causal=True, q_view="contiguous", cache="pair_nhd")
    alone = make_inputs(path_case, DEVICE, tokens)
    want = expected(alone)
    check(path_case, out[rows], lse[rows], want)
    if case_of_tree in WITH_UNMASKED_TWIN:
        check(path_case, *attend(alone), want)
