"""SGLang's layers and batches through jitattn, against their definition in float64.

Each test runs over what needs no SGLang, with stand-ins for its pools and batches, and over
SGLang's own where it can be imported (0.5.23 was; its compiled parts are not needed).
"""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from jitattn.base.errors import ConfigError
from jitattn.integrations import sglang as integration
from jitattn.integrations.sglang.layers import Backend
from tests.support import engines
from tests.support.sglang_runs import (
    DECODE,
    EXTEND,
    FULL,
    MIXED,
    VERIFY,
    Case,
    Engine,
    Run,
    stand_in,
)


def sglang_backend() -> Any:
    """The backend over SGLang's class, or a skip that says why not."""
    with engines.installed("sglang", "SGLang"):
        from sglang.srt.layers import radix_attention  # noqa: F401
        from sglang.srt.mem_cache import memory_pool, swa_memory_pool  # noqa: F401

        from jitattn.integrations.sglang import backend
    return backend


pytestmark = pytest.mark.usefixtures("new_tensors_are_nan")


def engine_of_sglang(monkeypatch: pytest.MonkeyPatch) -> Engine:
    backend = sglang_backend()
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    monkeypatch.setattr(backend, "_is_deterministic", lambda: False)
    monkeypatch.setattr(backend, "_context_parallel_size", lambda: 1)

    def layer(heads: engines.Heads, scores: engines.Scores, layer_id: int) -> Any:
        return RadixAttention(
            heads.num_qo_heads,
            heads.head_dim,
            scores.scale,
            heads.num_kv_heads,
            layer_id,
            logit_cap=scores.soft_cap,
            v_head_dim=heads.head_dim_vo,
            sliding_window_size=scores.window_left,
        )

    return Engine(backend.JitattnBackend, layer, ForwardMode)


