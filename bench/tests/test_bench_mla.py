"""The parts of the bench of latent attention that need no GPU."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import bench_mla, bundle, flashmla, mla_contenders, mla_report, records
from bench.bench_mla import to_record
from bench.cases import BASELINE
from bench.ceilings import TensorCeilings
from bench.contenders import Prepared, SkipError
from bench.mla_cases import MLA_CASES, MLA_GROUPS, TOKEN_BYTES, Form, MLACase, select_mla
from bench.mla_contenders import (
    K_SCALE,
    MLA_WAYS,
    FlashInferMLA,
    FlashMLA,
    JitAttnMLA,
    MLAContender,
    MLAInputs,
    MLAOracle,
    make_mla_inputs,
)
from bench.timing import L2Policy, Timing
from bench.turns import Method, Result, choose_method
from jitattn.kernels.registry import check_config
from tests.support.counting_timer import CountingTimer
from tests.support.fake_contender import Fake, check_wrong_outputs

CPU = torch.device("cpu")
TINY = MLACase(name="tiny", q_lens=(20, 1, 2), seq_lens=(37, 20, 17), num_heads=2, page_size=16)
ONE_EACH = dataclasses.replace(TINY, q_lens=(1, 1), seq_lens=(33, 16))
FORMS: tuple[Form, ...] = ("bfloat16", "e4m3", "rows656")
LIMITS = TensorCeilings(copy=3e12, read=3.1e12, read_method="fake", product=7e14)


def run(*contenders: MLAContender, case: MLACase = ONE_EACH, kind: str = "events") -> list[Result]:
    method = Method(kind, 4 if kind == "graph" else 1, rounds=2)
    inputs = make_mla_inputs(case, CPU, copies=2 if kind == "graph" else 1)
    return bench_mla.bench_case(inputs, contenders, method, CountingTimer())  # type: ignore[arg-type]


def one(name: str) -> MLACase:
    (case,) = select_mla(name)
    return case


def test_work_counts_the_keys_that_are_seen() -> None:
    seen = sum(
        key <= kv_len - q_len + row
        for q_len, kv_len in zip(TINY.q_lens, TINY.seq_lens, strict=True)
        for row in range(q_len)
        for key in range(kv_len)
    )
    assert TINY.flop == 2 * (576 + 512) * 2 * seen


def test_bytes() -> None:
    assert TOKEN_BYTES == {"bfloat16": 1152, "e4m3": 576, "rows656": 656}
    case = one("B64x4k-h128-p64")
    assert case.kv_bytes == 64 * 4096 * 1152
    assert case.num_bytes - case.kv_bytes == 64 * 128 * (576 + 512) * 2
    assert one("B64x4k-h16-p64-rows656").kv_bytes == 64 * 4096 * 656
    # What design figures divide 418.7 us and 144.5 us by.
    assert one("B128x8k-h16-p64").kv_bytes / 418.7e-6 == pytest.approx(2885e9, rel=1e-3)
    assert case.flop / 144.5e-6 == pytest.approx(505e12, rel=1e-3)


def test_floor_is_that_of_bytes_or_of_products() -> None:
    few, many = one("B64x4k-h16-p64"), one("B64x4k-h128-p64")
    assert few.floor_s(LIMITS) == few.num_bytes / 3.1e12
    assert many.floor_s(LIMITS) == many.flop / 7e14 > many.num_bytes / 3.1e12
    assert few.is_bound_by_bytes(LIMITS)
    assert not many.is_bound_by_bytes(LIMITS)


@pytest.mark.parametrize("case", MLA_CASES, ids=lambda case: f"{case.group}-{case.name}")
def test_every_case_is_supported(case: MLACase) -> None:
    for name, way in MLA_WAYS.items():
        if JitAttnMLA(name).name in MLA_GROUPS[case.group].contenders:
            assert check_config(planner="mla", **way.planner_arguments(case)).supported


def test_method_depends_on_the_case_alone() -> None:
    methods = {c.name: choose_method(c.method_floor_s, "auto", 32, 3).kind for c in MLA_CASES}
    assert methods["B1x4k-h128-p64"] == methods["B64x4k-h16-p64"] == "graph"
    assert methods["B128x8k-h16-p64"] == methods["4x512-on-8k-h16-p64"] == "events"


@pytest.mark.parametrize("method", ["graph", "events"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", [TINY, ONE_EACH], ids=["extend", "decode"])
def test_a_right_output_is_timed(case: MLACase, form: Form, method: str) -> None:
    case = dataclasses.replace(case, form=form)
    (result,) = run(JitAttnMLA("shared"), case=case, kind=method)
    assert (result.status, result.reason) == ("timed", "")
    assert result.error is not None
    assert 0 < result.error < 5e-3, "a rounding to bfloat16"
    assert result.timing is not None
    assert result.timing.median_s == (0.25 if method == "graph" else 1.0)
    assert result.facts["plan_s"] == 1.0
    assert ("event_median_s" in result.facts) == (method == "graph")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MLA_WAYS)
def test_every_way_is_right(name: str, form: Form) -> None:
    for case in (TINY, ONE_EACH):
        case = dataclasses.replace(case, form=form)
        plain, way = run(JitAttnMLA("shared"), JitAttnMLA(name), case=case)
        assert plain.status == "timed"
        if form == "rows656" and name in ("separate", "pair"):
            assert (way.status, way.reason[:4]) == ("skipped", "rows")
        else:
            assert way.status == "timed"
            assert name == "shared" or way.facts["same_bits_as_shared"] is True


@pytest.mark.parametrize("page_size", [1, 16, 32])
def test_pages_hold_what_requests_have(page_size: int) -> None:
    case = dataclasses.replace(TINY, page_size=page_size)
    inputs = make_mla_inputs(case, CPU, copies=2)
    table, separate = inputs.block_table, inputs.separate_table()
    assert separate[:, 0].equal(table)
    indptr = inputs.kv_indptr.tolist()
    for b, (start, stop) in enumerate(itertools.pairwise(indptr)):
        assert table[b, : stop - start].equal(inputs.kv_indices[start:stop])
        latent, rope = inputs.request(1, b)
        assert latent.shape == (case.seq_lens[b], 512)
        pages = separate[b, 1, : stop - start].long()
        apart = inputs.rope_pool(1)[pages].flatten(0, 1)[: case.seq_lens[b]]
        assert apart.double().equal(rope)
    assert not separate[:, 1].equal(table)


class _Deaf(JitAttnMLA):
    """Ignores a part of the inputs."""

    def __init__(self, part: str) -> None:
        super().__init__("shared")
        self.part = part

    def prepare(self, inputs: MLAInputs, /) -> Prepared:
        if self.part == "rope":
            return super().prepare(dataclasses.replace(inputs, q_pe=inputs.q_pe * 0))
        if self.part == "nope":
            return super().prepare(dataclasses.replace(inputs, q_nope=inputs.q_nope * 0))
        kv = inputs.kv.clone()
        cleared = dataclasses.replace(inputs, kv=kv)
        cleared.latent_scales(0).fill_(K_SCALE)
        return super().prepare(cleared)


@pytest.mark.parametrize("part", ["rope", "nope", "scales"])
def test_oracle_notices_what_is_ignored(part: str) -> None:
    case = dataclasses.replace(ONE_EACH, form="rows656")
    (result,) = run(_Deaf(part), case=case)
    assert result.status == "wrong"


def test_a_wrong_output_is_not_timed() -> None:
    fakes = [Fake(name, JitAttnMLA("shared")) for name in ("wrong", "broken", "tired")]
    check_wrong_outputs(run(*fakes))


def test_error_is_infinite_where_a_row_was_not_written() -> None:
    inputs = make_mla_inputs(TINY, CPU)
    outs = torch.full_like(inputs.q_nope, math.nan)
    assert MLAOracle(inputs).error(outs) == math.inf


class _Wrapper:
    """Stands for FlashInfer's: computes what its documentation says, one request at a time."""

    def __init__(self, buffer: Tensor, *, backend: str) -> None:
        self.backend = backend
        self.planned: dict[str, object] = {}

    def plan(self, *, metadata: dict[str, Tensor], **named: object) -> None:
        self.metadata, self.planned = metadata, named

    def run(
        self,
        *,
        query: tuple[Tensor, Tensor],
        kv_cache: tuple[Tensor, Tensor],
        out: Tensor,
        ckv_scale: float = 1.0,
        kpe_scale: float = 1.0,
    ) -> None:
        latents, ropes = (pool.double() for pool in kv_cache)
        latents, ropes = latents * ckv_scale, ropes * kpe_scale
        meta = {name: value.tolist() for name, value in self.metadata.items()}
        for b, kv_len in enumerate(meta["kv_len_arr"]):
            pages = meta["kv_indices"][meta["kv_indptr"][b] : meta["kv_indptr"][b + 1]]
            latent, rope = (pool[pages].flatten(0, 1)[:kv_len] for pool in (latents, ropes))
            rows = slice(meta["qo_indptr"][b], meta["qo_indptr"][b + 1])
            q_nope, q_pe = (q[rows].double() for q in query)
            scores = q_nope @ latent.T + q_pe @ rope.T
            if self.planned["causal"]:
                q_len = q_nope.shape[0]
                seen = torch.ones(q_len, kv_len).tril(kv_len - q_len).bool()
                scores.masked_fill_(~seen[:, None], -math.inf)
            scale = self.planned["sm_scale"]
            assert isinstance(scale, float)
            out[rows] = (torch.softmax(scale * scores, dim=-1) @ latent).to(out.dtype)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    mla = SimpleNamespace(
        BatchMLAPagedAttentionWrapper=_Wrapper, MLAPlanMetadata=SimpleNamespace(csr=dict)
    )
    module = SimpleNamespace(mla=mla, __version__="1")
    monkeypatch.setattr(mla_contenders, "flashinfer", lambda: module)
    monkeypatch.setattr(mla_contenders, "workspace", lambda *_: torch.empty(0))


