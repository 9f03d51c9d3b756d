"""Compile what the rivals need for some cases, several modules at once, before anything is timed.

    python -m bench.build_rivals --cases figures --contenders fa2-tc,xqa --jobs 8

FlashInfer compiles a module on its first call: 9 to 80 s each, one after the other, on a card that
waits. Here each module gets a process of its own. `bench.carry` takes the results to the next run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from bench.cases import CASES, GROUPS, select
from bench.contenders import Contender
from bench.rivals import all_rivals
from bench.workloads import Case, make_batch


def modules(cases: Sequence[Case], rivals: Sequence[Contender]) -> list[tuple[str, str]]:
    """Return a (rival, case) pair of names for each module that the cases need."""
    needed: dict[Hashable, tuple[str, str]] = {}
    for case in cases:
        for rival in rivals:
            key = rival.build_key(case)
            if key is not None and rival.name in GROUPS[case.group].contenders:
                needed.setdefault(key, (rival.name, case.name))
    return list(needed.values())


def build(rival: Contender, case: Case) -> None:
    """Compile one module in this process by running the smallest batch that needs it."""
    batch = make_batch(case.tiny(), 1, torch.device("cuda"))
    rival.prepare(batch).runs[0]()
    torch.cuda.synchronize()


def main(argv: Sequence[str] | None = None) -> int:
    """Compile; the exit status is 1 when a module failed (the bench will report it again)."""
    rivals = {rival.name: rival for rival in all_rivals()}
    parser = argparse.ArgumentParser(
        prog="python -m bench.build_rivals",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cases", default="figures")
    parser.add_argument("--contenders", default=",".join(rivals), help="others are ignored")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--one", nargs=2, metavar=("RIVAL", "CASE"), help="only this, here")
    options = parser.parse_args(argv)
    if options.one:
        name, case_name = options.one
        build(rivals[name], next(case for case in CASES if case.name == case_name))
        return 0
    wanted = [rivals[name] for name in options.contenders.split(",") if name in rivals]
    with ThreadPoolExecutor(options.jobs) as pool:
        statuses = list(pool.map(_build_apart, modules(select(options.cases), wanted)))
    return max(statuses, default=0)


def _build_apart(pair: tuple[str, str]) -> int:
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "bench.build_rivals", "--one", *pair],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    seconds = time.perf_counter() - start
    last = done.stderr.strip().rpartition("\n")[2][:300] if done.returncode else "built"
    print(f"{pair[0]:7} {pair[1]:32} {seconds:6.1f} s  {last}", flush=True)
    return int(done.returncode != 0)


if __name__ == "__main__":
    raise SystemExit(main())
