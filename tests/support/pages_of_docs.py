"""What the examples of docs/ leave out: the names that a page's blocks of Python find.

Sizes are small, and tensors are on the CPU. A page's blocks run one after the other in one
namespace; ``RENAMED`` are words of a page that a machine without a card can't take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

import jitattn

NOT_RUN = {
    "engines.md": "needs the engines themselves: tests/integrations/test_transformers.py",
    "parallel.md": "needs several processes: tests/parallel/test_example.py",
}
RENAMED = {
    "variants.md": {"jitattn.precompile(": "check("},
    "page-manager.md": {'"cuda"': '"cpu"', "8 << 30": "1 << 27", "16 << 30": "1 << 27"},
    "from-tensorrt-llm.md": {'"cuda:0"': '"cpu"'},
    # Inductor takes a minute; tests/kernels/common/test_torch_op.py compiles the same.
    "torch-compile.md": {"fullgraph=True": 'fullgraph=True, backend="eager"'},
}
HEADS, KV_HEADS, DIM = 32, 8, 128


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16)


def _counted(rows: int, width: int) -> Tensor:
    return torch.arange(rows * width, dtype=torch.int32).view(rows, width)


def _caches(page_size: int, num_pages: int = 6) -> tuple[Tensor, Tensor]:
    k, v = (_normal(num_pages, page_size, KV_HEADS, DIM) for _ in "kv")
    return k, v


def quantisation() -> dict[str, object]:
    fp8 = torch.float8_e4m3fn
    return {
        "q": torch.randn(3, HEADS, DIM).to(fp8),
        "kv_cache": torch.randn(8, 2, 16, KV_HEADS, DIM).to(fp8),
        "table": _counted(3, 2),
        "seq_lens": torch.tensor([20, 5, 32]),
        "k_scale": torch.tensor(0.5),
        "v_scale": torch.tensor(0.5),
    }


def preprocessing() -> dict[str, object]:
    return {
        "config": {
            "model_type": "llama",
            "hidden_size": HEADS * DIM,
            "num_attention_heads": HEADS,
            "rope_theta": 500000.0,
            "max_position_embeddings": 8192,
        },
        "qkv": _normal(3, (HEADS + 2 * KV_HEADS) * DIM),
        "kv_cache": _normal(4, 2, 16, KV_HEADS, DIM),
        "table": _counted(2, 2),
        "seq_lens": torch.tensor([20, 5]),
        "qo_indptr": torch.tensor([0, 2, 3], dtype=torch.int32),
    }


def cascade() -> dict[str, object]:
    return {
        "kv_cache": _normal(12, 2, 16, KV_HEADS, DIM),
        "prefix_pages": _counted(2, 2),
        "prefix_lens": torch.tensor([32, 20]),
        "own_pages": 4 + _counted(5, 1),
        "own_lens": torch.tensor([1, 2, 3, 4, 5]),
        "q": _normal(5, HEADS, DIM),
    }


def sparse() -> dict[str, object]:
    return {
        "table": _counted(2, 8),
        "seq_lens": torch.tensor([100, 50]),
        "q_index": _normal(2, 64, DIM).to(torch.float8_e4m3fn),
        "weights": torch.rand(2, 64),
        "index_cache": torch.zeros(16, 16, DIM + 4, dtype=torch.uint8),
        "kv_cache": _normal(16, 2, 16, KV_HEADS, DIM),
        "q": _normal(2, HEADS, DIM),
    }


def torch_compile() -> dict[str, object]:
    planner = jitattn.AttentionPlanner(page_size=16, device="cpu")
    cache = _normal(4, 2, 16, KV_HEADS, DIM)
    weights = SimpleNamespace(
        qkv=_normal(16, (HEADS + 2 * KV_HEADS) * DIM), out=_normal(HEADS * DIM, 16)
    )
    return {
        "planner": planner,
        "pages": jitattn.BlockTable(_counted(2, 2)),
        "seq_lens": torch.tensor([20, 5]),
        "rope": jitattn.Rope(DIM),
        "layers": [(weights, cache, planner.bind(cache))] * 2,
        "x": _normal(2, 16),
        "q": _normal(2, HEADS, DIM),
        "out": torch.empty(2, HEADS, DIM, dtype=torch.bfloat16),
        "lse": torch.empty(2, HEADS),
    }


def page_manager() -> dict[str, object]:
    return {
        "planner": jitattn.AttentionPlanner(page_size=32, device="cpu"),
        "prompt": list(range(70)),
        "token": 7,
        "seq_lens": torch.tensor([70]),
        "qo_indptr": torch.tensor([0, 70], dtype=torch.int32),
    }


def latent_attention() -> dict[str, object]:
    return {
        "num_pages": 4,
        "table": _counted(2, 2),
        "seq_lens": torch.tensor([70, 5]),
        "q_nope": _normal(2, 16, 512),
        "q_pe": _normal(2, 16, 64),
        "k_pe": _normal(2, 1, 64),
        "latent": _normal(2, 1, 512),
    }


def from_flash_attn() -> dict[str, object]:
    k_cache, v_cache = _caches(256)
    return {
        "q": _normal(2, 1, HEADS, DIM),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "k": _normal(2, 1, KV_HEADS, DIM),
        "v": _normal(2, 1, KV_HEADS, DIM),
        "cache_seqlens": torch.tensor([300, 5], dtype=torch.int32),
        "block_table": _counted(2, 3),
    }


def from_flashinfer() -> dict[str, object]:
    return {
        "workspace": torch.empty(16, dtype=torch.uint8),
        "indptr": torch.tensor([0, 2, 5], dtype=torch.int32),
        "indices": torch.tensor([3, 1, 0, 4, 2], dtype=torch.int32),
        "last_page_len": torch.tensor([16, 3], dtype=torch.int32),
        "num_qo_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": DIM,
        "page_size": 16,
        "q": _normal(2, HEADS, DIM),
        "paged_kv_cache": _normal(6, 2, KV_HEADS, 16, DIM),
    }


def from_tensorrt_llm() -> dict[str, object]:
    num_pages, num_layers = 4, 2
    pool = _normal(num_pages, num_layers, 2, KV_HEADS, 32, DIM)
    blocks = torch.tensor([[[0, 4], [1, 5]], [[8, 12], [9, 13]]], dtype=torch.int32)
    return {
        "pool": pool,  # who holds the memory
        "pool_pointers": torch.tensor([[pool.data_ptr(), 0]]),
        "pool_mapping": torch.tensor([[0, layer] for layer in range(num_layers)]),
        "layer_idx": 1,
        "num_pages": num_pages,
        "num_layers": num_layers,
        "block_offsets": blocks[None],
        "batch_size": 2,
        "seq_lens": torch.tensor([40, 5]),
    }


def variants() -> dict[str, object]:
    def check(configs: list[dict[str, object]], *, arch: str, out: str) -> None:
        """What ``precompile`` is given, without the compiler."""
        assert all(jitattn.check_config(arch=arch, **config).supported for config in configs)

    bias = SimpleNamespace(weight=torch.randn(32, HEADS))
    return {"layer": SimpleNamespace(relative_attention_bias=bias), "check": check}


SETUPS: dict[str, Callable[[], dict[str, object]]] = {
    "cascade.md": cascade,
    "from-flash-attn.md": from_flash_attn,
    "from-flashinfer.md": from_flashinfer,
    "from-tensorrt-llm.md": from_tensorrt_llm,
    "latent-attention.md": latent_attention,
    "page-manager.md": page_manager,
    "preprocessing.md": preprocessing,
    "quantisation.md": quantisation,
    "sparse.md": sparse,
    "torch-compile.md": torch_compile,
    "variants.md": variants,
}


Steps = Sequence[Mapping[str, Tensor]]
"""The names of a page after each of its blocks."""


def check_flash_attn(steps: Steps) -> None:
    torch.testing.assert_close(steps[1]["out"], steps[0]["out"][:, 0])


def check_flashinfer(steps: Steps) -> None:
    torch.testing.assert_close(steps[1]["out"], steps[0]["out"])
    torch.testing.assert_close(steps[1]["lse"], steps[0]["lse"] * math.log(2))


CHECKS: dict[str, Callable[[Steps], None]] = {
    "from-flash-attn.md": check_flash_attn,
    "from-flashinfer.md": check_flashinfer,
}
"""What the pages say beyond that their examples run: two ways to the same."""
