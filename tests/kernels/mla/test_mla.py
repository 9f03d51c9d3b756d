"""Multi-head latent attention on the CPU: the definition, every cache and table, what run gives."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given

import jitattn
from jitattn.kernels.mla.config import cache_specs
from jitattn.kernels.mla.tile import mla_tile
from jitattn.kernels.registry import parse_config, specs_of
from jitattn.spec.config import MLAConfig
from jitattn.spec.layout import Loader
from jitattn.tools import cli
from tests.support.examples import examples
from tests.support.harness import same_bits
from tests.support.mla import (
    FORMS,
    LAYOUTS,
    TABLES,
    MLACase,
    cases,
    check,
    check_case,
    expected,
    make_inputs,
)

CASE = MLACase(num_heads=4, kv_lora_rank=256, qk_rope_head_dim=32, page_size=4, lengths=(5, 0, 17))
MIXED = replace(CASE, q_lens=(4, 1, 3), spare_rows=2)
FP8 = ("fp8_one", "fp8_pair", "fp8_mixed")


@examples(150)
@given(cases())
def test_random_cases(case: MLACase) -> None:
    check_case(case)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("page_table", TABLES)
def test_every_cache_and_table(page_table: str, form: str) -> None:
    check_case(replace(MIXED, page_table=page_table, form=form))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout: str, form: str) -> None:
    if layout == "odd" and form == "fp8_rows":
        pytest.skip("rows that hold float32 scales begin at multiples of 4 bytes")
    check_case(replace(MIXED, page_table="separate", form=form, layout=layout))


@pytest.mark.parametrize(
    ("num_heads", "kv_lora_rank", "qk_rope_head_dim"),
    [(16, 512, 64), (128, 512, 64), (64, 256, 64), (128, 512, 32), (1, 256, 32)],
)
def test_dims(num_heads: int, kv_lora_rank: int, qk_rope_head_dim: int) -> None:
    dims = {"kv_lora_rank": kv_lora_rank, "qk_rope_head_dim": qk_rope_head_dim}
    check_case(MLACase(num_heads=num_heads, **dims, lengths=(130, 1), q_lens=(2, 4)))


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 32, 64, 100, 128])
@pytest.mark.parametrize("form", ["one", "fp8_rows"])
def test_page_sizes(form: str, page_size: int) -> None:
    check_case(replace(MIXED, form=form, page_size=page_size, lengths=(129, 64, 1)))


def test_cases_of_a_decode_batch_have_no_spare_rows() -> None:
    with pytest.raises(ValueError, match="spare_rows is 2 without q_lens"):
        replace(MIXED, q_lens=None)


# --- the definition -------------------------------------------------------------------------------


def test_lse_counts_keys_and_out_is_their_mean() -> None:
    inputs = make_inputs(replace(MIXED, lengths=(9, 2, 17), out_dtype="float32"))
    inputs.q_nope[:8] = 0
    inputs.q_pe[:8] = 0
    out, lse = inputs.run()
    counts = torch.tensor([6.0, 7, 8, 9, 2, 15, 16, 17])
    torch.testing.assert_close(lse[:8].exp(), counts[:, None].expand(8, 4))
    torch.testing.assert_close(out[3, 0], inputs.latent[:9].mean(dim=0).float())
    assert bool((lse[8:] == -math.inf).all())
    assert bool((out[8:] == 0).all())


def test_a_score_is_the_scaled_sum_of_both_products() -> None:
    inputs = make_inputs(replace(CASE, lengths=(1,)))
    _, lse = inputs.run()
    q = torch.cat((inputs.q_nope, inputs.q_pe), dim=2)[0].double()
    key = torch.cat((inputs.latent, inputs.rope), dim=1)[0]
    torch.testing.assert_close(lse[0].double(), CASE.sm_scale * (q @ key), rtol=1e-6, atol=1e-6)


def test_rows_before_the_first_key_are_empty() -> None:
    inputs = make_inputs(replace(CASE, lengths=(2,), q_lens=(5,)))
    out, lse = inputs.run()
    check(inputs, out, lse)
    assert bool((lse[:3] == -math.inf).all())
    assert bool((out[:3] == 0).all())
    every, _ = make_inputs(replace(inputs.case, causal=False)).run()
    assert bool((every != 0).any(dim=2).all())


@pytest.mark.parametrize("part", ["latent", "rope"])
def test_a_visible_nan_reaches_the_rows_that_see_it(part: str) -> None:
    inputs = make_inputs(replace(CASE, form="pair", lengths=(6, 9), q_lens=(3, 2)))
    want = expected(inputs)[0]
    page = int(inputs.table[0, 1])
    inputs.kv[part == "rope"][page, 1] = math.nan  # token 5 of request 0, its last
    out, _ = inputs.run()
    assert bool(out[2].isnan().all())
    others = [0, 1, 3, 4]
    torch.testing.assert_close(out[others].double(), want[others], rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("length", [0, -1, -(2**31)])
@pytest.mark.parametrize("page_table", TABLES)
def test_padding(page_table: str, length: int) -> None:
    inputs = make_inputs(replace(CASE, page_table=page_table, lengths=(length, 6, length)))
    out, lse = inputs.run()
    check(inputs, out, lse)
    assert bool((out[[0, 2]] == 0).all())
    assert bool((lse[[0, 2]] == -math.inf).all())


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("is_pair", [False, True])
def test_append_kv_writes_its_cache(is_pair: bool, kv_dtype: str) -> None:
    planner = jitattn.MLAPlanner(sm_scale=0.1, num_heads=2, kv_dtype=kv_dtype, device="cpu")
    dtype = getattr(torch, kv_dtype)
    row = torch.full((3, 64, 576), 0xFF, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype)
    caches = row[..., :512], row[..., 512:]
    latent, rope = torch.randn(70, 1, 512).bfloat16(), torch.randn(70, 1, 64).bfloat16()
    pages = jitattn.BlockTable(torch.tensor([[2, 0]], dtype=torch.int32))
    lengths = torch.tensor([70])
    scale = None if kv_dtype == "bfloat16" else 0.5
    jitattn.append_kv(
        *(latent, rope, tuple(cache.unsqueeze(2) for cache in caches)),
        pages=pages,
        seq_lens=lengths,
        qo_indptr=torch.tensor([0, 70], dtype=torch.int32),
        k_scale=scale,
        v_scale=scale,
    )
    q_nope, q_pe = torch.zeros(1, 2, 512).bfloat16(), torch.zeros(1, 2, 64).bfloat16()
    q_pe[0, :, 3] = 10.0
    kv = planner.bind(caches if is_pair else row, k_scale=scale)
    out, lse = planner.plan(pages, lengths).run(q_nope, q_pe, kv, return_lse=True)

    def kept(values: torch.Tensor) -> torch.Tensor:
        found = jitattn.quant.quantize_kv(values, kv_dtype, scale=scale)
        return jitattn.quant.dequantize_kv(found, scale=scale)[:, 0].double()

    scores = kept(rope)[:, 3]
    torch.testing.assert_close(lse[0, 0].double(), scores.logsumexp(0), rtol=1e-6, atol=1e-6)
    want = scores.softmax(0) @ kept(latent)
    torch.testing.assert_close(out[0, 1].double(), want, rtol=2**-8, atol=1e-6)


# --- tables ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_a_separate_table_of_equal_rows_is_a_shared_one(form: str) -> None:
    inputs = make_inputs(replace(MIXED, form=form))
    want = inputs.run()
    inputs.table = inputs.table[:, None].expand(-1, 2, -1).contiguous()
    found = inputs.run(replace(MIXED, form=form, page_table="separate").planner("cpu"))
    assert all(same_bits(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("form", ["one", "fp8_one", "fp8_rows"])
def test_one_tensor_takes_row_0_of_a_separate_table(form: str) -> None:
    inputs = make_inputs(replace(MIXED, form=form, page_table="separate"))
    want = inputs.run()
    inputs.table[:, 1] = -(2**31)
    assert all(same_bits(a, b) for a, b in zip(inputs.run(), want, strict=True))
    check(inputs, *want)


def test_both_parts_of_one_row_are_the_same_as_one_tensor() -> None:
    inputs = make_inputs(MIXED)
    want = inputs.run()
    inputs.kv = inputs.kv[..., :256], inputs.kv[..., 256:]
    assert all(same_bits(a, b) for a, b in zip(inputs.run(), want, strict=True))
    inputs.table = torch.stack((inputs.table, inputs.table), dim=1)
    separate = replace(MIXED, page_table="separate").planner("cpu")
    assert all(same_bits(a, b) for a, b in zip(inputs.run(separate), want, strict=True))


def test_pages_of_both_kinds_in_one_pool() -> None:
    """Latents at pages 2p and rope parts at 2p + 1 of one tensor of rows as long as a latent."""
    inputs = make_inputs(replace(MIXED, form="pair"))
    want = inputs.run()
    latent, rope = inputs.kv
    pool = torch.full((2 * latent.shape[0], *latent.shape[1:]), math.nan, dtype=latent.dtype)
    pool[::2], pool[1::2, :, :32] = latent, rope
    inputs.kv = pool, pool[..., :32]
    inputs.table = torch.stack((2 * inputs.table, 2 * inputs.table + 1), dim=1)
    separate = replace(MIXED, page_table="separate").planner("cpu")
    assert all(same_bits(a, b) for a, b in zip(inputs.run(separate), want, strict=True))


def test_the_pools_of_a_separate_table_may_differ_in_pages() -> None:
    inputs = make_inputs(replace(MIXED, form="pair", page_table="separate"))
    want = inputs.run()
    latent, rope = inputs.kv
    inputs.kv = torch.cat((latent, latent[:1])), rope
    assert all(same_bits(a, b) for a, b in zip(inputs.run(), want, strict=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stride", [3, 2**40 + 1])
def test_strides_of_size_1_mean_nothing(form: str, stride: int) -> None:
    inputs = make_inputs(replace(CASE, form=form, page_size=1))
    want = inputs.run()

    def odd(cache: torch.Tensor) -> torch.Tensor:
        page, _, dim = cache.stride()
        return cache.as_strided(cache.shape, (page, stride, dim), cache.storage_offset())

    inputs.kv = (
        odd(inputs.kv) if isinstance(inputs.kv, torch.Tensor) else tuple(map(odd, inputs.kv))
    )
    assert all(same_bits(a, b) for a, b in zip(inputs.run(), want, strict=True))
    bound = inputs.case.planner("cpu").bind(inputs.kv)
    assert bound.latent.token_stride == bound.rope.token_stride == 0


# --- FP8 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["number", "0d", "1d"])
@pytest.mark.parametrize("form", FP8)
def test_scales(form: str, scale: str) -> None:
    check_case(replace(MIXED, form=form, scale=scale))


@pytest.mark.parametrize("form", FP8)
def test_a_scale_tensor_is_read_by_run(form: str) -> None:
    inputs = make_inputs(replace(MIXED, form=form, scale="1d"))
    planner = inputs.case.planner("cpu")
    kv, plan = planner.bind(inputs.kv, k_scale=inputs.k_scale), inputs.plan(planner)
    before = plan.run(inputs.q_nope, inputs.q_pe, kv)
    factor = 2.0
    inputs.k_scale *= factor
    after = plan.run(inputs.q_nope, inputs.q_pe, kv)
    assert not same_bits(after, before)
    inputs.latent *= factor
    inputs.rope *= 1.0 if form == "fp8_mixed" else factor
    check(inputs, *inputs.run())
    assert same_bits(after, inputs.run()[0])


@pytest.mark.parametrize("form", ["fp8_one", "fp8_pair", "fp8_mixed", "fp8_rows"])
def test_fp8_as_bytes(form: str) -> None:
    inputs = make_inputs(replace(MIXED, form=form))
    want = inputs.run()
    parts = [inputs.kv] if isinstance(inputs.kv, torch.Tensor) else list(inputs.kv)
    other = {torch.float8_e4m3fn: torch.uint8, torch.uint8: torch.float8_e4m3fn}
    parts = [part.view(other.get(part.dtype, part.dtype)) for part in parts]
    inputs.kv = parts[0] if len(parts) == 1 else tuple(parts)
    assert all(same_bits(a, b) for a, b in zip(inputs.run(), want, strict=True))


def test_the_656_bytes_of_a_row() -> None:
    """512 e4m3, four float32 scales, 64 bfloat16: byte by byte."""
    planner = jitattn.MLAPlanner(
        sm_scale=1.0, num_heads=1, kv_dtype="float8_e4m3fn", out_dtype="float32", device="cpu"
    )
    row = bytes([0x38, 0x40, 0x44, 0xB8]) * 128  # 1, 2, 3, -1
    row += torch.tensor([1.0, 10.0, 100.0, 1000.0]).numpy().tobytes()
    row += torch.full((64,), 0.5, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    assert len(row) == 656
    kv = torch.full((2, 64, 656), 0xFF, dtype=torch.uint8)
    kv[1, 0] = torch.frombuffer(bytearray(row), dtype=torch.uint8)
    plan = planner.plan(jitattn.BlockTable(torch.tensor([[1]]).int()), torch.tensor([1]))
    q_nope, q_pe = torch.zeros(1, 1, 512).bfloat16(), torch.ones(1, 1, 64).bfloat16()
    q_nope[0, 0, 130] = 1
    out, lse = plan.run(q_nope, q_pe, kv, return_lse=True)
    want = torch.tensor([1.0, 2, 3, -1]).repeat(128) * torch.tensor(
        [1.0, 10, 100, 1000]
    ).repeat_interleave(128)
    assert torch.equal(out[0, 0], want)
    assert float(lse) == 30 + 64 * 0.5


# --- what run returns -----------------------------------------------------------------------------


def test_run_returns_out_alone_or_both() -> None:
    inputs = make_inputs(MIXED)
    planner = inputs.case.planner("cpu")
    kv, plan = planner.bind(inputs.kv), inputs.plan(planner)
    out = plan.run(inputs.q_nope, inputs.q_pe, kv)
    assert isinstance(out, torch.Tensor)
    assert out.dtype == torch.bfloat16
    assert out.shape == inputs.q_nope.shape
    both = plan.run(inputs.q_nope, inputs.q_pe, kv, return_lse=True)
    assert same_bits(both[0], out)
    assert both[1].dtype == torch.float32
    check(inputs, *both)
    lse = torch.empty(4, both[1].shape[0]).T
    filled = plan.run(inputs.q_nope, inputs.q_pe, inputs.kv, lse=lse)  # bound on the spot
    assert same_bits(filled, out)
    assert torch.equal(lse, both[1])


def test_a_plan_snapshots_lengths_and_reads_tables_when_it_runs() -> None:
    inputs = make_inputs(CASE)
    planner = inputs.case.planner("cpu")
    kv, plan = planner.bind(inputs.kv), inputs.plan(planner)
    before = plan.run(inputs.q_nope, inputs.q_pe, kv)
    inputs.seq_lens.copy_(torch.tensor([3, 0, 11]))
    assert same_bits(plan.run(inputs.q_nope, inputs.q_pe, kv), before)
    plan.refresh()
    after = plan.run(inputs.q_nope, inputs.q_pe, kv)
    assert same_bits(after, inputs.run()[0])
    assert not same_bits(after, before)
    other = jitattn.BlockTable(inputs.table.clone())
    assert same_bits(plan.run(inputs.q_nope, inputs.q_pe, kv, pages=other), after)


def test_arguments_are_readable() -> None:
    planner = CASE.planner("cpu")
    assert planner.num_heads == 4
    assert planner.kv_lora_rank == 256
    assert planner.qk_rope_head_dim == 32
    assert planner.sm_scale == CASE.sm_scale
    assert planner.page_size == 4
    assert planner.backend == "reference"
    assert planner.workspace is None
    assert planner.workspace_bytes(64, max_q_len=4) == 0
    assert jitattn.build_info(planner) == []


# --- the support table ----------------------------------------------------------------------------


def test_kernels_and_why_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    support = jitattn.check_config(planner="mla", num_heads=16, page_size=1)
    assert support.supported
    assert support.kernel is not None
    assert support.kernel.startswith("jitattn_mla_r16_d576x512_p1_")
    assert not support.reasons
    refused = jitattn.check_config(planner="mla", num_heads=200, kv_lora_rank=384)
    assert not refused.supported
    assert [reason.split("=")[0] for reason in refused.reasons] == ["num_heads", "kv_lora_rank"]
    assert cli.main(["configs"]) == 0
    assert "mla: supported arguments" in capsys.readouterr().out
    rows = [row for row in jitattn.supported_configs() if row.kernel == "mla"]
    assert len(rows) == 1
    with pytest.raises(jitattn.ConfigError, match="arch='sm_70' is not one of"):
        specs_of(MLAConfig(), "sm_70")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100f", "sm_120f"])
@pytest.mark.parametrize("num_heads", [1, 16, 17, 128])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_every_cache_has_kernels_of_one_tile(arch: str, num_heads: int, kv_dtype: str) -> None:
    """A plan's launches with any of them have the same schedule and partial rows."""
    specs = cache_specs(MLAConfig(num_heads=num_heads, kv_dtype=kv_dtype), arch)
    row_tiles = list(dict.fromkeys(spec.row_tile for spec in specs))
    # On Hopper few query rows have kernels of their own, before that of any number of them.
    on_hopper = {1: [16, 32, 64], 16: [16, 32, 64], 17: [32, 64], 128: [64]}
    assert row_tiles == on_hopper[num_heads] if arch == "sm_90a" else len(row_tiles) == 1
    for row_tile in row_tiles:
        alike = [spec for spec in specs if spec.row_tile == row_tile]
        assert len({(spec.k_pe_dtype, spec.has_scales) for spec in alike}) == (
            1 if kv_dtype == "bfloat16" else 3
        )
        tiles = [mla_tile(spec, arch) for spec in alike]
        assert len({tile.tile_tokens for tile in tiles}) == 1
        assert len({getattr(tile, "packs_partials", False) for tile in tiles}) == 1
        assert all(spec.loader is Loader.PLAIN for spec in alike[1::2])


