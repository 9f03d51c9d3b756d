"""Samples of what a kernel defines before it includes its parts, for editors and for tests.

Parts of attention kernels are plain headers that read constants, the page table and the arguments
of the kernel they serve. A rendered kernel defines those itself; elsewhere ``jitattn/kernel.cuh``
has those of one kernel. ``python -m tests.support.kernel_header`` writes the samples anew.
"""

from __future__ import annotations

import re

from jitattn.bundles.precompile import kernels_of
from jitattn.jit.render import TEMPLATES, render
from jitattn.kernels.attention.spec import PrefillSpec
from jitattn.kernels.common.spec import AttentionSpec
from jitattn.kernels.mla.spec import MLASpec
from jitattn.spec.layout import Loader

ARCH = "sm_90a"
_CONFIGS = {
    "jitattn/kernel.cuh": "num_qo_heads=32,num_kv_heads=8,head_dim=128,page_size=16",
    "jitattn/dequant_kernel.cuh": "num_qo_heads=32,num_kv_heads=8,head_dim=128,page_size=16,"
    "kv_dtype=float8_e4m3fn",
    "jitattn/wide_dequant_kernel.cuh": "num_qo_heads=32,num_kv_heads=8,head_dim=256,page_size=16,"
    "kv_dtype=float8_e4m3fn",
    "jitattn/fp8_kernel.cuh": "num_qo_heads=32,num_kv_heads=8,head_dim=128,page_size=16,"
    "q_dtype=float8_e4m3fn,kv_dtype=float8_e4m3fn,fp8_products=fast",
    "jitattn/mla/kernel.cuh": "planner=mla,num_heads=128,page_size=64",
    "jitattn/mla/narrow_kernel.cuh": "planner=mla,num_heads=16,page_size=64",
}
GUARD = "#define JITATTN_KERNEL  // its own jitattn/kernel.cuh follows\n"
_END = "}  // namespace jitattn\n"
_HEAD = """// Constants, page table and arguments of {what}: a sample for editors, by
// tests/support/kernel_header.py. A rendered kernel defines its own before it includes parts.
#pragma once

#ifndef JITATTN_KERNEL
{guard}
"""


def specs() -> dict[str, AttentionSpec]:
    """Return the kernel that each sample is of, by the sample's name among headers."""
    found = {}
    for name, config in _CONFIGS.items():
        kernels = (spec for spec, _ in kernels_of([config], ARCH))
        found[name] = next(
            spec
            for spec in kernels
            if isinstance(spec, PrefillSpec | MLASpec) and spec.loader is not Loader.PLAIN
        )
    return found


def sample(name: str) -> str:
    """Return the text of a sample."""
    source = re.sub(
        r"^#line.*\n|^// (Rendered|\w+Spec:) .*\n", "", render(specs()[name], ARCH), flags=re.M
    )
    before, after = source.split(GUARD)
    includes = "".join(re.findall(r"^#include .*\n|^\n(?=#include)", before, flags=re.M)).lstrip()
    block = re.sub(r"\n{3,}", "\n\n", after[: after.index(_END)] + _END)
    what = {
        "mla": "an MLA kernel",
        "wide": "a kernel of FP8 caches of wide heads",
        "dequant": "a kernel of FP8 caches",
        "fp8": "a kernel of products of 8 bits",
    }
    kind = next((text for part, text in what.items() if part in name), "an attention kernel")
    return f"{_HEAD.format(what=kind, guard=GUARD)}{includes}{block}#endif\n"


def main() -> None:
    """Write the samples."""
    for name in specs():
        (TEMPLATES / "include" / name).write_text(sample(name))


if __name__ == "__main__":
    main()
