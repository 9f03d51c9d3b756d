"""FlashInfer's functions of one request, whose K and V have no pages."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from jitattn.base.validate import type_name
from jitattn.compat.flashinfer.common.arguments import (
    Q_DTYPES,
    Pair,
    check_layout,
    refuse_unbuilt,
)
from jitattn.compat.flashinfer.ragged import BatchPrefillWithRaggedKVCacheWrapper
from jitattn.spec.dtype import dtype_name
from jitattn.tensors.scales import ScaleLike
from jitattn.tensors.tensor_checks import check_tensor

_KV = "[kv_len, num_kv_heads, head_dim], or with HND heads first"
_HALVES = tuple(getattr(torch, name) for name in Q_DTYPES)


def single_decode_with_kv_cache(
    q: Tensor, k: Tensor, v: Tensor, kv_layout: str = "NHD", pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False, q_scale: float | None = None,
    k_scale: ScaleLike | None = None, v_scale: ScaleLike | None = None, window_left: int = -1,
    logits_soft_cap: float | None = None, sm_scale: float | None = None,
    rope_scale: float | None = None, rope_theta: float | None = None, return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attend one query, that of the last key, to the keys of its request.

    ``q`` is [num_qo_heads, head_dim]; ``k`` and ``v`` are [kv_len, num_kv_heads, head_dim] ("HND":
    heads before tokens). Others are as of ``single_prefill_with_kv_cache``.

    Returns:
        out [num_qo_heads, head_dim of V], or (out, lse), lse float32 [num_qo_heads], base 2.

    Raises:
        TypeError, ValueError, ConfigError: naming the argument, before any launch.
    """
    refuse_unbuilt(locals())
    check_tensor("q", q, _HALVES)
    if q.dim() != 2:
        raise ValueError(f"q has shape {list(q.shape)}: expected [num_qo_heads, head_dim]")
    wrapper = _planned(
        q[None], k, v, kv_layout, causal=True, window_left=window_left,
        logits_soft_cap=logits_soft_cap, sm_scale=sm_scale,
    )  # fmt: skip
    found = wrapper.run(
        q[None], k, v, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse
    )
    return found[0] if isinstance(found, Tensor) else (found[0][0], found[1][0])


def single_prefill_with_kv_cache(
    q: Tensor, k: Tensor, v: Tensor, scale_q: Tensor | None = None, scale_k: Tensor | None = None,
    scale_v: Tensor | None = None, o_dtype: torch.dtype | None = None,
    custom_mask: Tensor | None = None, packed_custom_mask: Tensor | None = None,
    causal: bool = False, kv_layout: str = "NHD", pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False, sm_scale: float | None = None, window_left: int = -1,
    logits_soft_cap: float | None = None, rope_scale: float | None = None,
    rope_theta: float | None = None, backend: str = "auto", return_lse: bool = False,
    kv_cache_sf: Pair | None = None, k_scale: ScaleLike | None = None,
    v_scale: ScaleLike | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attend the queries of one request to its keys; query i of n sits at kv_len - n + i.

    Args:
        q: [qo_len, num_qo_heads, head_dim], float16 or bfloat16.
        k: [kv_len, num_kv_heads, head_dim] ("HND": heads before tokens), any strides but the last;
            like ``q``, FP8, or uint8 for NVFP4 with head_dim / 2 bytes.
        v: likewise; its heads may have another size.
        scale_q: refused unless None: q is not quantised.
        scale_k: of FP8: float32 [num_kv_heads], what stored keys are multiplied with.
        scale_v: likewise.
        o_dtype: float16, bfloat16 or float32; None: that of ``q``.
        custom_mask: bool [qo_len, kv_len], instead of ``causal``.
        packed_custom_mask: uint8, its bits from the lowest up.
        causal: queries see no later keys.
        kv_layout: "NHD" or "HND".
        pos_encoding_mode: "NONE"; others are refused.
        use_fp16_qk_reduction: refused unless False.
        sm_scale: None: head_dim ** -0.5.
        window_left: earlier tokens that a query sees besides its own; -1 is all.
        logits_soft_cap: score becomes cap * tanh(score / cap); None and 0 are off.
        rope_scale: refused unless None, as ``rope_theta`` is.
        rope_theta: see there.
        backend: no effect.
        return_lse: return lse, too.
        kv_cache_sf: of NVFP4, a pair of float8_e4m3fn like k and v with head_dim / 16 elements.
        k_scale: of FP8 and NVFP4: a number, or float32 [], [1] or [num_kv_heads].
        v_scale: likewise.

    Returns:
        out [qo_len, num_qo_heads, head_dim of V], or (out, lse), lse float32 [qo_len,
        num_qo_heads], base 2. A row that sees no key has out 0 and lse -inf.

    Raises:
        TypeError, ValueError, ConfigError: naming the argument, before any launch.
    """
    refuse_unbuilt(locals(), but=("kv_cache_sf",))
    check_tensor("q", q, _HALVES)
    if scale_q is not None:
        raise ValueError("scale_q is given: q is not quantised, expected None")
    scales = _one_of_each(k=(k_scale, scale_k), v=(v_scale, scale_v))
    wrapper = _planned(
        q, k, v, kv_layout, causal=causal, window_left=window_left, custom_mask=custom_mask,
        packed_custom_mask=packed_custom_mask, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale,
        o_data_type=o_dtype,
    )  # fmt: skip
    return wrapper.run(q, k, v, **scales, return_lse=return_lse, kv_cache_sf=kv_cache_sf)


single_prefill_with_kv_cache_return_lse = functools.partial(
    single_prefill_with_kv_cache, return_lse=True
)


def _one_of_each(**pairs: tuple[object, object]) -> dict[str, Any]:
    """Return the scales, each of which has two names."""
    for name, (own, other) in pairs.items():
        if own is not None and other is not None:
            raise ValueError(f"{name}_scale is given, and so is scale_{name}: expected one")
    return {f"{n}_scale": other if own is None else own for n, (own, other) in pairs.items()}


def _planned(
    q: Tensor, k: Tensor, v: Tensor, kv_layout: str, **others: object
) -> BatchPrefillWithRaggedKVCacheWrapper:
    """Return a wrapper that has planned one request."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a {type_name(tensor)}: expected a tensor")
        if tensor.dim() != 3:
            wanted = "[qo_len, num_qo_heads, head_dim]" if tensor is q else _KV
            raise ValueError(f"{name} has shape {list(tensor.shape)}: expected {wanted}")
    heads, tokens = (1, 0) if check_layout(kv_layout) == "NHD" else (0, 1)
    per_element = 2 if k.dtype == torch.uint8 else 1
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(q.new_empty(0), kv_layout)
    wrapper.plan(
        torch.tensor([0, q.shape[0]], dtype=torch.int32, device="cpu"),
        torch.tensor([0, k.shape[tokens]], dtype=torch.int32, device="cpu"),
        q.shape[1],
        k.shape[heads],
        q.shape[2],
        head_dim_vo=v.shape[-1] * per_element,
        q_data_type=dtype_name(q.dtype),
        kv_data_type=k.dtype,
        **others,  # type: ignore[arg-type]
    )
    return wrapper
