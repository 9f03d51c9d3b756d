"""Precompile jitattn's kernels for the bench cases: a card that is waited for should only compute.

    python -m bench.bundle --cases figures -o bundle-bench
    JITATTN_PRECOMPILED=$PWD/bundle-bench JITATTN_JIT=0 python -m bench.bench_decode --cases figures

Needs no GPU. Cases that jitattn doesn't support yet are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import jitattn
from bench.bench_dispatch import CASE as DISPATCH_CASE
from bench.cases import GROUPS, select
from bench.contenders import VARIANTS, JitAttn
from bench.workloads import Case, PlannerArguments


def configurations(cases: Sequence[Case], arch: str) -> list[PlannerArguments]:
    """Return what the planners of ``cases`` are given, each once, without unsupported ones."""
    wanted = [
        variant.planner_arguments(case)
        for case in cases
        for name, variant in VARIANTS.items()
        if JitAttn(name).name in GROUPS[case.group].contenders
    ]
    wanted += [DISPATCH_CASE.planner_arguments(table) for table in ("shared", "separate")]
    return [
        arguments
        for i, arguments in enumerate(wanted)
        if arguments not in wanted[:i] and jitattn.check_config(arch, **arguments).supported
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Fill the bundle; the exit status is 1 when a kernel didn't compile."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.bundle",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cases", default="figures")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("-o", "--out", type=Path, required=True)
    options = parser.parse_args(argv)
    chosen = configurations(select(options.cases), options.arch)
    report = jitattn.precompile(
        [dict(arguments) for arguments in chosen], options.arch, options.out
    )
    for failure in report.failures:
        print(failure)
    print(f"{options.out}: {report.compiled} compiled, {report.reused} there already")
    return int(bool(report.failures))


if __name__ == "__main__":
    raise SystemExit(main())
