"""Batches whose tokens lie over ranks: random ones, what a rank is given, and what is right.

What is right is computed on one process by other means than the package's: which tokens a rank has
is counted token by token, and each query token is a request.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

import jitattn
from jitattn.kernels.attention.reference import attention
from jitattn.kernels.mla.reference import latent_attention
from jitattn.parallel import ContextParallel
from jitattn.spec.config import MLAConfig, PlannerConfig

FP8 = torch.float8_e4m3fn
SCALE = 0.5


@dataclass(frozen=True, kw_only=True)
class ContextCase:
    """One batch on several ranks.

    Attributes:
        num_ranks: how many.
        interleave: pages of a block.
        page_size: tokens of a page.
        seq_lens: tokens of each request on all ranks.
        q_lens: query tokens of each; None is one each, without offsets.
        is_mla: latent attention.
        heads: query heads of all ranks.
        kv_heads: of attention.
        kv_dtype: of the cache.
        page_table: "shared", "separate", "csr" or "token".
        causal: of the planner.
        soft_cap: of attention.
        has_sinks: of attention.
        has_rows: whether requests share a pool of rows.
        batch_invariant: of the planner.
        seed: of the numbers.
    """

    num_ranks: int
    interleave: int = 1
    page_size: int = 4
    seq_lens: tuple[int, ...] = (9,)
    q_lens: tuple[int, ...] | None = None
    is_mla: bool = False
    heads: int = 8
    kv_heads: int = 2
    kv_dtype: str = "bfloat16"
    page_table: str = "shared"
    causal: bool = True
    soft_cap: float = 0.0
    has_sinks: bool = False
    has_rows: bool = False
    batch_invariant: bool = False
    seed: int = 0


def random_case(num_ranks: int, seed: int) -> ContextCase:
    """Return a batch, with empty and short requests among others."""
    rng = random.Random(seed)
    page_size, interleave = rng.choice((1, 3, 4, 16)), rng.choice((1, 1, 2, 3))
    round_len = num_ranks * interleave * page_size
    lengths = (0, 1, page_size, page_size + 1, round_len, round_len + 1, 3 * round_len - 1)
    seq_lens = tuple(
        rng.choice((rng.choice(lengths), rng.randint(0, 4 * round_len)))
        for _ in range(rng.randint(1, 5))
    )
    is_mla, causal = rng.random() < 0.4, rng.random() < 0.8
    has_many = rng.random() < 0.5
    table = rng.choice(("shared", "shared", "separate", "token"))
    if not (has_many and causal) and rng.random() < 0.3:
        table = "csr"
    kv_heads = rng.choice((1, 2, num_ranks))
    return ContextCase(
        num_ranks=num_ranks,
        interleave=interleave,
        page_size=page_size,
        seq_lens=seq_lens,
        q_lens=tuple(rng.randint(0, 5) for _ in seq_lens) if has_many else None,
        is_mla=is_mla,
        heads=num_ranks * kv_heads * rng.choice((1, 2)),
        kv_heads=kv_heads,
        kv_dtype=rng.choice(("bfloat16", "bfloat16", "float8_e4m3fn")),
        page_table=table,
        causal=causal,
        soft_cap=0.0 if is_mla else rng.choice((0.0, 0.0, 5.0)),
        has_sinks=not is_mla and rng.random() < 0.3,
        has_rows=table != "csr" and rng.random() < 0.3,
        seed=seed,
    )


Planner = jitattn.AttentionPlanner | jitattn.MLAPlanner


def planner_of(case: ContextCase, **changes: object) -> Planner:
    """Return the planner of every rank."""
    arguments: dict[str, object] = {
        "page_size": case.page_size,
        "q_dtype": "bfloat16",
        "kv_dtype": case.kv_dtype,
        "page_table": case.page_table,
        "causal": case.causal,
        "batch_invariant": case.batch_invariant,
        "device": "cpu",
    }
    if case.is_mla:
        arguments |= {"num_heads": case.heads, "sm_scale": 0.05}
        return jitattn.MLAPlanner(**arguments | changes)  # type: ignore[arg-type]
    arguments |= {
        "num_qo_heads": case.heads,
        "num_kv_heads": case.kv_heads,
        "head_dim": 32,
        "logits_soft_cap": case.soft_cap,
    }
    return jitattn.AttentionPlanner(**arguments | changes)  # type: ignore[arg-type]


class ContextInputs:
    """The tensors of a case, equal in every process that makes them, on a device.

    Attributes:
        tokens: K and V, or latents, of each request, as stored; [len, heads, dim] each.
        qs: q, or q_nope and q_pe, of all heads.
        sinks: of all heads.
        pages: for each request the page of all ranks of each of its pages.
        caches: of all pages of all ranks.
    """

    def __init__(self, case: ContextCase, device: str = "cpu") -> None:
        self.case, self.device = case, device
        self._rng = torch.Generator().manual_seed(case.seed)
        dims = [(1, 512), (1, 64)] if case.is_mla else [(case.kv_heads, 32)] * 2
        q_lens = case.q_lens or (1,) * len(case.seq_lens)
        self.q_lens = q_lens
        num_tokens = sum(q_lens) + (2 if case.q_lens is not None else 0)
        q_dims = (512, 64) if case.is_mla else (32,)
        self.qs = [self._normal(num_tokens, case.heads, dim).bfloat16() for dim in q_dims]
        self.sinks = self._normal(case.heads)
        self.tokens = [[self._stored(length, *dim) for dim in dims] for length in case.seq_lens]
        self._lay_out()
        self.qs, self.sinks = [q.to(device) for q in self.qs], self.sinks.to(device)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._rng)

    def _stored(self, *shape: int) -> Tensor:
        values = self._normal(*shape)
        return values.to(getattr(torch, self.case.kv_dtype))

    def _lay_out(self) -> None:
        """Give each page of a request one of its rank, in random order, and fill it."""
        case = self.case
        counts = [-(-length // case.page_size) for length in case.seq_lens]
        group = case.num_ranks * case.interleave
        num_pages = (sum(counts) + len(counts) * group + group) // group * group
        free: list[list[int]] = [[] for _ in range(case.num_ranks)]
        for page in torch.randperm(num_pages, generator=self._rng).tolist():
            free[page // case.interleave % case.num_ranks].append(page)
        self.pages = [
            [free[number // case.interleave % case.num_ranks].pop() for number in range(count)]
            for count in counts
        ]
        self.caches = []
        for which, first in enumerate(self.tokens[0]):
            cache = torch.full((num_pages, case.page_size, *first.shape[1:]), math.nan)
            for pages, tokens in zip(self.pages, self.tokens, strict=True):
                for t, token in enumerate(tokens[which].float()):
                    cache[pages[t // case.page_size], t % case.page_size] = token
            self.caches.append(cache.to(first.dtype))

    @property
    def qo_indptr(self) -> Tensor | None:
        if self.case.q_lens is None:
            return None
        offsets = torch.tensor([0, *self.case.q_lens]).cumsum(0)
        return offsets.to(self.device, torch.int32)

    @property
    def seq_lens(self) -> Tensor:
        return torch.tensor(self.case.seq_lens, dtype=torch.int32, device=self.device)

    def table(self, pages: list[list[int]]) -> jitattn.BlockTable:
        """Return the table of pages of each request, in the layout of the case."""
        case, device = self.case, self.device
        width = max((len(row) for row in pages), default=0) + 1
        if case.page_table == "csr":
            starts = torch.tensor([0, *map(len, pages)], dtype=torch.int32).cumsum(0).int()
            flat = [page for row in pages for page in row] + [77]
            indices = torch.tensor(flat, dtype=torch.int32)
            return jitattn.CsrPages(starts.to(device), indices.to(device))  # type: ignore[return-value]
        rows = None
        ids = torch.tensor([row + [-1] * (width - len(row)) for row in pages], dtype=torch.int32)
        if case.has_rows:
            rows = torch.arange(len(pages), dtype=torch.int32, device=device).flip(0)
            ids = ids.flip(0)
        if case.page_table == "token":
            places = torch.arange(case.page_size, dtype=torch.int32)
            slots = (ids[:, :, None] * case.page_size + places).where(ids[:, :, None] >= 0, -1)
            return jitattn.TokenTable(slots.flatten(1).to(device), rows=rows)  # type: ignore[return-value]
        if case.page_table == "separate":
            ids = torch.stack((ids, ids), dim=1)
        return jitattn.BlockTable(ids.to(device), rows=rows)

    def local_cache(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return the pages of a rank: every num_ranks-th block of all."""
        case = self.case
        parts = []
        for cache in self.caches:
            raw = cache.view(torch.uint8) if cache.dtype is FP8 else cache
            blocks = raw.unflatten(0, (-1, case.num_ranks, case.interleave))[:, rank]
            own = blocks.flatten(0, 1).contiguous().view(cache.dtype).to(self.device)
            parts.append(own.squeeze(2) if case.is_mla else own)
        return parts[0], parts[1]

    def bound(self, planner: Planner, rank: int) -> object:
        """Return the cache of a rank as its planner takes it."""
        cache = self.local_cache(rank)
        if self.case.kv_dtype == "bfloat16":
            return planner.bind(cache)
        if self.case.is_mla:
            return planner.bind(cache, k_scale=SCALE)
        return planner.bind(
            cache, k_scale=SCALE, v_scale=torch.tensor(2 * SCALE, device=self.device)
        )

    def heads_of(self, tensor: Tensor, rank: int) -> Tensor:
        """Return a rank's part of what has heads in its second dimension."""
        count = self.case.heads // self.case.num_ranks
        return tensor[:, rank * count : (rank + 1) * count]


