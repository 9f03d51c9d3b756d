"""Plans of attention on the reference backend."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from jitattn.kernels.attention.check import Call
from jitattn.kernels.attention.reference import attention
from jitattn.kernels.common.reference_plan import (
    ListReferencePlan,
    ReferencePlan,
    first_visible,
    gather_tokens,
    listed_slots,
    tokens_of_slots,
)
from jitattn.spec.config import PlannerConfig
from jitattn.spec.layout import ListLayout
from jitattn.tensors.masks import Mask
from jitattn.tensors.page_table_base import PageTable
from jitattn.tensors.quantization import dequantize_kv, saturated
from jitattn.tensors.scales import Scale
from jitattn.tensors.tensor_layouts import Batch
from jitattn.tensors.token_lists import PageLists
from jitattn.tensors.variant_params import transform_of


class AttentionReferencePlan(ReferencePlan[PlannerConfig, Call]):
    """Plans and runs by the definition of attention, in float64 torch."""

    def __init__(self, config: PlannerConfig, batch: Batch) -> None:
        """Made by ``AttentionPlanner.plan``."""
        super().__init__(config, batch, queries="q")

    def _attend(self, call: Call, rows: slice, request: int) -> tuple[Tensor, Tensor]:
        kv_len, q_len = self.lens[request], rows.stop - rows.start
        start = first_visible(kv_len, q_len, self.config.window_left)
        change = transform_of(
            self.config.variant,
            call.variant_params,
            lengths=lambda _: (q_len, kv_len),
            num_qo_heads=self.config.num_qo_heads,
            num_kv_heads=self.config.num_kv_heads,
        )
        out, lse = attention(
            call.q[rows],
            _values(call, request, kv_len, start, which=0),
            _values(call, request, kv_len, start, which=1),
            [0, q_len],
            [0, kv_len],
            causal=self.config.causal,
            window_left=self.config.window_left,
            logits_soft_cap=self.config.logits_soft_cap,
            sm_scale=self.config.score_scale,
            sinks=call.sinks,
            masks=None if call.mask is None else [_mask(call.mask, rows, request, kv_len)],
            transform=change and (lambda _, *scores: change(request, *scores)),
        )
        return saturated(out, call.out.dtype), lse.float()


class ListsReferencePlan(ListReferencePlan[PlannerConfig, Call]):
    """The same of lists: a KV head's query heads attend to what its list has."""

    def __init__(self, config: PlannerConfig, batch: Batch) -> None:
        """Made by ``AttentionPlanner.plan``."""
        super().__init__(config, batch, queries="q")

    def _attend(self, call: Call, rows: slice, request: int) -> tuple[Tensor, Tensor]:
        config, q_len = self.config, rows.stop - rows.start
        width = config.head_dim_vo or config.head_dim
        out = call.q.new_full((q_len, config.num_qo_heads, width), math.nan, dtype=torch.float64)
        lse = out[:, :, 0].clone()
        for kv_head in range(config.num_kv_heads):
            seen = self._seen(call, request, kv_head, q_len)
            if seen is None:
                continue
            slots, mask = seen
            heads = slice(kv_head * config.group_size, (kv_head + 1) * config.group_size)
            out[:, heads], lse[:, heads] = attention(
                call.q[rows, heads],
                _listed_values(call, slots, kv_head, which=0),
                _listed_values(call, slots, kv_head, which=1),
                [0, q_len],
                [0, slots.shape[0]],
                causal=False,
                window_left=-1,
                logits_soft_cap=config.logits_soft_cap,
                sm_scale=config.score_scale,
                sinks=None if call.sinks is None else call.sinks[heads],
                masks=[mask],
            )
        return saturated(out, call.out.dtype), lse.float()

    def _seen(
        self, call: Call, request: int, kv_head: int, q_len: int
    ) -> tuple[Tensor, Tensor] | None:
        """Return slots and which row sees which, bool [q_len, num_slots]; None is NaN."""
        num_pages, page_size = call.kv.k.tensor.shape[:2]
        if self.config.page_table == ListLayout.INDICES:
            slots = listed_slots(call.pages, request, kv_head, num_pages * page_size)
            if slots is None:
                return None
            return slots, torch.ones((q_len, slots.shape[0]), dtype=torch.bool, device=slots.device)
        pages, numbers = cast(PageLists, call.pages).entries(request, kv_head)
        is_outside = pages >= num_pages
        if self.lens[request] > 0 and bool(is_outside.any()):
            return None
        places = torch.arange(page_size, device=pages.device)
        slots = (pages[:, None] * page_size + places).flatten()
        keys = (numbers[:, None] * page_size + places).flatten()
        kv_len, window = self.lens[request], self.config.window_left
        rows = kv_len - q_len + torch.arange(q_len, device=pages.device)[:, None]
        last = rows if self.config.causal else torch.full_like(rows, kv_len - 1)
        mask = (keys <= last) & (keys < kv_len)
        if window >= 0:
            mask = mask & (keys >= rows - window)
        kept = mask.any(dim=0)
        return slots[kept], mask[:, kept]


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


def _values(call: Call, request: int, kv_len: int, start: int, *, which: int) -> Tensor:
    """Return K (``which`` 0) or V (1) of a request, as values."""
    kv = call.kv
    view, scale = ((kv.k, kv.k_scale), (kv.v, kv.v_scale))[which]
    table = cast(PageTable, call.pages)
    tokens = gather_tokens(view.tensor, table, request, kv_len, start, which=which)
    if kv.block_scales is not None:
        blocks = kv.block_scales[which].tensor
        blocks = gather_tokens(blocks, table, request, kv_len, start, which=which)
        tokens = dequantize_kv(tokens, dtype=kv.config.kv_dtype, block_scales=blocks)
    return _scaled(tokens, scale)


def _listed_values(call: Call, slots: Tensor, kv_head: int, *, which: int) -> Tensor:
    """Return K (``which`` 0) or V (1) of slots, as values [num_slots, 1, dim] of a KV head."""
    kv = call.kv
    view, scale = ((kv.k, kv.k_scale), (kv.v, kv.v_scale))[which]
    tokens = tokens_of_slots(view.tensor, slots)
    if kv.block_scales is not None:
        blocks = tokens_of_slots(kv.block_scales[which].tensor, slots)
        tokens = dequantize_kv(tokens, dtype=kv.config.kv_dtype, block_scales=blocks)
    return _scaled(tokens, scale)[:, kv_head : kv_head + 1]


def _scaled(tokens: Tensor, scale: Scale | None) -> Tensor:
    """Return the values that stored tokens [kv_len, num_kv_heads, head_dim] stand for."""
    if scale is None:
        return tokens
    if scale.tensor is None:
        return tokens.double() * scale.value
    return tokens.double() * scale.tensor.double().reshape(-1, 1)
