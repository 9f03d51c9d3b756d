"""The page manager's benchmarks: they run, and their table is the one that is documented."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import bench_manager, kv_memory

ROOT = Path(__file__).parents[2]


def test_a_step_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "manager.jsonl"
    arguments = ["--sequences", "2,3", "--steps", "2", "--json", str(path)]
    assert bench_manager.main(arguments) == 0
    assert len(path.read_text().splitlines()) == 2
    assert "us a sequence" in capsys.readouterr().out


def test_the_documented_table_is_what_pools_say() -> None:
    assert kv_memory.table() in (ROOT / "docs/page-manager.md").read_text()


def test_slots_of_the_worked_example() -> None:
    def slots(**options: object) -> int:
        return kv_memory.peak_of(kv_memory.EXAMPLE, 1024, 1024, **options).windowed  # type: ignore[arg-type]

    assert slots(reuse_scratch=False) == 32
    assert slots(reuse_scratch=True) == 5
    assert [slots(reuse_scratch=True, max_rewind_len=n) for n in (1, 2, 33, 34)] == [5, 6, 6, 7]
