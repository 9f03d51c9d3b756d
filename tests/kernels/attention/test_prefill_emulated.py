"""The prefill kernel of warpgroups, run on the CPU: 16-bit caches, and every way to end a run.

A few small batches through the whole of the kernel and of the host code that launches it; the GPU
tests have the large ones.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.emulator.attention import EmulatedCuda
from tests.support.cases import E4M3, Case, of

BASE = Case(head_dim=64, num_kv_heads=1, group_size=2)
# Two whole tiles and more on two CTAs, rows without keys, and a request that is split.
PAIRS = ((140, 150), (70, 300), (66, 66), (65, 0))
LONG = ((64, 700), (60, 650))
# Two column blocks of V, of which each computes the scores again, and K in parts.
WIDE = replace(BASE, head_dim=512)
SHORT = ((70, 150), (33, 205), (30, 30), (65, 0))
# Few rows, for which one consumer warpgroup is enough.
FEW = ((9, 300), (20, 330), (1, 5), (0, 7), (12, 12))
CASES = {
    "boxes": of(BASE, *PAIRS, spare_rows=2),
    "vectors": of(replace(BASE, head_dim=96, page_size=5), *PAIRS),
    "single elements": of(replace(BASE, cache="odd_strides", q_view="odd", out_view="odd"), *PAIRS),
    "fp16": of(replace(BASE, head_dim=128, dtype="float16", page_table="separate"), *PAIRS),
    "fp32 out": of(replace(BASE, out_dtype="float32", sm_scale=-0.2, sinks="float32"), *PAIRS),
    "everything": of(replace(BASE, causal=False, group_size=3, q_view="qkv"), *PAIRS),
    "window": of(replace(BASE, window_left=70, out_view="heads_outside"), *PAIRS),
    "soft cap": of(replace(BASE, logits_soft_cap=2.0, sinks="bfloat16"), *PAIRS),
    "soft cap, reached": of(replace(BASE, logits_soft_cap=50.0, sm_scale=3.0), *PAIRS),
    "soft cap, no bound": of(replace(BASE, logits_soft_cap=51.0, sm_scale=3.0), *PAIRS),
    "bool mask": of(replace(BASE, mask="bool", causal=False), *PAIRS),
    "packed mask": of(replace(BASE, mask="packed", window_left=90, logits_soft_cap=5.0), *PAIRS),
    "ragged mask": of(replace(BASE, mask="ragged", page_table="csr"), *PAIRS),
    "ragged": of(replace(BASE, page_table="ragged", page_size=1), *PAIRS),
    "narrow values": of(replace(BASE, head_dim=192, head_dim_vo=48), *PAIRS),
    "wide": of(replace(BASE, head_dim=192, head_dim_vo=256, page_size=64), *PAIRS),
    "e4m3": of(replace(BASE, kv_dtype=E4M3.kv_dtype, scales="heads"), *PAIRS),
    "few rows": of(replace(BASE, logits_soft_cap=4.0, sinks="float32"), *FEW),
    "few rows, e4m3": of(replace(BASE, head_dim=128, kv_dtype=E4M3.kv_dtype), *FEW),
    "512": of(replace(WIDE, window_left=70, sinks="float32"), *SHORT, spare_rows=2),
    "512, pages of 1": of(replace(WIDE, page_size=1, window_left=90, dtype="float16"), *SHORT),
    "512, elements": of(replace(WIDE, cache="odd_strides", q_view="odd", out_view="odd"), *SHORT),
    "512, ragged": of(replace(WIDE, page_table="ragged", page_size=1, sm_scale=-0.1), *SHORT),
    "512, mask": of(replace(WIDE, mask="packed", logits_soft_cap=5.0, page_size=8), *SHORT),
    "512, separate": of(replace(WIDE, head_dim_vo=80, page_table="separate"), *SHORT),
    "512, split": of(replace(WIDE, logits_soft_cap=9.0, out_dtype="float32"), *LONG),
    "512, invariant": of(replace(WIDE, batch_invariant=True, page_table="csr"), *LONG),
    "512, e4m3": of(replace(WIDE, kv_dtype=E4M3.kv_dtype, scales="heads"), *SHORT),
    "512, nvfp4": of(replace(WIDE, kv_dtype="nvfp4", scales="float", page_size=3), *SHORT),
    "512, int4": of(replace(WIDE, kv_dtype="int4", head_dim=64, head_dim_vo=512), *FEW),
    "512 of V": of(replace(BASE, head_dim=96, head_dim_vo=512, page_size=64), *SHORT),
    "split": of(BASE, *LONG),
    "split, sinks": of(replace(BASE, sinks="float32", window_left=400), *LONG),
    "split, odd": of(replace(BASE, head_dim_vo=80, logits_soft_cap=9.0, out_view="odd"), *LONG),
    "split, e4m3": of(replace(BASE, kv_dtype=E4M3.kv_dtype, batch_invariant=True), *LONG),
}


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_computes_the_definition(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    host = EmulatedCuda(monkeypatch, "sm_90a")
    host.check(case)
    assert "prefill" in host.kinds


@pytest.mark.parametrize("name", ["512", "512, pages of 1", "512, e4m3"])
def test_wide_heads_in_any_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warps run ahead of others, and copies and products end as late as they may."""
    EmulatedCuda(monkeypatch, "sm_90a", seed=3).check(CASES[name])


@pytest.mark.parametrize("name", ["few rows, e4m3", "split, e4m3"])
def test_dequantised_tiles_in_any_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of producers that dequantise, and of those of Q beside them."""
    EmulatedCuda(monkeypatch, "sm_90a", seed=3).check(CASES[name])


def test_dequantised_tiles_of_many_work_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """One CTA has them all, some without queries or keys: rings of work items go round."""
    pairs = ((40, 40), (100, 100), (33, 103), (64, 264), (0, 5), (5, 0), (90, 100), (12, 12))
    case = of(Case(head_dim=64, group_size=4, num_kv_heads=1, kv_dtype=E4M3.kv_dtype), *pairs)
    EmulatedCuda(monkeypatch, "sm_90a", seed=3, num_sms=1).check(case)
