import torch

import jitattn

device = "cuda" if torch.cuda.is_available() else "cpu"
kv_cache = torch.randn(64, 2, 16, 8, 128, dtype=torch.bfloat16, device=device)  # K and V pages
pages = torch.randperm(64, device=device)[:60].view(3, 20).to(torch.int32)  # a row a request
seq_lens = torch.tensor([5, 320, 77], dtype=torch.int32, device=device)
q = torch.randn(3, 32, 128, dtype=torch.bfloat16, device=device)  # one query token a request

planner = jitattn.AttentionPlanner(
    num_qo_heads=32, num_kv_heads=8, head_dim=128, page_size=16, device=device
)  # compiles or loads the kernels
kv = planner.bind(kv_cache)  # once per layer
plan = planner.plan(jitattn.BlockTable(pages), seq_lens)  # once per step
out, lse = plan.run(q, kv, return_lse=True)  # once per layer and step
print(out.shape, lse.shape)
