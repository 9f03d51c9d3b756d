"""Base of the prefill wrappers: offsets of queries, masks, bounds of captured batches."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from jitattn.base.validate import check_count, check_flag, shown
from jitattn.compat.flashinfer.common.batch import (
    Batch,
    FixedBuffers,
    check_equal,
    check_offsets,
    refuse_buffers,
)
from jitattn.compat.flashinfer.common.calls import ForwardArguments, PlanArguments, check_head_dim
from jitattn.compat.flashinfer.common.masks import rows_of_bytes
from jitattn.compat.flashinfer.common.paged_table import PagedTable
from jitattn.compat.flashinfer.common.wrapper import Wrapper
from jitattn.tensors.page_table_base import PageTable
from jitattn.tensors.tensor_checks import check_tensor


class QueryArguments(NamedTuple):
    """The arguments of a prefill's ``plan`` that say which queries see which keys."""

    qo_indptr: Tensor
    head_dim_qk: int
    head_dim_vo: int | None
    custom_mask: Tensor | None
    packed_custom_mask: Tensor | None
    causal: bool
    seq_lens_q: Tensor | None
    max_token_per_sequence: int | None
    max_sequence_kv: int | None
    uniform_q_len: int | None
    qo_indptr_cpu: Tensor | None = None

    def checked(self) -> dict[str, object]:
        """Return the planner's arguments.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        has_mask = self.custom_mask is not None or self.packed_custom_mask is not None
        head_dim, dim_vo = check_head_dim("head_dim_qk", self.head_dim_qk), self.head_dim_vo
        return {
            "head_dim": head_dim,
            "head_dim_vo": head_dim if dim_vo is None else check_head_dim("head_dim_vo", dim_vo),
            # A mask is all there is, but for the window.
            "causal": check_flag("causal", self.causal) and not has_mask,
            "use_custom_mask": has_mask,
        }

    def check_offsets(self, name: str, kv_indptr: Tensor) -> None:
        """Check offsets of queries and keys, of which there are as many.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        check_offsets("qo_indptr", self.qo_indptr)
        check_copy("qo_indptr_cpu", self.qo_indptr_cpu, self.qo_indptr)
        check_offsets(name, kv_indptr)
        if kv_indptr.shape != self.qo_indptr.shape:
            raise ValueError(
                f"{name} has {kv_indptr.shape[0]} entries: expected {self.qo_indptr.shape[0]}, "
                "like qo_indptr"
            )

    def offsets(self) -> list[int]:
        """Return ``qo_indptr`` on the host; the device is waited for unless a copy lies there."""
        copy = self.qo_indptr if self.qo_indptr_cpu is None else self.qo_indptr_cpu
        return [int(n) for n in copy.tolist()]


def check_copy(name: str, copy: Tensor | None, offsets: Tensor) -> None:
    """Raise unless a copy of offsets lies on the CPU and is like them, where given.

    Raises:
        TypeError, ValueError: naming it.
    """
    if copy is None:
        return
    check_offsets(name, copy)
    original = name.removesuffix("_cpu")
    if copy.device.type != "cpu":
        raise ValueError(f"{name} is on {copy.device}: expected a copy on the CPU")
    if copy.shape != offsets.shape or (
        offsets.device.type == "cpu" and bool((copy != offsets).any())
    ):
        raise ValueError(f"{name} is {shown(copy.tolist())}: expected the values of {original}")


