"""What SGLang's attention backend does over planners, without SGLang: ``Backend``.

backend.py gives it the base that SGLang asks for. Names of arguments are SGLang's, since it passes
them by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from jitattn.integrations.sglang.batches import Batch, Buffers, Forward, Pools, paged, scales_of
from jitattn.integrations.sglang.latents import LatentLayers
from jitattn.integrations.steps import BoundCaches, LayerPlanners
from jitattn.kernels.attention.api import AttentionPlanner
from jitattn.kernels.preprocess.api import append_kv
from jitattn.tensors.page_table_base import PageTable
from jitattn.tensors.scales import ScaleLike


@dataclass
class _LayerState:
    """What is known of a layer, checked once."""

    layer: Any
    planners: LayerPlanners
    is_windowed: bool
    caches: BoundCaches = field(default_factory=BoundCaches)
    views: tuple[object, Tensor, Tensor] | None = None


class Backend:
    """Attention of a model's layers over SGLang's pools.

    Attributes:
        forward_metadata: the batch that layers attend to.
    """

    needs_cpu_seq_lens: bool = False

    forward_metadata: Forward | None

    def __init__(self, runner: Any, *, batch_invariant: bool = False) -> None:
        """Hold the pools of a ``ModelRunner``.

        Args:
            runner: has ``req_to_token_pool``, ``token_to_kv_pool``, ``page_size`` and
                ``sliding_window_size``.
            batch_invariant: a request's bits depend on nothing but itself.

        Raises:
            ValueError: naming what is not supported.
        """
        _refuse_runner(runner)
        window_left = getattr(runner, "sliding_window_size", None)
        self.pools = Pools(
            runner.req_to_token_pool.req_to_token,
            int(runner.page_size or 1),
            runner.token_to_kv_pool,
            -1 if window_left is None else int(window_left),
        )
        if self.pools.is_hybrid and self.pools.window_left < 0:
            raise ValueError("sliding_window_size is None: a hybrid pool keeps windows of it")
        self.forward_metadata = None
        self._batch_invariant = batch_invariant
        self._layers: dict[int, _LayerState] = {}
        self._latents: LatentLayers | None = None
        if getattr(runner, "use_mla_backend", False):
            self._latents = LatentLayers(
                runner.token_to_kv_pool, self.pools.page_size, batch_invariant=batch_invariant
            )
        self._graph_buffers: Buffers | None = None
        # Graphs read these as long as they live.
        self._captured: list[Forward] = []

    # --- batches ----------------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Describe a batch that is run, not replayed.

        Raises:
            ValueError: naming what of it is not supported.
        """
        if forward_batch.forward_mode.is_idle():
            self.forward_metadata = None
            return
        batch = Batch.of(forward_batch)
        num_tokens = 0 if batch.out_cache_loc is None else batch.out_cache_loc.shape[0]
        buffers = Buffers.of(self.pools, batch.rows.shape[0], num_tokens)
        self.forward_metadata = Forward(self.pools, batch, buffers)
        self.forward_metadata.fill()

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what captured batches have in common.

        Args:
            max_bs: the most requests of a captured batch.
            max_num_tokens: the most tokens of one.
        """
        self._graph_buffers = Buffers.of(self.pools, max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Describe a batch to be captured; before a replay there is nothing to do.

        Captured batches are those of DECODE and TARGET_VERIFY. Others are described as if they
        were run.

        Raises:
            ValueError: a capture of another mode, or of a batch larger than was told.
        """
        mode = forward_batch.forward_mode
        is_captured = mode.is_decode() or mode.is_target_verify()
        if not in_capture:
            if not is_captured:
                self.init_forward_metadata(forward_batch)
            return
        if not is_captured:
            raise ValueError(f"forward_mode is {mode.name}: whole captures of it are not supported")
        if self._graph_buffers is None:
            raise ValueError("init_cuda_graph_state has to come before captures")
        batch = Batch.of(forward_batch)
        num_tokens = 0 if batch.out_cache_loc is None else batch.out_cache_loc.shape[0]
        buffers = self._graph_buffers.part(batch.rows.shape[0], num_tokens)
        self.forward_metadata = Forward(self.pools, batch, buffers)
        self._captured.append(self.forward_metadata)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Fill the tables and schedules of a captured batch, as each replay does again."""
        del forward_batch  # its buffers are known
        if self.forward_metadata is not None:
            self.forward_metadata.fill()

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of requests that pad a captured batch: of row 0, whose slot is 0."""
        return 1

    # --- layers -----------------------------------------------------------------------------------

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write K and V of this step's tokens, and attend to all tokens of each request.

        Args:
            q: [num_tokens, num_qo_heads * head_dim], or of three dimensions.
            k: [num_tokens, num_kv_heads, head_dim] or flat; None: the cache has it.
            v: likewise.
            layer: a ``RadixAttention``.
            forward_batch: has ``out_cache_loc``, int64 [num_tokens].
            save_kv_cache: whether k and v are written; else the cache has them already.
            sinks: [num_qo_heads], any float dtype.

        Returns:
            [num_tokens, num_qo_heads * V's elements]; rows past the last request are 0.

        Raises:
            TypeError, ValueError, ConfigError: naming what is not supported or doesn't fit.

        Defined by: jitattn/kernels/attention/reference.py::attention.
        """
        forward = self.forward_metadata
        if forward is None:
            raise ValueError("forward_metadata is None: init_forward_metadata has to come first")
        if self._latents is not None:
            if sinks is not None:
                raise ValueError("sinks are given: latent attention has none")
            return self._latents.attend(
                *(q, k, v, layer, forward_batch, forward), save_kv_cache=save_kv_cache
            )
        state = self._state(layer, has_sinks=sinks is not None)
        k_cache, v_cache = self._views(state)
        k_scale, v_scale = scales_of(layer, k_cache)
        if save_kv_cache and k is not None and v is not None:
            self._write(state, k, v, (k_cache, v_cache), (k_scale, v_scale), forward_batch)
        pages = forward.window_pages if state.is_windowed else forward.pages
        assert pages is not None
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        planner = self._planner(state, q, k_cache, v_cache, pages)
        plan, other = forward.step.plan_of(planner, pages)
        kv = state.caches.of(planner, k_cache, v_cache, k_scale, v_scale)
        out = torch.empty(
            (q.shape[0], layer.tp_q_head_num, layer.v_head_dim), dtype=q.dtype, device=q.device
        )
        plan.run(q, kv, out=out, pages=other, sinks=sinks)
        return out.flatten(1)

    forward_decode = forward_extend  # one token a request

    def _state(self, layer: Any, *, has_sinks: bool) -> _LayerState:
        state = self._layers.get(id(layer))
        if state is None or state.planners.fixed["use_sinks"] != has_sinks:
            _refuse_layer(layer)
            is_windowed = self.pools.is_windowed(layer.layer_id)
            window_left = -1 if layer.sliding_window_size is None else layer.sliding_window_size
            kept = self.pools.window_left
            if is_windowed and not 0 <= window_left <= kept:
                raise ValueError(
                    f"sliding_window_size is {window_left} of layer {layer.layer_id}: the pool of "
                    f"its K and V keeps {kept}"
                )
            arguments = {
                "num_qo_heads": layer.tp_q_head_num,
                "num_kv_heads": layer.tp_k_head_num,
                "head_dim": layer.qk_head_dim,
                "window_left": window_left,
                "logits_soft_cap": float(layer.logit_cap or 0.0),
                "sm_scale": float(layer.scaling),
                "use_sinks": has_sinks,
                "batch_invariant": self._batch_invariant,
            }
            state = _LayerState(layer, LayerPlanners(arguments), is_windowed)
            self._layers[id(layer)] = state
        return state

    def _planner(
        self, state: _LayerState, q: Tensor, k_cache: Tensor, v_cache: Tensor, pages: PageTable
    ) -> AttentionPlanner:
        return state.planners.of(
            head_dim_vo=v_cache.shape[3],
            q_dtype=q.dtype,
            kv_dtype=k_cache.dtype,
            page_size=self.pools.page_size,
            page_table=pages.layout.value,
            causal=True,
            device=q.device,
        )

    def _views(self, state: _LayerState) -> tuple[Tensor, Tensor]:
        """Return K and V as [num_pages, page_size, num_kv_heads, elements]."""
        # This is where SGLang waits for a layer that is loaded from elsewhere.
        k, v = self.pools.kv.get_kv_buffer(state.layer.layer_id)
        place = k.data_ptr(), v.data_ptr(), k.shape
        if state.views is None or state.views[0] != place:
            size = self.pools.page_size
            state.views = place, paged("K", k, size), paged("V", v, size)
        return state.views[1], state.views[2]

    def _write(
        self,
        state: _LayerState,
        k: Tensor,
        v: Tensor,
        caches: tuple[Tensor, Tensor],
        scales: tuple[ScaleLike | None, ScaleLike | None],
        forward_batch: Any,
    ) -> None:
        layer, slots = state.layer, forward_batch.out_cache_loc
        num_tokens = min(k.shape[0], slots.shape[0])  # where either is padded
        if state.is_windowed:
            assert self.forward_metadata is not None
            slots = self.forward_metadata.window_slots
            assert slots is not None
        append_kv(
            k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)[:num_tokens],
            v.view(-1, layer.tp_k_head_num, layer.v_head_dim)[:num_tokens],
            caches,
            slots=slots[:num_tokens],
            k_scale=scales[0],
            v_scale=scales[1],
        )


def _refuse_runner(runner: Any) -> None:
    pool, config = runner.token_to_kv_pool, getattr(runner, "model_config", None)
    pools = [pool, *(getattr(pool, name, None) for name in ("full_kv_pool", "swa_kv_pool"))]
    translator = getattr(runner, "kv_index_translator", None)
    for is_there, what in (
        (
            getattr(runner, "use_mla_backend", False) and not hasattr(pool, "kv_lora_rank"),
            "multi-head latent attention over a pool without latents",
        ),
        (getattr(runner, "is_draft_worker", False), "the draft model of speculative decoding"),
        (getattr(config, "is_encoder_decoder", False), "cross attention"),
        (getattr(translator, "is_translating", False), "a unified memory pool"),
        (any(getattr(p, "is_quantized_kv_cache", False) for p in pools), "a pool of 4 bits"),
        (
            any(getattr(p, "k_scale_buffer", None) is not None for p in pools),
            "a pool with scales of blocks",
        ),
    ):
        if is_there:
            raise ValueError(f'{what} is not supported by the attention backend "jitattn"')


def _refuse_layer(layer: Any) -> None:
    kind = getattr(layer.attn_type, "value", layer.attn_type)
    if layer.is_cross_attention or kind != "decoder":
        what = "cross attention" if layer.is_cross_attention else f"attn_type {kind!r}"
        raise ValueError(f"layer {layer.layer_id} has {what}: only decoder attention is supported")
    for name, plain in (
        ("pos_encoding_mode", "NONE"),
        ("logit_capping_method", "tanh"),
        ("xai_temperature_len", -1),
        ("use_irope", False),
    ):
        value = getattr(layer, name, plain)
        if value != plain:
            raise ValueError(
                f"{name} is {value!r} of layer {layer.layer_id}: only {plain!r} is supported"
            )
