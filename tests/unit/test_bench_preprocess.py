"""bench_preprocess without a card: its rows, its bytes, its check and its table."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import torch

from bench import bench_preprocess, build_rivals
from bench.bench_preprocess import (
    JitAttnTokens,
    Row,
    all_token_contenders,
    check_ours,
    compare,
    outputs,
    passes,
    print_table,
)
from bench.ceilings import Ceilings
from bench.timing import Timing
from bench.token_workloads import WORKLOADS, configs, make_token_batch, smaller
from jitattn.preprocess_config import PreprocessConfig

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


@pytest.mark.parametrize("row", SMALL, ids=lambda row: row.name)
def test_batches_are_what_they_say(row: object) -> None:
    batch = make_token_batch(row, 2, CPU)  # type: ignore[arg-type]
    assert batch.qkv[0].nbytes >= batch.row.read_bytes
    check_ours(batch)
    JitAttnTokens().prepare(batch)(1)
    sides = outputs(batch)[-2:]
    assert not sides[0].any()
    written = batch.caches[1][0].float().abs().amax(dim=-1) > 0
    assert int(written.sum()) == batch.row.num_tokens * 8


def test_what_is_wrong_is_seen() -> None:
    with pytest.raises(ValueError, match="differ by 1"):
        compare([torch.zeros(3)], [torch.ones(3)])


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
