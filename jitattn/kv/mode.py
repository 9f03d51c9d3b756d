"""Index modes of page tables: ``PageIndexMode``."""

from __future__ import annotations

from enum import StrEnum

from jitattn.base.validate import check_name


class PageIndexMode(StrEnum):
    """What page 0 of a layer's cache is.

    SHARED: the layer's own page of slot 0, and page i that of slot i. One table serves all layers
    of a group. PER_LAYER: the first page of the pool, with the pages of all layers behind each
    other. Each layer has its own table, which can list scratch.
    """

    SHARED = "shared"
    PER_LAYER = "per_layer"


def mode_of(mode: object) -> PageIndexMode:
    """Return a mode, given itself or its name.

    Raises:
        ValueError: it is none.
    """
    return PageIndexMode(check_name("mode", mode, tuple(PageIndexMode)))
