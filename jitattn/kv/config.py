"""Configuration of a page manager: ``KVCacheConfig`` and its ``LayerConfig``s. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jitattn.base.validate import INT32_MAX, MAX_DIM, check_count, check_name, shown, type_name
from jitattn.spec.config import MAX_KV_LEN, MAX_PAGE_SIZE
from jitattn.spec.dtype import DType, dtype_name

if TYPE_CHECKING:
    import torch

DEFAULT_PRIORITY = 35
MAX_PRIORITY = 100
_LAYOUTS = ("NHD", "HND")
_DTYPES = tuple(dtype.value for dtype in DType if dtype is not DType.FLOAT64)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerConfig:
    """The cache of one attention layer.

    Attributes:
        layer_id: the caller's number for it, unique.
        num_kv_heads: heads of K and V.
        head_dim: elements of a head of K.
        dtype: of K and V, a torch dtype or its name; types of four bits have block
            scales besides.
        window_left: earlier tokens that a query sees besides itself; -1 is all. Pages that no later
            query can see are given back.
        head_dim_vo: elements of a head of V; None is ``head_dim``.
    """

    layer_id: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype | str = "bfloat16"
    window_left: int = -1
    head_dim_vo: int | None = None

    def __post_init__(self) -> None:
        """Check the fields and keep the dtype as its name.

        Raises:
            TypeError, ValueError: a field that doesn't fit.
        """
        layer_id = check_count("layer_id", self.layer_id, least=0, most=INT32_MAX)
        name = f"layer {layer_id}: "
        counts = {
            "layer_id": layer_id,
            "num_kv_heads": check_count(f"{name}num_kv_heads", self.num_kv_heads, most=MAX_DIM),
            "head_dim": check_count(f"{name}head_dim", self.head_dim, most=MAX_DIM),
            "window_left": check_count(f"{name}window_left", self.window_left, least=-1),
        }
        if self.head_dim_vo is not None:
            counts["head_dim_vo"] = check_count(
                f"{name}head_dim_vo", self.head_dim_vo, most=MAX_DIM
            )
        for field, count in counts.items():  # as plain integers
            object.__setattr__(self, field, count)
        dtype = dtype_name(self.dtype, f"{name}dtype")
        if dtype not in _DTYPES:
            raise ValueError(f"{name}dtype is {dtype}: expected one of {', '.join(_DTYPES)}")
        object.__setattr__(self, "dtype", dtype)
        blocks = DType(dtype).blocks
        if blocks is not None and (
            self.head_dim % blocks.multiple or self.dim_vo % blocks.multiple
        ):
            raise ValueError(
                f"{name}head dims are {self.head_dim} and {self.dim_vo}: {dtype} takes multiples "
                f"of {blocks.multiple}"
            )

    @property
    def dim_vo(self) -> int:
        """Elements of a head of V."""
        return self.head_dim if self.head_dim_vo is None else self.head_dim_vo

    def part_bytes(self, page_size: int) -> tuple[int, ...]:
        """Return the bytes of what lies in a page of this layer, one part after the other.

        K and V, and of four bits the block scales of K and of V.
        """
        rows = page_size * self.num_kv_heads
        dims = (self.head_dim, self.dim_vo)
        data = tuple(rows * dim * DType(str(self.dtype)).bits // 8 for dim in dims)
        blocks = DType(str(self.dtype)).blocks
        return data if blocks is None else (*data, *(rows * blocks.row_bytes(dim) for dim in dims))

    @property
    def item_bytes(self) -> int:
        """Bytes of what a tensor of it has as elements; of four bits, bytes."""
        return max(DType(str(self.dtype)).bits // 8, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCacheConfig:
    """The layers of a model, and the memory for their pages.

    Attributes:
        page_size: tokens of a page on this device.
        gpu_bytes: memory for pages on the device (on the CPU: in the first tier).
        layers: the attention layers, any order.
        host_bytes: memory for pages that have left the device; 0 is none.
        reuse_scratch: let the pages of a prompt that no later query can see share slots between
            layers (windowed layers only). A sequence can do without.
        max_rewind_len: of a step with scratch, how many of its last tokens may be taken back.
        kv_layout: "NHD" (token, head) or "HND": the order of a page's dimensions.
        typical_len: tokens of a typical sequence: groups of layers whose slots differ share the
            memory in proportion to what such a sequence takes.
        num_ranks: devices that share the tokens of each sequence (`jitattn.parallel`), each with a
            manager that has the same configuration and gets the same calls. A block of
            page_size * num_ranks tokens then has a page of the same id on each.
    """

    page_size: int
    gpu_bytes: int
    layers: Sequence[LayerConfig]
    host_bytes: int = 0
    reuse_scratch: bool = False
    max_rewind_len: int = 0
    kv_layout: str = "NHD"
    typical_len: int = 2048
    num_ranks: int = 1

    def __post_init__(self) -> None:
        """Check the fields and keep the layers as a tuple.

        Raises:
            TypeError, ValueError: a field that doesn't fit.
        """
        counts = {
            "page_size": check_count("page_size", self.page_size, most=MAX_PAGE_SIZE),
            "gpu_bytes": check_count("gpu_bytes", self.gpu_bytes),
            "host_bytes": check_count("host_bytes", self.host_bytes, least=0),
            "max_rewind_len": check_count(
                "max_rewind_len", self.max_rewind_len, least=0, most=MAX_KV_LEN
            ),
            "typical_len": check_count("typical_len", self.typical_len, most=MAX_KV_LEN),
            "num_ranks": check_count("num_ranks", self.num_ranks, most=MAX_PAGE_SIZE),
        }
        for field, count in counts.items():  # as plain integers
            object.__setattr__(self, field, count)
        if not isinstance(self.reuse_scratch, bool):
            raise TypeError(f"reuse_scratch is {shown(self.reuse_scratch)}: expected True or False")
        object.__setattr__(self, "kv_layout", check_name("kv_layout", self.kv_layout, _LAYOUTS))
        if not isinstance(self.layers, list | tuple):
            raise TypeError(f"layers is {shown(self.layers)}: expected a list of LayerConfig")
        layers = tuple(self.layers)
        object.__setattr__(self, "layers", layers)
        if not layers:
            raise ValueError("layers is empty: expected at least one LayerConfig")
        seen: set[int] = set()
        for layer in layers:
            if not isinstance(layer, LayerConfig):
                raise TypeError(f"layers has a {type_name(layer)}: expected LayerConfig")
            if layer.layer_id in seen:
                raise ValueError(f"layers has layer_id {layer.layer_id} twice")
            seen.add(layer.layer_id)
            self._check_items(layer)
        self._check_ranks()

    @property
    def block_len(self) -> int:
        """Tokens of a sequence that have a page on each of the ranks."""
        return self.page_size * self.num_ranks

    def _check_ranks(self) -> None:
        if self.block_len > MAX_PAGE_SIZE:
            raise ValueError(
                f"page_size * num_ranks is {self.block_len}: expected at most {MAX_PAGE_SIZE}"
            )
        for layer in self.layers:
            if self.num_ranks > 1 and layer.window_left >= 0:
                raise ValueError(
                    f"layer {layer.layer_id} has window_left={layer.window_left}: a window is not "
                    f"shared by num_ranks={self.num_ranks}, give such layers a manager of their own"
                )

    def _check_items(self, layer: LayerConfig) -> None:
        page_bytes = sum(layer.part_bytes(self.page_size))
        odd = [n for n in layer.part_bytes(self.page_size) if n % layer.item_bytes]
        has_blocks = DType(str(layer.dtype)).blocks is not None
        if odd or page_bytes == 0 or (has_blocks and page_bytes % 2):
            raise ValueError(f"layer {layer.layer_id} has pages of {page_bytes} bytes")
