"""Pages of caches in four bits, as a page manager moves them: to the host, to forks, to copies."""

from __future__ import annotations

import torch
from torch import Tensor

import jitattn
from jitattn.kernels.preprocess.spec import PreprocessConfig
from jitattn.kv import KVCacheConfig, KVCacheManager, KVSequence, LayerConfig, PageIndexMode
from tests.support.token_cases import bits

KV_DTYPES = ("nvfp4", "int4", "int4_g32")
NUM_HEADS, HEAD_DIM, PAGE_SIZE = 2, 64, 4


def gpu_configs() -> list[PreprocessConfig]:
    """What tests/gpu/test_kv.py launches of this besides copies, for a bundle."""
    return [
        PreprocessConfig(head_dim=HEAD_DIM, page_size=PAGE_SIZE, kv_dtype=kv_dtype, pairing="none")
        for kv_dtype in KV_DTYPES
    ]


class Journal:
    """A manager of few slots, and the values of every token that its sequences hold."""

    def __init__(self, kv_dtype: str, device: str, *, kv_layout: str, seed: int = 0) -> None:
        self.kv_dtype, self.device, self.kv_layout = kv_dtype, device, kv_layout
        self._rng = torch.Generator().manual_seed(seed)
        layers = [
            LayerConfig(layer_id=i, num_kv_heads=NUM_HEADS, head_dim=HEAD_DIM, dtype=kv_dtype)
            for i in range(2)
        ]
        slot_bytes = sum(sum(layer.part_bytes(PAGE_SIZE)) for layer in layers)
        self.manager = KVCacheManager(
            KVCacheConfig(
                page_size=PAGE_SIZE, gpu_bytes=7 * slot_bytes, host_bytes=9 * slot_bytes,
                layers=layers, kv_layout=kv_layout,
            ),
            device=device,
        )  # fmt: skip
        for region in self.manager.regions(0):
            region.memory.fill_(0xFF)
        # [2 (K and V), tokens, heads, head_dim] of each layer.
        self.values: dict[KVSequence, list[Tensor]] = {}
        self.tokens: dict[KVSequence, list[int]] = {}
        self._num_written = 0

    def write(self, seq: KVSequence, num_tokens: int) -> None:
        """Have the manager make room for so many tokens more, and write them into all layers."""
        begin = seq.history_len
        assert seq.resize(begin + num_tokens)
        none = torch.empty(2, 0, NUM_HEADS, HEAD_DIM, dtype=torch.bfloat16)
        old = self.values.get(seq, [none, none])
        seq_lens = torch.tensor([begin + num_tokens], dtype=torch.int32, device=self.device)
        qo_indptr = torch.tensor([0, num_tokens], dtype=torch.int32, device=self.device)
        self.values[seq] = []
        for layer, before in enumerate(old):
            shape = (2, num_tokens, NUM_HEADS, HEAD_DIM)
            # Scales of blocks differ much.
            size = 2.0 ** torch.randint(-4, 5, shape[:-1], generator=self._rng)[..., None]
            new = (size * torch.randn(shape, generator=self._rng)).bfloat16()
            self.values[seq].append(torch.cat([before, new], dim=1))
            view = self.manager.layer_view(layer, PageIndexMode.SHARED)
            jitattn.append_kv(
                *new.to(self.device), view.kv_cache, pages=view.block_table([seq]),
                seq_lens=seq_lens, qo_indptr=qo_indptr, kv_layout=self.kv_layout,
            )  # fmt: skip
        # No two sequences have the same tokens.
        tokens = range(self._num_written, self._num_written + num_tokens)
        self._num_written += num_tokens
        self.tokens[seq] = [*self.tokens.get(seq, []), *tokens]
        seq.commit(tokens)

    def fork(self, seq: KVSequence) -> KVSequence:
        """Return a fork, which has the same values."""
        child = seq.fork()
        self.copy(seq, child)
        return child

    def copy(self, seq: KVSequence, other: KVSequence) -> None:
        """Expect of ``other`` what ``seq`` has."""
        self.values[other], self.tokens[other] = self.values[seq], self.tokens[seq]

    def check(self, seq: KVSequence) -> None:
        """Compare every byte of numbers and scales with the definition's."""
        for layer, values in enumerate(self.values[seq]):
            view = self.manager.layer_view(layer, PageIndexMode.SHARED)
            cache = view.kv_cache
            assert isinstance(cache, jitattn.QuantizedKV)
            pages = view.block_table([seq]).table[0].long()
            for side, stored in enumerate(values):
                want = jitattn.quant.quantize_kv(stored, self.kv_dtype)
                for part, right in zip(cache.tensors[side::2], want, strict=True):
                    # Of bytes: not every type has indexing on a card.
                    rows = part if part.element_size() > 1 else part.view(torch.uint8)
                    rows = rows.transpose(1, 2) if self.kv_layout == "HND" else rows
                    found = rows[pages].flatten(0, 1)[: len(right)]
                    assert torch.equal(bits(found.cpu()), bits(right)), (layer, side)


def check_pages_that_move(kv_dtype: str, device: str, kv_layout: str) -> None:
    """Sequences that make way for each other, fork, are found again and go on keep all bytes."""
    journal = Journal(kv_dtype, device, kv_layout=kv_layout)
    manager = journal.manager
    one, two = (manager.create_sequence() for _ in range(2))
    assert one.resume()
    journal.write(one, 18)
    one.suspend()
    assert two.resume()
    journal.write(two, 22)  # 6 of 7 slots: pages of the first go to the host
    journal.check(two)
    two.suspend()
    assert one.resume()
    journal.check(one)
    child = journal.fork(one)
    journal.write(one, 1)
    journal.write(child, 3)  # into copies of the page that both had
    for seq in (one, child):
        journal.check(seq)
        seq.suspend()
    assert two.resume()
    journal.write(two, 3)
    journal.check(two)
    two.close()
    for seq in (child, one):
        assert seq.resume()
        journal.check(seq)
        seq.suspend()
    child.close()
    one.close()
    again = manager.create_sequence(journal.tokens[one])
    assert again.history_len == 19
    assert again.resume()
    journal.copy(one, again)
    journal.write(again, 2)  # into a copy of the last page
    journal.check(again)
    stats = manager.stats()
    assert min(stats.offloaded_pages, stats.reloaded_pages) >= 10
    assert stats.copied_pages >= 2
