"""The right answer, and how far an output may be from it. What is wrong is never timed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from bench.workloads import Batch
from jitattn.kernels.attention.reference import attention
from jitattn.kernels.common.reference_plan import gather
from jitattn.spec.dtype import BLOCK_DTYPES
from jitattn.tensors.quantization import dequantize_kv

LIMITS = {
    **{"bfloat16": 1e-2, "float16": 5e-3, "float8_e4m3fn": 6e-2},
    **dict.fromkeys(BLOCK_DTYPES, 1e-2),
}
"""Largest relative error of a query token, by cache dtype. Rounding an output to bfloat16 costs
2e-3; losing one of 8192 random keys 1e-2. Rivals quantise q and the probabilities to the cache's
FP8; nobody does with four bits: values of NVFP4 are exact in bfloat16, those of int4 are rounded to
float16."""


class Oracle:
    """Expected outputs of a batch, computed once for each copy that is asked for."""

    def __init__(self, batch: Batch) -> None:
        """Remember the batch; nothing is computed yet."""
        self.batch = batch
        self.limit = LIMITS[batch.case.kv_dtype]
        self._expected: dict[int, Tensor] = {}

    def error(self, outs: Tensor) -> float:
        """Return the largest relative error of a query token in the first and the last copy.

        Args:
            outs: [num_copies, batch_size * q_len, num_qo_heads, head_dim]; what was never written
                should hold NaN, which makes the error infinite.
        """
        copies = {0, self.batch.num_copies - 1}
        return max(relative_error(outs[copy], self._of(copy)) for copy in copies)

    def _of(self, copy: int) -> Tensor:
        if copy not in self._expected:
            self._expected[copy] = reference(self.batch, copy)
        return self._expected[copy]


def reference(batch: Batch, copy: int) -> Tensor:
    """Return [batch_size * q_len, num_qo_heads, head_dim] float64, a request at a time."""
    case = batch.case
    queries = batch.q[copy].view(case.batch_size, case.q_len, *batch.q.shape[2:])
    outs = []
    for q, length, pages in zip(queries, case.seq_lens, batch.block_table, strict=True):
        k, v = _tokens(batch, copy, pages, length)
        outs.append(attend(q, k, v, window_left=case.window_left, sinks=batch.sinks))
    return torch.cat(outs)


def _tokens(batch: Batch, copy: int, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return K and V of a request, [length, num_kv_heads, head_dim]; of four bits its values."""
    k, v = (gather(side, pages, length) for side in batch.tokens_first(copy))
    blocks = batch.scales_first(copy)
    if blocks is None:
        return k, v
    case = batch.case
    k_scales, v_scales = (gather(side, pages, length) for side in blocks)
    return (
        dequantize_kv(k, dtype=case.kv_dtype, block_scales=k_scales),
        dequantize_kv(v, dtype=case.kv_dtype, block_scales=v_scales),
    )


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, window_left: int = -1, sinks: Tensor | None = None
) -> Tensor:
    """Return what the last query tokens of a request see, [q_len, num_qo_heads, head_dim] float64.

    Args:
        q: [q_len, num_qo_heads, head_dim].
        k: [kv_len, num_kv_heads, head_dim].
        v: likewise.
        window_left: as of a planner.
        sinks: [num_qo_heads] or None.
    """
    out, _ = attention(
        q,
        k,
        v,
        [0, q.shape[0]],
        [0, k.shape[0]],
        causal=True,
        window_left=window_left,
        logits_soft_cap=0.0,
        sm_scale=q.shape[-1] ** -0.5,
        sinks=sinks,
    )
    return out


def relative_error(out: Tensor, expected: Tensor) -> float:
    """Return the largest |out - expected| / |expected| of a token; infinite where not finite.

    A token that sees no key has none where its output is 0, too.

    Args:
        out: [num_tokens, num_qo_heads, head_dim].
        expected: like out, float64.
    """
    difference = (out.double() - expected).flatten(1).norm(dim=1)
    scale = expected.flatten(1).norm(dim=1)
    scale[(scale == 0) & (difference == 0)] = 1
    worst = float((difference / scale).max())
    return worst if worst < float("inf") else float("inf")


_SAMPLED_ROWS = 16  # of a request


class _SampledCase(Protocol):
    @property
    def kv_dtype(self) -> str: ...

    @property
    def q_lens(self) -> Sequence[int]: ...


class _SampledInputs(Protocol):
    @property
    def case(self) -> _SampledCase: ...

    @property
    def qo_indptr(self) -> Tensor: ...


AnyInputs = TypeVar("AnyInputs", bound=_SampledInputs)


class SampledOracle(Generic[AnyInputs]):
    """Expected outputs of sampled rows, computed once for the first and the last copy."""

    def __init__(self, inputs: AnyInputs) -> None:
        """Remember the inputs; nothing is computed yet."""
        self.inputs = inputs
        self.limit = LIMITS[inputs.case.kv_dtype]
        self._known: dict[int, Tensor] = {}
        self.rows: list[int] = []
        for q_len, start in zip(inputs.case.q_lens, inputs.qo_indptr.tolist(), strict=False):
            self.rows += [start + row for row in sampled_rows(q_len)]

    def error(self, outs: Tensor) -> float:
        """Return the largest relative error of a sampled row; infinite where it isn't finite."""
        copies = {0, outs.shape[0] - 1}
        return max(relative_error(outs[copy, self.rows], self.expected(copy)) for copy in copies)

    def expected(self, copy: int) -> Tensor:
        """Return the sampled rows of a copy, one request after the other, in float64."""
        if copy not in self._known:
            requests = range(len(self.inputs.case.q_lens))
            self._known[copy] = torch.cat([self._request(copy, b) for b in requests])
        return self._known[copy]

    def _request(self, copy: int, b: int) -> Tensor:
        """Return the sampled rows of one request."""
        raise NotImplementedError


def sampled_rows(q_len: int) -> list[int]:
    """Rows of a request that are compared: the first, the last and some between."""
    step = max(1, q_len // (_SAMPLED_ROWS - 2))
    return sorted({0, q_len - 1, *range(step // 2, q_len, step)})
