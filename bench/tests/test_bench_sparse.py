"""The bench of lists on the CPU: its contenders are right, and its counts are."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import bench_sparse, flashmla, mla_contenders, rivals, sparse_rivals
from bench.bench_sparse import JitAttnLists
from bench.contenders import Prepared, SkipError
from bench.sparse_cases import CASES, MAX_ERROR, Batch, Case, SparseOracle, error_of, make_batch
from bench.timing import L2Policy, summarize
from bench.turns import Competitor, Method, Result
from tests.support.counting_timer import CountingTimer
from tests.support.fake_contender import Fake

CPU = torch.device("cpu")
DIFFERENT = [case for case in CASES if case.num_heads in (16, 32)]
METHOD = Method("graph", 2, rounds=1)


def tiny(case: Case) -> Case:
    """Return a case whose lists have lengths that every rival takes."""
    return dataclasses.replace(case.tiny(), k=3 if case.kind == "pages" else 128)


def run(*contenders: Competitor[Batch], case: Case) -> list[Result]:
    batch = make_batch(case, 2, CPU)
    return bench_sparse.bench_case(batch, contenders, METHOD, CountingTimer())  # type: ignore[arg-type]


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("case", DIFFERENT, ids=lambda case: case.name)
def test_contenders_are_right(case: Case, dense: bool) -> None:
    batch = make_batch(case.tiny(), 2, CPU)
    prepared = JitAttnLists(dense=dense).prepare(batch)
    for copy, call in enumerate(prepared.runs):
        call()
        out = prepared.outs[copy]
        assert error_of(batch, out, dense=dense, copy=copy) < MAX_ERROR
        assert error_of(batch, out + 1, dense=dense, copy=copy) > MAX_ERROR
        assert error_of(batch, out / 0, dense=dense, copy=copy) == math.inf
    assert SparseOracle(batch, dense=dense).error(prepared.outs) < MAX_ERROR
    assert SparseOracle(batch, dense=not dense).error(prepared.outs) > MAX_ERROR


def test_counts() -> None:
    latent, rows = Case("latent", 16), Case("latent", 16, form="rows")
    assert latent.num_bytes == 64 * 2048 * 1152
    assert rows.num_bytes == 64 * 2048 * 656
    assert Case("pages", 32, k=16, page_size=128).num_bytes == Case("grouped", 32).num_bytes
    assert latent.num_flops == 2 * 64 * 16 * 2048 * (576 + 512)
    assert len({case.name for case in CASES}) == len(CASES)


def test_what_is_wrong_or_breaks_is_not_timed() -> None:
    right = JitAttnLists(dense=False)
    fakes = [Fake(name, right) for name in ("wrong", "broken")]
    *faulty, lists, dense = run(*fakes, right, JitAttnLists(dense=True), case=tiny(CASES[0]))
    assert [r.status for r in faulty] == ["wrong", "failed"]
    assert [r.status for r in (lists, dense)] == ["timed", "timed"]
    assert lists.facts["plan_s"] == 1.0


class Late(JitAttnLists):
    """Breaks when the clock runs."""

    def __init__(self) -> None:
        super().__init__(dense=False)
        self.name = "late"
        self.num_runs = 0

    def prepare(self, batch: Batch, /) -> Prepared:
        right = super().prepare(batch)

        def call(i: int) -> None:
            self.num_runs += 1
            if self.num_runs > 4:  # two copies, checked by themselves and in a graph
                raise RuntimeError("a fault on the device")
            right.runs[i]()

        return dataclasses.replace(right, runs=tuple(functools.partial(call, i) for i in (0, 1)))


def test_what_breaks_at_the_clock_stops_no_other() -> None:
    late, lists = run(Late(), JitAttnLists(dense=False), case=tiny(CASES[0]))
    assert (late.status, late.timing) == ("failed", None)
    assert "a fault on the device" in late.reason
    assert lists.status == "timed"


# --- rivals: what stands in checks what the libraries check, and computes what they compute -------


def attend(q: Tensor, keys: Tensor, values: Tensor, sm_scale: float) -> Tensor:
    """Return [num_heads, ..] of q [num_heads, ..] in float64."""
    return torch.softmax(sm_scale * (q.double() @ keys.double().T), dim=-1) @ values.double()


class FlashMLAOps:
    """Stands for FlashMLA's operators."""

    def __init__(self) -> None:
        self.num_schedules = 0

    def sparse_decode_fwd(
        self, q: Tensor, kv: Tensor, slots: Tensor, *others: Any
    ) -> tuple[Any, ...]:
        lens, sinks, tiles, splits, more, lists, more_lens, width, sm_scale, out = others
        assert lens is sinks is more is lists is more_lens is None
        assert (tiles is None) == (splits is None)
        assert q.shape[2] in (64, 128)
        assert kv.dtype == torch.uint8
        assert (kv.stride(1), kv.shape[2:]) == (656, (1, 656))
        assert (width, out.shape, out.stride(-1)) == (512, (*q.shape[:3], 512), 1)
        self.num_schedules += tiles is None
        rows = kv.flatten(0, 2)
        latents = rows[:, :512].contiguous().view(torch.float8_e4m3fn).double()
        scales = rows[:, 512:528].contiguous().view(torch.float32).double()
        latents *= scales.repeat_interleave(128, dim=1)
        ropes = rows[:, 528:].contiguous().view(torch.bfloat16).double()
        keys = torch.cat((latents, ropes), dim=1)
        for b, ids in enumerate(slots[:, 0].long()):
            out[b, 0] = attend(q[b, 0], keys[ids], latents[ids], sm_scale)
        return out, None, torch.zeros(1), torch.zeros(1)

    def sparse_prefill_fwd(
        self, q: Tensor, kv: Tensor, slots: Tensor, sm_scale: float, width: int, *others: Any
    ) -> list[Tensor]:
        sinks, lens, out = others
        assert sinks is lens is None
        assert q.shape[1] in (64, 128)
        assert (width, kv.shape[1:]) == (512, (1, 576))
        assert out.is_contiguous()
        for b, ids in enumerate(slots[:, 0].long()):
            keys = kv[ids, 0]
            out[b] = attend(q[b], keys, keys[:, :width], sm_scale)
        return [out]


