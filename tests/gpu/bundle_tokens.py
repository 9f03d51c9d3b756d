"""Precompile the kernels of tests/gpu/test_preprocess.py, test_append.py and bench_preprocess.py.

    python -m tests.gpu.bundle_tokens --arch sm_90a -o build/gpu-tests
    JITATTN_PRECOMPILED=build/gpu-tests JITATTN_JIT=0 python -m pytest tests/gpu/test_preprocess.py

Needs neither a GPU nor torch's CUDA build.
"""

from __future__ import annotations

import sys

from bench.token_workloads import configs as bench_configs
from tests.gpu.bundle import fill, parser_of
from tests.support.token_sets import kinds_of


def main(arguments: list[str] | None = None) -> int:
    options = parser_of("tests.gpu.bundle_tokens", __doc__).parse_args(arguments)
    return fill(list(dict.fromkeys((*kinds_of(), *bench_configs()))), options)


if __name__ == "__main__":
    sys.exit(main())
