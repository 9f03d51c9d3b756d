"""The plot of decode figures, from the records that are committed."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.cases import RIVALS

pytest.importorskip("matplotlib", reason="matplotlib is not installed; it is in the bench extra")

from bench import roofline

RESULTS = sorted((Path(__file__).parents[2] / "bench/results").glob("*.jsonl"))


def fake(case: str, contender: str, time: str, **other: object) -> roofline.Record:
    environment = {"card": "H100", "commit": time[:1], "time": time}
    return {
        "case": case,
        "contender": contender,
        "num_bytes": 100,
        "gb_per_s": 1.0,
        "ceilings": {"copy": 3e12, "read": 3.1e12},
        "environment": environment,
        **other,
    }


def test_committed_records_make_a_small_picture(tmp_path: Path) -> None:
    for name in ("new/roofline.svg", "roofline.png"):
        assert roofline.main([*map(str, RESULTS), "-o", str(tmp_path / name)]) == 0
        assert 1000 < (tmp_path / name).stat().st_size < 150_000
    svg = tmp_path / "new/roofline.svg"
    text = "".join(ElementTree.parse(svg).getroot().itertext())
    for word in ("H100", "H200", "B64ragged", "XQA", "FlashAttention-3", "streaming read"):
        assert word in text
    again = tmp_path / "again.svg"
    roofline.main([*map(str, RESULTS), "-o", str(again)])
    assert again.read_bytes() == svg.read_bytes()


def test_every_rival_has_a_style_of_its_own() -> None:
    styles = roofline._STYLES
    assert set(RIVALS) <= set(styles)
    for key in ("marker", "color", "label"):
        assert len({style[key] for style in styles.values()}) == len(styles)


def test_newest_commit_with_rivals_and_last_figures_of_a_case_count() -> None:
    records = [
        fake("old", "xqa", "1 08:00"),
        fake("a", "xqa", "2 08:00"),
        fake("a", "jitattn-shared", "2 08:00", gb_per_s=5.0),
        fake("a", "xqa", "2 09:00"),
        fake("a", "jitattn-shared", "2 09:00", gb_per_s=6.0),
        fake("small", "xqa", "2 08:00", num_bytes=10),
        fake("alone", "jitattn-shared", "2 08:00"),
        fake("alone", "jitattn-shared", "3 08:00"),
    ]
    (run,) = roofline.newest_runs(records)
    assert (run.card, run.commit, run.copy, run.read) == ("H100", "2", 3000.0, 3100.0)
    assert list(run.cases) == ["small", "a"]
    assert [record["gb_per_s"] for record in run.cases["a"]] == [1.0, 6.0]
    assert roofline.clusters(run) == [["small"], ["a"]]


def test_without_rivals_there_is_no_picture(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("")
    assert roofline.main([str(path), "-o", str(tmp_path / "x.svg")]) == 1
    assert not (tmp_path / "x.svg").exists()
