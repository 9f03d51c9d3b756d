"""What ranks do in tests: plan and run, and not agree, refuse, leave or be late."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import time
from dataclasses import replace
from datetime import timedelta

import torch
from torch import Tensor

import jitattn
from jitattn.errors import ParallelError
from jitattn.parallel import ContextParallel, ContextPlan
from tests.support.contexts import ContextCase, ContextInputs, planner_of

CASE = ContextCase(num_ranks=3, seq_lens=(30, 5), heads=6)


def plan_of(
    changes: dict[str, object], *, case: ContextCase = CASE, **planner: object
) -> tuple[ContextPlan, ContextInputs]:
    """Plan the case; ``changes`` are of ContextParallel, others of the planner."""
    inputs = ContextInputs(case)
    cp = ContextParallel(**{"page_size": case.page_size} | changes)  # type: ignore[arg-type]
    pages = cp.local_table(inputs.table(inputs.pages))
    plan = cp.plan(planner_of(case, **planner), pages, inputs.seq_lens)  # type: ignore
    return plan, inputs


def plan_with(rank: int, odd: dict[str, dict[str, object]]) -> list[str]:
    """Plan several times, each time with one argument that rank 1 has otherwise.

    Returns the error of each plan.
    """
    told = []
    for changes in odd.values():
        own = changes if rank == 1 else {}
        context = {k: v for k, v in own.items() if k in ("interleave", "page_size")}
        planner = {k: v for k, v in own.items() if k not in context and k != "seq_lens"}
        case = replace(CASE, seq_lens=own["seq_lens"]) if "seq_lens" in own else CASE
        if "page_size" in context:
            case = replace(case, page_size=context["page_size"])
        try:
            plan_of(context, case=case, **planner)
            told.append("no error")
        except jitattn.ConfigError as error:
            told.append(f"ConfigError: {error}")
    return told


def plan_where_one_refuses(rank: int) -> list[str]:
    """Rank 2 gives no table, then a planner with a window; the third plan is everyone's."""
    inputs, told = ContextInputs(CASE), []
    cp = ContextParallel(page_size=CASE.page_size)
    pages = cp.local_table(inputs.table(inputs.pages))
    for given, window in ((None, -1), (pages, 4), (pages, -1)):
        is_odd = rank == 2
        planner = planner_of(CASE, window_left=window if is_odd else -1)
        try:
            cp.plan(planner, given if is_odd else pages, inputs.seq_lens)  # type: ignore
            told.append("no error")
        except (TypeError, ValueError, ParallelError) as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def run_then(rank: int, what: str) -> list[str]:
    """Run a layer; then rank 1 leaves, is late or gives a wrong q, and others go on."""
    plan, inputs = plan_of({})
    q, kv = inputs.heads_of(inputs.qs[0], rank), inputs.bound(planner_of(CASE), rank)
    plan.run(q, kv)  # type: ignore[arg-type]
    if rank == 1 and what == "leaves":
        os._exit(3)
    if rank == 1 and what == "is late":
        time.sleep(3)
    told = []
    for _ in range(2):
        begun = time.monotonic()
        try:
            plan.run(q[:, :1] if rank == 1 and what == "has another q" else q, kv)  # type: ignore
            told.append("no error")
        except (ValueError, ParallelError) as error:
            told.append(f"{type(error).__name__}: {error}")
        told.append(f"{time.monotonic() - begun:.1f}")
    return told


def local_parts(rank: int) -> dict[str, object]:
    """Return what this rank keeps of lengths, slots and tables, and which errors it gives."""
    cp = ContextParallel(page_size=4, interleave=2)
    lens, slots = torch.tensor([0, 1, 17, 40]), torch.tensor([-1, 0, 9, 17, 31], dtype=torch.int32)
    table = torch.arange(10, dtype=torch.int32)[None]
    found: dict[str, object] = {
        "lens": cp.local_lens(lens).tolist(),
        "slots": cp.local_slots(slots).tolist(),
        "rows": cp.local_slots(torch.arange(20)[None]).tolist(),
        "table": cp.local_table(table).tolist(),
        "pages": cp.local_table(jitattn.BlockTable(table)).tensors[0].tolist(),
        "round": cp.round_len,
        "shown": repr(cp),
    }
    for name, wrong in (
        ("local_lens", lens.float()),
        ("local_slots", lens.float()),
        ("local_table", jitattn.RaggedKV(torch.zeros(2, dtype=torch.int32))),
        ("local_table", [3]),
    ):
        try:
            getattr(cp, name)(wrong)
        except (TypeError, ValueError) as error:
            found[f"{name} {len(found)}"] = str(error)
    return found


