"""Layers under ``torch.compile``: one graph, the same bits, and none again for another plan."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import jitattn
from jitattn.tensors import tensor_handles
from tests.support.compiled import (
    CACHES,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    PAGE_SIZE,
    TABLES,
    Case,
    layer,
    mla_case,
    new_planner,
)

torch._dynamo.config.cache_size_limit = 64

BACKENDS = ("eager", "aot_eager")


@pytest.fixture(autouse=True)
def _forget_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield


class Counted:
    """A compiled function, and how many graphs were made of it."""

    def __init__(self, function: Callable[..., Any], backend: str, **options: Any) -> None:
        from torch._dynamo.testing import CompileCounterWithBackend

        self.counter = CompileCounterWithBackend(backend)
        self.call = torch.compile(function, fullgraph=True, backend=self.counter, **options)

    @property
    def graphs(self) -> int:
        return int(self.counter.frame_count)


def run_layer(compiled: Callable[..., Any], case: Case, *, bound: bool) -> tuple[Tensor, Tensor]:
    """Return out and the cache's bytes of a layer over a copy of the case's cache."""
    case = case.copied()
    planner = new_planner(case)
    kv = planner.bind(case.cache, k_scale=case.k_scale, v_scale=case.v_scale)
    plan = planner.plan(case.pages, case.seq_lens, case.qo_indptr, max_q_len=case.max_q_len)
    out = compiled(case.x, case.weights, case, kv if bound else case.cache, plan)
    return out, case.bytes()


@pytest.mark.parametrize("cache", CACHES)
def test_layers_over_every_cache(cache: str) -> None:
    case = Case.of(cache=cache, seed=3)
    compiled = Counted(layer, "aot_eager")
    for bound in (True,) if case.is_quantised else (True, False):
        found = run_layer(compiled.call, case, bound=bound)
        expected = run_layer(layer, case, bound=bound)
        assert torch.equal(found[1], expected[1])
        assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize(("table", "max_q_len"), [*zip(TABLES, (1, 5, 1, 5, 4), strict=True)])
def test_layers_over_every_table(table: str, max_q_len: int) -> None:
    case = Case.of(table=table, max_q_len=max_q_len, seed=4)
    found = run_layer(Counted(layer, "aot_eager").call, case, bound=True)
    expected = run_layer(layer, case, bound=True)
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_plan_is_no_other_graph(backend: str) -> None:
    compiled = Counted(layer, backend)
    planner = new_planner(Case.of(seed=0))
    cache = Case.of(seed=0)
    kv = planner.bind(cache.cache)
    plans = []
    for step in range(6):
        case = Case.of(seed=step)
        case.cache = cache.cache
        plan = planner.plan(case.pages, case.seq_lens)
        # Others live on, or their handles would come back.
        plans.append(plan)
        expected_cache = case.copied()
        out = compiled.call(case.x, case.weights, case, kv, plan)
        bound = planner.bind(expected_cache.cache)
        expected = layer(case.x, case.weights, expected_cache, bound, plan)
        assert torch.equal(out, expected)
        assert torch.equal(case.bytes(), expected_cache.bytes())
    assert compiled.graphs == 1


def test_another_number_of_requests_is_one_more_graph() -> None:
    compiled = Counted(layer, "eager")
    for batch_size in (3, 4, 7, 2, 9):
        run_layer(compiled.call, Case.of(batch_size=batch_size, seed=batch_size), bound=True)
    assert compiled.graphs == 2


def test_plans_of_planners_share_a_graph_and_so_do_inference_mode_and_default_devices() -> None:
    compiled = Counted(lambda q, plan, cache: plan.run(q, cache), "eager")
    case = Case.of(seed=0)
    for _ in range(2):
        plan = new_planner(case).plan(case.pages, case.seq_lens)
        compiled.call(case.q, plan, case.cache)
    with torch.inference_mode():
        inside = [new_planner(case).plan(case.pages, case.seq_lens) for _ in range(70)][-1]
    compiled.call(case.q, inside, case.cache)
    with torch.device("meta"):
        elsewhere = [new_planner(case).plan(case.pages, case.seq_lens) for _ in range(90)][-1]
    assert elsewhere.handle.device.type == "cpu"
    compiled.call(case.q, elsewhere, case.cache)
    assert compiled.graphs == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor_copies_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators get the caches themselves: nothing is bound again."""
    case = Case.of(seed=5).copied()
    planner = new_planner(case)
    kv = planner.bind(case.cache)
    plan = planner.plan(case.pages, case.seq_lens)
    expected_case = case.copied()
    expected = layer(case.x, case.weights, expected_case, planner.bind(expected_case.cache), plan)
    monkeypatch.setattr(jitattn.AttentionPlanner, "bind", lambda *_, **__: pytest.fail("bound"))
    out = Counted(layer, "inductor").call(case.x, case.weights, case, kv, plan)
    torch.testing.assert_close(out, expected, rtol=0.05, atol=0.05)
    assert torch.equal(case.bytes(), expected_case.bytes())


