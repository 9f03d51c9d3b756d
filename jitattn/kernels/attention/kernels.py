"""The kernels of a planner on a CUDA device, and the plans that launch them."""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import _C

from jitattn.base import knobs
from jitattn.device.driver import device_facts, load_kernel
from jitattn.device.workspace import Workspace, capture_buffers, default_workspace
from jitattn.jit.build import Pending, start
from jitattn.kernels.attention.config import attention_specs, wide_row_tile
from jitattn.kernels.attention.launch import CudaPlan, Part
from jitattn.kernels.attention.loaded_kernels import AttentionKernel, BoundKernels, Role
from jitattn.kernels.attention.schedule import (
    MAX_IDLE_ROOM,
    AttentionArguments,
    Recipe,
    Recipes,
    plan_bytes,
    workspace_size,
)
from jitattn.kernels.attention.spec import DecodeSpec, PrefillSpec
from jitattn.kernels.common.device_kernels import arch_of
from jitattn.kernels.common.spec import AttentionSpec, ScheduleSpec
from jitattn.kernels.common.tile import DecodeTile
from jitattn.spec.config import PlannerConfig
from jitattn.spec.family import KernelSpec
from jitattn.spec.layout import Loader
from jitattn.tensors.block_caches import BlockArguments, BlockCaches
from jitattn.tensors.cache_views import Batch, CacheView
from jitattn.tensors.tma import Box, TensorMaps, box_of


@dataclass(frozen=True)
class KernelInfo:
    """One kernel of a planner: where it came from and what it costs.

    ``origin`` is "compiled", "disk", "precompiled" or "memory"; ``smem_bytes`` counts static and
    dynamic shared memory of a CTA.
    """

    name: str
    arch: str
    origin: str
    seconds: float
    registers: int
    spill_bytes: int
    smem_bytes: int
    compiler: str


