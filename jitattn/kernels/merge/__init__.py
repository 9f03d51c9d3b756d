"""Merging attention states."""

from jitattn.kernels.merge.spec import MergeSpec
from jitattn.spec.family import Family

FAMILY = Family(
    name="merge",
    specs=(MergeSpec,),
)
