"""The tensors of a call, checked and reduced to pointers and strides. Launches nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Protocol

import torch
from torch import Tensor

from jitattn.spec.config import PlannerConfig
from jitattn.spec.dtype import BYTE_DTYPES, QUANTISED_DTYPES, DType
from jitattn.tensors.overlap import span_of
from jitattn.tensors.page_table import PageTable
from jitattn.tensors.tensor_checks import check_device, check_last_stride, check_tensor, row_strides
from jitattn.tensors.tensor_handles import new_handle
from jitattn.tensors.variant_params import VariantParams

try:
    # What TorchDynamo guards its traces with: one call instead of ten.
    from torch._C._dynamo.guards import TensorGuards as _TensorGuards
except ImportError:
    _TensorGuards = None  # type: ignore[assignment,misc]

_VECTOR_BYTES = 16
_LARGEST_FLOAT = torch.finfo(torch.float32).max
_BYTE_DTYPES = tuple(DType(name).torch_dtype for name in BYTE_DTYPES)


@dataclass(frozen=True, slots=True)
class CacheView:
    """K or V as [num_pages, page_size, num_kv_heads, head_dim], whatever its layout in memory.

    Strides are in elements; that of a dimension of size 1 means nothing in torch and is 0 here.
    """

    tensor: Tensor  # a view with the dimensions in that order
    page_stride: int
    token_stride: int
    head_stride: int
    vector_bytes: int = _VECTOR_BYTES  # that kernels copy at a time where rows allow it

    @property
    def strides(self) -> tuple[int, int, int]:
        """The strides of pages, tokens and heads."""
        return self.page_stride, self.token_stride, self.head_stride

    @property
    def is_vector_aligned(self) -> bool:
        """Whether every row starts at a multiple of a vector, of 16 bytes but for NVFP4."""
        size = self.tensor.element_size()
        offsets = [self.tensor.data_ptr(), *(stride * size for stride in self.strides)]
        return all(offset % self.vector_bytes == 0 for offset in offsets)


@dataclass(frozen=True, slots=True)
class Scale:
    """What the stored values of a quantised cache are multiplied with.

    ``tensor`` is float32 with one entry for each KV head, ``stride`` elements apart, or with one
    for all and a stride of 0. It is read when the kernel runs. Without it ``value`` counts.
    """

    value: float
    tensor: Tensor | None = None
    stride: int = 0


class TensorMaps(Protocol):
    """Tensor maps of K and V, for kernels that copy boxes of them, or the scales of their blocks.

    Launches have them in front of their other parameters.
    """

    def at(self, role: str, k_at: int, v_at: int) -> bytes:
        """Return the bytes of both for a kernel, where K and V are at these addresses now."""


class BoundCache:
    """A cache that a planner has checked; ``run`` takes it without looking again.

    Attributes:
        config: the configuration it was checked against.
        k: K as [num_pages, page_size, num_kv_heads, head_dim]; of NVFP4 head_dim / 2 bytes.
        v: V likewise.
        block_scales: those of K and V as [num_pages, page_size, num_kv_heads, head_dim / 16]; None
            where K and V are not NVFP4.
        k_scale: what a stored K is multiplied with; None where K is not quantised.
        v_scale: likewise of V.
        source: the cache's tensors, as they were given.
        handle: int64 [] on the CPU, what stands for it in calls of ``torch.ops.jitattn``.
    """

    __slots__ = (
        "__weakref__",
        "block_scales",
        "config",
        "device",
        "handle",
        "k",
        "k_at",
        "k_scale",
        "kernels",
        "kind",
        "source",
        "strides",
        "tensor_maps",
        "v",
        "v_at",
        "v_scale",
        "view",
    )

    def __init__(
        self,
        config: PlannerConfig,
        device: torch.device,
        k: CacheView,
        v: CacheView,
        kernels: object,
        *,
        kind: object,
        tensor_maps: TensorMaps | None = None,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        block_scales: tuple[CacheView, CacheView] | None = None,
        view: object = None,
        source: tuple[Tensor, ...] = (),
    ) -> None:
        """Made by ``AttentionPlanner.bind``, with the planner's own ``config`` and ``device``."""
        self.config = config
        self.device = device
        self.k = k
        self.v = v
        self.kernels = kernels
        self.tensor_maps = tensor_maps
        self.strides = k.strides + v.strides
        self.k_scale = k_scale
        self.v_scale = v_scale
        self.block_scales = block_scales
        # Of a page manager's cache, which tables it is for.
        self.view = view
        self.source = source
        self.handle = new_handle(self)
        # One object for the caches of a planner that differ in addresses and scales only.
        self.kind = kind
        # These say where K and V are now: the memory of a tensor may move.
        self.k_at, self.v_at = k.tensor.data_ptr, v.tensor.data_ptr

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """K and V, then the scales of their blocks, then their own, as far as these are tensors."""
        views = self.k, self.v, *(self.block_scales or ())
        scales = [scale.tensor for scale in (self.k_scale, self.v_scale) if scale is not None]
        return *(view.tensor for view in views), *(scale for scale in scales if scale is not None)

    @property
    def facts(self) -> tuple[object, ...]:
        """What it is beside its tensors: of two with equal facts the tensors tell."""
        config, scales = self.config, (self.k_scale, self.v_scale)
        numbers = [scale.value for scale in scales if scale is not None and scale.tensor is None]
        return (
            *(config.q_dtype, config.kv_dtype, config.kv_layout, config.page_table),
            *(scale is None or scale.tensor is None for scale in scales),
            *numbers,
        )

    @property
    def pools(self) -> dict[str, int]:
        """The pages of K and of V."""
        return {"K": self.k.tensor.shape[0], "V": self.v.tensor.shape[0]}


