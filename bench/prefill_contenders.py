"""Who computes the prefill cases, their inputs, and the right answer."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from unittest import mock

import torch
from torch import Tensor

import jitattn
from bench import caches
from bench.contenders import Ours, Prepared, SkipError
from bench.oracle import SampledOracle, sampled_rows
from bench.prefill_cases import CONTIGUOUS, Q_DTYPE, PrefillArguments, PrefillCase
from bench.rivals import ON_HOST, Fa3Step, flashinfer, load_fa3, workspace
from bench.timing import Call
from bench.workloads import Batch, make_batch
from jitattn.kernels.attention.reference import attention
from jitattn.kernels.common.reference_plan import gather

_FA3_HEAD_DIMS = (64, 128, 256)  # of FlashInfer's


@dataclass(frozen=True)
class Inputs:
    """The tensors of a case.

    Attributes:
        batch: caches and tables; its queries are not used.
        q: [num_copies, num_tokens, num_qo_heads, head_dim].
        qo_indptr: [batch_size + 1] int32.
    """

    case: PrefillCase
    batch: Batch
    q: Tensor
    qo_indptr: Tensor

    def contiguous(self, copy: int) -> tuple[Tensor, Tensor]:
        """Return K and V without pages, each [num_kv_tokens, num_kv_heads, head_dim]."""
        requests = [self.request(copy, b) for b in range(len(self.case.seq_lens))]
        k, v = (torch.cat(tokens) for tokens in zip(*requests, strict=True))
        return k, v

    def request(self, copy: int, b: int) -> tuple[Tensor, Tensor]:
        """Return K and V of request ``b``."""
        pages, kv_len = self.batch.block_table[b], self.case.seq_lens[b]
        k, v = (gather(cache, pages, kv_len) for cache in self.batch.tokens_first(copy))
        return k, v


def make_inputs(
    case: PrefillCase, device: torch.device, *, copies: int = 1, seed: int = 0
) -> Inputs:
    """Fill queries and caches with normal random numbers, which ``seed`` fixes."""
    starts = [0, *itertools.accumulate(case.q_lens)]
    generator = torch.Generator(device).manual_seed(seed + 1)
    shape = (copies, starts[-1], case.num_qo_heads, case.head_dim)
    dtype = getattr(torch, Q_DTYPE)
    q = torch.randn(shape, generator=generator, dtype=dtype, device=device)
    indptr = torch.tensor(starts, dtype=torch.int32, device=device)
    return Inputs(case, make_batch(case.pages(), copies, device, seed=seed), q, indptr)


def with_page_size(batch: Batch, page_size: int) -> Batch:
    """Return a batch of the same tokens in pages of another size, in an order of their own."""
    case = dataclasses.replace(batch.case, page_size=page_size)
    other = make_batch(case, batch.num_copies, batch.kv.device)
    places = torch.arange(max(case.seq_lens), device=batch.kv.device)
    for copy in range(batch.num_copies):
        pairs = zip(batch.tokens_first(copy), other.tokens_first(copy), strict=True)
        for (source, target), (b, kv_len) in itertools.product(pairs, enumerate(case.seq_lens)):
            at = places[:kv_len]
            pages = other.block_table[b][at // page_size].long()
            target[pages, at % page_size] = gather(source, batch.block_table[b], kv_len)
    return other


class PrefillOracle(SampledOracle[Inputs]):
    """Expected outputs of sampled rows, [num_rows, num_qo_heads, head_dim] float64."""

    def _request(self, copy: int, b: int) -> Tensor:
        """Return what the sampled rows of a request come to, in float64."""
        inputs, case = self.inputs, self.inputs.case
        rows = torch.tensor(sampled_rows(case.q_lens[b]), device=inputs.q.device)
        q = inputs.q[copy, inputs.qo_indptr[b] + rows]
        k, v = inputs.request(copy, b)
        positions = case.seq_lens[b] - case.q_lens[b] + rows
        distance = positions[:, None] - torch.arange(k.shape[0], device=k.device)
        visible = distance >= 0
        if case.window_left >= 0:
            visible &= distance <= case.window_left
        out, _ = attention(
            q,
            k,
            v,
            [0, q.shape[0]],
            [0, k.shape[0]],
            causal=False,  # sampled rows are no neighbours: the mask says it all
            window_left=-1,
            logits_soft_cap=case.logits_soft_cap,
            sm_scale=case.head_dim**-0.5,
            sinks=inputs.batch.sinks,
            masks=[visible],
        )
        return out


class PrefillContender(Protocol):
    """One way to compute a case."""

    name: str

    def version(self) -> str:
        """Return its version, or raise SkipError with the reason why it can't run here."""

    def build_key(self, case: PrefillCase) -> Hashable | None:
        """Return what decides which module a case makes it compile; None: nothing worth noting."""

    def prepare(self, inputs: Inputs, /) -> Prepared:
        """Compile, plan and bind, or raise SkipError with the reason why it can't."""


