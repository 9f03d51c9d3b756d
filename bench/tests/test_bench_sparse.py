"""The bench of lists on the CPU: its contenders are right, and its counts are."""

from __future__ import annotations

import json

import pytest
import torch

from bench import bench_sparse
from bench.bench_sparse import CASES, MAX_ERROR, Case, Result, error_of, make_batch
from bench.timing import summarize

CPU = torch.device("cpu")
DIFFERENT = [case for case in CASES if case.num_heads in (16, 32)]


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("case", DIFFERENT, ids=lambda case: case.name)
def test_contenders_are_right(case: Case, dense: bool) -> None:
    batch = make_batch(case.tiny(), 2, CPU)
    _, runs, out = batch.runs(dense=dense)
    for copy, run in enumerate(runs):
        run()
        assert error_of(batch, out, dense=dense, copy=copy) < MAX_ERROR
        assert error_of(batch, out + 1, dense=dense, copy=copy) > MAX_ERROR


def test_counts() -> None:
    latent, rows = Case("latent", 16), Case("latent", 16, form="rows")
    assert latent.num_bytes == 64 * 2048 * 1152
    assert rows.num_bytes == 64 * 2048 * 656
    assert Case("pages", 32, k=16, page_size=128).num_bytes == Case("grouped", 32).num_bytes
    assert latent.num_flops == 2 * 64 * 16 * 2048 * (576 + 512)
    assert len({case.name for case in CASES}) == len(CASES)


def test_records_and_table(capsys: pytest.CaptureFixture[str]) -> None:
    results = [
        Result("lists", 0.001, summarize([3e-6, 3e-6])),
        Result("dense", 0.001, summarize([2e-6, 2e-6])),
        Result("other", 0.5),
    ]
    entry = bench_sparse.to_record(CASES[0], results[0], 2e-6, {"card": "x"})
    assert json.loads(json.dumps(entry))["of_dense"] == pytest.approx(1.5)
    bench_sparse.print_results([(CASES[0], results)])
    text = capsys.readouterr().out
    assert "1.50" in text
    assert "wrong" in text
