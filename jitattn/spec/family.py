"""Kernels as values, and the families that define them. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, ClassVar, NamedTuple, Protocol

from jitattn.base.record import Value
from jitattn.spec.variant import AttentionVariant


class Tile(Protocol):
    """Shape of a CTA on an architecture: a named tuple whose fields are template variables."""

    @property
    def num_threads(self) -> int:
        """Threads of a CTA."""
        ...

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        ...

    def _asdict(self) -> dict[str, Any]: ...


class KernelSpec(Value):
    """A kernel: fields are what changes its machine code, and nothing that a launch could say."""

    kernel: ClassVar[str]
    """Name of the kernel within its family, with which symbols begin."""
    path: ClassVar[str]
    """The template, as a path below templates/, where every architecture has the same one."""
    cta: ClassVar[Tile]
    """The shape of a CTA, likewise."""

    @property
    def symbol(self) -> str:
        """Name of the ``extern "C"`` kernel: unique per spec and readable in a profile."""
        raise NotImplementedError

    @property
    def transform(self) -> AttentionVariant | None:
        """The user's code that is part of the kernel."""
        return None

    def context(self) -> dict[str, object]:
        """Return the template variables of this spec: its fields and its symbol."""
        return {k: plain(v) for k, v in vars(self).items()} | {"symbol": self.symbol}

    def tile(self, arch: str) -> Tile:
        """Return the shape of a CTA on ``arch``."""
        return self.cta

    def template(self, arch: str) -> str:
        """Return the template on ``arch``, as a path below templates/."""
        return self.path

    def config_text(self) -> str:
        """Return arguments that select the kernel, as ``--config`` takes them."""
        raise NotImplementedError


class OnlySpec(KernelSpec):
    """A kernel of which there is one on an architecture, named after it."""

    @property
    def symbol(self) -> str:
        """Name of the ``extern "C"`` kernel."""
        return f"jitattn_{self.kernel}"

    def config_text(self) -> str:
        """Return arguments that select the kernel."""
        return f"kernel={self.kernel}"


class KernelConfig(Protocol):
    """What selects kernels of a family: a planner's arguments, or those of a function."""

    def arguments_text(self) -> str:
        """Return the arguments as the command line takes them."""
        ...


class Family(NamedTuple):
    """A family of kernels: a folder below jitattn/kernels, and a line of its registry."""

    name: str
    specs: tuple[type[KernelSpec], ...]
    config: type[Any] | None = None
    """Of its arguments, with ``parse``; None where planners select its kernels."""
    selectors: tuple[str, ...] = ()
    """First arguments of its configurations as text, as "planner=mla"; "" for those without one."""
    resolve: Callable[[Any, str], tuple[KernelSpec, ...]] | None = None
    """Returns the kernels of a configuration on an architecture, the main one first."""
    support: Mapping[str, Mapping[str, str]] = {}
    """What arguments may be, by a name for the support table."""


def plain(value: object) -> object:
    """Return the value of an enum's member, and others as they are."""
    return value.value if isinstance(value, Enum) else value
