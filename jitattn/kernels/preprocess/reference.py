"""The definition of ``preprocess_qkv`` and ``append_kv``, in float64 PyTorch.

A row of Q, K or V gets its bias, is scaled to a mean square of 1 and by the weights of its norm (Q
and K), is turned by its position (Q and K), is multiplied by a Hadamard matrix where that is asked
for, and is rounded to the type of qkv. That is stored: as it is, or as
``quantization.quantize_kv`` says. So one call stores what several would, one after
the other. What nothing is done to keeps its bits.

Written from the definition alone: it knows nothing of the kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from jitattn.base.validate import check_number
from jitattn.kernels.preprocess.check import TokenCall
from jitattn.kernels.preprocess.hadamard import hadamard_transform
from jitattn.spec.dtype import DType
from jitattn.tensors.cache_views import CacheView
from jitattn.tensors.page_table_base import PageTable
from jitattn.tensors.quantization import bytes_of_scales, quantize_kv, saturated
from jitattn.tensors.rope import Rope
from jitattn.tensors.scales import Scale


class Places(NamedTuple):
    """Tokens that count, in the order of rows, and where they lie; -1: K and V are not stored."""

    rows: Tensor  # of q, k and v
    requests: Tensor
    positions: Tensor
    k_slots: Tensor  # page * page_size + place
    v_slots: Tensor


class Steps(NamedTuple):
    """What is done to rows; None: is not."""

    bias: Tensor | None
    norm: Tensor | None
    positions: Tensor | None  # [3, num_rows]
    transform: str | None


def preprocess(call: TokenCall) -> Tensor | None:
    """Write K and V into the cache, and return q; None where there is none.

    Rows of q that don't count stay as they are in ``q_out``, and are undefined in a new tensor.
    """
    given = call.given
    places = places_of(call)
    rows = places.rows
    biases = [None] * 3 if call.biases is None else list(call.biases)
    positions, qk_transform = _rotary_positions(call, places), given.qk_transform
    out = None
    if call.q is not None:
        out = given.q_out
        if out is None:
            out = torch.empty(call.q.shape, dtype=call.q.dtype, device=call.device)
        q = _computed(call.q[rows], call, Steps(biases[0], given.q_norm, positions, qk_transform))
        out[rows] = _stored(q, DType.of(out.dtype), call.q_scale)[0]
    k = _computed(call.k[rows], call, Steps(biases[1], given.k_norm, positions, qk_transform))
    v = _computed(call.v[rows], call, Steps(biases[2], None, None, given.v_transform))
    _write(call.k_cache, call.k_blocks, _stored(k, call.kv_dtype, call.k_scale), places.k_slots)
    _write(call.v_cache, call.v_blocks, _stored(v, call.kv_dtype, call.v_scale), places.v_slots)
    if given.zero_tail:
        _zero_tails(call, places)
    return out


def places_of(call: TokenCall) -> Places:
    """Return which tokens count, and where they lie."""
    given = call.given
    if given.seq_lens is None:
        return _places_of_slots(call)
    lengths = given.seq_lens.tolist()
    starts = range(len(lengths) + 1) if given.qo_indptr is None else given.qo_indptr.tolist()
    rows, requests, positions = [], [], []
    for b, length in enumerate(lengths):
        if length <= 0:
            continue
        for row in range(starts[b], starts[b + 1]):
            rows.append(row)
            requests.append(b)
            positions.append(length - (starts[b + 1] - row))
    where = _integers(rows), _integers(requests), _integers(positions)
    if given.slots is not None:
        slots = given.slots.long()[where[0]]
        return Places(*where, slots, slots)
    assert given.pages is not None
    found = [
        _slots_in(given.pages, b, p, call.page_size)
        for b, p in zip(requests, positions, strict=True)
    ]
    k_slots, v_slots = (_integers([pair[i] for pair in found]) for i in range(2))
    for name, view, slots in (("K", call.k_cache, k_slots), ("V", call.v_cache, v_slots)):
        end = view.tensor.shape[0] * call.page_size
        if bool((slots >= end).any()):
            raise ValueError(
                f"pages lists page {int(slots.max()) // call.page_size} for {name}: "
                f"the cache has {view.tensor.shape[0]}"
            )
    return Places(*where, k_slots, v_slots)


def _integers(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def _places_of_slots(call: TokenCall) -> Places:
    given = call.given
    assert given.slots is not None
    num_rows = call.num_tokens
    if given.qo_indptr is not None:
        num_rows = int(given.qo_indptr[-1])
    rows = torch.arange(num_rows, device="cpu")
    slots = given.slots.long()[:num_rows]
    return Places(rows, torch.zeros_like(rows), torch.zeros_like(rows), slots, slots)


def _slots_in(pages: PageTable, request: int, position: int, page_size: int) -> tuple[int, int]:
    k_slot, v_slot = (pages.locate(request, position, page_size, which=i) for i in range(2))
    return (-1, -1) if min(k_slot, v_slot) < 0 else (k_slot, v_slot)


def _rotary_positions(call: TokenCall, places: Places) -> Tensor | None:
    """Return int64 [3, rows]: the positions of each axis."""
    given = call.given
    if given.rope is None:
        return None
    if given.positions is not None:
        return given.positions.long()[..., places.rows].expand(3, -1)
    positions = places.positions
    if given.position_delta is not None:
        positions = positions + given.position_delta.long()[places.requests]
    return positions.expand(3, -1)


def _computed(values: Tensor, call: TokenCall, steps: Steps) -> Tensor:
    """Return rows [num_rows, num_heads, dim] in their own type."""
    bias, norm, positions, transform = steps
    if all(step is None for step in steps):
        return values
    x = values.double()
    if bias is not None:
        x = x + bias.double().reshape(x.shape[1:])
    if norm is not None:
        mean_square = x.square().mean(dim=-1, keepdim=True)
        x = x / (mean_square + check_number("norm_eps", call.given.norm_eps)).sqrt() * norm.double()
    if positions is not None:
        assert call.given.rope is not None
        x = rotate(x, call.given.rope, positions)
    if transform is not None:
        x = hadamard_transform(x)
    return saturated(x, values.dtype)


def rotate(x: Tensor, rope: Rope, positions: Tensor) -> Tensor:
    """Turn the pairs of float64 [num_rows, num_heads, head_dim] by positions [3, num_rows]."""
    axes = torch.tensor(rope.axes or [0] * len(rope.inv_freq), device="cpu")
    angles = positions[axes].T.double() * rope.inv_freq.double()  # [num_rows, pairs]
    cos, sin = (f(angles)[:, None] * rope.attention_factor for f in (torch.cos, torch.sin))
    half = rope.rotary_dim // 2
    if rope.interleaved:
        first, second = slice(0, rope.rotary_dim, 2), slice(1, rope.rotary_dim, 2)
    else:
        first, second = slice(0, half), slice(half, rope.rotary_dim)
    a, b = x[..., first], x[..., second]
    turned = x.clone()
    turned[..., first] = a * cos - b * sin
    turned[..., second] = b * cos + a * sin
    return turned


def _stored(values: Tensor, dtype: DType, scale: Scale) -> tuple[Tensor, Tensor | None]:
    """Return what is stored for values, and the scales of blocks."""
    if getattr(torch, dtype.value, None) is values.dtype:
        return values, None
    factor = scale.value if scale.tensor is None else scale.tensor
    stored = quantize_kv(values, dtype.value, scale=factor if dtype.is_quantised else None)
    return stored if isinstance(stored, tuple) else (stored, None)


def _write(
    cache: CacheView,
    blocks: CacheView | None,
    stored: tuple[Tensor, Tensor | None],
    slots: Tensor,
) -> None:
    kept = slots >= 0
    page_size = cache.tensor.shape[1]
    where = slots[kept] // page_size, slots[kept] % page_size
    # As bytes: not every type has an indexed assignment.
    data, scales = stored
    _bits(cache.tensor)[where] = _bits(data)[kept]
    if blocks is not None and scales is not None:
        blocks.tensor[where] = bytes_of_scales(scales)[kept]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8 if tensor.element_size() == 1 else torch.int16)


def _zero_tails(call: TokenCall, places: Places) -> None:
    page_size = call.page_size
    lasts = {int(b): i for i, b in enumerate(places.requests)}
    sides = (
        (call.k_cache, call.k_blocks, places.k_slots),
        (call.v_cache, call.v_blocks, places.v_slots),
    )
    for cache, blocks, slots in sides:
        for i in lasts.values():
            slot = int(slots[i])
            if slot < 0:
                continue
            page, place = divmod(slot, page_size)
            for view in (cache, blocks):
                if view is not None:
                    _bits(view.tensor)[page, place + 1 :] = 0
