"""Attention variants: transforms of logits, those that come with jitattn, and their parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitattn.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from jitattn.spec.variant import ALIBI, RELATIVE_BIAS, AttentionVariant
    from jitattn.tensors.variant_params import alibi_slopes, t5_bias

__all__ = ["ALIBI", "RELATIVE_BIAS", "AttentionVariant", "alibi_slopes", "t5_bias"]

__getattr__ = lazy_names(
    __name__,
    {
        "ALIBI": "jitattn.spec.variant",
        "RELATIVE_BIAS": "jitattn.spec.variant",
        "AttentionVariant": "jitattn.spec.variant",
        "alibi_slopes": "jitattn.tensors.variant_params",
        "t5_bias": "jitattn.tensors.variant_params",
    },
)