def view_scale(
    name: str,
    scale: float | Tensor | None,
    kv_dtype: str,
    device: torch.device,
    *,
    num_kv_heads: int,
) -> Scale | None:
    """Return a scale of K or V, 1 when it is not given; None where K and V are not quantised.

    Raises:
        TypeError: neither a number nor a float32 tensor.
        ValueError: given for a cache that is not quantised, not finite, or a tensor whose shape or
            device doesn't fit.
    """
    if kv_dtype not in QUANTISED_DTYPES:
        if scale is not None:
            raise ValueError(f"{name} is given, but a cache of {kv_dtype} is not quantised")
        return None
    return check_scale(name, scale, device, num_kv_heads=num_kv_heads)


def check_scale(
    name: str, scale: float | Tensor | None, device: torch.device, *, num_kv_heads: int = 1
) -> Scale:
    """Return the scale of a quantised cache, 1 when it is not given.

    Raises:
        TypeError: neither a number nor a float32 tensor.
        ValueError: not finite, or a tensor whose shape or device doesn't fit.
    """
    if scale is None:
        return Scale(1.0)
    if not isinstance(scale, Tensor):
        return Scale(scale_value(name, scale))
    check_tensor(name, scale, (torch.float32,))
    if tuple(scale.shape) not in ((), (1,), (num_kv_heads,)):
        each = f"[], [1] or [{num_kv_heads}], one for each KV head"
        raise ValueError(
            f"{name} has shape {list(scale.shape)}: expected "
            f"{each if num_kv_heads > 1 else '[] or [1]'}"
        )
    check_device(name, scale, device)
    return Scale(1.0, scale, scale.stride(0) if scale.numel() > 1 else 0)


def scale_value(name: str, scale: object) -> float:
    """Return a scale that is a number.

    Raises:
        TypeError: it is none.
        ValueError: no finite float32.
    """
    if isinstance(scale, bool) or not isinstance(scale, Real):
        raise TypeError(
            f"{name} is a {type(scale).__name__}: expected a number or a tensor of float32"
        )
    try:
        value = float(scale)
    except OverflowError:
        value = math.inf
    if not abs(value) <= _LARGEST_FLOAT:
        raise ValueError(f"{name} is {value}: expected a finite float32")
    return value