@pytest.mark.usefixtures("flashinfer")
@pytest.mark.parametrize("form", ["bfloat16", "e4m3"])
@pytest.mark.parametrize("case", [TINY, ONE_EACH], ids=["extend", "decode"])
def test_flashinfer_gets_everything(case: MLACase, form: Form) -> None:
    case = dataclasses.replace(case, form=form)
    for backend in ("fa2", "fa3"):
        rival = FlashInferMLA(backend)
        (result,) = run(rival, case=case, kind="graph")
        assert (result.status, result.reason) == ("timed", "")
        wrapper = rival.prepare(make_mla_inputs(case, CPU)).runs[0].func.__self__  # type: ignore[attr-defined]
        assert wrapper.backend == backend
        assert wrapper.planned["causal"] == (case is not ONE_EACH and max(case.q_lens) > 1)
        assert wrapper.planned["page_size"] == 16
        assert wrapper.planned["num_heads"] == 2
        assert wrapper.planned["kv_data_type"] == getattr(torch, case.kv_dtype)


class _FlashMLAOps:
    """Stands for FlashMLA's dense decode: checks what it checks, computes what it computes."""

    def __init__(self) -> None:
        self.num_schedules = 0

    def dense_decode_fwd(
        self, q: Tensor, kv: Tensor, width: int, seq_lens: Tensor, table: Tensor, *others: Any
    ) -> tuple[Any, ...]:
        sm_scale, causal, tiles, splits, out = others
        batch_size, q_len, num_heads, _ = q.shape
        assert causal
        assert (width, kv.shape[1:]) == (512, (64, 1, 576))
        assert out.shape == (batch_size, 1, q_len * num_heads, 512)
        assert out.is_contiguous()
        assert (tiles is None) == (splits is None)
        if tiles is None:
            self.num_schedules += 1
            tiles = splits = seq_lens.clone()
        assert tiles.equal(seq_lens)
        for b, kv_len in enumerate(tiles.tolist()):
            tokens = kv[table[b].long(), :, 0].flatten(0, 1)[:kv_len].double()
            seen = torch.ones(q_len, kv_len).tril(kv_len - q_len).bool()
            scores = (q[b].double() @ tokens.T).masked_fill(~seen[:, None], -math.inf)
            rows = torch.softmax(sm_scale * scores, dim=-1) @ tokens[:, :width]
            out[b, 0] = rows.flatten(0, 1).to(out.dtype)
        return out, None, tiles, splits


