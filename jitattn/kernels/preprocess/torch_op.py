"""``preprocess_qkv`` and ``append_kv`` inside a compiled function: ``torch.ops.jitattn``."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from jitattn.kernels.common.torch_op import (
    PAGES,
    cache_tensors,
    define,
    pages_tensors,
    refuse_gradients,
    scale_of,
    scale_parts,
)
from jitattn.kernels.preprocess.api import LAUNCHES
from jitattn.kernels.preprocess.check import PreprocessCall, QkvParts
from jitattn.kernels.preprocess.hadamard import kept_matrix
from jitattn.tensors.page_tables import table_from_tensors
from jitattn.tensors.quantization import cache_of
from jitattn.tensors.rope import Rope
from jitattn.tensors.tensor_handles import find

__all__ = ["append_kv", "preprocess_qkv"]

_PLACES = f"{PAGES}Tensor? seq_lens, Tensor? qo_indptr, Tensor? slots, "
_KV_SCALES = "Tensor? k_scale, float? k_factor, Tensor? v_scale, float? v_factor, "
_WRITTEN = "str kv_layout, str? kv_dtype, bool zero_tail) -> ()"


# fmt: off
def preprocess_qkv(
    qkv: list[Tensor], kv_cache: list[Tensor], q_out: Tensor,
    num_qo_heads: int, num_kv_heads: int, head_dim: int,
    pages: list[Tensor], page_table: str | None, seq_lens: Tensor | None,
    qo_indptr: Tensor | None, slots: Tensor | None,
    rope: Tensor | None, positions: Tensor | None, position_delta: Tensor | None,
    bias: list[Tensor], q_norm: Tensor | None, k_norm: Tensor | None, norm_eps: float,
    q_scale: Tensor | None, q_factor: float | None, k_scale: Tensor | None,
    k_factor: float | None, v_scale: Tensor | None, v_factor: float | None,
    qk_transform: str | None, v_transform: str | None,
    kv_layout: str, kv_dtype: str | None, zero_tail: bool,
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
        qk_transform: "hadamard", or none.
        v_transform: likewise.
        kv_layout: "NHD" or "HND".
        kv_dtype: the name of what the bytes of a uint8 cache are.
        zero_tail: write zeros after a request's last token.

    Raises:
        TypeError, ValueError: as ``preprocess_qkv``, or a handle of nothing that lives.
    """
    LAUNCHES.run(PreprocessCall(
        _one_or_parts(qkv), cache_of(kv_cache), table_from_tensors(pages, page_table), seq_lens,
        qo_indptr, slots, kv_layout, kv_dtype, scale_of(k_scale, k_factor),
        scale_of(v_scale, v_factor), zero_tail, num_qo_heads, num_kv_heads, head_dim,
        _rope_of(rope), positions, position_delta, _one_or_parts(bias) if bias else None,
        q_norm, k_norm, norm_eps, q_out, scale_of(q_scale, q_factor), qk_transform, v_transform,
    ))
# fmt: on


def _one_or_parts(tensors: list[Tensor]) -> Tensor | QkvParts:
    """Return the tensor, or those of q, k and v."""
    return tensors[0] if len(tensors) == 1 else (tensors[0], tensors[1], tensors[2])


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
    LAUNCHES.run(
        PreprocessCall(
            qkv=(k, v),
            kv_cache=cache_of(kv_cache),
            pages=table_from_tensors(pages, page_table),
            seq_lens=seq_lens,
            qo_indptr=qo_indptr,
            slots=slots,
            kv_layout=kv_layout,
            kv_dtype=kv_dtype,
            k_scale=scale_of(k_scale, k_factor),
            v_scale=scale_of(v_scale, v_factor),
            zero_tail=zero_tail,
        )
    )


define(
    preprocess_qkv,
    "Tensor[] qkv, Tensor(a!)[] kv_cache, Tensor(b!) q_out, int num_qo_heads, int num_kv_heads, "
    f"int head_dim, {_PLACES}Tensor? rope, Tensor? positions, Tensor? position_delta, "
    "Tensor[] bias, Tensor? q_norm, Tensor? k_norm, float norm_eps, Tensor? q_scale, "
    f"float? q_factor, {_KV_SCALES}str? qk_transform, str? v_transform, {_WRITTEN}",
)
define(
    append_kv,
    f"Tensor k, Tensor v, Tensor(a!)[] kv_cache, {_PLACES}{_KV_SCALES}{_WRITTEN}",
)


def _rope_of(handle: Tensor | None) -> Rope | None:
    return None if handle is None else cast(Rope, find("rope", handle, "Rope"))


def trace_preprocess(call: PreprocessCall) -> Tensor:
    """Put a ``preprocess_qkv`` into the graph."""
    qkv, bias, rope, q_out = call.qkv, call.bias, call.rope, call.q_out
    parts = [qkv] if isinstance(qkv, Tensor) else list(qkv)
    biases = [] if bias is None else [bias] if isinstance(bias, Tensor) else list(bias)
    refuse_gradients(
        _named("qkv", parts)
        | _named("bias", biases)
        | {"q_norm": call.q_norm, "k_norm": call.k_norm}
    )
    if q_out is None:
        assert call.num_qo_heads is not None
        assert call.head_dim is not None
        shape = parts[0].shape[0], call.num_qo_heads, call.head_dim
        q_out = torch.empty(shape, dtype=parts[0].dtype, device=parts[0].device)
    torch.ops.jitattn.preprocess_qkv(
        parts, cache_tensors(call.kv_cache, call.pages)[0], q_out,
        call.num_qo_heads, call.num_kv_heads, call.head_dim,
        *_places(call), None if rope is None else rope.handle, call.positions,
        call.position_delta, biases, call.q_norm, call.k_norm, float(call.norm_eps),
        *scale_parts(call.q_scale), *_scales(call), call.qk_transform, call.v_transform,
        *_written(call),
    )  # fmt: skip
    return q_out


def _named(name: str, tensors: list[Tensor]) -> dict[str, Tensor | None]:
    """Return an argument's tensors, with numbers where it has several."""
    if len(tensors) == 1:
        return {name: tensors[0]}
    return {f"{name}[{i}]": tensor for i, tensor in enumerate(tensors)}


def trace_append(call: PreprocessCall) -> None:
    """Put an ``append_kv`` into the graph."""
    k, v, *_ = call.qkv
    refuse_gradients({"k": k, "v": v})
    cache = cache_tensors(call.kv_cache, call.pages)[0]
    torch.ops.jitattn.append_kv(k, v, cache, *_places(call), *_scales(call), *_written(call))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def constant_matrix(dim: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a Hadamard matrix, which a graph holds: it would make it at every call."""
    return kept_matrix(dim, device, dtype)


def _places(call: PreprocessCall) -> tuple[Any, ...]:
    return *pages_tensors(call.pages), call.seq_lens, call.qo_indptr, call.slots


def _scales(call: PreprocessCall) -> tuple[Any, ...]:
    return *scale_parts(call.k_scale), *scale_parts(call.v_scale)


def _written(call: PreprocessCall) -> tuple[Any, ...]:
    kv_dtype = call.kv_dtype
    if isinstance(kv_dtype, torch.dtype):
        kv_dtype = str(kv_dtype).removeprefix("torch.")
    return call.kv_layout, kv_dtype, call.zero_tail
