"""Decode context parallelism: the KV tokens of each request that one rank keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from jitattn.integrations.steps import Step
from jitattn.integrations.vllm.metadata import Context
from jitattn.tensors.page_tables import RaggedKV


@dataclass
class Shards:
    """This rank among those that share the keys of each request, and room for its lengths.

    Attributes:
        size: how many ranks there are.
        rank: which one this is.
        interleave: tokens that a rank keeps before it is the next one's turn.
        cached_lens: int32 [most requests of a batch].
        new_lens: likewise.
    """

    size: int
    rank: int
    interleave: int
    cached_lens: Tensor
    new_lens: Tensor

    @classmethod
    def of(
        cls, *, size: int, rank: int, interleave: int, max_batch_size: int, device: torch.device
    ) -> Self:
        """Make room for batches of up to ``max_batch_size`` requests."""
        lens = torch.zeros(2, max_batch_size, dtype=torch.int32, device=device)
        return cls(size, rank, interleave, lens[0], lens[1])

    def context(self, seq_lens: Tensor, qo_indptr: Tensor, max_q_len: int) -> Context:
        """Write the lengths of a batch and return what describes it.

        They are written in place for graphs, which read them where they were when captured.

        Raises:
            ValueError: more requests than there is room for.
        """
        batch_size = seq_lens.shape[0]
        if batch_size > self.new_lens.shape[0]:
            raise ValueError(
                f"num_reqs is {batch_size}: there is room for {self.new_lens.shape[0]} requests, "
                "as many as max_num_seqs"
            )
        cached_lens, new_lens = self.cached_lens[:batch_size], self.new_lens[:batch_size]
        torch.sub(qo_indptr[1:], qo_indptr[:-1], out=new_lens)
        cached_lens.copy_(shard_lens(seq_lens - new_lens, self.size, self.rank, self.interleave))
        return Context(
            Step(cached_lens, qo_indptr, max_q_len),
            Step(new_lens, qo_indptr, max_q_len),
            RaggedKV(qo_indptr),
        )


def shard_lens(lens: Tensor, size: int, rank: int, interleave: int) -> Tensor:
    """Return how many of the first ``lens`` tokens of each request a rank keeps.

    Ranks take turns, ``interleave`` tokens at a time.
    """
    round_len = size * interleave
    rest = (lens % round_len - rank * interleave).clamp(0, interleave)
    return (lens // round_len * interleave + rest).clamp(min=0)
