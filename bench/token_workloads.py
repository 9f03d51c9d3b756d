"""Tokens on their way into a cache: the rows of bench_preprocess.py, and their tensors."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16


@dataclass(frozen=True)
class TokenWorkload:
    """One row: ``op`` is "preprocess" (rotary embedding, q, and K and V into pages) or "append"."""

    op: str
    num_tokens: int
    kv_dtype: str
    batch_size: int
    kv_len: int

    @property
    def name(self) -> str:
        return f"{self.op}-{self.num_tokens}-{self.kv_dtype}"

    @property
    def read_bytes(self) -> int:
        """Of qkv, or of K and V, in bf16."""
        heads = 2 * NUM_KV_HEADS + (NUM_QO_HEADS if self.op == "preprocess" else 0)
        return 2 * heads * HEAD_DIM * self.num_tokens

    @property
    def written_bytes(self) -> int:
        """Of q in bf16, and of K and V as they are stored."""
        item: int = getattr(torch, self.kv_dtype).itemsize
        q_bytes = 2 * NUM_QO_HEADS if self.op == "preprocess" else 0
        return (q_bytes + item * 2 * NUM_KV_HEADS) * HEAD_DIM * self.num_tokens

    @property
    def num_bytes(self) -> int:
        return self.read_bytes + self.written_bytes


WORKLOADS = tuple(
    TokenWorkload(op, num_tokens, kv_dtype, batch_size, kv_len)
    for op in ("preprocess", "append")
    for num_tokens, batch_size, kv_len in ((64, 64, 2048), (8192, 4, 4096))
    for kv_dtype in ("bfloat16", "float8_e4m3fn")
)


def configs() -> list[str]:
    """Return what ``jitattn precompile --config`` takes, for every row's kernel."""
    return [
        f"kernel=preprocess,head_dim={HEAD_DIM},page_size={PAGE_SIZE},kv_dtype={row.kv_dtype},"
        f"pairing={'neox' if row.op == 'preprocess' else 'none'}"
        for row in WORKLOADS
    ]


@dataclass
class TokenBatch:
    """A row's tensors; ``copies`` of what is read and written, so that none is in the cache."""

    row: TokenWorkload
    qkv: list[Tensor]  # [num_tokens, (32 + 2 * 8) * 128]
    q_out: list[Tensor]
    caches: list[tuple[Tensor, Tensor]]
    table: Tensor
    seq_lens: Tensor
    qo_indptr: Tensor
    positions: Tensor  # [num_tokens], int32
    k_scale: float | None
    v_scale: float | None

    @property
    def copies(self) -> int:
        return len(self.qkv)

    @property
    def requests(self) -> Tensor:
        """The request of every token, [num_tokens]."""
        q_len = self.row.num_tokens // self.row.batch_size
        return torch.arange(self.row.num_tokens, device=self.table.device) // q_len

    def cache(self, copy: int) -> tuple[Tensor, Tensor]:
        """Return the K and V that a copy is written to."""
        return self.caches[copy % len(self.caches)]

    def slots(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the page of each of ``tokens``, and its place there."""
        positions = self.positions[tokens].long()
        page = self.table[self.requests[tokens], positions // PAGE_SIZE].long()
        return page, positions % PAGE_SIZE

    def heads(self, copy: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of q, K and V."""
        heads = self.qkv[copy].view(self.row.num_tokens, -1, HEAD_DIM)
        end = NUM_QO_HEADS + NUM_KV_HEADS
        return heads[:, :NUM_QO_HEADS], heads[:, NUM_QO_HEADS:end], heads[:, end:]


def make_token_batch(row: TokenWorkload, copies: int, device: torch.device) -> TokenBatch:
    """Return random tokens, and pages in random order."""
    rng = torch.Generator(device).manual_seed(0)
    width = row.kv_len // PAGE_SIZE
    num_pages = row.batch_size * width
    order = torch.randperm(num_pages, generator=rng, device=device)
    q_len = row.num_tokens // row.batch_size
    kv_dtype = getattr(torch, row.kv_dtype)
    shape = num_pages, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM
    columns = (NUM_QO_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    starts = torch.arange(row.num_tokens, device=device) % q_len
    is_quantised = row.kv_dtype != "bfloat16"

    def cache() -> Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16, device=device).to(kv_dtype)

    return TokenBatch(
        row=row,
        qkv=[
            torch.randn((row.num_tokens, columns), generator=rng, device=device).bfloat16()
            for _ in range(copies)
        ],
        q_out=[
            torch.zeros(
                (row.num_tokens, NUM_QO_HEADS, HEAD_DIM), dtype=torch.bfloat16, device=device
            )
            for _ in range(copies)
        ],
        # The slots that are written differ by copy, where pools are large.
        caches=[(cache(), cache()) for _ in range(copies if row.num_tokens < 1000 else 1)],
        table=order.view(row.batch_size, width).int(),
        seq_lens=torch.full((row.batch_size,), row.kv_len, dtype=torch.int32, device=device),
        qo_indptr=torch.arange(row.batch_size + 1, device=device).int() * q_len,
        positions=(row.kv_len - q_len + starts).int(),
        k_scale=0.02 if is_quantised else None,
        v_scale=0.03 if is_quantised else None,
    )


def smaller(row: TokenWorkload) -> TokenWorkload:
    """Return a row like ``row`` that the definition has soon checked."""
    return dataclasses.replace(row, num_tokens=64, batch_size=4, kv_len=64)
