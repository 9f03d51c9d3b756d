"""A kernel without machine code, where only what is asked for and loaded counts."""

from __future__ import annotations

from typing import Any

from jitattn.jit.build import Kernel
from jitattn.spec.family import KernelSpec


def empty_kernel(spec: KernelSpec, **changes: Any) -> Kernel:
    """What a build returns for ``spec``, with nothing in it."""
    facts = {"arch": "sm_90a", "origin": "disk", "compiler": "none", "seconds": 0.0}
    sizes = {"registers": 8, "spill_bytes": 0, "smem_bytes": 16}
    names = {"symbol": spec.symbol, "entry": spec.symbol}
    return Kernel(**{"spec": spec, "cubin": b"", **facts, **sizes, **names, **changes})
