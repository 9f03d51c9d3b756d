"""A timer of benches for machines without a card."""

from __future__ import annotations

from collections.abc import Sequence

from bench.timing import Call


class CountingTimer:
    """Runs what it is given and says that each call takes a second."""

    def samples(self, call: Call) -> list[float]:
        call()
        return [1.0, 1.0]

    def capture(self, plan: Call | None, runs: Sequence[Call], num_runs: int) -> Call:
        def replay() -> None:
            if plan is not None:
                plan()
            for i in range(num_runs):
                runs[i % len(runs)]()

        return replay
