"""bench_preprocess without a card: its rows, its bytes, its checks, its turns and its table."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import time
import weakref
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from bench import bench_preprocess, build_rivals
from bench.bench_preprocess import Row, bench_row, is_bad, passes, print_table, try_apart
from bench.ceilings import Ceilings
from bench.timing import Call, L2Flush, Timer, Timing
from bench.token_contenders import (
    Check,
    FlashInferTokens,
    JitAttnTokens,
    all_token_contenders,
    compare,
)
from bench.token_workloads import WORKLOADS, TokenWorkload, configs, make_token_batch, smaller
from bench.turns import WrongError
from jitattn.kernels.preprocess.spec import PreprocessConfig
from tests.support.counting_timer import CountingTimer

CPU = torch.device("cpu")
SMALL = [smaller(row) for row in WORKLOADS if row.num_tokens == 64]


def test_rows() -> None:
    assert {row.name for row in WORKLOADS} >= {
        "preprocess-64-bfloat16",
        "append-8192-float8_e4m3fn",
    }
    for text in configs():
        assert PreprocessConfig.parse(text).head_dim == 128
    row = WORKLOADS[0]
    assert row.name == "preprocess-64-bfloat16"
    # 48 heads of 128 numbers of 2 bytes, read and written.
    assert row.num_bytes == 2 * 64 * 48 * 128 * 2


every_row = pytest.mark.parametrize("row", SMALL, ids=lambda row: row.name)


@every_row
def test_batches_are_what_they_say(row: TokenWorkload) -> None:
    batch = make_token_batch(row, 2, CPU)
    assert batch.qkv[0].nbytes >= batch.row.read_bytes
    JitAttnTokens().prepare(batch)(1)
    assert not batch.caches[0][0].float().any()
    written = batch.caches[1][0].float().abs().amax(dim=-1) > 0
    assert int(written.sum()) == batch.row.num_tokens * 8
    pages, places = batch.slots(torch.arange(row.num_tokens))
    assert bool(written[pages, places].all())


def rotated(x: Tensor, positions: Tensor, base: float) -> Tensor:
    half = x.shape[-1] // 2
    angles = positions.double()[:, None] * base ** -(torch.arange(half).double() / half)
    cos, sin = (f(angles)[:, None, :] for f in (torch.cos, torch.sin))
    a, b = x.double().split(half, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def fake_flashinfer(*, late: int = 0) -> SimpleNamespace:
    """Return FlashInfer's two functions; ``late`` is added to positions of the append."""

    def append(
        k: Tensor,
        v: Tensor,
        requests: Tensor,
        positions: Tensor,
        cache: tuple[Tensor, Tensor],
        indices: Tensor,
        indptr: Tensor,
        last: Tensor,
        kv_layout: str,
    ) -> None:
        ints = (requests, positions, indices, indptr, last)
        assert {x.dtype for x in ints} == {torch.int32} and kv_layout == "NHD"
        assert k.dtype == cache[0].dtype and len(indptr) == len(last) + 1
        at = (positions - late).clamp(min=0).long()
        pages = indices[indptr[requests.long()].long() + at // 16].long()
        for side, values in zip(cache, (k, v), strict=True):
            side.view(torch.uint8)[pages, at % 16] = values.contiguous().view(torch.uint8)

    def rotate(q: Tensor, k: Tensor, at: Tensor, *, interleave: bool, rope_theta: float) -> None:
        for x in (q, k):
            x.copy_(rotated(x, at, rope_theta))

    return SimpleNamespace(append_paged_kv_cache=append, apply_rope_pos_ids_inplace=rotate)


@every_row
def test_everyone_is_checked(row: TokenWorkload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer())
    batch = make_token_batch(row, 3, CPU)
    fresh = [qkv.clone() for qkv in batch.qkv]
    results = bench_row(batch, all_token_contenders(), CountingTimer(), 4, 2)  # type: ignore[arg-type]
    assert [(r.contender, r.status, r.reason) for r in results] == [
        (name, "timed", "") for name in ("jitattn", "copy", "flashinfer")
    ]
    assert {r.timing.median_s for r in results if r.timing} == {0.25}
    for copy in (0, 2):  # as they were, though FlashInfer rotates in place
        assert torch.equal(batch.qkv[copy], fresh[copy])


@every_row
def test_a_rival_that_writes_elsewhere_is_wrong(
    row: TokenWorkload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer(late=1))
    batch = make_token_batch(row, 2, CPU)
    ours, rival = bench_row(
        batch,
        [JitAttnTokens(), FlashInferTokens()],
        CountingTimer(),
        2,
        1,  # type: ignore[arg-type]
    )
    assert ours.status == "timed"
    assert rival.status == "wrong" and is_bad(rival) and not is_bad(ours)


def test_a_replay_that_writes_something_else_is_wrong() -> None:
    batch = make_token_batch(SMALL[0], 2, CPU)
    run = JitAttnTokens().prepare(batch)
    check = Check(JitAttnTokens(), batch)
    runs: list[Call] = [lambda: run(0), lambda: run(1)]
    check.graph(lambda: [call() for call in runs], runs, 2)
    with pytest.raises(WrongError, match="other bits"):
        check.graph(runs[0], runs, 2)


def test_what_is_wrong_is_seen() -> None:
    with pytest.raises(WrongError, match="differ by 1"):
        compare([torch.zeros(3)], [torch.ones(3)])
    with pytest.raises(WrongError, match="differ by nan"):
        compare([torch.full((3,), float("nan"))], [torch.ones(3)])


class Device:
    """A device that a contender breaks in its second turn."""

    def __init__(self) -> None:
        self.turns = 0
        self.is_lost = False

    def samples(self, call: Call) -> list[float]:
        self.turns += 1
        if self.turns == 5:
            self.is_lost = True
        if self.is_lost:
            raise RuntimeError("an illegal memory access was encountered")
        return [1.0, 1.0]

    capture = CountingTimer.capture


def test_a_crash_leaves_the_figures_of_turns_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer())
    device = Device()
    monkeypatch.setattr(bench_preprocess, "is_lost", lambda: device.is_lost)
    batch = make_token_batch(SMALL[0], 2, CPU)
    results = bench_row(batch, all_token_contenders(), device, 2, 3)  # type: ignore[arg-type]
    assert [r.status for r in results] == ["timed"] * 3
    assert all(r.timing and r.timing.num_samples >= 2 for r in results)
    assert "lost after some turns: an illegal memory" in results[1].reason
    first = Device()
    first.turns = 3  # so that it breaks in the second's first turn
    monkeypatch.setattr(bench_preprocess, "is_lost", lambda: first.is_lost)
    results = bench_row(batch, all_token_contenders(), first, 2, 1)  # type: ignore[arg-type]
    assert [r.status for r in results] == ["timed", "failed", "failed"]


