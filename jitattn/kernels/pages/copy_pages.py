"""Copy pages between pools, on a device and to host memory and back: ``copy_pages``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from jitattn.base.validate import INT32_MAX, type_name
from jitattn.kernels.common import device_kernels
from jitattn.kernels.common.launch_cache import CallTensors, LaunchCache
from jitattn.kernels.common.value_checks import asks_for_checks, checking
from jitattn.kernels.pages.params import MAX_POOLS, PAGE_DIMS, CopyParams
from jitattn.kernels.pages.spec import CopyPagesSpec
from jitattn.kernels.pages.tile import CopyPagesTile
from jitattn.spec.params import Divisor
from jitattn.tensors.tensor_checks import (
    INTEGERS,
    check_device,
    check_memory,
    check_tensor,
    check_writable,
)

if TYPE_CHECKING:
    from jitattn.device.driver import Launch

Pools = Tensor | Sequence[Tensor]

_WORD_BYTES = (16, 8, 4, 2, 1)
_OF_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
# Fill a card, and the bus to the host: a copy that waits for the bus leaves the card to others.
_CTAS_PER_SM, _CTAS_ON_BUS = 8, 16


def copy_pages(src: Pools, dst: Pools, pairs: Tensor) -> None:
    """Copy pages of ``src`` to pages of ``dst``, on the current stream, without waiting.

    For defragmentation and copy on write, and with pinned host memory for offload and reload: the
    kernel reads or writes host memory through the bus itself, from a few multiprocessors, so a
    stream of its own lets it run beside others (who frees a pool before it is done records that
    stream). One launch for all pools of one layout, at most 128 of them at a time.

    Args:
        src: a pool, [num_pages, ...], for example a cache as ``bind`` takes it, of any dtype and
            any strides; or several, of all layers, K and V. On the device, or pinned host memory.
        dst: likewise, as many, with pages of the same shapes and dtypes; strides and numbers of
            pages may differ.
        pairs: int32 or int64 [num_pairs, 2] of (source page, destination page), the same for all
            pools; a pair with a negative id is skipped. On the device they are read when the kernel
            runs, so that the call can be captured; those on the CPU are checked and copied to it.

    No page may be the destination of two pairs, nor the destination of one and the source of
    another in the same memory: the pairs are copied at the same time. Pairs on the CPU are refused
    then, where the two begin at one address, and where they name a page that a pool hasn't; of
    pairs on the device such a destination has the bytes of either, and what names no page is
    skipped.

    Raises:
        TypeError, ValueError: an argument that doesn't fit.
    """
    LAUNCHES.run(CopyCall(_as_pools("src", src), _as_pools("dst", dst), pairs))


class CopyCall(NamedTuple):
    """The arguments of ``copy_pages``, pools as tuples of them."""

    src: tuple[Tensor, ...]
    dst: tuple[Tensor, ...]
    pairs: Tensor


@dataclass(frozen=True, slots=True)
class _Copies:
    """The arguments, checked but for the ids, and where the kernel runs."""

    src: tuple[Tensor, ...]
    dst: tuple[Tensor, ...]
    pairs: Tensor
    device: torch.device


def _as_pools(name: str, pools: Pools) -> tuple[Tensor, ...]:
    if isinstance(pools, Tensor):
        return (pools,)
    if not isinstance(pools, (tuple, list)):
        raise TypeError(f"{name} is a {type_name(pools)}: expected a tensor or a list of them")
    return tuple(pools)


# --- checks of arguments


def _check(call: CopyCall) -> _Copies:
    sources, targets, pairs = call
    if len(sources) != len(targets):
        raise ValueError(f"src has {len(sources)} pools and dst {len(targets)}")
    if not sources:
        raise ValueError("src has no pools: expected at least one")
    named = {f"src[{i}]": pool for i, pool in enumerate(sources)}
    named |= {f"dst[{i}]": pool for i, pool in enumerate(targets)}
    for name, pool in named.items():
        if not isinstance(pool, Tensor):
            raise TypeError(f"{name} is a {type_name(pool)}: expected a tensor")
        check_memory(name, pool)
        if pool.dim() < 2:
            raise ValueError(f"{name} has shape {list(pool.shape)}: expected [num_pages, ...]")
    for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if source.dtype != target.dtype:
            raise TypeError(f"dst[{i}] has dtype {target.dtype}: expected {source.dtype}, as src")
        if source.shape[1:] != target.shape[1:]:
            raise ValueError(
                f"dst[{i}] has shape {list(target.shape)}: expected pages of "
                f"{list(source.shape[1:])}, as src"
            )
        check_writable(f"dst[{i}]", target)
    check_tensor("pairs", pairs, INTEGERS)
    if pairs.dim() != 2 or pairs.shape[1] != 2:
        raise ValueError(f"pairs has shape {list(pairs.shape)}: expected [num_pairs, 2]")
    return _Copies(*call, _device_of(named, pairs))


def _device_of(pools: dict[str, Tensor], pairs: Tensor) -> torch.device:
    """Return the device of the pools that are on one; the CPU without any."""
    devices = {pool.device for pool in pools.values()} | {pairs.device}
    on_device = {device for device in devices if device.type == "cuda"}
    if not on_device:
        for name, pool in pools.items():
            check_device(name, pool, torch.device("cpu"))
        check_device("pairs", pairs, torch.device("cpu"))
        return torch.device("cpu")
    device = next(pool.device for pool in (*pools.values(), pairs) if pool.device.type == "cuda")
    for name, pool in pools.items():
        if pool.device.type == "cpu" and not pool.is_pinned():
            raise ValueError(
                f"{name} is in host memory that isn't pinned: pin it, with pin_memory()"
            )
        if pool.device.type != "cpu":
            check_device(name, pool, device)
    if pairs.device.type != "cpu":
        check_device("pairs", pairs, device)
    return device


def _check_pairs(pairs: Tensor, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Raise unless all pairs, which are on the CPU, can be copied at the same time."""
    listed = [(int(s), int(d)) for s, d in pairs.tolist() if s >= 0 and d >= 0]
    for name, pools, side in (("src", sources, 0), ("dst", targets, 1)):
        highest = max(listed, key=lambda pair: pair[side], default=(-1, -1))
        for i, pool in enumerate(pools):
            if highest[side] >= pool.shape[0]:
                raise ValueError(
                    f"pairs has {list(highest)}: {name}[{i}] has {pool.shape[0]} pages"
                )
    written: set[int] = set()
    for pair in listed:
        if pair[1] in written:
            raise ValueError(f"pairs has {list(pair)}: page {pair[1]} is a destination twice")
        written.add(pair[1])
    _check_order(listed, sources, targets)


