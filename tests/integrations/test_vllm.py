"""vLLM's layers and batches through jitattn, against their definition in float64.

Each test runs over what needs no vLLM, with stand-ins for what vLLM hands over, and over vLLM's own
classes where it can be imported (0.26 and 0.33 were; their compiled parts are not needed).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from jitattn.base.errors import ConfigError
from jitattn.integrations import vllm as integration
from jitattn.integrations.vllm.context_parallel import Shards
from jitattn.integrations.vllm.layer import Layer
from jitattn.integrations.vllm.metadata import Tensors
from jitattn.kernels.attention.api import AttentionPlanner
from tests.support import engines
from tests.support.vllm_runs import DECODE, LAYOUTS, MIXED, Case, Engine, Run, stand_in


def vllm_backend() -> Any:
    """The backend over vLLM's classes, or a skip that says why not."""
    with engines.installed("vllm", "vLLM"):
        from jitattn.integrations.vllm import backend
    return backend


pytestmark = pytest.mark.usefixtures("new_tensors_are_nan")


def engine_of_vllm() -> Engine:
    backend = vllm_backend()
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.attention.backend import CommonAttentionMetadata

    class Held(AttentionLayerBase):
        def __init__(self, impl: Any) -> None:
            self.impl = impl

        def get_attn_backend(self) -> Any:
            return backend.JitattnBackend

        def get_kv_cache_spec(self, vllm_config: Any) -> Any:
            raise NotImplementedError

    def builder(tensors: Tensors, found: dict[str, Any]) -> Any:
        context = {name: Held(layer.impl) for name, layer in found.items()}
        config = SimpleNamespace(
            model_config=SimpleNamespace(dtype=tensors.q_dtype),
            compilation_config=SimpleNamespace(static_forward_context=context),
        )
        spec = SimpleNamespace(
            block_size=tensors.page_size,
            dtype=tensors.kv_dtype,
            head_size=tensors.head_dim_vo,
            head_size_v=tensors.head_dim_vo,
        )
        return backend.JitattnMetadataBuilder(spec, list(found), config, tensors.device)

    def common(**given: Any) -> Any:
        host = given["query_start_loc"].clone()
        return CommonAttentionMetadata(query_start_loc_cpu=host, **given)

    return Engine(backend.JitattnImpl, builder, common)