def view_caches(
    kv_cache: Tensor | tuple[Tensor, Tensor], config: PlannerConfig, device: torch.device
) -> tuple[CacheView, CacheView]:
    """Return K and V of one tensor [num_pages, 2, ...] or of a pair of 4-D tensors.

    FP8 may come as uint8, the bytes it is stored in.

    Raises:
        TypeError: no tensor or pair of tensors, or another dtype than the planner's.
        ValueError: a shape, stride or device that doesn't fit the planner.
    """
    if isinstance(kv_cache, Tensor):
        return _view_halves(kv_cache, config, device)
    if not isinstance(kv_cache, (tuple, list)) or len(kv_cache) != 2:
        raise TypeError(
            f"kv_cache is a {type(kv_cache).__name__}: expected a tensor or (k_cache, v_cache)"
        )
    k = view_cache("k_cache", kv_cache[0], config, config.head_dim, device)
    v = view_cache("v_cache", kv_cache[1], config, config.head_dim_vo or config.head_dim, device)
    check_same_pages("k_cache", k, "v_cache", v, config)
    return k, v


def check_same_pages(
    k_name: str, k: CacheView, v_name: str, v: CacheView, config: PlannerConfig
) -> None:
    """Raise ValueError where one id stands for pages of K and V that aren't equally many."""
    if config.page_table != "separate" and k.tensor.shape[0] != v.tensor.shape[0]:
        what = "tokens" if config.page_table == "ragged" else "pages"
        raise ValueError(
            f"{k_name} has {k.tensor.shape[0]} {what} and {v_name} {v.tensor.shape[0]}: with "
            f"page_table={config.page_table!r} one id stands for both"
        )


def _view_halves(
    kv_cache: Tensor, config: PlannerConfig, device: torch.device
) -> tuple[CacheView, CacheView]:
    if config.page_table == "ragged":
        raise ValueError("kv_cache is one tensor: ragged K and V are a pair (k, v)")
    if config.head_dim_vo not in (None, config.head_dim):
        raise ValueError(
            f"kv_cache is one tensor: with head_dim={config.head_dim} and "
            f"head_dim_vo={config.head_dim_vo} give a pair (k_cache, v_cache)"
        )
    _check_rank("kv_cache", kv_cache, config, num_dims=5)
    if kv_cache.shape[1] != 2:
        raise ValueError(
            f"kv_cache has shape {list(kv_cache.shape)}: expected 2, K and V, as the second "
            "dimension"
        )
    k = view_cache("kv_cache", kv_cache[:, 0], config, config.head_dim, device)
    v = view_cache("kv_cache", kv_cache[:, 1], config, config.head_dim, device)
    return k, v


def view_cache(
    name: str,
    cache: Tensor,
    config: PlannerConfig,
    row_elements: int,
    device: torch.device,
    *,
    row: str = "head_dim",
) -> CacheView:
    """Return K or V as a planner of ``config`` takes it, whose rows have so many elements.

    Raises:
        TypeError, ValueError: it doesn't fit; ``row`` says what its last dimension is.
    """
    is_ragged = config.page_table == "ragged"
    _check_rank(name, cache, config, num_dims=3 if is_ragged else 4, row=row)
    if is_ragged:
        view = cache.unsqueeze(1)  # pages of one token
    else:
        view = cache if config.kv_layout == "NHD" else cache.transpose(1, 2)
    wanted = (config.page_size or 1, config.num_kv_heads, row_elements)
    if tuple(view.shape[1:]) != wanted:
        raise ValueError(
            f"{name} has shape {list(cache.shape)} with kv_layout={config.kv_layout}: that is "
            f"page_size, num_kv_heads, {row} = {list(view.shape[1:])}, expected {list(wanted)}"
        )
    check_device(name, cache, device)
    check_last_stride(name, cache)
    found = cache_view(view.view(getattr(torch, config.kv_dtype)))  # of its bytes
    # Ragged tokens follow each other at the stride of their pages.
    return replace(found, token_stride=found.page_stride) if is_ragged else found


def cache_view(tensor: Tensor) -> CacheView:
    """Return K or V that is [num_pages, page_size, num_kv_heads, head_dim] with its strides."""
    page, token, head = (
        stride if size > 1 else 0
        for stride, size in zip(tensor.stride()[:3], tensor.shape[:3], strict=True)
    )
    return CacheView(tensor, page, token, head)


