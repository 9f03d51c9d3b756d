"""Operators that ``torch.compile`` puts into its graphs: ``torch.ops.jitattn``.

Inside a compiled function ``Plan.run``, ``MLAPlan.run``, ``preprocess_qkv`` and ``append_kv`` are
calls of these; elsewhere they go past the dispatcher. Plans, bound caches and rotary embeddings
come as handles, tables as their tensors. What an operator writes it is given, and declares.

Importing this module defines the operators. It knows no planner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from jitattn.kernels.merge import launch as merge_launch
from jitattn.kernels.preprocess import dispatch
from jitattn.tensors.page_tables import (
    table_from_tensors,
)
from jitattn.tensors.quantization import KVCache, QuantizedKV
from jitattn.tensors.tensor_checks import check_rows
from jitattn.tensors.tensor_handles import find

__all__ = ["append_kv", "attention", "merge_states", "mla_attention", "preprocess_qkv"]

_LIBRARY: Any = torch.library.Library("jitattn", "DEF")  # type: ignore[no-untyped-call]

_PLAN = "Tensor plan, "
_CACHE = "Tensor[] kv_cache, Tensor? kv, Tensor? k_scale, "
_PAGES = "Tensor[] pages, str? page_table, "
_OUTPUTS = "Tensor(a!) out, Tensor(b!)? lse) -> ()"
_PLACES = f"{_PAGES}Tensor? seq_lens, Tensor? qo_indptr, Tensor? slots, "
_KV_SCALES = "Tensor? k_scale, float? k_factor, Tensor? v_scale, float? v_factor, "
_WRITTEN = "str kv_layout, str? kv_dtype, bool zero_tail) -> ()"


def attention(
    plan: Tensor,
    q: Tensor,
    kv_cache: list[Tensor],
    kv: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    pages: list[Tensor],
    page_table: str | None,
    sinks: Tensor | None,
    custom_mask: Tensor | None,
    mask_indptr: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Run a plan: ``torch.ops.jitattn.attention``.

    Args:
        plan: ``plan.handle`` of a plan that lives.
        q: as of ``Plan.run``.
        kv_cache: the cache's tensor; or those of K and V; or those of a ``QuantizedKV``: k, v,
            k_block_scales, v_block_scales.
        kv: ``handle`` of what ``bind`` made of the cache; None: it is bound on the spot.
        k_scale: the tensor that the cache was bound with as k_scale, if it was one.
        v_scale: likewise.
        pages: the tensors of a table to read instead of the plan's: ``pages.tensors``; or none.
        page_table: the table's layout, with ``pages``.
        sinks: as of ``Plan.run``.
        custom_mask: likewise; the bytes of a ragged one.
        mask_indptr: of a ragged mask.
        out: likewise; written.
        lse: likewise; written if given.

    Raises:
        TypeError, ValueError: as ``Plan.run``, or a handle of nothing that lives.
    """
    found: Any = find("plan", plan, "Plan")
    bound = _bound(found, kv_cache, kv, "BoundCache", k_scale=k_scale, v_scale=v_scale)
    found.run(
        q,
        bound,
        pages=table_from_tensors(pages, page_table),
        out=out,
        lse=lse,
        sinks=sinks,
        custom_mask=custom_mask if mask_indptr is None else (custom_mask, mask_indptr),
    )


