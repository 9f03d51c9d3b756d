"""The parts of the prefill bench that need no GPU."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import bench_prefill, bundle, prefill_contenders, prefill_report, records
from bench.bench_error import errors_of
from bench.bench_prefill import to_record
from bench.cases import BASELINE
from bench.contenders import Prepared, SkipError
from bench.prefill_cases import PREFILL_CASES, PREFILL_GROUPS, PrefillCase, select_prefill
from bench.prefill_contenders import (
    WAYS,
    Fa3Prefill,
    FlashInferPod,
    FlashInferPrefill,
    Inputs,
    JitAttnPrefill,
    PrefillContender,
    PrefillOracle,
    make_inputs,
    sampled_rows,
    with_page_size,
)
from bench.timing import L2Policy, Timing
from bench.turns import Method, Result, choose_method
from jitattn.kernels.registry import check_config
from tests.support.counting_timer import CountingTimer
from tests.support.fake_contender import Fake, check_wrong_outputs

CPU = torch.device("cpu")
TINY = PrefillCase("tiny", (70, 1), (90, 40), num_qo_heads=4, num_kv_heads=2, head_dim=32)
MIXED = dataclasses.replace(TINY, q_lens=(1, 1, 9), seq_lens=(33, 17, 20))
KINDS: dict[str, dict[str, object]] = {
    "plain": {},
    "window": {"window_left": 11},
    "cap": {"logits_soft_cap": 1.0},
    "sinks": {"window_left": 11, "use_sinks": True},
    "e4m3": {"kv_dtype": "float8_e4m3fn"},
}


def kind_of_case(kind: str, case: PrefillCase = TINY) -> PrefillCase:
    return dataclasses.replace(case, **KINDS[kind])  # type: ignore[arg-type]


def run(
    *contenders: PrefillContender, case: PrefillCase = TINY, kind: str = "events"
) -> list[Result]:
    method = Method(kind, 4 if kind == "graph" else 1, rounds=2)
    inputs = make_inputs(case, CPU, copies=2 if kind == "graph" else 1)
    return bench_prefill.bench_case(inputs, contenders, method, CountingTimer())  # type: ignore[arg-type]


def seen(case: PrefillCase) -> int:
    return sum(
        0 <= kv_len - q_len + row - key <= (case.window_left if case.window_left >= 0 else kv_len)
        for q_len, kv_len in zip(case.q_lens, case.seq_lens, strict=True)
        for row in range(q_len)
        for key in range(kv_len)
    )


@pytest.mark.parametrize("window_left", [-1, 0, 11, 45, 200])
def test_work_counts_the_keys_that_are_seen(window_left: int) -> None:
    case = dataclasses.replace(TINY, window_left=window_left)
    assert case.flop == 2 * 2 * 32 * 4 * seen(case)


@pytest.mark.parametrize("case", PREFILL_CASES, ids=lambda case: f"{case.group}-{case.name}")
def test_every_case_is_supported(case: PrefillCase) -> None:
    for name, way in WAYS.items():
        if JitAttnPrefill(name).name in PREFILL_GROUPS[case.group].contenders:
            assert check_config(**way.planner_arguments(case)).supported


def test_method_depends_on_the_case_alone() -> None:
    methods = {c.name: choose_method(c.floor_s, "auto", 16, 3).kind for c in PREFILL_CASES}
    graphs = [name for name, kind in methods.items() if kind == "graph"]
    assert graphs == ["1x1k", "1x512"]
    assert choose_method(TINY.floor_s, "auto", 16, 3) == Method("graph", 16, 3)
    assert choose_method(TINY.floor_s, "events", 16, 3) == Method("events", 1, 3)


@pytest.mark.parametrize("q_len", [1, 2, 13, 128, 16_384])
def test_sampled_rows(q_len: int) -> None:
    rows = sampled_rows(q_len)
    assert rows[0] == 0
    assert rows[-1] == q_len - 1
    assert len(rows) == len(set(rows)) <= 20


@pytest.mark.parametrize("method", ["graph", "events"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_right_output_is_timed(kind: str, method: str) -> None:
    (result,) = run(JitAttnPrefill("shared"), case=kind_of_case(kind), kind=method)
    assert (result.status, result.reason) == ("timed", "")
    assert result.timing is not None
    assert result.timing.median_s == (0.25 if method == "graph" else 1.0)
    assert result.timing.num_samples == 4
    assert result.facts["plan_s"] == 1.0
    assert ("event_median_s" in result.facts) == (method == "graph")


@pytest.mark.parametrize("kind", ["window", "cap", "sinks"])
def test_oracle_notices_what_is_ignored(kind: str) -> None:
    inputs = make_inputs(kind_of_case(kind), CPU)
    plain = Inputs(TINY, dataclasses.replace(inputs.batch, sinks=None), inputs.q, inputs.qo_indptr)
    outs = JitAttnPrefill("shared").prepare(plain)
    outs.runs[0]()
    assert PrefillOracle(plain).error(outs.outs) < 5e-3
    assert PrefillOracle(inputs).error(outs.outs) > 2e-2


@pytest.mark.parametrize("name", WAYS)
def test_every_way_is_right(name: str) -> None:
    for case in (TINY, MIXED):
        results = run(JitAttnPrefill("shared"), JitAttnPrefill(name), case=case)
        assert [result.status for result in results] == ["timed", "timed"]
        if name in ("separate", "cross-layer"):
            assert results[1].facts["same_bits_as_shared"] is True


def test_parts_of_a_mixed_batch() -> None:
    (mixed,) = select_prefill("60x1-*")
    assert list(WAYS["apart"].parts(mixed)) == [slice(0, 60), slice(60, 64)]
    assert list(WAYS["shared"].parts(mixed)) == [slice(0, 64)]
    assert list(WAYS["apart"].parts(TINY)) == [slice(0, 2)]


@pytest.mark.parametrize("page_size", [1, 32])
def test_other_pages_hold_the_same_tokens(page_size: int) -> None:
    inputs = make_inputs(TINY, CPU, copies=2)
    other = dataclasses.replace(inputs, batch=with_page_size(inputs.batch, page_size))
    assert other.batch.kv.shape[3] == page_size
    for copy in (0, 1):
        for a, b in zip(inputs.contiguous(copy), other.contiguous(copy), strict=True):
            assert a.shape == (130, 2, 32)
            assert a.equal(b)


def test_a_wrong_output_is_not_timed() -> None:
    fakes = [Fake(name, JitAttnPrefill("shared")) for name in ("wrong", "broken", "tired")]
    check_wrong_outputs(run(*fakes))


def test_rivals_refuse_what_they_would_drop() -> None:
    e4m3 = kind_of_case("e4m3")
    both = dataclasses.replace(TINY, use_sinks=True, logits_soft_cap=30.0)
    fa2, fa3 = FlashInferPrefill("fa2"), FlashInferPrefill("fa3")
    assert fa2.refusal(TINY) is fa2.refusal(e4m3) is None
    for contender, case in ((fa3, TINY), (fa3, e4m3), (fa3, both), (fa2, both)):
        assert contender.build_key(case) is None
        with pytest.raises(SkipError):
            contender.prepare(make_inputs(case, CPU))
    with pytest.raises(SkipError, match="one dtype"):
        Fa3Prefill(paged=True).prepare(make_inputs(e4m3, CPU))


class _Wrapper:
    """Stands for FlashInfer's, and remembers how it was called."""

    def __init__(self, buffer: Tensor, layout: str, **made: object) -> None:
        self.made, self.plan_arguments, self.runs = made, {}, []  # type: ignore[var-annotated]

    def plan(self, *positional: object, **named: object) -> None:
        self.plan_arguments = named

    def run(self, *positional: object, out: Tensor) -> None:
        self.runs.append(positional)


