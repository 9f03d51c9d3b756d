"""vLLM's multi-head latent attention over planners, without vLLM: mla.py gives it base classes.

Decode steps attend to what the cache keeps of each token, with projections multiplied in
(``LatentLayer``). Prompts attend to K and V of each head, which vLLM multiplies out: this step's,
and then what it gathers of the cache, a chunk at a time (``Prompts``).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jitattn.integrations.steps import FP8, LayerPlanners, Step, is_quantised, place_of
from jitattn.kernels.attention.api import AttentionPlanner
from jitattn.kernels.mla.api import MLAPlanner
from jitattn.kernels.mla.check import BoundMLACache
from jitattn.kernels.preprocess.api import append_kv
from jitattn.tensors.page_tables import RaggedKV

CACHE_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3")
_16_BITS = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def cache_dtype(name: str, model_dtype: torch.dtype) -> torch.dtype:
    """Return what a cache of vLLM's name ``name`` has, of a model of ``model_dtype``."""
    return FP8.get(name, _16_BITS.get(name, model_dtype))


@dataclass(frozen=True, eq=False)
class Latents:
    """What kernels want to know of a decode step's tensors.

    Attributes:
        num_heads: query heads, those of all ranks that share a request's keys.
        q_dtype: of queries and outputs.
        page_size: tokens of a page.
        device: where they are.
    """

    num_heads: int
    q_dtype: torch.dtype
    page_size: int
    device: torch.device


