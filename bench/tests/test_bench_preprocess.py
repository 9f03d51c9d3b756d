"""bench_preprocess without a card: its rows, its bytes, its checks, its turns and its table."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from bench.bench_preprocess import Row, bench_row, is_bad, print_table
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
