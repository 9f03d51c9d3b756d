"""What gather_kv, copy_pages and the functions that make tables refuse, and what they remember."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import jitattn
from jitattn.kernels.common import device_kernels
from jitattn.kernels.pages.spec import TransferSpec
from jitattn.tensors.page_tables import slots_of_pages
from tests.emulator.pages import emulate_kernels

Call = Callable[[], object]


def ints(*values: object, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


POOL = torch.zeros(5, 2, 4, 2, 16, dtype=torch.bfloat16)
PAIR = (POOL[:, 0], POOL[:, 1])
FP8 = POOL.to(torch.float8_e4m3fn)
TABLE = ints([1, 2], [3, 4])
PAGES = jitattn.BlockTable(TABLE)
LENS = ints(5, 8)


def gathered(
    kv: object = POOL, pages: object = PAGES, lens: object = LENS, **options: object
) -> Call:
    return lambda: jitattn.gather_kv(kv, pages, lens, **options)


def bound(**arguments: object) -> jitattn.types.BoundCache:
    sizes = {"num_qo_heads": 2, "num_kv_heads": 2, "head_dim": 16, "page_size": 4}
    planner = jitattn.AttentionPlanner(device="cpu", **(sizes | arguments))
    return planner.bind(PAIR)


def outs(rows: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    return torch.zeros(rows, 2, 16, dtype=dtype), torch.zeros(rows, 2, 16, dtype=dtype)


QUANTISED = jitattn.QuantizedKV(
    *(torch.zeros(5, 4, 2, 8, dtype=torch.uint8) for _ in range(2)),
    *(torch.zeros(5, 4, 2, 1, dtype=torch.uint8) for _ in range(2)),
)
GATHERS: dict[str, tuple[Call, str]] = {
    "a list": (gathered([1, 2]), r"kv\[0\] is a int"),
    "a number": (gathered(3), "kv is a int"),
    "float32": (gathered(POOL.float()), "kv has dtype float32"),
    "bytes": (gathered(POOL.view(torch.uint8)), "kv has dtype uint8: expected float16 or"),
    "four dimensions": (gathered(POOL[:, 0]), r"kv has shape \[5, 4, 2, 16\]"),
    "five in a pair": (gathered((POOL, POOL)), r"expected \[num_pages, page_size"),
    "two page counts": (gathered((PAIR[0][:4], PAIR[1])), "k_cache has 4 pages and v_cache 5"),
    "no elements": (gathered(POOL[..., :0]), "holds nothing"),
    "a layout": (gathered(kv_layout="nhd"), "kv_layout is 'nhd'"),
    "strided columns": (gathered(POOL[..., ::2]), "the last dimension must be contiguous"),
    "no pages": (gathered(pages=TABLE), "pages is a Tensor"),
    "ragged": (gathered(pages=jitattn.RaggedKV(ints(0, 3))), "ragged K and V"),
    "elsewhere": (gathered(lens=LENS.to("meta")), "seq_lens is on meta: expected cpu"),
    "float lengths": (gathered(lens=LENS.float()), "seq_lens has dtype float32"),
    "a list of lengths": (gathered(lens=[5, 8]), "seq_lens is a list"),
    "three lengths": (gathered(lens=ints(1, 2, 3)), "seq_lens has 3 entries: expected 2"),
    "long": (gathered(lens=ints(9, 1)), r"seq_lens\[0\] is 9: the table lists 8 tokens"),
    "a dead page": (
        gathered(pages=jitattn.BlockTable(ints([1, -1], [3, 4]))),
        "request 0 has a token at slot -1 of K",
    ),
    "past the pool": (
        gathered(pages=jitattn.BlockTable(ints([1, 5], [3, 4]))),
        "slot 20 of K: the cache has 5 pages of 4 tokens",
    ),
    "a row": (
        gathered(pages=jitattn.BlockTable(TABLE, rows=ints(0, 2))),
        r"rows\[1\] is 2: the table has 2 rows",
    ),
    "a scale": (gathered(k_scale=2.0), "k_scale is given, but a cache of bfloat16"),
    "a scale's shape": (gathered(FP8, v_scale=torch.ones(3)), r"v_scale has shape \[3\]"),
    "a scale of ints": (gathered(FP8, v_scale=torch.ones(2).int()), "v_scale has dtype int32"),
    "an infinite scale": (gathered(FP8, k_scale=float("inf")), "k_scale is inf"),
    "an out_dtype": (gathered(out_dtype="float64"), "out_dtype is float64: expected float16"),
    "another FP8": (gathered(FP8, out_dtype="float8_e5m2"), "out_dtype is float8_e5m2"),
    "a scale of bits": (
        gathered(FP8, k_scale=1.0, out_dtype="float8_e4m3fn"),
        "k_scale or v_scale is given, but out_dtype=float8_e4m3fn copies",
    ),
    "bits of NVFP4": (gathered(QUANTISED, out_dtype="nvfp4"), "out_dtype is nvfp4"),
    "one out": (gathered(out=outs(13)[0]), "out is a Tensor"),
    "short outs": (gathered(out=outs(12)), "out has 12 rows: seq_lens have 13 tokens"),
    "an out of floats": (gathered(out=outs(13, torch.float32)), r"out\[0\] has dtype float32"),
    "outs of two sizes": (
        gathered(out=(outs(13)[0], outs(14)[1])),
        r"out\[1\] has shape \[14, 2, 16\]: expected \[13, 2, 16\]",
    ),
    "a strided out": (
        gathered(out=tuple(x.transpose(0, 1).contiguous().transpose(0, 1) for x in outs(13))),
        "expected a contiguous tensor",
    ),
    "a long indptr": (gathered(out=(*outs(13), ints(0, 0, 0, 0))), r"out\[2\] has shape \[4\]"),
    "an int64 indptr": (
        gathered(out=(*outs(13), torch.zeros(3, dtype=torch.int64))),
        r"out\[2\] has dtype int64",
    ),
    "one out for both": (gathered(out=(outs(13)[0],) * 2), r"out\[0\] shares memory with out\[1\]"),
    "a huge length": (gathered(lens=ints(2**40, 1, dtype=torch.int64)), "at most 2147483647"),
    "a bound layout": (gathered(bound(), kv_layout="HND"), "kv_layout is 'HND'"),
    "a scale of a bound cache": (gathered(bound(), k_scale=1.0), "a bound cache has its own"),
    "a separate table": (
        gathered(bound(), jitattn.BlockTable(ints([[1, 2], [1, 2]], [[3, 4], [3, 4]]))),
        "page_table='shared'",
    ),
}


@pytest.mark.parametrize("name", GATHERS)
def test_gathers_refused(name: str) -> None:
    call, match = GATHERS[name]
    with pytest.raises((TypeError, ValueError), match=match):
        call()


def copied(src: object = POOL, dst: object = POOL, pairs: object = None) -> Call:
    pairs = ints([0, 1]) if pairs is None else pairs
    return lambda: jitattn.copy_pages(src, dst, pairs)


BUFFER = torch.zeros_like(POOL)
COPIES: dict[str, tuple[Call, str]] = {
    "a number": (copied(3), "src is a int"),
    "numbers": (copied([POOL], [3]), r"dst\[0\] is a int"),
    "two and one": (copied([POOL, POOL], POOL), "src has 2 pools and dst 1"),
    "a vector": (copied(ints(1, 2), ints(1, 2)), r"src\[0\] has shape \[2\]"),
    "dtypes": (copied(POOL, FP8), r"dst\[0\] has dtype torch.float8_e4m3fn"),
    "pages": (copied(POOL, POOL[:, :1]), r"dst\[0\] has shape \[5, 1, 4, 2, 16\]: expected pages"),
    "a shared dst": (copied(POOL, POOL[:1].expand(5, -1, -1, -1, -1)), "share memory"),
    "float pairs": (copied(pairs=torch.zeros(1, 2)), "pairs has dtype float32"),
    "a vector of pairs": (copied(pairs=ints(0, 1)), r"pairs has shape \[2\]"),
    "triples": (copied(pairs=ints([0, 1, 2])), r"pairs has shape \[1, 3\]"),
    "a source that isn't": (copied(pairs=ints([5, 1])), r"has \[5, 1\]: src\[0\] has 5 pages"),
    "a target that isn't": (copied(pairs=ints([1, 9])), r"has \[1, 9\]: dst\[0\] has 5 pages"),
    "one target twice": (copied(pairs=ints([0, 1], [2, 1])), "page 1 is a destination twice"),
    "no pools": (copied([], []), "src has no pools"),
    "views that overlap": (copied(POOL[:3], POOL[1:4], ints([0, 0], [1, 1])), r"page 1 of src"),
    "one pool twice": (
        copied([POOL, POOL + 1], [BUFFER, BUFFER]),
        r"page 1 of dst\[1\] is a destination of another pool",
    ),
    "a chain": (copied(pairs=ints([0, 1], [1, 2])), r"page 1 of src\[0\] is a destination"),
    "a swap": (copied(pairs=ints([0, 1], [1, 0])), "are copied at the same time"),
    "elsewhere": (copied(POOL, POOL.to("meta")), r"dst\[0\] is on meta"),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_refused(name: str) -> None:
    call, match = COPIES[name]
    before = POOL.clone()
    with pytest.raises((TypeError, ValueError), match=match):
        call()
    assert torch.equal(POOL, before)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e5m2, torch.complex128])
def test_pages_of_every_type_are_copied(dtype: torch.dtype) -> None:
    src = torch.arange(1, 65, dtype=torch.uint8).reshape(2, 32).view(dtype)
    dst = torch.zeros(2, 32, dtype=torch.uint8).view(dtype)
    jitattn.copy_pages(src, dst, ints([0, 1]))
    assert dst.view(torch.uint8).tolist() == [[0] * 32, list(range(1, 33))]


def test_padding_requests_may_have_any_row() -> None:
    pages = jitattn.BlockTable(TABLE, rows=ints(-1, 1))
    k, _, kv_indptr = jitattn.gather_kv(POOL, pages, ints(0, 3))
    assert k.shape[0] == 3
    assert kv_indptr.tolist() == [0, 0, 3]


def test_pages_of_two_pools_have_ids_of_their_own() -> None:
    src, dst = torch.arange(10.0).reshape(5, 2), torch.zeros(5, 2)
    jitattn.copy_pages(src, dst, ints([0, 1], [1, 2], [3, 3]))
    assert dst[:, 0].tolist() == [0, 0, 2, 6, 0]
    # K and V of one pool are two pools, and a page may be copied to itself.
    pool = torch.arange(20.0).reshape(5, 2, 2)
    jitattn.copy_pages(pool[:, 0], pool[:, 1], ints([0, 1], [1, 0]))
    assert pool[:2, 1, 0].tolist() == [4, 0]
    jitattn.copy_pages(pool, pool, ints([2, 2], [2, 3]))
    assert torch.equal(pool[3], pool[2])


SLOTS = ints([4, 5, 6, 7, 12, 13], [0, 1, 2, 3, 8, 9])


def built(slots: object = SLOTS, lens: object = None, size: object = 4, **options: object) -> Call:
    lens = ints(6, 5) if lens is None else lens
    return lambda: jitattn.build_block_table(slots, lens, size, **options)


TABLES: dict[str, tuple[Call, str]] = {
    "a list": (built([[1, 2]]), "slots is a list"),
    "float slots": (built(SLOTS.float()), "slots has dtype float32"),
    "a vector": (built(SLOTS[0]), r"slots has shape \[6\]"),
    "lengths": (built(lens=ints(1)), "seq_lens has 1 entries: expected 2"),
    "float lengths": (built(lens=torch.ones(2)), "seq_lens has dtype float32"),
    "no page size": (built(size=0), "page_size is 0: expected 1 to"),
    "a float page size": (built(size=4.0), "page_size is a float"),
    "rows of a table": (built(jitattn.TokenTable(SLOTS), rows=ints(0, 1)), "rows are given"),
    "float rows": (built(rows=torch.zeros(2)), "rows has dtype float32"),
    "a row": (built(rows=ints(0, 2)), r"rows\[1\] is 2: the table has 2 rows"),
    "starts": (built(kv_start=ints(0)), "kv_start has 1 entries"),
    "a map of floats": (built(slot_map=torch.zeros(20)), "slot_map has dtype float32"),
    "a short map": (built(slot_map=torch.arange(12)), "slot 12: slot_map has 12 entries"),
    "a long request": (built(lens=ints(7, 1)), r"seq_lens\[0\] is 7: it has 6 slots"),
    "a narrow out": (built(out=ints([0], [0])), r"seq_lens\[0\] is 6: out holds 1 pages of 4"),
    "rows of out": (built(out=ints([0, 0])), r"out has shape \[1, 2\]: expected \[2, width\]"),
    "an int64 out": (built(out=torch.zeros(2, 2, dtype=torch.int64)), "out has dtype int64"),
    "a separate out": (
        built(out=jitattn.BlockTable(torch.zeros(2, 2, 2, dtype=torch.int32))),
        "expected a shared table without rows",
    ),
    "an expanded out": (built(out=ints([0, 0]).expand(2, 2)), "share memory"),
    "a huge length of CSR": (
        lambda: jitattn.build_block_table(
            jitattn.CsrPages(ints(0, 2), ints(0, 1)), ints(2**40, dtype=torch.int64), 2
        ),
        r"seq_lens\[0\] is 1099511627776: slots has 2 entries",
    ),
    "a page past int32": (
        lambda: jitattn.build_block_table(ints([2**40], dtype=torch.int64), ints(1), 2),
        "ids are int32",
    ),
    "apart": (
        built(ints([4, 5, 6, 8, 12, 13], [0] * 6)),
        "request 0: the slots of tokens 0 to 3 are not those of a page of 4",
    ),
    "in the middle": (built(ints([5, 6, 7, 8, 12, 13], [0] * 6)), "request 0: the slots"),
    "nothing": (built(ints([-1] * 6, [0] * 6)), "request 0: the slots of tokens 0 to 3"),
    "a tail apart": (built(size=5), "request 0: the slots of tokens 0 to 4"),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_refused(name: str) -> None:
    call, match = TABLES[name]
    with pytest.raises((TypeError, ValueError), match=match):
        call()


def info(lens: object = LENS, q_lens: object = None, tokens: object = 9, **options: object) -> Call:
    q_lens = ints(1, 2) if q_lens is None else q_lens
    return lambda: jitattn.batch_info(lens, q_lens, num_tokens=tokens, **options)


SIZED = jitattn.batch_info(LENS, ints(1, 2), num_tokens=9)
INFOS: dict[str, tuple[Call, str]] = {
    "a list": (info([5, 8]), "seq_lens is a list"),
    "floats": (info(q_lens=torch.ones(2)), "q_lens has dtype float32"),
    "one of them": (info(q_lens=ints(1)), "q_lens has 1 entries: expected 2"),
    "too many": (info(tokens=2), "q_lens have 3 tokens together: num_tokens is 2"),
    "a float": (info(tokens=3.0), "num_tokens is a float"),
    "less than none": (info(tokens=-1), "num_tokens is -1"),
    "a page size": (info(page_size=4), "page_size is given without pages"),
    "no page size": (info(pages=PAGES), "page_size is None"),
    "a tensor": (info(pages=TABLE), "pages is a Tensor"),
    "a separate table": (
        info(pages=jitattn.BlockTable(torch.zeros(2, 2, 2, dtype=torch.int32)), page_size=4),
        "two slots a token",
    ),
    "other requests": (
        info(pages=jitattn.BlockTable(TABLE[:1]), page_size=4),
        "pages has 1 requests: expected 2",
    ),
    "a long request": (
        info(ints(9, 1), pages=PAGES, page_size=4),
        r"seq_lens\[0\] is 9: the table lists 8 tokens",
    ),
    "offsets past int32": (info(ints(2**31 - 1, 1)), "seq_lens have 2147483648 tokens together"),
    "another out": (info(out=(1, 2)), "out is a tuple"),
    "an out of another size": (info(tokens=8, out=SIZED), r"out.requests has shape \[9\]"),
    "an out without slots": (info(pages=PAGES, page_size=4, out=SIZED), "out.slots is None"),
}


@pytest.mark.parametrize("name", INFOS)
def test_infos_refused(name: str) -> None:
    call, match = INFOS[name]
    with pytest.raises((TypeError, ValueError), match=match):
        call()


def converted(pages: object = PAGES, layout: object = "csr", **options: object) -> Call:
    options = {"page_size": 4, "seq_lens": LENS} | options
    return lambda: jitattn.pages.convert_pages(pages, layout, **options)


CONVERSIONS: dict[str, tuple[Call, str]] = {
    "a tensor": (converted(TABLE), "pages is a Tensor"),
    "ragged": (converted(jitattn.RaggedKV(ints(0, 1))), "pages is a RaggedKV"),
    "to ragged": (converted(layout="ragged"), "layout is 'ragged': expected 'shared', 'separate'"),
    "long": (converted(seq_lens=ints(1, 9)), r"seq_lens\[1\] is 9: the table has 2 pages of it"),
    "lengths": (converted(seq_lens=ints(1)), "seq_lens has 1 entries"),
    "a page size": (converted(page_size=0), "page_size is 0"),
    "a float": (converted(max_kv_len=3.0), "max_kv_len is a float"),
    "no length": (converted(max_kv_len=-1), "max_kv_len is -1"),
    "longer than the most": (converted(max_kv_len=4), r"seq_lens\[0\] is 5: the table has 1 pages"),
    "a row": (
        converted(jitattn.BlockTable(TABLE, rows=ints(0, 2))),
        r"rows\[1\] is 2: the table has 2 rows",
    ),
    "a huge length": (
        converted(
            jitattn.CsrPages(ints(0, 1, 2), ints(0, 1)),
            "shared",
            seq_lens=ints(2**40, 1, dtype=torch.int64),
        ),
        r"seq_lens\[0\] is 1099511627776",
    ),
    "slots past int32": (
        converted(jitattn.BlockTable(ints([2**30], [0])), "token", seq_lens=ints(1, 1)),
        "slots of pages of 4 tokens are int32",
    ),
    "tokens apart": (
        converted(jitattn.TokenTable(ints(*[[3, 1, 2, 0] * 2] * 2)), "shared"),
        "request 0: the slots",
    ),
}


def test_slots_past_int32_are_none_on_a_device() -> None:
    """Where nothing can be refused they would come back as slots of other pages."""
    largest = 2**31 // 3 - 1
    found = slots_of_pages(ints([largest, largest + 1, 2**31 - 1, 0, -1]), 3)
    want = [*range(3 * largest, 3 * largest + 3), *[-1] * 6, 0, 1, 2, *[-1] * 3]
    assert found.tolist() == [want]
    assert slots_of_pages(ints([2**31 - 1, -1, 0]), 1).tolist() == [[2**31 - 1, -1, 0]]


@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversions_refused(name: str) -> None:
    call, match = CONVERSIONS[name]
    with pytest.raises((TypeError, ValueError), match=match):
        call()


@pytest.mark.parametrize("layout", ["shared", "csr", "token"])
def test_conversions_have_the_width_asked_for(layout: str) -> None:
    pages = jitattn.pages.convert_pages(PAGES, layout, page_size=4, seq_lens=LENS)
    table = jitattn.pages.convert_pages(
        pages, "shared", page_size=4, seq_lens=ints(3, 4), max_kv_len=4
    )
    assert isinstance(table, jitattn.BlockTable)
    assert table.table.tolist() == [[1], [3]]


# --- what is remembered ---------------------------------------------------------------------------


def test_a_launch_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that lie alike are one launch, patched; whatever differs is checked anew."""
    emulate_kernels(monkeypatch, 1)
    made = []
    load = device_kernels.load

    def count(spec: TransferSpec, card: int) -> object:
        made.append(spec)
        return load(spec, card)

    monkeypatch.setattr(device_kernels, "load", count)
    rng = torch.Generator().manual_seed(3)
    pools = [torch.randn(POOL.shape, generator=rng).bfloat16() for _ in range(4)]
    for step in range(3):
        lens = ints(5 + step, 8 - step)
        for pool in pools:
            table = jitattn.BlockTable(TABLE.roll(step))
            k, v, _ = jitattn.gather_kv(pool, table, lens)
            rows = pool[table.table[0].long()]
            assert torch.equal(k[: 5 + step], rows[:, 0].flatten(0, 1)[: 5 + step])
            assert torch.equal(v[0], rows[0, 1, 0])
    assert len(made) == 1
    # K and V that are one tensor lie alike, too, and another tensor doesn't lie like them.
    for pair in ((pools[0][:, 0],) * 2, (pools[1][:, 1],) * 2, (pools[2][:, 0], pools[2][:, 1])):
        k, v, _ = jitattn.gather_kv(pair, PAGES, LENS)
        assert torch.equal(k[0], pair[0][1, 0])
        assert torch.equal(v[0], pair[1][1, 0])
    assert len(made) == 3
    with pytest.raises(ValueError, match="k_scale is given"):
        jitattn.gather_kv(pools[0], PAGES, LENS, k_scale=1.0)
    with pytest.raises(TypeError, match="seq_lens is a list"):
        jitattn.gather_kv(pools[0], PAGES, [5, 8])


