"""Which kernels a serving step of a model needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import jitattn
from jitattn.base.errors import ConfigError
from jitattn.bundles.model_config import model_of
from jitattn.bundles.model_kernels import Need, Serving, from_model, needs_of
from jitattn.device import driver
from jitattn.kernels.common import cuda_kernels, device_kernels, kernel_loader
from jitattn.kernels.mla.kernels import MLAKernels
from jitattn.kernels.pages.spec import TransferConfig
from jitattn.kernels.preprocess.spec import SLOTS, PreprocessConfig
from jitattn.kernels.registry import specs_of
from jitattn.kernels.select import index_logits, select_tokens
from jitattn.kernels.select.spec import SelectConfig
from jitattn.spec.arch import ARCHITECTURES
from jitattn.spec.config import MLAConfig, PlannerConfig
from jitattn.spec.dtype import DType
from jitattn.spec.family import KernelSpec
from tests.emulator import launch_recorder
from tests.support.model_configs import MODELS, write_config

TABLES = ("shared", "separate")
SPARSE = ("deepseek-v3.2", "glm-5")


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
    expected |= {"mla"} if name.startswith(("deepseek", "glm-5")) else set()
    expected |= {"index_logits", "choose"} if name in SPARSE else set()
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


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[KernelSpec]]:
    """The kernels that a card of compute capability 9.0 is asked for; nothing is launched."""
    found: set[KernelSpec] = set()
    launch_recorder.install(monkeypatch)
    start, facts = kernel_loader.start, cuda_kernels.device_facts(0)

    def started(specs: Sequence[KernelSpec], *others: object, **named: object) -> object:
        found.update(specs)
        return start(specs, *others, **named)  # type: ignore[arg-type]

    def load(spec: KernelSpec, *others: object) -> launch_recorder.FakeKernel:
        found.add(spec)
        return launch_recorder.FakeKernel(spec.symbol, 0, 0)

    monkeypatch.setattr(kernel_loader, "start", started)
    monkeypatch.setattr(device_kernels, "load", load)
    monkeypatch.setattr(device_kernels, "card_of", lambda device: 0)
    monkeypatch.setattr(device_kernels, "launch_on", lambda card, launch: None)
    monkeypatch.setattr(driver, "device_facts", lambda index: facts)
    for module in (index_logits, select_tokens):
        monkeypatch.setattr(module, "LAUNCHES", module.LAUNCHES.anew())
    device_kernels.tile_of.cache_clear()
    yield found
    device_kernels.tile_of.cache_clear()


@pytest.mark.parametrize("kv_dtype", ["auto", "float8_e4m3fn"])
@pytest.mark.parametrize("name", SPARSE)
def test_a_sparse_layer_asks_for_nothing_else(
    asked: set[KernelSpec], name: str, kv_dtype: str
) -> None:
    """Decode steps, verified tokens and prompts: indexer, choice, attention over every cache."""
    found = needs(name, tensor_parallel=4, kv_dtypes=(kv_dtype,))
    model = model_of(MODELS[name])
    indexer = model.indexer
    assert indexer is not None
    config = next(need.config for need in found if need.use == "attention to chosen tokens")
    assert isinstance(config, MLAConfig)
    arguments = {field: getattr(config, field) for field in vars(config)}
    planner = jitattn.MLAPlanner(**arguments, device="cpu")
    planner.kernels = MLAKernels(config, torch.device("cuda", 0))
    planner.kernels.device, planner.backend = launch_recorder.CPU, "cuda"  # type: ignore[attr-defined]
    lens = torch.tensor([300, 64], dtype=torch.int32)
    pages = jitattn.BlockTable(torch.arange(10, dtype=torch.int32).view(2, 5))
    index_cache = torch.zeros(10, 64, indexer.head_dim + 4, dtype=torch.uint8)
    for q_len in (1, 2, 3, 5, 40):
        tokens = 2 * q_len
        steps = {"qo_indptr": torch.tensor([0, q_len, tokens], dtype=torch.int32)}
        given: dict[str, Any] = {} if q_len == 1 else steps | {"max_q_len": q_len}
        q_index = torch.zeros(tokens, indexer.num_heads, indexer.head_dim).to(torch.float8_e4m3fn)
        weights = torch.zeros(tokens, indexer.num_heads)
        logits = jitattn.index_logits(q_index, weights, index_cache, pages, lens, **given)
        lists = jitattn.select_tokens(logits, pages, lens, indexer.num_tokens, **given)
        plan = planner.plan(lists, tokens)
        q_nope = torch.zeros(tokens, config.num_heads, 512, dtype=torch.bfloat16)
        for cache in latent_caches(config):
            plan.run(q_nope, q_nope[..., :64].contiguous(), planner.bind(cache))
    kinds = {spec.kernel for spec in asked}
    assert {"index_logits", "choose", "mla", "schedule"} <= kinds
    assert asked <= kernels(found, "sm_90a")


def latent_caches(config: MLAConfig) -> Iterator[Tensor | tuple[Tensor, Tensor]]:
    """Every form that ``bind`` takes, each once at odd addresses."""
    stored = getattr(torch, config.kv_dtype)
    shape = 10, config.page_size, 576
    for room in (0, 1):
        whole = torch.zeros(*shape[:2], 576 + 4 * room, dtype=stored)[..., 4 * room :]
        yield whole
        yield whole[..., :512], whole[..., 512:]
        if stored.itemsize == 1:
            yield (
                whole[..., :512],
                torch.zeros(*shape[:2], 64 + room, dtype=torch.bfloat16)[..., room:],
            )
            yield torch.zeros(*shape[:2], 656 + 4 * room, dtype=torch.uint8)[..., 4 * room :]


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