def test_every_argument_of_run() -> None:
    case = Case.of(max_q_len=4, seed=6)
    planner = new_planner(case, use_sinks=True, use_custom_mask=True, window_left=5)
    plan = planner.plan(case.pages, case.seq_lens, case.qo_indptr, max_q_len=4)
    sinks = torch.randn(HEADS)
    mask = torch.rand(case.q.shape[0], 8) < 0.7
    packed = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128]).mul(mask.int()).sum(1).byte()[:, None]
    width = -(-case.seq_lens // 8)
    sizes = case.qo_indptr.diff() * width
    ragged = torch.randint(256, (int(sizes.sum()),), dtype=torch.uint8)
    indptr = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).int()

    def run(q: Tensor, plan: Any, pages: Any, custom_mask: Any, out: Any, lse: Any) -> Any:
        return plan.run(
            q, case.cache, pages=pages, out=out, lse=lse, return_lse=lse is None, sinks=sinks,
            custom_mask=custom_mask,
        )  # fmt: skip

    compiled = Counted(run, "aot_eager")
    other = jitattn.BlockTable(torch.randint(30, case.pages.table.shape, dtype=torch.int32))
    for pages in (None, other):
        for custom_mask in (mask, packed, (ragged, indptr)):
            expected = run(case.q, plan, pages, custom_mask, None, None)
            found = compiled.call(case.q, plan, pages, custom_mask, None, None)
            assert all(map(torch.equal, found, expected))
            strided = torch.empty(case.q.shape[0], HEADS, 2 * HEAD_DIM, dtype=torch.bfloat16)
            out = strided[..., :HEAD_DIM]
            lse = torch.empty(HEADS, case.q.shape[0]).T
            assert compiled.call(case.q, plan, pages, custom_mask, out, lse) is out
            assert torch.equal(out, expected[0])
            assert torch.equal(lse, expected[1])


@pytest.mark.parametrize("kind", ["one", "pair", "fp8", "rows"])
def test_latent_attention(kind: str) -> None:
    planner, plan, q, k, v, cache, arguments, scale = mla_case(kind)

    def run(plan: Any, kv: Any, cache: Any) -> Any:
        if isinstance(cache, tuple):
            jitattn.append_kv(k, v, (cache[0].unsqueeze(2), cache[1].unsqueeze(2)), **arguments)
        return plan.run(*q, kv, return_lse=True)

    copied = copy.deepcopy(cache)
    expected = run(plan, planner.bind(copied, k_scale=scale), copied)
    compiled = Counted(run, "aot_eager")
    found = compiled.call(plan, planner.bind(cache, k_scale=scale), cache)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("backend", BACKENDS)
