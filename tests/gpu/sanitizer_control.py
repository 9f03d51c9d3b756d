"""A planted fault: one table entry is a page past the pool. memcheck must report it.

The cache is one that the plain loader reads: what boxes of a tensor map reach past it are zeros.

Shows that tests/gpu/sanitize.sh instruments the kernels it calls clean. The result is not looked
at; run it under compute-sanitizer only.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.support.cases import D128
from tests.support.harness import attend
from tests.support.inputs import make_inputs


def main() -> None:
    inputs = make_inputs(replace(D128, lengths=(100, 5), cache="odd_base"), "cuda")
    inputs.table[0, 2] = 2**24  # far beyond every allocation
    attend(inputs)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
