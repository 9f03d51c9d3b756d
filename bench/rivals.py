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
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from bench.contenders import Contender, Prepared, SkipError
from bench.timing import Call
from bench.workloads import Batch, Case

_WORKSPACE_BYTES = 512 << 20
_XQA_PAGE_SIZES = (16, 32, 64, 128)
ON_HOST = "on the host, before the clock starts"


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
def workspace(owner: str, device: torch.device) -> Tensor:
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
        if self._refusal(case):
            return None
        has_window = case.window_left >= 0
        return self.name, case.head_dim, case.q_dtype, case.kv_dtype, has_window, case.use_sinks

    def _refusal(self, case: Case) -> str | None:
        if self.use_tensor_cores:
            return None
        if case.q_len > 1:
            return "fa2 on CUDA cores takes one query token a request"
        return "fa2 on CUDA cores has no sinks" if case.use_sinks else None

    def wrapper(self, batch: Batch) -> Any:
        """Return FlashInfer's wrapper object, or raise SkipError."""
        case, buffer = batch.case, workspace(self.name, batch.q.device)
        if reason := self._refusal(case):
            raise SkipError(reason)
        if case.use_sinks:  # the other wrappers drop sinks without a word
            return flashinfer().BatchAttentionWithAttentionSinkWrapper(
                buffer,
                case.kv_layout,
                backend="fa2",
                q_data_type=batch.q.dtype,
                kv_data_type=batch.kv.dtype,
                head_dim_qk=case.head_dim,
                head_dim_vo=case.head_dim,
                window_left=case.window_left,
            )
        return flashinfer().BatchDecodeWithPagedKVCacheWrapper(
            buffer, case.kv_layout, use_tensor_cores=self.use_tensor_cores, backend="fa2"
        )

    def plan(self, wrapper: Any, batch: Batch) -> None:
        """Plan ``batch``; it reads the lengths back to the host."""
        case = batch.case
        only: dict[str, Any] = {"q_len_per_req": case.q_len} if case.q_len > 1 else {}
        starts = []
        if case.use_sinks:  # a wrapper for prefill
            starts, only = [batch.qo_indptr], {"causal": True}
        wrapper.plan(
            *starts,
            *batch.csr(),
            window_left=case.window_left,
            q_data_type=batch.q.dtype,
            kv_data_type=batch.kv.dtype,
            **only,
        )

    def prepare(self, batch: Batch) -> Prepared:
        """Compile and plan."""
        wrapper = self.wrapper(batch)
        self.plan(wrapper, batch)
        outs = torch.empty_like(batch.q)
        extra = (batch.sinks, batch.case.head_dim**-0.5) if batch.case.use_sinks else ()
        runs = tuple(
            functools.partial(wrapper.run, q, kv, *extra, out=out)
            for q, kv, out in zip(batch.q, batch.kv, outs, strict=True)
        )
        return Prepared(runs=runs, outs=outs, facts={"planned": ON_HOST})


class FlashInferXqa:
    """XQA, TensorRT-LLM's generation kernel, as FlashInfer compiles it."""

    name = "xqa"

    def version(self) -> str:
        """Return FlashInfer's version."""
        return str(flashinfer().__version__)

    def build_key(self, case: Case) -> Hashable | None:
        """Return what its module is compiled for."""
        if case.page_size not in _XQA_PAGE_SIZES:
            return None
        has_window = case.window_left >= 0
        shape = case.head_dim, case.kv_dtype, case.page_size, case.group_size
        return self.name, *shape, has_window, case.q_len

    def prepare(self, batch: Batch) -> Prepared:
        """Copy the pools into HND order; the first run compiles."""
        decode = flashinfer().decode.trtllm_batch_decode_with_kv_cache
        case = batch.case
        if case.page_size not in _XQA_PAGE_SIZES:
            raise SkipError(f"XQA has no page size {case.page_size}")
        pools = batch.kv  # [copies, pages, 2, heads, page, dim]
        if case.kv_layout == "NHD":
            pools = pools.transpose(-3, -2).contiguous()
        outs = torch.empty_like(batch.q)
        buffer = workspace(self.name, batch.q.device)

        runs = tuple(
            functools.partial(
                decode,
                q,
                (pool[:, 0], pool[:, 1]),
                buffer,
                batch.block_table,
                batch.seq_lens,
                max(case.seq_lens),
                bmm1_scale=case.head_dim**-0.5,
                bmm2_scale=1.0,
                window_left=case.window_left,
                sinks=batch.sinks,
                out=out.unflatten(0, (-1, case.q_len)) if case.q_len > 1 else out,
                kv_layout="HND",
                q_len_per_req=case.q_len,
                mask=_causal_mask(batch) if case.q_len > 1 else None,
                backend="xqa",
            )
            for q, pool, out in zip(batch.q, pools, outs, strict=True)
        )
        return Prepared(runs=runs, outs=outs, facts={"planned": "nothing to plan"})


