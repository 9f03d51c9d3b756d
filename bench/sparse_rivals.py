"""Rivals over lists: FlashMLA's kernels for them, and others whose pages have one token.

All of them read the same cache and the same lists; queries that a rival wants as one tensor, or
with more heads, are laid out before the clock starts.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from bench import flashmla, mla_contenders
from bench.contenders import Prepared, SkipError
from bench.mla_cases import LATENT_DIM, ROPE_DIM, SM_SCALE
from bench.rivals import ON_HOST, Fa3Step, flashinfer, load_fa3, workspace
from bench.sparse_cases import Batch, Case
from bench.timing import Call
from bench.turns import Competitor

_LATENT_ALONE = "it is for latent attention alone"


def all_sparse_rivals() -> tuple[Competitor[Batch], ...]:
    """Return every rival, here or not."""
    return FlashMLADecode(), FlashMLAPrefill(), FlashInferLists(), FlashAttention3Lists()


class FlashMLADecode:
    """FlashMLA's decode by lists over rows of 656 bytes."""

    name = "flashmla-decode"

    def version(self) -> str:
        """Return vLLM's version, or the library's digest where only the library is here."""
        return flashmla.load_flashmla()

    def prepare(self, batch: Batch, /) -> Prepared:
        """Pad queries to the heads of its kernels; the first run of a step makes the schedule."""
        case = batch.case
        _refuse_unless_latent(case, "rows", "its lists for decode are of rows of 656 bytes")
        _refuse_length(case, "decode")
        heads = flashmla.padded_heads(case.num_heads)
        q = flashmla.joined(*batch.queries, heads)
        outs = batch.new_outs(heads)
        schedule = flashmla.Schedule()
        runs = tuple(
            functools.partial(flashmla.sparse_decode, q, batch.kv, lists.slots, out, schedule)
            for lists, out in zip(batch.lists, outs, strict=True)
        )
        facts = {"planned": flashmla.BY_RUN, "padded_heads": heads}
        outs = outs[:, :, : case.num_heads]
        return Prepared(runs, outs, schedule.forget, facts, plan_is_a_call=False)


class FlashMLAPrefill:
    """FlashMLA's prefill by lists over 16-bit latents, which vLLM's decode over those is, too."""

    name = "flashmla-prefill"

    def version(self) -> str:
        """Return vLLM's version, or the library's digest where only the library is here."""
        return flashmla.load_flashmla()

    def prepare(self, batch: Batch, /) -> Prepared:
        """Pad queries to the heads of its kernels."""
        case = batch.case
        _refuse_unless_latent(case, "bf16", "its prefill has 16-bit latents")
        _refuse_length(case, "prefill")
        heads = flashmla.padded_heads(case.num_heads)
        q = flashmla.joined(*batch.queries, heads)
        tokens, outs = batch.kv.flatten(0, 1), batch.new_outs(heads)
        runs = tuple(
            functools.partial(flashmla.sparse_prefill, q, tokens, lists.slots, out)
            for lists, out in zip(batch.lists, outs, strict=True)
        )
        facts = {"planned": "nothing to plan", "padded_heads": heads}
        return Prepared(runs=runs, outs=outs[:, :, : case.num_heads], facts=facts)


class FlashInferLists:
    """FlashInfer's latent attention, its FlashAttention-3 template, over pages of one token."""

    name = "flashinfer-fa3"

    def version(self) -> str:
        """Return FlashInfer's version."""
        return str(flashinfer().__version__)

    def prepare(self, batch: Batch, /) -> Prepared:
        """Plan for each copy's lists, over copies of latents and of rope parts."""
        case, device = batch.case, batch.kv.device
        _refuse_unless_latent(
            case, "bf16", "FlashInfer's FP8 latents on this card have FP8 rope parts beside them"
        )
        tokens = batch.kv.flatten(0, 1).unsqueeze(1)
        pools = tokens[..., :LATENT_DIM].contiguous(), tokens[..., LATENT_DIM:].contiguous()
        outs = batch.new_outs()
        starts = torch.arange(case.batch_size + 1, dtype=torch.int32, device=device)
        runs: list[Call] = []
        for lists, out in zip(batch.lists, outs, strict=True):
            wrapper = mla_contenders.planned_wrapper(
                "fa3",
                workspace(self.name, device),
                qo_indptr=starts,
                kv_indptr=starts * case.k,
                kv_indices=lists.slots.flatten(),
                kv_lens=_lengths(batch),
                num_heads=case.num_heads,
                page_size=1,
                causal=False,
                q_dtype=batch.queries[0].dtype,
                kv_dtype=batch.kv.dtype,
            )
            runs.append(
                functools.partial(wrapper.run, query=batch.queries, kv_cache=pools, out=out)
            )
        return Prepared(runs=tuple(runs), outs=outs, facts={"planned": ON_HOST})


