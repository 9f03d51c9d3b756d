"""vLLM's engine with several attention backends in one process; ``vllm_engine`` starts it.

    python -m bench.engines.vllm_pair --engines CUSTOM,FLASH_ATTN,CUSTOM:fp8 --json out.jsonl

An engine is a name of vLLM's for attention, and its ``kv_cache_dtype`` behind a colon; "EXACT" is
attention in float32. Each phase writes its record as it ends, and what it raises into that record:
the next ones have their turn. The exit status is 3 when an engine did not start, and 1 when
a phase failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from bench.engines import llama, prompts
from bench.engines.log import Log
from bench.engines.observer import Observer, compare, path_of
from bench.engines.prompts import Prompts, Workload
from bench.engines.vllm_session import EXACT, GRAPHS, Session, Setting
from bench.options import make_parser

DID_NOT_START = 3
PHASES = ("decode", "again", "race", "judge", "lost", "agreement")


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

    def start(self, name: str) -> bool:
        """Start an engine; whether it did."""

        def work() -> Mapping[str, object]:
            self.sessions[name] = Session(name, self._setting)
            return self.sessions[name].facts()

        return self._try("start", name, work)

    def observe(self, observers: Mapping[str, Observer], phase: str) -> None:
        """Go through a phase of `Observer` with all engines that are there.

        Args:
            observers: of each engine.
            phase: a method; EXACT, which takes its time, has "judge" alone.
        """
        for name in list(self.sessions):
            if phase == "judge" or not name.startswith(EXACT):
                self._try(phase, name, getattr(observers[name], phase))

    def race(self, racers: Sequence[str], rounds: int) -> None:
        """Time the workloads in the order A B B A, after each engine has run them once.

        Args:
            racers: names of engines.
            rounds: how often.
        """
        setting = self._setting
        for workload in prompts.WORKLOADS[setting.model]:
            asked = prompts.draw(workload.lengths, setting.sizes()["vocab_size"], seed=3)
            for name in [name for name in racers if name in self.sessions]:
                self._try("warm", name, partial(warm, self.sessions[name], workload, asked))
            for name in [*racers, *reversed(racers)] * rounds:
                if session := self.sessions.get(name):
                    self._try("race", name, partial(once, session, workload, asked))

    def _try(self, phase: str, name: str, work: Callable[[], Mapping[str, object]]) -> bool:
        if self._log.phase(phase, work, engine=name):
            return True
        if self._log.left() > 0:
            self.sessions.pop(name, None)
        return False


def warm(session: Session, workload: Workload, asked: Prompts) -> Mapping[str, object]:
    """Run a workload's kernels once."""
    return {"workload": workload.name, "total_s": session.seconds(workload, asked, num_new=3)}


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser("bench.engines.vllm_pair", __doc__)
    parser.add_argument("--engines", default="CUSTOM,FLASH_ATTN", help="see above")
    parser.add_argument("--racers", help="engines that are timed; default: all but EXACT")
    parser.add_argument("--model", choices=llama.SIZES, default="8b")
    parser.add_argument("--layers", type=int, help="instead of the model's")
    parser.add_argument("--kv-gib", type=float, default=20.0, help="of each engine's cache")
    parser.add_argument("--block-size", type=int, help="tokens of a page; default: vLLM's choice")
    parser.add_argument("--graphs", choices=GRAPHS, default="decode")
    parser.add_argument("--rounds", type=int, default=1, help="of A B B A")
    parser.add_argument("--seconds", type=float, default=240.0, help="until when phases start")
    parser.add_argument(
        "--phases", default=",".join(PHASES), help=f"of {','.join(PHASES)}, in turn"
    )
    parser.add_argument("--reference", help="whose tokens all judge; default: the first engine")
    parser.add_argument("--folder", type=Path, help="for tokens; default: a temporary one")
    parser.add_argument("--json", type=Path, help="file to which records are appended")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Start the engines, compare and time them."""
    options = options_of(argv)
    names = options.engines.split(",")
    options.folder = options.folder or Path(tempfile.mkdtemp())
    options.folder.mkdir(parents=True, exist_ok=True)
    log = Log(options.json, options.seconds, {"model": options.model, "graphs": options.graphs})
    # A kernel that never ends would say nothing.
    faulthandler.dump_traceback_later(options.seconds + 10, exit=True)
    setting = Setting(
        model=options.model,
        folder=options.folder / "model",
        graphs=options.graphs,
        num_layers=options.layers,
        kv_bytes=int(options.kv_gib * 2**30),
        block_size=options.block_size,
    )
    llama.write_config(setting.folder, setting.sizes(), prompts.LIMITS[options.model][0])
    if not log.phase("import", partial(load, names)):
        return DID_NOT_START
    engines = Engines(log, setting)
    if not all(map(engines.start, names)):
        return DID_NOT_START
    go(log, engines, options)
    log.say("done")
    return int(log.num_failed > 0)


def load(names: Sequence[str]) -> Mapping[str, object]:
    """Import vLLM and register the backends that it does not bring."""
    import vllm

    from jitattn.integrations.vllm import register

    register()
    if any(name.startswith(EXACT) for name in names):
        from bench.engines import exact

        exact.register()
    return {"vllm": vllm.__version__, "argv": sys.argv[1:]}


def go(log: Log, engines: Engines, options: argparse.Namespace) -> None:
    """Go through the phases in the order that was asked for."""
    names = options.engines.split(",")
    reference = options.reference or names[0]
    observers = {
        name: Observer(session, options.folder, reference)
        for name, session in engines.sessions.items()
    }
    racers = [name for name in names if not name.startswith(EXACT)]
    for phase in options.phases.split(","):
        if phase == "race":
            engines.race(options.racers.split(",") if options.racers else racers, options.rounds)
        elif phase == "agreement":
            compare_all(log, options.folder, dict.fromkeys([reference, *names]))
        else:
            engines.observe(observers, phase)


def compare_all(log: Log, folder: Path, names: Iterable[str]) -> None:
    """Compare each two engines that have decoded or judged, in this process or an earlier one."""
    for pair in itertools.combinations(names, 2):
        paths = [path_of(folder, name) for name in pair]
        if all(path.exists() for path in paths):
            log.phase("agreement", partial(compare, *paths), engines=pair)


if __name__ == "__main__":
    raise SystemExit(main())