@pytest.fixture(params=["stand-ins", "sglang"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Engine:
    return stand_in() if request.param == "stand-ins" else engine_of_sglang(monkeypatch)


# --- numbers --------------------------------------------------------------------------------------

MODES = {"EXTEND": EXTEND, "DECODE": DECODE, "MIXED": MIXED, "TARGET_VERIFY": VERIFY}


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode(engine: Engine, mode: str, page_size: int) -> None:
    Run(engine, Case(MODES[mode], mode=mode, page_size=page_size, padding=0)).go()


@pytest.mark.parametrize("page_size", [1, 32])
@pytest.mark.parametrize("layout", ["nhd", "hnd", "strided"])
def test_every_layout(engine: Engine, layout: str, page_size: int) -> None:
    Run(engine, Case(MIXED, layout=layout, page_size=page_size, seed=1)).go()


CASES = {
    "fp16": Case(MIXED, dtype=torch.float16),
    "window": Case(MIXED, scores=engines.Scores(window_left=7)),
    "window, page 1": Case(DECODE, "DECODE", scores=engines.Scores(window_left=9), page_size=1),
    "soft cap": Case(MIXED, scores=engines.Scores(soft_cap=2.0, scale=2.0)),
    "sinks": Case(MIXED, sinks=True),
    "one kv head": Case(MIXED, heads=engines.Heads(4, 1), layout="strided"),
    "other V": Case(EXTEND, heads=engines.Heads(4, 2, 64, 32)),
    "other V, page 1": Case(DECODE, "DECODE", heads=engines.Heads(4, 2, 64, 32), page_size=1),
    "fp8": Case(MIXED, kv_cache_dtype="fp8_e4m3", seed=1),
    "fp8, page 1": Case(DECODE, "DECODE", kv_cache_dtype="fp8_e4m3", page_size=1, seed=2),
    "fp8 e5m2": Case(VERIFY, "TARGET_VERIFY", kv_cache_dtype="fp8_e5m2", seed=3),
    "hybrid": Case(MIXED, is_hybrid=True, scores=engines.Scores(window_left=7)),
    "hybrid, page 1": Case(
        EXTEND, is_hybrid=True, scores=engines.Scores(window_left=12), page_size=1
    ),
    "hybrid decode": Case(DECODE, "DECODE", is_hybrid=True, scores=engines.Scores(window_left=20)),
    "hybrid verify": Case(
        VERIFY, "TARGET_VERIFY", is_hybrid=True, scores=engines.Scores(window_left=5)
    ),
    "hybrid, fp8, sinks": Case(
        MIXED,
        is_hybrid=True,
        scores=engines.Scores(window_left=16),
        kv_cache_dtype="fp8_e4m3",
        sinks=True,
    ),
    "padded rows": Case(MIXED, padding=3),
}


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_layer(engine: Engine, name: str) -> None:
    Run(engine, CASES[name]).go()


@pytest.mark.parametrize("seed", range(40))
def test_random_batches(seed: int) -> None:
    rng = random.Random(seed)
    mode = rng.choice(["EXTEND", "DECODE", "MIXED", "TARGET_VERIFY"])
    drafts = rng.randint(1, 5)
    q_lens, kv_lens = [], []
    for _ in range(rng.randint(1, 6)):
        q = {"DECODE": 1, "TARGET_VERIFY": drafts}.get(mode) or rng.randint(1, 20)
        q_lens.append(q)
        kv_lens.append(q + rng.choice([0, 1, 15, 16, 50]))
    heads = rng.choice([1, 2])
    is_hybrid = rng.random() < 0.4
    windows = [0, 3, 16, 40] if is_hybrid else [-1, -1, 3, 40]
    case = Case(
        {"kv_lens": tuple(kv_lens), "q_lens": tuple(q_lens)},
        mode=mode,
        heads=engines.Heads(heads * rng.choice([1, 4, 5]), heads, 16, rng.choice([16, 32])),
        scores=engines.Scores(
            scale=rng.choice([0.25, 1.0]),
            window_left=rng.choice(windows),
            soft_cap=rng.choice([0.0, 0.0, 1.5]),
        ),
        page_size=rng.choice([1, 4, 16, 32]),
        layout=rng.choice(["nhd", "hnd", "strided"]),
        dtype=rng.choice([torch.float16, torch.bfloat16]),
        kv_cache_dtype=rng.choice(["auto", "auto", "fp8_e4m3", "fp8_e5m2"]),
        sinks=rng.random() < 0.3,
        is_hybrid=is_hybrid,
        padding=0 if mode == "DECODE" else rng.choice([0, 4]),
        seed=seed,
    )
    if case.scores.window_left == 0 and not case.is_hybrid:
        case.scores = engines.SCORES  # SGLang's layers take 0 for none
    Run(stand_in(), case).go()


def test_a_hybrid_pools_layers_without_a_window(engine: Engine) -> None:
    """They have the pool's own slots, and both kinds of layers share lengths."""
    run = Run(engine, Case(MIXED, is_hybrid=True, scores=engines.Scores(window_left=7)))
    forward_batch = run.forward_batch()
    run.backend.init_forward_metadata(forward_batch)
    run.check(run.attend(forward_batch))
    run.case.scores, run.case.is_hybrid = engines.SCORES, False
    run.layer = run.engine.new_layer(engines.HEADS, engines.SCORES, FULL)
    run.slot_of = run.paged.slot
    run.buffers = run.pool.get_kv_buffer(FULL)
    run._fill()
    run.check(run.attend(forward_batch))


def test_k_and_v_that_are_in_the_cache_already(engine: Engine) -> None:
    run = Run(engine, Case(MIXED))
    forward_batch = run.forward_batch()
    run.backend.init_forward_metadata(forward_batch)
    run.attend(forward_batch)
    k, v = run.batch.new
    run.check(run.attend(forward_batch, save_kv_cache=False))
    q = engines.packed(run.batch.q)
    run.check(run.backend.forward_extend(q, None, None, run.layer, forward_batch))
    before = [buffer.clone() for buffer in run.buffers]
    args = q, torch.zeros_like(k), torch.zeros_like(v), run.layer, forward_batch
    run.check(run.backend.forward_extend(*args, save_kv_cache=False))
    for found, want in zip(run.buffers, before, strict=True):
        torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)


def test_scales_are_read_when_layers_run(engine: Engine) -> None:
    run = Run(engine, Case(MIXED, kv_cache_dtype="fp8_e4m3", seed=1))
    forward_batch = run.forward_batch()
    run.backend.init_forward_metadata(forward_batch)
    run.check(run.attend(forward_batch))
    kept = [run.kept(b) for b in range(run.batch.batch_size)]
    run.kept = lambda b: kept[b]  # type: ignore[method-assign]
    run.layer.k_scale.mul_(3.0)
    run.layer.v_scale.mul_(0.5)
    run.check(run.attend(forward_batch, save_kv_cache=False))


def test_scales_that_are_numbers(engine: Engine) -> None:
    run = Run(engine, Case(MIXED, kv_cache_dtype="fp8_e4m3", seed=1))
    run.scales = [0.02, 0.03]
    run._fill()
    for name, scale in zip(("k_scale", "v_scale"), run.scales, strict=True):
        setattr(run.layer, name, None)
        setattr(run.layer, f"{name}_float", scale)
    run.go()
    run = Run(engine, Case(MIXED, kv_cache_dtype="fp8_e4m3", seed=1))
    run.scales = [1.0, 1.0]
    run._fill()
    for name in ("k_scale", "v_scale", "k_scale_float", "v_scale_float"):
        setattr(run.layer, name, None)
    run.go()


# --- plans and captures ---------------------------------------------------------------------------


def test_layers_of_a_kind_share_a_plan(engine: Engine, plans: list[str]) -> None:
    run = Run(engine, Case(MIXED))
    forward_batch = run.forward_batch()
    run.backend.init_forward_metadata(forward_batch)
    for _ in range(3):
        run.layer = run.engine.new_layer(engines.HEADS, engines.SCORES, FULL)
        run.check(run.attend(forward_batch))
    assert plans == ["plan"]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("mode", ["DECODE", "TARGET_VERIFY"])
@pytest.mark.parametrize("is_hybrid", [False, True])
def test_captured_batches_replay_others(
    engine: Engine, plans: list[str], mode: str, page_size: int, is_hybrid: bool
) -> None:
    """As a graph does: tables and schedules are made anew inside it, in the same memory."""
    window = 9 if is_hybrid else -1
    case = Case(
        MODES[mode],
        mode=mode,
        page_size=page_size,
        is_hybrid=is_hybrid,
        scores=engines.Scores(window_left=window),
    )
    run = Run(engine, case)
    run.backend.init_cuda_graph_state(8, 64)
    live = run.forward_batch()
    wanted = {name: getattr(live, name).clone() for name in ("req_pool_indices", "seq_lens")}
    slots = live.out_cache_loc.clone()
    # A runner captures over its own buffers, which say nothing yet.
    live.req_pool_indices.zero_()
    live.seq_lens.fill_(1)
    live.out_cache_loc.zero_()
    run.backend.init_forward_metadata_out_graph(live, in_capture=True)
    forward = run.backend.forward_metadata
    for _ in range(2):  # warm-ups
        run.backend.init_forward_metadata_in_graph(live)
        run.attend(live)
    assert plans == ["plan", "refresh"]
    for name, value in wanted.items():
        getattr(live, name).copy_(value)
    live.out_cache_loc.copy_(slots)
    run.buffers[0].view(torch.int16).fill_(-1)  # NaN, and what the warm-up wrote is gone
    run.buffers[1].view(torch.int16).fill_(-1)
    run._fill()
    run.backend.init_forward_metadata_out_graph(live)  # before a replay: nothing
    assert run.backend.forward_metadata is forward
    run.backend.init_forward_metadata_in_graph(live)
    run.check(run.attend(live))
    assert plans == ["plan", "refresh", "refresh"]


@pytest.mark.parametrize("mode", ["DECODE", "TARGET_VERIFY"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_padded_requests_of_a_capture(engine: Engine, mode: str, page_size: int) -> None:
    """They have row 0, whose slots are all 0, and one token; the others are what they are."""
    run = Run(engine, Case(MODES[mode], mode=mode, page_size=page_size))
    run.backend.init_cuda_graph_state(8, 64)
    live = run.forward_batch()
    n, q_len = run.batch.batch_size, run.batch.q_lens[0]
    live.batch_size = n + 2
    live.req_pool_indices = torch.nn.functional.pad(live.req_pool_indices, (0, 2))
    live.seq_lens = torch.nn.functional.pad(live.seq_lens, (0, 2), value=1)
    live.out_cache_loc = torch.nn.functional.pad(live.out_cache_loc, (0, 2 * q_len))
    run.backend.init_forward_metadata_out_graph(live, in_capture=True)
    run.backend.init_forward_metadata_in_graph(live)
    zeros = [
        torch.zeros(2 * q_len, *part[0].shape[1:]).to(part[0])
        for part in (run.batch.q, run.batch.k, run.batch.v)
    ]
    k, v = run.batch.new
    call = run.backend.forward_decode if mode == "DECODE" else run.backend.forward_extend
    out = call(
        torch.cat([*run.batch.q, zeros[0]]),
        torch.cat([k, zeros[1]]),
        torch.cat([v, zeros[2]]),
        run.layer,
        live,
    )
    run.check(out[: run.batch.num_tokens])
    assert bool((out[run.batch.num_tokens :] == 0).all())


def test_captures_share_memory_and_keep_their_plans(engine: Engine) -> None:
    run = Run(engine, Case(DECODE, "DECODE"))
    live = run.forward_batch()
    with pytest.raises(ValueError, match="init_cuda_graph_state has to come before"):
        run.backend.init_forward_metadata_out_graph(live, in_capture=True)
    run.backend.init_cuda_graph_state(4, 4)
    found = []
    for _ in range(2):
        run.backend.init_forward_metadata_out_graph(live, in_capture=True)
        run.backend.init_forward_metadata_in_graph(live)
        run.check(run.attend(live))
        found.append(run.backend.forward_metadata)
    assert found[0] is not found[1]
    assert found[0].pages.table.data_ptr() == found[1].pages.table.data_ptr()
    assert run.backend._captured == found
    run.backend.init_cuda_graph_state(3, 4)
    with pytest.raises(ValueError, match="a batch of 4 requests and 4 tokens is larger"):
        run.backend.init_forward_metadata_out_graph(live, in_capture=True)


def test_a_batch_without_requests(engine: Engine) -> None:
    run = Run(engine, Case(DECODE, "DECODE"))
    idle = run.forward_batch(forward_mode=getattr(engine.mode, "IDLE"))  # noqa: B009
    run.backend.init_forward_metadata(idle)
    assert run.backend.forward_metadata is None
    with pytest.raises(ValueError, match="init_forward_metadata has to come first"):
        run.attend(run.forward_batch())


# --- latents --------------------------------------------------------------------------------------

RANK, ROPE = 256, 32


class LatentPool:
    kv_lora_rank, qk_rope_head_dim = RANK, ROPE

    def __init__(self, buffer: Tensor, dtype: torch.dtype) -> None:
        self.buffer, self.dtype = buffer, dtype

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.buffer.view(self.dtype)


class LatentRun:
    """A model's latents in a pool; a request's K is a latent and a rope part, its V the latent."""

    def __init__(self, engine: Engine, case: Case) -> None:
        rng = random.Random(case.seed)
        torch.manual_seed(case.seed)
        self.engine, self.case, size = engine, case, case.page_size
        heads = engines.Heads(4, 1, RANK + ROPE, RANK)
        self.batch = engines.Batch(**case.lens, heads=heads, dtype=case.dtype, device="cpu")
        self.batch.v = [k[..., :RANK] for k in self.batch.k]
        self.scores = engines.Scores(scale=0.06)
        self.paged = engines.Paged.of(self.batch, size, rng)
        self.dtype = torch.float8_e4m3fn if case.kv_cache_dtype != "auto" else case.dtype
        shape = self.paged.num_pages * size, 1, RANK + ROPE
        self.cells = torch.full(shape, engines.NAN).to(self.dtype)
        stored_as = torch.uint8 if self.dtype != case.dtype else self.dtype
        self.pool = LatentPool(self.cells.view(stored_as), self.dtype)
        self.scale = torch.tensor(0.02) if self.dtype != case.dtype else None
        rows = torch.full((6, 96), 2**31 - 1, dtype=torch.int32)
        rows[0] = 0
        self.rows = torch.tensor(rng.sample(range(1, 6), self.batch.batch_size))
        lens = enumerate(zip(self.batch.kv_lens, self.batch.q_lens, strict=True))
        for b, (n, q) in lens:
            slots = torch.tensor([self.paged.slot(b, t) for t in range(n)])
            rows[self.rows[b], :n] = slots.int()
            self.cells[slots[: n - q]] = self.kept(b)[: n - q]
        self.layer = engine.new_layer(heads, self.scores, 0)
        self.layer.k_scale = self.scale
        self.runner = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=rows),
            token_to_kv_pool=self.pool,
            page_size=size,
            sliding_window_size=None,
            use_mla_backend=True,
        )
        self.backend = engine.new_backend(self.runner)

    def kept(self, request: int) -> Tensor:
        return engines.stored(
            self.batch.k[request], self.dtype, 1.0 if self.scale is None else self.scale
        )

    def forward_batch(self, **other: Any) -> Any:
        case, batch = self.case, self.batch
        kv_lens, q_lens = torch.tensor(batch.kv_lens), torch.tensor(batch.q_lens)
        drafts = SimpleNamespace(topk=1, draft_token_num=batch.q_lens[0])
        is_verify = case.mode == "TARGET_VERIFY"
        given = {
            "forward_mode": getattr(self.engine.mode, case.mode),
            "batch_size": batch.batch_size,
            "req_pool_indices": self.rows,
            "seq_lens": kv_lens - q_lens if is_verify else kv_lens,
            "out_cache_loc": torch.tensor(self.paged.slots(batch)),
            "spec_info": drafts if is_verify else None,
            "extend_seq_lens": q_lens,
            "extend_seq_lens_cpu": list(batch.q_lens),
            "extend_prefix_lens_cpu": (kv_lens - q_lens).tolist(),
        }
        return SimpleNamespace(**{**given, **other})

    def attend(self, forward_batch: Any, **other: Any) -> Tensor:
        call = self.backend.forward_extend
        if self.case.mode == "DECODE":
            call = self.backend.forward_decode
        k, _ = self.batch.new
        q = torch.cat(self.batch.q).flatten(1)
        return call(q, k, k[..., :RANK], self.layer, forward_batch, **other)

    def check(self, out: Tensor) -> None:
        out = out.view(-1, 4, RANK)
        for b, (begin, end) in enumerate(itertools.pairwise(self.batch.indptr())):
            k = engines.read(self.kept(b), 1.0 if self.scale is None else self.scale)
            want, _, size = engines.defined(self.batch.q[b], k, k[..., :RANK], self.scores)
            engines.check_rows(out[begin:end], want, size)

    def go(self) -> None:
        want = self.cells.clone()
        for b, (n, q) in enumerate(zip(self.batch.kv_lens, self.batch.q_lens, strict=True)):
            slots = [self.paged.slot(b, t) for t in range(n - q, n)]
            want[torch.tensor(slots)] = self.kept(b)[n - q :]
        forward_batch = self.forward_batch()
        self.backend.init_forward_metadata(forward_batch)
        self.check(self.attend(forward_batch))
        torch.testing.assert_close(self.cells.float(), want.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("mode", MODES)
def test_latents(engine: Engine, mode: str, page_size: int, kv_cache_dtype: str) -> None:
    case = Case(MODES[mode], mode, page_size=page_size, kv_cache_dtype=kv_cache_dtype)
    LatentRun(engine, case).go()


@pytest.mark.parametrize("mode", ["DECODE", "TARGET_VERIFY"])
def test_captured_batches_of_latents(engine: Engine, mode: str) -> None:
    run = LatentRun(engine, Case(MODES[mode], mode))
    run.backend.init_cuda_graph_state(8, 64)
    live = run.forward_batch()
    wanted = {name: getattr(live, name).clone() for name in ("req_pool_indices", "seq_lens")}
    before = run.cells.clone()
    live.req_pool_indices.zero_()
    live.seq_lens.fill_(1)
    run.backend.init_forward_metadata_out_graph(live, in_capture=True)
    for _ in range(2):
        run.backend.init_forward_metadata_in_graph(live)
        run.attend(live)
    for name, value in wanted.items():
        getattr(live, name).copy_(value)
    run.cells.copy_(before)
    run.backend.init_forward_metadata_in_graph(live)
    run.check(run.attend(live))


def test_k_and_v_of_each_head_of_prompts(engine: Engine) -> None:
    """As models attend where nothing is cached; latents are written by the model."""
    lens = {"kv_lens": (5, 20, 1), "q_lens": (5, 20, 1)}
    run = LatentRun(engine, Case(lens))
    torch.manual_seed(0)
    heads = engines.Heads(4, 4, 48, 32)
    dense = engines.Batch(**lens, heads=heads, dtype=torch.bfloat16, device="cpu")
    layer = engine.new_layer(heads, engines.SCORES, 0)
    forward_batch = run.forward_batch()
    run.backend.init_forward_metadata(forward_batch)
    call = run.backend.forward_extend
    args = engines.packed(dense.q).flatten(1), *dense.new, layer, forward_batch
    out = call(*args, save_kv_cache=False).view(-1, 4, 32)
    for b, (begin, end) in enumerate(itertools.pairwise(dense.indptr())):
        want, _, size = engines.defined(dense.q[b], dense.k[b], dense.v[b], engines.SCORES)
        engines.check_rows(out[begin:end], want, size)
    assert bool(run.cells.isnan().all())
    with pytest.raises(ValueError, match="layer 0 has head_dim 48"):
        call(*args)
    forward_batch.extend_prefix_lens_cpu = [0, 4, 0]
    with pytest.raises(ValueError, match=r"extend_prefix_lens_cpu is \[0, 4, 0\]"):
        call(*args, save_kv_cache=False)
    forward_batch.extend_prefix_lens_cpu = [0, 0, 0]
    forward_batch.mha_return_lse = True
    with pytest.raises(ValueError, match="mha_return_lse is True"):
        call(*args, save_kv_cache=False)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("sliding_window_size", 4, "sliding_window_size is 4"),
        ("logit_cap", 30.0, "logit_cap is 30.0"),
    ],
)
def test_latent_layers_that_are_not_supported(
    engine: Engine, name: str, value: object, message: str
) -> None:
    run = LatentRun(engine, Case(DECODE, "DECODE"))
    forward_batch = run.forward_batch()
    run.backend.init_forward_metadata(forward_batch)
    with pytest.raises(ValueError, match="sinks are given"):
        run.attend(forward_batch, sinks=torch.zeros(4))
    setattr(run.layer, name, value)
    with pytest.raises(ValueError, match=message):
        run.attend(forward_batch)
    run.pool.use_dsa = True
    with pytest.raises(ValueError, match="sparse attention is not supported"):
        engine.new_backend(run.runner)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page_size", [1, 16])
