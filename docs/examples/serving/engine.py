"""The scheduler in a thread of its own: requests in, answers out token by token."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from torch import Tensor

from docs.examples.serve import CHUNK, Batch, Request, Scheduler
from docs.examples.serving.sampling import Sampler
from docs.examples.serving.text import GrowingText
from jitattn.kv import KVCacheError, KVCacheManager, KVSequence, LayerConfig, Stats

_LOG = logging.getLogger(__name__)


class Model:
    """Interface of a model."""

    max_position: int

    def layers(self) -> list[LayerConfig]:
        raise NotImplementedError

    def forward(self, manager: KVCacheManager, batch: Batch) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class Event:
    """New text of a choice, the last one with ``reason``. ``error`` ends all choices."""

    index: int
    text: str = ""
    reason: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class Load:
    """What the engine does, as it was after its last step."""

    num_running: int
    num_waiting: int
    num_suspended: int
    stats: Stats


@dataclass(eq=False, kw_only=True)
class Choice(Request):
    """One choice of a request's answer.

    Attributes:
        index: its number among them.
        text: what was said so far.
        sampler: chooses its tokens.
        tell: takes its events, in the engine's thread.
        others: choices of the same prompt, which begin when that is computed.
        num_generated: tokens of the answer, one that ends it included.
        num_reused: tokens of the prompt that were there.
    """

    index: int
    text: GrowingText
    sampler: Sampler
    tell: Callable[[Event], None]
    stop_ids: frozenset[int]
    others: list[Choice] = field(default_factory=list)
    num_generated: int = 0
    num_reused: int | None = None
    is_over: bool = False


class Engine(Scheduler):
    """Runs a model for requests from any thread.

    Attributes:
        max_len: tokens of a prompt and its answer that fit for certain.
        error: the exception that stopped the engine, or None.
        load: what it does, for all threads; the manager is for its own alone.
        is_idle: whether it waits for a request, so that until the next one the manager is at rest.
    """

    max_running = 32

    def __init__(self, model: Model, manager: KVCacheManager, *, chunk: int = CHUNK) -> None:
        super().__init__(model, manager, [])
        self.chunk = chunk
        self.max_len = _longest(manager, model.max_position, chunk)
        self.error: str | None = None
        self.load = self._load()
        self.is_idle = False
        self._changed = threading.Condition()
        self._new: list[Choice] = []
        self._gone: list[Choice] = []
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, choices: list[Choice]) -> None:
        """Answer a prompt, which is computed once for all choices."""
        choices[0].others = choices[1:]
        with self._changed:
            if self.error is not None or self._is_closing:
                raise RuntimeError(self.error or "the engine is closing")
            self._new.append(choices[0])
            self._wake()

    def cancel(self, choices: list[Choice]) -> None:
        """Cancel an answer; ended choices stay as they are."""
        with self._changed:
            self._gone += choices
            self._wake()

    def close(self) -> None:
        """End all requests, and the thread."""
        with self._changed:
            self._is_closing = True
            self._wake()
        self._thread.join()

    def _wake(self) -> None:
        self.is_idle = False
        self._changed.notify()

    # --- in the thread

    def _run(self) -> None:
        try:
            while self._take_news():
                if self.running or self.waiting:
                    self.step()
                self.load = self._load()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            _LOG.exception("the engine has stopped")
            self._stop(self.error)
        else:
            self._stop("the server is closing")

    def _load(self) -> Load:
        counts = len(self.running), len(self.waiting), self.num_suspended
        return Load(*counts, self.manager.stats())

    def _take_news(self) -> bool:
        with self._changed:
            while not (self._new or self._gone or self.running or self.waiting):
                if self._is_closing:
                    return False
                self.is_idle = True
                self._changed.wait()
            self.waiting.extend(self._new)
            gone = self._gone
            self._new, self._gone = [], []
            is_closing = self._is_closing
        for choice in gone:
            self._drop(choice)
        return not is_closing

    def _stop(self, why: str) -> None:
        """End all answers, and free their pages."""
        with self._changed:
            self.error = self.error or why
            unfinished = [*self._new, *self.waiting, *self.running]
        every = [each for choice in unfinished for each in (choice, *choice.others)]
        for each in every:
            each.tell(Event(each.index, error=why))
        with suppress(KVCacheError):  # after an error halfway, a manager frees nothing
            for each in every:
                self._drop(each)
            self.load = self._load()

    def _drop(self, choice: Choice) -> None:
        if choice.is_over:
            return
        choice.is_over = True
        if choice in self.running:
            self.running.remove(choice)
        elif choice in self.waiting:
            self.waiting.remove(choice)
        if choice.seq is not None:
            choice.seq.close()
            choice.seq = None

    def admit(self) -> None:
        super().admit()
        for choice in self.running:
            if choice.num_reused is None:
                choice.num_reused = choice.seq.history_len

    def follow(self, request: Choice, logits: Tensor) -> None:
        others, request.others = request.others, []
        prompt = list(request.tokens) if others else []
        for other in others:
            if not other.is_over:
                # A fork of the prompt; its last page is copied when it grows.
                other.tokens, other.seq = list(prompt), _fork(request)
                other.num_reused = 0
                self.running.append(other)
                self._append(other, logits)
        self._append(request, logits)

    def _append(self, choice: Choice, logits: Tensor) -> None:
        token = choice.sampler.choose(logits)
        choice.num_generated += 1
        if token in choice.stop_ids:
            self._finish(choice, choice.text.finish(), "stop")
            return
        choice.tokens.append(token)
        choice.num_wanted -= 1
        piece = choice.text.push(token)
        if choice.text.is_stopped:
            self._finish(choice, piece, "stop")
        elif choice.num_wanted == 0:
            self._finish(choice, piece + choice.text.finish(), "length")
        elif piece:
            choice.tell(Event(choice.index, piece))

    def _finish(self, choice: Choice, piece: str, reason: str) -> None:
        choice.is_over = True
        self.end(choice)
        # Pages first, so that they are free when the client learns of the end.
        choice.tell(Event(choice.index, piece, reason))


def _fork(request: Request) -> KVSequence:
    assert request.seq is not None
    return request.seq.fork()


def _longest(manager: KVCacheManager, most: int, chunk: int) -> int:
    """Return the most tokens, up to ``most``, that fit for a single sequence, in chunks.

    Raises:
        ValueError: not even one chunk fits.
    """
    seq = manager.create_sequence()
    assert seq.resume()
    length = 0
    while length < most and seq.resize(length + chunk, length):
        length += chunk
    if length == 0:
        raise ValueError(f"the pages don't hold a chunk of {chunk} tokens: give more bytes")
    rest = next((n for n in range(chunk - 1, 0, -1) if seq.resize(length + n, length)), 0)
    seq.close()
    return min(length + rest, most)