def test_scales_of_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_kernels(monkeypatch, 1)
    pool = torch.ones(POOL.shape).to(torch.float8_e4m3fn)
    for k_scale in (2.0, 3.0, torch.tensor([5.0, 7.0]), torch.tensor([2.0, 4.0]), None, 2.0):
        k, v, _ = jitattn.gather_kv(pool, PAGES, LENS, k_scale=k_scale, v_scale=9.0)
        want = torch.as_tensor(1.0 if k_scale is None else k_scale).expand(2)
        assert torch.equal(k[0, :, 0].float(), want)
        assert bool((v == 9).all())


def test_what_has_no_page_is_nan_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries outside the cache, rows outside the table, tokens past it, and rows past out."""
    emulate_kernels(monkeypatch, 1)
    pool = torch.ones(POOL.shape).bfloat16()
    table = ints([1, -1], [5, 4], [3, 2**31 - 1])
    pages = jitattn.BlockTable(table, rows=ints(0, 1, 2, 3, -1))
    k, _, indptr = jitattn.gather_kv(pool, pages, ints(8, 8, 10, 2, 3))
    assert indptr.tolist() == [0, 8, 16, 26, 28, 31]
    lives = [1] * 4 + [0] * 4 + [0] * 4 + [1] * 4 + [1] * 4 + [0] * 6 + [0] * 5
    assert torch.equal(~k[:, 0, 0].isnan(), torch.tensor(lives).bool())
    out = outs(7)
    k, _, indptr = jitattn.gather_kv(pool, pages, ints(4, 8, 0, 0, -3), out=out)
    assert indptr.tolist() == [0, 4, 12, 12, 12, 12]
    assert k.data_ptr() == out[0].data_ptr()
    assert bool((k[:4] == 1).all())
    assert bool(k[4:].isnan().all())
    stored = pool.to(torch.int8)
    k, _, _ = jitattn.gather_kv(stored, pages, ints(8, 0, 0, 0, 0), out_dtype="int8")
    assert k[:, 0, 0].tolist() == [1] * 4 + [0] * 4


# --- JITATTN_CHECK --------------------------------------------------------------------------------


CHECKED: dict[str, tuple[Call, str]] = {
    "a long request": (gathered(lens=ints(9, 1)), r"seq_lens\[0\] is 9: the table lists 8"),
    "a dead page": (
        gathered(pages=jitattn.BlockTable(ints([1, -1], [3, 4]))),
        "request 0 has a token at slot -1 of K",
    ),
    "short outs": (gathered(out=outs(12)), "out has 12 rows: seq_lens have 13 tokens"),
    "a target twice": (copied(pairs=ints([0, 1], [2, 1])), "page 1 is a destination twice"),
    "a page that isn't": (copied(pairs=ints([1, 9])), r"has \[1, 9\]: dst\[0\] has 5 pages"),
    "slots apart": (built(ints([4, 5, 6, 8, 12, 13], [0] * 6)), "request 0: the slots"),
    "a short map": (built(slot_map=torch.arange(12)), "slot 12: slot_map has 12 entries"),
    "too many tokens": (info(tokens=2), "q_lens have 3 tokens together: num_tokens is 2"),
    "no page": (
        info(ints(9, 1), pages=PAGES, page_size=4),
        r"seq_lens\[0\] is 9: the table lists 8 tokens",
    ),
}


@pytest.mark.parametrize("name", CHECKED)
def test_values_are_looked_at_when_asked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernels leave out or make NaN is an error then, at every call."""
    call, match = CHECKED[name]
    emulate_kernels(monkeypatch, 1)
    before = POOL.clone()
    if name != "a target twice":  # which has the bytes of either
        call()
    emulate_kernels(monkeypatch, 1)
    monkeypatch.setenv("JITATTN_CHECK", "1")
    POOL.copy_(before)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"JITATTN_CHECK: .*{match}"):
            call()
    assert torch.equal(POOL, before)


def test_good_calls_pass_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_kernels(monkeypatch, 1)
    monkeypatch.setenv("JITATTN_CHECK", "1")
    for _ in range(2):
        k, _, indptr = jitattn.gather_kv(POOL, PAGES, LENS)
        assert indptr.tolist() == [0, 5, 13]
        assert k.shape[0] == 13
        table = jitattn.build_block_table(SLOTS, ints(6, 5), 4)
        assert table.table.tolist() == [[1, 3], [0, 2]]
        found = jitattn.batch_info(LENS, ints(1, 2), num_tokens=4, pages=PAGES, page_size=4)
        assert found.slots is not None
        assert found.slots.tolist() == [8, 18, 19, -1]
        jitattn.copy_pages(POOL, POOL.clone(), ints([0, 1], [-1, 9]))