def constructed(rank: int) -> list[str]:
    """Return the errors of constructors and plans that no group can have."""
    del rank
    cp, told = ContextParallel(page_size=4), []
    inputs = ContextInputs(CASE)
    pages = cp.local_table(inputs.table(inputs.pages))
    offsets = torch.tensor([0, 17, 18], dtype=torch.int32)
    flat = jitattn.CsrPages(torch.tensor([0, 1, 2], dtype=torch.int32), pages.tensors[0].flatten())

    def plan(planner: object, table: object = pages, *arguments: object, **others: object) -> None:
        cp.plan(planner, table, inputs.seq_lens, *arguments, **others)  # type: ignore

    for call in (
        lambda: ContextParallel(interleave=0),
        lambda: ContextParallel(page_size="4"),  # type: ignore[arg-type]
        lambda: ContextParallel(timeout=timedelta(seconds=3)),
        lambda: ContextParallel(timeout=3),  # type: ignore[arg-type]
        lambda: plan("planner"),
        lambda: plan(planner_of(CASE, window_left=3)),
        lambda: plan(planner_of(CASE, use_sinks=True)),
        lambda: plan(planner_of(CASE, use_custom_mask=True)),
        lambda: plan(planner_of(CASE, variant="alibi")),
        lambda: plan(planner_of(CASE, page_size=16)),
        lambda: plan(planner_of(CASE, num_qo_heads=4)),
        lambda: plan(planner_of(CASE), pages, offsets, max_q_len=17),
        lambda: plan(planner_of(CASE), pages, offsets, max_q_len=9),
        lambda: plan(planner_of(CASE), pages, offsets),
        lambda: plan(planner_of(CASE, page_table="csr"), flat, offsets // 17, max_q_len=1),
        lambda: plan(planner_of(CASE), pages, max_kv_len=-1),
        lambda: plan(planner_of(CASE), pages, max_kv_len=8),
        lambda: plan(planner_of(CASE)),
    ):
        try:
            call()
            told.append("no error")
        except (TypeError, ValueError) as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def keep_bits(rank: int, repeats: int) -> list[tuple[Tensor, Tensor]]:
    """Run one layer again and again, with ranks that wait now and then."""
    plan, inputs = plan_of({})
    q, kv = inputs.heads_of(inputs.qs[0], rank), inputs.bound(planner_of(CASE), rank)
    found = []
    for i in range(repeats):
        time.sleep(0.02 * ((rank + i) % 3))
        found.append(plan.run(q, kv, return_lse=True))  # type: ignore[arg-type]
    return found  # type: ignore[return-value]


def attend_chunk(rank: int, case: ContextCase) -> tuple[Tensor, Tensor]:
    """Attend the last tokens of a prompt, as docs/parallel.md says: to earlier ones, to themselves.

    The case has two ranks, with one KV head for the query heads of each.
    """
    inputs = ContextInputs(case)
    cp = ContextParallel(page_size=case.page_size)
    planner = planner_of(case, causal=False)
    offsets = inputs.qo_indptr
    assert offsets is not None
    chunk, most = offsets.diff(), max(inputs.q_lens)
    pages = cp.local_table(inputs.table(inputs.pages))
    earlier = cp.plan(planner, pages, inputs.seq_lens - chunk, offsets, max_q_len=most)  # type: ignore
    q = inputs.heads_of(inputs.qs[0], rank)[: int(offsets[-1])]
    before = earlier.run(q, inputs.bound(planner, rank), return_lse=True)  # type: ignore
    new = [
        [part[-n:, rank : rank + 1] for part in parts]
        for parts, n in zip(inputs.tokens, inputs.q_lens, strict=True)
    ]
    k, v = (torch.cat(parts) for parts in zip(*new, strict=True))
    within = jitattn.AttentionPlanner(
        num_qo_heads=q.shape[1], num_kv_heads=1, head_dim=32, page_size=None, page_table="ragged",
        device="cpu",
    ).plan(jitattn.RaggedKV(offsets), chunk, offsets, max_q_len=most)  # fmt: skip
    own = within.run(q, (k, v), return_lse=True)
    outs, lses = (torch.stack(parts) for parts in zip(before, own, strict=True))
    return jitattn.merge_states(outs, lses)


def run_other_rows(rank: int) -> list[str]:
    """Rank 1 gives a row more than the others, then as many, of attention and latent attention."""
    told = []
    for is_mla in (False, True):
        case = replace(CASE, q_lens=(2, 1), is_mla=is_mla)
        inputs = ContextInputs(case)
        cp, planner = ContextParallel(page_size=case.page_size), planner_of(case)
        pages = cp.local_table(inputs.table(inputs.pages))
        plan = cp.plan(planner, pages, inputs.seq_lens, inputs.qo_indptr, max_q_len=2)  # type: ignore
        for extra in (1, 0):
            count = 4 + extra * (rank == 1)
            qs = [inputs.heads_of(q, rank)[:count] for q in inputs.qs]
            try:
                plan.run(*qs, inputs.bound(planner, rank))  # type: ignore[arg-type]
                told.append("no error")
            except jitattn.ConfigError as error:
                told.append(str(error))
    return told


def write_outputs(rank: int) -> dict[str, object]:
    """Write into given tensors, of other strides, and give some that don't fit."""
    plan, inputs = plan_of({})
    q, kv = inputs.heads_of(inputs.qs[0], rank), inputs.bound(planner_of(CASE), rank)
    want, want_lse = plan.run(q, kv, return_lse=True)  # type: ignore
    out = torch.zeros(2, 2, 64, dtype=torch.bfloat16)[..., :32]
    lse = torch.zeros(2, 2).T
    found: dict[str, object] = {
        "is the given": plan.run(q, kv, out=out, lse=lse) is out,  # type: ignore[arg-type]
        "is written": torch.equal(out, want) and torch.equal(lse, want_lse),
    }
    for name, others in {
        "out has shape": {"out": out[:1]},
        "out has dtype": {"out": out.float()},
        "lse has shape": {"lse": lse[:1]},
        "lse has strides": {"lse": torch.zeros(1).expand(2, 2)},
        "sinks has shape": {"sinks": torch.zeros(6)},
        "sinks is a list": {"sinks": [0.0, 0.0]},
        "return_lse is a": {"return_lse": 1},
        "q has dtype": {"q": q.float()},
    }.items():
        arguments = {"q": q, "kv": kv} | others
        try:
            plan.run(**arguments)  # type: ignore[arg-type]
            found[name] = "no error"
        except (TypeError, ValueError) as error:
            found[name] = str(error)
    return found


def plan_nothing(rank: int) -> list[list[int]]:
    """Return shapes of out and lse of a batch without requests."""
    del rank
    cp, planner = ContextParallel(page_size=4), planner_of(CASE)
    pages = jitattn.BlockTable(torch.zeros(0, 3, dtype=torch.int32))
    q, kv = torch.zeros(0, 2, 32, dtype=torch.bfloat16), torch.zeros(1, 2, 4, 2, 32).bfloat16()
    shapes = []
    for indptr, most in ((None, None), (torch.zeros(1, dtype=torch.int32), 3)):
        none = torch.zeros(0, dtype=torch.int32)
        plan = cp.plan(planner, cp.local_table(pages), none, indptr, max_q_len=most)  # type: ignore
        shapes += [list(part.shape) for part in plan.run(q, kv, return_lse=True)]
    return shapes


def refresh_and_replace(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Overwrite lengths and pages of a plan with draft tokens in place, and give another table."""
    case = replace(CASE, seq_lens=(30, 17), q_lens=(3, 2))
    inputs = ContextInputs(case)
    cp = ContextParallel(page_size=case.page_size)
    planner = planner_of(case)
    pages = cp.local_table(inputs.table(inputs.pages))
    first = inputs.seq_lens - 3
    indptr = inputs.qo_indptr
    assert indptr is not None
    indptr[1] = 1
    plan = cp.plan(planner, pages, first, indptr, max_q_len=4)  # type: ignore
    q, kv = inputs.heads_of(inputs.qs[0], rank), inputs.bound(planner, rank)
    before = plan.run(q, kv, return_lse=True)  # type: ignore[arg-type]
    first.copy_(inputs.seq_lens)
    indptr[1] = 3
    plan.refresh()
    after = plan.run(q, kv, return_lse=True)  # type: ignore[arg-type]
    other = jitattn.BlockTable(pages.table.clone())  # type: ignore[union-attr]
    again = plan.run(q, kv, pages=other, return_lse=True)  # type: ignore[arg-type]
    # Rows of a table are read by run: the plan's, overwritten, and another table's.
    rows = torch.zeros(2, dtype=torch.int32)
    turned = jitattn.BlockTable(pages.table.flip(0), rows=rows)  # type: ignore[union-attr]
    plan = cp.plan(planner, turned, inputs.seq_lens, inputs.qo_indptr, max_q_len=4)  # type: ignore
    rows.copy_(torch.tensor([1, 0]))
    own_rows = plan.run(q, kv, return_lse=True)  # type: ignore[arg-type]
    straight = jitattn.BlockTable(other.table, rows=torch.arange(2))
    given_rows = plan.run(q, kv, pages=straight, return_lse=True)  # type: ignore[arg-type]
    return [before, after, again, own_rows, given_rows]  # type: ignore[list-item]


def run_bench(rank: int, arguments: list[str]) -> str:
    """Return what the bench of this prints."""
    from bench import bench_parallel

    del rank
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        assert bench_parallel.main(arguments) == 0
    return told.getvalue()


def run_example(rank: int, path: str) -> str:
    """Return what a program of docs/examples prints."""
    del rank
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        runpy.run_path(path, run_name="__main__")
    return told.getvalue()