def mla_attention(
    plan: Tensor,
    q_nope: Tensor,
    q_pe: Tensor,
    kv_cache: list[Tensor],
    kv: Tensor | None,
    k_scale: Tensor | None,
    pages: list[Tensor],
    page_table: str | None,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Run a plan of latent attention: ``torch.ops.jitattn.mla_attention``.

    Args:
        plan: ``plan.handle`` of an ``MLAPlan`` that lives.
        q_nope: as of ``MLAPlan.run``.
        q_pe: likewise.
        kv_cache: the cache's tensor, or those of latents and rope parts.
        kv: as of ``attention``, like what follows.
        k_scale: the tensor that the cache was bound with as k_scale, if it was one.
        pages: the tensors of a table to read instead of the plan's, or none.
        page_table: the table's layout.
        out: written.
        lse: written if given.

    Raises:
        TypeError, ValueError: as ``MLAPlan.run``, or a handle of nothing that lives.
    """
    found: Any = find("plan", plan, "MLAPlan")
    bound = _bound(found, kv_cache, kv, "BoundMLACache", k_scale=k_scale)
    found.run(q_nope, q_pe, bound, pages=table_from_tensors(pages, page_table), out=out, lse=lse)


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
    dispatch.dispatch(
        (
            qkv[0] if len(qkv) == 1 else tuple(qkv), _cache(kv_cache),
            table_from_tensors(pages, page_table), seq_lens, qo_indptr, slots, positions,
            position_delta,
            None if not bias else bias[0] if len(bias) == 1 else tuple(bias),
            q_norm, k_norm, q_out, _scale(q_scale, q_factor), _scale(k_scale, k_factor),
            _scale(v_scale, v_factor), None if rope is None else find("rope", rope, "Rope"),
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
    dispatch.dispatch(
        (
            (k, v), _cache(kv_cache), table_from_tensors(pages, page_table), seq_lens, qo_indptr,
            slots, None, None, None, None, None, None, None, _scale(k_scale, k_factor),
            _scale(v_scale, v_factor), None, 0.0, None, None, None, kv_layout, kv_dtype, zero_tail,
        ),
        k,
    )  # fmt: skip


def merge_states(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge states: ``torch.ops.jitattn.merge_states``.

    Args:
        outs: as of ``merge_states``.
        lses: likewise.
        out: [num_tokens, num_heads, head_dim], of the dtype of ``outs``; written.
        lse: float32 [num_tokens, num_heads]; written.

    Raises:
        TypeError, ValueError: as ``merge_states``, or an output doesn't fit.
    """
    merge_launch.check_states(outs, lses)
    check_rows("out", out, tuple(outs.shape[1:]), outs.dtype, outs.device)
    check_rows("lse", lse, tuple(outs.shape[1:3]), torch.float32, outs.device)
    merge_launch.dispatch(outs, lses, out, lse)


# --- what tensors stand for -----------------------------------------------------------------------


def _cache(tensors: Sequence[Tensor]) -> KVCache:
    if len(tensors) == 1:
        return tensors[0]
    if len(tensors) == 2:
        return tensors[0], tensors[1]
    if len(tensors) == 4:
        k, v, k_scales, v_scales = tensors
        return QuantizedKV(k, v, k_scales, v_scales)
    raise ValueError(f"kv_cache has {len(tensors)} tensors: expected 1, 2 (K, V), or 4 of NVFP4")


def _scale(tensor: Tensor | None, factor: float | None) -> float | Tensor | None:
    return factor if tensor is None else tensor


def _bound(
    plan: Any, tensors: Sequence[Tensor], kv: Tensor | None, kind: str, **scales: Tensor | None
) -> object:
    """Return the bound cache of a handle, or bind tensors that are not where its own are.

    A graph may keep a cache that it writes elsewhere until it ends.
    """
    if kv is None:
        return _cache(tensors)
    bound: Any = find("kv", kv, kind)
    given = {name: _own_scale(getattr(bound, name)) for name in scales}
    own = [*bound.source, *(scale for scale in given.values() if isinstance(scale, Tensor))]
    now = [*tensors, *(scale for scale in scales.values() if scale is not None)]
    if len(own) == len(now) and all(map(_lies_like, own, now)):
        return bound
    for name, scale in scales.items():
        given[name] = given[name] if scale is None else scale
    return plan._planner.bind(_cache(tensors), **given)


def _own_scale(scale: Any) -> float | Tensor | None:
    return None if scale is None else _scale(scale.tensor, scale.value)


def _lies_like(one: Tensor, other: Tensor) -> bool:
    return one is other or (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
    )


# --- definitions ----------------------------------------------------------------------------------


def _define(function: Callable[..., None], schema: str) -> None:
    """Define an operator that runs ``function`` on every device, and does nothing to fake tensors.

    A schema, and no annotations, since those of lists that are written are unknown to torch 2.6.
    """
    name = function.__name__
    tags = [torch.Tag.pt2_compliant_tag]
    # Plans change from step to step, and with them what launches read: graphs of torch's own making
    # leave the operators out. Who captures a step captures it whole.
    if hasattr(torch.Tag, "cudagraph_unsafe"):
        tags.append(torch.Tag.cudagraph_unsafe)
    _LIBRARY.define(f"{name}({schema}", tags=tags)
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"jitattn::{name}", _do_nothing, lib=_LIBRARY)


def _do_nothing(*arguments: object) -> None:
    """Say of fake tensors what an operator returns."""


_define(
    attention,
    f"{_PLAN}Tensor q, {_CACHE}Tensor? v_scale, {_PAGES}Tensor? sinks, Tensor? custom_mask, "
    f"Tensor? mask_indptr, {_OUTPUTS}",
)
_define(mla_attention, f"{_PLAN}Tensor q_nope, Tensor q_pe, {_CACHE}{_PAGES}{_OUTPUTS}")
_define(
    preprocess_qkv,
    "Tensor[] qkv, Tensor(a!)[] kv_cache, Tensor(b!) q_out, int num_qo_heads, int num_kv_heads, "
    f"int head_dim, {_PLACES}Tensor? rope, Tensor? positions, Tensor? position_delta, "
    "Tensor[] bias, Tensor? q_norm, Tensor? k_norm, float norm_eps, Tensor? q_scale, "
    f"float? q_factor, {_KV_SCALES}{_WRITTEN}",
)
_define(merge_states, "Tensor outs, Tensor lses, Tensor(a!) out, Tensor(b!) lse) -> ()")
_define(
    append_kv,
    f"Tensor k, Tensor v, Tensor(a!)[] kv_cache, {_PLACES}{_KV_SCALES}{_WRITTEN}",
)