def test_sglangs_pool_of_latents(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of_sglang(monkeypatch)
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    run = LatentRun(engine, Case(MIXED, page_size=page_size))
    pool = MLATokenToKVPool(
        size=(run.paged.num_pages - 1) * page_size,
        page_size=page_size,
        dtype=torch.bfloat16,
        kv_lora_rank=RANK,
        qk_rope_head_dim=ROPE,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
    )
    pool.get_key_buffer(0).copy_(run.cells)
    run.runner.token_to_kv_pool = pool
    run.cells = pool.get_key_buffer(0)
    run.backend = engine.new_backend(run.runner)
    run.go()


# --- what is refused ------------------------------------------------------------------------------

TRANSLATOR = SimpleNamespace(is_translating=True)


@pytest.mark.parametrize(
    ("owner", "name", "value", "message"),
    [
        ("runner", "use_mla_backend", True, "multi-head latent attention over a pool without lat"),
        ("runner", "is_draft_worker", True, "the draft model"),
        ("runner", "model_config", SimpleNamespace(is_encoder_decoder=True), "cross attention"),
        ("runner", "kv_index_translator", TRANSLATOR, "a unified memory pool"),
        ("pool", "is_quantized_kv_cache", True, "a pool of 4 bits"),
        ("pool", "k_scale_buffer", [torch.ones(1)], "a pool with scales of blocks"),
        ("pool", "swa_kv_pool", SimpleNamespace(is_quantized_kv_cache=True), "a pool of 4 bits"),
    ],
)
def test_runners_and_pools_that_are_not_supported(
    engine: Engine, owner: str, name: str, value: object, message: str
) -> None:
    run = Run(engine, Case(DECODE, "DECODE"))
    setattr(getattr(run, owner), name, value)
    with pytest.raises(ValueError, match=f"^{message}.* is not supported"):
        engine.new_backend(run.runner)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("is_cross_attention", True, "layer 3 has cross attention"),
        ("attn_type", SimpleNamespace(value="encoder_only"), "attn_type 'encoder_only'"),
        ("attn_type", SimpleNamespace(value="decoder_bidirectional"), "decoder_bidirectional"),
        ("pos_encoding_mode", "ALIBI", "pos_encoding_mode is 'ALIBI'"),
        ("logit_capping_method", "gelu", "logit_capping_method is 'gelu'"),
        ("xai_temperature_len", 1024, "xai_temperature_len is 1024"),
        ("use_irope", True, "use_irope is True"),
    ],
)
def test_layers_that_are_not_supported(
    engine: Engine, name: str, value: object, message: str
) -> None:
    run = Run(engine, Case(MIXED))
    setattr(run.layer, name, value)
    forward_batch = run.forward_batch()
    run.backend.init_forward_metadata(forward_batch)
    with pytest.raises(ValueError, match=message):
        run.attend(forward_batch)


