"""The parts of the benchmarks that need no GPU: workloads, byte counts, checks, records, tables."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Hashable
from pathlib import Path

import pytest
import torch

from bench import (
    bundle,
    caches,
    oracle,
    records,
    report,
    workloads,
)
from bench.bench_decode import Method, Result, bench_case, choose_method, to_record
from bench.cases import BASELINE, CASES, GROUPS, select
from bench.ceilings import Ceilings
from bench.contenders import VARIANTS, Contender, JitAttn, Prepared, SkipError
from bench.rivals import _causal_mask
from bench.timing import L2Policy, Timing, summarize
from bench.workloads import Batch, Case, make_batch, num_copies
from jitattn.kernels.registry import check_config
from jitattn.quant import QuantizedKV, dequantize_kv
from tests.support.counting_timer import CountingTimer

CPU = torch.device("cpu")
E4M3 = torch.float8_e4m3fn
SMALL = Case(
    name="small",
    seq_lens=(5, 33, 16),
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim=16,
    page_size=16,
)
LIMITS = Ceilings(copy=3.0e12, read=3.05e12, read_method="torch.sum")

# Microseconds of K, V, q and out at 3,050 GB/s, worked out by hand, for the cases in their order.
FLOORS_US = (11.0, 176, 44.1, 176, 704, 353, 352, 352, 44.1, 704, 176, 704, 352)


@pytest.mark.parametrize(("case", "floor_us"), list(zip(CASES, FLOORS_US, strict=False)))
def test_bytes_give_the_known_floor(case: Case, floor_us: float) -> None:
    assert case.floor_s(3.05e12) * 1e6 == pytest.approx(floor_us, rel=5e-3)


def test_bytes_of_a_case_by_hand() -> None:
    assert SMALL.kv_bytes == (5 + 33 + 16) * 2 * 2 * 16 * 2
    assert SMALL.num_bytes == SMALL.kv_bytes + 2 * 3 * 4 * 16 * 2
    window = dataclasses.replace(SMALL, window_left=19, q_len=2)
    assert window.kv_bytes == (5 + 21 + 16) * 2 * 2 * 16 * 2
    assert window.num_bytes == window.kv_bytes + 2 * 2 * 3 * 4 * 16 * 2
    eight_bit = dataclasses.replace(SMALL, kv_dtype="float8_e4m3fn")
    assert eight_bit.kv_bytes * 2 == SMALL.kv_bytes


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_supported(case: Case) -> None:
    assert check_config(**case.planner_arguments("shared")).supported


def test_select_by_group_and_pattern_keeps_the_order() -> None:
    assert len(select("figures")) == 13
    assert [case.group for case in select("layouts,chain")] == ["layouts", "chain", "chain"]
    picked = [case.name for case in select("*-d64-*,B1x8k-*")]
    assert picked[0].startswith("B1x8k")
    assert all("d64" in name for name in picked[1:])
    with pytest.raises(ValueError, match="no case matches 'nope'"):
        select("figures,nope")


@pytest.mark.parametrize(("batch", "copies"), [("B1x8k", 7), ("B64x8k", 1), ("B1x1k", 32)])
def test_copies_exceed_the_cache_four_times(batch: str, copies: int) -> None:
    (case,) = select(f"{batch}-h32_8-d128-p16")
    assert num_copies(case.kv_bytes, 52 << 20, 32) == copies


def test_batch_has_every_page_once_and_lengths_that_agree() -> None:
    batch = make_batch(SMALL, 2, CPU)
    assert batch.q.shape == (2, 3, 4, 16)
    assert batch.kv.shape == (2, 5, 2, 16, 2, 16)
    assert sorted(batch.kv_indices.tolist()) == list(range(5))
    assert batch.kv_indptr.tolist() == [0, 1, 4, 5]
    assert batch.last_page_len.tolist() == [5, 1, 16]
    assert batch.block_table.shape == (3, 3)
    for b in range(3):
        start, stop = batch.kv_indptr[b : b + 2].tolist()
        assert batch.block_table[b, : stop - start].equal(batch.kv_indices[start:stop])
    again = make_batch(SMALL, 2, CPU)
    assert again.kv.equal(batch.kv)
    assert again.block_table.equal(batch.block_table)
    assert not batch.kv[0].equal(batch.kv[1])


def test_pages_before_a_window_are_one() -> None:
    case = dataclasses.replace(SMALL, seq_lens=(5, 133, 64), window_left=30)
    batch = make_batch(case, 1, CPU)
    assert case.dead_pages_per_seq == (0, 6, 2)
    assert batch.kv.shape[1] == case.num_pages == 1 + 3 + 2 + 1
    dead = {*batch.block_table[1, :6].tolist(), *batch.block_table[2, :2].tolist()}
    live = [batch.block_table[0, 0], *batch.block_table[1, 6:9], *batch.block_table[2, 2:4]]
    assert len(dead) == 1
    assert len({int(page) for page in live} - dead) == 6
    assert batch.kv_indices[1:10].equal(batch.block_table[1])
    assert batch.kv_indptr.tolist() == [0, 1, 10, 14]


def test_separate_table_names_the_same_pages() -> None:
    batch = make_batch(SMALL, 1, CPU)
    table, pool = batch.separate_table(), batch.separate_pool(0)
    for kv in (0, 1):
        assert pool[table[1, kv].long()].equal(batch.kv[0][batch.block_table[1].long(), kv])


def test_summary() -> None:
    timing = summarize([1.0, 2.0, 3.0, 4.0, 5.0])
    assert timing == Timing(median_s=3.0, p10_s=1.4, p90_s=4.6, num_samples=5)
    assert Timing(1e-3, 0.0, 0.0, 1).gb_per_s(3 * 10**9) == 3000.0


def test_error_is_infinite_where_something_was_not_written() -> None:
    expected = torch.ones(2, 4, 16, dtype=torch.float64)
    assert oracle.relative_error(expected.bfloat16(), expected) == 0.0
    half_written = expected.clone()
    half_written[1, 3, 15] = math.nan
    assert oracle.relative_error(half_written, expected) == math.inf


class _Wrong:
    """Writes zeros."""

    name = "wrong"

    def version(self) -> str:
        return "1"

    def build_key(self, case: Case) -> Hashable | None:
        return case.head_dim

    def prepare(self, batch: Batch) -> Prepared:
        outs = torch.empty_like(batch.q)
        return Prepared(runs=tuple(out.zero_ for out in outs), outs=outs)


class _Absent(_Wrong):
    name = "absent"

    def version(self) -> str:
        raise SkipError("not installed")


class _Broken(_Wrong):
    name = "broken"

    def prepare(self, batch: Batch) -> Prepared:
        raise RuntimeError("no kernel image")


@pytest.fixture(params=["graph", "events"])
def results(request: pytest.FixtureRequest) -> list[Result]:
    contenders: list[Contender] = [
        _Wrong(),
        _Absent(),
        _Broken(),
        JitAttn("shared"),
        JitAttn("separate"),
    ]
    num_runs = 4 if request.param == "graph" else 1
    method = Method(request.param, num_runs, rounds=2)
    batch = make_batch(SMALL, 2, CPU)
    timer = CountingTimer()
    return bench_case(batch, contenders, method, timer)  # type: ignore[arg-type]


def test_only_right_contenders_are_timed(results: list[Result]) -> None:
    statuses = {result.contender: result.status for result in results}
    assert statuses == {
        "wrong": "wrong",
        "absent": "skipped",
        "broken": "failed",
        "jitattn-shared": "timed",
        "jitattn-separate": "timed",
    }
    for result in results:
        assert (result.timing is not None) == (result.status == "timed")
        assert bool(result.reason) == (result.status != "timed")
    ours = results[-1]
    assert ours.timing is not None
    assert ours.timing.num_samples == 4
    assert ours.facts["same_bits_as_shared"] is True
    assert ours.error is not None
    assert ours.error < 1e-2


def test_runs_of_a_graph_are_divided(results: list[Result]) -> None:
    timing = results[-1].timing
    assert timing is not None
    assert timing.median_s in (0.25, 1.0)


def test_unsupported_case_is_skipped_with_the_reason() -> None:
    case = dataclasses.replace(SMALL, head_dim=40)
    with pytest.raises(SkipError, match="head_dim"):
        JitAttn("shared").prepare(make_batch(case, 1, CPU))


KINDS: dict[str, dict[str, object]] = {
    "plain": {},
    "e4m3": {"kv_dtype": "float8_e4m3fn"},
    "nvfp4": {"kv_dtype": "nvfp4"},
    "int4": {"kv_dtype": "int4", "kv_layout": "HND"},
    "hnd": {"kv_layout": "HND"},
    "window": {"seq_lens": (5, 133, 64), "window_left": 30},
    "sinks": {"use_sinks": True},
    "q4": {"q_len": 4},
    "all": {
        "seq_lens": (5, 133, 64),
        "window_left": 30,
        "use_sinks": True,
        "q_len": 4,
        "kv_layout": "HND",
    },
}


def kind_of_case(kind: str) -> Case:
    return dataclasses.replace(SMALL, **KINDS[kind])  # type: ignore[arg-type]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_variant_computes_every_kind_of_case(kind: str, variant: str) -> None:
    if kind in ("nvfp4", "int4") and VARIANTS[variant].cache is not caches.whole:
        return  # no case asks for it
    batch = make_batch(kind_of_case(kind), 2, CPU)
    try:
        prepared = JitAttn(variant).prepare(batch)
    except SkipError as reason:
        pytest.skip(str(reason))
    prepared.outs.fill_(math.nan)
    for run in prepared.runs:
        run()
    assert oracle.Oracle(batch).error(prepared.outs) < 5e-3


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_nvfp4_pools_are_those_of_the_definition(
    kv_layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is quantised at once; the oracle reads what is stored, scales included."""
    case = dataclasses.replace(SMALL, kv_dtype="nvfp4", head_dim=32, kv_layout=kv_layout)
    monkeypatch.setattr(workloads, "_PAGES_AT_ONCE", 3)
    batch = make_batch(case, 2, CPU)
    page = (2, 16) if kv_layout == "HND" else (16, 2)
    assert batch.block_scales is not None
    assert (batch.kv.shape, batch.kv.dtype) == ((2, 5, 2, *page, 16), torch.uint8)
    assert batch.block_scales.shape == (2, 5, 2, *page, 2)
    held = caches.whole(batch, 1)
    assert isinstance(held, QuantizedKV)
    assert held.v_block_scales.data_ptr() == batch.block_scales[1, 0, 1].data_ptr()
    values = dequantize_kv(batch.kv, dtype="nvfp4", block_scales=batch.block_scales)
    assert 0.9 < float(values.std()) < 1.1
    right = oracle.reference(batch, 1)
    plain = dataclasses.replace(
        batch, case=dataclasses.replace(case, kv_dtype="bfloat16"), kv=values, block_scales=None
    )
    assert oracle.reference(plain, 1).equal(right)
    twice = dataclasses.replace(batch, block_scales=batch.block_scales.float().mul(2).to(E4M3))
    assert oracle.relative_error(oracle.reference(twice, 1), right) > 0.3


