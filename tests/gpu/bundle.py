"""Precompile every kernel of the GPU tests, so that a card computes and doesn't compile.

    python -m tests.gpu.bundle --arch sm_90a -o build/gpu-tests
    JITATTN_PRECOMPILED=build/gpu-tests JITATTN_JIT=0 python -m pytest tests/gpu

Needs neither a GPU nor torch.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jitattn
from jitattn.support import ARCHITECTURES
from jitattn.transfer_config import every_config
from tests.cases import kernel_configs


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.bundle", description=__doc__)
    parser.add_argument("--arch", choices=ARCHITECTURES, default="sm_90a")
    parser.add_argument("-o", "--out", type=Path, help="folder to fill")
    parser.add_argument("-j", "--jobs", type=int, help="processes; default: one per core")
    parser.add_argument(
        "--transfers", action="store_true", help="only what moves tokens and pages, makes tables"
    )
    parser.add_argument("--list", action="store_true", help="print the configurations only")
    options = parser.parse_args(arguments)
    configs = [*every_config(), *(() if options.transfers else kernel_configs(options.arch))]
    if options.list or options.out is None:
        for config in configs:
            sys.stdout.write(config.arguments_text() + "\n")
        return 0
    report = jitattn.precompile(
        configs, arch=options.arch, out=options.out, jobs=options.jobs, progress=False
    )
    sys.stdout.write(
        f"{len(report.entries)} kernels for {options.arch} in {options.out}: "
        f"{report.compiled} compiled, {report.reused} there already, {report.seconds:.0f} s\n"
    )
    for failure in report.failures:
        sys.stdout.write(f"{failure}\n")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
