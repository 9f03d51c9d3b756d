"""Query tokens of mixed batches: their rows, offsets and masks, and the keys that a row sees.

Everything is computed a batch at a time, so that a GPU makes the inputs of a case in milliseconds.
A mask's bits are random but for what no row may depend on: columns before a request's first key,
rows past the last request, and bits that fill up a byte are set or not, as it happens.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support.cases import Case

CustomMask = Tensor | tuple[Tensor, Tensor]


def row_starts(case: Case) -> list[int]:
    """The first row of q of each request, and where the rows of the last one end."""
    return [0, *itertools.accumulate(case.queries)]


def offsets_of(case: Case, device: torch.device | str) -> Tensor | None:
    """qo_indptr, at a stride for odd seeds; None for one query token a request."""
    if case.q_lens is None:
        return None
    step = 1 + case.seed % 2
    wide = torch.full((len(case.q_lens) + 1, step), 2**31 - 1, dtype=torch.int32, device=device)
    wide[:, 0] = torch.tensor(row_starts(case), dtype=torch.int32)
    return wide[:, 0]


def request_and_place(case: Case, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Request and place in it of every row of q that a request owns."""
    counts = torch.tensor(case.queries, device=device)
    starts = torch.tensor(row_starts(case), device=device)
    request = torch.repeat_interleave(
        torch.arange(len(counts), device=device), counts, output_size=sum(case.queries)
    )
    return request, torch.arange(len(request), device=device) - starts[request]


@dataclass(frozen=True)
class Rows:
    """The rows of q that requests own, and the half-open range of keys that each sees.

    The range follows from causality and the window; a custom mask takes keys out of it.
    """

    request: Tensor
    position: Tensor  # negative for rows before the first key
    first: Tensor
    last: Tensor

    @classmethod
    def of(cls, case: Case, device: torch.device | str) -> Rows:
        request, place = request_and_place(case, device)
        kv_len = torch.tensor([max(0, n) for n in case.lengths], device=device)[request]
        q_len = torch.tensor(case.queries, device=device)[request]
        position = kv_len - q_len + place
        first, last = torch.zeros_like(position), kv_len
        if case.window_left >= 0:
            first = (position - case.window_left).clamp(min=0)
        if case.causal:
            last = torch.minimum(kv_len, position + 1)
        return cls(request, position, first, torch.maximum(first, last))

    @property
    def num_keys(self) -> Tensor:
        """How many keys each row sees."""
        return self.last - self.first


@dataclass(frozen=True)
class MaskOf:
    """A custom mask as ``run`` takes it, and as each request's bool [q_len, kv_len]."""

    given: CustomMask
    seen: list[Tensor]


def make_mask(case: Case, rng: torch.Generator) -> MaskOf | None:
    """A random mask of the case's form, a third of whose bits hide a key."""
    if case.mask is None:
        return None
    if case.mask == "ragged":
        seen = [_random_bits((q, max(0, n)), rng) for q, n in _lengths(case)]
        return MaskOf(ragged_mask(seen, rng), seen)
    bits = _random_bits((case.num_tokens, case.mask_width), rng)
    return mask_of_last_keys(case, bits)


def mask_of_last_keys(case: Case, bits: Tensor) -> MaskOf:
    """The mask whose column ``width - 1`` is each request's last key; it hides no key before.

    Args:
        case: says by ``mask`` whether the bits are given packed, and by ``seed`` at which stride.
        bits: bool [num_tokens, width].
    """
    seen = []
    for start, (q_len, kv_len) in zip(row_starts(case)[:-1], _lengths(case), strict=True):
        rows = torch.ones((q_len, max(0, kv_len)), dtype=torch.bool, device=bits.device)
        covered = min(rows.shape[1], bits.shape[1])
        if covered:
            rows[:, -covered:] = bits[start : start + q_len, -covered:]
        seen.append(rows)
    given = pack(bits) if case.mask == "packed" else bits
    return MaskOf(_padded(given, 5 * (case.seed % 2)), seen)


def ragged_mask(seen: list[Tensor], rng: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """(packed, mask_indptr) of each request's bool [q_len, kv_len].

    With ``rng`` there are bytes between requests and bits past a row's last key, of any value.
    """
    device = seen[0].device
    pieces, starts, end = [], [], 0
    for rows in seen:
        width = -(-rows.shape[1] // 8) * 8
        filled = torch.zeros((rows.shape[0], width), dtype=torch.bool, device=device)
        if rng is not None:
            filled = _random_bits((rows.shape[0], width), rng)
        filled[:, : rows.shape[1]] = rows
        room = 0 if rng is None else 3
        gap = torch.full((room,), 0xA5, dtype=torch.uint8, device=device)
        pieces += [pack(filled).flatten(), gap]
        starts.append(end)
        end += rows.shape[0] * width // 8 + room
    indptr = torch.tensor([*starts, end], dtype=torch.int32, device=device)
    return torch.cat(pieces), indptr


def pack(bits: Tensor) -> Tensor:
    """Bits of bool [rows, 8 n] as uint8 [rows, n], the first in the lowest place."""
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits.unflatten(-1, (-1, 8)) * weights).sum(-1, dtype=torch.uint8)


def _lengths(case: Case) -> list[tuple[int, int]]:
    return list(zip(case.queries, case.lengths, strict=True))


def _random_bits(shape: tuple[int, int], rng: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=rng, device=rng.device) > 1 / 3


def _padded(rows: Tensor, room: int) -> Tensor:
    """The same values with other ones between the rows."""
    wide = rows.new_ones((rows.shape[0], rows.shape[1] + room))
    wide[:, : rows.shape[1]] = rows
    return wide[:, : rows.shape[1]]
