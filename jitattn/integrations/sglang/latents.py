"""Multi-head latent attention over SGLang's pools of latents: ``LatentLayers``.

Models call it in two ways. With projections multiplied in, q has a latent and a rope part, and K
is what the pool keeps. With K and V of each head, a prompt's first tokens attend to themselves
alone, and the model has written the latents.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from jitattn.integrations.sglang.batches import Forward, paged, scales_of
from jitattn.integrations.steps import LayerPlanners, place_of
from jitattn.kernels.mla.api import MLAPlanner
from jitattn.kernels.mla.check import BoundMLACache
from jitattn.kernels.preprocess.api import append_kv
from jitattn.tensors.scales import ScaleLike


class LatentLayers:
    """The layers of a model whose pool keeps a latent and a rope part of each token."""

    def __init__(self, pool: Any, page_size: int, *, batch_invariant: bool) -> None:
        """Hold the pool, which has ``kv_lora_rank``, ``qk_rope_head_dim`` and ``get_key_buffer``.

        Raises:
            ValueError: naming what of it is not supported.
        """
        if getattr(pool, "use_dsa", False) or getattr(pool, "dsa_kv_cache_store_fp8", False):
            raise ValueError('sparse attention is not supported by the attention backend "jitattn"')
        self._pool, self._page_size = pool, page_size
        self._rank, self._rope = int(pool.kv_lora_rank), int(pool.qk_rope_head_dim)
        self._batch_invariant = batch_invariant
        self._bound: dict[tuple[MLAPlanner, int], tuple[object, BoundMLACache]] = {}
        self._dense: dict[object, LayerPlanners] = {}

    def attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        forward: Forward,
        *,
        save_kv_cache: bool,
    ) -> Tensor:
        """Write what is new, and attend.

        Args:
            q: [num_tokens, heads * (kv_lora_rank + qk_rope_head_dim)], the latent part first; or
                with K and V of each head [num_tokens, heads * head_dim].
            k: [num_tokens, 1, kv_lora_rank + qk_rope_head_dim], or [num_tokens, heads, head_dim].
            v: the latent part of k, or [num_tokens, heads, V's elements].
            layer: a ``RadixAttention``.
            forward_batch: as of ``Backend.forward_extend``.
            forward: the batch.
            save_kv_cache: whether k is written.

        Returns:
            [num_tokens, heads * kv_lora_rank], or [num_tokens, heads * V's elements].

        Raises:
            TypeError, ValueError, ConfigError: naming what is not supported or doesn't fit.

        Defined by: jitattn/kernels/mla/reference.py::latent_attention,
        jitattn/kernels/attention/reference.py::attention.
        """
        _refuse_layer(layer)
        q = q.reshape(q.shape[0], layer.tp_q_head_num, layer.qk_head_dim)
        if layer.qk_head_dim != self._rank + self._rope:
            if k is None or v is None or save_kv_cache:
                raise ValueError(
                    f"layer {layer.layer_id} has head_dim {layer.qk_head_dim}: the pool keeps "
                    f"latents of {self._rank} and {self._rope} elements"
                )
            return self._attend_to_new(q, k, v, layer, forward_batch, forward)
        cache = paged("K", self._pool.get_key_buffer(layer.layer_id), self._page_size)
        scale = _scale_of(layer, cache)
        if save_kv_cache and k is not None:
            self._write(k, cache, forward_batch.out_cache_loc, scale)
        return self._attend_to_latents(q, cache, layer, forward, scale)

    def _write(self, k: Tensor, cache: Tensor, slots: Tensor, scale: ScaleLike | None) -> None:
        num_tokens, rank = min(k.shape[0], slots.shape[0]), self._rank
        rows = k.view(-1, 1, rank + self._rope)[:num_tokens]
        append_kv(
            rows[..., :rank],
            rows[..., rank:],
            (cache[..., :rank], cache[..., rank:]),
            slots=slots[:num_tokens],
            k_scale=scale,
            v_scale=scale,
        )

    def _attend_to_latents(
        self, q: Tensor, cache: Tensor, layer: Any, forward: Forward, scale: ScaleLike | None
    ) -> Tensor:
        pages = forward.pages
        arguments = {
            "num_heads": layer.tp_q_head_num,
            "kv_lora_rank": self._rank,
            "qk_rope_head_dim": self._rope,
            "page_size": self._page_size,
            "sm_scale": float(layer.scaling),
            "q_dtype": q.dtype,
            "kv_dtype": cache.dtype,
            "page_table": pages.layout.value,
            "batch_invariant": self._batch_invariant,
        }
        planner = _planner(tuple(arguments.items()), q.device)
        plan, other = forward.step.plan_of(planner, pages)
        parts = q[..., : self._rank], q[..., self._rank :]
        out: Tensor = plan.run(*parts, self._kv(planner, layer, cache, scale), pages=other)
        return out.flatten(1)

    def _kv(
        self, planner: MLAPlanner, layer: Any, cache: Tensor, scale: ScaleLike | None
    ) -> BoundMLACache:
        key, places = (planner, layer.layer_id), (place_of(cache), place_of(scale))
        found = self._bound.get(key)
        if found is None or found[0] != places:
            found = self._bound[key] = places, planner.bind(cache.squeeze(2), k_scale=scale)
        return found[1]

    def _attend_to_new(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, forward: Forward
    ) -> Tensor:
        prefixes = forward_batch.extend_prefix_lens_cpu
        if prefixes is None or any(int(n) for n in prefixes):
            raise ValueError(
                f"extend_prefix_lens_cpu is {prefixes}: K and V of each head are supported where "
                "no request has a prefix"
            )
        if getattr(forward_batch, "mha_return_lse", False):
            raise ValueError("mha_return_lse is True: prefixes in chunks are not supported")
        num_heads = layer.tp_k_head_num
        k = k.view(-1, num_heads, layer.qk_head_dim)
        v = v.view(-1, num_heads, layer.v_head_dim)
        kind = layer.tp_q_head_num, num_heads, layer.qk_head_dim, float(layer.scaling)
        planners = self._dense.get(kind)
        if planners is None:
            names = ("num_qo_heads", "num_kv_heads", "head_dim", "sm_scale")
            arguments = dict(zip(names, kind, strict=True))
            arguments["batch_invariant"] = self._batch_invariant
            planners = self._dense[kind] = LayerPlanners(arguments)
        planner = planners.of(
            head_dim_vo=layer.v_head_dim,
            q_dtype=q.dtype,
            kv_dtype=k.dtype,
            page_size=None,
            page_table="ragged",
            causal=True,
            device=q.device,
        )
        plan, other = forward.step.plan_of(planner, forward.new_tokens)
        out: Tensor = plan.run(q, (k, v), pages=other)
        return out.flatten(1)


@functools.lru_cache(maxsize=64)
def _planner(arguments: tuple[tuple[str, Any], ...], device: torch.device) -> MLAPlanner:
    given: Mapping[str, Any] = dict(arguments)
    return MLAPlanner(**given, device=device)


def _refuse_layer(layer: Any) -> None:
    window = layer.sliding_window_size
    if window is not None and window >= 0:
        raise ValueError(
            f"sliding_window_size is {window} of layer {layer.layer_id}: latent attention has no "
            "windows"
        )
    if layer.logit_cap:
        raise ValueError(
            f"logit_cap is {layer.logit_cap} of layer {layer.layer_id}: latent attention has no "
            "soft cap"
        )


def _scale_of(layer: Any, cache: Tensor) -> ScaleLike | None:
    """Return the scale of FP8 latents: a tensor, read when kernels run, or a number; or None."""
    return scales_of(layer, cache)[0]