def _check_rank(
    name: str, cache: object, config: PlannerConfig, *, num_dims: int, row: str = "head_dim"
) -> None:
    dtype = getattr(torch, config.kv_dtype)
    check_tensor(name, cache, (dtype, torch.uint8) if dtype in _BYTE_DTYPES else (dtype,))
    assert isinstance(cache, Tensor)
    if cache.dim() != num_dims:
        page = "page_size, num_kv_heads" if config.kv_layout == "NHD" else "num_kv_heads, page_size"
        wanted = {
            3: "num_kv_tokens, num_kv_heads",
            4: f"num_pages, {page}",
            5: f"num_pages, 2, {page}",
        }
        raise ValueError(
            f"{name} has shape {list(cache.shape)}: expected [{wanted[num_dims]}, {row}]"
        )


@dataclass(frozen=True, slots=True)
class Mask:
    """A custom mask, in one of its forms.

    ``layout`` is "bool" (bool [num_tokens, width]), "packed" (uint8 [num_tokens, width / 8], bits
    from the lowest up), both over the last ``width`` keys of each request, or "ragged" (uint8
    bytes over all keys, ``indptr`` [batch_size + 1] says in bytes where each request begins).
    """

    layout: str
    values: Tensor
    width: int
    indptr: Tensor | None


@dataclass(slots=True)  # frozen ones take four times as long to make
class Batch:
    """What a plan is made of, checked.

    ``max_kv_len`` and ``max_q_len`` bound the requests; ``qo_indptr`` is None for one query token
    a request. Of one ``layout``, tables and lengths differ in their addresses only.
    """

    pages: PageTable
    batch_size: int
    seq_lens: Tensor
    qo_indptr: Tensor | None
    max_kv_len: int
    max_q_len: int
    layout: BatchLayout


class RowLayout:
    """How a tensor lies in memory that passed its checks: those that lie alike pass them, too.

    Attributes:
        shape: its shape, rows of the batch first.
        strides: in elements.
        alignment: bytes of which the address of a tensor is a multiple when each of its rows
            begins at a multiple of a vector; 0 when the strides allow none.
        span: bytes from its first element to its last.
    """

    __slots__ = ("_device", "_dtype", "alignment", "shape", "span", "strides")

    def __init__(self, tensor: Tensor | None, *, vector: int = 1) -> None:
        """Describe ``tensor``, with vectors of ``vector`` elements; None is like no tensor."""
        self.shape: tuple[int, ...] = ()
        self.strides: tuple[int, ...] = ()
        self.alignment = 0
        self.span = 0
        self._dtype: torch.dtype | None = None
        self._device: torch.device | None = None
        if tensor is not None:
            self.shape, self.strides = tensor.shape, tensor.stride()
            self._dtype, self._device = tensor.dtype, tensor.device
            self.span = span_of(tensor)
            if all(stride % vector == 0 for stride in row_strides(tensor)):
                self.alignment = vector * tensor.element_size()

    def fits(self, tensor: object) -> bool:
        """Whether ``tensor`` is a tensor that lies like this one."""
        return (
            type(tensor) is Tensor
            and tensor.dtype is self._dtype
            and tensor.shape == self.shape
            and tensor.stride() == self.strides
            and tensor.device == self._device
        )

    def is_aligned(self, pointer: int) -> bool:
        """Whether the rows of a tensor at ``pointer`` begin at multiples of a vector."""
        return self.alignment > 0 and pointer % self.alignment == 0


NO_LAYOUT = RowLayout(None)
"""The layout that no tensor has."""


