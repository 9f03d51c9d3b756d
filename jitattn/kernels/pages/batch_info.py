"""What a step's kernels want to know of its tokens: ``batch_info``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from jitattn.base.validate import INT32_MAX, check_count, type_name
from jitattn.kernels.common import device_kernels
from jitattn.kernels.common.launch_cache import (
    CallParams,
    CallTensors,
    LaunchCache,
    address_of,
    new_call,
)
from jitattn.kernels.common.page_lists import lengths_of, page_sources
from jitattn.kernels.common.value_checks import asks_for_checks, checking
from jitattn.kernels.pages.block_table import check_offsets, check_page_size
from jitattn.kernels.pages.params import BatchInfoParams
from jitattn.kernels.pages.spec import BatchInfoSpec
from jitattn.spec.layout import Layout
from jitattn.tensors.page_table_base import PageTable
from jitattn.tensors.page_tables import has_pages, table_names
from jitattn.tensors.tensor_checks import (
    check_device,
    check_per_request,
    check_tensor,
    check_vector,
    check_writable,
    new_tensor,
)

_OUTPUTS = ("qo_indptr", "kv_indptr", "requests", "positions", "slots")  # of BatchInfo.tensors


@dataclass(frozen=True, eq=False, slots=True)
class BatchInfo:
    """Where the query tokens of a batch stand, as ``batch_info`` says."""

    qo_indptr: Tensor
    """int32 [batch_size + 1], where the query tokens of each request begin."""
    kv_indptr: Tensor
    """int32 [batch_size + 1], where the KV tokens of each request would begin one after the
    other."""
    requests: Tensor
    """int32 [num_tokens], the request of each query token; -1 past the last one's."""
    positions: Tensor
    """int32 [num_tokens], the position of each query token in its request: seq_len - q_len + i;
    -1 where that is negative, and past the last one."""
    slots: Tensor | None
    """int64 [num_tokens], the slot of each query token, page * page_size + place; -1 where it has
    no position or its request no page there. None without ``pages``."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        found = (self.qo_indptr, self.kv_indptr, self.requests, self.positions)
        return found if self.slots is None else (*found, self.slots)


def batch_info(
    seq_lens: Tensor,
    q_lens: Tensor,
    *,
    num_tokens: int,
    pages: PageTable | None = None,
    page_size: int | None = None,
    out: BatchInfo | None = None,
) -> BatchInfo:
    """Say of every query token which request it is of, and where: one launch, to be captured.

    Args:
        seq_lens: int32 or int64 [batch_size], all KV tokens of each request, this step's included.
        q_lens: int32 or int64 [batch_size], query tokens of each request, its last ones. Zero and
            less is none.
        num_tokens: query tokens to speak of, padding included: the rows of q.
        pages: a table whose K and V have one slot a token, for the slots that this step's K and V
            go to; read like the lengths when the kernel runs.
        page_size: tokens of a page, with ``pages`` that list pages.
        out: what an earlier call of these sizes returned, to be written again.

    Returns:
        ``out``, or new tensors. Query tokens past ``num_tokens`` are left out, of the offsets not.

    Raises:
        TypeError, ValueError: an argument that doesn't fit. On the CPU also more query tokens than
            ``num_tokens``, more KV tokens together than int32 offsets reach, or a token that its
            table has no room for; on the device its slot is -1.
    """
    given = seq_lens, q_lens, num_tokens, pages, page_size, out
    return LAUNCHES.run(new_call(BatchCall, given))


class BatchCall(NamedTuple):
    """The arguments of ``batch_info``, as they were given."""

    seq_lens: Tensor
    q_lens: Tensor
    num_tokens: int
    pages: PageTable | None
    page_size: int | None
    out: BatchInfo | None


@dataclass(frozen=True, slots=True)
class _Batch:
    """The arguments, checked."""

    seq_lens: Tensor
    q_lens: Tensor
    num_tokens: int
    pages: PageTable | None
    page_size: int
    out: BatchInfo | None

    @property
    def device(self) -> torch.device:
        return self.seq_lens.device

    def maker(self) -> Callable[[], BatchInfo]:
        """Return what makes tensors for the result; it keeps none of ours."""
        return functools.partial(
            _new_info,
            self.num_tokens,
            self.seq_lens.shape[0],
            self.device,
            has_slots=self.pages is not None,
        )


def _check(call: BatchCall) -> _Batch:
    seq_lens, q_lens, num_tokens, pages, page_size, out = call
    check_vector("seq_lens", seq_lens, device=None)
    check_per_request("q_lens", q_lens, seq_lens.shape[0], seq_lens.device)
    num_tokens = check_count("num_tokens", num_tokens, least=0, most=INT32_MAX)
    table = None
    if pages is not None:
        page_size = None if page_size is None else check_page_size(page_size)
        table = _checked_pages(pages, page_size, seq_lens)
    elif page_size is not None:
        raise ValueError("page_size is given without pages")
    batch = _Batch(seq_lens, q_lens, num_tokens, table, page_size or 1, out)
    if out is not None:
        _check_out(out, batch)
    return batch


def _checked_pages(pages: PageTable, page_size: int | None, seq_lens: Tensor) -> PageTable:
    if not has_pages(pages):
        names = table_names(without=[Layout.RAGGED])
        raise TypeError(f"pages is a {type_name(pages)}: expected a {names}")
    if pages.layout == "separate":
        raise ValueError(f"pages is {pages!r}: separate ids of K and V are two slots a token")
    if page_size is None and pages.layout.lists_pages:
        raise ValueError("page_size is None: pages need the tokens of a page")
    check_device("pages", pages, seq_lens.device)
    if pages.batch_size != seq_lens.shape[0]:
        raise ValueError(f"pages has {pages.batch_size} requests: expected {seq_lens.shape[0]}")
    return pages


def _check_out(out: BatchInfo, batch: _Batch) -> None:
    if not isinstance(out, BatchInfo):
        raise TypeError(f"out is a {type(out).__name__}: expected a BatchInfo")
    for name in ("qo_indptr", "kv_indptr"):
        check_offsets(f"out.{name}", getattr(out, name), batch.seq_lens.shape[0], batch.device)
    if (out.slots is None) != (batch.pages is None):
        raise ValueError(
            f"out.slots is {'None' if out.slots is None else 'a tensor'}, but pages are "
            f"{'not ' if batch.pages is None else ''}given"
        )
    for name in ("requests", "positions", "slots"):
        tensor = getattr(out, name)
        if tensor is None:
            continue
        check_tensor(f"out.{name}", tensor, (torch.int64 if name == "slots" else torch.int32,))
        if tuple(tensor.shape) != (batch.num_tokens,):
            raise ValueError(
                f"out.{name} has shape {list(tensor.shape)}: expected [{batch.num_tokens}]"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"out.{name} has the stride {tensor.stride(0)}: expected 1")
        check_writable(f"out.{name}", tensor)
        check_device(f"out.{name}", tensor, batch.device)


def _new_info(
    num_tokens: int, batch_size: int, device: torch.device, *, has_slots: bool
) -> BatchInfo:
    # One allocation. Slots come first, since they are wider than the others.
    sizes = [2 * num_tokens * has_slots, num_tokens, num_tokens, batch_size + 1, batch_size + 1]
    memory = new_tensor("num_tokens", (sum(sizes),), torch.int32, device)
    slots, requests, positions, qo_indptr, kv_indptr = torch.split(memory, sizes)
    return BatchInfo(
        qo_indptr, kv_indptr, requests, positions, slots.view(torch.int64) if has_slots else None
    )


def _info_by_definition(batch: _Batch) -> BatchInfo:
    info = batch.maker()() if batch.out is None else batch.out
    kv_lens = [max(int(n), 0) for n in batch.seq_lens.tolist()]
    q_lens = [max(int(n), 0) for n in batch.q_lens.tolist()]
    total = sum(q_lens)
    if total > batch.num_tokens:
        raise ValueError(f"q_lens have {total} tokens together: num_tokens is {batch.num_tokens}")
    if sum(kv_lens) > INT32_MAX:
        raise ValueError(f"seq_lens have {sum(kv_lens)} tokens together: at most {INT32_MAX}")
    requests, positions, slots = [], [], []
    for b, (kv_len, q_len) in enumerate(zip(kv_lens, q_lens, strict=True)):
        wanted = [max(kv_len - q_len + i, -1) for i in range(q_len)]
        requests += [b] * q_len
        positions += wanted
        if batch.pages is not None and q_len > 0:
            known = batch.pages.slots_of(b, kv_len, batch.page_size).tolist()
            slots += [known[position] if position >= 0 else -1 for position in wanted]
    padding = [-1] * (batch.num_tokens - total)
    found = {"requests": requests, "positions": positions, "slots": slots}
    for name, values in found.items():
        if (tensor := getattr(info, name)) is not None:
            tensor.copy_(torch.tensor(values + padding, dtype=tensor.dtype, device="cpu"))
    for indptr, lens in ((info.qo_indptr, q_lens), (info.kv_indptr, kv_lens)):
        indptr.copy_(torch.tensor([0, *lens], device="cpu").cumsum(0))
    return info


class _InfoLauncher:
    """Launches for batches that lie alike."""

    def __init__(self, batch: _Batch, given: CallTensors, card: int) -> None:
        from jitattn.device.driver import Launch

        self._card = card
        self._new_info = batch.maker()
        self._checks = asks_for_checks()
        self._params = CallParams(BatchInfoParams)
        params = self._params.struct
        params.num_tokens = batch.num_tokens
        params.seq_lens = lengths_of(batch.seq_lens)
        params.q_lens = lengths_of(batch.q_lens)
        sources = {"seq_lens.values": "seq_lens", "q_lens.values": "q_lens"}
        if batch.pages is not None:
            params.pages = batch.pages.page_list(batch.page_size)
            sources |= page_sources("pages", batch.pages)
        outputs = [name for name in _OUTPUTS if batch.pages is not None or name != "slots"]
        names = {name: f"out[{i}]" for i, name in enumerate(outputs)}
        # New tensors come where those of out would.
        given_names = [*given.names, *(name for name in names.values() if name not in given.names)]
        self._params.connect(sources | names, given_names)
        num_threads = device_kernels.tile_of(BatchInfoSpec(), card).num_threads
        grid = max(1, -(-batch.num_tokens // num_threads))
        kernel = device_kernels.load(BatchInfoSpec(), card)
        self._launch = Launch(kernel, params, grid, num_threads)

    def __call__(self, call: BatchCall, tensors: list[Tensor]) -> BatchInfo:
        """Launch for these, which lie like those it was made with."""
        if self._checks and not device_kernels.is_capturing(call.seq_lens.device):
            _verify(call)
        info = call.out
        if info is None:
            info = self._new_info()
            tensors += info.tensors
        pointers = tuple(map(address_of, tensors))
        params = self._params
        image = params.images.get(pointers)
        if image is None:
            params.write(pointers)
            params.keep(pointers, self._launch)
        else:
            params.image[:] = image[1]
        device_kernels.launch_on(self._card, self._launch)
        return info


def _verify(call: BatchCall) -> None:
    """Refuse what would be -1 or left out."""
    with checking():
        pages = None if call.pages is None else call.pages.to_cpu()
        seq_lens, q_lens = call.seq_lens.cpu(), call.q_lens.cpu()
        on_host = call._replace(seq_lens=seq_lens, q_lens=q_lens, pages=pages, out=None)
        _info_by_definition(_check(on_host))


LAUNCHES = LaunchCache(_check, _info_by_definition, _InfoLauncher)