def test_rivals_are_tried_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[Sequence[str]] = []

    def run(command: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        lines = [{"row": "preprocess-64-bfloat16", "status": "timed", "reason": ""}]
        lines += [{"row": "preprocess-64-float8_e4m3fn", "status": "wrong", "reason": "values"}]
        out = "a warning\n" + "".join(json.dumps(line) + "\n" for line in lines)
        return subprocess.CompletedProcess([], -6, out, "a trace\nan illegal memory access\n")

    monkeypatch.setattr(subprocess, "run", run)
    options = Namespace(rows="preprocess", runs=32)
    tried = try_apart(all_token_contenders(), options)
    assert [*tried] == ["flashinfer"] and len(commands) == 1
    assert "--attempt" in commands[0] and "flashinfer" in commands[0]
    came = tried["flashinfer"]
    assert came["preprocess-64-bfloat16"].status == "timed"
    assert came["preprocess-64-float8_e4m3fn"] == Row("flashinfer", "wrong", "values")
    absent = came["append-64-bfloat16"]
    assert absent.status == "failed"
    assert absent.reason.endswith("ended with -6 before this row: an illegal memory access")
    batch = make_token_batch(SMALL[0], 1, CPU)
    timer = CountingTimer()
    results = bench_row(batch, [FlashInferTokens()], timer, 1, 1, {"flashinfer": absent})  # type: ignore[arg-type]
    assert results == [absent]


def test_a_graph_keeps_what_it_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else their memory is another's, or nobody's, when it is replayed."""

    @contextlib.contextmanager
    def capture(graph: object) -> Iterator[None]:
        yield

    replays: list[int] = []
    graph = SimpleNamespace(replay=lambda: replays.append(1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)

    def calls() -> tuple[Callable[[], object], weakref.ref[Tensor]]:
        held = torch.zeros(3)
        return (lambda: held.add_(1)), weakref.ref(held)

    (run, of_run), (plan, of_plan) = calls(), calls()
    flush = L2Flush.__new__(L2Flush)
    replay = Timer(flush).capture(plan, [run], 2)
    del run, plan
    gc.collect()
    held, planned = of_run(), of_plan()
    assert held is not None and held.tolist() == [2, 2, 2]
    assert planned is not None and planned.tolist() == [1, 1, 1]
    replay()
    assert replays == [1]
    del replay, held, planned
    gc.collect()
    assert of_run() is None and of_plan() is None


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    batch = make_token_batch(SMALL[0], 1, CPU)
    timing = Timing(median_s=4e-6, p10_s=3e-6, p90_s=5e-6, num_samples=9)
    rows = [Row("jitattn", "timed", timing=timing), Row("copy", "timed", timing=timing)]
    absent = Row("flashinfer", "skipped", "cannot be imported")
    print_table([(batch, [*rows, absent])], Ceilings(copy=3e12, read=3e12, read_method="none"))
    out = capsys.readouterr().out
    assert "4.00" in out
    assert "1.00" in out
    assert "flashinfer: skipped: cannot be imported" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a card says")
def test_needs_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_preprocess.main(["--rows", "append"]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err


def test_what_compiles_nothing_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    everyone = all_token_contenders()
    ours, copy, rival = everyone
    assert [[one.name for one in some] for some in passes(everyone)] == [
        ["jitattn", "copy"],
        ["jitattn", "copy", "flashinfer"],
    ]
    assert passes([ours, copy]) == [[ours, copy]]
    assert passes([rival]) == [[rival]]
    with pytest.raises(SystemExit):
        bench_preprocess.main(["--contenders", "jitattn,fast"])
    assert "fast: expected jitattn, copy, flashinfer" in capsys.readouterr().err


def test_modules_are_built_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def build(command: list[str], *, end: float | None) -> int:
        assert end is not None
        commands.append(command)
        return 0

    monkeypatch.setattr(build_rivals, "_build_apart", build)
    assert build_rivals.main(["--tokens", "--limit", "9"]) == 0
    assert commands == [["--tokens", "--one", "flashinfer", module] for module in ("page", "rope")]


def test_what_isnt_built_at_the_limit_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A compiler that it started, too."""
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\nsleep 60 & echo $! > {tmp_path}/pid\nwait\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    assert build_rivals.main(["--tokens", "--jobs", "1", "--limit", "1"]) == 1
    assert capsys.readouterr().out.count("killed at the limit") == 2
    compiler = int((tmp_path / "pid").read_text())
    for _ in range(100):
        try:
            os.kill(compiler, 0)
        except ProcessLookupError:
            return
        state = Path(f"/proc/{compiler}/stat")
        if state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the compiler lives on")
