"""A lock that the kernel releases when its owner ends, however it ends.

It is flock, never the mere existence of a file, which a killed owner would leave behind for ever.
Where flock does not work there is no lock, and the caller does without.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_POLL_S = 0.02
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

# Descriptors of this process's locks. A forked child inherits them, and would keep the locks held
# after their owner's death.
_descriptors: set[int] = set()


def _forget_inherited() -> None:
    while _descriptors:
        os.close(_descriptors.pop())  # without unlocking: the lock is still the parent's


os.register_at_fork(after_in_child=_forget_inherited)


@contextmanager
def hold(path: Path, timeout_s: float) -> Iterator[bool]:
    """Hold the lock ``path``, a file that says who holds it; the value says whether it is held.

    It is not where the file cannot be created or locked, and when the owner does not let go within
    ``timeout_s`` seconds, for which there is a RuntimeWarning. The file is gone afterwards.
    """
    descriptor = _acquire(path, timeout_s)
    try:
        yield descriptor is not None
    finally:
        if descriptor in _descriptors:  # not in a child, which was forked inside the block
            _release(path, descriptor)


def _acquire(path: Path, timeout_s: float) -> int | None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            descriptor = os.open(path, _FLAGS, 0o644)
        except OSError:
            return None
        _descriptors.add(descriptor)
        locked = _try_lock(descriptor)
        if locked and _is_at(path, descriptor):
            _write_owner(descriptor)
            return descriptor
        owner = _read_owner(descriptor)
        _close(descriptor)
        if locked is None:
            path.unlink(missing_ok=True)
            return None
        # Locked, but no longer at the path: its last owner removed it, so try the one there now.
        if not locked and time.monotonic() >= deadline:
            warnings.warn(
                f"gave up after {timeout_s:g} s (JITATTN_LOCK_TIMEOUT) on the lock {path}, held by "
                f"{owner}; compiling without it",
                RuntimeWarning,
                stacklevel=2,
            )
            return None
        if not locked:
            time.sleep(min(_POLL_S, max(0.0, deadline - time.monotonic())))


def _try_lock(descriptor: int) -> bool | None:
    """Lock the file; False: another process has the lock; None: locks don't work here."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _release(path: Path, descriptor: int) -> None:
    import fcntl

    with suppress(OSError):  # a folder that became read-only keeps the file
        if _is_at(path, descriptor):
            path.unlink()
    with suppress(OSError):  # closing is not enough when a child has inherited the descriptor
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    _close(descriptor)


def _close(descriptor: int) -> None:
    _descriptors.discard(descriptor)
    os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except OSError:
        return False


def _write_owner(descriptor: int) -> None:
    with suppress(OSError):  # a full disk
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()} on {os.uname().nodename}".encode(), 0)


def _read_owner(descriptor: int) -> str:
    with suppress(OSError):
        text = os.pread(descriptor, 256, 0).decode(errors="replace").strip()
        if text:
            return text
    return "an unknown process"
