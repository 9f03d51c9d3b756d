"""Attention over caches of four bits: jitattn's beside vLLM's Triton kernel for int4.

    python -m bench.bench_int4 --vllm DIR --json bench/results/int4.jsonl

DIR holds vLLM's package, as its wheel unpacks; nothing of it but three files of Triton kernels is
loaded, so it need not import. Its int4 has a scale and a zero point a token and head, as the dtype
"int4" here, and rotates Q and the output by a Hadamard transform in each call, which is timed once
with the kernel and once without. Each is timed in a CUDA graph (bench/surface.py), and compared
with float32 over the numbers before they became four bits: errors are those of quantisation, too.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import jitattn
from bench import records
from bench.options import make_parser
from bench.surface import (
    DECODE,
    PREFILL,
    Batch,
    Point,
    measure_jitattn,
    points,
    seconds,
)
from jitattn.kernels.registry import config_of

# vLLM's backend: the 3D kernel below so many CTAs, in so many segments.
_LEAST_GRID = 128
_SEGMENTS = 16


def int4_points() -> Iterator[Point]:
    """Yield uniform and ragged decode, and prefill."""
    ragged = next(p for p in points(0, 0) if p.name.startswith("decode-64xragged"))
    yield replace(DECODE, kv_lens=(8192,) * 64)
    yield replace(DECODE, kv_lens=ragged.kv_lens)
    yield DECODE
    yield replace(PREFILL, kv_lens=(2048,) * 8)


def load_triton(folder: Path) -> Any:
    """Return vLLM's module of int4 kernels, with stand-ins for what else it would import."""
    for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.ops"):
        package = types.ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")))]
        sys.modules[name] = package
    triton = importlib.import_module("triton")
    platform = types.SimpleNamespace(
        is_rocm=lambda: False,
        is_xpu=lambda: False,
        is_cuda=lambda: True,
        fp8_dtype=lambda: torch.float8_e4m3fn,
        has_device_capability=lambda wanted: True,
        is_device_capability_family=lambda wanted: False,
    )
    parts: dict[str, dict[str, object]] = {
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"triton": triton, "tl": triton.language},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.logger": {"init_logger": importlib.import_module("logging").getLogger},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": types.SimpleNamespace(NONE=0)},
    }
    for name, values in parts.items():
        module = types.ModuleType(name)
        module.__dict__.update(values)
        sys.modules[name] = module
        parent, _, own = name.rpartition(".")
        setattr(sys.modules[parent], own, module)
    return importlib.import_module("vllm.v1.attention.ops.int4_per_token_head")


def measure_triton(module: Any, batch: Batch, runs: int) -> dict[str, object]:
    """Return the time of vLLM's call, of its kernel alone, and its error."""
    point, device = batch.point, batch.q.device
    num_pages, size, heads, dim = batch.k.shape
    k, v = torch.empty(2, num_pages, size, heads, dim // 2, dtype=torch.uint8, device=device)
    k_scales, v_scales = torch.empty(2, num_pages, size, heads, device=device)
    module.reshape_and_cache_int4(
        *(x.flatten(0, 1) for x in (batch.k, batch.v)),
        *(k, v, torch.arange(num_pages * size, device=device)),
        k_scale_cache=k_scales,
        v_scale_cache=v_scales,
    )
    most = max(_LEAST_GRID // heads, 1)
    segments = torch.empty(most, point.num_qo_heads, _SEGMENTS, dim, device=device)
    sums = torch.empty(2, most, point.num_qo_heads, _SEGMENTS, device=device)
    out = torch.empty_like(batch.q)
    given: dict[str, Any] = {
        "cu_seqlens_q": batch.qo_indptr,
        "max_seqlen_q": max(batch.q_lens),
        "seqused_k": batch.seq_lens,
        "window_size": (-1, -1),
        "block_table": batch.block_table,
        "softcap": 0.0,
        "use_alibi_sqrt": False,
        "k_scale_cache": k_scales,
        "v_scale_cache": v_scales,
        "seq_threshold_3D": most,
        "num_par_softmax_segments": _SEGMENTS,
        "softmax_segm_output": segments,
        "softmax_segm_max": sums[0],
        "softmax_segm_expsum": sums[1],
    } | dict.fromkeys(("sinks", "alibi_slopes", "qq_bias", "output_scale", "mm_prefix_range"))
    longest, scale = max(point.kv_lens), dim**-0.5

    def run() -> None:
        module.unified_attention_int4(
            batch.q, k, v, out, max_seqlen_k=longest, softmax_scale=scale, **given
        )

    def run_kernel() -> None:
        module._launch_packed_attn(
            q=batch.q, k_cache=k, v_cache=v, out=out, softmax_scale=scale, packing_factor=2, **given
        )

    run()
    error = batch.error(out, (batch.k, batch.v))
    times = {"us": run, "kernel_us": run_kernel}
    found: dict[str, object] = {
        name: seconds(None, call, runs) * 1e6 for name, call in times.items()
    }
    return found | {"error": error}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = make_parser("bench.bench_int4", __doc__)
    parser.add_argument("--vllm", type=Path, help="folder with vLLM's package")
    parser.add_argument("--bundle", type=Path, help="precompile the points' kernels into DIR")
    parser.add_argument("--json", type=Path, help="file that records are appended to")
    options = parser.parse_args(arguments)
    dtypes = ("bfloat16", "int4", "nvfp4")
    if options.bundle:
        given = (replace(point, kv_dtype=name) for point in int4_points() for name in dtypes)
        configs = list(dict.fromkeys(config_of(point.arguments) for point in given))
        report = jitattn.precompile(configs, arch="sm_90a", out=options.bundle, progress=False)
        return 1 if report.failures else 0
    module = load_triton(options.vllm) if options.vllm else None
    for point in int4_points():
        runs = max(2, min(16, int(1e13 / point.flop)))
        batches = (Batch(replace(point, kv_dtype=name)) for name in dtypes)
        found = {
            batch.point.kv_dtype: measure_jitattn(batch, runs, counts_quantisation=True)
            for batch in batches
        }
        if module:
            found["vllm-triton-int4"] = measure_triton(module, Batch(point), runs)
        for name, figures in found.items():
            sys.stdout.write(f"{point.name} {name}: {figures}\n")
        if options.json:
            record = {"name": point.name, "commit": records.commit(), "contenders": found}
            with options.json.open("a") as file:
                file.write(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