def recogniser(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return what says of as many tensors whether each lies like its counterpart.

    As ``RowLayout.fits`` does, in half the time, and it may deny it of some that do lie alike.
    """
    if _TensorGuards is not None:
        guards = _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        check: Callable[..., bool] = guards.check
        return check
    layouts = [RowLayout(tensor) for tensor in tensors]
    return lambda *others: all(map(RowLayout.fits, layouts, others))


@dataclass(slots=True)
class Call:
    """The tensors of one ``run``, checked, and how those lie that differ from run to run."""

    q: Tensor
    q_layout: RowLayout
    kv: BoundCache
    pages: PageTable
    out: Tensor
    out_layout: RowLayout
    lse: Tensor | None
    lse_layout: RowLayout
    sinks: Tensor | None
    mask: Mask | None
    variant_params: VariantParams | None = None

    @property
    def is_aligned(self) -> bool:
        """Whether the rows of q and out begin at multiples of their vectors."""
        return self.q_layout.is_aligned(self.q.data_ptr()) and self.out_layout.is_aligned(
            self.out.data_ptr()
        )


class BatchLayout:
    """How a page table and lengths lie that passed their checks: those that lie alike do, too.

    Attributes:
        batch_size: their requests.
        capacity: the most tokens of a request.
    """

    __slots__ = ("_lie_alike", "_num_tensors", "_table", "batch_size", "capacity")

    def __init__(self, pages: PageTable | None, seq_lens: Tensor | None, capacity: int) -> None:
        """Describe both; without them it is like nothing."""
        self.capacity = capacity
        self.batch_size = 0
        self._table: type[PageTable] | None = None
        if pages is not None and seq_lens is not None:
            self.batch_size = pages.batch_size
            self._table = type(pages)
            self._num_tensors = len(pages.tensors)
            self._lie_alike = recogniser((seq_lens, *pages.tensors))

    def fits(self, pages: PageTable, seq_lens: Tensor) -> bool:
        """Whether these lie like those."""
        return (
            type(pages) is self._table
            and len(pages.tensors) == self._num_tensors
            and self._lie_alike(seq_lens, *pages.tensors)
        )


NO_BATCH = BatchLayout(None, None, 0)
"""The layout that no batch has."""

Again = Callable[[object, object, object], Tensor | None]
"""Repeats a call with another q, bound cache and out, or a new out for None.

Returns out; does nothing and returns None where something differs that is not an address.
"""


def view_mask(
    custom_mask: Tensor | tuple[Tensor, Tensor],
    num_tokens: int,
    batch_size: int,
    device: torch.device,
) -> Mask:
    """Check a custom mask.

    Raises:
        TypeError: neither a bool or uint8 tensor nor a pair (packed, mask_indptr).
        ValueError: a shape, stride or device doesn't fit.
    """
    if isinstance(custom_mask, (tuple, list)):
        return _view_ragged_mask(custom_mask, batch_size, device)
    check_tensor("custom_mask", custom_mask, (torch.bool, torch.uint8))
    if custom_mask.dim() != 2 or custom_mask.shape[0] != num_tokens:
        raise ValueError(
            f"custom_mask has shape {list(custom_mask.shape)}: expected [{num_tokens}, width] bool "
            f"or [{num_tokens}, width / 8] uint8"
        )
    check_device("custom_mask", custom_mask, device)
    check_last_stride("custom_mask", custom_mask)
    if custom_mask.dtype == torch.bool:
        return Mask("bool", custom_mask, custom_mask.shape[1], None)
    return Mask("packed", custom_mask, 8 * custom_mask.shape[1], None)


def _view_ragged_mask(
    custom_mask: tuple[Tensor, Tensor] | list[Tensor], batch_size: int, device: torch.device
) -> Mask:
    if len(custom_mask) != 2:
        raise TypeError("custom_mask is no pair (packed, mask_indptr)")
    packed, indptr = custom_mask
    check_tensor("custom_mask[0]", packed, (torch.uint8,))
    check_tensor("custom_mask[1]", indptr, (torch.int32,))
    if packed.dim() != 1:
        raise ValueError(f"custom_mask[0] has shape {list(packed.shape)}: expected one dimension")
    check_last_stride("custom_mask[0]", packed)
    if tuple(indptr.shape) != (batch_size + 1,):
        raise ValueError(
            f"custom_mask[1] has shape {list(indptr.shape)}: expected [{batch_size + 1}]"
        )
    check_device("custom_mask[0]", packed, device)
    check_device("custom_mask[1]", indptr, device)
    if device.type == "cpu" and int(indptr[-1]) > packed.shape[0]:
        raise ValueError(
            f"custom_mask[1][-1] is {int(indptr[-1])}: custom_mask[0] has {packed.shape[0]} bytes"
        )
    return Mask("ragged", packed, 0, indptr)


_VIEW = "jitattn_view"


def mark_view(tensor: Tensor, view: object) -> None:
    """Note on the first tensor of a cache which tables it is for."""
    setattr(tensor, _VIEW, view)


def view_of(kv_cache: object) -> object:
    """Return what a page manager noted on a cache; None where it comes from elsewhere."""
    first = kv_cache[0] if isinstance(kv_cache, (tuple, list)) and kv_cache else kv_cache
    return getattr(getattr(first, "k", first), _VIEW, None)