def _check_order(
    listed: Sequence[tuple[int, int]], sources: Sequence[Tensor], targets: Sequence[Tensor]
) -> None:
    """Raise where the order of copies would matter: a page is both written and read, or twice."""
    memories = [pool.untyped_storage().data_ptr() for pool in targets]
    read = {pool.untyped_storage().data_ptr() for pool in sources}
    if len(set(memories)) == len(memories) and read.isdisjoint(memories):
        return
    written: set[int] = set()
    for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
        for s, d in listed:
            where = _page_at(target, d)
            if where in written:
                raise ValueError(
                    f"pairs has {[s, d]}: page {d} of dst[{i}] is a destination of another pool"
                )
            if where != _page_at(source, s):  # else nothing changes
                written.add(where)
    for i, source in enumerate(sources):
        for s, d in listed:
            if _page_at(source, s) in written:
                raise ValueError(
                    f"pairs has {[s, d]}: page {s} of src[{i}] is a destination, too, and pairs "
                    "are copied at the same time"
                )


def _page_at(pool: Tensor, page: int) -> int:
    """Return the address of a page, by which views of the same memory are told."""
    return pool.data_ptr() + page * pool.stride(0) * pool.element_size()


def _copy_by_definition(copies: _Copies) -> None:
    pairs = copies.pairs
    _check_pairs(pairs, copies.src, copies.dst)
    kept = pairs[(pairs >= 0).all(dim=1)].long()
    if kept.shape[0] == 0:
        return
    for source, target in zip(copies.src, copies.dst, strict=True):
        _bits(target)[kept[:, 1]] = _bits(source)[kept[:, 0]]