@pytest.fixture(params=["stand-ins", "vllm"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return stand_in() if request.param == "stand-ins" else engine_of_vllm()


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lens", [MIXED, DECODE], ids=["mixed", "decode"])
def test_every_layout(engine: Engine, layout: str, lens: dict[str, tuple[int, ...]]) -> None:
    Run(engine, Case(lens, layout=layout, padding=3)).go()


CASES = {
    "fp16": Case(MIXED, dtype=torch.float16),
    "window": Case(MIXED, scores=engines.Scores(window_left=7)),
    "window of one": Case(MIXED, scores=engines.Scores(window_left=0), page_size=32),
    "long window": Case(DECODE, scores=engines.Scores(window_left=100)),
    "soft cap": Case(MIXED, scores=engines.Scores(soft_cap=2.0, scale=2.0)),
    "sinks": Case(MIXED, sinks=True, padding=2),
    "sinks, window": Case(DECODE, sinks=True, scores=engines.Scores(window_left=20)),
    "one kv head": Case(MIXED, heads=engines.Heads(4, 1)),
    "many heads": Case(DECODE, heads=engines.Heads(6, 6, 64, 64)),
    "other V": Case(MIXED, heads=engines.Heads(4, 2, 64, 32)),
    "page 48": Case(MIXED, page_size=48, layout="BLNHC"),
    "page 528": Case(MIXED, page_size=528),
    "fp8": Case(MIXED, kv_cache_dtype="fp8", seed=1),
    "fp8 typed": Case(DECODE, kv_cache_dtype="fp8_e4m3", seed=2, layout="BLHNC"),
    "fp8 e5m2": Case(MIXED, kv_cache_dtype="fp8_e5m2", seed=3),
    "fp8 per head": Case(MIXED, kv_cache_dtype="fp8", per_head_scales=True, seed=4),
    "fp8, window, sinks": Case(
        MIXED, kv_cache_dtype="fp8", sinks=True, scores=engines.Scores(window_left=5), seed=5
    ),
    "not causal": Case(MIXED, scores=engines.Scores(causal=False)),
}


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_layer(engine: Engine, name: str) -> None:
    Run(engine, CASES[name]).go()


@pytest.mark.parametrize("seed", range(40))
def test_random_batches(seed: int) -> None:
    rng = random.Random(seed)
    q_lens, kv_lens = [], []
    for _ in range(rng.randint(1, 6)):
        q = rng.choice([0, 1, 1, 1, 2, rng.randint(1, 20)])
        q_lens.append(q)
        kv_lens.append(0 if q == 0 and rng.random() < 0.5 else q + rng.choice([0, 1, 15, 16, 50]))
    heads = rng.choice([1, 2])
    fp8 = rng.random() < 0.3
    case = Case(
        {"kv_lens": tuple(kv_lens), "q_lens": tuple(q_lens)},
        heads=engines.Heads(heads * rng.choice([1, 4, 5]), heads, 16, rng.choice([16, 32])),
        scores=engines.Scores(
            scale=rng.choice([0.25, 1.0]),
            window_left=rng.choice([-1, -1, 0, 3, 15, 16, 40]),
            soft_cap=rng.choice([0.0, 0.0, 1.5]),
        ),
        page_size=rng.choice([16, 32, 48]),
        layout=rng.choice(LAYOUTS),
        dtype=rng.choice([torch.float16, torch.bfloat16]),
        kv_cache_dtype=rng.choice(["fp8", "fp8_e5m2"]) if fp8 else "auto",
        per_head_scales=rng.random() < 0.5,
        sinks=rng.random() < 0.3,
        padding=rng.choice([0, 4]),
        seed=seed,
    )
    Run(stand_in(), case).go()


def test_scales_are_read_when_layers_run(engine: Engine) -> None:
    """What changes in place counts, and a float that nobody set does not."""
    run = Run(engine, Case(DECODE, kv_cache_dtype="fp8", seed=1))
    run.layer._k_scale_float = run.layer._v_scale_float = 1.0
    metadata = run.builder.build(0, run.common())
    run.write(metadata)
    run.check(run.attend(metadata))
    kept = [run.kept(b) for b in range(run.batch.batch_size)]
    run.layer._k_scale.mul_(3.0)
    run.layer._v_scale.mul_(0.5)
    run.kept = lambda b: kept[b]  # type: ignore[method-assign]
    run.check(run.attend(run.builder.build(0, run.common())))


def test_strides_of_size_one_mean_nothing(engine: Engine) -> None:
    run = Run(engine, Case(MIXED, heads=engines.Heads(4, 1)))
    page, _, token, _ = run.kv_cache.stride()
    run.kv_cache = run.kv_cache.as_strided(run.kv_cache.shape, (page, 7, token, 1))
    run.go()
    one = Case({"kv_lens": (20,), "q_lens": (1,)})
    run = Run(engine, one)
    run.write(run.builder.build(0, run.common()))
    heads = one.heads
    q = run.batch.q[0].as_strided((1, heads.num_qo_heads, heads.head_dim), (4608, 32, 1))
    out = torch.full_like(q, engines.NAN)
    run.impl.forward(
        run.layer, q, None, None, run.kv_cache, run.builder.build(0, run.common()), out
    )
    run.check(out)


def test_tokens_without_a_slot_are_not_written(engine: Engine) -> None:
    run = Run(engine, Case(DECODE))
    slots = torch.full((3,), -1, dtype=torch.int64)
    before = run.kv_cache.clone()
    run.write(run.builder.build(0, run.common(slot_mapping=slots)))
    torch.testing.assert_close(run.kv_cache, before, rtol=0, atol=0, equal_nan=True)


def test_a_run_that_measures_memory_is_zeros(engine: Engine) -> None:
    run = Run(engine, Case(DECODE))
    assert bool((run.attend(None) == 0).all())


def test_rows_of_buffers_that_hold_more(engine: Engine) -> None:
    """VLLM's own tensors are parts of larger ones; a table may be narrower than its rows."""
    run = Run(engine, Case(MIXED))
    common = run.common()
    n, width = common.block_table_tensor.shape
    wide = torch.full((n + 3, width + 13), 2**31 - 1, dtype=torch.int32)
    wide[:n, :width] = common.block_table_tensor
    many = torch.full((n + 3,), 10**6, dtype=torch.int32)
    many[:n] = common.seq_lens
    starts = torch.full((n + 4,), common.num_actual_tokens, dtype=torch.int32)
    starts[: n + 1] = common.query_start_loc
    metadata = run.builder.build(
        0,
        run.common(block_table_tensor=wide[:, :width], seq_lens=many, query_start_loc=starts),
    )
    run.write(metadata)
    run.check(run.attend(metadata))


# --- plans ----------------------------------------------------------------------------------------


def test_layers_of_a_kind_share_a_plan(engine: Engine, plans: list[str]) -> None:
    """A pass over the model makes one; the next pass with the same metadata looks again."""
    run = Run(engine, Case(MIXED))
    other = Run(engine, Case(MIXED))
    metadata = run.builder.build(0, run.common())
    assert plans == []  # a step that only replays graphs needs none
    run.write(metadata)
    run.check(run.attend(metadata))
    other.impl.forward(
        run.layer,
        engines.packed(run.batch.q),
        None,
        None,
        run.kv_cache,
        metadata,
        out := run.attend(None),
    )
    run.check(out)
    assert plans == ["plan"]
    run.attend(metadata)
    assert plans == ["plan", "refresh"]


def test_layers_of_other_kinds_have_plans_of_their_own(engine: Engine, plans: list[str]) -> None:
    run = Run(engine, Case(DECODE, scores=engines.Scores(window_left=4)))
    other = Run(engine, Case(DECODE))
    metadata = run.builder.build(0, other.common())
    other.write(metadata)
    other.attend(metadata)
    run.kv_cache, run.paged = other.kv_cache, other.paged
    run.check(run.attend(metadata))
    assert plans == ["plan", "plan"]


def test_a_step_reads_lengths_that_changed_in_place(engine: Engine) -> None:
    run = Run(engine, Case({"kv_lens": (40, 17), "q_lens": (1, 1)}))
    common = run.common()
    metadata = run.builder.build(0, common)
    run.write(metadata)
    run.check(run.attend(metadata))
    batch = run.batch
    common.seq_lens.copy_(torch.tensor([25, 0]))
    batch.k, batch.v = ([x[0][:25], x[1][:0]] for x in (batch.k, batch.v))
    out = run.attend(metadata)
    want, _, size = engines.defined(batch.q[0], batch.k[0], batch.v[0], run.case.scores)
    engines.check_rows(out[:1], want, size)
    assert bool((out[1] == 0).all())


def test_plans_of_a_capture(engine: Engine, plans: list[str]) -> None:
    """They are there before it, the first layer schedules inside it, and they stay."""
    run = Run(engine, Case(DECODE))
    common = run.common()
    first = run.builder.build_for_cudagraph_capture(common)
    assert plans == ["plan"]
    assert run.builder.build_for_cudagraph_capture(common) is first  # after a warm-up
    run.write(first)
    run.check(run.attend(first))
    assert plans == ["plan", "refresh"]
    smaller = run.common(block_table_tensor=common.block_table_tensor.clone())
    assert run.builder.build_for_cudagraph_capture(smaller) is not first


def test_another_groups_table_has_the_same_plan(engine: Engine, plans: list[str]) -> None:
    run = Run(engine, Case(MIXED))
    metadata = run.builder.build(0, run.common())
    other = Run(engine, Case(MIXED, seed=9))
    common = other.common()
    changed = run.builder.update_block_table(
        metadata, common.block_table_tensor, common.slot_mapping
    )
    for one, given in ((run, metadata), (other, changed)):
        one.write(given)
        one.check(one.attend(given))
    assert plans == ["plan"]
    wide = torch.nn.functional.pad(common.block_table_tensor, (0, 3), value=-1)
    changed = run.builder.update_block_table(metadata, wide, common.slot_mapping)
    other.check(other.attend(changed))
    assert plans == ["plan", "plan"]


def test_a_cache_is_bound_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    bind = AttentionPlanner.bind
    monkeypatch.setattr(AttentionPlanner, "bind", lambda *a, **k: seen.append(1) or bind(*a, **k))
    run = Run(engine, Case(DECODE, kv_cache_dtype="fp8"))
    for _ in range(3):
        metadata = run.builder.build(0, run.common())
        run.write(metadata)
        run.check(run.attend(metadata))
    assert len(seen) == 1
    run.kv_cache = run.kv_cache.clone()  # elsewhere
    run.check(run.attend(metadata))
    assert len(seen) == 2


# --- decode context parallelism -------------------------------------------------------------------


@pytest.mark.parametrize("interleave", [1, 4])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_keys_of_a_request_on_two_ranks(interleave: int, kv_cache_dtype: str) -> None:
    """Ranks attend all heads to their keys; combined and merged, each has its own heads' rows."""
    torch.manual_seed(interleave)
    size, heads = 2, engines.Heads(2, 1)
    lens = {"kv_lens": (1, 40, 18, 0, 3), "q_lens": (1, 1, 5, 0, 3)}
    runs = [
        Ranked(rank, size, interleave, Case(lens, heads=heads, kv_cache_dtype=kv_cache_dtype))
        for rank in range(size)
    ]
    q = torch.cat([torch.cat(run.batch.q) for run in runs], dim=1)
    states = [run.context_state(q) for run in runs]
    for run in runs:
        run.attend_with(q, states)


class Ranked(Run):
    """A rank's heads, its part of the cache, and a group that knows what the others have."""

    def __init__(self, rank: int, size: int, interleave: int, case: Case) -> None:
        kind = type("RankedLayer", (Layer,), {"dcp_world_size": size, "_group": self.group})
        super().__init__(Engine(kind, stand_in().new_builder, SimpleNamespace), case)
        self.rank = rank
        torch.manual_seed(1000 + rank)
        self.batch.q = [torch.randn_like(q) for q in self.batch.q]  # K and V are every rank's
        self.shards = Shards.of(
            size=size,
            rank=rank,
            interleave=interleave,
            max_batch_size=8,
            device=torch.device("cpu"),
        )
        self.builder.shards = self.shards
        self.kv_cache.view(self.kv_dtype).copy_(torch.full((), engines.NAN).to(self.kv_dtype))
        for b, (n, q) in enumerate(zip(self.batch.kv_lens, self.batch.q_lens, strict=True)):
            row = torch.cat(self.kept(b), dim=-1)
            own = [t for t in range(n - q) if t // interleave % size == rank]
            for place, token in enumerate(own):
                page, offset = divmod(self.paged.slot(b, place), case.page_size)
                self.cells[page, offset] = row[token]
        self.metadata = self.builder.build(0, self.common())
        found = self.metadata.context.cached.seq_lens.tolist()
        pairs = zip(self.batch.kv_lens, self.batch.q_lens, strict=True)
        assert found == [
            sum(t // interleave % size == rank for t in range(n - q)) for n, q in pairs
        ]

    def context_state(self, q: Tensor) -> tuple[Tensor, Tensor]:
        caches = self.impl._split(self.kv_cache)
        scales = self.impl._scales(self.layer, caches[0])
        return self.impl.context_state(q, caches, scales, self.metadata)

    def group(self, _: Any = None) -> Any:
        return (lambda q: self.all_q), self.combine

    def combine(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        outs = torch.stack([state[0] for state in self.states]).double()
        lses = torch.stack([state[1] for state in self.states]).double()
        assert torch.equal(outs[self.rank], out.double())
        assert torch.equal(lses[self.rank], lse.double())
        total = torch.logsumexp(lses, dim=0)
        weights = torch.exp(lses - total.masked_fill(total == -math.inf, 0.0))
        own = slice(self.rank * 2, self.rank * 2 + 2)
        merged = (outs * weights[..., None]).sum(dim=0)[:, own]
        return merged.to(out.dtype), total[:, own].float()

    def attend_with(self, q: Tensor, states: list[tuple[Tensor, Tensor]]) -> None:
        self.all_q, self.states = q, states
        k, v = self.batch.new
        out = torch.full((q.shape[0], 2, 32), engines.NAN, dtype=q.dtype)
        own = torch.cat(self.batch.q)
        self.impl.forward(self.layer, own, k, v, self.kv_cache, self.metadata, out)
        ends = self.batch.indptr()
        for b, (begin, end) in enumerate(itertools.pairwise(ends)):
            n, new = self.batch.kv_lens[b], self.batch.q_lens[b]
            kept, values = self.kept(b), (self.batch.k[b], self.batch.v[b])
            scales = self.layer._k_scale, self.layer._v_scale
            # This step's own are as the model made them.
            both = [
                torch.cat([engines.read(x, scale)[: n - new], value[n - new :].double()])
                for x, value, scale in zip(kept, values, scales, strict=True)
            ]
            want, _, size = engines.defined(self.batch.q[b], *both, self.case.scores)
            engines.check_rows(out[begin:end], want, size, slack=4.0)


def test_plans_of_a_capture_on_two_ranks(plans: list[str]) -> None:
    """Those of both parts are there before it, and replays read what a later build has written."""
    lens = {"kv_lens": (1, 40, 18, 0, 3), "q_lens": (1, 1, 1, 0, 1)}
    runs = [Ranked(rank, 2, 1, Case(lens, heads=engines.Heads(2, 1))) for rank in range(2)]
    common = [run.common() for run in runs]
    wanted = [c.seq_lens.clone() for c in common]
    for run, c in zip(runs, common, strict=True):
        c.seq_lens.fill_(1)
        run.metadata = run.builder.build_for_cudagraph_capture(c)
    assert plans == ["plan"] * 4
    for run, c, lens_now in zip(runs, common, wanted, strict=True):
        c.seq_lens.copy_(lens_now)
        run.builder.build(0, c)
    q = torch.cat([torch.cat(run.batch.q) for run in runs], dim=1)
    states = [run.context_state(q) for run in runs]
    for run in runs:
        run.attend_with(q, states)
    assert plans.count("plan") == 4
    runs[0].builder.shards.cached_lens = runs[0].builder.shards.cached_lens[:2]
    runs[0].builder.shards.new_lens = runs[0].builder.shards.new_lens[:2]
    with pytest.raises(ValueError, match="num_reqs is 5: there is room for 2"):
        runs[0].builder.build(0, common[0])


@pytest.mark.parametrize("given", [{"sliding_window": 4}, {"sinks": torch.zeros(4)}])
def test_context_parallelism_that_is_not_supported(given: dict[str, Any]) -> None:
    kind = type("RankedLayer", (Layer,), {"dcp_world_size": 2})
    with pytest.raises(ValueError, match=f"{next(iter(given))} .*context parallelism"):
        kind(4, 32, 0.2, 2, **given)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"alibi_slopes": [0.5] * 4}, "alibi_slopes are given"),
        ({"attn_type": "encoder_only"}, "attn_type is 'encoder_only'"),
        ({"attn_type": "encoder_decoder"}, "attn_type is 'encoder_decoder'"),
        ({"head_size": 40}, "head_size is 40"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype is 'nvfp4'"),
        ({"kv_cache_dtype": "fp8_per_token_head"}, "kv_cache_dtype is 'fp8_per_token_head'"),
        ({"sinks": torch.zeros(3)}, r"sinks has shape \[3\]"),
    ],
)
def test_layers_that_are_not_supported(engine: Engine, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.new_layer(
            **{"num_heads": 4, "head_size": 32, "scale": 0.2, "num_kv_heads": 2, **given}
        )


def test_arguments_of_other_backends_are_not_taken(engine: Engine) -> None:
    with pytest.raises(TypeError, match="chunk_lookback"):
        engine.new_layer(4, 32, 0.2, 2, chunk_lookback=1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"causal": torch.ones(6, dtype=torch.int32)}, "causal is a tensor"),
        ({"mm_req_doc_ranges": {0: [(1, 2)]}}, "mm_req_doc_ranges is given"),
        ({"encoder_seq_lens": torch.ones(6)}, "encoder_seq_lens is given"),
        ({"block_table_tensor": torch.ones(6, 4, dtype=torch.int64)}, "table has dtype int64"),
    ],
)
def test_batches_that_are_not_supported(
    engine: Engine, given: dict[str, Any], message: str
) -> None:
    run = Run(engine, Case(MIXED))
    with pytest.raises((TypeError, ValueError), match=message):
        run.builder.build(0, run.common(**given))


