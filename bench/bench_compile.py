"""What it costs to get a kernel: cold compile, load from disk, import. Needs no GPU.

    python -m bench.bench_compile --cores 2 --json bench/results/compile.jsonl

Every figure is of a fresh process. "cold" is one call of `build` with an empty cache; "disk" the
same call in another process afterwards, without loading the module onto a card. "constructor" is
a planner's, with an empty cache in a process that has imported torch, the imports of jitattn
included: after it the process could decode. "complete" is the same until the prefill kernel, which
compiles in the background, is there too. "import" is `import jitattn` in a process that has
imported torch. "second process" is that, too: the imports of jitattn, looking up and reading the
decode, prefill and schedule kernel of the default planner that an earlier process has stored, with
bytecode cached and no module loaded onto a card.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from bench import records
from bench.options import make_parser
from bench.report import console

CONFIGS = (
    "num_qo_heads=32,num_kv_heads=8,head_dim=128,page_size=16",
    "num_qo_heads=32,num_kv_heads=8,head_dim=128,page_size=64,page_table=separate",
    "num_qo_heads=64,num_kv_heads=8,head_dim=64,page_size=16,q_dtype=float16,kv_dtype=float16",
    "num_qo_heads=16,num_kv_heads=8,head_dim=256,page_size=16",
    "num_qo_heads=32,num_kv_heads=32,head_dim=128,page_size=1,logits_soft_cap=30.0",
)

_ROOT = Path(__file__).parent.parent
_IMPORT = """
import time
import torch
start = time.perf_counter()
import jitattn
print(time.perf_counter() - start)
"""


def bench_config(config_text: str, arch: str) -> dict[str, object]:
    """Return the seconds of one configuration, and the decode kernel's resources.

    Raises:
        RuntimeError: a build came from where it must not, for example a bundle in the environment.
    """
    with tempfile.TemporaryDirectory(prefix="jitattn-bench-") as folder:
        cold = _probe(config_text, arch, "decode", Path(folder) / "one", "compiled")
        disk = [_probe(config_text, arch, "decode", Path(folder) / "one", "disk") for _ in range(3)]
        planner = _probe(config_text, arch, "planner", Path(folder) / "all", "compiled")
    return {
        "config": config_text,
        "arch": arch,
        "cold_s": cold["seconds"],
        "cold_cpu_s": cold["cpu_seconds"],  # tells a slow compiler from a busy machine
        "disk_s": statistics.median(float(str(run["seconds"])) for run in disk),
        "constructor_s": planner["seconds"],
        "complete_s": planner["complete_seconds"],
    } | {name: cold[name] for name in ("symbol", "registers", "spill_bytes", "cubin_bytes")}


def bench_import(repeats: int) -> list[float]:
    """Return the seconds that `import jitattn` takes after `import torch`, a process each."""
    return [float(_python("-c", _IMPORT)) for _ in range(repeats)]


def bench_second_process(arch: str, repeats: int) -> list[dict[str, object]]:
    """Return the seconds of processes after the first, all told and of imports alone."""
    with tempfile.TemporaryDirectory(prefix="jitattn-bench-") as folder:
        cache = Path(folder) / "kernels"
        bytecode = {
            "PYTHONPYCACHEPREFIX": str(Path(folder) / "bytecode"),
            "PYTHONDONTWRITEBYTECODE": "",
        }
        _probe("head_dim=128", arch, "read", cache, "compiled", bytecode)
        # The second one writes the bytecode of what only reading imports.
        return [
            _probe("head_dim=128", arch, "read", cache, "disk", bytecode)
            for _ in range(repeats + 1)
        ][1:]


def _probe(
    config_text: str,
    arch: str,
    which: str,
    cache: Path,
    origin: str,
    more_env: Mapping[str, str] | None = None,
) -> dict[str, object]:
    # No bundle may answer for the compiler, and nothing may forbid it.
    unwanted = ("JITATTN_PRECOMPILED", "JITATTN_JIT", "JITATTN_LINEINFO")
    env = {name: value for name, value in os.environ.items() if name not in unwanted}
    env |= more_env or {}
    arguments = ("-m", "bench.probe_build", which, config_text, arch)
    facts: dict[str, object] = json.loads(
        _python(*arguments, env=env | {"JITATTN_CACHE_DIR": str(cache)})
    )
    if facts["origins"] != [origin]:
        raise RuntimeError(f"{config_text}: expected {origin} kernels, got {facts['origins']}")
    return facts


def _python(*arguments: str, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=_ROOT, env=env, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments[:2])} failed:\n{done.stderr[-2000:]}")
    return done.stdout.strip().rpartition("\n")[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table and append the records."""
    options = _parse(argv)
    if options.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    env = records.environment()
    if not options.second_process:
        _compile_and_import(options, env)
    runs = bench_second_process(options.arch, options.imports)
    records.append_json(options.json, [records.record("second process", env, runs=runs)])
    for name in ("seconds", "import_seconds"):
        samples = sorted(1e3 * float(str(run[name])) for run in runs)
        middle = statistics.median(samples)
        console().print(
            f"second process, {name}: median {middle:.1f} ms, {samples[0]:.1f} to {samples[-1]:.1f}"
        )
    return 0


def _compile_and_import(options: argparse.Namespace, env: dict[str, object]) -> None:
    rows = [bench_config(text, options.arch) for text in options.config or CONFIGS]
    imports = bench_import(options.imports)
    entries = [records.record("compile", env, **row) for row in rows]
    entries.append(
        records.record("import", env, median_s=statistics.median(imports), samples_s=imports)
    )
    records.append_json(options.json, entries)
    _print(rows, imports, env)


def _print(
    rows: Sequence[Mapping[str, object]], imports: Sequence[float], env: Mapping[str, object]
) -> None:
    out = console()
    out.print(f"{env['compiler']}, {env['cores']} cores, commit {env['commit']}", markup=False)
    table = Table(title="ms in a fresh process")
    times = ("cold_s", "cold_cpu_s", "disk_s", "constructor_s", "complete_s")
    names = [name.removesuffix("_s").replace("_", " ") for name in times]
    columns = ("config", *names, "registers", "spill bytes", "cubin KiB")
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", overflow="fold")
    for row in rows:
        cells = (f"{1e3 * float(str(row[name])):.1f}" for name in times)
        size = f"{int(str(row['cubin_bytes'])) / 1024:.1f}"
        resources = (str(row["registers"]), str(row["spill_bytes"]), size)
        table.add_row(str(row["config"]), *cells, *resources)
    out.print(table)
    for name in times:
        middle = statistics.median(float(str(row[name])) for row in rows)
        out.print(f"median {name.removesuffix('_s'):11} {1e3 * middle:8.1f} ms")
    out.print(f"import jitattn after torch: median {1e3 * statistics.median(imports):.1f} ms")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("bench.bench_compile", __doc__)
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--config", action="append", help="instead of the five; repeatable")
    parser.add_argument("--cores", type=int, help="use this many")
    parser.add_argument("--imports", type=int, default=7, help="processes of each kind")
    parser.add_argument("--second-process", action="store_true", help="measure nothing else")
    parser.add_argument("--json", type=Path, help="file to which records are appended")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
