"""The kernels that choose tokens and pages, compiled for the CPU, launched by the real host code.

Lanes are coroutines, as those of attention's kernels (device.py). CTAs have fewer threads, and
hold fewer keys, so that short rows reach every path.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Iterator

import pytest

from jitattn.device.driver import Launch
from jitattn.jit.render import TEMPLATES, environment
from jitattn.kernels.common import device_kernels
from jitattn.kernels.select import index_logits, page_bounds, select_pages, select_tokens
from jitattn.kernels.select.spec import ChoiceSpec, IndexLogitsSpec
from jitattn.kernels.select.tile import PageBoundsTile, PageScoresTile, choice_tile
from jitattn.spec.family import KernelSpec, Tile
from tests.emulator.attention import ARCHITECTURES, JOIN, SMEM
from tests.emulator.device import Program

CACHES = [module.LAUNCHES for module in (index_logits, page_bounds, select_pages, select_tokens)]
HEADERS = ("lanes", "operands", "request_rows", "page_list", "select_params", "select/index_keys")
OPERANDS = "attention/wgmma_operands"
PARAMS = {
    "index_logits": "IndexLogitsParams",
    "choose": "ChoiceParams",
    "page_bounds": "PageBoundsParams",
    "page_scores": "PageScoresParams",
}
# What these kernels ask of a lane besides.
MORE = """
template <typename T> T __shfl_up_sync(unsigned mask, T value, int offset) {
  const int lane = threadIdx.x % 32;
  return __shfl_sync(mask, value, lane < offset ? lane : lane - offset);
}
namespace jitattn {
inline float max_or_nan(float a, float b) { return a != a || b != b ? NAN : std::max(a, b); }
inline uint32_t warp_sum(uint32_t value) {
  const emulator::Words* all = emulator::meet(&value, sizeof value);
  uint32_t sum = 0;
  for (int lane = 0; lane < 32; ++lane) sum += all[lane][0];
  return sum;
}
inline uint2 ld_global_8(const void* source, bool exists) {
  uint2 words = {};
  if (exists) std::memcpy(&words, source, 8);
  return words;
}
}  // namespace jitattn
"""


@functools.cache
def compiled(spec: KernelSpec, arch: str) -> Program:
    """The kernel of ``spec`` as a function of the host."""
    tile = emulated_tile(spec, arch)._asdict()
    source = environment().get_template(spec.template(arch)).render(spec.context() | tile)
    source = re.sub(r"extern __shared__ __align__\(\d+\) uint8_t smem\[\];", SMEM, source)
    for name, place in (("RS", "FromRegisters"), ("SS", "FromShared")):
        source = re.sub(rf"\bMMA_64x\w+_{name}_TN<", f"{place}<jitattn::Float8E4M3", source)
    headers = [(TEMPLATES / f"include/jitattn/{name}.cuh").read_text() for name in HEADERS]
    operands = (TEMPLATES / f"include/jitattn/{OPERANDS}.cuh").read_text()
    source = source.replace(f'#include "jitattn/{OPERANDS}.cuh"', operands)
    source = re.sub(r'asm\("mov\.b64[^;]*;"[^;]*;', JOIN, source)
    major, minor = ARCHITECTURES[arch]
    begin = f"namespace jitattn {{ constexpr int kArch = {100 * major + 10 * minor}; }}"
    params = f"namespace jitattn {{ using KernelParams = {PARAMS[spec.kernel]}; }}"
    text = "\n".join((begin, MORE, *headers, source, params))
    return Program(re.sub(r"#include [\"<](?=jitattn|cut)|#pragma|#line", r"// \g<0>", text))


def emulated_tile(spec: KernelSpec, arch: str) -> Tile:
    """A tile of few threads; that of products is what it is."""
    if isinstance(spec, IndexLogitsSpec):
        return spec.tile(arch)
    if isinstance(spec, ChoiceSpec):
        return choice_tile(num_threads=64, held_keys=2)
    if spec.kernel == "page_bounds":
        return PageBoundsTile(num_threads=32)
    return PageScoresTile(num_threads=64, warp_pages=2)


class _Kernel:
    """Stands for a loaded kernel."""

    begins_early = False

    def __init__(self, spec: KernelSpec, arch: str) -> None:
        self.program = compiled(spec, arch)
        self.symbol = spec.symbol
        self.smem_bytes = emulated_tile(spec, arch).smem_bytes


class EmulatedCard:
    """A card of an architecture whose kernels run on tensors of the CPU.

    Attributes:
        seed: 0, or what the order of lanes and the landing of copies are drawn by.
        launched: the symbols of what ran.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, arch: str, seed: int = 0) -> None:
        self.seed = seed
        self.launched: list[str] = []
        monkeypatch.setattr(device_kernels, "card_of", lambda device: 0)
        monkeypatch.setattr(device_kernels, "arch_on", lambda card: arch)
        monkeypatch.setattr(device_kernels, "num_sms", lambda card: 3)
        monkeypatch.setattr(device_kernels, "load", lambda spec, card: _Kernel(spec, arch))
        monkeypatch.setattr(device_kernels, "tile_of", lambda spec, card: emulated_tile(spec, arch))
        monkeypatch.setattr(device_kernels, "launch_on", lambda card, launch: self.launch(launch))

    def launch(self, launch: Launch) -> None:
        """Stand for the driver."""
        grid, num_threads, _ = launch.shape
        kernel: _Kernel = launch.kernel  # type: ignore[assignment]
        program = kernel.program
        assert program.params_size == ctypes.sizeof(launch.params)
        if self.seed:
            self.seed += 1
        random = self.seed * 0x9E3779B1 & 0xFFFFFFFF
        at = ctypes.addressof(launch.params)
        program.launch(kernel.symbol, at, grid, num_threads, random)
        self.launched.append(kernel.symbol)


def forget() -> None:
    """Forget launchers: those of an emulated card are for no other."""
    for cache in CACHES:
        cache.clear()


@pytest.fixture(params=["sm_80", "sm_90a"])
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedCard]:
    """Launch kernels on the CPU."""
    forget()
    yield EmulatedCard(monkeypatch, request.param)
    forget()


@pytest.fixture
def random_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedCard]:
    """The same in random order, for kernels that no architecture has an own template of."""
    forget()
    yield EmulatedCard(monkeypatch, "sm_90a", seed=3)
    forget()