@pytest.fixture
def flashmla_ops(monkeypatch: pytest.MonkeyPatch) -> _FlashMLAOps:
    ops = _FlashMLAOps()
    monkeypatch.setattr(torch.ops, "_flashmla_C", ops, raising=False)
    monkeypatch.setattr(flashmla, "load_flashmla", lambda: "vllm 1")
    return ops


@pytest.mark.usefixtures("flashmla_ops")
@pytest.mark.parametrize("kind", ["graph", "events"])
@pytest.mark.parametrize("q_len", [1, 3])
def test_flashmla_gets_everything(q_len: int, kind: str) -> None:
    case = dataclasses.replace(TINY, q_lens=(q_len,) * 2, seq_lens=(130, 64), page_size=64)
    (result,) = run(FlashMLA(), case=case, kind=kind)
    assert (result.status, result.reason) == ("timed", "")
    assert result.facts["planned"] == flashmla.BY_RUN
    assert "plan_s" not in result.facts, "no call makes the schedule alone"


def test_flashmla_schedules_once_a_step(flashmla_ops: _FlashMLAOps) -> None:
    case = dataclasses.replace(ONE_EACH, page_size=64)
    prepared = FlashMLA().prepare(make_mla_inputs(case, CPU, copies=3))
    assert prepared.plan is not None
    for steps in (1, 2):
        prepared.plan()
        for call in prepared.runs:
            call()
        assert flashmla_ops.num_schedules == steps


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"page_size": 16}, "64 tokens"),
        ({"form": "e4m3"}, "wants FP8 queries"),
        ({"form": "rows656"}, "by lists alone"),
        ({"q_lens": (1, 2)}, "as many query tokens"),
        ({"q_lens": (512, 512), "seq_lens": (512, 513)}, "at most 128"),
    ],
)
def test_flashmla_says_what_it_does_not_do(changed: dict[str, Any], reason: str) -> None:
    case = dataclasses.replace(ONE_EACH, page_size=64)
    inputs = make_mla_inputs(dataclasses.replace(case, **changed), CPU)
    with pytest.raises(SkipError, match=reason):
        FlashMLA().prepare(inputs)