def test_batches_that_are_not_supported(engine: Engine) -> None:
    run = Run(engine, Case(VERIFY, "TARGET_VERIFY"))
    modes = engine.mode
    for given, message in (
        ({"spec_info": SimpleNamespace(topk=4, draft_token_num=4)}, "topk is 4"),
        (
            {"spec_info": SimpleNamespace(draft_token_num=4, custom_mask=torch.ones(4))},
            "topk is None .*trees",
        ),
        (
            {
                "spec_info": SimpleNamespace(
                    topk=1, draft_token_num=4, ragged_verify_layout=object()
                )
            },
            "ragged_verify_layout is given",
        ),
        ({"forward_mode": modes.DRAFT_EXTEND_V2}, "forward_mode is DRAFT_EXTEND_V2"),
        ({"forward_mode": modes.DLLM_EXTEND}, "forward_mode is DLLM_EXTEND"),
        (
            {
                "forward_mode": modes.DECODE,
                "spec_info": SimpleNamespace(kv_indptr=torch.zeros(4)),
            },
            "spec_info has kv_indptr in DECODE",
        ),
        ({"encoder_lens": torch.ones(3)}, "encoder_lens are given"),
    ):
        with pytest.raises(ValueError, match=message):
            run.backend.init_forward_metadata(run.forward_batch(**given))
    run.backend.init_cuda_graph_state(8, 64)
    extend = run.forward_batch(forward_mode=modes.EXTEND)
    with pytest.raises(ValueError, match="forward_mode is EXTEND: whole captures"):
        run.backend.init_forward_metadata_out_graph(extend, in_capture=True)


