"""Checks of tensor arguments: dtypes, shapes, strides and devices."""

from __future__ import annotations

import itertools
from typing import Protocol

import torch
from torch import Tensor

INTEGERS = (torch.int32, torch.int64)


class _HasDevice(Protocol):
    @property
    def device(self) -> torch.device: ...


def check_tensor(name: str, value: object, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise TypeError unless ``value`` is a strided tensor of one of ``dtypes``."""
    if isinstance(value, Tensor) and value.dtype in dtypes:
        if value.layout is not torch.strided:
            raise TypeError(f"{name} has the layout {value.layout}: expected torch.strided")
        return
    wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}: expected a tensor of {wanted}")
    given = str(value.dtype).removeprefix("torch.")
    raise TypeError(f"{name} has dtype {given}: expected {wanted}")


def check_vector(name: str, value: Tensor, *, device: torch.device) -> None:
    """Raise unless ``value`` is a 1-D int32 or int64 tensor on ``device``."""
    check_tensor(name, value, INTEGERS)
    if value.dim() != 1:
        raise ValueError(f"{name} has shape {list(value.shape)}: expected one dimension")
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
    """Raise ValueError when elements of an output share memory, as after ``expand``."""
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
