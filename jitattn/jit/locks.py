"""A lock that the kernel releases when its owner ends, however it ends.

filelock's flock lock, never the mere existence of a file, which a killed owner would leave behind
for ever: filelock falls back to that where flock does not work, so flock is tried first, and where
it does not work there is no lock and the caller does without.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_POLL_S = 0.02
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@contextmanager
def hold(path: Path, timeout_s: float) -> Iterator[bool]:
    """Hold the lock ``path``; a file beside it says who does. The value says whether it is held.

    It is not where the file cannot be created or locked, and when the owner does not let go within
    ``timeout_s`` seconds, for which there is a RuntimeWarning. The files are gone afterwards.
    """
    if not _flock_works(path):
        yield False
        return
    # Imported here: it costs more than finding a kernel, which needs no lock.
    from filelock import Timeout, UnixFileLock

    lock = UnixFileLock(str(path), timeout=timeout_s, poll_interval=_POLL_S, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        _warn_of_owner(path, timeout_s)
        yield False
        return
    except OSError:  # the folder went away, or was made read-only
        yield False
        return
    owner = os.getpid()
    _write_owner(path)
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


def _flock_works(path: Path) -> bool:
    import fcntl

    try:
        descriptor = os.open(path, _FLAGS, 0o644)
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


def _warn_of_owner(path: Path, timeout_s: float) -> None:
    try:
        owner = _owner_file(path).read_text(errors="replace").strip()
    except OSError:
        owner = ""
    warnings.warn(
        f"gave up after {timeout_s:g} s (JITATTN_LOCK_TIMEOUT) on the lock {path}, held by "
        f"{owner or 'an unknown process'}; compiling without it",
        RuntimeWarning,
        stacklevel=4,
    )


def _owner_file(path: Path) -> Path:
    return path.with_suffix(".owner")


def _write_owner(path: Path) -> None:
    with suppress(OSError):  # a full disk
        _owner_file(path).write_text(f"pid {os.getpid()} on {os.uname().nodename}")
