"""What sparse attention reads, chosen on the device: indexer, tokens, bounds of pages, and pages.

    python -m bench.bench_select --json bench/results/select.jsonl
    python -m bench.bench_select --bundle build/select          # compiles ahead, without a card

Each case is captured in a graph and replayed with a cold L2 cache; it is first compared with torch.
Bytes are those that have to be read once: keys and scales, logits, bounds. Shares are of the
card's streaming read, measured in the same run, and of 1,979 TFLOP/s in 8 bits. ``torch.topk``
stands beside the choice of tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

import jitattn
from bench import ceilings, records
from bench.options import cuda_device, make_parser
from bench.report import console, print_head
from bench.timing import L2Flush, L2Policy, Timer, Timing, summarize
from bench.turns import WrongError
from jitattn.kernels.select.spec import SelectConfig

E4M3 = torch.float8_e4m3fn
HEAD_DIM, PAGE_SIZE = 128, 64
PEAK_FLOPS = 1979e12  # of products of 8 bits on an H100 or H200
_TOLERANCE = 2**-10


@dataclass(frozen=True)
class Case:
    """A batch of equally long requests.

    Attributes:
        kind: "index", "tokens", "step" (both), "bounds", "update" or "pages".
        batch_size: requests.
        kv_len: tokens of each.
        q_len: query tokens of each, its last ones.
        num_heads: of the indexer, or KV heads of pages.
        k: tokens, or pages, that are chosen.
        page_size: tokens of a page.
    """

    kind: str
    batch_size: int = 64
    kv_len: int = 128 * 1024
    q_len: int = 1
    num_heads: int = 64
    k: int = 2048
    page_size: int = PAGE_SIZE

    @property
    def name(self) -> str:
        parts = [f"{self.kind}-B{self.batch_size}x{self.kv_len // 1024}k"]
        parts += [f"q{self.q_len}"] if self.q_len > 1 else []
        return "-".join((*parts, f"h{self.num_heads}", f"k{self.k}"))

    @property
    def num_tokens(self) -> int:
        return self.batch_size * self.q_len

    @property
    def num_pages(self) -> int:
        return self.batch_size * -(-self.kv_len // self.page_size)

    @property
    def num_bytes(self) -> int:
        """Bytes that have to be read."""
        tokens = self.batch_size * self.kv_len
        if self.kind in ("index", "step"):
            return tokens * (HEAD_DIM + 4)
        if self.kind == "tokens":
            return self.num_tokens * self.kv_len * 4
        row = self.num_heads * HEAD_DIM * 2
        if self.kind == "bounds":
            return tokens * row
        if self.kind == "update":  # the last page of each request, which is full
            return self.batch_size * self.page_size * row
        return self.num_pages * 2 * row

    @property
    def num_flops(self) -> int:
        """Operations of the products of an indexer, of keys that are seen."""
        if self.kind not in ("index", "step"):
            return 0
        seen = self.q_len * self.kv_len - self.q_len * (self.q_len - 1) // 2
        return 2 * self.batch_size * seen * self.num_heads * HEAD_DIM


CASES = (
    Case("index"),
    Case("index", q_len=2),
    Case("index", q_len=4),
    Case("index", num_heads=32),
    Case("index", batch_size=8),
    Case("index", batch_size=1),
    Case("index", batch_size=256, kv_len=8192),
    Case("index", batch_size=1, kv_len=32 * 1024, q_len=2048),
    Case("tokens"),
    Case("tokens", k=512),
    Case("tokens", batch_size=1),
    Case("tokens", batch_size=256, kv_len=8192),
    Case("tokens", batch_size=1, kv_len=32 * 1024, q_len=2048),
    Case("step"),
    Case("bounds", num_heads=8, page_size=128, k=16, batch_size=16),
    Case("update", num_heads=8, page_size=128, k=16, batch_size=16),
    Case("pages", num_heads=8, page_size=128, k=16),
    Case("pages", num_heads=8, page_size=16, k=128, batch_size=16),
)

Calls = dict[str, Callable[[], object]]
"""Contenders by name, jitattn first, once checked."""


@dataclass(frozen=True)
class Batch:
    """The tables and lengths of a case."""

    case: Case
    pages: jitattn.BlockTable
    seq_lens: Tensor
    queries: dict[str, object]

    @property
    def device(self) -> torch.device:
        return self.seq_lens.device

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device)


def make_batch(case: Case, device: torch.device) -> Batch:
    """Make a batch whose pages lie in random order."""
    torch.manual_seed(0)
    table = torch.randperm(case.num_pages, device=device).to(torch.int32).view(case.batch_size, -1)
    lens = torch.full((case.batch_size,), case.kv_len, dtype=torch.int32, device=device)
    queries: dict[str, object] = {}
    if case.q_len > 1:
        steps = torch.arange(case.batch_size + 1, dtype=torch.int32, device=device)
        queries = {"qo_indptr": steps * case.q_len, "max_q_len": case.q_len}
    return Batch(case, jitattn.BlockTable(table), lens, queries)


# --- contenders -----------------------------------------------------------------------------------


def index_calls(batch: Batch, *, with_choice: bool = False) -> Calls:
    """Logits of an indexer, and the choice after it."""
    case, device = batch.case, batch.device
    width = HEAD_DIM + 4
    shape = case.num_pages, case.page_size
    cache = torch.empty((*shape, width), dtype=torch.uint8, device=device)
    flat = cache.view(case.num_pages, -1)
    for page in range(0, case.num_pages, 4096):
        rows = flat[page : page + 4096]
        keys = batch.normal(rows.shape[0], case.page_size * HEAD_DIM).to(E4M3)
        rows[:, : keys.shape[1]] = keys.view(torch.uint8)
        scales = torch.rand(rows.shape[0], case.page_size, device=device) + 0.5
        rows[:, keys.shape[1] :] = scales.view(torch.uint8)
    q = batch.normal(case.num_tokens, case.num_heads, HEAD_DIM).to(E4M3)
    weights = batch.normal(case.num_tokens, case.num_heads)
    out = torch.empty(case.num_tokens, case.kv_len, device=device)
    lists = new_lists(case, device)

    def run() -> None:
        jitattn.index_logits(
            *(q, weights, cache, batch.pages, batch.seq_lens),
            **batch.queries,  # type: ignore[arg-type]
            out=out,
        )
        if with_choice:
            choose(batch, out, lists)

    run()
    row = case.num_tokens - 1
    ids = batch.pages.table[-1].long()
    keys = flat[ids, : case.page_size * HEAD_DIM].view(-1, HEAD_DIM).view(E4M3).float()
    scales = flat[ids, case.page_size * HEAD_DIM :].contiguous().view(torch.float32).flatten()
    want = (keys @ q[row].float().T).relu() @ weights[row] * scales
    size = (keys.abs() @ q[row].float().abs().T) @ weights[row].abs() * scales
    if bool(((out[row] - want).abs() > _TOLERANCE * size).any()):
        raise WrongError(f"logits of row {row} are not those of torch")
    return {"jitattn": run}


def new_lists(case: Case, device: torch.device) -> jitattn.IndexLists:
    slots = torch.empty((case.num_tokens, case.k), dtype=torch.int32, device=device)
    return jitattn.IndexLists(slots, torch.empty(case.num_tokens, dtype=torch.int32, device=device))


def choose(batch: Batch, logits: Tensor, lists: jitattn.IndexLists) -> None:
    jitattn.select_tokens(
        *(logits, batch.pages, batch.seq_lens, batch.case.k),
        **batch.queries,  # type: ignore[arg-type]
        page_size=batch.case.page_size,
        out=lists,
    )


def token_calls(batch: Batch) -> Calls:
    """The choice of tokens, beside torch's of their positions alone."""
    case = batch.case
    logits = batch.normal(case.num_tokens, case.kv_len)
    lists = new_lists(case, batch.device)

    def run() -> None:
        choose(batch, logits, lists)

    run()
    for row in {0, case.num_tokens - 1}:
        seen = case.kv_len - case.q_len + 1 + row % case.q_len
        best = logits[row, :seen].topk(min(case.k, seen)).indices.sort().values
        ids = batch.pages.table[row // case.q_len].long()
        want = ids[best // case.page_size] * case.page_size + best % case.page_size
        if not torch.equal(lists.slots[row, : len(want)].long(), want):
            raise WrongError(f"tokens of row {row} are not those of torch.topk")
    return {"jitattn": run, "torch.topk": lambda: logits.topk(case.k)}


def page_calls(batch: Batch) -> Calls:
    """Bounds of pages, their update, or the choice of pages."""
    case, device = batch.case, batch.device
    if case.kind == "pages":
        bounds = batch.normal(case.num_pages, 2, case.num_heads, HEAD_DIM).bfloat16()
        bounds = bounds.sort(dim=1).values.contiguous()
        q = batch.normal(case.batch_size, 4 * case.num_heads, HEAD_DIM).bfloat16()
        arguments = q, bounds, batch.pages, batch.seq_lens, case.k
        lists = jitattn.select_pages(*arguments, page_size=case.page_size)
        return {
            "jitattn": lambda: jitattn.select_pages(*arguments, page_size=case.page_size, out=lists)
        }
    shape = case.num_pages, case.page_size, case.num_heads, HEAD_DIM
    keys = torch.randn(shape, dtype=torch.bfloat16, device=device)
    bounds = jitattn.page_bounds((keys, keys), batch.pages, batch.seq_lens)
    for i, want in enumerate((keys[:64].amin(1), keys[:64].amax(1))):
        if not torch.equal(bounds[:64, i], want):
            raise WrongError("bounds are not those of torch")
    queries: dict[str, object] = {}
    if case.kind == "bounds":  # every token is new
        steps = torch.arange(case.batch_size + 1, dtype=torch.int32, device=device) * case.kv_len
        queries = {"qo_indptr": steps, "max_q_len": case.kv_len}
    return {
        "jitattn": lambda: jitattn.page_bounds(
            *((keys, keys), batch.pages, batch.seq_lens),
            **queries,  # type: ignore[arg-type]
            out=bounds,
        )
    }


def calls_of(batch: Batch) -> Calls:
    """Return the contenders of a case, checked.

    Raises:
        WrongError: what was computed isn't what torch computes.
    """
    if batch.case.kind in ("index", "step"):
        return index_calls(batch, with_choice=batch.case.kind == "step")
    return token_calls(batch) if batch.case.kind == "tokens" else page_calls(batch)


# --- results --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What came of one contender on one case."""

    case: Case
    contender: str
    status: str
    reason: str = ""
    timing: Timing | None = None
    read: float = 0.0
    """Bytes a second of the card's streaming read."""

    @property
    def figures(self) -> dict[str, float]:
        if self.timing is None:
            return {}
        seconds, case = self.timing.median_s, self.case
        found = {"us": seconds * 1e6, "gb_per_s": self.timing.gb_per_s(case.num_bytes)}
        found["read_fraction"] = case.num_bytes / seconds / self.read
        if case.num_flops:
            found["tflops"] = case.num_flops / seconds / 1e12
            found["peak_fraction"] = case.num_flops / seconds / PEAK_FLOPS
        return found


def bench_case(case: Case, timer: Timer, num_runs: int, read: float) -> list[Result]:
    """Check and time the contenders of a case."""
    try:
        calls = calls_of(make_batch(case, torch.device("cuda", torch.cuda.current_device())))
    except WrongError as error:
        return [Result(case, "jitattn", "wrong", str(error))]
    except Exception as error:
        return [Result(case, "jitattn", "failed", f"{type(error).__name__}: {error}")]
    found = []
    for name, call in calls.items():
        call()
        # What is read between two runs of a graph mostly exceeds the L2 cache by itself.
        runs = num_runs if case.num_bytes > 1 << 28 else 1
        samples = timer.samples(timer.capture(None, [call], runs))
        timing = summarize([seconds / runs for seconds in samples])
        found.append(Result(case, name, "timed", timing=timing, read=read))
    return found


def to_record(result: Result, env: dict[str, object]) -> dict[str, object]:
    """Return the JSON record of one result."""
    timing = {} if result.timing is None else dataclasses.asdict(result.timing)
    return records.of_result(
        "select",
        env,
        result.case.name,
        result,
        num_bytes=result.case.num_bytes,
        **timing,
        **result.figures,
    )


def print_results(results: Sequence[Result]) -> None:
    """Print the table."""
    table = Table(title="What sparse attention reads, chosen on the device")
    headings = {
        "us": "us",
        "gb_per_s": "GB/s",
        "read_fraction": "of the read",
        "tflops": "TFLOP/s",
        "peak_fraction": "of the peak",
    }
    for heading in ("case", "contender", *headings.values()):
        table.add_column(heading, justify="left" if heading in ("case", "contender") else "right")
    for result in results:
        figures = result.figures
        cells = [
            "" if name not in figures
            else f"{figures[name]:.0%}" if name.endswith("fraction") else f"{figures[name]:.1f}"
            for name in headings
        ]  # fmt: skip
        shown = cells if figures else [result.status, *[""] * 4]
        table.add_row(result.case.name, result.contender, *shown)
    console().print(table)
    for result in results:
        if result.reason:
            console().print(f"{result.case.name}: {result.reason}", markup=False)


def configs() -> list[SelectConfig]:
    """Return what the cases launch."""
    heads = dict.fromkeys(case.num_heads for case in CASES if case.kind in ("index", "step"))
    return [
        *(SelectConfig(kernel="index_logits", head_dim=HEAD_DIM, num_heads=n) for n in heads),
        SelectConfig(kernel="select_tokens"),
        SelectConfig(kernel="page_bounds", kv_dtype="bfloat16"),
        SelectConfig(kernel="select_pages", kv_dtype="bfloat16", head_dim=HEAD_DIM),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases; the exit status is 1 when an output was wrong."""
    options = _parse(argv)
    if options.bundle is not None:
        report = jitattn.precompile(
            configs(), arch=options.arch, out=options.bundle, progress=False
        )
        print(f"{len(report.entries)} kernels for {options.arch} in {options.bundle}")
        return 0
    device = cuda_device("bench_select")
    env = records.environment()
    print_head(env)
    limits = ceilings.measure(device)
    console().print(f"streaming read: {limits.read / 1e9:.0f} GB/s ({limits.read_method})")
    timer = Timer(L2Flush(options.l2, device), repeats=options.repeats)
    results: list[Result] = []
    for case in CASES:
        if options.cases in case.name:
            results += bench_case(case, timer, options.runs, limits.read)
            torch.cuda.empty_cache()
    records.append_json(options.json, [to_record(result, env) for result in results])
    print_results(results)
    return int(any(result.status in ("wrong", "failed") for result in results))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("bench.bench_select", __doc__)
    add = parser.add_argument
    add("--cases", default="", help="part of the names of cases to run; default: all")
    add("--runs", type=int, default=4, help="runs inside a graph, of cases beyond the L2 cache")
    add("--repeats", type=int, default=20, help="timed replays")
    add("--l2", type=L2Policy, default=L2Policy.READ, help="write, read or keep")
    add("--json", type=Path, help="file to which records are appended")
    add("--bundle", type=Path, help="fill this folder with the kernels, and measure nothing")
    add("--arch", default="sm_90a", help="of the bundle; default: %(default)s")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
