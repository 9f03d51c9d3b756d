"""What SGLang's attention backend does over planners, without SGLang: ``Backend``.

backend.py gives it the base that SGLang asks for. Names of arguments are SGLang's, since it passes
them by name.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from jitattn.integrations.steps import BoundCaches, LayerPlanners, Scale, Step, is_quantised
from jitattn.pages import BlockTable, Pages, TokenTable
from jitattn.planner import AttentionPlanner
from jitattn.preprocess import append_kv
from jitattn.tables import build_block_table


@dataclass(frozen=True)
class Pools:
    """Where tokens lie.

    Attributes:
        req_to_token: int32 [num_rows, width], the slot of every token of a request.
        page_size: tokens of a page.
        kv: the pool, which has ``get_kv_buffer``; a hybrid one has ``layers_mapping`` and
            ``full_to_swa_index_mapping`` besides.
        window_left: earlier tokens that a hybrid pool keeps for its layers with a window.
    """

    req_to_token: Tensor
    page_size: int
    kv: Any
    window_left: int = -1

    @property
    def width(self) -> int:
        """Pages that a request may have."""
        return -(-self.req_to_token.shape[1] // self.page_size)

    @property
    def is_hybrid(self) -> bool:
        """Whether layers with a window have slots of their own."""
        return hasattr(self.kv, "layers_mapping")

    @property
    def has_tokens(self) -> bool:
        """Whether kernels read the slots of tokens where they are, instead of a block table."""
        return self.page_size == 1

    def is_windowed(self, layer_id: int) -> bool:
        """Whether a layer's K and V are in the part with slots of its own."""
        return self.is_hybrid and bool(self.kv.layers_mapping[layer_id][1])

    @property
    def slot_map(self) -> Tensor:
        """The slot of layers with a window for each of the others': int64 [num_slots]."""
        mapping = self.kv.full_to_swa_index_mapping
        if mapping is None:
            raise ValueError("full_to_swa_index_mapping is None: the pool has none yet")
        return mapping  # type: ignore[no-any-return]


@dataclass
class Buffers:
    """Memory of the tables of a batch; that of captures is shared, since replays follow each other.

    Attributes:
        kv_lens: int64 [most requests].
        table: int32 [most requests, width], or None where slots are read as they are.
        window_table: likewise of layers with a window of a hybrid pool, or None.
        kv_start: int64 [most requests], with ``window_table``.
        window_slots: int64 [most tokens], likewise.
    """

    kv_lens: Tensor
    table: Tensor | None
    window_table: Tensor | None
    kv_start: Tensor | None
    window_slots: Tensor | None

    @classmethod
    def of(cls, pools: Pools, batch_size: int, num_tokens: int) -> Buffers:
        """Allocate them for one batch, or for all up to these sizes."""
        device = pools.req_to_token.device
        int64 = functools.partial(torch.zeros, dtype=torch.int64, device=device)
        table = functools.partial(
            torch.zeros, batch_size, pools.width, dtype=torch.int32, device=device
        )
        is_hybrid = pools.is_hybrid
        return cls(
            int64(batch_size),
            None if pools.has_tokens else table(),
            table() if is_hybrid else None,
            int64(batch_size) if is_hybrid else None,
            int64(num_tokens) if is_hybrid else None,
        )

    def part(self, batch_size: int, num_tokens: int) -> Buffers:
        """Return those of a batch."""

        def first(tensor: Tensor | None, size: int) -> Tensor | None:
            if tensor is not None and tensor.shape[0] < size:
                raise ValueError(
                    f"a batch of {batch_size} requests and {num_tokens} tokens is larger than "
                    "init_cuda_graph_state was told"
                )
            return None if tensor is None else tensor[:size]

        kv_lens = first(self.kv_lens, batch_size)
        assert kv_lens is not None
        return Buffers(
            kv_lens,
            first(self.table, batch_size),
            first(self.window_table, batch_size),
            first(self.kv_start, batch_size),
            first(self.window_slots, num_tokens),
        )


