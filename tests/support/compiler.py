"""A kernel through the compiler, as builds compile it, and what it is then."""

from __future__ import annotations

import hashlib
import pickle
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from jitattn.base.errors import CompilerMissingError
from jitattn.jit import nvrtc
from jitattn.jit.build import headers_of
from jitattn.jit.render import render
from jitattn.spec.family import KernelSpec
from jitattn.tools.explain import disassembler
from tests.support.shared_files import shared_file


def compile_kernel(spec: KernelSpec, arch: str) -> nvrtc.Compiled:
    """Compile a kernel, once a run."""

    def make(path: Path) -> None:
        path.write_bytes(pickle.dumps(compile_afresh(spec, arch)))

    digest = hashlib.sha256(f"{nvrtc.version()}{arch}{render(spec, arch)}".encode()).hexdigest()
    found = pickle.loads(shared_file(f"{digest[:32]}.pickle", make).read_bytes())
    assert isinstance(found, nvrtc.Compiled)
    return found


def compile_afresh(spec: KernelSpec, arch: str) -> nvrtc.Compiled:
    source = render(spec, arch)
    return nvrtc.compile_cubin(
        source,
        name=f"{spec.symbol}.cu",
        headers=headers_of(source),
        options=nvrtc.options(arch),
    )


def most_spilled() -> int:
    """Bytes that a thread may spill: none, but of registers that an older ptxas deals out."""
    return 0 if nvrtc.version() >= (13, 5) else 16


def advice(log: str) -> list[str]:
    """What ptxas says of products that it serialises, and of registers it can't hand over: C75xx.

    Before 13.5 it also says where it lets products wait for registers of its own accord (C7519).
    """
    found = re.findall(r".*\bC75\d\d\b.*|.*serialized.*|.*setmaxnreg.*", log)
    return [line for line in found if "C7519" not in line or nvrtc.version() >= (13, 5)]


def skip_unless_compiled(specs: Iterable[KernelSpec], arch: str) -> None:
    """Skip a test whose kernels can't be compiled here, for lack of a compiler or of headers."""
    pytest.importorskip("cuda.bindings.nvrtc")
    for spec in specs:
        try:
            headers_of(render(spec, arch))
        except CompilerMissingError as error:
            pytest.skip(f"{spec.symbol}: {error}")


def nvdisasm() -> Path:
    found = disassembler()
    if found is None:
        pytest.skip("needs the wheel nvidia-cuda-nvdisasm")
    return found


def instructions(cubin: bytes, folder: Path) -> list[str]:
    """The instructions of a cubin in order, without predicates: ``"WARPSYNC 0xffffffff"``."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [nvdisasm(), "-c", "-ndf", path]  # without its analysis of where indirect jumps go
    done = subprocess.run(command, capture_output=True, text=True, check=True, encoding="utf-8")
    line = r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z][^;]*?)\s*;"
    return re.findall(line, done.stdout, re.MULTILINE)


def opcodes(cubin: bytes, folder: Path) -> list[str]:
    """The opcodes of a cubin in order, as nvdisasm names them: ``"HMMA.16816.F32.BF16"``."""
    return [instruction.partition(" ")[0] for instruction in instructions(cubin, folder)]
