"""The decode and prefill kernels of warps, run on the CPU: NVFP4, and beside it what it shares.

A few small batches through the whole of a kernel and of the host code that launches it; the GPU
tests have the large ones.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import jitattn
from tests.emulator.attention import EmulatedCuda
from tests.support.cases import E4M3, E5M2, NVFP4, Case, of
from tests.support.harness import attend, check, check_addresses, expected
from tests.support.inputs import address_probe, make_inputs, random_tokens
from tests.support.scales import every_byte_of_v

PAIRS = ((1, 40), (1, 150), (3, 0), (2, 17), (40, 70), (1, 0))
BASE = replace(NVFP4, group_size=2, num_kv_heads=2)
CASES = {
    "e4m3": replace(BASE, kv_dtype=E4M3.kv_dtype, page_size=5),  # no boxes
    "nvfp4": BASE,
    "fp16": replace(BASE, dtype="float16", page_table="separate", page_size=3),
    "odd number of blocks": replace(BASE, head_dim=80, page_table="csr", page_size=5),
    "one block": replace(BASE, head_dim=16, page_table="token", logits_soft_cap=5.0),
    "three blocks": replace(BASE, head_dim=48, dtype="float16", page_table="ragged", page_size=1),
    "wide rows": replace(BASE, head_dim=256, group_size=3, window_left=30),
    "narrow values": replace(BASE, head_dim=64, head_dim_vo=48, group_size=20, sinks="float32"),
    "wide values": replace(BASE, head_dim=64, head_dim_vo=512, page_size=8),
    "split": replace(BASE, head_dim=32, batch_invariant=True, kv_layout="HND"),
    "odd strides": replace(BASE, cache="odd_strides", block_cache="padded"),
    "odd scales": replace(BASE, cache="padded", block_cache="odd_base", mask="packed"),
}
WARPGROUPS = ("nvfp4", "fp16", "odd number of blocks", "wide rows", "odd strides")


@pytest.mark.parametrize("name", CASES)
def test_kernels_compute_the_definition(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = of(CASES[name], *PAIRS, spare_rows=2)
    host = EmulatedCuda(monkeypatch, "sm_80")  # elsewhere prefill has warpgroups
    host.check(case)
    assert host.kinds == {"decode", "prefill"}


@pytest.mark.parametrize("name", ["nvfp4", "odd number of blocks", "wide rows"])
def test_decode_of_large_shared_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = of(CASES[name], (1, 40), (1, 150), (1, 0))
    host = EmulatedCuda(monkeypatch, "sm_90a")
    host.check(case)
    assert host.kinds == {"decode"}


# Tiles of 128 tokens in slots of one or some, and the splits of each request.
@pytest.mark.parametrize(
    ("pairs", "num_sms", "num_splits"),
    [
        (((1, 128 * 65),), 66, [65]),  # one more in the last of four groups
        (((2, 128 * 49 + 3),), 66, [50]),
        (((1, 17_010), (1, 20_864)), 54, [49, 60]),  # with a slot in common
        (((1, 128 * 48),), 66, [48]),  # no groups
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_groups_of_many_splits(
    pairs: tuple[tuple[int, int], ...],
    num_sms: int,
    num_splits: list[int],
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = of(replace(CASES["e4m3"], num_kv_heads=1, head_dim=32, head_dim_vo=48), *pairs)
    host = EmulatedCuda(monkeypatch, "sm_80", seed=seed, num_sms=num_sms)
    inputs = make_inputs(case, "cpu")
    planner = host.planner(**case.planner_arguments())
    for _ in range(2):  # counters are as they were
        check(case, *attend(inputs, planner), expected(inputs))
    assert host.kinds == {"decode"}
    assert host.num_splits == num_splits


@pytest.mark.parametrize("name", ["e4m3", *WARPGROUPS])
def test_prefill_with_warpgroups(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = of(CASES[name], (140, 150), (40, 200), (20, 20))
    host = EmulatedCuda(monkeypatch, "sm_90a")
    host.check(case)
    assert "prefill" in host.kinds


@pytest.mark.parametrize("name", ["e4m3", "fp16"])
def test_prefill_in_any_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = of(CASES[name], (140, 150), (40, 200), (20, 20))
    inputs = make_inputs(case, "cpu")
    planner = EmulatedCuda(monkeypatch, "sm_90a", seed=1).planner(**case.planner_arguments())
    check(case, *attend(inputs, planner), expected(inputs))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("q_len", [1, 40])
def test_small_probabilities_of_float16(
    q_len: int, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In most columns the keys of large probabilities have values of 0."""
    case = of(replace(CASES["e4m3"], dtype="float16"), *[(q_len, 90)] * 4)
    q, k, v = random_tokens(case, "cpu")
    rng = torch.Generator().manual_seed(5)
    v = torch.where(torch.rand(v.shape, generator=rng) < 0.05, v.float(), 0.0).to(v.dtype)
    inputs = make_inputs(case, "cpu", (4 * q, k, v))
    planner = EmulatedCuda(monkeypatch, arch).planner(**case.planner_arguments())
    out, lse = attend(inputs, planner)
    want = expected(inputs)
    check(case, out, lse, want)
    assert bool(((want.out != 0) & (want.out.abs() < 2.0**-14)).any())


