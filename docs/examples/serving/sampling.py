"""Sampling of one token."""

from __future__ import annotations

import torch
from torch import Tensor


class Sampler:
    """Temperature and top-p, with a generator of its own, independent of the batch."""

    def __init__(self, temperature: float, top_p: float, seed: int | None) -> None:
        self._temperature, self._top_p = temperature, top_p
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    def choose(self, logits: Tensor) -> int:
        """Return a token of logits [vocabulary] on the CPU; the best one at temperature 0."""
        if self._temperature == 0:
            return int(logits.argmax())
        scores = (logits.double() - logits.max()) / self._temperature
        shares, tokens = torch.softmax(scores, dim=0).sort(descending=True, stable=True)
        # Keep the fewest tokens that reach top_p, at least one.
        shares[shares.cumsum(0) - shares >= self._top_p] = 0
        return int(tokens[torch.multinomial(shares, 1, generator=self._generator)])
