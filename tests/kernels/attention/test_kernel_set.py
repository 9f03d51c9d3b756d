"""Which kernels of a planner are waited for, and when, with a builder that the test controls."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from jitattn.base.errors import CompileError, KernelNotFoundError
from jitattn.device.driver import DeviceFacts
from jitattn.jit.build import Kernel
from jitattn.kernels.attention.kernels import AttentionKernels
from jitattn.kernels.common import cuda_kernels, kernel_loader, tma
from jitattn.spec.config import PlannerConfig
from jitattn.spec.family import KernelSpec
from jitattn.tensors.cache_views import CacheView
from tests.emulator import launch_recorder
from tests.support.empty_kernel import empty_kernel

DEVICE = torch.device("cuda", 3)
CONFIG = PlannerConfig(head_dim=128)


@dataclass
class FakePending:
    """Stands for a kernel that is being built; knows how often it was waited for."""

    spec: KernelSpec
    was_found: bool
    error: CompileError | None = None
    num_waits: int = 0

    def result(self) -> Kernel:
        self.num_waits += 1
        if self.error is not None:
            raise self.error
        return empty_kernel(self.spec, origin="disk" if self.was_found else "compiled")


@dataclass
class FakeBuilder:
    """Stands for ``build.start``, and for what loads a kernel."""

    was_found: bool = False
    failing: str = "nothing"
    started: list[FakePending] = field(default_factory=list)
    loaded: list[tuple[str, int, int]] = field(default_factory=list)

    def start(
        self, specs: Sequence[KernelSpec], arch: str, knobs: object, *, hint: str
    ) -> tuple[FakePending, ...]:
        assert arch == "sm_90a"
        assert hint == "head_dim=128"
        error = CompileError("k", "error: no", "")
        pending = [
            FakePending(spec, self.was_found, error if spec.kernel == self.failing else None)
            for spec in specs
        ]
        self.started += pending
        return tuple(pending)

    def load(self, cubin: bytes, symbol: str, device_index: int, smem_bytes: int) -> object:
        self.loaded.append((symbol, device_index, threading.get_ident()))
        return object()

    def waited_for(self) -> list[str]:
        return [short(pending.spec) for pending in self.started if pending.num_waits]

    def loaded_kernels(self) -> list[str]:
        """What was loaded, in order, each on this thread and the right device."""
        assert {entry[1:] for entry in self.loaded} <= {(DEVICE.index, threading.get_ident())}
        names = {pending.spec.symbol: short(pending.spec) for pending in self.started}
        return [names[symbol] for symbol, _, _ in self.loaded]


def short(spec: KernelSpec) -> str:
    return f"{spec.kernel} {getattr(spec, 'loader', '')}".strip()


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> FakeBuilder:
    fake = FakeBuilder()
    facts = DeviceFacts(3, "card", (9, 0), num_sms=132, max_smem_bytes=232448)
    monkeypatch.setattr(cuda_kernels, "device_facts", lambda index: facts)
    monkeypatch.setattr(kernel_loader, "start", fake.start)
    monkeypatch.setattr(kernel_loader, "load_kernel", fake.load)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(tma, "encode_tensor_map", launch_recorder.encode_tensor_map)
    return fake


def view(row: int) -> CacheView:
    """Rows of 128 elements, ``row`` apart."""
    tensor = torch.empty(4, 16, 8, row, dtype=torch.bfloat16)[..., :128]
    return CacheView(tensor, *tensor.stride()[:3])


def bind(kernels: AttentionKernels, *, aligned: bool) -> kernel_loader.BoundKernels:
    cache = view(128 if aligned else 129)
    bound, maps = kernels.bind(cache, cache)
    assert (maps is not None) == aligned
    return bound


def test_the_constructor_waits_for_decode_and_schedule(builder: FakeBuilder) -> None:
    kernels = AttentionKernels(CONFIG, DEVICE)
    assert [short(p.spec) for p in builder.started] == [
        "decode tensor",
        "schedule",
        "prefill tensor",
        "decode tensor",  # the wide one
    ]
    assert builder.waited_for() == ["decode tensor", "schedule"]
    assert sorted(builder.loaded_kernels()) == ["decode tensor", "schedule"]
    kernels.loader.need("prefill")
    assert builder.loaded_kernels()[2:] == ["prefill tensor"]


def test_what_was_found_is_loaded_at_once(builder: FakeBuilder) -> None:
    builder.was_found = True
    kernels = AttentionKernels(CONFIG, DEVICE)
    decode = "decode tensor"
    assert sorted(builder.loaded_kernels()) == [decode, decode, "prefill tensor", "schedule"]
    bind(kernels, aligned=False)
    assert sorted(builder.loaded_kernels()[4:]) == ["decode plain"] * 2 + ["prefill plain"]


def test_bind_waits_for_the_decode_kernel_alone(builder: FakeBuilder) -> None:
    kernels = AttentionKernels(CONFIG, DEVICE)
    assert bind(kernels, aligned=True) is kernels.kernels
    assert len(builder.started) == 4
    bound = bind(kernels, aligned=False)
    assert bound is bind(kernels, aligned=False)
    assert builder.loaded_kernels()[2:] == ["decode plain"]
    assert len(builder.started) == 7
    assert bound.decode.load() is not kernels.kernels.decode.load()


def test_strides_that_the_driver_maps_not_are_for_the_plain_loader(
    builder: FakeBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = AttentionKernels(CONFIG, DEVICE)
    cache = view(128)
    monkeypatch.setattr(tma, "encode_tensor_map", lambda *given, **named: None)
    bound, maps = kernels.bind(cache, cache)
    assert maps is None
    assert bound is bind(kernels, aligned=False)
    assert builder.loaded_kernels()[2:] == ["decode plain"]


def test_a_plan_with_prefill_loads_it_for_every_cache(builder: FakeBuilder) -> None:
    """So that a captured run, of a cache bound before or after, loads nothing."""
    bound_before = AttentionKernels(CONFIG, DEVICE)
    bind(bound_before, aligned=False)
    bound_before.loader.need("prefill")
    assert builder.loaded_kernels()[3:] == ["prefill tensor", "prefill plain"]
    builder.started.clear()
    builder.loaded.clear()
    bound_after = AttentionKernels(CONFIG, DEVICE)
    bound_after.loader.need("prefill")
    bind(bound_after, aligned=False)
    assert builder.loaded_kernels()[2:] == ["prefill tensor", "decode plain", "prefill plain"]
    num_loaded = len(builder.loaded)
    bound_after.loader.need("prefill")
    assert len(builder.loaded) == num_loaded


def test_infos_wait_for_all(builder: FakeBuilder) -> None:
    kernels = AttentionKernels(CONFIG, DEVICE)
    assert [info.origin for info in kernels.infos()] == ["compiled"] * 4
    bind(kernels, aligned=False)
    infos = kernels.infos()
    assert [info.name for info in infos] == [p.spec.symbol for p in builder.started]
    assert builder.waited_for() == [short(p.spec) for p in builder.started]
    decode_bytes = kernels.kernels.decode.tile.smem_bytes
    assert [info.smem_bytes for info in infos[:2]] == [16 + decode_bytes, 16]
    assert len(builder.loaded) == 3  # knowing is not loading


def test_a_failure_is_told_at_each_question_and_decode_works(builder: FakeBuilder) -> None:
    builder.failing = "prefill"
    kernels = AttentionKernels(CONFIG, DEVICE)
    assert bind(kernels, aligned=True).decode.load() is not None
    need = functools.partial(kernels.loader.need, "prefill")
    for ask in [need, kernels.infos, kernels.kernels.prefill.load] * 2:
        with pytest.raises(CompileError):
            ask()
    # And further caches can be bound.
    for aligned in (True, False):
        assert bind(kernels, aligned=aligned).decode.load() is not None


def test_a_failing_decode_kernel_fails_the_constructor(builder: FakeBuilder) -> None:
    builder.failing = "decode"
    with pytest.raises(CompileError):
        AttentionKernels(CONFIG, DEVICE)


def test_many_threads_bind_and_plan(builder: FakeBuilder) -> None:
    kernels = AttentionKernels(CONFIG, DEVICE)
    barrier = threading.Barrier(8)
    bound: list[kernel_loader.BoundKernels] = []

    def work(number: int) -> None:
        barrier.wait()
        for aligned, _ in itertools.product((True, False), range(20)):
            bound.append(bind(kernels, aligned=aligned))
            if number % 2:
                kernels.loader.need("prefill")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(found) for found in bound}) == 2
    assert len(builder.started) == 7


def test_without_jit_the_constructor_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = DeviceFacts(0, "card", (9, 0), num_sms=132, max_smem_bytes=232448)
    monkeypatch.setattr(cuda_kernels, "device_facts", lambda index: facts)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setenv("JITATTN_JIT", "0")
    with pytest.raises(KernelNotFoundError, match="--config head_dim=128"):
        AttentionKernels(CONFIG, torch.device("cuda", 0))
