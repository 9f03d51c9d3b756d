"""Records of measurements as JSON lines, with card, driver, compiler, commit and versions."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from jitattn.version import __version__

SCHEMA = 1
"""Rises when a field of a record changes its meaning."""


def environment(rivals: Mapping[str, str] | None = None) -> dict[str, object]:
    """Return everything about this process that a figure depends on.

    Args:
        rivals: version or reason of absence of each rival.
    """
    facts: dict[str, object] = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "jitattn": __version__,
        "compiler": compiler(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "card": None,
        "driver": None,
    }
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(torch.cuda.current_device())
        facts |= {
            "card": card.name,
            "driver": _first_line(
                "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
            ),
            "num_sms": card.multi_processor_count,
            "l2_bytes": card.L2_cache_size,
        }
    return facts | {"rivals": dict(rivals or {})}


def record(kind: str, env: Mapping[str, object], **facts: object) -> dict[str, object]:
    """Return one measurement as it is stored.

    Args:
        kind: which bench wrote it: "decode", "prefill", "mla", "decoder", "generate", "engine",
            "gather", "select", "compile", "import", "dispatch", "manager" or "parallel".
        env: see `environment`.
        **facts: the figures; seconds end in ``_s``, microseconds in ``_us``.
    """
    return {"schema": SCHEMA, "kind": kind, **facts, "environment": dict(env)}


def of_result(
    kind: str, env: Mapping[str, object], case: str, result: Any, **facts: object
) -> dict[str, object]:
    """Return the record of what came of a contender on a case, such as a `bench.turns.Result`."""
    came_of_it = {name: getattr(result, name) for name in ("contender", "status", "reason")}
    return record(kind, env, case=case, **came_of_it, **facts)


def append_json(path: Path | None, records: Sequence[Mapping[str, object]]) -> None:
    """Append ``records`` to ``path``, a line each; without a path do nothing."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for entry in records:
            file.write(json.dumps(entry, sort_keys=True) + "\n")


def commit() -> str:
    """Return JITATTN_BENCH_COMMIT, for copies of a tree, or the checkout's commit.

    The latter is followed by "-dirty" when files differ from it, and "unknown" without git.
    """
    if named := os.environ.get("JITATTN_BENCH_COMMIT"):
        return named
    root = Path(__file__).parent.parent
    head = _first_line("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    if head is None:
        return "unknown"
    status = _first_line("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return f"{head}-dirty" if status else head


def compiler() -> str:
    """Return NVRTC's version and build, or why there is none; never compiles with JITATTN_JIT=0."""
    if os.environ.get("JITATTN_JIT") == "0":
        return "not asked, JITATTN_JIT=0"
    try:
        from jitattn.jit import nvrtc

        return nvrtc.toolchain()
    except Exception as error:  # whatever keeps it from loading is what the record should say
        return f"none ({error})"


def _first_line(*command: str) -> str | None:
    """Return the first line that a command prints; "" for none, None when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.partition("\n")[0].strip()
