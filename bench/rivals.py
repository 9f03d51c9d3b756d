"""Other implementations, each optional: absent ones are reported with the reason, never guessed.

Every rival gets the layout it is best at (XQA a copy of the cache in HND order), its plan made
before the clock starts unless the device makes it, a preallocated output, and the same pages.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Hashable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from bench.contenders import Contender, Prepared, SkipError
from bench.timing import Call
from bench.workloads import Batch, Case

_WORKSPACE_BYTES = 512 << 20
_FA3_LIBRARY = "_vllm_fa3_C.abi3.so"
_ON_HOST = "on the host, before the clock starts"


def all_rivals() -> tuple[Contender, ...]:
    """Return every rival, here or not."""
    return (
        FlashInferFa2(use_tensor_cores=False),
        FlashInferFa2(use_tensor_cores=True),
        FlashInferXqa(),
        FlashAttention3(),
    )


def flashinfer() -> ModuleType:
    """Import FlashInfer, or raise SkipError; any failure of its imports is a reason."""
    try:
        return importlib.import_module("flashinfer")
    except Exception as error:
        raise SkipError(f"flashinfer can't be imported: {error}") from error


@functools.cache
def _workspace(owner: str, device: torch.device) -> Tensor:
    """One zeroed workspace for each owner: XQA keeps semaphores in its own that must start at 0."""
    del owner
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


class FlashInferFa2:
    """FlashInfer's FlashAttention-2 decode wrapper, on CUDA cores or on tensor cores."""

    def __init__(self, *, use_tensor_cores: bool) -> None:
        """Choose the kernel family."""
        self.use_tensor_cores = use_tensor_cores
        self.name = "fa2-tc" if use_tensor_cores else "fa2"

    def version(self) -> str:
        """Return FlashInfer's version."""
        return str(flashinfer().__version__)

    def build_key(self, case: Case) -> Hashable | None:
        """Return what its module is compiled for; group and page size are run-time arguments."""
        return self.name, case.head_dim, case.q_dtype, case.kv_dtype

    def wrapper(self, device: torch.device) -> Any:
        """Return FlashInfer's wrapper object."""
        return flashinfer().BatchDecodeWithPagedKVCacheWrapper(
            _workspace(self.name, device),
            "NHD",
            use_tensor_cores=self.use_tensor_cores,
            backend="fa2",
        )

    def plan(self, wrapper: Any, batch: Batch) -> None:
        """Plan ``batch``; it reads the lengths back to the host."""
        case = batch.case
        wrapper.plan(
            batch.kv_indptr,
            batch.kv_indices,
            batch.last_page_len,
            case.num_qo_heads,
            case.num_kv_heads,
            case.head_dim,
            case.page_size,
            q_data_type=batch.q.dtype,
            kv_data_type=batch.kv.dtype,
        )

    def prepare(self, batch: Batch) -> Prepared:
        """Compile and plan."""
        wrapper = self.wrapper(batch.q.device)
        self.plan(wrapper, batch)
        outs = torch.empty_like(batch.q)
        triples = zip(batch.q, batch.kv, outs, strict=True)
        runs = tuple(functools.partial(wrapper.run, q, kv, out=out) for q, kv, out in triples)
        return Prepared(runs=runs, outs=outs, facts={"planned": _ON_HOST})


class FlashInferXqa:
    """XQA, TensorRT-LLM's generation kernel, as FlashInfer compiles it."""

    name = "xqa"

    def version(self) -> str:
        """Return FlashInfer's version."""
        return str(flashinfer().__version__)

    def build_key(self, case: Case) -> Hashable | None:
        """Return what its module is compiled for."""
        return self.name, case.head_dim, case.kv_dtype, case.page_size, case.group_size

    def prepare(self, batch: Batch) -> Prepared:
        """Copy the pools into HND order; the first run compiles."""
        decode = flashinfer().decode.trtllm_batch_decode_with_kv_cache
        case = batch.case
        if case.page_size not in (16, 32, 64, 128):
            raise SkipError(f"XQA has no page size {case.page_size}")
        pools = batch.kv.transpose(-3, -2).contiguous()  # [copies, pages, 2, heads, page, dim]
        outs = torch.empty_like(batch.q)
        workspace = _workspace(self.name, batch.q.device)

        runs = tuple(
            functools.partial(
                decode,
                q,
                (pool[:, 0], pool[:, 1]),
                workspace,
                batch.block_table,
                batch.seq_lens,
                max(case.seq_lens),
                bmm1_scale=case.head_dim**-0.5,
                bmm2_scale=1.0,
                out=out,
                kv_layout="HND",
                backend="xqa",
            )
            for q, pool, out in zip(batch.q, pools, outs, strict=True)
        )
        return Prepared(runs=runs, outs=outs, facts={"planned": "nothing to plan"})


