"""What ``plan`` and ``run`` remember between calls never shows: parameters, checks and errors.

A call that follows others must hand the kernels what a first call would, bit for bit, and must be
refused where a first call would be.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import pickle
import random
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import jitattn
from jitattn.kernels.common import planner_base
from jitattn.kernels.common.cuda_plan import CudaPlan
from jitattn.kernels.common.kernel_launch import KernelLaunch
from jitattn.kernels.common.planner_base import plan_for_call
from jitattn.tensors import tensor_layouts
from jitattn.tensors.tensor_layouts import NO_LAYOUT, RowLayout
from tests.emulator import launch_recorder
from tests.emulator.launch_recorder import LaunchRecorder

B, HQ, HKV, D, PAGE, PAGES, WIDTH = 3, 8, 2, 32, 4, 6, 5
SHAPE = {"num_qo_heads": HQ, "num_kv_heads": HKV, "head_dim": D, "page_size": PAGE}
REFUSED = (TypeError, ValueError)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> LaunchRecorder:
    return launch_recorder.install(monkeypatch)


def queries(num_tokens: int = B, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(num_tokens, HQ, D, dtype=dtype)


def cache(num_pages: int = PAGES) -> Tensor:
    return torch.zeros(num_pages, 2, PAGE, HKV, D, dtype=torch.bfloat16)


def table(width: int = WIDTH, *, batch_size: int = B) -> jitattn.BlockTable:
    return jitattn.BlockTable(torch.zeros(batch_size, width, dtype=torch.int32))


LENS = torch.tensor([5, 9, 0], dtype=torch.int32)
OFFSETS = torch.tensor([0, 3, 4, 6], dtype=torch.int32)


# --- parameters -----------------------------------------------------------------------------------


def own(params: ctypes.Structure) -> dict[str, object]:
    """What kernels get, but for the addresses of the plan's own memory."""
    fields = {}
    for part in ("attention", "pages"):
        value = getattr(params, part)
        for name, _ in value._fields_:
            entry = getattr(value, name)
            fields[name] = bytes(entry) if isinstance(entry, ctypes.Structure) else entry
    for name in ("schedule", "partials", "partial_sums", "counters"):
        fields.pop(name)
    return fields


