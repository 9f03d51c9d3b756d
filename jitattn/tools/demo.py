"""``jitattn demo``: the main job on real input, checked and measured.

Decode attention of a Llama-3.1-8B layer over a paged pool: requests of mixed lengths, shuffled
pages, both page-table layouts. On a GPU the kernels run, are compared with the float64 reference
and timed against the card's copy bandwidth. Without one, a smaller input goes through the
reference backend, which is compared with torch's own attention, and the same kernels are compiled
for another card.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import jitattn
from jitattn.base.knobs import Knobs
from jitattn.jit.build import Kernel, build_all
from jitattn.kernels.attention import reference
from jitattn.kernels.common.kernel_loader import KernelInfo
from jitattn.kernels.registry import specs_of
from jitattn.spec.config import PlannerConfig

NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16
DTYPE = torch.bfloat16
LAYOUTS = ("shared", "separate")
CROSS_ARCH = "sm_90a"

# bf16 keeps 8 significant bits: half a unit in the last place of an output near max |V| is
# 2**-9 of it, and the rounding of the weights P before the product P V doubles that a few times.
OUT_TOLERANCE = 2.0**-7
LSE_TOLERANCE = 1e-3

Oracle = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Batch:
    """Requests over one pool; ``tables`` holds a page table for each layout."""

    seq_lens: tuple[int, ...]
    q: Tensor  # [batch_size, num_qo_heads, head_dim]
    kv_cache: Tensor  # [num_pages, 2, page_size, num_kv_heads, head_dim]
    tables: dict[str, Tensor]  # [batch_size, M] shared, [batch_size, 2, M] separate

    @property
    def num_bytes(self) -> int:
        """Bytes that a decode step must move: live keys and values, queries and outputs."""
        token_bytes = 2 * NUM_KV_HEADS * HEAD_DIM * DTYPE.itemsize
        return sum(self.seq_lens) * token_bytes + 2 * self.q.numel() * DTYPE.itemsize


@dataclass(frozen=True)
class Check:
    """The largest error found, beside what is allowed where it was found."""

    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """A NaN does not pass."""
        return self.error <= self.tolerance


def run(console: Console, knobs: Knobs) -> bool:
    """Print the demo's tables; return whether every check passed."""
    if torch.cuda.is_available():
        return _run_on_gpu(console, torch.device("cuda", torch.cuda.current_device()))
    return _run_on_cpu(console, knobs)


def _run_on_gpu(console: Console, device: torch.device) -> bool:
    memory = torch.cuda.mem_get_info(device)[0]
    # Some 2.2 GB of keys and values, far more than any L2; an eighth of it on a small card.
    batch = make_batch(mixed_lengths(64 if memory > 12 * 2**30 else 8, longest=16384), device)
    _describe(console, batch, torch.cuda.get_device_name(device))

    planners = {layout: _planner(layout, device) for layout in LAYOUTS}
    kernels = {k.name: k for p in planners.values() for k in jitattn.build_info(p)}
    _print_kernels(console, "Kernels", kernels.values())

    checks, timings = {}, {}
    for layout, planner in planners.items():
        kv = planner.bind(batch.kv_cache)
        plan = planner.plan(_block_table(batch, layout), _lengths(batch))
        out, lse = plan.run(batch.q, kv, return_lse=True)
        checks[layout] = compare(batch, layout, out, lse, _reference_oracle)
        timings[layout] = time_on_gpu(functools.partial(plan.run, batch.q, kv, out=out))
    passed = _print_checks(console, "float64 reference", checks)
    _print_timings(console, batch, timings, copy_bandwidth(device))
    return passed


def _run_on_cpu(console: Console, knobs: Knobs) -> bool:
    device = torch.device("cpu")
    batch = make_batch((1, 16, 17, 0, 100, 333, 512), device)
    _describe(console, batch, "CPU (no CUDA device found: the reference backend computes)")

    checks = {}
    for layout in LAYOUTS:
        planner = _planner(layout, device)
        plan = planner.plan(_block_table(batch, layout), _lengths(batch))
        out, lse = plan.run(batch.q, planner.bind(batch.kv_cache), return_lse=True)
        checks[layout] = compare(batch, layout, out, lse, _torch_oracle)
    passed = _print_checks(console, "torch scaled_dot_product_attention in float64", checks)

    specs = {s: None for layout in LAYOUTS for s in specs_of(_config(layout), CROSS_ARCH)}
    kernels = build_all(tuple(specs), CROSS_ARCH, knobs)
    title = f"The kernels of this batch, compiled here for {CROSS_ARCH}"
    _print_kernels(console, title, [_cross_compiled_row(k) for k in kernels])
    return passed


