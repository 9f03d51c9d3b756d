"""Precompile the kernels of tests/gpu/test_preprocess.py, test_append.py and bench_preprocess.py.

    python -m tests.gpu.bundle_tokens --arch sm_90a -o build/gpu-tests
    JITATTN_PRECOMPILED=build/gpu-tests JITATTN_JIT=0 python -m pytest tests/gpu/test_preprocess.py

Needs neither a GPU nor torch's CUDA build.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jitattn
from bench.token_workloads import configs as bench_configs
from jitattn.support import ARCHITECTURES
from tests.token_sets import kinds_of


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.bundle_tokens", description=__doc__)
    parser.add_argument("--arch", choices=ARCHITECTURES, default="sm_90a")
    parser.add_argument("-o", "--out", type=Path, help="folder to fill")
    parser.add_argument("-j", "--jobs", type=int, help="processes; default: one per core")
    parser.add_argument("--list", action="store_true", help="print the configurations only")
    options = parser.parse_args(arguments)
    configs = list(dict.fromkeys((*kinds_of(), *bench_configs())))
    if options.list or options.out is None:
        sys.stdout.writelines(f"{config}\n" for config in configs)
        return 0
    report = jitattn.precompile(
        configs, arch=options.arch, out=options.out, jobs=options.jobs, progress=False
    )
    sys.stdout.write(
        f"{len(report.entries)} kernels for {options.arch} in {options.out}: {report.compiled} "
        f"compiled, {report.reused} there already, {report.seconds:.0f} s\n"
    )
    for failure in report.failures:
        sys.stdout.write(f"{failure}\n")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
