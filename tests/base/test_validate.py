"""Flags and counts: what only looks like one is refused, in the first call and in later ones."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

import jitattn
from jitattn.base.validate import check_count, check_flag, check_number
from tests.emulator.launch_recorder import LaunchRecorder, install
from tests.emulator.pages import emulate_kernels

FLAGS = ("no", 1, 0, None, 1.0, torch.tensor(True))
TABLE = jitattn.BlockTable(torch.arange(2, dtype=torch.int32)[:, None])
LENS = torch.ones(2, dtype=torch.int32)
Q = torch.zeros(2, 4, 64, dtype=torch.bfloat16)
CACHE = torch.zeros(2, 2, 16, 2, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize("value", FLAGS)
def test_flags(value: object) -> None:
    assert check_flag("a", True) is True
    with pytest.raises(TypeError, match=r"a is a .*: expected a bool"):
        check_flag("a", value)


def test_a_flag_of_numpy_is_told_from_a_bool() -> None:
    with pytest.raises(TypeError, match=r"a is a numpy\.bool_?: expected a bool"):
        check_flag("a", np.bool_(True))


@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_beyond_floats(sign: int) -> None:
    for value in (sign * 10**400, Fraction(sign * 10**400)):
        with pytest.raises(ValueError, match="a is beyond floats"):
            check_number("a", value)


def test_counts() -> None:
    assert check_count("a", 3) == 3
    assert check_count("a", 0, least=0, most=0) == 0
    for value in (True, "1", 1.0, None, torch.tensor(1)):
        with pytest.raises(TypeError, match=r"a is a .*: expected an int"):
            check_count("a", value)
    with pytest.raises(ValueError, match="a is 0: expected at least 1"):
        check_count("a", 0)
    with pytest.raises(ValueError, match="a is 5: expected 1 to 4"):
        check_count("a", 5, most=4)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> LaunchRecorder:
    return install(monkeypatch)


@pytest.mark.parametrize("flag", FLAGS)
def test_return_lse(flag: object, cuda: LaunchRecorder) -> None:
    planner = cuda.planner(num_qo_heads=4, num_kv_heads=2, head_dim=64)
    kv, plan = planner.bind(CACHE), planner.plan(TABLE, LENS)
    for again in range(3):
        with pytest.raises(TypeError, match=r"return_lse is a .*: expected a bool"):
            plan.run(Q, kv, return_lse=flag)  # type: ignore[arg-type]
        plan.run(Q, kv)
        assert len(cuda.launches) == 2 + again
    with pytest.raises(TypeError, match=r"return_lse is a .*: expected a bool"):
        jitattn.attention(Q, CACHE, TABLE, LENS, return_lse=flag)  # type: ignore[arg-type]


def test_precompile(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="progress is a str"):
        jitattn.precompile("head_dim=64", "sm_80", tmp_path, progress="no")  # type: ignore[arg-type]
    for jobs in ("2", True, 2.0):
        with pytest.raises(TypeError, match=r"jobs is a .*: expected an int"):
            jitattn.precompile("head_dim=64", "sm_80", tmp_path, jobs)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


# What is equal to 1 finds the launch of 1.
AGAIN: dict[str, tuple[Callable[[object], object], str]] = {
    "num_tokens": (
        lambda one: jitattn.batch_info(LENS[:1], LENS[:1], num_tokens=one),  # type: ignore[arg-type]
        "num_tokens is a",
    ),
    "page_size of slots": (
        lambda one: jitattn.batch_info(LENS, LENS, num_tokens=2, pages=TABLE, page_size=one),  # type: ignore[arg-type]
        "page_size is a",
    ),
    "page_size": (
        lambda one: jitattn.build_block_table(LENS[:, None], LENS, one),  # type: ignore[arg-type]
        "page_size is a",
    ),
    "k_scale": (
        lambda one: jitattn.gather_kv(CACHE.char(), TABLE, LENS, k_scale=one),  # type: ignore[arg-type]
        "k_scale is a",
    ),
}


@pytest.mark.parametrize("name", AGAIN)
def test_true_is_not_1(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_kernels(monkeypatch, 1)
    call, match = AGAIN[name]
    for _ in range(2):
        call(1)
        with pytest.raises(TypeError, match=match):
            call(True)
