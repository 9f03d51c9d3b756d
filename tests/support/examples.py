"""How many examples random tests draw, and which."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings


def examples(count: int) -> settings:
    """So many examples, or JITATTN_TEST_EXAMPLES; the same ones every time."""
    return settings(
        max_examples=int(os.environ.get("JITATTN_TEST_EXAMPLES", count)),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
