"""Batches that the device schedules, as launches of one kernel or of two; and plans for reuse."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import _C

from jitattn.device.driver import Launch
from jitattn.device.workspace import Workspace
from jitattn.kernels.common.kernel_launch import KernelLaunch, PlannedCall, Replay, replay
from jitattn.kernels.common.kernel_loader import BoundKernels
from jitattn.kernels.common.schedule_config import MAX_IDLE_CAPACITY, ScheduleConfigs
from jitattn.tensors.tensor_layouts import Batch

# Plans of a size that a planner keeps when they are gone.
_MAX_IDLE_PLANS = 16


class CudaPlan:
    """The schedule of a batch on the device, and the launches that use it.

    It takes a while to make, so that one that is gone serves later batches: a launch, captured or
    not, has read its parameters when it returns, and the schedule's memory is read and written in
    the order of one stream.

    Attributes:
        launches: those of its kernels, in their order; the second begins beside the first.
        schedule_launch: makes their schedules.
        is_empty: whether the batch has no requests.
        idle: where it goes when it is gone; None where its memory can't be used again.
    """

    __slots__ = ("_index", "_streams", "idle", "is_empty", "launches", "schedule_launch")

    def __init__(
        self,
        launches: Sequence[KernelLaunch],
        schedule_launch: Launch,
        device_index: int,
        stream: int | None = None,
    ) -> None:
        """Plan with these launches; the allocator knows ``stream`` to use their memory."""
        self._index = device_index
        self._streams = set() if stream is None else {stream}
        self.launches = launches
        self.schedule_launch = schedule_launch
        self.is_empty = True
        self.idle: list[CudaPlan] | None = None

    def begin(self, batch: Batch) -> None:
        """Schedule another batch, which there is capacity for."""
        self.is_empty = batch.batch_size == 0
        for launch in self.launches:
            launch.begin(batch)
        self.refresh()

    def give_back(self) -> None:
        """Leave this plan to batches to come: its own is gone."""
        # An idle one keeps nobody's tables, and not the list that keeps it.
        idle, self.idle = self.idle, None
        if idle is not None and len(idle) < _MAX_IDLE_PLANS:
            for launch in self.launches:
                launch.forget_tables()
            idle.append(self)

    def has_buffers_of(self, workspace: Workspace) -> bool:
        """Whether all buffers are those that ``workspace`` has now."""
        for launch in self.launches:
            partials, counters = launch.buffers
            if partials is not workspace.partials or counters is not workspace.counters:
                return False
        return True

    def refresh(self) -> None:
        """Launch the schedule kernel."""
        if not self.is_empty:
            self._launch(self.schedule_launch)

    def run(self, call: PlannedCall) -> None:
        """Patch the parameters of a call that was checked, and launch."""
        if self.is_empty:
            call.out.zero_()
            if call.lse is not None:
                call.lse.fill_(-math.inf)
            return
        kernels = call.kv.kernels
        if not isinstance(kernels, BoundKernels):
            raise ValueError("kv was bound by a planner of the reference backend")
        for launch in self.launches:
            launch.patch(call)
            for step in launch.steps_of(kernels):
                self._launch(step)

    def write_query_scale(self, scale: object) -> None:
        """Write the scale of queries that kernels read with theirs."""
        for launch in self.launches:
            launch.write_query_scale(scale)

    def replay_of(self, call: PlannedCall) -> Replay | None:
        """Return what repeats ``call``, the last one, with other addresses; None if nothing can."""
        stream = _C._cuda_getCurrentRawStream(self._index)
        is_aligned = call.q_layout.is_aligned(call.q.data_ptr()) and call.out_layout.is_aligned(
            call.out.data_ptr()
        )
        if self.is_empty or stream not in self._streams or not is_aligned:
            return None
        return replay(call, self.launches, self._index, stream)

    def _launch(self, launch: Launch) -> None:
        stream = _C._cuda_getCurrentRawStream(self._index)
        if stream not in self._streams:
            self._lend_memory(stream)
        elif self.idle is not None and torch.cuda.is_current_stream_capturing():
            self.idle = None  # a graph uses our memory as long as it lives
        if _C._cuda_getDevice() == self._index:
            launch(stream)
        else:
            with torch.cuda.device(self._index):
                launch(stream)

    def _lend_memory(self, stream: int) -> None:
        """Keep our memory from others until ``stream``, the current one, is done with it.

        It was allocated on another stream, whose next tensor could get it when the plan is gone.
        """
        self.idle = None
        with torch.cuda.device(self._index):
            if torch.cuda.is_current_stream_capturing():
                return  # who replays the graph keeps the plan
            for launch in self.launches:
                launch.record_stream(torch.cuda.current_stream())
        self._streams.add(stream)


class PlanPool:
    """The idle plans of a planner, by workspace, kernels and capacities."""

    def __init__(self) -> None:
        """Keep none."""
        self._idle: defaultdict[
            tuple[Workspace, ScheduleConfigs, tuple[int, ...]], list[CudaPlan]
        ] = defaultdict(list)

    def take(
        self, workspace: Workspace, configs: ScheduleConfigs, capacities: tuple[int, ...]
    ) -> tuple[CudaPlan | None, list[CudaPlan] | None]:
        """Return an idle plan or None, and where it goes when it is gone again.

        The second is None where plans are too large to keep.
        """
        if max(capacities) > MAX_IDLE_CAPACITY:
            return None, None
        idle = self._idle[workspace, configs, capacities]
        try:
            return idle.pop() if idle else None, idle
        except IndexError:  # another thread was faster
            return None, idle
