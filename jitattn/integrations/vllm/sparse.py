"""vLLM's sparse latent attention over planners, without vLLM: ``SparseLayer``.

Written for the interface of ``SparseMLAAttentionImpl`` in vLLM 0.26 to 0.33. The indexer of a layer
writes positions in each query token's request into a buffer that it shares with attention.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from jitattn.integrations.sparse import SparseLatents, lists_of_positions, step_of
from jitattn.tensors.token_lists import IndexLists

_STEPS = "jitattn_steps"


def index_lists(
    topk_indices: Tensor, metadata: Any, *, out: IndexLists | None = None
) -> IndexLists:
    """Return what a layer's indexer chose, as slots of its cache.

    It waits for nothing, and can be captured with ``out``.

    Args:
        topk_indices: int32 [num_tokens, topk], the indexer's buffer as far as it has query tokens:
            positions in the request; -1 is nothing, wherever it stands.
        metadata: of a sparse backend: ``req_id_per_token`` int32 [at least num_tokens],
            ``block_table`` int32 [num_reqs, width] and ``block_size``.
        out: what an earlier call of these sizes returned, to be written again.

    Raises:
        TypeError, ValueError: as ``lists_of_positions``.
    """
    rows = metadata.req_id_per_token[: topk_indices.shape[0]]
    block_size = int(metadata.block_size)
    return lists_of_positions(topk_indices, metadata.block_table, rows, block_size, out=out)


class SparseLayer(SparseLatents):
    """A layer whose indexer fills ``topk_indices_buffer`` before it attends.

    Attributes:
        topk_indices_buffer: int32 [most tokens of a step, topk].
    """

    def __init__(
        self, num_heads: int, scale: float, *, topk_indices_buffer: Tensor, **others: Any
    ) -> None:
        """Hold what a layer is.

        Args:
            num_heads: query heads of this rank.
            scale: multiplies scores.
            topk_indices_buffer: that of the indexer.
            others: ``kv_lora_rank``, ``qk_rope_head_dim``, ``batch_invariant``.
        """
        super().__init__(num_heads, scale, **others)
        self.topk_indices_buffer = topk_indices_buffer

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, as vLLM calls it, to decode steps and to prefill chunks alike.

        Args:
            q: (q_nope, q_pe) of [num_tokens, num_heads, ..], or one tensor of both, q_nope first.
            kv_c_and_k_pe_cache: [num_blocks, block_size, 576] of 16 bits, or 656 bytes of
                ``fp8_ds_mla``. It is read where it is: no part of it is gathered or converted.
            attn_metadata: as of ``index_lists``; the layers of a step share it, and its plan.
            layer: not read.

        Returns:
            out [num_tokens, num_heads, kv_lora_rank], and None: no lse.

        Raises:
            TypeError, ValueError, ConfigError: naming what is not supported or doesn't fit.
        """
        del layer
        q_nope, q_pe = q if isinstance(q, tuple) else self._parts(q)
        num_tokens = q_nope.shape[0]
        lists = index_lists(self.topk_indices_buffer[:num_tokens], attn_metadata)
        steps = getattr(attn_metadata, _STEPS, None)
        if steps is None:
            steps = {}
            setattr(attn_metadata, _STEPS, steps)
        step = steps.setdefault(num_tokens, step_of(num_tokens))
        out: Tensor = self.attend(q_nope, q_pe, kv_c_and_k_pe_cache, lists, step=step)
        return out, None

    def _parts(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return q[..., : self.kv_lora_rank], q[..., self.kv_lora_rank :]
