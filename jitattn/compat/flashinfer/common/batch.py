"""A wrapper's batch on the device and its plans, and the buffers of captured runs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from jitattn.base.validate import shown
from jitattn.compat.flashinfer.common.arguments import as_lengths
from jitattn.kernels.attention.api import AttentionPlanner, Plan
from jitattn.kernels.attention.functional import planner_of
from jitattn.tensors.page_table_base import PageTable
from jitattn.tensors.tensor_checks import INTEGERS, check_device, check_indptr, check_tensor


class Batch:
    """A batch on the device, and a plan of it for each configuration that ``run`` asks for.

    Attributes:
        arguments: those of its planner.
        mask: a custom mask as ``Plan.run`` takes it, or None.
        max_q_len: the most query tokens of a request.
        seq_lens: KV tokens of each request.
        num_rows: query tokens of all requests, where the host knows.
    """

    def __init__(
        self,
        arguments: Mapping[str, object],
        device: torch.device,
        pages: PageTable,
        seq_lens: Tensor,
        qo_indptr: Tensor | None = None,
        *,
        max_q_len: int = 1,
        max_kv_len: int | None = None,
        mask: tuple[Tensor, Tensor] | None = None,
        num_rows: int | None = None,
    ) -> None:
        """Make the plan of ``arguments`` alone; ``run`` may ask for others."""
        self.arguments = dict(arguments)
        self.mask = mask
        self.max_q_len = max_q_len
        self.seq_lens = seq_lens
        self.num_rows = num_rows
        self._device = device
        self._pages = pages
        self._qo_indptr = qo_indptr
        self._max_kv_len = max_kv_len
        self._plans: dict[tuple[tuple[str, object], ...], tuple[AttentionPlanner, Plan]] = {}
        self.plan_with({})

    def plan_with(self, changes: Mapping[str, object]) -> tuple[AttentionPlanner, Plan]:
        """Return a planner of its arguments but for ``changes``, and its plan of the batch."""
        key = tuple(sorted(changes.items()))
        if key not in self._plans:
            planner = planner_of({**self.arguments, **changes}, self._device)
            plan = planner.plan(
                self._pages,
                self.seq_lens,
                self._qo_indptr,
                max_q_len=self.max_q_len,
                max_kv_len=self._max_kv_len,
            )
            self._plans[key] = planner, plan
        return self._plans[key]

    def refresh(self) -> None:
        """Make all plans anew of what the tensors hold now; captured runs see it."""
        for _, plan in self._plans.values():
            plan.refresh()


class FixedBuffers:
    """The tensors of a batch whose runs are captured: they stay, and ``plan`` fills them."""

    def __init__(self, device: torch.device, **buffers: Tensor | None) -> None:
        """Hold int32 tensors of one dimension, named as the wrapper's constructor names them.

        Raises:
            TypeError, ValueError: naming the first that is missing or doesn't fit.
        """
        self._buffers: dict[str, Tensor] = {}
        for name, buffer in buffers.items():
            if buffer is None:
                raise ValueError(f"{name} is None: use_cuda_graph=True needs it")
            check_tensor(name, buffer, (torch.int32,))
            if buffer.dim() != 1:
                raise ValueError(f"{name} has shape {list(buffer.shape)}: expected one dimension")
            check_device(name, buffer, device)
            self._buffers[name] = buffer

    def __getitem__(self, name: str) -> Tensor:
        return self._buffers[name]

    def check_size(self, name: str, size: int) -> None:
        """Raise ValueError unless a buffer has as many elements."""
        if self[name].shape[0] != size:
            raise ValueError(f"{name} has {self[name].shape[0]} entries: expected {size}")

    def check_room(self, name: str, argument: str, values: Tensor, *, exact: bool) -> None:
        """Raise ValueError, naming the argument, where ``values`` don't fit a buffer."""
        given, room = values.shape[0], self[name].shape[0]
        if given > room or (exact and given != room):
            raise ValueError(
                f"{argument} has {given} entries: {name} has {room}, and a wrapper with "
                "use_cuda_graph=True keeps its batch size and buffers"
            )

    def fill(self, name: str, values: Tensor, non_blocking: bool) -> Tensor:
        """Copy ``values`` to the front of a buffer, and return all of it."""
        buffer = self[name]
        buffer[: values.shape[0]].copy_(values, non_blocking=non_blocking)
        return buffer


