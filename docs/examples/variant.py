import torch

import jitattn

# Keys of the last 64 tokens count in full, older ones less and less; each head has its own rate.
fading = jitattn.variants.AttentionVariant(
    "fading",
    """
    const int age = qo_idx - kv_idx;
    if (age < 64) return logit;
    return logit - params.rate(qo_head) * float(age - 64);
    """,
    {"rate": "float[qo_heads]"},
    # The same in torch: what the backend "reference" runs, and tests compare kernels with.
    reference=lambda logit, at: (
        logit - at.params.rate[at.qo_head] * (at.qo_idx - at.kv_idx - 64).clamp(min=0)
    ),
)

device = "cuda" if torch.cuda.is_available() else "cpu"
kv_cache = torch.randn(64, 2, 16, 8, 128, dtype=torch.bfloat16, device=device)
pages = torch.randperm(64, device=device)[:60].view(3, 20).to(torch.int32)
seq_lens = torch.tensor([5, 320, 77], dtype=torch.int32, device=device)
q = torch.randn(3, 32, 128, dtype=torch.bfloat16, device=device)

planner = jitattn.AttentionPlanner(variant=fading, device=device)  # compiles its kernels
plan = planner.plan(jitattn.BlockTable(pages), seq_lens)
rate = torch.full((32,), 0.05, device=device)
out = plan.run(q, planner.bind(kv_cache), variant_params={"rate": rate})
print(out.shape)
