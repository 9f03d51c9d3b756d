"""Counters of the server in the text format of Prometheus."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator

from jitattn.kv import Stats

_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_PREFIX = "jitattn_server_"


class Histogram:
    """Durations in seconds."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BUCKETS_S) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        place = next((i for i, most in enumerate(_BUCKETS_S) if seconds <= most), len(_BUCKETS_S))
        self._counts[place] += 1
        self._sum += seconds

    def lines(self, name: str) -> Iterator[str]:
        total = 0
        for most, count in zip((*_BUCKETS_S, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{most}"}} {total}'
        yield f"{name}_sum {self._sum:.6f}"
        yield f"{name}_count {total}"


class Metrics:
    """What the server has done; for all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._counts = Counter(
            prompt_tokens=0, cached_prompt_tokens=0, generated_tokens=0, disconnects=0,
            refused_connections=0, closed_idle_connections=0,
        )  # fmt: skip
        self._seconds, self._first_seconds = Histogram(), Histogram()

    def count(self, **more: int) -> None:
        with self._lock:
            self._counts.update(more)

    def end_request(self, path: str, status: int, seconds: float) -> None:
        with self._lock:
            self._requests[path, status] += 1
            self._seconds.add(seconds)

    def begin_answer(self, seconds: float) -> None:
        """Note the time from a request to the first text of its answer."""
        with self._lock:
            self._first_seconds.add(seconds)

    def text(self, now: dict[str, int], stats: Stats) -> str:
        """Return all metrics, with numbers of now and of the page manager."""
        with self._lock:
            lines = list(self._lines())
        for name, value in now.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += _metric(name, kind, [f"{_PREFIX}{name} {value}"])
        lines += _metric("pages", "gauge", _page_lines(stats))
        for name in ("offloaded", "reloaded", "dropped"):
            full = f"{name}_pages_total"
            lines += _metric(
                full, "counter", [f"{_PREFIX}{full} {getattr(stats, f'{name}_pages')}"]
            )
        return "\n".join(lines) + "\n"

    def _lines(self) -> Iterator[str]:
        yield from _metric(
            "requests_total",
            "counter",
            (
                f'{_PREFIX}requests_total{{path="{path}",status="{status}"}} {count}'
                for (path, status), count in sorted(self._requests.items())
            ),
        )
        for name, count in self._counts.items():
            yield from _metric(f"{name}_total", "counter", [f"{_PREFIX}{name}_total {count}"])
        for name, histogram in (
            ("request_seconds", self._seconds),
            ("first_text_seconds", self._first_seconds),
        ):
            yield from _metric(name, "histogram", histogram.lines(_PREFIX + name))


def _metric(name: str, kind: str, lines: Iterable[str]) -> list[str]:
    return [f"# TYPE {_PREFIX}{name} {kind}", *lines]


def _page_lines(stats: Stats) -> Iterator[str]:
    for i, pool in enumerate(stats.pools):
        host_free = pool.host_total - pool.host_held - pool.host_reusable
        tiers = {
            "device": (pool.used, pool.held, pool.reusable, pool.free),
            "host": (0, pool.host_held, pool.host_reusable, host_free),
        }
        for tier, counts in tiers.items():
            for state, count in zip(("used", "held", "reusable", "free"), counts, strict=True):
                labels = f'pool="{i}",tier="{tier}",state="{state}"'
                yield f"{_PREFIX}pages{{{labels}}} {count}"
