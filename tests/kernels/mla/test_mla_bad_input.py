"""What MLAPlanner refuses: before any launch, naming the argument, what was given and wanted."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

import jitattn
from jitattn import ConfigError
from tests.support.mla import MLACase, make_inputs
from tests.support.zeros import bf16, fp8, int32

REFUSED = (ValueError, TypeError)
B, H, RANK, ROPE, PAGE, PAGES, WIDTH = 2, 8, 256, 32, 4, 6, 3
GOOD = {
    "num_heads": H,
    "kv_lora_rank": RANK,
    "qk_rope_head_dim": ROPE,
    "page_size": PAGE,
    "sm_scale": 0.1,
}
ROW_BYTES = RANK + RANK // 32 + 2 * ROPE


@dataclass
class Call:
    """One valid call; a test changes a single argument of it."""

    planner: dict[str, object] = field(default_factory=dict)
    table: object = field(default_factory=lambda: int32(B, WIDTH))
    seq_lens: object = field(default_factory=lambda: torch.tensor([5, 9], dtype=torch.int32))
    plan: dict[str, object] = field(default_factory=dict)
    kv: object = field(default_factory=lambda: bf16(PAGES, PAGE, RANK + ROPE))
    bind: dict[str, object] = field(default_factory=dict)
    q_nope: object = field(default_factory=lambda: bf16(B, H, RANK))
    q_pe: object = field(default_factory=lambda: bf16(B, H, ROPE))
    run: dict[str, object] = field(default_factory=dict)

    def __call__(self) -> object:
        planner = jitattn.MLAPlanner(**(GOOD | self.planner), device="cpu")
        plan = planner.plan(jitattn.BlockTable(self.table), self.seq_lens, **self.plan)
        kv = planner.bind(self.kv, **self.bind)
        return plan.run(self.q_nope, self.q_pe, kv, **self.run)


FP8 = {"kv_dtype": "float8_e4m3fn"}


def rows(*, cut: int = 0, at: int = 0, **changes: object) -> Call:
    """A valid call whose rows hold their scales, each ``cut`` bytes from the next."""
    kv = torch.zeros(PAGES, PAGE, ROW_BYTES + cut, dtype=torch.uint8)[..., at : at + ROW_BYTES]
    return Call(planner=FP8 | changes, kv=kv)


def ragged(kv: object) -> Call:
    call = Call(planner={"page_table": "ragged", "page_size": None}, kv=kv)
    return call


def test_the_unchanged_calls_are_accepted() -> None:
    assert Call()().shape == (B, H, RANK)
    assert Call(kv=(bf16(PAGES, PAGE, RANK), bf16(PAGES, PAGE, ROPE)))().shape == (B, H, RANK)
    assert rows()().shape == (B, H, RANK)
    assert rows(cut=4, at=4)().shape == (B, H, RANK)
    for scale in (None, 2, 0.5, torch.ones(()), torch.ones(1)):
        call = Call(planner=FP8, kv=fp8(PAGES, PAGE, RANK + ROPE), bind={"k_scale": scale})
        assert call().shape == (B, H, RANK)


# --- the constructor ------------------------------------------------------------------------------

CONFIGS: dict[str, tuple[dict[str, object], str]] = {
    "no heads": ({"num_heads": 0}, "num_heads=0 is not from 1 to 128"),
    "too many heads": ({"num_heads": 129}, "num_heads=129"),
    "another rank": ({"kv_lora_rank": 384}, "kv_lora_rank=384 is not one of 256, 512"),
    "another rope part": ({"qk_rope_head_dim": 48}, "qk_rope_head_dim=48 is not one of 32, 64"),
    "page_size 0": ({"page_size": 0}, "page_size=0"),
    "no pages": ({"page_size": None}, "page_size=None"),
    "pages of a ragged cache": ({"page_table": "ragged"}, "page_size=4"),
    "no such table": ({"page_table": "tree"}, "page_table=tree"),
    "fp8 queries": ({"q_dtype": "float8_e4m3fn"}, "q_dtype=float8_e4m3fn"),
    "e5m2 cache": ({"kv_dtype": torch.float8_e5m2}, "kv_dtype=float8_e5m2 is neither"),
    "bytes of no type": ({"kv_dtype": torch.uint8}, "kv_dtype=uint8"),
    "two dtypes": ({"kv_dtype": "float16"}, "kv_dtype=float16"),
    "integer out": ({"out_dtype": torch.int8}, "out_dtype=int8"),
    "no sm_scale": ({"sm_scale": None}, "sm_scale=None: expected a number"),
    "NaN scale": ({"sm_scale": float("nan")}, "sm_scale=nan"),
    "boolean heads": ({"num_heads": True}, "num_heads=True"),
    "no bool": ({"causal": 1}, "causal=1"),
    "no SMs": ({"num_sms": 0}, "num_sms=0"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configuration(name: str) -> None:
    arguments, match = CONFIGS[name]
    with pytest.raises(ConfigError, match=match) as error:
        Call(planner=arguments)()
    support = jitattn.check_config(planner="mla", **(GOOD | arguments))
    assert not support.supported
    assert any(re.search(match, reason) for reason in support.reasons)
    assert set(error.value.reasons) <= set(support.reasons)


def test_every_reason_is_given_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        Call(planner={"num_heads": 0, "kv_lora_rank": 8, "page_size": 0})()
    assert len(error.value.reasons) == 3


@pytest.mark.parametrize("name", ["num_qo_heads", "window_left", "head_dim", "softmax_scale"])
def test_unknown_arguments(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        Call(planner={name: 1})()
    assert any(name in x for x in jitattn.check_config(planner="mla", **{name: 1}).reasons)


def test_sm_scale_has_no_default() -> None:
    with pytest.raises(TypeError, match="sm_scale"):
        jitattn.MLAPlanner(device="cpu")


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_backend_that_does_not_exist_here(backend: str) -> None:
    with pytest.raises(ConfigError, match=backend):
        Call(planner={"backend": backend})()


def test_another_planner() -> None:
    reasons = jitattn.check_config(planner="sparse").reasons
    assert reasons == ["planner=sparse is not mla; leave it out for attention"]


# --- everything after it --------------------------------------------------------------------------

PAIR = "page_size=4, kv_lora_rank=256, qk_rope_head_dim=32"
CALLS: dict[str, tuple[Callable[[], Call], str]] = {
    # tables and plan
    "table of rank 1": (lambda: Call(table=int32(4)), "table"),
    "table with three rows": (lambda: Call(table=int32(2, 3, 3)), r"table.*\[2, 3, 3\].*is 2"),
    "separate table, shared planner": (lambda: Call(table=int32(B, 2, WIDTH)), "separate.*shared"),
    "shared table, separate planner": (
        lambda: Call(planner={"page_table": "separate"}),
        "shared.*separate",
    ),
    "seq_lens too short": (lambda: Call(seq_lens=int32(1)), "seq_lens has 1 entries: expected 2"),
    "float seq_lens": (lambda: Call(seq_lens=torch.ones(B)), "seq_lens has dtype float32"),
    "longer than the table": (
        lambda: Call(seq_lens=torch.tensor([5, 13])),
        r"seq_lens\[1\] is 13: .* 12",
    ),
    "max_q_len without qo_indptr": (lambda: Call(plan={"max_q_len": 4}), "max_q_len is 4"),
    "no max_q_len": (
        lambda: Call(plan={"qo_indptr": torch.tensor([0, 1, 2]).int()}),
        "max_q_len is None",
    ),
    # bind
    "no tensor": (lambda: Call(kv=None), "kv is a NoneType"),
    "three tensors": (lambda: Call(kv=(bf16(PAGES, PAGE, RANK),) * 3), "kv is a tuple"),
    "kv of rank 4": (
        lambda: Call(kv=bf16(PAGES, PAGE, 1, RANK + ROPE)),
        rf"kv has shape \[6, 4, 1, 288\]: expected \[num_pages, 4, 288\] with {PAIR}",
    ),
    "kv of rank 2": (lambda: Call(kv=bf16(PAGES, RANK + ROPE)), r"kv has shape \[6, 288\]"),
    "kv of no rank": (lambda: Call(kv=bf16()), r"kv has shape \[\]"),
    "K and V halves": (lambda: Call(kv=bf16(PAGES, 2, PAGE, RANK + ROPE)), "kv has shape"),
    "another page size": (
        lambda: Call(kv=bf16(PAGES, 8, RANK + ROPE)),
        r"kv has shape \[6, 8, 288\]: expected \[num_pages, 4, 288\]",
    ),
    "a latent alone": (lambda: Call(kv=bf16(PAGES, PAGE, RANK)), r"\[6, 4, 256\].*288"),
    "the pair turned": (
        lambda: Call(kv=(bf16(PAGES, PAGE, ROPE), bf16(PAGES, PAGE, RANK))),
        r"kv\[0\] \(latent\) has shape \[6, 4, 32\]: expected \[num_pages, 4, 256\]",
    ),
    "another page size of the rope part": (
        lambda: Call(kv=(bf16(PAGES, PAGE, RANK), bf16(PAGES, 8, ROPE))),
        r"kv\[1\] \(rope\) has shape \[6, 8, 32\]",
    ),
    "another number of pages": (
        lambda: Call(kv=(bf16(PAGES, PAGE, RANK), bf16(7, PAGE, ROPE))),
        r"kv\[0\] \(latent\) has 6 pages and kv\[1\] \(rope\) 7",
    ),
    "ragged kv with pages": (
        lambda: ragged(bf16(PAGES, PAGE, RANK + ROPE)),
        "pages is BlockTable",
    ),
    "another dtype": (lambda: Call(kv=bf16(PAGES, PAGE, 288).half()), "kv has dtype float16"),
    "bytes, bf16 planner": (
        lambda: Call(kv=torch.zeros(PAGES, PAGE, 288, dtype=torch.uint8)),
        "uint8.*bfloat16",
    ),
    "bf16 cache, FP8 planner": (lambda: Call(planner=FP8), "bfloat16.*float8_e4m3fn"),
    "bf16 latent, FP8 planner": (
        lambda: Call(planner=FP8, kv=(bf16(PAGES, PAGE, RANK), bf16(PAGES, PAGE, ROPE))),
        r"kv\[0\].*bfloat16",
    ),
    "fp16 rope part of a bf16 planner": (
        lambda: Call(planner=FP8, kv=(fp8(PAGES, PAGE, RANK), bf16(PAGES, PAGE, ROPE).half())),
        r"kv\[1\].*float16.*bfloat16",
    ),
    "strided elements": (lambda: Call(kv=bf16(PAGES, PAGE, 576)[..., ::2]), "contiguous"),
    "kv on another device": (lambda: Call(kv=bf16(PAGES, PAGE, 288).to("meta")), "kv is on meta"),
    "bytes a row of a bf16 planner": (
        lambda: Call(kv=torch.zeros(PAGES, PAGE, ROW_BYTES, dtype=torch.uint8)),
        "uint8.*bfloat16",
    ),
    "one byte a row too few": (
        lambda: Call(planner=FP8, kv=torch.zeros(6, 4, ROW_BYTES - 1, dtype=torch.uint8)),
        rf"\[6, 4, {ROW_BYTES - 1}\]",
    ),
    "rows with scales, another page size": (
        lambda: Call(planner=FP8, kv=torch.zeros(6, 8, ROW_BYTES, dtype=torch.uint8)),
        rf"\[6, 8, {ROW_BYTES}\]: expected \[num_pages, 4, {ROW_BYTES}\]",
    ),
    "rows with scales at odd bytes": (lambda: rows(cut=4, at=1), "multiples of 4 bytes"),
    "rows with scales of odd strides": (lambda: rows(cut=3), "multiples of 4 bytes"),
    "rows with scales, fp16 queries": (lambda: rows(q_dtype="float16"), "q_dtype=float16"),
    "k_scale beside scales in rows": (
        lambda: Call(planner=FP8, kv=rows().kv, bind={"k_scale": 0.5}),
        "k_scale is given, but rows of 328 bytes",
    ),
    "k_scale for bf16": (lambda: Call(bind={"k_scale": 0.5}), "k_scale.*bfloat16"),
    "v_scale": (
        lambda: Call(planner=FP8, kv=fp8(6, 4, 288), bind={"v_scale": 0.5}),
        "v_scale is given, but a value is the latent",
    ),
    "two scales": (
        lambda: Call(planner=FP8, kv=fp8(6, 4, 288), bind={"k_scale": torch.ones(2)}),
        r"k_scale has shape \[2\]: expected \[\] or \[1\]",
    ),
    "bf16 scale": (
        lambda: Call(planner=FP8, kv=fp8(6, 4, 288), bind={"k_scale": bf16(1)}),
        "k_scale has dtype bfloat16",
    ),
    "NaN for a scale": (
        lambda: Call(planner=FP8, kv=fp8(6, 4, 288), bind={"k_scale": float("nan")}),
        "k_scale is nan",
    ),
    # run
    "q_nope of rank 2": (lambda: Call(q_nope=bf16(B, H * RANK)), r"q_nope has shape \[2, 2048\]"),
    "too few tokens": (lambda: Call(q_nope=bf16(1, H, RANK)), r"q_nope.*\[1, 8, 256\].*\[2, 8"),
    "another head count": (lambda: Call(q_nope=bf16(B, 4, RANK)), r"q_nope.*\[2, 4.*\[2, 8"),
    "both parts in q_nope": (lambda: Call(q_nope=bf16(B, H, RANK + ROPE)), "q_nope.*288.*256"),
    "q_pe of other tokens": (lambda: Call(q_pe=bf16(3, H, ROPE)), r"q_pe.*\[3, 8, 32\].*\[2, 8"),
    "q_pe of another width": (lambda: Call(q_pe=bf16(B, H, 64)), "q_pe.*64.*32"),
    "q_pe of another dtype": (lambda: Call(q_pe=bf16(B, H, ROPE).half()), "q_pe.*float16.*bfloat"),
    "q_nope of another dtype": (lambda: Call(q_nope=bf16(B, H, RANK).float()), "q_nope.*float32"),
    "list for q_pe": (lambda: Call(q_pe=[1.0]), "q_pe is a list"),
    "strided q_nope": (lambda: Call(q_nope=bf16(B, H, 512)[..., ::2]), "q_nope.*contiguous"),
    "strided q_pe": (lambda: Call(q_pe=bf16(B, H, 64)[..., ::2]), "q_pe.*contiguous"),
    "q_nope on another device": (lambda: Call(q_nope=bf16(B, H, RANK).to("meta")), "q_nope.*meta"),
    "q_pe on another device": (lambda: Call(q_pe=bf16(B, H, ROPE).to("meta")), "q_pe.*meta"),
    "out of another shape": (lambda: Call(run={"out": bf16(B, H, ROPE)}), r"out.*32.*256"),
    "out of another dtype": (lambda: Call(run={"out": bf16(B, H, RANK).float()}), "out.*float32"),
    "lse of another shape": (lambda: Call(run={"lse": torch.zeros(B, H + 1)}), r"lse.*\[2, 9\]"),
    "q_scale": (lambda: Call(run={"q_scale": 0.5}), "q_scale is given"),
    "out_scale": (lambda: Call(run={"out_scale": torch.tensor(0.5)}), "out_scale is given"),
    "a word for return_lse": (lambda: Call(run={"return_lse": "no"}), "return_lse is a str"),
    "out over q_pe": (
        lambda: joint_out(),
        "out shares memory with q_pe",
    ),
    "pages of another layout": (
        lambda: Call(run={"pages": jitattn.BlockTable(int32(B, 2, WIDTH))}),
        "pages",
    ),
    "pages of another batch": (
        lambda: Call(run={"pages": jitattn.BlockTable(int32(B + 1, WIDTH))}),
        "pages has 3 requests",
    ),
    "raw tensor for pages": (lambda: Call(run={"pages": int32(B, WIDTH)}), "pages is a Tensor"),
    "an id beyond the cache": (lambda: Call(table=int32(B, WIDTH) + 6), "the entry 6 for kv"),
}


def joint_out() -> Call:
    joint = bf16(B, H, RANK + ROPE)
    return Call(q_pe=joint[..., RANK:], run={"out": joint[..., ROPE:]})


@pytest.mark.parametrize("name", CALLS)
def test_call(name: str) -> None:
    make, match = CALLS[name]
    with pytest.raises(REFUSED, match=f"(?s){match}"):
        make()()


def test_ragged_tensors_have_no_pages() -> None:
    planner = jitattn.MLAPlanner(
        **(GOOD | {"page_table": "ragged", "page_size": None}), device="cpu"
    )
    assert planner.bind(bf16(9, RANK + ROPE)).latent.tensor.shape == (9, 1, RANK)
    with pytest.raises(ValueError, match=r"kv has shape .*: expected \[num_kv_tokens, 288\]"):
        planner.bind(bf16(PAGES, PAGE, RANK + ROPE))
    with pytest.raises(ValueError, match=r"kv\[0\] \(latent\) has 9 tokens and kv\[1\] .* 8"):
        planner.bind((bf16(9, RANK), bf16(8, ROPE)))


def test_out_over_a_query_is_refused() -> None:
    q_nope = bf16(B, H, RANK)
    with pytest.raises(ValueError, match="out shares memory with q_nope"):
        Call(q_nope=q_nope, run={"out": q_nope})()


def test_a_cache_of_another_planner() -> None:
    bound = jitattn.MLAPlanner(**(GOOD | {"num_heads": 4}), device="cpu").bind(Call().kv)
    planner = jitattn.MLAPlanner(**GOOD, device="cpu")
    plan = planner.plan(jitattn.BlockTable(int32(B, WIDTH)), int32(B))
    with pytest.raises(ValueError, match="kv was bound by a planner of another configuration"):
        plan.run(bf16(B, H, RANK), bf16(B, H, ROPE), bound)


def test_nothing_is_written_when_refused() -> None:
    out = torch.full((B, H, RANK), 7.0, dtype=torch.bfloat16)
    with pytest.raises(REFUSED):
        Call(run={"out": out}, q_pe=bf16(B, H, 64))()
    assert bool((out == 7).all())


CHECKED = MLACase(
    num_heads=1, kv_lora_rank=256, qk_rope_head_dim=32, page_size=16, lengths=(40, 0, 70)
)


@pytest.mark.parametrize(
    ("form", "which", "name"),
    [("pair", 0, "latent"), ("pair", 1, "rope"), ("one", 0, "kv"), ("fp8_rows", 0, "kv")],
)
@pytest.mark.parametrize("check", [False, True])
def test_entries_outside_a_pool_name_it(
    monkeypatch: pytest.MonkeyPatch, check: bool, form: str, which: int, name: str
) -> None:
    monkeypatch.setenv("JITATTN_CHECK", "1" if check else "0")
    inputs = make_inputs(MLACase(**(vars(CHECKED) | {"form": form, "page_table": "separate"})))
    inputs.run()
    inputs.table[0, which, 2] = -7
    with pytest.raises(ValueError, match=rf"request 0\b.*-7 for {name}\b"):
        inputs.run()


@pytest.mark.parametrize("page_table", ["shared", "csr", "token", "ragged"])
def test_the_check_finds_nothing_in_a_valid_call(
    monkeypatch: pytest.MonkeyPatch, page_table: str
) -> None:
    monkeypatch.setenv("JITATTN_CHECK", "1")
    inputs = make_inputs(MLACase(**(vars(CHECKED) | {"page_table": page_table})))
    inputs.run()
    inputs.seq_lens[2] = 5000
    with pytest.raises(ValueError, match=r"seq_lens\[2\] is 5000"):
        inputs.run()
