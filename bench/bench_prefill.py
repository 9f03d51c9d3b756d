"""jitattn's prefill beside FlashInfer's fa2 on the same tensors: TFLOP/s of unmasked work.

    python -m bench.bench_prefill --json bench/results/prefill.jsonl

Causal, pages of 16 tokens, in bfloat16. Sampled rows of every output are compared with the float64
reference before anything is timed; what is wrong or absent is reported and not timed. Plans are
made before the clock starts; that of jitattn, which the device makes, is timed on its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import jitattn
from bench import records
from bench.contenders import SkipError
from bench.oracle import attend, relative_error
from bench.rivals import flashinfer
from bench.timing import Call, L2Flush, L2Policy, Timer, Timing, summarize
from bench.workloads import Batch, Case, make_batch
from jitattn.reference import gather

_SAMPLED_ROWS = 16  # of a request
_LIMIT = 1e-2  # relative error of a request's sampled rows, as in bench.oracle


@dataclass(frozen=True)
class PrefillCase:
    """Query tokens and KV tokens of each request."""

    name: str
    q_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16

    @property
    def flop(self) -> int:
        """Operations of both products over the keys that each query token sees."""
        pairs = zip(self.q_lens, self.seq_lens, strict=True)
        num_scores = sum(q * (n - q) + q * (q + 1) // 2 for q, n in pairs)
        return 4 * self.head_dim * self.num_qo_heads * num_scores

    def pages(self) -> Case:
        """The case whose caches and tables this one uses."""
        return Case(
            name=self.name,
            seq_lens=self.seq_lens,
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=self.page_size,
        )


CASES = (
    PrefillCase("8x2k", (2048,) * 8, (2048,) * 8),
    PrefillCase("1x4k", (4096,), (4096,)),
    PrefillCase("1x16k", (16_384,), (16_384,)),
    PrefillCase("4x512-on-8k", (512,) * 4, (8192,) * 4),
    PrefillCase("1x128-on-64k", (128,), (65_536,)),
)


@dataclass(frozen=True)
class Inputs:
    """The tensors of a case."""

    case: PrefillCase
    batch: Batch
    q: Tensor
    qo_indptr: Tensor


def make_inputs(case: PrefillCase, device: torch.device) -> Inputs:
    """Fill queries and caches with normal random numbers."""
    starts = [0, *itertools.accumulate(case.q_lens)]
    generator = torch.Generator(device).manual_seed(1)
    shape = (starts[-1], case.num_qo_heads, case.head_dim)
    q = torch.randn(shape, generator=generator, dtype=torch.bfloat16, device=device)
    indptr = torch.tensor(starts, dtype=torch.int32, device=device)
    return Inputs(case, make_batch(case.pages(), 1, device), q, indptr)


@dataclass(frozen=True)
class Prepared:
    """A contender that is ready to run, and the work of a step that it does on the device."""

    run: Call
    out: Tensor
    plan: Call | None = None


def prepare_jitattn(inputs: Inputs) -> Prepared:
    """Make a planner, bind and plan."""
    case, batch = inputs.case, inputs.batch
    arguments = case.pages().planner_arguments("shared")
    planner = jitattn.AttentionPlanner(**arguments, device=inputs.q.device)
    kv = planner.bind(batch.kv[0])
    pages = jitattn.BlockTable(batch.block_table)
    plan = planner.plan(pages, batch.seq_lens, inputs.qo_indptr, max_q_len=max(case.q_lens))
    out = torch.empty_like(inputs.q)
    return Prepared(lambda: plan.run(inputs.q, kv, out=out), out, plan.refresh)


def prepare_fa2(inputs: Inputs) -> Prepared:
    """FlashInfer's FlashAttention-2 prefill wrapper; it plans on the host."""
    case, batch = inputs.case, inputs.batch
    workspace = torch.zeros(512 << 20, dtype=torch.uint8, device=inputs.q.device)
    wrapper = flashinfer().BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    wrapper.plan(
        inputs.qo_indptr,
        batch.kv_indptr,
        batch.kv_indices,
        batch.last_page_len,
        case.num_qo_heads,
        case.num_kv_heads,
        case.head_dim,
        case.page_size,
        causal=True,
        q_data_type=inputs.q.dtype,
        kv_data_type=batch.kv.dtype,
    )
    out = torch.empty_like(inputs.q)
    return Prepared(lambda: wrapper.run(inputs.q, batch.kv[0], out=out), out)


CONTENDERS: dict[str, Callable[[Inputs], Prepared]] = {
    "fa2": prepare_fa2,
    "jitattn-shared": prepare_jitattn,
}


