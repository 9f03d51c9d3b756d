"""The kernels of attention, compiled for the CPU and launched by the real host code.

The lanes of a CTA are coroutines, which meet where a warp or the CTA does; CTAs run one after the
other. Instructions that the host hasn't are written anew here; the templates and the headers of
their arithmetic are the real ones. Shared memory begins full of NaN, and copies to it land when
they are waited for.

With a seed the order of lanes is random, some warps run far ahead of others, and what is under way
happens as late as it may: boxes land when nobody expects them, products read and write when they
are waited for. Until then NaN stands where they write. What a launch does wrong whatever comes of
it, a wait without end or a product that reads past its fence, fails the test.
"""

from __future__ import annotations

import ctypes
import functools
import re

import pytest
import torch

import jitattn
from jitattn.device import driver
from jitattn.device.driver import DeviceFacts
from jitattn.jit.render import TEMPLATES, render
from jitattn.kernels.common import cuda_kernels
from jitattn.kernels.common.params import ListScheduleParams, ScheduleParams, kernel_params
from jitattn.kernels.common.spec import AttentionSpec
from jitattn.kernels.mla.kernels import MLAKernels
from jitattn.spec.layout import layout_of
from tests.emulator import launch_recorder
from tests.emulator.device import Program
from tests.emulator.launch_recorder import FakeKernel
from tests.emulator.schedule import EmulatedSchedule, compile_schedule
from tests.support.cases import Case
from tests.support.harness import attend, check, expected
from tests.support.inputs import make_inputs

REAL_HEADERS = (
    *("operands", "schedule", "attention_params", "mla_params"),
    *("blocks", "nvfp4", "int4", "lanes"),
)
UNPACK = """
template <typename To, typename From> uint2 unpack_pairs(uint32_t bytes) {
  if constexpr (std::is_base_of_v<Bytes<From>, From>) {
    const uint2 halves = From::to_pairs(bytes);
    return {To::from_halves(halves.x), To::from_halves(halves.y)};
  }
  return {};
}
template <typename To, typename From> uint2 unpack(uint32_t bytes) {
  if constexpr (std::is_base_of_v<Bytes<From>, From>) {
    const uint2 halves = From::to_halves(bytes);
    return {To::from_halves(halves.x), To::from_halves(halves.y)};
  }
  return {};
}
"""
ARCHITECTURES = {"sm_80": (8, 0), "sm_90a": (9, 0)}


def begin_of(arch: str) -> str:
    """What stands for ``prelude.cuh`` and ``convert.cuh``, beside the device's."""
    major, minor = ARCHITECTURES[arch]
    return f"""
namespace jitattn {{
constexpr int kArch = {100 * major + 10 * minor};
{UNPACK}
}}  // namespace jitattn
"""


def with_parts(source: str, included: set[str]) -> str:
    """Replace includes of parts by their text, each once, for they read what the kernel defines."""

    def text_of(match: re.Match[str]) -> str:
        name = match[1]
        if name in included or name.endswith("kernel.cuh"):
            return ""
        included.add(name)
        return with_parts((TEMPLATES / "include" / name).read_text(), included)

    return re.sub(r"#include \"(jitattn/(?:attention|mla)/\w+\.cuh)\"\n", text_of, source)


@functools.cache
def compiled(spec: AttentionSpec, arch: str) -> Program:
    """The kernels of ``spec`` as functions of the host."""
    headers = [(TEMPLATES / f"include/jitattn/{name}.cuh").read_text() for name in REAL_HEADERS]
    source = with_parts(render(spec, arch), set())
    source = re.sub(r"extern __shared__ __align__\(\d+\) uint8_t smem\[\];", SMEM, source)
    for name in dict.fromkeys(re.findall(r"MMA_64x\w+", source)):
        kind = "FromShared" if "_SS" in name else "FromRegisters"
        if "E4M3" in name:
            source = source.replace(f"{name}<>", f"{kind}<jitattn::Float8E4M3>")
            continue
        number = "jitattn::BFloat16" if "BF16" in name else "jitattn::Half"
        source = re.sub(rf"\b{name}<", f"{kind}<{number}, ", source)
    source = re.sub(r'asm\("mov\.b64[^;]*;"[^;]*;', JOIN, source)
    text = "\n".join((begin_of(arch), *headers, source))
    text = re.sub(r"#include [\"<](?=jitattn|cut)|#pragma|#line", r"// \g<0>", text)
    return Program(text)


