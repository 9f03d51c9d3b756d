"""A batch that the device schedules, as launches of one kernel or of two."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import _C

from jitattn.device.driver import Launch
from jitattn.device.workspace import Workspace
from jitattn.kernels.common.kernel_launch import KernelLaunch, PlannedCall, Replay, replay
from jitattn.kernels.common.plan_pool import MAX_IDLE_PLANS
from jitattn.kernels.common.planned_kernel import BoundKernels
from jitattn.tensors.tensor_layouts import Batch


class CudaPlan:
    """The schedule of a batch on the device, and the launches that use it.

    It takes a while to make, so that one that is gone serves later batches: a launch, captured or
    not, has read its parameters when it returns, and the schedule's memory is read and written in
    the order of one stream.

    Attributes:
        launches: those of its kernels, which have the same memory one after the other.
        is_empty: whether the batch has no requests.
        idle: where it goes when it is gone; None where its memory can't be used again.
    """

    __slots__ = ("_index", "_streams", "idle", "is_empty", "launches")

    def __init__(
        self, launches: Sequence[KernelLaunch], device_index: int, stream: int | None = None
    ) -> None:
        """Plan with these launches; the allocator knows ``stream`` to use their memory."""
        self._index = device_index
        self._streams = set() if stream is None else {stream}
        self.launches = launches
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
        if idle is not None and len(idle) < MAX_IDLE_PLANS:
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
        """Launch the schedule kernels."""
        if not self.is_empty:
            for launch in self.launches:
                self._launch(launch.schedule_launch)

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

    def replay_of(self, call: PlannedCall) -> Replay | None:
        """Return what repeats ``call``, the last one, with other addresses; None if nothing can."""
        stream = _C._cuda_getCurrentRawStream(self._index)
        if self.is_empty or stream not in self._streams:
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
