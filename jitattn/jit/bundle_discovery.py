"""Which bundles may be used: named in the environment or installed by pip, and pinned to a digest.

Asks once a process, and only when somebody looks for a kernel that is not in memory.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from jitattn.base.errors import CacheError
from jitattn.base.knobs import Knobs
from jitattn.jit.cache import KernelCache, digest_of_files

if TYPE_CHECKING:
    from importlib.metadata import Distribution

GROUP = "jitattn.bundles"
"""The entry points of bundles; the value of one is the package whose folder is a bundle."""

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
    from importlib.metadata import distributions  # 10 ms where nobody has imported it

    found: dict[str, Path] = {}
    for distribution in distributions():
        # Of what comes first on the path, as for imports.
        for name, folder in _bundles_of(distribution):
            found.setdefault(name, folder)
    return tuple(found[name] for name in sorted(found))


def _bundles_of(distribution: Distribution) -> Iterator[tuple[str, Path]]:
    try:
        # Parsing the entry points of all that is installed takes several times as long as this.
        if GROUP not in (distribution.read_text("entry_points.txt") or ""):
            return
    except (OSError, ValueError):
        return  # another package's trouble
    for point in distribution.entry_points.select(group=GROUP):
        folder = Path(str(distribution.locate_file(point.value.replace(".", "/")))).absolute()
        if folder.is_dir():
            yield point.name, folder
        else:
            logger.warning("entry point %s of %s: there is no %s", point.name, GROUP, folder)


def forget() -> None:
    """Look again the next time."""
    installed_bundles.cache_clear()
    _bundles.cache_clear()


@functools.cache
def _bundles(named: tuple[Path, ...], pin: str | None) -> tuple[KernelCache, ...]:
    if pin is None:
        return tuple(KernelCache(folder) for folder in (*named, *installed_bundles()))
    # Missing folders are no bundles, as without a pin.
    there = [folder for folder in named if folder.is_dir()]
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