class _SinkWrapper(_Wrapper):
    pass


@pytest.mark.parametrize("kind", ["window", "cap", "sinks"])
def test_flashinfer_gets_everything(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=_Wrapper,
        BatchAttentionWithAttentionSinkWrapper=_SinkWrapper,
    )
    monkeypatch.setattr(prefill_contenders, "flashinfer", lambda: module)
    monkeypatch.setattr(prefill_contenders, "workspace", lambda *_: torch.empty(0))
    inputs = make_inputs(dataclasses.replace(kind_of_case(kind), head_dim=64), CPU)
    call = FlashInferPrefill("fa3").prepare(inputs).runs[0]
    call()
    wrapper = call.func.__self__  # type: ignore[attr-defined]
    assert wrapper.made["backend"] == "fa3"
    assert wrapper.plan_arguments["window_left"] == inputs.case.window_left
    assert wrapper.plan_arguments["logits_soft_cap"] == inputs.case.logits_soft_cap
    assert isinstance(wrapper, _SinkWrapper) == (kind == "sinks")
    if kind == "sinks":
        assert wrapper.made["window_left"] == 11
        assert wrapper.runs[0][2] is inputs.batch.sinks


class _Ops:
    """Stands for FlashAttention-3, and remembers how it was called."""

    def __init__(self) -> None:
        self.calls: dict[str, tuple[object, ...]] = {}

    def get_scheduler_metadata(self, *arguments: object) -> Tensor:
        self.calls["schedule"] = arguments
        return torch.zeros(1)

    def fwd(self, *arguments: object) -> None:
        self.calls["fwd"] = arguments


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("kind", ["plain", "window", "cap", "sinks"])
def test_fa3_gets_everything(kind: str, paged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = _Ops()
    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", ops, raising=False)
    inputs = make_inputs(kind_of_case(kind), CPU)
    prepared = Fa3Prefill(paged=paged).prepare(inputs)
    prepared.runs[0]()
    schedule, forward = ops.calls["schedule"], ops.calls["fwd"]
    assert (len(schedule), len(forward)) == (23, 37)
    window = (inputs.case.window_left, 0) if inputs.case.window_left >= 0 else (-1, -1)
    assert schedule[17:20] == (*window, kind == "cap")
    assert forward[12:14] == (70, 90) == schedule[1:3]
    assert forward[24:28] == (True, *window, inputs.case.logits_soft_cap)
    assert (forward[33] is not None) == (kind == "sinks")
    assert (forward[14] is not None) == (forward[11] is not None) == paged
    assert (forward[8] is None) == (schedule[10] is None) == paged
    assert schedule[14] == (16 if paged else None)
    assert prepared.plan is not None
    if not paged:
        k = forward[1]
        assert isinstance(k, Tensor)
        assert k.equal(inputs.contiguous(0)[0])


def test_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITATTN_JIT", "0")
    env = records.environment({"fa3-paged": "vllm"})
    results = run(Fake("broken", JitAttnPrefill("shared")), JitAttnPrefill("shared"), kind="graph")
    method = Method("graph", 4, 2)
    lines = [to_record(result, TINY, method, L2Policy.WRITE, env) for result in results]
    records.append_json(tmp_path / "prefill.jsonl", lines)
    failed, timed = map(json.loads, (tmp_path / "prefill.jsonl").read_text().splitlines())
    assert failed["status"] == "failed"
    assert "median_s" not in failed
    assert (timed["kind"], timed["method"], timed["num_runs"]) == ("prefill", "graph", 4)
    assert timed["tflop_per_s"] == pytest.approx(TINY.flop / timed["median_s"] / 1e12)
    assert timed["event_median_s"] == 1.0


def _timed(contender: str, median_s: float) -> Result:
    return Result(contender, "timed", timing=Timing(median_s, median_s, median_s, 1))


class _FakePod:
    """FlashInfer's wrapper of prefill on decode: notes its plan, and writes 1 and 2."""

    planned: tuple[Any, ...] = ()

    def __init__(self, buffer: Tensor, layout: str) -> None:
        assert layout == "NHD"

    def plan(self, *arguments: Tensor | int, **dtypes: torch.dtype) -> None:
        _FakePod.planned = arguments

    def run(self, q: Tensor, kv: Tensor, q_of_decode: Tensor, *_: Tensor, causal_p: bool) -> None:
        assert causal_p
        for part, value in ((q, 1.0), (q_of_decode, 2.0)):
            torch.empty_like(part).fill_(value)


def test_prefill_on_decode_gets_both_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        prefill_contenders,
        "flashinfer",
        lambda: SimpleNamespace(BatchPODWithPagedKVCacheWrapper=_FakePod),
    )
    monkeypatch.setattr(prefill_contenders, "workspace", lambda *_: torch.empty(0))
    case = dataclasses.replace(TINY, q_lens=(1, 1, 3, 5), seq_lens=(20, 1, 30, 17))
    inputs = make_inputs(case, CPU)
    prepared = FlashInferPod().prepare(inputs)
    prepared.runs[0]()
    assert [int(row[0, 0]) for row in prepared.outs[0]] == [2] * 2 + [1] * 8
    rows, pages, indices, lasts = _FakePod.planned[:4]
    assert rows.tolist() == [0, 3, 8]
    counts = [-(-n // case.page_size) for n in case.seq_lens]
    assert pages.tolist() == [0, counts[2], counts[2] + counts[3]]
    assert indices.tolist() == inputs.batch.kv_indices[sum(counts[:2]) :].tolist()
    assert lasts.tolist() == inputs.batch.last_page_len[2:].tolist()
    assert _FakePod.planned[4].tolist() == [0, 1, 2]
    with pytest.raises(SkipError, match="not mixed"):
        FlashInferPod().prepare(make_inputs(TINY, CPU))


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    short, long = select_prefill("1x4k,1x128-on-64k")
    e4m3 = select_prefill("1x128-on-64k-e4m3")[0]
    (mixed,) = select_prefill("60x1-*")
    rows = [
        (
            short,
            [
                _timed("flashinfer-fa3", 300e-6),
                _timed("fa3-paged", 250e-6),
                _timed("fa3-contiguous", 200e-6),
                _timed(BASELINE, 200e-6),
            ],
        ),
        (long, [Result("fa3-paged", "skipped", "absent"), _timed(BASELINE, 240e-6)]),
        (e4m3, [_timed(BASELINE, 200e-6)]),
        (mixed, [_timed(BASELINE, 400e-6), _timed("jitattn-apart", 500e-6)]),
    ]
    compared = prefill_report.ratios(rows[0][1])
    assert compared["best paged rival"] == (pytest.approx(1.25), "fa3-paged")
    prefill_report.print_case(short, "events", rows[0][1])
    prefill_report.print_tables(rows)
    printed = capsys.readouterr().out
    for words in (
        "fa3-paged 250.0 us, 550 TFLOP/s",
        "200.0 (687)",
        "figures: best paged rival / jitattn: geometric mean 1.250",
        "figures: fa3-contiguous / jitattn: geometric mean 1.000",
        "1x128-on-64k-e4m3: 1.200 x the speed of 1x128-on-64k",
        "skipped",
        "apart / shared",
    ):
        assert words in printed


def test_bundle_has_what_the_cases_need() -> None:
    chosen = bundle.prefill_configurations(select_prefill("figures,layouts,mixed"), "sm_90a")
    assert [(a["page_size"], a["page_table"]) for a in chosen] == [
        (16, "shared"),
        (1, "shared"),
        (64, "shared"),
        (128, "shared"),
        (16, "separate"),
    ]
    more = bundle.prefill_configurations(select_prefill("more"), "sm_90a")
    assert len(more) == 9
    assert {a["logits_soft_cap"] for a in more} == {0.0, 30.0, 50.0}


def test_error_is_infinite_where_a_row_was_not_written() -> None:
    inputs = make_inputs(TINY, CPU)
    assert PrefillOracle(inputs).error(torch.full_like(inputs.q, math.nan)) == math.inf


def test_errors_of_a_seed() -> None:
    """What a contender rounds and gets wrong counts, and each seed has inputs of its own."""
    case = dataclasses.replace(TINY, q_lens=(70,), seq_lens=(70,))
    right = JitAttnPrefill("shared")
    errors = [errors_of(right, case, CPU, seed) for seed in (0, 1)]
    assert errors[0] != errors[1]
    for mean, top in errors:
        assert 1e-4 < mean < 4e-3, "a rounding to bfloat16"
        assert mean < top < 0.1
    assert errors_of(_Zero("zero", right), case, CPU, 0)[0] == pytest.approx(1.0)


class _Zero(Fake):
    """Answers with zeros."""

    def prepare(self, inputs: Inputs, /) -> Prepared:
        prepared = self._right.prepare(inputs)
        return Prepared(runs=(lambda: None,), outs=torch.zeros_like(prepared.outs))
