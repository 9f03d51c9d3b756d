"""The plots of figures, most of them from the records that are committed."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed; it is in the bench extra")

from bench import case_plot, roofline

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


def test_prefill_records_make_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "prefill.svg"
    assert roofline.main(["--prefill", *map(str, RESULTS), "-o", str(path)]) == 0
    text = "".join(ElementTree.parse(path).getroot().itertext())
    for word in ("Prefill on NVIDIA H100", "1x16k", "FlashInfer fa2", "TFLOP/s"):
        assert word in text


def test_mla_records_make_a_picture(tmp_path: Path) -> None:
    names = ("B1x4k-h16-p64", "B64x4k-h128-p64", "gone")
    made = [
        fake(
            name, contender, "1 08:00", kind="mla", status="timed", group=group, floor_fraction=0.5
        )
        for name, group in zip(names, ("figures", "figures", "layouts"), strict=True)
        for contender in ("fa2", "flashinfer-fa3", "jitattn-shared")
    ]
    records = tmp_path / "mla.jsonl"
    records.write_text("".join(json.dumps(record) + "\n" for record in made))
    path = tmp_path / "mla.svg"
    assert roofline.main(["--mla", str(records), "-o", str(path)]) == 0
    text = "".join(ElementTree.parse(path).getroot().itertext())
    for word in ("Latent attention on H100", *names[:2], "FlashInfer fa3", "% of what"):
        assert word in text
    assert "gone" not in text
    assert "FlashAttention-3" not in text
    assert [case_plot.MLA.figure(record) for record in made] == [50.0] * 9


def test_last_prefill_figures_of_the_newest_commit_count() -> None:
    records = [
        fake("8x2k", "fa3-paged", "1 08:00", group="figures", tflop_per_s=1.0),
        fake("8x2k", "fa3-paged", "2 08:00", group="figures", tflop_per_s=2.0),
        fake("8x2k", "fa3-paged", "2 09:00", group="figures", tflop_per_s=3.0),
        fake("8x2k", "jitattn-shared", "2 09:00", group="figures", tflop_per_s=4.0),
        fake("8x2k", "jitattn-shared", "2 10:00", group="layouts", tflop_per_s=5.0),
    ]
    cards = case_plot.PREFILL.newest(records)
    assert [r["tflop_per_s"] for r in cards["H100"]] == [3.0, 4.0]
    assert case_plot.PREFILL.newest(records[-1:]) == {}
