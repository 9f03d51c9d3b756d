"""The bench of gathers on the CPU: its contenders gather, and its counts of bytes are right."""

from __future__ import annotations

import json

import pytest
import torch

from bench import bench_gather
from bench.bench_gather import CASES, CONTENDERS, Case, Result, check, copy_runs, make_batch
from bench.timing import summarize
from bench.turns import WrongError

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["jitattn", "torch"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_contenders_gather(kv_dtype: str, name: str) -> None:
    batch = make_batch(Case(60, 3, kv_dtype), 2, CPU)
    check(batch, CONTENDERS[name](batch))


def test_a_wrong_one_is_found() -> None:
    batch = make_batch(Case(64, 4, "bfloat16"), 2, CPU)
    with pytest.raises(WrongError, match="K of cache"):
        check(batch, copy_runs(batch))


def test_bytes() -> None:
    bf16, e4m3 = Case(8192, 1, "bfloat16"), Case(8192, 1, "float8_e4m3fn")
    assert bf16.num_bytes == 2 * 2 * 8192 * 8 * 128 * 2
    assert e4m3.num_bytes == 2 * 8192 * 8 * 128 * 3
    for case in (bf16, e4m3):
        batch = make_batch(Case(64, 4, case.kv_dtype), 1, CPU)
        (run,) = copy_runs(batch)
        run()
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.num_tokens for case in CASES} == {64, 8192}


def test_records_and_table(capsys: pytest.CaptureFixture[str]) -> None:
    case = CASES[0]
    timing = summarize([2e-6, 2e-6])
    results = [
        Result("copy", "timed", timing=timing, host=timing),
        Result("jitattn", "timed", timing=summarize([4e-6, 4e-6]), host=timing),
        Result("vllm", "skipped", "not here"),
    ]
    entry = bench_gather.to_record(results[1], case, 2e-6, 64, {"card": "x"})
    assert json.loads(json.dumps(entry))["copy_fraction"] == pytest.approx(0.5)
    bench_gather.print_results([(case, results)])
    text = capsys.readouterr().out
    assert "50%" in text
    assert "not here" in text