# What FlashInfer calls arguments of planners.
_CALLED = {
    "q_dtype": "q_data_type",
    "kv_dtype": "kv_data_type",
    "out_dtype": "o_data_type",
    "batch_invariant": "disable_split_kv, or a fixed_split_size,",
    "use_custom_mask": "a custom_mask",
    "kv_lora_rank": "head_dim_ckv",
    "qk_rope_head_dim": "head_dim_kpe",
}


def refuse_buffers(buffers: Mapping[str, object]) -> None:
    """Raise ValueError for buffers of captured runs where runs aren't captured."""
    for name, buffer in buffers.items():
        if buffer is not None:
            raise ValueError(f"{name} is given: it is for use_cuda_graph=True")


def refuse_changes(planned: Mapping[str, object], given: Mapping[str, object]) -> None:
    """Raise ValueError for arguments that differ from those of a captured batch."""
    for name, value in given.items():
        if planned[name] != value:
            called = _CALLED.get(name, name)
            raise ValueError(
                f"{called} is {shown(value)}: this wrapper with use_cuda_graph=True was planned "
                f"with {shown(planned[name])}, and runs captured since would not see another; use "
                "another wrapper"
            )


def check_offsets(name: str, indptr: Tensor) -> list[int] | None:
    """Check int32 [batch_size + 1]; return the values where the host has them.

    Raises:
        TypeError, ValueError: naming it, and on the CPU unless it rises from 0.
    """
    check_indptr(name, indptr)
    return None if indptr.device.type != "cpu" else [int(n) for n in indptr.tolist()]


def check_indices(name: str, indices: Tensor, offsets_name: str, offsets: list[int] | None) -> None:
    """Raise unless ``indices`` is int32 of one dimension that holds what offsets end at."""
    check_tensor(name, indices, (torch.int32,))
    if indices.dim() != 1:
        raise ValueError(f"{name} has shape {list(indices.shape)}: expected one dimension")
    if offsets is not None and offsets[-1] > indices.shape[0]:
        raise ValueError(
            f"{offsets_name}[-1] is {offsets[-1]}: {name} has {indices.shape[0]} entries"
        )


def csr_lens(indptr: Tensor, last_page_len: Tensor, page_size: int) -> Tensor:
    """Return the tokens of each request, 0 for one without pages, where ``last_page_len`` is."""
    num_pages = indptr.to(last_page_len.device).diff()
    return torch.where(num_pages > 0, (num_pages - 1) * page_size + last_page_len, 0)


def check_last_pages(
    name: str, last_page_len: Tensor, offsets: list[int] | None, batch_size: int, page_size: int
) -> None:
    """Raise unless it is [batch_size], and on the CPU within a page for requests that have some.

    Raises:
        TypeError, ValueError: naming it.
    """
    check_tensor(name, last_page_len, INTEGERS)
    if tuple(last_page_len.shape) != (batch_size,):
        raise ValueError(f"{name} has shape {list(last_page_len.shape)}: expected [{batch_size}]")
    if offsets is None or last_page_len.device.type != "cpu":
        return
    for b, tokens in enumerate(last_page_len.tolist()):
        if offsets[b + 1] > offsets[b] and not 0 <= tokens <= page_size:
            raise ValueError(f"{name}[{b}] is {tokens}: pages have {page_size} tokens")


def check_equal(name: str, value: Tensor | None, wanted: Tensor, meaning: str) -> None:
    """Raise ValueError where lengths on the host differ from what other arguments say."""
    if value is None:
        return
    value = as_lengths(name, value)
    if value.shape != wanted.shape:
        raise ValueError(f"{name} has shape {list(value.shape)}: expected {list(wanted.shape)}")
    if value.device.type == "cpu" and wanted.device.type == "cpu" and bool((value != wanted).any()):
        raise ValueError(f"{name} is {value.tolist()}: {meaning} is {wanted.tolist()}")


def check_block_tables(block_tables: Tensor, batch_size: int, fixed: FixedBuffers | None) -> None:
    """Raise unless a table is int32 [batch_size, max_pages] that no graph has captured."""
    if fixed is not None:
        raise ValueError(
            "block_tables is given: captured runs read the buffers given to the constructor "
            "(use_cuda_graph=True)"
        )
    check_tensor("block_tables", block_tables, (torch.int32,))
    if block_tables.dim() != 2 or block_tables.shape[0] != batch_size:
        raise ValueError(
            f"block_tables has shape {list(block_tables.shape)}: expected [{batch_size}, max_pages]"
        )
