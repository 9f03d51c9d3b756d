"""Run a plan by the definition, in float64 torch, on any device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from jitattn.kernels.attention.reference import attention, chosen, first_visible
from jitattn.kernels.mla.check import MLACall
from jitattn.kernels.mla.config import SCALE_BLOCK
from jitattn.kernels.mla.reference import latent_attention
from jitattn.spec.config import MLAConfig, PagedConfig, PlannerConfig
from jitattn.tensors.cache_views import Batch, Call, Mask, Scale
from jitattn.tensors.page_table import PageTable
from jitattn.tensors.quantization import dequantize_kv, saturated
from jitattn.tensors.variant_params import transform_of


class _Pools(Protocol):
    @property
    def pools(self) -> Mapping[str, int]: ...


class _Call(Protocol):
    """What of a call doesn't depend on the planner's kind."""

    @property
    def pages(self) -> PageTable: ...

    @property
    def kv(self) -> _Pools: ...

    @property
    def out(self) -> Tensor: ...

    @property
    def lse(self) -> Tensor | None: ...


ConfigT = TypeVar("ConfigT", bound=PagedConfig)
CallT = TypeVar("CallT", bound=_Call)


class _ReferencePlan(Generic[ConfigT, CallT]):
    """Plans and runs one request after the other, each by a definition."""

    _queries = "q"

    def __init__(self, config: ConfigT, batch: Batch) -> None:
        """Made by a planner's ``plan``."""
        self._config = config
        self._batch = batch
        self._lens: list[int] = []
        self._starts: list[int] = []
        self._is_invalid: list[bool] = []
        self.refresh()

    def refresh(self) -> None:
        """Read the lengths and offsets; on the CPU, refuse those beyond the table or the maxima.

        Raises:
            ValueError: a length on the CPU that is too long.
        """
        batch = self._batch
        lens = [max(int(n), 0) for n in batch.seq_lens.tolist()]
        starts = list(range(len(lens) + 1))
        if batch.qo_indptr is not None:
            starts = [int(n) for n in batch.qo_indptr.tolist()]
        wrongs = [
            _what_is_wrong(batch, self._config, b, kv_len, max(starts[b + 1] - starts[b], 0))
            for b, kv_len in enumerate(lens)
        ]
        self._raise_on_cpu(wrongs)
        self._lens, self._starts = lens, starts
        self._is_invalid = [bool(wrong) for wrong in wrongs]

    def _raise_on_cpu(self, wrongs: list[str]) -> None:
        if self._batch.seq_lens.device.type == "cpu":
            for wrong in filter(None, wrongs):
                raise ValueError(wrong)

    def _q_len(self, request: int) -> int:
        return max(self._starts[request + 1] - self._starts[request], 0)

    def give_back(self) -> None:
        """Nothing is kept."""

    @torch.no_grad()
    def run(self, call: CallT) -> None:
        """Compute a call that was checked.

        Raises:
            ValueError: q has fewer rows than the requests have query tokens, or, on the CPU, an
                entry or an offset lies outside the cache.
        """
        if call.out.shape[0] < self._starts[-1]:
            raise ValueError(
                f"{self._queries} has {call.out.shape[0]} rows: qo_indptr[-1] is {self._starts[-1]}"
            )
        wrongs = [
            _what_is_read_wrong(call, self._config, b, kv_len, self._q_len(b))
            for b, kv_len in enumerate(self._lens)
        ]
        self._raise_on_cpu(wrongs)
        call.out[self._starts[-1] :] = 0.0
        if call.lse is not None:
            call.lse[self._starts[-1] :] = -math.inf
        for b in range(len(self._lens)):
            rows = slice(self._starts[b], self._starts[b] + self._q_len(b))
            if self._is_invalid[b] or wrongs[b]:
                out = lse = math.nan
            else:
                out, lse = self._attend(call, rows, b)  # type: ignore[assignment]
            call.out[rows] = out
            if call.lse is not None:
                call.lse[rows] = lse

    def _attend(self, call: CallT, rows: slice, request: int) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class ReferencePlan(_ReferencePlan[PlannerConfig, Call]):
    """Plans and runs by the definition of attention, in float64 torch."""

    def again(self, call: Call) -> None:
        """Nothing is prepared."""
        del call

    def _attend(self, call: Call, rows: slice, request: int) -> tuple[Tensor, Tensor]:
        kv_len, q_len = self._lens[request], rows.stop - rows.start
        start = first_visible(kv_len, q_len, self._config.window_left)
        change = transform_of(
            self._config.variant,
            call.variant_params,
            lengths=lambda _: (q_len, kv_len),
            num_qo_heads=self._config.num_qo_heads,
            num_kv_heads=self._config.num_kv_heads,
        )
        out, lse = attention(
            call.q[rows],
            _values(call, request, kv_len, start, which=0),
            _values(call, request, kv_len, start, which=1),
            [0, q_len],
            [0, kv_len],
            causal=self._config.causal,
            window_left=self._config.window_left,
            logits_soft_cap=self._config.logits_soft_cap,
            sm_scale=self._config.score_scale,
            sinks=call.sinks,
            masks=None if call.mask is None else [_mask(call.mask, rows, request, kv_len)],
            transform=change and (lambda _, *scores: change(request, *scores)),
        )
        return saturated(out, call.out.dtype), lse.float()