def run_case(rank: int, case: ContextCase, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Return out and lse of this rank's heads."""
    inputs = ContextInputs(case, device)
    cp = ContextParallel(interleave=case.interleave, page_size=case.page_size)
    planner = planner_of(case, device=device)
    plan = cp.plan(
        planner,  # type: ignore[arg-type]
        cp.local_table(inputs.table(inputs.pages)),
        inputs.seq_lens,
        inputs.qo_indptr,
        max_q_len=None if case.q_lens is None else max(inputs.q_lens),
    )
    qs = [inputs.heads_of(q, rank) for q in inputs.qs]
    others = {}
    if case.has_sinks:
        others["sinks"] = inputs.heads_of(inputs.sinks[None], rank)[0]
    found = plan.run(*qs, inputs.bound(planner, rank), return_lse=True, **others)  # type: ignore
    assert isinstance(found, tuple)
    return found[0].cpu(), found[1].cpu()


def run_cases(
    rank: int, cases: list[ContextCase], device: str = "cpu"
) -> list[tuple[Tensor, Tensor]]:
    """Run one case after the other; on "cuda" each rank has a card, on "cuda:0" all share one."""
    if device == "cuda":
        torch.cuda.set_device(rank)
        device = f"cuda:{rank}"
    return [run_case(rank, case, device) for case in cases]


def states_of(rank: int, case: ContextCase) -> tuple[Tensor, Tensor]:
    """Return the states that this rank merges, as they come."""
    from jitattn.parallel import plan

    kept: list[tuple[Tensor, Tensor]] = []

    def merge_into(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
        del out, lse
        kept.append((outs.clone(), lses.clone()))

    plan.merge_into = merge_into
    run_case(rank, case)
    return kept[0]


# --- what is right


def query_tokens(inputs: ContextInputs) -> list[tuple[int, int]]:
    """Return the request of each query token, and how many of its tokens it sees."""
    case = inputs.case
    found = []
    for request, (kv_len, q_len) in enumerate(zip(case.seq_lens, inputs.q_lens, strict=True)):
        for i in range(q_len):
            seen = kv_len - q_len + i + 1 if case.causal else kv_len
            found.append((request, max(seen, 0)))
    return found


def shard_state(inputs: ContextInputs, rank: int) -> tuple[Tensor, Tensor]:
    """Return out and lse over the tokens of one rank, with all heads, by a planner alone."""
    case, device = inputs.case, inputs.device
    planner = planner_of(case, page_table="shared", device=device)
    block, page = case.interleave * case.page_size, case.page_size

    def own(seen: int) -> int:
        return sum(t // block % case.num_ranks == rank for t in range(seen))

    def place(number: int) -> int:
        group = case.num_ranks * case.interleave
        return number // group * case.interleave + number % case.interleave

    rows = [
        [
            place(number)
            for j, number in enumerate(inputs.pages[request])
            if j * page // block % case.num_ranks == rank
        ]
        for request, _ in query_tokens(inputs)
    ]
    width = max((len(row) for row in rows), default=0) + 1
    ids = [row + [-1] * (width - len(row)) for row in rows]
    table = torch.tensor(ids, dtype=torch.int32, device=device).view(len(rows), width)
    counts = [own(seen) for _, seen in query_tokens(inputs)]
    lens = torch.tensor(counts, dtype=torch.int32, device=device)
    plan = planner.plan(jitattn.BlockTable(table), lens)
    qs = [q[: len(rows)] for q in inputs.qs]
    found = plan.run(*qs, inputs.bound(planner, rank), return_lse=True)  # type: ignore
    assert isinstance(found, tuple)
    return found


def merged_in_order(inputs: ContextInputs) -> tuple[Tensor, Tensor]:
    """Return what ``merge_states`` makes of the shards, in the order of ranks, with all heads."""
    case = inputs.case
    states = [shard_state(inputs, rank) for rank in range(case.num_ranks)]
    if case.has_sinks:
        out, lse = states[0]
        states.append((torch.zeros_like(out), inputs.sinks.expand_as(lse)))
    outs, lses = (torch.stack(parts) for parts in zip(*states, strict=True))
    out, lse = jitattn.merge_states(outs, lses)
    padding = inputs.qs[0].shape[0] - out.shape[0]
    zeros = out.new_zeros(padding, *out.shape[1:])
    nothing = lse.new_full((padding, lse.shape[1]), -math.inf)
    return torch.cat((out, zeros)), torch.cat((lse, nothing))


def whole(inputs: ContextInputs) -> tuple[Tensor, Tensor]:
    """Return out and lse over all tokens, float64."""
    case = inputs.case
    outs, lses, row = [], [], 0
    for tokens, q_len in zip(inputs.tokens, inputs.q_lens, strict=True):
        qs = [q[row : row + q_len].cpu() for q in inputs.qs]
        k, v = (part.double() for part in tokens)
        if case.kv_dtype != "bfloat16":
            k, v = k * SCALE, v * (SCALE if case.is_mla else 2 * SCALE)
        if case.is_mla:
            out, lse = latent_attention(
                *qs, k.squeeze(1), v.squeeze(1), causal=case.causal, sm_scale=0.05
            )
        else:
            out, lse = attention(
                qs[0], k, v, [0, q_len], [0, k.shape[0]],
                causal=case.causal, window_left=-1, logits_soft_cap=case.soft_cap,
                sm_scale=32**-0.5, sinks=inputs.sinks.cpu() if case.has_sinks else None,
            )  # fmt: skip
        outs.append(out)
        lses.append(lse)
        row += q_len
    return torch.cat(outs), torch.cat(lses)


# --- on cards


def card_cases(num_ranks: int) -> list[ContextCase]:
    """Return batches of pages of 16 tokens, of attention and of latent attention."""
    common = {"num_ranks": num_ranks, "page_size": 16, "batch_invariant": True}
    return [
        ContextCase(**common | changes)  # type: ignore[arg-type]
        for is_mla in (False, True)
        for dtype in ("bfloat16", "float8_e4m3fn")
        for changes in (
            {"seq_lens": (700, 1, 0, 33), "is_mla": is_mla, "kv_dtype": dtype},
            {
                "seq_lens": (700, 5, 90),
                "q_lens": (4, 2, 3),
                "is_mla": is_mla,
                "kv_dtype": dtype,
                "has_sinks": not is_mla,
            },
        )
    ]


def gpu_configs() -> list[PlannerConfig | MLAConfig]:
    """What tests/gpu/test_parallel.py asks for."""
    return [planner_of(case).config for case in card_cases(2)]


def replay_case(rank: int, case: ContextCase, num_replays: int) -> int:
    """Replay a captured step with other lengths each time; return how often bits were eager's."""
    torch.cuda.set_device(rank)
    device = f"cuda:{rank}"
    inputs = ContextInputs(case, device)
    cp, planner = ContextParallel(page_size=case.page_size), planner_of(case, device=device)
    pages, lens = cp.local_table(inputs.table(inputs.pages)), inputs.seq_lens
    qs = [inputs.heads_of(q, rank).contiguous() for q in inputs.qs]
    kv = inputs.bound(planner, rank)
    plan = cp.plan(planner, pages, lens)  # type: ignore

    def step() -> tuple[Tensor, Tensor]:
        plan.refresh()
        return plan.run(*qs, kv, return_lse=True)  # type: ignore

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    num_same = 0
    for i in range(num_replays):
        lens.copy_(inputs.seq_lens - i % 40)
        graph.replay()
        replayed = out.clone(), lse.clone()
        want = step()
        num_same += torch.equal(replayed[0], want[0]) and torch.equal(replayed[1], want[1])
    return num_same
