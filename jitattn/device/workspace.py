"""Workspaces: device memory for partial results and counters, shared by kernels of one stream."""

from __future__ import annotations

import threading
from typing import NoReturn

import torch

from jitattn.base.errors import ConfigError
from jitattn.base.validate import shown

SLICE_BYTES = 256
"""Alignment of the parts of a workspace."""


class Workspace:
    """Device memory for partial results of KV splits, which grows on demand and never shrinks.

    Consecutive kernels, decode and prefill alike, may share one; concurrent streams need one each.
    A plan keeps the buffers it was made with. It needs no clearing: kernels leave the counters at
    zero, and write everything else before they read it.

    Attributes:
        device: the CUDA device of the buffers.
        partials: float32, partial outputs and sums of KV splits; undefined between launches.
        counters: int32, one per work slot and head block; zero between launches.
    """

    def __init__(self, device: torch.device | str | int) -> None:
        """Make an empty workspace on ``device``; the first plan allocates its memory."""
        self.device = canonical_device(device)
        self.partials = torch.empty(0, dtype=torch.float32, device=self.device)
        self.counters = torch.zeros(0, dtype=torch.int32, device=self.device)
        self._lock = threading.Lock()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a workspace can't be copied or pickled: make another Workspace(device)")

    @property
    def num_bytes(self) -> int:
        """Allocated bytes."""
        return 4 * (self.partials.numel() + self.counters.numel())

    def reserve(self, num_partials: int, num_counters: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return buffers of at least ``num_partials`` floats and ``num_counters`` counters.

        Raises:
            ValueError: the workspace would have to grow while the current stream is captured.
        """
        partials, counters = self.partials, self.counters  # never shrink
        if partials.numel() >= num_partials and counters.numel() >= num_counters:
            return partials, counters
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                f"the workspace has {self.num_bytes} bytes and needs "
                f"{workspace_bytes(num_partials, num_counters)} in a capture, where it can't grow: "
                "plan a batch of this kind before it"
            )
        with self._lock:
            if self.partials.numel() < num_partials:
                self.partials = torch.empty(num_partials, dtype=torch.float32, device=self.device)
            if self.counters.numel() < num_counters:
                self.counters = torch.zeros(num_counters, dtype=torch.int32, device=self.device)
            return self.partials, self.counters


def capture_buffers(
    device: torch.device, num_partials: int, num_counters: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return buffers for a captured call, in the memory of its graph.

    Each replay clears the counters.
    """
    partials = torch.empty(num_partials, dtype=torch.float32, device=device)
    return partials, torch.zeros(num_counters, dtype=torch.int32, device=device)


def workspace_bytes(num_partials: int, num_counters: int) -> int:
    """Return the bytes of a workspace with these numbers of floats and counters."""
    return aligned(4 * num_partials) + aligned(4 * num_counters)


def aligned(num_bytes: int) -> int:
    """Return ``num_bytes``, rounded up to the alignment."""
    return -(-num_bytes // SLICE_BYTES) * SLICE_BYTES


# The raw handle of the per-thread default stream.
_PER_THREAD_STREAM = 2

_defaults: dict[tuple[int, int, int], Workspace] = {}
_defaults_lock = threading.Lock()


def default_workspace(device: torch.device, stream: int) -> Workspace:
    """Return the default workspace of ``stream``, a raw handle, on a device."""
    assert device.index is not None  # canonical
    thread = threading.get_ident() if stream == _PER_THREAD_STREAM else 0
    key = (device.index, stream, thread)
    workspace = _defaults.get(key)
    if workspace is None:
        with _defaults_lock:
            if key not in _defaults:
                _defaults[key] = Workspace(device)
            workspace = _defaults[key]
    return workspace


def canonical_device(device: torch.device | str | int | None) -> torch.device:
    """Return ``device`` with its index; None is the current CUDA device, or the CPU without one.

    Raises:
        ConfigError: ``device`` is neither the CPU nor a CUDA device of this machine.
    """
    if device is None and not torch.cuda.is_available():
        return torch.device("cpu")
    try:
        resolved = torch.device("cuda" if device is None else device)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError([f"device={shown(device)} is no device"]) from error
    if resolved.type == "cpu":
        return torch.device("cpu")
    if resolved.type != "cuda":
        raise ConfigError([f"device={device} is neither a CUDA device nor the CPU"])
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = resolved.index
    if index is None and count > 0:
        index = torch.cuda.current_device()
    if index is None or index >= count:
        raise ConfigError([f"device={device}: this process sees {count} CUDA devices"])
    return torch.device("cuda", index)
