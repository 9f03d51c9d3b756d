"""A layer's attention from packed QKV: `preprocess_qkv` and `Plan.run`, 64 requests of 2k tokens.

    python -m bench.bench_layer --json bench/results/layer.jsonl

Times the host's two calls, each alone and both; captures both in a graph, replays it on other
inputs and compares with eager calls, bit for bit; times a replay of 32 layers, each with a cache of
its own, so that none is in the L2 cache. What a layer launches, as a profiler sees it, is counted
at the end, since a process that was profiled may launch more slowly. The host's time is mostly
Python's: the record says how fast this host is.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import jitattn
from bench import host_speed, records, report
from bench.options import cuda_device, make_parser
from bench.timing import L2Flush, L2Policy, Timer, no_gc, summarize
from bench.token_workloads import (
    HEAD_DIM,
    NUM_KV_HEADS,
    NUM_QO_HEADS,
    PAGE_SIZE,
    TokenBatch,
    TokenWorkload,
    make_token_batch,
)

NUM_LAYERS = 32
CASES = tuple(
    TokenWorkload("preprocess", 64, kv_dtype, 64, 2048)
    for kv_dtype in ("bfloat16", "float8_e4m3fn")
)


@dataclass
class Layers:
    """Layers that share a plan."""

    batch: TokenBatch
    pages: jitattn.BlockTable
    plan: jitattn.types.Plan
    bound: list[jitattn.types.BoundCache]
    rope: jitattn.Rope
    outs: list[Tensor]

    @classmethod
    def of(cls, batch: TokenBatch) -> Layers:
        planner = jitattn.AttentionPlanner(
            num_qo_heads=NUM_QO_HEADS,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            page_size=PAGE_SIZE,
            kv_dtype=batch.row.kv_dtype,
        )
        for cache in (cache for pair in batch.caches for cache in pair):
            cache.copy_(torch.randn(cache.shape, dtype=torch.bfloat16, device=cache.device))
        pages = jitattn.BlockTable(batch.table)
        scales = {"k_scale": batch.k_scale, "v_scale": batch.v_scale}
        return cls(
            batch,
            pages,
            planner.plan(pages, batch.seq_lens),
            [planner.bind(cache, **scales) for cache in batch.caches],
            jitattn.Rope(HEAD_DIM, base=500000.0),
            [torch.full_like(q, float("nan")) for q in batch.q_out],
        )

    def run(self, i: int) -> None:
        """One layer."""
        self.attend(i, self.preprocess(i))

    def preprocess(self, i: int) -> Tensor:
        """Return q of a layer."""
        batch = self.batch
        return jitattn.preprocess_qkv(
            batch.qkv[i],
            batch.cache(i),
            num_qo_heads=NUM_QO_HEADS,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            pages=self.pages,
            seq_lens=batch.seq_lens,
            qo_indptr=batch.qo_indptr,
            rope=self.rope,
            q_out=batch.q_out[i],
            k_scale=batch.k_scale,
            v_scale=batch.v_scale,
        )

    def attend(self, i: int, q: Tensor) -> None:
        self.plan.run(q, self.bound[i % len(self.bound)], out=self.outs[i])

    def run_all(self) -> None:
        for i in range(self.batch.copies):
            self.run(i)


def count_launches(layers: Layers) -> int:
    """Return the kernels of one layer that a profiler sees."""
    layers.run(0)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        layers.run(0)
        torch.cuda.synchronize()
    kernels = [event for event in seen.events() if event.device_type.name == "CUDA"]
    return len(kernels)


def host_times(layers: Layers, rounds: int = 30) -> dict[str, object]:
    """Return the median time that the host's calls take a layer, the launches included."""
    batch = layers.batch
    calls: dict[str, Callable[[int], object]] = {
        "host_median_s": layers.run,
        "host_preprocess_s": layers.preprocess,
        "host_run_s": lambda i: layers.attend(i, batch.q_out[i]),
    }
    samples: dict[str, list[float]] = {name: [] for name in calls}
    with no_gc():
        for _ in range(rounds):
            for name, call in calls.items():
                torch.cuda.synchronize()
                started = time.perf_counter()
                for i in range(batch.copies):
                    call(i)
                samples[name].append((time.perf_counter() - started) / batch.copies)
    torch.cuda.synchronize()
    return {name: summarize(of_call).median_s for name, of_call in samples.items()}


def captured(layers: Layers) -> torch.cuda.CUDAGraph:
    """Return a graph of all layers."""
    layers.run_all()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers.run_all()
    return graph


def replays_as_eager(layers: Layers, graph: torch.cuda.CUDAGraph) -> bool:
    """Return whether a replay on new inputs has the bits of eager calls."""
    for qkv in layers.batch.qkv:
        qkv.copy_(qkv.flip(0) * 0.5)
    for out in layers.outs:
        out.fill_(float("nan"))
    graph.replay()
    replayed = [out.clone() for out in layers.outs]
    layers.run_all()
    return all(torch.equal(a, b) for a, b in zip(replayed, layers.outs, strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every case; the exit status is 1 when a replay differs or there are more launches."""
    parser = make_parser("bench.bench_layer", __doc__)
    parser.add_argument("--repeats", type=int, default=10, help="timed replays")
    parser.add_argument("--json", type=Path, help="file to which records are appended")
    options = parser.parse_args(argv)
    device = cuda_device("bench_layer")
    env = records.environment({})
    report.print_head(env)
    speed = host_speed.measure(device)
    print(f"host       {speed}")
    timer = Timer(L2Flush(L2Policy.WRITE, device), repeats=options.repeats)
    measured = {}
    for case in CASES:
        layers = Layers.of(make_token_batch(case, NUM_LAYERS, device))
        layers.run_all()
        facts = host_times(layers) | {"host": dataclasses.asdict(speed)}
        graph = captured(layers)
        facts["same_bits"] = replays_as_eager(layers, graph)
        facts["median_s"] = summarize(timer.samples(graph.replay)).median_s / NUM_LAYERS
        measured[case.name] = facts
        del layers, graph
        torch.cuda.empty_cache()
    for case in CASES:
        layers = Layers.of(make_token_batch(case, 1, device))
        measured[case.name]["launches"] = count_launches(layers)
    records.append_json(
        options.json,
        [records.record("layer", env, case=name, **facts) for name, facts in measured.items()],
    )
    print_table(measured)
    return int(not all(f["launches"] == 2 and f["same_bits"] is True for f in measured.values()))


def print_table(measured: Mapping[str, Mapping[str, object]]) -> None:
    """Print a row for each case."""
    headings = ("launches", "host us", "of preprocess", "of run", "graph us", "replay as eager")
    keys = ("launches", "host_median_s", "host_preprocess_s", "host_run_s", "median_s", "same_bits")
    table = Table("case, a layer", *headings)
    for name, facts in measured.items():
        cells = (facts[key] for key in keys)
        table.add_row(name, *(f"{c * 1e6:.2f}" if isinstance(c, float) else str(c) for c in cells))
    report.console().print(table)


if __name__ == "__main__":
    sys.exit(main())
