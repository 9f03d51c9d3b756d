"""The plots of decode and prefill figures, from the records that are committed."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.cases import RIVALS

pytest.importorskip("matplotlib", reason="matplotlib is not installed; it is in the bench extra")

from bench import prefill_plot, roofline

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


def test_prefill_records_make_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "prefill.svg"
    assert roofline.main(["--prefill", *map(str, RESULTS), "-o", str(path)]) == 0
    text = "".join(ElementTree.parse(path).getroot().itertext())
    for word in ("Prefill on NVIDIA H100", "1x16k", "FlashInfer fa2", "TFLOP/s"):
        assert word in text


def test_last_prefill_figures_of_the_newest_commit_count() -> None:
    records = [
        fake("8x2k", "fa3-paged", "1 08:00", group="figures", tflop_per_s=1.0),
        fake("8x2k", "fa3-paged", "2 08:00", group="figures", tflop_per_s=2.0),
        fake("8x2k", "fa3-paged", "2 09:00", group="figures", tflop_per_s=3.0),
        fake("8x2k", "jitattn-shared", "2 09:00", group="figures", tflop_per_s=4.0),
        fake("8x2k", "jitattn-shared", "2 10:00", group="layouts", tflop_per_s=5.0),
    ]
    cards = prefill_plot.newest(records)
    assert [r["tflop_per_s"] for r in cards["H100"]] == [3.0, 4.0]
    assert prefill_plot.newest(records[-1:]) == {}
