"""bench_generate without a card: a dry run, what is wrong, its table and its kernels."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bench.bench_generate import (
    BASELINE,
    LLAMA,
    TINY,
    WrongTokensError,
    kernel_configs,
    print_table,
    share_of_first,
)
from bench.timing import summarize
from bench.turns import Result
from jitattn.kernels.registry import check_config


def test_prompts_are_fixed_and_in_range() -> None:
    prompts = LLAMA.prompts()
    assert prompts == LLAMA.prompts()
    assert len(prompts) == LLAMA.num_requests
    assert all(32 <= len(prompt) < LLAMA.longest for prompt in prompts)
    assert all(0 < token < LLAMA.sizes["vocab_size"] for token in prompts[0])


def test_what_is_wrong_is_told() -> None:
    def outputs(first: list[int], num_new: int = TINY.num_new) -> list[SimpleNamespace]:
        return [SimpleNamespace(generated_tokens=[token] * num_new, error=None) for token in first]

    first = [3, 1, 4, 1, 5]
    logits = torch.arange(128.0).mul(7).sin().repeat(5, 1)
    logits[range(5), first] = 2.0
    logits[2, 9] = 1.95  # as good
    assert share_of_first(TINY, outputs(first), logits) == 1
    assert share_of_first(TINY, outputs([3, 1, 9, 1, 5]), logits) == 1
    with pytest.raises(WrongTokensError, match="3 of 5 first tokens are as good"):
        share_of_first(TINY, outputs([3, 1, 4, 2, 6]), logits)
    with pytest.raises(WrongTokensError, match="5 of 5 requests"):
        share_of_first(TINY, outputs(first, num_new=3), logits)
    failed = outputs(first)
    failed[1].error = "no memory"
    with pytest.raises(WrongTokensError, match="4 of 5 requests were decoded"):
        share_of_first(TINY, failed, logits)


def test_its_kernels_are_supported() -> None:
    for workload in (LLAMA, TINY):
        for arguments in kernel_configs(workload):
            assert check_config("sm_90a", **arguments).supported


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"tokens_per_s": 1000.0, "good_first_tokens": 0.99}
    results = [
        Result(BASELINE, "timed", timing=summarize([2.0, 2.0]), facts=facts),
        Result("sdpa", "timed", timing=summarize([3.0, 3.0]), facts=facts),
        Result("eager", "failed", "RuntimeError: no memory"),
    ]
    print_table(LLAMA, results)
    out = capsys.readouterr().out
    for cell in ("1.500", "1000", "0.990", "failed", "eager: RuntimeError: no memory"):
        assert cell in out