class Fa3Ops:
    """Stands for FlashAttention-3, over pages of one token."""

    def get_scheduler_metadata(self, *given: Any) -> Tensor:
        assert len(given) == 23
        assert given[14] == 1
        self.widths = given[5:7]
        return torch.zeros(1)

    def fwd(self, *given: Any) -> None:
        assert len(given) == 37
        q, k, v, q_v, out, lens, table = (given[i] for i in (0, 1, 2, 5, 6, 11, 14))
        assert self.widths == (k.shape[-1], v.shape[-1])
        assert k.shape[:3] == v.shape[:3]
        group = q.shape[1] // k.shape[2]
        for b, length in enumerate(lens.tolist()):
            ids = table[b, :length].long()
            for h in range(k.shape[2]):
                heads = slice(h * group, (h + 1) * group)
                keys, values, queries = k[ids, 0, h], v[ids, 0, h], q[b, heads]
                if q_v is not None:
                    keys = torch.cat((keys, values), dim=1)
                    queries = torch.cat((queries, q_v[b, heads]), dim=1)
                out[b, heads] = attend(queries, keys, values, given[23]).to(out.dtype)


class Wrapper:
    """Stands for FlashInfer's wrapper for latent attention, one query token a request."""

    def __init__(self, buffer: Tensor, *, backend: str) -> None:
        assert backend == "fa3"

    def plan(self, *, metadata: dict[str, Tensor], **named: Any) -> None:
        assert (named["page_size"], named["causal"]) == (1, False)
        assert metadata["qo_indptr"].diff().eq(1).all()
        assert metadata["kv_indptr"].diff().equal(metadata["kv_len_arr"])
        self.metadata, self.sm_scale = metadata, named["sm_scale"]

    def run(
        self, *, query: tuple[Tensor, Tensor], kv_cache: tuple[Tensor, ...], out: Tensor
    ) -> None:
        latents, ropes = (pool[:, 0] for pool in kv_cache)
        starts = self.metadata["kv_indptr"].tolist()
        for b, q in enumerate(torch.cat(query, dim=-1)):
            ids = self.metadata["kv_indices"][starts[b] : starts[b + 1]].long()
            keys = torch.cat((latents[ids], ropes[ids]), dim=1)
            out[b] = attend(q, keys, latents[ids], self.sm_scale)


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> FlashMLAOps:
    mla = SimpleNamespace(
        BatchMLAPagedAttentionWrapper=Wrapper, MLAPlanMetadata=SimpleNamespace(csr=dict)
    )
    module = SimpleNamespace(mla=mla, __version__="1")
    made = FlashMLAOps()
    monkeypatch.setattr(torch.ops, "_flashmla_C", made, raising=False)
    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", Fa3Ops(), raising=False)
    monkeypatch.setattr(flashmla, "load_flashmla", lambda: "1")
    monkeypatch.setattr(sparse_rivals, "load_fa3", lambda: "1")
    monkeypatch.setattr(sparse_rivals, "workspace", lambda *_: torch.empty(0))
    for user in (mla_contenders, sparse_rivals):
        monkeypatch.setattr(user, "flashinfer", lambda: module)
    return made


