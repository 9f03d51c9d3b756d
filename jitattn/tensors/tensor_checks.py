"""Checks of tensor arguments: dtypes, shapes, strides and devices."""

from __future__ import annotations

import itertools
import math
from typing import Protocol

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from jitattn.base.validate import shown, type_name

INTEGERS = (torch.int32, torch.int64)
_MOST_BYTES = 2**32  # of a result that is numbers of tokens: a billion of them


class _HasDevice(Protocol):
    @property
    def device(self) -> torch.device: ...


def check_tensor(name: str, value: object, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise TypeError unless ``value`` is a tensor of one of ``dtypes`` that has plain memory.

    Raises:
        TypeError: no tensor, another dtype, or a form that ``check_memory`` refuses.
        ValueError: likewise.
    """
    if isinstance(value, Tensor) and value.dtype in dtypes:
        check_memory(name, value)
        return
    wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type_name(value)}: expected a tensor of {wanted}")
    given = str(value.dtype).removeprefix("torch.")
    raise TypeError(f"{name} has dtype {given}: expected {wanted}")


def check_memory(name: str, value: Tensor) -> None:
    """Raise unless the elements of ``value`` are what its memory holds.

    Raises:
        TypeError: a sparse, quantised or nested tensor.
        ValueError: a meta tensor, or one whose sign or conjugation is a bit beside its memory.
    """
    if value.layout is not torch.strided:
        raise TypeError(f"{name} has the layout {value.layout}: expected torch.strided")
    if is_dynamo_compiling():
        return
    if value.is_nested:
        raise TypeError(f"{name} is a nested tensor: expected one of a single shape")
    if value.is_neg() or value.is_conj():
        bit = "negative" if value.is_neg() else "conjugate"
        raise ValueError(
            f"{name} has the {bit} bit, which kernels don't read: give {name}.resolve_"
            f"{'neg' if value.is_neg() else 'conj'}()"
        )
    if value.device.type == "meta":
        raise ValueError(f"{name} is on meta: expected cpu or cuda, where it has memory")


def new_tensor(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return memory for a result whose size ``name`` decides.

    Raises:
        ValueError: there is not so much, or nobody needs it; with the number of bytes.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes > _MOST_BYTES:
        raise ValueError(f"{name} asks for {num_bytes} bytes: at most {_MOST_BYTES}")
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:  # torch.cuda.OutOfMemoryError among them
        raise ValueError(
            f"{name} asks for {num_bytes} bytes on {device}: there is no room"
        ) from error


def check_vector(name: str, value: Tensor, *, device: torch.device | None) -> None:
    """Raise unless ``value`` is a 1-D int32 or int64 tensor on ``device``, or with None on any."""
    check_tensor(name, value, INTEGERS)
    if value.dim() != 1:
        raise ValueError(f"{name} has shape {list(value.shape)}: expected one dimension")
    if device is not None:
        check_device(name, value, device)


def check_per_request(name: str, values: Tensor, batch_size: int, device: torch.device) -> None:
    """Raise unless ``values`` is int32 or int64 [batch_size] on ``device``."""
    check_vector(name, values, device=device)
    if values.shape[0] != batch_size:
        raise ValueError(
            f"{name} has {values.shape[0]} entries: expected {batch_size}, one for each request"
        )


def check_indptr(name: str, indptr: Tensor) -> None:
    """Raise unless ``indptr`` is int32 [batch_size + 1], and on the CPU rises from 0."""
    check_tensor(name, indptr, (torch.int32,))
    if indptr.dim() != 1 or indptr.shape[0] == 0:
        raise ValueError(f"{name} has shape {list(indptr.shape)}: expected [batch_size + 1]")
    if indptr.device.type != "cpu":
        return
    values = indptr.tolist()
    if values[0] != 0:
        raise ValueError(f"{name}[0] is {values[0]}: expected 0")
    for b, (begin, end) in enumerate(itertools.pairwise(values)):
        if end < begin:
            raise ValueError(f"{name}[{b + 1}] is {end}, less than {name}[{b}], {begin}")


def check_supported(device: torch.device) -> None:
    """Raise ValueError unless ``device`` is the CPU or a CUDA device."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"the tensors are on {device}: expected a CUDA device or the CPU")


def as_device(name: str, value: object) -> torch.device:
    """Return the device that an argument stands for, one that this process can use.

    Raises:
        TypeError: no device and no name of one.
        ValueError: neither the CPU nor a CUDA device that is here.
    """
    try:
        device: torch.device = torch.device(value)  # type: ignore[call-overload]
    except Exception as error:  # of a class of the caller's, too
        raise TypeError(f"{name} is {shown(value)}: expected a device or its name") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} is {device}: expected a CUDA device or the CPU")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ValueError(f"{name} is {device}: this process sees {count} CUDA devices")
    return device


def check_device(name: str, value: _HasDevice, device: torch.device) -> None:
    """Raise ValueError unless ``value`` is on ``device``."""
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}: expected {device}, like the other tensors")


def check_rows(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise unless ``tensor`` has this shape, dtype and device."""
    check_tensor(name, tensor, (dtype,))
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}: expected {list(shape)}")
    check_device(name, tensor, device)


def check_last_stride(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless the last dimension is contiguous."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(
            f"{name} has strides {list(tensor.stride())}: the last dimension must be contiguous"
        )


def check_writable(name: str, tensor: Tensor) -> None:
    """Raise ValueError for an output that can't be written.

    Raises:
        ValueError: its elements share memory, as after ``expand``, or autograd follows it.
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires grad, so it can't be written: give {name}.detach()")
    reach = 0  # the farthest element of the dimensions so far
    dims = sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    for stride, size in dims:
        if stride <= reach and tensor.numel() > 0:
            raise ValueError(
                f"{name} has strides {list(tensor.stride())}: its elements share memory, so it "
                "can't be written"
            )
        reach += (size - 1) * stride


def row_strides(tensor: Tensor) -> tuple[int, int]:
    """Return the strides of the first two dimensions; 0 for a dimension of size 1."""
    return tuple(
        s if n > 1 else 0 for s, n in zip(tensor.stride()[:2], tensor.shape[:2], strict=True)
    )  # type: ignore[return-value]


# --- checks of what tensors hold, which wait for the device: JITATTN_CHECK


def refuse_first(wrong: Tensor, values: Tensor, message: str) -> None:
    """Raise ValueError of the first request that is wrong: ``message`` takes it and its value."""
    if bool(wrong.any()):
        request = int(wrong.int().argmax())
        raise ValueError("JITATTN_CHECK: " + message.format(request, int(values[request])))


def refuse_falling(name: str, indptr: Tensor) -> None:
    """Raise ValueError for offsets that are negative or fall."""
    begins = indptr[:-1].long()
    refuse_first(begins < 0, begins, name + " of request {} begins at {}, before 0")
    refuse_first(
        indptr.long().diff() < 0, indptr[1:], name + " of request {} ends at {}, before it begins"
    )