def test_bytes_of_nvfp4_are_numbers_and_scales() -> None:
    bf16, e4m3, nvfp4, rows, g32 = (case for case in CASES if case.group == "nvfp4")
    assert (bf16.seq_lens, e4m3.seq_lens) == (nvfp4.seq_lens, nvfp4.seq_lens)
    assert e4m3.name == GROUPS["nvfp4"].against
    assert bf16.kv_bytes == 2 * e4m3.kv_bytes == 64 * 8192 * 2 * 8 * 128 * 2
    assert nvfp4.kv_bytes == 64 * 8192 * 2 * 8 * (64 + 8)
    assert (rows.kv_bytes, g32.kv_bytes) == tuple(64 * 8192 * 2 * 8 * (64 + n) for n in (4, 16))
    kinds = {a["kv_dtype"] for a in bundle.configurations(select("nvfp4"), "sm_90a")}
    assert kinds == {"bfloat16", "float8_e4m3fn", "nvfp4", "int4", "int4_g32"}


def test_table_of_cache_types(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        (case, [_timed(BASELINE, seconds)])
        for case, seconds in zip(select("nvfp4")[:3], (800e-6, 400e-6, 250e-6), strict=True)
    ]
    report.print_tables(rows, LIMITS)
    printed = capsys.readouterr().out
    # 605 MB of 604 MB of K and V, and q and out: 198.4 us at 3,050 GB/s, of 250.
    for shown in ("605", "198.4", "79.3", "1.600", "0.500", "% read"):
        assert shown in printed
    report.print_tables(rows[:1], LIMITS)
    assert "speed / B64x8k-h32_8-d128-p16-e4m3fn's" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "ignored"),
    [("window", {"window_left": -1}), ("window", {"window_left": 29}), ("q4", {"q_len": 1})],
)
def test_oracle_notices_what_is_ignored(kind: str, ignored: dict[str, object]) -> None:
    batch = make_batch(kind_of_case(kind), 1, CPU)
    case = dataclasses.replace(batch.case, **ignored)  # type: ignore[arg-type]
    wrong = dataclasses.replace(batch, case=case)
    if kind == "q4":  # every token sees all keys, as without the causal mask
        wrong = dataclasses.replace(
            wrong,
            case=dataclasses.replace(
                case, seq_lens=tuple(n for n in case.seq_lens for _ in "four")
            ),
            block_table=batch.block_table.repeat_interleave(4, dim=0),
        )
    assert oracle.Oracle(batch).error(oracle.reference(wrong, 0)[None]) > 2e-2