@pytest.mark.parametrize(("num_heads", "row_tiles"), [(16, [16]), (17, [32]), (33, [64])])
def test_lists_have_one_kernel(num_heads: int, row_tiles: list[int]) -> None:
    """Their tokens are planned alone."""
    specs = cache_specs(MLAConfig(num_heads=num_heads, page_table="indices"), "sm_90a")
    assert list(dict.fromkeys(spec.row_tile for spec in specs)) == row_tiles


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_a_batch_invariant_planner_has_one_kernel(kv_dtype: str) -> None:
    """A token's bits are those of its request's prefill."""
    config = MLAConfig(num_heads=16, kv_dtype=kv_dtype, batch_invariant=True)
    assert {spec.row_tile for spec in cache_specs(config, "sm_90a")} == {64}


def test_config_text() -> None:
    config = MLAConfig(num_heads=16, page_table="separate", causal=False, kv_dtype="float8_e4m3fn")
    text = config.arguments_text()
    assert text.startswith("planner=mla,num_heads=16,")
    assert parse_config(text) == config
    assert parse_config(" planner = mla , page_size=1") == MLAConfig(page_size=1)
    assert MLAConfig().arguments_text() == "planner=mla"
    assert parse_config("planner=mla") == MLAConfig()
    with pytest.raises(jitattn.ConfigError, match="planner=moe"):
        parse_config("planner=moe,page_size=1")
    with pytest.raises(jitattn.ConfigError, match="head_dim"):
        parse_config("planner=mla,head_dim=64")


def test_precompile_gives_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    config = "planner=mla,kv_lora_rank=384"
    command = ["precompile", "--arch", "sm_90a", "-o", "nowhere", "--config", config]
    assert cli.main(command) == 1
    assert "kv_lora_rank=384" in capsys.readouterr().err
    for refused in (config, {"planner": "mla", "kv_lora_rank": 384}):
        with pytest.raises(jitattn.ConfigError, match="kv_lora_rank=384"):
            jitattn.precompile(refused, arch="sm_90a", out="nowhere")
