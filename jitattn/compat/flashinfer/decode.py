"""FlashInfer's decode wrapper: a few query tokens for each request of a CSR table."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from jitattn.base.validate import as_int, check_count, check_flag, shown
from jitattn.compat.flashinfer.absent import names_of
from jitattn.compat.flashinfer.common.arguments import check_dtype, refuse_unbuilt
from jitattn.compat.flashinfer.common.batch import Batch, FixedBuffers, refuse_buffers
from jitattn.compat.flashinfer.common.calls import (
    ForwardArguments,
    PlanArguments,
    Results,
    RunArguments,
    ScoreArguments,
    check_head_dim,
    forward_of,
    sizes_of,
    window_change,
)
from jitattn.compat.flashinfer.common.paged_table import PagedTable, TableNames
from jitattn.compat.flashinfer.common.queries import check_copy
from jitattn.compat.flashinfer.common.wrapper import Wrapper
from jitattn.compat.flashinfer.single import single_decode_with_kv_cache
from jitattn.compat.flashinfer.trtllm.attention import trtllm_batch_decode_with_kv_cache
from jitattn.compat.flashinfer.trtllm.latents import trtllm_batch_decode_with_kv_cache_mla
from jitattn.compat.flashinfer.trtllm.xqa import (
    xqa,
    xqa_batch_decode_with_kv_cache,
    xqa_batch_decode_with_kv_cache_mla,
    xqa_mla,
)
from jitattn.tensors.page_table_base import PageTable
from jitattn.tensors.scales import ScaleLike

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "fast_decode_plan",
    "single_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa",
    "xqa_batch_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache_mla",
    "xqa_mla",
]

__getattr__ = names_of(__name__, __all__)

_NAMES = TableNames("", "_buffer")


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
        jit_kwargs: dict[str, Any] | None = None,
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
            jit_kwargs: likewise.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        refuse_unbuilt(locals())
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
        self._use_tensor_cores = use_tensor_cores
        self._backend = backend
        given = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        buffers = dict(zip(_NAMES.buffers(), given, strict=True))
        if not use_cuda_graph:
            refuse_buffers(buffers)
            return
        self._fixed = FixedBuffers(self.device, **buffers)
        size = self._fixed["paged_kv_last_page_len_buffer"].shape[0]
        self._fixed.check_size("paged_kv_indptr_buffer", size + 1)

    @property
    def use_tensor_cores(self) -> bool:
        """What the constructor was given."""
        return self._use_tensor_cores

    @property
    def resolved_backend(self) -> str:
        """The backend that the constructor was given; all are the same kernels."""
        return self._backend

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
        use_token_head_sf: bool = False,
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
            use_token_head_sf: refused unless False.

        Raises:
            TypeError, ValueError, ConfigError: naming the argument.
        """
        refuse_unbuilt(locals())
        scores = ScoreArguments(window_left, logits_soft_cap, sm_scale)
        types = _data_types(q_data_type, kv_data_type, data_type)
        given = PlanArguments(
            num_qo_heads, num_kv_heads, page_size, *types, o_data_type, scores, fixed_split_size,
            disable_split_kv,
        )  # fmt: skip
        table = PagedTable(
            _NAMES, indptr, indices, last_page_len, page_size, block_tables, seq_lens
        )
        self._plan(given, table, head_dim, _check_causal(q_len_per_req, is_causal), non_blocking)

    begin_forward = plan
    workspace_size = sizes_of(
        plan, "non_blocking", "window_right", "is_causal", "use_token_head_sf"
    )

    def _plan(
        self,
        given: PlanArguments,
        table: PagedTable,
        head_dim: int,
        q_len: int,
        non_blocking: bool,
    ) -> None:
        """Check a batch, copy it to the device, and plan it or refresh the plan."""
        arguments = {
            **given.checked(self._kv_layout),
            "head_dim": check_head_dim("head_dim", head_dim),
            "page_table": table.layout,
            "causal": True,
        }
        lens = table.check(self._fixed)
        check_flag("non_blocking", non_blocking)
        kept = self._keep(arguments)
        if kept is not None and kept.max_q_len != q_len:
            raise ValueError(
                f"q_len_per_req is {q_len}: this wrapper with use_cuda_graph=True was planned with "
                f"{kept.max_q_len}"
            )
        seq_lens = self._to_device(lens, non_blocking)
        pages = table.on_device(self.device, self._fixed, non_blocking)
        if kept is not None:
            kept.seq_lens.copy_(seq_lens)
            kept.refresh()
            return
        if self._fixed is not None:
            seq_lens = seq_lens.clone()
        self._planned = self._batch_of(arguments, pages, seq_lens, q_len)

    def _batch_of(
        self, arguments: dict[str, object], pages: PageTable, seq_lens: Tensor, q_len: int
    ) -> Batch:
        num_requests = seq_lens.shape[0]
        offsets = None
        if q_len > 1:
            steps = torch.arange(num_requests + 1, dtype=torch.int32, device=self.device)
            offsets = steps * q_len
        num_rows = q_len * num_requests
        return Batch(
            arguments, self.device, pages, seq_lens, offsets, max_q_len=q_len, num_rows=num_rows
        )

    def run(
        self, q: Tensor, paged_kv_cache: Tensor | tuple[Tensor, Tensor], *args: object,
        q_scale: float | None = None, k_scale: ScaleLike | None = None,
        v_scale: ScaleLike | None = None,
        out: Tensor | None = None, lse: Tensor | None = None, return_lse: bool = False,
        enable_pdl: bool | None = None, window_left: int | None = None, sinks: Tensor | None = None,
        q_len_per_req: int | None = None, skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Attend the queries of each request to its pages, on the current stream.

        Args:
            q: [batch_size * q_len_per_req, num_qo_heads, head_dim].
            paged_kv_cache: [num_pages, 2, page_size, num_kv_heads, head_dim] ("HND": heads before
                tokens) or a pair of such tensors without the second dimension, any strides but the
                last; without the dimension of tokens, pages have one.
            args: refused: they are for kernels of ``jit_args``.
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
        return self._run(locals(), {})

    def _run(self, given: Mapping[str, Any], changes: Mapping[str, object]) -> Results:
        """Do what ``run`` does of its arguments, under ``changes`` of the planned ones."""
        refuse_unbuilt(given, but=("kv_cache_sf",))
        q_len = given["q_len_per_req"]
        if q_len is not None and as_int(q_len) != self._batch().max_q_len:
            raise ValueError(
                f"q_len_per_req is {shown(q_len)}: plan was given {self._batch().max_q_len}"
            )
        names = "q", "q_scale", "k_scale", "v_scale", "out", "lse", "return_lse", "sinks"
        call = RunArguments(*(given[name] for name in (*names, "kv_cache_sf")))
        changes = {**changes, **window_change(given["window_left"])}
        return self._attend_pages(given["paged_kv_cache"], call, changes)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def _read_forward(
        self, q: Tensor, paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        pos_encoding_mode: str = "NONE", q_scale: float | None = None,
        k_scale: ScaleLike | None = None, v_scale: ScaleLike | None = None,
        window_left: int = -1, logits_soft_cap: float | None = None,
        sm_scale: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> ForwardArguments:  # fmt: skip
        refuse_unbuilt(locals())
        call = RunArguments(q, q_scale, k_scale, v_scale)
        scores = ScoreArguments(window_left, logits_soft_cap, sm_scale)
        return ForwardArguments(call, paged_kv_cache, scores, None)

    def _forward(self, given: ForwardArguments) -> Results:
        return self._attend_pages(given.kv_cache, given.run, given.scores.checked())

    forward = forward_of(
        _read_forward,
        "Call ``run`` with this window, soft cap and scale instead of ``plan``'s.",
        return_lse=False,
    )
    forward_return_lse = forward_of(
        _read_forward, "Call ``forward`` and return lse, too.", return_lse=True
    )


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper, indptr: Tensor, indices: Tensor,
    last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int,
    pos_encoding_mode: str = "NONE", window_left: int = -1, logits_soft_cap: float | None = None,
    q_data_type: str | torch.dtype | None = None, kv_data_type: str | torch.dtype | None = None,
    data_type: str | torch.dtype | None = None, sm_scale: float | None = None,
    rope_scale: float | None = None, rope_theta: float | None = None, non_blocking: bool = True,
    fixed_split_size: int | None = None, disable_split_kv: bool = False, q_len_per_req: int = 1,
    global_override_indptr_cpu: Tensor | None = None,
) -> None:  # fmt: skip
    """Plan a batch of a decode wrapper, which comes first; ``plan`` is no slower here.

    Arguments are as of ``BatchDecodeWithPagedKVCacheWrapper.plan``. ``global_override_indptr_cpu``
    is ``indptr`` on the CPU, which nothing waits for: its values must be those.

    Raises:
        TypeError, ValueError, ConfigError: naming the argument.
    """
    check_copy("global_override_indptr_cpu", global_override_indptr_cpu, indptr)
    self.plan(
        indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        pos_encoding_mode, window_left, logits_soft_cap, q_data_type, kv_data_type, None,
        data_type, sm_scale, rope_scale, rope_theta, non_blocking,
        fixed_split_size=fixed_split_size, disable_split_kv=disable_split_kv,
        q_len_per_req=q_len_per_req,
    )  # fmt: skip


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


def _data_types(
    q: str | torch.dtype | None, kv: str | torch.dtype | None, both: str | torch.dtype | None
) -> tuple[str | torch.dtype, str | torch.dtype | None]:
    """Return the types of q and of the cache, for which ``data_type`` may stand."""
    both = None if both is None else check_dtype("data_type", both)
    q = None if isinstance(q, str) and q == "" else q
    return (both or "float16") if q is None else q, both if kv is None else kv


def _check_causal(q_len_per_req: int, is_causal: bool | None) -> int:
    """Return query tokens of each request, more than one of which are causal."""
    q_len = check_count("q_len_per_req", q_len_per_req)
    if is_causal is not None and is_causal is not (q_len > 1):
        raise ValueError(
            f"is_causal is {shown(is_causal)}: with q_len_per_req={q_len} it is {q_len > 1}"
        )
    return q_len
