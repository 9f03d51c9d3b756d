"""``attn_implementation="jitattn"`` and ``"paged|jitattn"`` for models of transformers.

``"jitattn"`` reads the caches of ``generate`` where they lie: keys of a row follow each other, so
that a head's row is a request of a "ragged" planner, whatever the cache's length. Which of them a
query sees is decided once per step, where transformers makes its masks: rows of tokens behind
padding, with or without a window, are lengths, and everything else is a mask of bits. What was
decided hangs on the tensor that transformers hands on, and so do the plans of the step.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor

from jitattn.base.validate import INT32_MAX
from jitattn.kernels.attention.api import AttentionPlanner, Plan
from jitattn.kernels.attention.functional import planner_of
from jitattn.kernels.common.planner_base import plan_for_call
from jitattn.kernels.preprocess.api import append_kv
from jitattn.tensors.page_tables import BlockTable, Pages, RaggedKV

__all__ = ["register"]

NAME = "jitattn"
_STEP = "jitattn_step"
_OLDEST = (5, 0)
# Arguments that say nothing about attention, or say again what the mask says.
_SAID_ELSEWHERE = frozenset(
    (
        *("position_ids", "position_embeddings", "cache_position", "use_cache", "return_dict"),
        *("output_hidden_states", "logits_to_keep", "num_items_in_batch", "token_type_ids"),
        *("logits_indices", "logits_processor_args", "output_router_logits", "input_ids"),
        *("num_logits_to_keep",),
    )
)


def register() -> None:
    """Make transformers know ``"jitattn"`` and ``"paged|jitattn"``; once is enough, twice no harm.

    Give ``attn_implementation="jitattn"`` to ``from_pretrained`` or ``set_attn_implementation`` for
    ``generate`` and plain forward passes, ``"paged|jitattn"`` for ``generate_batch``. Models have
    16 bits; docs/engines.md says what is supported, and the rest is refused when it occurs.

    Raises:
        ImportError: transformers is not installed, or is older than 5.0.
    """
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface

    found = tuple(int(n) for n in re.findall(r"\d+", transformers.__version__)[:2])
    if found < _OLDEST:
        raise ImportError(
            f"transformers {transformers.__version__} is installed: jitattn registers with 5.0 and "
            "up"
        )
    # Compiled models call them as they are: planning and launching is nothing to trace.
    apart: Callable[[object], Callable[..., object]] = torch.compiler.disable
    AttentionInterface.register(NAME, apart(_attend))
    AttentionInterface.register(f"paged|{NAME}", apart(_attend_paged))
    AttentionMaskInterface.register(NAME, apart(_mask))


# --- what a query sees ----------------------------------------------------------------------------


@dataclass
class _Step:
    """What the queries of a step see, and the plans for it.

    Query i of a row sits at ``end`` - q_len + i of the row's keys, of which those before its start
    are padding.

    Attributes:
        shape: batch size, queries and keys of a row.
        end: how many keys of each row there are, this step's included: a number, or [].
        causal: queries see no later keys.
        window_left: earlier keys that a query sees besides its own; -1 is all.
        starts: [batch_size], keys of each row that are padding; None: none.
        bits: bool [batch_size * q_len, kv_len], what is seen, instead of all that.
        plans: by what else they depend on.
    """

    shape: tuple[int, int, int]
    end: int | Tensor
    causal: bool = False
    window_left: int = -1
    starts: Tensor | None = None
    bits: Tensor | None = None
    plans: dict[object, Plan] = field(default_factory=dict)


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """Return a tensor [batch_size, 1, q_length, kv_length] that carries a `_Step`.

    Where lengths say it all it is a byte that was expanded: whoever changes it loses the step, and
    is told so by `_attend`.
    """
    from transformers import masking_utils

    if mask_function is None:
        mask_function = masking_utils.causal_mask_function
    shape = batch_size, q_length, kv_length
    step = _step_of_lengths(shape, q_offset, kv_offset, mask_function, attention_mask)
    device = others.get("device", "cpu")
    if step is not None:
        mask = torch.zeros((), dtype=torch.uint8, device=device).expand(batch_size, 1, *shape[1:])
        setattr(mask, _STEP, step)
        return mask
    bits = masking_utils.sdpa_mask(
        *shape,
        q_offset,
        kv_offset,
        mask_function,
        attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=others.get("use_vmap", False),
        device=device,
    )
    assert isinstance(bits, Tensor)
    setattr(bits, _STEP, _step_of_bits(bits, shape))
    return bits


def _step_of_lengths(
    shape: tuple[int, int, int],
    q_offset: int | Tensor,
    kv_offset: int,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None,
) -> _Step | None:
    """Return the step of rows that begin with padding and see what came before; else None."""
    window_left = _window_left(mask_function)
    if window_left is None:
        return None
    _, q_length, kv_length = shape
    end = q_offset - kv_offset + q_length
    step = _Step(shape, end, causal=True, window_left=window_left)
    if attention_mask is None:
        return step
    if attention_mask.dim() != 2:
        return None
    seen = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    seen = torch.nn.functional.pad(seen, (0, kv_length - seen.shape[1]))
    is_past = torch.arange(kv_length, device=seen.device) >= end
    # One answer for the whole step, as transformers waits for one to leave masks out.
    if not bool((seen[:, 1:] | ~seen[:, :-1] | is_past[1:]).all()):
        return None
    step.starts = (~(seen | is_past)).sum(dim=1)
    return step


def _window_left(mask_function: Callable[..., Tensor]) -> int | None:
    """Return the window of transformers' causal masks, -1 without one; None of all others."""
    from transformers import masking_utils

    if mask_function is masking_utils.causal_mask_function:
        return -1
    like = masking_utils.sliding_window_causal_mask_function(1)
    found: list[int] = []
    if not _is_like(mask_function, like, found) or len(found) != 1:
        return None
    return found[0] - 1


