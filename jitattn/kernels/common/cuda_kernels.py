"""The kernels of a planner on a CUDA device: choice, schedules, and plans that launch them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import _C

from jitattn.base.validate import INT32_MAX
from jitattn.device.driver import DeviceFacts, Launch, device_facts
from jitattn.device.workspace import Workspace, capture_buffers, default_workspace
from jitattn.kernels.common.cuda_plan import CudaPlan, PlanPool
from jitattn.kernels.common.device_kernels import arch_of
from jitattn.kernels.common.kernel_launch import KernelLaunch
from jitattn.kernels.common.kernel_loader import (
    BoundKernels,
    KernelInfo,
    KernelLoader,
    KernelMaker,
    Role,
)
from jitattn.kernels.common.params import MAX_KERNELS, ListScheduleParams, ScheduleParams
from jitattn.kernels.common.schedule_config import (
    AttentionArguments,
    FamilyTraits,
    ScheduleConfig,
    ScheduleConfigs,
    is_prefill,
    plan_bytes,
    schedule_config,
    workspace_places,
    workspace_size,
)
from jitattn.kernels.common.spec import AttentionSpec, ScheduleSpec
from jitattn.kernels.common.tma import MapForm, TmaTile
from jitattn.spec.layout import LISTS, ListLayout
from jitattn.tensors.cache_views import CacheView
from jitattn.tensors.tensor_layouts import Batch


class TargetDevice(NamedTuple):
    """A CUDA device, and the architecture whose code it runs."""

    device: torch.device
    facts: DeviceFacts
    arch: str

    @classmethod
    def of(cls, device: torch.device) -> TargetDevice:
        """Look a device up.

        Raises:
            ConfigError: no kernel runs on it.
        """
        assert device.index is not None
        facts = device_facts(device.index)
        return cls(device, facts, arch_of(facts))


class CudaKernels:
    """What plans batches for the kernels of a configuration; see ``Kernels`` of planner_base.

    Attributes:
        config: the planner's arguments.
        device: where tensors and schedules are.
        traits: those of the kernels' family.
        specs: the specs of all kernels of the configuration.
        loader: builds and loads the kernels.
        multi_token_rows: the row tile of the multi-token decode kernel; 0 where there is none.
        narrow_rows: the same of the prefill kernel of few rows.
    """

    def __init__(
        self,
        config: AttentionArguments,
        target: TargetDevice,
        traits: FamilyTraits,
        *,
        specs: Sequence[AttentionSpec],
        main_specs: Sequence[AttentionSpec],
        make_kernels: KernelMaker,
        launch_type: type[KernelLaunch] = KernelLaunch,
        multi_token_rows: int = 0,
        narrow_rows: int = 0,
    ) -> None:
        """Start to build the kernels that nearly all caches need, and load those of decode.

        Args:
            config: the planner's arguments.
            target: the device.
            traits: those of the kernels' family.
            specs: the specs of all kernels of the configuration.
            main_specs: those of most caches; the first is decode's.
            make_kernels: how kernels are made of specs.
            launch_type: what launches one of them.
            multi_token_rows: the row tile of the multi-token decode kernel; 0 for none.
            narrow_rows: the same of the prefill kernel of few rows.
        """
        self.config = config
        self.device = target.device
        self.traits = traits
        self.specs = specs
        self.multi_token_rows = multi_token_rows
        self.narrow_rows = narrow_rows
        self._target = target
        self._launch_type = launch_type
        self._multi_token_q_len = multi_token_rows // config.group_size
        self._pool = PlanPool()
        self._configs: dict[tuple[object, ...], ScheduleConfigs] = {}
        self.loader = KernelLoader(
            main_specs,
            make_kernels,
            device_index=target.facts.index,
            arch=target.arch,
            hint=config.arguments_text(),
            schedule=ScheduleSpec(has_lists=config.page_table in LISTS),
        )

    @property
    def kernels(self) -> BoundKernels:
        """The kernels of most caches."""
        return self.loader.kernels

    def plan(self, workspace: Workspace | None, batch: Batch) -> CudaPlan:
        """Return a plan of ``batch``, whose schedule the device makes.

        Raises:
            ValueError: in a capture.
        """
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("plan() inside a capture: plan before it and capture plan.refresh()")
        configs = self.schedule_configs(batch.max_q_len, has_offsets=batch.qo_indptr is not None)
        size = batch.batch_size, batch.max_q_len
        capacities = tuple([config.capacity_for(*size) for config in configs])
        if workspace is None:
            plan = self._plan_on_this_stream(configs, capacities)
        else:
            plan = self._new_plan(configs, capacities, workspace.reserve(*workspace_size(configs)))
        plan.begin(batch)
        return plan

    def plan_for_call(self, workspace: Workspace | None, batch: Batch) -> CudaPlan:
        """Return a plan that is run once, by the call that makes it, which may be captured.

        Raises:
            ValueError: the batch needs a kernel that isn't loaded, in a capture.
        """
        if torch.cuda.is_current_stream_capturing():
            return self.plan_in_capture(batch)
        return self.plan(workspace, batch)

    def plan_in_capture(self, batch: Batch) -> CudaPlan:
        """Return a plan whose memory and whose schedule are those of the graph that is captured.

        Nothing but that graph can run it: outside of a replay there is no schedule.

        Raises:
            ValueError: the batch needs a kernel that isn't loaded.
        """
        configs = self.schedule_configs(batch.max_q_len, has_offsets=batch.qo_indptr is not None)
        size = batch.batch_size, batch.max_q_len
        capacities = tuple([config.capacity_for(*size) for config in configs])
        buffers = capture_buffers(self.device, *workspace_size(configs))
        stream = _C._cuda_getCurrentRawStream(self._target.facts.index)
        plan = self._new_plan(configs, capacities, buffers, stream)
        plan.begin(batch)
        return plan

    def schedule_configs(self, max_q_len: int, *, has_offsets: bool = True) -> ScheduleConfigs:
        """Return those of the kernels that a batch needs, which are loaded then.

        Args:
            max_q_len: the most query tokens of a request.
            has_offsets: whether requests may have other numbers of query tokens than one.
        """
        configs = self._chosen(max_q_len, has_offsets=has_offsets)
        for config in configs:
            self.loader.need(config.role)
        return configs

    def plan_bytes(self, batch_size: int, max_q_len: int) -> int:
        """Return the bytes that a plan takes; nothing is loaded for it."""
        return plan_bytes(self._chosen(max_q_len), batch_size, max_q_len)

    def of(self, config: AttentionArguments) -> Self:
        """Return the kernels of another configuration on the same device."""
        other = type(self)(config, self._target.device)  # type: ignore[call-arg, arg-type]
        other.device = self.device
        return other

    def infos(self) -> list[KernelInfo]:
        """Return the kernels asked for so far, and wait for those that still compile."""
        return self.loader.infos()

    def _chosen(self, max_q_len: int, *, has_offsets: bool = True) -> ScheduleConfigs:
        if self.config.page_table == ListLayout.PAGE_LISTS:
            return self._of_page_lists(max_q_len)
        if self.config.page_table == ListLayout.INDICES:  # whose tokens are planned alone
            return self._decode
        prefill: Role = "prefill"
        if self.narrow_rows and max_q_len * self.config.group_size <= self.narrow_rows:
            prefill = "prefill_narrow"
        if self.config.batch_invariant:
            is_alone = self.traits.has_one_kernel or not has_offsets
            return self._invariant(prefill, is_alone=is_alone)
        # Without requests of many rows the others would have nothing to do.
        if max_q_len <= self._decode[0].max_q_len:
            return self._decode
        if max_q_len <= self._multi_token_q_len:
            return self._multi_token
        # One that computes decode, too, would be launched twice.
        return self._alone(prefill) if self.traits.has_one_kernel else self._mixed(prefill)

    def _new_plan(
        self,
        configs: ScheduleConfigs,
        capacities: tuple[int, ...],
        buffers: tuple[torch.Tensor, torch.Tensor],
        stream: int | None = None,
    ) -> CudaPlan:
        places = workspace_places(configs)[:-1]
        kind: Any = ListScheduleParams if configs[0].has_lists else ScheduleParams
        params = (kind * MAX_KERNELS)(*(kind.from_buffer_copy(c.schedule_params) for c in configs))
        launches = [
            self._launch_type(config, capacity, buffers, self.device, place, params[place.number])
            for config, capacity, place in zip(configs, capacities, places, strict=True)
        ]
        kernel, num_threads = configs[0].schedule_kernel  # that of all
        schedule_launch = Launch(kernel, params, len(launches), num_threads)
        return CudaPlan(launches, schedule_launch, self._target.facts.index, stream)

    def _plan_on_this_stream(
        self, configs: ScheduleConfigs, capacities: tuple[int, ...]
    ) -> CudaPlan:
        """Return a plan that an earlier one left, or a new one."""
        stream = _C._cuda_getCurrentRawStream(self._target.facts.index)
        workspace = default_workspace(self.device, stream)
        plan, idle = self._pool.take(workspace, configs, capacities)
        if plan is None or not plan.has_buffers_of(workspace):  # it grows
            buffers = workspace.reserve(*workspace_size(configs))
            plan = self._new_plan(configs, capacities, buffers, stream)
        plan.idle = idle
        return plan

    def _of_page_lists(self, max_q_len: int) -> ScheduleConfigs:
        """Return the decode kernel's, with as many row tiles as requests fill."""
        role: Role = "decode"
        if self._multi_token_q_len and max_q_len > self._decode[0].max_q_len:
            role = "decode_multi_token"
        row_tile = self.kernels.of(role).row_tile
        num_row_blocks = -(-max(max_q_len, 1) * self.config.group_size // row_tile)
        return self._remembered(
            (role, num_row_blocks),
            lambda: (self._schedule_config(role, num_row_blocks=num_row_blocks),),
        )

    # Two threads may make one each: they are alike.
    @functools.cached_property
    def _decode(self) -> ScheduleConfigs:
        return (self._schedule_config("decode"),)

    @functools.cached_property
    def _multi_token(self) -> ScheduleConfigs:
        return (self._schedule_config("decode_multi_token"),)

    def _mixed(self, prefill: Role) -> ScheduleConfigs:
        # The same kernel takes a request whatever else a plan is for. That of decode comes second:
        # it begins where CTAs of the other have ended, and ends at once if it has no request.
        decode = self._multi_token if self._multi_token_q_len else self._decode
        return self._remembered(
            ("mixed", prefill), lambda: (self._schedule_config(prefill), *decode)
        )

    def _invariant(self, prefill: Role, *, is_alone: bool) -> ScheduleConfigs:
        # A token has the same bits in a decode step and in a prefill if one kernel computes both.
        if is_alone:
            return self._alone(prefill)
        # The decode kernel writes the rows of invalid requests and those of none.
        return self._remembered(
            ("invariant", prefill),
            lambda: (
                self._schedule_config(prefill, decode_rows=0),
                self._schedule_config("decode", decode_rows=0),
            ),
        )

    def _alone(self, prefill: Role) -> ScheduleConfigs:
        return self._remembered(
            ("alone", prefill), lambda: (self._schedule_config(prefill, decode_rows=-1),)
        )

    def _remembered(
        self, key: tuple[object, ...], make: Callable[[], ScheduleConfigs]
    ) -> ScheduleConfigs:
        found = self._configs.get(key)
        return self._configs.setdefault(key, make()) if found is None else found

    def _schedule_config(
        self, role: Role, decode_rows: int | None = None, *, num_row_blocks: int | None = None
    ) -> ScheduleConfig:
        kernel = self.kernels.of(role)
        # What doesn't fit the tile of a plan's decode kernel is for the prefill kernel.
        if decode_rows is None:
            decode_rows = kernel.row_tile
            if is_prefill(role):
                decode_rows = self.multi_token_rows or self.kernels.decode.row_tile
        if self.config.page_table in LISTS:  # which decode kernels take all of
            decode_rows = INT32_MAX
        return schedule_config(
            self.config,
            self.traits,
            role,
            kernel,
            self.loader.schedule_kernel,
            num_sms=self._target.facts.num_sms,
            decode_rows=decode_rows,
            num_row_blocks=num_row_blocks,
        )


def map_cache(
    k: CacheView, v: CacheView, tma_tiles: Mapping[str, TmaTile]
) -> tuple[bool, MapForm | None]:
    """Return whether the loader of aligned caches suits K and V, and the form of maps it uses.

    Args:
        k: keys.
        v: values.
        tma_tiles: what the kernels load at a time through TMA, by role; none if they don't.
    """
    if not (k.is_vector_aligned and v.is_vector_aligned):
        return False, None
    if not tma_tiles:
        return True, None
    form = MapForm(k, v, tma_tiles)
    try:
        form((k, v))
    except ValueError:
        return False, None  # any strides will do for the plain loader
    return True, form
