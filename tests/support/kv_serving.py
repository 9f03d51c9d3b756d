"""A windowed model whose layers write and read pages of a manager, with any backend."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import jitattn
from jitattn.kernels.preprocess.spec import PreprocessConfig
from jitattn.kv import KVCacheConfig, KVCacheManager, KVSequence, LayerConfig, PageIndexMode
from jitattn.spec.config import PlannerConfig

HEAD_DIM = 16
EXAMPLE = (127, 32)
"""Window and page size of the worked example."""
REPLAYED = (20, 8)
"""The same of steps that are captured."""


def windowed_manager(
    num_layers: int,
    *,
    window_left: int,
    page_size: int,
    slots: int,
    device: str,
    reuse_scratch: bool,
    max_rewind_len: int = 0,
) -> KVCacheManager:
    layers = [
        LayerConfig(layer_id=i, num_kv_heads=1, head_dim=HEAD_DIM, window_left=window_left)
        for i in range(num_layers)
    ]
    slot_bytes = sum(sum(layer.part_bytes(page_size)) for layer in layers)
    manager = KVCacheManager(
        KVCacheConfig(
            page_size=page_size,
            gpu_bytes=slots * slot_bytes,
            layers=layers,
            reuse_scratch=reuse_scratch,
            max_rewind_len=max_rewind_len,
        ),
        device=device,
    )
    for region in manager.regions(0):
        region.memory.fill_(0xFF)  # NaN: what is read without being written is seen
    return manager


def run_step(
    planner: jitattn.AttentionPlanner, manager: KVCacheManager, seq: KVSequence, x: Tensor
) -> Tensor:
    """Run the tokens after the history through all layers.

    Args:
        planner: of one KV head and one query head.
        manager: has the pages.
        seq: with a capacity of its history and ``x.shape[0]`` tokens.
        x: [num_tokens, 3 * HEAD_DIM], the first layer's input: q, k and v of each token.

    Returns:
        The last layer's x.
    """
    device = x.device
    seq_lens = torch.tensor([seq.capacity], dtype=torch.int32, device=device)
    qo_indptr = torch.tensor([0, x.shape[0]], dtype=torch.int32, device=device)
    plan = None
    for layer in manager.config.layers:
        view = manager.layer_view(layer.layer_id, PageIndexMode.PER_LAYER)
        table = view.block_table([seq])
        if plan is None:
            plan = planner.plan(table, seq_lens, qo_indptr, max_q_len=x.shape[0])
        heads = x.view(-1, 3, HEAD_DIM)
        jitattn.append_kv(
            heads[:, 1:2], heads[:, 2:3], view.kv_cache,
            pages=table, seq_lens=seq_lens, qo_indptr=qo_indptr,
        )  # fmt: skip
        out = plan.run(heads[:, :1], view.kv_cache, pages=table)
        assert isinstance(out, Tensor)
        out = out.flatten(1)
        # Bounded, and of a size that stays: growing numbers are infinite in float32, where products
        # of kernels are, before they are in float64.
        mixed = torch.cat([out, out.roll(1, 1), out.flip(0)], dim=1)
        x = torch.sin(2 * x + 3 * mixed)
    return x


def planner_config(window_left: int, page_size: int) -> PlannerConfig:
    return PlannerConfig(
        num_qo_heads=1, num_kv_heads=1, head_dim=HEAD_DIM, page_size=page_size,
        window_left=window_left, batch_invariant=True,
    )  # fmt: skip


def windowed_planner(window_left: int, page_size: int, device: str) -> jitattn.AttentionPlanner:
    return jitattn.AttentionPlanner(**vars(planner_config(window_left, page_size)), device=device)


def gpu_configs() -> list[PlannerConfig | PreprocessConfig]:
    """What tests/gpu/test_kv.py launches besides copies and tables, for a bundle."""
    shapes = [EXAMPLE, REPLAYED, *((window, Pressure.PAGE_SIZE) for window in Pressure.WINDOWS)]
    writers = (
        PreprocessConfig(head_dim=HEAD_DIM, page_size=page_size, pairing="none")
        for _, page_size in shapes
    )
    return list(dict.fromkeys((*(planner_config(*shape) for shape in shapes), *writers)))


def prefill_and_decode(
    manager: KVCacheManager,
    planner: jitattn.AttentionPlanner,
    chunks: Sequence[Tensor],
    *,
    num_decoded: int,
) -> tuple[list[Tensor], int]:
    """Run a prompt in chunks and then single tokens; return all results and the prompt's slots."""
    seq = manager.create_sequence()
    assert seq.resume()
    results, peak = [], 0
    for chunk in chunks:
        assert seq.resize(seq.history_len + chunk.shape[0])
        results.append(run_step(planner, manager, seq, chunk))
        peak = manager.stats().pools[0].peak
        seq.commit(range(seq.history_len, seq.capacity))
    for _ in range(num_decoded):
        assert manager.advance([seq], [[]]) == [True]
        results.append(run_step(planner, manager, seq, results[-1][-1:]))
        assert manager.advance([seq], [seq.history_len]) == [True]
    seq.close()
    return results, peak


