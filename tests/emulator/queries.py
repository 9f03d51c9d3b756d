"""The kernel that dequantises queries, compiled for the CPU and launched by the real host code."""

from __future__ import annotations

import ctypes
import functools

import pytest

from jitattn.device.driver import Launch
from jitattn.jit.render import render
from jitattn.kernels.attention.spec import DequantizeQueriesSpec
from jitattn.kernels.common import device_kernels
from tests.emulator.cuda_runtime import with_headers
from tests.emulator.device import Program

SPEC = DequantizeQueriesSpec()
HOST_HEADERS = ("prelude", "ptx", "types", "fp8")


@functools.cache
def compiled() -> Program:
    """The kernel as a function of the host."""
    params = "\nnamespace jitattn { using KernelParams = QueryParams; }\n"
    return Program(with_headers(render(SPEC, "sm_80"), HOST_HEADERS) + params)


class _Kernel:
    """Stands for a loaded kernel."""

    smem_bytes = 0
    begins_early = False


def _launch(card: int, launch: Launch) -> None:
    program, (grid, num_threads, _) = compiled(), launch.shape
    assert card == 0
    assert program.params_size == ctypes.sizeof(launch.params)
    program.launch(SPEC.symbol, ctypes.addressof(launch.params), grid, num_threads)


@pytest.fixture
def emulated_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch the kernel on the CPU."""
    monkeypatch.setattr(device_kernels, "card_of", lambda device: 0)
    monkeypatch.setattr(device_kernels, "load", lambda spec, card: _Kernel())
    monkeypatch.setattr(device_kernels, "tile_of", lambda spec, card: spec.cta)
    monkeypatch.setattr(device_kernels, "launch_on", _launch)
