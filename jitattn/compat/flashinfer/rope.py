"""FlashInfer's rotary embeddings, which torch applies here.

``jitattn.preprocess_qkv`` with a ``jitattn.Rope`` does it in the launch that appends K and V.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from jitattn.base.validate import check_count, check_flag, check_number
from jitattn.compat.flashinfer.absent import names_of
from jitattn.compat.flashinfer.common.batch import check_offsets
from jitattn.compat.rotation import rotate
from jitattn.tensors.rope import Rope
from jitattn.tensors.tensor_checks import INTEGERS, check_device, check_tensor, check_writable

__all__ = [
    "apply_llama31_rope",
    "apply_llama31_rope_inplace",
    "apply_llama31_rope_pos_ids",
    "apply_llama31_rope_pos_ids_inplace",
    "apply_rope",
    "apply_rope_inplace",
    "apply_rope_pos_ids",
    "apply_rope_pos_ids_inplace",
    "apply_rope_with_cos_sin_cache",
    "apply_rope_with_cos_sin_cache_inplace",
]

__getattr__ = names_of(__name__, __all__)

_HALVES = (torch.float16, torch.bfloat16, torch.float32)


def apply_rope(
    q: Tensor, k: Tensor, indptr: Tensor, offsets: Tensor, rotary_dim: int | None = None,
    interleave: bool = False, rope_scale: float = 1, rope_theta: float = 1e4,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Turn q and k of requests that follow each other.

    Args:
        q: [nnz, num_qo_heads, head_dim], float16, bfloat16 or float32, any strides.
        k: [nnz, num_kv_heads, head_dim], likewise.
        indptr: int32 [batch_size + 1], where the tokens of each request begin; rows past
            ``indptr[-1]`` are not turned.
        offsets: int32 or int64 [batch_size], the position of each request's first token.
        rotary_dim: elements of a head that turn, from the first on; None: all.
        interleave: pairs are neighbours; False: rotary_dim / 2 apart.
        rope_scale: positions are divided by this.
        rope_theta: the base of frequencies.

    Returns:
        (q, k), turned, in new tensors.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    turns = _positions(q, indptr, offsets)
    return _turned(q, k, *turns, _rope(q, rotary_dim, interleave, rope_scale, rope_theta))


def apply_rope_inplace(
    q: Tensor, k: Tensor, indptr: Tensor, offsets: Tensor, rotary_dim: int | None = None,
    interleave: bool = False, rope_scale: float = 1, rope_theta: float = 1e4,
) -> None:  # fmt: skip
    """Turn q and k in place: arguments as of ``apply_rope``."""
    turned = apply_rope(q, k, indptr, offsets, rotary_dim, interleave, rope_scale, rope_theta)
    _overwrite(q, k, turned)


def apply_rope_pos_ids(
    q: Tensor, k: Tensor, pos_ids: Tensor, rotary_dim: int | None = None,
    interleave: bool = False, rope_scale: float = 1, rope_theta: float = 1e4,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Turn q and k by positions: ``pos_ids`` int32 or int64 [nnz], others as of ``apply_rope``."""
    _check_positions("pos_ids", pos_ids, q)
    return _turned(q, k, pos_ids, None, _rope(q, rotary_dim, interleave, rope_scale, rope_theta))


def apply_rope_pos_ids_inplace(
    q: Tensor, k: Tensor, pos_ids: Tensor, rotary_dim: int | None = None,
    interleave: bool = False, rope_scale: float = 1, rope_theta: float = 1e4,
) -> None:  # fmt: skip
    """Turn q and k in place: arguments as of ``apply_rope_pos_ids``."""
    turned = apply_rope_pos_ids(q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta)
    _overwrite(q, k, turned)


