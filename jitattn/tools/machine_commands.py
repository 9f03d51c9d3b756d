"""``jitattn demo`` and ``doctor``: the machine, tried and examined."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

from jitattn.base import knobs
from jitattn.tools.configs_command import configs_of_model, serving_of
from jitattn.tools.console import UsageError, load_knobs, make_console, make_table, print_json
from jitattn.version import __version__

if TYPE_CHECKING:
    from jitattn.bundles.model_kernels import Serving
    from jitattn.tools.doctor import Finding


def run_demo(args: argparse.Namespace) -> int:
    """Run the demo; 1 if a result is wrong."""
    try:
        from jitattn.tools import demo
    except ModuleNotFoundError as error:
        raise UsageError(f"the demo computes, and needs torch: {error}") from error
    return 0 if demo.run(make_console(), load_knobs()) else 1


def run_doctor(args: argparse.Namespace) -> int:
    """Print what the machine has; 1 if something is missing."""
    from jitattn.tools import doctor

    serving = serving_of(args)
    if args.arch and args.model is None:
        raise UsageError("--arch is about --model, which is not given")
    try:
        settings = load_knobs()
    except ModuleNotFoundError:  # of the folder of caches, which is a finding, too
        settings = knobs.Knobs(cache_dir=None)
    findings = doctor.examine(settings)
    if args.model is not None:
        findings.append(_model_finding(args, serving, settings))
    ok = all(finding.ok is not False for finding in findings)
    if args.json:
        print_json({"ok": ok, "findings": [asdict(finding) for finding in findings]})
        return 0 if ok else 1
    try:
        _print_findings(findings)
    except ModuleNotFoundError:  # of what draws tables
        for finding in findings:
            sys.stdout.write(f"{_MARKS[finding.ok][0]} {finding.what}: {finding.found}\n")
    for finding in findings:
        if finding.advice:
            sys.stdout.write(f"{finding.what}: {finding.advice}\n")
    return 0 if ok else 1


def _model_finding(args: argparse.Namespace, serving: Serving, settings: knobs.Knobs) -> Finding:
    from jitattn.bundles.precompile import kernels_of
    from jitattn.tools import doctor

    archs = tuple(dict.fromkeys(args.arch or doctor.archs_here(settings)))
    if not archs:
        return doctor.Finding(
            "model", "not looked for", False, "no card and no bundle: give --arch"
        )
    configs = configs_of_model(args.model, serving)
    command = f"jitattn precompile --arch {','.join(archs)} --model {args.model} -o DIR"
    return doctor.examine_model(kernels_of(configs, archs), settings, command)


_MARKS = {True: ("ok", "green"), False: ("no", "red"), None: ("--", "yellow")}


def _print_findings(findings: Iterable[Finding]) -> None:
    from rich.markup import escape

    console = make_console()
    table = make_table(console, f"jitattn {__version__}", "", "what", "found")
    for finding in findings:
        mark, colour = _MARKS[finding.ok]
        table.add_row(f"[{colour}]{mark}[/]", finding.what, escape(finding.found))
    console.print(table)
