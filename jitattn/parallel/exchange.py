"""What ranks send each other: one place for torch.distributed, its groups and its errors."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from jitattn.base.errors import ConfigError, ParallelError
from jitattn.base.validate import type_name
from jitattn.kernels.common.planner_base import is_capturing

_TIMEOUT = timedelta(minutes=10)  # of NCCL
# Before torch 2.13 it has another name; a torch without torch.distributed has neither.
_all_gather: Any = getattr(dist, "all_gather_single", getattr(dist, "all_gather_into_tensor", None))


class Exchange:
    """Collectives of one group, on the device of the tensors, and on the CPU for what is checked.

    Tensors of a card travel by NCCL; a group that has gloo alone takes them through the CPU.
    A collective that failed leaves ranks at different places, so that no other is begun.

    Attributes:
        num_ranks: ranks of the group.
        rank: this one's number in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta | None) -> None:
        """Join a group; each of its ranks does.

        Raises:
            ConfigError: nobody has initialised torch.distributed, or this process is not in
                ``group``, or ``timeout`` is given to a group that has its own.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError(
                ["group: torch.distributed has no group yet: call init_process_group (torchrun "
                 "sets its environment)"]
            )  # fmt: skip
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"group is a {type_name(group)}: expected a ProcessGroup or None")
        if timeout is not None and not isinstance(timeout, timedelta):
            raise TypeError(f"timeout is a {type_name(timeout)}: expected a datetime.timedelta")
        self._group = group
        self.num_ranks = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ConfigError(["group: this process is none of its ranks"])
        self._backends = _backends(group)
        self._host_group = self._group_of_hosts(timeout)
        self._failure = ""

    def _group_of_hosts(self, timeout: timedelta | None) -> dist.ProcessGroup | None:
        """Return a group of the same ranks for tensors on the CPU."""
        if "cpu" in self._backends:
            if timeout is not None:
                raise ConfigError(["timeout is given, but group has one of its own for the CPU"])
            return self._group
        hosts: dist.ProcessGroup = dist.new_group(
            dist.get_process_group_ranks(self._group),
            timeout=timeout or _TIMEOUT,
            backend="gloo",
            use_local_synchronization=True,
        )
        return hosts

    def reasons_against(self, device: torch.device) -> list[str]:
        """Say why tensors on ``device`` can't travel."""
        if self.num_ranks == 1 or device.type in self._backends or "cpu" in self._backends:
            return []
        return [f"group has no backend for {device.type}, where the planner is"]

    def gather(self, tensor: Tensor) -> Tensor:
        """Return [num_ranks, *shape]: the tensor of every rank, which all have this shape."""
        if self.num_ranks == 1 or tensor.numel() == 0:
            return tensor.expand(self.num_ranks, *tensor.shape)
        sent = self._departing(tensor)
        found = sent.new_empty((self.num_ranks, *sent.shape))
        group = self._group_for(tensor)
        self._wait(
            "gathering queries",
            lambda: _all_gather(found.flatten(0, 1), sent, group=group),
        )
        return found.to(tensor.device).view(tensor.dtype)

    def swap(self, tensor: Tensor, out: Tensor) -> None:
        """Send entry r of the first dimension to rank r, and write what ranks sent into ``out``.

        Both are contiguous and of one shape.
        """
        if self.num_ranks == 1 or tensor.numel() == 0:
            out.copy_(tensor)
            return
        sent = self._departing(tensor)
        is_staged = sent.device != out.device
        found = torch.empty_like(sent) if is_staged else out.view(torch.uint8)
        group = self._group_for(tensor)
        self._wait("exchanging outputs", lambda: dist.all_to_all_single(found, sent, group=group))
        if is_staged:
            out.view(torch.uint8).copy_(found)

    def gather_bytes(self, row: bytes, size: int) -> list[bytes]:
        """Return a row of every rank, at most ``size`` bytes without zeros at the end."""
        sent = torch.zeros(size, dtype=torch.uint8, device="cpu")
        sent[: len(row)] = torch.frombuffer(bytearray(row), dtype=torch.uint8)
        found = torch.empty((self.num_ranks, size), dtype=torch.uint8, device="cpu")
        group = self._host_group
        self._wait(
            "comparing plans",
            lambda: _all_gather(found.flatten(), sent, group=group),
        )
        return [bytes(each.tolist()).rstrip(b"\0") for each in found]

    def _group_for(self, tensor: Tensor) -> dist.ProcessGroup | None:
        return self._host_group if self._is_staged(tensor.device) else self._group

    def _is_staged(self, device: torch.device) -> bool:
        """Whether tensors of ``device`` travel through the CPU: gloo has few collectives there."""
        return device.type != "cpu" and self._backends.get(device.type) in (None, "gloo")

    def _departing(self, tensor: Tensor) -> Tensor:
        """Return the bytes of a tensor where they leave from."""
        tensor = tensor.detach()
        if self._is_staged(tensor.device):
            if is_capturing(tensor.device):
                raise ConfigError(
                    ["group has gloo alone, which no graph captures: make it with "
                     "init_process_group('cpu:gloo,cuda:nccl')"]
                )  # fmt: skip
            tensor = tensor.cpu()
        return tensor.contiguous().view(torch.uint8)

    def _wait(self, what: str, collective: Callable[[], object]) -> None:
        if self._failure:
            raise ParallelError(f"{self._failure}: make another group and ContextParallel")
        try:
            collective()
        except RuntimeError as error:
            self._failure = f"{what} over {self.num_ranks} ranks failed on rank {self.rank}"
            raise ParallelError(f"{self._failure}: {error}") from error


def _backends(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Return the backend of a group for each type of device that it has one for."""
    pairs = (part.partition(":") for part in dist.get_backend_config(group).split(","))
    return {device: name for device, _, name in pairs}