@dataclass(frozen=True)
class Way:
    """One way to use jitattn.

    Attributes:
        page_table: the planner's argument.
        page_size: None is the case's.
        cache: makes the cache of a copy in some memory layout.
        is_apart: requests of one query token have a plan and a run of their own.
    """

    page_table: str = "shared"
    page_size: int | None = None
    cache: Callable[[Batch, int], caches.Cache] = caches.whole
    is_apart: bool = False

    def planner_arguments(self, case: PrefillCase) -> PrefillArguments:
        """Return the planner's arguments for ``case``."""
        arguments = case.planner_arguments(self.page_table)
        if self.page_size is not None:
            arguments["page_size"] = self.page_size
        return arguments

    def batch(self, batch: Batch) -> Batch:
        """Return ``batch`` in pages of the size that this way wants."""
        return batch if self.page_size is None else with_page_size(batch, self.page_size)

    def parts(self, case: PrefillCase) -> Iterator[slice]:
        """Return the requests of each run; never none."""
        stops = {len(case.q_lens), *([case.num_decodes] if self.is_apart else [])}
        bounds = sorted({0, *stops})
        return (slice(start, stop) for start, stop in itertools.pairwise(bounds))


WAYS: Mapping[str, Way] = {
    "shared": Way(),
    "page1": Way(page_size=1),
    "page64": Way(page_size=64),
    "page128": Way(page_size=128),
    "separate": Way(page_table="separate", cache=caches.separate),
    "cross-layer": Way(cache=caches.cross_layer),
    "apart": Way(is_apart=True),
}


class JitAttnPrefill(Ours):
    """One way to use jitattn."""

    def __init__(self, way_name: str) -> None:
        """Choose one of `WAYS`."""
        super().__init__(way_name)
        self.way = WAYS[way_name]

    def prepare(self, inputs: Inputs, /) -> Prepared:
        """Make a planner, bind every copy and plan."""
        case, batch = inputs.case, self.way.batch(inputs.batch)
        try:
            arguments = self.way.planner_arguments(case)
            planner = jitattn.AttentionPlanner(**arguments, device=inputs.q.device)
        except jitattn.ConfigError as error:
            raise SkipError(str(error)) from error
        bound = [planner.bind(self.way.cache(batch, copy)) for copy in range(batch.num_copies)]
        parts = [self._plan(planner, inputs, batch, part) for part in self.way.parts(case)]
        outs = torch.empty_like(inputs.q)
        calls = [
            [
                functools.partial(plan.run, q[rows], kv, out=out[rows], sinks=batch.sinks)
                for plan, rows in parts
            ]
            for q, kv, out in zip(inputs.q, bound, outs, strict=True)
        ]
        kernels = [dataclasses.asdict(kernel) for kernel in jitattn.build_info(planner)]
        facts = {"planned": "on the device", "kernels": kernels}
        runs = tuple(_in_a_row(runs) for runs in calls)
        return Prepared(runs, outs, _in_a_row([plan.refresh for plan, _ in parts]), facts)

    def _plan(
        self, planner: jitattn.AttentionPlanner, inputs: Inputs, batch: Batch, part: slice
    ) -> tuple[jitattn.types.Plan, slice]:
        """Return the plan of some requests and their rows of q."""
        separate = self.way.page_table == "separate"
        table = batch.separate_table() if separate else batch.block_table
        pages, seq_lens = jitattn.BlockTable(table[part]), batch.seq_lens[part]
        starts = inputs.qo_indptr[part.start : part.stop + 1]
        rows = slice(int(starts[0]), int(starts[-1]))
        max_q_len = max(inputs.case.q_lens[part])
        if max_q_len == 1:
            return planner.plan(pages, seq_lens), rows
        return planner.plan(pages, seq_lens, starts - starts[0], max_q_len=max_q_len), rows