def sampled_rows(q_len: int) -> list[int]:
    """Rows of a request that are compared: the first, the last and some between."""
    step = max(1, q_len // (_SAMPLED_ROWS - 2))
    return sorted({0, q_len - 1, *range(step // 2, q_len, step)})


def error_of(out: Tensor, inputs: Inputs) -> float:
    """Return the largest relative error of a request's sampled rows."""
    return max(
        relative_error(out[rows], expected)
        for rows, expected in (_sample(inputs, b) for b in range(len(inputs.case.q_lens)))
    )


def _sample(inputs: Inputs, request: int) -> tuple[list[int], Tensor]:
    """Rows of q of one request, and what they come to in float64, each on its own."""
    case, batch = inputs.case, inputs.batch
    q_len, kv_len = case.q_lens[request], case.seq_lens[request]
    begin = sum(case.q_lens[:request])
    k, v = (gather(batch.kv[0][:, i], batch.block_table[request], kv_len) for i in (0, 1))
    rows = sampled_rows(q_len)
    outs = []
    for row in rows:
        seen = kv_len - q_len + row + 1
        outs.append(attend(inputs.q[begin + row : begin + row + 1], k[:seen], v[:seen]))
    return [begin + row for row in rows], torch.cat(outs)


def bench_case(
    inputs: Inputs, names: Sequence[str], timer: Timer, rounds: int
) -> list[dict[str, object]]:
    """Check every contender, then time those that are right, in turns."""
    results: dict[str, dict[str, object]] = {}
    ready: dict[str, Prepared] = {}
    for name in names:
        results[name] = {"contender": name, "status": "timed"}
        try:
            prepared = CONTENDERS[name](inputs)
            prepared.out.fill_(float("nan"))
            prepared.run()
            error = error_of(prepared.out, inputs)
        except SkipError as reason:
            results[name] |= {"status": "skipped", "reason": str(reason)}
        except Exception as reason:  # a rival may raise anything
            text = f"{type(reason).__name__}: {reason}"
            results[name] |= {"status": "failed", "reason": text}
        else:
            results[name] |= {"error": error}
            if error > _LIMIT:
                results[name] |= {"status": "wrong", "reason": f"relative error {error:.1e}"}
            else:
                ready[name] = prepared
    samples: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(rounds):
        for name, prepared in ready.items():
            samples[name] += timer.samples(prepared.run)
    for name, prepared in ready.items():
        results[name] |= _figures(inputs.case, summarize(samples[name]))
        if prepared.plan is not None:
            results[name]["plan_s"] = summarize(timer.samples(prepared.plan)).median_s
    return list(results.values())


def _figures(case: PrefillCase, timing: Timing) -> dict[str, object]:
    figures = dataclasses.asdict(timing)
    return figures | {"tflop_per_s": case.flop / timing.median_s / 1e12}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases; the exit status is 1 when an output was wrong."""
    options = _parse(argv)
    if not torch.cuda.is_available():
        print("bench_prefill needs a CUDA device")
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    env = records.environment({"fa2": _version()})
    timer = Timer(L2Flush(options.l2, device), repeats=options.repeats)
    is_wrong = False
    for case in CASES:
        if case.name not in options.cases:
            continue
        results = bench_case(make_inputs(case, device), options.contenders, timer, options.rounds)
        common = {"case": case.name, "flop": case.flop, "l2_policy": options.l2.value}
        lines = [records.record("prefill", env, **common, **result) for result in results]
        records.append_json(options.json, lines)
        for result in results:
            print(f"{case.name:13}", _line(result), flush=True)
            is_wrong |= result["status"] == "wrong"
        torch.cuda.empty_cache()
    return int(is_wrong)


def _line(result: dict[str, object]) -> str:
    name, status = result["contender"], result["status"]
    if status != "timed":
        return f"{name:15} {status}: {str(result['reason'])[:300]}"
    plan = f", plan {result['plan_s']:.2e} s" if "plan_s" in result else ""
    return (
        f"{name:15} {result['median_s']:.3e} s ({result['p10_s']:.3e} to {result['p90_s']:.3e}), "
        f"{result['tflop_per_s']:.0f} TFLOP/s, error {result['error']:.1e}{plan}"
    )


def _version() -> str:
    try:
        return str(flashinfer().__version__)
    except SkipError as error:
        return f"absent: {error}"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.bench_prefill",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    names = [case.name for case in CASES]
    add("--cases", nargs="+", choices=names, default=names)
    add("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    add("--rounds", type=int, default=3, help="turns of every contender")
    add("--repeats", type=int, default=20, help="timed calls a turn")
    add("--l2", type=L2Policy, default=L2Policy.WRITE, help="write, read or keep")
    add("--json", type=Path, help="file to which records are appended")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
