"""What indexers of vLLM and SGLang choose becomes lists, and layers attend to those."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import jitattn
from jitattn.integrations import sparse
from jitattn.integrations.sglang import sparse as sglang
from jitattn.integrations.sparse import lists_of_positions
from jitattn.integrations.vllm import sparse as vllm

SIZE, HEADS, SCALE = 16, 3, 0.06
INT = torch.int32


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=INT)


class Step:
    """Query tokens of some requests, what their indexer chose, and where all tokens lie."""

    def __init__(self, seed: int, kv_lens: tuple[int, ...], q_lens: tuple[int, ...]) -> None:
        rng = random.Random(seed)
        counts = [-(-n // SIZE) for n in kv_lens]
        self.num_pages = sum(counts) + 2
        free = rng.sample(range(self.num_pages), sum(counts))
        # Entries past the last page of a request may be anything.
        self.table = torch.randint(-9, 999, (len(kv_lens), max(counts) + 1), dtype=INT)
        for request, count in enumerate(counts):
            self.table[request, :count] = ints(*(free.pop() for _ in range(count)))
        self.offsets = torch.tensor([0, *q_lens]).cumsum(0).int()
        self.rows = torch.repeat_interleave(torch.arange(len(q_lens)), torch.tensor(q_lens)).int()
        self.begins = torch.tensor([0, *kv_lens]).cumsum(0).int()
        self.slots = [[self.slot(r, i) for i in range(n)] for r, n in enumerate(kv_lens)]
        chosen = []
        for row in self.rows.tolist():
            some = rng.sample(range(kv_lens[row]), min(rng.randint(0, 20), kv_lens[row]))
            entries = [*some, *[-1] * (24 - len(some))]
            rng.shuffle(entries)
            chosen.append(entries)
        self.topk = ints(*chosen)

    def slot(self, request: int, position: int) -> int:
        return int(self.table[request, position // SIZE]) * SIZE + position % SIZE

    @property
    def wanted(self) -> Tensor:
        return ints(
            *(
                [-1 if p < 0 else self.slots[row][p] for p in entries]
                for row, entries in zip(self.rows.tolist(), self.topk.tolist(), strict=True)
            )
        )

    @property
    def by_token(self) -> Tensor:
        """As SGLang's tables: the slot of every token of a request."""
        width = max(map(len, self.slots)) + 3
        return ints(*([*own, *[-7] * (width - len(own))] for own in self.slots))


STEPS = [
    Step(0, (70, 5, 16), (1, 1, 1)),
    Step(1, (70, 33), (4, 2)),
    Step(2, (1, 100, 40, 17), (1, 9, 3, 1)),
]


@pytest.mark.parametrize("step", STEPS)
def test_vllm(step: Step) -> None:
    metadata = SimpleNamespace(
        req_id_per_token=torch.cat((step.rows, ints(0, 0))),  # of a step that is padded
        block_table=step.table,
        block_size=SIZE,
    )
    lists = vllm.index_lists(step.topk, metadata)
    assert torch.equal(lists.slots, step.wanted)
    again = vllm.index_lists(step.topk, metadata, out=lists)
    assert again is lists
    padded = torch.cat((step.topk, torch.full((2, 24), -1, dtype=INT)))
    assert torch.equal(vllm.index_lists(padded, metadata).slots[:-2], step.wanted)


@pytest.mark.parametrize("step", STEPS)
def test_sglang(step: Step) -> None:
    num_tokens = len(step.rows)
    chosen = step.wanted
    assert sglang.slot_lists(chosen).slots is chosen
    rows = sglang.request_rows(step.offsets, num_tokens)
    assert torch.equal(rows.int(), step.rows)
    # Rows of a pool of requests; with a row for each query token; and of the K of all.
    pool = torch.full((9, step.by_token.shape[1]), -3, dtype=INT)
    places = torch.randperm(9)[: len(step.slots)]
    pool[places] = step.by_token
    of_pool = sglang.request_rows(step.offsets, num_tokens, rows=places)
    flat = ints(*(slot for own in step.slots for slot in own))
    offsets = step.begins[step.rows]
    shifted = torch.where(step.topk < 0, step.topk, step.topk + offsets[:, None])
    for lists in (
        sglang.index_lists(step.topk, step.by_token, rows),
        sglang.index_lists(step.topk, pool, of_pool),
        sglang.index_lists(step.topk, step.by_token[step.rows]),
        sglang.flat_lists(step.topk, flat, offsets),
        sglang.flat_lists(step.topk, flat.long(), offsets[:, None]),
        sglang.flat_lists(shifted, flat),
    ):
        assert torch.equal(lists.slots, step.wanted)
    assert sglang.request_rows(step.offsets, num_tokens + 5)[-1] == len(step.slots) - 1


def by_hand(q: Tensor, latents: Tensor, slots: Tensor) -> Tensor:
    """Attention of [tokens, heads, 576] to float64 [num_slots, 576]."""
    outs = []
    for token, row in enumerate(slots.tolist()):
        keys = latents[[slot for slot in row if slot >= 0]]
        weights = torch.softmax(SCALE * q[token].double() @ keys.T, dim=-1)
        outs.append(weights @ keys[:, :512])
    return torch.stack(outs)


def latents_of(kind: str, num_slots: int) -> tuple[Tensor, Tensor]:
    """A cache of a kind, [num_slots, its bytes or elements], and what it stands for."""
    latent, rope = torch.randn(num_slots, 512), torch.randn(num_slots, 64).bfloat16()
    if kind == "bfloat16":
        both = torch.cat((latent.bfloat16(), rope), dim=1)
        return both, both.double()
    scales = latent.unflatten(1, (4, 128)).abs().amax(-1) / 448
    codes = (latent.unflatten(1, (4, 128)) / scales[..., None]).to(torch.float8_e4m3fn)
    parts = codes.flatten(1), scales, rope
    rows = torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)
    values = (codes.double() * scales.double()[..., None]).flatten(1)
    return rows, torch.cat((values, rope.double()), dim=1)


