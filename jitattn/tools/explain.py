"""``jitattn explain``: what a kernel is made of, and how much of it an SM can hold at once.

Needs no GPU. The instruction mix needs nvdisasm, which comes as a wheel of its own.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jitattn.base.knobs import Knobs
from jitattn.jit.build import Kernel, build
from jitattn.spec.arch import ARCHS, SMLimits
from jitattn.spec.family import KernelSpec

INSTALL = "pip install nvidia-cuda-nvdisasm"

_WARP = 32
_REGISTERS_PER_SM = 64 * 1024
_REGISTER_STEP = 8  # registers of a thread are given out in eights
_WARP_STEP = 4  # and warps to the four quarters of an SM
_SMEM_STEP = 128
_SMEM_RESERVED = 1024  # of every CTA, by the system


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """How many CTAs of a kernel an SM runs at a time."""

    capability: str
    ctas: int
    warps: int
    max_warps: int
    limited_by: str
    """``"registers"``, ``"shared memory"``, ``"warps"`` or ``"CTAs"``."""

    def __str__(self) -> str:
        """Say it in words."""
        return (
            f"{self.ctas} CTAs an SM, {self.warps} of {self.max_warps} warps "
            f"({self.warps / self.max_warps:.0%}), limited by {self.limited_by}"
        )


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What is known of one kernel."""

    symbol: str
    arch: str
    spec: Mapping[str, object]
    tile: Mapping[str, object]
    num_threads: int
    registers: int
    spill_bytes: int
    static_smem_bytes: int
    dynamic_smem_bytes: int
    occupancy: tuple[Occupancy, ...]
    compiler: str
    origin: str
    entry: str
    opcodes: Mapping[str, int] | None
    """How often each opcode occurs, without modifiers; None without nvdisasm."""

    @property
    def mix(self) -> dict[str, int]:
        """Instructions by kind, the most frequent first."""
        kinds: Counter[str] = Counter()
        for opcode, count in (self.opcodes or {}).items():
            kinds[kind_of(opcode)] += count
        return dict(kinds.most_common())

    def facts(self) -> dict[str, str]:
        """Return what is not about instructions, as text, by name."""
        dynamic, static = f"{self.dynamic_smem_bytes:,}", f"{self.static_smem_bytes:,}"
        per_cta = f"{self.dynamic_smem_bytes + self.static_smem_bytes:,}"
        return {
            "spec": _fields(self.spec),
            "tile": _fields(self.tile),
            "threads": f"{self.num_threads} a CTA",
            "registers": f"{self.registers} a thread, {self.spill_bytes} bytes spilled",
            "shared memory": f"{per_cta} bytes a CTA: {dynamic} dynamic, {static} static",
            **{f"occupancy on {o.capability}": str(o) for o in self.occupancy},
            "compiler": self.compiler,
            "entry": f"{self.entry} ({self.origin})",
        }

    def most_frequent(self, kind: str) -> str:
        """Return the opcodes of ``kind`` with their counts, the most frequent ones."""
        of_kind = {op: n for op, n in (self.opcodes or {}).items() if kind_of(op) == kind}
        return ", ".join(f"{op} {n:,}" for op, n in list(of_kind.items())[:6])


