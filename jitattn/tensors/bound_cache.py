"""``BoundCache``: a KV cache that a planner has checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from jitattn.spec.config import PlannerConfig
from jitattn.tensors.cache_views import CacheView, HasTensor
from jitattn.tensors.quantization import QuantizedKV
from jitattn.tensors.scales import Scale
from jitattn.tensors.tensor_handles import new_handle
from jitattn.tensors.tensor_layouts import recogniser

FormT = TypeVar("FormT")

# Forms of caches that a planner remembers: layers of a model have a few.
_MAX_FORMS = 16
# What alignment is judged by: no kernel asks for more, in bytes.
_MOST_ALIGNMENT = 16


class LeadingParams(Protocol):
    """What launches have in front of their other parameters.

    Tensor maps of K and V, for kernels that copy TMA tiles of them, or the scales of their blocks.
    """

    def at(self, role: str, k_at: int, v_at: int) -> bytes:
        """Return the bytes of both for a kernel, where K and V are at these addresses now."""


LeadingForm = Callable[[Sequence[Any]], LeadingParams]
"""Makes those of a cache, of its views: K and V come first."""


class CachePart(NamedTuple):
    """A view of one of a cache's tensors, for caches that lie alike."""

    source: int  # the number of the tensor
    shape: tuple[int, ...]  # in elements of the tensor
    strides: tuple[int, ...]
    ahead: int  # of the tensor's first element
    dtype: torch.dtype | None  # None: the tensor's
    is_whole: bool  # nothing differs from the tensor
    make: Callable[..., HasTensor]
    facts: tuple[int, ...]  # what the view has beside its tensor

    @classmethod
    def of(cls, number: int, source: Tensor, view: Any) -> CachePart:
        """Describe ``view``, a named tuple whose first field is a view of ``source``."""
        tensor = view[0]
        # Bytes of scales and zeros are of a type with several.
        size, of = tensor.itemsize, source.itemsize
        shape = *tensor.shape[:-1], tensor.shape[-1] * size // of
        strides = *(stride * size // of for stride in tensor.stride()[:-1]), tensor.stride(-1)
        ahead = tensor.storage_offset() * size // of - source.storage_offset()
        dtype = None if tensor.dtype is source.dtype else tensor.dtype
        is_whole = (shape, strides, ahead, dtype) == (source.shape, source.stride(), 0, None)
        return cls(number, shape, strides, ahead, dtype, is_whole, type(view), tuple(view[1:]))

    def view(self, tensors: Sequence[Tensor]) -> Any:
        """Return the same of a cache of these tensors."""
        source = tensors[self.source]
        if self.is_whole:
            return self.make(source.detach(), *self.facts)
        offset = source.storage_offset() + self.ahead
        tensor = source.as_strided(self.shape, self.strides, offset)
        return self.make(tensor if self.dtype is None else tensor.view(self.dtype), *self.facts)


class CacheForm(NamedTuple):
    """What is known of all caches of a planner that lie alike.

    Attributes:
        parts: their views, K and V first.
        kernels: those whose loaders they allow.
        leading: what makes their leading parameters, where kernels have some.
        layout: what says of two forms that kernels are launched alike for both.
    """

    parts: tuple[CachePart, ...]
    kernels: object
    leading: LeadingForm | None
    layout: object

    @classmethod
    def of(
        cls,
        tensors: Sequence[Tensor],
        views: Sequence[HasTensor],
        kernels: object,
        leading: LeadingForm | None,
        layout: object = None,
    ) -> CacheForm:
        """Describe a cache by its views.

        Args:
            tensors: what ``plain_tensors`` returns of it; without any there are no parts.
            views: named tuples, whose first field is a view of the first of ``tensors``, or of one
                after the other.
            kernels: see the attributes.
            leading: likewise.
            layout: likewise.
        """
        sources = [tensors[0]] * len(views) if len(tensors) == 1 else tensors
        numbers = range(len(views)) if len(tensors) > 1 else [0] * len(views)
        parts = map(CachePart.of, numbers, sources, views)
        return cls(tuple(parts), kernels, leading, layout)

    def views(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Return the views of a cache of these tensors, in the order of ``parts``."""
        return [part.view(tensors) for part in self.parts]


class KnownForms(Generic[FormT]):
    """What a planner found of the last caches, for those that lie like one of them.

    That is: tensors of the same number, shapes, strides, dtypes and device, whose addresses and
    offsets into their storage are the same multiples of 16. No tensor is kept alive.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        """Begin without any."""
        # Replaced whole, since other threads bind, too.
        self._known: tuple[tuple[object, Callable[..., bool], list[int], FormT], ...] = ()

    def find(self, tensors: Sequence[Tensor]) -> FormT | None:
        """Return what was found of a cache that lies like one of these tensors, if there was one.

        Args:
            tensors: what ``plain_tensors`` returns of the cache.
        """
        if not tensors:
            return None
        found = self._find(len(tensors), tensors)
        if found is None and len(tensors) > len(set(map(id, tensors))):
            found = self._find(*_distinct(tensors))
        return found

    def _find(self, key: object, tensors: Sequence[Tensor]) -> FormT | None:
        for other, lie_alike, places, form in self._known:
            if other == key and lie_alike(*tensors) and places == _places(tensors):
                return form
        return None

    def add(self, tensors: Sequence[Tensor], form: FormT) -> None:
        """Remember what was found of a cache of these tensors; nothing where there are none."""
        if tensors:
            key: object = len(tensors)
            if len(tensors) > len(set(map(id, tensors))):
                key, tensors = _distinct(tensors)
            entry = key, recogniser(tensors), _places(tensors), form
            self._known = (entry, *self._known[: _MAX_FORMS - 1])


def _distinct(tensors: Sequence[Tensor]) -> tuple[object, Sequence[Tensor]]:
    """Return which tensors are the same, and each of them once, as a recogniser takes them."""
    once = {id(tensor): tensor for tensor in tensors}
    order = {key: i for i, key in enumerate(once)}
    return tuple([order[id(tensor)] for tensor in tensors]), tuple(once.values())


def _places(tensors: Sequence[Tensor]) -> list[int]:
    """Return what of the tensors' addresses decides which kernels take them."""
    return [
        int(place) % _MOST_ALIGNMENT
        for tensor in tensors
        for place in (tensor.data_ptr(), tensor.storage_offset())
    ]


def plain_tensors(kv_cache: object) -> tuple[Tensor, ...]:
    """Return the tensors of a cache; none where it is of a kind that is checked each time.

    One tensor, a pair, or four of a QuantizedKV, so that their number says which.
    """
    if type(kv_cache) is Tensor:
        tensors: tuple[Any, ...] = (kv_cache,)
    elif type(kv_cache) is tuple and len(kv_cache) == 2:
        tensors = kv_cache
    elif type(kv_cache) is QuantizedKV:
        tensors = kv_cache.tensors
    else:
        return ()
    for tensor in tensors:
        # A guard that meets a nested tensor ends the process.
        is_tensor = type(tensor) is Tensor and not tensor.is_nested
        if not is_tensor or tensor.requires_grad or tensor.layout is not torch.strided:
            return ()
    return () if is_dynamo_compiling() else tensors


class BoundCache:
    """A cache that a planner has checked; ``run`` takes it without looking again.

    Attributes:
        config: the configuration it was checked against.
        k: K as [num_pages, page_size, num_kv_heads, head_dim]; of four bits head_dim / 2 bytes.
        v: V likewise.
        block_scales: those of K and V, and zeros, as bytes [num_pages, page_size, num_kv_heads,
            bytes of a row]; None where K and V have no blocks.
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
        "layout_key",
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
        layout_key: object,
        tensor_maps: LeadingParams | None = None,
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
        self.layout_key = layout_key
        # These say where K and V are now: the memory of a tensor may move.
        self.k_at, self.v_at = k.tensor.data_ptr, v.tensor.data_ptr

    def __reduce__(self) -> NoReturn:
        raise TypeError("a bound cache can't be copied or pickled: bind the tensors it is made of")

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
