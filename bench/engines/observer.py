"""What an engine decodes of the compared prompts, and what it makes of another's tokens."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.engines import agreement, prompts
from bench.engines.agreement import Greedy
from bench.engines.vllm_session import Session


class Observer:
    """Decodes the compared prompts with one engine and judges the reference's tokens."""

    def __init__(self, session: Session, folder: Path, reference: str) -> None:
        """Draw the prompts.

        Args:
            session: an engine.
            folder: where the tokens of each engine are.
            reference: the engine whose tokens all judge.
        """
        self._session = session
        self.path = path_of(folder, session.name)
        self._reference = path_of(folder, reference)
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
        """Decode in other batches, with K and V of prompts as they are in the cache."""
        asked, num_new = self._asked, self._num_new
        found: list[Greedy] = []
        for i in range(0, len(asked), 3):
            found += self._session.greedy(asked[i : i + 3], num_new)
        cached = [one.num_cached for one in found]
        return {"cached_tokens": cached, **agreement.of_greedy(read_greedy(self.path), found)}

    def judge(self) -> Mapping[str, object]:
        """Find the logarithmic probabilities of the reference's tokens."""
        forced = self._session.forced(self._asked, self._judged())
        self._keep(forced=forced)
        return {"mean": sum(map(sum, forced)) / sum(map(len, forced))}

    def lost(self) -> Mapping[str, object]:
        """Return what the loss of one page's tokens does to the figure that engines differ by."""
        shorter = [prompt[min(16, len(prompt) - 1) :] for prompt in self._asked]
        forced = self._session.forced(shorter, self._judged())
        return agreement.of_forced(self._kept["forced"], forced)

    def _judged(self) -> prompts.Prompts:
        path = self._reference if self._reference.exists() else self.path
        return [one.tokens for one in read_greedy(path)]

    def _keep(self, **found: object) -> None:
        self._kept |= found
        self.path.write_text(json.dumps(self._kept))


def path_of(folder: Path, name: str) -> Path:
    """Return the file of what an engine decoded."""
    return folder / f"tokens-{name.replace(':', '-')}.json"


def read_greedy(path: Path) -> list[Greedy]:
    """Return what an engine decoded, from its file."""
    return [Greedy(**one) for one in json.loads(path.read_text())["greedy"]]


def compare(ours: Path, theirs: Path) -> dict[str, object]:
    """Compare what two engines have decoded and judged, as far as both have."""
    kept = [json.loads(path.read_text()) for path in (ours, theirs)]
    found: dict[str, object] = {}
    if all("greedy" in one for one in kept):
        found |= agreement.of_greedy(read_greedy(ours), read_greedy(theirs))
    if all("forced" in one for one in kept):
        found |= agreement.of_forced(*(one["forced"] for one in kept))
    return found
