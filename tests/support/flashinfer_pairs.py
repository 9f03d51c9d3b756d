"""Calls that FlashInfer and its stand-in both take, drawn at random, and the kernels they need."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jitattn.kernels.preprocess.spec import SLOTS, PreprocessConfig
from jitattn.kernels.registry import specs_of
from jitattn.spec.config import MLAConfig, PlannerConfig
from tests.support.scattered import indptr_of

HEAD_DIM, PAGE_SIZE, LATENT = 128, 16, (512, 64)
MLA_HEADS = 16
GROUPS = (1, 4)


def gpu_configs(arch: str) -> list[PlannerConfig | MLAConfig | PreprocessConfig]:
    """What tests/gpu/test_compat_flashinfer.py launches, for a bundle."""
    found: dict[object, PlannerConfig] = {}
    for table, cap, mask, group in itertools.product(
        ("csr", "ragged", "shared"), (0.0, 30.0), (False, True), GROUPS
    ):
        if (table == "shared" and (cap or mask)) or (cap and mask):
            continue
        config = PlannerConfig(
            num_qo_heads=2 * group,
            num_kv_heads=2,
            head_dim=HEAD_DIM,
            page_size=None if table == "ragged" else PAGE_SIZE,
            page_table=table,
            logits_soft_cap=cap,
            use_custom_mask=mask,
        )
        found.setdefault(specs_of(config, arch), config)
    latent = MLAConfig(
        num_heads=MLA_HEADS,
        kv_lora_rank=LATENT[0],
        qk_rope_head_dim=LATENT[1],
        page_size=PAGE_SIZE,
        page_table="csr",
    )
    writer = PreprocessConfig(
        head_dim=HEAD_DIM, page_size=PAGE_SIZE, pairing="none", page_table=SLOTS
    )
    return [*found.values(), latent, writer]


@dataclass(frozen=True)
class Pair:
    """A call: given a package, it returns tensors to compare."""

    name: str
    seed: int
    call: Callable[[Any, random.Random, str], list[Tensor]]  # of a package, on a device

    def __str__(self) -> str:
        return f"{self.name}-{self.seed}"

    def results(self, package: object, device: str) -> list[Tensor]:
        """Call the package with what the seed draws, on a device."""
        return self.call(package, random.Random(self.seed), device)


def pairs() -> list[Pair]:
    """Forty of them."""
    counts = {"decode": 10, "prefill": 10, "ragged": 6, "mla": 4, "append": 3, "merge": 3, "xqa": 4}
    return [Pair(name, i, _CALLS[name]) for name, n in counts.items() for i in range(n)]


def normal(rng: random.Random, device: str, *shape: int) -> Tensor:
    """Bfloat16 numbers that are the same on every device."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    return torch.randn(*shape, generator=generator).bfloat16().to(device)


def workspace(device: str) -> Tensor:
    """As much as FlashInfer recommends, and on the CPU, where nothing uses it, next to nothing."""
    size = 1024 if device == "cpu" else 128 * 2**20
    return torch.zeros(size, dtype=torch.uint8, device=device)


