"""Quest over a layer as Llama's: bounds of each page's keys say which pages a KV head reads."""

import torch

import jitattn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
BATCH, HEADS, KV_HEADS, DIM, PAGE_SIZE, NUM_CHOSEN = 2, 32, 8, 128, 16, 32
seq_lens = torch.tensor([3000, 400], dtype=torch.int32, device=device)
num_pages = 400
table = torch.randperm(num_pages, device=device).view(BATCH, 200).int()
pages = jitattn.BlockTable(table)
kv_cache = torch.randn(num_pages, 2, PAGE_SIZE, KV_HEADS, DIM, device=device).bfloat16()

shape = {"num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "page_size": PAGE_SIZE}
planner = jitattn.AttentionPlanner(**shape, page_table="page_lists", device=device)
kv = planner.bind(kv_cache)  # once per layer
bounds = jitattn.page_bounds(kv_cache, pages, seq_lens)  # of the prompts, once per layer

for _ in range(3):  # decode steps
    q = torch.randn(BATCH, HEADS, DIM, device=device).bfloat16()
    k, v = torch.randn(2, BATCH, KV_HEADS, DIM, device=device).bfloat16()
    seq_lens += 1
    jitattn.append_kv(k, v, kv_cache, pages=pages, seq_lens=seq_lens)
    jitattn.page_bounds(kv_cache, pages, seq_lens, out=bounds)  # reads the pages of new tokens
    lists = jitattn.select_pages(q, bounds, pages, seq_lens, NUM_CHOSEN)
    plan = planner.plan(lists, seq_lens)
    out = plan.run(q, kv)

# How far that is from attention to everything: random keys are the worst there are.
dense = jitattn.AttentionPlanner(**shape, device=device)
all_of_it = dense.plan(pages, seq_lens).run(q, dense.bind(kv_cache))
print(out.shape, lists.counts[:, 0].tolist(), float((out - all_of_it).abs().max()))
