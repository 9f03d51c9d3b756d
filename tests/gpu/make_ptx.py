"""Compile the kernels of tests/gpu/test_sm80.py to PTX for compute capability 8.0, without a GPU.

    pip download --no-deps nvidia-cuda-nvrtc==13.0.88 -d wheel
    python -m zipfile -e wheel/*.whl nvrtc-13.0
    python -m tests.gpu.make_ptx --nvrtc nvrtc-13.0/nvidia/cu13/lib -o build/ptx
    JITATTN_TEST_PTX=build/ptx python -m pytest tests/gpu/test_sm80.py

A driver refuses PTX that is newer than itself, so this takes the NVRTC that it is given, and talks
to it directly: the package compiles to machine code, never to PTX.
"""

from __future__ import annotations

import argparse
import ctypes
import gzip
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from jitattn.jit.sources import headers
from jitattn.kernels.attention.spec import PrefillSpec
from jitattn.kernels.registry import specs_of
from jitattn.spec.family import KernelSpec
from tests.support.cases import all_cases, kernel_configs

ARCH, VIRTUAL = "sm_80", "compute_80"


def specs() -> tuple[KernelSpec, ...]:
    """The decode kernels of all GPU tests, the prefill kernels of some, and what goes with them.

    Batch-invariant planners decode by the prefill kernel.
    """
    from tests.support.mixed_strategies import SM80_VARIANTS  # needs hypothesis

    kernels = [spec for config in kernel_configs(ARCH) for spec in specs_of(config, ARCH)]
    found = {spec: None for spec in kernels if not isinstance(spec, PrefillSpec)}
    for case in all_cases():
        if case.batch_invariant:
            found |= dict.fromkeys(specs_of(case.config(), ARCH))
    for case in SM80_VARIANTS:
        found |= dict.fromkeys(specs_of(case.config(), ARCH))
    return tuple(found)


def load(folder: Path) -> ctypes.CDLL:
    """NVRTC and the builtins beside it, which it would look for on the search path."""
    for library in sorted(folder.glob("libnvrtc-builtins.so*")):
        ctypes.CDLL(str(library.absolute()), mode=ctypes.RTLD_GLOBAL)
    (path,) = folder.glob("libnvrtc.so.*")
    return ctypes.CDLL(str(path.absolute()))


def compile_ptx(nvrtc: ctypes.CDLL, source: str, name: str) -> bytes:
    """PTX of one source; raises with the compiler's log."""
    names, texts = zip(*headers(), strict=True)
    array = ctypes.c_char_p * len(names)
    program = ctypes.c_void_p()
    _check(
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program),
            source.encode(),
            f"{name}.cu".encode(),
            len(names),
            array(*(text.encode() for text in texts)),
            array(*(header.encode() for header in names)),
        ),
        "nvrtcCreateProgram",
    )
    options = (ctypes.c_char_p * 2)(f"--gpu-architecture={VIRTUAL}".encode(), b"--std=c++17")
    if nvrtc.nvrtcCompileProgram(program, 2, options):
        raise RuntimeError(_fetch(nvrtc, "ProgramLog", program).decode())
    ptx = _fetch(nvrtc, "PTX", program)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return ptx


def _fetch(nvrtc: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), what)
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(nvrtc, f"nvrtcGet{what}")(program, buffer), what)
    return buffer.raw.rstrip(b"\0")


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"{what}: NVRTC status {status}")


def make(job: tuple[KernelSpec, Path, Path]) -> int:
    """Write one kernel's PTX, compressed; its size."""
    from jitattn.jit.render import (
        render,  # needs Jinja; the machine with the card uses `specs` only
    )

    spec, library, out = job
    ptx = compile_ptx(load(library), render(spec, ARCH), spec.symbol)
    path = out / f"{spec.symbol}.ptx.gz"
    path.write_bytes(gzip.compress(ptx, mtime=0))
    return len(ptx)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.make_ptx", description=__doc__)
    parser.add_argument("--nvrtc", type=Path, required=True, help="folder of libnvrtc.so")
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder to fill")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    jobs = [(spec, options.nvrtc, options.out) for spec in specs()]
    with ProcessPoolExecutor(options.jobs) as pool:
        sizes = list(pool.map(make, jobs))
    sys.stdout.write(f"{len(sizes)} kernels in {options.out}, {sum(sizes) / 1e6:.0f} MB of PTX\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
