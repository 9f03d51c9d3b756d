"""Who computes the cases of latent attention, their inputs, and the right answer."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

import jitattn
from bench import flashmla
from bench.contenders import Ours, Prepared, SkipError
from bench.mla_cases import (
    LATENT_DIM,
    Q_DTYPE,
    ROPE_DIM,
    SCALE_BLOCK,
    SM_SCALE,
    TOKEN_BYTES,
    MLAArguments,
    MLACase,
)
from bench.oracle import SampledOracle, sampled_rows
from bench.rivals import ON_HOST, flashinfer, workspace
from jitattn.kernels.common.reference_plan import gather
from jitattn.kernels.mla.reference import latent_attention

K_SCALE = 0.05
"""Of an FP8 cache: normal numbers, divided by it, use its range; who ignores it is wrong."""

_NUM_LAYERS = 4  # of a pool across layers; every layer but one lies idle
_LAYER = 1

Cache = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True)
class MLAInputs:
    """The tensors of a case. The tables serve every copy; q and the pools differ.

    Attributes:
        q_nope: [num_copies, num_tokens, num_heads, 512].
        q_pe: [num_copies, num_tokens, num_heads, 64].
        kv: [num_copies, num_pages, page_size, 576], kv_dtype; of rows that hold their scales [..,
            656] bytes.
        block_table: [batch_size, max_pages_per_seq] int32; 0 past the last page.
        kv_indptr: [batch_size + 1] int32; offsets into kv_indices.
        kv_indices: int32, the pages of all requests, in a random order.
        seq_lens: [batch_size] int32.
        qo_indptr: [batch_size + 1] int32.
        rope_ids: [num_pages] int32: where each page lies in `rope_pool`.
    """

    case: MLACase
    q_nope: Tensor
    q_pe: Tensor
    kv: Tensor
    block_table: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    seq_lens: Tensor
    qo_indptr: Tensor
    rope_ids: Tensor

    @property
    def num_copies(self) -> int:
        """Pools, each with its own queries."""
        return self.q_nope.shape[0]

    def new_outs(self) -> Tensor:
        """Return memory for the outputs of every copy, [num_copies, num_tokens, num_heads, 512]."""
        return torch.empty_like(self.q_nope)

    def latent(self, copy: int) -> Tensor:
        """Return the latents as they are stored, a view [num_pages, page_size, 512]."""
        stored = self.kv[copy, ..., :LATENT_DIM]
        return stored.view(getattr(torch, self.case.kv_dtype))

    def rope(self, copy: int) -> Tensor:
        """Return the rope parts as they are stored, a view [num_pages, page_size, 64]."""
        if self.case.form == "rows656":
            return self.kv[copy, ..., -2 * ROPE_DIM :].view(torch.bfloat16)
        return self.kv[copy, ..., LATENT_DIM:]

    def latent_scales(self, copy: int) -> Tensor:
        """Return the scales of rows that hold them, a view [num_pages, page_size, 4]."""
        return self.kv[copy, ..., LATENT_DIM : -2 * ROPE_DIM].view(torch.float32)

    def rope_pool(self, copy: int) -> Tensor:
        """Return rope parts in pages of their own, in another order, for `separate_table`."""
        rope = self.rope(copy)
        pool = torch.empty_like(rope, memory_format=torch.contiguous_format)
        pool.view(torch.uint8)[self.rope_ids.long()] = rope.contiguous().view(torch.uint8)
        return pool

    def separate_table(self) -> Tensor:
        """Return [batch_size, 2, max_pages_per_seq]: ids of latents, and of rope parts."""
        return torch.stack((self.block_table, self.rope_ids[self.block_table.long()]), dim=1)

    def request(self, copy: int, b: int) -> tuple[Tensor, Tensor]:
        """Return latents and rope parts of request ``b`` as they are meant, both float64."""
        tokens = functools.partial(_tokens, pages=self.block_table[b], kv_len=self.case.seq_lens[b])
        latent, rope = tokens(self.latent(copy)).double(), tokens(self.rope(copy)).double()
        if self.case.form == "e4m3":
            return latent * K_SCALE, rope * K_SCALE
        if self.case.form == "rows656":
            scales = tokens(self.latent_scales(copy)).double()
            latent = latent * scales.repeat_interleave(SCALE_BLOCK, dim=-1)
        return latent, rope


def _tokens(pool: Tensor, *, pages: Tensor, kv_len: int) -> Tensor:
    """Return [kv_len, ..] out of a pool [num_pages, page_size, ..]; as bytes, which index all."""
    rows = gather(pool.view(torch.uint8).unsqueeze(-2), pages, kv_len)
    return rows[:, 0].view(pool.dtype)


def make_mla_inputs(
    case: MLACase, device: torch.device, *, copies: int = 1, seed: int = 0
) -> MLAInputs:
    """Fill queries and caches with normal random numbers, which ``seed`` fixes; shuffle pages.

    Args:
        case: the shapes.
        copies: pools to make.
        device: where the tensors live.
        seed: fixes every value and the order of the pages on one device type.
    """
    generator = torch.Generator(device).manual_seed(seed)
    order = torch.Generator().manual_seed(seed)
    num_pages = sum(case.pages_per_seq)
    indices = torch.randperm(num_pages, generator=order, dtype=torch.int32)

    def values(*shape: int) -> Tensor:
        kind = getattr(torch, Q_DTYPE)
        return torch.randn(shape, generator=generator, dtype=kind, device=device)

    def ints(data: Iterable[int]) -> Tensor:
        return torch.tensor(list(data), dtype=torch.int32, device=device)

    rows = copies, case.num_tokens, case.num_heads
    return MLAInputs(
        case=case,
        q_nope=values(*rows, LATENT_DIM),
        q_pe=values(*rows, ROPE_DIM),
        kv=_make_cache(case, values, (copies, num_pages, case.page_size)),
        block_table=_table(case, indices).to(device),
        kv_indptr=ints([0, *itertools.accumulate(case.pages_per_seq)]),
        kv_indices=indices.to(device),
        seq_lens=ints(case.seq_lens),
        qo_indptr=ints([0, *itertools.accumulate(case.q_lens)]),
        rope_ids=torch.randperm(num_pages, generator=order, dtype=torch.int32).to(device),
    )


def _table(case: MLACase, indices: Tensor) -> Tensor:
    table = torch.zeros(len(case.seq_lens), max(case.pages_per_seq), dtype=torch.int32)
    starts = itertools.accumulate(case.pages_per_seq, initial=0)
    for row, start, num_pages in zip(table, starts, case.pages_per_seq, strict=False):
        row[:num_pages] = indices[start : start + num_pages]
    return table


def _make_cache(case: MLACase, values: Callable[..., Tensor], tokens: tuple[int, ...]) -> Tensor:
    if case.form == "bfloat16":
        return values(*tokens, LATENT_DIM + ROPE_DIM)
    dtype = getattr(torch, case.kv_dtype)
    if case.form == "e4m3":
        return (values(*tokens, LATENT_DIM + ROPE_DIM) / K_SCALE).to(dtype)
    latent = (values(*tokens, LATENT_DIM) / K_SCALE).to(dtype)
    # Between half and three halves of the scale, and no two blocks alike.
    spread = values(*tokens, LATENT_DIM // SCALE_BLOCK).float().sigmoid() + 0.5
    parts = (latent, spread * K_SCALE, values(*tokens, ROPE_DIM))
    cache = latent.new_empty((*tokens, TOKEN_BYTES[case.form]), dtype=torch.uint8)
    torch.cat([part.view(torch.uint8) for part in parts], dim=-1, out=cache)
    return cache


class MLAOracle(SampledOracle[MLAInputs]):
    """Expected outputs of sampled rows, [num_rows, num_heads, 512] float64."""

    def _request(self, copy: int, b: int) -> Tensor:
        """Return what the sampled rows of a request come to, each over the keys it sees."""
        inputs, case = self.inputs, self.inputs.case
        latent, rope = inputs.request(copy, b)
        first = case.seq_lens[b] - case.q_lens[b]
        start = sum(case.q_lens[:b])
        outs = []
        for row in sampled_rows(case.q_lens[b]):
            at, seen = slice(start + row, start + row + 1), first + row + 1
            q_nope, q_pe = inputs.q_nope[copy, at], inputs.q_pe[copy, at]
            out, _ = latent_attention(
                q_nope, q_pe, latent[:seen], rope[:seen], causal=False, sm_scale=SM_SCALE
            )
            outs.append(out)
        return torch.cat(outs)


class MLAContender(Protocol):
    """One way to compute a case."""

    name: str

    def version(self) -> str:
        """Return its version, or raise SkipError with the reason why it can't run here."""

    def build_key(self, case: MLACase) -> Hashable | None:
        """Return what decides which module a case makes it compile; None: nothing worth noting."""

    def prepare(self, inputs: MLAInputs, /) -> Prepared:
        """Compile, plan and bind, or raise SkipError with the reason why it can't."""


