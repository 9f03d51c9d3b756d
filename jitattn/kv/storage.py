"""The memory of pages, views of it, and copies between tiers: the torch half of the manager."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from jitattn.kernels.pages.copy_pages import copy_pages
from jitattn.kv.config import LayerConfig
from jitattn.kv.layout import Layout, Place
from jitattn.kv.pool import Copies
from jitattn.spec.dtype import DType
from jitattn.tensors.quantization import QuantizedKV

KVCache = Tensor | tuple[Tensor, Tensor] | QuantizedKV


class Storage:
    """Pools on a device, and on the host.

    On a CUDA device all work goes to the stream that is current when the manager is called; copies
    to the host and back run on a stream of their own, between what came before on that stream and
    what comes after. Give the manager one stream, the one that runs the model.

    Attributes:
        device: where the pools are.
        pools: for each set of slots, for each pool, uint8 [num_slots, bytes of a slot].
        host_pools: likewise on the host.
    """

    def __init__(
        self,
        layout: Layout,
        num_slots: Sequence[int],
        num_host_slots: Sequence[int],
        device: torch.device,
    ) -> None:
        """Allocate everything, the host's memory pinned where the device needs that."""
        self.device = device
        on_card = device.type == "cuda"

        def allocate(counts: Sequence[int], *, on_host: bool) -> list[tuple[Tensor, ...]]:
            where = torch.device("cpu") if on_host else device
            return [
                tuple(
                    torch.empty(
                        (count, size),
                        dtype=torch.uint8,
                        device=where,
                        pin_memory=on_host and on_card,
                    )
                    for size in sizes
                )
                for count, sizes in zip(counts, layout.slot_bytes, strict=True)
            ]

        self.pools = allocate(num_slots, on_host=False)
        self.host_pools = allocate(num_host_slots, on_host=True)
        self._side = torch.cuda.Stream(device) if on_card else None  # type: ignore[no-untyped-call]

    def copy(self, slots: int, copies: Copies) -> None:
        """Make copies of a set of slots: to the host, from it, on the device.

        Each kind that is done is cleared, so that a call again after an error makes the rest: what
        was offloaded may be overwritten by then.
        """
        device, host = self.pools[slots], self.host_pools[slots]
        if copies.offloads or copies.reloads:
            if self._side is None:
                _copy(device, host, copies.offloads)
                _copy(host, device, copies.reloads)
            else:
                current = torch.cuda.current_stream(self.device)
                self._side.wait_stream(current)
                try:
                    with torch.cuda.stream(self._side):
                        _copy(device, host, copies.offloads)
                        _copy(host, device, copies.reloads)
                finally:
                    current.wait_stream(self._side)
        _copy(device, device, copies.duplicates)

    def view(self, place: Place, *, page_size: int, kv_layout: str, is_per_layer: bool) -> KVCache:
        """Return the cache of a layer.

        Args:
            place: of the layer.
            page_size: tokens of a page.
            kv_layout: "NHD" or "HND".
            is_per_layer: pages are the layers' pages of a pool, one after the other; otherwise the
                layer's own page of each slot.
        """
        pool = self.pools[place.slots][place.pool]
        layer = place.layer
        slot_bytes = pool.shape[1]
        if is_per_layer:
            count, stride, begin = pool.shape[0] * place.num_layers, place.page_bytes, 0
        else:
            count, stride = pool.shape[0], slot_bytes
            begin = place.offset * place.page_bytes
        parts = _Parts(pool, layer, page_size, kv_layout, count, stride, begin)
        if DType(str(layer.dtype)).blocks is not None:
            return QuantizedKV(parts.tensor(0), parts.tensor(1), parts.tensor(2), parts.tensor(3))
        if layer.head_dim == layer.dim_vo:
            return parts.both()
        return parts.tensor(0), parts.tensor(1)


class _Parts:
    """K, V and block scales of the pages of a layer, as views of a pool."""

    def __init__(
        self,
        pool: Tensor,
        layer: LayerConfig,
        page_size: int,
        kv_layout: str,
        count: int,
        stride: int,
        begin: int,
    ) -> None:
        self._pool, self._layer = pool.view(-1), layer
        self._rows = (page_size, layer.num_kv_heads)
        if kv_layout == "HND":
            self._rows = self._rows[::-1]
        self._count, self._stride = count, stride
        sizes = layer.part_bytes(page_size)
        self._begins = [begin + sum(sizes[:i]) for i in range(len(sizes))]

    def tensor(self, part: int) -> Tensor:
        """Return one part, [num_pages, page_size, num_kv_heads, ..] (HND likewise)."""
        layer = self._layer
        dim = (layer.head_dim, layer.dim_vo)[part % 2]
        kind = DType(str(layer.dtype))
        if part < 2:
            return self._rows_of(part, kind.torch_dtype, dim // 2 if kind.bits < 8 else dim)
        assert kind.blocks is not None
        num_bytes = kind.blocks.row_bytes(dim)
        if not kind.blocks.has_zeros:
            return self._rows_of(part, torch.float8_e4m3fn, num_bytes)
        pairs = self._rows_of(part, torch.float16, num_bytes // 2)
        return pairs.view(*pairs.shape[:-1], num_bytes // 4, 2)

    def _rows_of(self, part: int, dtype: torch.dtype, dim: int) -> Tensor:
        item = dtype.itemsize
        shape = (self._count, *self._rows, dim)
        strides = (self._stride // item, self._rows[1] * dim, dim, 1)
        return self._pool.view(dtype).as_strided(shape, strides, self._begins[part] // item)

    def both(self) -> Tensor:
        """Return K and V, which are equally large, as [num_pages, 2, ..]."""
        k = self.tensor(0)
        between = (self._begins[1] - self._begins[0]) // k.element_size()
        return k.as_strided(
            (k.shape[0], 2, *k.shape[1:]),
            (k.stride(0), between, *k.stride()[1:]),
            k.storage_offset(),
        )


def _copy(src: Sequence[Tensor], dst: Sequence[Tensor], pairs: dict[int, int]) -> None:
    """Copy slots, by target, and clear ``pairs``."""
    if pairs:
        listed = [(source, target) for target, source in pairs.items()]
        copy_pages(src, dst, torch.tensor(listed, dtype=torch.int32, device="cpu"))
        pairs.clear()
