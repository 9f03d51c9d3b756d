"""Precompile jitattn's kernels for the bench cases: a card that is waited for should only compute.

    python -m bench.bundle --cases figures -o bundle-bench
    JITATTN_PRECOMPILED=$PWD/bundle-bench JITATTN_JIT=0 python -m bench.bench_decode --cases figures
    python -m bench.bundle --prefill figures,more -o bundle-bench
    python -m bench.bundle --mla figures,heads,ragged,pages,forms,queries,layouts -o bundle-bench
    python -m bench.bundle --decoder --generate -o bundle-bench
    python -m bench.bundle --engine -o bundle-engine

Needs no GPU. Cases that jitattn doesn't support yet are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jitattn
from bench import bench_generate, command
from bench.bench_dispatch import CASE as DISPATCH_CASE
from bench.cases import GROUPS, select
from bench.contenders import VARIANTS, Ours
from bench.decoder_contenders import kernel_configs
from bench.decoder_model import DECODER_CASES, LLAMA_8B
from bench.engines.llama import SIZES
from bench.mla_cases import MLA_GROUPS, MLACase, select_mla
from bench.mla_contenders import MLA_WAYS
from bench.options import make_parser
from bench.prefill_cases import (
    PREFILL_GROUPS,
    PrefillArguments,
    PrefillCase,
    select_prefill,
)
from bench.prefill_contenders import WAYS
from bench.workloads import Case, PlannerArguments

Arguments = TypeVar("Arguments", bound=Mapping[str, object])
CaseT = TypeVar("CaseT", bound=command.Named)
WayT = TypeVar("WayT")


def configurations(cases: Sequence[Case], arch: str) -> list[PlannerArguments]:
    """Return what the planners of ``cases`` are given, each once, without unsupported ones."""
    wanted = [
        variant.planner_arguments(case) for case, variant in _taking_part(cases, VARIANTS, GROUPS)
    ]
    wanted += [DISPATCH_CASE.planner_arguments(table) for table in ("shared", "separate")]
    return _supported(wanted, arch)


def prefill_configurations(cases: Sequence[PrefillCase], arch: str) -> list[PrefillArguments]:
    """Return likewise what the planners of prefill cases are given."""
    pairs = _taking_part(cases, WAYS, PREFILL_GROUPS)
    return _supported([way.planner_arguments(case) for case, way in pairs], arch)


def mla_configurations(cases: Sequence[MLACase], arch: str) -> list[dict[str, object]]:
    """Return likewise what the planners of latent attention are given."""
    pairs = _taking_part(cases, MLA_WAYS, MLA_GROUPS)
    wanted = [{"planner": "mla", **way.planner_arguments(case)} for case, way in pairs]
    return _supported(wanted, arch)


def _taking_part(
    cases: Sequence[CaseT], ways: Mapping[str, WayT], groups: Mapping[str, Any]
) -> list[tuple[CaseT, WayT]]:
    """Return each case with each of the ways that its group measures."""
    return [
        (case, way)
        for case in cases
        for name, way in ways.items()
        if Ours(name).name in groups[case.group].contenders
    ]


def decoder_configurations() -> list[Mapping[str, object] | str]:
    """Return what the kernels of bench_decoder are compiled for."""
    return [
        config
        for page_size in sorted({case.page_size for case in DECODER_CASES})
        for config in kernel_configs(LLAMA_8B, page_size)
    ]


def engine_configurations(page_size: int = 16) -> list[Mapping[str, object] | str]:
    """Return what the layers of the model of engines.vllm_engine launch, with pages of vLLM's."""
    sizes = SIZES["8b"]
    heads = {
        "num_qo_heads": sizes["num_attention_heads"],
        "num_kv_heads": sizes["num_key_value_heads"],
        "head_dim": sizes["head_dim"],
    }
    append = f"kernel=preprocess,head_dim={sizes['head_dim']},page_table=slots,pairing=none"
    found: list[Mapping[str, object] | str] = []
    for kv_dtype in ("bfloat16", "float8_e4m3fn"):
        cache = {"page_size": page_size, "kv_dtype": kv_dtype}
        found += [{**heads, **cache}, f"{append},page_size={page_size},kv_dtype={kv_dtype}"]
    return found


def _supported(wanted: Sequence[Arguments], arch: str) -> list[Arguments]:
    return [
        arguments
        for i, arguments in enumerate(wanted)
        if arguments not in wanted[:i] and jitattn.check_config(arch, **arguments).supported
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Fill the bundle; the exit status is 1 when a kernel didn't compile."""
    parser = make_parser("bench.bundle", __doc__)
    parser.add_argument("--cases", help="of bench_decode; figures, unless another is given")
    parser.add_argument("--prefill", metavar="CASES", help="of bench_prefill")
    parser.add_argument("--mla", metavar="CASES", help="of bench_mla")
    parser.add_argument("--decoder", action="store_true", help="of bench_decoder")
    parser.add_argument("--generate", action="store_true", help="of bench_generate")
    parser.add_argument("--engine", action="store_true", help="of engines.vllm_engine")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("-o", "--out", type=Path, required=True)
    options = parser.parse_args(argv)
    is_other = options.decoder or options.generate or options.engine
    if options.cases is options.prefill is options.mla is None and not is_other:
        options.cases = "figures"
    report = jitattn.precompile(_chosen(options), options.arch, options.out)
    for failure in report.failures:
        print(failure)
    print(f"{options.out}: {report.compiled} compiled, {report.reused} there already")
    return int(bool(report.failures))


def _chosen(options: argparse.Namespace) -> list[Mapping[str, object] | str]:
    chosen: list[Mapping[str, object] | str] = []
    if options.cases is not None:
        chosen += [dict(a) for a in configurations(select(options.cases), options.arch)]
    if options.prefill is not None:
        cases = select_prefill(options.prefill)
        chosen += [dict(a) for a in prefill_configurations(cases, options.arch)]
    if options.mla is not None:
        chosen += mla_configurations(select_mla(options.mla), options.arch)
    if options.decoder:
        chosen += decoder_configurations()
    if options.generate:
        chosen += bench_generate.kernel_configs(bench_generate.LLAMA)
    if options.engine:
        chosen += engine_configurations()
    return chosen


if __name__ == "__main__":
    raise SystemExit(main())
