"""The kernel of ``preprocess_qkv`` on the CPU: its own source and its own launches, without a card.

Everything from the public arguments to the kernel's last store is the real thing but for the
driver, and for PTX, which tests/emulator/cuda_runtime.py says in C++.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import jitattn
from jitattn.device.driver import Launch
from jitattn.kernels.common import device_kernels, launch_cache
from jitattn.kernels.common.launch_cache import CallParams
from jitattn.kernels.preprocess import api
from jitattn.kernels.preprocess import launch as preprocess_launch
from jitattn.kernels.preprocess.spec import PreprocessSpec
from tests.emulator.preprocess import compiled
from tests.support.token_cases import TokenCase, compare, make_token_inputs
from tests.support.token_sets import KINDS

# Of calls that launch; others follow the definition.
LAUNCHES = api.LAUNCHES.anew()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[PreprocessSpec]]:
    """Run launches on the CPU; the specs that were launched."""
    specs: list[PreprocessSpec] = []

    def launch(card: int, launch: Launch) -> None:
        spec = launch.kernel.spec  # type: ignore[attr-defined]
        specs.append(spec)
        grid, num_threads, _ = launch.shape
        program = compiled(spec)
        assert program.params_size == ctypes.sizeof(launch.params)
        program.launch(spec.symbol, ctypes.addressof(launch.params), grid, num_threads)

    def kernel(spec: PreprocessSpec, *others: object) -> Any:
        return SimpleNamespace(symbol=spec.symbol, smem_bytes=0, spec=spec, begins_early=False)

    monkeypatch.setattr(device_kernels, "launch_on", launch)
    monkeypatch.setattr(device_kernels, "load", kernel)
    monkeypatch.setattr(preprocess_launch, "device_facts", lambda index: SimpleNamespace(num_sms=1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    LAUNCHES.clear()
    yield specs


def on_the_kernel(inputs: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have ``inputs.run`` launch."""

    def run() -> Tensor | None:
        with monkeypatch.context() as patch:
            patch.setattr(device_kernels, "card_of", lambda device: 0)
            patch.setattr(api, "LAUNCHES", LAUNCHES)
            return type(inputs).run(inputs)

    inputs.run = run
    return inputs


