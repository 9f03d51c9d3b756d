"""FlashMLA, the build that vLLM ships: its library's operators, argument by argument.

Three of them run on compute capability 9.0: decode over 16-bit latents in pages, decode by lists
over rows of 656 bytes, and prefill by lists over 16-bit latents. The first two split their work by
a schedule that their own first call of a step makes on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bench.contenders import SkipError
from bench.mla_cases import LATENT_DIM, SM_SCALE
from bench.rivals import load_library

PAGE_SIZE = 64  # of dense decode
MAX_Q_LEN = 128  # longer chunks vLLM computes another way
LISTED_AT_ONCE = {"decode": 64, "prefill": 128}
"""Lengths of lists are multiples of these; other lengths would end the process."""
BY_RUN = "on the device, by the first run of a step"

_HEADS = (64, 128)


def load_flashmla() -> str:
    """Load FlashMLA and return its version, or raise SkipError."""
    return load_library("_flashmla_C.abi3.so", "JITATTN_BENCH_FLASHMLA", "vllm")


class Schedule:
    """What the first run of a step makes and the others, of the same lengths, are given."""

    def __init__(self) -> None:
        """Begin without one."""
        self.parts: tuple[Tensor | None, Tensor | None] = None, None

    def forget(self) -> None:
        """Begin a step: the next run makes the schedule."""
        self.parts = None, None


def padded_heads(num_heads: int) -> int:
    """Return the heads that kernels for lists run with; engines pad queries to these."""
    for heads in _HEADS:
        if num_heads <= heads:
            return heads
    raise SkipError(f"FlashMLA has at most {_HEADS[-1]} heads by lists")


def joined(q_nope: Tensor, q_pe: Tensor, num_heads: int) -> Tensor:
    """Return queries as one tensor [.., num_heads, 576]; heads past the last are zero."""
    width = q_nope.shape[-1] + q_pe.shape[-1]
    q = q_nope.new_zeros((*q_nope.shape[:-2], num_heads, width))
    given = q[..., : q_nope.shape[-2], :]
    given[..., : q_nope.shape[-1]] = q_nope
    given[..., q_nope.shape[-1] :] = q_pe
    return q


def dense_decode(
    q: Tensor, kv: Tensor, seq_lens: Tensor, block_table: Tensor, out: Tensor, schedule: Schedule
) -> None:
    """Attend over pages; query tokens are the last of their requests and see what is before them.

    Args:
        q: [batch_size, q_len, num_heads, 576].
        kv: [num_pages, 64, 576], of the dtype of ``q``.
        seq_lens: [batch_size] int32.
        block_table: [batch_size, max_pages_per_seq] int32.
        out: [batch_size, q_len, num_heads, 512], contiguous.
        schedule: of the step.
    """
    batch_size, q_len, num_heads, _ = q.shape
    # The operator's output has rows of a token's heads, one token after the other.
    rows = out.view(batch_size, 1, q_len * num_heads, LATENT_DIM)
    made = torch.ops._flashmla_C.dense_decode_fwd(
        q, kv.unsqueeze(-2), LATENT_DIM, seq_lens, block_table,
        SM_SCALE, True,  # causal
        *schedule.parts, rows,
    )  # fmt: skip
    schedule.parts = made[2], made[3]


def sparse_decode(q: Tensor, rows: Tensor, slots: Tensor, out: Tensor, schedule: Schedule) -> None:
    """Attend by lists over rows of 656 bytes, each query token a request of its own.

    Args:
        q: [num_tokens, 64 or 128, 576] bfloat16.
        rows: [num_pages, page_size, 656] uint8.
        slots: [num_tokens, k] int32: page times page_size plus the place in it.
        out: [num_tokens, heads of q, 512] bfloat16.
        schedule: of the step.
    """
    none = None
    made = torch.ops._flashmla_C.sparse_decode_fwd(
        q.unsqueeze(1), rows.unsqueeze(-2), slots.unsqueeze(1),
        none, none,  # lengths of lists, sinks
        *schedule.parts,
        none, none, none,  # another cache, its lists and their lengths
        LATENT_DIM, SM_SCALE, out.unsqueeze(1),
    )  # fmt: skip
    schedule.parts = made[2], made[3]


def sparse_prefill(q: Tensor, tokens: Tensor, slots: Tensor, out: Tensor) -> None:
    """Attend by lists over 16-bit latents; there is nothing to schedule.

    Args:
        q: [num_tokens, 64 or 128, 576] bfloat16.
        tokens: [num_slots, 576] bfloat16.
        slots: [num_tokens, k] int32.
        out: [num_tokens, heads of q, 512] bfloat16, contiguous.
    """
    none = None
    torch.ops._flashmla_C.sparse_prefill_fwd(
        q, tokens.unsqueeze(1), slots.unsqueeze(1), SM_SCALE, LATENT_DIM,
        none, none,  # sinks, lengths of lists
        out,
    )  # fmt: skip
