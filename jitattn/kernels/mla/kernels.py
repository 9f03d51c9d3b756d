"""The kernels of an ``MLAPlanner`` on a CUDA device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from jitattn.device.driver import Launch, LoadedKernel
from jitattn.jit.build import Pending
from jitattn.kernels.common.cuda_kernels import CudaKernels, TargetDevice, map_cache
from jitattn.kernels.common.kernel_launch import KernelLaunch, PlannedCall, write_scale
from jitattn.kernels.common.kernel_loader import BoundKernels, PlannedKernel, Role
from jitattn.kernels.common.params import ListScheduleParams, ScheduleParams
from jitattn.kernels.common.schedule_config import FamilyTraits, ScheduleConfig, WorkspacePlace
from jitattn.kernels.common.spec import AttentionSpec
from jitattn.kernels.common.tile import WarpgroupTile
from jitattn.kernels.common.tma import MapForm, TmaTile
from jitattn.kernels.mla.check import LatentViews, MLACall
from jitattn.kernels.mla.config import mla_specs
from jitattn.kernels.mla.params import MLA_FIELDS
from jitattn.kernels.mla.spec import MLASpec
from jitattn.spec.config import MLAConfig
from jitattn.spec.dtype import DType
from jitattn.spec.layout import Loader
from jitattn.tensors.scales import Scale
from jitattn.tensors.tensor_layouts import NO_LAYOUT, Batch

# Costs are measured: docs/perf-log.md. Partial rows are wide, so that splits are few; Q takes as
# long to load as two tiles, and each eight splits of a row take as long to merge as a tile or two.
TRAITS = FamilyTraits(
    max_splits=8,
    min_split_tokens=512,
    head_split_tokens=0,
    max_split_tokens=512,
    tile_visit_cost=2,
    min_slot_cost=2,
    has_one_kernel=True,
    merges_in_kernel=False,
    skips_empty_tiles=True,
    params=MLA_FIELDS,
)

# Splits of a query tile that its CTAs merge, where they can: more are sooner merged by many small
# CTAs.
_MOST_SPLITS_HERE = 8

# CTAs of the merge kernel for each of the attention kernel's: they are small, and wait for memory.
_MERGE_CTAS = 8

_UNSCALED = Scale(1.0)


class MLAKernel(PlannedKernel):
    """A kernel of MLA, and its second one, which merges splits unless CTAs of the first do."""

    _merge: LoadedKernel | None = None

    @property
    def can_merge(self) -> bool:
        """Whether its own CTAs can merge splits."""
        return isinstance(self.tile, WarpgroupTile)

    def load(self) -> LoadedKernel:
        """Load both."""
        self.load_merge()
        return super().load()

    def load_merge(self) -> LoadedKernel:
        """Load the one that merges."""
        if self._merge is None:
            spec = self.pending.result().spec
            assert isinstance(spec, MLASpec)
            self._merge = self.load_symbol(spec.merge_symbol, smem_bytes=0)
        return self._merge


class MLAKernelLaunch(KernelLaunch):
    """A kernel of an MLA plan: ``KernelLaunch``, with the query's k_pe part and the merge."""

    __slots__ = (
        "_group_size",
        "_is_invariant",
        "_merge_grid",
        "_merge_launches",
        "_pe_layout",
        "_row_tile",
    )

    def __init__(
        self,
        config: ScheduleConfig,
        capacity: int,
        buffers: tuple[Tensor, Tensor],
        device: torch.device,
        place: WorkspacePlace,
        schedule_params: ScheduleParams | ListScheduleParams,
    ) -> None:
        super().__init__(config, capacity, buffers, device, place, schedule_params)
        self._pe_layout = NO_LAYOUT
        # As many as `num_sms` allows, where it is given: each CTA may be on an SM of its own.
        self._merge_grid = config.grid * (1 if config.limits_sms else _MERGE_CTAS)
        self._merge_launches: dict[PlannedKernel, Launch] = {}
        self._group_size, self._row_tile = config.group_size, config.kernel.row_tile
        self._is_invariant = config.class_tokens > 0

    def begin(self, batch: Batch) -> None:
        """Have the schedule kernel's launch schedule another batch."""
        super().begin(batch)
        # How many CTAs share a request, if all are alike. Those of a batch-invariant plan have few
        # splits, and one way to merge them.
        num_tiles = batch.batch_size * -(-batch.max_q_len * self._group_size // self._row_tile)
        is_shared_by_few = self._grid // max(num_tiles, 1) <= _MOST_SPLITS_HERE
        self.params.mla.merges_splits = self._is_invariant or is_shared_by_few

    def steps_of(self, kernels: BoundKernels) -> tuple[Launch, ...]:
        """Return the launch of the attention kernel, and of one that merges where it doesn't."""
        kernel = kernels.of(self.role)
        assert isinstance(kernel, MLAKernel)
        if self.params.mla.merges_splits and kernel.can_merge:
            return (self.launch_of(kernels),)
        merge = self._merge_launches.get(kernel)
        if merge is None:
            threads = kernel.tile.value_dim // 4
            merge = Launch(kernel.load_merge(), self.params, self._merge_grid, threads)
            self._merge_launches[kernel] = merge
        return self.launch_of(kernels), merge

    def patch(self, call: PlannedCall) -> None:
        """Write into the parameters what differs from the last call."""
        super().patch(call)
        assert isinstance(call, MLACall)
        kv, mla, pe_at = call.kv, self.params.mla, call.q_pe.data_ptr()
        pages = call.pages
        if pages.value_stride:
            # One tensor has the ids of row 0 only.
            self.params.pages.kv_stride = pages.value_stride if kv.is_pair else 0
        if call.q_pe_layout is not self._pe_layout:
            mla.q_pe_token_stride, mla.q_pe_head_stride = call.q_pe_layout.strides[:2]
            self._pe_layout = call.q_pe_layout
        mla.q_pe = pe_at
        mla.q_pe_is_aligned = call.q_pe_layout.is_aligned(pe_at)
        # A value is the latent, which has one scale.
        scale = kv.k_scale or _UNSCALED
        write_scale(self.params.attention.k_scale, scale)
        write_scale(self.params.attention.v_scale, scale)
        if kv.latent_scales is not None:
            mla.latent_scales = kv.latent_scales.tensor.data_ptr()
            mla.scale_page_stride = kv.latent_scales.page_stride
            mla.scale_token_stride = kv.latent_scales.token_stride


class MLAKernels(CudaKernels):
    """The kernels of an MLA configuration; those of unusual caches are built when bound."""

    def __init__(self, config: MLAConfig, device: torch.device) -> None:
        """Start to build them, and load the one of decode."""
        target = TargetDevice.of(device)
        self._mla_specs = [
            spec for spec in mla_specs(config, target.arch) if isinstance(spec, MLASpec)
        ]
        first = self._of_cache(self._mla_specs[0])
        self._tma_tiles: dict[str, TmaTile] = {}
        if first[0].loader is Loader.TENSOR:
            for role, spec in _by_role(first).items():
                tile, rope_dim = spec.tile(target.arch), config.qk_rope_head_dim
                self._tma_tiles[role] = TmaTile(
                    tile.tma_tokens, tile.key_tma_columns, rope_dim, is_grouped=True
                )
        super().__init__(
            config,
            target,
            TRAITS,
            specs=self._mla_specs,
            main_specs=first,
            make_kernels=functools.partial(_make_kernels, target.arch, target.facts.index),
            launch_type=MLAKernelLaunch,
            multi_token_rows=_multi_token_rows(first),
        )

    def bind(self, kv: LatentViews) -> tuple[BoundKernels, MapForm | None]:
        """Return the kernels that the strides and dtypes of a cache allow, and what makes maps."""
        is_aligned, maps = map_cache(kv.latent.as_cache(), kv.rope.as_cache(), self._tma_tiles)
        spec = next(
            spec
            for spec in self._mla_specs
            if spec.k_pe_dtype == DType.of(kv.rope.tensor.dtype)
            and spec.has_scales == (kv.scales is not None)
            and (spec.loader is not Loader.PLAIN) == is_aligned
        )
        return self.loader.kernels_for(self._of_cache(spec)), maps

    def _of_cache(self, first: MLASpec) -> tuple[MLASpec, ...]:
        """Return the kernels of a cache, of which ``first`` is one, those of fewer rows first."""
        return tuple(
            spec for spec in self._mla_specs if replace(spec, row_tile=first.row_tile) == first
        )


def _make_kernels(
    arch: str, index: int, specs: Sequence[AttentionSpec], pending: Sequence[Pending]
) -> BoundKernels:
    builds = dict(zip(specs, pending, strict=True))
    return BoundKernels(
        **{
            role: MLAKernel(builds[spec], spec.tile(arch), spec.row_tile, index)
            for role, spec in _by_role(specs).items()
        }
    )


def _by_role(specs: Sequence[AttentionSpec]) -> dict[Role, MLASpec]:
    """Return the kernels of a cache by role, of which one may have both ends."""
    kernels = [spec for spec in specs if isinstance(spec, MLASpec)]
    found: dict[Role, MLASpec] = {"decode": kernels[0], "prefill": kernels[-1]}
    if len(kernels) > 2:
        found["decode_multi_token"] = kernels[1]
    return found


def _multi_token_rows(specs: Sequence[AttentionSpec]) -> int:
    multi_token = _by_role(specs).get("decode_multi_token")
    return 0 if multi_token is None else multi_token.row_tile
