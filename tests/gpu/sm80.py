"""Run the sm_80 code of the kernels on a newer card: PTX that the driver compiles. Tests only.

The package loads machine code for the very architecture and nothing else. Here the planner is told
that the card runs sm_80 code, and gets kernels from the folder that tests/gpu/make_ptx.py filled.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from jitattn.device import driver
from jitattn.device.driver import LoadedKernel
from jitattn.jit import build
from jitattn.jit.build import Kernel, Pending
from jitattn.kernels.common import cuda_kernels, device_kernels, kernel_loader
from jitattn.spec.family import KernelSpec
from tests.gpu.make_ptx import ARCH, specs
from tests.support import harness
from tests.support.empty_kernel import empty_kernel

NUM_THREADS = 16


class PtxKernels:
    """Kernels by symbol, each compiled once by the driver of device 0."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            self.loaded = dict(pool.map(self._load, specs()))

    def _load(self, spec: KernelSpec) -> tuple[str, LoadedKernel]:
        smem_bytes = spec.tile(ARCH).smem_bytes
        return spec.symbol, LoadedKernel(self.ptx(spec), spec.symbol, 0, smem_bytes)

    def ptx(self, spec: KernelSpec) -> bytes:
        """The text, and the zero that ends it for the driver."""
        return gzip.decompress((self.folder / f"{spec.symbol}.ptx.gz").read_bytes()) + b"\0"

    def build(self, spec: KernelSpec, arch: str, knobs: object, *, hint: str = "") -> Kernel:
        """Stands for jitattn.jit.build.build."""
        del knobs, hint
        assert arch == ARCH
        return empty_kernel(
            spec, arch=arch, origin="precompiled", compiler="PTX", registers=0, smem_bytes=0
        )

    def start(
        self, wanted: Sequence[KernelSpec], arch: str, knobs: object, *, hint: str = ""
    ) -> tuple[Pending, ...]:
        """Stand-in for jitattn.jit.build.start; the folder lacks some prefill kernels."""
        pending = []
        for spec in wanted:
            make = partial(self.build, spec, arch, knobs, hint=hint)
            compiled: Future[Kernel] = Future()  # what was compiled is loaded when it is needed
            compiled.set_result(make())
            pending.append(Pending(compiled, make))
        return tuple(pending)

    def load(self, cubin: bytes, symbol: str, device_index: int, smem_bytes: int) -> LoadedKernel:
        """Stands for jitattn.device.driver.LoadedKernel."""
        del cubin
        assert device_index == 0
        kernel = self.loaded[symbol]
        assert smem_bytes == kernel.smem_bytes
        return kernel


@contextmanager
def pretend_sm80(folder: Path) -> Iterator[None]:
    """Planners made in here run the sm_80 code; none of them lives on outside."""
    kernels = PtxKernels(folder)
    caches = (
        harness._planner.cache_clear,
        device_kernels.tile_of.cache_clear,
        device_kernels.unload,
    )
    with pytest.MonkeyPatch.context() as patch:
        for module in (cuda_kernels, device_kernels):
            patch.setattr(module, "arch_of", lambda facts: ARCH)
        patch.setattr(kernel_loader, "start", kernels.start)
        patch.setattr(build, "build", kernels.build)
        patch.setattr(driver, "LoadedKernel", kernels.load)
        for clear in caches:
            clear()
        try:
            yield
        finally:
            for clear in caches:
                clear()
