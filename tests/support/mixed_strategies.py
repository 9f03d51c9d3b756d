"""Random batches of mixed query lengths for hypothesis, over a fixed list of configurations.

A planner is made once for each of `VARIANTS`; query and KV lengths, padding, caches, strides,
masks and what the tokens probe are drawn freely. Most batches are small: the reference takes the
requests one by one, on the device.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from tests.support.cases import (
    BLOCK_KERNELS,
    BYTE_KERNELS,
    KERNELS,
    MASKED_BLOCK_KERNELS,
    MASKED_BYTE_KERNELS,
    MASKED_KERNELS,
    Case,
)
from tests.support.strategies import Example, placed, variant


def _variants() -> tuple[Case, ...]:
    """Every second kernel, the widest, and all with masks: 65 or so."""
    rng = random.Random(5)
    kernels = [kernel for kernel in KERNELS[::2] if kernel.head_dim < 512]
    kernels += [kernel for kernel in KERNELS if kernel.head_dim == 512]
    kernels += (*MASKED_KERNELS, *BYTE_KERNELS[::2], *MASKED_BYTE_KERNELS)
    kernels += (*BLOCK_KERNELS[::2], *MASKED_BLOCK_KERNELS)
    return tuple(variant(kernel, rng) for kernel in kernels)


VARIANTS = _variants()
SM80_VARIANTS = VARIANTS[::3]
"""Those of tests/gpu/test_sm80.py: each makes the driver compile two prefill kernels."""

_EDGES = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129)
_Q_LENS = st.one_of(
    st.just(1),
    st.integers(0, 16),
    st.sampled_from(_EDGES),
    st.integers(0, 200),
)
_KV_LENS = st.one_of(
    st.sampled_from((*_EDGES, 256, 257, 513)),
    st.integers(0, 300),
    st.integers(1, 1500),
    st.sampled_from([0, -1, -(2**31)]),
)
_PAIRS = st.one_of(
    st.tuples(_Q_LENS, _KV_LENS),
    st.tuples(_Q_LENS, st.integers(0, 100)).map(lambda pair: (pair[0], pair[0] + pair[1])),
    st.tuples(st.integers(1, 20), st.integers(1000, 5000)),  # few over many: split
    st.tuples(st.integers(200, 900), st.integers(0, 900)),
)


@st.composite
def examples(draw: st.DrawFn, variants: Sequence[Case] = VARIANTS) -> Example:
    """A mixed batch of a configuration on the list."""
    case = draw(st.sampled_from(variants))
    q_lens, lengths = zip(*draw(st.lists(_PAIRS, min_size=1, max_size=7)), strict=True)
    case = replace(
        case,
        q_lens=q_lens,
        lengths=lengths,
        spare_rows=draw(st.sampled_from([0, 0, 1, 30])),
        mask=draw(st.sampled_from(["bool", "packed", "ragged"])) if case.mask else None,
        mask_width=draw(st.sampled_from([8, 64, 136, 1024])),
    )
    return placed(draw, case)
