"""Run all tests of a card and its sanitizers, some processes at once, and write what came of it.

    python -m tests.gpu.run --bundle build/gpu-tests -o build/gpu-results
    python -m tests.gpu.run --files decode,mixed --tools none -o build/gpu-results
    python -m tests.gpu.run --summary build/gpu-results build/more-results

Each file of tests/gpu is a process, the longest first; so are the ``gpu`` tests of other folders
("unit") and the tools of tests/gpu/sanitize.sh. Who takes longer than the limit is interrupted, and
counts as far as it came. summary.md in the folder of results is written anew whenever a process
ends, so that a run that is stopped has said what it knew.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from bench.records import commit
from tests.gpu.bundle import configs_of, missing
from tests.gpu.summary import SANITIZERS, read_part, summary_of

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests/gpu"
# Begun first, since the run ends when they do.
LONGEST = ("decode", "sm80", "mixed", "random", "random_mixed", "fp8", "wide", "bits")
# Between the interrupt, after which pytest writes its report, and the end of all patience.
GRACE = 30.0


@dataclass(frozen=True)
class Job:
    """A process of the run."""

    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str]


def file_names() -> list[str]:
    """The files of tests, without ``test_`` and ``.py``; those of the sanitizers run under them."""
    names = {path.stem.removeprefix("test_") for path in FOLDER.glob("test_*.py")}
    names = {name for name in names if not name.startswith("sanitizer_")}
    return [*(name for name in LONGEST if name in names), *sorted(names - {*LONGEST})]


def jobs_of(files: Sequence[str], tools: Sequence[str], out: Path) -> list[Job]:
    """The processes of a run, in the order in which they begin."""
    found = []
    for name in files:
        stem = name if name == "unit" else f"test_{name}"
        where = (
            ("tests", "bench", f"--ignore={FOLDER}")
            if name == "unit"
            else (f"tests/gpu/{stem}.py",)
        )
        pytest = (sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider")
        found.append(Job(stem, (*pytest, f"--junitxml={out / stem}.xml", *where), {}))
    for tool in tools:
        given = {"CASES": f"--junitxml={out / tool}.xml", "PYTHON": sys.executable}
        found.append(Job(tool, ("bash", str(FOLDER / "sanitize.sh"), tool), given))
    return found


def run_job(job: Job, out: Path, limit: float) -> None:
    """Run a process to its end, or interrupt it; write its log and how it ended."""
    started, cut_off = time.monotonic(), False
    with (out / f"{job.name}.log").open("wb") as log:
        process = subprocess.Popen(
            job.command,
            cwd=ROOT,
            env=os.environ | job.environ,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # tools have children, which are to be interrupted, too
        )
        for patience, then in ((limit, signal.SIGINT), (GRACE, signal.SIGKILL)):
            try:
                process.wait(patience)
                break
            except subprocess.TimeoutExpired:
                cut_off = True
                os.killpg(process.pid, then)
        status = process.wait()
    ended = {"status": status, "cut_off": cut_off, "seconds": time.monotonic() - started}
    (out / f"{job.name}.json").write_text(json.dumps(ended))


def facts(named: str | None, jobs: int) -> dict[str, object]:
    """What the results depend on besides the tests."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    lines = [line.split(", ") for line in _output(query).splitlines()] or [["no card", "unknown"]]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": named or commit(),
        "cards": f"{len(lines)} x {lines[0][0]}",
        "driver": lines[0][1],
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "jobs": jobs,
    }


def _output(command: Sequence[str]) -> str:
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def run(jobs: Sequence[Job], out: Path, *, at_once: int, limit: float) -> bool:
    """Run all; whether they are clean."""
    is_clean = True
    with ThreadPoolExecutor(at_once) as pool:
        running = {pool.submit(run_job, job, out, limit): job for job in jobs}
        for done in as_completed(running):
            done.result()
            part = read_part(running[done].name, out)
            is_clean = is_clean and part.is_clean
            sys.stdout.write(f"{part.row}\n")
            sys.stdout.flush()
            (out / "summary.md").write_text(summary_of([out]))
    return is_clean


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-o", "--out", type=Path, help="folder of results")
    parser.add_argument("--bundle", type=Path, nargs="*", default=[], help="JITATTN_JIT=0 then")
    parser.add_argument("--arch", default="sm_90a", help="whose kernels the bundle has to have")
    parser.add_argument("--ptx", type=Path, help="what tests.gpu.make_ptx wrote, for test_sm80")
    parser.add_argument("--files", default="all", help="such as decode,unit; all; none")
    parser.add_argument("--tools", default="all", help="such as memcheck,racecheck; all; none")
    parser.add_argument("-j", "--jobs", type=int, default=6, help="processes at once")
    parser.add_argument("--limit", type=float, default=1500, help="seconds of a process")
    parser.add_argument("--commit", help="default: JITATTN_BENCH_COMMIT, or that of the checkout")
    parser.add_argument("--summary", type=Path, nargs="+", help="only sum up these folders")
    options = parser.parse_args(arguments)
    if options.summary:
        sys.stdout.write(summary_of(options.summary))
        return 0
    if options.out is None:
        parser.error("give --out or --summary")
    files = _chosen(parser, options.files, [*file_names(), "unit"])
    tools = _chosen(parser, options.tools, SANITIZERS)
    if options.bundle:
        paths = [str(path.absolute()) for path in options.bundle]
        os.environ |= {"JITATTN_PRECOMPILED": os.pathsep.join(paths), "JITATTN_JIT": "0"}
        # A card is not to be waited for by tests that can't run.
        if names := missing(configs_of(options.arch), options.arch):
            parser.error(f"{len(names)} kernels are in no bundle, {names[0]} for one: fill it anew")
    if options.ptx:
        os.environ["JITATTN_TEST_PTX"] = str(options.ptx.absolute())
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    (out / "facts.json").write_text(json.dumps(facts(options.commit, options.jobs)))
    jobs = jobs_of(files, tools, out)
    return int(not run(jobs, out, at_once=options.jobs, limit=options.limit))


def _chosen(parser: argparse.ArgumentParser, given: str, known: Sequence[str]) -> list[str]:
    names = {"all": [*known], "none": []}.get(given, given.split(","))
    if unknown := {*names} - {*known}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
