"""vLLM's and SGLang's batches on a device: numbers, graphs, and that the host never waits.

Neither engine is needed: layers and backends are those that both drive, over stand-ins.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.device import DEVICE
from tests.support import sglang_runs, vllm_runs
from tests.support.engines import GPU_HEADS, Scores, packed
from tests.support.harness import forbid_waiting

# What a kernel's probabilities are rounded to, and its output.
SLACK = 3.0
WINDOW = Scores(scale=128**-0.5, window_left=20)
PLAIN = Scores(scale=128**-0.5)


class VllmRun(vllm_runs.Run):
    slack = SLACK


class SglangRun(sglang_runs.Run):
    slack = SLACK


def vllm_run(lens: dict[str, tuple[int, ...]], **given: Any) -> VllmRun:
    given = {"heads": GPU_HEADS, "scores": PLAIN, "device": DEVICE, **given}
    return VllmRun(vllm_runs.stand_in(), vllm_runs.Case(lens, **given))


def sglang_run(lens: dict[str, tuple[int, ...]], mode: str, **given: Any) -> SglangRun:
    given = {"heads": GPU_HEADS, "scores": PLAIN, "device": DEVICE, **given}
    return SglangRun(sglang_runs.stand_in(), sglang_runs.Case(lens, mode, **given))


@pytest.mark.parametrize("layout", vllm_runs.LAYOUTS)
def test_vllms_layouts(layout: str) -> None:
    vllm_run(vllm_runs.MIXED, layout=layout, padding=3).go()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("lens", [vllm_runs.MIXED, vllm_runs.DECODE], ids=["mixed", "decode"])
def test_vllms_layers(lens: dict[str, tuple[int, ...]], kv_cache_dtype: str) -> None:
    for given in ({}, {"scores": WINDOW}, {"scores": WINDOW, "sinks": True}):
        vllm_run(lens, kv_cache_dtype=kv_cache_dtype, seed=1, **given).go()


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("mode", ["EXTEND", "DECODE", "MIXED", "TARGET_VERIFY"])
def test_sglangs_modes(mode: str, page_size: int) -> None:
    lens = {
        "EXTEND": sglang_runs.EXTEND,
        "DECODE": sglang_runs.DECODE,
        "MIXED": sglang_runs.MIXED,
        "TARGET_VERIFY": sglang_runs.VERIFY,
    }[mode]
    for kv_cache_dtype in ("auto", "fp8_e4m3"):
        given = {"page_size": page_size, "kv_cache_dtype": kv_cache_dtype}
        sglang_run(lens, mode, **given).go()
        sglang_run(lens, mode, scores=WINDOW, is_hybrid=True, **given).go()


def test_the_host_never_waits() -> None:
    run = vllm_run(vllm_runs.MIXED)
    metadata = run.builder.build(0, common := run.common())
    run.write(metadata)
    run.attend(metadata)
    inputs = vllm_inputs(run)
    with forbid_waiting():
        vllm_layer(run, run.builder.build(0, common), inputs)
    other = sglang_run(sglang_runs.MIXED, "MIXED", is_hybrid=True, scores=WINDOW)
    forward_batch = other.forward_batch()
    other.backend.init_forward_metadata(forward_batch)
    q, (k, v) = packed(other.batch.q), other.batch.new
    for _ in range(2):
        with forbid_waiting():
            other.backend.init_forward_metadata(forward_batch)
            out = other.backend.forward_extend(q, k, v, other.layer, forward_batch)
        other.check(out)


def vllm_inputs(run: VllmRun) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    k, v = run.batch.new
    q = packed(run.batch.q)
    return q, packed([k]), packed([v]), torch.empty_like(q)


def vllm_layer(
    run: VllmRun, metadata: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor]
) -> Tensor:
    q, k, v, out = inputs
    run.impl.do_kv_cache_update(run.layer, k, v, run.kv_cache, metadata.slot_mapping)
    return run.impl.forward(run.layer, q, k, v, run.kv_cache, metadata, out)


@pytest.mark.skipif(DEVICE != "cuda", reason="graphs are the device's")
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_vllms_graphs_replay_other_batches(kv_cache_dtype: str) -> None:
    """Captured with one token each; replayed with others, padding among them, in place."""
    given = {"kv_cache_dtype": kv_cache_dtype, "seed": 1}
    first = vllm_run({"kv_lens": (1,) * 4, "q_lens": (1,) * 4}, **given)
    width = 8
    common = first.common(
        block_table_tensor=torch.zeros(4, width, dtype=torch.int32, device=DEVICE)
    )
    metadata = first.builder.build_for_cudagraph_capture(common)
    inputs = vllm_inputs(first)
    # A pool that all batches fit into; NaN but for what a batch has.
    pool = vllm_runs.layer_view("BLNHC", (64, 2, 16, 256), first.kv_dtype, DEVICE)
    first.kv_cache = pool
    for _ in range(2):
        vllm_layer(first, metadata, inputs)
    assert first.builder.build_for_cudagraph_capture(common) is metadata
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = vllm_layer(first, metadata, inputs)
    for lens in ((100, 1, 17, 32), (5, 64, 0, 0), (1, 1, 1, 1), (33, 16, 15, 0)):
        q_lens = tuple(min(n, 1) for n in lens)
        run = vllm_run({"kv_lens": lens, "q_lens": q_lens}, layout="BLNHC", **given)
        pool.copy_(torch.full((), float("nan")).to(pool.dtype).to(DEVICE))
        pages = run.kv_cache.view(run.kv_dtype).shape[0]
        pool[:pages] = run.kv_cache.view(run.kv_dtype)
        live = run.common()
        common.seq_lens.copy_(live.seq_lens)
        common.query_start_loc.copy_(live.query_start_loc)
        table = live.block_table_tensor[:, :width]
        common.block_table_tensor[:, : table.shape[1]] = table
        common.slot_mapping.fill_(-1)
        n = run.batch.num_tokens
        common.slot_mapping[:n] = live.slot_mapping
        for buffer, tensor in zip(inputs, vllm_inputs(run), strict=True):
            buffer.fill_(float("nan"))
            buffer[:n] = tensor[:n]
        for name in ("_k_scale", "_v_scale"):
            getattr(first.layer, name).copy_(getattr(run.layer, name))
        out.fill_(float("nan"))
        graph.replay()
        run.check(out)


@pytest.mark.skipif(DEVICE != "cuda", reason="graphs are the device's")
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("mode", ["DECODE", "TARGET_VERIFY"])
@pytest.mark.parametrize("is_hybrid", [False, True])
def test_sglangs_graphs_replay_other_batches(mode: str, page_size: int, is_hybrid: bool) -> None:
    """Captured over a runner's buffers that say nothing; replayed with a batch in them."""
    lens = sglang_runs.DECODE if mode == "DECODE" else sglang_runs.VERIFY
    scores = WINDOW if is_hybrid else PLAIN
    run = sglang_run(lens, mode, page_size=page_size, is_hybrid=is_hybrid, scores=scores)
    run.backend.init_cuda_graph_state(8, 64)
    live = run.forward_batch()
    names = ("req_pool_indices", "seq_lens", "out_cache_loc")
    wanted = {name: getattr(live, name).clone() for name in names}
    live.req_pool_indices = torch.zeros_like(live.req_pool_indices)
    live.seq_lens.fill_(1)
    live.out_cache_loc.zero_()
    run.backend.init_forward_metadata_out_graph(live, in_capture=True)
    q, (k, v) = packed(run.batch.q), run.batch.new

    def step() -> Tensor:
        run.backend.init_forward_metadata_in_graph(live)
        call = run.backend.forward_decode if mode == "DECODE" else run.backend.forward_extend
        return call(q, k, v, run.layer, live)

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for name in names:
        getattr(live, name).copy_(wanted[name])
    for buffer in run.buffers:
        buffer.view(torch.int16).fill_(-1)  # NaN
    run._fill()
    for _ in range(3):
        out.fill_(float("nan"))
        run.backend.init_forward_metadata_out_graph(live)
        graph.replay()
        run.check(out)
