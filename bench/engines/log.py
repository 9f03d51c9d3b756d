"""Records of phases as they end, and lines that say what happens when."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from bench import records

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
