"""``BoundCache``: a KV cache that a planner has checked."""

from __future__ import annotations

from typing import NoReturn, Protocol

import torch
from torch import Tensor

from jitattn.spec.config import PlannerConfig
from jitattn.tensors.cache_views import CacheView
from jitattn.tensors.scales import Scale
from jitattn.tensors.tensor_handles import new_handle


class LeadingParams(Protocol):
    """What launches have in front of their other parameters.

    Tensor maps of K and V, for kernels that copy TMA tiles of them, or the scales of their blocks.
    """

    def at(self, role: str, k_at: int, v_at: int) -> bytes:
        """Return the bytes of both for a kernel, where K and V are at these addresses now."""


class BoundCache:
    """A cache that a planner has checked; ``run`` takes it without looking again.

    Attributes:
        config: the configuration it was checked against.
        k: K as [num_pages, page_size, num_kv_heads, head_dim]; of four bits head_dim / 2 bytes.
        v: V likewise.
        block_scales: those of K and V, and zeros, as bytes [num_pages, page_size, num_kv_heads,
            bytes of a row]; None where K and V have no blocks.
        k_scale: what a stored K is multiplied with; None where K is not quantised.
        v_scale: likewise of V.
        source: the cache's tensors, as they were given.
        handle: int64 [] on the CPU, what stands for it in calls of ``torch.ops.jitattn``.
    """

    __slots__ = (
        "__weakref__",
        "block_scales",
        "config",
        "device",
        "handle",
        "k",
        "k_at",
        "k_scale",
        "kernels",
        "layout_key",
        "source",
        "strides",
        "tensor_maps",
        "v",
        "v_at",
        "v_scale",
        "view",
    )

    def __init__(
        self,
        config: PlannerConfig,
        device: torch.device,
        k: CacheView,
        v: CacheView,
        kernels: object,
        *,
        layout_key: object,
        tensor_maps: LeadingParams | None = None,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        block_scales: tuple[CacheView, CacheView] | None = None,
        view: object = None,
        source: tuple[Tensor, ...] = (),
    ) -> None:
        """Made by ``AttentionPlanner.bind``, with the planner's own ``config`` and ``device``."""
        self.config = config
        self.device = device
        self.k = k
        self.v = v
        self.kernels = kernels
        self.tensor_maps = tensor_maps
        self.strides = k.strides + v.strides
        self.k_scale = k_scale
        self.v_scale = v_scale
        self.block_scales = block_scales
        # Of a page manager's cache, which tables it is for.
        self.view = view
        self.source = source
        self.handle = new_handle(self)
        # One object for the caches of a planner that differ in addresses and scales only.
        self.layout_key = layout_key
        # These say where K and V are now: the memory of a tensor may move.
        self.k_at, self.v_at = k.tensor.data_ptr, v.tensor.data_ptr

    def __reduce__(self) -> NoReturn:
        raise TypeError("a bound cache can't be copied or pickled: bind the tensors it is made of")

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """K and V, then the scales of their blocks, then their own, as far as these are tensors."""
        views = self.k, self.v, *(self.block_scales or ())
        scales = [scale.tensor for scale in (self.k_scale, self.v_scale) if scale is not None]
        return *(view.tensor for view in views), *(scale for scale in scales if scale is not None)

    @property
    def facts(self) -> tuple[object, ...]:
        """What it is beside its tensors: of two with equal facts the tensors tell."""
        config, scales = self.config, (self.k_scale, self.v_scale)
        numbers = [scale.value for scale in scales if scale is not None and scale.tensor is None]
        return (
            *(config.q_dtype, config.kv_dtype, config.kv_layout, config.page_table),
            *(scale is None or scale.tensor is None for scale in scales),
            *numbers,
        )

    @property
    def pools(self) -> dict[str, int]:
        """The pages of K and of V."""
        return {"K": self.k.tensor.shape[0], "V": self.v.tensor.shape[0]}
