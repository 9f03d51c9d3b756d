"""Build kernels in this process, time it, print JSON: a process of `bench_compile`.

Apart from bench_compile, so that the process imports nothing that `build` would have to.
"""

from __future__ import annotations

import json
import sys
import time


def main(config_text: str, arch: str, which: str) -> None:
    """Build the decode kernel of a planner ("decode") or everything it needs ("all").

    Args:
        config_text: the planner's arguments, as `jitattn precompile --config` takes them.
        arch: for example "sm_90a".
        which: "decode" or "all".
    """
    from jitattn import knobs
    from jitattn.build import build_all
    from jitattn.config import PlannerConfig
    from jitattn.support import resolve

    specs = resolve(PlannerConfig.parse(config_text), arch)
    settings = knobs.load()
    start, start_cpu = time.perf_counter(), time.process_time()
    kernels = build_all(specs[:1] if which == "decode" else specs, arch, settings)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    facts = {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "num_kernels": len(kernels),
        "origins": sorted({kernel.origin for kernel in kernels}),
        "symbol": kernels[0].symbol,
        "registers": kernels[0].registers,
        "spill_bytes": kernels[0].spill_bytes,
        "cubin_bytes": len(kernels[0].cubin),
        "compiler": kernels[0].compiler,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main(*sys.argv[1:])