TAKEN = {
    "bf16": {"flashmla-prefill", "flashinfer-fa3", "fa3"},
    "rows": {"flashmla-decode"},
    "grouped": {"fa3"},
    "pages": set[str](),
}


@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("case", DIFFERENT, ids=lambda case: case.name)
def test_rivals_get_everything(case: Case) -> None:
    taken = TAKEN[case.form if case.kind == "latent" else case.kind]
    for result in run(*sparse_rivals.all_sparse_rivals(), case=tiny(case)):
        expected = "timed" if result.contender in taken else "skipped"
        assert (result.contender, result.status) == (result.contender, expected), result.reason
        assert (result.reason == "") == (expected == "timed")
        if result.contender.startswith("flashmla") and expected == "timed":
            assert result.facts["padded_heads"] == 64
            assert "plan_s" not in result.facts


def test_the_first_run_of_a_step_schedules(ops: FlashMLAOps) -> None:
    batch = make_batch(tiny(Case("latent", 16, form="rows")), 2, CPU)
    prepared = sparse_rivals.FlashMLADecode().prepare(batch)
    assert prepared.plan is not None
    for steps in (1, 2):
        prepared.plan()
        for call in prepared.runs:
            call()
        assert ops.num_schedules == steps


@pytest.mark.usefixtures("ops")
def test_flashmla_refuses_what_would_end_the_process() -> None:
    plain, rows = (Case("latent", 16, form=form) for form in ("bf16", "rows"))
    for rival, case, k in (
        (sparse_rivals.FlashMLADecode(), rows, 96),
        (sparse_rivals.FlashMLAPrefill(), plain, 192),
    ):
        batch = make_batch(dataclasses.replace(case.tiny(), k=k), 1, CPU)
        with pytest.raises(SkipError, match="multiples"):
            rival.prepare(batch)
    assert [flashmla.padded_heads(n) for n in (8, 64, 65, 128)] == [64, 64, 128, 128]
    with pytest.raises(SkipError, match="at most 128 heads"):
        flashmla.padded_heads(129)


def test_libraries_that_are_not_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delenv("JITATTN_BENCH_FLASHMLA", raising=False)
    with pytest.raises(SkipError, match=r"_flashmla_C\.abi3\.so is not on sys\.path"):
        flashmla.load_flashmla()
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "_flashmla_C.abi3.so").write_text("no library")
    with pytest.raises(SkipError, match="can't be loaded"):
        flashmla.load_flashmla()
    monkeypatch.setenv("JITATTN_BENCH_FA3", str(tmp_path / "other.so"))
    with pytest.raises(SkipError, match=r"other\.so can't be loaded"):
        rivals.load_fa3()


# --- records --------------------------------------------------------------------------------------


def test_records_and_table(capsys: pytest.CaptureFixture[str]) -> None:
    timings = {name: summarize([s, s]) for name, s in (("lists", 3e-6), ("dense", 2e-6))}
    results = [Result(name, "timed", timing=t, error=0.001) for name, t in timings.items()]
    results += [
        Result("padded", "timed", timing=timings["dense"], error=0.0, facts={"padded_heads": 64}),
        Result("other", "wrong", "relative error", error=0.5),
        Result("absent", "skipped", "not here"),
    ]
    env = {"card": "x", "rivals": {"padded": "vllm 1"}}
    entries = [
        bench_sparse.to_record(CASES[0], result, 2e-6, METHOD, L2Policy.READ, env)
        for result in results
    ]
    first, _, padded, wrong, absent = map(json.loads, map(json.dumps, entries))
    assert first["of_dense"] == pytest.approx(1.5)
    assert (first["status"], first["method"], first["num_runs"]) == ("timed", "graph", 2)
    assert padded["padded_heads"] == 64
    assert padded["environment"]["rivals"] == {"padded": "vllm 1"}
    assert (wrong["status"], wrong["reason"]) == ("wrong", "relative error")
    assert "median_s" not in wrong
    assert (absent["status"], absent["error"]) == ("skipped", None)
    bench_sparse.print_case(CASES[0], results)
    bench_sparse.print_results([(CASES[0], results)])
    text = capsys.readouterr().out
    for words in ("lists 3.0 us; dense 2.0 us", "absent: not here", "1.50", "wrong", "64 heads"):
        assert words in text