class LatentLayer:
    """Latent attention of one layer: writes latents and rope parts, and attends to them.

    Attributes:
        scale: multiplies scores.
        kv_lora_rank: elements of a latent.
        qk_rope_head_dim: elements of a rope part.
        kv_cache_dtype: vLLM's name of the cache's dtype.
        need_to_return_lse_for_decode: whether keys of a request are spread over ranks.
    """

    scale: float
    kv_lora_rank: int
    qk_rope_head_dim: int
    kv_cache_dtype: str
    need_to_return_lse_for_decode: bool = False
    _bound: tuple[object, BoundMLACache] | None = None

    def planner(self, latents: Latents) -> MLAPlanner:
        """Return the planner of decode steps, one for all layers of a kind.

        Raises:
            ConfigError: with every reason why the configuration has no kernel.
        """
        arguments = {
            "num_heads": latents.num_heads,
            "kv_lora_rank": self.kv_lora_rank,
            "qk_rope_head_dim": self.qk_rope_head_dim,
            "sm_scale": self.scale,
            "page_size": latents.page_size,
            "q_dtype": latents.q_dtype,
            "kv_dtype": cache_dtype(self.kv_cache_dtype, latents.q_dtype),
        }
        return _planner(tuple(arguments.items()), latents.device)

    def plan(self, decode: Any, latents: Latents) -> None:
        """Make the plan that ``forward_mqa`` will ask for, as captures need it.

        Raises:
            ConfigError, TypeError, ValueError: as ``forward_mqa``.
        """
        decode.step.plan_of(self.planner(latents), decode.pages)

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Write latents and rope parts of this step's tokens, in one launch.

        Args:
            kv_c_normed: [at least num_tokens, kv_lora_rank].
            k_pe: [at least num_tokens, 1, qk_rope_head_dim], after the rotary embedding.
            kv_cache: [num_pages, page_size, kv_lora_rank + qk_rope_head_dim]; without elements
                nothing is written, as in runs that measure memory.
            slot_mapping: int64 [num_tokens], page * page_size + place; -1 is not written.
            kv_cache_dtype: not read: it is the layer's.
            k_scale: float32 [] or [1] of FP8 caches, read when the kernel runs.
            skip_scale: not read: scales of 1 change nothing.

        Raises:
            TypeError, ValueError: naming what doesn't fit, before any launch.
        """
        del kv_cache_dtype, skip_scale
        if kv_cache.numel() == 0:
            return
        cache = self._typed(kv_cache, kv_c_normed.dtype)[:, :, None]
        slots, rank = slot_mapping.flatten(), self.kv_lora_rank
        num_tokens = slots.shape[0]
        scale = k_scale if is_quantised(cache.dtype) else None
        append_kv(
            kv_c_normed[:num_tokens, None],
            k_pe[:num_tokens].view(num_tokens, 1, self.qk_rope_head_dim),
            (cache[..., :rank], cache[..., rank:]),
            slots=slots,
            k_scale=scale,
            v_scale=scale,
        )

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend the query tokens of decode steps to the latents of their requests.

        Args:
            q: (q_nope, q_pe) of [num_tokens, num_heads, ..], or one tensor of both, q_nope first,
                with the projection of keys multiplied in.
            kv_c_and_k_pe_cache: as of ``do_kv_cache_update``. It is read where it is: no part of
                it is gathered or converted.
            attn_metadata: has ``decode``, whose ``step`` and ``pages`` all layers share.
            layer: has ``_k_scale``, the scale of FP8 latents, read when the kernel runs.

        Returns:
            out [num_tokens, num_heads, kv_lora_rank], and with decode context parallelism lse
            float32 [num_tokens, num_heads], natural logarithms; 0 and -inf where this rank has no
            keys of a request.

        Raises:
            TypeError, ValueError, ConfigError: naming what is not supported or doesn't fit.

        Defined by: jitattn/kernels/mla/reference.py::latent_attention.
        """
        rank = self.kv_lora_rank
        q_nope, q_pe = q if isinstance(q, tuple) else (q[..., :rank], q[..., rank:])
        cache = self._typed(kv_c_and_k_pe_cache, q_nope.dtype)
        shape = Latents(q_nope.shape[1], q_nope.dtype, cache.shape[1], q_nope.device)
        planner, decode = self.planner(shape), attn_metadata.decode
        plan, pages = decode.step.plan_for(self, planner, decode.pages)
        scale = layer._k_scale if is_quantised(cache.dtype) else None
        kv = self._bind(planner, cache, scale)
        if not self.need_to_return_lse_for_decode:
            return plan.run(q_nope, q_pe, kv, pages=pages), None
        out, lse = plan.run(q_nope, q_pe, kv, pages=pages, return_lse=True)
        return out, lse

    def _typed(self, kv_cache: Tensor, model_dtype: torch.dtype) -> Tensor:
        """Return the cache with its values' dtype: vLLM keeps FP8 as bytes."""
        width = self.kv_lora_rank + self.qk_rope_head_dim
        if kv_cache.dim() != 3 or kv_cache.shape[2] != width:
            raise ValueError(
                f"kv_cache has shape {list(kv_cache.shape)}: expected [num_pages, page_size, "
                f"{width}]"
            )
        dtype = cache_dtype(self.kv_cache_dtype, model_dtype)
        return kv_cache if kv_cache.dtype == dtype else kv_cache.view(dtype)

    def _bind(self, planner: MLAPlanner, cache: Tensor, scale: Tensor | None) -> BoundMLACache:
        at = planner, place_of(cache), place_of(scale)
        if self._bound is None or self._bound[0] != at:
            self._bound = at, planner.bind(cache, k_scale=scale)
        return self._bound[1]


@dataclass(frozen=True, eq=False)
class _Part:
    """Requests of a step, and where the keys begin that their queries are to attend to."""

    step: Step
    pages: RaggedKV