def test_q_in_its_own_place(backend: str) -> None:
    case = Case.of(max_q_len=3, seed=8)

    def run(qkv: Tensor, cache: Tensor) -> Tensor:
        qkv = qkv * 1
        return jitattn.preprocess_qkv(
            qkv, cache, num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
            pages=case.pages, seq_lens=case.seq_lens, qo_indptr=case.qo_indptr, rope=case.rope,
            q_out=qkv[:, : HEADS * HEAD_DIM].view(-1, HEADS, HEAD_DIM),
        ) + 0  # fmt: skip

    qkv = case.x @ case.weights[0]
    caches = case.copied().cache, case.copied().cache
    assert torch.equal(Counted(run, backend).call(qkv, caches[0]), run(qkv, caches[1]))
    assert torch.equal(*caches)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_argument_of_tokens(backend: str) -> None:
    """Slots, positions, parts, biases, norms, transforms, FP8 on both sides, bytes with a name."""
    case = Case.of(max_q_len=4, seed=9)
    num_tokens = case.x.shape[0]
    heads = (case.x @ case.weights[0]).view(num_tokens, -1, HEAD_DIM)
    q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    slots = torch.randperm(60)[:num_tokens]
    bias = [torch.randn(part.shape[1] * HEAD_DIM).bfloat16() for part in (q, k, v)]

    def run(cache: Tensor, q_out: Tensor, scale: Tensor) -> None:
        jitattn.preprocess_qkv(
            (q, k, v), cache, num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
            slots=slots, rope=case.rope, positions=slots, bias=tuple(bias),
            q_norm=torch.ones(HEAD_DIM), k_norm=torch.ones(HEAD_DIM), norm_eps=1e-5, q_out=q_out,
            q_scale=0.5, k_scale=scale, v_scale=2, kv_dtype=torch.float8_e4m3fn,
            qk_transform="hadamard", v_transform="hadamard",
        )  # fmt: skip
        jitattn.append_kv(
            k, v, (cache[:, 0], cache[:, 1]), slots=slots.flip(0), kv_dtype="float8_e4m3fn",
            k_scale=2.0,
        )  # fmt: skip

    found = []
    for call in (run, Counted(run, backend).call):
        cache = torch.zeros(32, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype=torch.uint8)
        q_out = torch.zeros(num_tokens, HEADS, HEAD_DIM, dtype=torch.float8_e4m3fn)
        call(cache, q_out, torch.tensor([0.5, 2.0]))
        found.append((cache, q_out.view(torch.uint8)))
    assert all(map(torch.equal, *found))
    assert found[0][0].any()


def test_two_plans_and_many_layers_in_a_graph() -> None:
    """Layers with a window and without, whose caches are views of one pool."""
    pool = torch.randn(32, 4, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM).bfloat16()
    case = Case.of(seed=10)
    planners = [new_planner(case), new_planner(case, window_left=3)]

    def model(x: Tensor, pool: Tensor, plans: list[Any], kvs: list[Any]) -> Tensor:
        for i in range(4):
            case.cache = pool[:, i]
            x = layer(x, case.weights, case, kvs[i], plans[i % 2]) * 0.5
        return x

    compiled = Counted(model, "aot_eager")
    for _ in range(3):
        plans = [planner.plan(case.pages, case.seq_lens) for planner in planners]
        pools = pool.clone(), pool.clone()
        found, expected = (
            call(case.x, each, plans, [planners[i % 2].bind(each[:, i]) for i in range(4)])
            for call, each in zip((compiled.call, model), pools, strict=True)
        )
        assert torch.equal(found, expected)
        assert torch.equal(*pools)
    assert compiled.graphs == 1


def test_layers_of_one_graph() -> None:
    """A layer that is compiled alone serves them all: other caches and ropes are no other graph."""
    pool = torch.randn(32, 4, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM).bfloat16()
    case = Case.of(seed=10)
    planner = new_planner(case)
    plan = planner.plan(case.pages, case.seq_lens)
    compiled = Counted(layer, "aot_eager")
    ropes = [jitattn.Rope(HEAD_DIM) for _ in range(4)]
    for i, case.rope in enumerate(ropes):
        case.cache = pool[:, i]
        copied = case.copied()
        found = compiled.call(case.x, case.weights, case, planner.bind(case.cache), plan)
        expected = layer(case.x, case.weights, copied, planner.bind(copied.cache), plan)
        assert torch.equal(found, expected)
        assert torch.equal(case.cache, copied.cache)
    assert compiled.graphs == 1


def test_scales_that_a_graph_writes_are_those_that_attention_reads() -> None:
    case = Case.of(cache="fp8", seed=11)
    planner = new_planner(case)
    plan = planner.plan(case.pages, case.seq_lens)
    scale = torch.tensor([1.0])

    def run(q: Tensor, kv: Any, scale: Tensor, value: Tensor) -> Any:
        scale.copy_(value)
        return plan.run(q, kv)

    compiled = Counted(run, "aot_eager")
    for number in (0.25, 3.0):
        kv = planner.bind(case.cache, v_scale=scale)
        found = compiled.call(case.q, kv, scale, torch.tensor([number]))
        assert torch.equal(found, plan.run(case.q, planner.bind(case.cache, v_scale=number)))


