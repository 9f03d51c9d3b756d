"""The command line: argparse over the functions of the package, tables printed with rich.

Only ``demo`` imports torch; every command imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from jitattn.base import knobs
from jitattn.base.errors import CacheError, ConfigError, JitAttnError
from jitattn.kernels import registry
from jitattn.spec.arch import ARCHITECTURES, why_no_arch
from jitattn.spec.dtype import Q_DTYPES
from jitattn.version import __version__

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from jitattn.bundles.model_kernels import Need, Serving
    from jitattn.bundles.precompile import Report
    from jitattn.jit.cache import Entry, KernelCache
    from jitattn.spec.family import KernelSpec
    from jitattn.tools.doctor import Finding

    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_DEFAULT_ARCH = "sm_90a"
_PIPE_WIDTH = 240  # of tables that go to a file or a pipe, where no terminal says how wide to be
_SIZE_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


class UsageError(Exception):
    """The command line, or the environment, asks for something that makes no sense."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status: 0, 1 for a failure, 2 for wrong usage."""
    args = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):  # paths are bytes, and need not be text
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status: int = args.command(args)
        sys.stdout.flush()
        return status
    except UsageError as error:
        return _complain(error, 2)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "jitattn"):
            raise
        return _complain(f"{package} is not installed; jitattn doctor says what else is not", 1)
    except JitAttnError as error:
        return _complain(error, 1)
    except BrokenPipeError:
        # The reader has seen enough (`jitattn configs | head`); a flush at exit must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _complain(error, 1)
    except KeyboardInterrupt:
        return 130


def _complain(error: BaseException | str, status: int) -> int:
    sys.stderr.write(f"jitattn: {error}\n")
    return status


# ---------------------------------------------------------------------------- arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jitattn", description="Paged attention kernels, compiled for your exact shapes."
    )
    parser.add_argument("--version", action="version", version=f"jitattn {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    demo = _add(commands, "demo", "attention of a Llama-3.1-8B layer, checked and timed")
    demo.set_defaults(command=_demo)

    configs = _add(commands, "configs", "what is supported, or whether a model is")
    configs.add_argument("--arch", type=_archs, action="extend", help=_ARCH_HELP)
    configs.add_argument("--model", type=Path, metavar="config.json", help=_MODEL_HELP)
    _add_serving(configs)
    configs.add_argument("--json", action="store_true", help="print JSON instead of a table")
    configs.set_defaults(command=_configs)

    render = _add(commands, "render", "print the CUDA source of a kernel")
    render.add_argument("--config", default="", metavar="k=v,...", help=_CONFIG_HELP)
    _add_arch(render)
    render.add_argument("--symbol", help="which kernel of the planner (default: the main one)")
    render.add_argument("-o", "--out", type=Path, metavar="DIR", help="write all of them to DIR")
    render.set_defaults(command=_render)

    explain = _add(commands, "explain", "registers, occupancy, instructions of a kernel")
    explain.add_argument("--config", default="", metavar="k=v,...", help=_CONFIG_HELP)
    _add_arch(explain)
    explain.add_argument("--symbol", help="which kernel of the planner (default: the main one)")
    explain.add_argument("--json", action="store_true", help="print JSON instead of tables")
    explain.set_defaults(command=_explain)

    _add_precompile(commands)
    doctor = _add(commands, "doctor", "what this machine has, and what is missing")
    doctor.set_defaults(command=_doctor)
    _add_cache(commands)
    _add_bundle(commands)
    return parser


def _add(commands: _Commands, name: str, text: str) -> argparse.ArgumentParser:
    """Add a command whose line in the list of commands is also what its --help begins with."""
    return commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")


def _add_arch(parser: argparse.ArgumentParser) -> None:
    known = ", ".join(ARCHITECTURES)
    parser.add_argument(
        "--arch", type=_arch, default=_DEFAULT_ARCH, help=f"one of {known} (default: %(default)s)"
    )


_ARCH_HELP = f"comma-separated or repeated: {', '.join(ARCHITECTURES)}"
_MODEL_HELP = "the config.json that Hugging Face has of a model, or its folder"
_CONFIG_HELP = (
    "planner arguments, such as head_dim=128,page_size=16,page_table=separate; with planner=mla "
    "those of MLAPlanner, such as planner=mla,num_heads=16,kv_dtype=float8_e4m3fn; or kernels of "
    "preprocess_qkv and append_kv, such as kernel=preprocess,head_dim=128,page_size=32; or of "
    "gather_kv, kernel=gather,kv_dtype=float8_e5m2,out_dtype=bfloat16"
)


def _add_precompile(commands: _Commands) -> None:
    parser = _add(commands, "precompile", "fill a bundle; needs neither GPU nor torch")
    parser.add_argument("--arch", type=_archs, action="extend", required=True, help=_ARCH_HELP)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", action="append", metavar="k=v,...", help=_CONFIG_HELP)
    what.add_argument(
        "--model", type=Path, metavar="config.json", help=f"{_MODEL_HELP}: all that a step needs"
    )
    what.add_argument("--preset", metavar="NAME", help="a named list, such as llama-3.1-8b")
    _add_serving(parser)
    parser.add_argument("-j", "--jobs", type=_positive, help="processes (default: one a core)")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="the bundle")
    parser.set_defaults(command=_precompile)


