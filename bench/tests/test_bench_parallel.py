"""The bench of several ranks: it runs on CPUs, and its arithmetic is what is documented."""

from __future__ import annotations

import json
from pathlib import Path

from bench import bench_parallel, parallel_cases
from tests.support.rank_jobs import run_bench
from tests.support.ranks import run_ranks, values

ROOT = Path(__file__).parents[2]


def test_steps_of_two_ranks_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "parallel.jsonl"
    arguments = ["--backend", "gloo", "--tiny", "--repeats", "2", "--table", "--json", str(path)]
    first, second = values(run_ranks(2, run_bench, [*arguments, "--cases", "b3-130"]))
    assert second == ""
    assert first.count("| yes |") == 8  # once as it goes, once in the table
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert [entry["case"] for entry in entries] == [
        case.name for case in parallel_cases.cases(is_tiny=True, names="b3-130")
    ]
    assert all(entry["step_s"] > 0 and entry["num_ranks"] == 2 for entry in entries)


def test_the_documented_table_is_the_arithmetic() -> None:
    assert bench_parallel.arithmetic(8) in (ROOT / "docs/parallel.md").read_text()


def test_bytes_of_a_step() -> None:
    (case,) = parallel_cases.cases(is_tiny=False, names="b1-1024k-h32_8-bf16")
    assert case.kv_bytes == 2**20 * 2 * 8 * 128 * 2
    assert case.received_bytes(1) == 0
    assert case.received_bytes(8) == 7 * 4 * (2 * 128 + 2 * 128 + 16)
