"""The definition of multi-head latent attention, in float64 PyTorch.

Written from the definition alone: it imports nothing, not even the definition of attention.

Query row i of a request with q_len queries and kv_len keys sits at p = kv_len - q_len + i. It sees
key j iff 0 <= j < kv_len, and j <= p when causal. Each token has a latent, which all heads share
and which is its value too, and a rope part:
score = sm_scale * (q_nope . latent + q_pe . rope), or what a variant makes of it;
lse = ln(sum of exp(score) over visible keys); out = sum of exp(score - lse) * latent. A row that
sees no key, or whose scores are all -inf, has out 0 and lse -inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

_MAX_SCORES = 1 << 26
"""Scores held at once (512 MiB of float64); long requests are computed some rows at a time."""


def latent_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    latent: Tensor,
    rope: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    transform: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend the queries of one request to its tokens.

    Args:
        q_nope: [q_len, num_heads, kv_lora_rank], any dtype and strides: queries with the
            projection that makes keys of latents multiplied in.
        q_pe: [q_len, num_heads, qk_rope_head_dim], turned by the rotary embedding.
        latent: [kv_len, kv_lora_rank].
        rope: [kv_len, qk_rope_head_dim].
        causal: the last query is aligned with the last key.
        sm_scale: multiplies the sum of both products.
        transform: changes scores [num_rows, num_heads, num_keys]; it gets positions of queries and
            of keys, too, which broadcast with them.

    Returns:
        out [q_len, num_heads, kv_lora_rank] and lse [q_len, num_heads] (natural logarithm), both
        float64. Keys that a row can't see don't reach it, whatever they hold; a visible NaN does.
    """
    q_len, num_heads, _ = q_nope.shape
    kv_len = latent.shape[0]
    out = torch.zeros(q_nope.shape, dtype=torch.float64, device=q_nope.device)
    lse = torch.full((q_len, num_heads), -math.inf, dtype=torch.float64, device=q_nope.device)
    latent, rope = latent.double(), rope.double()
    # Rows that see the same keys, which are the first ones, at a time: one row when causal.
    step = 1 if causal else max(1, _MAX_SCORES // max(1, num_heads * kv_len))
    for start in range(0, q_len, step):
        rows = slice(start, min(start + step, q_len))
        num_visible = min(max(kv_len - q_len + start + 1, 0), kv_len) if causal else kv_len
        if num_visible == 0:
            continue
        keys = latent[:num_visible]
        products = q_nope[rows].double() @ keys.T + q_pe[rows].double() @ rope[:num_visible].T
        scores = sm_scale * products
        if transform is not None:
            positions = kv_len - q_len + torch.arange(rows.start, rows.stop, device=latent.device)
            indices = torch.arange(num_visible, device=latent.device)
            scores = transform(scores, positions[:, None, None], indices)
        lse[rows] = torch.logsumexp(scores, dim=-1)
        is_empty = lse[rows, :, None] == -math.inf
        out[rows] = torch.softmax(scores.masked_fill(is_empty, 0.0), dim=-1) @ keys
        out[rows].masked_fill_(is_empty, 0.0)
    return out, lse