def _bits(pool: Tensor) -> Tensor:
    # Not every type can be indexed.
    return pool.view(_OF_BYTES[pool.element_size()])


# --- on the device


@dataclass(frozen=True, slots=True)
class _Page:
    """A page in both pools, in words; ``dims`` are (size, source stride, destination stride)."""

    word_bytes: int
    src_stride: int  # from one page to the next
    dst_stride: int
    dims: tuple[tuple[int, int, int], ...]

    @property
    def num_words(self) -> int:
        count = 1
        for size, _, _ in self.dims:
            count *= size
        return count


def page_of(source: Tensor, target: Tensor) -> _Page:
    """Describe a page by as few dimensions, and in as wide words, as the strides allow."""
    strides = zip(source.shape[1:], source.stride()[1:], target.stride()[1:], strict=True)
    # Where pages are written in the order of memory, what follows each other is one dimension.
    dims = sorted((dim for dim in strides if dim[0] > 1), key=lambda dim: -dim[2])
    merged: list[tuple[int, int, int]] = []
    for size, src, dst in dims:
        if merged and merged[-1][1:] == (size * src, size * dst):
            merged[-1] = (merged[-1][0] * size, src, dst)
        else:
            merged.append((size, src, dst))
    merged = merged or [(1, 1, 1)]
    item = source.element_size()
    pages = tuple(pool.stride(0) if pool.shape[0] > 1 else 0 for pool in (source, target))
    steps = [*pages, *(stride for _, *both in merged[:-1] for stride in both)]
    word = item
    if merged[-1][1:] == (1, 1):
        sizes = [merged[-1][0], *steps]
        word = next(w for w in _WORD_BYTES if w <= item or all(n * item % w == 0 for n in sizes))
    ratio = word // item
    size, *inner = merged[-1]
    if ratio > 1:
        size //= ratio
    outer = [(n, src // ratio, dst // ratio) for n, src, dst in merged[:-1]]
    dims_in_words = (*outer, (size, inner[0], inner[1]))
    return _Page(word, pages[0] // ratio, pages[1] // ratio, dims_in_words)


def narrowed(page: _Page, word_bytes: int) -> _Page:
    """Return ``page`` in words of so many bytes: its pools may begin at any multiple of them."""
    ratio = page.word_bytes // word_bytes
    if ratio == 1:
        return page
    *outer, (size, *_) = page.dims
    dims = (*((n, src * ratio, dst * ratio) for n, src, dst in outer), (size * ratio, 1, 1))
    return _Page(word_bytes, page.src_stride * ratio, page.dst_stride * ratio, dims)


class _CopyLauncher:
    """Launches for pools and pairs that lie alike, one for each layout of pools."""

    def __init__(self, copies: _Copies, given: CallTensors, card: int) -> None:
        tile = device_kernels.tile_of(CopyPagesSpec(), card)
        assert isinstance(tile, CopyPagesTile)
        self._tile = tile
        self._device, self._card = copies.device, card
        self._kernel = device_kernels.load(CopyPagesSpec(), card)
        self._pairs_are_here = copies.pairs.device == copies.device
        self._checks = asks_for_checks()
        pools = [*copies.src, *copies.dst]
        # Of tensors, after the pairs.
        self._on_host = [i + 1 for i, pool in enumerate(pools) if pool.device != copies.device]
        self._names = given.names
        self._num_pairs = copies.pairs.shape[0]
        self._item_bytes = [pool.element_size() for pool in copies.src]
        both = [*zip(copies.src, copies.dst, strict=True)]
        self._pages = [page_of(*pair) for pair in both]
        self._counts = [(source.shape[0], target.shape[0]) for source, target in both]
        self._groups = self._groups_of(copies.src)
        self._addresses: list[int] = []
        self._launches: list[tuple[Launch, CopyParams]] = []

    def _groups_of(self, sources: Sequence[Tensor]) -> list[list[int]]:
        """Return the numbers of the pools of each launch, which lie alike."""
        layouts: dict[object, list[int]] = {}
        for i, page in enumerate(self._pages):
            if 0 in sources[i].shape[1:]:
                continue
            if len(page.dims) > PAGE_DIMS:
                raise ValueError(
                    f"src[{i}] has shape {list(sources[i].shape)} and strides "
                    f"{list(sources[i].stride())}: pages of more than {PAGE_DIMS} dimensions that "
                    "don't follow each other in memory are not copied"
                )
            if page.num_words > INT32_MAX or sources[i][:1].numel() > INT32_MAX:
                raise ValueError(f"src[{i}] has pages of more than {INT32_MAX} elements")
            layouts.setdefault((page, self._counts[i]), []).append(i)
        return [
            group[at : at + MAX_POOLS]
            for group in layouts.values()
            for at in range(0, len(group), MAX_POOLS)
        ]

    def __call__(self, call: CopyCall, tensors: list[Tensor]) -> None:
        """Launch for these, which lie like those it was made with."""
        # Pinned memory and another look alike.
        for i in self._on_host:
            if not tensors[i].is_pinned():
                raise ValueError(f"{self._names[i]} is in host memory that isn't pinned")
        pairs = call.pairs
        if not self._pairs_are_here:
            if device_kernels.is_capturing(self._device):
                raise ValueError("pairs are on the CPU in a capture: give them on the device")
            _check_pairs(pairs, call.src, call.dst)
            pairs = pairs.to(self._device)
        elif self._checks and not device_kernels.is_capturing(self._device):
            with checking():
                _check_pairs(pairs.cpu(), call.src, call.dst)
        addresses = [pool.data_ptr() for pool in tensors[1:]]
        if addresses != self._addresses:
            self._launches = [
                launch for group in self._groups for launch in self._launches_of(group, addresses)
            ]
            self._addresses = addresses
        for launch, params in self._launches:
            params.pairs = pairs.data_ptr()
            params.pair_stride, params.side_stride = pairs.stride()
            params.pairs_are_int64 = pairs.dtype is torch.int64
            device_kernels.launch_on(self._card, launch)

    def _launches_of(
        self, group: Sequence[int], addresses: Sequence[int]
    ) -> Iterator[tuple[Launch, CopyParams]]:
        """Yield the launch for a group of pools of one layout, if it has anything to do."""
        from jitattn.device.driver import Launch

        count = len(addresses) // 2
        both = [(addresses[i], addresses[count + i]) for i in group]
        at = 0
        for address in itertools.chain(*both):
            at |= address
        page = self._pages[group[0]]
        item = self._item_bytes[group[0]]
        word = next(w for w in _WORD_BYTES if w <= page.word_bytes and at % w == 0)
        params = self._params_of(narrowed(page, max(word, item)), self._counts[group[0]])
        params.num_pools = len(group)
        for i, (params_src, params_dst) in enumerate(both):
            params.pools[i].src, params.pools[i].dst = params_src, params_dst
        params.num_parts = self._num_pairs * len(group) * params.page_parts
        if params.num_parts == 0:
            return
        on_bus = bool(self._on_host)
        grid = min(params.num_parts, max_ctas(self._card, on_bus=on_bus))
        yield Launch(self._kernel, params, grid, self._tile.num_threads), params

    def _params_of(self, page: _Page, counts: tuple[int, int]) -> CopyParams:
        params = CopyParams(
            src_page_stride=page.src_stride,
            dst_page_stride=page.dst_stride,
            num_src_pages=counts[0],
            num_dst_pages=counts[1],
            page_words=page.num_words,
            page_parts=-(-page.num_words // self._tile.part_words),
            word_bytes=page.word_bytes,
        )
        padding = ((1, 0, 0),) * (PAGE_DIMS - len(page.dims))
        for dim, (size, src, dst) in zip(params.dims, (*padding, *page.dims), strict=True):
            dim.size, dim.src_stride, dim.dst_stride = Divisor.of(size), src, dst
        return params


def max_ctas(card: int, *, on_bus: bool) -> int:
    """Return the most CTAs of a copy; ``on_bus``: to host memory, or from there."""
    from jitattn.device.driver import device_facts

    return _CTAS_ON_BUS if on_bus else _CTAS_PER_SM * device_facts(card).num_sms


LAUNCHES = LaunchCache(_check, _copy_by_definition, _CopyLauncher)