def test_calls_that_are_not_supported(engine: Engine) -> None:
    run = Run(engine, Case(MIXED))
    forward_batch = run.forward_batch()
    run.backend.init_forward_metadata(forward_batch)
    with pytest.raises(TypeError, match="k_rope"):
        run.attend(forward_batch, k_rope=torch.ones(1))
    run.layer.tp_q_head_num = 8
    with pytest.raises((ValueError, RuntimeError)):
        run.attend(forward_batch)
    run = Run(engine, Case(MIXED, dtype=torch.float32))
    run.backend.init_forward_metadata(forward_batch)
    with pytest.raises((ConfigError, TypeError), match="float32"):
        run.attend(forward_batch)
    run = Run(engine, Case(MIXED, is_hybrid=True, scores=engines.Scores(window_left=7)))
    run.layer.sliding_window_size = 8
    run.backend.init_forward_metadata(run.forward_batch())
    with pytest.raises(ValueError, match=r"sliding_window_size is 8 .* keeps 7"):
        run.attend(run.forward_batch())


# --- SGLang's own ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_sglang_knows_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of_sglang(monkeypatch)
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

    integration.register()
    integration.register()  # twice is no harm
    assert ATTENTION_BACKEND_CHOICES.count("jitattn") == 1
    run = Run(engine, Case(DECODE, "DECODE"))
    backend = ATTENTION_BACKENDS["jitattn"](run.runner)
    assert isinstance(backend, AttentionBackend)
    assert isinstance(backend, Backend)
    assert backend.get_cuda_graph_seq_len_fill_value() == 1
    # Models take the pools from it.
    assert backend.token_to_kv_pool is run.runner.token_to_kv_pool
    assert backend.req_to_token_pool is run.runner.req_to_token_pool
    decode = engine.mode.DECODE
    assert backend.shared_read_ends(decode) is SharedReadEnds.IN_REPLAY
    run.runner.page_size = 1
    found = ATTENTION_BACKENDS["jitattn"](run.runner)
    assert found.shared_read_ends(decode) is SharedReadEnds.UNKNOWN
    # As a model calls it.
    run.backend = backend
    forward_batch = run.forward_batch()
    backend.init_forward_metadata(forward_batch)
    k, v = run.batch.new
    out = backend.forward(engines.packed(run.batch.q), k, v, run.layer, forward_batch)
    run.check(out)
    idle = run.forward_batch(forward_mode=engine.mode.IDLE)
    assert backend.forward(engines.packed(run.batch.q), k, v, run.layer, idle).shape == out.shape


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("page_size", [1, 16])
def test_sglangs_pools_are_taken_as_they_lie(
    dtype: torch.dtype, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the pool wrote itself is read, and what is written the pool reads."""
    engine = engine_of_sglang(monkeypatch)
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

    name = "auto" if dtype == torch.bfloat16 else "fp8_e4m3"
    run = Run(engine, Case(MIXED, page_size=page_size, kv_cache_dtype=name, seed=1))
    heads = run.case.heads
    pool = MHATokenToKVPool(
        size=(run.paged.num_pages - 1) * page_size,
        page_size=page_size,
        dtype=dtype,
        head_num=heads.num_kv_heads,
        head_dim=heads.head_dim,
        layer_num=5,
        device="cpu",
        enable_memory_saver=False,
    )
    rows = ReqToTokenPool(
        size=8, max_context_len=run.req_to_token.shape[1], device="cpu", enable_memory_saver=False
    )
    rows.req_to_token[: run.req_to_token.shape[0]] = run.req_to_token
    run.runner.token_to_kv_pool, run.runner.req_to_token_pool = pool, rows
    run.backend = engine.new_backend(run.runner)
    run.buffers = pool.get_kv_buffer(FULL)
    for buffer in run.buffers:
        buffer.copy_(torch.full((), engines.NAN).to(dtype))
    run._fill()
    run.go()
    assert [tuple(b.shape) for b in pool.get_kv_buffer(FULL)] == [
        tuple(b.shape) for b in run.buffers
    ]
