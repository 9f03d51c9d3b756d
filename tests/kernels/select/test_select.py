"""The definitions of choices, against loops over them; arguments that are honoured or refused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import jitattn
from jitattn import ConfigError
from tests.support import choices
from tests.support.choices import Batch, Choice, Index, Pages
from tests.support.examples import examples


@examples(25)
@given(st.data())
def test_logits(data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(("page", "token")))
    batch = data.draw(choices.batches())
    sizes = data.draw(st.sampled_from((1, 8, 33))), data.draw(st.sampled_from((32, 128)))
    choices.check_index(Index(batch, *sizes, layout, has_out=data.draw(st.booleans())), "cpu")


@examples(40)
@given(st.data())
def test_tokens(data: st.DataObject) -> None:
    batch = data.draw(choices.batches(tables=("shared", "csr", "token")))
    k = data.draw(st.sampled_from((1, 2, 7, 64, 300)))
    values = data.draw(st.sampled_from(choices.VALUES))
    choices.check_choice(Choice(batch, k, values, 0, data.draw(st.booleans())), "cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize(("page_size", "table"), [(1, "csr"), (8, "shared")])
def test_bounds(dtype: torch.dtype, page_size: int, table: str) -> None:
    batch = Batch(kv_lens=(70, 0, 33, 5), q_lens=(1,) * 4, page_size=page_size, table=table)
    for is_pair, layout in itertools.product((False, True), ("NHD", "HND")):
        choices.check_bounds(Pages(batch, dtype=dtype, kv_layout=layout, is_pair=is_pair), "cpu")


@pytest.mark.parametrize("k", [2, 3, 6, 40])
@pytest.mark.parametrize("has_out", [False, True])
def test_pages(k: int, has_out: bool) -> None:
    batch = Batch(kv_lens=(70, 0, 33, 5, 200), q_lens=(1,) * 5, page_size=8)
    choices.check_pages(Pages(batch, k=k), "cpu", has_out=has_out)


# --- page sizes -----------------------------------------------------------------------------------

LENS = torch.tensor([9, 5], dtype=torch.int32)
TABLE = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32)
PAGES = jitattn.BlockTable(TABLE)
CSR = jitattn.CsrPages(
    torch.tensor([0, 3, 5], dtype=torch.int32), torch.arange(5, dtype=torch.int32)
)
Q = torch.ones(2, 3, 32).to(torch.float8_e4m3fn)
WEIGHTS = torch.ones(2, 3)
CACHE = torch.zeros(6, 4, 36, dtype=torch.uint8)
LOGITS = torch.arange(24, dtype=torch.float32).view(2, 12)
KV = torch.ones(6, 2, 4, 2, 8)
BOUNDS = torch.ones(6, 2, 2, 8, dtype=torch.float16)
QUERY = torch.ones(2, 4, 8)


def test_a_page_size_comes_with_logits() -> None:
    logits = jitattn.index_logits(Q, WEIGHTS, CACHE, CSR, LENS)
    assert logits.shape == (2, 20)
    lists = jitattn.select_tokens(logits, CSR, LENS, 3)
    assert lists.slots.tolist() == [[0, 1, 2], [12, 13, 14]]
    assert jitattn.select_tokens(logits, CSR, LENS, 3, page_size=4).slots.equal(lists.slots)
    with pytest.raises(ValueError, match="page_size is 8: logits is of pages of 4 tokens"):
        jitattn.select_tokens(logits, CSR, LENS, 3, page_size=8)


def test_logits_as_wide_as_a_table_tell_its_page_size() -> None:
    assert jitattn.select_tokens(LOGITS, PAGES, LENS, 2).slots.tolist() == [[7, 8], [15, 16]]
    slots = jitattn.TokenTable(torch.arange(24, dtype=torch.int32).flip(0).view(2, 12))
    assert jitattn.select_tokens(LOGITS, slots, LENS, 2).slots.tolist() == [[16, 15], [8, 7]]
    for pages, width in ((PAGES, 11), (CSR, 12), (PAGES, 0)):
        with pytest.raises(ValueError, match="page_size is None"):
            jitattn.select_tokens(LOGITS[:, :width], pages, LENS, 2)


def test_a_page_size_comes_with_bounds() -> None:
    bounds = jitattn.page_bounds(KV.half(), PAGES, LENS)
    lists = jitattn.select_pages(QUERY, bounds, PAGES, LENS, 4)
    assert lists.numbers[0, 0].tolist() == [0, 1, 2, -1]
    with pytest.raises(ValueError, match="page_size is None: bounds are not what"):
        jitattn.select_pages(QUERY, bounds.clone(), PAGES, LENS, 4)


def test_bounds_of_a_bound_cache() -> None:
    planner = jitattn.AttentionPlanner(
        num_qo_heads=4, num_kv_heads=2, head_dim=16, page_size=4, device="cpu"
    )
    cache = torch.randn(6, 2, 4, 2, 16).bfloat16()
    want = jitattn.page_bounds(cache, PAGES, LENS)
    assert jitattn.page_bounds(planner.bind(cache), PAGES, LENS).equal(want)


def test_caches_of_other_ranks() -> None:
    cache = torch.randint(0, 127, (6, 4, 36), dtype=torch.uint8)
    cache.view(6, -1)[:, 128:].view(torch.float32)[:] = 0.5
    want = jitattn.index_logits(Q, WEIGHTS, cache, PAGES, LENS)
    for other in (cache[:, :, None], cache.view(6, -1), cache.view(torch.float8_e4m3fn)):
        assert jitattn.index_logits(Q, WEIGHTS, other, PAGES, LENS).equal(want)


def test_ties_go_to_the_earlier_page() -> None:
    bounds = torch.zeros(6, 2, 1, 8, dtype=torch.float16)
    lists = jitattn.select_pages(
        torch.ones(1, 1, 8),
        bounds,
        jitattn.BlockTable(TABLE.view(1, 6)),
        LENS[:1] + 14,
        4,
        page_size=4,
    )
    assert lists.numbers.tolist() == [[[0, 1, 2, 5]]]


# --- what is refused ------------------------------------------------------------------------------

OFFSETS = torch.tensor([0, 1, 2], dtype=torch.int32)
INT32 = {"dtype": torch.int32}


def logits_of(**arguments: object) -> Callable[[], object]:
    given = {"q": Q, "weights": WEIGHTS, "k_cache": CACHE, "pages": PAGES, "seq_lens": LENS}
    return lambda: jitattn.index_logits(**(given | arguments))  # type: ignore[arg-type]


def tokens_of(**arguments: object) -> Callable[[], object]:
    given = {"logits": LOGITS, "pages": PAGES, "seq_lens": LENS, "k": 3, "page_size": 4}
    return lambda: jitattn.select_tokens(**(given | arguments))  # type: ignore[arg-type]


def bounds_of(**arguments: object) -> Callable[[], object]:
    given = {"kv_cache": KV.half(), "pages": PAGES, "seq_lens": LENS}
    return lambda: jitattn.page_bounds(**(given | arguments))  # type: ignore[arg-type]


def pages_of(**arguments: object) -> Callable[[], object]:
    given = {"q": QUERY, "bounds": BOUNDS, "pages": PAGES, "seq_lens": LENS, "k": 3, "page_size": 4}
    return lambda: jitattn.select_pages(**(given | arguments))  # type: ignore[arg-type]


def lists(*shape: int, counts: tuple[int, ...] | None = (2,)) -> jitattn.IndexLists:
    slots = torch.zeros(shape, **INT32)  # type: ignore[arg-type]
    return jitattn.IndexLists(slots, None if counts is None else torch.zeros(counts, **INT32))  # type: ignore[arg-type]


SEPARATE = jitattn.BlockTable(torch.stack((TABLE, TABLE), dim=1))
RAGGED = jitattn.RaggedKV(torch.tensor([0, 9, 14], dtype=torch.int32))
SLOTS = jitattn.TokenTable(torch.arange(24, dtype=torch.int32).view(2, 12))
STRIDED = torch.zeros(6, 8, 36, dtype=torch.uint8)[:, ::2]
ODD = torch.zeros(6 * 144 + 2, dtype=torch.uint8)[2:].view(6, 4, 36)
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "bf16 q": (logits_of(q=Q.bfloat16()), "q has dtype bfloat16"),
    "q of rank 2": (logits_of(q=Q[0]), "q has shape"),
    "strided q": (logits_of(q=torch.ones(2, 3, 64).to(Q.dtype)[..., ::2]), "q has strides"),
    "a head_dim": (logits_of(q=Q[..., :16]), "head_dim=16 is not one of"),
    "many heads": (logits_of(q=Q.repeat(1, 50, 1)), "num_heads=150"),
    "weights of tokens": (logits_of(weights=WEIGHTS[0]), "weights has shape"),
    "bf16 weights": (logits_of(weights=WEIGHTS.bfloat16()), "weights has dtype"),
    "no scales": (logits_of(k_cache=CACHE[..., :32]), "k_cache has shape"),
    "bf16 cache": (logits_of(k_cache=CACHE.bfloat16()), "k_cache has dtype"),
    "strided pages": (logits_of(k_cache=STRIDED), "a page is contiguous"),
    "an odd address": (logits_of(k_cache=ODD), "multiples of 4 bytes"),
    "a layout": (logits_of(scale_layout="row"), "scale_layout is 'row'"),
    "flat rows by token": (
        logits_of(scale_layout="token", k_cache=CACHE.view(6, -1)),
        "k_cache has shape",
    ),
    "ragged pages": (logits_of(pages=RAGGED), "pages is a RaggedKV"),
    "a table alone": (logits_of(pages=TABLE), "pages is a Tensor"),
    "other lengths": (logits_of(seq_lens=LENS[:1]), "seq_lens has 1 entries"),
    "float lengths": (logits_of(seq_lens=LENS.float()), "seq_lens has dtype"),
    "offsets without the most": (logits_of(qo_indptr=OFFSETS), "max_q_len is None"),
    "the most without offsets": (logits_of(max_q_len=2), "max_q_len is 2"),
    "offsets of one": (logits_of(qo_indptr=OFFSETS[:2], max_q_len=1), "qo_indptr has 2 entries"),
    "too many tokens": (logits_of(qo_indptr=OFFSETS * 1 + OFFSETS, max_q_len=2), "q has 2 rows"),
    "more than the most": (
        logits_of(qo_indptr=torch.tensor([0, 2, 2], **INT32), max_q_len=1),  # type: ignore[call-overload]
        "max_q_len is 1",
    ),
    "rows without offsets": (
        logits_of(q=Q.repeat(2, 1, 1), weights=WEIGHTS.repeat(2, 1)),
        "give qo_indptr",
    ),
    "a long request": (logits_of(seq_lens=LENS + 8), r"seq_lens\[0\] is 17: there is room for 12"),
    "a narrow result": (logits_of(max_kv_len=8), r"seq_lens\[0\] is 9: there is room for 8"),
    "out of another width": (logits_of(max_kv_len=12, out=LOGITS[:, :11]), "out has shape"),
    "out of a dtype": (logits_of(out=LOGITS.double()), "out has dtype"),
    "out that is read": (
        logits_of(weights=LOGITS.view(8, 3)[:2], out=LOGITS),
        "out shares memory with weights",
    ),
    "a page outside": (
        logits_of(pages=jitattn.BlockTable(TABLE + 3)),
        "request 1 has a token at slot 24",
    ),
    "logits of a dtype": (tokens_of(logits=LOGITS.half()), "logits has dtype"),
    "logits of a rank": (tokens_of(logits=LOGITS[0]), "logits has shape"),
    "strided logits": (tokens_of(logits=LOGITS[:, ::2]), "logits has strides"),
    "no k": (tokens_of(k=0), "k is 0"),
    "a float k": (tokens_of(k=2.0), "k is a float"),
    "separate ids": (tokens_of(pages=SEPARATE), "pages is BlockTable"),
    "no page size": (tokens_of(page_size=0), "page_size is 0"),
    "no counts": (tokens_of(out=lists(2, 3, counts=None)), "out has no counts"),
    "other counts": (tokens_of(out=lists(2, 3, counts=(2, 1))), "out.counts has shape"),
    "another k": (tokens_of(out=lists(2, 4)), "out.slots has shape"),
    "a tensor": (tokens_of(out=TABLE), "out is a Tensor"),
    "long tokens": (tokens_of(seq_lens=LENS + 8), "there is room for 12"),
    "a chosen token nowhere": (
        tokens_of(pages=jitattn.BlockTable(torch.full_like(TABLE, -1))),
        "request 0 has a token that its table has no page for",
    ),
    "float32 keys": (bounds_of(kv_cache=KV), "kv_cache has dtype float32"),
    "a cache of a rank": (bounds_of(kv_cache=KV.half()[0]), "kv_cache has shape"),
    "a cache of three": (bounds_of(kv_cache=(KV, KV, KV)), "kv_cache is a tuple"),
    "no layout": (bounds_of(kv_layout="DNH"), "kv_layout is 'DNH'"),
    "token tables": (bounds_of(pages=SLOTS), "pages is TokenTable"),
    "offsets without out": (
        bounds_of(qo_indptr=OFFSETS, max_q_len=1),
        "qo_indptr is given without",
    ),
    "the most without out": (bounds_of(max_q_len=1), "max_q_len is given without out"),
    "bounds of others": (bounds_of(out=BOUNDS[:5]), "out has shape"),
    "bounds of a dtype": (bounds_of(out=BOUNDS.bfloat16()), "out has dtype"),
    "bounds outside": (bounds_of(pages=jitattn.BlockTable(TABLE + 3)), "request 1 has a token"),
    "q of an int dtype": (pages_of(q=QUERY.int()), "q has dtype"),
    "one page": (pages_of(k=1), "k is 1"),
    "other dims": (pages_of(q=QUERY[..., :4]), "bounds has shape"),
    "odd heads": (pages_of(q=QUERY[:, :3]), "q has 3 heads"),
    "strided bounds": (
        pages_of(bounds=BOUNDS.transpose(0, 1).contiguous().transpose(0, 1)),
        "contig",
    ),
    "float bounds": (pages_of(bounds=BOUNDS.float()), "bounds has dtype"),
    "a dim of 6": (pages_of(q=QUERY[..., :6], bounds=BOUNDS[..., :6].clone()), "head_dim=6"),
    "tokens of a table": (pages_of(pages=SLOTS), "pages is TokenTable"),
    "long pages": (pages_of(seq_lens=LENS + 8), "there is room for 12"),
    "a page outside bounds": (
        pages_of(pages=jitattn.BlockTable(TABLE + 3)),
        "request 1 has page 6",
    ),
    "lists of tokens": (pages_of(out=lists(2, 3)), "out is a IndexLists"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError, ConfigError), match=message):
        make()


def test_nan_passes_through() -> None:
    """A key, a query or a scale that is NaN makes logits that are, and none else."""
    cache = torch.zeros(6, 144, dtype=torch.uint8)
    cache[1, 32] = 0x7F  # of token 5
    cache[2, 128:132] = torch.tensor([math.nan]).view(torch.uint8)  # the scale of token 8
    logits = jitattn.index_logits(Q, WEIGHTS, cache, PAGES, LENS)
    assert logits[0].isnan().nonzero().flatten().tolist() == [5, 8]
    assert not logits[1].isnan().any()