def _is_like(one: object, other: object, numbers: list[int]) -> bool:
    """Whether two closures have the same code and cells but for numbers, which are collected."""
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        return one.__code__ is other.__code__ and _is_like(
            one.__closure__ or (), other.__closure__ or (), numbers
        )
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(
            _is_like(a, b, numbers) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, CellType) and isinstance(other, CellType):
        return _is_like(one.cell_contents, other.cell_contents, numbers)
    if type(one) is int and type(other) is int:
        numbers.append(one)
        return True
    return one is other


def _step_of_bits(bits: Tensor, shape: tuple[int, int, int]) -> _Step:
    """Return the step of a bool mask [batch_size or 1, 1, q_length, kv_length]."""
    batch_size, q_length, kv_length = shape
    rows = bits.expand(batch_size, 1, q_length, kv_length).reshape(-1, kv_length)
    return _Step(shape, kv_length, bits=rows.contiguous())


def _step_of_mask(mask: Tensor, shape: tuple[int, int, int]) -> _Step:
    """Return the step of a mask that a caller made, for all layers that get it."""
    found = list(mask.shape)
    batch_size, q_length, kv_length = shape
    if mask.dim() != 4 or found[1:] != [1, q_length, kv_length] or found[0] not in (1, batch_size):
        raise ValueError(
            f"attention_mask has shape {found}: expected [{batch_size}, 1, {q_length}, {kv_length}]"
        )
    if mask.dtype == torch.bool:
        step = _step_of_bits(mask, shape)
    elif mask.is_floating_point():
        seen = mask == 0
        if not bool((seen | (mask <= torch.finfo(mask.dtype).min / 2)).all()):
            raise ValueError(
                "attention_mask has other numbers than 0 and minus infinity: a bias of scores is "
                "not supported"
            )
        step = _step_of_bits(seen, shape)
    else:
        raise ValueError(
            f"attention_mask has dtype {mask.dtype}: expected a bool or float mask, or the one "
            "that jitattn's mask function made, as it was"
        )
    setattr(mask, _STEP, step)
    return step