def one_tensor(inputs: MLAInputs, copy: int) -> Cache:
    """Return the pool as the inputs have it: latent and rope part side by side."""
    return inputs.kv[copy]


def cross_layer(inputs: MLAInputs, copy: int) -> Cache:
    """Return one layer of a pool whose pages hold every layer, so that page strides are large."""
    kv = inputs.kv[copy]
    layer = kv.new_empty(kv.shape[0], _NUM_LAYERS, *kv.shape[1:])[:, _LAYER]
    layer.copy_(kv)
    return layer


def pair(inputs: MLAInputs, copy: int) -> Cache:
    """Return latents and rope parts in pools of their own, with the same ids."""
    _refuse_rows(inputs.case)
    return inputs.latent(copy).contiguous(), inputs.rope(copy).contiguous()


def separate(inputs: MLAInputs, copy: int) -> Cache:
    """Return them for `MLAInputs.separate_table`."""
    _refuse_rows(inputs.case)
    return inputs.latent(copy).contiguous(), inputs.rope_pool(copy)


def _refuse_rows(case: MLACase) -> None:
    if case.form == "rows656":
        raise SkipError("rows that hold their scales are one tensor")


@dataclass(frozen=True)
class MLAWay:
    """One way to use jitattn.

    Attributes:
        page_table: the planner's argument.
        cache: makes the cache of a copy in some memory layout.
        batch_invariant: the planner's argument.
    """

    page_table: str = "shared"
    cache: Callable[[MLAInputs, int], Cache] = one_tensor
    batch_invariant: bool = False

    def planner_arguments(self, case: MLACase) -> MLAArguments:
        """Return the planner's arguments for ``case``."""
        return case.planner_arguments(self.page_table, batch_invariant=self.batch_invariant)


