"""What is written is nothing that is read: whether tensors share bytes, and calls where they do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import jitattn
from jitattn.kernels.common import device_kernels
from jitattn.kernels.preprocess import api
from jitattn.kernels.preprocess import launch as preprocess_launch
from jitattn.tensors.overlap import Apart, share_bytes
from tests.emulator.pages import emulate_kernels
from tests.support.examples import examples


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """Of one piece of memory, in bytes or pairs of them."""
    memory = MEMORY.view(draw(st.sampled_from([torch.uint8, torch.int16])))
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    strides = [draw(st.sampled_from([0, 1, 2, 3, 4, 5, 8, 10, 12, 20, 24, 40])) for _ in shape]
    extent = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    return memory.as_strided(shape, strides, draw(st.integers(0, max(0, 120 - extent))))


MEMORY = torch.zeros(800, dtype=torch.uint8)


def bytes_of(tensor: Tensor) -> set[int]:
    places = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = places[..., None] + torch.arange(size) * stride
    item = tensor.element_size()
    first = tensor.data_ptr()
    return {first + item * at + i for at in places.flatten().tolist() for i in range(item)}


@examples(3000)
@given(views(), views())
def test_bytes_in_common(a: Tensor, b: Tensor) -> None:
    assert share_bytes(a, b) == bool(bytes_of(a) & bytes_of(b))


def test_views_of_large_pools() -> None:
    pool = torch.empty(100_000, 2, 4, 2, 8, dtype=torch.bfloat16)
    assert not share_bytes(pool[:, 0], pool[:, 1])
    assert not share_bytes(pool[::2], pool[1::2])
    assert share_bytes(pool[:-1, 0], pool[1:, 0])
    assert share_bytes(pool[:, 0, :, 0], pool[77_777, 0, 3, 0, 5:6])
    assert not share_bytes(pool[:, 0, :, 0], pool[77_777, 0, 3, 1, 5:6])
    assert not share_bytes(pool[:0], pool)


def test_what_is_known_to_be_apart() -> None:
    tensors = [torch.zeros(4), torch.zeros(8)]
    apart = Apart(tensors, [(0, 1)])
    for pointers, holds in (
        ([1000, 2000], True),
        ([1000, 1016], True),
        ([1000, 968], True),
        ([1000, 1015], False),
        ([1000, 969], False),
    ):
        assert apart.holds(pointers) is holds
        assert apart.holds(pointers) is holds
    apart.learn([1000, 1015])
    assert apart.holds([1000, 1015])
    assert apart.holds([5000, 5015]), "they lie to each other as they did"
    assert not apart.holds([1000, 1014])


# --- calls ----------------------------------------------------------------------------------------

D, TOKENS = 32, 4
TABLE = jitattn.BlockTable(torch.arange(4, dtype=torch.int32)[:, None])
LENS = torch.ones(TOKENS, dtype=torch.int32)
PAGES = {"pages": TABLE, "seq_lens": LENS}


def memory() -> Tensor:
    return torch.zeros(4 * 2 * 16 * 2 * D + 4096, dtype=torch.bfloat16)


def cache_in(memory: Tensor, at: int = 0) -> Tensor:
    return memory[at : at + 4 * 2 * 16 * 2 * D].view(4, 2, 16, 2, D)


def rows_in(memory: Tensor, num_heads: int, at: int = 0) -> Tensor:
    return memory[at : at + TOKENS * num_heads * D].view(TOKENS, num_heads, D)


def packed() -> Tensor:
    return torch.zeros(TOKENS, 8 * D, dtype=torch.bfloat16)


def preprocessed(qkv: object, cache: object, **others: object) -> object:
    heads = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": D}
    return jitattn.preprocess_qkv(qkv, cache, **(heads | PAGES | others))


def q_out_in_the_cache(cache: Tensor, own: Tensor) -> None:
    preprocessed(packed(), cache_in(cache), q_out=rows_in(own, 4, 64))


def qkv_in_the_cache(cache: Tensor, own: Tensor) -> None:
    preprocessed(rows_in(own, 8).flatten(1), cache_in(cache))


def v_in_the_cache(cache: Tensor, own: Tensor) -> None:
    qkv = packed().view(TOKENS, 8, D)
    preprocessed((qkv[:, :4], qkv[:, 4:6], rows_in(own, 2)), cache_in(cache))


def q_out_half_over_q(cache: Tensor, own: Tensor) -> None:
    q, kv = rows_in(cache, 4), packed().view(TOKENS, 8, D)
    preprocessed((q, kv[:, 4:6], kv[:, 6:]), cache_in(memory()), q_out=rows_in(own, 4, D))


def appended_v_in_the_cache(cache: Tensor, own: Tensor) -> None:
    jitattn.append_kv(packed().view(TOKENS, 8, D)[:, :2], rows_in(own, 2), cache_in(cache), **PAGES)


def v_a_page_behind_k(cache: Tensor, own: Tensor) -> None:
    pools = [x[: 5 * 16 * 2 * D].view(5, 16, 2, D) for x in (cache, own)]
    k = packed().view(TOKENS, 8, D)[:, :2]
    jitattn.append_kv(k, k, (pools[0][:-1], pools[1][1:]), **PAGES)


TOKEN_CALLS: dict[str, tuple[Callable[[Tensor, Tensor], None], str]] = {
    "q_out in the cache": (q_out_in_the_cache, "q_out shares memory with kv_cache's K"),
    "qkv in the cache": (qkv_in_the_cache, "kv_cache's K shares memory with qkv's q"),
    "v in the cache": (v_in_the_cache, "kv_cache's K shares memory with v"),
    "q_out half over q": (q_out_half_over_q, "q_out shares memory with q"),
    "appended v in the cache": (appended_v_in_the_cache, "kv_cache's K shares memory with v"),
    "V a page behind K": (v_a_page_behind_k, "kv_cache's K shares memory with kv_cache's V"),
}


@pytest.mark.parametrize("name", TOKEN_CALLS)
def test_tokens_on_the_cpu(name: str) -> None:
    call, match = TOKEN_CALLS[name]
    call(memory(), memory())
    one = memory()
    with pytest.raises(ValueError, match=match):
        call(one, one)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Have the functions of tokens launch, and keep what they do."""
    found: list[object] = []

    def kernel(spec: object, *others: object) -> object:
        return SimpleNamespace(symbol="kernel", smem_bytes=0, begins_early=False)

    monkeypatch.setattr(device_kernels, "load", kernel)
    monkeypatch.setattr(device_kernels, "launch_on", lambda card, launch: found.append(launch))
    monkeypatch.setattr(device_kernels, "card_of", lambda device: 0)
    monkeypatch.setattr(preprocess_launch, "device_facts", lambda index: SimpleNamespace(num_sms=1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    api.LAUNCHES.clear()
    yield found
    api.LAUNCHES.clear()


@pytest.mark.parametrize("name", TOKEN_CALLS)
def test_tokens_of_a_layout_that_is_known(name: str, launches: list[object]) -> None:
    """Tensors are recognised by how they lie: where they lie is another question."""
    call, match = TOKEN_CALLS[name]
    one, two = memory(), memory()
    for _ in range(3):
        call(one, two)
    assert len(launches) == 3
    for _ in range(2):
        with pytest.raises(ValueError, match=match):
            call(one, one)
    assert len(launches) == 3
    call(two, one)
    assert len(launches) == 4


def test_views_of_one_tensor_are_taken(launches: list[object]) -> None:
    """Columns of a projection, in place and beside; K and V in one pool, by page and by row."""
    pool = torch.zeros(4, 16, 2, 2 * D, dtype=torch.bfloat16)
    wide = torch.zeros(TOKENS, 12 * D, dtype=torch.bfloat16)
    for cache in (cache_in(memory()), (pool[..., :D], pool[..., D:])):
        for q_out in (wide[:, : 4 * D], wide[:, 8 * D :]):
            for _ in range(2):
                preprocessed(wide[:, : 8 * D], cache, q_out=q_out.view(TOKENS, 4, D))
    assert len(launches) == 8
    k = wide.view(TOKENS, 12, D)[:, 4:6]
    separate = jitattn.BlockTable(torch.arange(8, dtype=torch.int32).view(4, 2, 1))
    both = torch.zeros(8, 16, 2, D, dtype=torch.bfloat16)
    jitattn.append_kv(k, k, (both, both), pages=separate, seq_lens=LENS)
    assert len(launches) == 9


@pytest.fixture(params=["definition", "kernel"])
def gathers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "kernel":
        emulate_kernels(monkeypatch, 1)


def gathered(cache: Tensor, own: Tensor, indptr: Tensor | None = None) -> None:
    outs = rows_in(own, 2, 512), torch.zeros(TOKENS, 2, D, dtype=torch.bfloat16)
    jitattn.gather_kv(cache_in(cache), TABLE, LENS, out=outs if indptr is None else (*outs, indptr))


@pytest.mark.usefixtures("gathers")
def test_gathers() -> None:
    one, two = memory(), memory()
    for _ in range(2):
        gathered(one, two)
        with pytest.raises(ValueError, match=r"out\[0\] shares memory with kv"):
            gathered(one, one)
    beside = torch.zeros(TOKENS, 2, 2, D, dtype=torch.bfloat16)
    for outs in ((beside[:2].view(-1, 2, D)[:4], beside[1:3].view(-1, 2, D)[:4]),):
        with pytest.raises(ValueError, match=r"out\[0\] shares memory with out\[1\]"):
            jitattn.gather_kv(cache_in(one), TABLE, LENS, out=outs)


@pytest.mark.usefixtures("gathers")
def test_gathers_of_offsets_over_lengths() -> None:
    numbers = torch.ones(20, dtype=torch.int32)
    outs = tuple(torch.zeros(TOKENS, 2, D, dtype=torch.bfloat16) for _ in range(2))
    cache = cache_in(memory())
    for _ in range(2):
        jitattn.gather_kv(cache, TABLE, numbers[:4], out=(*outs, torch.zeros(5).int()))
        with pytest.raises(ValueError, match=r"out\[2\] shares memory with seq_lens"):
            jitattn.gather_kv(cache, TABLE, numbers[:4], out=(*outs, numbers[3:8]))
        numbers.fill_(1)


@pytest.mark.usefixtures("gathers")
def test_block_tables() -> None:
    slots = torch.arange(4 * 8, dtype=torch.int32).view(4, 8)
    lens = torch.full((4,), 8, dtype=torch.int32)
    out = torch.zeros(4, 8, dtype=torch.int32)
    for _ in range(2):
        jitattn.build_block_table(slots, lens, 4, out=out[:, :2])
        with pytest.raises(ValueError, match="out shares memory with"):
            jitattn.build_block_table(slots, lens, 4, out=slots[:, :2])