class Prompts:
    """Attention of prompts, with K and V of each head and without pages.

    Attributes:
        num_heads: heads of q, K and V.
        scale: multiplies scores.
        qk_nope_head_dim: elements of a head of q and K without those that turn.
        qk_rope_head_dim: those that turn.
        v_head_dim: elements of a head of V.
    """

    num_heads: int
    scale: float
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    _prefill_metadata: Any = None

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        """Take the prompts of a step; all its layers share the plans.

        Args:
            prefill_metadata: has ``query_start_loc``, int32 [num_reqs + 1], and
                ``max_query_len``; with earlier tokens in the cache ``chunked_context``.
        """
        self._prefill_metadata = prefill_metadata
        self._parts: dict[int | None, _Part] = {}

    def planner(
        self, dtype: torch.dtype, device: torch.device, *, causal: bool
    ) -> AttentionPlanner:
        """Return the planner of prompts, or of what is before them.

        Raises:
            ConfigError: with every reason why the configuration has no kernel.
        """
        return self._planners.of(
            head_dim_vo=self.v_head_dim,
            q_dtype=dtype,
            kv_dtype=dtype,
            page_size=None,
            page_table="ragged",
            causal=causal,
            device=device,
        )

    @functools.cached_property
    def _planners(self) -> LayerPlanners:
        return LayerPlanners(
            {
                "num_qo_heads": self.num_heads,
                "num_kv_heads": self.num_heads,
                "head_dim": self.qk_nope_head_dim + self.qk_rope_head_dim,
                "sm_scale": self.scale,
            }
        )

    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        return_softmax_lse: bool,
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend this step's query tokens to themselves and those before them in this step.

        Args:
            q: [num_tokens, num_heads, qk_nope_head_dim + qk_rope_head_dim].
            k: likewise.
            v: [num_tokens, num_heads, v_head_dim], any strides but the last.
            return_softmax_lse: return lse as well.
            out: as of v; allocated when None.
            output_scale: refused.

        Returns:
            out, or (out, lse): lse is float32 [num_heads, num_tokens], natural logarithms.

        Raises:
            TypeError, ValueError: naming what doesn't fit, before any launch.

        Defined by: jitattn/kernels/attention/reference.py::attention.
        """
        if output_scale is not None:
            raise ValueError("output_scale is given: quantised outputs are not supported")
        prompts = self._prefill_metadata
        part = self._part(None, prompts, prompts.query_start_loc)
        found, lse = self._attend(part, q, k, v, out, causal=True, with_lse=return_softmax_lse)
        return found if lse is None else (found, lse)

    def run_prefill_context_chunk(
        self,
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        chunk_idx: int = 0,
        chunk: Any = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend query tokens to tokens of their requests that the cache had before this step.

        Args:
            q: [num_tokens, num_heads, qk_nope_head_dim + qk_rope_head_dim]: all of the step's
                prompts, or with ``chunk`` those of its requests.
            k: [tokens of the chunk, num_heads, qk_nope_head_dim + qk_rope_head_dim].
            v: [tokens of the chunk, num_heads, v_head_dim].
            chunk_idx: which of ``chunked_context``, in vLLM before 0.30 or so.
            chunk: has ``index``, ``query_start_loc``, ``max_query_len`` and ``cu_seq_lens``.
            out: as of q with v's elements; allocated when None.

        Returns:
            As ``run_prefill_new_tokens``; 0 and -inf where a request has none of the chunk.

        Raises:
            TypeError, ValueError: naming what doesn't fit, before any launch.
        """
        prompts = self._prefill_metadata
        if chunk is None:
            starts = prompts.chunked_context.cu_seq_lens[chunk_idx]
            part = self._part(chunk_idx, prompts, starts)
        else:
            part = self._part(chunk.index, chunk, chunk.cu_seq_lens)
        found, lse = self._attend(part, q, k, v, out, causal=False, with_lse=True)
        assert lse is not None
        return found, lse

    def _part(self, index: int | None, queries: Any, key_starts: Tensor) -> _Part:
        part = self._parts.get(index)
        if part is None:
            lens = key_starts.diff()
            step = Step(lens, queries.query_start_loc, int(queries.max_query_len))
            part = self._parts[index] = _Part(step, RaggedKV(key_starts))
        return part

    def _attend(
        self,
        part: _Part,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None,
        *,
        causal: bool,
        with_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        planner = self.planner(q.dtype, q.device, causal=causal)
        plan, pages = part.step.plan_of(planner, part.pages)
        lse = None
        if with_lse:
            # vLLM merges lse of [num_heads, num_tokens].
            lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
        rows = None if lse is None else lse.T
        return plan.run(q, (k, v), pages=pages, out=out, lse=rows), lse


@functools.lru_cache(maxsize=64)
def _planner(arguments: tuple[tuple[str, Any], ...], device: torch.device) -> MLAPlanner:
    given: Mapping[str, Any] = dict(arguments)
    return MLAPlanner(**given, device=device)
