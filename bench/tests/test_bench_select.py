"""The bench of choices on the CPU: its checks hold, its counts and its bundle are right."""

from __future__ import annotations

import json

import pytest
import torch

from bench import bench_select
from bench.bench_select import CASES, Case, Result, calls_of, configs, make_batch
from bench.timing import summarize

CPU = torch.device("cpu")
SMALL = (
    Case("step", 2, 256, num_heads=8, k=32),
    Case("index", 2, 256, q_len=3, num_heads=8, k=32),
    Case("tokens", 2, 256, q_len=3, k=32),
    Case("bounds", 2, 256, num_heads=2, page_size=16),
    Case("update", 2, 256, num_heads=2, page_size=16),
    Case("pages", 2, 256, num_heads=2, page_size=16, k=5),
)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_contenders_are_checked(case: Case) -> None:
    calls_of(make_batch(case, CPU))["jitattn"]()


def test_counts() -> None:
    assert Case("index").num_bytes == 64 * 131072 * 132
    assert Case("index").num_flops == 2 * 64 * 131072 * 64 * 128
    assert Case("tokens").num_bytes == 64 * 131072 * 4
    assert Case("pages", num_heads=8, page_size=128).num_bytes == 64 * 1024 * 8 * 2 * 256
    assert len({case.name for case in CASES}) == len(CASES)


def test_records_and_table(capsys: pytest.CaptureFixture[str]) -> None:
    timing = summarize([1e-3, 1e-3])
    results = [
        Result(CASES[0], "jitattn", "timed", timing=timing, read=4e12),
        Result(CASES[1], "jitattn", "wrong", "not so"),
    ]
    entry = json.loads(json.dumps(bench_select.to_record(results[0], {"card": "x"})))
    assert entry["read_fraction"] == pytest.approx(64 * 131072 * 132 / 1e-3 / 4e12)
    bench_select.print_results(results)
    text = capsys.readouterr().out
    assert "28%" in text
    assert "not so" in text


def test_configs() -> None:
    symbols = {spec.symbol for config in configs() for spec in config.specs("sm_90a")}
    assert {f"jitattn_index_logits_d128_h{h}_t{t}" for h in (32, 64) for t in (1, 2, 4)} < symbols
