"""vLLM's engine with several attention backends in one process; ``vllm_engine`` starts it.

    python -m bench.engines.vllm_pair --backends CUSTOM,FLASH_ATTN --model 8b --json out.jsonl

Each phase writes its record as it ends, and what it raises into that record: the next ones have
their turn. The exit status is 3 when an engine did not start, and 1 when
a phase failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench import records
from bench.engines import agreement, llama, prompts
from bench.engines.agreement import Greedy
from bench.engines.prompts import Prompts, Workload
from bench.engines.vllm_session import GRAPHS, Session, Setting
from bench.options import make_parser

DID_NOT_START = 3
_TAIL = 3000  # characters of a traceback that a record keeps


class Log:
    """Writes records as they come, and says what happens when."""

    def __init__(self, path: Path | None, seconds: float, facts: Mapping[str, object]) -> None:
        """Start the clock.

        Args:
            path: of the JSON lines, or None.
            seconds: until when phases start.
            facts: that every record has.
        """
        self._path, self._facts = path, dict(facts)
        self._started, self._until = time.monotonic(), time.monotonic() + seconds
        self._env = records.environment()
        self.num_failed = 0

    def say(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        print(f"[{time.monotonic() - self._started:6.1f} s] {text}", flush=True)

    def left(self) -> float:
        """Return the seconds until the limit."""
        return self._until - time.monotonic()

    def write(self, phase: str, **facts: object) -> None:
        """Append a record."""
        line = records.record("engine", self._env, phase=phase, **self._facts, **facts)
        records.append_json(self._path, [line])
        reason = str(facts.pop("reason", ""))
        self.say(f"{phase}: {json.dumps(facts)} {reason.strip().rpartition(chr(10))[2]}")
        if reason:
            print(reason, flush=True)

    def phase(self, name: str, work: Callable[[], Mapping[str, object]], **facts: object) -> bool:
        """Write what ``work`` returns, or the end of what it raises; whether it returned.

        Args:
            name: of the phase.
            work: returns the record's facts.
            **facts: others.
        """
        if self.left() <= 0:
            self.write(name, status="skipped", reason="no time is left", **facts)
            return False
        self.say(f"{name} {facts or ''} ...")
        started = time.monotonic()
        try:
            found = work()
        except Exception as error:  # an engine may raise anything, and other phases have their turn
            self.num_failed += 1
            text = "".join(traceback.format_exception(error))
            self.write(name, status="failed", reason=text[-_TAIL:], **facts)
            return False
        self.write(name, status="done", seconds=time.monotonic() - started, **facts, **found)
        return True


class Observer:
    """Decodes the compared prompts with one engine and judges the reference's tokens."""

    def __init__(self, session: Session, folder: Path, reference: str) -> None:
        """Draw the prompts.

        Args:
            session: an engine.
            folder: where ``tokens-BACKEND.json`` of each engine are.
            reference: the backend whose tokens all judge.
        """
        self._session = session
        self.path = folder / f"tokens-{session.backend}.json"
        self._reference = folder / f"tokens-{reference}.json"
        setting = session.setting
        self._asked, self._num_new = prompts.compared(setting.model, setting.sizes()["vocab_size"])
        self._kept: dict[str, Any] = {}

    def decode(self) -> Mapping[str, object]:
        """Decode all prompts in one batch, without cached prefixes at first."""
        self._session.forget()
        found = self._session.greedy(self._asked, self._num_new)
        self._keep(greedy=[dataclasses.asdict(one) for one in found])
        return {"first_tokens": [one.tokens[:4] for one in found[:4]]}

    def again(self) -> Mapping[str, object]:
        """Decode in other batches: what differs then differs within one engine."""
        asked, num_new = self._asked, self._num_new
        found: list[Greedy] = []
        for i in range(0, len(asked), 3):
            found += self._session.greedy(asked[i : i + 3], num_new)
        cached = [one.num_cached for one in found]
        return {"cached_tokens": cached, **agreement.of_greedy(read_greedy(self.path), found)}

    def judge(self) -> Mapping[str, object]:
        """Return what the loss of one page's tokens does to the figure that engines differ by."""
        judged = self._reference if self._reference.exists() else self.path
        tokens = [one.tokens for one in read_greedy(judged)]
        forced = self._session.forced(self._asked, tokens)
        self._keep(forced=forced)
        shorter = [prompt[min(16, len(prompt) - 1) :] for prompt in self._asked]
        lost = agreement.of_forced(forced, self._session.forced(shorter, tokens))
        return {"without_16_tokens": lost}

    def _keep(self, **found: object) -> None:
        self._kept |= found
        self.path.write_text(json.dumps(self._kept))


def read_greedy(path: Path) -> list[Greedy]:
    """Return what an engine decoded, from its file."""
    return [Greedy(**one) for one in json.loads(path.read_text())["greedy"]]


def compare(log: Log, folder: Path, what: str) -> None:
    """Write how far jitattn and FlashAttention are apart, if both have been observed.

    Args:
        log: of records.
        folder: see `Observer`.
        what: "greedy" or "forced".
    """

    def both() -> Mapping[str, object]:
        ours, theirs = (folder / f"tokens-{backend}.json" for backend in ("CUSTOM", "FLASH_ATTN"))
        if what == "greedy":
            return agreement.of_greedy(read_greedy(ours), read_greedy(theirs))
        forced = (json.loads(path.read_text())["forced"] for path in (ours, theirs))
        return agreement.of_forced(*forced)

    if len(list(folder.glob("tokens-*.json"))) > 1:
        log.phase("agreement", both, what=what)


