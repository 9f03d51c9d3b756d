"""Launches of the kernels of a choice: for calls whose tensors lie alike."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from jitattn.kernels.common import device_kernels
from jitattn.kernels.common.launch_cache import CallParams, CallTensors, address_of
from jitattn.kernels.common.value_checks import asks_for_checks
from jitattn.kernels.select.query_rows import note_page_size
from jitattn.spec.family import KernelSpec
from jitattn.tensors.overlap import Apart, refuse_shared_bytes

Adjust = Callable[[Sequence[int]], None]
"""Writes into parameters what depends on addresses, or raises where they don't do."""


def new_params(kind: type[ctypes.Structure]) -> CallParams[Any]:
    """Return parameters, zeros at first."""
    return CallParams(kind)


class KernelCall:
    """A kernel whose parameters take addresses from the tensors of each call."""

    __slots__ = ("_adjust", "_card", "_launch", "_params")

    def __init__(
        self,
        spec: KernelSpec,
        card: int,
        params: CallParams[Any],
        grid: int,
        adjust: Adjust | None = None,
    ) -> None:
        """Load the kernel of ``spec``; a grid of 0 launches nothing."""
        from jitattn.device.driver import Launch

        self._params, self._card, self._adjust = params, card, adjust
        num_threads = device_kernels.tile_of(spec, card).num_threads
        kernel = device_kernels.load(spec, card)
        self._launch = Launch(kernel, params.struct, grid, num_threads) if grid else None

    def __call__(self, pointers: tuple[int, ...]) -> None:
        """Launch for tensors at these addresses."""
        params = self._params
        image = params.images.get(pointers)
        if image is None:
            if self._adjust is not None:
                self._adjust(pointers)
            params.write(pointers)
            params.keep(pointers, self._launch)
        else:
            params.image[:] = image[1]
        if self._launch is not None:
            device_kernels.launch_on(self._card, self._launch)


class KernelCalls:
    """The kernels of a call, one after the other, which write tensors given or new ones.

    ``names`` are those of the call's tensors, and then of what it writes where that isn't given.
    """

    __slots__ = ("_apart", "_kernels", "_num_read", "_own_names", "names")

    def __init__(self, given: CallTensors, outputs: Sequence[str]) -> None:
        """Watch the outputs among the tensors given; they come last."""
        self.names = [*given.names, *(name for name in outputs if name not in given.names)]
        self._own_names = given.names
        self._num_read = len(given.names) - sum(name in given.names for name in outputs)
        every = range(len(given.names))
        pairs = [(i, j) for i in every[self._num_read :] for j in every[:i]]
        self._apart = Apart(given.tensors, pairs)
        self._apart.learn(given.pointers())
        self._kernels: list[KernelCall] = []

    def add(self, kernel: KernelCall) -> None:
        """Launch a kernel after those before."""
        self._kernels.append(kernel)

    def launch(self, tensors: list[Tensor], new: Sequence[Tensor]) -> None:
        """Launch for the tensors of a call, and for those that are made for it.

        Raises:
            ValueError: an output has memory of another tensor.
        """
        pointers = (*map(address_of, tensors), *map(address_of, new))
        if not self._apart.holds(pointers):
            named = [*zip(self._own_names, tensors, strict=True)]
            refuse_shared_bytes(named[self._num_read :], named[: self._num_read])
            self._apart.learn(pointers)
        for kernel in self._kernels:
            kernel(pointers)


class OnlyCall(Protocol):
    """A call that writes one tensor."""

    @property
    def seq_lens(self) -> Tensor:
        """The lengths."""

    @property
    def out(self) -> Tensor | None:
        """What is written, where it is given."""


CallT = TypeVar("CallT", bound=OnlyCall)


class OneOutput(Generic[CallT]):
    """A launcher of calls that write one tensor, on which the tokens of a page are noted."""

    def __init__(
        self,
        given: CallTensors,
        new_out: Callable[[], Tensor],
        verify: Callable[[CallT], None],
        page_size: int,
    ) -> None:
        """Launch ``calls``, which are added; ``verify`` is asked where values are checked."""
        self.calls = KernelCalls(given, ("out",))
        self._new_out, self._verify, self._page_size = new_out, verify, page_size
        self._checks = asks_for_checks()

    def __call__(self, call: CallT, tensors: list[Tensor]) -> Tensor:
        """Launch for these, which lie like those it was made with."""
        if self._checks and not device_kernels.is_capturing(call.seq_lens.device):
            self._verify(call)
        out = call.out
        if out is None:
            out = self._new_out()
            self.calls.launch(tensors, (out,))
        else:
            self.calls.launch(tensors, ())
        note_page_size(out, self._page_size)
        return out
