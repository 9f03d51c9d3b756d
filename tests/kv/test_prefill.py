"""Prompts through pages of a manager, scratch included, on the reference backend."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from tests.support.kv_serving import (
    HEAD_DIM,
    Pressure,
    check_tables_written_in_place,
    check_worked_example,
    prefill_and_decode,
    windowed_manager,
    windowed_planner,
)


def chunks_of(lengths: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(n, 3 * HEAD_DIM, generator=generator).bfloat16() for n in lengths]


@pytest.mark.usefixtures("bundled")
def test_the_worked_example() -> None:
    """32 layers, prompt 1024, window_left 127, page 32: 32 slots, with scratch 5, or 6."""
    scratch = ((False, 0), (True, 0), (True, 33))
    assert check_worked_example("cpu", scratch, num_decoded=1) == [32, 5, 6]


@pytest.mark.parametrize("lengths", [[24, 24, 24], [5, 40, 1, 30], [70]])
@pytest.mark.parametrize("window_left", [0, 7, 12])
def test_chunks_with_scratch_have_the_bits_of_those_without(
    lengths: list[int], window_left: int
) -> None:
    planner = windowed_planner(window_left, 4, "cpu")
    found = []
    for reuse_scratch in (False, True):
        manager = windowed_manager(
            3, window_left=window_left, page_size=4, slots=24, device="cpu",
            reuse_scratch=reuse_scratch,
        )  # fmt: skip
        found.append(prefill_and_decode(manager, planner, chunks_of(lengths), num_decoded=3))
    (plain, plain_peak), (shared, shared_peak) = found
    assert shared_peak < plain_peak
    for given, expected in zip(shared, plain, strict=True):
        assert not given.isnan().any()
        assert torch.equal(given, expected)


@pytest.mark.usefixtures("bundled")
def test_tables_are_read_again() -> None:
    check_tables_written_in_place("cpu")


@pytest.mark.usefixtures("bundled")
@pytest.mark.parametrize("seed", range(2))
def test_attention_under_pressure_is_that_of_a_contiguous_cache(seed: int) -> None:
    Pressure("cpu", seed, slots=60, host_slots=20).run(40)


@pytest.mark.parametrize(("windows", "gpu_bytes"), [([-1, -1], 180_000), ([15, 15, -1], 160_000)])
def test_the_reference_scheduler(
    windows: list[int], gpu_bytes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """It answers all requests with fewer pages than they need together."""
    example = runpy.run_path(str(Path(__file__).parents[2] / "docs/examples/serve.py"))
    answers = example["serve"]("test", windows, gpu_bytes=gpu_bytes, reuse_scratch=True)
    asked = example["make_requests"](6)
    assert [len(tokens) for tokens in answers] == [len(r.tokens) + r.num_wanted for r in asked]
    for tokens, request in zip(answers, asked, strict=True):
        assert tokens[: len(request.tokens)] == request.tokens
    said = capsys.readouterr().out
    assert " 0 suspensions" not in said
    assert "tokens/s" in said