@pytest.mark.parametrize("name", ["attention", "mla_attention", "preprocess_qkv", "append_kv"])
def test_operators_are_as_declared(name: str) -> None:
    import jitattn.kernels.torch_ops  # noqa: F401 - it defines them

    case = Case.of(max_q_len=3, seed=12)
    planner = new_planner(case)
    plan = planner.plan(case.pages, case.seq_lens, case.qo_indptr, max_q_len=3)
    kv = planner.bind(case.cache)
    tables = [case.pages.table], "shared"
    places = *tables, case.seq_lens, case.qo_indptr, None
    scales, written = (None,) * 4, ("NHD", None, False)
    out = torch.empty_like(case.q)
    lse = torch.empty(out.shape[:2])
    if name == "attention":
        arguments: tuple[Any, ...] = (
            plan.handle, case.q, [case.cache], kv.handle, None, None, *tables, None, None, None,
            out, lse,
        )  # fmt: skip
    elif name == "mla_attention":
        planner, plan, q, _, _, cache, _, _ = mla_case("pair")
        out = torch.empty_like(q[0])
        arguments = plan.handle, *q, list(cache), None, None, [], None, out, None
    elif name == "preprocess_qkv":
        qkv = case.x @ case.weights[0]
        arguments = (
            [qkv], [case.cache], out, HEADS, KV_HEADS, HEAD_DIM, *places, case.rope.handle, None,
            None, [], None, None, 1e-6, None, None, *scales, "hadamard", None, *written,
        )  # fmt: skip
    else:
        k, v = case.q[:, :KV_HEADS], case.q[:, KV_HEADS : 2 * KV_HEADS]
        arguments = k, v, [case.cache], *places, *scales, *written
    torch.library.opcheck(getattr(torch.ops.jitattn, name).default, arguments)


# --- what is refused ------------------------------------------------------------------------------


def test_handles_of_what_is_gone_or_else() -> None:
    import jitattn.kernels.torch_ops  # noqa: F401 - it defines them

    case = Case.of(seed=13)
    planner = new_planner(case)
    plan, kept = planner.plan(case.pages, case.seq_lens), planner.plan(case.pages, case.seq_lens)
    kv = planner.bind(case.cache)
    handle, gone = plan.handle, kept.handle
    del kept
    others = [planner.plan(case.pages, case.seq_lens) for _ in range(3)]
    assert int(gone) not in [int(other.handle) for other in others]

    def run(plan: Tensor, kv: Tensor | None) -> None:
        out = torch.empty_like(case.q)
        torch.ops.jitattn.attention(
            plan, case.q, [case.cache], kv, None, None, [], None, None, None, None, out, None
        )

    run(handle, kv.handle)
    with pytest.raises(ValueError, match=r"plan is \d+, the handle of nothing that lives"):
        run(gone, None)
    with pytest.raises(ValueError, match=r"kv is .* of a Plan: expected that of a BoundCache"):
        run(handle, handle)
    for number in (-1, 1 << 40):
        with pytest.raises(ValueError, match="nothing that lives"):
            run(torch.tensor(number), None)


def test_handles_come_back() -> None:
    case = Case.of(seed=14)
    planner = new_planner(case)
    gc.collect()
    before = len(tensor_handles._OBJECTS)
    for _ in range(200):
        planner.plan(case.pages, case.seq_lens).run(case.q, case.cache)
    assert len(tensor_handles._OBJECTS) <= before + 3
    rope = jitattn.Rope(64)
    other = copy.deepcopy(rope)
    assert other == rope
    assert int(other.handle) != int(rope.handle)


