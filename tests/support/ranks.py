"""Ranks as processes on this machine: ``run_ranks`` calls a function in each of a gloo group.

They are forked from a server that has imported torch once. Whatever a rank does, ``run_ranks``
ends: after ``limit_s`` it kills those that are left.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__, "tests.support.contexts", "tests.support.rank_jobs"])
GONE = "gone"


def run_ranks(
    num_ranks: int,
    job: Callable[..., object],
    *arguments: object,
    backend: str = "gloo",
    timeout_s: float = 60,
    limit_s: float = 240,
) -> list[Any]:
    """Return what ``job(rank, *arguments)`` returned or raised, of each rank.

    Args:
        num_ranks: how many processes.
        job: a function of a module, which a group is there for.
        arguments: what can be pickled.
        backend: of the group.
        timeout_s: of the group.
        limit_s: after which this raises.

    Returns:
        By rank the value, the exception, or ``GONE`` for a process that ended without either.

    Raises:
        TimeoutError: a rank was still running.
    """
    with tempfile.TemporaryDirectory() as folder:
        url = f"file://{Path(folder) / 'store'}"
        pairs = [_CONTEXT.Pipe(duplex=False) for _ in range(num_ranks)]
        processes = [
            _CONTEXT.Process(
                target=_main,
                args=(sender, _Group(backend, url, rank, num_ranks, timeout_s), job, arguments),
            )
            for rank, (_, sender) in enumerate(pairs)
        ]
        for process, (_, sender) in zip(processes, pairs, strict=True):
            process.start()
            sender.close()
        deadline = time.monotonic() + limit_s
        try:
            return [_received(receiver, deadline) for receiver, _ in pairs]
        finally:
            for process in processes:
                process.join(max(deadline - time.monotonic(), 0.1) if process.is_alive() else 1)
                process.kill()
                process.join()


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch to one thread: beside other processes, more of them mostly wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def values(results: list[Any]) -> list[Any]:
    """Return results, none of which is an exception; else raise the first."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    assert GONE not in [result for result in results if isinstance(result, str)]
    return results


@dataclass
class _Group:
    """What a rank joins; and the settings of the process that starts it, as the server's differ."""

    backend: str
    url: str
    rank: int
    num_ranks: int
    timeout_s: float
    environ: dict[str, str] = field(
        default_factory=lambda: {k: v for k, v in os.environ.items() if k.startswith("JITATTN_")}
    )


def _received(receiver: Connection, deadline: float) -> object:
    if not receiver.poll(max(deadline - time.monotonic(), 0)):
        raise TimeoutError("a rank is still running")
    try:
        return pickle.loads(receiver.recv_bytes())
    except EOFError:
        return GONE


def _main(
    sender: Connection,
    group: _Group,
    job: Callable[..., object],
    arguments: tuple[object, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.update(group.environ)
    dist.init_process_group(
        group.backend,
        init_method=group.url,
        rank=group.rank,
        world_size=group.num_ranks,
        timeout=timedelta(seconds=group.timeout_s),
    )
    dist.barrier()  # a rank that ends at once would break connections that others still make
    try:
        found: object = job(group.rank, *arguments)
    except Exception as error:
        found = error
    sender.send_bytes(pickle.dumps(found))  # send shares the memory of tensors, which goes
    sender.close()
    dist.destroy_process_group()