def test_oracle_notices_sinks_that_are_ignored() -> None:
    batch = make_batch(kind_of_case("sinks"), 1, CPU)
    without = dataclasses.replace(batch, sinks=None)
    assert batch.sinks is not None
    assert batch.sinks.equal(batch.sinks.bfloat16().float())
    assert oracle.Oracle(batch).error(oracle.reference(without, 0)[None]) > 0.3


def test_variants_have_the_strides_they_are_named_after() -> None:
    batch = make_batch(SMALL, 1, CPU)
    layer = VARIANTS["cross-layer"].cache(batch, 0)
    k, v = VARIANTS["packed"].cache(batch, 0)
    moved = VARIANTS["unaligned"].cache(batch, 0)
    assert isinstance(layer, torch.Tensor)
    assert isinstance(moved, torch.Tensor)
    assert layer.stride(0) == 4 * batch.kv[0].stride(0)
    assert k.stride(-2) == v.stride(-2) == 2 * SMALL.head_dim
    assert k.data_ptr() + 2 * SMALL.head_dim == v.data_ptr()
    assert moved.data_ptr() % 16 == 2


def test_mask_of_xqa_is_causal() -> None:
    mask = _causal_mask(make_batch(kind_of_case("q4"), 1, CPU))
    assert mask.dtype == torch.uint16
    assert mask.tolist() == [[[1, 0], [3, 0], [7, 0], [15, 0]]] * 3


