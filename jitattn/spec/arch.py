"""Architectures: one row for each compilation target. Torch-free."""

from __future__ import annotations

import re
from typing import NamedTuple

from jitattn.base.errors import ConfigError
from jitattn.base.validate import shown

_RESERVED_SMEM_BYTES = 1024
"""Shared memory of every CTA that the system reserves."""


class SMLimits(NamedTuple):
    """Limits of an SM of one compute capability (CUDA C++ Programming Guide)."""

    capability: str
    warps: int
    ctas: int
    smem_bytes: int


class Arch(NamedTuple):
    """A compilation target and the devices that run its code."""

    name: str
    major: int
    """Major number of the compute capabilities that run its code."""
    limits: tuple[SMLimits, ...]
    """Limits of an SM, for each of these capabilities."""
    has_wgmma: bool
    """Whether kernels use wgmma and TMA."""
    has_fp8_conversions: bool
    """Whether the instruction set converts FP8 to 16 bits."""
    tested_on: dict[str, str]
    """Cards that kernels were run on, by family; tests/gpu/RESULTS.md has the runs."""

    @property
    def smem_bytes(self) -> int:
        """Shared memory that one CTA may use, on every device that runs the code."""
        return min(limits.smem_bytes for limits in self.limits) - _RESERVED_SMEM_BYTES


def _tested(attention: str, mla: str, preprocess: str, pages: str, select: str) -> dict[str, str]:
    return {
        "attention": attention,
        "mla": mla,
        "preprocess": preprocess,
        "pages": pages,
        "select": select,
    }


_NOT_RUN = "compiled, not run"
_EMULATED = "compiled, and emulated on the CPU, not run"
_H200 = "run on H200, and before the last changes on H100"
_BOTH = "run on H100 and H200"
_FROM_PTX = "run from PTX on H200, before the last changes"

_ROWS = (
    Arch(
        name="sm_80",
        major=8,
        limits=(
            SMLimits("8.0", warps=64, ctas=32, smem_bytes=164 * 1024),
            SMLimits("8.6", warps=48, ctas=16, smem_bytes=100 * 1024),
            SMLimits("8.9", warps=48, ctas=24, smem_bytes=100 * 1024),
        ),
        has_wgmma=False,
        has_fp8_conversions=False,
        tested_on=_tested(_FROM_PTX, _EMULATED, _NOT_RUN, _NOT_RUN, _EMULATED),
    ),
    Arch(
        name="sm_90a",
        major=9,
        limits=(SMLimits("9.0", warps=64, ctas=32, smem_bytes=228 * 1024),),
        has_wgmma=True,
        has_fp8_conversions=True,
        tested_on=_tested(_H200, _H200, _BOTH, _BOTH, "run on H200"),
    ),
    Arch(
        name="sm_100f",
        major=10,
        limits=(SMLimits("10.0", warps=64, ctas=32, smem_bytes=228 * 1024),),
        has_wgmma=False,
        has_fp8_conversions=True,
        tested_on=_tested(_NOT_RUN, _EMULATED, _NOT_RUN, _NOT_RUN, _EMULATED),
    ),
    Arch(
        name="sm_120f",
        major=12,
        limits=(SMLimits("12.0", warps=48, ctas=24, smem_bytes=100 * 1024),),
        has_wgmma=False,
        has_fp8_conversions=True,
        tested_on=_tested(_NOT_RUN, _EMULATED, _NOT_RUN, _NOT_RUN, _EMULATED),
    ),
)

ARCHS = {arch.name: arch for arch in _ROWS}
ARCHITECTURES = tuple(ARCHS)


def arch_for(major: int, minor: int) -> str | None:
    """Return the architecture whose code a device of this compute capability runs, or None."""
    del minor  # 8.x runs sm_80 code, 10.x and 12.x their family code
    return next((arch.name for arch in _ROWS if arch.major == major), None)


def why_no_arch(arch: str) -> str:
    """Return the reason why ``arch`` has no kernels, with the known names; empty for a known one.

    For a compute capability, or another compiler's name of one, the reason names its architecture.
    """
    if isinstance(arch, str) and arch in ARCHS:
        return ""
    reason = f"{shown(arch)} is not one of {', '.join(ARCHITECTURES)}"
    if not isinstance(arch, str):
        return reason
    given = re.fullmatch(r"(?:sm_|compute_)?(\d+)\.?(\d)[af]?", arch)
    if given is None:
        return reason
    capability = f"{given[1]}.{given[2]}"
    known = arch_for(int(given[1]), int(given[2]))
    told = f"runs code for {known}" if known else "has no kernels"
    return f"{reason}; compute capability {capability} {told}"


def check_arch(arch: str) -> None:
    """Raise ConfigError unless ``arch`` is one of ``ARCHITECTURES``."""
    if reason := why_no_arch(arch):
        raise ConfigError([f"arch={reason}"])
