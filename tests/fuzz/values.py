"""What a fuzzer puts in an argument's place: hostile values, and tensors that lie otherwise.

A value is made anew for each input, so that none carries anything from one to the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from random import Random

import numpy as np
import torch
from torch import Tensor

shown: list[str] = []
"""What has been asked to show itself since the list was cleared; nothing hostile may be."""


class HostileCallError(Exception):
    """A hostile value was called."""


def _show(self: object, *_: object) -> str:
    shown.append(type(self).__name__)
    raise HostileCallError(f"{type(self).__name__} was asked to show itself")


def _convert(self: object, *_: object) -> object:
    raise HostileCallError(f"{type(self).__name__} was converted")


_SHOWS = {"__repr__": _show, "__str__": _show, "__format__": _show}
_CONVERTS = dict.fromkeys(("__index__", "__int__", "__float__", "__bool__"), _convert)
HostileStr = type("HostileStr", (str,), _SHOWS)
HostileInt = type("HostileInt", (int,), _SHOWS | _CONVERTS)
HostileFloat = type("HostileFloat", (float,), _SHOWS | _CONVERTS)
HostileObject = type("HostileObject", (), _SHOWS | _CONVERTS)
HostileList = type("HostileList", (list,), _SHOWS)
HostileDict = type("HostileDict", (dict,), _SHOWS)
HOSTILE = (HostileStr, HostileInt, HostileFloat, HostileObject, HostileList, HostileDict)


class Subclass(Tensor):
    """A tensor of another class, as quantisation libraries have them."""


def _endless() -> list[object]:
    found: list[object] = []
    found.append(found)
    return found


NUMBERS: tuple[object, ...] = (
    *(0, 1, -1, 2, 3, 7, 16, 128, 2**20, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63)),
    *(10**400, -(10**400), 0.0, -0.0, 0.5, 1.5, -1.0, math.nan, math.inf, -math.inf, 1e39, 1e300),
    *(1e-300, 5e-324, np.int32(3), np.int64(2**40), np.uint64(2**64 - 1), np.int8(-1)),
    *(np.float32(0.5), np.float64(math.nan), np.float16(2), Decimal("1.5"), Decimal("NaN")),
    *(Decimal("sNaN"), Decimal("1e400"), Fraction(1, 3), Fraction(10**400), complex(1, 2)),
)
NAMES: tuple[object, ...] = (
    *("", "x", "False", "None", "NHD", "HND", "shared", "separate", "csr", "token", "ragged"),
    *("bfloat16", "float32", "uint8", "nvfp4", "cpu", "meta", "cuda", "cuda:99", "\ud800", "\0"),
    *("x" * 100_000, "{}{0}%s", "a b;c\n#define x", np.str_("NHD"), b"NHD", "sm_90a", "sm_1"),
)
_MAKERS: tuple[Callable[[], object], ...] = (
    *(lambda v=v: v for v in (None, True, False, np.bool_(True), object, len, range(3), ...)),
    *(list, dict, tuple, object, _endless, lambda: [1], lambda: (None, None), lambda: {"x": 1}),
    *(lambda: [2**40], lambda: ["a"], lambda: [[1], [1, 2]], lambda: iter([1]), lambda: {1}),
    *(lambda: np.array(3), lambda: np.array([1, 2]), lambda: np.array([1.5]), bytearray),
    *(lambda: torch.tensor(3), lambda: torch.tensor(2.5), lambda: torch.zeros(3)),
    *(lambda: torch.zeros(0), lambda: torch.empty((), device="meta")),
    *(lambda: torch.empty(2, 3, device="meta"), lambda: torch.zeros(2, 2).to_sparse()),
    *(lambda: [torch.zeros(2)], lambda: torch.tensor(True), lambda: torch.tensor(1j)),
    *(lambda v=v: v for v in (torch.bfloat16, torch.float32, torch.uint8, torch.complex64)),
    *(lambda v=v: v for v in (torch.device("cpu"), torch.device("meta"), torch.strided)),
    *(lambda: HostileStr("NHD"), lambda: HostileStr("bfloat16"), lambda: HostileInt(1)),
    *(lambda: HostileInt(16), lambda: HostileFloat(0.5), HostileObject, HostileList, HostileDict),
    lambda: HostileStr("y" * 100_000),
)


def any_value(random: Random) -> object:
    """Return a value of any kind."""
    kind = random.randrange(3)
    if kind == 0:
        return random.choice(NUMBERS)
    return random.choice(NAMES) if kind == 1 else random.choice(_MAKERS)()


def plain(value: object) -> object:
    """Return the value of the plain type that ``value`` stands for, if it is of another."""
    for base in (str, int, float):
        if isinstance(value, base) and type(value) is not base and not isinstance(value, bool):
            return {str: str.__str__, int: int.__index__, float: float.__float__}[base](value)
    if isinstance(value, np.integer | np.floating):
        return value.item()
    return value


# --- tensors that lie otherwise, of the same values ----------------------------------------------


def strided(tensor: Tensor) -> Tensor:
    """The same values, every other element of memory along the first dimension with room."""
    room = tensor.new_zeros((2 * max(tensor.shape[0], 1), *tensor.shape[1:]))
    return room[::2][: tensor.shape[0]].copy_(tensor)


def last_strided(tensor: Tensor) -> Tensor:
    """The same values, with gaps along the last dimension."""
    room = tensor.new_zeros((*tensor.shape, 2))
    return room[..., 0].copy_(tensor)


def offset(tensor: Tensor) -> Tensor:
    """The same values, one element further in memory."""
    room = tensor.new_zeros(tensor.numel() + 1)
    return room[1:].view(tensor.shape).copy_(tensor)


def negated(tensor: Tensor) -> Tensor:
    """The same values, whose sign the negative bit turns."""
    return torch._neg_view(-tensor)


def requiring_grad(tensor: Tensor) -> Tensor:
    """The same values, a leaf of autograd."""
    return tensor.clone().requires_grad_()


def subclassed(tensor: Tensor) -> Tensor:
    """The same values, of a class of their own."""
    return tensor.clone().as_subclass(Subclass)


def widened(tensor: Tensor) -> Tensor:
    """The same integers, of the other width."""
    return tensor.to({torch.int32: torch.int64, torch.int64: torch.int32}[tensor.dtype])


SAME = (strided, last_strided, offset, negated, requiring_grad, subclassed, widened)

# --- and of others --------------------------------------------------------------------------------

_DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8),
    *(torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn),
)


def _filled(tensor: Tensor, random: Random) -> Tensor:
    if tensor.dtype.is_floating_point:
        value = random.choice((math.nan, math.inf, -math.inf, 0.0, -1.0))
    elif tensor.dtype is torch.bool:
        value = random.choice((True, False))
    else:
        info = torch.iinfo(tensor.dtype)
        value = random.choice((info.min, info.max, -1, 0, 1, 2, 100))
        value = min(max(value, info.min), info.max)
    found = tensor.clone()
    if random.random() < 0.5 and found.numel() and found.dtype.itemsize > 1:
        found.view(-1)[random.randrange(found.numel())] = value
        return found
    return (
        torch.full(tensor.shape, value, dtype=torch.float32).to(tensor.dtype)
        if (tensor.dtype.itemsize == 1)
        else found.fill_(value)
    )


_OTHER: tuple[Callable[[Tensor, Random], object], ...] = (
    lambda t, r: torch.zeros(t.shape, dtype=r.choice(_DTYPES)),
    lambda t, r: t[None],
    lambda t, r: t[..., None],
    lambda t, r: t[0],
    lambda t, r: t[:0],
    lambda t, r: t[..., :-1],
    lambda t, r: t[:-1],
    lambda t, r: torch.cat((t, t)),
    lambda t, r: t.flatten(),
    lambda t, r: t.transpose(0, -1),
    lambda t, r: t.flip(0)[:1].expand(t.shape),
    lambda t, r: t.to("meta"),
    lambda t, r: t.to_sparse(),
    lambda t, r: torch.nested.nested_tensor(list(t)),
    lambda t, r: torch.zeros(t.shape, dtype=torch.complex64).conj(),
    lambda t, r: torch.conj(torch.zeros(t.shape, dtype=torch.complex64)).imag,
    lambda t, r: t.tolist(),
    lambda t, r: t.numpy(),
    lambda t, r: [t, t],
    lambda t, r: torch.nn.Parameter(t.clone()),
    lambda t, r: t.new_zeros(()),
    lambda t, r: t.new_zeros((0,) * t.dim()),
    _filled,
    _filled,
    _filled,
)


def spoiled(tensor: Tensor, random: Random) -> tuple[object, bool]:
    """Return another tensor, and whether it has the same values.

    What torch can't make of this one, such as a sparse tensor of some types, gives it unchanged.
    """
    try:
        if random.random() < 0.4:
            return random.choice(SAME)(tensor), True
        return random.choice(_OTHER)(tensor, random), False
    except (RuntimeError, TypeError, IndexError, KeyError, NotImplementedError):
        return tensor, True
