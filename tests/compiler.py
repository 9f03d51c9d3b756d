"""A kernel through the compiler, as builds compile it."""

from __future__ import annotations

from jitattn import nvrtc
from jitattn.build import headers_of
from jitattn.render import render
from jitattn.spec import KernelSpec


def compile_kernel(spec: KernelSpec, arch: str) -> nvrtc.Compiled:
    source = render(spec, arch)
    return nvrtc.compile_cubin(
        source,
        name=f"{spec.symbol}.cu",
        headers=headers_of(source),
        options=nvrtc.options(arch),
    )
