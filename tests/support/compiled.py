"""Batches for layers under ``torch.compile``, of every cache and table."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import jitattn
from jitattn.kernels.preprocess.spec import PreprocessConfig
from jitattn.spec.config import MLAConfig, PlannerConfig
from jitattn.tensors.quantization import tensors_of

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, NUM_PAGES = 4, 2, 16, 4, 32
CACHES = ("tensor", "pair", "interleaved", "fp8", "fp8-tensors", "nvfp4")
TABLES = ("shared", "rows", "separate", "token", "csr")


@dataclass
class Case:
    """A step of a layer: its input, and where its tokens go."""

    cache: Any
    pages: Any
    table: str
    kv_dtype: str
    seq_lens: Tensor
    qo_indptr: Tensor | None
    max_q_len: int | None
    rope: jitattn.Rope
    x: Tensor
    weights: tuple[Tensor, Tensor]
    k_scale: Any = None
    v_scale: Any = None

    @classmethod
    def of(
        cls,
        *,
        cache: str = "tensor",
        table: str = "shared",
        batch_size: int = 3,
        max_q_len: int = 1,
        seed: int,
        device: str = "cpu",
    ) -> Case:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).bfloat16().to(device)

        table = "separate" if cache == "interleaved" else table
        q_lens = torch.randint(1, max_q_len + 1, (batch_size,), generator=generator)
        q_lens[0] = max_q_len
        lens = q_lens + torch.randint(0, 8, (batch_size,), generator=generator)
        indptr = torch.nn.functional.pad(q_lens.cumsum(0), (1, 0)).int().to(device)
        hidden, width = 32, (HEADS + 2 * KV_HEADS) * HEAD_DIM
        made, kv_dtype, scales = _cache(cache, random, device)
        return cls(
            made, _pages(table, batch_size, generator, device), table.replace("rows", "shared"),
            kv_dtype, lens.int().to(device), indptr if max_q_len > 1 else None,
            max_q_len if max_q_len > 1 else None,
            jitattn.Rope(HEAD_DIM, interleaved=cache == "nvfp4"),
            random(int(q_lens.sum()), hidden),
            (random(hidden, width) / 6, random(HEADS * HEAD_DIM, hidden) / 8), *scales,
        )  # fmt: skip

    @property
    def q(self) -> Tensor:
        heads = (self.x @ self.weights[0]).view(-1, HEADS + 2 * KV_HEADS, HEAD_DIM)
        return heads[:, :HEADS]

    @property
    def is_quantised(self) -> bool:
        return self.kv_dtype != "bfloat16"

    def copied(self) -> Case:
        """The same with a cache of its own; tensors that are one stay one."""
        return replace(self, cache=copy.deepcopy(self.cache))

    def bytes(self) -> Tensor:
        """What the cache holds."""
        parts = [part.contiguous().view(torch.uint8) for part in tensors_of(self.cache)]
        return torch.cat([part.flatten() for part in parts])


def layer(x: Tensor, weights: Sequence[Tensor], case: Case, kv: Any, plan: Any) -> Tensor:
    """A decoder layer: projection, preprocess_qkv, attention, projection."""
    q = jitattn.preprocess_qkv(
        x @ weights[0], case.cache, num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
        pages=case.pages, seq_lens=case.seq_lens, qo_indptr=case.qo_indptr, rope=case.rope,
        k_scale=case.k_scale, v_scale=case.v_scale,
    )  # fmt: skip
    out = plan.run(q, kv)
    return x + out.flatten(1) @ weights[1]


def new_planner(case: Case, **others: Any) -> jitattn.AttentionPlanner:
    return jitattn.AttentionPlanner(
        num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, page_size=PAGE_SIZE,
        kv_dtype=case.kv_dtype, page_table=case.table, device=case.x.device, **others,
    )  # fmt: skip


def _cache(kind: str, random: Any, device: str) -> tuple[Any, str, tuple[Any, Any]]:
    shape = NUM_PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM
    if kind == "tensor":
        return random(NUM_PAGES, 2, *shape[1:]), "bfloat16", (None, None)
    if kind == "pair":
        return (random(*shape), random(*shape)), "bfloat16", (None, None)
    if kind == "interleaved":
        pool = random(*shape)
        return (pool, pool), "bfloat16", (None, None)
    if kind == "nvfp4":
        blocks = *shape[:3], HEAD_DIM // 16
        parts = [
            torch.zeros(*size, dtype=torch.uint8, device=device)
            for size in ((*shape[:3], HEAD_DIM // 2),) * 2 + (blocks,) * 2
        ]
        return jitattn.QuantizedKV(*parts), "nvfp4", (0.5, 2.0)
    cache = torch.zeros(NUM_PAGES, 2, *shape[1:], dtype=torch.float8_e4m3fn, device=device)
    if kind == "fp8":
        return cache, "float8_e4m3fn", (0.5, 2.0)
    scales = torch.tensor(0.5, device=device), torch.tensor([2.0, 0.5], device=device)
    return cache, "float8_e4m3fn", scales


def _pages(kind: str, batch_size: int, generator: torch.Generator, device: str) -> Any:
    width = 3
    ids = torch.randperm(NUM_PAGES, generator=generator).int()
    # Few pages, so many requests share some; only the tests of one layer compare bits then.
    ids = ids.repeat(-(-batch_size * width * 2 // NUM_PAGES))
    table = ids[: batch_size * width].view(batch_size, width).to(device)
    if kind == "shared":
        return jitattn.BlockTable(table)
    if kind == "rows":
        rows = torch.randperm(batch_size, generator=generator).to(device)
        return jitattn.BlockTable(table, rows=rows)
    if kind == "separate":
        both = ids[: 2 * batch_size * width].view(batch_size, 2, width).to(device)
        return jitattn.BlockTable(both)
    if kind == "token":
        slots = table[:, :, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=device).int()
        return jitattn.TokenTable(slots.flatten(1))
    indptr = torch.arange(0, batch_size * width + 1, width, dtype=torch.int32, device=device)
    return jitattn.CsrPages(indptr, table.flatten())


def mla_case(kind: str, device: str = "cpu") -> tuple[Any, ...]:
    """Planner, plan, queries, K and V to write, cache, where they go, and the cache's scale."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16().to(device)

    is_fp8 = kind in ("fp8", "rows")
    planner = jitattn.MLAPlanner(
        sm_scale=0.1, num_heads=HEADS, kv_lora_rank=512, qk_rope_head_dim=64, page_size=4,
        kv_dtype="float8_e4m3fn" if is_fp8 else "bfloat16", device=device,
    )  # fmt: skip
    if kind == "pair":
        cache: Any = random(8, 4, 512), random(8, 4, 64)
    elif kind == "rows":
        cache = torch.zeros(8, 4, 656, dtype=torch.uint8, device=device)
    else:
        cache = random(8, 4, 576)
        cache = cache.to(torch.float8_e4m3fn) if is_fp8 else cache
    table = jitattn.BlockTable(torch.randperm(8, generator=generator).int().view(2, 4).to(device))
    seq_lens = torch.tensor([5, 9], dtype=torch.int32, device=device)
    plan = planner.plan(table, seq_lens)
    q = random(2, HEADS, 512), random(2, HEADS, 64)
    k, v = random(2, 1, 512), random(2, 1, 64)
    arguments = {"pages": table, "seq_lens": seq_lens}
    scale = torch.tensor([0.5], device=device) if kind == "fp8" else None
    return planner, plan, q, k, v, cache, arguments, scale


def gpu_configs() -> list[PlannerConfig | PreprocessConfig | MLAConfig]:
    """What tests/gpu/test_compiled.py launches, for a bundle."""
    found: list[PlannerConfig | PreprocessConfig | MLAConfig] = []
    for kv_dtype in ("bfloat16", "float8_e4m3fn"):
        found += [
            PlannerConfig(
                num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, page_size=PAGE_SIZE,
                kv_dtype=kv_dtype,
            ),
            PreprocessConfig(head_dim=HEAD_DIM, page_size=PAGE_SIZE, kv_dtype=kv_dtype),
            MLAConfig.from_arguments(
                {"sm_scale": 0.1, "num_heads": HEADS, "page_size": 4, "kv_dtype": kv_dtype}
            ),
        ]  # fmt: skip
    return found