@pytest.mark.parametrize("q_len", [1, 40])
def test_addresses(q_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out is one row of V, bit for bit."""
    targets = [0, 17, 99, 130]
    case = of(replace(BASE, causal=False), *[(q_len, 131)] * len(targets))
    host = EmulatedCuda(monkeypatch, "sm_80")
    inputs = make_inputs(case, "cpu", address_probe(case, "cpu", targets))
    planner = host.planner(**case.planner_arguments())
    assert check_addresses(inputs, attend(inputs, planner)[0], targets) == q_len * len(targets)


def test_a_nan_scale_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the block that it is the scale of, and nowhere else."""
    case = of(replace(BASE, causal=False, scales=None), (1, 20), (2, 20))
    inputs = make_inputs(case, "cpu")
    assert inputs.blocks is not None
    page = int(inputs.table[0, 0])
    inputs.blocks[1].view(torch.uint8)[page, 5, 1, 3] = 0x7F
    host = EmulatedCuda(monkeypatch, "sm_90a")
    out, lse = attend(inputs, host.planner(**case.planner_arguments()))
    is_nan = torch.isnan(out)
    want = torch.zeros_like(is_nan)
    want[0, 2:, 48:64] = True
    assert torch.equal(is_nan, want)
    assert bool(torch.isfinite(lse).all())


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("q_len", [1, 30])
@pytest.mark.parametrize("family", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_every_byte(family: Case, q_len: int, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Infinite values saturate with the outputs that they are; NaN stays."""
    case = replace(family, page_size=5)  # no boxes
    inputs, want = every_byte_of_v(case, q_len, "cpu", range(0, 256, 51))
    planner = EmulatedCuda(monkeypatch, arch).planner(**inputs.case.planner_arguments())
    out, _ = attend(inputs, planner)
    torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("arch", [None, "sm_80", "sm_90a"])
@pytest.mark.parametrize("q_len", [1, 70])
def test_outputs_saturate(q_len: int, arch: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is beyond float16 is its largest number, on the reference backend (None), too."""
    arguments = {
        **{"num_qo_heads": 2, "num_kv_heads": 1, "q_dtype": "float16", "kv_dtype": "int8"},
        "page_size": 5,  # no boxes
    }
    if arch is None:
        planner = jitattn.AttentionPlanner(**arguments, device="cpu")
    else:
        planner = EmulatedCuda(monkeypatch, arch).planner(**arguments)
    cache = torch.full((20, 2, 5, 1, 128), 127, dtype=torch.int8)
    cache[:, 1, ..., 64:] = -127
    table = jitattn.BlockTable(torch.arange(20, dtype=torch.int32)[None])
    lens, starts = (torch.tensor(n, dtype=torch.int32) for n in ([100], [0, q_len]))
    plan = planner.plan(table, lens, starts, max_q_len=q_len)
    q = torch.zeros(q_len, 2, 128, dtype=torch.float16)
    out = torch.full_like(q, math.nan)
    plan.run(q, planner.bind(cache, v_scale=1e4), out=out)
    want = torch.full_like(q, 65504.0)
    want[..., 64:] = -65504.0
    assert torch.equal(out, want)