def _step_without_mask(
    module: Any, shape: tuple[int, int, int], is_causal: bool | None, sliding_window: int | None
) -> _Step:
    _, q_length, kv_length = shape
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if not is_causal:
        if sliding_window is not None:
            raise ValueError(
                f"sliding_window is {sliding_window} without a mask and without causality: such "
                "windows need an attention_mask"
            )
        return _Step(shape, kv_length)
    if q_length not in (1, kv_length):
        raise ValueError(
            f"attention_mask is None: {q_length} queries may stand anywhere among {kv_length} keys"
        )
    window_left = -1 if sliding_window is None else sliding_window - 1
    return _Step(shape, kv_length, causal=True, window_left=window_left)


# --- generate, and plain forward passes -----------------------------------------------------------


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Attend, as transformers asks: q [batch_size, heads, q_len, head_dim], K and V likewise.

    The mask decides what is seen, as it does for eager attention; ``sliding_window`` and
    ``is_causal`` count where there is none.

    Returns:
        out [batch_size, q_len, num_qo_heads, head_dim of V], and no weights.
    """
    _refuse(dropout, others, query, key, value)
    shape = query.shape[0], query.shape[2], key.shape[2]
    if attention_mask is None:
        step = _step_without_mask(module, shape, is_causal, sliding_window)
    else:
        step = getattr(attention_mask, _STEP, None) or _step_of_mask(attention_mask, shape)
        if step.shape != shape:
            raise ValueError(
                f"attention_mask is for {list(step.shape)} (batch, queries, keys): q and K have "
                f"{list(shape)}"
            )
    k, v, row = _as_tokens(key, value)
    config = (
        ("num_qo_heads", query.shape[1]),
        ("num_kv_heads", key.shape[1]),
        ("head_dim", query.shape[3]),
        ("head_dim_vo", value.shape[3]),
        ("q_dtype", query.dtype),
        ("kv_dtype", key.dtype),
        *_scores(scaling, softcap, s_aux, step.window_left, causal=step.causal),
        ("use_custom_mask", step.bits is not None),
    )
    plan = step.plans.get((config, row))
    if plan is None:
        planner = _planner((*config, ("page_table", "ragged"), ("page_size", None)), query.device)
        plan = step.plans[config, row] = _plan(planner, step, row)
    q = query.transpose(1, 2).reshape(-1, query.shape[1], query.shape[3])
    out = plan.run(q, (k, v), sinks=s_aux, custom_mask=step.bits)
    assert isinstance(out, Tensor)
    return out.view(shape[0], shape[1], *out.shape[1:]), None


def _plan(planner: AttentionPlanner, step: _Step, row: int) -> Plan:
    """Plan a step whose rows of K and V begin ``row`` tokens after each other.

    A request without tokens goes before the others, since offsets begin with 0 and the first row
    may begin with padding.
    """
    batch_size, q_length, kv_length = step.shape
    device = planner.device
    last = (batch_size - 1) * row + kv_length
    if last > INT32_MAX:
        raise ValueError(f"key has {last} tokens from first to last: expected at most {INT32_MAX}")
    begins = torch.arange(batch_size, device=device) * row
    lens = torch.zeros(batch_size, dtype=torch.int64, device=device) + step.end
    if step.starts is not None:
        begins, lens = begins + step.starts, lens - step.starts
    kv_indptr = torch.nn.functional.pad(begins, (1, 0))
    kv_indptr = torch.nn.functional.pad(kv_indptr, (0, 1), value=last).int()
    offsets = (torch.arange(-1, batch_size + 1, device=device).clamp(min=0) * q_length).int()
    return planner.plan(
        RaggedKV(kv_indptr),
        torch.nn.functional.pad(lens, (1, 0)),
        offsets,
        max_q_len=q_length,
        max_kv_len=kv_length,
    )


def _as_tokens(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, int]:
    """View [batch_size, heads, length, head_dim] as [tokens, heads, head_dim].

    Tokens between the rows are those of other heads. Nothing is copied unless the rows of K and V
    begin at different multiples of a token's stride, or at no multiple.

    Returns:
        K, V, and how many tokens after each other their rows begin.
    """
    rows = {_row_tokens(tensor) for tensor in (key, value)}
    strides = [(tensor.stride(2), tensor.stride(1), 1) for tensor in (key, value)]
    row = rows.pop()
    if rows or row is None:
        key, value = key.contiguous(), value.contiguous()
        row = key.shape[1] * key.shape[2]
        # Not those of a contiguous tensor, which may be any where a size is 1.
        strides = [(t.shape[3], t.shape[2] * t.shape[3], 1) for t in (key, value)]
    size = (key.shape[0] - 1) * row + key.shape[2]
    k, v = (
        tensor.as_strided((size, tensor.shape[1], tensor.shape[3]), stride)
        for tensor, stride in zip((key, value), strides, strict=True)
    )
    return k, v, row


def _row_tokens(tensor: Tensor) -> int | None:
    """How many tokens after each other rows begin; None where that is no number."""
    row, _, token, element = tensor.stride()
    if tensor.shape[3] > 1 and element != 1:
        return None
    if tensor.shape[0] == 1:
        return tensor.shape[2]
    if token <= 0 or row % token or row // token < tensor.shape[2]:
        return None
    return row // token


# --- generate_batch -------------------------------------------------------------------------------


def _attend_paged(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    cache: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Write K and V into the cache and attend, as continuous batching asks.

    q is [1, num_qo_heads, num_tokens, head_dim], K and V likewise, the tokens of all requests one
    after the other. Layers with a window attend to what ``cache.update`` gathers, the others to the
    blocks where they lie. Requests without keys are padding.

    Returns:
        out [1, num_tokens, num_qo_heads, head_dim of V], and no weights.
    """
    if cache is None:
        raise ValueError(
            'cache is None: "paged|jitattn" is for generate_batch, and "jitattn" for generate'
        )
    if attention_mask is not None:
        raise ValueError('attention_mask is given: "paged|jitattn" takes lengths instead')
    if is_causal is False:
        raise ValueError("is_causal is False: a request's queries see what came before them")
    batch = _Batch.of(module.layer_idx, cache, others)
    _refuse(dropout, others, query, key, value)
    if sliding_window is not None and sliding_window != batch.window:
        raise ValueError(
            f"sliding_window is {sliding_window}: the cache keeps a window of {batch.window}"
        )
    q = query.squeeze(0).transpose(0, 1)
    k, v, pages, page_size = batch.written(key, value)
    window_left = -1 if batch.window is None else batch.window - 1
    config = (
        ("num_qo_heads", q.shape[1]),
        ("num_kv_heads", k.shape[-2]),
        ("head_dim", q.shape[2]),
        ("head_dim_vo", v.shape[-1]),
        ("q_dtype", q.dtype),
        ("kv_dtype", k.dtype),
        *_scores(scaling, softcap, s_aux, window_left, causal=True),
        ("page_table", pages.layout.value),
        ("page_size", page_size),
    )
    plan = plan_for_call(
        _planner(config, q.device),
        pages,
        batch.seq_lens,
        batch.qo_indptr,
        max_q_len=batch.max_q_len,
        # With a table of blocks its width is all that is known.
        max_kv_len=batch.max_kv_len if batch.block_table is None else None,
    )
    out = plan.run(q, (k, v), sinks=s_aux)
    assert isinstance(out, Tensor)
    return out.unsqueeze(0), None