def _add_serving(parser: argparse.ArgumentParser) -> None:
    """Add what a model's file does not say; None stands for what was not given."""
    group = parser.add_argument_group("how --model is served; lists are comma-separated")
    group.add_argument(
        "--tensor-parallel", type=_positive, metavar="N", help="devices that share its heads"
    )
    group.add_argument("--dtype", choices=Q_DTYPES, help="of q, k and v (default: the file's)")
    group.add_argument(
        "--kv-dtype", type=_names, metavar="NAMES", help="of the cache (default: auto, the dtype)"
    )
    group.add_argument(
        "--page-size",
        type=_counts,
        metavar="TOKENS",
        help="(default: 16, and 64 for latent attention)",
    )
    group.add_argument(
        "--page-table", type=_names, metavar="NAMES", help="(default: shared,separate)"
    )


def _add_bundle(commands: _Commands) -> None:
    bundle = _add(commands, "bundle", "make a wheel of a bundle, or print its digest")
    actions = bundle.add_subparsers(required=True, metavar="action")
    wheel = _add(actions, "wheel", "write a wheel that pip installs and jitattn finds")
    wheel.add_argument("folder", type=Path, metavar="DIR", help="the bundle")
    wheel.add_argument(
        "-o", "--out", type=Path, required=True, metavar="DIR", help="where the wheel goes"
    )
    wheel.add_argument("--name", default="jitattn-bundle", help="of the package (%(default)s)")
    wheel.add_argument(
        "--version", dest="wheel_version", help="default: jitattn's, +, and the digest's first 12"
    )
    wheel.set_defaults(command=_bundle_wheel)
    sha256 = _add(actions, "sha256", "print a bundle's digest, which JITATTN_BUNDLE_SHA256 takes")
    sha256.add_argument("folder", type=Path, metavar="DIR", help="the bundle")
    sha256.set_defaults(command=_bundle_sha256)


def _add_cache(commands: _Commands) -> None:
    cache = _add(commands, "cache", "look after the user's cache, or a bundle")
    actions = cache.add_subparsers(required=True, metavar="action")
    for name, command, text in (
        ("path", _cache_path, "print the folder"),
        ("list", _cache_list, "list the kernels"),
        ("verify", _cache_verify, "check every digest; exit 1 if an entry is damaged"),
        ("prune", _cache_prune, "remove the least recently used kernels"),
        ("clear", _cache_clear, "remove every kernel"),
    ):
        action = _add(actions, name, text)
        if name == "prune":
            action.add_argument(
                "--max-size", type=_size, required=True, help="bytes to keep, such as 500M or 2G"
            )
        if name == "list":
            action.add_argument("--json", action="store_true", help="print JSON instead of a table")
        action.add_argument("folder", nargs="?", type=Path, help="default: the user's cache")
        action.set_defaults(command=command)


def _archs(text: str) -> tuple[str, ...]:
    archs = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for arch in archs:
        _arch(arch)
    if not archs:
        raise argparse.ArgumentTypeError("no architecture given")
    return archs


