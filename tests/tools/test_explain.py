"""What is said of a kernel: occupancy from its resources, instructions from its machine code."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import pytest

from jitattn.base.knobs import Knobs
from jitattn.kernels.common.spec import ScheduleSpec
from jitattn.kernels.registry import specs_of
from jitattn.spec.arch import ARCHS
from jitattn.spec.config import PlannerConfig
from jitattn.tools import explain as module
from jitattn.tools.explain import count_opcodes, explain, kind_of, occupancy

(HOPPER,) = ARCHS["sm_90a"].limits


# CTAs on compute capability 9.0 by NVIDIA's occupancy calculator.
@pytest.mark.parametrize(
    ("num_threads", "registers", "smem_bytes", "ctas", "limited_by"),
    [
        (128, 32, 0, 16, "registers"),
        (128, 24, 0, 16, "warps"),
        (128, 149, 78640, 2, "shared memory"),
        (128, 168, 0, 3, "registers"),
        (512, 40, 0, 3, "registers"),
        (1024, 64, 0, 1, "registers"),
        (32, 16, 0, 32, "CTAs"),
        (256, 255, 0, 1, "registers"),
        (128, 32, 227 * 1024, 1, "shared memory"),
        (128, 32, 228 * 1024, 0, "shared memory"),
        (384, 168, 200 * 1024, 1, "registers"),
    ],
)
def test_occupancy(
    num_threads: int, registers: int, smem_bytes: int, ctas: int, limited_by: str
) -> None:
    found = occupancy(HOPPER, num_threads, registers, smem_bytes)
    assert (found.ctas, found.limited_by) == (ctas, limited_by)
    assert found.warps == ctas * num_threads // 32
    assert f"{ctas} CTAs an SM" in str(found)


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        ("HMMA", "tensor core"), ("HGMMA", "tensor core"), ("LDGSTS", "asynchronous copy"),
        ("UTMALDG", "asynchronous copy"), ("LDG", "global load"), ("STG", "global store, atomics"),
        ("LDSM", "shared load"), ("STS", "shared store"), ("LDL", "local memory"),
        ("MUFU", "exponential and the like"), ("F2FP", "conversion"), ("FFMA", "float"),
        ("HADD2", "float"), ("IMAD", "integer, address, predicate"), ("BRA", "control"),
        ("SHFL", "move, shuffle, select"), ("BAR", "barrier, wait"), ("ULDC", "constant load"),
        ("FENCE", "barrier, wait"), ("USETMAXREG", "control"), ("WARPGROUP", "tensor core"),
    ],
)  # fmt: skip
def test_kinds(opcode: str, kind: str) -> None:
    assert kind_of(opcode) == kind


def test_a_kernel_is_explained(tmp_path: Path) -> None:
    config = PlannerConfig.parse("head_dim=64")
    spec = specs_of(config, "sm_90a")[0]
    found = explain(spec, "sm_90a", Knobs(cache_dir=tmp_path / "cache"))
    assert found.symbol == spec.symbol
    assert found.spec["head_dim"] == 64
    assert found.registers > 0
    assert found.spill_bytes == 0
    assert found.occupancy[0].ctas >= 1
    assert found.origin == "compiled"
    if module.disassembler() is None:
        pytest.skip("needs the wheel nvidia-cuda-nvdisasm")
    assert found.opcodes is not None
    assert found.mix["tensor core"] == found.opcodes["HMMA"]
    assert sum(found.mix.values()) == sum(found.opcodes.values())
    assert "local memory" not in found.mix
    assert found.most_frequent("tensor core") == f"HMMA {found.opcodes['HMMA']}"


def test_without_the_disassembler_the_rest_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "disassembler", lambda: None)
    found = explain(ScheduleSpec(), "sm_80", Knobs(cache_dir=tmp_path / "cache"))
    assert found.opcodes is None
    assert found.mix == {}
    assert [o.capability for o in found.occupancy] == ["8.0", "8.6", "8.9"]
    assert set(dataclasses.asdict(found)) >= {"registers", "occupancy", "tile"}


def test_a_cubin_that_cannot_be_read_has_no_opcodes(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "")
    monkeypatch.setattr(module, "disassembler", lambda: Path("nvdisasm"))
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: failed)
    assert count_opcodes(b"junk") is None