@pytest.mark.parametrize("kind", ["bfloat16", "rows"])
@pytest.mark.parametrize("step", STEPS)
def test_layers_attend_to_what_is_chosen(step: Step, kind: str) -> None:
    """Two layers of vLLM's, which share a plan; SGLang's lists over its pool give the same."""
    num_tokens = len(step.rows)
    metadata = SimpleNamespace(req_id_per_token=step.rows, block_table=step.table, block_size=SIZE)
    buffer = torch.full((num_tokens + 7, 24), 10**6, dtype=INT)
    layers = [vllm.SparseLayer(HEADS, SCALE, topk_indices_buffer=buffer) for _ in range(2)]
    for number, layer in enumerate(layers):
        buffer[:num_tokens] = step.topk.flip(1) if number else step.topk
        cache, latents = latents_of(kind, step.num_pages * SIZE)
        q = torch.randn(num_tokens, HEADS, 576).bfloat16()
        want = by_hand(q, latents, step.wanted)
        paged = cache.unflatten(0, (step.num_pages, SIZE))
        tolerance = {"rtol": 0.03, "atol": 0.02}
        for given in (q, (q[..., :512].contiguous(), q[..., 512:].contiguous())):
            out, lse = layer.forward_mqa(given, paged, metadata, None)
            assert lse is None
            has_some = (step.topk >= 0).any(dim=1)
            torch.testing.assert_close(out[has_some].double(), want[has_some], **tolerance)
            assert not out[~has_some].any()
        # SGLang's pools have slots, and pages only for who asks.
        lists = sglang.index_lists(step.topk, step.by_token, step.rows)
        latent = sparse.SparseLatents(HEADS, SCALE)
        other = latent.attend(q[..., :512], q[..., 512:], cache[:, None], lists, return_lse=True)
        torch.testing.assert_close(other[0][has_some].double(), want[has_some], **tolerance)
    (plans,) = metadata.jitattn_steps.values()
    planner = layers[0].planner(torch.bfloat16, paged)
    assert planner is layers[1].planner(torch.bfloat16, paged)
    first = jitattn.IndexLists(step.wanted)
    assert plans.plan_of(planner, first)[1] is first, "made of the first layer's lists"


def test_what_does_not_fit_is_refused() -> None:
    step = STEPS[1]
    rows = step.rows
    for error, text, positions, table, given in (
        (TypeError, "positions has dtype int64", step.topk.long(), step.table, rows),
        (TypeError, "table has dtype int64", step.topk, step.table.long(), rows),
        (ValueError, r"positions has shape \[24\]", step.topk[0], step.table, rows),
        (ValueError, r"table has shape \[7\]", step.topk, torch.zeros(7, dtype=INT), rows),
        (ValueError, r"rows has shape \[1\]: expected \[6\]", step.topk, step.table, rows[:1]),
        (ValueError, "table has 2 rows and positions 6", step.topk, step.table, None),
        (TypeError, "rows has dtype float32", step.topk, step.table, rows.float()),
    ):
        with pytest.raises(error, match=text):
            lists_of_positions(positions, table, given, SIZE)
    with pytest.raises(ValueError, match="page_size is 0"):
        lists_of_positions(step.topk, step.table, rows, 0)
    with pytest.raises(ValueError, match=r"expected lists of \[6, 24\] without counts"):
        out = jitattn.IndexLists(torch.zeros(6, 23, dtype=INT))
        lists_of_positions(step.topk, step.table, rows, SIZE, out=out)
    with pytest.raises(ValueError, match=r"topk_indices_offset has shape \[2\]: expected \[6\]"):
        sglang.flat_lists(step.topk, ints(1, 2), ints(1, 2))
    with pytest.raises(ValueError, match=r"cache has shape \[2, 576\]"):
        q = torch.zeros(6, HEADS, 512)
        sparse.SparseLatents(HEADS, SCALE).attend(
            q, q[..., :64], torch.zeros(2, 576), jitattn.IndexLists(step.wanted)
        )


@pytest.mark.parametrize(
    ("positions", "table", "rows"),
    [
        ([[0, 64]], [[1, 2, 3, 4]], [0]),  # past the table
        ([[0, 17]], [[1, -1]], [0]),  # a page that is none
        ([[0, 5]], [[1, 2]], [3]),  # a request that is none
        ([[0, 5]], [[1, 2**31 - 8]], [-1]),
        ([[0, 17]], [[1, 2**30]], [0]),  # a slot beyond all integers
        ([[0, 5]], [[]], [0]),
    ],
)
def test_a_position_without_a_page(
    monkeypatch: pytest.MonkeyPatch, positions: Any, table: Any, rows: Any
) -> None:
    """Is refused on the CPU, and on a device an entry that attention answers with NaN."""
    given = ints(*positions), ints(*table).reshape(1, -1), ints(*rows), SIZE
    with pytest.raises(ValueError, match=r"positions\[0, \d\] is \d+: the table has no page for"):
        lists_of_positions(*given)
    monkeypatch.setattr(sparse, "_refuse_missing", lambda *missing: None)
    assert int(lists_of_positions(*given).slots[0, 1]) == 2**31 - 1
    nothing = torch.full_like(given[0], -5)
    assert lists_of_positions(nothing, *given[1:]).slots.tolist() == [[-1, -1]]