@dataclass
class Batch:
    """A batch as SGLang describes it, read once.

    Attributes:
        rows: int32 or int64 [batch_size], the row of each request in ``req_to_token``.
        seq_lens: int32 or int64 [batch_size], KV tokens; this step's included but for drafts.
        out_cache_loc: int64 [num_tokens], the slots of this step's tokens; or None.
        num_drafts: tokens of each request to be verified, which ``seq_lens`` leaves out.
        qo_indptr: int32 [batch_size + 1], or None: one token a request.
        max_q_len: the most query tokens of a request.
    """

    rows: Tensor
    seq_lens: Tensor
    out_cache_loc: Tensor | None
    num_drafts: int = 0
    qo_indptr: Tensor | None = None
    max_q_len: int = 1

    @classmethod
    def of(cls, forward_batch: Any) -> Batch:
        """Read a ``ForwardBatch``; nothing is waited for.

        Raises:
            ValueError: naming what of its mode is not supported.
        """
        mode, batch_size = forward_batch.forward_mode, int(forward_batch.batch_size)
        if getattr(forward_batch, "encoder_lens", None) is not None:
            raise ValueError("encoder_lens are given: cross attention is not supported")
        batch = cls(
            forward_batch.req_pool_indices[:batch_size],
            forward_batch.seq_lens[:batch_size],
            forward_batch.out_cache_loc,
        )
        if mode.is_decode():
            if forward_batch.spec_info is not None:
                raise ValueError("spec_info is given in DECODE: drafting is not supported")
            return batch
        if mode.is_target_verify():
            return batch._with_drafts(forward_batch.spec_info)
        if mode.is_draft_extend_v2() or mode.is_dllm_extend():
            raise ValueError(f"forward_mode is {mode.name}: it is not supported")
        return batch._with_prefixes(forward_batch)

    def _with_drafts(self, spec_info: Any) -> Batch:
        """Of a chain of draft tokens each request, one after the other."""
        topk = getattr(spec_info, "topk", None)
        is_tree = topk is None and getattr(spec_info, "custom_mask", None) is not None
        if is_tree or topk not in (None, 0, 1):
            raise ValueError(
                f"topk is {topk} in TARGET_VERIFY: trees of draft tokens are not supported, chains "
                "(topk=1) are"
            )
        if getattr(spec_info, "ragged_verify_layout", None) is not None:
            raise ValueError("ragged_verify_layout is given: it is not supported")
        given = int(getattr(spec_info, "num_tokens_per_req", -1))
        self.num_drafts = given if given > 0 else int(spec_info.draft_token_num)
        self.max_q_len = self.num_drafts
        ends = torch.arange(self.rows.shape[0] + 1, dtype=torch.int32, device=self.rows.device)
        self.qo_indptr = ends * self.num_drafts
        return self

    def _with_prefixes(self, forward_batch: Any) -> Batch:
        """Of requests whose last tokens are new."""
        lens = forward_batch.extend_seq_lens[: self.rows.shape[0]]
        self.qo_indptr = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int()
        on_host = forward_batch.extend_seq_lens_cpu
        if on_host is not None and len(on_host):
            self.max_q_len = max(int(n) for n in on_host)
        else:
            assert self.out_cache_loc is not None
            self.max_q_len = self.out_cache_loc.shape[0]  # no request has more
        return self


