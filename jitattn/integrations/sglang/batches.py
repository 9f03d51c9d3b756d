"""What SGLang says of a step, as tables and lengths: ``Pools``, ``Batch`` and ``Forward``."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jitattn.integrations.steps import Step, is_quantised
from jitattn.kernels.pages.block_table import build_block_table
from jitattn.tensors.page_table_base import PageTable
from jitattn.tensors.page_tables import BlockTable, RaggedKV, TokenTable
from jitattn.tensors.scales import ScaleLike


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
        # Whose every entry is written before any is read.
        table = functools.partial(
            torch.empty, batch_size, pools.width, dtype=torch.int32, device=device
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
            if getattr(forward_batch.spec_info, "kv_indptr", None) is not None:
                raise ValueError("spec_info has kv_indptr in DECODE: drafting is not supported")
            return batch
        if mode.is_target_verify():
            return batch.with_drafts(forward_batch.spec_info)
        if mode.is_draft_extend_v2() or mode.is_dllm_extend():
            raise ValueError(f"forward_mode is {mode.name}: it is not supported")
        return batch.with_prefixes(forward_batch)

    def with_drafts(self, spec_info: Any) -> Batch:
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

    def with_prefixes(self, forward_batch: Any) -> Batch:
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
        self.pages: PageTable
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

    @functools.cached_property
    def new_tokens(self) -> RaggedKV:
        """Where this step's tokens of each request begin, as K and V without pages."""
        if self._batch.qo_indptr is None:
            raise ValueError("K and V of each head are given in DECODE: only latents are supported")
        return RaggedKV(self._batch.qo_indptr)


def paged(name: str, buffer: Tensor, page_size: int) -> Tensor:
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


def scales_of(layer: Any, cache: Tensor) -> tuple[ScaleLike | None, ScaleLike | None]:
    """Return the scales of an FP8 cache: tensors, which are read when kernels run, or numbers."""
    if not is_quantised(cache.dtype):
        return None, None

    def scale(name: str) -> ScaleLike | None:
        found = getattr(layer, name, None)
        if isinstance(found, Tensor) and found.device == cache.device:
            return found
        number = getattr(layer, f"{name}_float", None)
        return number if number is not None or found is None else float(found)

    return scale("k_scale"), scale("v_scale")
