"""A windowed model whose layers write and read pages of a manager, with any backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import jitattn
from jitattn.kv import KVCacheConfig, KVCacheManager, KVSequence, LayerConfig, PageIndexMode

HEAD_DIM = 16


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
        x = x * 0.5 + torch.cat([out, out.flip(0), out.roll(1, 0)], dim=1)
    return x


def windowed_planner(window_left: int, page_size: int, device: str) -> jitattn.AttentionPlanner:
    return jitattn.AttentionPlanner(
        num_qo_heads=1, num_kv_heads=1, head_dim=HEAD_DIM, page_size=page_size,
        window_left=window_left, batch_invariant=True, device=device,
    )  # fmt: skip


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
