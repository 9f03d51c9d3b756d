"""Command line: argparse over the functions of the package.

Only ``demo`` imports torch; every command imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jitattn.base import knobs
from jitattn.base.errors import JitAttnError
from jitattn.spec.arch import ARCHITECTURES
from jitattn.spec.dtype import Q_DTYPES
from jitattn.version import __version__

if TYPE_CHECKING:
    pass
from jitattn.tools.arguments import (
    Commands,
    add_command,
    arch_list,
    arch_name,
    byte_size,
    count_list,
    name_list,
    positive_int,
)
from jitattn.tools.bundle_commands import run_bundle_sha256, run_bundle_wheel, run_precompile
from jitattn.tools.cache_commands import (
    run_cache_clear,
    run_cache_list,
    run_cache_path,
    run_cache_prune,
    run_cache_verify,
)
from jitattn.tools.configs_command import run_configs
from jitattn.tools.console import UsageError
from jitattn.tools.kernel_commands import run_explain, run_render
from jitattn.tools.machine_commands import run_demo, run_doctor

_DEFAULT_ARCH = "sm_90a"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status: 0, 1 for a failure, 2 for wrong usage."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # paths are bytes, and need not be text
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        args = _parser().parse_args(arguments)
        if told := knobs.tell_unknown():
            sys.stderr.write(f"jitattn: note: {told}\n")
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jitattn", description="Paged attention kernels, compiled for your exact shapes."
    )
    parser.add_argument("--version", action="version", version=f"jitattn {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    demo = add_command(commands, "demo", "attention of a Llama-3.1-8B layer, checked and timed")
    demo.set_defaults(command=run_demo)

    configs = add_command(commands, "configs", "what is supported, or whether a model is")
    configs.add_argument("--arch", type=arch_list, action="extend", help=_ARCH_HELP)
    configs.add_argument("--model", type=Path, metavar="config.json", help=_MODEL_HELP)
    _add_serving(configs)
    configs.add_argument("--json", action="store_true", help="print JSON instead of a table")
    configs.set_defaults(command=run_configs)

    render = add_command(commands, "render", "print the CUDA source of a kernel")
    render.add_argument("--config", default="", metavar="k=v,...", help=_CONFIG_HELP)
    _add_arch(render)
    render.add_argument("--symbol", help="which kernel of the planner (default: the main one)")
    render.add_argument("-o", "--out", type=Path, metavar="DIR", help="write all of them to DIR")
    render.set_defaults(command=run_render)

    explain = add_command(commands, "explain", "registers, occupancy, instructions of a kernel")
    explain.add_argument("--config", default="", metavar="k=v,...", help=_CONFIG_HELP)
    _add_arch(explain)
    explain.add_argument("--symbol", help="which kernel of the planner (default: the main one)")
    explain.add_argument("--json", action="store_true", help="print JSON instead of tables")
    explain.set_defaults(command=run_explain)

    _add_precompile(commands)
    doctor = add_command(
        commands, "doctor", "what this machine has, and what is missing: 1 if it can't serve"
    )
    doctor.add_argument("--json", action="store_true", help="print JSON instead of a table")
    doctor.add_argument("--model", type=Path, metavar="config.json", help=_DOCTOR_MODEL_HELP)
    doctor.add_argument(
        "--arch",
        type=arch_list,
        action="extend",
        help="of --model's kernels (default: this machine's cards, or what its bundles are for)",
    )
    _add_serving(doctor)
    doctor.set_defaults(command=run_doctor)
    _add_cache(commands)
    _add_bundle(commands)
    return parser


def _add_arch(parser: argparse.ArgumentParser) -> None:
    known = ", ".join(ARCHITECTURES)
    parser.add_argument(
        "--arch",
        type=arch_name,
        default=_DEFAULT_ARCH,
        help=f"one of {known} (default: %(default)s)",
    )


_ARCH_HELP = f"comma-separated or repeated: {', '.join(ARCHITECTURES)}"
_MODEL_HELP = "the config.json that Hugging Face has of a model, or its folder"
_DOCTOR_MODEL_HELP = f"{_MODEL_HELP}: whether all of its kernels are there"
_CONFIG_HELP = (
    "planner arguments, such as head_dim=128,page_size=16,page_table=separate; with planner=mla "
    "those of MLAPlanner, such as planner=mla,num_heads=16,kv_dtype=float8_e4m3fn; or kernels of "
    "preprocess_qkv and append_kv, such as kernel=preprocess,head_dim=128,page_size=32; or of "
    "gather_kv, kernel=gather,kv_dtype=float8_e5m2,out_dtype=bfloat16"
)


def _add_precompile(commands: Commands) -> None:
    parser = add_command(commands, "precompile", "fill a bundle; needs neither GPU nor torch")
    parser.add_argument("--arch", type=arch_list, action="extend", required=True, help=_ARCH_HELP)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", action="append", metavar="k=v,...", help=_CONFIG_HELP)
    what.add_argument(
        "--model", type=Path, metavar="config.json", help=f"{_MODEL_HELP}: all that a step needs"
    )
    what.add_argument("--preset", metavar="NAME", help="a named list, such as llama-3.1-8b")
    _add_serving(parser)
    parser.add_argument("-j", "--jobs", type=positive_int, help="processes (default: one a core)")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="the bundle")
    parser.set_defaults(command=run_precompile)


def _add_serving(parser: argparse.ArgumentParser) -> None:
    """Add what a model's file does not say; None stands for what was not given."""
    group = parser.add_argument_group("how --model is served; lists are comma-separated")
    group.add_argument(
        "--tensor-parallel", type=positive_int, metavar="N", help="devices that share its heads"
    )
    group.add_argument("--dtype", choices=Q_DTYPES, help="of q, k and v (default: the file's)")
    group.add_argument(
        "--kv-dtype",
        type=name_list,
        metavar="NAMES",
        help="of the cache (default: auto, the dtype)",
    )
    group.add_argument(
        "--page-size",
        type=count_list,
        metavar="TOKENS",
        help="(default: 16, and 64 for latent attention)",
    )
    group.add_argument(
        "--page-table", type=name_list, metavar="NAMES", help="(default: shared,separate)"
    )


