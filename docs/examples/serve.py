"""Continuous batching with chunked prefill and prefix reuse, on a card or, slowly, on the CPU.

Two models of random weights, one like Llama and one like Gemma 3 (five windowed layers to each full
one), answer the same requests with pages of ``jitattn.kv``. Prints memory and tokens a second. The
server in serving/ schedules with what is here.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

import jitattn
from jitattn.kv import KVCacheConfig, KVCacheManager, KVSequence, LayerConfig, PageIndexMode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, VOCABULARY = 4, 2, 32, 16, 500
HIDDEN, CHUNK, MAX_RUNNING = HEADS * HEAD_DIM, 64, 4
Batch = list[tuple["Request", list[int]]]


@dataclass(eq=False)
class Request:
    """A prompt, its generated tokens, and its pages while it runs."""

    tokens: list[int]
    num_wanted: int
    seq: KVSequence | None = None


@dataclass
class Step:
    """A batch for all layers: lengths, a table a layer, and a plan a window."""

    seq_lens: Tensor
    indptr: Tensor
    tables: dict[int, jitattn.BlockTable]
    plans: dict[int, jitattn.types.Plan]

    @classmethod
    def of(
        cls, manager: KVCacheManager, planners: dict[int, jitattn.AttentionPlanner], batch: Batch
    ) -> Step:
        seqs = [request.seq for request, _ in batch if request.seq is not None]
        sizes = [len(new) for _, new in batch]
        device = next(iter(planners.values())).device
        seq_lens = torch.tensor([seq.capacity for seq in seqs], dtype=torch.int32, device=device)
        step = cls(seq_lens, torch.tensor([0, *sizes]).cumsum(0).to(device, torch.int32), {}, {})
        for group in manager.layer_groups:
            pages = [jitattn.BlockTable(ids) for ids in manager.block_tables(seqs, group)]
            step.tables |= dict(zip(group.layer_ids, pages, strict=True))
            step.plans[group.window_left] = planners[group.window_left].plan(
                pages[0], seq_lens, step.indptr, max_q_len=max(sizes)
            )
        return step


class Model:
    """Attention layers with random weights, one planner for each window."""

    def __init__(self, windows: list[int], *, vocabulary: int = VOCABULARY) -> None:
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=generator) / shape[0] ** 0.5).bfloat16().to(DEVICE)

        self.windows = windows
        self.embedding, self.head = weight(vocabulary, HIDDEN), weight(HIDDEN, vocabulary)
        self.qkv = [weight(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM) for _ in windows]
        self.up = [weight(HIDDEN, 2 * HIDDEN) for _ in windows]
        self.down = [weight(2 * HIDDEN, HIDDEN) for _ in windows]
        self.rope = jitattn.Rope(HEAD_DIM, max_position=1 << 14)
        self.planners = {
            window: jitattn.AttentionPlanner(
                num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, page_size=PAGE_SIZE,
                window_left=window, device=DEVICE,
            )
            for window in set(windows)
        }  # fmt: skip

    def layers(self) -> list[LayerConfig]:
        return [
            LayerConfig(layer_id=i, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, window_left=window)
            for i, window in enumerate(self.windows)
        ]

    def forward(self, manager: KVCacheManager, batch: Batch) -> Tensor:
        """Compute the new tokens of each request; return logits of its next token."""
        step = Step.of(manager, self.planners, batch)
        x = self.embedding[torch.tensor([t for _, new in batch for t in new], device=DEVICE)]
        for i in range(len(self.windows)):
            cache = manager.layer_view(i, PageIndexMode.PER_LAYER).kv_cache
            x = x + self.attend(normed(x) @ self.qkv[i], cache, step, i).flatten(1)
            x = x + (normed(x) @ self.up[i]).relu() @ self.down[i]
        # In float32, to avoid ties between tokens.
        return normed(x[step.indptr[1:].long() - 1]).float() @ self.head.float()

    def attend(self, qkv: Tensor, cache: Tensor, step: Step, layer: int) -> Tensor:
        """Write this step's K and V of a layer, and attend."""
        pages = step.tables[layer]
        q = jitattn.preprocess_qkv(
            qkv, cache, num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, pages=pages,
            seq_lens=step.seq_lens, qo_indptr=step.indptr, rope=self.rope,
        )  # fmt: skip
        out = step.plans[self.windows[layer]].run(q, cache, pages=pages)
        assert isinstance(out, Tensor)
        return out


def normed(x: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:])


