"""The definition of attention, in float64 PyTorch.

Owns what ``out`` and ``lse`` mean. The tests compare kernels with it, and the planner's reference
backend runs it. It is written from the definition alone: it imports nothing from the planner or
the kernels, and knows nothing of tiles, splits or page tables.

Query row i of a request with q_len queries and kv_len keys sits at p = kv_len - q_len + i. It sees
key j iff 0 <= j < kv_len, and j <= p when causal, and j >= p - window_left when window_left >= 0.
score = sm_scale * q.k, then cap * tanh(score / cap) with a soft cap, then what a variant makes of
it; the mask comes last.
lse = ln(sum of exp(score) over visible keys + exp(sink)); out = sum of exp(score - lse) * v.
A row that sees no key has out 0 and lse -inf, or lse = sink with a sink.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

_MAX_SCORES = 1 << 26
"""Scores held at once (512 MiB of float64); long requests are computed some rows at a time."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qo_indptr: Tensor | Sequence[int],
    kv_indptr: Tensor | Sequence[int],
    *,
    causal: bool,
    window_left: int,
    logits_soft_cap: float,
    sm_scale: float,
    sinks: Tensor | None = None,
    masks: Sequence[Tensor] | None = None,
    transform: Callable[[int, Tensor, Tensor, Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend every query of a ragged batch to the keys of its request.

    Args:
        q: [num_tokens, num_qo_heads, head_dim_qk], any dtype and strides.
        k: [num_kv_tokens, num_kv_heads, head_dim_qk]; num_kv_heads divides num_qo_heads.
        v: [num_kv_tokens, num_kv_heads, head_dim_vo].
        qo_indptr: [batch_size + 1], rows of q that start each request.
        kv_indptr: [batch_size + 1], rows of k and v that start each request.
        causal: the last query of a request is aligned with its last key.
        window_left: keys visible to the left of a query; 0 is itself alone, -1 is all.
        logits_soft_cap: 0 is off.
        sm_scale: multiplies q.k.
        sinks: [num_qo_heads], logits that enter the denominator only.
        masks: for each request bool [q_len, kv_len], which keys a query may see besides.
        transform: changes scores: of a request, its scores [num_rows, num_qo_heads, num_keys],
            and positions of queries and of keys that broadcast with them. Those of keys that a row
            doesn't see are its own.

    Returns:
        out [num_tokens, num_qo_heads, head_dim_vo] and lse [num_tokens, num_qo_heads] (natural
        logarithm), both float64 on the device of q. Rows past qo_indptr[-1]: out 0, lse -inf.
        Keys that a row can't see don't reach it, whatever they hold; a visible NaN does.
    """
    q_starts, kv_starts = _to_ints(qo_indptr), _to_ints(kv_indptr)
    num_qo_heads = q.shape[1]
    out = q.new_zeros((q.shape[0], num_qo_heads, v.shape[2]), dtype=torch.float64)
    lse = q.new_full((q.shape[0], num_qo_heads), -math.inf, dtype=torch.float64)
    sink = None if sinks is None else sinks.to(q.device, torch.float64)
    for b, start, stop, kv_start, kv_len in _row_blocks(q_starts, kv_starts, num_qo_heads):
        # The position of row i is kv_len - q_len + i: the last row sits at kv_len - 1.
        first_position = kv_len - (q_starts[b + 1] - start)
        low, high = _visible_span(first_position, stop - start, kv_len, causal, window_left)
        keys = slice(kv_start + low, kv_start + high)
        positions = torch.arange(first_position, first_position + stop - start, device=q.device)
        indices = torch.arange(low, high, device=q.device)
        visible = _visible(positions, indices, causal, window_left)
        if masks is not None:
            visible &= masks[b][start - q_starts[b] : stop - q_starts[b], low:high].to(q.device)
        scores = _scores(q[start:stop], k[keys], sm_scale, logits_soft_cap)
        if transform is not None:
            own = positions[:, None, None]
            places = torch.where(visible[:, None, :], indices, own.clamp(min=0))
            scores = transform(b, scores.flatten(1, 2), own, places).reshape(scores.shape)
        out[start:stop], lse[start:stop] = _softmax(scores, visible, v[keys], sink)
    return out, lse


def _row_blocks(
    q_starts: list[int], kv_starts: list[int], num_qo_heads: int
) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield rows computed at once: request, rows, where its keys begin, their number."""
    if len(q_starts) != len(kv_starts):
        raise ValueError(f"qo_indptr has {len(q_starts)} entries, kv_indptr {len(kv_starts)}")
    for b in range(len(q_starts) - 1):
        q_start, q_stop = q_starts[b], q_starts[b + 1]
        kv_start, kv_len = kv_starts[b], kv_starts[b + 1] - kv_starts[b]
        step = max(1, _MAX_SCORES // max(1, kv_len * num_qo_heads))
        for start in range(q_start, q_stop, step):
            yield b, start, min(start + step, q_stop), kv_start, kv_len


def _to_ints(indptr: Tensor | Sequence[int]) -> list[int]:
    values = indptr.tolist() if isinstance(indptr, Tensor) else indptr
    return [int(value) for value in values]


def _visible_span(
    first_position: int, num_rows: int, kv_len: int, causal: bool, window_left: int
) -> tuple[int, int]:
    """The half-open range of keys that at least one of the rows sees; possibly empty."""
    low = max(0, first_position - window_left) if window_left >= 0 else 0
    high = min(kv_len, first_position + num_rows) if causal else kv_len
    low = min(low, max(kv_len, 0))
    return low, max(low, high)


def _visible(positions: Tensor, keys: Tensor, causal: bool, window_left: int) -> Tensor:
    """The mask [num_rows, num_keys] of the definition."""
    distance = positions[:, None] - keys[None, :]
    visible = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        visible &= distance >= 0
    if window_left >= 0:
        visible &= distance <= window_left
    return visible


def _scores(q: Tensor, k: Tensor, sm_scale: float, logits_soft_cap: float) -> Tensor:
    """Capped logits [num_rows, num_kv_heads, group_size, num_keys] before the mask."""
    num_rows, num_qo_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    grouped = q.double().reshape(num_rows, num_kv_heads, num_qo_heads // num_kv_heads, head_dim)
    scores = torch.einsum("rhgd,khd->rhgk", grouped, k.double()) * sm_scale
    if logits_soft_cap > 0:
        scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
    return scores


def _softmax(
    scores: Tensor, visible: Tensor, v: Tensor, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Out and lse of some rows, with rows that see nothing as the definition wants them."""
    num_rows, num_kv_heads, group_size, _ = scores.shape
    num_qo_heads = num_kv_heads * group_size
    mask = visible[:, None, None, :]
    scores = scores.masked_fill(~mask, -math.inf)
    empty = scores.new_full((num_rows, num_kv_heads, group_size, 1), -math.inf)
    logit = empty if sink is None else sink.reshape(num_kv_heads, group_size, 1).expand_as(empty)
    peak = torch.cat((scores, logit), dim=-1).amax(dim=-1, keepdim=True)
    # -inf - -inf would be NaN: rows without any weight are shifted by nothing.
    shift = peak.masked_fill(peak == -math.inf, 0.0)
    weights = torch.exp(scores - shift)
    total = weights.sum(dim=-1, keepdim=True) + torch.exp(logit - shift)
    lse = (shift + torch.log(total)).reshape(num_rows, num_qo_heads)
    weights = weights / total.masked_fill(total == 0.0, 1.0)
    out = _weigh(weights, visible, v.double()).reshape(num_rows, num_qo_heads, v.shape[2])
    return out, lse


def _weigh(weights: Tensor, visible: Tensor, v: Tensor) -> Tensor:
    """Sum weights * v over visible keys only: an invisible NaN in v must not count as 0 * NaN."""
    unfit = ~torch.isfinite(v)
    out = torch.einsum("rhgk,khd->rhgd", weights, v.masked_fill(unfit, 0.0))
    if bool(unfit.any()):
        seen = torch.einsum("rk,khd->rhd", visible.double(), unfit.double()) > 0
        out = out.masked_fill(seen[:, :, None, :], math.nan)
    return out
