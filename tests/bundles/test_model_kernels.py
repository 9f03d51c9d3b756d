"""Which kernels a serving step of a model needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from jitattn.base.errors import ConfigError
from jitattn.bundles.model_config import model_of
from jitattn.bundles.model_kernels import Need, Serving, from_model, needs_of
from jitattn.kernels.pages.spec import TransferConfig
from jitattn.kernels.preprocess.spec import SLOTS, PreprocessConfig
from jitattn.kernels.registry import specs_of
from jitattn.kernels.select.spec import SelectConfig
from jitattn.spec.arch import ARCHITECTURES
from jitattn.spec.config import MLAConfig, PlannerConfig
from jitattn.spec.dtype import DType
from jitattn.spec.family import KernelSpec
from tests.support.model_configs import MODELS, write_config

TABLES = ("shared", "separate")


def needs(name: str, **changes: object) -> list[Need]:
    serving = {key: changes.pop(key) for key in list(changes) if key in vars(Serving())}
    return needs_of(model_of(MODELS[name] | changes), Serving(**serving))


def planners(found: list[Need]) -> list[PlannerConfig]:
    return [need.config for need in found if isinstance(need.config, PlannerConfig)]


def writers(found: list[Need]) -> list[PreprocessConfig]:
    return [need.config for need in found if isinstance(need.config, PreprocessConfig)]


def kernels(found: list[Need], arch: str) -> set[KernelSpec]:
    return {spec for need in found for spec in specs_of(need.config, arch)}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_supported_everywhere(name: str, arch: str) -> None:
    found = needs(name)
    assert not [need for need in found if need.reasons]
    families = {spec.kernel for spec in kernels(found, arch)}
    expected = {"decode", "prefill", "preprocess", "schedule", "merge", "gather", "copy_pages"}
    expected |= {"block_table", "batch_info", "layer_tables"}
    expected |= {"mla"} if name.startswith("deepseek") else set()
    expected |= {"index_logits", "choose"} if name == "deepseek-v3.2" else set()
    assert families == expected


def test_what_llama_needs() -> None:
    found = needs("llama-3.1-8b")
    assert {(c.page_size, c.page_table) for c in planners(found)} == {(16, t) for t in TABLES}
    assert {(c.num_qo_heads, c.num_kv_heads, c.head_dim) for c in planners(found)} == {(32, 8, 128)}
    assert {(c.page_table, c.pairing) for c in writers(found)} == {
        (table, pairing) for table in (*TABLES, SLOTS) for pairing in ("neox", "none")
    }
    assert len({need.config for need in found}) == len(found)
    row_tiles = {spec.row_tile for spec in kernels(found, "sm_90a") if spec.kernel == "decode"}
    assert row_tiles == {8, 16}  # the wide kernel, too


def test_writers_of_models() -> None:
    assert {(c.use_bias, c.pairing) for c in writers(needs("qwen2.5-7b"))} == {
        (True, "neox"), (False, "neox"), (False, "none"),
    }  # fmt: skip
    assert {(c.use_norm, c.pairing) for c in writers(needs("gemma-3-27b"))} == {
        (True, "neox"), (False, "none"),
    }  # fmt: skip
    assert {(c.use_mrope, c.pairing) for c in writers(needs(
        "qwen2.5-7b", rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]}
    ))} == {(True, "neox"), (False, "none")}  # fmt: skip


def test_what_serving_chooses() -> None:
    chosen = Serving(
        dtype="float16",
        kv_dtypes=("auto", "float8_e4m3fn", "float16"),
        page_sizes=(32, 1, 32),
        page_tables=("csr", "token", "ragged"),
    )
    found = needs_of(model_of(MODELS["qwen3-8b"]), chosen)
    pages = {(c.page_size, c.page_table) for c in planners(found)}
    assert pages == {(32, "csr"), (1, "csr"), (32, "token"), (1, "token"), (None, "ragged")}
    assert {(c.q_dtype, c.kv_dtype) for c in planners(found)} == {
        ("float16", "float16"), ("float16", "float8_e4m3fn"),
    }  # fmt: skip
    assert {c.page_table for c in writers(found)} == {"csr", "token", SLOTS}
    assert {(c.qkv_dtype, c.kv_dtype) for c in writers(found)} == {
        ("float16", "float16"), ("float16", "float8_e4m3fn"),
    }  # fmt: skip


def test_latent_attention() -> None:
    found = needs("deepseek-v2-lite", kv_dtypes=("auto", "float8_e4m3fn"))
    latents = [need.config for need in found if isinstance(need.config, MLAConfig)]
    assert {(c.num_heads, c.page_size, c.kv_dtype, c.page_table) for c in latents} == {
        (16, 64, kv_dtype, table) for kv_dtype in ("bfloat16", "float8_e4m3fn") for table in TABLES
    }
    (prompt,) = planners(found)
    assert (prompt.head_dim, prompt.head_dim_vo, prompt.page_table) == (192, 128, "ragged")
    assert (prompt.num_qo_heads, prompt.num_kv_heads) == (16, 16)
    assert {(c.head_dim, c.head_dim_vo, c.pairing) for c in writers(found)} == {
        (512, 64, "none"), (64, 512, "interleaved"),
    }  # fmt: skip
    gathers = {c for need in found if isinstance(c := need.config, TransferConfig)}
    assert TransferConfig(kv_dtype="float8_e4m3fn", out_dtype="bfloat16") in gathers


def test_tokens_that_are_chosen() -> None:
    found = needs("deepseek-v3.2", tensor_parallel=8)
    chosen = {need.use: need.config for need in found}
    assert chosen["indexer"] == SelectConfig(kernel="index_logits", head_dim=128, num_heads=64)
    assert chosen["choice of tokens"] == SelectConfig(kernel="select_tokens")
    lists = chosen["attention to chosen tokens"]
    assert isinstance(lists, MLAConfig)
    assert (lists.num_heads, lists.page_size, lists.page_table) == (16, 64, "indices")
    assert sum(need.use == "latent attention" for need in found) == len(TABLES)
    symbols = {spec.symbol for need in found for spec in specs_of(need.config, "sm_90a")}
    assert {"jitattn_index_logits_d128_h64_t1", "jitattn_select_tokens"} < symbols


@pytest.mark.parametrize(
    ("count", "heads"), [(1, (28, 4)), (2, (14, 2)), (4, (7, 1)), (14, None), (28, (1, 1))]
)
def test_heads_are_divided(count: int, heads: tuple[int, int] | None) -> None:
    if heads is None:
        with pytest.raises(ConfigError, match="neither a divisor nor a multiple of num_key_value"):
            needs("qwen2.5-7b", tensor_parallel=count)
        return
    found = planners(needs("qwen2.5-7b", tensor_parallel=count))
    assert {(c.num_qo_heads, c.num_kv_heads) for c in found} == {heads}


def test_heads_that_do_not_divide_are_told() -> None:
    with pytest.raises(ConfigError, match="28; 1, 2, 4, 7, 14, 28 do"):
        needs("qwen2.5-7b", tensor_parallel=8)
    with pytest.raises(ConfigError, match="tensor_parallel=0 is not at least 1"):
        needs("qwen2.5-7b", tensor_parallel=0)
    found = needs("deepseek-v2-lite", tensor_parallel=8)
    assert {c.num_heads for need in found if isinstance(c := need.config, MLAConfig)} == {2}


def test_nvfp4_and_part_of_a_head() -> None:
    assert not [n for n in needs("phi-2", kv_dtypes=("nvfp4",)) if n.reasons]  # turns 32
    found = needs("phi-2", kv_dtypes=(DType.NVFP4.value,), partial_rotary_factor=0.5)
    assert {need.use for need in found if need.reasons} == {"preprocess"}
    assert all("turns 40" in need.reasons[0] for need in found if need.reasons)


@pytest.mark.parametrize(
    ("serving", "reason"),
    [
        ({"kv_dtypes": ("fp8",)}, "kv_dtype=fp8 is not one of auto, bfloat16"),
        ({"page_sizes": (2**21,)}, "page_size=2097152 does not fit"),
        ({"page_tables": ("paged",)}, "page_table=paged is not one of"),
        ({"dtype": "float32"}, "q_dtype=float32 is not one of"),
    ],
    ids=str,
)
def test_what_has_no_kernel(serving: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        kernels(needs("llama-3.1-8b", **serving), "sm_90a")


def test_an_unknown_name_is_told_once_and_not_of_each_configuration() -> None:
    with pytest.raises(ConfigError) as error:
        needs("deepseek-v2-lite", page_tables=("shared", "foo"), kv_dtypes=("fp8", "auto"))
    assert [reason.partition(" ")[0] for reason in error.value.reasons] == [
        "page_table=foo",
        "kv_dtype=fp8",
    ]


def test_odd_head_dims_are_told_by_the_planners_rules() -> None:
    for name, changes, reason in (
        ("llama-3.1-8b", {"head_dim": 33}, "head_dim=33 is not a multiple of 16"),
        ("deepseek-v2-lite", {"qk_rope_head_dim": 33}, "qk_rope_head_dim=33 is not one of 32, 64"),
    ):
        with pytest.raises(ConfigError, match=reason):
            kernels(needs_of(model_of(MODELS[name] | changes), Serving()), "sm_90a")


def test_a_file_becomes_needs(tmp_path: Path) -> None:
    path = write_config(tmp_path, "qwen3-8b")
    assert from_model(path) == from_model(tmp_path, Serving()) == needs("qwen3-8b")
