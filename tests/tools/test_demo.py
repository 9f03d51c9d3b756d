"""The demo, as it runs without a GPU, and that its checks can fail."""

from __future__ import annotations

import math
import re

import pytest
import torch
from rich.console import Console

from jitattn.tools import cli, demo
from jitattn.tools.demo import Check


def test_runs_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["demo"]) == 0
    printed = capsys.readouterr().out
    assert len(re.findall(r"\bpass\b", printed)) == 4
    assert "FAIL" not in printed
    for layout in demo.LAYOUTS:
        assert re.search(rf"jitattn_decode_\w*{layout}", printed)
    assert "jitattn_schedule" in printed
    assert printed.count("compiled") >= 5


@pytest.mark.gpu
def test_runs_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo"]) == 0
    printed = capsys.readouterr().out
    assert len(re.findall(r"\bpass\b", printed)) == 4
    assert "GB/s" in printed


def test_the_report_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The same steps as on a GPU, with the reference backend in the place of the kernels.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**33, 2**34))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Card")
    monkeypatch.setattr(demo, "mixed_lengths", lambda num_requests, longest: (1, 40, 16))
    monkeypatch.setattr(demo, "time_on_gpu", lambda call: (call(), 1e-3)[1])
    assert demo._run_on_gpu(Console(width=120), torch.device("cpu"))
    printed = capsys.readouterr().out
    assert "this card copies 1,074 GB/s" in printed
    assert re.search(r"separate\D+1,000.0", printed)


def test_a_wrong_result_fails_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.ones(q.shape, dtype=torch.float64), torch.zeros(q.shape[:2])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(demo, "_torch_oracle", wrong)
    monkeypatch.setattr(demo, "build_all", lambda *_: ())
    assert cli.main(["demo"]) == 1


def test_nan_fails() -> None:
    nan, good = Check(math.nan, 1.0), Check(0.5, 1.0)
    assert not nan.passed
    assert good.passed
    assert demo._worst([good, nan]) is nan
    assert not Check(1.5, 1.0).passed


def test_equal_infinities_are_no_error() -> None:
    got = torch.tensor([-math.inf, 1.0])
    assert demo._max_error(got, torch.tensor([-math.inf, 1.5])) == 0.5
    assert demo._max_error(got, torch.tensor([0.0, 1.0])) == math.inf


def test_lengths_are_mixed_and_reproducible() -> None:
    lengths = demo.mixed_lengths(64, 1000)
    assert lengths == demo.mixed_lengths(64, 1000)
    assert (min(lengths), max(lengths), len(set(lengths))) == (1, 1000, 64)
    assert list(lengths) != sorted(lengths)


def test_what_no_request_owns_is_poisoned() -> None:
    batch = demo.make_batch((5, 0, 40), torch.device("cpu"))
    used = batch.tables["shared"]
    live = used[used >= 0].long()
    assert batch.kv_cache[live].isfinite().all()
    assert batch.kv_cache.isnan().flatten(1).all(1).sum() == len(batch.kv_cache) - len(live)
    assert (used[1] == -1).all()
    separate = batch.tables["separate"]
    assert torch.equal(separate[:, 0], used)
    assert not torch.equal(separate[:, 1], used)
    assert set(separate[:, 1].flatten().tolist()) == set(used.flatten().tolist())
