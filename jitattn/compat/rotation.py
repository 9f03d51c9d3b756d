"""Rotary embeddings by tables of cosines and sines, where a caller's package turns by itself."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Turn the first elements of each head.

    Args:
        x: [.., num_heads, head_dim].
        cos: float32 [.., rotary_dim / 2], of each token; sums are in float32.
        sin: likewise.
        interleaved: pairs are neighbours; False: rotary_dim / 2 apart.

    Returns:
        A tensor like ``x``.
    """
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    rotary_dim = 2 * cos.shape[-1]
    turned = x[..., :rotary_dim].float()
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    pairs = a * cos - b * sin, a * sin + b * cos
    turned = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
    return torch.cat((turned.to(x.dtype), x[..., rotary_dim:]), dim=-1)
