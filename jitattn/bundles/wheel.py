"""Wheels of bundles: packages that hold kernels, and that jitattn finds where pip installs them.

A wheel is a zip archive, laid out as packaging.python.org's "Binary distribution format" says. Its
entry point in the group ``jitattn.bundles`` names the package whose folder is the bundle.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path

from jitattn.base.errors import CacheError, ConfigError
from jitattn.jit.bundle_discovery import GROUP
from jitattn.jit.cache import ENTRY_FILES, Entry, KernelCache
from jitattn.version import __version__

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
# In the normal form that installers compare file names with.
_NUMBER = r"(0|[1-9]\d*)"
_VERSION = re.compile(
    rf"({_NUMBER}!)?{_NUMBER}(\.{_NUMBER})*((a|b|rc){_NUMBER})?(\.post{_NUMBER})?"
    rf"(\.dev{_NUMBER})?(\+[a-z0-9]+(\.[a-z0-9]+)*)?"
)
_PREFIX = "jitattn_bundle"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first day that a zip archive can tell
_DIGEST_CHARS = 12


def write_wheel(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    name: str = "jitattn-bundle",
    version: str | None = None,
) -> Path:
    """Write a wheel of the bundle ``folder`` into the folder ``out``; return its path.

    Equal bundles, names and versions make equal bytes, given one version of jitattn and of zlib.

    Args:
        folder: what ``precompile`` filled.
        out: where the wheel goes; created if it does not exist.
        name: of the package to install; several wheels that are installed together need several.
        version: in the normal form of PEP 440. None: jitattn's, "+" and the beginning of the
            bundle's digest.

    Raises:
        ConfigError: the name or the version is none.
        CacheError: the folder holds no kernels, or damaged ones, or must not be used.
        OSError: the wheel cannot be written.
    """
    bundle = KernelCache(Path(folder).absolute())
    files = _files(bundle)
    digest = bundle.sha256()
    version = f"{__version__}+{digest[:_DIGEST_CHARS]}" if version is None else version
    _check_names(name, version)
    package = _package(name)
    distribution = f"{re.sub(r'[-_.]+', '_', name).lower()}-{version}"
    contents = {f"{package}/{path}": data for path, data in files.items()}
    contents |= _metadata(f"{distribution}.dist-info", package, name, version, digest)
    target = Path(out).absolute()
    if target.suffix == ".whl" or target.is_file():
        raise CacheError(f"{target} is no folder: the wheel names itself, give where it goes")
    target.mkdir(parents=True, exist_ok=True)
    path = target / f"{distribution}-py3-none-any.whl"
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        _write(staged, contents, f"{distribution}.dist-info/RECORD")
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)
    return path


def whole_entries(bundle: KernelCache) -> list[Entry]:
    """Return the entries of a bundle; CacheError where it has none, or damaged ones."""
    entries = [entry for entry in bundle.entries() if entry.path.parent == bundle.root]
    if not entries:
        raise CacheError(f"{bundle.root} holds no kernels: fill it with jitattn precompile")
    if damaged := bundle.verify():
        found = "; ".join(f"{one.name}: {one.damage}" for one in damaged)
        raise CacheError(f"{bundle.root} has damaged kernels, compile them again: {found}")
    return entries


def _files(bundle: KernelCache) -> dict[str, bytes]:
    """Return the bytes of every entry's files by their paths, all of them verified."""
    return {
        f"{entry.name}/{file}": bundle.read_part(entry.name, file)
        for entry in whole_entries(bundle)
        for file in ENTRY_FILES
    }


def _check_names(name: str, version: str) -> None:
    reasons = []
    if not _NAME.fullmatch(name):
        reasons.append(
            f"name={name!r} is no package name: letters, digits, '.', '_' and '-' between them"
        )
    elif re.sub(r"[-_.]+", "-", name).lower() == "jitattn":
        reasons.append(f"name={name!r} is the package that holds jitattn itself")
    if not _VERSION.fullmatch(version):
        reasons.append(
            f"version={version!r} is no version in normal form, such as 1.2.0 or 1.2.0.post1"
        )
    if reasons:
        raise ConfigError(reasons)


def _package(name: str) -> str:
    """Return the module's name, which no package of others has."""
    module = re.sub(r"[-_.]+", "_", name).lower()
    return module if module.startswith(_PREFIX) else f"{_PREFIX}_{module}"


def _metadata(info: str, package: str, name: str, version: str, digest: str) -> Mapping[str, bytes]:
    texts = {
        f"{package}/__init__.py": '"""Kernels of jitattn, which finds them by an entry point."""\n',
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            f"Summary: Precompiled kernels of jitattn, sha256 {digest}\n"
        ),
        f"{info}/WHEEL": (
            f"Wheel-Version: 1.0\nGenerator: jitattn {__version__}\nRoot-Is-Purelib: true\n"
            "Tag: py3-none-any\n"
        ),
        f"{info}/entry_points.txt": f"[{GROUP}]\n{package} = {package}\n",
    }
    return {path: text.encode() for path, text in texts.items()}


def _write(path: Path, contents: Mapping[str, bytes], record: str) -> None:
    lines = []
    with zipfile.ZipFile(path, "w") as archive:
        for member in sorted(contents, key=lambda member: (".dist-info/" in member, member)):
            data = contents[member]
            _add(archive, member, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{member},sha256={digest},{len(data)}\n")
        _add(archive, record, "".join([*lines, f"{record},,\n"]).encode())


def _add(archive: zipfile.ZipFile, member: str, data: bytes) -> None:
    info = zipfile.ZipInfo(member, _EPOCH)
    info.create_system = 3  # whose permissions follow, whatever system writes this
    info.external_attr = (stat.S_IFREG | 0o644) << 16
    info.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(info, data, compresslevel=9)
