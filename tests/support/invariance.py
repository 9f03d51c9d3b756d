"""Batch invariance across kernels: a token's bits, however its request is cut into calls.

A request of ``num_tokens`` is computed in pieces [begin, end): a decode step is a piece of one
token, verified tokens are one of a few, a prefill is one of many. Each piece stands among others in
a batch, with pages of its own, and its rows have the bits of one prefill of all rows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

import jitattn
from jitattn.kernels.registry import config_of
from jitattn.spec.config import MLAConfig, PlannerConfig
from tests.support.harness import same_bits

Piece = tuple[int, int]
Result = tuple[Tensor, Tensor]


def random_pieces(rng: random.Random, first: int, end: int) -> list[Piece]:
    """Pieces of rows [first, end): single tokens, a few, and chunks, some of them twice."""
    pieces = []
    while first < end:
        size = rng.choice((1, 1, 2, 3, 4, 8, 16, 17, rng.randint(1, 300)))
        pieces.append((first, min(first + size, end)))
        first += size
    return [*pieces, *rng.choices(pieces, k=2)]


@dataclass(frozen=True)
class Request:
    """A request whose rows are computed in pieces."""

    planner: jitattn.AttentionPlanner | jitattn.MLAPlanner
    queries: tuple[Tensor, ...]
    """Of all tokens: q, or q_nope and q_pe."""
    stored: tuple[Tensor, ...]
    """[num_tokens, ...] of what pages hold: K and V, or latents with their rope part."""
    page_size: int

    def run(self, pieces: Sequence[Piece], rng: random.Random) -> list[Result]:
        """Compute the pieces as requests of one batch; rows of out and lse of each."""
        device, page_size = self.queries[0].device, self.page_size
        lengths = [end for _, end in pieces]
        counts = [-(-length // page_size) for length in lengths]
        num_pages = sum(counts) + 3
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        order = torch.randperm(num_pages, generator=generator)[: sum(counts)].int()
        table = torch.full((len(pieces), max(counts)), -7, dtype=torch.int32, device=device)
        cache = [
            torch.empty(num_pages * page_size, *rows.shape[1:], dtype=rows.dtype, device=device)
            for rows in self.stored
        ]
        for slots in cache:
            slots.fill_(float("nan"))
        for request, own in enumerate(order.to(device).split(counts)):
            table[request, : len(own)] = own
            token = torch.arange(lengths[request], device=device)
            place = own[token // page_size] * page_size + token % page_size
            for slots, rows in zip(cache, self.stored, strict=True):
                slots.view(torch.uint8)[place] = rows[: lengths[request]].view(torch.uint8)
        cache = [slots.unflatten(0, (num_pages, page_size)) for slots in cache]
        sizes = [end - begin for begin, end in pieces]
        offsets = torch.tensor([0, *sizes]).cumsum(0).int().to(device)
        is_decode = max(sizes) == min(sizes) == 1 and rng.random() < 0.5
        plan = self.planner.plan(
            jitattn.BlockTable(table),
            torch.tensor(lengths, dtype=torch.int32, device=device),
            *(() if is_decode else (offsets,)),
            **({} if is_decode else {"max_q_len": max(sizes) + rng.choice((0, 1, 100))}),
        )
        queries = [torch.cat([q[begin:end] for begin, end in pieces]) for q in self.queries]
        kv = cache[0] if len(cache) == 1 else tuple(cache)
        out, lse = plan.run(*queries, kv, return_lse=True)
        return list(zip(out.split(sizes), lse.split(sizes), strict=True))

    def by_definition(self) -> Request:
        """The same request of the reference backend."""
        config = self.planner.config
        arguments = {field.name: getattr(config, field.name) for field in fields(config)}
        planner = type(self.planner)(**arguments, device="cpu", backend="reference")
        queries, stored = (
            tuple(x.cpu() for x in tensors) for tensors in (self.queries, self.stored)
        )
        return Request(planner, queries, stored, self.page_size)

    def check(self, first: int, rng: random.Random, *, rounds: int) -> int:
        """Assert that rows [first, num_tokens) have the same bits in any pieces; count these."""
        num_tokens, count = len(self.queries[0]), 0
        ((out, lse),) = self.run([(first, num_tokens)], rng)
        ((last, last_lse),) = self.by_definition().run([(num_tokens - 1, num_tokens)], rng)
        torch.testing.assert_close(out[-1:].cpu().float(), last.float(), atol=0.02, rtol=0.02)
        torch.testing.assert_close(lse[-1:].cpu(), last_lse, atol=2e-3, rtol=0.0)
        for _ in range(rounds):
            pieces = random_pieces(rng, first, num_tokens)
            rng.shuffle(pieces)
            size = rng.choice((1, 3, len(pieces)))
            for at in range(0, len(pieces), size):
                batch = pieces[at : at + size]
                for (begin, end), got in zip(batch, self.run(batch, rng), strict=True):
                    rows = slice(begin - first, end - first)
                    assert same_bits(got[0], out[rows]), (begin, end)
                    assert same_bits(got[1], lse[rows]), (begin, end)
            count += len(pieces)
        return count


@dataclass(frozen=True)
class Examples:
    """Random requests that are the first tokens of one long sequence.

    An example is a request of some length, of which the last rows are queries, computed whole and
    alone. Of it, bit for bit: any of its rows is the same in a decode step among others, its rows
    are the same in chunks, and the whole is the same beside other requests.
    """

    request: Request
    most_rows: int = 300

    def check(self, seed: int) -> None:
        """Assert the three of the request of a seed."""
        rng, longest = random.Random(seed), len(self.request.queries[0])
        end = rng.choice((rng.randint(1, 300), rng.randint(1, 5000), rng.randint(1, longest)))
        end = min(end, longest)
        first = end - rng.randint(1, min(end, rng.choice((4, 40, self.most_rows))))
        (whole,) = self.request.run([(first, end)], rng)
        steps = [(row, row + 1) for row in rng.choices(range(first, end), k=rng.randint(1, 4))]
        chunks = random_pieces(rng, first, end)
        beside = [(first, end), *self._others(rng)]
        rng.shuffle(beside)
        for kind, pieces in (
            ("decode steps", [*steps, *self._others(rng, most_rows=1)]),
            ("chunks", chunks if rng.random() < 0.5 else chunks[: rng.randint(1, len(chunks))]),
            ("among others", beside),
        ):
            for piece, got in zip(pieces, self.request.run(pieces, rng), strict=True):
                if not first <= piece[0] < piece[1] <= end:
                    continue
                rows = slice(piece[0] - first, piece[1] - first)
                same = all(same_bits(a, b[rows]) for a, b in zip(got, whole, strict=True))
                assert same, f"{kind}: rows {piece} of {(first, end)} in a batch of {pieces}"

    def _others(self, rng: random.Random, most_rows: int = 40) -> list[Piece]:
        found = []
        for _ in range(rng.randint(0, 6)):
            end = rng.randint(1, min(4000, len(self.request.queries[0])))
            found.append((end - rng.randint(1, min(end, most_rows)), end))
        return found


def attention_sequence(
    planner: jitattn.AttentionPlanner, num_tokens: int, seed: int, device: torch.device | str
) -> Request:
    """A request of attention with normal values."""
    config, rng = planner.config, torch.Generator(device).manual_seed(seed)

    def normal(heads: int, dim: int, dtype: str) -> Tensor:
        values = torch.randn(num_tokens, heads, dim, generator=rng, device=device)
        return values.to(getattr(torch, dtype))

    head_dim_vo = config.head_dim_vo or config.head_dim
    return Request(
        planner,
        (normal(config.num_qo_heads, config.head_dim, config.q_dtype),),
        (
            normal(config.num_kv_heads, config.head_dim, config.kv_dtype),
            normal(config.num_kv_heads, head_dim_vo, config.kv_dtype),
        ),
        config.page_size or 1,
    )


def latent_sequence(
    planner: jitattn.MLAPlanner, num_tokens: int, seed: int, device: torch.device | str
) -> Request:
    """A request of latent attention with normal values."""
    config, rng = planner.config, torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: str = config.q_dtype) -> Tensor:
        values = torch.randn(num_tokens, *shape, generator=rng, device=device)
        return values.to(getattr(torch, dtype))

    return Request(
        planner,
        (
            normal(config.num_heads, config.kv_lora_rank),
            normal(config.num_heads, config.qk_rope_head_dim),
        ),
        (normal(config.kv_lora_rank + config.qk_rope_head_dim, dtype=config.kv_dtype),),
        config.page_size or 1,
    )


ATTENTION: dict[str, dict[str, object]] = {
    "32/8 heads of 128": {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128},
    "8/1 heads of 128": {"num_qo_heads": 8, "num_kv_heads": 1, "head_dim": 128, "page_size": 1},
    "64": {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 32},
    "96": {"num_qo_heads": 6, "num_kv_heads": 2, "head_dim": 96},
    "256": {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 256},
    "192 and 128": {"num_qo_heads": 4, "num_kv_heads": 4, "head_dim": 192, "head_dim_vo": 128},
    "window": {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 128, "window_left": 3000},
    "soft cap": {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 128, "logits_soft_cap": 30.0},
    "e4m3": {
        "num_qo_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 128,
        "kv_dtype": "float8_e4m3fn",
    },
    "512": {"num_qo_heads": 2, "num_kv_heads": 1, "head_dim": 512},
}
"""Arguments of planners, for a card."""
LATENT: dict[str, dict[str, object]] = {
    "latents, 16 heads": {"num_heads": 16, "page_size": 64, "sm_scale": 0.05},
    "latents, 128 heads": {"num_heads": 128, "page_size": 16, "sm_scale": 0.05},
}
"""Likewise of latent attention."""


def attention_arguments(name: str) -> dict[str, object]:
    """Arguments of a planner of attention."""
    return {"page_size": 16, "batch_invariant": True, **ATTENTION[name]}


def latent_arguments(name: str) -> dict[str, object]:
    """Likewise of latent attention."""
    return {"batch_invariant": True, **LATENT[name]}


def gpu_configs() -> list[PlannerConfig | MLAConfig]:
    """What tests/gpu/test_invariance.py asks for, for a bundle."""
    return [
        *(config_of(attention_arguments(name)) for name in ATTENTION),
        *(MLAConfig.from_arguments(latent_arguments(name)) for name in LATENT),
    ]