class MLAReferencePlan(_ReferencePlan[MLAConfig, MLACall]):
    """Plans and runs by the definition of multi-head latent attention, in float64 torch."""

    _queries = "q_nope"

    def _attend(self, call: MLACall, rows: slice, request: int) -> tuple[Tensor, Tensor]:
        kv, kv_len, config = call.kv, self._lens[request], self._config
        change = transform_of(
            config.variant,
            call.variant_params,
            lengths=lambda _: (rows.stop - rows.start, kv_len),
            num_qo_heads=config.num_heads,
            num_kv_heads=1,
        )

        def tokens(cache: Tensor, which: int) -> Tensor:
            found = _gather(cache.unsqueeze(2), call.pages, request, kv_len, 0, which=which)
            return found.squeeze(1).double()

        latent = tokens(kv.latent.tensor, 0)
        rope = tokens(kv.rope.tensor, 1 if kv.is_pair else 0)
        if kv.latent_scales is not None:
            scales = tokens(kv.latent_scales.tensor, 0)
            latent = latent * scales.repeat_interleave(SCALE_BLOCK, dim=1)
        if kv.k_scale is not None:
            factor = kv.k_scale.value if kv.k_scale.tensor is None else kv.k_scale.tensor.double()
            latent = latent * factor
            rope = rope * factor if kv.is_rope_scaled else rope
        out, lse = latent_attention(
            call.q_nope[rows],
            call.q_pe[rows],
            latent,
            rope,
            causal=config.causal,
            sm_scale=call.sm_scale,
            transform=change and (lambda *scores: change(request, *scores)),
        )
        return saturated(out, call.out.dtype), lse.float()


def _what_is_wrong(batch: Batch, config: PagedConfig, request: int, kv_len: int, q_len: int) -> str:
    """Say which length of a request exceeds what was planned, or nothing."""
    page_size = config.page_size or 1
    limit = min(batch.max_kv_len, batch.pages.request_capacity(request, page_size))
    if kv_len > max(limit, 0):
        return f"seq_lens[{request}] is {kv_len}: the table or max_kv_len ends at {max(limit, 0)}"
    if q_len > batch.max_q_len:
        return f"request {request} has {q_len} query tokens: max_q_len is {batch.max_q_len}"
    return ""


