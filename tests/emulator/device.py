"""A device whose CTAs are coroutines, one a lane: what kernels are compiled behind, and launches.

device.hpp is what a kernel asks of it, device.cpp does it and is built once a run.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from tests.emulator.cuda_runtime import QUALIFIERS, TYPES, WORDS, library_of

_FOLDER = Path(__file__).parent
# What every kernel is compiled behind.
HOST = "\n".join(
    (
        QUALIFIERS,
        WORDS,
        (_FOLDER / "device.hpp").read_text(),
        f"namespace jitattn {{\n{TYPES}}}  // namespace jitattn\n",
        (_FOLDER / "warpgroups.hpp").read_text(),
    )
)
CALL = """
extern "C" int64_t params_size() { return sizeof(jitattn::KernelParams); }
extern "C" void run(void (*kernel)(jitattn::KernelParams), const jitattn::KernelParams* params) {
  kernel(*params);
}
"""


@functools.cache
def device() -> ctypes.CDLL:
    """What lanes ask of their device, and what launches kernels on it."""
    library = library_of(HOST + (_FOLDER / "device.cpp").read_text(), "-O2")
    library.launch.restype = ctypes.c_char_p
    return library


class Program:
    """Kernels of one source, includes replaced, as functions of the host."""

    def __init__(self, source: str) -> None:
        self._library = library_of(source + CALL, begin=HOST, needs=(device(),))
        self.params_size: int = self._library.params_size()

    def launch(self, symbol: str, params: int, grid: int, num_threads: int, seed: int = 0) -> None:
        """Run a kernel with the parameters at an address; what it does wrong fails the test."""
        functions = (ctypes.cast(self._library[name], ctypes.c_void_p) for name in ("run", symbol))
        given = ctypes.c_void_p(params), self.params_size
        fault = device().launch(*functions, *given, grid, num_threads, ctypes.c_uint32(seed))
        assert fault is None, (symbol, fault.decode())
