"""Calls inside a compiled function: objects become tensors for the operators of ``jitattn.kernels.common.operators``.

TorchDynamo traces what is here, so it reads attributes and makes tensors, and nothing else: what
arguments hold is checked when the operator runs. Nothing here is reached by eager calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from jitattn.kernels.common import operators
from jitattn.kernels.preprocess.check import Arguments
from jitattn.tensors.cache_views import view_of
from jitattn.tensors.page_table import PageTable
from jitattn.tensors.page_tables import check_view
from jitattn.tensors.quantization import KVCache, QuantizedKV, tensors_of

Scale = float | Tensor
_OPS = torch.ops.jitattn
assert operators is not None  # it defines them


def run_attention(
    plan: Any,
    q: Tensor,
    kv: Any,
    pages: PageTable | None,
    out: Tensor | None,
    lse: Tensor | None,
    return_lse: bool,
    sinks: Tensor | None,
    custom_mask: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Put a ``Plan.run`` into the graph."""
    _refuse_gradients({"q": q, "sinks": sinks})
    config = plan._planner.config
    tensors, handle, k_scale, v_scale = _cache_of(kv, pages)
    mask, indptr = custom_mask if isinstance(custom_mask, tuple) else (custom_mask, None)
    out, lse = _outputs(
        q, config.head_dim_vo or config.head_dim, plan._planner._out_dtype, out, lse, return_lse
    )
    _OPS.attention(
        plan.handle, q, tensors, handle, k_scale, v_scale, *_tensors_of(pages),
        sinks, mask, indptr, out, lse,
    )  # fmt: skip
    if return_lse:
        assert lse is not None
        return out, lse
    return out


def run_mla_attention(
    plan: Any,
    q_nope: Tensor,
    q_pe: Tensor,
    kv: Any,
    pages: PageTable | None,
    out: Tensor | None,
    lse: Tensor | None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Put an ``MLAPlan.run`` into the graph."""
    _refuse_gradients({"q_nope": q_nope, "q_pe": q_pe})
    tensors, handle, k_scale, _ = _cache_of(kv, pages)
    planner = plan._planner
    rank, dtype = planner.config.kv_lora_rank, planner._out_dtype
    out, lse = _outputs(q_nope, rank, dtype, out, lse, return_lse)
    _OPS.mla_attention(
        plan.handle, q_nope, q_pe, tensors, handle, k_scale, *_tensors_of(pages), out, lse
    )
    if return_lse:
        assert lse is not None
        return out, lse
    return out


def preprocess(given: Arguments) -> Tensor | None:
    """Put a ``preprocess_qkv`` into the graph, or an ``append_kv``, which returns None."""
    parts = [given.qkv] if isinstance(given.qkv, Tensor) else list(given.qkv)
    cache = _cache_of(given.kv_cache, given.pages)[0]
    if given.num_qo_heads is None:
        _refuse_gradients({"k": parts[0], "v": parts[1]})
        _OPS.append_kv(*parts, cache, *_places(given), *_written(given))
        return None
    bias, rope, q_out = given.bias, given.rope, given.q_out
    biases = [] if bias is None else [bias] if isinstance(bias, Tensor) else list(bias)
    _refuse_gradients({"qkv": parts[0], "bias": biases[0] if biases else None})
    if q_out is None:
        assert given.head_dim is not None
        shape = parts[0].shape[0], given.num_qo_heads, given.head_dim
        q_out = torch.empty(shape, dtype=parts[0].dtype, device=parts[0].device)
    _OPS.preprocess_qkv(
        parts, cache, q_out, given.num_qo_heads, given.num_kv_heads, given.head_dim,
        *_places(given), None if rope is None else rope.handle, given.positions,
        given.position_delta, biases, given.q_norm, given.k_norm, float(given.norm_eps),
        *_scale(given.q_scale), *_written(given),
    )  # fmt: skip
    return q_out


def merge(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """Put a merge of states into the graph."""
    _refuse_gradients({"outs": outs, "lses": lses})
    _OPS.merge_states(outs, lses, out, lse)


def _cache_of(
    kv: Any, pages: PageTable | None
) -> tuple[list[Tensor], Tensor | None, Tensor | None, Tensor | None]:
    """Return the tensors of a cache; of a bound one its handle and tensors of scales, too."""
    if isinstance(kv, (Tensor, tuple, list, QuantizedKV)):
        if pages is not None:
            check_view(pages, view_of(kv))
        return list(tensors_of(cast(KVCache, kv))), None, None, None
    if pages is not None:
        check_view(pages, getattr(kv, "view", None))
    k, v = kv.k_scale, kv.v_scale
    return (
        list(kv.source),
        kv.handle,
        None if k is None else k.tensor,
        None if v is None else v.tensor,
    )


def _tensors_of(pages: PageTable | None) -> tuple[list[Tensor], str | None]:
    if pages is None:
        return [], None
    return list(pages.tensors), pages.layout.value


def _outputs(
    q: Tensor,
    width: int,
    dtype: torch.dtype,
    out: Tensor | None,
    lse: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    if out is None:
        out = torch.empty((*q.shape[:2], width), dtype=dtype, device=q.device)
    if lse is None and return_lse:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    return out, lse


def _places(given: Arguments) -> tuple[Any, ...]:
    return *_tensors_of(given.pages), given.seq_lens, given.qo_indptr, given.slots


def _written(given: Arguments) -> tuple[Any, ...]:
    kv_dtype = given.kv_dtype
    if isinstance(kv_dtype, torch.dtype):
        kv_dtype = str(kv_dtype).removeprefix("torch.")
    return (
        *_scale(given.k_scale),
        *_scale(given.v_scale),
        given.kv_layout,
        kv_dtype,
        given.zero_tail,
    )


def _scale(scale: Scale | None) -> tuple[Tensor | None, float | None]:
    if scale is None or isinstance(scale, Tensor):
        return scale, None
    return None, float(scale)


def _refuse_gradients(tensors: Mapping[str, Tensor | None]) -> None:
    """Refuse what would be differentiated: there is no backward pass, and eager calls have none."""
    if torch.is_grad_enabled():
        for name, tensor in tensors.items():
            if tensor is not None and tensor.requires_grad:
                raise ValueError(
                    f"{name} requires a gradient, and attention has none here: compile under "
                    "torch.no_grad() or torch.inference_mode()"
                )