def test_errors_come_from_where_the_graph_runs() -> None:
    case = Case.of(seed=15)
    planner = new_planner(case)
    plan = planner.plan(case.pages, case.seq_lens)
    compiled = Counted(lambda q, cache: plan.run(q, cache), "eager")
    with pytest.raises(ValueError, match="q has shape"):
        compiled.call(case.q[:, :1], case.cache)
    with pytest.raises(TypeError, match="kv_cache has dtype"):
        compiled.call(case.q, case.cache.float())
    mixed = planner.bind(case.cache)
    other = new_planner(case, window_left=2)
    with pytest.raises(ValueError, match="another configuration"):
        Counted(lambda q, kv: plan.run(q, kv), "eager").call(case.q, other.bind(case.cache))
    assert torch.equal(
        Counted(lambda q, kv: plan.run(q, kv), "eager").call(case.q, mixed),
        plan.run(case.q, mixed),
    )


@pytest.mark.parametrize("argument", ["q_scale", "out_scale"])
def test_arguments_without_a_use_are_refused(argument: str) -> None:
    case = Case.of(seed=16)
    plan = new_planner(case).plan(case.pages, case.seq_lens)
    compiled = Counted(lambda q: plan.run(q, case.cache, **{argument: 1.0}), "eager")
    with pytest.raises(Exception, match=f"{argument} is given"):
        compiled.call(case.q)


def test_gradients_are_refused() -> None:
    case = Case.of(seed=17)
    plan = new_planner(case).plan(case.pages, case.seq_lens)
    compiled = Counted(lambda q: plan.run(q, case.cache), "eager")
    with torch.enable_grad(), pytest.raises(Exception, match="q requires a gradient"):
        compiled.call(case.q.clone().requires_grad_())


@pytest.mark.parametrize("backend", BACKENDS)
def test_tables_of_another_view_are_refused(backend: str) -> None:
    from jitattn.kv import KVCacheConfig, KVCacheManager, LayerConfig, PageIndexMode

    layers = [LayerConfig(layer_id=i, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM) for i in range(2)]
    config = KVCacheConfig(page_size=PAGE_SIZE, gpu_bytes=1 << 20, layers=layers)
    manager = KVCacheManager(config, device="cpu")
    for region in manager.regions(0):
        region.memory.zero_()
    seq = manager.create_sequence()
    seq.resume()
    seq.resize(9)
    views = [manager.layer_view(i, PageIndexMode.PER_LAYER) for i in range(2)]
    shared = manager.layer_view(1, PageIndexMode.SHARED)
    case = Case.of(batch_size=1, seed=18)
    planner = new_planner(case)
    seq_lens = torch.tensor([9], dtype=torch.int32)
    k = case.q[:, :KV_HEADS]

    def run(q: Tensor, plan: Any, pages: Any, cache: Any, kv: Any) -> Any:
        jitattn.append_kv(k, k, cache, pages=pages, seq_lens=seq_lens)
        return plan.run(q, kv, pages=pages)

    compiled = Counted(run, backend)
    table = views[1].block_table([seq])
    plan = planner.plan(table, seq_lens)
    cache = views[1].kv_cache
    found = compiled.call(case.q, plan, table, cache, planner.bind(cache))
    assert torch.equal(found, run(case.q, plan, table, cache, planner.bind(cache)))
    with pytest.raises(Exception, match="pages is a table for"):
        compiled.call(case.q, plan, table, shared.kv_cache, planner.bind(cache))
    with pytest.raises(Exception, match="pages is a table for"):
        compiled.call(case.q, plan, table, cache, planner.bind(shared.kv_cache))
    seq.close()


def test_eager_calls_know_no_operators() -> None:
    code = (
        "import sys, torch, jitattn\n"
        "cache = torch.zeros(4, 2, 4, 2, 16, dtype=torch.bfloat16)\n"
        "planner = jitattn.AttentionPlanner(num_qo_heads=2, num_kv_heads=2, head_dim=16,\n"
        "    page_size=4, device='cpu')\n"
        "table = jitattn.BlockTable(torch.zeros(1, 2, dtype=torch.int32))\n"
        "plan = planner.plan(table, torch.ones(1, dtype=torch.int32))\n"
        "q = torch.ones(1, 2, 16, dtype=torch.bfloat16)\n"
        "jitattn.append_kv(q, q, cache, pages=table, seq_lens=torch.ones(1, dtype=torch.int32))\n"
        "plan.run(q, planner.bind(cache))\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "assert not [m for m in sys.modules if m.endswith(('torch_op', 'torch_ops'))]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