class Scheduler:
    """Decodes running requests, admits waiting ones, suspends the youngest when out of pages."""

    max_running = MAX_RUNNING
    chunk = CHUNK

    def __init__(self, model: Model, manager: KVCacheManager, requests: list[Request]) -> None:
        self.model, self.manager = model, manager
        self.waiting, self.running = deque(requests), list[Request]()
        self.num_computed = self.num_suspended = self.most_bytes = 0

    def admit(self) -> None:
        while self.waiting and len(self.running) < self.max_running:
            request = self.waiting[0]
            if request.seq is None:  # the last token is computed again, for its logits
                request.seq = self.manager.create_sequence(request.tokens[:-1])
            while not request.seq.resume():
                if self.running:
                    return
                self.forget_sleeper(besides=request)
            self.running.append(self.waiting.popleft())

    def grow(self) -> list[tuple[Request, list[int]]]:
        """Reserve pages for the next tokens of requests; suspend the youngest until they fit."""
        batch: list[tuple[Request, list[int]]] = []
        for request in list(self.running):
            if request not in self.running:
                break
            assert request.seq is not None
            history = request.seq.history_len
            new = request.tokens[history : history + self.chunk]
            while not request.seq.resize(history + len(new)):
                self.suspend_youngest()
                if request not in self.running:
                    break
            else:
                batch.append((request, new))
        return batch

    def suspend_youngest(self) -> None:
        if len(self.running) > 1:
            request = self.running.pop()
            assert request.seq is not None
            request.seq.suspend()
            self.waiting.appendleft(request)
            self.num_suspended += 1
            return
        self.forget_sleeper()

    def forget_sleeper(self, besides: Request | None = None) -> None:
        """Free the pages of the last waiting request that has some; it will be recomputed."""
        for request in reversed(self.waiting):
            if request.seq is not None and request is not besides:
                request.seq.close()
                request.seq = None
                return
        raise RuntimeError("one request alone needs more pages than there are")

    def step(self) -> None:
        self.admit()
        batch = self.grow()
        pools = self.manager.stats().pools
        self.most_bytes = max(self.most_bytes, sum(pool.used * pool.slot_bytes for pool in pools))
        following = self.model.forward(self.manager, batch).float().cpu()
        for (request, new), logits in zip(batch, following, strict=True):
            assert request.seq is not None
            request.seq.commit(new)
            self.num_computed += len(new)
            if request.seq.history_len == len(request.tokens):
                self.follow(request, logits)

    def follow(self, request: Request, logits: Tensor) -> None:
        """Append the best token; end requests that have all their tokens."""
        request.tokens.append(int(logits.argmax()))
        request.num_wanted -= 1
        if request.num_wanted == 0:
            self.end(request)

    def end(self, request: Request) -> None:
        assert request.seq is not None
        request.seq.close()
        self.running.remove(request)

    def run(self) -> None:
        while self.waiting or self.running:
            self.step()


def make_requests(count: int) -> list[Request]:
    """Return requests that share their first tokens, like a system prompt."""
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(VOCABULARY, (48,), generator=generator).tolist()
    lengths = torch.randint(10, 100, (count,), generator=generator).tolist()
    return [
        Request(shared + torch.randint(VOCABULARY, (n,), generator=generator).tolist(), 4)
        for n in lengths
    ]


def serve(name: str, windows: list[int], *, gpu_bytes: int, reuse_scratch: bool) -> list[list[int]]:
    """Answer the requests, print times, and return all tokens."""
    model = Model(windows)
    config = KVCacheConfig(
        page_size=PAGE_SIZE, gpu_bytes=gpu_bytes, host_bytes=gpu_bytes, layers=model.layers(),
        reuse_scratch=reuse_scratch, typical_len=128,
    )  # fmt: skip
    manager = KVCacheManager(config, device=DEVICE)
    requests = make_requests(6)
    scheduler = Scheduler(model, manager, requests)
    begun = time.perf_counter()
    scheduler.run()
    seconds = time.perf_counter() - begun
    stats = manager.stats()
    print(
        f"{name}: {scheduler.most_bytes / 1e3:.0f} of {gpu_bytes / 1e3:.0f} kB, "
        f"{scheduler.num_computed} tokens computed and {stats.reused_tokens} reused, "
        f"{scheduler.num_suspended} suspensions, "
        f"{scheduler.num_computed / seconds:.0f} tokens/s on {DEVICE}"
    )
    manager.close()
    return [request.tokens for request in requests]


if __name__ == "__main__":
    serve("like Llama", [-1] * 2, gpu_bytes=180_000, reuse_scratch=False)
    gemma = [15, 15, 15, 15, 15, -1]
    serve("like Gemma 3", gemma, gpu_bytes=300_000, reuse_scratch=False)
    serve("like Gemma 3, with scratch", gemma, gpu_bytes=300_000, reuse_scratch=True)