def _what_is_read_wrong(
    call: _Call, config: PagedConfig, request: int, kv_len: int, q_len: int
) -> str:
    """Say what lies outside the cache of all that a request reads, or nothing."""
    if kv_len == 0 or q_len == 0:
        return ""
    pages, page_size = call.pages, config.page_size or 1
    pools = call.kv.pools
    num_kv_tokens = next(iter(pools.values()))
    limit = pages.request_capacity(request, page_size, num_kv_tokens=num_kv_tokens)
    if kv_len > limit:
        return f"request {request} has {kv_len} tokens: pages and kv hold {max(limit, 0)} of them"
    try:
        pages.check_row(request)
    except ValueError as error:
        return str(error)
    size = pages.entry_tokens(page_size)
    start = first_visible(kv_len, q_len, config.window_left)
    for which, (name, num_pages) in enumerate(pools.items()):
        entries = pages.entries(request, which=which)[start // size : -(-kv_len // size)]
        end = num_pages * page_size // size
        wrong = entries[(entries < 0) | (entries >= end)]
        if wrong.numel() > 0:
            entry = int(wrong[0])
            return f"request {request} has the entry {entry} for {name}: the cache ends at {end}"
    return ""


def _mask(mask: Mask, rows: slice, request: int, kv_len: int) -> Tensor:
    """Return bool [q_len, kv_len]."""
    q_len = rows.stop - rows.start
    if mask.indptr is not None:
        begin, width = int(mask.indptr[request]), -(-kv_len // 8)
        # What the mask is too short to say is not seen.
        packed = mask.values.new_zeros(q_len * width)
        given = mask.values[max(begin, 0) : max(begin + q_len * width, 0)]
        packed[: given.shape[0]] = given
        return _unpack(packed.view(q_len, width))[:, :kv_len]
    bits = mask.values[rows] if mask.layout == "bool" else _unpack(mask.values[rows])
    seen = torch.ones((q_len, kv_len), dtype=torch.bool, device=bits.device)
    covered = min(kv_len, mask.width)
    if covered > 0:
        seen[:, kv_len - covered :] = bits[:, mask.width - covered :]
    return seen


def _unpack(packed: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[:, :, None] >> shifts & 1).bool().flatten(1)


def _gather(
    cache: Tensor, pages: PageTable, request: int, kv_len: int, start: int, *, which: int
) -> Tensor:
    """Copy the tokens of a request out of K (``which`` 0) or V (1)."""
    slots = pages.slots_of(request, kv_len, cache.shape[1], which=which)
    return _gather_slots(cache, slots, start)


def _values(call: Call, request: int, kv_len: int, start: int, *, which: int) -> Tensor:
    """Return K (``which`` 0) or V (1) of a request, as values."""
    kv = call.kv
    view, scale = ((kv.k, kv.k_scale), (kv.v, kv.v_scale))[which]
    tokens = _gather(view.tensor, call.pages, request, kv_len, start, which=which)
    if kv.block_scales is not None:
        blocks = kv.block_scales[which].tensor
        blocks = _gather(blocks, call.pages, request, kv_len, start, which=which)
        tokens = dequantize_kv(tokens, dtype="nvfp4", block_scales=blocks)
    return _scaled(tokens, scale)


def _scaled(tokens: Tensor, scale: Scale | None) -> Tensor:
    """Return the values that stored tokens [kv_len, num_kv_heads, head_dim] stand for."""
    if scale is None:
        return tokens
    if scale.tensor is None:
        return tokens.double() * scale.value
    return tokens.double() * scale.tensor.double().reshape(-1, 1)


def _gather_slots(cache: Tensor, slots: Tensor, start: int) -> Tensor:
    """Copy tokens; those before ``start`` are NaN, or the largest number of a type without."""
    page_size = cache.shape[1]
    nothing = math.nan if cache.dtype.is_floating_point else torch.iinfo(cache.dtype).max
    tokens = cache.new_full((slots.shape[0], *cache.shape[2:]), nothing)
    live = slots[start:]
    tokens[start:] = chosen(cache, (live // page_size, live % page_size))
    return tokens
