"""The arguments of ``gather_kv``: what was given, and what it comes to. Launches nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from jitattn.base.validate import INT32_MAX, check_name, shown, type_name
from jitattn.kernels.pages.block_table import check_offsets
from jitattn.spec.config import PlannerConfig
from jitattn.spec.dtype import BLOCK_DTYPES, QUANTISED_DTYPES, DType, dtype_name
from jitattn.spec.layout import Layout
from jitattn.tensors.bound_cache import BoundCache
from jitattn.tensors.cache_views import CacheView, view_caches
from jitattn.tensors.overlap import refuse_shared_bytes
from jitattn.tensors.page_table_base import PageTable
from jitattn.tensors.page_tables import has_pages, table_names
from jitattn.tensors.quantization import CACHE_DTYPES, KVCache, QuantizedKV
from jitattn.tensors.scales import Scale, ScaleLike, view_scale
from jitattn.tensors.tensor_checks import (
    check_device,
    check_per_request,
    check_tensor,
    check_writable,
)

Outs = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]

_PLAIN_DTYPES = tuple(DType(name).torch_dtype for name in CACHE_DTYPES if name not in BLOCK_DTYPES)
_OUT_DTYPES = (DType.FLOAT16.value, DType.BFLOAT16.value, DType.FLOAT32.value)


class GatherCall(NamedTuple):
    """The arguments of ``gather_kv``, as they were given."""

    kv: BoundCache | KVCache
    pages: PageTable
    seq_lens: Tensor
    kv_layout: str
    k_scale: ScaleLike | None
    v_scale: ScaleLike | None
    out_dtype: torch.dtype | str | None
    out: Outs | None


@dataclass(frozen=True, slots=True)
class Batch:
    """What is gathered, checked."""

    k: CacheView
    v: CacheView
    k_scale: Scale | None
    v_scale: Scale | None
    pages: PageTable
    seq_lens: Tensor
    kv_dtype: str
    out_dtype: str
    block_scales: tuple[CacheView, CacheView] | None = None  # in bytes
    out: Outs | None = None

    @property
    def device(self) -> torch.device:
        """Where all tensors are."""
        return self.seq_lens.device

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return int(self.k.tensor.shape[1])

    @property
    def copies_bits(self) -> bool:
        """Whether stored elements are copied as they are."""
        return self.kv_dtype == self.out_dtype

    def row_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of a token's K and V."""
        per_element = 2 if self.block_scales else 1
        k, v = (
            (*view.tensor.shape[2:-1], per_element * view.tensor.shape[-1])
            for view in (self.k, self.v)
        )
        return k, v


# --- checks


def check(call: GatherCall) -> Batch:
    """Return the batch that a call describes.

    Raises:
        TypeError, ValueError: naming the argument, what was given and what is wanted.
    """
    pages, seq_lens = call.pages, call.seq_lens
    if not has_pages(pages):
        names = table_names(without=[Layout.RAGGED])
        raise TypeError(
            f"pages is a {type_name(pages)}: expected a {names} (ragged K and V lie one request "
            "after the other already)"
        )
    check_per_request("seq_lens", seq_lens, pages.batch_size, pages.device)
    batch = _viewed(call, pages)
    if batch.out_dtype not in (*_OUT_DTYPES, batch.kv_dtype) or batch.out_dtype in BLOCK_DTYPES:
        own = "" if batch.block_scales else f" or that of the cache, {batch.kv_dtype}"
        raise ValueError(f"out_dtype is {batch.out_dtype}: expected {', '.join(_OUT_DTYPES)}{own}")
    given = (call.k_scale, call.v_scale)
    if batch.copies_bits and any(scale is not None for scale in given):
        raise ValueError(
            f"k_scale or v_scale is given, but out_dtype={batch.out_dtype} copies what is stored"
        )
    if call.out is not None:
        _check_out(call.out, batch)
        read = [("kv", view.tensor) for view in (batch.k, batch.v, *(batch.block_scales or ()))]
        read += [("pages", tensor) for tensor in batch.pages.tensors]
        read += [("seq_lens", batch.seq_lens)]
        for name, scale in (("k_scale", batch.k_scale), ("v_scale", batch.v_scale)):
            if scale is not None and scale.tensor is not None:
                read.append((name, scale.tensor))
        refuse_shared_bytes([(f"out[{i}]", one) for i, one in enumerate(call.out)], read)
    return replace(batch, out=call.out)


def _viewed(call: GatherCall, pages: PageTable) -> Batch:
    """Return the caches and their scales, but for ``out_dtype`` checked."""
    kv, device = call.kv, pages.device
    blocks = None
    if isinstance(kv, BoundCache):
        _check_bound(kv, call)
        config, k, v = kv.config, kv.k, kv.v
        k_scale, v_scale = kv.k_scale, kv.v_scale
        blocks = kv.block_scales
    else:
        config = _config_of(kv, pages, call.kv_layout)
        if isinstance(kv, QuantizedKV):
            stored = replace(config, kv_dtype="uint8")
            k, v = view_caches((kv.k, kv.v), stored, device)
            k_scales, v_scales = kv.scale_bytes
            stored = replace(stored, head_dim=k_scales.shape[-1], head_dim_vo=v_scales.shape[-1])
            blocks = view_caches((k_scales, v_scales), stored, device)
        else:
            k, v = view_caches(kv, config, device)
        k_scale, v_scale = (
            view_scale(name, scale, config.kv_dtype, device, num_kv_heads=config.num_kv_heads)
            for name, scale in (("k_scale", call.k_scale), ("v_scale", call.v_scale))
        )
    if call.out_dtype is not None:
        out_dtype = dtype_name(call.out_dtype, "out_dtype")
    else:
        out_dtype = (
            config.kernel_q_dtype if config.kv_dtype in QUANTISED_DTYPES else config.kv_dtype
        )
    return Batch(k, v, k_scale, v_scale, pages, call.seq_lens, config.kv_dtype, out_dtype, blocks)


