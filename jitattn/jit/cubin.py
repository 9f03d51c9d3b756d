"""Read from a cubin what its kernel needs of an SM. Knows ELF, and neither compiler nor driver.

The compiler's log says it too, but not always: NVRTC 13.0 logs nothing outside the main thread.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

# Shared memory that the system takes of each CTA from sm_90 on; a cubin counts it as the kernel's.
_SYSTEM_SMEM_BYTES = 1024
# Attributes of a cubin's .nv.info section: 4-byte symbol index, 4-byte value.
_FRAME_SIZE, _REGISTER_COUNT = 0x11, 0x2F
_SIZED_FORMAT = 0x04  # an attribute whose size follows; the others have one 4-byte word


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What one kernel needs of an SM."""

    registers: int
    """Per thread."""
    spill_bytes: int
    """Local memory per thread: where registers spill to. Our kernels use it for nothing else."""
    smem_bytes: int
    """Static shared memory per CTA; dynamic shared memory comes on top."""
    code_bytes: int
    """Machine code."""


@dataclass(frozen=True)
class _Section:
    name: str
    offset: int
    size: int
    link: int


def resources_of(cubin: bytes, symbol: str, arch: str) -> Resources:
    """Return what the kernel ``symbol`` of a cubin for ``arch`` needs.

    Raises:
        ValueError: ``cubin`` is no 64-bit ELF file or has no such kernel.
    """
    try:
        sections = {section.name: section for section in _sections(cubin)}
        code = sections[f".text.{symbol}"]
        index = _symbol_index(cubin, sections, symbol)
        values = dict(_attributes(cubin, sections[".nv.info"], index))
        shared = sections.get(f".nv.shared.{symbol}")
        system = 0 if arch.startswith("sm_8") else _SYSTEM_SMEM_BYTES
        return Resources(
            registers=values[_REGISTER_COUNT],
            spill_bytes=values.get(_FRAME_SIZE, 0),
            smem_bytes=max(shared.size - system, 0) if shared else 0,
            code_bytes=code.size,
        )
    except (KeyError, IndexError, struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"the cubin says nothing about {symbol}: {error!r}") from error


def _sections(cubin: bytes) -> Iterator[_Section]:
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQI", cubin, table + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    for name, _, _, _, offset, size, link in headers:
        yield _Section(_string(cubin, names + name), offset, size, link)


def _symbol_index(cubin: bytes, sections: dict[str, _Section], symbol: str) -> int:
    table = sections[".symtab"]
    strings = list(_sections(cubin))[table.link].offset
    for index in range(table.size // 24):
        (name,) = struct.unpack_from("<I", cubin, table.offset + 24 * index)
        if _string(cubin, strings + name) == symbol:
            return index
    raise KeyError(symbol)


def _attributes(cubin: bytes, info: _Section, symbol_index: int) -> Iterator[tuple[int, int]]:
    at, end = info.offset, info.offset + info.size
    while at < end:
        kind, attribute, size = struct.unpack_from("<BBH", cubin, at)
        at += 4
        if kind != _SIZED_FORMAT:
            continue
        if size == 8:
            index, value = struct.unpack_from("<II", cubin, at)
            if index == symbol_index:
                yield attribute, value
        at += size


def _string(cubin: bytes, at: int) -> str:
    return cubin[at : cubin.index(b"\0", at)].decode()