class FlashAttention3:
    """FlashAttention-3 with paged caches, the build that vLLM ships."""

    name = "fa3"

    def version(self) -> str:
        """Return vLLM's version, or the library's digest where only the library is here."""
        return _load_fa3(_fa3_library())

    def build_key(self, case: Case) -> Hashable | None:
        """Return None: it comes compiled."""
        return None

    def prepare(self, batch: Batch) -> Prepared:
        """Plan with its scheduler kernel, as vLLM does once a step."""
        self.version()  # loads the library
        case = batch.case
        if case.kv_dtype != case.q_dtype:
            raise SkipError("FlashAttention-3 wants q and cache of one dtype")
        ops = torch.ops._vllm_fa3_C
        qo_indptr = torch.arange(case.batch_size + 1, dtype=torch.int32, device=batch.q.device)
        outs = torch.empty_like(batch.q)
        metadata: list[Tensor] = []

        def plan() -> None:
            metadata[:] = [_fa3_schedule(ops, batch, qo_indptr)]

        def run(copy: int) -> Call:
            q, k, v = batch.q[copy], batch.kv[copy][:, 0], batch.kv[copy][:, 1]
            out = outs[copy]
            return lambda: _fa3_forward(ops, batch, q, k, v, out, qo_indptr, metadata[0])

        plan()
        runs = tuple(run(copy) for copy in range(batch.num_copies))
        return Prepared(runs=runs, outs=outs, plan=plan, facts={"planned": "on the device"})


def _fa3_library() -> Path:
    """Return the library: JITATTN_BENCH_FA3, or the first on sys.path; else raise SkipError."""
    if named := os.environ.get("JITATTN_BENCH_FA3"):
        return Path(named)
    for folder in sys.path:
        for place in (Path(folder), Path(folder) / "vllm" / "vllm_flash_attn"):
            if (place / _FA3_LIBRARY).is_file():
                return place / _FA3_LIBRARY
    raise SkipError(f"{_FA3_LIBRARY} is not on sys.path, and JITATTN_BENCH_FA3 doesn't name it")


@functools.cache
def _load_fa3(library: Path) -> str:
    """Load the library once and return its version, or raise SkipError."""
    try:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise SkipError(f"{library.name} can't be loaded: {error}") from error
    try:
        return "vllm " + importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return "vllm build, sha256 " + hashlib.sha256(library.read_bytes()).hexdigest()[:12]


def _fa3_schedule(ops: Any, batch: Batch, qo_indptr: Tensor) -> Tensor:
    """Split the work on the device, with the arguments that `_fa3_forward` repeats."""
    case = batch.case
    none = None
    schedule: Tensor = ops.get_scheduler_metadata(
        case.batch_size, 1, max(case.seq_lens), case.num_qo_heads, case.num_kv_heads,
        case.head_dim, case.head_dim, batch.q.dtype, batch.seq_lens,
        qo_indptr, none, none, none,  # cu_seqlens of q, k and new k; seqused_q
        none,  # leftpad
        case.page_size, 0, True,  # page size, new keys, causal
        -1, -1, False,  # window, soft cap
        0, none, 0,  # splits: as it likes; pack the group: as it likes; all SMs
    )  # fmt: skip
    return schedule


def _fa3_forward(
    ops: Any,
    batch: Batch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    qo_indptr: Tensor,
    metadata: Tensor,
) -> None:
    case = batch.case
    none = None
    ops.fwd(
        q, k, v, none, none, none,  # no new keys and values, no q_v
        out, qo_indptr, none, none,  # cu_seqlens of q, k, new k
        none, batch.seq_lens, 1, max(case.seq_lens), batch.block_table,
        none, none, none, none, none,  # batch index, leftpad, rotary
        none, none, none,  # scales
        case.head_dim**-0.5, True, -1, -1, 0.0, True,  # causal, window, soft cap, rotary order
        metadata, 0, none, 0,  # splits, packing, SMs: as in the schedule
        none, 1, 0, none,  # sinks, context parallelism
    )  # fmt: skip
