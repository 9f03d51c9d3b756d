"""Compile what the rivals need for some cases, several modules at once, before anything is timed.

    python -m bench.build_rivals --cases figures --contenders fa2-tc,xqa --jobs 8
    python -m bench.build_rivals --prefill figures,more --jobs 8
    python -m bench.build_rivals --mla figures,forms --limit 300
    python -m bench.build_rivals --tokens --limit 500

FlashInfer compiles a module on its first call: 9 to 80 s each, one after the other, on a card that
waits; those of bench_preprocess take minutes. Here each module gets a process of its own, which is
killed at the `--limit`. `bench.carry` takes the results to the next run.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from bench.cases import CASES, GROUPS, Group, select
from bench.mla_cases import MLA_CASES, MLA_GROUPS, MLACase, select_mla
from bench.mla_contenders import all_mla_contenders, make_mla_inputs
from bench.options import make_parser
from bench.prefill_cases import PREFILL_CASES, PREFILL_GROUPS, PrefillCase, select_prefill
from bench.prefill_contenders import all_prefill_contenders, make_inputs
from bench.rivals import all_rivals
from bench.token_contenders import FlashInferTokens, build_module
from bench.workloads import Case, make_batch

AnyCase = TypeVar("AnyCase", Case, PrefillCase, MLACase)
CaseOf = TypeVar("CaseOf", contravariant=True)


class _Rival(Protocol[CaseOf]):
    """What a contender of any bench says about its modules."""

    name: str

    def build_key(self, case: CaseOf) -> Hashable | None:
        """Return what decides which module a case makes it compile."""


def modules(
    cases: Sequence[AnyCase],
    rivals: Sequence[_Rival[AnyCase]],
    groups: Mapping[str, Group] = GROUPS,
) -> list[tuple[str, str]]:
    """Return a (rival, case) pair of names for each module that the cases need."""
    needed: dict[Hashable, tuple[str, str]] = {}
    for case in cases:
        for rival in rivals:
            key = rival.build_key(case)
            if key is not None and rival.name in groups[case.group].contenders:
                needed.setdefault(key, (rival.name, case.name))
    return list(needed.values())


def build(rival_name: str, case_name: str) -> None:
    """Compile one module in this process by running the smallest batch that needs it."""
    rival = next(rival for rival in all_rivals() if rival.name == rival_name)
    case = next(case for case in CASES if case.name == case_name)
    rival.prepare(make_batch(case.tiny(), 1, torch.device("cuda"))).runs[0]()
    torch.cuda.synchronize()


def build_prefill(rival_name: str, case_name: str) -> None:
    """Compile one module of a prefill rival."""
    rival = next(rival for rival in all_prefill_contenders() if rival.name == rival_name)
    case = next(case for case in PREFILL_CASES if case.name == case_name)
    rival.prepare(make_inputs(case.tiny(), torch.device("cuda"))).runs[0]()
    torch.cuda.synchronize()


def build_mla(rival_name: str, case_name: str) -> None:
    """Compile one module of a rival of latent attention."""
    rival = next(rival for rival in all_mla_contenders() if rival.name == rival_name)
    case = next(case for case in MLA_CASES if case.name == case_name)
    rival.prepare(make_mla_inputs(case.tiny(), torch.device("cuda"))).runs[0]()
    torch.cuda.synchronize()


def build_tokens(module: str) -> None:
    """Compile one module of the rival of bench_preprocess."""
    build_module(module, torch.device("cuda"))
    torch.cuda.synchronize()


def main(argv: Sequence[str] | None = None) -> int:
    """Compile; the exit status is 1 when a module failed (the bench will report it again)."""
    options = _parse(argv)
    if options.one:
        if options.tokens:
            build_tokens(options.one[1])
        elif options.mla:
            build_mla(*options.one)
        else:
            (build_prefill if options.prefill else build)(*options.one)
        return 0
    end = None if options.limit is None else time.monotonic() + options.limit
    commands = [["--one", *pair] for pair in _decode_modules(options)]
    commands += [["--prefill", "one", "--one", *pair] for pair in _prefill_modules(options)]
    commands += [["--mla", "one", "--one", *pair] for pair in _mla_modules(options)]
    commands += [["--tokens", "--one", *pair] for pair in _token_modules(options)]
    with ThreadPoolExecutor(options.jobs) as pool:
        statuses = list(pool.map(functools.partial(_build_apart, end=end), commands))
    return max(statuses, default=0)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("bench.build_rivals", __doc__)
    parser.add_argument("--cases", help="of bench_decode; figures, unless another is given")
    parser.add_argument("--prefill", metavar="CASES", help="of bench_prefill")
    parser.add_argument("--mla", metavar="CASES", help="of bench_mla")
    parser.add_argument("--tokens", action="store_true", help="of bench_preprocess")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="kills what isn't done then")
    parser.add_argument("--contenders", help="names; default: all, of prefill fa3 and pod")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--one", nargs=2, metavar=("RIVAL", "CASE"), help="only this, here")
    options = parser.parse_args(argv)
    if options.cases is options.prefill is options.mla is None and not options.tokens:
        options.cases = "figures"
    return options


def _decode_modules(options: argparse.Namespace) -> list[tuple[str, str]]:
    if options.cases is None:
        return []
    wanted = [rival for rival in all_rivals() if _is_wanted(rival.name, options.contenders)]
    return modules(select(options.cases), wanted)


def _prefill_modules(options: argparse.Namespace) -> list[tuple[str, str]]:
    if options.prefill is None:
        return []
    names = options.contenders or "flashinfer-fa3,flashinfer-pod"
    wanted = [rival for rival in all_prefill_contenders() if _is_wanted(rival.name, names)]
    return modules(select_prefill(options.prefill), wanted, PREFILL_GROUPS)


def _mla_modules(options: argparse.Namespace) -> list[tuple[str, str]]:
    if options.mla is None:
        return []
    rivals = [rival for rival in all_mla_contenders() if _is_wanted(rival.name, options.contenders)]
    return modules(select_mla(options.mla), rivals, MLA_GROUPS)


def _token_modules(options: argparse.Namespace) -> list[tuple[str, str]]:
    rival = FlashInferTokens()
    if not options.tokens or not _is_wanted(rival.name, options.contenders):
        return []
    return [(rival.name, module) for module in rival.modules]


def _is_wanted(name: str, names: str | None) -> bool:
    return names is None or name in names.split(",")


def _build_apart(command: Sequence[str], *, end: float | None = None) -> int:
    """Build in a process; ``end``, of the monotonic clock, is when it and its own are killed."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.build_rivals", *command],
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=end is not None,  # compilers, too, are in its group
    )
    try:
        left = None if end is None else max(0.0, end - time.monotonic())
        errors = process.communicate(timeout=left)[1]
        last = errors.strip().rpartition("\n")[2][:300] if process.returncode else "built"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        last = "killed at the limit"
    seconds = time.perf_counter() - start
    print(f"{command[-2]:14} {command[-1]:32} {seconds:6.1f} s  {last}", flush=True)
    return int(process.returncode != 0)


if __name__ == "__main__":
    raise SystemExit(main())
