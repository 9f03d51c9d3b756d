"""A layer as DeepSeek V3.2's: an indexer scores all keys, and attention reads the best of them."""

import torch

import jitattn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
BATCH, HEADS, INDEX_HEADS, TOP_K, PAGE_SIZE = (
    2,
    16,
    64,
    2048,
    64,
)  # 16 of 128 heads: a card of eight
seq_lens = torch.tensor([5000, 1500], dtype=torch.int32, device=device)
num_pages = 160
table = torch.randperm(num_pages, device=device).view(BATCH, 80).int()
pages = jitattn.BlockTable(table)  # of latents and of the indexer's keys alike

# What earlier steps have left: latents of 512 elements with 64 that carry the position, and keys of
# the indexer, 128 bytes of e4m3 and a float32 scale each.
latents = torch.randn(num_pages, PAGE_SIZE, 512 + 64, device=device).bfloat16()
keys = torch.randn(num_pages, PAGE_SIZE, 128, device=device)
scales = keys.abs().amax(dim=-1) / 448
codes = (keys / scales[..., None]).to(torch.float8_e4m3fn)
parts = codes.view(torch.uint8).flatten(1), scales.view(torch.uint8).flatten(1)
index_cache = torch.cat(parts, dim=1).view(num_pages, PAGE_SIZE, 128 + 4)

# What this step's projections have made of its tokens, one a request.
index_q = torch.randn(BATCH, INDEX_HEADS, 128, device=device).to(torch.float8_e4m3fn)
weights = torch.rand(BATCH, INDEX_HEADS, device=device)  # times the scale of index_q
q_nope = torch.randn(BATCH, HEADS, 512, device=device).bfloat16()
q_pe = torch.randn(BATCH, HEADS, 64, device=device).bfloat16()

planner = jitattn.MLAPlanner(
    num_heads=HEADS, page_size=PAGE_SIZE, sm_scale=192**-0.5, page_table="indices", device=device
)  # compiles or loads the kernels
kv = planner.bind(latents)  # once per layer

logits = jitattn.index_logits(index_q, weights, index_cache, pages, seq_lens)
lists = jitattn.select_tokens(logits, pages, seq_lens, TOP_K)  # slots, and how many there are
plan = planner.plan(lists, BATCH)  # once per step: other layers run with lists of their own
out = plan.run(q_nope, q_pe, kv, pages=lists)
print(out.shape, lists.counts.tolist())  # 2,048 of 5,000 tokens, and all of 1,500
