"""bench_int4: what it measures, and how it loads a rival's file without the rival's package."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from bench.bench_int4 import int4_points, load_triton

FILE = """
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.helpers import ANSWER
from vllm.v1.kv_cache_interface import KVQuantMode
import vllm.envs as envs

given = (triton, tl, envs.VLLM_BATCH_INVARIANT, KVQuantMode.NONE, current_platform.is_cuda())
"""


def test_points_are_decode_and_prefill() -> None:
    assert [point.kind for point in int4_points()] == ["decode", "decode", "decode", "prefill"]


def test_a_file_is_loaded_without_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "vllm/v1/attention/ops"
    folder.mkdir(parents=True)
    (tmp_path / "vllm/__init__.py").write_text("raise ImportError")
    (folder / "helpers.py").write_text("ANSWER = 42")
    (folder / "int4_per_token_head.py").write_text(FILE)
    triton = types.ModuleType("triton")
    triton.language = object()  # type: ignore[attr-defined]
    monkeypatch.setattr(sys, "modules", {**sys.modules, "triton": triton})
    module = load_triton(tmp_path)
    assert module.ANSWER == 42
    assert module.given == (triton, triton.language, False, 0, True)
