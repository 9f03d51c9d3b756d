"""Context-parallel decode over the cards of a host: a step in a graph, speed-up, communication.

    torchrun --nproc-per-node 2 -m bench.bench_parallel --table --json bench/results/parallel.jsonl
    torchrun --nproc-per-node 2 -m bench.bench_parallel --backend gloo --tiny --table
    python -m bench.bench_parallel --arithmetic 8

A step is one layer: queries gathered, attention over the rank's tokens, outputs exchanged and
merged. Each rank's median is of replays of a graph with several such steps; the slowest rank
counts. `attention` is the same graph without what travels, `one card` the whole batch on rank 0
alone. Outputs are compared, bit for bit, with the ranks' states merged in their order. On the CPU
(gloo, the reference backend) calls are timed one by one: that shows that it runs, and no speed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import jitattn
from bench import records
from bench.options import make_parser
from jitattn.parallel import ContextParallel

K = 1024
PAGE = 64
_LAYERS = 8  # of a graph
# Of one H200 in docs/perf-log.md: B64 x 8k in bf16, 2.15 GB in 501.5 us; latent attention with 128
# heads, B128 x 8k, in bf16 and e4m3.
READ_BYTES_PER_S = 4.28e12
PRODUCTS_PER_S = {"bfloat16": 592e12, "float8_e4m3fn": 366e12}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch of one query token a request."""

    batch_size: int
    kv_len: int
    is_mla: bool
    kv_dtype: str
    heads: int
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def name(self) -> str:
        length = f"{self.kv_len // K}k" if self.kv_len >= K else str(self.kv_len)
        kind = f"mla-h{self.heads}" if self.is_mla else f"h{self.heads}_{self.kv_heads}"
        return f"b{self.batch_size}-{length}-{kind}-{'e4m3' if self.is_fp8 else 'bf16'}"

    @property
    def is_fp8(self) -> bool:
        return self.kv_dtype == "float8_e4m3fn"

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV tokens of a layer, on all ranks."""
        row = 576 if self.is_mla else 2 * self.kv_heads * self.head_dim
        return self.batch_size * self.kv_len * row * (1 if self.is_fp8 else 2)

    @property
    def seconds(self) -> float:
        """Of a layer on one H200, by its bytes and, of latent attention, its products."""
        products = self.batch_size * self.kv_len * self.heads * 2 * (576 + 512) * self.is_mla
        return max(self.kv_bytes / READ_BYTES_PER_S, products / PRODUCTS_PER_S[self.kv_dtype])

    def received_bytes(self, num_ranks: int) -> int:
        """Bytes that each rank receives in a step: queries, and outs with their lse."""
        dims = (576, 512) if self.is_mla else (self.head_dim, self.head_dim)
        row = 2 * sum(dims) + 4
        return (num_ranks - 1) * self.batch_size * (self.heads // num_ranks) * row


def cases(*, is_tiny: bool, names: str) -> list[Case]:
    """Return the cases whose names have one of the comma-separated parts."""
    shapes = [(1, K * K), (8, 128 * K), (64, 8 * K)]
    if is_tiny:
        shapes = [(1, 700), (3, 130)]
    found = [
        Case(
            batch_size=batch_size,
            kv_len=kv_len,
            is_mla=is_mla,
            kv_dtype=kv_dtype,
            heads=8 if is_tiny else 128 if is_mla else 32,
            kv_heads=2 if is_tiny else 8,
        )
        for batch_size, kv_len in shapes
        for is_mla in (False, True)
        for kv_dtype in ("bfloat16", "float8_e4m3fn")
    ]
    parts = names.split(",")
    return [case for case in found if any(part in case.name for part in parts)]


def planner_of(case: Case, device: torch.device) -> Any:
    """Return the planner of all heads."""
    common = {"kv_dtype": case.kv_dtype, "page_size": PAGE, "device": device}
    if case.is_mla:
        return jitattn.MLAPlanner(num_heads=case.heads, sm_scale=192**-0.5, **common)  # type: ignore
    return jitattn.AttentionPlanner(
        num_qo_heads=case.heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        **common,  # type: ignore[arg-type]
    )


class Step:
    """One rank's tensors of a case: its tokens, and several layers of them so that L2 is cold."""

    def __init__(self, case: Case, num_ranks: int, rank: int, device: torch.device) -> None:
        self.case, self.device = case, device
        self.planner = planner_of(case, device)
        rounds = -(-case.kv_len // (num_ranks * PAGE))
        self.seq_lens = torch.full((case.batch_size,), case.kv_len, device=device)
        self.table = torch.arange(case.batch_size * rounds, dtype=torch.int32, device=device).view(
            case.batch_size, rounds
        )
        num_pages = self.table.numel()
        own_bytes = max(case.kv_bytes // num_ranks, 1)
        # Enough for ten L2 caches, and no more than four layers.
        num_layers = 1 if device.type == "cpu" else min(4, max(1, -(-(600 << 20) // own_bytes)))
        torch.manual_seed(rank)
        self.caches = [self._bound(num_pages) for _ in range(num_layers)]
        dims = (512, 64) if case.is_mla else (case.head_dim,)
        torch.manual_seed(99)
        self.qs = [self._normal(case.batch_size, case.heads, dim).bfloat16() for dim in dims]

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device)

    def _bound(self, num_pages: int) -> object:
        case, dtype = self.case, getattr(torch, self.case.kv_dtype)
        rows = (576,) if case.is_mla else (case.kv_heads, case.head_dim)
        shape = (num_pages, PAGE, *rows) if case.is_mla else (num_pages, 2, PAGE, *rows)
        cache = torch.empty(shape, dtype=dtype, device=self.device)
        for part in cache.split(1024):  # no room for all of it in float32
            part.copy_(self._normal(*part.shape).to(dtype))
        return self.planner.bind(cache)

    def own(self, cp: ContextParallel) -> list[Tensor]:
        """Return the queries of this rank's heads."""
        count = self.case.heads // cp.num_ranks
        return [q[:, cp.rank * count : (cp.rank + 1) * count].contiguous() for q in self.qs]


@dataclass(frozen=True)
class Measured:
    """Seconds of a layer; `one_card_s` is 0 where it was not measured."""

    step_s: float
    attention_s: float
    one_card_s: float
    is_same: bool


def measure(case: Case, cp: ContextParallel, device: torch.device, repeats: int) -> Measured:
    """Time a case on every rank; the slowest counts."""
    step_s, attention_s, is_same = _measure_ranks(case, cp, device, repeats)
    one_card_s = _measure_alone(case, device, repeats) if cp.rank == 0 else 0.0
    dist.barrier()
    figures = torch.tensor([step_s, attention_s, one_card_s, float(not is_same)], device=device)
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    slowest = figures.tolist()
    return Measured(slowest[0], slowest[1], slowest[2], slowest[3] == 0)


def _measure_ranks(
    case: Case, cp: ContextParallel, device: torch.device, repeats: int
) -> tuple[float, float, bool]:
    """Return seconds of this rank's step and of its attention, and whether bits are right."""
    step = Step(case, cp.num_ranks, cp.rank, device)
    pages = jitattn.BlockTable(step.table)
    plan: Any = cp.plan(step.planner, pages, step.seq_lens)
    alone = step.planner.plan(pages, cp.local_lens(step.seq_lens))
    own = step.own(cp)
    is_same = _is_merge_in_order(cp, plan, alone, step, own)

    def run_step(kv: object) -> None:
        plan.run(*own, kv)

    def attend(kv: object) -> None:
        alone.run(*step.qs, kv, return_lse=True)

    step_s = _seconds(plan.refresh, run_step, step.caches, device, repeats)
    return step_s, _seconds(alone.refresh, attend, step.caches, device, repeats), is_same


def _measure_alone(case: Case, device: torch.device, repeats: int) -> float:
    """Return seconds of the whole batch on this card."""
    whole = Step(case, 1, 0, device)
    plan = whole.planner.plan(jitattn.BlockTable(whole.table), whole.seq_lens)
    return _seconds(plan.refresh, lambda kv: plan.run(*whole.qs, kv), whole.caches, device, repeats)


def _is_merge_in_order(
    cp: ContextParallel, plan: Any, alone: Any, step: Step, own: Sequence[Tensor]
) -> bool:
    """Whether a step is what `merge_states` makes of all ranks' states."""
    out, lse = plan.run(*own, step.caches[0], return_lse=True)
    part, part_lse = alone.run(*step.qs, step.caches[0], return_lse=True)
    states = []
    for tensor in (part, part_lse):
        found = [torch.empty_like(tensor) for _ in range(cp.num_ranks)]
        dist.all_gather(found, tensor.contiguous())
        states.append(torch.stack(found))
    want, want_lse = jitattn.merge_states(*states)
    heads = slice(cp.rank * own[0].shape[1], (cp.rank + 1) * own[0].shape[1])
    return torch.equal(out, want[:, heads]) and torch.equal(lse, want_lse[:, heads])


def _seconds(
    refresh: Callable[[], object],
    run: Callable[[object], object],
    caches: Sequence[object],
    device: torch.device,
    repeats: int,
) -> float:
    """Return the median of a layer, of replays of a graph of eight, or of calls on the CPU."""
    if device.type == "cpu":
        samples = []
        for _ in range(repeats):
            begun = time.perf_counter()
            refresh()
            for kv in caches:
                run(kv)
            samples.append((time.perf_counter() - begun) / len(caches))
        return statistics.median(samples)
    refresh()
    for kv in caches:
        run(kv)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        refresh()
        for i in range(_LAYERS):
            run(caches[i % len(caches)])
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * repeats)]
    for _ in range(3):
        graph.replay()
    for begun, ended in zip(events[::2], events[1::2], strict=True):
        begun.record()
        graph.replay()
        ended.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) / 1e3 for a, b in zip(events[::2], events[1::2], strict=True)]
    return statistics.median(times) / _LAYERS


