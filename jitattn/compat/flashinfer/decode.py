"""FlashInfer's decode wrapper: a few query tokens for each request of a CSR table."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jitattn.base.validate import check_count
from jitattn.compat.flashinfer.arguments import (
    LseForm,
    Scale,
    as_lengths,
    check_dtype,
    refuse_unbuilt,
)
from jitattn.compat.flashinfer.batch import (
    Batch,
    FixedBuffers,
    check_block_tables,
    check_equal,
    check_indices,
    check_last_pages,
    check_offsets,
    csr_lens,
    refuse_buffers,
)
from jitattn.compat.flashinfer.wrapper import (
    Wrapper,
    check_head_dim,
    planner_arguments,
    score_arguments,
    window_change,
)
from jitattn.tensors.page_table import PageTable
from jitattn.tensors.page_tables import BlockTable, CsrPages


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    """Decode over pages listed one request after the other.

    Query i of a request with q_len_per_req queries and n keys sits at n - q_len_per_req + i and
    sees no later key. What differs from FlashInfer: docs/from-flashinfer.md.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        """Remember the device and the buffers.

        Args:
            float_workspace_buffer: any tensor on the device of all others; nothing is written
                there.
            kv_layout: "NHD" or "HND", the order of a page's dimensions.
            use_cuda_graph: runs are captured: the batch size and ``plan``'s arguments stay, and
                ``plan``, outside the graph, brings captured runs up to date.
            use_tensor_cores: no effect.
            paged_kv_indptr_buffer: int32 [batch_size + 1], with ``use_cuda_graph``.
            paged_kv_indices_buffer: int32, room for the most pages, with ``use_cuda_graph``.
            paged_kv_last_page_len_buffer: int32 [batch_size], with ``use_cuda_graph``.
            backend: a name that FlashInfer knows; all mean the same kernels.
            jit_args: refused unless None.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        given = dict(locals())
        refuse_unbuilt(given)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
        self._use_tensor_cores = use_tensor_cores
        if not use_cuda_graph:
            refuse_buffers(given, [f"paged_kv_{name}_buffer" for name in _FILLED])
        if use_cuda_graph:
            self._fixed = FixedBuffers(
                self.device,
                paged_kv_indptr_buffer=paged_kv_indptr_buffer,
                paged_kv_indices_buffer=paged_kv_indices_buffer,
                paged_kv_last_page_len_buffer=paged_kv_last_page_len_buffer,
            )
            size = self._fixed["paged_kv_last_page_len_buffer"].shape[0]
            self._fixed.check_size("paged_kv_indptr_buffer", size + 1)

    @property
    def use_tensor_cores(self) -> bool:
        """What the constructor was given."""
        return self._use_tensor_cores

    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, pos_encoding_mode: str = "NONE",
        window_left: int = -1, logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None, data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, non_blocking: bool = True,
        block_tables: Tensor | None = None, seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None, disable_split_kv: bool = False,
        q_len_per_req: int = 1, *, window_right: int = 0, is_causal: bool | None = None,
    ) -> None:  # fmt: skip
        """Plan a batch; nothing waits for the device.

        Args:
            indptr: int32 [batch_size + 1], where the pages of each request begin.
            indices: int32 [>= indptr[-1]], page ids. These three may be on the CPU, too.
            last_page_len: int32 [batch_size], tokens in the last page of each request.
            num_qo_heads: heads of q and out.
            num_kv_heads: heads of K and V.
            head_dim: elements of a head.
            page_size: tokens of a page.
            pos_encoding_mode: "NONE"; others are refused.
            window_left: earlier tokens that a query sees besides its own; -1 is all.
            logits_soft_cap: score becomes cap * tanh(score / cap); None and 0 are off.
            q_data_type: float16 or bfloat16.
            kv_data_type: the same, FP8, or uint8 for NVFP4; None: ``q_data_type``.
            o_data_type: None: ``q_data_type``.
            data_type: stands for ``q_data_type`` and ``kv_data_type`` where they are None.
            sm_scale: None: head_dim ** -0.5.
            rope_scale: refused unless None.
            rope_theta: likewise.
            non_blocking: how tensors of the CPU are copied.
            block_tables: int32 [batch_size, max_pages], read instead of ``indices``; refused with
                ``use_cuda_graph``.
            seq_lens: KV tokens of each request, read instead of ``last_page_len``.
            fixed_split_size: where given, bits don't depend on the rest of the batch.
            disable_split_kv: likewise.
            q_len_per_req: query tokens of every request.
            window_right: 0; others are refused.
            is_causal: None, or whether ``q_len_per_req`` is more than 1; others are refused.

        Raises:
            TypeError, ValueError, ConfigError: naming the argument.
        """
        if data_type is not None:
            data_type = check_dtype("data_type", data_type)
        if q_data_type is None:
            q_data_type = "float16" if data_type is None else data_type
        kv_data_type = data_type if kv_data_type is None else kv_data_type
        given = dict(locals())
        arguments = _arguments(given, self._kv_layout)
        indptr, indices, last_page_len = _checked(given, self._fixed)
        seq_lens = csr_lens(indptr, last_page_len, page_size) if seq_lens is None else seq_lens
        kept = self._keep(arguments)
        if kept is not None and kept.max_q_len != q_len_per_req:
            raise ValueError(
                f"q_len_per_req is {q_len_per_req}: this wrapper with use_cuda_graph=True was "
                f"planned with {kept.max_q_len}"
            )
        tables = _Tables(indptr, indices, last_page_len, as_lengths("seq_lens", seq_lens))
        self._adopt(arguments, tables, block_tables, q_len_per_req, kept, non_blocking)

    begin_forward = plan

    def _adopt(
        self,
        arguments: dict[str, object],
        tables: _Tables,
        block_tables: Tensor | None,
        q_len: int,
        kept: Batch | None,
        non_blocking: bool,
    ) -> None:
        """Copy what was checked to the device, and plan it or refresh the plan."""
        pages: PageTable
        seq_lens = self._to_device(tables.seq_lens, non_blocking)
        if self._fixed is not None:
            indptr, indices, _ = (
                self._fixed.fill(f"paged_kv_{name}_buffer", values, non_blocking)
                for name, values in zip(_FILLED, tables, strict=False)
            )
            if kept is not None:
                kept.seq_lens.copy_(seq_lens)
                kept.refresh()
                return
            pages, seq_lens = CsrPages(indptr, indices), seq_lens.clone()
        elif block_tables is not None:
            pages = BlockTable(self._to_device(block_tables, non_blocking))
        else:
            indptr, indices = (self._to_device(t, non_blocking) for t in tables[:2])
            pages = CsrPages(indptr, indices)
        offsets = None
        if q_len > 1:
            steps = torch.arange(seq_lens.shape[0] + 1, dtype=torch.int32, device=self.device)
            offsets = steps * q_len
        arguments = {**arguments, "page_table": pages.layout.value}
        self._planned = Batch(
            arguments,
            self.device,
            pages,
            seq_lens,
            offsets,
            max_q_len=q_len,
            num_rows=q_len * seq_lens.shape[0],
        )

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        *,
        q_scale: float | None = None,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend the queries of each request to its pages, on the current stream.

        Args:
            q: [batch_size * q_len_per_req, num_qo_heads, head_dim].
            paged_kv_cache: [num_pages, 2, page_size, num_kv_heads, head_dim] ("HND": heads before
                tokens) or a pair of such tensors without the second dimension, any strides but the
                last; without the dimension of tokens, pages have one.
            q_scale: refused unless None or 1.
            k_scale: of FP8 and NVFP4: a number, or float32 [], [1] or [num_kv_heads].
            v_scale: likewise.
            out: filled and returned where given.
            lse: float32 [batch_size * q_len_per_req, num_qo_heads], filled where given.
            return_lse: return lse, too.
            enable_pdl: no effect.
            window_left: of this call; None: that of ``plan``.
            sinks: [num_qo_heads], whose exp is added to each sum.
            q_len_per_req: None, or that of ``plan``.
            skip_softmax_threshold_scale_factor: refused unless None.
            kv_cache_sf: the scales of NVFP4 blocks, float8_e4m3fn like ``paged_kv_cache``, with
                head_dim / 16 elements in their order.

        Returns:
            out, or (out, lse), base 2. A row that sees no key has out 0 and lse -inf.

        Raises:
            TypeError, ValueError, ConfigError: naming the argument, before any launch.
        """
        given = dict(locals())
        if q_len_per_req not in (None, self._batch().max_q_len):
            raise ValueError(
                f"q_len_per_req is {q_len_per_req}: plan was given {self._batch().max_q_len}"
            )
        return self._attend_pages(given, window_change(window_left), LseForm())

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Call ``run`` with this window, soft cap and scale instead of ``plan``'s."""
        given = dict(locals())
        return self._attend_pages(given, score_arguments(given), LseForm())

    def forward_return_lse(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Call ``forward`` and return lse, too."""
        given = dict(locals())
        return self._attend_pages({**given, "return_lse": True}, score_arguments(given), LseForm())


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """A ``BatchDecodeWithPagedKVCacheWrapper`` whose runs are captured."""

    def __init__(
        self,
        workspace_buffer: Tensor,
        indptr_buffer: Tensor,
        indices_buffer: Tensor,
        last_page_len_buffer: Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        """Remember the device and the buffers: arguments as of the class above."""
        super().__init__(
            workspace_buffer,
            kv_layout,
            True,
            use_tensor_cores,
            indptr_buffer,
            indices_buffer,
            last_page_len_buffer,
        )


_FILLED = ("indptr", "indices", "last_page_len")


class _Tables(NamedTuple):
    """What ``plan`` was given, checked, wherever it lies."""

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    seq_lens: Tensor


def _arguments(given: dict[str, Any], kv_layout: str) -> dict[str, object]:
    q_len = check_count("q_len_per_req", given["q_len_per_req"])
    if given["is_causal"] is not None and given["is_causal"] is not (q_len > 1):
        raise ValueError(
            f"is_causal is {given['is_causal']!r}: with q_len_per_req={q_len} it is {q_len > 1}"
        )
    layout = "csr" if given["block_tables"] is None else "shared"
    head_dim = check_head_dim("head_dim", given["head_dim"])
    others = planner_arguments(given, kv_layout)
    return {**others, "head_dim": head_dim, "page_table": layout, "causal": True}


def _checked(given: dict[str, Any], fixed: FixedBuffers | None) -> tuple[Tensor, Tensor, Tensor]:
    """Check tables on the host where they lie there."""
    indptr, indices, last_page_len = (given[name] for name in _FILLED)
    block_tables, page_size = given["block_tables"], given["page_size"]
    offsets = check_offsets("indptr", indptr)
    batch_size = indptr.shape[0] - 1
    check_indices("indices", indices, "indptr", offsets)
    check_last_pages("last_page_len", last_page_len, offsets, batch_size, page_size)
    if given["seq_lens"] is not None:
        lens = csr_lens(indptr, last_page_len, page_size)
        check_equal("seq_lens", given["seq_lens"], lens, "what last_page_len says")
    if block_tables is not None:
        check_block_tables(block_tables, batch_size, fixed)
    if fixed is not None:
        for name in _FILLED:
            is_list = name == "indices"
            fixed.check_room(f"paged_kv_{name}_buffer", name, given[name], exact=not is_list)
    return indptr, indices, last_page_len
