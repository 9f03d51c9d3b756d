"""Whether ranks plan the same: what each is about to do, compared before any query travels."""

from __future__ import annotations

import json
from collections.abc import Mapping

from jitattn.base.errors import ConfigError, ParallelError
from jitattn.parallel.exchange import Exchange

_ROW_BYTES = 12 * 1024
_MOST_LETTERS = 1024  # of an error, of which each may take six in JSON
_MOST_OF_A_FACT = 80


def agree(exchange: Exchange, facts: Mapping[str, str], error: Exception | None) -> None:
    """Return if every rank comes with the same facts and without an error.

    Args:
        exchange: of the ranks; each calls this.
        facts: by name, what has to be the same.
        error: what this rank's plan raised.

    Raises:
        Exception: this rank's own error.
        ConfigError: on every rank, facts that differ, with their names and each rank's.
        ParallelError: another rank's plan raised an error, or it is gone.
    """
    note = "" if error is None else f"{type(error).__name__}: {error}"[:_MOST_LETTERS]
    told = {name: value[:_MOST_OF_A_FACT] for name, value in facts.items()}
    row = json.dumps({"error": note, "facts": told}).encode()
    rows = [json.loads(row) for row in exchange.gather_bytes(row, _ROW_BYTES)]
    if error is not None:
        raise error
    for rank, found in enumerate(rows):
        if found["error"]:
            raise ParallelError(f"rank {rank} refused its plan: {found['error']}")
    if reasons := _differences([found["facts"] for found in rows]):
        raise ConfigError(reasons)


def _differences(facts: list[dict[str, str]]) -> list[str]:
    """Say which facts differ: of each kind the first rank that has it."""
    reasons = []
    for name in sorted({name for each in facts for name in each}):
        values = [each.get(name, "none") for each in facts]
        if len(set(values)) > 1:
            first = {value: values.index(value) for value in values}
            told = " and ".join(f"{value} on rank {rank}" for value, rank in first.items())
            reasons.append(f"{name} is {told}")
    return reasons