def test_calls_that_are_not_supported(engine: Engine) -> None:
    run = Run(engine, Case(MIXED))
    with pytest.raises(ValueError, match="common_prefix_len is 16"):
        run.builder.build(16, run.common())
    metadata = run.builder.build(0, run.common())
    out = run.attend(None)
    q = engines.packed(run.batch.q)
    for name in ("output_scale", "output_block_scale"):
        with pytest.raises(ValueError, match=f"{name} is given"):
            run.impl.forward(
                run.layer, q, None, None, run.kv_cache, metadata, out, **{name: torch.ones(1)}
            )
    for wrong in (run.kv_cache[0], run.kv_cache[..., :32]):
        with pytest.raises(ValueError, match="kv_cache has shape"):
            run.impl.forward(run.layer, q, None, None, wrong, metadata, out)
    with pytest.raises(ConfigError, match="kv_dtype=bfloat16"):
        run.impl.forward(run.layer, q.half(), None, None, run.kv_cache, metadata, out.half())
    windowed = Run(engine, Case(MIXED, scores=engines.Scores(window_left=3)))
    metadata = windowed.builder.build(0, windowed.common(causal=False))
    with pytest.raises(ValueError, match="causal is False and sliding_window 4"):
        windowed.attend(metadata)


def test_kernels_that_there_are_none_of_are_named_at_the_start(engine: Engine) -> None:
    layer = SimpleNamespace(impl=engine.new_layer(3, 32, 0.2, 2))
    tensors = Tensors(32, torch.bfloat16, torch.bfloat16, 16, torch.device("cpu"))
    builder = engine.new_builder
    with pytest.raises(ConfigError, match="num_qo_heads=3"):
        found = builder(tensors, {"layer": layer})
        found.load()  # which vLLM's builder does itself


