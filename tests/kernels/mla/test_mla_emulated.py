"""The kernels of latent attention, run on the CPU by the code that launches them.

A few small batches; the GPU tests have the large ones.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import jitattn
from jitattn.kernels.mla import kernels
from jitattn.kernels.mla.config import cache_specs
from jitattn.kernels.mla.tile import mla_tile
from jitattn.spec.config import MLAConfig
from tests.emulator.attention import EmulatedCuda
from tests.support.harness import same_bits
from tests.support.mla import (
    FORMS,
    HEADS_OF_ROWS,
    MLACase,
    check_invariant_rises,
    check_kernel,
    check_queries_that_are_not_finite,
    check_too_long,
    make_inputs,
)

# Requests that several slots share, of one tile, of none, and of a length that is no multiple.
BASE = MLACase(kv_lora_rank=256, lengths=(230, 64, 0, 1), page_size=16, out_dtype="float32")
FULL = replace(BASE, kv_lora_rank=512)
MIXED = replace(BASE, q_lens=(2, 19, 1, 3), spare_rows=2)
PORTABLE = {
    **{form: replace(BASE, form=form, page_table="separate", scale=None) for form in FORMS},
    "scale": replace(BASE, form="fp8_mixed", scale="1d", page_size=1),
    "rows of 656 bytes": replace(BASE, form="fp8_rows", kv_lora_rank=512, page_size=7),
    "many heads": replace(BASE, num_heads=40, page_table="csr"),
    "mixed": replace(MIXED, page_table="ragged", form="fp8_one", scale="number"),
    "odd": replace(MIXED, layout="odd", page_table="token", form="fp8_pair"),
    "rope of 32": replace(
        BASE, qk_rope_head_dim=32, num_heads=3, causal=False, q_lens=(1, 2, 3, 4)
    ),
    "joint queries": replace(MIXED, q_view="joint", dtype="float16", rows="int64"),
}
WARPGROUPS = {
    "boxes": replace(BASE, form="pair", page_table="separate", num_heads=40),
    "one tensor": replace(BASE, page_table="separate", layout="layers", num_heads=33),
    "full": replace(BASE, kv_lora_rank=512, page_size=64, lengths=(200, 70), q_lens=(3, 1)),
    "vectors": replace(MIXED, page_size=1, sm_scale=-0.06),
    "elements": replace(MIXED, layout="odd", page_size=8, q_view="heads_outside"),
    "many heads": replace(BASE, num_heads=128, lengths=(130, 3), page_size=8, dtype="float16"),
    "not causal": replace(MIXED, causal=False, page_table="csr", page_size=128),
    "rope of 32": replace(BASE, qk_rope_head_dim=32, num_heads=48, page_table="token"),
    "ragged": replace(MIXED, page_table="ragged"),
    "8 bits": replace(MIXED, form="fp8_pair", page_table="separate", scale="number"),
    "8 bits, one tensor": replace(
        FULL, form="fp8_one", num_heads=34, page_size=1, dtype="float16", lengths=(130, 3)
    ),
    "8 bits, rope of 16": replace(MIXED, form="fp8_mixed", scale="1d", page_table="csr"),
    "rows of 656 bytes": replace(
        MIXED, form="fp8_rows", kv_lora_rank=512, page_size=7, lengths=(150, 64, 0, 1)
    ),
    "8 bits, elements": replace(MIXED, layout="odd", form="fp8_pair", page_table="token"),
}
NARROW = {
    "two stages of a page": replace(FULL, page_size=64, lengths=(700, 70, 0, 1)),
    "a page a stage": replace(FULL, page_size=32, num_heads=8, q_lens=(2, 1, 1, 2)),
    "two pages a stage": replace(FULL, form="pair", page_table="separate", num_heads=3),
    "four pages a stage": replace(FULL, page_size=8, dtype="float16", kv_lora_rank=256),
    "vectors": replace(FULL, page_size=1, sm_scale=-0.06),
    "elements": replace(FULL, layout="odd", page_size=8, q_view="heads_outside"),
    "pages of 7": replace(FULL, page_table="csr", page_size=7, num_heads=3),
    "ragged": replace(FULL, page_table="ragged"),
    "rope of 32": replace(BASE, qk_rope_head_dim=32, num_heads=3, page_table="token"),
    "not causal": replace(FULL, causal=False, q_lens=(2, 1, 1, 1), num_heads=5),
    "8 bits": replace(FULL, form="fp8_pair", page_table="separate", scale="number"),
    "8 bits, one tensor": replace(FULL, form="fp8_one", page_size=1, dtype="float16"),
    "8 bits, rope of 16": replace(FULL, form="fp8_mixed", scale="1d", page_table="csr"),
    "8 bits, rope of 32": replace(
        BASE, form="fp8_pair", qk_rope_head_dim=32, lengths=(700, 130, 3)
    ),
    "8 bits, elements": replace(FULL, layout="odd", form="fp8_pair", page_table="token"),
    "rows of 656 bytes": replace(FULL, form="fp8_rows", page_size=64, lengths=(700, 130, 3)),
    "rows of two scales": replace(
        FULL, form="fp8_rows", kv_lora_rank=256, page_size=7, lengths=(300, 130, 3)
    ),
}
# Of 17 to 32 query rows: of a token, or of several of fewer heads.
NARROW_32 = {
    "two stages of a page": replace(FULL, num_heads=32, page_size=64, lengths=(700, 70, 0, 1)),
    "two tokens": replace(FULL, q_lens=(2, 1, 2, 2), lengths=(230, 65, 1, 64)),
    "two pages a stage": replace(
        FULL, form="pair", page_table="separate", num_heads=17, dtype="float16"
    ),
    "vectors": replace(FULL, num_heads=24, page_size=1, sm_scale=-0.06),
    "elements": replace(
        FULL, layout="odd", page_size=8, q_view="heads_outside", num_heads=8, q_lens=(3, 4, 1, 2)
    ),
    "pages of 7": replace(
        FULL, page_table="csr", page_size=7, num_heads=12, q_lens=(2, 1, 1, 2), causal=False
    ),
    "rope of 32": replace(BASE, qk_rope_head_dim=32, num_heads=20, page_table="token"),
    "8 bits": replace(FULL, form="fp8_pair", page_table="separate", scale="number", num_heads=32),
    "8 bits, two tokens": replace(
        FULL, form="fp8_one", page_size=1, dtype="float16", q_lens=(2, 2, 1, 2), layout="odd"
    ),
    "8 bits, rope of 16": replace(
        FULL, form="fp8_mixed", scale="1d", page_table="csr", num_heads=20, page_size=64
    ),
    "rows of 656 bytes": replace(
        FULL, form="fp8_rows", page_size=64, lengths=(700, 130, 3), num_heads=32
    ),
    "rows of two scales": replace(
        FULL,
        form="fp8_rows",
        kv_lora_rank=256,
        page_size=7,
        lengths=(300, 130, 3),
        q_lens=(2, 1, 2),
    ),
}


def has_rows(host: EmulatedCuda, num_rows: int) -> bool:
    """Whether all kernels that ran have tiles of so many query rows."""
    return all(f"mla_r{num_rows}_" in symbol for symbol in host.ran)


def run(
    case: MLACase, host: EmulatedCuda, **arguments: object
) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = make_inputs(case)
    out, lse = inputs.run(host.mla_planner(**(case.planner_arguments() | arguments)))
    is_invariant = bool(arguments.get("batch_invariant"))
    has_warpgroups = host.arch == "sm_90a"
    check_kernel(inputs, out, lse, warpgroups=has_warpgroups, batch_invariant=is_invariant)
    return out, lse


@pytest.mark.parametrize("name", PORTABLE)
def test_products_of_warps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run(PORTABLE[name], EmulatedCuda(monkeypatch, "sm_80"))


@pytest.mark.parametrize("name", WARPGROUPS)
def test_products_of_warpgroups(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host = EmulatedCuda(monkeypatch, "sm_90a")
    run(WARPGROUPS[name], host)
    assert has_rows(host, 64)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("num_rows", "name"), [*((16, name) for name in NARROW), *((32, name) for name in NARROW_32)]
)
def test_few_rows(num_rows: int, name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    host = EmulatedCuda(monkeypatch, "sm_90a", seed)
    run((NARROW if num_rows == 16 else NARROW_32)[name], host)
    assert has_rows(host, num_rows)


def test_few_and_many_query_tokens_have_kernels_of_their_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A planner's: a plan launches one, that of its longest request."""
    host = EmulatedCuda(monkeypatch, "sm_90a")
    case = replace(BASE, num_heads=8, lengths=(70, 9), causal=False)
    inputs = [make_inputs(replace(case, q_lens=(1, n))) for n in (1, 2, 3, 4, 5)]
    planner = host.mla_planner(**case.planner_arguments())
    for one in inputs:
        check_kernel(one, *one.run(planner), warpgroups=True)
    rows = [int(symbol.split("_r")[1].split("_")[0]) for symbol in host.ran]
    assert rows == [16, 16, 32, 32, 64]