def _fields(values: Mapping[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


_KINDS = (
    ("tensor core", r"[HIQDBO]MMA|[HIQ]GMMA|UTC\w*MMA|WARPGROUP\w*"),
    ("asynchronous copy", r"LDGSTS|UTMA\w+|UBLK\w+|LDGDEPBAR"),
    ("global load", r"LDG|LD"),
    ("global store, atomics", r"STG|ST|ATOM\w*|RED\w*"),
    ("shared load", r"LDS|LDSM"),
    ("shared store", r"STS|STSM"),
    ("local memory", r"LDL|STL"),
    ("constant load", r"U?LDCU?"),
    ("exponential and the like", r"MUFU"),
    ("conversion", r"F2F\w*|I2F\w*|F2I\w*|I2I\w*|F2FP|I2FP|FRND"),
    ("float", r"F(?!2|ENCE|LO)\w+|H(ADD|MUL|FMA|MNMX|SET)\w*|D(ADD|MUL|FMA|SETP)"),
    (
        "barrier, wait",
        r"U?BAR|B2R\w*|MEMBAR|DEPBAR|SYNCS|WARPSYNC|NANOSLEEP|FENCE|(CGA)?ERRBAR|CCTL|ACQBULK",
    ),
    (
        "control",
        r"BRA|BRX|JMP|BSSY|BSYNC|BREAK|(PRE)?EXIT|CALL|RET|NOP|BMOV|YIELD|ENDCOLLECTIVE|BPT|"
        r"USETMAXREG",
    ),
    (
        "move, shuffle, select",
        r"U?MOV|SHFL|U?PRMT|U?SEL|R2UR|S2U?R|CS2R|R2P|P2R|MOVM|VOTE\w*|REDUX",
    ),
)
_KIND_PATTERNS = tuple((kind, re.compile(pattern)) for kind, pattern in _KINDS)


def kind_of(opcode: str) -> str:
    """Return what kind of instruction an opcode is, for example ``"tensor core"`` for HMMA."""
    for kind, pattern in _KIND_PATTERNS:
        if pattern.fullmatch(opcode):
            return kind
    return "integer, address, predicate"


def explain(spec: KernelSpec, arch: str, knobs: Knobs) -> Explanation:
    """Find or compile a kernel and take it apart.

    Raises:
        JitAttnError: as ``build``.
    """
    kernel = build(spec, arch, knobs)
    tile = spec.tile(arch)
    return Explanation(
        symbol=kernel.symbol,
        arch=arch,
        spec={k: v for k, v in spec.context().items() if k != "symbol"},
        tile=tile._asdict(),
        num_threads=tile.num_threads,
        registers=kernel.registers,
        spill_bytes=kernel.spill_bytes,
        static_smem_bytes=kernel.smem_bytes,
        dynamic_smem_bytes=tile.smem_bytes,
        occupancy=_occupancies(kernel, tile.num_threads, tile.smem_bytes),
        compiler=kernel.compiler,
        origin=kernel.origin,
        entry=kernel.entry,
        opcodes=count_opcodes(kernel.cubin),
    )


def _occupancies(
    kernel: Kernel, num_threads: int, dynamic_smem_bytes: int
) -> tuple[Occupancy, ...]:
    return tuple(
        occupancy(limits, num_threads, kernel.registers, kernel.smem_bytes + dynamic_smem_bytes)
        for limits in ARCHS[kernel.arch].limits
    )


def occupancy(limits: SMLimits, num_threads: int, registers: int, smem_bytes: int) -> Occupancy:
    """Return how many CTAs fit an SM, and what stops one more.

    Args:
        limits: of the SM.
        num_threads: of a CTA.
        registers: of a thread.
        smem_bytes: static and dynamic shared memory of a CTA.
    """
    warps = -(-num_threads // _WARP)
    per_warp = _WARP * _round_up(max(registers, 1), _REGISTER_STEP)
    warps_by_registers = _REGISTERS_PER_SM // per_warp // _WARP_STEP * _WARP_STEP
    ctas, limited_by = min(
        (limits.warps // warps, "warps"),
        (warps_by_registers // warps, "registers"),
        (limits.smem_bytes // _round_up(smem_bytes + _SMEM_RESERVED, _SMEM_STEP), "shared memory"),
        (limits.ctas, "CTAs"),
    )
    return Occupancy(
        capability=limits.capability,
        ctas=ctas,
        warps=ctas * warps,
        max_warps=limits.warps,
        limited_by=limited_by,
    )


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def count_opcodes(cubin: bytes) -> dict[str, int] | None:
    """Return how often each opcode occurs, without modifiers; None without nvdisasm."""
    program = disassembler()
    if program is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [program, "-c", file.name], capture_output=True, encoding="utf-8", errors="replace"
        )
    if done.returncode:
        return None
    # "/*0010*/  @!P0 LDG.E.128 R4, ..." with an optional predicate.
    found = re.findall(
        r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9]*)", done.stdout, re.MULTILINE
    )
    return dict(Counter(found).most_common())


@functools.cache
def disassembler() -> Path | None:
    """Return nvdisasm, from its wheel, which is not on PATH, or from a toolkit."""
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.name == "nvdisasm" and path.is_file():
            return path
    found = shutil.which("nvdisasm")
    return Path(found) if found else None