# --- vLLM's own -----------------------------------------------------------------------------------


@pytest.fixture
def backend() -> Iterator[Any]:
    module = vllm_backend()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    AttentionBackendEnum.CUSTOM.clear_override()
    integration.register()
    yield module
    AttentionBackendEnum.CUSTOM.clear_override()


def test_vllm_knows_the_backend(backend: Any) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    integration.register()  # twice is no harm
    found = AttentionBackendEnum.CUSTOM.get_class()
    assert found is backend.JitattnBackend
    assert AttentionBackendEnum[found.get_name()] is AttentionBackendEnum.CUSTOM
    assert found.full_cls_name() == (backend.__name__, "JitattnBackend")
    assert AttentionBackendEnum.CUSTOM.get_path() == integration.PATH


def test_another_packages_backend_stays(backend: Any, caplog: pytest.LogCaptureFixture) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "others.Backend")
    with caplog.at_level("WARNING", logger="jitattn"):
        integration.register()
    assert "others.Backend" in caplog.text
    assert AttentionBackendEnum.CUSTOM.get_path() == "others.Backend"


ASKED: dict[str, Any] = {
    "head_size": 128,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": 16,
    "use_mla": False,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "attn_type": "decoder",
}


def reasons(backend: Any, **asked: Any) -> list[str]:
    from vllm.platforms.interface import DeviceCapability

    capability = asked.pop("device_capability", (9, 0))
    given = {**ASKED, "device_capability": DeviceCapability(*capability), **asked}
    found: list[str] = backend.JitattnBackend.validate_configuration(**given)
    return found


