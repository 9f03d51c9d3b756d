"""Hadamard matrices of head dims: which there are, and the signs of their elements. Torch-free.

Of order ``dim`` is the Kronecker product of Paley's matrix of an order that is no power of two (or
of order 1) and Sylvester's of a power of two, 1 or -1 everywhere:

- Sylvester's: -1 where the row's and the column's number share an odd count of bits.
- Paley's of order q + 1, q a prime of 4 n + 3: ones in the row 0, in the column 0 otherwise -1;
  row i, column j from 1 on have 1 where i = j or i - j is a square modulo q, otherwise -1.
- Paley's of order 2 (q + 1), q a prime of 4 n + 1: for each element of the symmetric matrix with
  ones in row and column 0, zeros in the diagonal, and elsewhere 1 where i - j is a square modulo q,
  or else -1: that times ((1, 1), (1, -1)), or for a zero ((1, -1), (-1, -1)).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

# Orders of Paley's matrices, and their primes. 13 * 16 = 208 would need order 52 or 104.
_PRIMES = {12: 11, 20: 19, 28: 13, 36: 17, 44: 43, 60: 59}
_LARGEST = 512  # of heads: what is larger is several


class Hadamard(NamedTuple):
    """A Hadamard matrix, the product of two."""

    dim: int
    order: int  # of Paley's; 1: there is none

    @property
    def factor(self) -> float:
        """What makes the matrix orthogonal."""
        return float(self.dim**-0.5)

    @property
    def row_signs(self) -> tuple[int, ...]:
        """Rows of Paley's matrix; bit j is set where column j has -1."""
        return (0,) if self.order == 1 else _paley_signs(self.order)


def hadamard_of(dim: int) -> Hadamard | None:
    """Return the matrix of a head dim; None where there is none."""
    # By comparison: the dims of traced shapes can be compared, but are no keys.
    return next((matrix for matrix in _MATRICES if matrix.dim == dim), None)


def no_hadamard(dim: int) -> str:
    """Say why there is no matrix."""
    orders = ", ".join(map(str, _PRIMES))
    return (
        f"there is a Hadamard matrix of powers of two, and of {orders} times one, up to "
        f"{_LARGEST}, none of {dim}"
    )


_MATRICES = tuple(
    Hadamard(order << power, order)
    for order in (1, *_PRIMES)
    for power in range(_LARGEST.bit_length())
    if order << power <= _LARGEST
)


@functools.cache
def _paley_signs(order: int) -> tuple[int, ...]:
    q = _PRIMES[order]
    squares = {i * i % q for i in range(1, q)}

    def element(i: int, j: int) -> int:
        """Return 1, -1 or, in the diagonal, 0."""
        if i == j:
            return 0
        if min(i, j) == 0:
            return -1 if j == 0 and q % 4 == 3 else 1
        return 1 if (i - j) % q in squares else -1

    if q % 4 == 3:
        rows = [[element(i, j) or 1 for j in range(order)] for i in range(order)]
    else:
        blocks = {1: ((1, 1), (1, -1)), -1: ((-1, -1), (-1, 1)), 0: ((1, -1), (-1, -1))}
        rows = [
            [blocks[element(i // 2, j // 2)][i % 2][j % 2] for j in range(order)]
            for i in range(order)
        ]
    return tuple(sum(1 << j for j, sign in enumerate(row) if sign < 0) for row in rows)
