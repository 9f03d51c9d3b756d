"""A contender of a bench that breaks, or whose outputs are or become wrong."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from bench.prefill_contenders import Prepared
from bench.turns import Result


class Fake:
    """A contender under the name of its fault, over one that is right."""

    def __init__(self, name: str, right: Any) -> None:
        self.name = name
        self.num_runs = 0
        self._right = right

    def version(self) -> str:
        return "1"

    def build_key(self, case: object) -> Hashable | None:
        return None

    def prepare(self, inputs: Any, /) -> Prepared:
        if self.name == "broken":
            raise RuntimeError("no such kernel")
        right = self._right.prepare(inputs)

        def spoil() -> None:
            self.num_runs += 1
            right.runs[0]()
            if self.name == "wrong" or self.num_runs > 2:
                right.outs[:, -1] = 0  # one row of one request

        return Prepared(runs=(spoil,), outs=right.outs)


def check_wrong_outputs(results: Sequence[Result]) -> None:
    """Check that none of a wrong, a broken and a tired contender was timed."""
    wrong, broken, tired = results
    assert (wrong.status, broken.status, tired.status) == ("wrong", "failed", "wrong")
    assert "no such kernel" in broken.reason
    assert tired.reason.startswith("after it was timed")
    assert wrong.timing is broken.timing is tired.timing is None
