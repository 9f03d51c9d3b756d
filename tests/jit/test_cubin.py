"""Resources are read from the cubin, for every architecture, whatever the compiler logs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from jitattn.jit import nvrtc
from jitattn.jit.cubin import Resources, resources_of
from jitattn.spec.arch import ARCHITECTURES

# One kernel with shared memory; one that must spill, since it may use 32 registers only.
SOURCE = """
extern "C" __global__ void plain(float* x) {
  __shared__ float s[64];
  s[threadIdx.x] = *x;
  __syncthreads();
  *x = s[0];
}
extern "C" __global__ void __launch_bounds__(1024, 2) spills(float* x) {
  float a[90];
  for (int i = 0; i < 90; ++i) a[i] = x[i * 7];
  for (int j = 0; j < 50; ++j)
    for (int i = 0; i < 89; ++i) a[i] = a[i] * a[i + 1] + x[j];
  for (int i = 0; i < 90; ++i) x[i] = a[i];
}
"""


def compile_for(arch: str) -> bytes:
    options = nvrtc.options(arch)
    return nvrtc.compile_cubin(SOURCE, name="k.cu", headers={}, options=options).cubin


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_resources(arch: str) -> None:
    cubin = compile_for(arch)
    plain = resources_of(cubin, "plain", arch)
    assert 0 < plain.registers <= 64
    assert plain.spill_bytes == 0
    assert plain.smem_bytes == 256
    assert plain.code_bytes % 128 == 0


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_spills_are_seen(arch: str) -> None:
    """Where two CTAs of 1,024 threads fit an SM, which leaves a thread 32 registers."""
    spills = resources_of(compile_for(arch), "spills", arch)
    assert spills.registers <= 32
    assert spills.spill_bytes > 0
    assert spills.smem_bytes == 0


def test_threads_get_the_same() -> None:
    def read(_: int) -> Resources:
        return resources_of(compile_for("sm_90a"), "plain", "sm_90a")

    with ThreadPoolExecutor(2) as pool:
        assert len(set(pool.map(read, range(4)))) == 1


def test_another_kernel_or_file_is_an_error() -> None:
    cubin = compile_for("sm_90a")
    with pytest.raises(ValueError, match="says nothing about other"):
        resources_of(cubin, "other", "sm_90a")
    with pytest.raises(ValueError, match="not a 64-bit ELF"):
        resources_of(b"cubin", "plain", "sm_90a")
    with pytest.raises(ValueError, match="says nothing about plain"):
        resources_of(cubin[: len(cubin) // 2], "plain", "sm_90a")
