"""``Shard``: which tokens of each request a rank keeps, and where they lie there.

Ranks take turns, a block of tokens each. A slot is dealt like a position: slot s lies at rank
s // block % num_ranks, so whoever hands out pages gives token t of a request a slot whose rank is
that of t.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank among those that share the tokens of each request.

    Attributes:
        num_ranks: how many there are.
        rank: which one this is.
        block: tokens that a rank keeps before it is the next one's turn.
    """

    num_ranks: int
    rank: int
    block: int

    @property
    def round_len(self) -> int:
        """Tokens after which it is the same rank's turn again."""
        return self.num_ranks * self.block

    def lens(self, lens: Tensor) -> Tensor:
        """Return how many of the first ``lens`` tokens of each request this rank keeps."""
        rest = (lens % self.round_len - self.rank * self.block).clamp(0, self.block)
        return (lens // self.round_len * self.block + rest).clamp(min=0)

    def places(self, slots: Tensor) -> Tensor:
        """Return where this rank keeps tokens of ``slots``; -1 what is another's, or negative."""
        is_own = (slots >= 0) & (slots // self.block % self.num_ranks == self.rank)
        own = slots // self.round_len * self.block + slots % self.block
        return own.where(is_own, -1)

    def columns(self, width: int, device: torch.device) -> Tensor:
        """Return which of ``width`` columns, a token each, are this rank's, in order.

        Returns:
            int64 [as many as a rank has at most]; ``width`` past the last.
        """
        count = -(-width // self.round_len) * self.block
        columns = torch.arange(count, device=device)
        start = columns // self.block * self.round_len + self.rank * self.block
        return (start + columns % self.block).clamp(max=width)

    def most(self, length: int) -> int:
        """Return the most tokens that any rank keeps of a request of up to ``length``."""
        return length // self.round_len * self.block + min(length % self.round_len, self.block)

    def of_entries(self, entry_tokens: int) -> Shard:
        """Return the same in entries of a page table, which have ``entry_tokens`` each."""
        return Shard(self.num_ranks, self.rank, self.block // entry_tokens)