def _causal_mask(batch: Batch) -> Tensor:
    """Return XQA's mask among the query tokens of a request: bit j of row i says that i sees j.

    Rows are padded to 32 bits; [batch_size, q_len, 2] uint16 for up to 15 query tokens.
    """
    q_len = batch.case.q_len
    rows = torch.tensor([[(2 << i) - 1, 0] for i in range(q_len)], device=batch.q.device)
    return rows.to(torch.int16).repeat(batch.case.batch_size, 1, 1).view(torch.uint16)


class FlashAttention3:
    """FlashAttention-3 with paged caches, the build that vLLM ships."""

    name = "fa3"

    def version(self) -> str:
        """Return vLLM's version, or the library's digest where only the library is here."""
        return load_fa3()

    def build_key(self, case: Case) -> Hashable | None:
        """Return None: it comes compiled."""
        return None

    def prepare(self, batch: Batch) -> Prepared:
        """Plan with its scheduler kernel, as vLLM does once a step."""
        self.version()  # loads the library
        case = batch.case
        if case.kv_dtype != case.q_dtype:
            raise SkipError("FlashAttention-3 wants q and cache of one dtype")
        step = Fa3Step(
            q_dtype=batch.q.dtype,
            num_qo_heads=case.num_qo_heads,
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
            max_q_len=case.q_len,
            max_kv_len=max(case.seq_lens),
            qo_indptr=batch.qo_indptr,
            seq_lens=batch.seq_lens,
            page_size=case.page_size,
            block_table=batch.block_table,
            window_left=case.window_left,
            sinks=batch.sinks,
        )
        caches = [batch.tokens_first(copy) for copy in range(batch.num_copies)]
        return step.prepare(batch.q, caches)