MLA_WAYS: Mapping[str, MLAWay] = {
    "shared": MLAWay(),
    "separate": MLAWay(page_table="separate", cache=separate),
    "pair": MLAWay(cache=pair),
    "cross-layer": MLAWay(cache=cross_layer),
    "invariant": MLAWay(batch_invariant=True),
}


class JitAttnMLA(Ours):
    """One way to use jitattn."""

    def __init__(self, way_name: str) -> None:
        """Choose one of `MLA_WAYS`."""
        super().__init__(way_name)
        self.way = MLA_WAYS[way_name]

    def prepare(self, inputs: MLAInputs, /) -> Prepared:
        """Make a planner, bind every copy and plan."""
        case = inputs.case
        caches = [self.way.cache(inputs, copy) for copy in range(inputs.num_copies)]
        try:
            arguments = self.way.planner_arguments(case)
            planner = jitattn.MLAPlanner(**arguments, device=inputs.kv.device)
        except jitattn.ConfigError as error:
            raise SkipError(str(error)) from error
        k_scale = K_SCALE if case.form == "e4m3" else None
        bound = [planner.bind(cache, k_scale=k_scale) for cache in caches]
        plan = self._plan(planner, inputs)
        outs = inputs.new_outs()
        runs = tuple(
            functools.partial(plan.run, q_nope, q_pe, kv, out=out)
            for q_nope, q_pe, kv, out in zip(inputs.q_nope, inputs.q_pe, bound, outs, strict=True)
        )
        # Waits, too, for what would go on compiling while something is timed.
        kernels = [dataclasses.asdict(kernel) for kernel in jitattn.build_info(planner)]
        facts = {"planned": "on the device", "kernels": kernels}
        return Prepared(runs=runs, outs=outs, plan=plan.refresh, facts=facts)

    def _plan(self, planner: jitattn.MLAPlanner, inputs: MLAInputs) -> jitattn.types.MLAPlan:
        is_separate = self.way.page_table == "separate"
        table = inputs.separate_table() if is_separate else inputs.block_table
        pages, max_q_len = jitattn.BlockTable(table), max(inputs.case.q_lens)
        if max_q_len == 1:
            return planner.plan(pages, inputs.seq_lens)
        return planner.plan(pages, inputs.seq_lens, inputs.qo_indptr, max_q_len=max_q_len)


class FlashInferMLA:
    """FlashInfer's wrapper for latent attention over pages; it plans on the host."""

    def __init__(self, backend: str) -> None:
        """Choose "fa2" or "fa3"."""
        self.backend = backend
        self.name = "fa2" if backend == "fa2" else f"flashinfer-{backend}"

    def version(self) -> str:
        """Return FlashInfer's version."""
        return str(flashinfer().__version__)

    def build_key(self, case: MLACase) -> Hashable | None:
        """Return what its module is compiled for; heads and page size are run-time arguments."""
        return None if self.refusal(case) else (self.name, case.kv_dtype)

    def refusal(self, case: MLACase) -> str | None:
        """Return why it doesn't do ``case``."""
        if case.form == "rows656":
            return "FlashInfer's FP8 latents on this card have FP8 rope parts beside them"
        return None

    def prepare(self, inputs: MLAInputs, /) -> Prepared:
        """Compile and plan, over latents and rope parts in pools of their own."""
        case = inputs.case
        if reason := self.refusal(case):
            raise SkipError(reason)
        wrapper = self._planned(inputs)
        outs = inputs.new_outs()
        scales = {"ckv_scale": K_SCALE, "kpe_scale": K_SCALE} if case.form == "e4m3" else {}
        queries = zip(inputs.q_nope, inputs.q_pe, strict=True)
        runs = tuple(
            functools.partial(wrapper.run, query=q, kv_cache=pair(inputs, copy), out=out, **scales)
            for copy, (q, out) in enumerate(zip(queries, outs, strict=True))
        )
        return Prepared(runs=runs, outs=outs, facts={"planned": ON_HOST})

    def _planned(self, inputs: MLAInputs) -> Any:
        case = inputs.case
        return planned_wrapper(
            self.backend,
            workspace(self.name, inputs.kv.device),
            qo_indptr=inputs.qo_indptr,
            kv_indptr=inputs.kv_indptr,
            kv_indices=inputs.kv_indices,
            kv_lens=inputs.seq_lens,
            num_heads=case.num_heads,
            page_size=case.page_size,
            causal=max(case.q_lens) > 1,  # a last token sees all
            q_dtype=inputs.q_nope.dtype,
            kv_dtype=getattr(torch, case.kv_dtype),
        )