def check_worked_example(
    device: str, scratch: Sequence[tuple[bool, int]], *, num_decoded: int
) -> list[int]:
    """A prompt of 1024 in 32 layers has the same bits however scratch is used; the peaks of slots.

    Args:
        device: of the manager.
        scratch: reuse_scratch and max_rewind_len of each run.
        num_decoded: tokens after the prompt.
    """
    window_left, page_size = EXAMPLE
    planner = windowed_planner(window_left, page_size, device)
    generator = torch.Generator().manual_seed(7)
    chunk = torch.randn(1024, 3 * HEAD_DIM, generator=generator).bfloat16().to(device)
    results, peaks = [], []
    for reuse_scratch, max_rewind_len in scratch:
        manager = windowed_manager(
            32, window_left=window_left, page_size=page_size, slots=32, device=device,
            reuse_scratch=reuse_scratch, max_rewind_len=max_rewind_len,
        )  # fmt: skip
        result, peak = prefill_and_decode(manager, planner, [chunk], num_decoded=num_decoded)
        results.append(result)
        peaks.append(peak)
    for result in results:
        for given, expected in zip(result, results[0], strict=True):
            assert not given.isnan().any()
            assert torch.equal(given, expected)
    return peaks


def captured(step: Callable[[], Tensor], device: str) -> Callable[[], Tensor]:
    """Return what runs a step again: the graph of it, or the step itself on the CPU."""
    if device == "cpu":
        return step
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


def check_tables_written_in_place(device: str) -> None:
    """A captured step follows a sequence: it reads its table, length and tokens again."""
    window_left, page_size = REPLAYED
    manager = windowed_manager(
        2, window_left=window_left, page_size=page_size, slots=40, device=device,
        reuse_scratch=False,
    )  # fmt: skip
    for region in manager.regions(0):
        region.memory.zero_()
    planner = windowed_planner(window_left, page_size, device)
    view = manager.layer_view(1, PageIndexMode.SHARED)
    seq = manager.create_sequence()
    assert seq.resume()
    assert seq.resize(1)
    table = torch.full((1, 16), -1, dtype=torch.int32, device=device)
    seq_lens = torch.ones(1, dtype=torch.int32, device=device)
    q, k, v = torch.randn(3, 1, 1, HEAD_DIM, device=device).bfloat16()
    pages = view.block_table([seq], out=table)
    plan = planner.plan(pages, seq_lens)

    def attend(plan: jitattn.types.Plan) -> Tensor:
        jitattn.append_kv(k, v, view.kv_cache, pages=pages, seq_lens=seq_lens)
        out = plan.run(q, view.kv_cache)
        assert isinstance(out, Tensor)
        return out

    def step() -> Tensor:
        plan.refresh()
        return attend(plan)

    step()
    replay = captured(step, device)
    for position in range(40):
        view.block_table([seq], out=table)
        seq_lens.fill_(position + 1)
        k.normal_()
        v.normal_()
        assert torch.equal(replay(), attend(planner.plan(pages, seq_lens)))
        assert manager.advance([seq], [position]) == [True]


