"""Reading of all files of caches and bundles: no file is taken on trust.

No link is followed, nothing is waited for, no more than a stated size is read, and what belongs to
others, or may be written by them, is refused. Whatever is wrong is an OSError or a ValueError that
says so; who reads takes either for a file that is not there.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
# A link would lead elsewhere, and opening a pipe would wait for its other end.
SAFE_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def distrust(info: os.stat_result) -> str | None:
    """Return why a file or folder must not be trusted; None when it may be."""
    if info.st_uid not in (os.geteuid(), 0):
        return f"owned by user {info.st_uid}, neither by this user ({os.geteuid()}) nor by root"
    if info.st_mode & _OTHERS_WRITE:
        mode = stat.S_IMODE(info.st_mode)
        return (
            f"writable by group or others (mode {mode:04o}); chmod go-w (-R for all of it) makes "
            "it acceptable"
        )
    return None


def read_file(path: Path, limit: int, *, anyones: bool = False) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes.

    Args:
        path: the file.
        limit: more is damage.
        anyones: whether the file may be another user's, as those of installed packages may.

    Raises:
        FileNotFoundError: there is none.
        OSError, ValueError: it is no file, too large, or must not be trusted.
    """
    descriptor = os.open(path, os.O_RDONLY | SAFE_FLAGS)
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise ValueError(f"{path.name} is not a file")
        if not anyones and (reason := distrust(info)):
            raise ValueError(f"{path.name} is {reason}")
        if info.st_size > limit:
            raise ValueError(f"{path.name} has {info.st_size:,} bytes: expected at most {limit:,}")
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(limit + 1)  # it may grow meanwhile
    finally:
        os.close(descriptor)
    if len(data) > limit:
        raise ValueError(f"{path.name} has more than {limit:,} bytes")
    return data


def read_object(path: Path, limit: int) -> dict[str, object]:
    """Return the JSON object of a file; see ``read_file``."""
    with excess_as_damage(path.name):
        value = json.loads(read_file(path, limit))
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} is not an object")
    return value


@contextmanager
def excess_as_damage(name: str) -> Iterator[None]:
    """Raise ValueError where the content of the file ``name`` is too deep, or too much."""
    try:
        yield
    except (RecursionError, MemoryError) as error:
        raise ValueError(f"{name} is nested too deeply or too large") from error


def check_folder(path: Path) -> None:
    """Check a folder inside a cache.

    Raises:
        OSError, ValueError: it is missing, no folder, or must not be trusted.
    """
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode):
        raise ValueError("not a folder")
    if reason := distrust(info):
        raise ValueError(f"the folder is {reason}")


def write_file(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Write a new file that everyone may read.

    Raises:
        OSError: there is something already, or it cannot be written.
    """
    with path.open("xb") as file:
        os.fchmod(file.fileno(), 0o644)
        file.write(data)
        file.flush()
        if sync:
            os.fsync(file.fileno())


def is_folder(path: Path) -> bool:
    """Say whether there is a folder, or a link to one, that this user can see."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def why_unreadable(path: Path) -> str:
    """Return why a folder cannot be listed, such as ``"missing"``; empty when it can be."""
    try:
        with os.scandir(path):
            return ""
    except FileNotFoundError:
        return "missing"
    except (OSError, ValueError) as error:
        return f"cannot be read: {getattr(error, 'strerror', None) or error}"


def names_in(path: Path) -> list[str]:
    """Return the sorted names in a folder; none where it cannot be read."""
    with suppress(OSError, ValueError):
        return sorted(os.listdir(path))  # noqa: PTH208  # names, and none for a folder
    return []
