"""Compare two bundles' cubins by kernel: ``python -m tests.support.compare_cubins BASE NEW``.

It checks a change of templates that promises the same machine code. Names of constants stand in a
cubin's symbol table, so a renaming moves bytes beside the code: such kernels count as the same
code.
"""

from __future__ import annotations

import argparse
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

_ENTRY = re.compile(r"(?P<arch>sm_\w+?)-(?P<symbol>.+)-[0-9a-f]{32}")
# Sections of a kernel that an SM reads, or that reserve what it reads.
_CODE = re.compile(r"\.(text|nv\.shared|nv\.constant[0-3])\b")
_NO_BITS = 8


def code_of(cubin: bytes) -> dict[str, bytes | int]:
    """Return a cubin's sections of instructions, constants and shared memory."""
    return {name: data for name, data in _sections(cubin) if _CODE.match(name)}


def _sections(cubin: bytes) -> Iterator[tuple[str, bytes | int]]:
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    for name, kind, _, _, offset, size in headers:
        at = names + name
        data = size if kind == _NO_BITS else cubin[offset : offset + size]
        yield cubin[at : cubin.index(b"\0", at)].decode(), data


def cubins_of(bundle: Path) -> dict[tuple[str, str], bytes]:
    """Return the cubins of a bundle by (architecture, kernel)."""
    found = {}
    for folder in bundle.iterdir():
        if match := _ENTRY.fullmatch(folder.name):
            found[match["arch"], match["symbol"]] = (folder / "kernel.cubin").read_bytes()
    return found


def verdict(base: bytes | None, new: bytes | None) -> str:
    """Return what became of a kernel."""
    if base is None or new is None:
        return "missing" if new is None else "added"
    if base == new:
        return "same"
    return "same code" if code_of(base) == code_of(new) else "different"


def main() -> int:
    """Print the kernels that differ, and counts; return 1 where one differs or is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--common", action="store_true", help="only kernels that both bundles have")
    options = parser.parse_args()
    base, new = cubins_of(options.base), cubins_of(options.new)
    kernels = base.keys() & new.keys() if options.common else base.keys() | new.keys()
    found: dict[str, list[str]] = {}
    for key in sorted(kernels):
        found.setdefault(verdict(base.get(key), new.get(key)), []).append(" ".join(key))
    for outcome in ("different", "missing", "added"):
        for name in found.get(outcome, []):
            sys.stdout.write(f"{outcome}: {name}\n")
    sys.stdout.write(
        ", ".join(f"{len(names)} {outcome}" for outcome, names in sorted(found.items()))
    )
    sys.stdout.write("\n")
    return 1 if found.keys() & {"different", "missing"} else 0


if __name__ == "__main__":
    sys.exit(main())
