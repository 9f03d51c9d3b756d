"""Fetch a package's own tests, run them over ``jitattn.compat``, and count what became of them.

``python -m tests.suites flashinfer`` or ``flash_attn``; ``-h`` lists the options. Nothing needs a
GPU: devices of CUDA are the CPU, and kernels the reference backend. The tests are fetched into a
folder outside of the checkout and belong to their package. Docs: docs/from-flashinfer.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import platformdirs

ROOT = Path(__file__).parents[2]


class Suite(NamedTuple):
    """Where a package's tests are, and which of them are about what jitattn has."""

    source: str
    revision: str
    folders: tuple[str, ...]
    files: tuple[str, ...]
    outdated: tuple[str, ...] = ()  # of tests that hold for another release alone


_ATTENTION = (
    *("alibi", "attention_sink", "batch_attention", "batch_decode_kernels", "batch_prefill"),
    *(
        "batch_invariant_fa2",
        "batch_prefill_kernels",
        "block_sparse",
        "decode_fp8_calibration_scale",
    ),
    *("decode_prefill_lse", "deepseek_mla", "fp8_prefill", "hopper", "logits_cap", "mla_page"),
    *("non_contiguous_decode", "non_contiguous_prefill", "page", "rope", "shared_prefix_kernels"),
    *("single_prefill", "sliding_window", "tensor_cores_decode", "trtllm_gen_attention_decode"),
    *("trtllm_gen_attention_prefill", "trtllm_gen_mla", "trtllm_ragged_kv_stride"),
    *("workspace_size", "xqa", "xqa_batch_decode", "xqa_mla_batch_decode", "hopper_fp8_attention"),
    *("trtllm_gen_attention_decode_xqa",),
)
SUITES = {
    "flashinfer": Suite(
        "https://github.com/flashinfer-ai/flashinfer",
        "main",
        ("tests",),
        (
            *(f"tests/attention/test_{name}.py" for name in _ATTENTION),
            *("tests/utils/test_pod_kernels.py", "tests/utils/test_quantization.py"),
        ),
        # Which parameter is the last.
        ("test_bf16q_fp8kv_transform_mode_kwarg_exists",),
    ),
    "flash_attn": Suite(
        "https://github.com/Dao-AILab/flash-attention",
        "main",
        ("tests/test_flash_attn.py",),
        ("tests/test_flash_attn.py",),
    ),
}


def fetch(suite: Suite, source: str, revision: str, folder: Path) -> str:
    """Unpack a package's tests into a folder; return the commit they are of."""
    folder.mkdir(parents=True, exist_ok=True)
    git = ["git", "-C", str(folder)]
    if not (folder / ".git").exists():
        subprocess.run([*git, "init", "-q"], check=True)
    if Path(source).is_dir():
        of = ["git", "-C", source]
    else:
        subprocess.run([*git, "fetch", "-q", "--depth", "1", source, revision], check=True)
        of, revision = git, "FETCH_HEAD"
    listed = subprocess.run(
        [*of, "ls-tree", "-r", "--name-only", revision, "--", *suite.folders],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    for name in listed.stdout.splitlines():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shown = subprocess.run([*of, "show", f"{revision}:{name}"], check=True, capture_output=True)
        path.write_bytes(shown.stdout)
    found = subprocess.run([*of, "rev-parse", revision], check=True, capture_output=True, text=True)
    return found.stdout.strip()


def run(name: str, folder: Path, arguments: argparse.Namespace) -> dict[str, object]:
    """Run the files of a suite, each in a process of its own; return the sums of their counts."""
    # The package's own tests are called ``tests``, too: ours must not be on the path.
    path = folder / "path"
    path.mkdir(exist_ok=True)
    for link, target in (("jitattn", ROOT / "jitattn"), ("suites", ROOT / "tests/suites")):
        if not (path / link).is_symlink():
            (path / link).symlink_to(target)
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(folder), str(path), *arguments.path)),
        "SUITES_SAMPLE": str(arguments.sample),
        "SUITES_SECONDS": str(arguments.seconds),
    }
    sums: dict[str, int] = {}
    failed: list[str] = []
    why: dict[str, dict[str, int]] = {}
    keyword = " and ".join(
        (*(f"not {n}" for n in SUITES[name].outdated), arguments.keyword or "test")
    )
    for file in arguments.files or SUITES[name].files:
        report = folder / "report.json"
        report.unlink(missing_ok=True)
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-x" if arguments.first else "-q", file),
            *("--noconftest", "-p", "suites.plugin", "-p", "no:cacheprovider", "--no-header"),
            *("--replace", name, "--report", str(report), "--tb=short", "-c", os.devnull),
            *("--rootdir", str(folder), "-k", keyword),
        ]
        done = subprocess.run(
            command, cwd=folder, env=environ, check=False, capture_output=True, text=True
        )
        if not report.exists():
            failed.append(f"{file}: no report, {done.stdout[-300:]} {done.stderr[-300:]}")
            continue
        found = json.loads(report.read_text())
        for kind, count in found["counts"].items():
            sums[kind] = sums.get(kind, 0) + count
        for kind, reasons in found["why"].items():
            of_kind = why.setdefault(kind, {})
            for reason, count in reasons.items():
                of_kind[reason] = of_kind.get(reason, 0) + count
        failed += found["failed"]
        print(f"{file}: {found['counts']}", flush=True)  # noqa: T201
    return {"counts": sums, "failed": failed, "why": why}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("package", choices=sorted(SUITES))
    parser.add_argument("--files", nargs="+", help="tests in the package's checkout; default: all")
    parser.add_argument("--source", help="address or folder of its repository")
    parser.add_argument("--revision", help="default: main, or HEAD of a folder")
    parser.add_argument("--folder", type=Path, help="where tests are unpacked; default: a cache")
    parser.add_argument("--sample", type=int, default=12, help="small cases a function; 0: all")
    parser.add_argument("--seconds", type=int, default=20, help="that a test may take")
    parser.add_argument("--path", nargs="*", default=(), help="more for PYTHONPATH")
    parser.add_argument("-k", "--keyword", default="", help="as pytest's")
    parser.add_argument("--first", action="store_true", help="stop a file at its first failure")
    arguments = parser.parse_args()
    suite = SUITES[arguments.package]
    default = platformdirs.user_cache_path("jitattn-suites") / arguments.package
    folder = (arguments.folder or default).resolve()
    if folder.is_relative_to(ROOT):
        parser.error(f"--folder {folder} is inside the checkout: these files are not ours")
    source = arguments.source or suite.source
    revision = arguments.revision or ("HEAD" if Path(source).is_dir() else suite.revision)
    commit = fetch(suite, source, revision, folder)
    found = run(arguments.package, folder, arguments)
    (folder / "result.json").write_text(json.dumps({"commit": commit, **found}, indent=1) + "\n")
    print(f"{arguments.package} {commit[:12]}: {found['counts']}")  # noqa: T201
    for line in found["failed"]:  # type: ignore[attr-defined]
        print(line)  # noqa: T201
    raise SystemExit(1 if found["failed"] else 0)


if __name__ == "__main__":
    main()
