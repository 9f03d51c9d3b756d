r"""vLLM's engine with jitattn and with FlashAttention-3: tokens, their probabilities, speed.

    python -m bench.engines.vllm_engine --out engine-out
    python -m bench.engines.vllm_engine --out engine-out --graphs compiled
    python -m bench.engines.vllm_engine --out engine-out --phases decode,judge,agreement \
        --engines CUSTOM,FLASH_ATTN,TRITON_ATTN,EXACT

A model of Llama-3.1-8B's shape with random weights in bfloat16, vLLM's own scheduler, runner,
layers and CUDA graphs of decode batches. Both engines are in one process, with the same weights,
and are timed in the order A B B A: 64 prompts of 512 tokens and 256 new ones, and 32 prompts of 128
to 8,192 tokens and 128 new ones. ``vllm_pair`` is that process. When it fails it is started again
with less: the older runner, no graphs, an engine alone in its process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.table import Table

from bench import report
from bench.engines import llama
from bench.engines.vllm_pair import PHASES
from bench.engines.vllm_session import GRAPHS
from bench.options import make_parser

ENGINES = ("CUSTOM,FLASH_ATTN", "CUSTOM:fp8,FLASH_ATTN:fp8")
"""Those of a process each; see ``vllm_pair``."""
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # errors and records stay in one process
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "jitattn",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}
_LEAST_S = 45.0
"""Under which no process is started: an engine takes longer to start."""
_KILL_S = 20.0
"""After its time, for a process to end by itself."""
_WIDTH = 400


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A way to start engines, the next one when it fails.

    Attributes:
        graphs: a name in ``vllm_session.GRAPHS``.
        runner: "2" is vLLM's newer model runner, its choice for this model; "1" the older.
        apart: whether each engine has a process of its own.
    """

    graphs: str
    runner: str = "2"
    apart: bool = False

    def environment(self) -> dict[str, str]:
        """Return what vLLM reads of it."""
        is_breakable = self.graphs == "breakable"
        return {
            "VLLM_USE_V2_MODEL_RUNNER": str(int(self.runner == "2")),
            **({"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"} if is_breakable else {}),
        }


def attempts_of(graphs: str) -> list[Attempt]:
    """Return what is tried, one after the other."""
    found = [Attempt(graphs=graphs), Attempt(graphs=graphs, runner="1")]
    if graphs not in ("decode", "none"):
        found.append(Attempt(graphs="decode"))
    if graphs != "none":
        found.append(Attempt(graphs="none", runner="1"))
    return [*found, Attempt(graphs=graphs, apart=True)]


