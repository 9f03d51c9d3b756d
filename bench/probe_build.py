"""Build kernels in this process, time it, print JSON: a process of `bench_compile`.

Apart from bench_compile, so that the process imports nothing that the build would have to.
"""

from __future__ import annotations

import json
import re
import sys
import time


def build_decode(config_text: str, arch: str) -> dict[str, object]:
    """Time `build` of a planner's decode kernel, without jitattn's imports.

    Args:
        config_text: the planner's arguments, as `jitattn precompile --config` takes them.
        arch: for example "sm_90a".
    """
    from jitattn.base import knobs
    from jitattn.jit.build import build
    from jitattn.kernels.registry import specs_of
    from jitattn.spec.config import PlannerConfig

    spec = specs_of(PlannerConfig.parse(config_text), arch)[0]
    settings = knobs.load()
    start, start_cpu = time.perf_counter(), time.process_time()
    kernel = build(spec, arch, settings)
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - start_cpu,
        "origins": [kernel.origin],
        "symbol": kernel.symbol,
        "registers": kernel.registers,
        "spill_bytes": kernel.spill_bytes,
        "cubin_bytes": len(kernel.cubin),
    }


def construct(config_text: str, arch: str) -> dict[str, object]:
    """Time a planner's constructor, jitattn's imports included, and what it leaves to compile.

    Args:
        config_text: as for `build_decode`.
        arch: of the card that is pretended; nothing is loaded onto one.
    """
    from unittest import mock

    import torch

    start = time.perf_counter()
    from jitattn.device.driver import DeviceFacts
    from jitattn.kernels.attention.kernels import AttentionKernels
    from jitattn.kernels.common import cuda_kernels, kernel_loader
    from jitattn.spec.config import PlannerConfig

    capability = divmod(int(re.sub(r"\D", "", arch)), 10)
    facts = DeviceFacts(0, "none", capability, num_sms=132, max_smem_bytes=0)
    with (
        mock.patch.object(cuda_kernels, "device_facts", lambda index: facts),
        mock.patch.object(kernel_loader, "load_kernel", lambda *arguments: None),
    ):
        kernels = AttentionKernels(PlannerConfig.parse(config_text), torch.device("cuda", 0))
    seconds = time.perf_counter() - start
    infos = kernels.infos()  # waits
    return {
        "seconds": seconds,
        "complete_seconds": time.perf_counter() - start,
        "origins": sorted({info.origin for info in infos}),
    }


def read_all(config_text: str, arch: str) -> dict[str, object]:
    """Time the import of jitattn after torch, and `build_all` of what a planner starts with.

    Those are the decode and the prefill kernel of the vector loader and the schedule kernel.
    """
    import torch  # noqa: F401

    start = time.perf_counter()
    from jitattn.base import knobs
    from jitattn.jit.build import build_all
    from jitattn.kernels.merge.spec import MergeSpec
    from jitattn.kernels.registry import specs_of
    from jitattn.spec.config import PlannerConfig
    from jitattn.spec.layout import Loader

    imported = time.perf_counter()
    specs = [
        spec
        for spec in specs_of(PlannerConfig.parse(config_text), arch)
        if getattr(spec, "loader", None) is not Loader.PLAIN and not isinstance(spec, MergeSpec)
    ]
    kernels = build_all(specs, arch, knobs.load())
    return {
        "seconds": time.perf_counter() - start,
        "import_seconds": imported - start,
        "origins": sorted({kernel.origin for kernel in kernels}),
        "num_kernels": len(kernels),
    }


if __name__ == "__main__":
    which = {"decode": build_decode, "planner": construct, "read": read_all}[sys.argv[1]]
    print(json.dumps(which(*sys.argv[2:])))
