"""Where the tests of this folder run; conftest.py skips them without such a device."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from jitattn.spec.arch import arch_for

DEVICE = "cuda"


def arch_of_device() -> str:
    """What kernels of the current device are compiled for."""
    found = arch_for(*torch.cuda.get_device_capability())
    assert found is not None
    return found


def side_by_side(work: Callable[[int], None], count: int) -> None:
    """Do the work of 0, 1 ... on a thread each; raise what one of them raises."""
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))
