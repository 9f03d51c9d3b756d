"""``--context-parallel N``: the tokens of each sequence lie over N processes, a card each.

Rank 0 answers requests. Calls that change its page manager, and batches, are told to the others,
which make the same calls: so pages have the same ids on each, and all compute the same batch. Each
rank attends with its own heads, and gathers those of the others.
"""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import jitattn
from docs.examples.serve import DEVICE, HEAD_DIM, HEADS, KV_HEADS, PAGE_SIZE, Batch, Request, Step
from docs.examples.serving.models import RandomModel
from jitattn.kv import KVCacheConfig, KVCacheManager, KVSequence, LayerConfig, Stats
from jitattn.parallel import ContextParallel

CHUNK = 16  # causal query tokens of a request, at most


class RankPlanner:
    """The planner of a rank for `Step.of`."""

    def __init__(self, cp: ContextParallel, planner: jitattn.AttentionPlanner) -> None:
        self.device, self._cp, self._planner = planner.device, cp, planner

    def plan(self, *arguments: Any, **others: Any) -> object:
        return self._cp.plan(self._planner, *arguments, **others)


class RankModel(RandomModel):
    """The random model, of which this rank attends with its own heads."""

    def __init__(self, cp: ContextParallel) -> None:
        super().__init__([-1, -1, -1])
        self.cp = cp
        self.planners: Any = {-1: RankPlanner(cp, self.planners[-1])}

    def attend(self, qkv: Tensor, cache: Any, step: Step, layer: int) -> Tensor:
        cp, pages = self.cp, step.tables[layer]
        info = jitattn.batch_info(
            step.seq_lens, step.indptr.diff(), num_tokens=qkv.shape[0], pages=pages,
            page_size=PAGE_SIZE * cp.num_ranks,
        )  # fmt: skip
        assert info.slots is not None
        q = jitattn.preprocess_qkv(
            qkv, cache, num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
            slots=cp.local_slots(info.slots), positions=info.positions, rope=self.rope,
        )  # fmt: skip
        own = q.chunk(cp.num_ranks, dim=1)[cp.rank]
        out: Any = step.plans[-1].run(own, cache, pages=pages)
        outs = [torch.empty_like(out) for _ in range(cp.num_ranks)]
        dist.all_gather(outs, out.contiguous())
        return torch.cat(outs, dim=1)


class Rank:
    """A model, a page manager and its sequences by number: of rank 0, and the same of others."""

    def __init__(self, rank: int, num_ranks: int, url: str, sizes: dict[str, int]) -> None:
        backend = "cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo"
        if DEVICE == "cuda":
            torch.cuda.set_device(rank)
        else:
            torch.set_num_threads(max(torch.get_num_threads() // num_ranks, 1))
        dist.init_process_group(backend, init_method=url, rank=rank, world_size=num_ranks)
        self.model = RankModel(ContextParallel(page_size=PAGE_SIZE))
        config = KVCacheConfig(
            page_size=PAGE_SIZE, layers=self.model.layers(), num_ranks=num_ranks, **sizes
        )
        self.manager = KVCacheManager(config, device=DEVICE)
        self.seqs: dict[int, KVSequence] = {}

    def do(self, name: str, number: int, *arguments: Any) -> Any:
        """Make one call: of sequence ``number``, which is new in the first two, or of the model."""
        if name == "create_sequence":
            self.seqs[number] = self.manager.create_sequence(*arguments)
        elif name == "fork":
            self.seqs[number] = self.seqs[arguments[0]].fork()
        elif name == "forward":
            batch = [(Request([], 0, self.seqs[n]), tokens) for n, tokens in arguments[0]]
            return self.model.forward(self.manager, batch)
        elif name == "close":
            self.seqs.pop(number).close()
        elif name == "end":
            self.manager.close()
            dist.destroy_process_group()
        else:
            return getattr(self.seqs[number], name)(*arguments)
        return None


class LedSequence:
    """A sequence of rank 0: what changes it is told to the other ranks."""

    def __init__(self, leader: Leader, number: int, seq: KVSequence) -> None:
        self.number, self._leader, self._seq = number, leader, seq

    def fork(self) -> LedSequence:
        return self._leader.numbered("fork", self.number)

    def __getattr__(self, name: str) -> Any:
        if name in ("resume", "resize", "commit", "suspend", "close"):
            return lambda *arguments: self._leader.tell(name, self.number, *arguments)
        return getattr(self._seq, name)


class Leader:
    """Rank 0, for an engine both its page manager and its model."""

    chunk = CHUNK
    max_position = RandomModel.max_position

    def __init__(self, rank: Rank, pipes: list[Connection], end: Callable[[], None]) -> None:
        self._rank, self._pipes, self._end, self._count = rank, pipes, end, 0

    def tell(self, name: str, number: int, *arguments: Any) -> Any:
        """Make a call on every rank, and return what it returned on this one."""
        for pipe in self._pipes:
            pipe.send((name, number, *arguments))
        return self._rank.do(name, number, *arguments)

    def numbered(self, name: str, *arguments: Any) -> LedSequence:
        """Make a sequence on every rank, of one number."""
        self._count += 1
        self.tell(name, self._count, *arguments)
        return LedSequence(self, self._count, self._rank.seqs[self._count])

    def create_sequence(self, prompt: list[int] | None = None) -> LedSequence:
        return self.numbered("create_sequence", prompt)

    def layers(self) -> list[LayerConfig]:
        return self._rank.model.layers()

    def stats(self) -> Stats:
        return self._rank.manager.stats()

    def forward(self, manager: object, batch: Batch) -> Tensor:
        del manager
        told = [(request.seq.number, new) for request, new in batch]  # type: ignore[union-attr]
        logits = self.tell("forward", -1, told)
        assert isinstance(logits, Tensor)
        return logits

    def close(self) -> None:
        """End all ranks."""
        try:
            self.tell("end", -1)
        finally:
            self._end()


def start_ranks(num_ranks: int, **sizes: int) -> Leader:
    """Start the other ranks, and return the first.

    Raises:
        OSError: so many ranks can't share the cards or heads that there are.
    """
    cards = torch.cuda.device_count() if DEVICE == "cuda" else num_ranks
    if num_ranks < 1 or HEADS % num_ranks or num_ranks > cards:
        raise OSError(f"--context-parallel {num_ranks}: there are {HEADS} heads and {cards} cards")
    folder = tempfile.mkdtemp()
    url = f"file://{folder}/store"
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(1, num_ranks):
        theirs, ours = context.Pipe(duplex=False)
        process = context.Process(
            target=_follow, args=(theirs, rank, num_ranks, url, sizes), daemon=True
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)

    def end() -> None:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join()
        shutil.rmtree(folder, ignore_errors=True)

    return Leader(Rank(0, num_ranks, url, sizes), pipes, end)


def _follow(pipe: Connection, *arguments: Any) -> None:
    """Do what rank 0 does, until it ends or is gone."""
    rank = Rank(*arguments)
    while True:
        try:
            call = pipe.recv()
        except EOFError:
            return
        rank.do(*call)
