"""Kernels of variants, run on the CPU by the code that launches them, against the definition.

Some hundred small batches of few kernels, and the warpgroups of both families.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.emulator.attention import EmulatedCuda
from tests.support.cases import E4M3, NVFP4, Case, of
from tests.support.examples import examples
from tests.support.mla import MLACase, check_kernel
from tests.support.mla import make_inputs as make_latents

PAIRS = ((1, 40), (1, 150), (3, 0), (2, 17), (40, 70), (1, 0), (9, 4))
BASE = Case(head_dim=32, page_size=5, num_kv_heads=2, group_size=2, seed=4)
CASES = {
    "everything": replace(BASE, variant="everything"),
    "not causal": replace(BASE, variant="alibi", causal=False, dtype="float16"),
    "all features": replace(
        BASE,
        variant="everything",
        window_left=40,
        logits_soft_cap=3.0,
        sinks="float32",
        mask="packed",
        page_table="csr",
    ),
    "no products": replace(BASE, variant="relative_bias", sm_scale=0.0, group_size=3),
    "negative scale": replace(BASE, variant="everything", sm_scale=-0.3, batch_invariant=True),
    "e4m3": replace(E4M3, variant="everything", page_size=5, group_size=2, num_kv_heads=2),
    "nvfp4": replace(NVFP4, variant="everything", group_size=2, num_kv_heads=2, sinks="float64"),
}


# Each feature in a kernel of warps or of warpgroups: what follows the scores is one text for both.
@pytest.mark.parametrize("name", ["everything", "all features", "negative scale", "nvfp4"])
def test_warps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host = EmulatedCuda(monkeypatch, "sm_80")
    host.check(of(CASES[name], *PAIRS, spare_rows=2))
    assert host.kinds == {"decode", "prefill"}


@pytest.mark.parametrize("name", ["everything", "e4m3", "nvfp4"])
def test_decode_of_large_shared_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(CASES[name], head_dim=128, page_size=16)
    host = EmulatedCuda(monkeypatch, "sm_90a")
    host.check(of(case, (1, 40), (1, 150), (1, 0)))
    assert host.kinds == {"decode"}


@pytest.mark.parametrize("name", ["everything", "not causal", "no products", "e4m3"])
def test_prefill_with_warpgroups(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(CASES[name], head_dim=64)
    host = EmulatedCuda(monkeypatch, "sm_90a", seed=1 if name == "everything" else 0)
    host.check(of(case, (140, 150), (40, 200), (20, 20), (30, 10)))
    assert "prefill" in host.kinds


LATENTS = MLACase(
    kv_lora_rank=256, lengths=(230, 64, 0, 1), page_size=16, out_dtype="float32", num_heads=5
)


@pytest.mark.parametrize(
    ("name", "arch", "form", "q_lens"),
    [
        ("alibi", "sm_80", "one", None),
        ("everything", "sm_80", "fp8_pair", (2, 19, 1, 3)),
        ("relative_bias", "sm_80", "fp8_rows", None),
        ("relative_bias", "sm_90a", "one", (2, 19, 1, 3)),
        ("everything", "sm_90a", "pair", None),
        ("everything", "sm_90a", "fp8_pair", (6, 4, 1, 2)),
        ("alibi", "sm_90a", "fp8_rows", (6, 4, 1, 2)),
    ],
)
def test_latents(
    name: str, arch: str, form: str, q_lens: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(LATENTS, variant=name, form=form, q_lens=q_lens, seed=11)
    inputs = make_latents(case)
    planner = EmulatedCuda(monkeypatch, arch).mla_planner(**case.planner_arguments())
    check_kernel(inputs, *inputs.run(planner))


PAIR = st.one_of(
    st.tuples(st.just(1), st.integers(0, 130)),
    st.tuples(st.integers(0, 12), st.integers(0, 60)),
)
ONE_EACH = st.lists(st.tuples(st.just(1), st.integers(-1, 150)), min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("name", "arch", "pairs"),
    [
        ("alibi", "sm_80", st.lists(PAIR, min_size=1, max_size=4)),
        ("relative_bias", "sm_90a", ONE_EACH),
    ],
    ids=["mixed", "decode"],
)
def test_random_batches(
    name: str,
    arch: str,
    pairs: st.SearchStrategy[list[tuple[int, int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lengths, heads, tables and windows of one kernel each, or two: 100 batches."""
    host = EmulatedCuda(monkeypatch, arch)

    @examples(100)
    @given(
        batch=pairs,
        num_kv_heads=st.integers(1, 3),
        group_size=st.integers(1, 4),
        window_left=st.sampled_from([-1, -1, 0, 7, 40]),
        causal=st.booleans(),
        seed=st.integers(0, 300),
    )
    def run(batch: list[tuple[int, int]], **changes: int) -> None:
        host.check(of(replace(BASE, variant=name, **changes), *batch))

    run()
