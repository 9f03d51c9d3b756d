"""vLLM's latent attention through jitattn, against its definition in float64.

What needs no vLLM is tried over stand-ins; layers as models have them, over vLLM's own classes
where it can be imported (0.26 and 0.33 were; what they have compiled is there in torch).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from jitattn.base.errors import ConfigError
from jitattn.integrations import vllm as integration
from jitattn.integrations.vllm.latents import Latents
from jitattn.kernels.merge.api import merge_states
from tests.support import engines, vllm_latent_ops
from tests.support.vllm_latent_runs import (
    DECODE,
    DEEPSEEK,
    DIMS,
    MIXED,
    PROMPTS,
    SCALE,
    SORTED,
    VERIFIED,
    Case,
    Dims,
    Run,
    attend,
    check,
    decode_of,
    heads_of,
    layer_of,
    prompts_of,
    queries_of,
    write,
)

pytestmark = pytest.mark.usefixtures("new_tensors_are_nan")

CPU = torch.device("cpu")


# --- decode steps, without vLLM -------------------------------------------------------------------


CASES = {
    "decode": Case(DECODE),
    "fp16": Case(DECODE, dtype=torch.float16, padding=2),
    "verified tokens": Case(VERIFIED),
    "prompts as well": Case(MIXED, page_size=32),
    "deepseek": Case(VERIFIED, dims=DEEPSEEK, page_size=64),
    "fp8": Case(DECODE, kv_cache_dtype="fp8"),
    "fp8 by name": Case(VERIFIED, kv_cache_dtype="fp8_e4m3", dims=DEEPSEEK),
    "empty requests": Case({"kv_lens": (9, 0, 33, 0), "q_lens": (1, 0, 1, 0)}, padding=2),
    "named dtype": Case(DECODE, kv_cache_dtype="bfloat16"),
}


@pytest.mark.parametrize("name", CASES)
def test_decode_steps_attend_to_latents(name: str) -> None:
    run = Run(CASES[name])
    layer, q = layer_of(run), queries_of(run)
    write(layer, run)
    out, lse = attend(layer, run, q, decode_of(run))
    assert lse is None
    assert out.is_contiguous()
    check(run, q, out)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_latents_are_written_where_they_belong(kv_cache_dtype: str) -> None:
    """And nothing else is."""
    run = Run(Case(MIXED, kv_cache_dtype=kv_cache_dtype, padding=3))
    layer, want = layer_of(run), run.cache.clone()
    for b, (n, q) in enumerate(zip(run.batch.kv_lens, run.batch.q_lens, strict=True)):
        for token in range(n - q, n):
            page, place = divmod(run.paged.slot(b, token), run.case.page_size)
            want[page, place] = run.stored(b)[token]
    write(layer, run, slots=torch.full_like(run.slots, -1))
    write(layer, run)
    torch.testing.assert_close(run.cache.float(), want.float(), rtol=0, atol=0, equal_nan=True)
    nothing = torch.tensor([])  # before there are caches
    layer.do_kv_cache_update(*run.new, nothing, run.slots, "auto", run.scale)


def test_a_ranks_part_of_the_keys_gives_lse_as_well() -> None:
    """Natural logarithms; a rank may have none of a request's tokens."""
    run = Run(Case({"kv_lens": (40, 1, 33), "q_lens": (1, 1, 1)}))
    layer, q = layer_of(run), queries_of(run)
    layer.need_to_return_lse_for_decode = True
    write(layer, run)
    lens, size, states = run.batch.kv_lens, run.case.page_size, []
    for rank in (0, 1):  # which have every other page
        pages = [ids[rank::2] for ids in run.paged.pages]
        counts = [sum(1 for t in range(n) if t // size % 2 == rank) for n in lens]
        table = torch.tensor([(ids + [0] * 4)[:4] for ids in pages], dtype=torch.int32)
        given = {"seq_lens": run.ints(counts), "block_table_tensor": table}
        states.append(attend(layer, run, q, decode_of(run, **given)))
    assert float(states[1][1][1].max()) == -torch.inf
    outs, lses = (torch.stack(parts) for parts in zip(*states, strict=True))
    out, lse = merge_states(outs, lses)
    for b in range(run.batch.batch_size):
        want, want_lse, bound = run.wanted_latents(q[b : b + 1], b)
        engines.check_rows(out[b : b + 1], want, bound, slack=2.5)
        torch.testing.assert_close(lse[b : b + 1].double(), want_lse, rtol=1e-5, atol=1e-5)


def test_layers_of_a_step_share_a_plan() -> None:
    """A later pass looks at lengths again, which may have changed in place."""
    run = Run(Case(DECODE))
    layers, q = [layer_of(run), layer_of(run)], queries_of(run)
    write(layers[0], run)
    decode = decode_of(run)
    for layer in layers:
        check(run, q, attend(layer, run, q, decode)[0])
    planner = layers[0].planner(Latents(DIMS.num_heads, run.case.dtype, 16, CPU))
    assert (
        decode.step.plan_of(planner, decode.pages)[0]
        is (
            decode.step.plan_of(
                layers[1].planner(Latents(4, run.case.dtype, 16, CPU)), decode.pages
            )[0]
        )
    )
    decode.step.seq_lens.copy_(torch.tensor([1, 30, 2, 40]))
    run.rows = [row[:n] for row, n in zip(run.rows, (1, 30, 2, 40), strict=True)]
    check(run, q, attend(layers[0], run, q, decode)[0])


def test_scales_and_places_are_looked_at_each_time() -> None:
    run = Run(Case(DECODE, kv_cache_dtype="fp8"))
    layer, q = layer_of(run), queries_of(run)
    write(layer, run)
    check(run, q, attend(layer, run, q, decode_of(run))[0])
    kept = [run.stored(b) for b in range(run.batch.batch_size)]
    run.stored = kept.__getitem__  # type: ignore[method-assign]
    run.scale.mul_(2)
    check(run, q, attend(layer, run, q, decode_of(run))[0])
    run.cache = run.cache.clone()
    check(run, q, attend(layer, run, q, decode_of(run))[0])


def test_what_does_not_fit_is_named() -> None:
    run = Run(Case(DECODE))
    layer = layer_of(run)
    with pytest.raises(ValueError, match=r"kv_cache has shape \[.*\]: expected .*, 320\]"):
        layer.do_kv_cache_update(*run.new, run.cache[..., 1:], run.slots, "auto", run.scale)
    with pytest.raises(ConfigError, match="num_heads=129"):
        layer.planner(Latents(129, torch.bfloat16, 16, CPU))
    layer.kv_cache_dtype = "float16"
    with pytest.raises(ConfigError, match="kv_dtype=float16"):
        layer.planner(Latents(4, torch.bfloat16, 16, CPU))


# --- prompts, without vLLM ------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [DIMS, DEEPSEEK], ids=["small", "deepseek"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_prompts_attend_to_themselves(dims: Dims, dtype: torch.dtype) -> None:
    lens = (20, 1, 33)
    starts = torch.tensor([0, 20, 21, 54], dtype=torch.int32)
    q, v = heads_of(54, dims, dtype)[0], heads_of(54, dims, dtype)[1]
    k = heads_of(54, dims, dtype)[0]
    prompts = prompts_of(dims)
    prompts.prepare_metadata(SimpleNamespace(query_start_loc=starts, max_query_len=33))
    room = torch.empty(54, dims.num_heads, dims.v, dtype=dtype)
    alone = prompts.run_prefill_new_tokens(q=q, k=k, v=v, return_softmax_lse=False, out=room)
    assert alone is room
    out, lse = prompts.run_prefill_new_tokens(q=q, k=k, v=v, return_softmax_lse=True)
    assert torch.equal(alone, out)
    assert lse.shape == (dims.num_heads, 54)
    for begin, n in zip(starts.tolist(), lens, strict=False):
        rows = slice(begin, begin + n)
        want, want_lse, size = engines.defined(q[rows], k[rows], v[rows], engines.Scores(SCALE))
        engines.check_rows(out[rows], want, size)
        torch.testing.assert_close(lse.T[rows].double(), want_lse, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="output_scale is given"):
        prompts.run_prefill_new_tokens(
            q=q, k=k, v=v, return_softmax_lse=False, output_scale=torch.ones(())
        )


@pytest.mark.parametrize("has_chunks", [False, True], ids=["0.26", "0.33"])
def test_prompts_attend_to_what_is_before_them(has_chunks: bool) -> None:
    """Every query to all tokens of a chunk; where there are none lse is -inf."""
    starts, key_starts = ([0, 7, 9, 29], [0, 40, 40, 53])
    q = heads_of(29, DIMS, torch.bfloat16)[0]
    k, v = heads_of(53, DIMS, torch.bfloat16)
    offsets, key_offsets = (torch.tensor(x, dtype=torch.int32) for x in (starts, key_starts))
    both = torch.stack([torch.zeros_like(key_offsets), key_offsets])
    prompts = prompts_of(DIMS)
    metadata = SimpleNamespace(
        query_start_loc=offsets,
        max_query_len=20,
        chunked_context=SimpleNamespace(cu_seq_lens=both),
    )
    prompts.prepare_metadata(metadata)
    chunk = SimpleNamespace(
        index=1, query_start_loc=offsets, max_query_len=20, cu_seq_lens=key_offsets
    )
    given: dict[str, Any] = {"chunk": chunk} if has_chunks else {"chunk_idx": 1}
    out, lse = prompts.run_prefill_context_chunk(q=q, k=k, v=v, **given)
    pairs = zip(itertools.pairwise(starts), itertools.pairwise(key_starts), strict=True)
    for (begin, end), (first, last) in pairs:
        scores = engines.Scores(SCALE, causal=False)
        want, want_lse, size = engines.defined(q[begin:end], k[first:last], v[first:last], scores)
        engines.check_rows(out[begin:end], want, size)
        torch.testing.assert_close(lse.T[begin:end].double(), want_lse, rtol=1e-5, atol=1e-5)
    assert float(lse[:, 7:9].max()) == -torch.inf


# --- vLLM's own -----------------------------------------------------------------------------------


@pytest.fixture
def mla(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The backend over vLLM's classes, on a card of compute capability 9.0 as far as it asks."""
    with engines.installed("vllm", "vLLM"):
        from vllm.platforms import current_platform
        from vllm.platforms.interface import DeviceCapability
        from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        from jitattn.integrations.vllm import mla
    vllm_latent_ops.install(monkeypatch)
    capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
    monkeypatch.setattr(type(current_platform), "get_device_capability", capability)
    names = AttentionBackendEnum.CUSTOM, MLAPrefillBackendEnum.CUSTOM
    for name in names:
        name.clear_override()
    integration.register()
    yield mla
    for name in names:
        name.clear_override()


class Projection(torch.nn.Module):
    """``kv_b_proj`` without ranks, which multiplies K and V out of latents."""

    quant_method = None

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, latents: Tensor) -> tuple[Tensor, None]:
        return torch.nn.functional.linear(latents, self.weight), None


def config_of(run: Run, *, num_speculative: int = 0) -> Any:
    """VLLM's configuration, as far as layers and builders read it."""
    from vllm.config import DeviceConfig, VllmConfig

    case, dims = run.case, run.case.dims
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    text = SimpleNamespace(
        q_lora_rank=None,
        kv_lora_rank=dims.rank,
        qk_nope_head_dim=dims.nope,
        qk_rope_head_dim=dims.rope,
        v_head_dim=dims.v,
    )
    model = SimpleNamespace(
        dtype=case.dtype,
        use_mla=True,
        hf_text_config=text,
        max_model_len=8,
        get_head_size=lambda: dims.width,
        get_num_attention_heads=lambda parallel: dims.num_heads,
    )
    object.__setattr__(config, "model_config", model)
    config.cache_config.cache_dtype = case.kv_cache_dtype
    config.cache_config.block_size = case.page_size
    config.scheduler_config.max_num_seqs = 1  # little room for what is gathered
    if num_speculative:
        counts = SimpleNamespace(num_speculative_tokens=num_speculative, parallel_drafting=False)
        object.__setattr__(config, "speculative_config", counts)
    return config


def attention_of(run: Run, config: Any, mla: Any, name: str) -> Any:
    """``MLAAttention`` as models have it."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import MLAAttention

    dims = run.case.dims
    before = torch.get_default_dtype()
    torch.set_default_dtype(run.case.dtype)
    try:
        with set_current_vllm_config(config):
            attention = MLAAttention(
                *(dims.num_heads, SCALE, dims.nope, dims.rope, dims.v, None, dims.rank),
                Projection(run.weight),
                cache_config=config.cache_config,
                prefix=name,
                attn_backend=mla.JitattnMLABackend,
            )
    finally:
        torch.set_default_dtype(before)
    attention.impl.dcp_world_size = 1  # no groups of ranks were made
    attention.process_weights_after_loading(run.case.dtype)
    attention._k_scale.copy_(run.scale)
    attention.kv_cache = run.handed_over
    return attention


class Layers:
    """Two layers of vLLM over a batch, and their builder."""

    names = ("model.layers.0.attn", "model.layers.1.attn")

    def __init__(self, run: Run, mla: Any, **given: Any) -> None:
        from vllm.v1.kv_cache_interface import MLAAttentionSpec

        case = run.case
        self.run, self.config = run, config_of(run, **given)
        self.layers = [attention_of(run, self.config, mla, name) for name in self.names]
        spec = MLAAttentionSpec(
            block_size=case.page_size,
            num_kv_heads=1,
            head_size=case.dims.width,
            dtype=run.handed_over.dtype,
        )
        self.builder = mla.JitattnMLAMetadataBuilder(spec, list(self.names), self.config, CPU)

    def common(self, **other: Any) -> Any:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        return CommonAttentionMetadata(**self.run.common(**other))

    def attend(self, metadata: Any) -> list[Tensor]:
        """Results of both layers, [num_tokens, num_heads, v]."""
        from vllm.forward_context import set_forward_context

        run, dims = self.run, self.run.case.dims
        q = engines.packed(run.q, run.case.padding)
        slots = {} if metadata is None else dict.fromkeys(self.names, metadata.slot_mapping)
        held = None if metadata is None else dict.fromkeys(self.names, metadata)
        shape = torch.Size((q.shape[0], dims.num_heads * dims.v))
        with set_forward_context(held, self.config, num_tokens=q.shape[0], slot_mapping=slots):
            found = [layer(q, *run.new, output_shape=shape) for layer in self.layers]
        return [out.view(-1, dims.num_heads, dims.v) for out in found]

    def check(self, out: Tensor, num_decodes: int) -> None:
        bounds = self.run.batch.indptr()
        for b, (begin, end) in enumerate(itertools.pairwise(bounds)):
            want, size = self.run.wanted(b, is_prompt=b >= num_decodes)
            # K, V, latents of q and of out, and states are rounded; logits of q's go by e^x.
            engines.check_rows(out[begin:end], want, size, slack=3)


VLLM_CASES = {
    "mixed": (Case(MIXED, padding=2), 3),
    "mixed, fp16": (Case(MIXED, dtype=torch.float16), 3),
    "sorted": (Case(SORTED, padding=2), 3),
    "decode": (Case(DECODE), 4),
    "prompts": (Case(PROMPTS), 0),
    "deepseek": (Case(MIXED, dims=DEEPSEEK), 3),
    "fp8": (Case(MIXED, kv_cache_dtype="fp8"), 3),
}


@pytest.mark.filterwarnings("ignore")  # of modules that vLLM imports
@pytest.mark.parametrize("name", VLLM_CASES)
def test_vllms_layers(mla: Any, name: str) -> None:
    """Decode steps and prompts, some with tokens in the cache that take several chunks."""
    case, num_decodes = VLLM_CASES[name]
    layers = Layers(Run(case), mla)
    metadata = layers.builder.build(0, layers.common())
    assert metadata.num_decodes == num_decodes
    if case.lens is MIXED:
        context = metadata.prefill.chunked_context
        assert len(getattr(context, "chunks", None) or context.seq_tot) >= 2
    for out in layers.attend(metadata):
        layers.check(out, num_decodes)


@pytest.mark.filterwarnings("ignore")  # of modules that vLLM imports
def test_vllms_verified_tokens(mla: Any) -> None:
    """Several query tokens a request are decode steps, when vLLM speculates."""
    layers = Layers(Run(Case(VERIFIED)), mla, num_speculative=2)
    assert layers.builder.reorder_batch_threshold == 3
    metadata = layers.builder.build(0, layers.common())
    assert (metadata.num_decodes, metadata.num_prefills) == (4, 0)
    assert metadata.decode.step.max_q_len == 3
    layers.check(layers.attend(metadata)[1], 4)


@pytest.mark.filterwarnings("ignore")  # of modules that vLLM imports
def test_vllms_runs_that_measure_memory_are_zeros(mla: Any) -> None:
    layers = Layers(Run(Case(DECODE)), mla)
    for layer in layers.layers:
        layer.kv_cache = torch.tensor([])  # there is none yet
    for out in layers.attend(None):
        assert bool((out == 0).all())


@pytest.mark.filterwarnings("ignore")  # of modules that vLLM imports
def test_vllms_captures(mla: Any) -> None:
    """Uniform batches; those of the same buffers and sizes have the same plans."""
    from vllm.v1.attention.backend import AttentionCGSupport

    support = mla.JitattnMLAMetadataBuilder.get_cudagraph_support(None, None)
    assert support is AttentionCGSupport.UNIFORM_BATCH
    layers = Layers(Run(Case(DECODE)), mla)
    common = layers.common()
    metadata = layers.builder.build_for_cudagraph_capture(common)
    assert layers.builder.build_for_cudagraph_capture(common) is metadata
    assert layers.builder.build_for_cudagraph_capture(layers.common()) is not metadata
    for out in layers.attend(metadata):
        layers.check(out, 4)
    lens = torch.tensor([1, 30, 2, 40])
    common.seq_lens.copy_(lens)
    layers.run.rows = [row[:n] for row, n in zip(layers.run.rows, lens.tolist(), strict=True)]
    metadata.slot_mapping.fill_(-1)
    for out in layers.attend(metadata):
        layers.check(out, 4)


# --- what vLLM asks before ------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # of modules that vLLM imports
def test_vllm_gets_the_backend_of_the_model(mla: Any) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from jitattn.integrations.vllm.backend import JitattnBackend

    custom = AttentionBackendEnum.CUSTOM
    assert custom.get_class() is JitattnBackend
    config = config_of(Run(Case(DECODE)))
    with set_current_vllm_config(config):
        assert custom.get_class() is mla.JitattnMLABackend
        config.model_config.use_mla = False
        assert custom.get_class() is JitattnBackend
    assert mla.JitattnMLABackend.get_name() == custom.name
    path = ".".join(mla.JitattnMLABackend.full_cls_name())
    assert path == "jitattn.integrations.vllm.mla.JitattnMLABackend"


@pytest.mark.filterwarnings("ignore")  # of modules that vLLM imports
def test_prompts_go_through_what_the_user_named(mla: Any) -> None:
    from vllm.v1.attention.backends.mla.prefill.registry import (
        MLAPrefillBackendEnum,
        register_mla_prefill_backend,
    )

    run = Run(Case(DECODE))
    config = config_of(run)
    layer = attention_of(run, config, mla, "a")
    assert isinstance(layer.prefill_backend, mla.JitattnMLAPrefillBackend)
    assert config.attention_config.mla_prefill_backend is MLAPrefillBackendEnum.CUSTOM
    named = MLAPrefillBackendEnum.FLASHINFER
    path = f"{__name__}.Named"
    register_mla_prefill_backend(named, path)
    try:
        globals()["Named"] = type("Named", (mla.JitattnMLAPrefillBackend,), {})
        config = config_of(run)
        config.attention_config.mla_prefill_backend = named
        assert type(attention_of(run, config, mla, "b").prefill_backend).__name__ == "Named"
    finally:
        named.clear_override()


def test_another_packages_prefill_backend_stays(mla: Any, caplog: Any) -> None:
    from vllm.v1.attention.backends.mla.prefill import registry

    custom = registry.MLAPrefillBackendEnum.CUSTOM
    registry.register_mla_prefill_backend(custom, "others.Prefill")
    with caplog.at_level("WARNING", logger="jitattn"):
        integration.register()
    assert "others.Prefill" in caplog.text
    assert custom.get_path() == "others.Prefill"


ASKED: dict[str, Any] = {
    "head_size": 576,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": 64,
    "use_mla": True,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "attn_type": "decoder",
}


def reasons(mla: Any, **asked: Any) -> list[str]:
    from vllm.platforms.interface import DeviceCapability

    capability = asked.pop("device_capability", (9, 0))
    given = {**ASKED, "device_capability": DeviceCapability(*capability), **asked}
    found: list[str] = mla.JitattnMLABackend.validate_configuration(**given)
    return found


def test_configurations_that_are_supported(mla: Any) -> None:
    from vllm.v1.attention.selector import AttentionSelectorConfig

    for asked in (
        {},
        {"dtype": torch.float16, "head_size": 320, "block_size": 16},
        {"kv_cache_dtype": "fp8", "use_kv_connector": True},
        {"kv_cache_dtype": "bfloat16", "block_size": None, "device_capability": (8, 0)},
    ):
        assert reasons(mla, **asked) == []
    # As vLLM asks: all that it knows of.
    config = AttentionSelectorConfig(
        head_size=576, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None, use_mla=True
    )
    assert reasons(mla, **config._asdict()) == []
    if "use_dcp" in config._fields:
        assert reasons(mla, use_dcp=True) == []


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"head_size": 512}, "head_size not supported"),
        ({"dtype": torch.float32}, "dtype not supported"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype not supported"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype not supported"),
        (
            {"kv_cache_dtype": "float16"},
            "kv_dtype=float16 is neither q_dtype nor float8_e4m3fn",
        ),
        ({"block_size": 8}, "block_size not supported"),
        ({"use_mla": False}, "non-MLA not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"has_sink": True}, "attention sinks not supported"),
        ({"has_sliding_window": True}, "sliding window not supported"),
        ({"use_non_causal": True}, "non-causal attention not supported"),
        ({"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
        ({"use_batch_invariant": True}, "batch invariance not supported"),
        ({"use_pcp": True}, "PCP not supported"),
        ({"use_per_head_quant_scales": True}, "per-head quant scales not supported"),
        ({"attn_type": "encoder_only"}, "attention type encoder_only not supported"),
        ({"device_capability": (7, 5)}, "compute capability not supported"),
    ],
)
def test_configurations_that_are_not_supported(
    mla: Any, asked: dict[str, Any], reason: str
) -> None:
    assert reason in reasons(mla, **asked)


def test_prompts_of_heads_that_there_are_no_kernels_for(mla: Any) -> None:
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.mla.prefill.base import MLADimensions
    from vllm.v1.attention.backends.mla.prefill.selector import MLAPrefillSelectorConfig

    def asked(nope: int, v: int, dtype: torch.dtype = torch.bfloat16) -> list[str]:
        dims = MLADimensions(qk_nope_head_dim=nope, qk_rope_head_dim=64, v_head_dim=v)
        config = MLAPrefillSelectorConfig(dtype=dtype, mla_dimensions=dims)
        found: list[str] = mla.JitattnMLAPrefillBackend.validate_configuration(
            DeviceCapability(9, 0), config
        )
        return found

    assert asked(128, 128) == []
    assert asked(192, 256, torch.float16) == []
    assert "supported MLA dimensions" in str(asked(40, 128))
    assert "dtype torch.float32 not supported" in asked(128, 128, torch.float32)


LAYER: dict[str, Any] = {
    "num_heads": 16,
    "head_size": 576,
    "scale": 0.1,
    "num_kv_heads": 1,
    "alibi_slopes": None,
    "sliding_window": None,
    "kv_cache_dtype": "auto",
    "logits_soft_cap": None,
    "attn_type": "decoder",
    "kv_sharing_target_layer_name": None,
}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"alibi_slopes": [0.5]}, "alibi_slopes is given"),
        ({"sliding_window": 8}, "sliding_window is given"),
        ({"logits_soft_cap": 5.0}, "logits_soft_cap is given"),
        ({"indexer": object()}, "indexer is given"),
        ({"attn_type": "encoder"}, "attn_type is 'encoder'"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype is 'fp8_ds_mla'"),
    ],
)
def test_layers_that_are_not_supported(mla: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mla.JitattnMLAImpl(**(LAYER | given))


@pytest.mark.parametrize("seed", range(12))
def test_random_decode_steps(seed: int) -> None:
    rng = random.Random(seed)
    q_lens = tuple(rng.choice([0, 1, 1, 2, 5]) for _ in range(rng.randint(1, 5)))
    kv_lens = tuple(q + rng.choice([0, 1, 15, 16, 50]) if q else 0 for q in q_lens)
    dims = Dims(num_heads=rng.choice([1, 3, 16]), rank=rng.choice([256, 512]))
    case = Case(
        {"kv_lens": kv_lens, "q_lens": q_lens},
        dims=dims,
        page_size=rng.choice([16, 32, 64]),
        dtype=rng.choice([torch.float16, torch.bfloat16]),
        kv_cache_dtype=rng.choice(["auto", "fp8"]),
        padding=rng.choice([0, 3]),
        seed=seed,
    )
    run = Run(case)
    layer, q = layer_of(run), queries_of(run)
    write(layer, run)
    check(run, q, attend(layer, run, q, decode_of(run))[0])
