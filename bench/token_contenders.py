"""Who takes tokens into a cache for bench_preprocess.py, and whether what they wrote is right."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

import jitattn
from bench.contenders import SkipError
from bench.timing import Call
from bench.token_workloads import (
    HEAD_DIM,
    NUM_KV_HEADS,
    NUM_QO_HEADS,
    PAGE_SIZE,
    WORKLOADS,
    TokenBatch,
    make_token_batch,
    smaller,
)
from bench.turns import WrongError

BASE = 500000.0
NUM_CHECKED = 64
"""Tokens of a batch that are compared with the definition."""

Run = Callable[[int], object]
"""Runs on one of the copies of a batch."""


class TokenContender(Protocol):
    """Takes tokens in."""

    name: str
    modules: tuple[str, ...]
    """What it compiles at its first calls."""

    def prepare(self, batch: TokenBatch) -> Run:
        """Return what is timed, or raise SkipError."""

    def q_of(self, batch: TokenBatch, copy: int) -> Tensor | None:
        """Return where it leaves q, [num_tokens, num_qo_heads, head_dim]; None: nowhere."""


class JitAttnTokens:
    """One launch."""

    name = "jitattn"
    modules: tuple[str, ...] = ()

    def prepare(self, batch: TokenBatch) -> Run:
        pages = jitattn.BlockTable(batch.table)
        rope = jitattn.Rope(HEAD_DIM, base=BASE)
        places: dict[str, Any] = {
            "pages": pages,
            "seq_lens": batch.seq_lens,
            "qo_indptr": batch.qo_indptr,
            "k_scale": batch.k_scale,
            "v_scale": batch.v_scale,
        }

        def preprocess(copy: int) -> object:
            return jitattn.preprocess_qkv(
                batch.qkv[copy],
                batch.cache(copy),
                num_qo_heads=NUM_QO_HEADS,
                num_kv_heads=NUM_KV_HEADS,
                head_dim=HEAD_DIM,
                rope=rope,
                q_out=batch.q_out[copy],
                **places,
            )

        def append(copy: int) -> None:
            _, k, v = batch.heads(copy)
            jitattn.append_kv(k, v, batch.cache(copy), **places)

        return preprocess if batch.row.op == "preprocess" else append

    def q_of(self, batch: TokenBatch, copy: int) -> Tensor | None:
        return batch.q_out[copy]


class Copy:
    """A device-to-device copy that reads and writes as many bytes together."""

    name = "copy"
    modules: tuple[str, ...] = ()

    def prepare(self, batch: TokenBatch) -> Run:
        size = batch.row.num_bytes // 2
        device = batch.table.device
        pairs = [torch.zeros((2, size), dtype=torch.uint8, device=device) for _ in batch.qkv]
        return lambda copy: pairs[copy][1].copy_(pairs[copy][0])

    def q_of(self, batch: TokenBatch, copy: int) -> Tensor | None:
        return None


class FlashInferTokens:
    """Rotary embedding in place, a quantisation where the cache has 8 bits, then the append."""

    name = "flashinfer"
    modules: tuple[str, ...] = ("page", "rope")

    def prepare(self, batch: TokenBatch) -> Run:
        calls = self.calls(batch)
        append, rotate = calls["page"], calls["rope"]

        def preprocess(copy: int) -> object:
            rotate(copy)
            return append(copy)

        return preprocess if batch.row.op == "preprocess" else append

    def q_of(self, batch: TokenBatch, copy: int) -> Tensor | None:
        return batch.heads(copy)[0]

    def calls(self, batch: TokenBatch) -> dict[str, Run]:
        """Return the calls, by the module that each compiles, or raise SkipError."""
        try:
            flashinfer = importlib.import_module("flashinfer")
        except Exception as error:
            raise SkipError(f"cannot be imported: {error}") from error
        row, device = batch.row, batch.table.device
        requests = batch.requests.int()
        width = batch.table.shape[1]
        indptr = torch.arange(row.batch_size + 1, device=device).int() * width
        indices = batch.table.flatten().contiguous()
        last = torch.full((row.batch_size,), PAGE_SIZE, dtype=torch.int32, device=device)
        dtype = batch.caches[0][0].dtype

        def append(copy: int) -> object:
            _, k, v = batch.heads(copy)
            if batch.k_scale is not None and batch.v_scale is not None:
                k, v = (k / batch.k_scale).to(dtype), (v / batch.v_scale).to(dtype)
            places = (requests, batch.positions, batch.cache(copy), indices, indptr, last)
            return flashinfer.append_paged_kv_cache(k, v, *places, kv_layout="NHD")

        def rotate(copy: int) -> object:
            q, k, _ = batch.heads(copy)
            return flashinfer.apply_rope_pos_ids_inplace(
                q, k, batch.positions, interleave=False, rope_theta=BASE
            )

        return {"page": append, "rope": rotate}


def all_token_contenders() -> list[TokenContender]:
    """Return all that take tokens in; those that compile come last."""
    return [JitAttnTokens(), Copy(), FlashInferTokens()]


def build_module(module: str, device: torch.device) -> None:
    """Have FlashInfer compile a module, by a small call of it."""
    row = next(row for row in WORKLOADS if row.op == "preprocess")
    FlashInferTokens().calls(make_token_batch(smaller(row), 1, device))[module](0)


class Check:
    """What a contender writes, beside the definition and beside what its graph writes.

    Tokens of a batch are put back as they were at first, since a contender may rotate them in
    place, and what it writes is written over NaN.
    """

    def __init__(self, contender: TokenContender, batch: TokenBatch) -> None:
        """Remember the tokens of the first and of the last copy."""
        self.contender, self.batch = contender, batch
        self.copies = sorted({0, batch.copies - 1})
        self.fresh = [batch.qkv[copy].clone() for copy in self.copies]
        step = max(1, batch.row.num_tokens // NUM_CHECKED)
        self.tokens = torch.arange(0, batch.row.num_tokens, step, device=batch.table.device)

    def restore(self) -> None:
        """Put the tokens back, and NaN where they go."""
        for copy, fresh in zip(self.copies, self.fresh, strict=True):
            self.batch.qkv[copy].copy_(fresh)
            self.batch.q_out[copy].fill_(float("nan"))
            for side in self.batch.cache(copy):
                side.view(torch.uint8).fill_(0xFF)  # NaN in bfloat16 and in e4m3

    def outputs(self, copy: int) -> list[Tensor]:
        """Return what is written of the checked tokens: q where it is rotated, K and V."""
        page, place = self.batch.slots(self.tokens)
        sides = [side.view(torch.uint8)[page, place] for side in self.batch.cache(copy)]
        dtype = self.batch.cache(copy)[0].dtype
        found = [side.view(dtype) for side in sides]
        q = self.contender.q_of(self.batch, copy)
        if q is None or self.batch.row.op != "preprocess":
            return found
        return [q[self.tokens], *found]

    def eager(self, run: Run) -> None:
        """Raise WrongError unless a call writes what the definition says."""
        if self.contender.q_of(self.batch, 0) is None:
            return
        for copy, fresh in zip(self.copies, self.fresh, strict=True):
            self.restore()
            run(copy)
            compare(self.outputs(copy), define(self.batch, fresh, self.tokens))
        self.restore()

    def graph(self, replay: Call, runs: Sequence[Call], num_runs: int) -> None:
        """Raise WrongError unless a replay writes the bits of the calls that it captured."""
        self.restore()
        for i in range(num_runs):
            runs[i % len(runs)]()
        want = [self.outputs(copy) for copy in self.copies]
        self.restore()
        replay()
        for copy, of_copy in zip(self.copies, want, strict=True):
            for a, b in zip(self.outputs(copy), of_copy, strict=True):
                if not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
                    raise WrongError("a replay writes other bits than the calls that it captured")
        self.restore()


def define(batch: TokenBatch, qkv: Tensor, tokens: Tensor) -> list[Tensor]:
    """Return q where it is rotated, K and V of some tokens, as jitattn's definition has them.

    It is computed on the CPU, into pages of its own: nothing of a table takes part.
    """
    num_pages = -(-len(tokens) // PAGE_SIZE)
    dtype = batch.caches[0][0].dtype
    shape = num_pages, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM
    k, v = (torch.zeros(shape, dtype=torch.float32).to(dtype) for _ in range(2))
    is_rotated = batch.row.op == "preprocess"
    q = jitattn.preprocess_qkv(
        qkv[tokens].cpu(),
        (k, v),
        num_qo_heads=NUM_QO_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        slots=torch.arange(len(tokens)),
        rope=jitattn.Rope(HEAD_DIM, base=BASE) if is_rotated else None,
        positions=batch.positions[tokens].cpu() if is_rotated else None,
        k_scale=batch.k_scale,
        v_scale=batch.v_scale,
    )
    sides = [side.flatten(0, 1)[: len(tokens)] for side in (k, v)]
    return [q.view(len(tokens), NUM_QO_HEADS, HEAD_DIM), *sides] if is_rotated else sides


def compare(found: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    """Raise WrongError where some value is more than two steps of e4m3 from what is wanted."""
    for a, b in zip(found, want, strict=True):
        one, other = a.float().cpu(), b.float().cpu()
        if not bool(((one - other).abs() <= 0.05 + 0.13 * other.abs()).all()):
            raise WrongError(f"values differ by {float((one - other).abs().max())}")


def calls_of(batch: TokenBatch, run: Run) -> list[Call]:
    """Return a call for every copy."""
    return [functools.partial(run, copy) for copy in range(batch.copies)]