SMEM = "uint8_t* smem = emulator::smem;"
JOIN = "words = uint64_t(kSwizzle128 | kStep / 16) << 32 | (low + bytes / 16);"


@functools.cache
def schedule_on_host(*, has_lists: bool = False) -> EmulatedSchedule:
    """The schedule kernel as a function of the host."""
    return compile_schedule(1, has_lists=has_lists)


def num_splits_of(params: ScheduleParams) -> list[int]:
    """The splits of each query tile of a schedule."""
    num_query_tiles = (ctypes.c_int32 * 4).from_address(params.schedule.header)[1]
    words = (ctypes.c_int32 * (8 * num_query_tiles)).from_address(params.schedule.query_tiles)
    return words[6::8]


class EmulatedCuda:
    """A CUDA backend whose kernels run on the CPU, of an architecture."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, arch: str, seed: int = 0, num_sms: int = 4
    ) -> None:
        """Put it in the place of the driver; launches are random by a seed."""
        self.arch = arch
        self.seed = seed
        self.fake = launch_recorder.install(monkeypatch)
        self.specs: dict[str, AttentionSpec] = {}
        self.ran: list[str] = []
        self.grids: list[tuple[str, int]] = []
        self.num_splits: list[int] = []  # of the query tiles of decode's last schedule
        facts = DeviceFacts(0, "card", ARCHITECTURES[arch], num_sms, max_smem_bytes=232448)
        monkeypatch.setattr(cuda_kernels, "device_facts", lambda index: facts)
        monkeypatch.setattr(driver, "_launch_function", lambda: self.launch)

    def planner(self, **arguments: object) -> jitattn.AttentionPlanner:
        """A planner for tensors on the CPU."""
        planner = self.fake.planner(**arguments)
        self.know(planner)
        return planner

    def check(self, case: Case) -> None:
        """Run a case against the definition."""
        inputs = make_inputs(case, "cpu")
        planner = self.planner(**case.planner_arguments())
        check(case, *attend(inputs, planner), expected(inputs))

    @property
    def kinds(self) -> set[str]:
        """What ran: "decode", "prefill"."""
        return {symbol.split("_")[1] for symbol in self.ran}

    def mla_planner(self, **arguments: object) -> jitattn.MLAPlanner:
        """The same of multi-head latent attention."""
        planner = jitattn.MLAPlanner(**arguments, device="cpu")  # type: ignore[arg-type]
        planner.kernels = MLAKernels(planner.config, torch.device("cuda", 0))
        planner.kernels.device, planner.backend = launch_recorder.CPU, "cuda"
        self.know(planner)
        return planner

    def know(self, planner: jitattn.AttentionPlanner | jitattn.MLAPlanner) -> None:
        """Run kernels of a planner that this one hasn't made."""
        config, others = planner.config, planner.kernels.traits.params
        self.params = kernel_params(layout_of(config.page_table), config.variant, others)
        for spec in planner.kernels.specs:
            if isinstance(spec, AttentionSpec):
                self.specs[spec.symbol] = spec

    def launch(self, config: object, kernel: FakeKernel, pointer: object, extra: None) -> int:
        """Stand for ``cuLaunchKernelEx``."""
        assert extra is None
        at = pointer._obj.value  # type: ignore[attr-defined]
        shape = config._obj  # type: ignore[attr-defined]
        if kernel.symbol.startswith("jitattn_schedule"):
            has_lists = kernel.symbol.endswith("_lists")
            kind = ListScheduleParams if has_lists else ScheduleParams
            for cta in range(shape.grid_x):
                part = kind.from_address(at + cta * ctypes.sizeof(kind))
                schedule_on_host(has_lists=has_lists)(part)
                if part.prefill_rows == 0:
                    self.num_splits = num_splits_of(part)
            return 0
        spec = self.specs[kernel.symbol.removesuffix("_merge")]
        if kernel.symbol == spec.symbol:
            assert shape.block_x == spec.tile(self.arch).num_threads
            self.ran.append(kernel.symbol)
        program = compiled(spec, self.arch)
        assert program.params_size == ctypes.sizeof(self.params)
        if self.seed:
            self.seed += 1
        random = self.seed * 0x9E3779B1 & 0xFFFFFFFF
        self.grids.append((kernel.symbol, shape.grid_x))
        program.launch(kernel.symbol, at, shape.grid_x, shape.block_x, random)
        return 0