class Pressure:
    """Many sequences in too little memory, whose attention is compared with a contiguous cache's.

    K, V and q of a token are rows of fixed tables, chosen by all tokens up to it, so that they have
    the same bits however they were computed; memory that is not written is NaN.
    """

    WINDOWS = (20, 20, -1, 20)
    PAGE_SIZE = 8
    TABLE = 4096

    def __init__(self, device: str, seed: int, *, slots: int, host_slots: int) -> None:
        layers = [
            LayerConfig(layer_id=i, num_kv_heads=1, head_dim=HEAD_DIM, window_left=window)
            for i, window in enumerate(self.WINDOWS)
        ]
        page_bytes = sum(layers[0].part_bytes(self.PAGE_SIZE)) * len(layers)
        self.manager = KVCacheManager(
            KVCacheConfig(
                page_size=self.PAGE_SIZE,
                gpu_bytes=slots * page_bytes,
                host_bytes=host_slots * page_bytes,
                layers=layers,
                reuse_scratch=True,
                max_rewind_len=3,
                typical_len=64,
            ),
            device=device,
        )
        for group in self.manager.layer_groups:
            for region in self.manager.regions(group):
                region.memory.fill_(0xFF)
        self.device, self.rng = device, random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(3, len(layers), self.TABLE, 1, HEAD_DIM, generator=generator)
        self.rows = rows.bfloat16().to(device)
        self.planners = {
            window: windowed_planner(window, self.PAGE_SIZE, device) for window in set(self.WINDOWS)
        }
        self.waiting: list[tuple[KVSequence, list[int]]] = []
        self.running: list[tuple[KVSequence, list[int]]] = []
        self.prompts: list[list[int]] = []
        self.num_compared = 0

    def begin(self) -> None:
        """Add a sequence, whose prompt may continue another's."""
        rng = self.rng
        base = rng.choice(self.prompts) if self.prompts and rng.random() < 0.6 else []
        prompt = base[: rng.randrange(len(base) + 1)] + [
            rng.randrange(1 << 20) for _ in range(rng.choice([1, 5, 17, 60, 130]))
        ]
        self.prompts.append(prompt)
        seq = self.manager.create_sequence(prompt[:-1], priority=rng.choice([0, 35]))
        self.waiting.append((seq, prompt))

    def turn(self) -> None:
        """Let one sequence wait, go on, fork or end."""
        rng = self.rng
        if self.waiting and rng.random() < 0.5:
            pair = self.waiting.pop(rng.randrange(len(self.waiting)))
            (self.running if pair[0].resume() else self.waiting).append(pair)
        if not self.running:
            return
        seq, tokens = pair = rng.choice(self.running)
        what = rng.random()
        if what < 0.1:
            seq.suspend()
            self.running.remove(pair)
            self.waiting.append(pair)
        elif what < 0.2 and len(self.running) < 12:
            self.running.append((seq.fork(), [*tokens[: seq.history_len], rng.randrange(1 << 20)]))
        elif what < 0.3:
            seq.close()
            self.running.remove(pair)
        else:
            self.step(seq, tokens)

    def step(self, seq: KVSequence, tokens: list[int]) -> None:
        """Compute a chunk of what a sequence has left, or one token more."""
        history = seq.history_len
        if history == len(tokens):
            tokens.append(self.rng.randrange(1 << 20))
        end = min(len(tokens), history + self.rng.choice([1, 40, 130]))
        if not seq.resize(end):
            return
        self.compare(seq, tokens[:end])
        seq.commit(tokens[history:end])

    def compare(self, seq: KVSequence, tokens: list[int]) -> None:
        """Attend the tokens after the history, layer by layer, in both caches."""
        history, chosen = seq.history_len, self.chosen(tokens)
        num_new, num_pages = len(tokens) - history, -(-len(tokens) // self.PAGE_SIZE)
        seq_lens = torch.tensor([len(tokens)], dtype=torch.int32, device=self.device)
        indptr = torch.tensor([0, num_new], dtype=torch.int32, device=self.device)
        whole = torch.tensor([0, len(tokens)], dtype=torch.int32, device=self.device)
        in_order = torch.arange(num_pages, dtype=torch.int32, device=self.device)[None]
        for layer in self.manager.config.layers:
            q, k, v = self.rows[:, layer.layer_id, chosen]
            view = self.manager.layer_view(layer.layer_id, PageIndexMode.PER_LAYER)
            table = view.block_table([seq])
            jitattn.append_kv(
                k[history:], v[history:], view.kv_cache,
                pages=table, seq_lens=seq_lens, qo_indptr=indptr,
            )  # fmt: skip
            cache = torch.full(
                (num_pages, 2, self.PAGE_SIZE, 1, HEAD_DIM), torch.nan,
                dtype=torch.bfloat16, device=self.device,
            )  # fmt: skip
            contiguous = jitattn.BlockTable(in_order)
            jitattn.append_kv(k, v, cache, pages=contiguous, seq_lens=seq_lens, qo_indptr=whole)
            planner = self.planners[layer.window_left]
            outs = [
                planner.plan(pages, seq_lens, indptr, max_q_len=num_new).run(q[history:], kv)
                for pages, kv in ((table, view.kv_cache), (contiguous, cache))
            ]
            assert isinstance(outs[0], Tensor)
            assert isinstance(outs[1], Tensor)
            assert not outs[1].isnan().any()
            assert torch.equal(outs[0], outs[1])
            self.num_compared += 1

    def chosen(self, tokens: list[int]) -> Tensor:
        """Return the row of each token: it depends on all before it."""
        found, value = [], 1
        for token in tokens:
            value = (value * 1_000_003 + token + 7) % (1 << 31)
            found.append(value % self.TABLE)
        return torch.tensor(found, device=self.device)

    def run(self, num_sequences: int) -> None:
        """Begin so many sequences, and give each a few turns."""
        for _ in range(num_sequences):
            self.begin()
            for _ in range(4):
                self.turn()
        for seq, _ in (*self.waiting, *self.running):
            seq.close()
        stats = self.manager.stats()
        assert all(pool.used == pool.held == pool.host_held == 0 for pool in stats.pools)
        happened = (
            self.num_compared, stats.offloaded_pages, stats.reloaded_pages, stats.copied_pages,
            stats.dropped_pages, stats.reused_tokens,
        )  # fmt: skip
        assert min(happened) > 0, happened
