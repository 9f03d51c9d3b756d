"""Time from ``import torch`` to the first result on the card, in fresh processes: cold and warm.

    python -m bench.bench_first_call [--json FILE]

Cold starts with an empty kernel cache, warm reads what cold stored. The clock starts after torch is
imported and its context exists, and stops when the first decode result has been read; "complete" is
when the prefill kernel, which compiles in the background, is there too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.records import append_json, environment, record

PROGRAM = """
import json, time
import torch
torch.zeros(1, device="cuda").item()
start = time.perf_counter()
import jitattn
planner = jitattn.AttentionPlanner()
built = time.perf_counter()
kv = torch.randn(64, 2, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
table = torch.arange(64, dtype=torch.int32, device="cuda").view(4, 16)
lens = torch.tensor([256, 100, 17, 1], dtype=torch.int32, device="cuda")
q = torch.randn(4, 32, 128, dtype=torch.bfloat16, device="cuda")
out = planner.plan(jitattn.BlockTable(table), lens).run(q, planner.bind(kv))
value = out.float().sum().item()
stop = time.perf_counter()
origins = sorted(info.origin for info in jitattn.build_info(planner))
complete = time.perf_counter()
times = {"planner_s": built - start, "first_result_s": stop - start, "complete_s": complete - start}
print(json.dumps(times | {"origins": origins}))
"""


def first_call(cache: Path) -> dict[str, object]:
    """Run the program in a fresh process on the kernel cache ``cache``."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("JITATTN_")}
    environ["JITATTN_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, check=True
    )
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.bench_first_call")
    parser.add_argument("--json", type=Path, help="file to append records to")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    results: dict[str, list[dict[str, object]]] = {"cold": [], "warm": []}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for kind in results:
                result = first_call(Path(folder) / "cache")
                results[kind].append(result)
                sys.stdout.write(f"{kind}: {result}\n")
    env = environment()
    records = []
    for kind, found in results.items():
        first_s, complete_s = (
            statistics.median(float(str(result[name])) for result in found)
            for name in ("first_result_s", "complete_s")
        )
        sys.stdout.write(f"{kind}: {first_s:.3f} s to the first result, {complete_s:.3f} to all\n")
        facts = {"median_s": first_s, "complete_s": complete_s, "num_rounds": len(found)}
        records.append(record("first_call", env, start=kind, **facts))
    append_json(options.json, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