@dataclass
class Pages:
    """Requests of some lengths and their pages."""

    lens: list[int]
    indptr: Tensor
    indices: Tensor
    last: Tensor

    @classmethod
    def of(cls, rng: random.Random, lens: list[int], device: str) -> Pages:
        """With pages of each that lie anywhere."""
        counts = [-(-n // PAGE_SIZE) for n in lens]
        ids = torch.tensor(rng.sample(range(sum(counts)), sum(counts)), dtype=torch.int32)
        last = torch.tensor([(n - 1) % PAGE_SIZE + 1 for n in lens], dtype=torch.int32)
        return cls(lens, indptr_of(counts).to(device), ids.to(device), last.to(device))

    def cache(self, rng: random.Random, device: str, layout: str, heads: int = 2) -> Tensor:
        """One tensor of K and V."""
        middle = (PAGE_SIZE, heads) if layout == "NHD" else (heads, PAGE_SIZE)
        return normal(rng, device, self.indices.shape[0], 2, *middle, HEAD_DIM)

    def table(self) -> Tensor:
        """The same as a block table."""
        rows = self.indices.split(self.indptr.diff().tolist())
        return torch.nn.utils.rnn.pad_sequence([*rows], batch_first=True)


def lengths(rng: random.Random, least: int = 1) -> list[int]:
    """One to six lengths."""
    return [rng.choice([least, rng.randint(least, 700)]) for _ in range(rng.randint(1, 6))]


def scores(rng: random.Random) -> dict[str, object]:
    """A window, a cap and a scale."""
    return {
        "window_left": rng.choice([-1, -1, 5, 200]),
        "logits_soft_cap": rng.choice([None, 30.0]),
        "sm_scale": rng.choice([None, 0.1]),
    }


_TYPES = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}


def _decode(package: Any, rng: random.Random, device: str) -> list[Tensor]:
    lens, layout, group = lengths(rng), rng.choice(["NHD", "HND"]), rng.choice(GROUPS)
    pages = Pages.of(rng, lens, device)
    wrapper = package.BatchDecodeWithPagedKVCacheWrapper(
        workspace(device), layout, use_tensor_cores=group > 1, backend="fa2"
    )
    tables = pages.indptr, pages.indices, pages.last
    wrapper.plan(*tables, 2 * group, 2, HEAD_DIM, PAGE_SIZE, **scores(rng), **_TYPES)
    q = normal(rng, device, len(lens), 2 * group, HEAD_DIM)
    return list(wrapper.run(q, pages.cache(rng, device, layout), return_lse=True))


def _draw_mask(rng: random.Random, q_lens: list[int], lens: list[int]) -> Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    size = sum(a * b for a, b in zip(q_lens, lens, strict=True))
    return torch.rand(size, generator=generator) < 0.7


def _prefill(package: Any, rng: random.Random, device: str) -> list[Tensor]:
    lens, layout, group = lengths(rng), rng.choice(["NHD", "HND"]), rng.choice(GROUPS)
    q_lens = [rng.randint(1, min(n, 60)) for n in lens]
    pages = Pages.of(rng, lens, device)
    wrapper = package.BatchPrefillWithPagedKVCacheWrapper(workspace(device), layout, backend="fa2")
    given = scores(rng)
    if rng.random() < 0.4:
        given = {"custom_mask": _draw_mask(rng, q_lens, lens).to(device)}
    wrapper.plan(
        *(indptr_of(q_lens).to(device), pages.indptr, pages.indices, pages.last),
        *(2 * group, 2, HEAD_DIM, PAGE_SIZE),
        causal=True,
        **given,
        **_TYPES,
    )
    q = normal(rng, device, sum(q_lens), 2 * group, HEAD_DIM)
    return list(wrapper.run(q, pages.cache(rng, device, layout), return_lse=True))


def _ragged(package: Any, rng: random.Random, device: str) -> list[Tensor]:
    lens, group = lengths(rng), rng.choice(GROUPS)
    q_lens = [rng.randint(1, min(n, 60)) for n in lens]
    wrapper = package.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), backend="fa2")
    given = scores(rng)
    if rng.random() < 0.4:
        given = {"custom_mask": _draw_mask(rng, q_lens, lens).to(device)}
    offsets = (indptr_of(x).to(device) for x in (q_lens, lens))
    wrapper.plan(*offsets, 2 * group, 2, HEAD_DIM, causal=True, **given, **_TYPES)
    q = normal(rng, device, sum(q_lens), 2 * group, HEAD_DIM)
    k, v = (normal(rng, device, sum(lens), 2, HEAD_DIM) for _ in range(2))
    return list(wrapper.run(q, k, v, return_lse=True))


