"""Plans of MLA on the reference backend."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from jitattn.kernels.common.reference_plan import (
    ListReferencePlan,
    ReferencePlan,
    gather_tokens,
    listed_slots,
    tokens_of_slots,
)
from jitattn.kernels.mla.check import BoundMLACache, MLACall
from jitattn.kernels.mla.config import SCALE_BLOCK
from jitattn.kernels.mla.reference import latent_attention
from jitattn.spec.config import MLAConfig
from jitattn.tensors.page_table_base import PageTable
from jitattn.tensors.quantization import saturated
from jitattn.tensors.tensor_layouts import Batch
from jitattn.tensors.variant_params import transform_of


class MLAReferencePlan(ReferencePlan[MLAConfig, MLACall]):
    """Plans and runs by the definition of multi-head latent attention, in float64 torch."""

    def __init__(self, config: MLAConfig, batch: Batch) -> None:
        """Made by ``MLAPlanner.plan``."""
        super().__init__(config, batch, queries="q_nope")

    def _attend(self, call: MLACall, rows: slice, request: int) -> tuple[Tensor, Tensor]:
        kv, kv_len, config = call.kv, self.lens[request], self.config
        table = cast(PageTable, call.pages)
        change = transform_of(
            config.variant,
            call.variant_params,
            lengths=lambda _: (rows.stop - rows.start, kv_len),
            num_qo_heads=config.num_heads,
            num_kv_heads=1,
        )

        def tokens(cache: Tensor, which: int) -> Tensor:
            found = gather_tokens(cache.unsqueeze(2), table, request, kv_len, 0, which=which)
            return found.squeeze(1)

        latent, rope = _values(kv, tokens)
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


class MLAListsReferencePlan(ListReferencePlan[MLAConfig, MLACall]):
    """The same of lists of tokens."""

    def __init__(self, config: MLAConfig, batch: Batch) -> None:
        """Made by ``MLAPlanner.plan``."""
        super().__init__(config, batch, queries="q_nope")

    def _attend(self, call: MLACall, rows: slice, request: int) -> tuple[Tensor, Tensor]:
        num_pages, page_size = call.kv.latent.tensor.shape[:2]
        slots = listed_slots(call.pages, request, 0, num_pages * page_size)
        if slots is None:
            out = call.q_nope.new_full(call.q_nope[rows].shape, math.nan, dtype=torch.float64)
            return out, out[..., 0]
        latent, rope = _values(call.kv, lambda cache, _: tokens_of_slots(cache, slots))
        out, lse = latent_attention(
            call.q_nope[rows],
            call.q_pe[rows],
            latent,
            rope,
            causal=False,
            sm_scale=call.sm_scale,
        )
        return saturated(out, call.out.dtype), lse.float()


def _values(kv: BoundMLACache, tokens: Callable[[Tensor, int], Tensor]) -> tuple[Tensor, Tensor]:
    """Return the values of latents and rope parts that ``tokens`` takes from a cache."""
    latent = tokens(kv.latent.tensor, 0).double()
    rope = tokens(kv.rope.tensor, 1 if kv.is_pair else 0).double()
    if kv.latent_scales is not None:
        scales = tokens(kv.latent_scales.tensor, 0).double()
        latent = latent * scales.repeat_interleave(SCALE_BLOCK, dim=1)
    if kv.k_scale is not None:
        factor = kv.k_scale.value if kv.k_scale.tensor is None else kv.k_scale.tensor.double()
        latent = latent * factor
        rope = rope * factor if kv.is_rope_scaled else rope
    return latent, rope
