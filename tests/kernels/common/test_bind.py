"""A cache that is bound after others is what a first one would be: views, kernels, maps, errors.

Planners remember what they found of caches by how these lie. Here each cache of a long random row
is bound by a planner that has seen many, and by one that has seen none.
"""

from __future__ import annotations

import functools
import gc
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import jitattn
from jitattn.kernels.attention import api
from jitattn.kernels.common import tma
from jitattn.kernels.mla.kernels import MLAKernels
from jitattn.tensors import tensor_layouts
from tests.emulator import launch_recorder
from tests.emulator.launch_recorder import CPU, LaunchRecorder

PAGES, PAGE, HEADS, DIM, RANK, ROPE = 3, 8, 2, 64, 512, 64
ROLES = "decode", "prefill"
ATTENTION: dict[str, dict[str, object]] = {
    "NHD": {},
    "HND": {"kv_layout": "HND"},
    "FP8": {"kv_dtype": "float8_e4m3fn"},
    "NVFP4": {"kv_dtype": "nvfp4"},
    "int4": {"kv_dtype": "int4_g32"},
    "separate": {"page_table": "separate"},
    "ragged": {"page_table": "ragged", "page_size": None},
    "lists": {"page_table": "indices"},
}
LATENT: dict[str, dict[str, object]] = {
    "latents": {},
    "FP8 latents": {"kv_dtype": "float8_e4m3fn"},
    "ragged latents": {"page_table": "ragged", "page_size": None},
    "lists of latents": {"page_table": "indices"},
}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> LaunchRecorder:
    return launch_recorder.install(monkeypatch)


def planner_of(cuda: LaunchRecorder, name: str) -> Any:
    if name in ATTENTION:
        shape = {"num_qo_heads": 4, "num_kv_heads": HEADS, "head_dim": DIM, "page_size": PAGE}
        return cuda.planner(**shape | ATTENTION[name])
    shape = {"num_heads": 4, "kv_lora_rank": RANK, "qk_rope_head_dim": ROPE, "page_size": PAGE}
    planner = jitattn.MLAPlanner(**shape | LATENT[name], sm_scale=1.0, device="cpu")
    planner.kernels = MLAKernels(planner.config, torch.device("cuda", 0))
    planner.kernels.device, planner.backend = CPU, "cuda"
    return planner


def memory(
    rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype, *, is_odd: bool
) -> Tensor:
    """A tensor of one of a few layouts and addresses; an odd one is likely to be refused."""
    sizes = list(shape)
    if is_odd and rng.random() < 0.5:
        sizes[rng.randrange(len(sizes))] += rng.choice((1, 2, 16))
    order = list(range(len(sizes) - 1))
    if rng.random() < 0.3:
        rng.shuffle(order)
    strides, size = [1] * len(sizes), sizes[-1]
    for dim in reversed(order):
        strides[dim] = size
        size = size * max(sizes[dim], 1) + rng.choice((0, 0, 0, 4, 16))
    offset = rng.choice((0, 0, 0, 4, 8, 16, 1))
    if is_odd and rng.random() < 0.2:
        dtype = torch.float32
    found = torch.zeros(size + offset, dtype=dtype).as_strided(sizes, strides, offset)
    return rng.choice(KINDS)(found) if is_odd and rng.random() < 0.3 else found


class Own(Tensor):
    """A class of somebody else's."""


KINDS: list[Callable[[Tensor], Any]] = [
    lambda x: x.as_subclass(Own),
    lambda x: x.to("meta"),
    lambda x: x._neg_view() if x.is_floating_point() and x.itemsize > 1 else x,
    lambda x: x.to_sparse() if x.itemsize > 1 else x,
    lambda x: x.detach().requires_grad_() if x.is_floating_point() and x.itemsize > 1 else x,
    lambda x: x[..., ::2],
    lambda x: x.flatten(0, 1),
    lambda x: None,
]


