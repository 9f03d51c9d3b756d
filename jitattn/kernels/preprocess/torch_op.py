"""``preprocess_qkv`` and ``append_kv`` inside a compiled function: ``torch.ops.jitattn``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jitattn.kernels.common.torch_op import (
    PAGES,
    cache_of,
    cache_tensors,
    define,
    pages_tensors,
    refuse_gradients,
    scale_of,
    scale_parts,
)
from jitattn.kernels.preprocess.check import Arguments
from jitattn.kernels.preprocess.dispatch import dispatch
from jitattn.tensors.page_tables import table_from_tensors
from jitattn.tensors.tensor_handles import find

__all__ = ["append_kv", "preprocess_qkv"]

_PLACES = f"{PAGES}Tensor? seq_lens, Tensor? qo_indptr, Tensor? slots, "
_KV_SCALES = "Tensor? k_scale, float? k_factor, Tensor? v_scale, float? v_factor, "
_WRITTEN = "str kv_layout, str? kv_dtype, bool zero_tail) -> ()"


def preprocess_qkv(
    qkv: list[Tensor],
    kv_cache: list[Tensor],
    q_out: Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    pages: list[Tensor],
    page_table: str | None,
    seq_lens: Tensor | None,
    qo_indptr: Tensor | None,
    slots: Tensor | None,
    rope: Tensor | None,
    positions: Tensor | None,
    position_delta: Tensor | None,
    bias: list[Tensor],
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    norm_eps: float,
    q_scale: Tensor | None,
    q_factor: float | None,
    k_scale: Tensor | None,
    k_factor: float | None,
    v_scale: Tensor | None,
    v_factor: float | None,
    kv_layout: str,
    kv_dtype: str | None,
    zero_tail: bool,
) -> None:
    """Write tokens: ``torch.ops.jitattn.preprocess_qkv``, with the function's arguments.

    Args:
        qkv: one tensor, or q, k and v.
        kv_cache: as of ``attention``; written.
        q_out: written.
        num_qo_heads: as of ``preprocess_qkv``, like what is not said here.
        num_kv_heads: heads of K and V.
        head_dim: elements of a head.
        pages: ``pages.tensors``, or none.
        page_table: the table's layout, with ``pages``.
        seq_lens: lengths.
        qo_indptr: offsets.
        slots: places.
        rope: ``rope.handle``.
        positions: of tokens.
        position_delta: of requests.
        bias: none, one tensor, or those of q, k and v.
        q_norm: weights.
        k_norm: weights.
        norm_eps: is added to the mean square.
        q_scale: a tensor; or else
        q_factor: a number; or neither. Likewise of K and V.
        k_scale: a tensor.
        k_factor: a number.
        v_scale: a tensor.
        v_factor: a number.
        kv_layout: "NHD" or "HND".
        kv_dtype: the name of what the bytes of a uint8 cache are.
        zero_tail: write zeros after a request's last token.

    Raises:
        TypeError, ValueError: as ``preprocess_qkv``, or a handle of nothing that lives.
    """
    dispatch(
        (
            qkv[0] if len(qkv) == 1 else tuple(qkv), cache_of(kv_cache),
            table_from_tensors(pages, page_table),
            seq_lens, qo_indptr, slots, positions, position_delta,
            None if not bias else bias[0] if len(bias) == 1 else tuple(bias),
            q_norm, k_norm, q_out, scale_of(q_scale, q_factor), scale_of(k_scale, k_factor),
            scale_of(v_scale, v_factor), None if rope is None else find("rope", rope, "Rope"),
            norm_eps, num_qo_heads, num_kv_heads, head_dim, kv_layout, kv_dtype, zero_tail,
        ),
        qkv[0],
    )  # fmt: skip


def append_kv(
    k: Tensor,
    v: Tensor,
    kv_cache: list[Tensor],
    pages: list[Tensor],
    page_table: str | None,
    seq_lens: Tensor | None,
    qo_indptr: Tensor | None,
    slots: Tensor | None,
    k_scale: Tensor | None,
    k_factor: float | None,
    v_scale: Tensor | None,
    v_factor: float | None,
    kv_layout: str,
    kv_dtype: str | None,
    zero_tail: bool,
) -> None:
    """Write K and V: ``torch.ops.jitattn.append_kv``, with the function's arguments.

    Args:
        k: as of ``append_kv``, like what is not said here.
        v: likewise.
        kv_cache: as of ``attention``; written.
        pages: as of ``torch.ops.jitattn.preprocess_qkv``, like what follows.
        page_table: the table's layout.
        seq_lens: lengths.
        qo_indptr: offsets.
        slots: places.
        k_scale: a tensor.
        k_factor: a number.
        v_scale: a tensor.
        v_factor: a number.
        kv_layout: "NHD" or "HND".
        kv_dtype: the name of what the bytes of a uint8 cache are.
        zero_tail: write zeros after a request's last token.

    Raises:
        TypeError, ValueError: as ``append_kv``.
    """
    dispatch(
        (
            (k, v), cache_of(kv_cache), table_from_tensors(pages, page_table), seq_lens, qo_indptr,
            slots,
            None, None, None, None, None, None, None, scale_of(k_scale, k_factor),
            scale_of(v_scale, v_factor), None, 0.0, None, None, None, kv_layout, kv_dtype,
            zero_tail,
        ),
        k,
    )  # fmt: skip


define(
    preprocess_qkv,
    "Tensor[] qkv, Tensor(a!)[] kv_cache, Tensor(b!) q_out, int num_qo_heads, int num_kv_heads, "
    f"int head_dim, {_PLACES}Tensor? rope, Tensor? positions, Tensor? position_delta, "
    "Tensor[] bias, Tensor? q_norm, Tensor? k_norm, float norm_eps, Tensor? q_scale, "
    f"float? q_factor, {_KV_SCALES}{_WRITTEN}",
)
define(
    append_kv,
    f"Tensor k, Tensor v, Tensor(a!)[] kv_cache, {_PLACES}{_KV_SCALES}{_WRITTEN}",
)


def trace_preprocess(given: Arguments) -> Tensor | None:
    """Put a ``preprocess_qkv`` into the graph, or an ``append_kv``, which returns None."""
    parts = [given.qkv] if isinstance(given.qkv, Tensor) else list(given.qkv)
    cache = cache_tensors(given.kv_cache, given.pages)[0]
    if given.num_qo_heads is None:
        refuse_gradients({"k": parts[0], "v": parts[1]})
        torch.ops.jitattn.append_kv(*parts, cache, *_places(given), *_written(given))
        return None
    bias, rope, q_out = given.bias, given.rope, given.q_out
    biases = [] if bias is None else [bias] if isinstance(bias, Tensor) else list(bias)
    refuse_gradients({"qkv": parts[0], "bias": biases[0] if biases else None})
    if q_out is None:
        assert given.head_dim is not None
        shape = parts[0].shape[0], given.num_qo_heads, given.head_dim
        q_out = torch.empty(shape, dtype=parts[0].dtype, device=parts[0].device)
    torch.ops.jitattn.preprocess_qkv(
        parts, cache, q_out, given.num_qo_heads, given.num_kv_heads, given.head_dim,
        *_places(given), None if rope is None else rope.handle, given.positions,
        given.position_delta, biases, given.q_norm, given.k_norm, float(given.norm_eps),
        *scale_parts(given.q_scale), *_written(given),
    )  # fmt: skip
    return q_out


def _places(given: Arguments) -> tuple[Any, ...]:
    return *pages_tensors(given.pages), given.seq_lens, given.qo_indptr, given.slots


def _written(given: Arguments) -> tuple[Any, ...]:
    kv_dtype = given.kv_dtype
    if isinstance(kv_dtype, torch.dtype):
        kv_dtype = str(kv_dtype).removeprefix("torch.")
    return (
        *scale_parts(given.k_scale),
        *scale_parts(given.v_scale),
        given.kv_layout,
        kv_dtype,
        given.zero_tail,
    )
