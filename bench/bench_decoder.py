"""A Llama-3.1-8B-shaped decoder end to end: tokens a second, with whom its layers attend.

    python -m bench.bench_decoder --json bench/results/decoder.jsonl
    python -m bench.bench_decoder --dry-run

64 requests, random weights in bfloat16, a CUDA graph for a step; products, norms, MLP, caches,
pages and tokens are the same for all. A step is what the host does (new pages, a plan where it is
made there), the replay, and the wait for the tokens of the step before: the next step is launched
ahead, which hides what the host does as long as the device takes longer. "waiting" is a step of a
host that waits for each step's tokens before it begins the next. "attention" is a graph of what all
layers do between the product of q, K and V and the one of the output, "rest" all else.

Logits of the first steps are compared with the same decoder's whose attention is computed in
float64. How far they may be from those is measured: what the definition's own become where every
output of attention is off by a rounding of bfloat16, times a few. Contenders take turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

from bench import command, records, report
from bench.decoder_contenders import (
    DecoderContender,
    Definition,
    all_decoder_contenders,
)
from bench.decoder_model import (
    DECODER_CASES,
    DRY_CASE,
    LLAMA_8B,
    TINY,
    Attention,
    Decoder,
    DecoderCase,
    Weights,
    make_weights,
    with_layers,
)
from bench.options import make_parser
from bench.oracle import relative_error
from bench.timing import Call, L2Flush, L2Policy, Timer, no_gc, summarize
from bench.turns import Result, WrongError, stopped, version_of

NUM_CHECKED = 2
"""Steps whose logits are compared: in the first of "x2k" every request gets a page."""

BASELINE = "jitattn"
_ROUNDING = 2.0**-8
_TIMES_ROUNDING = 3.0
_WARM_UP = 4


class HostTimer:
    """Times calls where there is no card, and captures nothing."""

    def samples(self, call: Call) -> list[float]:
        """Return the seconds of a few calls."""
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        return seconds

    def capture(self, plan: Call | None, runs: Sequence[Call], num_runs: int) -> Call:
        """Return the one call."""
        assert plan is None
        assert num_runs == 1
        return runs[0]


AnyTimer = Timer | HostTimer


@dataclass(frozen=True)
class Answer:
    """What comes of the first steps, each [batch_size, ...]."""

    tokens: Sequence[Tensor]
    logits: Sequence[Tensor]
    limit: float


@dataclass
class Steps:
    """Seconds of the steps of all turns.

    Attributes:
        ahead: a step, launched before the one before it has ended; the mean of a turn.
        waiting: a step of a host that waits; the mean of a turn.
        host: what the host does for a step.
        replays: what the device does for a step.
    """

    ahead: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    replays: list[float] = field(default_factory=list)


class Loop:
    """One contender's steps on a decoder that all share."""

    def __init__(self, decoder: Decoder, attention: Attention) -> None:
        """Start with calls that nothing has captured."""
        self.decoder, self.attention = decoder, attention
        self.replay: Call = lambda: decoder.forward(attention)
        self.is_cuda = decoder.kv.is_cuda

    def before(self) -> None:
        """Do the host's part."""
        self.decoder.requests.advance()
        self.attention.before(self.decoder.requests)

    def step(self) -> None:
        """Decode a token of each request, and wait.

        What the host writes for the next one may be read until then: tables, and FlashInfer's plan.
        """
        self.before()
        self.replay()
        self.wait()

    def attention_alone(self, qkv: Tensor) -> None:
        """Do what all layers do with q, K and V, all with the same."""
        self.attention.plan()
        for layer in range(len(self.decoder.kv)):
            self.attention.attend(layer, qkv)

    def wait(self) -> None:
        """Wait for the device."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def turn(self, num_steps: int, steps: Steps) -> None:
        """Decode from the prompts on, ahead and then waiting."""
        self.decoder.begin()
        for _ in range(_WARM_UP):
            self.step()
        with no_gc():
            steps.ahead.append(self._ahead(num_steps, steps))
            self.decoder.begin()
            self.wait()
            steps.waiting.append(self._waiting(num_steps, steps))

    def _ahead(self, num_steps: int, steps: Steps) -> float:
        taken = Mark(self.is_cuda)
        start = time.perf_counter()
        for _ in range(num_steps):
            began = time.perf_counter()
            self.before()
            taken.record()
            self.replay()
            steps.host.append(time.perf_counter() - began)
            # The step before has ended, and what the host wrote for this one was read: a plan may
            # write it anew.
            taken.wait()
        self.wait()
        return (time.perf_counter() - start) / num_steps

    def _waiting(self, num_steps: int, steps: Steps) -> float:
        marks = [(Mark(self.is_cuda), Mark(self.is_cuda)) for _ in range(num_steps)]
        start = time.perf_counter()
        for before, after in marks:
            self.before()
            before.record()
            self.replay()
            after.record()
            self.decoder.tokens.cpu()
        seconds = (time.perf_counter() - start) / num_steps
        steps.replays += [before.until(after) for before, after in marks]
        return seconds


class Mark:
    """A moment on the device's stream, or on the host's clock where there is none."""

    def __init__(self, is_cuda: bool) -> None:
        """Make it; it isn't recorded yet."""
        self._event = torch.cuda.Event(enable_timing=True) if is_cuda else None  # type: ignore[no-untyped-call]
        self._time = 0.0

    def record(self) -> None:
        """Record it."""
        if self._event is None:
            self._time = time.perf_counter()
        else:
            self._event.record()

    def wait(self) -> None:
        """Wait until the device has come here."""
        if self._event is not None:
            self._event.synchronize()

    def until(self, later: Mark) -> float:
        """Return the seconds to ``later``, which the device has passed."""
        if self._event is None:
            return later._time - self._time
        return float(self._event.elapsed_time(later._event)) / 1e3


