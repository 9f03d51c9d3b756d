"""Plans that are gone, kept for later batches of their size."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from jitattn.kernels.common.schedule_config import MAX_IDLE_CAPACITY, ScheduleConfigs

if TYPE_CHECKING:
    from jitattn.device.workspace import Workspace
    from jitattn.kernels.common.cuda_plan import CudaPlan

# Plans of a size that a planner keeps when they are gone.
MAX_IDLE_PLANS = 16


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
        if capacities[-1] > MAX_IDLE_CAPACITY:
            return None, None
        idle = self._idle[workspace, configs, capacities]
        try:
            return idle.pop() if idle else None, idle
        except IndexError:  # another thread was faster
            return None, idle