def arithmetic(num_ranks: int) -> str:
    """Return bytes of a layer on so many ranks, and the times that follow from them, as a table."""
    lines = [
        f"| a layer | KV, GB | attention on 1 card, us | on {num_ranks}, us | a rank receives, kB "
        "| travelling may take, us |",
        "| -- | --: | --: | --: | --: | --: |",
    ]
    for case in cases(is_tiny=False, names=""):
        one = case.seconds * 1e6
        each = one / num_ranks
        received = case.received_bytes(num_ranks) / 1e3
        lines.append(
            f"| {case.name} | {case.kv_bytes / 1e9:.2f} | {one:,.0f} | {each:,.0f} | "
            f"{received:,.0f} | {one - each:,.0f} |"
        )
    return "\n".join(lines)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("bench.bench_parallel", __doc__)
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--tiny", action="store_true", help="sizes of a machine without a card")
    parser.add_argument("--cases", default="", help="parts of names, comma-separated")
    parser.add_argument("--interleave", type=int, default=1, help="pages of a block")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--table", action="store_true", help="print a table at the end")
    parser.add_argument("--json", type=Path, help="file to which records are appended")
    parser.add_argument("--arithmetic", type=int, help="print bytes for so many ranks, and stop")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    if options.arithmetic is not None:
        print(arithmetic(options.arithmetic))
        return 0
    device = torch.device("cpu")
    if options.backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    is_own = not dist.is_initialized()
    if is_own:
        dist.init_process_group("cpu:gloo,cuda:nccl" if options.backend == "nccl" else "gloo")
    cp = ContextParallel(interleave=options.interleave, page_size=PAGE)
    env, lines, is_right = records.environment(), [], True
    for case in cases(is_tiny=options.tiny, names=options.cases):
        found = measure(case, cp, device, options.repeats)
        is_right &= found.is_same
        share = 1 - found.attention_s / found.step_s
        speed_up = found.one_card_s / found.step_s
        lines.append(
            f"| {case.name} | {found.one_card_s * 1e6:,.1f} | {found.step_s * 1e6:,.1f} | "
            f"{speed_up:.2f} | {share:.0%} | {'yes' if found.is_same else 'NO'} |"
        )
        if cp.rank == 0:
            print(lines[-1], flush=True)
            facts = asdict(case) | asdict(found) | {
                "case": case.name, "num_ranks": cp.num_ranks, "interleave": cp.interleave,
                "backend": options.backend, "speed_up": speed_up, "communication": share,
                "kv_bytes": case.kv_bytes, "received_bytes": case.received_bytes(cp.num_ranks),
            }  # fmt: skip
            records.append_json(options.json, [records.record("parallel", env, **facts)])
    if cp.rank == 0 and options.table:
        heading = [
            "case",
            "one card, us",
            f"{cp.num_ranks} ranks, us",
            "times",
            "travelling",
            "same bits",
        ]
        print(
            "\n".join([f"| {' | '.join(heading)} |", "| -- | --: | --: | --: | --: | -- |", *lines])
        )
    if is_own:
        dist.destroy_process_group()
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
