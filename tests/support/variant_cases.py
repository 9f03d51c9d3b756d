"""Few kernels of variants, and batches for them: those of a card, and random ones.

Kernels of warps and of warpgroups, of decode, prefill and latents, each with ALiBi, a relative bias
or everything that a transform sees.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from jitattn.spec.config import MLAConfig, PlannerConfig
from tests.support.cases import Case, of
from tests.support.mla import LAYOUTS, MLACase
from tests.support.strategies import Example, placed

CASES = {
    "relative_bias, warpgroups": Case(variant="relative_bias", page_table="shared"),
    "alibi, warpgroups": Case(variant="alibi", head_dim=64, page_size=24, group_size=20),
    "alibi, wide": Case(variant="alibi", head_dim=512, dtype="float16"),
    "everything, fp8": Case(
        variant="everything", kv_dtype="float8_e4m3fn", scales="1d", head_dim=256, sinks="float32"
    ),
}
LATENTS = {
    "relative_bias, warpgroups": MLACase(variant="relative_bias", page_size=16),
    "everything, warpgroups": MLACase(variant="everything", page_size=16, form="pair"),
    "alibi, fp8": MLACase(variant="alibi", page_size=16, form="fp8_one", scale="number"),
    "alibi, fp8 with scales": MLACase(variant="alibi", page_size=16, form="fp8_rows"),
}
# Of the kernels above, whose row tiles they choose.
_GROUPS = {64: (17, 20, 32), 128: (1, 2, 3, 4, 8), 256: (1, 4, 6), 512: (1, 4, 6)}

LONG = (4097, 64, 0, 1, 700, 63, -1, 40)
MIXED_LONG = (1, 2, 1, 0, 150, 63, 2, 60)


def on_a_card(case: Case) -> list[Case]:
    """Splits, whole units, empty and short requests; a prefill beside decodes."""
    mixed = of(case, *zip(MIXED_LONG, LONG, strict=True), spare_rows=3)
    return [
        *(replace(case, lengths=LONG, seed=seed) for seed in (1, 44)),
        *(replace(mixed, causal=causal, seed=9) for causal in (True, False)),
        replace(mixed, window_left=100, sm_scale=0.0, seed=3),
        replace(mixed, batch_invariant=True, sm_scale=-0.2, seed=25),
        replace(mixed, cache="odd_strides", q_view="odd", out_view="odd", seed=6),
    ]


def latents_on_a_card(case: MLACase) -> list[MLACase]:
    """Likewise."""
    mixed = replace(case, lengths=LONG, q_lens=MIXED_LONG, spare_rows=3)
    layout = "unequal" if case.form == "fp8_rows" else "odd"
    return [
        replace(case, lengths=LONG, seed=2),
        *(replace(mixed, causal=causal, seed=9) for causal in (True, False)),
        *(replace(mixed, num_heads=n, seed=33) for n in (5, 16)),
        replace(mixed, layout=layout, q_view="heads_outside", seed=14),
    ]


def gpu_configs() -> list[PlannerConfig | MLAConfig]:
    """The arguments of all planners, for a bundle: 28 attention kernels on sm_90a."""
    latents = (MLAConfig.from_arguments(case.planner_arguments()) for case in LATENTS.values())
    return [*(case.config() for case in CASES.values()), *dict.fromkeys(latents)]


_KV_LENS = st.one_of(
    st.sampled_from([1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 513]),
    st.integers(0, 300),
    st.integers(1, 2500),
    st.sampled_from([0, -1]),
)
_PAIRS = st.one_of(
    st.tuples(st.just(1), _KV_LENS),
    st.tuples(st.integers(0, 90), _KV_LENS),
    st.tuples(st.integers(1, 300), st.integers(0, 400)),
)
_BATCHES = st.lists(_PAIRS, min_size=1, max_size=6)


@st.composite
def examples(draw: st.DrawFn) -> Example:
    """Any batch of a kernel of `CASES`."""
    case = draw(st.sampled_from(list(CASES.values())))
    batch = draw(_BATCHES)
    if draw(st.booleans()):
        case = replace(case, lengths=tuple(length for _, length in batch))
    else:
        case = of(case, *batch, spare_rows=draw(st.sampled_from([0, 2])))
    case = replace(
        case,
        num_kv_heads=draw(st.sampled_from([1, 2, 3])) if case.head_dim > 64 else 1,
        group_size=draw(st.sampled_from(_GROUPS[case.head_dim])),
        window_left=draw(st.sampled_from([-1, -1, 0, 16, 200])),
        causal=draw(st.booleans()),
        sinks=draw(st.sampled_from([None, "float32"])),
        batch_invariant=draw(st.booleans()),
    )
    return placed(draw, case)


@st.composite
def latents(draw: st.DrawFn) -> MLACase:
    """Any batch of a kernel of `LATENTS`."""
    case = draw(st.sampled_from(list(LATENTS.values())))
    q_lens, lengths = zip(*draw(_BATCHES), strict=True)
    has_offsets = draw(st.booleans())
    layouts = [name for name in LAYOUTS if name != "odd" or case.form != "fp8_rows"]
    return replace(
        case,
        lengths=lengths,
        q_lens=q_lens if has_offsets else None,
        spare_rows=draw(st.sampled_from([0, 2])) if has_offsets else 0,
        num_heads=draw(st.sampled_from([1, 5, 16])),
        causal=draw(st.booleans()),
        layout=draw(st.sampled_from(layouts)),
        q_view=draw(st.sampled_from(["contiguous", "joint", "heads_outside"])),
        seed=draw(st.integers(0, 1000)),
    )