def test_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITATTN_JIT", "0")
    env = records.environment({"fa2": "1"})
    results = run(Fake("broken", JitAttnMLA("shared")), JitAttnMLA("shared"), kind="graph")
    method = Method("graph", 4, 2)
    lines = [to_record(r, ONE_EACH, method, L2Policy.WRITE, LIMITS, env) for r in results]
    records.append_json(tmp_path / "mla.jsonl", lines)
    failed, timed = map(json.loads, (tmp_path / "mla.jsonl").read_text().splitlines())
    assert failed["status"] == "failed"
    assert "median_s" not in failed
    assert (timed["kind"], timed["method"], timed["num_runs"]) == ("mla", "graph", 4)
    assert timed["tflop_per_s"] == pytest.approx(ONE_EACH.flop / timed["median_s"] / 1e12)
    assert timed["kv_gb_per_s"] == pytest.approx(49 * 1152 / timed["median_s"] / 1e9)
    assert timed["floor_fraction"] == pytest.approx(timed["floor_s"] / timed["median_s"])
    assert timed["ceilings"]["product"] == 7e14
    assert timed["environment"]["rivals"] == {"fa2": "1"}


def _timed(contender: str, median_s: float) -> Result:
    return Result(contender, "timed", timing=Timing(median_s, median_s, median_s, 1))


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    plain, fp8 = one("B64x4k-h16-p64"), one("B64x4k-h16-p64-e4m3")
    (layout, _) = select_mla("layouts")
    rows = [
        (
            plain,
            [
                _timed("fa2", 150e-6),
                _timed("flashinfer-fa3", 120e-6),
                _timed(BASELINE, 100e-6),
                _timed("jitattn-separate", 110e-6),
            ],
        ),
        (fp8, [Result("fa2", "skipped", "absent"), _timed(BASELINE, 80e-6)]),
        (layout, [_timed(BASELINE, 100e-6), _timed("jitattn-pair", 105e-6)]),
    ]
    mla_report.print_product(LIMITS)
    mla_report.print_case(plain, "graph", rows[0][1], LIMITS)
    mla_report.print_case(fp8, "graph", rows[1][1], LIMITS)
    mla_report.print_tables(rows, LIMITS)
    printed = capsys.readouterr().out
    for words in (
        "product of matrices 700 TFLOP/s",
        "floor 98.1 us; fa2 150.0 us; flashinfer-fa3 120.0 us",
        "    fa2: absent",
        "98.1 B",
        "3020",  # GB/s of latents
        "figures: best rival / jitattn: geometric mean 1.200",
        "all: best rival / jitattn: geometric mean 1.200",
        "B64x4k-h16-p64-e4m3: 1.250 x the speed of B64x4k-h16-p64",
        "pair / shared",
        "1.050",
    ):
        assert words in printed


def test_bundle_has_what_the_cases_need() -> None:
    chosen = bundle.mla_configurations(select_mla("figures"), "sm_90a")
    assert [(a["planner"], a["num_heads"], a["page_table"]) for a in chosen] == [
        ("mla", 16, "shared"),
        ("mla", 16, "separate"),
        ("mla", 128, "shared"),
        ("mla", 128, "separate"),
    ]
    layouts = bundle.mla_configurations(select_mla("layouts"), "sm_90a")
    assert {a["batch_invariant"] for a in layouts} == {False, True}
    assert len(bundle.mla_configurations(select_mla("forms"), "sm_90a")) == 4