@dataclass
class Entry:
    """A contender on its way through a case."""

    result: Result
    loop: Loop | None = None
    steps: Steps = field(default_factory=Steps)


def answer(decoder: Decoder) -> Answer:
    """Decode the first steps by the definition, and measure what roundings make of them."""
    tokens, logits = _first_steps(Loop(decoder, Definition(decoder)))
    _, others = _first_steps(Loop(decoder, Definition(decoder, noise=_ROUNDING)), tokens)
    errors = map(relative_error, others, logits)
    return Answer(tokens, logits, _TIMES_ROUNDING * max(errors))


def _first_steps(
    loop: Loop, given: Sequence[Tensor] | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Return tokens that the first steps begin with, which may be given, and their logits."""
    decoder = loop.decoder
    decoder.begin()
    decoder.spoil(NUM_CHECKED)
    tokens, logits = [], []
    for step in range(NUM_CHECKED):
        if given is not None:
            decoder.tokens.copy_(given[step])
        tokens.append(decoder.tokens.clone())
        decoder.logits.fill_(float("nan"))
        loop.step()
        logits.append(decoder.logits.double())
    return tokens, logits


def check(loop: Loop, expected: Answer) -> dict[str, float]:
    """Return the error of the first steps and how many best tokens differ, or raise WrongError.

    Tokens are given at each step, so that one which differs doesn't change those after it.
    """
    _, logits = _first_steps(loop, expected.tokens)
    error = max(map(relative_error, logits, expected.logits))
    if error > expected.limit:
        raise WrongError(
            f"relative error of logits {error:.1e}, at most {expected.limit:.1e} is right"
        )
    pairs = zip(logits, expected.logits, strict=True)
    differing = sum(int((a.argmax(1) != b.argmax(1)).sum()) for a, b in pairs)
    return {"error": error, "differing_tokens": differing}


def set_up(
    contender: DecoderContender, decoder: Decoder, timer: AnyTimer, expected: Answer
) -> Entry:
    """Prepare, check, capture and check again; whatever is raised becomes the result."""
    name = contender.name
    try:
        contender.version()
        decoder.begin()
        loop = Loop(decoder, contender.prepare(decoder))
        check(loop, expected)
        loop.replay = timer.capture(None, [loop.replay], 1)
        facts = check(loop, expected)
    except Exception as reason:  # a rival may raise anything, and the others still have their turn
        return Entry(stopped(name, reason))
    return Entry(Result(name, "timed", error=facts.pop("error"), facts=facts), loop)


def finish(entry: Entry, timer: AnyTimer, expected: Answer) -> Result:
    """Check once more, time what all layers do, and sum up."""
    result, loop, steps = entry.result, entry.loop, entry.steps
    if loop is None:
        return result
    try:
        error = check(loop, expected)["error"]
    except WrongError as reason:
        return dataclasses.replace(result, status="wrong", reason=f"after it was timed: {reason}")
    replay_s = statistics.median(steps.replays)
    attention_s = _attention_s(loop, timer)
    timing = summarize(steps.ahead)
    facts = {
        **result.facts,
        "limit": expected.limit,
        "tokens_per_s": loop.decoder.case.batch_size / timing.median_s,
        "waiting_s": statistics.median(steps.waiting),
        "host_s": statistics.median(steps.host),
        "replay_s": replay_s,
        "attention_s": attention_s,
        "rest_s": replay_s - attention_s,
    }
    error = max(error, result.error or 0.0)
    return dataclasses.replace(result, timing=timing, error=error, facts=facts)


def _attention_s(loop: Loop, timer: AnyTimer) -> float:
    """Return the seconds that all layers' attention takes in a graph of its own."""
    decoder = loop.decoder
    width = decoder.weights.shape.qkv_width
    qkv = torch.randn(
        (decoder.case.batch_size, width), dtype=decoder.kv.dtype, device=decoder.kv.device
    )
    decoder.begin()
    loop.step()  # leaves lengths, pages and plan of a step
    replay = timer.capture(None, [lambda: loop.attention_alone(qkv)], 1)
    return summarize(timer.samples(replay)).median_s


def bench_case(
    decoder: Decoder,
    contenders: Sequence[DecoderContender],
    timer: AnyTimer,
    rounds: int,
    num_steps: int,
) -> list[Result]:
    """Check every contender, time those that are right, in turns, and check them again."""
    expected = answer(decoder)
    entries = [set_up(contender, decoder, timer, expected) for contender in contenders]
    for _ in range(rounds):
        for entry in entries:
            if entry.loop is not None:
                entry.loop.turn(num_steps, entry.steps)
    return [finish(entry, timer, expected) for entry in entries]


def to_record(
    result: Result, case: DecoderCase, weights: Weights, num_steps: int, env: Mapping[str, object]
) -> dict[str, object]:
    """Return the JSON record of one result."""
    figures = {} if result.timing is None else dataclasses.asdict(result.timing)
    return records.of_result(
        "decoder",
        env,
        case.name,
        result,
        num_layers=weights.shape.num_layers,
        num_steps=num_steps,
        error=result.error,
        **figures,
        **result.facts,
    )


def print_case(case: DecoderCase, results: Sequence[Result]) -> None:
    """Print a row for each contender."""
    headings = ("step ms", "tokens/s", "/ jitattn", "waiting ms", "host us", "attention ms")
    table = Table(title=case.name)
    table.add_column("contender", no_wrap=True)
    for heading in (*headings, "rest ms", "error", "other tokens"):
        table.add_column(heading, justify="right")
    medians = {r.contender: r.timing.median_s for r in results if r.timing}
    ours = medians.get(BASELINE)
    for result in results:
        if result.timing is None:
            table.add_row(result.contender, result.status)
            continue
        facts, median_s = result.facts, result.timing.median_s
        table.add_row(
            result.contender,
            f"{median_s * 1e3:.3f}",
            f"{facts['tokens_per_s']:.0f}",
            "-" if ours is None else f"{median_s / ours:.3f}",
            f"{_number(facts, 'waiting_s') * 1e3:.3f}",
            f"{_number(facts, 'host_s') * 1e6:.0f}",
            f"{_number(facts, 'attention_s') * 1e3:.3f}",
            f"{_number(facts, 'rest_s') * 1e3:.3f}",
            f"{result.error:.1e} of {_number(facts, 'limit'):.1e}",
            f"{facts['differing_tokens']}",
        )
    report.console().print(table)
    for result in results:
        report.print_reason(result)


def _number(facts: Mapping[str, object], name: str) -> float:
    value = facts[name]
    assert isinstance(value, float)
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases; the exit status is 1 when an output was wrong."""
    contenders = all_decoder_contenders()
    options = _parse(argv, [contender.name for contender in contenders])
    if not options.dry_run and not torch.cuda.is_available():
        print("bench_decoder needs a CUDA device", file=sys.stderr)
        return 2
    chosen = [c for c in contenders if c.name in options.contenders.split(",")]
    cases = [c for c in DECODER_CASES if c.name in options.cases.split(",")]
    shape, device = LLAMA_8B, torch.device("cpu")
    timer: AnyTimer = HostTimer()
    if options.dry_run:
        cases, shape = [DRY_CASE], TINY
        chosen = [c for c in chosen if c.name.startswith(BASELINE)]
    else:
        device = torch.device("cuda", torch.cuda.current_device())
        timer = Timer(L2Flush(L2Policy.WRITE, device))
    env = records.environment({c.name: version_of(c) for c in chosen})
    report.print_head(env)
    weights = make_weights(with_layers(shape, options.layers), device)
    status = 0
    for case in cases:
        decoder = Decoder(weights, case, options.steps + _WARM_UP)
        results = bench_case(decoder, chosen, timer, options.rounds, options.steps)
        del decoder
        lines = [to_record(r, case, weights, options.steps, env) for r in results]
        records.append_json(options.json, lines)
        print_case(case, results)
        status |= command.status_of([results])
        torch.cuda.empty_cache()
    return status


def _parse(argv: Sequence[str] | None, names: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("bench.bench_decoder", __doc__)
    known = [case.name for case in DECODER_CASES]
    parser.add_argument("--cases", default=",".join(known), help=f"of {','.join(known)}")
    parser.add_argument("--contenders", default=",".join(names), help=f"of {','.join(names)}")
    parser.add_argument("--rounds", type=int, default=7, help="turns of every contender")
    parser.add_argument("--steps", type=int, default=32, help="steps of a turn")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--dry-run", action="store_true", help="jitattn alone, tiny, on the CPU")
    parser.add_argument("--json", type=Path, help="file to which records are appended")
    options = parser.parse_args(argv)
    command.check_names(parser, "case", options.cases, known)
    command.check_names(parser, "contender", options.contenders, names)
    if options.rounds < 2 or options.steps < NUM_CHECKED:
        parser.error(f"expected at least 2 rounds and {NUM_CHECKED} steps")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
