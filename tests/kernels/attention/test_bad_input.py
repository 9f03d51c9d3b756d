"""What can't work is refused before any launch, naming the argument and what was given.

Everything runs on the CPU: the checks are the same ones that guard the kernels.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

import jitattn
from jitattn import ConfigError
from tests.support.zeros import bf16, fp8, int32

REFUSED = (ValueError, TypeError)
B, HQ, HKV, D, PAGE, PAGES, WIDTH = 2, 8, 2, 32, 4, 6, 3

GOOD = {
    "num_qo_heads": HQ,
    "num_kv_heads": HKV,
    "head_dim": D,
    "page_size": PAGE,
    "device": "cpu",
}


@dataclass
class Call:
    """One valid call; a test changes a single argument of it."""

    planner: dict[str, object] = field(default_factory=dict)
    table: object = field(default_factory=lambda: int32(B, WIDTH))
    rows: object = None
    seq_lens: object = field(default_factory=lambda: torch.tensor([5, 9], dtype=torch.int32))
    plan: dict[str, object] = field(default_factory=dict)
    cache: object = field(
        default_factory=lambda: (bf16(PAGES, PAGE, HKV, D), bf16(PAGES, PAGE, HKV, D))
    )
    bind: dict[str, object] = field(default_factory=dict)
    q: object = field(default_factory=lambda: bf16(B, HQ, D))
    run: dict[str, object] = field(default_factory=dict)

    def __call__(self) -> object:
        planner = jitattn.AttentionPlanner(**(GOOD | self.planner))
        pages = jitattn.BlockTable(self.table, rows=self.rows)
        plan = planner.plan(pages, self.seq_lens, **self.plan)
        return plan.run(self.q, planner.bind(self.cache, **self.bind), **self.run)


TOKENS = 6
MASKED = {"use_custom_mask": True}


def offsets(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def queries(qo_indptr: object = None, max_q_len: object = 3, num_tokens: int = TOKENS) -> Call:
    """A valid call with three query tokens a request."""
    indptr = offsets(0, 3, 6) if qo_indptr is None else qo_indptr
    plan = {"qo_indptr": indptr, "max_q_len": max_q_len}
    return Call(plan=plan, q=bf16(num_tokens, HQ, D))


def scaled(**scales: object) -> Call:
    """A valid call with an FP8 cache and these scales."""
    cache = (fp8(PAGES, PAGE, HKV, D), fp8(PAGES, PAGE, HKV, D))
    return Call(planner={"kv_dtype": "float8_e4m3fn"}, cache=cache, bind=scales)


def bytes_of(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.uint8)


def masked(custom_mask: object) -> Call:
    """The call of `queries` with a mask."""
    call = queries()
    call.planner, call.run = MASKED, {"custom_mask": custom_mask}
    return call


def test_the_unchanged_call_is_accepted() -> None:
    assert Call()().shape == (B, HQ, D)
    assert scaled(k_scale=2, v_scale=torch.ones(HKV))().shape == (B, HQ, D)
    assert queries()().shape == (TOKENS, HQ, D)
    assert masked(torch.ones(TOKENS, 4, dtype=torch.bool))().shape == (TOKENS, HQ, D)
    assert masked((bytes_of(9), offsets(0, 3, 9)))().shape == (TOKENS, HQ, D)


# --- the constructor ------------------------------------------------------------------------------

CONFIGS: dict[str, tuple[dict[str, object], str]] = {
    "window below -1": ({"window_left": -2}, "window_left=-2"),
    "heads that don't divide": ({"num_qo_heads": 10, "num_kv_heads": 4}, "num_qo_heads=10"),
    "no heads": ({"num_qo_heads": 0}, "num_qo_heads=0"),
    "no KV heads": ({"num_kv_heads": 0}, "num_kv_heads=0"),
    "head_dim no multiple of 16": ({"head_dim": 40}, "head_dim=40"),
    "head_dim between 256 and 512": ({"head_dim": 272}, "head_dim=272"),
    "head_dim too large": ({"head_dim": 528}, "head_dim=528"),
    "page_size 0": ({"page_size": 0}, "page_size=0"),
    "no such layout": ({"kv_layout": "DHN"}, "kv_layout=DHN"),
    "no such table": ({"page_table": "tree"}, "page_table=tree"),
    "no such dtype": ({"q_dtype": "float12"}, "q_dtype=float12"),
    "float32 cache": ({"q_dtype": torch.float32, "kv_dtype": torch.float32}, "q_dtype=float32"),
    "two dtypes": ({"kv_dtype": "float16"}, "kv_dtype=float16"),
    "integer out": ({"out_dtype": torch.int8}, "out_dtype=int8"),
    "negative soft cap": ({"logits_soft_cap": -1.0}, "logits_soft_cap"),
    "NaN scale": ({"sm_scale": float("nan")}, "sm_scale"),
    "boolean heads": ({"num_kv_heads": True}, "num_kv_heads"),
    "text for a number": ({"head_dim": "large"}, "head_dim"),
    "no SMs": ({"num_sms": 0}, "num_sms=0"),
    "pages of a ragged cache": ({"page_table": "ragged"}, "page_size=4"),
    "order of ragged tokens": (
        {"page_table": "ragged", "page_size": None, "kv_layout": "HND"},
        r"kv_layout=HND .* NHD with page_table=ragged",
    ),
    "no pages": ({"page_size": None}, "page_size=None"),
    "huge pages": ({"page_size": 2**20 + 1}, "page_size=1048577"),
    "head_dim_vo no multiple of 16": ({"head_dim_vo": 24}, "head_dim_vo=24"),
    "head_dim_vo too large": ({"head_dim_vo": 528}, "head_dim_vo=528"),
    # Parts of the contract that later versions build: refused with a reason, never ignored.
    "another fp8 cache": ({"kv_dtype": torch.float8_e4m3fnuz}, "kv_dtype=float8_e4m3fnuz"),
    "bytes of no type": ({"kv_dtype": torch.uint8}, "kv_dtype=uint8"),
    "fp8 queries": ({"q_dtype": "float8_e4m3fn"}, "q_dtype=float8_e4m3fn"),
    "nvfp4 queries": ({"q_dtype": "nvfp4"}, "q_dtype=nvfp4"),
    "variant": (
        {"variant": "logit + bias"},
        r"variant='logit \+ bias': expected an AttentionVariant or one of alibi, relative_bias",
    ),
    "skipped tiles": ({"skip_softmax_threshold": 12}, "skip_softmax_threshold=12.0 is refused"),
    "no threshold": ({"skip_softmax_threshold": "off"}, "skip_softmax_threshold='off'"),
    "no bool": ({"early_kv": 1}, "early_kv=1"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configuration(name: str) -> None:
    arguments, match = CONFIGS[name]
    with pytest.raises(ConfigError, match=match):
        Call(planner=arguments)()


@pytest.mark.parametrize("name", CONFIGS)
def test_check_config_gives_the_same_reasons(name: str) -> None:
    arguments, match = CONFIGS[name]
    support = jitattn.check_config(**(GOOD_CONFIG | arguments))
    assert not support.supported
    assert any(re.search(match, reason) for reason in support.reasons)
    with pytest.raises(ConfigError) as error:
        Call(planner=arguments)()
    assert list(error.value.reasons) == support.reasons


GOOD_CONFIG = {name: value for name, value in GOOD.items() if name != "device"}


def test_every_reason_is_given_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        Call(planner={"window_left": -5, "head_dim": 40, "num_sms": 0})()
    assert len(error.value.reasons) == 3


def test_early_kv_is_a_promise_that_changes_no_result() -> None:
    assert jitattn.check_config(**(GOOD_CONFIG | {"early_kv": True})).supported
    assert torch.equal(Call(planner={"early_kv": True})(), Call()())


def test_unknown_argument() -> None:
    with pytest.raises(TypeError, match="softmax_scale"):
        Call(planner={"softmax_scale": 1.0})()


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_backend_that_does_not_exist_here(backend: str) -> None:
    with pytest.raises(REFUSED, match=backend):
        Call(planner={"backend": backend})()


# --- everything after it --------------------------------------------------------------------------

SEPARATE = {"page_table": "separate"}
HND = {"kv_layout": "HND"}
SINKS = {"use_sinks": True}

CALLS: dict[str, tuple[Callable[[], Call], str]] = {
    # BlockTable
    "table of rank 1": (lambda: Call(table=int32(4)), "table"),
    "table of rank 4": (lambda: Call(table=int32(2, 2, 3, 1)), "table"),
    "table with three rows a request": (lambda: Call(table=int32(2, 3, 3)), "table"),
    "int64 table": (lambda: Call(table=int32(B, WIDTH).long()), "int64"),
    "int16 table": (lambda: Call(table=int32(B, WIDTH).short()), "int16"),
    "float table": (lambda: Call(table=int32(B, WIDTH).float()), "float32"),
    "list for a table": (lambda: Call(table=[[1, 2, 3]] * B), "table"),
    "table on another device": (lambda: Call(table=int32(B, WIDTH).to("meta")), "meta"),
    "rows of rank 2": (lambda: Call(rows=int32(B, 1)), "rows"),
    "float rows": (lambda: Call(rows=torch.zeros(B)), "rows"),
    "int16 rows": (lambda: Call(rows=int32(B).short()), "rows"),
    "rows on another device": (lambda: Call(rows=int32(B).to("meta")), "rows"),
    "rows of another batch": (lambda: Call(rows=int32(B + 1)), "seq_lens"),
    # plan
    "shared table, separate planner": (lambda: Call(planner=SEPARATE), "separate"),
    "separate table, shared planner": (lambda: Call(table=int32(B, 2, WIDTH)), "shared"),
    "one table too few": (lambda: Call(table=int32(B - 1, WIDTH)), "seq_lens"),
    "seq_lens of rank 2": (lambda: Call(seq_lens=int32(B, 1)), "seq_lens"),
    "seq_lens too short": (lambda: Call(seq_lens=int32(1)), "seq_lens"),
    "float seq_lens": (lambda: Call(seq_lens=torch.tensor([5.0, 9.0])), "seq_lens"),
    "int16 seq_lens": (lambda: Call(seq_lens=int32(B).short()), "seq_lens"),
    "list for seq_lens": (lambda: Call(seq_lens=[5, 9]), "seq_lens"),
    "seq_lens on another device": (lambda: Call(seq_lens=int32(B).to("meta")), "seq_lens"),
    "max_q_len without qo_indptr": (lambda: Call(plan={"max_q_len": 4}), "max_q_len"),
    "int64 qo_indptr": (lambda: queries(offsets(0, 3, 6).long()), "qo_indptr.*int64"),
    "float qo_indptr": (lambda: queries(offsets(0, 3, 6).float()), "qo_indptr.*float32"),
    "list for qo_indptr": (lambda: queries([0, 3, 6]), "qo_indptr"),
    "qo_indptr of rank 2": (lambda: queries(offsets(0, 3, 6)[None]), "qo_indptr"),
    "qo_indptr too short": (lambda: queries(offsets(0, 3)), r"qo_indptr.*\b2\b.*\b3\b"),
    "qo_indptr too long": (lambda: queries(offsets(0, 3, 6, 6)), r"qo_indptr.*\b4\b.*\b3\b"),
    "qo_indptr on another device": (lambda: queries(offsets(0, 3, 6).to("meta")), "qo_indptr"),
    "qo_indptr that falls": (lambda: queries(offsets(0, 3, 2)), r"qo_indptr\[2\] is 2"),
    "qo_indptr from 1": (lambda: queries(offsets(1, 3, 6)), r"qo_indptr\[0\] is 1"),
    "negative qo_indptr": (lambda: queries(offsets(0, -3, 3)), r"qo_indptr\[1\] is -3"),
    "no max_q_len": (lambda: queries(max_q_len=None), "max_q_len"),
    "negative max_q_len": (lambda: queries(max_q_len=-1), "max_q_len"),
    "boolean max_q_len": (lambda: queries(max_q_len=True), "max_q_len"),
    "tensor for max_q_len": (lambda: queries(max_q_len=torch.tensor(3)), "max_q_len"),
    "max_q_len too small": (lambda: queries(max_q_len=2), r"request 0.*\b3\b.*max_q_len is 2"),
    "max_q_len too small later": (lambda: queries(offsets(0, 2, 6)), r"request 1.*\b4\b"),
    "negative max_kv_len": (lambda: Call(plan={"max_kv_len": -1}), "max_kv_len"),
    # bind
    "cache of rank 3": (lambda: Call(cache=(bf16(6, 4, D), bf16(6, 4, D))), "k_cache|kv_cache"),
    "one tensor of rank 4": (lambda: Call(cache=bf16(PAGES, PAGE, HKV, D)), "kv_cache"),
    "one tensor, not two halves": (lambda: Call(cache=bf16(6, 3, PAGE, HKV, D)), "kv_cache"),
    "three tensors": (lambda: Call(cache=(bf16(6, PAGE, HKV, D),) * 3), "kv_cache"),
    "no tensor": (lambda: Call(cache=None), "kv_cache"),
    "another page size": (lambda: Call(cache=bf16(6, 2, 8, HKV, D)), "page_size|page size"),
    "another head count": (lambda: Call(cache=bf16(6, 2, PAGE, 4, D)), "num_kv_heads"),
    "another head_dim": (lambda: Call(cache=bf16(6, 2, PAGE, HKV, 64)), "head_dim"),
    "NHD cache, HND planner": (lambda: Call(cache=bf16(6, 2, 4, 2, D), planner=HND), "HND"),
    "another cache dtype": (lambda: Call(cache=bf16(6, 2, PAGE, HKV, D).half()), "float16"),
    "another dtype of v alone": (
        lambda: Call(cache=(bf16(6, PAGE, HKV, D), bf16(6, PAGE, HKV, D).half())),
        "v_cache",
    ),
    "another shape of v alone": (
        lambda: Call(cache=(bf16(6, PAGE, HKV, D), bf16(6, PAGE, 1, D))),
        "v_cache",
    ),
    "cache with strided elements": (
        lambda: Call(cache=bf16(6, 2, PAGE, HKV, 2 * D)[..., ::2]),
        "contiguous",
    ),
    "cache with its last dimensions swapped": (
        lambda: Call(cache=bf16(6, 2, PAGE, D, HKV).transpose(3, 4)),
        "contiguous",
    ),
    "cache on another device": (lambda: Call(cache=bf16(6, 2, PAGE, HKV, D).to("meta")), "meta"),
    "k_scale for bf16": (lambda: Call(bind={"k_scale": 0.5}), "k_scale"),
    "v_scale for bf16": (lambda: Call(bind={"v_scale": torch.tensor(0.5)}), "v_scale"),
    "cache of the other FP8 type": (
        lambda: Call(planner={"kv_dtype": "float8_e5m2"}, cache=fp8(6, 2, PAGE, HKV, D)),
        "float8_e4m3fn.*float8_e5m2",
    ),
    "bf16 cache, FP8 planner": (
        lambda: Call(planner={"kv_dtype": "float8_e5m2"}),
        "bfloat16.*float8_e5m2",
    ),
    "bytes, bf16 planner": (
        lambda: Call(cache=fp8(6, 2, PAGE, HKV, D).view(torch.uint8)),
        "uint8.*bfloat16",
    ),
    "a scale for each query head": (
        lambda: scaled(k_scale=torch.ones(HQ)),
        r"k_scale.*\[8\].*\[2\]",
    ),
    "v_scale of rank 2": (lambda: scaled(v_scale=torch.ones(HKV, 1)), r"v_scale.*\[2, 1\]"),
    "an empty scale": (lambda: scaled(k_scale=torch.ones(0)), "k_scale"),
    "bf16 scale": (lambda: scaled(k_scale=bf16(1)), "k_scale.*bfloat16"),
    "float64 scale": (lambda: scaled(v_scale=torch.ones(HKV).double()), "v_scale.*float64"),
    "integer scale tensor": (lambda: scaled(v_scale=int32(1)), "v_scale.*int32"),
    "scale on another device": (lambda: scaled(k_scale=torch.ones((), device="meta")), "k_scale"),
    "list of scales": (lambda: scaled(v_scale=[1.0, 2.0]), "v_scale"),
    "text for a scale": (lambda: scaled(k_scale="0.5"), "k_scale"),
    "boolean scale": (lambda: scaled(k_scale=True), "k_scale"),
    "NaN for a scale": (lambda: scaled(v_scale=float("nan")), "v_scale is nan"),
    "infinite scale": (lambda: scaled(k_scale=float("inf")), "k_scale is inf"),
    "scale beyond float": (lambda: scaled(k_scale=10**400), "k_scale is inf"),
    "scale beyond float32": (lambda: scaled(k_scale=1e39), "k_scale is 1e"),
    # run
    "q of rank 2": (lambda: Call(q=bf16(B, HQ * D)), "q"),
    "q with too few tokens": (lambda: Call(q=bf16(1, HQ, D)), "q"),
    "q with another head count": (lambda: Call(q=bf16(B, 4, D)), "q"),
    "q with another head_dim": (lambda: Call(q=bf16(B, HQ, 64)), "q"),
    "q of another dtype": (lambda: Call(q=bf16(B, HQ, D).half()), "q"),
    "q with strided elements": (lambda: Call(q=bf16(B, HQ, 2 * D)[..., ::2]), "contiguous"),
    "fewer rows than qo_indptr[-1]": (lambda: queries(num_tokens=5), r"q.*\b5\b.*\b6\b"),
    "q on another device": (lambda: Call(q=bf16(B, HQ, D).to("meta")), "meta"),
    "out of another shape": (lambda: Call(run={"out": bf16(B, HQ, 64)}), "out"),
    "out of another dtype": (lambda: Call(run={"out": bf16(B, HQ, D).float()}), "out"),
    "out with strided elements": (
        lambda: Call(run={"out": bf16(B, HQ, 2 * D)[..., ::2]}),
        "contiguous",
    ),
    "out on another device": (lambda: Call(run={"out": bf16(B, HQ, D).to("meta")}), "out"),
    "lse of another shape": (lambda: Call(run={"lse": torch.zeros(B, HQ + 1)}), "lse"),
    "lse of another dtype": (lambda: Call(run={"lse": bf16(B, HQ)}), "lse"),
    "lse on another device": (lambda: Call(run={"lse": torch.zeros(B, HQ, device="meta")}), "lse"),
    "sinks without use_sinks": (lambda: Call(run={"sinks": torch.zeros(HQ)}), "sinks"),
    "use_sinks without sinks": (lambda: Call(planner=SINKS), "sinks"),
    "sinks of wrong length": (
        lambda: Call(planner=SINKS, run={"sinks": torch.zeros(HQ - 1)}),
        "sinks",
    ),
    "sinks of rank 2": (lambda: Call(planner=SINKS, run={"sinks": torch.zeros(HQ, 1)}), "sinks"),
    "integer sinks": (lambda: Call(planner=SINKS, run={"sinks": int32(HQ)}), "sinks"),
    "sinks on another device": (
        lambda: Call(planner=SINKS, run={"sinks": torch.zeros(HQ, device="meta")}),
        "sinks",
    ),
    "q_scale for bf16 beside FP8": (
        lambda: replace(scaled(), run={"q_scale": 0.5}),
        "q_scale",
    ),
    "out_scale for bf16 beside FP8": (
        lambda: replace(scaled(), run={"out_scale": 0.5}),
        "out_scale",
    ),
    "q_scale for bf16": (lambda: Call(run={"q_scale": 0.5}), "q_scale"),
    "out_scale for bf16": (lambda: Call(run={"out_scale": torch.tensor([0.5])}), "out_scale"),
    "custom_mask without use_custom_mask": (
        lambda: Call(run={"custom_mask": torch.ones(B, 9, dtype=torch.bool)}),
        "custom_mask",
    ),
    "use_custom_mask without custom_mask": (lambda: masked(None), "custom_mask"),
    "float custom_mask": (lambda: masked(torch.ones(TOKENS, 4)), "custom_mask.*float32"),
    "int32 custom_mask": (lambda: masked(int32(TOKENS, 4)), "custom_mask.*int32"),
    "custom_mask of rank 1": (lambda: masked(bytes_of(TOKENS)), "custom_mask"),
    "custom_mask with too few rows": (
        lambda: masked(torch.ones(TOKENS - 1, 4, dtype=torch.bool)),
        "custom_mask.*5, 4",
    ),
    "custom_mask a row a request": (
        lambda: masked(torch.ones(B, 4, dtype=torch.bool)),
        "custom_mask",
    ),
    "packed custom_mask with too many rows": (
        lambda: masked(torch.ones(TOKENS + 1, 1, dtype=torch.uint8)),
        "custom_mask",
    ),
    "custom_mask with strided elements": (
        lambda: masked(torch.ones(TOKENS, 8, dtype=torch.bool)[:, ::2]),
        "contiguous",
    ),
    "custom_mask on another device": (
        lambda: masked(torch.ones(TOKENS, 4, dtype=torch.bool, device="meta")),
        "custom_mask",
    ),
    "three parts of a custom_mask": (
        lambda: masked((bytes_of(9), offsets(0, 3, 9), offsets(0))),
        "custom_mask",
    ),
    "bool bits of a ragged custom_mask": (
        lambda: masked((bytes_of(9).bool(), offsets(0, 3, 9))),
        "custom_mask.*bool",
    ),
    "ragged custom_mask of rank 2": (
        lambda: masked((bytes_of(9).view(3, 3), offsets(0, 3, 9))),
        "custom_mask",
    ),
    "int64 mask_indptr": (
        lambda: masked((bytes_of(9), offsets(0, 3, 9).long())),
        "custom_mask.*int64",
    ),
    "mask_indptr too short": (lambda: masked((bytes_of(9), offsets(0, 3))), "custom_mask"),
    "mask_indptr on another device": (
        lambda: masked((bytes_of(9), offsets(0, 3, 9).to("meta"))),
        "custom_mask",
    ),
    "pages of another layout": (
        lambda: Call(run={"pages": jitattn.BlockTable(int32(B, 2, WIDTH))}),
        "pages",
    ),
    "pages of another batch": (
        lambda: Call(run={"pages": jitattn.BlockTable(int32(B + 1, WIDTH))}),
        "pages",
    ),
    "pages too narrow": (lambda: Call(run={"pages": jitattn.BlockTable(int32(B, 2))}), "pages"),
    "raw tensor for pages": (lambda: Call(run={"pages": int32(B, WIDTH)}), "pages"),
}


@pytest.mark.parametrize("name", CALLS)
def test_call(name: str) -> None:
    make, match = CALLS[name]
    with pytest.raises(REFUSED, match=match):
        make()()


def test_plan_wants_pages_not_a_tensor() -> None:
    planner = jitattn.AttentionPlanner(**GOOD)
    with pytest.raises(REFUSED, match="pages"):
        planner.plan(int32(B, WIDTH), int32(B))


def test_bound_cache_of_another_planner() -> None:
    other = jitattn.AttentionPlanner(**(GOOD | {"num_kv_heads": 1}))
    bound = other.bind(bf16(PAGES, 2, PAGE, 1, D))
    planner = jitattn.AttentionPlanner(**GOOD)
    plan = planner.plan(jitattn.BlockTable(int32(B, WIDTH)), int32(B))
    with pytest.raises(REFUSED, match="kv"):
        plan.run(bf16(B, HQ, D), bound)


def test_errors_say_what_was_given_and_what_is_wanted() -> None:
    with pytest.raises(REFUSED, match=r"(?s)q.*\b7\b.*\b8\b"):
        Call(q=bf16(B, 7, D))()
    with pytest.raises(REFUSED, match=r"(?s)float16.*bfloat16"):
        Call(q=bf16(B, HQ, D).half())()
    with pytest.raises(REFUSED, match=r"(?s)sinks.*\b7\b.*\b8\b"):
        Call(planner=SINKS, run={"sinks": torch.zeros(7)})()


def test_nothing_is_written_when_refused() -> None:
    out = torch.full((B, HQ, D), 7.0, dtype=torch.bfloat16)
    with pytest.raises(REFUSED):
        Call(run={"out": out, "q_scale": 0.5})()
    assert bool((out == 7).all())


def test_a_table_keeps_its_tensors() -> None:
    """A plan that has read one would not see another."""
    table = torch.zeros(2, 3, dtype=torch.int32)
    pages = jitattn.BlockTable(table)
    with pytest.raises(AttributeError, match=r"run\(pages=\.\.\.\)"):
        pages.table = table.clone()
    with pytest.raises(AttributeError, match="rows"):
        pages.rows = torch.zeros(2, dtype=torch.int32)
    assert pages.table is table


def test_a_sparse_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match="strided"):
        jitattn.BlockTable(torch.zeros(2, 3, dtype=torch.int32).to_sparse())
