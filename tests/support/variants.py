"""Variants of attention that tests run. No torch here: a build machine precompiles them.

`tests/support/variant_values.py` has their parameters and a definition of its own.
"""

from __future__ import annotations

from jitattn.spec.variant import ALIBI, RELATIVE_BIAS, AttentionVariant


def _everything(logit, at):  # type: ignore[no-untyped-def]
    params = at.params
    masked = (at.kv_idx + at.request + at.qo_head) % 5 == params.masked
    far = (at.qo_idx - at.kv_idx) / (at.qo_len + at.kv_len)
    shift = params.shift[at.qo_head] + params.kind[at.kv_head, at.qo_idx % 2]
    changed = params.alpha * logit + params.table[at.qo_head % 3, 1] * far + shift
    return changed.masked_fill(masked, float("-inf"))


EVERYTHING = AttentionVariant(
    "everything",
    """
    // Some keys are masked, whatever their "logit" (and this is no return).
    if ((kv_idx + request + qo_head) % 5 == params.masked) return neg_inf();
    const float far = float(qo_idx - kv_idx) / float(qo_len + kv_len);
    const float shift = params.shift[qo_head] + params.kind(kv_head, qo_idx & 1);
    return params.alpha * logit + params.table(qo_head % 3, 1) * far + shift;
    """,
    {
        "masked": "int",
        "alpha": "float",
        "shift": "bfloat16*",
        "kind": "uint8[kv_heads, 2]",
        "table": "float16[3, *]",
    },
    reference=_everything,
)
"""Every name that a transform sees, and every kind of parameter."""

VARIANTS = {variant.name: variant for variant in (ALIBI, RELATIVE_BIAS, EVERYTHING)}
