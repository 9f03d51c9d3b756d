"""Take rivals, and the modules they compiled, to a machine that reaches no package index.

    python3 bench/carry.py unpack .peer /tmp/site        # archives -> importable packages
    python3 bench/carry.py pack ~/.cache/flashinfer OUT  # compiled modules -> OUT/modules-*.tar

`unpack` reads every .txz, .tgz and modules-*.tar of a folder, and puts the modules where FlashInfer
looks for prebuilt ones, so that it neither compiles nor asks ninja. Standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import lzma
import sys
import tarfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path, PurePosixPath

MAX_ARCHIVE_BYTES = 15 << 20
MAX_ARCHIVES = 4
_PREBUILT = PurePosixPath("flashinfer/data/aot")


def pack(cache: Path, out: Path) -> list[Path]:
    """Compress every module under ``cache`` into as few archives as their size limit allows.

    Args:
        cache: FlashInfer's cache folder; modules are ``**/cached_ops/NAME/NAME.so``.
        out: folder for the archives, which are named after what they hold.

    Returns:
        The archives. Modules that don't fit into MAX_ARCHIVES are named on stderr and left out.
    """
    modules = [path for path in sorted(cache.rglob("*.so")) if path.parent.name == path.stem]
    with ProcessPoolExecutor() as pool:
        compressed = pool.map(_compress, modules)
        packed = dict(zip((path.stem for path in modules), compressed, strict=True))
    groups = group_by_size({name: len(data) for name, data in packed.items()}, MAX_ARCHIVE_BYTES)
    for name in (name for group in groups[MAX_ARCHIVES:] for name in group):
        print(f"left out: {name}", file=sys.stderr)
    out.mkdir(parents=True, exist_ok=True)
    archives = []
    for group in groups[:MAX_ARCHIVES]:
        digest = hashlib.sha256("\0".join(sorted(group)).encode()).hexdigest()[:8]
        archives.append(out / f"modules-{digest}.tar")
        with tarfile.open(archives[-1], "w") as tar:
            for name in group:
                member = tarfile.TarInfo(f"{name}.so.xz")
                member.size = len(packed[name])
                tar.addfile(member, io.BytesIO(packed[name]))
    return archives


def group_by_size(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Group names so that no group of two or more exceeds ``limit`` bytes, largest first."""
    groups: list[tuple[int, list[str]]] = []
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        for i, (total, names) in enumerate(groups):
            if total + sizes[name] <= limit:
                groups[i] = (total + sizes[name], [*names, name])
                break
        else:
            groups.append((sizes[name], [name]))
    return [names for _, names in groups]


def unpack(folder: Path, site: Path) -> None:
    """Extract every archive of ``folder`` into ``site``."""
    site.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.iterdir()):
        if path.suffix in (".txz", ".tgz"):
            with tarfile.open(path) as tar:
                tar.extractall(site, filter="data")
        elif path.name.startswith("modules-") and path.suffix == ".tar":
            with tarfile.open(path) as tar:
                _unpack_modules(tar, site / _PREBUILT)


def _unpack_modules(tar: tarfile.TarFile, prebuilt: Path) -> None:
    for member in _files(tar):
        name = PurePosixPath(member.name).name.removesuffix(".so.xz")
        data = tar.extractfile(member)
        if data is not None:
            target = prebuilt / name / f"{name}.so"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(lzma.decompress(data.read()))


def _files(tar: tarfile.TarFile) -> Iterable[tarfile.TarInfo]:
    return (member for member in tar.getmembers() if member.isfile())


def _compress(path: Path) -> bytes:
    return lzma.compress(path.read_bytes(), preset=3)


def main(argv: Sequence[str] | None = None) -> int:
    """Pack or unpack."""
    parser = argparse.ArgumentParser(
        prog="python3 bench/carry.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=("pack", "unpack"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args(argv)
    if options.action == "unpack":
        unpack(options.source, options.target)
        return 0
    for archive in pack(options.source.expanduser(), options.target):
        print(f"{archive} {archive.stat().st_size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
