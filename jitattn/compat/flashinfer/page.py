"""FlashInfer's functions around pages: tokens appended by request and position, and lengths."""

from __future__ import annotations

import torch
from torch import Tensor

from jitattn.base.validate import INT32_MAX, check_count
from jitattn.compat.flashinfer.absent import names_of
from jitattn.compat.flashinfer.common.arguments import Q_DTYPES, check_layout, paged_cache
from jitattn.compat.flashinfer.common.batch import (
    check_indices,
    check_last_pages,
    check_offsets,
    csr_lens,
)
from jitattn.compat.gradients import refuse_gradients
from jitattn.kernels.preprocess.api import append_kv
from jitattn.spec.config import HEAD_DIMS
from jitattn.tensors.quantization import KVCache, QuantizedKV
from jitattn.tensors.tensor_checks import (
    INTEGERS,
    check_device,
    check_last_stride,
    check_tensor,
    check_writable,
    new_tensor,
)

__all__ = [
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
]

__getattr__ = names_of(__name__, __all__)

_TOKENS = tuple(getattr(torch, name) for name in Q_DTYPES)
_CACHES = (*_TOKENS, torch.float8_e4m3fn, torch.float8_e5m2)


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: Tensor | tuple[Tensor, Tensor],
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Write keys and values of new tokens into the cache, in place.

    Args:
        append_key: [num_tokens, num_kv_heads, head_dim], float16 or bfloat16.
        append_value: likewise.
        batch_indices: int32 or int64 [num_tokens], the request of each token; negative: it is not
            written.
        positions: int32 or int64 [num_tokens], its place in the request.
        paged_kv_cache: [num_pages, 2, page_size, num_kv_heads, head_dim] ("HND": heads before
            tokens) or a pair of such tensors without the second dimension, any strides but the
            last. FP8 stores what is nearest, with a scale of 1.
        kv_indices: int32 [>= kv_indptr[-1]], page ids.
        kv_indptr: int32 [batch_size + 1], where the pages of each request begin.
        kv_last_page_len: int32 [batch_size], tokens in the last page, these included.
        kv_layout: "NHD" or "HND".

    Raises:
        TypeError, ValueError: naming the argument; on the CPU also a request or a position outside
            the batch, which on the device is not written.
    """
    check_layout(kv_layout)
    for name, tensor in (("append_key", append_key), ("append_value", append_value)):
        _check_tokens(name, tensor, 3)
    check_tensor("append_value", append_value, (append_key.dtype,))
    refuse_gradients({"append_key": append_key, "append_value": append_value})
    kv_dtype = _cache_dtype("paged_kv_cache", paged_kv_cache)
    cache = paged_cache("paged_kv_cache", paged_kv_cache, kv_layout, kv_dtype, None)
    assert not isinstance(cache, QuantizedKV)
    k = cache[:, 0] if isinstance(cache, Tensor) else cache[0]
    page_size = k.shape[1 if kv_layout == "NHD" else 2]
    heads = k.shape[2 if kv_layout == "NHD" else 1]
    for name, tensor in (("append_key", append_key), ("append_value", append_value)):
        if tensor.shape[2] not in HEAD_DIMS:
            raise ValueError(
                f"{name} has a head_dim of {tensor.shape[2]}: expected a multiple of 16 up to 256, "
                "or 512"
            )
        if tensor.shape[0] != append_key.shape[0] or tensor.shape[1] != heads:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}: expected [{append_key.shape[0]}, {heads}, "
                "head_dim]"
            )
    tables = kv_indices, kv_indptr, kv_last_page_len
    slots = _slots(batch_indices, positions, tables, page_size, append_key)
    _append(append_key, append_value, cache, slots, kv_layout)


def append_paged_mla_kv_cache(
    append_ckv: Tensor,
    append_kpe: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    ckv_cache: Tensor | None,
    kpe_cache: Tensor | None,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
) -> None:
    """Write latents and rope parts of new tokens into their caches, in place.

    Args:
        append_ckv: [num_tokens, head_dim_ckv], float16 or bfloat16.
        append_kpe: [num_tokens, head_dim_kpe], likewise.
        batch_indices: see ``append_paged_kv_cache``, as for those not described here.
        positions: see there.
        ckv_cache: [num_pages, page_size, head_dim_ckv], any strides but the last.
        kpe_cache: [num_pages, page_size, head_dim_kpe], likewise. None is refused, as it is for
            ``ckv_cache``.
        kv_indices: int32 [>= kv_indptr[-1]].
        kv_indptr: int32 [batch_size + 1].
        kv_last_page_len: int32 [batch_size].

    Raises:
        TypeError, ValueError: naming the argument.
    """
    for name, tensor in (("append_ckv", append_ckv), ("append_kpe", append_kpe)):
        _check_tokens(name, tensor, 2)
    check_tensor("append_kpe", append_kpe, (append_ckv.dtype,))
    refuse_gradients({"append_ckv": append_ckv, "append_kpe": append_kpe})
    for name, cache in (("ckv_cache", ckv_cache), ("kpe_cache", kpe_cache)):
        check_tensor(name, cache, _CACHES)
        assert cache is not None
        if cache.dim() != 3:
            raise ValueError(
                f"{name} has shape {list(cache.shape)}: expected [num_pages, page_size, dim]"
            )
        check_last_stride(name, cache)
        check_writable(name, cache)
    pairs = (("append_ckv", append_ckv, ckv_cache), ("append_kpe", append_kpe, kpe_cache))
    for name, tensor, cache in pairs:
        assert cache is not None
        if tensor.shape[1] not in HEAD_DIMS or tensor.shape[1] != cache.shape[2]:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}: expected [num_tokens, {cache.shape[2]}], "
                "a multiple of 16 up to 256, or 512"
            )
        if tensor.shape[0] != append_ckv.shape[0]:
            raise ValueError(f"{name} has {tensor.shape[0]} rows: append_ckv has others")
    assert ckv_cache is not None
    assert kpe_cache is not None
    tables = kv_indices, kv_indptr, kv_last_page_len
    slots = _slots(batch_indices, positions, tables, ckv_cache.shape[1], append_ckv)
    caches = ckv_cache.unsqueeze(2), kpe_cache.unsqueeze(2)
    _append(append_ckv.unsqueeze(1), append_kpe.unsqueeze(1), caches, slots, "NHD")


def get_seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    """Return the tokens of each request of a CSR table.

    Args:
        kv_indptr: int32 [batch_size + 1], where the pages of each request begin.
        kv_last_page_len: int32 [batch_size], tokens in the last page.
        page_size: tokens of a page.

    Returns:
        [batch_size]: a request without pages has ``kv_last_page_len`` tokens, as in FlashInfer.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    check_offsets("kv_indptr", kv_indptr)
    check_last_pages("kv_last_page_len", kv_last_page_len, None, kv_indptr.shape[0] - 1, page_size)
    page_size = check_count("page_size", page_size, most=INT32_MAX)
    return (kv_indptr.diff() - 1).clamp(min=0) * page_size + kv_last_page_len


