"""bench_layer without a card: its layers, its host times, its table, and how fast a host is."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from bench import host_speed
from bench.bench_layer import CASES, Layers, host_times, print_table
from bench.token_workloads import make_token_batch, smaller


def test_layers_and_their_host_times(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[None] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(None))
    row = dataclasses.replace(smaller(CASES[1]), num_tokens=4)
    layers = Layers.of(make_token_batch(row, 2, torch.device("cpu")))
    layers.run(0)
    assert layers.outs[0].isfinite().all()
    assert layers.outs[1].isnan().all()
    times = host_times(layers, rounds=2)
    assert layers.outs[1].isfinite().all()
    assert [*times] == ["host_median_s", "host_preprocess_s", "host_run_s"]
    assert all(isinstance(s, float) and s > 0 for s in times.values())
    assert len(waits) == 2 * 3 + 1


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"launches": 2, "same_bits": True, "median_s": 193e-6}
    facts |= {"host_median_s": 25e-6, "host_preprocess_s": 14.5e-6, "host_run_s": 9.25e-6}
    print_table({"a case": facts})
    out = capsys.readouterr().out
    for cell in ("a case", "25.00", "14.50", "9.25", "193.00", "True"):
        assert cell in out


def test_speed_of_a_host() -> None:
    speed = host_speed.measure(repeats=3)
    assert 0 < speed.torch_op_s < speed.loop_s < math.inf
    assert speed.launch_s is None
    assert "zero_" not in str(speed)
    with_device = host_speed.HostSpeed(loop_s=30e-6, torch_op_s=9e-7, launch_s=3.25e-6)
    assert str(with_device) == (
        "1000 additions in Python 30.0 us, a torch.empty(0) 0.90 us, a zero_() 3.25 us"
    )