# Later tiles exceed the maximum of earlier ones by more than probabilities may, by as much in two
# tiles, by little, and never; the last request has a tile alone.
RISING = replace(
    BASE, lengths=(330, 450, 330, 330, 64), rises=(20.0, 6.0, 1.0, -6.0, 0.0), out_dtype=None
)


@pytest.mark.parametrize("form", ["one", "fp8_one", "fp8_mixed", "fp8_rows"])
@pytest.mark.parametrize("num_rows", HEADS_OF_ROWS)
def test_maxima_that_rise(num_rows: int, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host = EmulatedCuda(monkeypatch, "sm_90a", seed=num_rows)
    case = replace(RISING, num_heads=HEADS_OF_ROWS[num_rows], form=form)
    if form == "one":
        case = replace(case, dtype="float16")
    if form == "fp8_rows":  # whose vectors of two scales are no whole ones
        case = replace(case, kv_lora_rank=512)
    run(case, host)
    assert has_rows(host, num_rows)


@pytest.mark.parametrize("level", [15_000.0, -15_000.0])
@pytest.mark.parametrize("form", ["one", "fp8_one"])
@pytest.mark.parametrize("num_rows", HEADS_OF_ROWS)
def test_maxima_that_rise_far_from_0(
    num_rows: int, form: str, level: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a product of a score and its scale has no digits left for differences."""
    host = EmulatedCuda(monkeypatch, "sm_90a")
    run(replace(RISING, num_heads=HEADS_OF_ROWS[num_rows], form=form, level=level), host)
    assert has_rows(host, num_rows)


@pytest.mark.parametrize("level", [0.0, 15_000.0])
def test_batch_invariant_maxima_that_rise(level: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a row alone, and beside rows of its query tile that have maxima rise elsewhere."""
    host = EmulatedCuda(monkeypatch, "sm_90a", seed=1)
    case = replace(RISING, level=level, num_heads=5, dtype="float16")
    planner = host.mla_planner(**case.planner_arguments(), batch_invariant=True)
    check_invariant_rises(case, "cpu", planner)


@pytest.mark.parametrize("form", ["one", "fp8_one", "fp8_mixed"])
@pytest.mark.parametrize("num_rows", HEADS_OF_ROWS)
def test_queries_that_are_not_finite(
    num_rows: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = EmulatedCuda(monkeypatch, "sm_90a")
    case = replace(RISING, num_heads=HEADS_OF_ROWS[num_rows], form=form)
    planner = host.mla_planner(**case.planner_arguments())
    check_queries_that_are_not_finite(case, "cpu", planner)


@pytest.mark.parametrize("num_rows", HEADS_OF_ROWS)
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_splits_of_one_tile(out_dtype: str, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """2, 4, 8, 13 and 20, merged in the kernel; a last one of which a query token sees nothing."""
    monkeypatch.setattr(kernels, "TRAITS", replace(kernels.TRAITS, min_slot_cost=1))
    case = replace(BASE, lengths=(1217, 1, 128, 250, 450, 800, 0), q_lens=(2, 2, 1, 1, 2, 1, 1))
    # So that the last splits have the maxima.
    case = replace(case, num_heads=num_rows // 2, out_dtype=out_dtype, rises=(1.0,) * 7)
    host = EmulatedCuda(monkeypatch, "sm_90a", seed=1, num_sms=54)
    run(case, host)
    assert has_rows(host, num_rows)
    assert not any(symbol.endswith("_merge") for symbol, _ in host.grids)


@pytest.mark.parametrize("num_heads", [4, 17, 33])
def test_zero_queries_beside_a_small_scale(num_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The factor of a scaled row of Q times k_scale leaves float32."""
    case = replace(BASE, form="fp8_one", scale="number", num_heads=num_heads)
    inputs = make_inputs(case)
    assert isinstance(inputs.k_scale, float)
    factor = 1e-7 / inputs.k_scale
    inputs.q_nope[:, 1] = 0
    inputs.q_pe[:, 1] = 0
    small = replace(inputs, k_scale=1e-7, latent=inputs.latent * factor, rope=inputs.rope * factor)
    host = EmulatedCuda(monkeypatch, "sm_90a")
    out, lse = small.run(host.mla_planner(**case.planner_arguments()))
    check_kernel(small, out, lse, warpgroups=True, batch_invariant=False)


@pytest.mark.parametrize("num_heads", [4, 16, 17])
def test_a_later_token_of_a_large_scale(num_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first query token does not see it, and keeps its digits."""
    case = replace(FULL, form="fp8_rows", num_heads=num_heads, q_lens=(2,), lengths=(40,))
    inputs = make_inputs(case)
    inputs.latent[39] *= 2.0**20
    inputs.q_nope.zero_()
    row = inputs.kv.view(torch.uint8)[int(inputs.table[0, 39 // 16]), 39 % 16]
    scales = row[512:528].clone().view(torch.float32) * 2.0**20
    row[512:528] = scales.view(torch.uint8)
    host = EmulatedCuda(monkeypatch, "sm_90a")
    out, lse = inputs.run(host.mla_planner(**case.planner_arguments()))
    check_kernel(inputs, out, lse, warpgroups=True, batch_invariant=False)


@pytest.mark.parametrize("num_heads", [4, 20])
@pytest.mark.parametrize("form", ["one", "fp8_one"])
def test_few_rows_of_short_requests(
    form: str, num_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one to three tiles each: producers may be some work items ahead."""
    lengths = (5, 60, 130, 0) * 6
    case = replace(BASE, form=form, lengths=lengths, page_size=128, num_heads=num_heads)
    run(case, EmulatedCuda(monkeypatch, "sm_90a", seed=250, num_sms=2))


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", ["boxes", "vectors", "not causal", "8 bits"])
def test_warpgroups_in_any_order(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run(WARPGROUPS[name], EmulatedCuda(monkeypatch, "sm_90a", seed))


def test_splits_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of one tile and of many, one after the other, and merges in the kernel itself."""
    case = replace(BASE, lengths=(1300, 70, 600), page_size=128, num_heads=4)
    run(case, EmulatedCuda(monkeypatch, "sm_90a", seed=1), batch_invariant=True)


def test_short_requests_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one tile each: a warpgroup may be a run ahead of the other."""
    case = replace(BASE, lengths=(5, 60) * 10, page_size=128, num_heads=40)
    run(case, EmulatedCuda(monkeypatch, "sm_90a", seed=250, num_sms=2))


def test_warps_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    run(PORTABLE["mixed"], EmulatedCuda(monkeypatch, "sm_80", seed=1))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_many_split_requests(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every CTA that merges has the same list of them, whichever warp is the first."""
    case = replace(BASE, lengths=(*[0] * 31, 600, 500), page_size=128, num_heads=4)
    for seed in (1, 2):
        run(case, EmulatedCuda(monkeypatch, arch, seed=seed, num_sms=16))


@pytest.mark.parametrize(("arch", "kv_lora_rank"), [("sm_80", 512), ("sm_90a", 256)])
def test_many_splits_of_a_request(
    arch: str, kv_lora_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warps share them, beside a request of few."""
    monkeypatch.setattr(kernels, "TRAITS", replace(kernels.TRAITS, min_slot_cost=1))
    case = replace(BASE, kv_lora_rank=kv_lora_rank, lengths=(170, 1090), num_heads=3)
    run(case, EmulatedCuda(monkeypatch, arch, seed=3, num_sms=24))


@pytest.mark.parametrize("num_sms", [4, 32])
@pytest.mark.parametrize(
    ("form", "num_heads"), [("one", 16), ("one", 20), ("fp8_one", 20), ("fp8_one", 33)]
)
def test_packed_partial_rows(
    form: str, num_heads: int, num_sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of outputs of 16 bits, merged by the kernel itself and, of many splits, by the second."""
    case = replace(FULL, form=form, lengths=(1900, 170, 0), num_heads=num_heads, out_dtype=None)
    host = EmulatedCuda(monkeypatch, "sm_90a", seed=3, num_sms=num_sms)
    run(case, host)
    has_second = any(symbol.endswith("_merge") for symbol, _ in host.grids)
    assert has_second == (num_sms > 4)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_batch_invariant_plans_have_few_splits(arch: str) -> None:
    """So few that a row is merged in one order, wherever that is."""
    for spec in cache_specs(MLAConfig(), arch):
        assert mla_tile(spec, arch).merge_splits >= kernels.TRAITS.max_splits


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_splits_of_a_table_that_allows_less(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are NaN, and stay so when the splits of others are merged."""
    case = replace(BASE, lengths=(700, 70), page_table="csr", page_size=128, num_heads=4)
    inputs = make_inputs(case)
    assert inputs.indptr is not None
    planner = EmulatedCuda(monkeypatch, arch).mla_planner(**case.planner_arguments())
    plan, kv = inputs.plan(planner), planner.bind(inputs.kv)
    plan.run(inputs.q_nope, inputs.q_pe, kv)
    fewer = inputs.indptr.clone()
    fewer[1:] -= 2
    pages = jitattn.CsrPages(fewer, inputs.table)
    out, lse = plan.run(inputs.q_nope, inputs.q_pe, kv, pages=pages, return_lse=True)
    assert bool(out[0].isnan().all())
    assert bool(lse[0].isnan().all())


def test_few_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """CTAs claim what is left, and those that merge are as few."""
    host = EmulatedCuda(monkeypatch, "sm_90a", seed=1)
    case = replace(BASE, lengths=(100, 3), q_lens=(1, 2), page_size=128, num_heads=80)
    run(case, host, num_sms=1)
    assert {grid for _, grid in host.grids} == {1}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_batch_invariant(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request has the same bits alone, beside others, and in another place."""
    host = EmulatedCuda(monkeypatch, arch)
    case = replace(BASE, lengths=(1300, 70, 600), page_size=128, num_heads=4)
    inputs = make_inputs(case)
    planner = host.mla_planner(**case.planner_arguments(), batch_invariant=True)
    out, lse = inputs.run(planner)
    check_kernel(inputs, out, lse)
    for order in ([2, 0, 1], [0], [1, 2]):
        rows = torch.tensor(order)
        some = replace(
            inputs,
            q_nope=inputs.q_nope[rows],
            q_pe=inputs.q_pe[rows],
            table=inputs.table[rows].contiguous(),
            seq_lens=inputs.seq_lens[rows],
        )
        found_out, found_lse = some.run(planner)
        assert same_bits(found_out, out[rows])
        assert same_bits(found_lse, lse[rows])


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_invalid_lengths_are_nan_and_others_intact(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = EmulatedCuda(monkeypatch, arch)
    case = replace(BASE, lengths=(40, 70, 33), q_lens=(1, 20, 2), num_heads=5)
    check_too_long(make_inputs(case), host.mla_planner(**case.planner_arguments()), 0)


def test_tables_and_layouts_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of boxes, vectors and elements, and whichever table says where tokens are."""
    host = EmulatedCuda(monkeypatch, "sm_90a")
    first = None
    for table in ("shared", "separate", "csr", "token"):
        for layout in ("contiguous", "odd"):
            case = replace(BASE, page_table=table, layout=layout, lengths=(150, 3))
            out, lse = run(case, host)
            first = first or (out, lse)
            assert same_bits(out, first[0]), (table, layout)
            assert same_bits(lse, first[1]), (table, layout)