def mixed_lengths(num_requests: int, longest: int) -> tuple[int, ...]:
    """Return lengths from 1 to ``longest``, spread evenly and shuffled, the same every time."""
    generator = torch.Generator().manual_seed(0)
    lengths = [max(1, longest * i // (num_requests - 1)) for i in range(num_requests)]
    return tuple(
        lengths[i] for i in torch.randperm(num_requests, generator=generator, device="cpu").tolist()
    )


def make_batch(seq_lens: Sequence[int], device: torch.device) -> Batch:
    """Return random requests whose pages lie shuffled in a pool with foreign pages.

    What no request owns must not be read, so foreign pages are NaN and unused table entries -1.
    """
    generator = torch.Generator(device).manual_seed(1)
    counts = [math.ceil(n / PAGE_SIZE) for n in seq_lens]
    num_live = sum(counts)
    num_pages = num_live + num_live // 8 + 1
    order = torch.randperm(num_pages, generator=generator, device=device)
    live = order[:num_live]

    shape = (num_pages, 2, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
    kv_cache = torch.randn(shape, dtype=DTYPE, device=device, generator=generator)
    kv_cache[order[num_live:]] = math.nan

    # With a separate table a request's values lie in other pages than its keys.
    other = live[torch.randperm(num_live, generator=generator, device=device)]
    k_ids, v_ids = _table(live, counts), _table(other, counts)
    q_shape = (len(seq_lens), NUM_QO_HEADS, HEAD_DIM)
    return Batch(
        seq_lens=tuple(seq_lens),
        q=torch.randn(q_shape, dtype=DTYPE, device=device, generator=generator),
        kv_cache=kv_cache,
        tables={"shared": k_ids, "separate": torch.stack((k_ids, v_ids), dim=1)},
    )


def _table(pages: Tensor, counts: Sequence[int]) -> Tensor:
    table = torch.full((len(counts), max(counts)), -1, dtype=torch.int32, device=pages.device)
    start = 0
    for row, count in zip(table, counts, strict=True):
        row[:count] = pages[start : start + count]
        start += count
    return table


def _block_table(batch: Batch, layout: str) -> jitattn.BlockTable:
    return jitattn.BlockTable(batch.tables[layout])


def _lengths(batch: Batch) -> Tensor:
    return torch.tensor(batch.seq_lens, dtype=torch.int32, device=batch.q.device)


def _planner(layout: str, device: torch.device) -> jitattn.AttentionPlanner:
    return jitattn.AttentionPlanner(
        num_qo_heads=NUM_QO_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        page_size=PAGE_SIZE,
        page_table=layout,
        q_dtype=DTYPE,
        kv_dtype=DTYPE,
        device=device,
    )


def _config(layout: str) -> PlannerConfig:
    return PlannerConfig(
        num_qo_heads=NUM_QO_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        page_size=PAGE_SIZE,
        page_table=layout,
    )


def compare(
    batch: Batch, layout: str, out: Tensor, lse: Tensor, oracle: Oracle
) -> tuple[Check, Check]:
    """Return the worst error of ``out`` and of ``lse``, request by request."""
    outs, lses = [Check(0.0, OUT_TOLERANCE)], [Check(0.0, LSE_TOLERANCE)]
    for row, kv_len in enumerate(batch.seq_lens):
        k, v = _gather(batch, layout, row)
        want_out, want_lse = oracle(batch.q[row : row + 1], k, v)
        scale = float(v.abs().max()) if kv_len else 1.0
        outs.append(Check(_max_error(out[row], want_out[0]), OUT_TOLERANCE * scale))
        lses.append(Check(_max_error(lse[row], want_lse[0]), LSE_TOLERANCE))
    return _worst(outs), _worst(lses)


def _gather(batch: Batch, layout: str, row: int) -> tuple[Tensor, Tensor]:
    table, kv_len = batch.tables[layout], batch.seq_lens[row]
    k_ids, v_ids = (table[row], table[row]) if layout == "shared" else table[row]
    num_used = math.ceil(kv_len / PAGE_SIZE)

    def tokens(cache: Tensor, ids: Tensor) -> Tensor:
        return cache[ids[:num_used].long()].flatten(0, 1)[:kv_len].double()

    return tokens(batch.kv_cache[:, 0], k_ids), tokens(batch.kv_cache[:, 1], v_ids)


def _max_error(got: Tensor, want: Tensor) -> float:
    got = got.double()
    difference = torch.where(got == want, 0.0, (got - want).abs())  # -inf equals -inf
    return float(difference.max())


def _worst(checks: Sequence[Check]) -> Check:
    return max(checks, key=lambda c: math.inf if math.isnan(c.error) else c.error / c.tolerance)


def _reference_oracle(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return reference.attention(
        q,
        k,
        v,
        [0, 1],
        [0, len(k)],
        causal=True,
        window_left=-1,
        logits_soft_cap=0.0,
        sm_scale=HEAD_DIM**-0.5,
    )


def _torch_oracle(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    # torch's attention does not define a row without keys; the contract does: 0 and -inf.
    if not len(k):
        return torch.zeros_like(q, dtype=torch.float64), torch.full(
            q.shape[:2], -math.inf, device="cpu"
        )
    group_size = q.shape[1] // k.shape[1]
    q = q.double().transpose(0, 1)
    k, v = (x.transpose(0, 1).repeat_interleave(group_size, dim=0) for x in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    scores = q @ k.transpose(1, 2) * HEAD_DIM**-0.5
    return out.transpose(0, 1), scores.logsumexp(-1).transpose(0, 1)


def time_on_gpu(call: Callable[[], object], repeats: int = 20) -> float:
    """Return the median seconds of ``call`` on the current stream."""
    for _ in range(3):
        call()
    event = functools.partial(torch.cuda.Event, enable_timing=True)
    pairs = [(event(), event()) for _ in range(repeats)]
    for start, stop in pairs:
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize()
    milliseconds: float = statistics.median(start.elapsed_time(stop) for start, stop in pairs)
    return milliseconds / 1e3


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second that a large copy reads and writes."""
    source = torch.empty(2**29, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / time_on_gpu(lambda: target.copy_(source))


def _describe(console: Console, batch: Batch, where: str) -> None:
    lengths = batch.seq_lens
    console.print(f"[bold]jitattn {jitattn.__version__}[/] on {where}")
    console.print(
        f"One decode step of a Llama-3.1-8B layer: {NUM_QO_HEADS} query and {NUM_KV_HEADS} KV "
        f"heads, head_dim {HEAD_DIM}, page_size {PAGE_SIZE}, bfloat16; {len(lengths)} requests of "
        f"{min(lengths):,} to {max(lengths):,} tokens ({sum(lengths):,} in all) in "
        f"{len(batch.kv_cache):,} shuffled pages.\n"
    )


def _cross_compiled_row(kernel: Kernel) -> KernelInfo:
    # A launch adds the tile's dynamic shared memory to what the compiler reports.
    smem_bytes = kernel.smem_bytes + kernel.spec.tile(kernel.arch).smem_bytes
    return KernelInfo(
        name=kernel.symbol, arch=kernel.arch, origin=kernel.origin, seconds=kernel.seconds,
        registers=kernel.registers, spill_bytes=kernel.spill_bytes, smem_bytes=smem_bytes,
        compiler=kernel.compiler,
    )  # fmt: skip


def _print_kernels(console: Console, title: str, rows: Iterable[KernelInfo]) -> None:
    table = _new_table(console, title, "kernel", "arch", "from")
    for heading in ("ms", "registers", "spill B", "shared B"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            row.arch,
            row.origin,
            f"{row.seconds * 1e3:,.1f}",
            str(row.registers),
            str(row.spill_bytes),
            f"{row.smem_bytes:,}",
        )
    console.print(table)


def _print_checks(console: Console, against: str, checks: dict[str, tuple[Check, Check]]) -> bool:
    table = _new_table(console, f"Errors against {against}", "page table", "what")
    for heading in ("max error", "tolerance"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for layout, pair in checks.items():
        for what, check in zip(("out", "lse"), pair, strict=True):
            verdict = "[green]pass[/]" if check.passed else "[red]FAIL[/]"
            table.add_row(layout, what, f"{check.error:.2e}", f"{check.tolerance:.2e}", verdict)
    console.print(table)
    return all(check.passed for pair in checks.values() for check in pair)


def _print_timings(console: Console, batch: Batch, seconds: dict[str, float], copy: float) -> None:
    table = _new_table(console, f"Speed; this card copies {copy / 1e9:,.0f} GB/s", "page table")
    for heading in ("us", "GB/s", "of copy"):
        table.add_column(heading, justify="right")
    for layout, s in seconds.items():
        rate = batch.num_bytes / s
        table.add_row(layout, f"{s * 1e6:,.1f}", f"{rate / 1e9:,.0f}", f"{rate / copy:.0%}")
    console.print(table)


def _new_table(console: Console, title: str, *columns: str) -> Table:
    console.print(f"[bold]{title}[/]")  # as a table's own title it would wrap at its width
    table = Table()
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table