def _in_a_row(calls: list[Any]) -> Call:
    if len(calls) == 1:
        return calls[0]  # type: ignore[no-any-return]

    def run() -> None:
        for call in calls:
            call()

    return run


class Fa3Prefill:
    """FlashAttention-3, the build that vLLM ships, over pages or over keys without pages."""

    def __init__(self, *, paged: bool) -> None:
        """Choose the form of the cache."""
        self.paged = paged
        self.name = "fa3-paged" if paged else CONTIGUOUS

    def version(self) -> str:
        """Return vLLM's version, or the library's digest where only the library is here."""
        return load_fa3()

    def build_key(self, case: PrefillCase) -> Hashable | None:
        """Return None: it comes compiled."""
        return None

    def prepare(self, inputs: Inputs, /) -> Prepared:
        """Plan with its scheduler kernel, as vLLM does once a step."""
        case = inputs.case
        if case.kv_dtype != Q_DTYPE:
            raise SkipError("FlashAttention-3 wants q and cache of one dtype")
        step = self._step(inputs)
        copies = range(inputs.q.shape[0])
        if self.paged:
            return step.prepare(inputs.q, [inputs.batch.tokens_first(copy) for copy in copies])
        return step.prepare(inputs.q, [inputs.contiguous(copy) for copy in copies])

    def _step(self, inputs: Inputs) -> Fa3Step:
        case, batch = inputs.case, inputs.batch
        starts = [0, *itertools.accumulate(case.seq_lens)]
        kv_indptr = torch.tensor(starts, dtype=torch.int32, device=inputs.q.device)
        return Fa3Step(
            q_dtype=inputs.q.dtype,
            num_qo_heads=case.num_qo_heads,
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
            max_q_len=max(case.q_lens),
            max_kv_len=max(case.seq_lens),
            qo_indptr=inputs.qo_indptr,
            seq_lens=batch.seq_lens,
            page_size=case.page_size if self.paged else None,
            block_table=batch.block_table if self.paged else None,
            kv_indptr=None if self.paged else kv_indptr,
            window_left=case.window_left,
            logits_soft_cap=case.logits_soft_cap,
            sinks=batch.sinks,
        )


class FlashInferPrefill:
    """FlashInfer's prefill wrapper over pages; it plans on the host."""

    def __init__(self, backend: str) -> None:
        """Choose "fa2" or "fa3"."""
        self.backend = backend
        self.name = "fa2" if backend == "fa2" else f"flashinfer-{backend}"

    def version(self) -> str:
        """Return FlashInfer's version."""
        return str(flashinfer().__version__)

    def build_key(self, case: PrefillCase) -> Hashable | None:
        """Return what its module is compiled for; heads and page size are run-time arguments."""
        if self.refusal(case):
            return None
        has_window, has_cap = case.window_left >= 0, case.logits_soft_cap > 0
        return self.name, case.head_dim, case.kv_dtype, has_window, has_cap, case.use_sinks

    def refusal(self, case: PrefillCase) -> str | None:
        """Return why it doesn't do ``case``."""
        if case.use_sinks and case.logits_soft_cap > 0:
            return "FlashInfer's wrapper with sinks has no soft cap"
        if self.backend == "fa3" and case.kv_dtype != Q_DTYPE:
            return "FlashInfer's fa3 wants q and cache of one dtype"
        if self.backend == "fa3" and case.head_dim not in _FA3_HEAD_DIMS:
            return f"FlashInfer's fa3 has no head_dim {case.head_dim}"
        return None

    def prepare(self, inputs: Inputs, /) -> Prepared:
        """Compile and plan."""
        case, batch = inputs.case, inputs.batch
        if reason := self.refusal(case):
            raise SkipError(reason)
        wrapper = self._wrapper(inputs)
        wrapper.plan(
            inputs.qo_indptr,
            *batch.csr(),
            causal=True,
            window_left=case.window_left,
            logits_soft_cap=case.logits_soft_cap,
            q_data_type=inputs.q.dtype,
            kv_data_type=batch.kv.dtype,
        )
        outs = torch.empty_like(inputs.q)
        extra = (batch.sinks, case.head_dim**-0.5) if case.use_sinks else ()
        runs = tuple(
            functools.partial(wrapper.run, q, kv, *extra, out=out)
            for q, kv, out in zip(inputs.q, batch.kv, outs, strict=True)
        )
        return Prepared(runs=runs, outs=outs, facts={"planned": ON_HOST})

    def _wrapper(self, inputs: Inputs) -> Any:
        case, buffer = inputs.case, workspace(self.name, inputs.q.device)
        if not case.use_sinks:
            return flashinfer().BatchPrefillWithPagedKVCacheWrapper(
                buffer, "NHD", backend=self.backend
            )
        return flashinfer().BatchAttentionWithAttentionSinkWrapper(  # others drop sinks silently
            buffer,
            "NHD",
            backend=self.backend,
            q_data_type=inputs.q.dtype,
            kv_data_type=inputs.batch.kv.dtype,
            head_dim_qk=case.head_dim,
            head_dim_vo=case.head_dim,
            window_left=case.window_left,
        )


