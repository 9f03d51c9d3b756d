"""``jitattn precompile`` and ``bundle``: bundles filled, packed in wheels, digested."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jitattn.kernels import registry

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from jitattn.bundles.precompile import Report
from jitattn.tools.configs_command import configs_of_model, serving_of
from jitattn.tools.console import UsageError, make_console, make_table


def run_precompile(args: argparse.Namespace) -> int:
    """Fill a bundle; 1 if a kernel did not compile."""
    from jitattn.bundles.precompile import precompile

    configs = _configs_to_precompile(args)
    try:
        report = precompile(configs, arch=args.arch, out=args.out, jobs=args.jobs, strict=False)
    except KeyboardInterrupt:
        sys.stderr.write(
            f"jitattn: interrupted: {args.out} keeps what was compiled, and the same command goes "
            "on\n"
        )
        raise
    console = make_console()
    if report.entries:
        console.print(_report_table(console, f"{args.out}", report))
    console.print(
        f"{args.out}: {len(report.entries)} kernels, {report.compiled} compiled and "
        f"{report.reused} there before, in {report.seconds:.1f} s",
        markup=False,
    )
    for failure in report.failures:
        sys.stderr.write(f"jitattn: {failure}\n")
    if report.failures:
        total = len(report.entries) + len(report.failures)
        sys.stderr.write(f"jitattn: {len(report.failures)} of {total} kernels could not be made\n")
    return 1 if report.failures else 0


def _configs_to_precompile(
    args: argparse.Namespace,
) -> Sequence[registry.AnyConfig | str]:
    from jitattn.bundles.precompile import PRESETS

    serving = serving_of(args)
    if args.model is not None:
        return configs_of_model(args.model, serving)
    if args.preset is not None and args.preset not in PRESETS:
        known = ", ".join(PRESETS)
        raise UsageError(f"--preset {args.preset}: known presets are {known}")
    return args.config or PRESETS[args.preset]


def _report_table(console: Console, title: str, report: Report) -> Table:
    columns = ("arch", "kernels", "compiled", "compiler seconds", "MB")
    table = make_table(console, title, *columns)
    for arch in dict.fromkeys(entry.arch for entry in report.entries):
        entries = [entry for entry in report.entries if entry.arch == arch]
        made = [entry.seconds for entry in entries if entry.origin == "compiled"]
        size = sum(entry.stored_bytes for entry in entries) / 1e6
        cells = (len(entries), len(made), f"{sum(made):.1f}", f"{size:.1f}")
        table.add_row(arch, *map(str, cells))
    return table


def run_bundle_wheel(args: argparse.Namespace) -> int:
    """Write the wheel of a bundle."""
    from jitattn.bundles.wheel import write_wheel

    path = write_wheel(args.folder, args.out, name=args.name, version=args.wheel_version)
    sys.stdout.write(f"{path}\n")
    return 0


def run_bundle_sha256(args: argparse.Namespace) -> int:
    """Print a bundle's digest."""
    from jitattn.bundles.wheel import whole_entries
    from jitattn.jit.cache import KernelCache

    bundle = KernelCache(args.folder)
    whole_entries(bundle)
    sys.stdout.write(f"{bundle.sha256()}\n")
    return 0