def test_method_depends_on_the_case_alone() -> None:
    short, long = select("B1x8k-*,B64x8k-h32_8-d128-p16")
    assert choose_method(short, "auto", LIMITS.read, 32, 3) == Method("graph", 32, 3)
    assert choose_method(long, "auto", LIMITS.read, 32, 3) == Method("events", 1, 3)
    assert choose_method(long, "graph", LIMITS.read, 8, 1) == Method("graph", 8, 1)


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    monkeypatch.setenv("JITATTN_JIT", "0")
    return records.environment({"fa2": "0.7.2"})


def test_environment_says_what_a_figure_depends_on(env: dict[str, object]) -> None:
    wanted = {"time", "commit", "jitattn", "compiler", "torch", "cuda", "python", "cores"}
    assert wanted | {"card", "driver", "rivals"} <= set(env)
    assert env["compiler"] == "not asked, JITATTN_JIT=0"
    assert env["rivals"] == {"fa2": "0.7.2"}


def test_records_are_json_lines(
    results: list[Result], env: dict[str, object], tmp_path: Path
) -> None:
    method = Method("graph", 4, 2)
    path = tmp_path / "new" / "decode.jsonl"
    for result in results:
        entry = to_record(result, SMALL, method, LIMITS, L2Policy.WRITE, env)
        records.append_json(path, [entry])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["contender"] for line in lines] == [result.contender for result in results]
    skipped, timed = lines[1], lines[-1]
    assert skipped["reason"] == "not installed"
    assert "median_s" not in skipped
    assert timed["schema"] == records.SCHEMA
    assert (timed["kind"], timed["l2_policy"], timed["method"]) == ("decode", "write", "graph")
    assert timed["gb_per_s"] == pytest.approx(SMALL.num_bytes / timed["median_s"] / 1e9)
    assert timed["copy_fraction"] == pytest.approx(1e9 * timed["gb_per_s"] / LIMITS.copy)
    assert timed["environment"]["rivals"] == {"fa2": "0.7.2"}


def _timed(contender: str, median_s: float) -> Result:
    return Result(contender, "timed", timing=Timing(median_s, median_s, median_s, 1))


def test_table_compares_with_the_best_rival(capsys: pytest.CaptureFixture[str]) -> None:
    (case,) = select("B1x8k-*")
    rows = [
        _timed("fa2", 30e-6),
        _timed("xqa", 24e-6),
        Result("fa3", "skipped", "absent"),
        _timed("jitattn-shared", 20e-6),
        _timed("jitattn-separate", 21e-6),
    ]
    assert report.best_rival(rows) == ("xqa", 24e-6)
    assert report.best_ours_s(rows) == 20e-6
    report.print_tables([(case, rows)], LIMITS)
    printed = capsys.readouterr().out
    for text in (case.name, "11.0", "30.0", "skipped", "1679", "56.0", "xqa", "1.200", "1.050"):
        assert text in printed


def test_bundle_has_every_supported_case_with_both_tables() -> None:
    chosen = bundle.configurations(select("B1x8k-*,*-e4m3fn"), "sm_90a")
    assert [arguments["page_table"] for arguments in chosen] == ["shared", "separate"] * 2
    assert {arguments["kv_dtype"] for arguments in chosen} == {"bfloat16", "float8_e4m3fn"}
