"""``jitattn render`` and ``explain``: source and machine code of one kernel."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from jitattn.kernels import registry

if TYPE_CHECKING:
    from jitattn.spec.family import KernelSpec
from jitattn.tools.console import UsageError, load_knobs, make_console, make_table, print_json


def run_render(args: argparse.Namespace) -> int:
    """Print the source of a kernel, or write those of a planner."""
    from jitattn.jit.render import render

    if args.out is not None:
        specs = registry.specs_of_text(args.config, args.arch)
        args.out.mkdir(parents=True, exist_ok=True)
        for spec in specs:
            (args.out / f"{spec.symbol}.cu").write_text(render(spec, args.arch))
        sys.stdout.writelines(f"{args.out / spec.symbol}.cu\n" for spec in specs)
        return 0
    sys.stdout.write(render(_chosen_spec(args), args.arch))
    return 0


def _chosen_spec(args: argparse.Namespace) -> KernelSpec:
    specs = {spec.symbol: spec for spec in registry.specs_of_text(args.config, args.arch)}
    symbol = args.symbol or next(iter(specs))
    if symbol not in specs:
        raise UsageError(f"--symbol {symbol}: there are {', '.join(specs)}")
    return specs[symbol]


def run_explain(args: argparse.Namespace) -> int:
    """Print the registers, occupancy and instructions of a kernel."""
    from jitattn.tools.explain import INSTALL, explain

    found = explain(_chosen_spec(args), args.arch, load_knobs())
    if args.json:
        print_json(asdict(found) | {"mix": found.mix})
        return 0
    console = make_console()
    table = make_table(console, f"{found.symbol} for {found.arch}", "what", "value")
    for name, value in found.facts().items():
        table.add_row(name, value)
    console.print(table)
    if found.opcodes is None:
        console.print(f"The instruction mix needs nvdisasm: {INSTALL}", markup=False)
        return 0
    total = sum(found.mix.values())
    table = make_table(
        console, f"{total:,} instructions", "kind", "count", "share", "most frequent"
    )
    for kind, count in found.mix.items():
        table.add_row(kind, f"{count:,}", f"{count / total:.1%}", found.most_frequent(kind))
    console.print(table)
    return 0