def _check_bound(kv: BoundCache, call: GatherCall) -> None:
    config, pages = kv.config, call.pages
    if config.page_table == "ragged":
        raise ValueError("kv was bound as ragged K and V, which have no pages to gather from")
    if (pages.layout == "separate") != (config.page_table == "separate"):
        raise ValueError(
            f"pages is {pages!r} of the layout {pages.layout.value!r}: kv was bound with "
            f"page_table={config.page_table!r}"
        )
    if call.kv_layout not in ("NHD", config.kv_layout):
        raise ValueError(f"kv_layout is {shown(call.kv_layout)}: kv was bound as another")
    for name, scale in (("k_scale", call.k_scale), ("v_scale", call.v_scale)):
        if scale is not None:
            raise ValueError(f"{name} is given, but a bound cache has its own: give it to bind")
    if kv.device != pages.device:
        raise ValueError(f"kv is on {kv.device}: expected {pages.device}, like pages")


def _config_of(kv: object, pages: PageTable, kv_layout: str) -> PlannerConfig:
    """Read off the tensors what ``view_caches`` compares them with; it checks the rest."""
    kv_layout = check_name("kv_layout", kv_layout, ("NHD", "HND"))
    kv_dtypes = _PLAIN_DTYPES
    one, k, v = kv, kv, kv
    if isinstance(kv, QuantizedKV):
        one, k, v, kv_dtypes = kv.k, kv.k, kv.v, (torch.uint8,)
    elif isinstance(kv, (tuple, list)) and len(kv) == 2:
        one, k, v = kv[0], kv[0], kv[1]
    elif not isinstance(kv, Tensor):
        raise TypeError(
            f"kv is a {type(kv).__name__}: expected a tensor, (k_cache, v_cache), a "
            "QuantizedKV or what planner.bind returns"
        )
    for name, cache in (("kv" if k is v else "kv[0]", k), ("kv" if k is v else "kv[1]", v)):
        check_tensor(name, cache, kv_dtypes)
    assert isinstance(one, Tensor)
    assert isinstance(v, Tensor)
    num_dims = 5 if one is kv else 4
    if one.dim() != num_dims or v.dim() != num_dims:
        page = "page_size, num_kv_heads" if kv_layout == "NHD" else "num_kv_heads, page_size"
        wanted = f"[num_pages, {'2, ' if num_dims == 5 else ''}{page}, head_dim]"
        given = one if one.dim() != num_dims else v
        raise ValueError(f"kv has shape {list(given.shape)}: expected {wanted}")
    if 0 in (*one.shape[1:], v.shape[-1]):
        raise ValueError(f"kv has shape {list(one.shape)}: a page of it holds nothing")
    token_dim, head_dim = (-3, -2) if kv_layout == "NHD" else (-2, -3)
    return PlannerConfig.from_arguments(
        {
            "num_qo_heads": one.shape[head_dim],
            "num_kv_heads": one.shape[head_dim],
            "head_dim": one.shape[-1],
            "head_dim_vo": v.shape[-1],
            "page_size": one.shape[token_dim],
            "kv_dtype": kv.kv_dtype if isinstance(kv, QuantizedKV) else one.dtype,
            "kv_layout": kv_layout,
            "page_table": pages.layout.value,
        }
    )


def _check_out(out: object, batch: Batch) -> None:
    if not isinstance(out, (tuple, list)) or len(out) not in (2, 3):
        raise TypeError(f"out is a {type(out).__name__}: expected (k, v) or (k, v, kv_indptr)")
    dtype = getattr(torch, batch.out_dtype)
    for i, (tensor, row) in enumerate(zip(out, batch.row_shapes(), strict=False)):
        check_tensor(f"out[{i}]", tensor, (dtype,))
        num_rows = out[0].shape[0] if out[0].dim() else 0
        if tuple(tensor.shape) != (num_rows, *row):
            raise ValueError(
                f"out[{i}] has shape {list(tensor.shape)}: expected {[num_rows, *row]}"
            )
        if num_rows > INT32_MAX:
            raise ValueError(f"out[{i}] has {num_rows} rows: expected at most {INT32_MAX}")
        if not tensor.is_contiguous():
            raise ValueError(
                f"out[{i}] has strides {list(tensor.stride())}: expected a contiguous tensor"
            )
        check_writable(f"out[{i}]", tensor)
        check_device(f"out[{i}]", tensor, batch.device)
    if len(out) == 3:
        check_offsets("out[2]", out[2], batch.seq_lens.shape[0], batch.device)


def check_total(num_tokens: int) -> None:
    """Raise ValueError where there are more tokens than offsets reach."""
    if num_tokens > INT32_MAX:
        raise ValueError(f"seq_lens have {num_tokens} tokens together: at most {INT32_MAX}")
