"""Keywords of flash-attn 3 and of vLLM's build, which users of the functions here also have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from torch import Tensor

from jitattn.base.validate import check_flag, shown
from jitattn.compat.flash_attn.common import FLOATS, is_unsplit
from jitattn.tensors.tensor_checks import check_device, check_tensor

_SCALES = "q, k and v have 16 bits and no scales"
_RANKS = "jitattn.parallel has context parallelism, and merge_states merges what ranks have"
_CHUNKS = "chunked attention is not built: window_size has windows"


class Options(TypedDict, total=False):
    """Those keywords; what each does is in docs/from-flash-attn.md."""

    page_table: Tensor | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    cu_seqlens_k_new: Tensor | None
    leftpad_k: Tensor | None
    rotary_seqlens: Tensor | None
    s_aux: Tensor | None
    learnable_sink: Tensor | None
    out: Tensor | None
    qv: Tensor | None
    q_v: Tensor | None
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    attention_chunk: int
    scheduler_metadata: object
    pack_gqa: bool | None
    sm_margin: int
    fa_version: int
    cp_world_size: int
    cp_rank: int
    cp_tot_seqused_k: Tensor | None


class VarlenOptions(Options, total=False):
    """Those of functions that have no such argument of flash-attn 2's."""

    return_softmax_lse: bool
    num_splits: int


class CacheOptions(Options, total=False):
    """Those of ``flash_attn_with_kvcache``."""

    cu_seqlens_q: Tensor | None
    max_seqlen_q: int | None


# What a keyword may be, and why not something else.
_ALLOWED: Mapping[str, tuple[object, str]] = {
    "qv": (None, "scores are products of q and k alone: MLAPlanner has latent attention"),
    "q_descale": (None, _SCALES),
    "k_descale": (None, _SCALES),
    "v_descale": (None, _SCALES),
    "q_v": (None, "scores are products of q and k alone: MLAPlanner has latent attention"),
    "attention_chunk": (0, _CHUNKS),
    "seqused_q": (None, "all queries count: cu_seqlens_q says where those of a request begin"),
    "leftpad_k": (None, "flash_attn_with_kvcache has cache_leftpad"),
    "cu_seqlens_k_new": (None, "as many tokens of each request are appended: append_kv has others"),
    "rotary_seqlens": (None, "tokens turn by their place: preprocess_qkv takes positions"),
    "cp_world_size": (1, _RANKS),
    "cp_rank": (0, _RANKS),
    "cp_tot_seqused_k": (None, _RANKS),
}
# What says how flash-attn computes, and changes nothing here.
_CHOICES = frozenset(("scheduler_metadata", "pack_gqa", "sm_margin", "fa_version"))
_HONOURED = frozenset(
    (
        *("page_table", "seqused_k", "s_aux", "learnable_sink", "out", "return_softmax_lse"),
        *("cu_seqlens_q", "max_seqlen_q", "num_splits"),
    )
)


def check_options(
    options: Options | VarlenOptions | CacheOptions, honoured: tuple[str, ...]
) -> dict[str, Any]:
    """Return those of ``honoured`` that are given, by name.

    Args:
        options: keywords of flash-attn 3 or of vLLM.
        honoured: names that the caller does something with.

    Raises:
        TypeError: a name that neither has.
        ValueError: one that asks for what is not built.
    """
    given: Mapping[str, Any] = {**options}
    for name, value in given.items():
        if name in _ALLOWED:
            allowed, why = _ALLOWED[name]
            if value is not allowed and not (type(value) is int and value == allowed):
                raise ValueError(f"{name} is {_shown(value)}: {why}, expected {allowed}")
        elif name in _HONOURED and name not in honoured and value is not None:
            raise ValueError(f"{name} is {_shown(value)}: this function has none, expected None")
        elif name not in _HONOURED and name not in _CHOICES:
            raise TypeError(f"{name} is no argument of flash-attn 2, flash-attn 3 or vLLM's")
    return {name: value for name, value in given.items() if name in honoured}


def _shown(value: object) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else shown(value)


def table_of(block_table: Tensor | None, options: Mapping[str, Any]) -> Tensor | None:
    """Return the table that one of both names gives.

    Raises:
        ValueError: both do.
    """
    page_table: Tensor | None = options.get("page_table")
    if block_table is not None and page_table is not None:
        raise ValueError("page_table is given, and so is block_table: expected one")
    return page_table if block_table is None else block_table


def sinks_of(options: Mapping[str, Any], q: Tensor) -> Tensor | None:
    """Return a number for each head, whose exp is added to each sum.

    Raises:
        TypeError, ValueError: naming it.
    """
    for name in ("s_aux", "learnable_sink"):
        sinks: Tensor | None = options.get(name)
        if sinks is not None:
            check_tensor(name, sinks, FLOATS)
            if tuple(sinks.shape) != (q.shape[-2],):
                raise ValueError(f"{name} has shape {list(sinks.shape)}: expected [{q.shape[-2]}]")
            check_device(name, sinks, q.device)
            return sinks
    return None


def splits_of(options: Mapping[str, Any]) -> bool:
    """Return whether ``num_splits`` asks for bits that don't depend on the batch."""
    return is_unsplit(options.get("num_splits") or 0)


def wants_lse(options: Mapping[str, Any]) -> bool:
    """Return ``return_softmax_lse``."""
    return check_flag("return_softmax_lse", options.get("return_softmax_lse") or False)
