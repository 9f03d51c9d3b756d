"""A cache of latents and rope parts, checked and reduced to strides. Launches nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from jitattn.kernels.mla.config import SCALE_BLOCK
from jitattn.spec.config import MLAConfig
from jitattn.spec.dtype import QUANTISED_DTYPES
from jitattn.spec.layout import ListLayout
from jitattn.tensors.bound_cache import LeadingParams
from jitattn.tensors.cache_views import CacheView
from jitattn.tensors.page_table_base import PlannedTable
from jitattn.tensors.scales import Scale, ScaleLike, check_scale
from jitattn.tensors.tensor_checks import (
    check_device,
    check_last_stride,
    check_rows,
    check_tensor,
)
from jitattn.tensors.tensor_handles import new_handle
from jitattn.tensors.tensor_layouts import RowLayout
from jitattn.tensors.variant_params import VariantParams

_SCALE_BYTES = 4  # of a float32


class RowsView(NamedTuple):
    """A part of every token as [num_pages, page_size, dim], whatever its layout in memory.

    Strides are in elements; that of a dimension of size 1 means nothing in torch and is 0 here.
    """

    tensor: Tensor
    page_stride: int
    token_stride: int

    def as_cache(self) -> CacheView:
        """Return the same as K or V of one head."""
        return CacheView(self.tensor.unsqueeze(2), self.page_stride, self.token_stride, 0)


class LatentViews(NamedTuple):
    """The parts of a cache's tokens."""

    latent: RowsView
    rope: RowsView
    scales: RowsView | None = None

    @property
    def parts(self) -> tuple[RowsView, ...]:
        """Those that there are."""
        return self if self.scales is not None else self[:2]  # type: ignore[return-value]


class BoundMLACache:
    """A cache that an ``MLAPlanner`` has checked; ``run`` takes it without looking again.

    Attributes:
        config: the configuration it was checked against.
        device: where it is.
        latent: [num_pages, page_size, kv_lora_rank]; "ragged" has pages of one token.
        rope: [num_pages, page_size, qk_rope_head_dim], with strides of its own.
        latent_scales: float32 [num_pages, page_size, kv_lora_rank / 128] of rows that hold them,
            or None.
        k_scale: what a stored latent is multiplied with, and a stored FP8 rope part; None where
            the cache is not quantised or its rows hold their scales.
        is_pair: whether latent and rope part are tensors of their own, which a separate table has
            ids of their own for.
        k, v: to kernels, latents are K and rope parts V.
        strides: of pages, tokens and heads, of which there is one; of latents and of rope parts.
        kernels: those that the strides allow; None on the backend "reference".
        tensor_maps: those of latents and rope parts, where kernels use some.
        source: the cache's tensors, as they were given.
        handle: int64 [] on the CPU, what stands for it in calls of ``torch.ops.jitattn``.
    """

    __slots__ = (
        "__weakref__",
        "config",
        "device",
        "handle",
        "is_pair",
        "k_at",
        "k_scale",
        "kernels",
        "latent",
        "latent_scales",
        "rope",
        "source",
        "strides",
        "tensor_maps",
        "v_at",
    )

    # A value is the latent, whose scale is k_scale.
    v_scale = None

    def __init__(
        self,
        config: MLAConfig,
        device: torch.device,
        views: LatentViews,
        *,
        is_pair: bool,
        k_scale: Scale | None = None,
        kernels: object = None,
        tensor_maps: LeadingParams | None = None,
        source: tuple[Tensor, ...] = (),
    ) -> None:
        """Made by ``MLAPlanner.bind``, with the planner's own ``config`` and ``device``."""
        self.config = config
        self.device = device
        self.latent, self.rope, self.latent_scales = latent, rope, _ = views
        self.is_pair = is_pair
        self.k_scale = k_scale
        self.kernels = kernels
        self.tensor_maps = tensor_maps
        self.source = source
        self.handle = new_handle(self)
        self.strides = (
            *(latent.page_stride, latent.token_stride, 0),
            *(rope.page_stride, rope.token_stride, 0),
        )
        # These say where the tensors are now: the memory of one may move.
        self.k_at, self.v_at = latent.tensor.data_ptr, rope.tensor.data_ptr

    def __reduce__(self) -> NoReturn:
        raise TypeError("a bound cache can't be copied or pickled: bind the tensors it is made of")

    @property
    def k(self) -> RowsView:
        """The latents."""
        return self.latent

    @property
    def v(self) -> RowsView:
        """The rope parts."""
        return self.rope

    @property
    def pools(self) -> Mapping[str, int]:
        """The pages of each tensor."""
        if not self.is_pair:
            return {"kv": self.latent.tensor.shape[0]}
        return {"latent": self.latent.tensor.shape[0], "rope": self.rope.tensor.shape[0]}

    @property
    def is_rope_scaled(self) -> bool:
        """Whether ``k_scale`` is that of the rope part, too."""
        return self.k_scale is not None and self.rope.tensor.dtype == self.latent.tensor.dtype


