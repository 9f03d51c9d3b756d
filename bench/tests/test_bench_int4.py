"""bench_int4: what it measures, and how it loads a rival's file without the rival's package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.bench_int4 import int4_points

FILE = """
import vllm.envs as envs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.helpers import ANSWER
from vllm.v1.kv_cache_interface import KVQuantMode

given = (tl, envs.VLLM_BATCH_INVARIANT, KVQuantMode.NONE, current_platform.is_cuda(), ANSWER)
"""
SCRIPT = """
import sys
from pathlib import Path
from bench.bench_int4 import load_triton
print(load_triton(Path(sys.argv[1])).given)
"""


def test_points_are_decode_and_prefill() -> None:
    assert [point.kind for point in int4_points()] == ["decode", "decode", "decode", "prefill"]


def test_a_file_is_loaded_without_its_package(tmp_path: Path) -> None:
    folder = tmp_path / "vllm/v1/attention/ops"
    folder.mkdir(parents=True)
    (tmp_path / "vllm/__init__.py").write_text("raise ImportError")
    (folder / "helpers.py").write_text("ANSWER = 42")
    (folder / "int4_per_token_head.py").write_text(FILE)
    (tmp_path / "triton.py").write_text("language = 'tl'")
    # In a process of its own, since it puts stand-ins among the modules.
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{SCRIPT}"
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "('tl', False, 0, True, 42)", done.stderr
