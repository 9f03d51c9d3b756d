"""preprocess_qkv and append_kv on the CPU: the definition, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import jitattn
from jitattn.base.errors import ConfigError
from jitattn.kernels.preprocess.spec import PreprocessConfig, config_of
from jitattn.spec.layout import Loader
from tests.support.token_cases import CACHE_DTYPES, POISON, TokenCase, make_token_inputs
from tests.support.token_sets import kinds_of

TABLE = torch.tensor([[1, 0], [2, 3]], dtype=torch.int32)


def arguments(**others: Any) -> dict[str, Any]:
    """Two requests, of 3 and 1 new tokens at 14, 15, 16 and at 4; heads 4/2, head_dim 32."""
    given: dict[str, Any] = {
        "qkv": torch.randn(4, 8 * 32).bfloat16(),
        "kv_cache": torch.zeros(4, 2, 16, 2, 32, dtype=torch.bfloat16),
        "num_qo_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "pages": jitattn.BlockTable(TABLE),
        "seq_lens": torch.tensor([17, 5], dtype=torch.int32),
        "qo_indptr": torch.tensor([0, 3, 4], dtype=torch.int32),
    }
    return {name: value for name, value in (given | others).items() if value is not None}


def test_where_tokens_go() -> None:
    given = arguments()
    q = jitattn.preprocess_qkv(**given)
    heads = given["qkv"].view(4, 8, 32)
    cache = given["kv_cache"]
    assert torch.equal(q, heads[:, :4])
    for token, (page, place) in enumerate(((1, 14), (1, 15), (0, 0), (2, 4))):
        assert torch.equal(cache[page, 0, place], heads[token, 4:6])
        assert torch.equal(cache[page, 1, place], heads[token, 6:])
        cache[page, :, place] = 0
    assert not cache.any()


def test_steps_follow_each_other() -> None:
    """Bias, norm and rotary embedding, written out for one token."""
    rope = jitattn.Rope(32)
    bias, q_norm, k_norm = torch.randn(256).bfloat16(), torch.randn(32), torch.randn(32).half()
    given = arguments(rope=rope, bias=bias, q_norm=q_norm, k_norm=k_norm, norm_eps=1e-3)
    q = jitattn.preprocess_qkv(**given)
    row = (given["qkv"].double() + bias.double())[1].view(8, 32)
    for head, found in ((2, q[1, 2]), (5, given["kv_cache"][1, 0, 15, 1])):
        weights = q_norm if head < 4 else k_norm
        x = row[head] / (row[head].square().mean() + 1e-3).sqrt() * weights.double()
        angles = 15 * rope.inv_freq.double()
        a, b = x[:16], x[16:]
        want = torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()))
        torch.testing.assert_close(found.double(), want, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(given["kv_cache"][1, 1, 15, 0].double(), row[6], rtol=2**-8, atol=0)


def test_positions() -> None:
    """Derived, given and shifted ones come to the same."""
    rope = jitattn.Rope(32)
    want = jitattn.preprocess_qkv(**(given := arguments(rope=rope)))
    positions = torch.tensor([14, 15, 16, 4])
    assert torch.equal(jitattn.preprocess_qkv(**given, positions=positions), want)
    shifted = given | {"seq_lens": torch.tensor([15, 2]), "position_delta": torch.tensor([2, 3])}
    assert torch.equal(jitattn.preprocess_qkv(**shifted), want)
    slots = {"pages": None, "slots": torch.tensor([0, 1, -1, 3])}
    assert torch.equal(jitattn.preprocess_qkv(**(given | slots)), want)
    three = given | {"rope": jitattn.Rope(32, mrope_section=(4, 6, 6))}
    assert torch.equal(jitattn.preprocess_qkv(**three), want)
    assert torch.equal(jitattn.preprocess_qkv(**three, positions=positions.expand(3, 4)), want)


def test_gemma_multiplies_by_one_more_than_its_weight() -> None:
    weight = torch.randn(32).bfloat16()
    found = jitattn.preprocess_qkv(**(given := arguments(q_norm=1 + weight.float())))
    x = given["qkv"].view(4, 8, 32)[:, :4].float()
    want = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + weight.float())
    torch.testing.assert_close(found.float(), want, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("kv_dtype", CACHE_DTYPES)
def test_what_is_stored_is_what_quantize_kv_says(kv_dtype: str) -> None:
    case = TokenCase(is_append=True, kv_dtype=kv_dtype, page_table="slots")
    scales = "none" if kv_dtype in ("bfloat16", "float16") else "heads"
    inputs = make_token_inputs(replace(case, scales=scales, extra_rows=0)).to("cpu")
    slots = inputs.arguments["slots"]
    inputs.run()
    cache, kept = inputs.arguments["kv_cache"], slots >= 0
    where = slots[kept] // 16, slots[kept] % 16
    for i, name in enumerate(("k", "v")):
        scale = inputs.arguments.get(f"{name}_scale")
        want = jitattn.quant.quantize_kv(inputs.arguments[name][kept], kv_dtype, scale=scale)
        if isinstance(want, tuple):
            found = getattr(cache, name), getattr(cache, f"{name}_block_scales")
        else:
            want, found = (want,), (cache[i],)
        for a, b in zip(found, want, strict=True):
            assert torch.equal(a.view(torch.uint8)[where], b.view(torch.uint8))


def test_c24_c25_bytes_in_the_cache() -> None:
    values = torch.zeros(1, 1, 16)
    values[0, 0, :7] = torch.tensor([1.0, 2.0, 3.5, 0.25, -1.0, 448.0, 1e9])
    for kv_dtype, want in (
        ("float8_e5m2", [0x3C, 0x40, 0x43, 0x34, 0xBC, 0x5F, 0x7B]),
        ("float8_e4m3fn", [0x38, 0x40, 0x46, 0x28, 0xB8, 0x7E, 0x7E]),
    ):
        for dtype in (getattr(torch, kv_dtype), torch.uint8):
            cache = torch.zeros(1, 2, 16, 1, 16, dtype=torch.uint8).view(dtype)
            k = values.bfloat16()
            jitattn.append_kv(k, k, cache, slots=torch.tensor([5]), kv_dtype=kv_dtype)
            assert cache.view(torch.uint8)[0, 1, 5, 0, :7].tolist() == want
    with pytest.raises(ValueError, match="kv_dtype is None: say what its bytes are"):
        jitattn.append_kv(k, k, cache.view(torch.uint8), slots=torch.tensor([5]))


def test_in_place_and_past_the_end() -> None:
    given = arguments(rope=jitattn.Rope(32), qkv=torch.randn(6, 256).half())
    given["kv_cache"] = given["kv_cache"].half()
    before = given["qkv"].clone()
    want = jitattn.preprocess_qkv(**given)
    view = given["qkv"][:, :128].view(6, 4, 32)
    assert jitattn.preprocess_qkv(**given, q_out=view) is view
    assert torch.equal(view[:4], want[:4])
    assert torch.equal(given["qkv"][4:], before[4:])
    assert torch.equal(given["qkv"][:, 128:], before[:, 128:])


def test_quantised_q() -> None:
    q_out = torch.zeros(4, 4, 32).to(torch.float8_e4m3fn)
    want = jitattn.preprocess_qkv(**(given := arguments(rope=jitattn.Rope(32))))
    found = jitattn.preprocess_qkv(**given, q_out=q_out, q_scale=torch.tensor([0.5]))
    assert found is q_out
    stored = jitattn.quant.quantize_kv(want, "float8_e4m3fn", scale=0.5)
    assert isinstance(stored, Tensor)
    assert torch.equal(found.view(torch.uint8), stored.view(torch.uint8))


def test_tails_become_zero() -> None:
    given = arguments(zero_tail=True)
    given["kv_cache"].fill_(math.nan)
    jitattn.preprocess_qkv(**given)
    cache = given["kv_cache"]
    assert not cache[0, :, 1:].any()
    assert not cache[2, :, 5:].any()
    assert bool(cache[1, :, :14].isnan().all())
    assert bool(cache[3].isnan().all())


def test_padding_requests_do_nothing() -> None:
    case = TokenCase(pairs=((1, 0), (2, -1), (0, 7)), q_out="given")
    inputs = make_token_inputs(case).to("cpu")
    q = inputs.run()
    assert q is not None
    assert all(bool((pool == POISON).all()) for pool in inputs.pools)
    assert bool((q.view(torch.int16) == -1).all())


def test_padding_tokens_may_have_any_slot_and_position() -> None:
    """Rows from qo_indptr[-1] on are not read, nor are those of empty requests."""
    given = arguments(
        pages=None,
        slots=torch.tensor([5, 6, 7, 2**40]),
        seq_lens=torch.tensor([17, 0], dtype=torch.int32),
        rope=jitattn.Rope(32, max_position=64),
        positions=torch.tensor([14, 15, 16, 2**40]),
    )
    jitattn.preprocess_qkv(**given)
    written = given["kv_cache"][:, 0].flatten(0, 1).abs().sum((1, 2)).nonzero().flatten()
    assert written.tolist() == [5, 6, 7]


@pytest.mark.parametrize("section", [None, [8, 4, 4]])
def test_no_tokens_with_positions(section: list[int] | None) -> None:
    given = arguments(qkv=torch.zeros(0, 256).bfloat16(), pages=None, slots=torch.arange(0))
    given |= {"seq_lens": None, "qo_indptr": None, "rope": jitattn.Rope(32, mrope_section=section)}
    positions = torch.zeros((3, 0) if section else 0, dtype=torch.int64)
    assert jitattn.preprocess_qkv(**given, positions=positions).shape == (0, 4, 32)


def test_no_tokens() -> None:
    given = arguments(
        qkv=torch.zeros(0, 256).bfloat16(), qo_indptr=torch.zeros(3, dtype=torch.int32)
    )
    assert tuple(jitattn.preprocess_qkv(**given, rope=jitattn.Rope(32)).shape) == (0, 4, 32)


ROPE = jitattn.Rope(32)
SLOTS = torch.arange(4)
FP8_CACHE = torch.zeros(4, 2, 16, 2, 32, dtype=torch.uint8).view(torch.float8_e4m3fn)
WIDE = torch.zeros(4, 256 + 64).bfloat16()
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"qkv": torch.zeros(4, 255).bfloat16()}, r"qkv has shape \[4, 255\].*= 256"),
    "float32": ({"qkv": torch.zeros(4, 256)}, "qkv has dtype float32"),
    "a list": ({"qkv": 3}, "qkv is a int"),
    "parts": ({"qkv": (torch.zeros(4, 4, 32).bfloat16(),) * 3}, r"k has shape \[4, 4, 32\]"),
    "heads": ({"num_qo_heads": 3}, "num_qo_heads is 3: expected a multiple"),
    "no heads": ({"num_kv_heads": 0}, "num_kv_heads is 0"),
    "head_dim": ({"head_dim": 8, "num_qo_heads": 16, "num_kv_heads": 8}, "head_dim is 8"),
    "cache rank": ({"kv_cache": torch.zeros(4, 16, 2, 32).bfloat16()}, "kv_cache has shape"),
    "cache heads": ({"kv_cache": torch.zeros(4, 2, 2, 16, 32).bfloat16()}, "rows of num_kv_heads"),
    "cache dtype": ({"kv_cache": torch.zeros(4, 2, 16, 2, 32)}, "kv_cache has dtype float32"),
    "another kv_dtype": ({"kv_dtype": "int8"}, "kv_dtype is int8: kv_cache has dtype bfloat16"),
    "nvfp4 bytes": (
        {"kv_cache": FP8_CACHE.view(torch.uint8), "kv_dtype": "nvfp4"},
        "give a QuantizedKV",
    ),
    "K upon V": (
        {"kv_cache": torch.zeros(4, 1, 16, 2, 32).bfloat16().expand(-1, 2, -1, -1, -1)},
        "kv_cache's K shares memory with kv_cache's V",
    ),
    "no row": (
        {"pages": jitattn.BlockTable(TABLE, rows=torch.tensor([0, -1]))},
        r"rows\[1\] is -1: the table has 2 rows",
    ),
    "long for its rope": (
        {"rope": jitattn.Rope(32, max_position=16)},
        "positions reach 16: rope has max_position=16",
    ),
    "a delta beyond": (
        {"rope": jitattn.Rope(32, max_position=17), "position_delta": torch.tensor([0, 13])},
        "positions reach 17: rope has max_position=17",
    ),
    "a scale that is 0 in float32": ({"kv_cache": FP8_CACHE, "k_scale": 1e-60}, "k_scale is 1e-60"),
    "a scale beyond float32": (
        {"kv_cache": FP8_CACHE, "k_scale": 1e60},
        "expected a finite float32",
    ),
    "a tail of text": ({"zero_tail": "no"}, "zero_tail is a str"),
    "layout": ({"kv_layout": "nhd"}, "kv_layout is 'nhd'"),
    "expanded cache": (
        {"kv_cache": torch.zeros(1, 2, 16, 2, 32).bfloat16().expand(4, -1, -1, -1, -1)},
        "share memory",
    ),
    "neither": ({"pages": None}, "pages or slots: neither is given"),
    "both": ({"slots": SLOTS}, "pages or slots: both are given"),
    "ragged": ({"pages": jitattn.RaggedKV(torch.tensor([0, 17, 22]).int())}, "RaggedKV"),
    "a tensor": ({"pages": TABLE}, "pages is a Tensor"),
    "no lengths": ({"seq_lens": None}, "seq_lens is None"),
    "lengths": ({"seq_lens": torch.tensor([17, 5, 1])}, "seq_lens has 3 entries: expected 2"),
    "offsets": ({"qo_indptr": torch.tensor([0, 4]).int()}, "qo_indptr has 2 entries: expected 3"),
    "a token each": ({"qo_indptr": None}, "seq_lens has 2 requests and qkv 4 tokens"),
    "too long": ({"seq_lens": torch.tensor([33, 5])}, r"seq_lens\[0\] is 33: its pages hold 32"),
    "too long for its pages": (
        {"pages": jitattn.CsrPages(torch.tensor([0, 1, 4]).int(), torch.arange(4).int())},
        r"seq_lens\[0\] is 17: its pages hold 16",
    ),
    "too short": ({"seq_lens": torch.tensor([2, 5])}, r"seq_lens\[0\] is 2: .* 3 new tokens"),
    "past the end": ({"qo_indptr": torch.tensor([0, 3, 5]).int()}, r"qo_indptr\[-1\] is 5"),
    "a page beyond": (
        {"pages": jitattn.BlockTable(TABLE + 2)},
        "pages lists page .* the cache has 4",
    ),
    "slots": ({"pages": None, "slots": SLOTS[:3]}, "slots has 3 entries: expected 4"),
    "a slot beyond": ({"pages": None, "slots": SLOTS + 64}, r"slots\[0\] is 64"),
    "float slots": ({"pages": None, "slots": SLOTS.float()}, "slots has dtype float32"),
    "rope": ({"rope": 10000.0}, "rope is a float"),
    "rope of others": ({"rope": jitattn.Rope(64)}, "rope has head_dim=64: expected 32"),
    "no rope": ({"positions": SLOTS}, "positions is given, but rope is None"),
    "positions": ({"rope": ROPE, "positions": SLOTS[:2]}, r"positions has shape \[2\]"),
    "three": ({"rope": ROPE, "positions": SLOTS.expand(3, 4)}, "mrope_section"),
    "no positions": (
        {"rope": ROPE, "pages": None, "slots": SLOTS, "seq_lens": None},
        "positions is None",
    ),
    "delta": (
        {"rope": ROPE, "positions": SLOTS, "position_delta": SLOTS[:2]},
        "position_delta is given, and so are positions",
    ),
    "delta of tokens": ({"rope": ROPE, "position_delta": SLOTS}, "position_delta has 4 entries"),
    "beyond max_position": (
        {"rope": jitattn.Rope(32, max_position=3), "positions": SLOTS},
        "positions reach 3",
    ),
    "bias": ({"bias": torch.zeros(255).bfloat16()}, r"bias has shape \[255\]: expected \[256\]"),
    "bias dtype": ({"bias": torch.zeros(256)}, "bias has dtype float32: expected bfloat16"),
    "norm": ({"q_norm": torch.zeros(128)}, r"q_norm has shape \[128\]: expected \[32\]"),
    "eps": ({"norm_eps": -1.0}, "norm_eps is -1"),
    "transform": ({"qk_transform": "fourier"}, "qk_transform is 'fourier': expected 'hadamard'"),
    "a flag as transform": ({"v_transform": True}, "v_transform is True: expected 'hadamard'"),
    "transform of 208": (
        {
            **{
                "v_transform": "hadamard",
                "head_dim": 208,
                "qkv": torch.zeros(4, 8 * 208).bfloat16(),
            },
            "kv_cache": torch.zeros(4, 2, 16, 2, 208).bfloat16(),
        },
        "v_transform is 'hadamard', but there is a Hadamard matrix of powers .* none of 208",
    ),
    "q_out": ({"q_out": torch.zeros(4, 2, 32).bfloat16()}, r"q_out has shape \[4, 2, 32\]"),
    "q_out dtype": ({"q_out": torch.zeros(4, 4, 32)}, "q_out has dtype float32"),
    "q_scale": ({"q_scale": 2.0}, "q_scale is given, but q_out is not"),
    "k_scale": ({"k_scale": 2.0}, "k_scale is given, but a cache of bfloat16"),
    "scale of heads": (
        {"kv_cache": FP8_CACHE, "v_scale": torch.ones(3)},
        r"v_scale has shape \[3\]: expected \[\], \[1\] or \[2\]",
    ),
    "scale 0": ({"kv_cache": FP8_CACHE, "v_scale": 0.0}, "v_scale is 0.0: values are divided"),
    "tail of slots": (
        {"pages": None, "slots": SLOTS, "zero_tail": True},
        "zero_tail is True: it needs pages",
    ),
    "overlap": (
        {"qkv": WIDE[:, :256], "q_out": WIDE[:, 192:].view(4, 4, 32)},
        "q_out shares memory with qkv's v",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    others, match = REFUSED[name]
    given = arguments()
    for argument, value in others.items():
        if value is None:
            given.pop(argument)
        else:
            given[argument] = value
    with pytest.raises((TypeError, ValueError), match=match):
        jitattn.preprocess_qkv(**given)


def test_columns_of_one_matrix_do_not_overlap() -> None:
    memory = torch.zeros(4, 256 + 128).bfloat16()
    given = arguments(qkv=memory[:, :256], q_out=memory[:, 256:].view(4, 4, 32))
    given["qkv"].normal_()
    assert torch.equal(jitattn.preprocess_qkv(**given), given["qkv"][:, :128].view(4, 4, 32))


def test_append_refuses_what_does_not_fit() -> None:
    k = torch.zeros(4, 2, 32).bfloat16()
    given = arguments()
    places = {name: given[name] for name in ("pages", "seq_lens", "qo_indptr")}
    cache = given["kv_cache"]
    with pytest.raises(ValueError, match=r"v has shape \[3, 2, 32\]: expected \[4, 2, head_dim\]"):
        jitattn.append_kv(k, k[:3], cache, **places)
    with pytest.raises(TypeError, match="v has dtype"):
        jitattn.append_kv(k, k.half(), cache, **places)
    with pytest.raises(ValueError, match="num_pages"):
        jitattn.append_kv(k, k, (cache[:, 0, 0], cache[:, 1, 0]), **places)
    with pytest.raises(ValueError, match="multiple of 32"):
        data = torch.zeros(4, 16, 2, 24, dtype=torch.uint8)
        blocks = torch.zeros(4, 16, 2, 3, dtype=torch.uint8)
        nvfp4 = jitattn.QuantizedKV(data, data, blocks, blocks)
        rope = jitattn.Rope(48, rotary_dim=16)
        qkv = torch.zeros(4, 8 * 48).bfloat16()
        others = arguments(qkv=qkv, kv_cache=nvfp4, head_dim=48, rope=rope)
        jitattn.preprocess_qkv(**others)


# --- configurations -------------------------------------------------------------------------------


def test_configurations_survive_their_text() -> None:
    for text in kinds_of():
        config = PreprocessConfig.parse(text)
        assert PreprocessConfig.parse(config.arguments_text()) == config
        vector, plain = config.specs("sm_90a")
        assert (vector.loader, plain.loader) == (Loader.VECTOR, Loader.PLAIN)
        assert config_of(vector) == config_of(plain) == config


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("kernel=gather", "names no kernel"),
        ("kernel=preprocess,head_dim=24", "head_dim=24 is not a multiple of 16"),
        ("kernel=preprocess,page_table=ragged", "page_table=ragged is not one of"),
        ("kernel=preprocess,kv_dtype=float32", "kv_dtype=float32 is not one of"),
        ("kernel=preprocess,out_dtype=float32", "out_dtype=float32"),
        ("kernel=preprocess,pairing=none,use_mrope=true", "use_mrope"),
        ("kernel=preprocess,head_dim=208,use_qk_hadamard=true", "use_qk_hadamard=True: there is a"),
        ("kernel=preprocess,head_dim_vo=208,use_v_hadamard=true", "use_v_hadamard=True: there is"),
        ("kernel=preprocess,use_v_hadamard=2", "use_v_hadamard=2 is neither true nor false"),
        ("kernel=preprocess,heads=3", "'heads=3' is not one of"),
        ("kernel=preprocess,page_size=0", "page_size=0"),
    ],
)
def test_configurations_refused(text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        PreprocessConfig.parse(text)
