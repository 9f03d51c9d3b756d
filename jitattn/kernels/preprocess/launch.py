"""``preprocess_qkv`` and ``append_kv`` on a CUDA device: kernels, and launches that are remembered.

A model calls them once a layer, with tensors that lie like those of the layer before: such a call
writes addresses into parameters that are there, and launches. Where all of them have been before,
as in the step before, it copies the parameters of that time.
"""

from __future__ import annotations

import ctypes
import operator
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import _C, Tensor

from jitattn.base import knobs
from jitattn.base.validate import INT32_MAX
from jitattn.device.driver import Launch, LoadedKernel, device_facts, load_kernel
from jitattn.jit.build import build
from jitattn.kernels.common.device_kernels import arch_of
from jitattn.kernels.preprocess.check import (
    Arguments,
    TokenCall,
    check,
    memory_pairs,
    names_of,
    parts_of,
)
from jitattn.kernels.preprocess.check_cache import divisor_value
from jitattn.kernels.preprocess.check_values import check_values
from jitattn.kernels.preprocess.fill_params import (
    alignment,
    scales_of,
    sources,
    spec_of,
    write_call,
    write_rope,
)
from jitattn.kernels.preprocess.params import PREPROCESS_PARAMS
from jitattn.kernels.preprocess.reference import places_of
from jitattn.kernels.preprocess.spec import PreprocessSpec
from jitattn.kernels.preprocess.tile import preprocess_tile
from jitattn.spec.layout import Loader
from jitattn.spec.params import Divisor
from jitattn.tensors.cache_views import recogniser
from jitattn.tensors.overlap import Apart

# Rows of a token that a group of threads takes one after the other, so that it computes angles
# once; fewer where that leaves SMs without work.
_MAX_ROWS = 4
_CTAS_PER_SM = 16
# Kinds of arguments that are remembered, layouts of each, and addresses of each of those.
_MAX_FAMILIES = 64
_MAX_LAYOUTS = 64
_MAX_IMAGES = 1024

_SCALE = struct.Struct("Pqf")
_TABLE = struct.Struct("2P")  # with which every page table begins
# Arguments from here on are no tensors.
_NUM_TENSOR_FIELDS = Arguments._fields.index("rope")
_Q_OUT = Arguments._fields.index("q_out")
_address: Callable[[Tensor], int] = Tensor.data_ptr

Given = tuple[Any, ...]
"""What a caller gave, in the order of ``Arguments``, which take longer to make."""

_kernels: dict[tuple[PreprocessSpec, int], LoadedKernel] = {}
_lock = threading.Lock()


class _Memory(threading.local):
    """A thread's launches: they have parameters, which one thread at a time writes."""

    def __init__(self) -> None:
        self.families: list[_Family] = []  # the last one first


_memory = _Memory()


def preprocess(given: Given) -> Tensor | None:
    """Check, launch and return q; None where there is none.

    Raises:
        TypeError, ValueError: an argument doesn't fit.
    """
    # Tensors are recognised by how they lie, once the kinds of arguments and all others agree.
    kinds, fixed = tuple(map(type, given)), given[_NUM_TENSOR_FIELDS:]
    families = _memory.families
    for i, family in enumerate(families):
        # In this order: what is of the same kinds can be compared.
        if family.kinds == kinds and family.fixed == fixed:
            if i > 0:
                families.insert(0, families.pop(i))
            break
    else:
        family = _Family(given, kinds, fixed)
    tensors = family.tensors_of(given)
    prepared = family.find(tensors)
    if prepared is None:
        arguments = Arguments(*given)
        prepared = _Prepared(check(arguments), names_of(arguments), tensors)
        family.remember(prepared, tensors)
        if family not in families:
            families.insert(0, family)
            del families[_MAX_FAMILIES:]
    return prepared.run(given, tensors)


# --- what is remembered ---------------------------------------------------------------------------


