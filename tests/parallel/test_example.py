"""The example of docs/parallel.md, on two ranks."""

from __future__ import annotations

import re

from tests.style.figures import ROOT
from tests.support.rank_jobs import run_example
from tests.support.ranks import run_ranks, values


def test_the_example_of_the_page() -> None:
    path = ROOT / "docs/examples/context_parallel.py"
    page = (ROOT / "docs/parallel.md").read_text()
    assert re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0] == path.read_text()
    assert values(run_ranks(2, run_example, str(path))) == [
        "rank 0: [2, 16, 128] over [504, 21] own tokens\n",
        "rank 1: [2, 16, 128] over [496, 16] own tokens\n",
    ]
