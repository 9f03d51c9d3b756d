"""Where the tests of this folder run; conftest.py skips them without such a device."""

from __future__ import annotations

import torch

from jitattn.spec.arch import arch_for

DEVICE = "cuda"


def arch_of_device() -> str:
    """What kernels of the current device are compiled for."""
    found = arch_for(*torch.cuda.get_device_capability())
    assert found is not None
    return found