class _Family:
    """Launches for arguments of the same kinds, by how their tensors lie.

    Attributes:
        kinds: types of all arguments.
        fixed: those that are no tensors.
    """

    __slots__ = ("_layouts", "_several", "_single", "fixed", "kinds")

    def __init__(self, given: Given, kinds: tuple[type, ...], fixed: Given) -> None:
        self.kinds, self.fixed = kinds, fixed
        single = [i for i, value in enumerate(given) if isinstance(value, Tensor)]
        self._single = _getter(single)
        # Arguments of a family are of the same types.
        self._several = [
            (i, parts) for i, value in enumerate(given) if (parts := parts_of(type(value)))(value)
        ]
        # By how many tensors there are: tables may have rows.
        self._layouts: dict[int, list[tuple[Callable[..., bool], _Prepared]]] = {}

    def tensors_of(self, given: Given) -> list[Any]:
        """Return the tensors of ``given``, in the order of ``names_of``."""
        tensors = [*self._single(given)]
        for i, parts in self._several:
            tensors += parts(given[i])
        return tensors

    def find(self, tensors: list[Any]) -> _Prepared | None:
        """Return the launch for tensors that lie like these."""
        layouts = self._layouts.get(len(tensors), [])
        for i, (lie_alike, prepared) in enumerate(layouts):
            try:
                is_found = lie_alike(*tensors)
            except TypeError:  # some are no tensors: that is for the checks to say
                return None
            if is_found:
                if i > 0:
                    layouts.insert(0, layouts.pop(i))
                return prepared
        return None

    def remember(self, prepared: _Prepared, tensors: list[Any]) -> None:
        """Keep a launch, and forget those that were not used for long."""
        layouts = self._layouts.setdefault(len(tensors), [])
        layouts.insert(0, (recogniser(tensors), prepared))
        del layouts[_MAX_LAYOUTS:]


def _getter(indices: Sequence[int]) -> Callable[[Any], Any]:
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda values: [values[i] for i in indices]


# --- a launch -------------------------------------------------------------------------------------

_Image = tuple[Launch, bytes] | tuple[()]
"""How to launch, and the bytes of all parameters; nothing where there are no tokens."""