@dataclass(frozen=True, kw_only=True)
class Fa3Step:
    """The arguments of FlashAttention-3 that the layers of one step share, causal.

    Attributes:
        qo_indptr: [batch_size + 1] int32.
        seq_lens: [batch_size] int32.
        page_size: of a paged cache.
        block_table: of a paged cache, [batch_size, max_pages_per_seq] int32.
        kv_indptr: of keys and values without pages, [batch_size + 1] int32.
        sinks: [num_qo_heads], exact in bfloat16, the one dtype it takes.
        head_dim_v: of values, where it isn't that of keys.
        sm_scale: what scores are multiplied with; None: head_dim ** -0.5.
    """

    q_dtype: torch.dtype
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    max_q_len: int
    max_kv_len: int
    qo_indptr: Tensor
    seq_lens: Tensor
    page_size: int | None = None
    block_table: Tensor | None = None
    kv_indptr: Tensor | None = None
    window_left: int = -1
    logits_soft_cap: float = 0.0
    sinks: Tensor | None = None
    head_dim_v: int | None = None
    sm_scale: float | None = None

    def prepare(self, q: Tensor, caches: Sequence[tuple[Tensor, Tensor]]) -> Prepared:
        """Plan, and return a run for every copy of q [num_copies, num_tokens, ...]."""
        outs = torch.empty_like(q)
        sinks = None if self.sinks is None else self.sinks.bfloat16()
        metadata: list[Tensor] = []

        def plan() -> None:
            metadata[:] = [self.schedule()]

        def run(copy: int) -> Call:
            k, v = caches[copy]
            q_of, out = q[copy], outs[copy]
            return lambda: self.forward(q_of, k, v, out, sinks, metadata[0])

        plan()
        runs = tuple(run(copy) for copy in range(q.shape[0]))
        return Prepared(runs=runs, outs=outs, plan=plan, facts={"planned": "on the device"})

    def _window(self) -> tuple[int, int]:
        """Return how far a query token sees to its left and right; -1 is without end."""
        return (self.window_left, 0) if self.window_left >= 0 else (-1, -1)

    def schedule(self) -> Tensor:
        """Split the work on the device, with the arguments that `forward` repeats."""
        none = None
        schedule: Tensor = torch.ops._vllm_fa3_C.get_scheduler_metadata(
            self.seq_lens.shape[0], self.max_q_len, self.max_kv_len,
            self.num_qo_heads, self.num_kv_heads, self.head_dim, self.head_dim_v or self.head_dim,
            self.q_dtype, self.seq_lens,
            self.qo_indptr, self.kv_indptr, none, none,  # cu_seqlens of q, k, new k; seqused_q
            none,  # leftpad
            self.page_size, 0, True,  # page size, new keys, causal
            *self._window(), self.logits_soft_cap > 0,
            0, none, 0,  # splits: as it likes; pack the group: as it likes; all SMs
        )  # fmt: skip
        return schedule

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        sinks: Tensor | None,
        metadata: Tensor,
        q_v: Tensor | None = None,
    ) -> None:
        """Attend by ``metadata`` of `schedule`.

        With ``q_v`` [num_tokens, num_qo_heads, head_dim_v] scores are q with keys plus q_v with
        values, as latent attention has it: q and k are the rope parts, q_v and v the latents.
        """
        none = None
        sm_scale = self.head_dim**-0.5 if self.sm_scale is None else self.sm_scale
        seq_lens = self.seq_lens if self.kv_indptr is None else none
        torch.ops._vllm_fa3_C.fwd(
            q, k, v, none, none, q_v,  # no new keys and values
            out, self.qo_indptr, self.kv_indptr, none,  # cu_seqlens of q, k, new k
            none, seq_lens, self.max_q_len, self.max_kv_len, self.block_table,
            none, none, none, none, none,  # batch index, leftpad, rotary
            none, none, none,  # scales
            sm_scale, True, *self._window(), self.logits_soft_cap,  # causal
            True, metadata, 0, none, 0,  # rotary order; splits, packing, SMs: as in the schedule
            sinks, 1, 0, none,  # context parallelism
        )  # fmt: skip


def load_fa3() -> str:
    """Load FlashAttention-3 and return its version, or raise SkipError."""
    return load_library("_vllm_fa3_C.abi3.so", "JITATTN_BENCH_FA3", "vllm/vllm_flash_attn")


def load_library(name: str, variable: str, folder_in_wheel: str) -> str:
    """Load a library of vLLM's wheel and return its version, or raise SkipError.

    Args:
        name: of the file.
        variable: of the environment, which names another file.
        folder_in_wheel: where an installed vLLM has it; on sys.path it may lie alone.
    """
    return _load(_find(name, variable, folder_in_wheel))


def _find(name: str, variable: str, folder_in_wheel: str) -> Path:
    """Return the library that ``variable`` names, or the first on sys.path."""
    if named := os.environ.get(variable):
        return Path(named)
    for folder in sys.path:
        for place in (Path(folder), Path(folder) / folder_in_wheel):
            if (place / name).is_file():
                return place / name
    raise SkipError(f"{name} is not on sys.path, and {variable} doesn't name it")


@functools.cache
def _load(library: Path) -> str:
    """Load the library once and return its version, or raise SkipError."""
    try:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except (OSError, RuntimeError) as error:  # the latter of operators that torch refuses
        reason = error.__cause__ or error  # which symbol or library is missing
        raise SkipError(f"{library.name} can't be loaded: {reason}") from error
    try:
        return "vllm " + importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return "vllm build, sha256 " + hashlib.sha256(library.read_bytes()).hexdigest()[:12]