class FlashInferPod:
    """FlashInfer's prefill on decode, by FlashAttention-2: both in one launch."""

    name = "flashinfer-pod"

    def version(self) -> str:
        """Return FlashInfer's version."""
        return str(flashinfer().__version__)

    def build_key(self, case: PrefillCase) -> Hashable | None:
        """Return what its module is compiled for."""
        return None if self.refusal(case) else (self.name, case.head_dim, case.kv_dtype)

    def refusal(self, case: PrefillCase) -> str | None:
        """Return why it doesn't do ``case``."""
        if case.kv_dtype != Q_DTYPE or case.use_sinks or case.logits_soft_cap:
            return "FlashInfer's prefill on decode wants plain attention over 16 bits"
        return None if 0 < case.num_decodes < len(case.q_lens) else "the batch is not mixed"

    def prepare(self, inputs: Inputs, /) -> Prepared:
        """Compile and plan."""
        case, batch = inputs.case, inputs.batch
        if reason := self.refusal(case):
            raise SkipError(reason)
        wrapper = flashinfer().BatchPODWithPagedKVCacheWrapper(
            workspace(self.name, inputs.q.device), "NHD"
        )
        num_decodes = case.num_decodes
        prefill = _pod_tables(inputs, slice(num_decodes, len(case.q_lens)))
        decode = _pod_tables(inputs, slice(0, num_decodes))
        sizes = batch.csr()[3:]
        dtypes = {"q_data_type": inputs.q.dtype, "kv_data_type": batch.kv.dtype}
        wrapper.plan(*prefill, *decode, *sizes, **dtypes)
        outs = torch.empty_like(inputs.q)
        tensors = zip(inputs.q, batch.kv, outs, strict=True)
        runs = tuple(functools.partial(_run_pod, wrapper, num_decodes, *each) for each in tensors)
        return Prepared(runs=runs, outs=outs, facts={"planned": ON_HOST})


def _pod_tables(inputs: Inputs, part: slice) -> tuple[Tensor, ...]:
    """Return query starts, page starts, pages and tokens of last pages of some requests."""
    batch, ends = inputs.batch, slice(part.start, part.stop + 1)
    rows, pages = inputs.qo_indptr[ends], batch.kv_indptr[ends]
    indices = batch.kv_indices[int(pages[0]) : int(pages[-1])]
    return rows - rows[0], pages - pages[0], indices, batch.last_page_len[part]


def _run_pod(wrapper: Any, num_decodes: int, q: Tensor, kv: Tensor, out: Tensor) -> None:
    # It takes no outputs: what it makes empty, those of prefill first, is given to it.
    made = iter((out[num_decodes:], out[:num_decodes]))
    with mock.patch.object(torch, "empty_like", lambda _: next(made)):
        wrapper.run(q[num_decodes:], kv, q[:num_decodes], kv, causal_p=True)


def all_prefill_contenders() -> tuple[PrefillContender, ...]:
    """Return every rival, here or not, and every way to use jitattn."""
    return (
        FlashInferPrefill("fa2"),
        FlashInferPrefill("fa3"),
        FlashInferPod(),
        Fa3Prefill(paged=True),
        Fa3Prefill(paged=False),
        *(JitAttnPrefill(name) for name in WAYS),
    )
