"""The kernels of an ``MLAPlanner`` on a CUDA device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from jitattn.device.driver import Launch, LoadedKernel, load_kernel
from jitattn.jit.build import Pending
from jitattn.kernels.attention.kernels import KernelSet
from jitattn.kernels.attention.launch import Part, write_scale
from jitattn.kernels.attention.loaded_kernels import AttentionKernel, BoundKernels
from jitattn.kernels.attention.schedule import Recipe
from jitattn.kernels.common.spec import AttentionSpec
from jitattn.kernels.mla.check import BoundMLACache, MLACall
from jitattn.kernels.mla.config import mla_specs
from jitattn.kernels.mla.spec import MLASpec
from jitattn.spec.config import MLAConfig
from jitattn.spec.dtype import DType
from jitattn.spec.family import KernelSpec
from jitattn.spec.layout import Loader
from jitattn.tensors.cache_views import NO_LAYOUT, Call, Scale
from jitattn.tensors.tma import Box, TensorMaps

_UNSCALED = Scale(1.0)


# CTAs of the kernel that merges, for each of the other's: they are small, and wait for memory.
_MERGE_CTAS = 8


class LatentKernel(AttentionKernel):
    """A kernel of latent attention, and its second one, which merges splits."""

    def load(self) -> LoadedKernel:
        """Load both."""
        self.load_merge()
        return super().load()

    def load_merge(self) -> LoadedKernel:
        """Load the one that merges."""
        if self._merge is None:
            kernel = self.pending.result()
            assert isinstance(kernel.spec, MLASpec)
            symbol = kernel.spec.merge_symbol
            self._merge = load_kernel(kernel.cubin, symbol, self._device_index, 0)
        return self._merge

    _merge: LoadedKernel | None = None


class MLAPart(Part):
    """A kernel of a plan of an ``MLAPlanner``: ``Part``, with what rope parts add."""

    __slots__ = ("_merge_grid", "_merge_launches", "_pe_layout")

    def __init__(self, recipe: Recipe, *arguments: Any) -> None:
        super().__init__(recipe, *arguments)
        self._pe_layout = NO_LAYOUT
        # As many as `num_sms` allows, where it is given: each CTA may be on an SM of its own.
        self._merge_grid = self._grid * (1 if recipe.config.num_sms else _MERGE_CTAS)
        self._merge_launches: dict[AttentionKernel, Launch] = {}

    def launches_of(self, kernels: BoundKernels) -> tuple[Launch, ...]:
        """Return the launch of the attention kernel, and of what merges its splits."""
        kernel = kernels.of(self.role)
        merge = self._merge_launches.get(kernel)
        if merge is None:
            assert isinstance(kernel, LatentKernel)
            threads = kernel.tile.value_dim // 4
            merge = Launch(kernel.load_merge(), self._params, self._merge_grid, threads)
            self._merge_launches[kernel] = merge
        return self.launch_of(kernels), merge

    def patch(self, call: Call | MLACall) -> None:
        """Write into the parameters what differs from the last call."""
        super().patch(call)
        assert isinstance(call, MLACall)
        kv, latent, pe_at = call.kv, self._params.latent, call.q_pe.data_ptr()
        pages = call.pages
        if pages.value_stride:
            # One tensor has the ids of row 0 only.
            self._params.pages.kv_stride = pages.value_stride if kv.is_pair else 0
        if call.q_pe_layout is not self._pe_layout:
            latent.q_pe_token_stride, latent.q_pe_head_stride = call.q_pe_layout.strides[:2]
            self._pe_layout = call.q_pe_layout
        latent.q_pe = pe_at
        latent.q_pe_is_aligned = call.q_pe_layout.is_aligned(pe_at)
        # A value is the latent, which has one scale.
        scale = kv.k_scale or _UNSCALED
        write_scale(self._attention.k_scale, scale)
        write_scale(self._attention.v_scale, scale)
        if kv.latent_scales is not None:
            latent.latent_scales = kv.latent_scales.tensor.data_ptr()
            latent.scale_page_stride = kv.latent_scales.page_stride
            latent.scale_token_stride = kv.latent_scales.token_stride


class MLAKernels(KernelSet):
    """The kernels of an ``MLAPlanner`` on a device; those of other caches are built when bound."""

    is_latent = True
    part_type = MLAPart
    # Partial rows are wide.
    max_splits = 8
    # Measured: docs/perf-log.md. Q takes as long to bring as two tiles, and each eight splits of a
    # row take as long to merge as a tile or two.
    unit_cost = 2
    min_slot_cost = 2

    config: MLAConfig

    def bind_latents(self, kv: BoundMLACache) -> tuple[BoundKernels, TensorMaps | None]:
        """Return the kernels that the strides and dtypes of a cache allow.

        And the tensor maps of latents and rope parts, if their loader uses some.
        """
        is_aligned, maps = self._maps_of(kv.latent.as_cache(), kv.rope.as_cache())
        spec = next(
            spec
            for spec in self._attention_specs()
            if spec.rope_dtype == DType.of(kv.rope.tensor.dtype)
            and spec.has_scales == (kv.latent_scales is not None)
            and (spec.loader is not Loader.PLAIN) == is_aligned
        )
        return self._kernels_for((spec,)), maps

    @functools.cached_property
    def _boxes(self) -> dict[str, Box]:
        """What one kernel brings at a time, whatever it is for."""
        tile = self._attention_specs()[0].tile(self.arch)
        rope_dim = self.config.qk_rope_head_dim
        return {"decode": Box(tile.box_tokens, tile.key_box_columns, rope_dim, is_grouped=True)}

    def _attention_specs(self) -> list[MLASpec]:
        return [spec for spec in self._specs if isinstance(spec, MLASpec)]

    def _find_specs(self) -> tuple[KernelSpec, ...]:
        return mla_specs(self.config, self.arch)

    def _find_wide_rows(self) -> int:
        return 0

    def _main_specs(self) -> Sequence[AttentionSpec]:
        return self._attention_specs()[:1]

    def _attention_kernels(
        self, specs: Sequence[AttentionSpec], pending: Sequence[Pending]
    ) -> BoundKernels:
        # One serves requests of few rows and of many.
        (spec,), (build,) = specs, pending
        assert isinstance(spec, MLASpec)
        tile = spec.tile(self.arch)
        kernel = LatentKernel(build, tile, spec.row_tile, self.facts.index)
        return BoundKernels(kernel, kernel, None)