def _arch(text: str) -> str:
    if reason := why_no_arch(text):
        raise argparse.ArgumentTypeError(reason)
    return text


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return names


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in _names(text))


def _size(text: str) -> int:
    lowered = text.strip().lower().removesuffix("ib").removesuffix("b")
    number, unit = (lowered[:-1], lowered[-1:]) if lowered[-1:].isalpha() else (lowered, "")
    try:
        size = int(float(number) * _SIZE_UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        size = -1
    if size < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size, such as 1000000, 500M or 2G")
    return size


# ---------------------------------------------------------------------------- commands


def _demo(args: argparse.Namespace) -> int:
    try:
        from jitattn.tools import demo
    except ModuleNotFoundError as error:
        raise UsageError(f"the demo computes, and needs torch: {error}") from error
    return 0 if demo.run(_console(), _knobs()) else 1


def _configs(args: argparse.Namespace) -> int:
    archs = tuple(dict.fromkeys(args.arch or ARCHITECTURES))
    serving = _serving(args)
    if args.model is not None:
        return _model_configs(args.model, serving, archs, as_json=args.json)
    if args.json:
        rows = [
            {"arch": arch, **asdict(config)}
            for arch in archs
            for config in registry.supported_configs(arch)
        ]
        _print_json(rows)
        return 0
    console = _console()
    for config, tested_on in support_groups(archs):
        title = f"{config.kernel}: supported arguments"
        table = _table(console, title, "argument", "values")
        for argument, values in config.fields.items():
            table.add_row(argument, values)
        console.print(table)
        for arch, tested in tested_on.items():
            console.print(f"  {arch:8} {tested}")
    return 0


def support_groups(archs: Iterable[str]) -> list[tuple[registry.Config, dict[str, str]]]:
    """Return the rows of the support table, those that differ in architecture only as one.

    Each comes with where it was run, by architecture.
    """
    groups: list[tuple[registry.Config, dict[str, str]]] = []
    for arch in archs:
        for config in registry.supported_configs(arch):
            key = (config.kernel, config.fields)
            same = [tested for known, tested in groups if (known.kernel, known.fields) == key]
            if not same:
                groups.append((config, {}))
                same = [groups[-1][1]]
            same[0][arch] = config.tested_on
    return groups


def _serving(args: argparse.Namespace) -> Serving:
    """Return how a model is served; refuse to say so of no model."""
    from jitattn.bundles.model_kernels import Serving

    names = {
        "tensor_parallel": "tensor_parallel",
        "dtype": "dtype",
        "kv_dtype": "kv_dtypes",
        "page_size": "page_sizes",
        "page_table": "page_tables",
    }
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    if given and args.model is None:
        option = next(iter(given)).replace("_", "-")
        raise UsageError(f"--{option} is about --model, which is not given")
    return Serving(**{names[name]: value for name, value in given.items()})


def _needs(model: Path, serving: Serving) -> list[Need]:
    from jitattn.bundles.model_config import read_model
    from jitattn.bundles.model_kernels import needs_of

    read = read_model(model)
    for note in read.notes:
        sys.stderr.write(f"jitattn: note: {note}\n")
    return needs_of(read, serving)


def _model_configs(model: Path, serving: Serving, archs: Sequence[str], *, as_json: bool) -> int:
    rows = []
    for need in _needs(model, serving):
        for arch in archs:
            answer = _support(need, arch)
            config = need.config.arguments_text()
            rows.append({"arch": arch, "use": need.use, "config": config, **asdict(answer)})
    if as_json:
        _print_json(rows)
    else:
        from rich.markup import escape

        console = _console()
        title = f"{model}: what its attention needs"
        table = _table(console, title, "arch", "use", "config")
        # In a file names stay whole; a terminal shows all of them, on more lines if it is narrow.
        width = None if console.is_terminal else max(len(row["kernel"] or "") for row in rows)
        table.add_column("kernel, or why not", overflow="fold", min_width=width)
        for row in rows:
            told = row["kernel"] or "; ".join(row["reasons"])
            table.add_row(row["arch"], row["use"], row["config"], escape(told))
        console.print(table)
    return 0 if all(row["supported"] for row in rows) else 1


def _support(need: Need, arch: str) -> registry.Support:
    reasons = list(need.reasons)
    if not reasons:
        try:
            specs = registry.specs_of(need.config, arch)
        except ConfigError as error:
            reasons = list(error.reasons)
        else:
            return registry.Support(supported=True, kernel=specs[0].symbol, reasons=[])
    return registry.Support(supported=False, kernel=None, reasons=reasons)


def _render(args: argparse.Namespace) -> int:
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


def _explain(args: argparse.Namespace) -> int:
    from jitattn.tools.explain import INSTALL, explain

    found = explain(_chosen_spec(args), args.arch, _knobs())
    if args.json:
        _print_json(asdict(found) | {"mix": found.mix})
        return 0
    console = _console()
    table = _table(console, f"{found.symbol} for {found.arch}", "what", "value")
    for name, value in found.facts().items():
        table.add_row(name, value)
    console.print(table)
    if found.opcodes is None:
        console.print(f"The instruction mix needs nvdisasm: {INSTALL}", markup=False)
        return 0
    total = sum(found.mix.values())
    table = _table(console, f"{total:,} instructions", "kind", "count", "share", "most frequent")
    for kind, count in found.mix.items():
        table.add_row(kind, f"{count:,}", f"{count / total:.1%}", found.most_frequent(kind))
    console.print(table)
    return 0


def _precompile(args: argparse.Namespace) -> int:
    from jitattn.bundles.precompile import precompile

    configs = _configs_to_precompile(args)
    try:
        report = precompile(configs, arch=args.arch, out=args.out, jobs=args.jobs)
    except KeyboardInterrupt:
        sys.stderr.write(
            f"jitattn: interrupted: {args.out} keeps what was compiled, and the same command goes "
            "on\n"
        )
        raise
    console = _console()
    if report.entries:
        console.print(_report_table(console, f"{args.out}", report))
    console.print(
        f"{args.out}: {len(report.entries)} kernels, {report.compiled} compiled and "
        f"{report.reused} there before, in {report.seconds:.1f} s",
        markup=False,
    )
    for failure in report.failures:
        sys.stderr.write(f"jitattn: {failure}\n")
    return 1 if report.failures else 0


def _configs_to_precompile(
    args: argparse.Namespace,
) -> Sequence[registry.AnyConfig | str]:
    from jitattn.bundles.precompile import PRESETS

    serving = _serving(args)
    if args.model is not None:
        needs = _needs(args.model, serving)
        if reasons := [reason for need in needs for reason in need.reasons]:
            raise ConfigError(list(dict.fromkeys(reasons)))
        return [need.config for need in needs]
    if args.preset is not None and args.preset not in PRESETS:
        known = ", ".join(PRESETS)
        raise UsageError(f"--preset {args.preset}: known presets are {known}")
    return args.config or PRESETS[args.preset]


def _report_table(console: Console, title: str, report: Report) -> Table:
    columns = ("arch", "kernels", "compiled", "compiler seconds", "MB")
    table = _table(console, title, *columns)
    for arch in dict.fromkeys(entry.arch for entry in report.entries):
        entries = [entry for entry in report.entries if entry.arch == arch]
        made = [entry.seconds for entry in entries if entry.origin == "compiled"]
        size = sum(entry.stored_bytes for entry in entries) / 1e6
        cells = (len(entries), len(made), f"{sum(made):.1f}", f"{size:.1f}")
        table.add_row(arch, *map(str, cells))
    return table


def _bundle_wheel(args: argparse.Namespace) -> int:
    from jitattn.bundles.wheel import write_wheel

    path = write_wheel(args.folder, args.out, name=args.name, version=args.wheel_version)
    sys.stdout.write(f"{path}\n")
    return 0


def _bundle_sha256(args: argparse.Namespace) -> int:
    from jitattn.bundles.wheel import whole_entries
    from jitattn.jit.cache import KernelCache

    bundle = KernelCache(args.folder)
    whole_entries(bundle)
    sys.stdout.write(f"{bundle.sha256()}\n")
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from jitattn.tools import doctor

    try:
        settings = _knobs()
    except ModuleNotFoundError:  # of the folder of caches, which is a finding, too
        settings = knobs.Knobs(cache_dir=None)
    findings = doctor.examine(settings)
    try:
        _print_findings(findings)
    except ModuleNotFoundError:  # of what draws tables
        for finding in findings:
            sys.stdout.write(f"{_MARKS[finding.ok][0]} {finding.what}: {finding.found}\n")
    for finding in findings:
        if finding.advice:
            sys.stdout.write(f"{finding.what}: {finding.advice}\n")
    return 1 if any(finding.ok is False for finding in findings) else 0


_MARKS = {True: ("ok", "green"), False: ("no", "red"), None: ("--", "yellow")}


def _print_findings(findings: Iterable[Finding]) -> None:
    from rich.markup import escape

    console = _console()
    table = _table(console, f"jitattn {__version__}", "", "what", "found")
    for finding in findings:
        mark, colour = _MARKS[finding.ok]
        table.add_row(f"[{colour}]{mark}[/]", finding.what, escape(finding.found))
    console.print(table)


def _cache_path(args: argparse.Namespace) -> int:
    # As bytes, so that a script can use whatever path it is.
    sys.stdout.flush()
    sys.stdout.buffer.write(os.fsencode(_cache(args).root) + b"\n")
    return 0


def _cache_list(args: argparse.Namespace) -> int:
    cache = _existing_cache(args)
    entries = cache.entries()
    if args.json:
        _print_json([_entry_record(entry) for entry in entries])
        return 0
    console = _console()
    table = _table(console, f"{cache.root}", "arch", "kernel", "compiler", "bytes", "age", "idle")
    for entry in entries:
        size, age, idle = f"{entry.size_bytes:,}", _days(entry.age_s), _days(entry.idle_s)
        table.add_row(entry.arch, entry.symbol, entry.compiler, size, age, idle)
    console.print(table)
    console.print(f"{len(entries)} kernels, {sum(e.size_bytes for e in entries):,} bytes")
    return 0


def _entry_record(entry: Entry) -> dict[str, object]:
    unknown = entry.idle_s == float("inf")  # which JSON cannot say
    record = asdict(entry) | {"path": str(entry.path), "idle_s": None if unknown else entry.idle_s}
    del record["damage"]  # `cache verify` looks for it
    return record


def _days(seconds: float) -> str:
    return "?" if seconds == float("inf") else f"{seconds / 86400:.1f} d"


def _cache_verify(args: argparse.Namespace) -> int:
    cache = _existing_cache(args)
    damaged = cache.verify()
    for entry in damaged:
        sys.stderr.write(f"jitattn: {entry.path}: {entry.damage}\n")
    sys.stdout.write(f"{len(cache.entries())} kernels, {len(damaged)} damaged\n")
    return 1 if damaged else 0


def _cache_prune(args: argparse.Namespace) -> int:
    return _say_removed(_cache(args).prune(args.max_size))


def _cache_clear(args: argparse.Namespace) -> int:
    return _say_removed(_cache(args).clear())


def _say_removed(removed: Sequence[Entry]) -> int:
    num_bytes = sum(entry.size_bytes for entry in removed)
    sys.stdout.write(f"removed {len(removed)} kernels, {num_bytes:,} bytes\n")
    return 0


def _existing_cache(args: argparse.Namespace) -> KernelCache:
    """Return what to look at; a folder that is named, and not the user's, has to be there."""
    cache = _cache(args)
    if args.folder is not None and not cache.root.exists():
        raise CacheError(f"{cache.root} does not exist")
    return cache


def _cache(args: argparse.Namespace) -> KernelCache:
    from jitattn.jit.cache import KernelCache

    folder = args.folder or _knobs().cache_dir
    if folder is None:
        raise CacheError("this user has no home folder: set JITATTN_CACHE_DIR, or name a folder")
    return KernelCache(folder)


# ---------------------------------------------------------------------------- output


def _knobs() -> knobs.Knobs:
    try:
        return knobs.load()
    except ValueError as error:
        raise UsageError(error) from error


def _console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)


def _table(console: Console, title: str, *columns: str) -> Table:
    from rich.table import Table

    console.print(
        title, style="bold", markup=False
    )  # as a table's own title it would wrap at its width
    table = Table()
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