class _Prepared:
    """A launch for tensors that lie alike. Holds none of them."""

    def __init__(self, call: TokenCall, names: list[str], tensors: list[Tensor]) -> None:
        arguments, rope = call.arguments, call.arguments.rope
        self._device, self._index = call.device, call.device.index or 0
        self._num_tokens = call.num_tokens
        self._new_shape = None if call.q is None or arguments.q_out is not None else call.q.shape
        self._dtype = call.k.dtype
        layout = None if arguments.pages is None else arguments.pages.layout
        kind = PREPROCESS_PARAMS[layout]
        self._raw = bytearray(ctypes.sizeof(kind))
        self._params = kind.from_buffer(self._raw)
        self._rope = rope  # owns what the parameters point to
        if rope is not None:
            write_rope(self._params.op, rope, call.device)
        write_call(self._params.op, call)
        if arguments.pages is not None:
            arguments.pages.fill(self._params.pages)
        self._table_at = self._params.__class__.pages.offset if layout else 0
        self._table = [i for i, name in enumerate(names) if name.startswith("pages[")]
        places = sources(call, names, tensors)
        # Zeros where there is no tensor.
        self._pack = struct.Struct("".join("8x" if at is None else "P" for at in places)).pack_into
        # Pointers of tensors come first, then what lies behind them, as V does in a cache of both.
        found = [at for at in places if at is not None]
        self._behind = [(i, offset) for i, offset in found if offset]
        count = len(names) + (self._new_shape is not None)
        behind = {at: count + number for number, at in enumerate(self._behind)}
        self._addresses = _getter([behind.get(at, at[0]) for at in found])
        self._scales = scales_of(call, names)
        # Scales that are numbers come behind the pointers.
        fields = Arguments._fields
        self._numbers = [
            fields.index(name)
            for _, name, index, _ in self._scales
            if index is None and getattr(arguments, name) is not None
        ]
        self._can_be_aligned, self._aligned = alignment(call, places)
        # Both loaders' kernels, of which the addresses choose.
        self._specs = {
            True: spec_of(call, layout, Loader.VECTOR),
            False: spec_of(call, layout, Loader.PLAIN),
        }
        self._launches: dict[bool, Launch] = {}
        # By pointers and numbers: how to launch for them, and the bytes of all parameters.
        self._images: dict[Given, _Image] = {}
        self._apart = Apart(tensors, memory_pairs(names, arguments.pages))
        self._apart.learn([tensor.data_ptr() for tensor in tensors])
        self._verifies = knobs.load().check

    def run(self, given: Given, tensors: list[Tensor]) -> Tensor | None:
        """Launch for other tensors, on the current stream of their device."""
        if self._verifies and not torch.cuda.is_current_stream_capturing():
            verify(Arguments(*given))
        pointers: list[Any] = [*map(_address, tensors)]
        out: Tensor | None = given[_Q_OUT]
        if self._new_shape is not None:
            out = torch.empty(self._new_shape, dtype=self._dtype, device=self._device)
            pointers.append(out.data_ptr())
        for i in self._numbers:
            pointers.append(given[i])
        image = self._images.get(tuple(pointers))
        if image is None:
            image = self._new_image(given, pointers)
        if image:
            launch, self._raw[:] = image
            self._launch(launch)
        return out

    def _new_image(self, given: Given, pointers: list[Any]) -> _Image:
        """Return the launch for these addresses and numbers, and its parameters."""
        key, arguments = tuple(pointers), Arguments(*given)
        if not self._apart.holds(pointers):
            check(arguments)  # which refuses those that share bytes
            self._apart.learn(pointers)
        if self._num_tokens == 0:
            return ()
        params = self._params
        del pointers[len(pointers) - len(self._numbers) :]
        for i, offset in self._behind:
            pointers.append(pointers[i] + offset)
        self._pack(params, 0, *self._addresses(pointers))
        for at, name, index, stride in self._scales:
            address = 0 if index is None else pointers[index]
            _SCALE.pack_into(params, at, address, stride, _number(name, getattr(arguments, name)))
        if self._table:
            first, *more = self._table
            rows = pointers[more[0]] if more else 0
            _TABLE.pack_into(params, self._table_at, pointers[first], rows)
        is_aligned = self._can_be_aligned and not any(pointers[i] & m for i, m in self._aligned)
        launch = self._launches.get(is_aligned) or self._new_launch(is_aligned)
        if len(self._images) >= _MAX_IMAGES:
            self._images.clear()
        image: _Image = launch, bytes(self._raw)
        self._images[key] = image
        return image

    def _launch(self, launch: Launch) -> None:
        stream = _C._cuda_getCurrentRawStream(self._index)
        if _C._cuda_getDevice() == self._index:
            launch(stream)
        else:
            with torch.cuda.device(self._index):
                launch(stream)

    def _new_launch(self, is_aligned: bool) -> Launch:
        spec = self._specs[is_aligned]
        kernel = _kernel(spec, self._index)
        tile = preprocess_tile(spec)
        op = self._params.op
        num_rows = op.num_qo_heads + 2 * op.num_kv_heads
        num_sms = device_facts(self._index).num_sms
        num_items = items_per_token(num_rows, self._num_tokens, tile.groups, num_sms)
        op.items_per_token = Divisor.of(num_items)
        grid = -(-self._num_tokens * num_items // tile.groups)
        launch = self._launches[is_aligned] = Launch(kernel, self._params, grid, tile.num_threads)
        return launch


def verify(arguments: Arguments) -> None:
    """Wait for the device and raise ValueError for what a kernel would skip: JITATTN_CHECK."""
    names = ("seq_lens", "qo_indptr", "slots", "positions", "position_delta")
    given = {name: getattr(arguments, name) for name in names}
    copies: dict[str, Any] = {
        name: None if value is None else value.cpu() for name, value in given.items()
    }
    call = check(arguments)
    try:
        pages = arguments.pages
        if pages is not None:
            pages = pages.to_cpu()
        call = replace(call, arguments=arguments._replace(pages=pages, **copies))
        check_values(call)
        places_of(call)
    except ValueError as error:
        raise ValueError(f"JITATTN_CHECK: {error}") from None


def items_per_token(num_rows: int, num_tokens: int, groups: int, num_sms: int) -> int:
    """Return to how many groups of threads the rows of a token are dealt.

    ``groups`` are those of a CTA. Launches of few tokens deal each row to one.
    """
    ctas = num_tokens * num_rows // groups
    rows = max(1, min(_MAX_ROWS, ctas // (num_sms * _CTAS_PER_SM)))
    num_items = -(-num_rows // rows)
    if num_tokens * num_items + groups > INT32_MAX:
        raise ValueError(f"qkv has {num_tokens} tokens of {num_rows} heads: too many for a launch")
    return num_items


def _number(name: str, scale: float | Tensor | None) -> float:
    """Return a scale that is a number; 1 in place of others."""
    return 1.0 if scale is None or isinstance(scale, Tensor) else divisor_value(name, scale)


def _kernel(spec: PreprocessSpec, index: int) -> LoadedKernel:
    kernel = _kernels.get((spec, index))
    if kernel is not None:
        return kernel
    if torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"{spec.symbol} is not loaded, and a capture can't load it: make such a call before it"
        )
    with _lock:
        arch = arch_of(device_facts(index))
        built = build(spec, arch, knobs.load())
        kernel = load_kernel(built.cubin, built.symbol, index, 0)
        _kernels[spec, index] = kernel
    return kernel