def _mla(package: Any, rng: random.Random, device: str) -> list[Tensor]:
    lens = lengths(rng, least=4)
    q_lens = [rng.randint(1, 4) for _ in lens]
    pages = Pages.of(rng, lens, device)
    wrapper = package.BatchMLAPagedAttentionWrapper(workspace(device), backend="fa2")
    tables = (
        *(indptr_of(q_lens).to(device), pages.indptr, pages.indices),
        torch.tensor(lens, dtype=torch.int32, device=device),
    )
    plan = {
        "num_heads": MLA_HEADS,
        "head_dim_ckv": LATENT[0],
        "head_dim_kpe": LATENT[1],
        "page_size": PAGE_SIZE,
        "causal": True,
        "sm_scale": 192**-0.5,
        **_TYPES,
    }
    layouts = {"query_layout": "split", "kv_cache_layout": "split", "lse_mode": "base2"}
    wrapper.plan(metadata=package.MLAPlanMetadata.csr(*tables), **plan, **layouts)
    query = tuple(normal(rng, device, sum(q_lens), MLA_HEADS, dim) for dim in LATENT)
    num_pages = pages.indices.shape[0]
    cache = tuple(normal(rng, device, num_pages, PAGE_SIZE, dim) for dim in LATENT)
    return list(wrapper.run(query=query, kv_cache=cache, return_lse=True))


def _append(package: Any, rng: random.Random, device: str) -> list[Tensor]:
    lens, layout = lengths(rng), rng.choice(["NHD", "HND"])
    # Some token at least: FlashInfer's launch for none is one that CUDA refuses.
    lens[0] = max(lens[0], 1)
    new = [rng.randint(min(n, 1), n) for n in lens]
    pages = Pages.of(rng, lens, device)
    seq_lens = package.get_seq_lens(pages.indptr, pages.last, PAGE_SIZE)
    indices = package.get_batch_indices_positions(indptr_of(new).to(device), seq_lens, sum(new))
    cache = pages.cache(rng, device, layout)
    k, v = (normal(rng, device, sum(new), 2, HEAD_DIM) for _ in range(2))
    tables = pages.indices, pages.indptr, pages.last
    package.append_paged_kv_cache(k, v, *indices, cache, *tables, layout)
    return [cache, seq_lens, *indices]


def _merge(package: Any, rng: random.Random, device: str) -> list[Tensor]:
    num_tokens, num_states = rng.randint(1, 70), rng.choice([2, 5])
    v = normal(rng, device, num_tokens, num_states, 4, HEAD_DIM)
    s = normal(rng, device, num_tokens, num_states, 4).float() * 4
    whole = package.merge_states(v, s)
    parts = [x[:, i].contiguous() for i in range(2) for x in (v, s)]
    pair = package.merge_state(*parts)
    mask = (normal(rng, device, num_tokens) > 0).contiguous()
    own = parts[0].clone(), parts[1].clone()
    package.merge_state_in_place(*own, parts[2], parts[3], mask)
    return [*whole, *pair, *own]


def _xqa(package: Any, rng: random.Random, device: str) -> list[Tensor]:
    lens, layout, group = lengths(rng), rng.choice(["NHD", "HND"]), 4
    pages = Pages.of(rng, lens, device)
    q = normal(rng, device, len(lens), 2 * group, HEAD_DIM)
    cache = pages.cache(rng, device, layout)
    out = package.trtllm_batch_decode_with_kv_cache(
        q,
        (cache[:, 0], cache[:, 1]),
        workspace(device),
        pages.table(),
        torch.tensor(lens, dtype=torch.int32, device=device),
        max(lens),
        bmm1_scale=HEAD_DIM**-0.5,
        bmm2_scale=1.0,
        window_left=rng.choice([-1, 200]),
        kv_layout=layout,
    )
    return [out]


_CALLS = {
    "decode": _decode,
    "prefill": _prefill,
    "ragged": _ragged,
    "mla": _mla,
    "append": _append,
    "merge": _merge,
    "xqa": _xqa,
}