class MLACall(NamedTuple):
    """The tensors of one ``run``, checked, and how those lie that differ from run to run."""

    q_nope: Tensor
    q_nope_layout: RowLayout
    q_pe: Tensor
    q_pe_layout: RowLayout
    kv: BoundMLACache
    pages: PlannedTable
    out: Tensor
    out_layout: RowLayout
    lse: Tensor | None
    lse_layout: RowLayout
    sm_scale: float
    variant_params: VariantParams | None
    sinks: None = None
    mask: None = None

    @property
    def q(self) -> Tensor:
        """To kernels, q_nope is Q."""
        return self.q_nope

    @property
    def q_layout(self) -> RowLayout:
        """How it lies."""
        return self.q_nope_layout


def check_q_pe(
    q_pe: Tensor, config: MLAConfig, dtype: torch.dtype, device: torch.device, *, num_tokens: int
) -> None:
    """Raise unless q_pe fits.

    Raises:
        TypeError, ValueError: a dtype, shape, stride or device that doesn't fit.
    """
    shape = num_tokens, config.num_heads, config.qk_rope_head_dim
    check_rows("q_pe", q_pe, shape, dtype, device)
    check_last_stride("q_pe", q_pe)


def row_bytes(config: MLAConfig) -> int:
    """Return the bytes of a row that holds its scales: 656 of DeepSeek's 512 and 64."""
    num_scales = config.kv_lora_rank // SCALE_BLOCK
    return config.kv_lora_rank + _SCALE_BYTES * num_scales + 2 * config.qk_rope_head_dim


def refuse_scale(k_scale: object, config: MLAConfig) -> None:
    """Raise ValueError for the scale of a cache that is not quantised."""
    if k_scale is not None and config.kv_dtype not in QUANTISED_DTYPES:
        raise ValueError(f"k_scale is given, but a cache of {config.kv_dtype} is not quantised")


def view_latents(
    kv: Tensor | tuple[Tensor, Tensor],
    k_scale: object,
    config: MLAConfig,
    device: torch.device,
) -> LatentViews:
    """Check a cache, and that rows which hold their scales have no other.

    Raises:
        TypeError: no tensor or pair of tensors, or another dtype than the planner's.
        ValueError: a shape, stride or device doesn't fit the planner, or a scale the cache.
    """
    if isinstance(kv, Tensor):
        is_quantised = config.kv_dtype in QUANTISED_DTYPES
        if is_quantised and kv.dim() > 0 and kv.shape[-1] == row_bytes(config):
            _refuse_second_scale(k_scale, config)
            return _view_rows(kv, config, device)
        width = config.kv_lora_rank + config.qk_rope_head_dim
        view = _view("kv", kv, width, config, device, _stored(config))
        latent, rope = view[..., : config.kv_lora_rank], view[..., config.kv_lora_rank :]
    else:
        if not isinstance(kv, (tuple, list)) or len(kv) != 2:
            raise TypeError(f"kv is a {type(kv).__name__}: expected a tensor or (latent, rope)")
        latent, rope = _view_pair(kv[0], kv[1], config, device)
    return LatentViews(_rows_view(latent, config), _rows_view(rope, config))


def scale_of(
    k_scale: ScaleLike | None, views: LatentViews, config: MLAConfig, device: torch.device
) -> Scale | None:
    """Return the scale of a checked cache; None where it is not quantised or has some in its rows.

    Raises:
        TypeError: neither a number nor a float32 tensor.
        ValueError: it doesn't fit.
    """
    if views.scales is not None:
        _refuse_second_scale(k_scale, config)
        return None
    is_quantised = config.kv_dtype in QUANTISED_DTYPES
    return check_scale("k_scale", k_scale, device) if is_quantised else None


def _refuse_second_scale(k_scale: object, config: MLAConfig) -> None:
    if k_scale is not None:
        raise ValueError(
            f"k_scale is given, but rows of {row_bytes(config)} bytes hold their scales"
        )


def _stored(config: MLAConfig) -> tuple[torch.dtype, ...]:
    """The dtypes that a cache may come as: FP8 as bytes, too."""
    dtype = getattr(torch, config.kv_dtype)
    return (dtype, torch.uint8) if config.kv_dtype in QUANTISED_DTYPES else (dtype,)


