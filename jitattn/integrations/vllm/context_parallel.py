"""Decode context parallelism: the KV tokens of each request that one rank keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from jitattn.integrations.steps import Step
from jitattn.integrations.vllm.metadata import Context
from jitattn.tensors.page_tables import RaggedKV
from jitattn.tensors.shards import Shard


@dataclass
class Shards:
    """This rank among those that share the keys of each request, and room for its lengths.

    Attributes:
        shard: which tokens it keeps.
        cached_lens: int32 [most requests of a batch].
        new_lens: likewise.
    """

    shard: Shard
    cached_lens: Tensor
    new_lens: Tensor

    @classmethod
    def of(
        cls, *, size: int, rank: int, interleave: int, max_batch_size: int, device: torch.device
    ) -> Self:
        """Make room for batches of up to ``max_batch_size`` requests."""
        lens = torch.zeros(2, max_batch_size, dtype=torch.int32, device=device)
        return cls(Shard(size, rank, interleave), lens[0], lens[1])

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
        cached_lens.copy_(self.shard.lens(seq_lens - new_lens))
        return Context(
            Step(cached_lens, qo_indptr, max_q_len),
            Step(new_lens, qo_indptr, max_q_len),
            RaggedKV(qo_indptr),
        )
