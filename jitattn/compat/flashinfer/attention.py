"""FlashInfer's wrapper of mixed batches, and its wrappers with attention sinks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from jitattn.base.validate import check_number, shown
from jitattn.compat.flashinfer.absent import names_of
from jitattn.compat.flashinfer.common.arguments import (
    Pair,
    as_lengths,
    check_dtype,
    refuse_unbuilt,
)
from jitattn.compat.flashinfer.common.batch import Batch
from jitattn.compat.flashinfer.common.calls import (
    PlanArguments,
    Results,
    RunArguments,
    ScoreArguments,
)
from jitattn.compat.flashinfer.common.paged_table import PagedTable, TableNames
from jitattn.compat.flashinfer.common.queries import PrefillWrapper, QueryArguments
from jitattn.compat.flashinfer.common.wrapper import Wrapper
from jitattn.compat.flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from jitattn.compat.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from jitattn.tensors.scales import ScaleLike

__all__ = [
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchDecodeWithAttentionSinkWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
]

__getattr__ = names_of(__name__, __all__)

_NAMES = TableNames("kv_", "")


class BatchAttention(PrefillWrapper):
    """Decode and prefill of one batch, over pages listed one request after the other."""

    def __init__(self, kv_layout: str = "NHD", device: str | torch.device = "cuda") -> None:
        """Remember the layout and the device.

        Args:
            kv_layout: "NHD" or "HND", the order of a page's dimensions.
            device: where tensors are.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        super().__init__(torch.empty(0, device=torch.device(device)), kv_layout, False)

    def plan(
        self, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, head_dim_vo: int, page_size: int,
        causal: bool = False, sm_scale: float | None = None, logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype = torch.bfloat16,
        kv_data_type: str | torch.dtype = torch.bfloat16, use_profiler: bool = False,
    ) -> None:  # fmt: skip
        """Plan a batch. It waits for the device only to learn the most queries of a request.

        ``qo_indptr`` and ``kv_indptr`` are int32 [batch_size + 1], ``kv_indices`` int32
        [>= kv_indptr[-1]] and ``kv_len_arr`` [batch_size], the tokens of each request. Others are
        as of ``BatchPrefillWithPagedKVCacheWrapper.plan``; ``use_profiler`` is refused.

        Raises:
            TypeError, ValueError, ConfigError: naming the argument.
        """
        refuse_unbuilt(locals())
        lens = as_lengths("kv_len_arr", kv_len_arr)
        given = PlanArguments(
            num_qo_heads, num_kv_heads, page_size, q_data_type, kv_data_type, None,
            ScoreArguments(-1, logits_soft_cap, sm_scale), None, False,
        )  # fmt: skip
        queries = QueryArguments(
            qo_indptr, head_dim_qk, head_dim_vo, None, None, causal, None, None, None, None
        )
        last = torch.where(lens > 0, (lens - 1) % page_size + 1, 0)
        table = PagedTable(_NAMES, kv_indptr, kv_indices, last, page_size, None, lens)
        self._plan_pages(given, queries, table, True)

    def run(
        self, q: Tensor, kv_cache: Pair, out: Tensor | None = None, lse: Tensor | None = None,
        k_scale: ScaleLike | None = None, v_scale: ScaleLike | None = None,
        logits_soft_cap: float = 0.0, profiler_buffer: Tensor | None = None,
        kv_cache_sf: Pair | None = None,
    ) -> Results:  # fmt: skip
        """Attend the queries of each request to its pages, on the current stream.

        Args:
            q: [num_tokens, num_qo_heads, head_dim_qk].
            kv_cache: as of ``BatchDecodeWithPagedKVCacheWrapper.run``.
            out: filled and returned where given.
            lse: float32 [num_tokens, num_qo_heads], likewise.
            k_scale: of FP8 and NVFP4: a number, or float32 [], [1] or [num_kv_heads].
            v_scale: likewise.
            logits_soft_cap: 0: that of ``plan``, which must have one for another.
            profiler_buffer: refused unless None.
            kv_cache_sf: the scales of NVFP4 blocks.

        Returns:
            (out, lse), base 2. A row that sees no key has out 0 and lse -inf.

        Raises:
            TypeError, ValueError, ConfigError: naming the argument, before any launch.
        """
        refuse_unbuilt(locals(), but=("kv_cache_sf",))
        cap = check_number("logits_soft_cap", logits_soft_cap, least=0.0)
        if cap and not self._batch().arguments["logits_soft_cap"]:
            raise ValueError(f"logits_soft_cap is {cap}: plan was given none")
        call = RunArguments(q, None, k_scale, v_scale, out, lse, True, None, kv_cache_sf)
        return self._attend_pages(kv_cache, call, {"logits_soft_cap": cap} if cap else {})


class _SinkWrapper(Wrapper):
    """A wrapper whose ``run`` takes sinks and a scale behind the cache."""

    _built: Mapping[str, object] = {}

    def _keep(self, arguments: Mapping[str, object]) -> Batch | None:
        """Check that a plan is of what the constructor was told, too."""
        for name, value in self._built.items():
            if name == "window_left" and value == -1 and arguments[name] != -1:
                raise ValueError(
                    f"window_left is {arguments[name]}: the constructor was given -1, no window"
                )
            if name != "window_left" and arguments.get(name, value) != value:
                raise ValueError(
                    f"{name} is {arguments[name]}: the constructor was given {shown(value)}"
                )
        return super()._keep(arguments)


