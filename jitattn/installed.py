"""Which bundles may be used: named in the environment or installed by pip, and pinned to a digest.

Asks once a process, and only when somebody looks for a kernel that is not in memory.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path

from jitattn.cache import KernelCache, digest_of_files
from jitattn.errors import CacheError
from jitattn.knobs import Knobs

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
    from importlib.metadata import entry_points  # reads the metadata of all that is installed

    found = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        folder = (
            Path(str(point.dist.locate_file(point.value.replace(".", "/")))) if point.dist else None
        )
        if folder is not None and folder.is_dir():
            found[folder.absolute()] = point.name
        else:
            logger.warning(
                "the entry point %s = %s of %s leads nowhere", point.name, point.value, GROUP
            )
    return tuple(found)


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