def planned_wrapper(
    backend: str,
    buffer: Tensor,
    *,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_lens: Tensor,
    num_heads: int,
    page_size: int,
    causal: bool,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> Any:
    """Return FlashInfer's wrapper with its plan, for latents and rope parts in pools of their own.

    Args:
        backend: "fa2" or "fa3".
        buffer: the workspace; wrappers whose runs follow each other may share one.
        qo_indptr: [batch_size + 1] int32.
        kv_indptr: [batch_size + 1] int32; offsets into ``kv_indices``.
        kv_indices: int32, the pages of all requests.
        kv_lens: [batch_size] int32.
        num_heads: of queries.
        page_size: of both pools.
        causal: whether query tokens of a request see different tokens.
        q_dtype: of queries and the output.
        kv_dtype: of both pools.
    """
    module = flashinfer().mla
    wrapper = module.BatchMLAPagedAttentionWrapper(buffer, backend=backend)
    wrapper.plan(
        metadata=module.MLAPlanMetadata.csr(
            qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices, kv_len_arr=kv_lens
        ),
        num_heads=num_heads,
        head_dim_ckv=LATENT_DIM,
        head_dim_kpe=ROPE_DIM,
        page_size=page_size,
        causal=causal,
        sm_scale=SM_SCALE,
        q_data_type=q_dtype,
        kv_data_type=kv_dtype,
        query_layout="split",
        kv_cache_layout="split",
    )
    return wrapper


class FlashMLA:
    """FlashMLA over pages of 64; its schedule is part of the first run of a step."""

    name = "flashmla"

    def version(self) -> str:
        """Return vLLM's version, or the library's digest where only the library is here."""
        return flashmla.load_flashmla()

    def build_key(self, case: MLACase) -> Hashable | None:
        """Return None: it comes compiled."""
        return None

    def refusal(self, case: MLACase) -> str | None:
        """Return why it doesn't do ``case``."""
        if case.form == "rows656":
            return "FlashMLA reads rows with scales by lists alone, which bench_sparse measures"
        if case.form != "bfloat16":
            return "FlashMLA over FP8 latents wants FP8 queries and takes no output"
        if case.page_size != flashmla.PAGE_SIZE:
            return f"FlashMLA's pages have {flashmla.PAGE_SIZE} tokens"
        if min(case.q_lens) < max(case.q_lens):
            return "FlashMLA takes as many query tokens of one request as of another"
        if max(case.q_lens) > flashmla.MAX_Q_LEN:
            return f"engines give FlashMLA at most {flashmla.MAX_Q_LEN} query tokens a request"
        return None

    def prepare(self, inputs: MLAInputs, /) -> Prepared:
        """Join queries with their rope parts; pools are one tensor as they are."""
        case = inputs.case
        if reason := self.refusal(case):
            raise SkipError(reason)
        requests = len(case.q_lens), case.q_lens[0]
        queries = flashmla.joined(inputs.q_nope, inputs.q_pe, case.num_heads)
        outs = inputs.new_outs()
        schedule = flashmla.Schedule()
        runs = tuple(
            functools.partial(
                flashmla.dense_decode,
                q.unflatten(0, requests),
                kv,
                inputs.seq_lens,
                inputs.block_table,
                out.unflatten(0, requests),
                schedule,
            )
            for q, kv, out in zip(queries, inputs.kv, outs, strict=True)
        )
        facts = {"planned": flashmla.BY_RUN}
        return Prepared(runs, outs, schedule.forget, facts, plan_is_a_call=False)


def all_mla_contenders() -> tuple[MLAContender, ...]:
    """Return every rival, here or not, and every way to use jitattn."""
    return (
        FlashInferMLA("fa2"),
        FlashInferMLA("fa3"),
        FlashMLA(),
        *(JitAttnMLA(name) for name in MLA_WAYS),
    )
