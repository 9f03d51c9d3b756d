"""TensorRT-LLM's KV pools and block-offset tables, as caches and page tables of planners.

A pool is [num_pages, num_layers, K and V, num_kv_heads, tokens_per_block, head_dim], dense. To a
layer it is a row of blocks, from its own first one on, and an entry of a table counts blocks there:
the K and V of a page have entries of their own. Nothing is copied here.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jitattn.base.validate import INT32_MAX, check_count, check_flag, shown
from jitattn.spec.dtype import DType, dtype_name
from jitattn.tensors.page_tables import BlockTable
from jitattn.tensors.quantization import CACHE_DTYPES, NVFP4_BLOCK, KVCache, QuantizedKV
from jitattn.tensors.tensor_checks import INTEGERS, check_device, check_tensor

__all__ = ["LayerPool", "block_table", "check_block_offsets", "layer_pool", "pool_of_layer"]

# int4 of TensorRT-LLM has no zeros.
_DTYPES = tuple(name for name in CACHE_DTYPES if not name.startswith(DType.INT4.value))


@dataclass(frozen=True, slots=True)
class LayerPool:
    """The blocks of a layer, those that an entry of a block-offset table can name.

    Attributes:
        blocks: [num_blocks, num_kv_heads, tokens_per_block, head_dim], from the layer's first K
            on; of NVFP4 uint8 with head_dim / 2 bytes.
        scales: of NVFP4 the scales of blocks of 16 elements, float8_e4m3fn [num_blocks,
            num_kv_heads, tokens_per_block, head_dim / 16]; else None.
        kv_factor: 2, or 1 where K and V are one latent.
    """

    blocks: Tensor
    scales: Tensor | None
    kv_factor: int

    def kv(self, *, uses_shared_paged_kv_idx: bool = False) -> KVCache:
        """Return what ``AttentionPlanner.bind`` takes, with kv_layout="HND".

        Args:
            uses_shared_paged_kv_idx: for ``block_table`` with the same: K ids stand for V, too,
                which is the block behind. False: K and V ids, of one row of blocks.

        Raises:
            ValueError: K and V are one latent.
        """
        if self.kv_factor != 2:
            raise ValueError(f"kv_factor is {self.kv_factor}: K and V are one, see latent()")
        is_shared = check_flag("uses_shared_paged_kv_idx", uses_shared_paged_kv_idx)
        k, v = _k_and_v(self.blocks, is_shared)
        if self.scales is None:
            return k, v
        return QuantizedKV(k, v, *_k_and_v(self.scales, is_shared))

    def latent(self) -> Tensor:
        """Return [num_blocks, tokens_per_block, head_dim], which ``MLAPlanner.bind`` takes.

        Raises:
            ValueError: it has K and V, more than a head, or NVFP4.
        """
        if self.kv_factor != 1 or self.blocks.shape[1] != 1 or self.scales is not None:
            raise ValueError(
                f"kv_factor is {self.kv_factor} with {self.blocks.shape[1]} heads: a latent has a "
                "kv_factor of 1, one head, and no scales of blocks"
            )
        return self.blocks.squeeze(1)


def _k_and_v(blocks: Tensor, is_shared: bool) -> tuple[Tensor, Tensor]:
    return (blocks[:-1], blocks[1:]) if is_shared else (blocks, blocks)


def layer_pool(
    pool: int | Tensor,
    layer_idx: int,
    *,
    num_kv_heads: int,
    tokens_per_block: int,
    head_dim: int,
    dtype: torch.dtype | str | None = None,
    num_blocks: int | None = None,
    device: torch.device | str | None = None,
    kv_factor: int = 2,
    scale_pool: int | Tensor | None = None,
    scale_layout: str | None = None,
) -> LayerPool:
    """View a layer of a pool.

    Args:
        pool: the address of its first byte, which stays the caller's memory and must outlive the
            view; or a contiguous tensor of all of it, of any shape.
        layer_idx: the layer's place in the pool.
        num_kv_heads: heads of K and V.
        tokens_per_block: tokens of a block.
        head_dim: elements of a head.
        dtype: of K and V: float16, bfloat16, FP8, int8 or "nvfp4"; None: that of the tensor. A
            tensor of bytes is read as it.
        num_blocks: blocks of the pool, each of a layer's K or V: pages * layers * ``kv_factor``;
            needed with an address, and with a tensor None.
        device: where the address is; needed with one, and with a tensor None.
        kv_factor: 2, or 1 where K and V are one latent.
        scale_pool: of NVFP4 the pool of the scales of blocks of 16 elements, likewise.
        scale_layout: of NVFP4 "linear": scales in the order of tokens and elements, as jitattn
            writes them. TensorRT-LLM's kernels interleave those of V by four tokens, which is not
            built, so that there is no default.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    for place, value in (("pool", pool), ("scale_pool", scale_pool)):
        if value is not None and not isinstance(value, Tensor):
            check_count(place, value)
    factor = check_count("kv_factor", kv_factor, most=2)
    layer = check_count("layer_idx", layer_idx, least=0)
    name = _dtype_name(pool, dtype)
    names = "num_kv_heads", "tokens_per_block", "head_dim"
    block = tuple(map(check_count, names, (num_kv_heads, tokens_per_block, head_dim)))
    is_nvfp4 = name == "nvfp4"
    _check_scales(is_nvfp4, head_dim, scale_pool, scale_layout)
    stored = torch.uint8 if is_nvfp4 else getattr(torch, name)
    shape = (*block[:2], head_dim // 2 if is_nvfp4 else head_dim)
    blocks = _blocks("pool", pool, shape, stored, num_blocks, device)
    scales = None
    if scale_pool is not None:
        scales = _scales_like(blocks, (*block[:2], head_dim // NVFP4_BLOCK), scale_pool, num_blocks)
        scales = scales[layer * factor :]
    if (layer + 1) * factor > blocks.shape[0]:
        raise ValueError(f"layer_idx is {layer}: the pool has {blocks.shape[0]} blocks")
    return LayerPool(blocks[layer * factor :], scales, factor)


def _scales_like(
    blocks: Tensor, shape: tuple[int, ...], scale_pool: int | Tensor, num_blocks: int | None
) -> Tensor:
    """View the scales of NVFP4 blocks, as many as there are blocks."""
    device = None if isinstance(scale_pool, Tensor) else blocks.device
    scales = _blocks("scale_pool", scale_pool, shape, torch.float8_e4m3fn, num_blocks, device)
    if scales.shape[0] != blocks.shape[0]:
        raise ValueError(
            f"scale_pool has {scales.shape[0]} blocks: expected {blocks.shape[0]}, like pool"
        )
    check_device("scale_pool", scales, blocks.device)
    return scales


def pool_of_layer(
    host_kv_cache_pool_pointers: Tensor, host_kv_cache_pool_mapping: Tensor, layer_idx: int
) -> tuple[int, int, int, int | None]:
    """Look a layer up in the tables that TensorRT-LLM has on the host.

    Args:
        host_kv_cache_pool_pointers: int64 [num_pools, 2], addresses on the GPU and on the host; of
            NVFP4 [num_pools, 2, 2], those of data and of scales last. On the CPU.
        host_kv_cache_pool_mapping: int32 [num_layers, 2], the pool of a layer and its place there.
        layer_idx: the layer.

    Returns:
        (pool_idx, its place in the pool, the address of the pool, that of its scales or None), for
        ``block_table`` and ``layer_pool``.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    pointers, mapping = host_kv_cache_pool_pointers, host_kv_cache_pool_mapping
    check_tensor("host_kv_cache_pool_pointers", pointers, (torch.int64,))
    check_tensor("host_kv_cache_pool_mapping", mapping, INTEGERS)
    for name, table in (
        ("host_kv_cache_pool_pointers", pointers),
        ("host_kv_cache_pool_mapping", mapping),
    ):
        check_device(name, table, torch.device("cpu"))
    if tuple(pointers.shape[1:]) not in ((2,), (2, 2)):
        raise ValueError(
            f"host_kv_cache_pool_pointers has shape {list(pointers.shape)}: expected [num_pools, "
            "2] or [num_pools, 2, 2]"
        )
    if mapping.dim() != 2 or mapping.shape[1] != 2:
        raise ValueError(
            f"host_kv_cache_pool_mapping has shape {list(mapping.shape)}: expected [num_layers, 2]"
        )
    layer = check_count("layer_idx", layer_idx, least=0, most=mapping.shape[0] - 1)
    pool_idx, place = (int(n) for n in mapping[layer])
    if not 0 <= pool_idx < pointers.shape[0]:
        raise ValueError(
            f"host_kv_cache_pool_mapping[{layer}] is pool {pool_idx}: there are "
            f"{pointers.shape[0]} pools"
        )
    primary = pointers[pool_idx, 0]
    if primary.dim() == 0:
        return pool_idx, place, int(primary), None
    return pool_idx, place, int(primary[0]), int(primary[1])


def block_table(
    block_offsets: Tensor,
    pool_idx: int,
    *,
    seq_offset: int = 0,
    batch_size: int | None = None,
    uses_shared_paged_kv_idx: bool = False,
) -> BlockTable:
    """View the rows of some sequences in a block-offset table.

    Entries past a sequence's last block may be anything. Those that are read must name blocks of
    the primary pool: one with the bit of the secondary pool is negative, which is outside of every
    cache, so that the reference backend refuses it, ``JITATTN_CHECK=1`` does, and
    ``check_block_offsets`` does, but nothing else looks at the values.

    Args:
        block_offsets: int32 [num_pools, num_sequences, 2, max_blocks], K ids and V ids, any
            strides.
        pool_idx: the pool.
        seq_offset: the first sequence.
        batch_size: how many there are; None: all from there on.
        uses_shared_paged_kv_idx: whether K ids stand for V, too, as with ``LayerPool.kv``'s of the
            same; V ids, which are K ids + 1, are not read then.

    Returns:
        A table over the same memory: [batch_size, 2, max_blocks], or [batch_size, max_blocks].

    Raises:
        TypeError, ValueError: naming the argument.
    """
    check_tensor("block_offsets", block_offsets, (torch.int32,))
    if block_offsets.dim() != 4 or block_offsets.shape[2] != 2:
        raise ValueError(
            f"block_offsets has shape {list(block_offsets.shape)}: expected [num_pools, "
            "num_sequences, 2, max_blocks]"
        )
    num_pools, num_sequences = block_offsets.shape[:2]
    pool = check_count("pool_idx", pool_idx, least=0, most=num_pools - 1)
    first = check_count("seq_offset", seq_offset, least=0, most=num_sequences)
    size = num_sequences - first
    if batch_size is not None:
        size = check_count("batch_size", batch_size, least=0, most=size)
    rows = block_offsets[pool, first : first + size]
    is_shared = check_flag("uses_shared_paged_kv_idx", uses_shared_paged_kv_idx)
    return BlockTable(rows[:, 0] if is_shared else rows)


def check_block_offsets(
    block_offsets: Tensor,
    seq_lens: Tensor,
    tokens_per_block: int,
    num_blocks: int,
    *,
    kv_start: Tensor | None = None,
    uses_shared_paged_kv_idx: bool = False,
) -> None:
    """Raise for an entry that no primary pool has; on a device, this waits for it.

    Args:
        block_offsets: int32 [batch_size, 2, max_blocks], the rows of a pool.
        seq_lens: int32 or int64 [batch_size], KV tokens of each sequence: entries past its last
            block are not looked at.
        tokens_per_block: tokens of a block.
        num_blocks: those of the layer, ``LayerPool.blocks``'s first dimension.
        kv_start: int32 or int64 [batch_size], the first token of each sequence that counts, as a
            sliding window leaves it: blocks wholly before it are not looked at.
        uses_shared_paged_kv_idx: V ids must be K ids + 1.

    Raises:
        TypeError, ValueError: naming the argument, sequence, column and value.
    """
    check_tensor("block_offsets", block_offsets, (torch.int32,))
    if block_offsets.dim() != 3 or block_offsets.shape[1] != 2:
        raise ValueError(
            f"block_offsets has shape {list(block_offsets.shape)}: expected [batch_size, 2, "
            "max_blocks]"
        )
    size = check_count("tokens_per_block", tokens_per_block)
    limit = check_count("num_blocks", num_blocks, least=0, most=INT32_MAX)
    is_shared = check_flag("uses_shared_paged_kv_idx", uses_shared_paged_kv_idx)
    lens = _per_sequence("seq_lens", seq_lens, block_offsets)
    starts = [0] * len(lens)
    if kv_start is not None:
        starts = _per_sequence("kv_start", kv_start, block_offsets)
    table = block_offsets.cpu()
    for b, (kv_len, start) in enumerate(zip(lens, starts, strict=True)):
        begin, end = max(start, 0) // size, -(-max(kv_len, 0) // size)
        if end > table.shape[2]:
            raise ValueError(
                f"seq_lens[{b}] is {kv_len}: block_offsets has {table.shape[2]} columns of {size} "
                "tokens"
            )
        for column in range(begin, end):
            _check_entry(b, column, table[b, :, column].tolist(), limit, is_shared)


def _check_entry(b: int, column: int, ids: list[int], limit: int, is_shared: bool) -> None:
    for plane, entry in enumerate(ids):
        where = f"block_offsets[{b}, {plane}, {column}] is {entry}"
        if entry < 0:
            raise ValueError(
                f"{where}: block {entry & INT32_MAX} of the secondary pool, which is on the host; "
                "bring it to the primary pool first"
            )
        if entry >= limit:
            raise ValueError(f"{where}: the layer has {limit} blocks")
    if is_shared and ids[1] != ids[0] + 1:
        raise ValueError(
            f"block_offsets[{b}, 1, {column}] is {ids[1]}: with uses_shared_paged_kv_idx=True "
            f"expected {ids[0] + 1}, the block behind its K"
        )


def _per_sequence(name: str, values: Tensor, table: Tensor) -> list[int]:
    check_tensor(name, values, INTEGERS)
    if tuple(values.shape) != (table.shape[0],):
        raise ValueError(f"{name} has shape {list(values.shape)}: expected [{table.shape[0]}]")
    return [int(n) for n in values.tolist()]


def _dtype_name(pool: int | Tensor, dtype: torch.dtype | str | None) -> str:
    if dtype is None:
        if not isinstance(pool, Tensor):
            raise ValueError("dtype is None: pool is an address, which has none")
        dtype = pool.dtype
    name = dtype_name(dtype)
    if name not in _DTYPES:
        raise ValueError(f"dtype is {name}: expected one of {', '.join(_DTYPES)}")
    return name


def _check_scales(
    is_nvfp4: bool, head_dim: int, scale_pool: object, scale_layout: str | None
) -> None:
    for name, value in (("scale_pool", scale_pool), ("scale_layout", scale_layout)):
        if value is not None and not is_nvfp4:
            raise ValueError(f"{name} is given: only NVFP4 has scales of blocks")
    if not is_nvfp4:
        return
    if scale_pool is None:
        raise ValueError("scale_pool is None: NVFP4 has scales of blocks")
    if scale_layout != "linear":
        raise ValueError(
            f"scale_layout is {shown(scale_layout)}: TensorRT-LLM's kernels interleave the scales "
            "of V by 4 tokens, which is not built; a pool that jitattn writes is 'linear'"
        )
    if head_dim % NVFP4_BLOCK:
        raise ValueError(f"head_dim is {head_dim}: NVFP4 has multiples of {NVFP4_BLOCK}")


def _blocks(
    name: str,
    pool: int | Tensor,
    block: tuple[int, ...],
    dtype: torch.dtype,
    num_blocks: int | None,
    device: torch.device | str | None,
) -> Tensor:
    """View all blocks of a pool as [num_blocks, *block]."""
    if isinstance(pool, Tensor):
        for what, value in (("num_blocks", num_blocks), ("device", device)):
            if value is not None:
                raise ValueError(f"{what} is given: {name} is a tensor, which knows")
        check_tensor(name, pool, (dtype, torch.uint8))
        if not pool.is_contiguous():
            raise ValueError(f"{name} has strides {list(pool.stride())}: expected a contiguous one")
        elements = pool.view(-1).view(dtype) if pool.dim() else pool.view(1).view(dtype)
    else:
        if num_blocks is None or device is None:
            missing = "num_blocks" if num_blocks is None else "device"
            raise ValueError(f"{missing} is None: {name} is an address, expected both")
        address = check_count(name, pool)
        count = check_count("num_blocks", num_blocks, most=INT32_MAX)
        size = torch.empty(0, dtype=dtype, device="cpu").element_size()
        if address % size:
            raise ValueError(f"{name} is {address:#x}: expected a multiple of {size} bytes")
        num_bytes = count * size * block[0] * block[1] * block[2]
        elements = _memory(name, address, num_bytes, torch.device(device)).view(dtype)
    per_block = block[0] * block[1] * block[2]
    if elements.numel() % per_block:
        raise ValueError(
            f"{name} has {elements.numel()} elements: expected a multiple of {per_block}, blocks "
            f"of {list(block)}"
        )
    return elements.view(-1, *block)


class _Memory:
    """Bytes of a CUDA device, in the form that torch takes without copying them."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _memory(name: str, address: int, num_bytes: int, device: torch.device) -> Tensor:
    if device.type == "cpu":
        held = (ctypes.c_uint8 * num_bytes).from_address(address)
        return torch.frombuffer(held, dtype=torch.uint8)
    if device.type != "cuda":
        raise ValueError(f"device is {device}: expected a CUDA device or the CPU")
    memory = torch.as_tensor(_Memory(address, num_bytes), device=device)
    if memory.data_ptr() != address:
        raise ValueError(f"{name} is {address:#x}, which is not on {device}")
    return memory
