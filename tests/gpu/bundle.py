"""Precompile every kernel of the GPU tests, so that a card computes and doesn't compile.

    python -m tests.gpu.bundle --arch sm_90a -o build/gpu-tests
    JITATTN_PRECOMPILED=build/gpu-tests JITATTN_JIT=0 python -m pytest tests/gpu

Needs neither a GPU nor torch's CUDA build.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jitattn
from jitattn.base import knobs
from jitattn.base.errors import KernelNotFoundError
from jitattn.bundles.precompile import Config, kernels_of
from jitattn.jit.build import build
from jitattn.kernels.pages.spec import every_config
from jitattn.spec.arch import ARCHITECTURES
from tests.support import (
    cascades,
    choices,
    compiled,
    contexts,
    deepseek,
    edge_numbers,
    engines,
    flash_attn_calls,
    flashinfer_pairs,
    fp8_queries,
    hf_models,
    invariance,
    kv_quantised,
    kv_serving,
    list_examples,
    lists,
    mla,
    nano,
    variant_cases,
    vllm_latent_runs,
)
from tests.support.cases import kernel_configs


def parser_of(program: str, description: str | None) -> argparse.ArgumentParser:
    """What every command that fills a bundle takes."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    parser.add_argument("--arch", choices=ARCHITECTURES, default="sm_90a")
    parser.add_argument("-o", "--out", type=Path, help="folder to fill")
    parser.add_argument("-j", "--jobs", type=int, help="processes; default: one per core")
    parser.add_argument("--list", action="store_true", help="print the configurations only")
    return parser


def fill(configs: Sequence[Config], options: argparse.Namespace) -> int:
    """Precompile or list ``configs``, and say what there is then; the exit status."""
    if options.list or options.out is None:
        for config in configs:
            text = config if isinstance(config, str) else config.arguments_text()
            sys.stdout.write(f"{text}\n")
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


def configs_of(arch: str, *, only_transfers: bool = False) -> list[Config]:
    """What the GPU tests ask for besides the kernels of tests/gpu/bundle_tokens.py."""
    found: list[Config] = [*every_config()]
    if not only_transfers:
        found += kernel_configs(arch)
        for module in (
            mla,
            kv_quantised,
            kv_serving,
            deepseek,
            edge_numbers,
            invariance,
            cascades,
            choices,
            compiled,
            contexts,
            engines,
            flash_attn_calls,
            fp8_queries,
            nano,
            hf_models,
            list_examples,
            lists,
            variant_cases,
            vllm_latent_runs,
        ):
            found += module.gpu_configs()
        found += flashinfer_pairs.gpu_configs(arch)
    return found


def missing(configs: Sequence[Config], arch: str) -> list[str]:
    """Names of kernels that a process with JITATTN_JIT=0 does not find."""
    found, settings = [], knobs.load()
    for spec, name in kernels_of(configs, arch):
        try:
            build(spec, name, settings)
        except KernelNotFoundError:
            found.append(spec.symbol)
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of("tests.gpu.bundle", __doc__)
    parser.add_argument(
        "--transfers", action="store_true", help="only what moves tokens and pages, makes tables"
    )
    options = parser.parse_args(arguments)
    return fill(configs_of(options.arch, only_transfers=options.transfers), options)


if __name__ == "__main__":
    sys.exit(main())