def test_configurations_that_are_supported(backend: Any) -> None:
    from vllm.v1.attention.selector import AttentionSelectorConfig

    for asked in (
        {},
        {"has_sink": True, "has_sliding_window": True, "dtype": torch.float16},
        {"kv_cache_dtype": "fp8", "use_per_head_quant_scales": True, "block_size": 528},
        {"head_size": 256, "device_capability": (8, 0)},
        {"use_non_causal": True},
        {"use_batch_invariant": True, "use_kv_connector": True},
    ):
        assert reasons(backend, **asked) == []
    # As vLLM asks: all that it knows of.
    config = AttentionSelectorConfig(
        head_size=64, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None
    )
    assert reasons(backend, **config._asdict()) == []


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"head_size": 40}, "head_size not supported"),
        ({"dtype": torch.float32}, "dtype not supported"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype not supported"),
        ({"block_size": 8}, "block_size not supported"),
        ({"use_mla": True}, "MLA not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
        ({"attn_type": "encoder_only"}, "attention type encoder_only not supported"),
        ({"device_capability": (7, 5)}, "compute capability not supported"),
        (
            {"use_non_causal": True, "has_sliding_window": True},
            "sliding window without causality not supported",
        ),
    ],
)
def test_configurations_that_are_not_supported(
    backend: Any, asked: dict[str, Any], reason: str
) -> None:
    assert reason in reasons(backend, **asked)