class KernelSet:
    """The kernels of a configuration on a device; the plain loader's are built when needed.

    Nobody waits for a prefill or a wide decode kernel to compile before a plan needs one.

    Attributes:
        is_latent: whether its kernels are those of latent attention.
        part_type: what launches one of them.
        wide_rows: the row tile of the wide kernel; 0 where there is none.
        max_splits: the most splits of a request that a batch-invariant plan makes.
        unit_cost, min_slot_cost: what a visit to a unit costs a CTA, and the least that is worth a
            CTA, in tiles.
    """

    is_latent: ClassVar[bool] = False
    part_type: ClassVar[type[Part]] = Part
    # More and shorter splits balance better and merge longer.
    max_splits: ClassVar[int] = 16
    # Measured: docs/perf-log.md.
    unit_cost: ClassVar[int] = 1
    min_slot_cost: ClassVar[int] = 1

    config: AttentionArguments

    def __init__(self, config: AttentionArguments, device: torch.device) -> None:
        assert device.index is not None
        _refuse_loading()
        self.config = config
        self.device = device
        self.facts = device_facts(device.index)
        self.arch = arch_of(self.facts)
        self._lock = threading.Lock()
        self._started: list[tuple[KernelSpec, Pending]] = []
        self._needed: frozenset[Role] = frozenset(("decode",))
        # Plans that are gone, by workspace, kernels and room.
        self._idle: defaultdict[tuple[Workspace, Recipes, tuple[int, ...]], list[CudaPlan]]
        self._idle = defaultdict(list)
        self._specs = self._find_specs()
        self.wide_rows = self._find_wide_rows()
        self._wide_max_q_len = self.wide_rows // config.group_size
        decode, *others = self._main_specs()
        self._takes_maps = any(spec.loader is Loader.TENSOR for spec in (decode, *others))
        schedule = ScheduleSpec()
        # In this order: on few cores the prefill kernel takes the one that the schedule frees.
        pending = self._start((decode, schedule, *others))
        self.kernels = self._attention_kernels((decode, *others), (pending[0], *pending[2:]))
        self._bound = {(decode, *others): self.kernels}
        tile = schedule.tile(self.arch)
        built = pending[1].result()
        self.schedule_kernel = load_kernel(
            built.cubin, built.symbol, self.facts.index, tile.smem_bytes
        )
        self.schedule_threads = tile.num_threads
        self.kernels.load(self._needed)

    def bind(self, k: CacheView, v: CacheView) -> tuple[BoundKernels, TensorMaps | None]:
        """Return the kernels whose loaders the strides of ``k`` and ``v`` allow.

        And the tensor maps of K and V, if the decode kernel's loader uses some.
        """
        is_aligned, maps = self._maps_of(k, v)
        return self._kernels_for(self._specs_of_loader(is_aligned=is_aligned)), maps

    def _maps_of(self, k: CacheView, v: CacheView) -> tuple[bool, TensorMaps | None]:
        """Return whether the loader of aligned caches suits K and V, and the maps that it uses."""
        if not (k.is_vector_aligned and v.is_vector_aligned):
            return False, None
        if not self._takes_maps:
            return True, None
        try:
            return True, TensorMaps(k, v, self._boxes)
        except ValueError:
            return False, None  # any strides will do for the plain loader

    def bind_blocks(self, caches: BlockCaches) -> tuple[BoundKernels, BlockArguments]:
        """Return the same of an NVFP4 cache, with what its launches say of the scales of blocks."""
        specs = self._specs_of_loader(is_aligned=caches.is_vector_aligned)
        return self._kernels_for(specs), BlockArguments(caches)

    @functools.cached_property
    def _boxes(self) -> dict[str, Box]:
        """What the kernels that tensor maps are for bring at a time."""
        # Not every configuration has a wide kernel.
        roles = zip(
            ("decode", "prefill", "wide"), self._specs_of_loader(is_aligned=True), strict=False
        )
        return {
            role: box_of(spec.tile(self.arch), spec.head_dim)
            for role, spec in roles
            if spec.loader is Loader.TENSOR
        }

    def _kernels_for(self, specs: Sequence[AttentionSpec]) -> BoundKernels:
        key = tuple(specs)
        if key not in self._bound:
            _refuse_loading()
        with self._lock:
            if key not in self._bound:
                self._bound[key] = self._attention_kernels(specs, self._start(specs))
            kernels, needed = self._bound[key], self._needed
        kernels.load(needed)
        return kernels

    def need(self, role: Role) -> None:
        """Load the kernels that are for this, those of caches still to be bound too.

        So that no run has to: it may be captured, and nothing is loaded in a capture.
        """
        if role in self._needed:
            return
        _refuse_loading()
        while True:
            bound = tuple(self._bound.values())
            for kernels in bound:
                kernels.load((role,))
            # What can't be loaded is not needed of later caches, either: others may do without.
            with self._lock:
                if len(bound) == len(self._bound):
                    self._needed = self._needed.union((role,))
                    return

    def plan(self, workspace: Workspace | None, batch: Batch) -> CudaPlan:
        """Return a plan of ``batch``, whose schedule the device makes.

        Raises:
            ValueError: in a capture.
        """
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("plan() inside a capture: plan before it and capture plan.refresh()")
        recipes = self.recipes_for(batch.max_q_len)
        size = batch.batch_size, batch.max_q_len
        rooms = tuple([recipe.room_for(*size) for recipe in recipes])
        if workspace is None:
            plan = self._plan_on_this_stream(recipes, rooms)
        else:
            plan = CudaPlan(self, workspace.reserve(*workspace_size(recipes)), recipes, rooms)
        plan.begin(batch)
        return plan

    def plan_in_capture(self, batch: Batch) -> CudaPlan:
        """Return a plan whose memory and whose schedule are those of the graph that is captured.

        Nothing but that graph can run it: outside of a replay there is no schedule.

        Raises:
            ValueError: the batch needs a kernel that isn't loaded.
        """
        recipes = self.recipes_for(batch.max_q_len)
        size = batch.batch_size, batch.max_q_len
        rooms = tuple([recipe.room_for(*size) for recipe in recipes])
        buffers = capture_buffers(self.device, *workspace_size(recipes))
        stream = _C._cuda_getCurrentRawStream(self.facts.index)
        plan = CudaPlan(self, buffers, recipes, rooms, stream)
        plan.begin(batch)
        return plan

    def recipes_for(self, max_q_len: int) -> Recipes:
        """Return those of the kernels that a batch needs, which are loaded then."""
        recipes = self._recipes(max_q_len)
        if recipes is not self._narrow:
            if self._wide_max_q_len:
                self.need("wide")
            if recipes is self._mixed:
                self.need("prefill")
        return recipes

    def _recipes(self, max_q_len: int) -> Recipes:
        # Without requests of many rows the others would have nothing to do.
        if max_q_len <= self.decode_recipe.max_q_len:
            return self._narrow
        return self._wide if max_q_len <= self._wide_max_q_len else self._mixed

    def plan_bytes(self, batch_size: int, max_q_len: int) -> int:
        """Return the bytes that a plan takes; nothing is loaded for it."""
        return plan_bytes(self._recipes(max_q_len), batch_size, max_q_len)

    def _plan_on_this_stream(self, recipes: Recipes, rooms: tuple[int, ...]) -> CudaPlan:
        """Return a plan that an earlier one left, or a new one."""
        stream = _C._cuda_getCurrentRawStream(self.facts.index)
        workspace = default_workspace(self.device, stream)
        idle = self._idle[workspace, recipes, rooms] if rooms[-1] <= MAX_IDLE_ROOM else None
        try:
            plan = idle.pop() if idle else None
        except IndexError:  # another thread was faster
            plan = None
        if plan is None or not plan.has_buffers_of(workspace):  # it grows
            buffers = workspace.reserve(*workspace_size(recipes))
            plan = CudaPlan(self, buffers, recipes, rooms, stream)
        plan.idle = idle
        return plan

    # Two threads may make one each: they are alike.
    @functools.cached_property
    def decode_recipe(self) -> Recipe:
        """What plans have in common of the decode kernel."""
        return Recipe(self, "decode")

    @functools.cached_property
    def prefill_recipe(self) -> Recipe:
        """What plans have in common of the prefill kernel."""
        return Recipe(self, "prefill")

    @functools.cached_property
    def _narrow(self) -> Recipes:
        return (self.decode_recipe,)

    @functools.cached_property
    def _wide(self) -> Recipes:
        return (Recipe(self, "wide"),)

    @functools.cached_property
    def _mixed(self) -> Recipes:
        # The same kernel takes a request whatever else a plan is for.
        return (*(self._wide if self._wide_max_q_len else self._narrow), self.prefill_recipe)

    def infos(self) -> list[KernelInfo]:
        """Return the kernels asked for so far, and wait for those that still compile."""
        infos = []
        for spec, pending in tuple(self._started):
            kernel = pending.result()
            info = KernelInfo(
                name=kernel.symbol,
                arch=kernel.arch,
                origin=kernel.origin,
                seconds=kernel.seconds,
                registers=kernel.registers,
                spill_bytes=kernel.spill_bytes,
                smem_bytes=kernel.smem_bytes + spec.tile(self.arch).smem_bytes,
                compiler=kernel.compiler,
            )
            infos.append(info)
        return infos

    def _find_specs(self) -> tuple[KernelSpec, ...]:
        assert isinstance(self.config, PlannerConfig)
        return attention_specs(self.config, self.arch)

    def _find_wide_rows(self) -> int:
        assert isinstance(self.config, PlannerConfig)
        return wide_row_tile(self.config)

    def _main_specs(self) -> Sequence[AttentionSpec]:
        """Return the specs of the kernels that nearly all caches need."""
        return self._specs_of_loader(is_aligned=True)

    def _specs_of_loader(self, *, is_aligned: bool) -> list[DecodeSpec | PrefillSpec]:
        """Return the specs of the decode and the prefill kernel, and of the wide one if any."""
        return [
            spec
            for spec in self._specs
            if isinstance(spec, DecodeSpec | PrefillSpec)
            and (spec.loader is not Loader.PLAIN) == is_aligned
        ]

    def _start(self, specs: Sequence[KernelSpec]) -> tuple[Pending, ...]:
        pending = start(specs, self.arch, knobs.load(), hint=self.config.arguments_text())
        self._started += zip(specs, pending, strict=True)
        return pending

    def _attention_kernels(
        self, specs: Sequence[AttentionSpec], pending: Sequence[Pending]
    ) -> BoundKernels:
        decode, prefill, *wide = (
            self._attention_kernel(spec, build) for spec, build in zip(specs, pending, strict=True)
        )
        return BoundKernels(decode, prefill, wide[0] if wide else None)

    def _attention_kernel(self, spec: AttentionSpec, pending: Pending) -> AttentionKernel:
        tile = spec.tile(self.arch)
        rows = spec if isinstance(spec, DecodeSpec) else tile
        assert not isinstance(rows, DecodeTile)
        return AttentionKernel(pending, tile, rows.row_tile, self.facts.index)


def _refuse_loading() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "a kernel is not loaded, and a capture can't load it: make such a call before it"
        )