def _view_pair(
    latent: Tensor, rope: Tensor, config: MLAConfig, device: torch.device
) -> tuple[Tensor, Tensor]:
    stored, q_dtype = _stored(config), getattr(torch, config.q_dtype)
    latent = _view("kv[0] (latent)", latent, config.kv_lora_rank, config, device, stored)
    dtypes = tuple(dict.fromkeys((*stored, q_dtype)))
    rope = _view("kv[1] (rope)", rope, config.qk_rope_head_dim, config, device, dtypes)
    if config.page_table != "separate" and latent.shape[0] != rope.shape[0]:
        what = "tokens" if config.page_table == "ragged" else "pages"
        raise ValueError(
            f"kv[0] (latent) has {latent.shape[0]} {what} and kv[1] (rope) {rope.shape[0]}: with "
            f"page_table={config.page_table!r} one id stands for both"
        )
    return latent, rope


def _view_rows(kv: Tensor, config: MLAConfig, device: torch.device) -> LatentViews:
    """View a tensor of rows that hold an FP8 latent, its scales and a bfloat16 rope part."""
    if config.q_dtype != "bfloat16":
        raise ValueError(
            f"kv has rows of {row_bytes(config)} bytes, whose rope part is bfloat16: the planner "
            f"has q_dtype={config.q_dtype}"
        )
    view = _view("kv", kv, row_bytes(config), config, device, _stored(config))
    view = _without_odd_strides(view.view(torch.uint8))
    offsets = (view.data_ptr(), view.storage_offset(), *view.stride()[:2])
    if any(offset % _SCALE_BYTES for offset in offsets):
        raise ValueError(
            f"kv has strides {list(kv.stride())} at address {kv.data_ptr():#x}: rows that hold "
            f"float32 scales must begin at multiples of {_SCALE_BYTES} bytes"
        )
    scales_at = config.kv_lora_rank
    rope_at = scales_at + _SCALE_BYTES * (config.kv_lora_rank // SCALE_BLOCK)
    latent, scales, rope = view[..., :scales_at], view[..., scales_at:rope_at], view[..., rope_at:]
    return LatentViews(
        _rows_view(latent.view(getattr(torch, config.kv_dtype)), config),
        _rows_view(rope.view(torch.bfloat16), config),
        _rows_view(scales.view(torch.float32), config),
    )


def _view(
    name: str,
    cache: Tensor,
    width: int,
    config: MLAConfig,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
) -> Tensor:
    """Return [num_pages, page_size, width]; bytes as the type they stand for."""
    check_tensor(name, cache, dtypes)
    is_ragged = config.page_table == "ragged"
    wanted = ["num_kv_tokens"] if is_ragged else ["num_pages", "page_size"]
    sizes = [width] if is_ragged else [config.page_size, width]
    if cache.dim() != len(wanted) + 1 or list(cache.shape[1:]) != sizes:
        named = ", ".join(map(str, [wanted[0], *sizes]))
        raise ValueError(f"{name} has shape {list(cache.shape)}: expected [{named}]{_why(config)}")
    check_device(name, cache, device)
    check_last_stride(name, cache)
    view = cache.unsqueeze(1) if is_ragged else cache
    return view.view(getattr(torch, config.kv_dtype)) if view.dtype == torch.uint8 else view


def _why(config: MLAConfig) -> str:
    parts = [f"kv_lora_rank={config.kv_lora_rank}", f"qk_rope_head_dim={config.qk_rope_head_dim}"]
    if config.page_table != "ragged":
        parts.insert(0, f"page_size={config.page_size}")
    return f" with {', '.join(parts)}"


def _without_odd_strides(view: Tensor) -> Tensor:
    """Return the same rows with strides of 0 where torch's mean nothing."""
    strides = [s if n > 1 else 0 for s, n in zip(view.stride()[:2], view.shape[:2], strict=True)]
    return view.as_strided(view.shape, (*strides, 1), view.storage_offset())


def _rows_view(view: Tensor, config: MLAConfig) -> RowsView:
    if config.page_table == ListLayout.INDICES and view.shape[0] == 0:
        # Kernels load something for entries that are none, and count it as nothing.
        raise ValueError("kv has no pages: lists of tokens are for a cache with one at least")
    page, token = (
        s if n > 1 else 0 for s, n in zip(view.stride()[:2], view.shape[:2], strict=True)
    )
    # Ragged tokens follow each other at the stride of their pages.
    return RowsView(view, page, page if config.page_table == "ragged" else token)