def _add_bundle(commands: Commands) -> None:
    bundle = add_command(commands, "bundle", "make a wheel of a bundle, or print its digest")
    actions = bundle.add_subparsers(required=True, metavar="action")
    wheel = add_command(actions, "wheel", "write a wheel that pip installs and jitattn finds")
    wheel.add_argument("folder", type=Path, metavar="DIR", help="the bundle")
    wheel.add_argument(
        "-o", "--out", type=Path, required=True, metavar="DIR", help="where the wheel goes"
    )
    wheel.add_argument("--name", default="jitattn-bundle", help="of the package (%(default)s)")
    wheel.add_argument(
        "--version", dest="wheel_version", help="default: jitattn's, +, and the digest's first 12"
    )
    wheel.set_defaults(command=run_bundle_wheel)
    sha256 = add_command(
        actions, "sha256", "print a bundle's digest, which JITATTN_BUNDLE_SHA256 takes"
    )
    sha256.add_argument("folder", type=Path, metavar="DIR", help="the bundle")
    sha256.set_defaults(command=run_bundle_sha256)


def _add_cache(commands: Commands) -> None:
    cache = add_command(commands, "cache", "look after the user's cache, or a bundle")
    actions = cache.add_subparsers(required=True, metavar="action")
    for name, command, text in (
        ("path", run_cache_path, "print the folder"),
        ("list", run_cache_list, "list the kernels"),
        ("verify", run_cache_verify, "check every digest; exit 1 if an entry is damaged"),
        ("prune", run_cache_prune, "remove the least recently used kernels"),
        ("clear", run_cache_clear, "remove every kernel"),
    ):
        action = add_command(actions, name, text)
        if name == "prune":
            action.add_argument(
                "--max-size",
                type=byte_size,
                required=True,
                help="bytes to keep, such as 500M or 2G",
            )
        if name == "list":
            action.add_argument("--json", action="store_true", help="print JSON instead of a table")
        action.add_argument("folder", nargs="?", type=Path, help="default: the user's cache")
        action.set_defaults(command=command)