def strided(rng: random.Random, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Memory of one of a few layouts; the last dimension is contiguous, any address."""
    gaps = [rng.choice((0, 0, 1, 4, 8)) for _ in shape]
    offset = rng.choice((0, 0, 1, 2, 4, 8))
    strides, size = [0] * len(shape), 1
    for i in reversed(range(len(shape))):
        strides[i] = size
        size = size * shape[i] + gaps[i]
    return torch.zeros(size + offset, dtype=dtype)[offset:].as_strided(
        shape, strides, storage_offset=offset
    )


def bound_caches(planner: jitattn.AttentionPlanner, rng: random.Random) -> list[object]:
    caches: list[object] = [planner.bind(cache()) for _ in range(3)]
    pools = [tuple(strided(rng, PAGES, PAGE, HKV, D) for _ in "kv") for _ in range(3)]
    return [*caches, *map(planner.bind, pools), pools[0]]


CONFIGS: dict[str, dict[str, object]] = {
    "plain": {},
    "sinks": {"use_sinks": True},
    "mask": {"use_custom_mask": True},
    "other dims": {"head_dim_vo": 64, "out_dtype": "float32"},
    "separate": {"page_table": "separate"},
}


def masks(rng: random.Random, num_tokens: int) -> object:
    width = rng.choice((8, 16))
    if rng.random() < 0.3:
        return torch.zeros(99, dtype=torch.uint8), OFFSETS
    if rng.random() < 0.5:
        return torch.zeros(num_tokens, width // 8, dtype=torch.uint8)
    return torch.zeros(num_tokens, width, dtype=torch.bool)


def arguments(rng: random.Random, config: str, num_tokens: int) -> dict[str, object]:
    """Arguments of ``run`` besides q and kv, at random."""
    value_dim = 64 if config == "other dims" else D
    out_dtype = torch.float32 if config == "other dims" else torch.bfloat16
    given: dict[str, object] = {}
    if rng.random() < 0.6:
        given["out"] = strided(rng, num_tokens, HQ, value_dim, dtype=out_dtype)
    if rng.random() < 0.4:
        given["lse"] = strided(rng, num_tokens, HQ, dtype=torch.float32)
    given["return_lse"] = rng.random() < 0.3
    if config == "sinks":
        dtype = rng.choice((torch.float32, torch.bfloat16, torch.float64))
        given["sinks"] = torch.zeros(HQ * 2, dtype=dtype)[:: rng.choice((1, 2))][:HQ]
    if config == "mask":
        given["custom_mask"] = masks(rng, num_tokens)
    return given


def tables(config: str) -> list[jitattn.BlockTable]:
    shape = (9, 2, WIDTH + 3) if config == "separate" else (9, WIDTH + 3)
    wide = torch.zeros(shape, dtype=torch.int32)
    rows = torch.tensor([4, 0, 2])
    return [
        jitattn.BlockTable(wide[:B, ..., :WIDTH]),
        jitattn.BlockTable(wide[..., :WIDTH], rows=rows),
        jitattn.BlockTable(wide[3:6, ..., 1 : WIDTH + 1]),
        jitattn.BlockTable(wide[..., :WIDTH], rows=rows.int()),
    ]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("max_q_len", [None, 2, 40])
def test_a_call_after_others_gets_what_a_first_call_gets(
    cuda: LaunchRecorder, config: str, max_q_len: int | None
) -> None:
    rng = random.Random(f"{config} {max_q_len}")
    planner = cuda.planner(**SHAPE | CONFIGS[config])
    if config == "other dims":
        pools = [
            (strided(rng, PAGES, PAGE, HKV, D), strided(rng, PAGES, PAGE, HKV, 64))
            for _ in range(4)
        ]
        caches = [*map(planner.bind, pools), pools[0]]
    else:
        caches = bound_caches(planner, rng)
    pages = tables(config)
    offsets = None if max_q_len is None else OFFSETS
    plan = planner.plan(pages[0], LENS, offsets, max_q_len=max_q_len)
    for _ in range(60):
        num_tokens = B if offsets is None else rng.choice((6, 7))
        q = strided(rng, num_tokens, HQ, D)
        given = arguments(rng, config, num_tokens)
        others = rng.choice((None, None, *pages))
        kv = rng.choice(caches)
        del cuda.launches[:]
        result = plan.run(q, kv, pages=others, **given)
        again = list(cuda.launches)
        # What was allocated is given to the first call, so that it gets the same addresses.
        out, lse = result if isinstance(result, tuple) else (result, given.get("lse"))
        fresh = planner.plan(pages[0], LENS, offsets, max_q_len=max_q_len)
        del cuda.launches[:]
        fresh.run(q, kv, pages=others, **given | {"out": out, "lse": lse})
        assert len(again) == len(cuda.launches) == (2 if max_q_len == 40 else 1)
        for one, other in zip(again, cuda.launches, strict=True):
            assert own(one.params) == own(other.params)
            assert (one.symbol, one.grid, one.num_threads) == (
                other.symbol,
                other.grid,
                other.num_threads,
            )


def test_alignment_is_that_of_each_call(cuda: LaunchRecorder) -> None:
    planner = cuda.planner(**SHAPE)
    plan, kv = planner.plan(table(), LENS), planner.bind(cache())
    memory = torch.zeros(B * HQ * D + 8, dtype=torch.bfloat16)
    for offset in (1, 0, 8, 4, 0, 2):
        q = memory[offset:][: B * HQ * D].view(B, HQ, D)
        out = torch.zeros_like(memory)[offset:][: B * HQ * D].view(B, HQ, D)
        plan.run(q, kv, out=out)
        got = cuda.last().params.attention
        assert got.q_is_aligned == (offset % 8 == 0)
        assert got.out_is_aligned == (offset % 4 == 0)
        assert (got.q, got.out) == (q.data_ptr(), out.data_ptr())


def test_lse_and_sinks_of_each_call(cuda: LaunchRecorder) -> None:
    planner = cuda.planner(**SHAPE, use_sinks=True)
    plan, kv = planner.plan(table(), LENS), planner.bind(cache())
    lse = torch.zeros(HQ, B).t()
    for dtype, code in ((torch.float32, 2), (torch.bfloat16, 1), (torch.float64, 3)):
        sinks = torch.zeros(2 * HQ, dtype=dtype)[::2]
        plan.run(queries(), kv, lse=lse, sinks=sinks)
        got = cuda.last().params.attention
        assert (got.lse, got.lse_token_stride, got.lse_head_stride) == (lse.data_ptr(), 1, B)
        assert (got.sinks, got.sink_stride, got.sink_code) == (sinks.data_ptr(), 2, code)
        plan.run(queries(), kv, sinks=sinks)
        assert cuda.last().params.attention.lse is None


def test_outputs_are_new_and_dense(cuda: LaunchRecorder) -> None:
    planner = cuda.planner(**SHAPE)
    plan, kv = planner.plan(table(), LENS), planner.bind(cache())
    packed = torch.zeros(B, 3 * HQ, D, dtype=torch.bfloat16)[:, :HQ]
    outs = [plan.run(q, kv) for q in (queries(), queries(), packed, packed, queries())]
    assert len({out.data_ptr() for out in outs}) == len(outs)
    assert {(tuple(out.shape), out.stride(), out.dtype) for out in outs} == {
        ((B, HQ, D), (HQ * D, D, 1), torch.bfloat16)
    }


def test_a_slice_whose_strides_are_those_of_out_is_not_its_shape(cuda: LaunchRecorder) -> None:
    planner = cuda.planner(**SHAPE, head_dim_vo=64)
    pool = torch.zeros(PAGES, PAGE, HKV, 64, dtype=torch.bfloat16)
    plan, kv = planner.plan(table(), LENS), planner.bind((pool[..., :D], pool))
    q = torch.zeros(B, HQ, 64, dtype=torch.bfloat16)[..., :D]
    assert [plan.run(q, kv).shape[-1] for _ in range(3)] == [64] * 3


def test_a_cache_may_have_moved(cuda: LaunchRecorder) -> None:
    planner = cuda.planner(**SHAPE)
    pool = cache()
    plan, kv = planner.plan(table(), LENS), planner.bind(pool)
    plan.run(queries(), kv)
    size = pool.untyped_storage().nbytes()
    pool.untyped_storage().resize_(0)
    junk = torch.zeros(size, dtype=torch.uint8)
    pool.untyped_storage().resize_(size)
    plan.run(queries(), kv)
    assert cuda.last().params.attention.k == pool.data_ptr()
    del junk


# --- checks ---------------------------------------------------------------------------------------


def overlapping(tensor: Tensor) -> Tensor:
    return tensor.new_zeros(1).expand(tensor.shape)


def moved_by(arguments: dict[str, object], num_tokens: int) -> tuple[Tensor, dict[str, object]]:
    """A q and an out that lies behind it by so many tokens, or ahead."""
    wide = queries(B + 1)
    q, out = (wide[:-1], wide[1:]) if num_tokens > 0 else (wide[1:], wide[:-1])
    return q, arguments | {"out": out}


Change = Callable[[Tensor, dict[str, object]], tuple[Tensor, dict[str, object]]]

BAD: dict[str, tuple[Change, str]] = {
    "q of another dtype": (lambda q, a: (q.half(), a), "q has dtype"),
    "q on another device": (lambda q, a: (q.to("meta"), a), "q is on meta"),
    "q of strided elements": (
        lambda q, a: (q.transpose(1, 2).contiguous().transpose(1, 2), a),
        "q has strides",
    ),
    "q with more tokens": (lambda q, a: (queries(B + 1), a), "q has shape"),
    "q as rows": (lambda q, a: (q.flatten(1), a), "q has shape"),
    "no q": (lambda q, a: (None, a), "q is a NoneType"),
    "q_scale": (lambda q, a: (q, a | {"q_scale": 1.0}), "q_scale"),
    "out_scale": (lambda q, a: (q, a | {"out_scale": 1.0}), "out_scale"),
    "sinks": (lambda q, a: (q, a | {"sinks": torch.zeros(HQ)}), "sinks"),
    "custom_mask": (lambda q, a: (q, a | {"custom_mask": q}), "custom_mask"),
    "out is q": (lambda q, a: (q, a | {"out": q}), "out shares memory with q"),
    "out begins where q does": (
        lambda q, a: (q, a | {"out": q.view(B, HQ, D)}),
        "out shares memory with q",
    ),
    "out begins in q": (lambda q, a: moved_by(a, 1), "out shares memory with q"),
    "q begins in out": (lambda q, a: moved_by(a, -1), "out shares memory with q"),
    "out of another dtype": (lambda q, a: (q, a | {"out": a["out"].float()}), "out has dtype"),
    "out on another device": (lambda q, a: (q, a | {"out": a["out"].to("meta")}), "out is on"),
    "out with more tokens": (lambda q, a: (q, a | {"out": queries(B + 1)}), "out has shape"),
    "out over itself": (lambda q, a: (q, a | {"out": overlapping(q)}), "share memory"),
    "out of strided elements": (
        lambda q, a: (q, a | {"out": q.transpose(1, 2).contiguous().transpose(1, 2)}),
        "out has strides",
    ),
    "no tensor for out": (lambda q, a: (q, a | {"out": 1}), "out is a int"),
    "lse of another dtype": (lambda q, a: (q, a | {"lse": a["lse"].double()}), "lse has dtype"),
    "lse on another device": (lambda q, a: (q, a | {"lse": a["lse"].to("meta")}), "lse is on"),
    "lse with more heads": (lambda q, a: (q, a | {"lse": torch.zeros(B, HQ + 1)}), "lse has shape"),
    "lse over itself": (lambda q, a: (q, a | {"lse": overlapping(a["lse"])}), "share memory"),
    "another layout of pages": (
        lambda q, a: (
            q,
            a | {"pages": jitattn.BlockTable(torch.zeros(B, 2, WIDTH, dtype=torch.int32))},
        ),
        "page_table='shared'",
    ),
    "narrow pages": (lambda q, a: (q, a | {"pages": table(WIDTH - 1)}), "pages has"),
    "no pages": (lambda q, a: (q, a | {"pages": 1}), "pages is a int"),
}


@pytest.mark.parametrize("given", ["all", "out", "none"])
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_call_after_good_ones_is_refused(cuda: LaunchRecorder, bad: str, given: str) -> None:
    planner = cuda.planner(**SHAPE)
    plan, kv = planner.plan(table(), LENS), planner.bind(cache())
    possible = {"out": queries(), "lse": torch.zeros(B, HQ), "pages": table()}
    good = {name: value for name, value in possible.items() if given in ("all", name)}
    for _ in range(3):
        plan.run(queries(), kv, **good)
    num_launches = len(cuda.launches)
    change, message = BAD[bad]
    q, changed = change(queries(), dict(possible))
    arguments = {k: v for k, v in changed.items() if k in good or v is not possible.get(k)}
    for _ in range(2):
        with pytest.raises(REFUSED, match=message):
            plan.run(q, kv, **arguments)
        assert len(cuda.launches) == num_launches
        plan.run(queries(), kv, **good)
        plan.run(queries(), kv, **good)
        num_launches += 2
    assert len(cuda.launches) == num_launches


@pytest.mark.parametrize("page_table", ["shared", "ragged"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_plain_calls_in_turn(cuda: LaunchRecorder, page_table: str, kv_dtype: str) -> None:
    """Caches of several kinds, q and out that lie anywhere, and other calls in between."""
    rng = random.Random(f"{page_table} {kv_dtype}")
    is_ragged = page_table == "ragged"
    planner = cuda.planner(
        **SHAPE | {"page_table": page_table, "page_size": None if is_ragged else PAGE},
        kv_dtype=kv_dtype,
    )
    dtype = getattr(torch, kv_dtype)
    pages = jitattn.RaggedKV(OFFSETS[[0, 1, 3, 3]]) if is_ragged else table()
    shapes = [(n, HKV, D) if is_ragged else (PAGES, PAGE, HKV, D) for n in (14, 14, 14, 20, 20, 17)]
    caches = [
        planner.bind(
            tuple(torch.zeros(shape, dtype=dtype) for _ in "kv"),
            k_scale=None if dtype is torch.bfloat16 else 1.0 + i,
        )
        for i, shape in enumerate(shapes)
    ]
    plan = planner.plan(pages, LENS)
    outs = [queries() for _ in range(3)]
    for i in range(200):
        q = strided(rng, B, HQ, D) if rng.random() < 0.1 else queries()
        out = strided(rng, B, HQ, D) if rng.random() < 0.1 else rng.choice(outs)
        kv = caches[i % 6] if rng.random() < 0.9 else rng.choice(caches)
        given = rng.choice(({"out": out}, {"out": out}, {}))
        cuda.stream, cuda.device = rng.choice(((0, 0), (0, 0), (0, 0), (0, 1)))
        if rng.random() < 0.1:
            given |= {"lse": torch.zeros(B, HQ)}
        del cuda.launches[:]
        out = plan.run(q, kv, **given)
        assert out is given.get("out", out)
        assert (out.shape, out.is_contiguous() or "out" in given) == ((B, HQ, D), True)
        fresh = planner.plan(pages, LENS)
        fresh.run(q, kv, **given | {"out": out})
        run, _, again = cuda.launches
        assert own(run.params) == own(again.params)
        assert (run.stream, run.devices) == (again.stream, again.devices)


@pytest.mark.parametrize("has_guards", [True, False])
def test_a_recogniser_knows_what_lies_alike(
    monkeypatch: pytest.MonkeyPatch, has_guards: bool
) -> None:
    if not has_guards:
        monkeypatch.setattr(tensor_layouts, "_TensorGuards", None)
    q, out = queries(), torch.zeros(B, HQ, 2 * D)[..., :D]
    lie_alike = tensor_layouts.recogniser((q, out))
    assert lie_alike(queries(), torch.ones(B, HQ, 2 * D)[..., D:])
    others = (
        q[:2],
        q.half(),
        q.to("meta"),
        torch.nn.Parameter(q),
        torch.zeros(B, HQ + 1, D, dtype=torch.bfloat16)[:, :HQ],
        q.unsqueeze(0),
        q.to_sparse(),
        None,
        7,
    )
    assert not any(lie_alike(other, out) for other in others)
    assert not any(lie_alike(q, other) for other in (out.contiguous(), out.double(), q, None))


def test_q_and_out_may_be_columns_of_one_tensor(cuda: LaunchRecorder) -> None:
    planner = cuda.planner(**SHAPE)
    plan, kv = planner.plan(table(), LENS), planner.bind(cache())
    for _ in range(4):
        wide = torch.zeros(B, 2 * HQ, D, dtype=torch.bfloat16)
        for q, out in ((wide[:, :HQ], wide[:, HQ:]), (wide[:, HQ:], wide[:, :HQ])):
            assert plan.run(q, kv, out=out) is out
        with pytest.raises(ValueError, match="out shares memory with q"):
            plan.run(wide[:, :HQ], kv, out=wide[:, 1 : HQ + 1])
    assert len(cuda.launches) == 1 + 8


def test_outputs_must_fit_the_q_of_their_call(cuda: LaunchRecorder) -> None:
    planner = cuda.planner(**SHAPE)
    plan = planner.plan(table(), LENS, OFFSETS, max_q_len=3)
    kv = planner.bind(cache())
    for num_tokens, other in ((6, 7), (7, 6)):
        lse = torch.zeros(num_tokens, HQ)
        plan.run(queries(num_tokens), kv, out=queries(num_tokens), lse=lse)
        with pytest.raises(ValueError, match="out has shape"):
            plan.run(queries(other), kv, out=queries(num_tokens))
        with pytest.raises(ValueError, match="lse has shape"):
            plan.run(queries(other), kv, lse=lse)
        assert plan.run(queries(other), kv).shape[0] == other
        assert plan.run(queries(other), kv, return_lse=True)[1].shape[0] == other


def test_a_cache_is_bound_once_as_long_as_it_lives(cuda: LaunchRecorder) -> None:
    planner = cuda.planner(**SHAPE)
    bound: list[object] = []
    bind = planner.bind

    def count(given: object, **scales: object) -> object:
        bound.append(given)
        return bind(given, **scales)  # type: ignore[arg-type]

    planner.bind = count  # type: ignore[assignment]
    plan, q = planner.plan(table(), LENS), queries()
    caches: list[Tensor | tuple[Tensor, Tensor]] = [
        cache(),
        cache(),
        (cache()[:, 0], cache()[:, 1]),
    ]
    for _ in range(3):
        for given in caches:
            plan.run(q, given)
            first = given if isinstance(given, Tensor) else given[0]
            assert cuda.last().params.attention.k == first.data_ptr()
    assert len(bound) == 3
    # Other memory of the same tensor, and what only lies there.
    caches[0].data = cache()  # type: ignore[union-attr]
    plan.run(q, caches[0])
    assert cuda.last().params.attention.k == caches[0].data_ptr()  # type: ignore[union-attr]
    plan.run(q, caches[1][:3])  # type: ignore[arg-type]
    assert len(bound) == 5
    # Nothing keeps memory alive that its owner dropped.
    gone = weakref.ref(caches[0].untyped_storage())  # type: ignore[union-attr]
    del bound[:], caches[0], given, first
    gc.collect()
    assert gone() is None
    assert len(planner.bound_tensors._known) == 2


def test_a_cache_of_another_planner(cuda: LaunchRecorder) -> None:
    planner, twin = cuda.planner(**SHAPE), cuda.planner(**SHAPE)
    other = cuda.planner(**SHAPE, window_left=3)
    reference = jitattn.AttentionPlanner(**SHAPE, device="cpu")
    elsewhere = planner.bind(cache())
    elsewhere.device = torch.device("meta")
    plan = planner.plan(table(), LENS)
    plan.run(queries(), planner.bind(cache()))
    plan.run(queries(), twin.bind(cache()))
    num_launches = len(cuda.launches)
    for kv, message in (
        (other.bind(cache()), "another configuration"),
        (reference.bind(cache()), "reference backend"),
        (elsewhere, "kv is on meta"),
        (cache()[0], "kv_cache has shape"),
        (None, "kv_cache is a NoneType"),
    ):
        with pytest.raises(REFUSED, match=message):
            plan.run(queries(), kv)
    assert len(cuda.launches) == num_launches


def test_a_subclass_of_tensor_is_checked_every_time(cuda: LaunchRecorder) -> None:
    planner = cuda.planner(**SHAPE)
    plan, kv = planner.plan(table(), LENS), planner.bind(cache())
    for _ in range(2):
        plan.run(torch.nn.Parameter(queries(), requires_grad=False), kv)
        with pytest.raises(TypeError, match="q has dtype"):
            plan.run(torch.nn.Parameter(queries().half(), requires_grad=False), kv)


def test_the_check_of_ids_sees_every_call(
    cuda: LaunchRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITATTN_CHECK", "1")
    planner = cuda.planner(**SHAPE)
    pages = table()
    plan, kv = planner.plan(pages, LENS), planner.bind(cache())
    plan.run(queries(), kv)
    num_launches = len(cuda.launches)
    pages.table[1, 2] = PAGES
    with pytest.raises(ValueError, match="request 1 has the entry 6"):
        plan.run(queries(), kv)
    assert len(cuda.launches) == num_launches


def test_a_layout_fits_what_lies_alike() -> None:
    tensor = torch.zeros(4, 8, 16, dtype=torch.bfloat16)
    layout = RowLayout(tensor, vector=8)
    assert layout.fits(torch.ones_like(tensor))
    others = (
        tensor[:3],
        tensor.half(),
        tensor.to("meta"),
        torch.nn.Parameter(tensor),
        torch.zeros(4, 9, 16, dtype=torch.bfloat16)[:, :8],
        tensor.unsqueeze(0),
        None,
        7,
    )
    assert not any(layout.fits(other) for other in others)
    assert not any(NO_LAYOUT.fits(other) for other in (*others, torch.zeros(())))
    assert (layout.is_aligned(32), layout.is_aligned(8)) == (True, False)
    odd = RowLayout(torch.zeros(4, 8, 17, dtype=torch.bfloat16)[..., :16], vector=8)
    assert not odd.is_aligned(32)


# --- plans, streams, devices ----------------------------------------------------------------------


def test_plans_say_what_they_were_given(cuda: LaunchRecorder) -> None:
    """Whatever the plans before them said, whose parameters they write over."""
    planner = cuda.planner(**SHAPE)
    lens = {dtype: torch.zeros(2 * B, dtype=dtype)[::2] for dtype in (torch.int32, torch.int64)}
    for i in range(8):
        seq_lens = lens[torch.int64 if i % 2 else torch.int32]
        offsets = OFFSETS if i % 3 else None
        max_q_len = 3 if i % 3 else None
        planner.plan(table(), seq_lens, offsets, max_q_len=max_q_len, max_kv_len=10 + i)
        got = cuda.last().params
        assert (got.seq_lens, got.seq_lens_stride) == (seq_lens.data_ptr(), 2)
        assert (got.batch_size, got.max_kv_len) == (B, 10 + i)
        assert got.seq_lens_are_int64 == i % 2
        assert got.max_q_len == (3 if i % 3 else 1)
        assert got.qo_indptr == (OFFSETS.data_ptr() if i % 3 else None)


def test_plans_that_live_share_nothing(cuda: LaunchRecorder) -> None:
    planner = cuda.planner(**SHAPE)
    kv = planner.bind(cache())
    kept = [planner.plan(table(), LENS) for _ in range(3)]
    for _ in range(5):
        planner.plan(table(), LENS)
    gc.collect()
    plans = [*kept, *(planner.plan(table(), LENS) for _ in range(3))]
    schedules = set()
    for plan in plans:
        plan.refresh()
        scheduled = bytes(cuda.last().params.schedule)
        plan.run(queries(), kv)
        assert bytes(cuda.last().params.attention.schedule) == scheduled
        schedules.add(scheduled)
    assert len(schedules) == len({id(p.backend.launches[0]) for p in plans}) == len(plans)


def memory_of(plan: jitattn.types.Plan) -> tuple[Tensor, ...]:
    return tuple(part.memory for part in plan.backend.launches)


def test_memory_goes_from_plan_to_plan_in_the_order_of_one_stream(
    cuda: LaunchRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: cuda.stream)
    monkeypatch.setattr(KernelLaunch, "record_stream", lambda part, stream: recorded.append(stream))
    planner = cuda.planner(**SHAPE)
    kept = planner.plan(table(), LENS)
    (first,) = memory_of(plan := planner.plan(table(), LENS))
    assert first is not memory_of(kept)[0]
    plan.run(queries(), planner.bind(cache()))
    del plan
    (second,) = memory_of(plan := planner.plan(table(batch_size=2), LENS[:2]))
    assert second is first
    cuda.stream = 7
    assert memory_of(planner.plan(table(), LENS))[0] is not first
    plan.refresh()  # from now on stream 7 uses it, too
    assert recorded == [7]
    del plan
    for cuda.stream in (7, 0):
        assert memory_of(planner.plan(table(), LENS))[0] is not first


def test_memory_of_a_workspace_that_has_grown_is_dropped(cuda: LaunchRecorder) -> None:
    planner = cuda.planner(**SHAPE)
    plan = planner.plan(table(), LENS)
    (first,) = memory_of(plan)
    del plan
    cuda.workspaces[0].reserve(10**7, 10)
    assert memory_of(planner.plan(table(), LENS))[0] is not first


def test_a_planner_that_is_gone_leaves_no_memory(cuda: LaunchRecorder) -> None:
    planner = cuda.planner(**SHAPE)
    plan, kv, out = planner.plan(table(), LENS), planner.bind(cache()), queries()
    for _ in range(3):
        plan.run(queries(), kv, out=out)
    memory = weakref.ref(memory_of(plan)[0])
    gc.disable()
    try:
        del plan, kv
        assert memory() is not None
        del planner
        assert memory() is None
    finally:
        gc.enable()


def test_threads_plan_and_run_at_once(cuda: LaunchRecorder) -> None:
    planner = cuda.planner(**SHAPE)
    barrier = threading.Barrier(8)
    wrong: list[object] = []

    def work() -> None:
        kv = planner.bind(cache())
        barrier.wait()
        for _ in range(100):
            plan, q = planner.plan(table(), LENS), queries()
            plan.run(q, kv)
            params = plan.backend.launches[0].params.attention
            if (params.q, params.k) != (q.data_ptr(), kv.k.tensor.data_ptr()):
                wrong.append(params)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(cuda.launches) == 8 * 100 * 2


def test_every_table_and_cache_of_ragged_batches(cuda: LaunchRecorder) -> None:
    planner = cuda.planner(**SHAPE | {"page_size": None, "page_table": "ragged"})
    pages = jitattn.RaggedKV(torch.tensor([0, 5, 14, 14], dtype=torch.int32))
    plan = planner.plan(pages, LENS)
    assert cuda.last().params.kv_indptr == pages.kv_indptr.data_ptr()
    assert (cuda.last().params.num_entries, cuda.last().params.entry_tokens) == (2**31 - 1, 1)
    for num_tokens in (14, 20, 17):
        pair = tuple(torch.zeros(num_tokens, HKV, D, dtype=torch.bfloat16) for _ in "kv")
        plan.run(queries(), planner.bind(pair))
        assert cuda.last().params.pages.num_entries == num_tokens


def test_csr_plans_know_their_pages(cuda: LaunchRecorder) -> None:
    planner = cuda.planner(**SHAPE, page_table="csr")
    offsets = torch.tensor([0, 2, 5, 5], dtype=torch.int32)
    for num_pages in (5, 9):
        pages = jitattn.CsrPages(offsets, torch.zeros(num_pages, dtype=torch.int32))
        planner.plan(pages, LENS)
        got = cuda.last().params
        assert (got.num_entries, got.entry_tokens) == (num_pages, PAGE)


def test_launches_follow_the_current_stream_and_device(
    cuda: LaunchRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent: list[int] = []
    monkeypatch.setattr(CudaPlan, "_lend_memory", lambda plan, stream: lent.append(stream))
    planner = cuda.planner(**SHAPE)
    plan, kv = planner.plan(table(), LENS), planner.bind(cache())
    for stream, device in ((0, 0), (7, 0), (7, 1), (0, 1), (8, 0)):
        cuda.stream, cuda.device = stream, device
        for call in (plan.refresh, lambda: plan.run(queries(), kv)):
            call()
            assert cuda.last().stream == stream
            assert cuda.last().devices == (() if device == 0 else (0,))
    assert lent == [7] * 4 + [8] * 2
    cuda.is_capturing = True
    with pytest.raises(ValueError, match="inside a capture"):
        planner.plan(table(), LENS)


def test_an_empty_batch_launches_nothing(cuda: LaunchRecorder) -> None:
    planner = cuda.planner(**SHAPE)
    plan = planner.plan(table(batch_size=0), LENS[:0])
    out, lse = plan.run(queries(0), planner.bind(cache()), return_lse=True)
    assert (out.shape, lse.shape) == ((0, HQ, D), (0, HQ))
    assert cuda.launches == []


def test_memory_of_a_captured_plan_is_not_used_again(cuda: LaunchRecorder) -> None:
    """On its own stream too: a graph that outlives the plan replays with it."""
    planner = cuda.planner()
    pages, lengths = jitattn.BlockTable(torch.zeros(2, 4, dtype=torch.int32)), torch.tensor([5, 9])
    q = torch.zeros(2, 32, 128, dtype=torch.bfloat16)
    kv = planner.bind(torch.zeros(4, 2, 16, 8, 128, dtype=torch.bfloat16))
    for captured in ("refresh", "run", "again"):
        plan = planner.plan(pages, lengths.int())
        backend = plan.backend
        if captured == "again":
            plan.run(q, kv)
            plan.run(q, kv)
        cuda.is_capturing = True
        if captured == "refresh":
            plan.refresh()
        else:
            plan.run(q, kv)
        cuda.is_capturing = False
        del plan
        assert planner.plan(pages, lengths.int()).backend is not backend


# --- plans of a call ------------------------------------------------------------------------------


@pytest.mark.parametrize("max_q_len", [1, 3, 100])
def test_a_plan_for_a_call_may_be_captured(cuda: LaunchRecorder, max_q_len: int) -> None:
    """Its memory is of the graph: nothing that others use, cleared by each replay."""
    planner = cuda.planner(**SHAPE)
    kv, q = planner.bind(cache()), queries(6)
    given = (None, None) if max_q_len == 1 else (OFFSETS, max_q_len)
    q = q if max_q_len > 1 else queries()
    offsets, most = given

    def call() -> KernelLaunch:
        plan = plan_for_call(planner, table(), LENS, offsets, max_q_len=most)
        plan.run(q, kv)
        assert isinstance(plan.backend, CudaPlan)
        assert not plan.backend.is_empty
        return plan.backend.launches[0]

    eager = call()
    num_launches = len(cuda.launches)
    (workspace,) = cuda.workspaces.values()
    partials, counters = workspace.partials, workspace.counters
    cuda.is_capturing, cuda.stream = True, 7
    captured = [call(), call()]
    cuda.is_capturing = False
    assert [*cuda.workspaces] == [0]
    assert (workspace.partials is partials, workspace.counters is counters) == (True, True)
    for part in captured:
        assert part.memory.data_ptr() != eager.memory.data_ptr()
        assert part.buffers[1].count_nonzero() == 0
        for mine, theirs in zip(part.buffers, (partials, counters), strict=True):
            assert mine.numel() == theirs.numel()
            assert mine.data_ptr() != theirs.data_ptr()
    launches = cuda.launches[num_launches:]
    assert len(launches) == 2 * num_launches
    assert {launch.stream for launch in launches} == {7}
    symbols = [launch.symbol for launch in launches]
    assert symbols[:num_launches] == [launch.symbol for launch in cuda.launches[:num_launches]]
    cuda.stream = 0
    plan = planner.plan(table(), LENS, offsets, max_q_len=most)
    assert plan.backend.launches[0].buffers[0] is partials  # type: ignore[attr-defined]


def test_latent_plans_for_a_call_may_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    class Kernels:
        def plan_for_call(self, workspace: object, batch: object) -> CudaPlan:
            made.append(batch)
            return CudaPlan.__new__(CudaPlan)

    planner = jitattn.MLAPlanner(num_heads=16, page_size=4, sm_scale=0.1, device="cpu")
    monkeypatch.setattr(CudaPlan, "give_back", lambda plan: None)
    planner.kernels = Kernels()  # type: ignore[assignment]
    plan = plan_for_call(planner, table(), LENS)
    assert plan.batch is made[0]


def test_a_capture_loads_no_kernel(cuda: LaunchRecorder) -> None:
    planner = cuda.planner(**SHAPE)
    odd = torch.zeros(B * 2 * PAGE * HKV * D + 1, dtype=torch.bfloat16)[1:].view(B, 2, PAGE, HKV, D)
    cuda.is_capturing = True
    for call in (
        lambda: plan_for_call(planner, table(), LENS, OFFSETS, max_q_len=100),
        lambda: planner.bind(odd),
        lambda: cuda.planner(**SHAPE),
    ):
        with pytest.raises(ValueError, match="a capture can't load it: make such a call before"):
            call()
    cuda.is_capturing = False
    planner.bind(odd)
    planner.plan(table(), LENS, OFFSETS, max_q_len=100)
    cuda.is_capturing = True
    planner.bind(odd)
    plan_for_call(planner, table(), LENS, OFFSETS, max_q_len=100)


def test_captured_calls_are_not_looked_at(
    cuda: LaunchRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JITATTN_CHECK would wait for the device."""
    monkeypatch.setenv("JITATTN_CHECK", "1")
    monkeypatch.setattr(planner_base, "is_capturing", lambda device: cuda.is_capturing)
    planner = cuda.planner(**SHAPE)
    kv, long = planner.bind(cache()), torch.tensor([5, 9, 10**6], dtype=torch.int32)
    with pytest.raises(ValueError, match="seq_lens"):
        plan_for_call(planner, table(), long)
    cuda.is_capturing = True
    plan_for_call(planner, table(), long).run(queries(), kv)


def test_plans_are_not_copied(cuda: LaunchRecorder) -> None:
    """A copy would give the memory back that the other one uses."""
    planner = cuda.planner()
    plan = planner.plan(
        jitattn.BlockTable(torch.zeros(1, 4, dtype=torch.int32)), torch.ones(1, dtype=torch.int32)
    )
    for copy_of in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="copied"):
            copy_of(plan)


def test_a_planner_of_float32_binds_caches_of_its_own() -> None:
    planner = jitattn.AttentionPlanner(**SHAPE, device="cpu")  # type: ignore[arg-type]
    exact, q, given = planner.exact(), queries(), cache()
    for own, dtype in (
        (planner, torch.bfloat16),
        (exact, torch.float32),
        (planner, torch.bfloat16),
    ):
        assert own.plan(table(), LENS).run(q, given).dtype is dtype  # type: ignore[union-attr]