class Forward:
    """A batch's tables and plans, for all layers.

    Attributes:
        step: lengths, offsets and plans.
        pages: where tokens lie.
        window_pages: where those of layers with a window lie, in a hybrid pool.
        window_slots: int64 [num_tokens], where this step's go there.
    """

    def __init__(self, pools: Pools, batch: Batch, buffers: Buffers) -> None:
        """Describe a batch; ``fill`` has to follow."""
        self._pools, self._batch, self._buffers = pools, batch, buffers
        self.pages: Pages
        if buffers.table is None:
            self.pages = TokenTable(pools.req_to_token, rows=batch.rows)
        else:
            self.pages = BlockTable(buffers.table)
        self.window_pages: BlockTable | None = None
        if buffers.window_table is not None:
            self.window_pages = BlockTable(buffers.window_table)
        self.window_slots = buffers.window_slots
        self.step = Step(buffers.kv_lens, batch.qo_indptr, batch.max_q_len)

    def fill(self) -> None:
        """Write lengths and tables from what the batch's tensors hold now, and all schedules.

        It can be captured: nothing is allocated that outlives it, and nothing waited for.
        """
        batch, buffers, pools = self._batch, self._buffers, self._pools
        kv_lens = buffers.kv_lens
        kv_lens.copy_(batch.seq_lens)
        if batch.num_drafts:
            # Row 0 is nobody's: its requests are padding, and have no draft tokens' slots.
            kv_lens.add_(batch.num_drafts).mul_(batch.rows > 0)
        if buffers.table is not None:
            build_block_table(
                pools.req_to_token,
                kv_lens,
                pools.page_size,
                rows=batch.rows,
                out=buffers.table,
            )
        if buffers.window_table is not None:
            self._fill_window(buffers.window_table)
        self.step.refresh()

    def _fill_window(self, table: Tensor) -> None:
        batch, buffers, pools = self._batch, self._buffers, self._pools
        kv_start = buffers.kv_start
        assert kv_start is not None
        # The first token that the first query of a request sees: others may be mapped to nothing.
        q_lens: Tensor | int = 1 if batch.qo_indptr is None else batch.qo_indptr.diff()
        kv_start.copy_((buffers.kv_lens - q_lens - pools.window_left).clamp(min=0))
        build_block_table(
            pools.req_to_token,
            buffers.kv_lens,
            pools.page_size,
            rows=batch.rows,
            kv_start=kv_start,
            slot_map=pools.slot_map,
            out=table,
        )
        if self.window_slots is not None and batch.out_cache_loc is not None:
            self.window_slots.copy_(pools.slot_map[batch.out_cache_loc])


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

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write K and V of one token a request, and attend; see ``forward_extend``."""
        return self.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, sinks)

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

        Defined by: jitattn/reference.py::attention.
        """
        forward = self.forward_metadata
        if forward is None:
            raise ValueError("forward_metadata is None: init_forward_metadata has to come first")
        state = self._state(layer, has_sinks=sinks is not None)
        k_cache, v_cache = self._views(state)
        k_scale, v_scale = _scales(layer, k_cache)
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
        self, state: _LayerState, q: Tensor, k_cache: Tensor, v_cache: Tensor, pages: Pages
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
            state.views = place, _paged("K", k, size), _paged("V", v, size)
        return state.views[1], state.views[2]

    def _write(
        self,
        state: _LayerState,
        k: Tensor,
        v: Tensor,
        caches: tuple[Tensor, Tensor],
        scales: tuple[Scale | None, Scale | None],
        forward_batch: Any,
    ) -> None:
        layer, slots = state.layer, forward_batch.out_cache_loc
        num_tokens = slots.shape[0]
        if state.is_windowed:
            assert self.forward_metadata is not None
            slots = self.forward_metadata.window_slots
            assert slots is not None
            slots = slots[:num_tokens]
        append_kv(
            k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)[:num_tokens],
            v.view(-1, layer.tp_k_head_num, layer.v_head_dim)[:num_tokens],
            caches,
            slots=slots,
            k_scale=scales[0],
            v_scale=scales[1],
        )


def _paged(name: str, buffer: Tensor, page_size: int) -> Tensor:
    """View a pool's K or V as [num_pages, page_size, num_kv_heads, elements].

    It has [num_slots, num_kv_heads, elements], any strides, or with heads before tokens
    [num_pages, num_kv_heads, page_size, elements].
    """
    if buffer.dim() == 3:
        num_pages, rest = divmod(buffer.shape[0], page_size)
        if rest == 0:
            slot, head, element = buffer.stride()
            # With its strides as they are, whatever the size of a dimension.
            return buffer.as_strided(
                (num_pages, page_size, *buffer.shape[1:]), (slot * page_size, slot, head, element)
            )
    elif buffer.dim() == 4 and buffer.shape[2] == page_size:
        return buffer.transpose(1, 2)
    raise ValueError(
        f"{name} of the pool has shape {list(buffer.shape)}: expected [num_slots, num_kv_heads, "
        f"elements] of whole pages or [num_pages, num_kv_heads, {page_size}, elements]"
    )


def _scales(layer: Any, cache: Tensor) -> tuple[Scale | None, Scale | None]:
    """Return the scales of an FP8 cache: tensors, which are read when kernels run, or numbers."""
    if not is_quantised(cache.dtype):
        return None, None

    def scale(name: str) -> Scale | None:
        found = getattr(layer, name, None)
        if isinstance(found, Tensor) and found.device == cache.device:
            return found
        number = getattr(layer, f"{name}_float", None)
        return number if number is not None or found is None else float(found)

    return scale("k_scale"), scale("v_scale")


def _refuse_runner(runner: Any) -> None:
    pool, config = runner.token_to_kv_pool, getattr(runner, "model_config", None)
    pools = [pool, *(getattr(pool, name, None) for name in ("full_kv_pool", "swa_kv_pool"))]
    translator = getattr(runner, "kv_index_translator", None)
    for is_there, what in (
        (getattr(runner, "use_mla_backend", False), "multi-head latent attention"),
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