@dataclass
class _Batch:
    """A batch of continuous batching, as one layer has it."""

    cache: Any
    layer_idx: int
    window: int | None
    qo_indptr: Tensor
    kv_indptr: Tensor
    max_q_len: int
    max_kv_len: int
    read_index: Sequence[Tensor]
    write_index: Sequence[Tensor]
    block_table: Tensor | None

    @classmethod
    def of(cls, layer_idx: int, cache: Any, given: dict[str, Any]) -> _Batch:
        """Take what describes the batch out of the other arguments."""
        window = cache.sliding_windows[layer_idx]
        window = None if window == 1 else window  # as the cache says that there is none
        kind = "full_attention" if window is None else "sliding_attention"

        def taken(name: str) -> Any:
            value = given.pop(name, None)
            if value is None:
                raise ValueError(f"{name} is None: continuous batching gives it")
            return value[kind] if isinstance(value, dict) else value

        return cls(
            cache,
            layer_idx,
            window,
            taken("cu_seq_lens_q").int(),
            taken("cu_seq_lens_k").int(),
            int(taken("max_seqlen_q")),
            int(taken("max_seqlen_k")),
            taken("read_index"),
            taken("write_index"),
            given.pop("block_table", None),
        )

    @functools.cached_property
    def seq_lens(self) -> Tensor:
        return self.kv_indptr.diff()

    def written(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Pages, int | None]:
        """Write the new tokens; K, V, where a request's are, and the page size, if any."""
        cache = self.cache
        group, index = cache.layer_index_to_group_indices[self.layer_idx]
        caches = [
            tensors[index].unflatten(0, (-1, cache.block_size))
            for tensors in (cache.key_cache, cache.value_cache)
        ]
        if self.block_table is not None and self.window is None:
            pages = BlockTable(self.block_table[group, : self.seq_lens.shape[0]])
            k, v = (x.squeeze(0).transpose(0, 1).contiguous() for x in (key, value))
            append_kv(
                k,
                v,
                (caches[0], caches[1]),
                pages=pages,
                seq_lens=self.seq_lens,
                qo_indptr=self.qo_indptr,
            )
            return caches[0], caches[1], pages, cache.block_size
        if self.block_table is not None:
            raise ValueError("block_table is given for a layer with a window, which has no blocks")
        k, v = key, value
        read_index, write_index = self.read_index[group], self.write_index[group]
        if self.window is not None or read_index.numel() == 0:
            k, v = cache.update(
                key_states=key,
                value_states=value,
                layer_idx=self.layer_idx,
                read_index=self.read_index,
                write_index=self.write_index,
            )
            return k, v, RaggedKV(self.kv_indptr), None
        for tensors, new in ((cache.key_cache, key), (cache.value_cache, value)):
            tensors[index].index_copy_(0, write_index, new.squeeze(0).transpose(0, 1))
        return caches[0], caches[1], self._blocks(read_index), cache.block_size

    def _blocks(self, read_index: Tensor) -> BlockTable:
        """Return the blocks of each request, from the slots of all of its tokens in order."""
        block_size = self.cache.block_size
        num_blocks = -(-self.max_kv_len // block_size)
        steps = torch.arange(num_blocks, device=read_index.device) * block_size
        # Entries past a request's last block are not read: they are any.
        firsts = (self.kv_indptr[:-1, None] + steps).clamp(max=read_index.shape[0] - 1)
        return BlockTable((read_index[firsts.long()] // block_size).int())


# --- what both have -------------------------------------------------------------------------------

_Config = tuple[tuple[str, object], ...]


def _planner(config: _Config, device: torch.device) -> AttentionPlanner:
    return planner_of(dict(config), device)


def _scores(
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    window_left: int,
    *,
    causal: bool,
) -> _Config:
    return (
        ("sm_scale", scaling),
        ("logits_soft_cap", softcap or 0.0),
        ("use_sinks", sinks is not None),
        ("window_left", window_left),
        ("causal", causal),
    )


def _refuse(dropout: float, others: dict[str, Any], *tensors: Tensor) -> None:
    if dropout:
        raise ValueError(f"dropout is {dropout}: jitattn has none; call model.eval()")
    for name, value in others.items():
        if value is not None and value is not False and name not in _SAID_ELSEWHERE:
            raise ValueError(f"{name} is given: jitattn's attention does not support it")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ValueError("q, K or V requires a gradient: jitattn has none; use torch.no_grad()")
