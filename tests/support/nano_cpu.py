"""nano-vllm's engine on the CPU, which knows only cards: scheduler, blocks, runner, model, sampler.

Its runner gets a torch whose cards are the CPU, and its Triton kernel that writes K and V by slots
is a copy by index. All else is nano-vllm's own; it decodes without graphs.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.support import nano

# What the engine is told that a card has, of which it takes a part for its blocks.
MEMORY = 160 << 20


def store_kvcache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache.flatten(0, 1)[slots.long()] = new


class HostTorch:
    """torch, as far as the runner asks of it."""

    cuda = SimpleNamespace(
        set_device=lambda rank: None,
        synchronize=lambda: None,
        empty_cache=lambda: None,
        reset_peak_memory_stats=lambda: None,
        mem_get_info=lambda: (MEMORY, MEMORY),
        memory_stats=lambda: {"allocated_bytes.all.current": 0},
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def set_default_device(self, device: str) -> None:
        """Leave the CPU the default."""

    def zeros(self, *sizes: int, pin_memory: bool = False, **given: Any) -> Tensor:
        return torch.zeros(*sizes, **given)

    def tensor(self, values: Any, *, pin_memory: bool = False, **given: Any) -> Tensor:
        return torch.tensor(values, **given)


class HostGroups:
    """torch.distributed, likewise."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.distributed, name)

    def init_process_group(self, backend: str, *others: Any, **given: Any) -> None:
        assert backend == "nccl"
        torch.distributed.init_process_group("gloo", *others, **given)


def be_on_the_cpu() -> None:
    """Let the engine that was imported run here."""
    runner: Any = importlib.import_module("nanovllm.engine.model_runner")
    runner.torch, runner.dist = HostTorch(), HostGroups()
    layer: Any = importlib.import_module("nanovllm.layers.attention")
    layer.store_kvcache = store_kvcache


@contextmanager
def cards_are_the_cpu() -> Iterator[None]:
    with mock.patch.object(Tensor, "cuda", lambda self, **given: self):
        yield


def decode(folder: Any, prompts: list[list[int]], num_new: int, *, compiled: bool) -> nano.Run:
    """Decode greedily through jitattn."""
    with cards_are_the_cpu():
        return nano.decode(
            *(folder, nano.JitAttn(), prompts, num_new),
            compiled=compiled, prepare=be_on_the_cpu, enforce_eager=True,
        )  # fmt: skip