def _built(
    q: object, kv: object, head_dim_qk: int, head_dim_vo: int, window_left: int
) -> dict[str, object]:
    kv_dtype = check_dtype("kv_data_type", kv)
    return {
        "q_dtype": check_dtype("q_data_type", q),
        "kv_dtype": "nvfp4" if kv_dtype == "uint8" else kv_dtype,
        "head_dim": head_dim_qk,
        "head_dim_vo": head_dim_vo,
        "window_left": max(window_left, -1),
    }


def _with_sinks(
    run: inspect.Signature, args: tuple[Any, ...], given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, object]]:
    """Return the arguments of ``run`` by name, and the scale, of (sinks, sm_scale) in ``args``."""
    if len(args) > 2:
        raise ValueError(f"args has {len(args)}: expected sinks and sm_scale behind the cache")
    bound = run.bind(None, **given)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    if args:
        arguments["sinks"] = args[0]
    changes: dict[str, object] = {}
    if len(args) == 2:
        changes["sm_scale"] = check_number("sm_scale", args[1])
    return arguments, changes


_PREFILL_RUN = inspect.signature(BatchPrefillWithPagedKVCacheWrapper.run)
_DECODE_RUN = inspect.signature(BatchDecodeWithPagedKVCacheWrapper.run)


class BatchAttentionWithAttentionSinkWrapper(_SinkWrapper, BatchPrefillWithPagedKVCacheWrapper):
    """A ``BatchPrefillWithPagedKVCacheWrapper`` with ``run(q, paged_kv_cache, sinks, sm_scale)``.

    That class takes ``sinks`` by name, too, and needs no variant of its own for them.
    """

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD",
        use_cuda_graph: bool = False, qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None, paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None, custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None, backend: str = "auto",
        pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False,
        q_data_type: str | torch.dtype = torch.bfloat16,
        kv_data_type: str | torch.dtype = torch.bfloat16, head_dim_qk: int = 128,
        head_dim_vo: int = 128, window_left: int = -1,
    ) -> None:  # fmt: skip
        """Remember the device, the buffers, and what ``plan`` will be given.

        Arguments are as of ``BatchPrefillWithPagedKVCacheWrapper``, and the types, head dims and
        window (-1: none) of every later ``plan``.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        refuse_unbuilt(locals())
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf,
            paged_kv_indices_buf, paged_kv_last_page_len_buf, custom_mask_buf, mask_indptr_buf,
            backend,
        )  # fmt: skip
        self._built = _built(q_data_type, kv_data_type, head_dim_qk, head_dim_vo, window_left)

    def run(
        self, q: Tensor, paged_kv_cache: Pair, *args: Any, q_scale: ScaleLike | None = None,
        k_scale: ScaleLike | None = None, **kwargs: Any,
    ) -> Results:  # fmt: skip
        """Attend as ``BatchPrefillWithPagedKVCacheWrapper.run`` does, with sinks and a scale.

        Args:
            q: see there, as for those not described here.
            paged_kv_cache: see there.
            args: sinks [num_qo_heads] and sm_scale, a number, instead of ``plan``'s; or neither.
            q_scale: see there.
            k_scale: see there.
            kwargs: others of that method.

        Raises:
            TypeError, ValueError, ConfigError: naming the argument, before any launch.
        """
        given = {"q": q, "paged_kv_cache": paged_kv_cache, "q_scale": q_scale, "k_scale": k_scale}
        return self._run(*_with_sinks(_PREFILL_RUN, args, {**given, **kwargs}))

    run_return_lse = functools.partialmethod(run, return_lse=True)


class BatchDecodeWithAttentionSinkWrapper(_SinkWrapper, BatchDecodeWithPagedKVCacheWrapper):
    """A ``BatchDecodeWithPagedKVCacheWrapper`` with ``run(q, paged_kv_cache, sinks, sm_scale)``."""

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", backend: str = "auto",
        q_data_type: str | torch.dtype = torch.bfloat16,
        kv_data_type: str | torch.dtype = torch.bfloat16, head_dim_qk: int = 128,
        head_dim_vo: int = 128, window_left: int = -1, **kwargs: Any,
    ) -> None:  # fmt: skip
        """Remember the device, and what ``plan`` will be given; ``kwargs`` as of the class above.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        super().__init__(float_workspace_buffer, kv_layout, backend=backend, **kwargs)
        self._built = _built(q_data_type, kv_data_type, head_dim_qk, head_dim_vo, window_left)

    def run(
        self, q: Tensor, paged_kv_cache: Pair, *args: Any, q_scale: ScaleLike | None = None,
        k_scale: ScaleLike | None = None, **kwargs: Any,
    ) -> Results:  # fmt: skip
        """Attend as ``BatchDecodeWithPagedKVCacheWrapper.run`` does, with sinks and a scale.

        Arguments are as of ``BatchAttentionWithAttentionSinkWrapper.run``.
        """
        given = {"q": q, "paged_kv_cache": paged_kv_cache, "q_scale": q_scale, "k_scale": k_scale}
        return self._run(*_with_sinks(_DECODE_RUN, args, {**given, **kwargs}))

    run_return_lse = functools.partialmethod(run, return_lse=True)