class PrefillWrapper(Wrapper):
    """What both have: query offsets, masks, and how many queries a request has at most."""

    _mask_room = 0
    _num_rows = 0
    _most_rows: int | None = None

    def _start(
        self,
        buffers: Mapping[str, Tensor | None],
        custom_mask_buf: Tensor | None,
        mask_indptr_buf: Tensor | None,
    ) -> None:
        """Take the constructor's buffers by name, offsets of q first, and those of masks."""
        if not self._use_cuda_graph:
            masks = {"custom_mask_buf": custom_mask_buf, "mask_indptr_buf": mask_indptr_buf}
            refuse_buffers({**buffers, **masks})
            return
        self._fixed = FixedBuffers(self.device, **buffers)
        first, *others = buffers
        for name in others:
            if name.endswith("indptr_buf"):
                self._fixed.check_size(name, self._fixed[first].shape[0])
        if custom_mask_buf is not None or mask_indptr_buf is not None:
            check_tensor("custom_mask_buf", custom_mask_buf, (torch.uint8,))
            check_tensor("mask_indptr_buf", mask_indptr_buf, (torch.int32,))
            assert custom_mask_buf is not None
            self._mask_room = custom_mask_buf.numel()

    def _plan_pages(
        self, given: PlanArguments, queries: QueryArguments, table: PagedTable, non_blocking: bool
    ) -> None:
        """Check a batch, copy it to the device, and plan it or refresh the plan."""
        arguments = {
            **given.checked(self._kv_layout),
            **queries.checked(),
            "page_table": table.layout,
        }
        queries.check_offsets("paged_kv_indptr", table.indptr)
        lens = table.check(self._fixed)
        check_flag("non_blocking", non_blocking)
        self._check_room("qo_indptr_buf", queries.qo_indptr)
        prepared = self._prepare(queries, lens, arguments)
        qo_indptr = self._placed("qo_indptr_buf", queries.qo_indptr, non_blocking)
        pages = table.on_device(self.device, self._fixed, non_blocking)
        lens = self._to_device(lens, non_blocking)
        self._adopt(arguments, prepared, pages, lens, qo_indptr)

    def _bound_rows(self, max_total_num_rows: int | None) -> None:
        """Take the most queries of captured batches, where given."""
        if max_total_num_rows is None:
            return
        self._most_rows = check_count("max_total_num_rows", max_total_num_rows, least=0)
        if not self._use_cuda_graph:
            raise ValueError("max_total_num_rows is given: it is for use_cuda_graph=True")

    def _check_room(self, name: str, values: Tensor) -> None:
        if self._fixed is not None:
            self._fixed.check_room(name, name.removesuffix("_buf"), values, exact=True)

    def _placed(self, name: str, values: Tensor, non_blocking: bool) -> Tensor:
        """Return offsets on the device, in their buffer where runs are captured."""
        if self._fixed is not None:
            return self._fixed.fill(name, values, non_blocking)
        return self._to_device(values, non_blocking)

    def _forward_changes(self, given: ForwardArguments) -> dict[str, object]:
        """Return what ``forward`` changes in the planner's arguments of ``plan``."""
        causal = check_flag("causal", given.causal) and self._batch().mask is None
        return {**given.scores.checked(), "causal": causal}

    def _prepare(
        self, queries: QueryArguments, seq_lens: Tensor, arguments: Mapping[str, object]
    ) -> Prepared:
        """Check what a batch is made of, before anything is copied."""
        kept = self._keep(arguments)
        max_kv_len = queries.max_sequence_kv
        if max_kv_len is not None:
            max_kv_len = check_count("max_sequence_kv", max_kv_len, least=0)
            longest = max(seq_lens.tolist(), default=0) if seq_lens.device.type == "cpu" else 0
            if longest > max_kv_len:
                raise ValueError(f"max_sequence_kv is {max_kv_len}: a request has {longest} keys")
        check_equal("seq_lens_q", queries.seq_lens_q, queries.qo_indptr.diff(), "qo_indptr's")
        max_q_len, num_rows = self._count_queries(queries, kept)
        mask = self._mask(queries, seq_lens)
        if mask is not None and self._use_cuda_graph:
            self._check_mask_room(mask[0])
        max_kv_len = None if self._use_cuda_graph else max_kv_len
        return Prepared(kept, max_q_len, num_rows, max_kv_len, mask)

    def _count_queries(self, queries: QueryArguments, kept: Batch | None) -> tuple[int, int | None]:
        """Return the most query tokens of a request, now or in any captured run, and of all.

        The latter is None where nothing has waited for the device to learn it.
        """
        most = queries.max_token_per_sequence
        uniform = queries.uniform_q_len
        most = None if most is None else check_count("max_token_per_sequence", most, least=0)
        uniform = None if uniform is None else check_count("uniform_q_len", uniform)
        is_known = queries.qo_indptr_cpu is not None or queries.qo_indptr.device.type == "cpu"
        if most is not None and not self._use_cuda_graph and not is_known:
            return most, None
        offsets = queries.offsets()
        total, longest = offsets[-1], max((b - a for a, b in pairwise(offsets)), default=0)
        if most is not None and longest > most:
            raise ValueError(f"max_token_per_sequence is {most}: a request has {longest} queries")
        if not self._use_cuda_graph:
            return longest, total
        if kept is None:
            # A later batch may give all of this one's rows to one request.
            self._num_rows = total if self._most_rows is None else self._most_rows
            limit = uniform or most or self._num_rows
        else:
            limit = kept.max_q_len
        if longest > limit or total > self._num_rows:
            raise ValueError(
                f"qo_indptr has {total} queries, {longest} of one request: this wrapper with "
                f"use_cuda_graph=True was planned for {self._num_rows} and {limit} (uniform_q_len, "
                "max_token_per_sequence, max_total_num_rows or all)"
            )
        return limit, total

    def _mask(self, queries: QueryArguments, seq_lens: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the mask that ``plan`` was given as ``Plan.run`` takes it."""
        custom_mask, packed = queries.custom_mask, queries.packed_custom_mask
        if custom_mask is None and packed is None:
            return None
        if custom_mask is not None and packed is not None:
            raise ValueError("packed_custom_mask is given, and so is custom_mask: expected one")
        q_lens = [b - a for a, b in pairwise(queries.offsets())]
        return rows_of_bytes(custom_mask, packed, q_lens, seq_lens.tolist(), self.device)

    def _check_mask_room(self, rows: Tensor) -> None:
        # Rows begin at bytes here, so that each may need one more than in FlashInfer.
        room = self._mask_room + self._num_rows
        if self._mask_room == 0 or rows.shape[0] > room:
            raise ValueError(
                f"custom_mask_buf has {self._mask_room} bytes: with use_cuda_graph=True it says "
                f"how large masks get, and this one has {rows.shape[0]} bytes in rows"
            )

    def _adopt(
        self,
        arguments: Mapping[str, object],
        prepared: Prepared,
        pages: PageTable,
        seq_lens: Tensor,
        qo_indptr: Tensor,
    ) -> None:
        """Plan what lies on the device now, or refresh the plan of captured runs."""
        kept, max_q_len, num_rows, max_kv_len, mask = prepared
        if kept is not None:
            kept.seq_lens.copy_(seq_lens)
            kept.num_rows = num_rows
            if mask is not None and kept.mask is not None:
                _copy_mask(mask, kept.mask)
            kept.refresh()
            return
        if self._use_cuda_graph:
            seq_lens = seq_lens.clone()
            if mask is not None:
                size = self._mask_room + self._num_rows
                fixed = mask[0].new_zeros(size), torch.empty_like(mask[1])
                mask = _copy_mask(mask, fixed)
        self._planned = Batch(
            arguments,
            self.device,
            pages,
            seq_lens,
            qo_indptr,
            max_q_len=max_q_len,
            max_kv_len=max_kv_len,
            mask=mask,
            num_rows=num_rows,
        )


class Prepared(NamedTuple):
    """A batch that was checked: the captured one, if any, its queries and keys, its mask."""

    kept: Batch | None
    max_q_len: int
    num_rows: int | None
    max_kv_len: int | None
    mask: tuple[Tensor, Tensor] | None


def _copy_mask(mask: tuple[Tensor, Tensor], to: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    to[0][: mask[0].shape[0]].copy_(mask[0])
    to[1].copy_(mask[1])
    return to