class Runner:
    """Starts processes, within a time, and keeps what they write."""

    def __init__(self, out: Path, seconds: float, each_s: float) -> None:
        """Start the clock.

        Args:
            out: folder of records, tokens and what processes print.
            seconds: for all processes.
            each_s: for one of them.
        """
        self._out, self._each_s = out, each_s
        self._until = time.monotonic() + seconds
        self.records = out / "vllm-engine.jsonl"

    def left(self) -> float:
        """Return the seconds that are left."""
        return self._until - time.monotonic()

    def run(self, attempt: Attempt, arguments: Sequence[str]) -> int:
        """Run ``vllm_pair``; return its exit status, or 124 where it was out of time."""
        seconds = min(self._each_s, self.left() - _KILL_S)
        command = [sys.executable, "-m", "bench.engines.vllm_pair", *arguments]
        command += ["--graphs", attempt.graphs, "--seconds", f"{seconds:.0f}"]
        command += ["--json", str(self.records)]
        print(f"{attempt}: {' '.join(command[2:])}", flush=True)
        process = subprocess.Popen(
            command,
            env={**os.environ, **_ENVIRONMENT, **attempt.environment()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        copier = threading.Thread(target=self._copy, args=(process.stdout,), daemon=True)
        copier.start()
        try:
            status = process.wait(seconds + _KILL_S)
        except subprocess.TimeoutExpired:
            process.kill()
            status = 124
        copier.join(5)
        print(f"status {status}", flush=True)
        return status

    def _copy(self, lines: IO[str]) -> None:
        """Keep all lines, and print those that say how far a process is."""
        with (self._out / "log.txt").open("a") as log:
            for line in lines:
                log.write(line)
                log.flush()
                if line.startswith("["):
                    print(line[:_WIDTH].rstrip(), flush=True)


def measure(runner: Runner, options: argparse.Namespace, engines: str) -> bool:
    """Run engines together, in the first way that works; whether one did."""
    for number, attempt in enumerate(attempts_of(options.graphs)):
        if runner.left() < _LEAST_S:
            print(f"no time is left for {attempt}", flush=True)
            return False
        folder = options.out / f"{engines.replace(',', '-').replace(':', '-')}-{number}"
        common = ["--model", options.model, "--folder", str(folder)]
        common += ["--rounds", str(options.rounds), "--kv-gib", str(options.kv_gib)]
        for name in ("layers", "racers"):
            if getattr(options, name) is not None:
                common += [f"--{name}", str(getattr(options, name))]
        if attempt.apart:
            return _run_apart(runner, attempt, common, engines.split(","))
        if runner.run(attempt, [*common, "--engines", engines, "--phases", options.phases]) == 0:
            return True
    return False


def _run_apart(
    runner: Runner, attempt: Attempt, common: Sequence[str], names: Sequence[str]
) -> bool:
    """Run A B B A, each in a process of its own; whether the first of each worked."""
    found = []
    for name in (*names, *reversed(names)):
        phases = PHASES if len(found) < len(names) else ("race",)
        which = ["--engines", name, "--phases", ",".join(phases), "--reference", names[0]]
        if runner.left() >= _LEAST_S:
            found.append(runner.run(attempt, [*common, *which]) == 0)
    return found[: len(names)] == [True] * len(names)


def print_tables(lines: Sequence[Mapping[str, Any]]) -> None:
    """Print speeds, and how far engines are apart."""
    done = [line for line in lines if line["status"] == "done"]
    table = Table(title="vLLM: medians")
    for name in ("workload", "graphs", "engine", "new tokens/s", "prompt tokens/s", "ms/step"):
        table.add_column(name, justify="right" if "/" in name else "left")
    for key, same in _grouped(done, "race", ("workload", "graphs", "engine")):
        new, prompt, step = (
            statistics.median(line[name] for line in same)
            for name in ("new_tokens_per_s", "prompt_tokens_per_s", "step_s")
        )
        table.add_row(*key, f"{new:.0f}", f"{prompt:.0f}", f"{1e3 * step:.3f}")
    report.console().print(table)
    table = Table(title="differences of the logarithmic probabilities of the same tokens")
    for name in ("engine", "other", "mean", "p99", "greedy tokens that are equal"):
        table.add_column(name)
    for line in done:
        if line["phase"] == "agreement" and line.get("forced_tokens"):
            figures = (f"{line[name]:.4f}" for name in ("forced_mean", "forced_p99"))
            table.add_row(*line["engines"], *figures, str(line.get("equal_tokens", "-")))
    report.console().print(table)


def _grouped(
    lines: Sequence[Mapping[str, Any]], phase: str, names: Sequence[str]
) -> Iterator[tuple[tuple[str, ...], list[Mapping[str, Any]]]]:
    found: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for line in lines:
        if line["phase"] == phase:
            found.setdefault(tuple(line[name] for name in names), []).append(line)
    yield from found.items()


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and print what came of it; the exit status is 1 unless all engines ran."""
    parser = make_parser("bench.engines.vllm_engine", __doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of records and logs")
    parser.add_argument("--model", choices=llama.SIZES, default="8b")
    parser.add_argument("--layers", type=int, help="instead of the model's")
    parser.add_argument("--kv-gib", type=float, default=20.0, help="of each engine's cache")
    parser.add_argument("--engines", nargs="+", default=ENGINES, help="of a process each")
    parser.add_argument("--racers", help="those that are timed; default: all")
    parser.add_argument(
        "--phases", default=",".join(PHASES), help=f"of {','.join(PHASES)}, in turn"
    )
    parser.add_argument("--graphs", choices=GRAPHS, default="decode")
    parser.add_argument("--rounds", type=int, default=1, help="of A B B A")
    parser.add_argument("--seconds", type=float, default=240.0, help="for everything")
    parser.add_argument("--each", type=float, default=150.0, help="seconds for one process")
    options = parser.parse_args(argv)
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    runner = Runner(options.out, options.seconds, options.each)
    worked = [measure(runner, options, engines) for engines in options.engines]
    if runner.records.exists():
        print_tables([json.loads(line) for line in runner.records.read_text().splitlines()])
    return int(not all(worked))


if __name__ == "__main__":
    raise SystemExit(main())
