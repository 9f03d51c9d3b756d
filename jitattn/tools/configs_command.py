"""``jitattn configs``: supported arguments, or the support of a model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from jitattn.base.errors import ConfigError
from jitattn.kernels import registry
from jitattn.spec.arch import ARCHITECTURES

if TYPE_CHECKING:
    from jitattn.bundles.model_kernels import Need, Serving
from jitattn.tools.console import UsageError, make_console, make_table, print_json


def run_configs(args: argparse.Namespace) -> int:
    """Print what is supported, or whether a model is; 1 if it is not."""
    archs = tuple(dict.fromkeys(args.arch or ARCHITECTURES))
    serving = serving_of(args)
    if args.model is not None:
        return _model_configs(args.model, serving, archs, as_json=args.json)
    if args.json:
        rows = [
            {"arch": arch, **asdict(config)}
            for arch in archs
            for config in registry.supported_configs(arch)
        ]
        print_json(rows)
        return 0
    console = make_console()
    for config, tested_on in support_groups(archs):
        title = f"{config.kernel}: supported arguments"
        table = make_table(console, title, "argument", "values")
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


def serving_of(args: argparse.Namespace) -> Serving:
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


def needs_of_model(model: Path, serving: Serving) -> list[Need]:
    """Return what a model's step needs; notes go to stderr."""
    from jitattn.bundles.model_config import read_model
    from jitattn.bundles.model_kernels import needs_of

    read = read_model(model)
    for note in read.notes:
        sys.stderr.write(f"jitattn: note: {note}\n")
    return needs_of(read, serving)


def configs_of_model(model: Path, serving: Serving) -> list[registry.AnyConfig]:
    """Return the configurations of a model's step; notes go to stderr.

    Raises:
        ConfigError: it needs something that there is no kernel for.
    """
    needs = needs_of_model(model, serving)
    if reasons := [reason for need in needs for reason in need.reasons]:
        raise ConfigError(list(dict.fromkeys(reasons)))
    return [need.config for need in needs]


def _model_configs(model: Path, serving: Serving, archs: Sequence[str], *, as_json: bool) -> int:
    rows = []
    for need in needs_of_model(model, serving):
        for arch in archs:
            answer = _support(need, arch)
            config = need.config.arguments_text()
            said = {"use": need.use, "what": _words_of(need), "config": config}
            rows.append({"arch": arch, **said, **asdict(answer)})
    if as_json:
        print_json(rows)
    else:
        from rich.markup import escape

        console = make_console()
        title = f"{model}: what its attention needs"
        table = make_table(console, title, "arch", "use", "config")
        # In a file names stay whole; a terminal shows all of them, on more lines if it is narrow.
        width = None if console.is_terminal else max(len(row["kernel"] or "") for row in rows)
        table.add_column("kernel, or why not", overflow="fold", min_width=width)
        for row in rows:
            told = row["kernel"] or "; ".join(row["reasons"])
            use = f"{row['use']}: {row['what']}" if row["what"] else row["use"]
            table.add_row(row["arch"], use, row["config"], escape(told))
        console.print(table)
    return 0 if all(row["supported"] for row in rows) else 1


def _words_of(need: Need) -> str:
    """Say what a kernel does with tokens, of which a configuration shows only what is unusual."""
    from jitattn.kernels.preprocess.spec import SLOTS, PreprocessConfig

    config = need.config
    if not isinstance(config, PreprocessConfig):
        return ""
    pairs = {"none": "no rotation", "neox": "NeoX pairs", "interleaved": "neighbouring pairs"}
    where = "slots" if config.page_table == SLOTS else f"{config.page_table} tables"
    parts = [
        f"heads of {config.head_dim}",
        *([f"V of {config.head_dim_vo}"] if config.head_dim_vo else []),
        pairs[config.pairing] + (" by three positions" if config.use_mrope else ""),
        *["biases"] * config.use_bias,
        *["norms of heads"] * config.use_norm,
        *["Hadamard transforms of q and K"] * config.use_qk_hadamard,
        *["Hadamard transforms of V"] * config.use_v_hadamard,
        f"{config.qkv_dtype} into {config.kv_dtype} pages of {config.page_size}, by {where}",
    ]
    return ", ".join(parts)


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
