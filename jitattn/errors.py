"""The errors that jitattn raises besides TypeError and ValueError."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitattn.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from jitattn.base.errors import (
        CacheError,
        CompileError,
        CompilerMissingError,
        ConfigError,
        DriverError,
        JitAttnError,
        KernelNotFoundError,
        ParallelError,
        PrecompileError,
    )

__all__ = [
    "CacheError",
    "CompileError",
    "CompilerMissingError",
    "ConfigError",
    "DriverError",
    "JitAttnError",
    "KernelNotFoundError",
    "ParallelError",
    "PrecompileError",
]

__getattr__ = lazy_names(
    __name__,
    {
        "CacheError": "jitattn.base.errors",
        "CompileError": "jitattn.base.errors",
        "CompilerMissingError": "jitattn.base.errors",
        "ConfigError": "jitattn.base.errors",
        "DriverError": "jitattn.base.errors",
        "JitAttnError": "jitattn.base.errors",
        "KernelNotFoundError": "jitattn.base.errors",
        "ParallelError": "jitattn.base.errors",
        "PrecompileError": "jitattn.base.errors",
    },
)
