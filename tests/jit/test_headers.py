"""Each plain header compiles alone: nothing in it relies on what an earlier include defined."""

from __future__ import annotations

import pytest

from jitattn.jit import nvrtc
from jitattn.jit.cutlass import wrapper_headers
from jitattn.jit.sources import TEMPLATES, headers
from tests.support import kernel_header

# What a warpgroup multiplies, or parts of it.
NEEDS_SM90 = (
    "barriers",
    "query_loader",
    "tile_loader",
    "dequant_loader",
    "producers",
    "wgmma",
    "mla/tma_loader",
)
SAMPLES = tuple(kernel_header.specs())


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", [name for name, _ in headers()])
def test_header_compiles_alone(name: str, arch: str) -> None:
    """An editor parses it as it stands."""
    if arch == "sm_80" and any(part in name for part in NEEDS_SM90):
        pytest.skip("its instructions begin with sm_90")
    texts = dict(headers())
    outside = wrapper_headers("".join(texts[sample] for sample in SAMPLES))
    source = f'#include "{name}"\n'
    nvrtc.compile_cubin(
        source, name="alone.cu", headers={**texts, **dict(outside)}, options=nvrtc.options(arch)
    )


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_are_what_their_kernels_render(name: str) -> None:
    """``python -m tests.support.kernel_header`` refreshes them."""
    assert (TEMPLATES / "include" / name).read_text() == kernel_header.sample(name)
