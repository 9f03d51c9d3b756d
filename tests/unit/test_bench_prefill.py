"""The parts of the prefill bench that need no GPU."""

from __future__ import annotations

import pytest
import torch

from bench import bench_prefill
from bench.bench_prefill import CASES, PrefillCase, make_inputs

TINY = PrefillCase("tiny", (70, 1), (90, 40), num_qo_heads=4, num_kv_heads=2, head_dim=32)


class OneSecond:
    """A timer that runs what it is given."""

    def samples(self, call: bench_prefill.Call) -> list[float]:
        call()
        return [1.0, 1.0]


def run(names: list[str]) -> list[dict[str, object]]:
    return bench_prefill.bench_case(make_inputs(TINY, torch.device("cpu")), names, OneSecond(), 1)  # type: ignore[arg-type]


def test_work_counts_the_keys_that_are_seen() -> None:
    scores = sum(
        key <= kv_len - q_len + row
        for q_len, kv_len in zip(TINY.q_lens, TINY.seq_lens, strict=True)
        for row in range(q_len)
        for key in range(kv_len)
    )
    assert TINY.flop == 2 * 2 * 32 * 4 * scores
    assert len({case.name for case in CASES}) == len(CASES) == 5


@pytest.mark.parametrize("q_len", [1, 2, 13, 128, 16_384])
def test_sampled_rows(q_len: int) -> None:
    rows = bench_prefill.sampled_rows(q_len)
    assert rows[0] == 0
    assert rows[-1] == q_len - 1
    assert len(rows) == len(set(rows)) <= 20


def test_a_right_output_is_timed() -> None:
    (result,) = run(["jitattn-shared"])
    assert result["status"] == "timed"
    assert result["median_s"] == 1.0
    assert result["tflop_per_s"] == TINY.flop / 1e12
    assert "plan_s" in result


def test_a_wrong_output_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(inputs: bench_prefill.Inputs) -> bench_prefill.Prepared:
        right = bench_prefill.prepare_jitattn(inputs)

        def spoil() -> None:
            right.run()
            right.out[-1] = 0  # one row of one request

        return bench_prefill.Prepared(spoil, right.out)

    def broken(inputs: bench_prefill.Inputs) -> bench_prefill.Prepared:
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(bench_prefill.CONTENDERS, "wrong", wrong)
    monkeypatch.setitem(bench_prefill.CONTENDERS, "broken", broken)
    first, second = run(["wrong", "broken"])
    assert first["status"] == "wrong"
    assert second["status"] == "failed"
    assert "no such kernel" in str(second["reason"])
    assert "median_s" not in first
