"""Which bundles may be used: named in the environment or installed by pip, and pinned to a digest.

Asks once a process, and only when somebody looks for a kernel that is not in memory.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from jitattn.base.errors import CacheError
from jitattn.base.knobs import Knobs
from jitattn.jit.cache import KernelCache, digest_of_files
from jitattn.jit.files import is_folder, names_in, read_file

GROUP = "jitattn.bundles"
"""The entry points of bundles; the value of one is the package whose folder is a bundle."""

# A dotted name, so that it can't lead out of where the wheel is installed.
_PACKAGE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_MAX_PACKAGE = 255
_INFO_SUFFIXES = (".dist-info", ".egg-info")
_LIMIT = 2**20

logger = logging.getLogger("jitattn")


def bundles(knobs: Knobs) -> tuple[KernelCache, ...]:
    """Return the bundles to look in, in order: those that the environment names come first.

    Raises:
        CacheError: there is a pin, and a bundle that the environment names does not match it, or no
            bundle at all does.
    """
    return _bundles(knobs.precompiled, knobs.bundle_sha256)


@functools.cache
def installed_bundles() -> tuple[Path, ...]:
    """Return the folders of installed bundles, in the order of their names; nothing is imported."""
    found: dict[str, Path] = {}
    for site in sys.path:
        # Of what comes first on the path, as for imports.
        for name, folder in _bundles_in(Path(site)):
            found.setdefault(name, folder)
    return tuple(found[name] for name in sorted(found))


def _bundles_in(site: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name and the folder of each bundle that is installed in a folder."""
    for info in names_in(site):
        if not info.endswith(_INFO_SUFFIXES):
            continue
        try:
            text = read_file(site / info / "entry_points.txt", _LIMIT, anyones=True).decode()
        except (OSError, ValueError):
            continue  # most have none, and what is wrong with others is another package's trouble
        for name, package in _entry_points(text):
            if (folder := _folder_of(site, name, package)) is not None:
                yield name, folder


def _entry_points(text: str) -> Iterator[tuple[str, str]]:
    """Yield the names and values of our group; parsing those of every group takes longer."""
    is_ours = False
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            is_ours = line == f"[{GROUP}]"
        elif is_ours and line and not line.startswith(("#", ";")):
            name, _, value = line.partition("=")
            yield name.strip(), value.strip()


def _folder_of(site: Path, name: str, package: str) -> Path | None:
    if len(package) > _MAX_PACKAGE or not _PACKAGE.fullmatch(package):
        logger.warning(
            "entry point %.80r of %s: %.80r is no package, and is passed over", name, GROUP, package
        )
        return None
    folder = site.joinpath(*package.split(".")).absolute()
    if is_folder(folder):
        return folder
    logger.warning("entry point %.80r of %s: there is no %s", name, GROUP, folder)
    return None


def forget() -> None:
    """Look again the next time."""
    installed_bundles.cache_clear()
    _bundles.cache_clear()


@functools.cache
def _bundles(named: tuple[Path, ...], pin: str | None) -> tuple[KernelCache, ...]:
    if pin is None:
        return tuple(KernelCache(folder) for folder in (*named, *installed_bundles()))
    # Missing folders are no bundles, as without a pin.
    there = [folder for folder in named if is_folder(folder)]
    others = [folder for folder in installed_bundles() if folder not in there]
    found = {folder: KernelCache(folder).file_digests() for folder in (*there, *others)}
    digests = {folder: digest_of_files(files) for folder, files in found.items()}
    wrong = [folder for folder in there if digests[folder] != pin]
    matching = [folder for folder in found if digests[folder] == pin]
    if wrong or not matching:
        shown = wrong or found
        what = "; ".join(f"{folder} has {digests[folder]}" for folder in shown)
        what = what or "no bundle is installed, nor is there one in JITATTN_PRECOMPILED"
        raise CacheError(f"JITATTN_BUNDLE_SHA256 asks for {pin}: {what}")
    return tuple(KernelCache(folder, expected=found[folder]) for folder in matching)
