"""The kernels of an ``AttentionPlanner`` on a CUDA device."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from jitattn.jit.build import Pending
from jitattn.kernels.attention.config import (
    attention_specs,
    has_fp8_products,
    wide_row_tile,
)
from jitattn.kernels.attention.spec import DecodeSpec, NarrowPrefillSpec, PrefillSpec
from jitattn.kernels.attention.tile import NARROW_ROWS
from jitattn.kernels.common.cuda_kernels import CudaKernels, TargetDevice, map_cache
from jitattn.kernels.common.kernel_loader import BoundKernels, PlannedKernel, Role
from jitattn.kernels.common.schedule_config import FamilyTraits
from jitattn.kernels.common.spec import AttentionSpec
from jitattn.kernels.common.tile import DecodeTile
from jitattn.kernels.common.tma import TmaTile, tma_tile_of
from jitattn.spec.config import PlannerConfig
from jitattn.spec.layout import Loader
from jitattn.spec.params import QueryScaleParams
from jitattn.tensors.bound_cache import LeadingForm
from jitattn.tensors.cache_views import BlockArguments, BlockCaches, CacheView

# Costs are measured: docs/perf-log.md. More and shorter splits balance better and merge longer.
TRAITS = FamilyTraits(
    max_splits=16,
    min_split_tokens=512,
    head_split_tokens=256,
    max_split_tokens=2048,
    tile_visit_cost=1,
    min_slot_cost=1,
)


# The same of kernels that read FP8 queries, with their scales.
FP8_TRAITS = replace(TRAITS, params=(("queries", QueryScaleParams),))


class AttentionKernels(CudaKernels):
    """The kernels of an attention configuration; the plain loader's are built when needed.

    Attributes:
        reads_fp8_queries: whether they do; else FP8 queries are dequantised in front.
    """

    def __init__(self, config: PlannerConfig, device: torch.device) -> None:
        """Start to build them, and load those of decode."""
        target = TargetDevice.of(device)
        self.reads_fp8_queries = has_fp8_products(config, target.arch)
        self._by_alignment: dict[bool, list[DecodeSpec | PrefillSpec]] = {True: [], False: []}
        specs = [
            spec
            for spec in attention_specs(config, target.arch)
            if isinstance(spec, DecodeSpec | PrefillSpec)
        ]
        for spec in specs:
            self._by_alignment[spec.loader is not Loader.PLAIN].append(spec)
        self._tma_tiles: dict[str, TmaTile] = {
            role: tma_tile_of(spec.tile(target.arch), spec.head_dim)
            for role, spec in _by_role(self._by_alignment[True]).items()
            if spec.loader is Loader.TENSOR
        }
        super().__init__(
            config,
            target,
            FP8_TRAITS if self.reads_fp8_queries else TRAITS,
            specs=specs,
            main_specs=self._by_alignment[True],
            make_kernels=functools.partial(_make_kernels, target.arch, target.facts.index),
            multi_token_rows=wide_row_tile(config),
            narrow_rows=NARROW_ROWS if "prefill_narrow" in _by_role(specs) else 0,
        )

    def bind(
        self, k: CacheView, v: CacheView, blocks: BlockCaches | None = None
    ) -> tuple[BoundKernels, LeadingForm | None]:
        """Return the kernels whose loaders the strides of K and V allow, and what makes maps.

        In the place of maps, caches of four bits have what launches say of the scales of their
        ``blocks``.
        """
        maps: LeadingForm | None
        if blocks is not None:
            is_aligned, maps = blocks.is_vector_aligned, BlockArguments
        else:
            is_aligned, maps = map_cache(k, v, self._tma_tiles)
        return self.loader.kernels_for(self._by_alignment[is_aligned]), maps


def _make_kernels(
    arch: str, index: int, specs: Sequence[AttentionSpec], pending: Sequence[Pending]
) -> BoundKernels:
    builds = dict(zip(specs, pending, strict=True))
    return BoundKernels(
        **{
            role: _make_kernel(arch, index, spec, builds[spec])
            for role, spec in _by_role(specs).items()
        }
    )


def _by_role(specs: Iterable[AttentionSpec]) -> dict[Role, AttentionSpec]:
    """Return the kernels of one loader by role; not every configuration has all."""
    found: dict[Role, AttentionSpec] = {}
    for spec in specs:
        if isinstance(spec, NarrowPrefillSpec):
            role: Role = "prefill_narrow"
        elif isinstance(spec, PrefillSpec):
            role = "prefill"
        else:  # the narrower decode kernel comes first
            role = "decode_multi_token" if "decode" in found else "decode"
        found.setdefault(role, spec)
    return found


def _make_kernel(arch: str, index: int, spec: AttentionSpec, pending: Pending) -> PlannedKernel:
    tile = spec.tile(arch)
    rows = spec if isinstance(spec, DecodeSpec) else tile
    assert not isinstance(rows, DecodeTile)
    return PlannedKernel(pending, tile, rows.row_tile, index)