def cache_for(rng: random.Random, name: str) -> Any:
    """A cache that a planner of this name takes, more often than not."""
    options = ATTENTION.get(name, LATENT.get(name, {}))
    is_ragged = options.get("page_table") == "ragged"
    kv_dtype = str(options.get("kv_dtype", "bfloat16"))
    has_blocks = kv_dtype in ("nvfp4", "int4_g32")
    stored = [torch.uint8] if has_blocks else [getattr(torch, kv_dtype)]
    if kv_dtype.startswith("float8"):
        stored.append(torch.uint8)
    make = functools.partial(memory, rng, is_odd=rng.random() < 0.3)
    num_pages = rng.choice((PAGES, PAGES, PAGES, 1, 0))
    if name in LATENT:
        rows = (num_pages,) if is_ragged else (num_pages, PAGE)
        width = rng.choice((RANK + ROPE, RANK + ROPE, RANK + RANK // 32 + 2 * ROPE))
        if rng.random() < 0.5:
            return make((*rows, width), rng.choice(stored))
        rope = torch.bfloat16 if rng.random() < 0.3 else stored[0]
        return pair(rng, make((*rows, RANK), stored[0]), make((*rows, ROPE), rope))
    inner = (HEADS, PAGE) if name == "HND" else (PAGE, HEADS)
    rows = (num_pages, HEADS) if is_ragged else (num_pages, *inner)
    if has_blocks:
        data = [make((*rows, DIM // 2), torch.uint8) for _ in "kv"]
        kind = (DIM // 16,), torch.uint8
        if kv_dtype != "nvfp4":
            kind = (DIM // 32, 2), torch.float16
        blocks = [make((*rows, *kind[0]), kind[1]) for _ in "kv"]
        try:
            return jitattn.QuantizedKV(*data, *blocks)
        except (TypeError, ValueError, AttributeError, RuntimeError):
            return (*data, *blocks)
    if rng.random() < 0.6 and not is_ragged:
        return make((num_pages, 2, *inner, DIM), rng.choice(stored))
    return pair(rng, *(make((*rows, DIM), rng.choice(stored)) for _ in "kv"))


def pair(rng: random.Random, first: Any, second: Any) -> Any:
    return rng.choice([(first, second)] * 12 + [[first, second], (first,), (first, second, first)])


def scales_for(rng: random.Random, planner: Any) -> dict[str, object]:
    if planner.config.kv_dtype == "bfloat16" and rng.random() < 0.95:
        return {}
    names = ("k_scale", "v_scale") if hasattr(planner.config, "num_kv_heads") else ("k_scale",)
    scales = [None, 0.5, torch.ones(1)] * 5 + [torch.ones(HEADS), torch.ones(9), "two"]
    return {name: rng.choice(scales) for name in names}


def told(planner: Any, cache: Any, scales: dict[str, object]) -> object:
    """All that a bound cache says, or the error."""
    try:
        bound = planner.bind(cache, **scales)
    except (TypeError, ValueError, RuntimeError) as error:
        return type(error), str(error)
    k, v = bound.k_at(), bound.v_at()
    blocks = getattr(bound, "block_scales", None) or ()
    views = [bound.k, bound.v, *blocks, getattr(bound, "latent_scales", None)]
    maps = bound.tensor_maps
    return (
        [
            (x.tensor.data_ptr(), x.tensor.shape, x.tensor.stride(), x.tensor.dtype, x[1:])
            for x in views
            if x is not None
        ],
        [None if maps is None else maps.at(role, k, v) for role in ROLES],
        [type(tensor) for tensor in bound.source],
        [id(tensor) for tensor in bound.source],
        bound.kernels.decode.pending.spec.symbol,
        bound.strides,
        (k, v),
        bound.k_scale,
        bound.v_scale,
        bound.pools,
    )


@pytest.mark.parametrize("has_guards", [True, False])
@pytest.mark.parametrize("name", [*ATTENTION, *LATENT])
def test_a_cache_after_others_is_bound_like_a_first_one(
    cuda: LaunchRecorder, monkeypatch: pytest.MonkeyPatch, name: str, has_guards: bool
) -> None:
    if not has_guards:
        monkeypatch.setattr(tensor_layouts, "_TensorGuards", None)
    rng, planner = random.Random(name), planner_of(cuda, name)
    kept, outcomes = [], {True: 0, False: 0}
    for _ in range(250):
        # One in two lies where others did, or is another view of the same memory.
        cache = rng.choice(kept) if kept and rng.random() < 0.5 else cache_for(rng, name)
        kept = [*kept[-20:], cache]
        scales = scales_for(rng, planner)
        found = told(planner, cache, scales)
        planner_of_none = planner_of(cuda, name)
        assert found == told(planner_of_none, cache, scales)
        outcomes[len(found) > 2] += 1  # type: ignore[arg-type]
    assert min(outcomes.values()) > 20, outcomes


def plain(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", ["NHD", "latents"])
def test_layers_that_lie_alike_are_encoded_once(
    cuda: LaunchRecorder, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    counts = {"encode_tensor_map": 0, "move_tensor_map": 0}

    def counted(function: str, *given: object, **named: object) -> bytes | None:
        counts[function] += 1
        return getattr(launch_recorder, function)(*given, **named)  # type: ignore[no-any-return]

    for function in counts:
        monkeypatch.setattr(tma, function, functools.partial(counted, function))
    planner = planner_of(cuda, name)
    shape = (PAGES, 2, PAGE, HEADS, DIM) if name == "NHD" else (PAGES, PAGE, RANK + ROPE)
    bound = [planner.bind(plain(*shape)) for _ in range(9)]
    if bound[0].tensor_maps is None:
        assert not any(counts.values())
    else:
        assert counts == {"encode_tensor_map": 2, "move_tensor_map": 2 * 8}
    if name == "NHD":
        assert len({id(kv.layout_key) for kv in bound}) == 1, "runs over them are replayed"


def test_alignment_is_that_of_each_cache(cuda: LaunchRecorder) -> None:
    """Of the same shapes and strides, a base that is odd has the plain kernel, and back again."""
    planner = planner_of(cuda, "NHD")
    size = PAGES * 2 * PAGE * HEADS * DIM
    rows = torch.zeros(size + 16, dtype=torch.bfloat16)
    for offset in (0, 1, 8, 3, 0, 16, 4, 1):
        cache = rows[offset : offset + size].view(PAGES, 2, PAGE, HEADS, DIM)
        bound = planner.bind(cache)
        is_aligned = offset % 8 == 0
        assert bound.k_at() == cache.data_ptr()
        assert (bound.tensor_maps is not None) == is_aligned
        assert bound.kernels.decode.pending.spec.symbol.endswith("plain") != is_aligned


def test_tensors_that_are_the_same_lie_alike(
    cuda: LaunchRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K and V of one pool, whose pages are interleaved, and one scale for both."""
    planner, names = planner_of(cuda, "FP8"), ("k_scale", "v_scale")
    shape, dtype = (PAGES, PAGE, HEADS, DIM), torch.float8_e4m3fn
    caches = [torch.zeros(shape).to(dtype) for _ in range(4)]
    scales = [torch.ones(1), torch.ones(HEADS)]
    first = planner.bind((caches[0], caches[0]), k_scale=scales[0], v_scale=scales[0])
    two = planner.bind((caches[0], caches[1]), k_scale=scales[0], v_scale=scales[1])
    checks = {"view_caches": 0, "view_scale": 0}
    for name in checks:
        function = getattr(api, name)

        def counted(*given: Any, check: str = name, call: Any = function, **named: Any) -> Any:
            checks[check] += 1
            return call(*given, **named)

        monkeypatch.setattr(api, name, counted)
    for k, v in ((2, 2), (2, 3), (3, 3), (1, 2), (0, 0)):
        bound = planner.bind((caches[k], caches[v]), **dict.fromkeys(names, scales[0].clone()))
        assert (bound.k_at(), bound.v_at()) == (caches[k].data_ptr(), caches[v].data_ptr())
        assert bound.layout_key is first.layout_key is two.layout_key
        assert bound.k_scale is not None
        assert (bound.k_scale.stride, bound.v_scale) == (0, bound.k_scale)
    assert not any(checks.values()), checks
    other = planner.bind((caches[2], caches[3]), k_scale=scales[1], v_scale=scales[1])
    assert other.k_scale.stride == other.v_scale.stride == 1
    assert checks == {"view_caches": 0, "view_scale": 2}


def test_no_tensor_is_kept_alive(cuda: LaunchRecorder) -> None:
    for name, shape in (
        ("NHD", (PAGES, 2, PAGE, HEADS, DIM)),
        ("latents", (PAGES, PAGE, RANK + ROPE)),
    ):
        planner = planner_of(cuda, name)
        caches = [plain(*shape) for _ in range(3)]
        alive = [weakref.ref(planner.bind(cache).source[0].untyped_storage()) for cache in caches]
        gone = [weakref.ref(cache) for cache in caches]
        del caches
        gc.collect()
        assert [ref() for ref in (*alive, *gone)] == [None] * 6


def test_a_bound_cache_keeps_its_memory_when_the_tensor_gets_another(cuda: LaunchRecorder) -> None:
    planner = planner_of(cuda, "NHD")
    for _ in range(2):
        k, v = plain(PAGES, PAGE, HEADS, DIM), plain(PAGES, PAGE, HEADS, DIM)
        bound, at = planner.bind((k, v)), k.data_ptr()
        k.data = plain(1, PAGE, HEADS, DIM)
        assert bound.k_at() == at != k.data_ptr()
        assert bound.k.tensor.shape[0] == PAGES


def test_the_planner_of_exact_outputs_has_kernels_of_its_own(cuda: LaunchRecorder) -> None:
    planner = planner_of(cuda, "lists")
    cache = plain(PAGES, 2, PAGE, HEADS, DIM)
    for _ in range(2):
        symbols = [
            p.bind(cache).kernels.decode.pending.spec.symbol for p in (planner, planner.exact())
        ]
        assert symbols[0] != symbols[1]


def test_threads_bind_at_once(cuda: LaunchRecorder) -> None:
    planner, failures = planner_of(cuda, "NHD"), []

    def bind(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(100):
            k, v = (plain(rng.randint(1, 30), PAGE, HEADS, DIM) for _ in "kv")
            if k.shape != v.shape:
                continue
            bound = planner.bind((k, v))
            if (bound.k_at(), bound.v_at(), bound.pools["K"]) != (
                *(k.data_ptr(), v.data_ptr()),
                k.shape[0],
            ):
                failures.append(k.shape)

    threads = [threading.Thread(target=bind, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
