"""Decode requests whose tokens lie over several devices.

torchrun --nproc-per-node 2 docs/examples/context_parallel.py
"""

import torch
import torch.distributed as dist

import jitattn
from jitattn.parallel import ContextParallel


def main() -> None:
    is_card = torch.cuda.is_available()
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if is_card else "gloo")
    cp = ContextParallel(page_size=16)
    device = torch.device("cuda", cp.rank) if is_card else torch.device("cpu")
    # All query heads and all KV heads; this rank computes q of its part of the query heads.
    planner = jitattn.AttentionPlanner(num_qo_heads=32, num_kv_heads=8, head_dim=128, device=device)
    own_heads = 32 // cp.num_ranks

    # On every rank the same: lengths, and a page of all ranks for each 16 tokens. Page j of a
    # request is one of rank j % num_ranks, as pages in order are.
    seq_lens = torch.tensor([1000, 37], device=device)
    table = torch.arange(2 * 64, dtype=torch.int32, device=device).view(2, 64)
    kv_cache = torch.zeros(2 * 64 // cp.num_ranks, 2, 16, 8, 128, dtype=torch.bfloat16).to(device)

    # A layer of a step: each rank writes the tokens that are its own.
    places = (seq_lens - 1).view(2, 1)
    slots = table.gather(1, places // 16).long() * 16 + places % 16
    k, v = torch.ones(2, 2, 8, 128, dtype=torch.bfloat16, device=device)
    jitattn.append_kv(k, v, kv_cache, slots=cp.local_slots(slots.flatten()))
    plan = cp.plan(planner, cp.local_table(jitattn.BlockTable(table)), seq_lens)
    q = torch.randn(2, own_heads, 128, dtype=torch.bfloat16, device=device)
    out = plan.run(q, kv_cache)
    print(f"rank {cp.rank}: {list(out.shape)} over {cp.local_lens(seq_lens).tolist()} own tokens")


if __name__ == "__main__":
    main()
