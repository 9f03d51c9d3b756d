"""Files that the processes of a test run make once and share, such as compiled kernels."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

FOLDER = "SHARED_TEST_FILES"  # set by conftest.py for the workers of a run


@functools.cache
def shared_folder() -> Path:
    """Return the run's folder; outside a run, one of this process."""
    return Path(os.environ.get(FOLDER) or tempfile.mkdtemp(prefix="jitattn-tests-"))


def shared_file(name: str, make: Callable[[Path], None]) -> Path:
    """Return the file ``name``, which ``make`` writes unless the run has it already."""
    path = shared_folder() / name
    if not path.exists():
        with FileLock(f"{path}.lock"):
            if not path.exists():
                part = path.with_name(f"{path.name}.part")
                make(part)
                part.rename(path)
    return path