def once(session: Session, workload: Workload, asked: Prompts) -> Mapping[str, object]:
    """Time a workload's prompts alone, and all of it."""
    prompt_s = session.seconds(workload, asked, num_new=1)
    total_s = session.seconds(workload, asked)
    return {
        "workload": workload.name,
        "total_s": total_s,
        "prompt_s": prompt_s,
        "new_tokens_per_s": len(asked) * workload.num_new / total_s,
        "prompt_tokens_per_s": sum(workload.lengths) / prompt_s,
        "step_s": (total_s - prompt_s) / (workload.num_new - 1),
    }


class Engines:
    """Those that have started and have not failed: a failed one may never return again."""

    def __init__(self, log: Log, setting: Setting) -> None:
        """Start none yet."""
        self._log, self._setting = log, setting
        self.sessions: dict[str, Session] = {}

    def start(self, backend: str) -> bool:
        """Start an engine; whether it did."""

        def work() -> Mapping[str, object]:
            self.sessions[backend] = Session(backend, self._setting)
            return self.sessions[backend].facts()

        return self._try("start", backend, work)

    def observe(self, observers: Mapping[str, Observer], phases: Sequence[str]) -> None:
        """Compare tokens, of all engines that are there.

        Args:
            observers: of each engine.
            phases: methods of `Observer`.
        """
        for phase in phases:
            for backend in list(self.sessions):
                self._try(phase, backend, getattr(observers[backend], phase))

    def race(self, rounds: int) -> None:
        """Time the workloads in the order A B B A, after each engine has run them once."""
        setting = self._setting
        for workload in prompts.WORKLOADS[setting.model]:
            asked = prompts.draw(workload.lengths, setting.sizes()["vocab_size"], seed=3)
            for backend, session in list(self.sessions.items()):
                self._try("warm", backend, partial(warm, session, workload, asked))
            for backend in [*self.sessions, *reversed(self.sessions)] * rounds:
                if session := self.sessions.get(backend):
                    self._try("race", backend, partial(once, session, workload, asked))

    def _try(self, phase: str, backend: str, work: Callable[[], Mapping[str, object]]) -> bool:
        if self._log.phase(phase, work, backend=backend):
            return True
        if self._log.left() > 0:
            self.sessions.pop(backend, None)
        return False


def warm(session: Session, workload: Workload, asked: Prompts) -> Mapping[str, object]:
    """Run a workload's kernels once."""
    return {"workload": workload.name, "total_s": session.seconds(workload, asked, num_new=3)}


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser("bench.engines.vllm_pair", __doc__)
    parser.add_argument("--backends", default="CUSTOM,FLASH_ATTN", help="vLLM's names")
    parser.add_argument("--model", choices=llama.SIZES, default="8b")
    parser.add_argument("--layers", type=int, help="instead of the model's")
    parser.add_argument("--kv-dtype", default="auto", help="vLLM's kv_cache_dtype")
    parser.add_argument("--kv-gib", type=float, default=20.0, help="of each engine's cache")
    parser.add_argument("--block-size", type=int, help="tokens of a page; default: vLLM's choice")
    parser.add_argument("--graphs", choices=GRAPHS, default="decode")
    parser.add_argument("--rounds", type=int, default=1, help="of A B B A")
    parser.add_argument("--seconds", type=float, default=240.0, help="until when phases start")
    parser.add_argument("--phases", default="observe,race", help="of observe,race")
    parser.add_argument("--reference", help="whose tokens all judge; default: the first backend")
    parser.add_argument("--folder", type=Path, help="for tokens; default: a temporary one")
    parser.add_argument("--json", type=Path, help="file to which records are appended")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Start the engines, compare and time them."""
    options = options_of(argv)
    backends = options.backends.split(",")
    folder = options.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"model": options.model, "kv_dtype": options.kv_dtype, "graphs": options.graphs}
    log = Log(options.json, options.seconds, facts)
    # A kernel that never ends would say nothing.
    faulthandler.dump_traceback_later(options.seconds + 10, exit=True)
    setting = Setting(
        model=options.model,
        folder=folder / "model",
        kv_dtype=options.kv_dtype,
        graphs=options.graphs,
        num_layers=options.layers,
        kv_bytes=int(options.kv_gib * 2**30),
        block_size=options.block_size,
    )
    llama.write_config(setting.folder, setting.sizes(), prompts.LIMITS[options.model][0])

    def load() -> Mapping[str, object]:
        import vllm

        from jitattn.integrations.vllm import register

        register()
        return {"vllm": vllm.__version__, "argv": sys.argv[1:]}

    if not log.phase("import", load):
        return DID_NOT_START
    engines = Engines(log, setting)
    if not all(map(engines.start, backends)):
        return DID_NOT_START
    reference = backends[0] if options.reference is None else options.reference
    observers = {
        backend: Observer(session, folder, reference)
        for backend, session in engines.sessions.items()
    }
    if "observe" in options.phases:
        engines.observe(observers, ["decode", "again"])
        compare(log, folder, "greedy")
    if "race" in options.phases:
        engines.race(options.rounds)
    if "observe" in options.phases:  # last, since it asks the most of an engine
        engines.observe(observers, ["judge"])
        compare(log, folder, "forced")
    log.say("done")
    return int(log.num_failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
