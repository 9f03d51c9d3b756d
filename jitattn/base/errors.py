"""Exceptions raised by jitattn.

JitAttnError
  + ConfigError               no kernel, or no meaning, for these arguments      (also ValueError)
  + TemplateError             a template failed to render: a bug in templates/
  + CompileError              NVRTC rejected the rendered source                 (also RuntimeError)
  |   + CompilerMissingError  NVRTC cannot be loaded here, or a kernel needs nvidia-cutlass
  + PrecompileError           some kernels of a bundle could not be made
  + KernelNotFoundError       JIT is off and no cache holds the kernel         (also LookupError)
  + CacheError                a cache or bundle that must not be used            (also OSError)
  + DriverError               the CUDA driver refused a call                     (also RuntimeError)
  + KVCacheError              the page manager was misused                       (also RuntimeError)
  + ParallelError             another rank failed, refused or is gone            (also RuntimeError)

All of them survive pickling, since precompilation reports failures from worker processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

_LOG_LINES_SHOWN = 40


class JitAttnError(Exception):
    """Base class of all errors that jitattn raises on purpose."""


class ConfigError(JitAttnError, ValueError):
    """No kernel exists for these arguments, or they contradict each other.

    Attributes:
        reasons: all reasons, not only the first.
    """

    def __init__(self, reasons: Sequence[str]) -> None:
        """Keep every reason; a single string is one reason."""
        self.reasons: tuple[str, ...] = (reasons,) if isinstance(reasons, str) else tuple(reasons)
        super().__init__(self.reasons)

    def __str__(self) -> str:
        """Join the reasons."""
        return "; ".join(self.reasons)


class TemplateError(JitAttnError):
    """A template failed to render."""


class CompileError(JitAttnError, RuntimeError):
    """NVRTC rejected a rendered source.

    Attributes:
        name: name of the program, for example ``"jitattn_decode_d128_p16.cu"``.
        log: NVRTC's messages, with file names and lines of templates/.
        source: the rendered CUDA source.
        source_path: path of the saved source, or None without a writable folder.
    """

    def __init__(self, name: str, log: str, source: str, source_path: Path | None = None) -> None:
        """Describe one failed compilation."""
        super().__init__(name, log, source, source_path)
        self.name = name
        self.log = log
        self.source = source
        self.source_path = source_path

    @property
    def first_error(self) -> str:
        """The first error line of the log, from which the others often follow."""
        lines = [line.strip() for line in self.log.splitlines() if line.strip()]
        return next((line for line in lines if "error" in line), lines[0] if lines else "no log")

    def __repr__(self) -> str:
        """Leave out the log and the source."""
        return f"{type(self).__name__}({self.name!r}, {self.first_error!r})"

    def __str__(self) -> str:
        """Show the log, shortened; the last line is the first error."""
        where = self.source_path or "not saved (no writable temporary folder)"
        lines = self.log.strip().splitlines()
        if len(lines) > _LOG_LINES_SHOWN:
            lines = [*lines[:_LOG_LINES_SHOWN], f"({len(lines) - _LOG_LINES_SHOWN} more lines)"]
        head = f"{self.name} does not compile: {self.first_error}"
        return "\n".join([head, *lines, f"rendered source: {where}", self.first_error])


class CompilerMissingError(CompileError):
    """NVRTC or its Python binding cannot be loaded here, or a kernel needs nvidia-cutlass."""

    def __init__(self, reason: str) -> None:
        """Keep the reason: the missing part and the package to install."""
        super().__init__("NVRTC", reason, "")
        self.args = (reason,)

    def __str__(self) -> str:
        """Return the reason; there is no log and no source."""
        return self.log


class PrecompileError(JitAttnError):
    """Some kernels could not be put into a bundle; the message has the first error, and how many.

    Attributes:
        report: what ``precompile`` with ``strict=False`` returns: kernels made, and all failures.
    """

    def __init__(self, message: str, report: Any) -> None:
        """Describe a bundle that lacks kernels."""
        super().__init__(message, report)
        self.report = report

    def __str__(self) -> str:
        """Return the message."""
        return str(self.args[0])


class KernelNotFoundError(JitAttnError, LookupError):
    """JIT is off and neither a bundle nor the user's cache holds the kernel."""


class CacheError(JitAttnError, OSError):
    """A cache or bundle is unsafe to use: others may write to it, or it is not a folder."""


class DriverError(JitAttnError, RuntimeError):
    """The CUDA driver refused a call."""


class KVCacheError(JitAttnError, RuntimeError):
    """The page manager was misused: a closed sequence, a shrinking history, a second close."""


class ParallelError(JitAttnError, RuntimeError):
    """Ranks could not finish together: one of them failed, refused its arguments or is gone."""