@pytest.mark.filterwarnings("ignore")  # of modules that vLLM imports
@pytest.mark.parametrize("window", [None, 8])
def test_vllms_attention_runs_through_it(backend: Any, window: int | None) -> None:
    """``Attention`` as models have it, with its own scales, cache update and forward context."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    scores = engines.Scores(window_left=-1 if window is None else window - 1)
    run = Run(engine_of_vllm(), Case(MIXED, scores=scores, padding=2))
    heads, names = run.case.heads, [f"model.layers.{i}.attn" for i in range(2)]
    before = torch.get_default_dtype()
    torch.set_default_dtype(run.case.dtype)
    try:
        with set_current_vllm_config(config):
            attentions = [
                Attention(
                    *(heads.num_qo_heads, heads.head_dim, scores.scale, heads.num_kv_heads),
                    prefix=name,
                    attn_backend=backend.JitattnBackend,
                    per_layer_sliding_window=window,
                )
                for name in names
            ]
    finally:
        torch.set_default_dtype(before)
    object.__setattr__(config, "model_config", SimpleNamespace(dtype=run.case.dtype))
    spec = FullAttentionSpec(
        block_size=run.case.page_size,
        num_kv_heads=heads.num_kv_heads,
        head_size=heads.head_dim,
        dtype=run.case.dtype,
    )
    builder = backend.JitattnMetadataBuilder(spec, names, config, torch.device("cpu"))
    metadata = builder.build(0, run.common())
    k, v = run.batch.new
    q, k, v = (engines.packed(x, run.case.padding) for x in (run.batch.q, [k], [v]))
    for attention, cache in zip(attentions, (run.kv_cache, run.kv_cache.clone()), strict=True):
        attention.kv_cache = cache
    object.__setattr__(config, "model_config", None)
    given = {
        "attn_metadata": dict.fromkeys(names, metadata),
        "slot_mapping": dict.fromkeys(names, metadata.slot_mapping),
    }
    with set_forward_context(vllm_config=config, num_tokens=q.shape[0], **given):
        for attention in attentions:
            out = attention(q, k, v)
            run.check(out.view(q.shape[0], heads.num_qo_heads, -1))
    with set_forward_context(None, config, num_tokens=q.shape[0]):
        assert bool((attentions[0](q, k, v) == 0).all())  # measures memory


@pytest.mark.filterwarnings("ignore")  # of modules that vLLM imports
def test_vllms_caches_are_taken_as_they_lie(backend: Any) -> None:
    """Shapes and orders of vLLM before 0.30, and the pools that later ones make."""
    custom = backend.JitattnBackend
    if hasattr(custom, "indexes_kv_by_block_stride"):
        assert custom.get_kv_cache_shape(7, 16, 2, 32) == (7, 2, 16, 64)
        from vllm.v1.attention.backends import utils
        from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

        for name, with_layers in itertools.product(("NHD", "HND"), (False, True)):
            utils.get_kv_cache_layout.cache_clear()
            utils.set_kv_cache_layout(name)
            try:
                found = custom.get_kv_cache_stride_order(with_layers)
                assert found == FlashAttentionBackend.get_kv_cache_stride_order(with_layers)
                assert custom.indexes_kv_by_block_stride()
            finally:
                utils.set_kv_cache_layout(None)
                utils.get_kv_cache_layout.cache_clear()
        return
    assert custom.supported_kv_cache_layouts() is None  # any
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout, compute_layout_strides

    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    engine = engine_of_vllm()
    for layout in KVCacheLayout:
        run = Run(engine, Case(MIXED, layout=layout.name))
        strides = compute_layout_strides(spec, run.kv_cache.shape[0], 3, layout)
        assert run.kv_cache.stride()[:3] == tuple(n // 2 for n in strides[1:4])
        run.go()


def test_vllm_captures_uniform_batches(backend: Any) -> None:
    from vllm.v1.attention.backend import AttentionCGSupport

    support = backend.JitattnMetadataBuilder.get_cudagraph_support(None, None)
    assert support is AttentionCGSupport.UNIFORM_BATCH
    impl = backend.JitattnImpl(4, 32, 0.2, 2)
    assert impl.can_return_lse_for_decode
    assert impl.lse_base_on_e
    assert not impl.supports_quant_query_input
