"""What kernel families share: planner base, launch cache, torch operators, the schedule kernel."""

from jitattn.kernels.common.spec import ScheduleSpec
from jitattn.spec.family import Family

FAMILY = Family(name="schedule", specs=(ScheduleSpec,))
