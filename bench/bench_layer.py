"""A layer's attention from packed QKV: `preprocess_qkv` and `Plan.run`, 64 requests of 2k tokens.

    python -m bench.bench_layer --json bench/results/layer.jsonl

Counts what a layer launches, as a profiler sees it; times the host's two calls; captures both in a
graph, replays it on other inputs and compares with eager calls, bit for bit; times a replay of 32
layers, each with a cache of its own, so that none is in the L2 cache.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import jitattn
from bench import records, report
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
    plan: jitattn.Plan
    bound: list[jitattn.BoundCache]
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
        batch = self.batch
        place = i % len(batch.caches)
        q = jitattn.preprocess_qkv(
            batch.qkv[i],
            batch.caches[place],
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
        self.plan.run(q, self.bound[place], out=self.outs[i])

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


def host_seconds(layers: Layers, rounds: int = 10) -> float:
    """Return the median time that the host's two calls take a layer, the launches included."""
    samples = []
    with no_gc():
        for _ in range(rounds):
            torch.cuda.synchronize()
            started = time.perf_counter()
            layers.run_all()
            samples.append((time.perf_counter() - started) / layers.batch.copies)
    torch.cuda.synchronize()
    return summarize(samples).median_s


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
    parser = argparse.ArgumentParser(
        prog="python -m bench.bench_layer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--repeats", type=int, default=10, help="timed replays")
    parser.add_argument("--json", type=Path, help="file to which records are appended")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench_layer needs a CUDA device", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    env = records.environment({})
    report.print_head(env)
    timer = Timer(L2Flush(L2Policy.WRITE, device), repeats=options.repeats)
    table = Table("case", "launches", "host us a layer", "graph us a layer", "replay as eager")
    is_right = True
    for case in CASES:
        layers = Layers.of(make_token_batch(case, NUM_LAYERS, device))
        facts: dict[str, object] = {
            "launches": count_launches(layers),
            "host_median_s": host_seconds(layers),
        }
        graph = captured(layers)
        facts["same_bits"] = replays_as_eager(layers, graph)
        facts["median_s"] = summarize(timer.samples(graph.replay)).median_s / NUM_LAYERS
        is_right &= facts["launches"] == 2 and facts["same_bits"] is True
        cells = (facts["launches"], facts["host_median_s"], facts["median_s"], facts["same_bits"])
        table.add_row(
            case.name,
            *(f"{c * 1e6:.2f}" if isinstance(c, float) else str(c) for c in cells),
        )
        records.append_json(options.json, [records.record("layer", env, case=case.name, **facts)])
    report.console().print(table)
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