def check_on_the_cpu(case: TokenCase, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_token_inputs(case)
    compare(inputs, on_the_kernel(inputs.to("cpu"), monkeypatch))


# One of each kind of kernel: a template instance takes seconds to compile.
BASE = TokenCase()
CASES = {
    "bf16": BASE,
    "mrope": replace(BASE, mrope=True, positions="given", rotary_dim=96, seed=1),
    "e4m3": replace(BASE, kv_dtype="float8_e4m3fn", scales="heads", q_out="float8_e4m3fn"),
    "nvfp4": replace(BASE, kv_dtype="nvfp4", scales="heads", rotary_dim=64, use_norm=True),
    "plain": replace(BASE, qkv="strided", memory="odd", rotary_dim=20, head_dim=80),
    "interleaved": replace(
        *(BASE,), rotary="interleaved", rotary_dim=36, head_dim=48, use_bias=True, kv_dtype="int8"
    ),
    "separate": replace(
        BASE, page_table="separate", memory="interleaved", use_norm=True, rows=True
    ),
    "csr": replace(BASE, page_table="csr", kv_layout="HND", memory="HND", zero_tail=True),
    "token": replace(BASE, page_table="token", rows=True, wide_integers=True, positions="delta"),
    "slots": replace(BASE, page_table="slots", dtype="float16", kv_dtype="float8_e5m2"),
    "latent": replace(
        *(BASE,), is_append=True, head_dim=512, head_dim_vo=64, num_kv_heads=1, page_table="slots"
    ),
    "turned latent": replace(
        BASE,
        head_dim=64,
        head_dim_vo=512,
        num_kv_heads=1,
        qkv="tuple",
        rotary="interleaved",
        rotary_dim=64,
        kv_dtype="float8_e4m3fn",
        scales="number",
    ),
    "append nvfp4": replace(
        *(BASE,), is_append=True, kv_dtype="nvfp4", memory="odd", head_dim=48, zero_tail=True
    ),
    "int4": replace(BASE, kv_dtype="int4", scales="heads", rotary_dim=48, use_norm=True),
    "int4 of 32": replace(BASE, kv_dtype="int4_g32", head_dim=96, rotary_dim=80),
    "append int4": replace(
        *(BASE,), is_append=True, kv_dtype="int4", memory="odd", head_dim=48, zero_tail=True
    ),
    "append int4 of 64": replace(BASE, is_append=True, kv_dtype="int4_g64", page_table="slots"),
    **{name: KINDS[name] for name in KINDS if name.startswith("hadamard")},
    "other 16 bits": replace(BASE, dtype="float16", q_out="in place", rotary="none", page_size=3),
}


@pytest.mark.parametrize("name", CASES)
def test_kernel_follows_the_definition(
    name: str, launched: list[PreprocessSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    check_on_the_cpu(case, monkeypatch)
    assert len(launched) == 1
    # The same kernel serves these, too.
    for other in (
        replace(case, pairs=((1, 5), (1, 16), (1, 17), (1, 40)), extra_rows=0),
        replace(case, num_qo_heads=6, num_kv_heads=3, pairs=((33, 33), (0, 4), (15, 64))),
        # Tokens whose number is that of their request, and others between.
        replace(case, pairs=((0, 3), (1, 5), (1, 0), (2, 16), (1, 17), (0, 9), (1, 40), (1, 33))),
        replace(case, seed=case.seed + 2, wide_integers=not case.wide_integers),
    ):
        check_on_the_cpu(other, monkeypatch)
    assert len(set(launched)) == 1


def test_what_lies_alike_is_prepared_once(
    launched: list[PreprocessSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = []
    original = preprocess_launch.PreprocessLauncher.__init__

    def counted(self: object, *arguments: Any) -> None:
        prepared.append(arguments)
        original(self, *arguments)

    monkeypatch.setattr(preprocess_launch.PreprocessLauncher, "__init__", counted)
    for seed in range(4):
        check_on_the_cpu(replace(BASE, seed=seed), monkeypatch)
    assert len(prepared) == 1
    check_on_the_cpu(replace(BASE, num_kv_heads=1), monkeypatch)
    assert len(prepared) == 2
    for seed in range(4):
        check_on_the_cpu(replace(BASE, rows=seed % 2 == 0, seed=seed), monkeypatch)
    assert len(prepared) == 3


def test_fused_is_what_the_steps_are(
    launched: list[PreprocessSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """C52: rotary, then quantised, then appended, has the bytes of one call."""
    case = replace(BASE, kv_dtype="float8_e4m3fn", scales="heads", q_out="float8_e4m3fn")
    inputs = make_token_inputs(case)
    fused = on_the_kernel(inputs.to("cpu"), monkeypatch)
    q = fused.run()
    steps = make_token_inputs(replace(case, kv_dtype="bfloat16", q_out="given", scales="none"))
    first = on_the_kernel(steps.to("cpu"), monkeypatch)
    q_steps = first.run()
    assert q is not None
    assert q_steps is not None
    for name, side in (("k_scale", 0), ("v_scale", 1)):
        scale = fused.arguments[name]
        values = first.arguments["kv_cache"][side]
        live = (values.view(torch.int16) != -1).any(-1)
        want = jitattn.quant.quantize_kv(values, case.kv_dtype, scale=scale)
        found = fused.arguments["kv_cache"][side]
        assert torch.equal(found.view(torch.uint8)[live], want.view(torch.uint8)[live])
    want = jitattn.quant.quantize_kv(
        q_steps.contiguous(), q.dtype, scale=fused.arguments["q_scale"]
    )
    live = (q_steps.view(torch.int16) != -1).any(-1)
    assert torch.equal(q.view(torch.uint8)[live], want.view(torch.uint8)[live])


def outside(case: TokenCase, monkeypatch: pytest.MonkeyPatch, **others: object) -> list[bool]:
    """Which pools were written by a call with other arguments."""
    inputs = on_the_kernel(make_token_inputs(case).to("cpu"), monkeypatch)
    inputs.arguments |= others
    before = [pool.clone() for pool in inputs.pools]
    inputs.run()
    return [not torch.equal(a, b) for a, b in zip(before, inputs.pools, strict=True)]


def test_what_lies_outside_is_not_written(
    launched: list[PreprocessSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids beyond the cache, lengths beyond the table, slots beyond the cache: K and V are left."""
    case = replace(BASE, pairs=((1, 20),), extra_rows=0, rotary="none")
    for ids in ([[0, 10**6]], [[0, -1]], [[0]]):
        pages = jitattn.BlockTable(torch.tensor(ids, dtype=torch.int32))
        assert outside(case, monkeypatch, pages=pages) == [False, False]
    good = jitattn.BlockTable(torch.tensor([[-1, 0]], dtype=torch.int32))
    assert outside(case, monkeypatch, pages=good) == [True, True]
    for slot in (10**6, -1, 2**40):
        slots = torch.tensor([slot])
        assert outside(case, monkeypatch, pages=None, slots=slots) == [False, False]


def test_arguments_that_change_from_call_to_call(
    launched: list[PreprocessSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of scales are no part of what is remembered; addresses decide on the loader."""
    case = replace(BASE, is_append=True, kv_dtype="int8", scales="number")
    inputs = make_token_inputs(case)
    for scale in (0.125, 2.0, 0.125):
        other = on_the_kernel(inputs.to("cpu"), monkeypatch)
        inputs.arguments["v_scale"] = other.arguments["v_scale"] = scale
        compare(inputs, other)
    assert len(set(launched)) == 1
    with pytest.raises(ValueError, match="k_scale is 0"):
        outside(case, monkeypatch, k_scale=0.0)
    memory = torch.zeros(case.num_tokens * 256 + 8, dtype=torch.bfloat16)
    for begin, loader in ((0, "vector"), (1, "plain"), (8, "vector")):
        k = memory[begin : begin + case.num_tokens * 256].view(-1, 2, 128)
        assert outside(case, monkeypatch, k=k) == [True, True]
        assert launched[-1].loader == loader


def test_addresses_that_were_there_before_take_the_parameters_of_then(
    launched: list[PreprocessSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the step before, whatever came between."""
    written = []
    write = CallParams.write
    monkeypatch.setattr(
        CallParams, "write", lambda *arguments: written.append(1) or write(*arguments)
    )
    case = replace(BASE, kv_dtype="int8", scales="number", q_out="given")
    want = make_token_inputs(case)
    layers = [on_the_kernel(want.to("cpu"), monkeypatch) for _ in range(3)]
    for scale in (0.125, 2.0, 0.125, 2.0):
        for layer in layers:
            want.arguments["v_scale"] = layer.arguments["v_scale"] = scale
            compare(want, layer)
    assert len(written) == 6
    monkeypatch.setattr(launch_cache, "_MAX_IMAGES", 2)
    for layer in (*layers, *layers):
        layer.arguments["v_scale"] = 0.5
        layer.run()
    assert len(written) == 12


@pytest.mark.parametrize(("kv_dtype", "num_blocks"), [("int4", 1), ("int4_g32", 3)])
def test_what_is_written_is_what_is_gathered(
    kv_dtype: str,
    num_blocks: int,
    launched: list[PreprocessSpec],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever tokens hold, NaN and infinities too: what the definition stores, bit for bit."""
    rng = torch.Generator().manual_seed(0)
    odd = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e30, 1e-30, 60000.0])
    codes = torch.zeros(2, 4, 16, 2, 48, dtype=torch.uint8)
    scales = torch.zeros(2, 4, 16, 2, num_blocks, 2, dtype=torch.float16)
    cache = jitattn.QuantizedKV(*codes, *scales)
    pages = jitattn.BlockTable(torch.arange(4, dtype=torch.int32)[None])
    lens = torch.tensor([64], dtype=torch.int32)
    for i in range(30):
        size = 10.0 ** float(torch.randint(-6, 5, (), generator=rng))
        both = size * (torch.randn(2, 64, 2, 96, generator=rng) + i % 3)
        some = torch.rand(both.shape, generator=rng) < (0.0, 0.002, 0.05)[i % 3]
        both = torch.where(some, odd[torch.randint(8, both.shape, generator=rng)], both)
        k, v = both.bfloat16()
        with monkeypatch.context() as patch:
            patch.setattr(device_kernels, "card_of", lambda device: 0)
            patch.setattr(api, "LAUNCHES", LAUNCHES)
            jitattn.append_kv(k, v, cache, slots=torch.arange(64))
        found = jitattn.gather_kv(cache, pages, lens, out_dtype="float32")
        for numbers, got in zip((k, v), found[:2], strict=True):
            data, pairs = jitattn.quant.quantize_kv(numbers, kv_dtype)
            want = jitattn.quant.dequantize_kv(data, dtype=kv_dtype, block_scales=pairs)
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert len(launched) == 30


def test_what_equals_a_number_of_another_type_is_checked(
    launched: list[PreprocessSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(BASE, rotary="none")
    inputs = on_the_kernel(make_token_inputs(case).to("cpu"), monkeypatch)
    inputs.run()
    for name, value in (("num_kv_heads", float(case.num_kv_heads)), ("zero_tail", 0)):
        assert inputs.arguments.get(name, False) == value
        with pytest.raises(TypeError, match=name):
            outside(case, monkeypatch, **{name: value})
    assert len(launched) == 1


def test_jitattn_check_names_what_would_be_skipped(
    launched: list[PreprocessSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(BASE, pairs=((1, 20),), extra_rows=0, rotary="none")
    pages = jitattn.BlockTable(torch.tensor([[0, 10**6]], dtype=torch.int32))
    assert outside(case, monkeypatch, pages=pages) == [False, False]
    LAUNCHES.clear()
    monkeypatch.setenv("JITATTN_CHECK", "1")
    with pytest.raises(ValueError, match="JITATTN_CHECK: pages lists page 1000000 for K"):
        outside(case, monkeypatch, pages=pages)
    slots = {"pages": None, "slots": torch.tensor([-1])}
    assert outside(case, monkeypatch, **slots) == [False, False]