class FlashAttention3Lists:
    """FlashAttention-3, vLLM's build, over pages of one token; latents are values and keys."""

    name = "fa3"

    def version(self) -> str:
        """Return vLLM's version, or the library's digest where only the library is here."""
        return load_fa3()

    def prepare(self, batch: Batch, /) -> Prepared:
        """Plan with its scheduler kernel once a step."""
        case, device = batch.case, batch.kv.device
        step = Fa3Step(
            q_dtype=batch.queries[0].dtype,
            num_qo_heads=case.num_heads,
            num_kv_heads=1 if case.kind == "latent" else case.num_kv_heads,
            head_dim=batch.queries[-1].shape[-1],
            head_dim_v=batch.queries[0].shape[-1],
            sm_scale=SM_SCALE if case.kind == "latent" else None,
            max_q_len=1,
            max_kv_len=case.k,
            qo_indptr=torch.arange(case.batch_size + 1, dtype=torch.int32, device=device),
            seq_lens=_lengths(batch),
            page_size=1,
        )
        k, v, tables = _pages_of_one_token(batch)
        q_v = batch.queries[0] if case.kind == "latent" else None
        outs = batch.new_outs()
        metadata: list[Tensor] = []

        def plan() -> None:
            metadata[:] = [step.schedule()]

        def run(table: Tensor, out: Tensor) -> Call:
            of_copy = dataclasses.replace(step, block_table=table)
            return lambda: of_copy.forward(batch.queries[-1], k, v, out, None, metadata[0], q_v)

        plan()
        runs = tuple(run(table, out) for table, out in zip(tables, outs, strict=True))
        return Prepared(runs=runs, outs=outs, plan=plan, facts={"planned": "on the device"})


def _pages_of_one_token(batch: Batch) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return keys and values [num_pages, 1, num_kv_heads, ..], views, and a table for each copy."""
    case = batch.case
    if case.kind == "pages":
        raise SkipError("a table of FlashAttention-3 serves all KV heads")
    slots = [lists.slots for lists in batch.lists]
    if case.kind == "latent":
        _refuse_unless_latent(case, "bf16", "FlashAttention-3 wants q and cache of one dtype")
        tokens = batch.kv.flatten(0, 1)
        latents, ropes = tokens[:, :LATENT_DIM], tokens[:, LATENT_DIM:]
        return ropes.view(-1, 1, 1, ROPE_DIM), latents.view(-1, 1, 1, LATENT_DIM), slots
    # Keys of a page precede its values: as rows of tokens both have the same numbers, values from
    # one page later on.
    size = case.page_size
    rows = batch.kv.flatten(0, 2).unsqueeze(1)
    tables = [(ids // size) * (2 * size) + ids % size for ids in slots]
    return rows[:-size], rows[size:], tables


def _lengths(batch: Batch) -> Tensor:
    """Return the length of each list, [batch_size] int32."""
    return torch.full_like(batch.seq_lens, batch.case.k)


def _refuse_unless_latent(case: Case, form: str, reason: str) -> None:
    """Raise SkipError but for latent attention over a cache of ``form``."""
    if case.kind != "latent":
        raise SkipError(_LATENT_ALONE)
    if case.form != form:
        raise SkipError(reason)


def _refuse_length(case: Case, kernel: str) -> None:
    if case.k % flashmla.LISTED_AT_ONCE[kernel]:
        raise SkipError(f"its lists are multiples of {flashmla.LISTED_AT_ONCE[kernel]} tokens")