def apply_llama31_rope(
    q: Tensor, k: Tensor, indptr: Tensor, offsets: Tensor, rotary_dim: int | None = None,
    interleave: bool = False, rope_scale: float = 8, rope_theta: float = 5e5,
    low_freq_factor: float = 1, high_freq_factor: float = 4, old_context_len: int = 8192,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Turn q and k by the frequencies of Llama 3.1; others as of ``apply_rope``.

    Args:
        q: see there, as for those not described here.
        k: see there.
        indptr: see there.
        offsets: see there.
        rotary_dim: see there.
        interleave: see there.
        rope_scale: what low frequencies are divided by.
        rope_theta: the base of frequencies.
        low_freq_factor: a frequency is low from ``old_context_len`` / this tokens a turn on.
        high_freq_factor: and unchanged up to ``old_context_len`` / this; between, both are mixed.
        old_context_len: tokens that the model was first trained with.
    """
    turns = _positions(q, indptr, offsets)
    bands = low_freq_factor, high_freq_factor, old_context_len
    return _turned(q, k, *turns, _rope(q, rotary_dim, interleave, rope_scale, rope_theta, bands))


def apply_llama31_rope_inplace(
    q: Tensor, k: Tensor, indptr: Tensor, offsets: Tensor, rotary_dim: int | None = None,
    interleave: bool = False, rope_scale: float = 8, rope_theta: float = 5e5,
    low_freq_factor: float = 1, high_freq_factor: float = 4, old_context_len: int = 8192,
) -> None:  # fmt: skip
    """Turn q and k in place: arguments as of ``apply_llama31_rope``."""
    turned = apply_llama31_rope(
        q, k, indptr, offsets, rotary_dim, interleave, rope_scale, rope_theta, low_freq_factor,
        high_freq_factor, old_context_len,
    )  # fmt: skip
    _overwrite(q, k, turned)


def apply_llama31_rope_pos_ids(
    q: Tensor, k: Tensor, pos_ids: Tensor, rotary_dim: int | None = None,
    interleave: bool = False, rope_scale: float = 8, rope_theta: float = 5e5,
    low_freq_factor: float = 1, high_freq_factor: float = 4, old_context_len: int = 8192,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Turn q and k by positions: ``pos_ids`` [nnz], others as of ``apply_llama31_rope``."""
    _check_positions("pos_ids", pos_ids, q)
    bands = low_freq_factor, high_freq_factor, old_context_len
    rope = _rope(q, rotary_dim, interleave, rope_scale, rope_theta, bands)
    return _turned(q, k, pos_ids, None, rope)


def apply_llama31_rope_pos_ids_inplace(
    q: Tensor, k: Tensor, pos_ids: Tensor, rotary_dim: int | None = None,
    interleave: bool = False, rope_scale: float = 8, rope_theta: float = 5e5,
    low_freq_factor: float = 1, high_freq_factor: float = 4, old_context_len: int = 8192,
) -> None:  # fmt: skip
    """Turn q and k in place: arguments as of ``apply_llama31_rope_pos_ids``."""
    turned = apply_llama31_rope_pos_ids(
        q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta, low_freq_factor,
        high_freq_factor, old_context_len,
    )  # fmt: skip
    _overwrite(q, k, turned)


def apply_rope_with_cos_sin_cache(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor,
    is_neox: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Turn queries and keys by a table.

    Args:
        positions: int32 or int64 [nnz], rows of the table.
        query: [nnz, num_qo_heads * head_size], float16, bfloat16 or float32.
        key: [nnz, num_kv_heads * head_size], likewise.
        head_size: elements of a head.
        cos_sin_cache: float32 [max_seq_len, rotary_dim]: cosines, then sines.
        is_neox: pairs are rotary_dim / 2 apart; False: they are neighbours.

    Returns:
        (query, key), turned, in new tensors.

    Raises:
        TypeError, ValueError: naming the argument; on the CPU also a position past the table.
    """
    size = check_count("head_size", head_size, least=1)
    check_tensor("cos_sin_cache", cos_sin_cache, (torch.float32,))
    if cos_sin_cache.dim() != 2 or not 0 < cos_sin_cache.shape[1] <= size:
        raise ValueError(
            f"cos_sin_cache has shape {list(cos_sin_cache.shape)}: expected [max_seq_len, "
            f"rotary_dim], rotary_dim at most {size}"
        )
    parts = []
    for name, tensor in (("query", query), ("key", key)):
        check_tensor(name, tensor, _HALVES)
        if tensor.dim() != 2 or tensor.shape[1] % size:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}: expected [nnz, num_heads * {size}]"
            )
        parts.append(tensor.view(tensor.shape[0], -1, size))
    check_device("cos_sin_cache", cos_sin_cache, query.device)
    _check_positions("positions", positions, query)
    rows = cos_sin_cache.shape[0]
    if positions.device.type == "cpu" and positions.numel() and int(positions.max()) >= rows:
        raise ValueError(f"positions has {int(positions.max())}: cos_sin_cache has {rows} rows")
    cos, sin = cos_sin_cache[positions.long()].chunk(2, dim=-1)
    interleaved = not check_flag("is_neox", is_neox)
    turned_q, turned_k = (rotate(x, cos, sin, interleaved=interleaved).flatten(1) for x in parts)
    return turned_q, turned_k


def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor,
    is_neox: bool = True,
) -> None:  # fmt: skip
    """Turn queries and keys in place: arguments as of ``apply_rope_with_cos_sin_cache``."""
    turned = apply_rope_with_cos_sin_cache(positions, query, key, head_size, cos_sin_cache, is_neox)
    check_writable("query", query)
    check_writable("key", key)
    query.copy_(turned[0])
    key.copy_(turned[1])


def _positions(q: Tensor, indptr: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's position, and which rows are of a request."""
    check_tensor("q", q, _HALVES)
    check_offsets("indptr", indptr)
    check_device("indptr", indptr, q.device)
    check_tensor("offsets", offsets, INTEGERS)
    check_device("offsets", offsets, q.device)
    batch_size = indptr.shape[0] - 1
    if tuple(offsets.shape) != (batch_size,):
        raise ValueError(f"offsets has shape {list(offsets.shape)}: expected [{batch_size}]")
    rows = torch.arange(q.shape[0], dtype=torch.int32, device=q.device)
    request = torch.searchsorted(indptr[1:].contiguous(), rows, right=True)
    is_turned = request < batch_size
    if batch_size == 0:
        return rows, is_turned
    request = torch.where(is_turned, request, 0)
    return rows - indptr[:-1][request] + offsets[request], is_turned


def _check_positions(name: str, positions: Tensor, q: Tensor) -> None:
    check_tensor("q", q, _HALVES)
    check_tensor(name, positions, INTEGERS)
    check_device(name, positions, q.device)
    if tuple(positions.shape) != (q.shape[0],):
        raise ValueError(f"{name} has shape {list(positions.shape)}: expected [{q.shape[0]}]")
    if positions.device.type == "cpu" and positions.numel() and int(positions.min()) < 0:
        raise ValueError(f"{name} has {int(positions.min())}: expected positions from 0 on")


def _rope(
    q: Tensor,
    rotary_dim: int | None,
    interleave: bool,
    rope_scale: float,
    rope_theta: float,
    bands: tuple[float, float, int] | None = None,
) -> Rope:
    """Return the frequencies that arguments of FlashInfer mean."""
    if q.dim() != 3:
        raise ValueError(f"q has shape {list(q.shape)}: expected [nnz, num_qo_heads, head_dim]")
    scale = check_number("rope_scale", rope_scale, least=0.0)
    theta = check_number("rope_theta", rope_theta, least=0.0)
    dim = q.shape[2] if rotary_dim is None else check_count("rotary_dim", rotary_dim)
    scaling: dict[str, object] = {"rope_type": "linear", "factor": scale}
    if bands is not None:
        names = "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
        scaling = {"rope_type": "llama3", "factor": scale, **dict(zip(names, bands, strict=True))}
    return _rope_of(q.shape[2], dim, check_flag("interleave", interleave), theta, _frozen(scaling))


def _frozen(scaling: Mapping[str, object]) -> tuple[tuple[str, object], ...]:
    return tuple(scaling.items())


@functools.lru_cache(maxsize=64)
def _rope_of(
    head_dim: int,
    rotary_dim: int,
    interleaved: bool,
    base: float,
    scaling: tuple[tuple[str, object], ...],
) -> Rope:
    return Rope(
        head_dim,
        rotary_dim=rotary_dim,
        base=base,
        scaling=dict(scaling),
        interleaved=interleaved,
    )


def _turned(
    q: Tensor, k: Tensor, positions: Tensor, is_turned: Tensor | None, rope: Rope
) -> tuple[Tensor, Tensor]:
    """Return q and k, turned where ``is_turned``."""
    check_tensor("k", k, (q.dtype,))
    check_device("k", k, q.device)
    if k.dim() != 3 or k.shape[0] != q.shape[0] or k.shape[2] != q.shape[2]:
        raise ValueError(
            f"k has shape {list(k.shape)}: expected [{q.shape[0]}, num_kv_heads, {q.shape[2]}]"
        )
    angles = positions.float()[:, None] * rope.inv_freq.to(q.device)
    if is_turned is not None:
        angles = torch.where(is_turned[:, None], angles, 0.0)
    cos, sin = angles.cos(), angles.sin()
    turned_q, turned_k = (rotate(x, cos, sin, interleaved=rope.interleaved) for x in (q, k))
    return turned_q, turned_k


def _overwrite(q: Tensor, k: Tensor, turned: tuple[Tensor, Tensor]) -> None:
    check_writable("q", q)
    check_writable("k", k)
    q.copy_(turned[0])
    k.copy_(turned[1])
