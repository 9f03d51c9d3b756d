"""A lock that the kernel releases when its owner ends, however it ends.

filelock's flock lock, never the mere existence of a file, which a killed owner would leave behind
for ever: filelock falls back to that where flock does not work, so flock is tried first, and where
it does not work there is no lock and the caller does without.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from jitattn.jit.files import SAFE_FLAGS, read_file, write_file

if TYPE_CHECKING:
    from filelock import UnixFileLock

NOTICE_S = 2.0
"""Waiting for longer is worth a line in the log."""

_POLL_S = 0.02
_LIMIT = 2**12

logger = logging.getLogger("jitattn")


@contextmanager
def hold(path: Path, timeout_s: float) -> Iterator[bool]:
    """Hold the lock ``path``; a file beside it says who does. The value says whether it is held.

    It is not where the file cannot be created or locked, and when the owner does not let go within
    ``timeout_s`` seconds, for which there is a RuntimeWarning; who waits says so before. The files
    are gone afterwards.
    """
    if not _flock_works(path):
        yield False
        return
    # Imported here: it costs more than finding a kernel, which needs no lock.
    from filelock import Timeout, UnixFileLock

    lock = UnixFileLock(str(path), mode=0o644, poll_interval=_POLL_S, thread_local=False)
    try:
        _acquire(lock, path, timeout_s)
    except Timeout:
        _warn_of_owner(path, timeout_s)
        yield False
        return
    except OSError:  # the folder went away, or was made read-only
        yield False
        return
    owner = os.getpid()
    with suppress(OSError):  # a full disk
        _remove(_owner_file(path))
        write_file(_owner_file(path), _own_name().encode(), sync=False)
    try:
        yield True
    finally:
        if os.getpid() == owner:  # not in a child, which was forked inside the block
            # While the lock is held, so that nobody's file is removed but ours. Who waits on it
            # finds what we stored before compiling anything.
            for file in (_owner_file(path), path):
                with suppress(OSError):  # a folder that became read-only keeps them
                    file.unlink()
            lock.release()


def check_lock(path: Path) -> None:
    """Check a file in the folder of locks.

    Raises:
        OSError, ValueError: it is none of ours, and the next who locks replaces it.
    """
    read_file(path, _LIMIT)


def _acquire(lock: UnixFileLock, path: Path, timeout_s: float) -> None:
    from filelock import Timeout

    at_first = min(timeout_s, NOTICE_S)
    try:
        lock.acquire(timeout=at_first)
    except Timeout:
        if timeout_s <= at_first:
            raise
        logger.warning(
            "waiting for at most %g s (JITATTN_LOCK_TIMEOUT) for %s, which compiles %s",
            timeout_s, _owner_of(path), path.stem,
        )  # fmt: skip
        lock.acquire(timeout=timeout_s - at_first)


def _flock_works(path: Path) -> bool:
    import fcntl

    try:
        descriptor = _open(path)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True  # and somebody has it
    except OSError:
        path.unlink(missing_ok=True)
        return False
    finally:
        os.close(descriptor)
    return True


def _open(path: Path) -> int:
    """Open the file of a lock, which replaces whatever else is in its place."""
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            _remove(path)
    return os.open(path, os.O_RDWR | os.O_CREAT | SAFE_FLAGS, 0o644)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        shutil.rmtree(path)


def _warn_of_owner(path: Path, timeout_s: float) -> None:
    warnings.warn(
        f"gave up after {timeout_s:g} s (JITATTN_LOCK_TIMEOUT) on the lock {path}, held by "
        f"{_owner_of(path)}; compiling without it",
        RuntimeWarning,
        stacklevel=4,
    )


def _owner_of(path: Path) -> str:
    try:
        text = read_file(_owner_file(path), _LIMIT).decode(errors="replace")
    except (OSError, ValueError):
        text = ""
    shown = "".join(char for char in text.strip()[:200] if char.isprintable())
    return shown or "an unknown process"


def _owner_file(path: Path) -> Path:
    return path.with_suffix(".owner")


def _own_name() -> str:
    return f"pid {os.getpid()} on {os.uname().nodename}"
