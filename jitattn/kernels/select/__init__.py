"""Choosing what sparse attention reads: tokens by an indexer, pages by bounds of their keys."""

from jitattn.kernels.select.spec import (
    KERNELS,
    SELECT_RANGES,
    ChoiceSpec,
    IndexLogitsSpec,
    PageBoundsSpec,
    PageScoresSpec,
    SelectConfig,
)
from jitattn.spec.family import Family

FAMILY = Family(
    name="select",
    specs=(IndexLogitsSpec, ChoiceSpec, PageBoundsSpec, PageScoresSpec),
    config=SelectConfig,
    selectors=tuple(f"kernel={kernel}" for kernel in KERNELS),
    resolve=SelectConfig.specs,
    support={"choices": SELECT_RANGES},
)