def get_batch_indices_positions(
    append_indptr: Tensor, seq_lens: Tensor, nnz: int, batch_indices: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the request and the position of each new token, the last of its request.

    Args:
        append_indptr: int32 [batch_size + 1], where the new tokens of each request begin.
        seq_lens: int32 or int64 [batch_size], tokens of each request, these included.
        nnz: rows of the result; those past ``append_indptr[-1]`` are of no request, -1.
        batch_indices: int32 [nnz] to fill, or None.
        positions: likewise; 0 for rows of no request.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    offsets = check_offsets("append_indptr", append_indptr)
    batch_size, device = append_indptr.shape[0] - 1, append_indptr.device
    num_rows = check_count("nnz", nnz, least=0, most=INT32_MAX)
    _check_vector("seq_lens", seq_lens, batch_size, device)
    if offsets is not None and offsets[-1] > num_rows:
        raise ValueError(f"nnz is {num_rows}: append_indptr[-1] is {offsets[-1]}")
    results = []
    for name, given in (("batch_indices", batch_indices), ("positions", positions)):
        if given is None:
            given = new_tensor("nnz", (num_rows,), torch.int32, device)
        check_tensor(name, given, (torch.int32,))
        _check_vector(name, given, num_rows, device)
        check_writable(name, given)
        results.append(given)
    rows = torch.arange(num_rows, dtype=torch.int32, device=device)
    request = torch.searchsorted(append_indptr[1:].contiguous(), rows, right=True)
    is_new = request < batch_size
    request = torch.where(is_new, request, 0)
    if batch_size:
        place = seq_lens[request] - append_indptr[1:][request] + rows
        results[1].copy_(torch.where(is_new, place, 0))
    else:
        results[1].zero_()
    results[0].copy_(torch.where(is_new, request, -1))
    return results[0], results[1]


def _check_tokens(name: str, tensor: Tensor, num_dims: int) -> None:
    check_tensor(name, tensor, _TOKENS)
    if tensor.dim() != num_dims:
        wanted = "[num_tokens, num_kv_heads, head_dim]" if num_dims == 3 else "[num_tokens, dim]"
        raise ValueError(f"{name} has shape {list(tensor.shape)}: expected {wanted}")


def _cache_dtype(name: str, cache: Tensor | tuple[Tensor, Tensor]) -> str:
    first = cache[0] if isinstance(cache, tuple | list) and cache else cache
    check_tensor(name, first, _CACHES)
    assert isinstance(first, Tensor)
    return str(first.dtype).removeprefix("torch.")


def _check_vector(name: str, value: Tensor, size: int, device: torch.device) -> None:
    check_tensor(name, value, INTEGERS)
    if tuple(value.shape) != (size,):
        raise ValueError(f"{name} has shape {list(value.shape)}: expected [{size}]")
    check_device(name, value, device)


def _slots(
    batch_indices: Tensor,
    positions: Tensor,
    tables: tuple[Tensor, Tensor, Tensor],
    page_size: int,
    tokens: Tensor,
) -> Tensor:
    """Return page * page_size + place of each token, -1 where it goes nowhere."""
    kv_indices, kv_indptr, kv_last_page_len = tables
    offsets = check_offsets("kv_indptr", kv_indptr)
    device, batch_size = tokens.device, kv_indptr.shape[0] - 1
    check_indices("kv_indices", kv_indices, "kv_indptr", offsets)
    check_last_pages("kv_last_page_len", kv_last_page_len, offsets, batch_size, page_size)
    for name, table in zip(("kv_indices", "kv_indptr", "kv_last_page_len"), tables, strict=True):
        check_device(name, table, device)
    _check_vector("batch_indices", batch_indices, tokens.shape[0], device)
    _check_vector("positions", positions, tokens.shape[0], device)
    lens = csr_lens(kv_indptr, kv_last_page_len, page_size)
    if device.type == "cpu":
        _check_places(batch_indices.tolist(), positions.tolist(), lens.tolist())
    if batch_size == 0 or kv_indices.shape[0] == 0:
        return torch.full_like(positions, -1, dtype=torch.int64)
    has_request = (batch_indices >= 0) & (batch_indices < batch_size)
    request = torch.where(has_request, batch_indices, 0).long()
    is_inside = has_request & (positions >= 0) & (positions < lens[request])
    place = torch.where(is_inside, positions, 0).long()
    entry = torch.where(is_inside, kv_indptr[request] + place // page_size, 0)
    return torch.where(is_inside, kv_indices[entry].long() * page_size + place % page_size, -1)


def _check_places(requests: list[int], positions: list[int], lens: list[int]) -> None:
    for i, (b, position) in enumerate(zip(requests, positions, strict=True)):
        if b >= len(lens):
            raise ValueError(f"batch_indices[{i}] is {b}: there are {len(lens)} requests")
        if b >= 0 and not 0 <= position < lens[b]:
            raise ValueError(
                f"positions[{i}] is {position}: request {b} has {lens[b]} tokens by kv_indptr and "
                "kv_last_page_len"
            )


def _append(k: Tensor, v: Tensor, cache: KVCache, slots: Tensor, kv_layout: str) -> None:
    k, v = (x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    append_kv(k, v, cache, slots=slots, kv_layout=kv_layout)
