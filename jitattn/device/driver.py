"""CUDA driver calls: device facts, tensor maps, kernel loading and launches. Torch-free."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver as cuda

from jitattn.base.errors import DriverError

_OK = cuda.CUresult.CUDA_SUCCESS
_ATTRIBUTE = cuda.CUdevice_attribute
_TENSOR_MAP_BYTES, _TENSOR_MAP_ALIGNMENT = 128, 64  # of CUtensorMap in cuda.h


@dataclass(frozen=True)
class DeviceFacts:
    """Facts of a CUDA device that planning depends on."""

    index: int
    name: str
    compute_capability: tuple[int, int]
    num_sms: int
    max_smem_bytes: int  # limit of shared memory of one CTA


def _check(result: tuple[Any, ...], what: str) -> Any:
    status, *values = result
    if status != _OK:
        raise DriverError(f"{what}: {_describe(status)}")
    return values[0] if len(values) == 1 else tuple(values)


def _result(answer: Any) -> Any:
    """Return a launch result as a ``CUresult``, or unchanged if the binding has no such name."""
    code = answer[0] if isinstance(answer, tuple) else answer
    try:
        return cuda.CUresult(code)
    except ValueError:
        return code


def _describe(status: Any) -> str:
    if not isinstance(status, cuda.CUresult):
        return f"error {status}"
    error, text = cuda.cuGetErrorString(status)
    message = text.decode() if error == _OK and text else "unknown error"
    return f"{getattr(status, 'name', status)} ({message})"


@functools.cache
def device_facts(index: int) -> DeviceFacts:
    """Return the facts of CUDA device ``index``, as this process numbers devices.

    Raises:
        DriverError: there is no driver or no such device.
    """
    _check(cuda.cuInit(0), "cuInit")
    device = _check(cuda.cuDeviceGet(index), f"no CUDA device {index}")

    def attribute(name: str) -> int:
        return int(_check(cuda.cuDeviceGetAttribute(getattr(_ATTRIBUTE, name), device), name))

    return DeviceFacts(
        index=index,
        name=_check(cuda.cuDeviceGetName(256, device), "name").split(b"\0")[0].decode(),
        compute_capability=(
            attribute("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR"),
            attribute("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR"),
        ),
        num_sms=attribute("CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT"),
        max_smem_bytes=attribute("CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
    )


@functools.cache
def _primary_context(index: int) -> Any:
    # Retained once and never released, as torch does with the same context.
    device = _check(cuda.cuDeviceGet(index), f"no CUDA device {index}")
    return _check(cuda.cuDevicePrimaryCtxRetain(device), "primary context")


@contextmanager
def _context(index: int) -> Iterator[None]:
    _check(cuda.cuCtxPushCurrent(_primary_context(index)), "push context")
    try:
        yield
    finally:
        _check(cuda.cuCtxPopCurrent(), "pop context")


def encode_tensor_map(
    pointer: int,
    item_bytes: int,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    *,
    fetch_bytes: int,
) -> bytes | None:
    """Return a tensor map with the 128-byte swizzle, or None if the driver refuses it.

    Args:
        pointer: address of the tensor.
        item_bytes: bytes of an element, 1 or 2.
        dims: sizes, the contiguous dimension first.
        strides: bytes between neighbours along the other dimensions.
        box: sizes of a TMA tile, in the order of ``dims``.
        fetch_bytes: least fetch of the L2 cache, 128 or 256.
    """
    types = cuda.CUtensorMapDataType
    status, encoded = cuda.cuTensorMapEncodeTiled(
        types.CU_TENSOR_MAP_DATA_TYPE_UINT8
        if item_bytes == 1
        else types.CU_TENSOR_MAP_DATA_TYPE_UINT16,
        len(dims),
        pointer,
        [cuda.cuuint64_t(size) for size in dims],
        [cuda.cuuint64_t(stride) for stride in strides],
        [cuda.cuuint32_t(size) for size in box],
        [cuda.cuuint32_t(1)] * len(dims),
        cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        getattr(cuda.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_L2_{fetch_bytes}B"),
        cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return ctypes.string_at(int(encoded.getPtr()), _TENSOR_MAP_BYTES) if status == _OK else None


class _MapMemory(threading.local):
    """Where a thread has the tensor map that it moves."""

    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(_TENSOR_MAP_BYTES + _TENSOR_MAP_ALIGNMENT)
        begin = ctypes.addressof(self.memory)
        self.at = begin + -begin % _TENSOR_MAP_ALIGNMENT


_MAP_MEMORY = _MapMemory()


@functools.cache
def _replace_address() -> Callable[[int, int], int]:
    """Return the driver's ``cuTensorMapReplaceAddress``."""
    function = ctypes.CDLL("libcuda.so.1")["cuTensorMapReplaceAddress"]
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p), ctypes.c_int
    return function


def move_tensor_map(encoded: bytes, pointer: int) -> bytes | None:
    """Return a tensor map for another address, or None if the driver refuses it.

    That takes a tenth of the time of encoding one.

    Args:
        encoded: what ``encode_tensor_map`` returned.
        pointer: address of a tensor of the same sizes and strides.
    """
    at = _MAP_MEMORY.at
    ctypes.memmove(at, encoded, _TENSOR_MAP_BYTES)
    status = _replace_address()(at, pointer)
    return ctypes.string_at(at, _TENSOR_MAP_BYTES) if status == 0 else None


class LoadedKernel:
    """A kernel loaded on one device, before any graph capture begins."""

    def __init__(self, cubin: bytes, symbol: str, device_index: int, smem_bytes: int) -> None:
        """Load ``cubin``; ``smem_bytes`` is the dynamic shared memory of every launch.

        Raises:
            DriverError: the cubin doesn't fit the device or the driver.
        """
        self.symbol = symbol
        self.device_index = device_index
        self.smem_bytes = smem_bytes
        with _context(device_index):
            what = f"cannot load {symbol} on device {device_index}"
            self._library = _check(cuda.cuLibraryLoadData(cubin, [], [], 0, [], [], 0), what)
            kernel = _check(cuda.cuLibraryGetKernel(self._library, symbol.encode()), what)
            # Loading is lazy, and must not happen inside a capture: this forces it now.
            self.function = _check(cuda.cuKernelGetFunction(kernel), what)
            self.argument = ctypes.c_void_p.from_param(int(self.function))
            version = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PTX_VERSION
            # From compute capability 9.0 on, kernels wait for their predecessor themselves.
            self.begins_early = _check(cuda.cuFuncGetAttribute(version, self.function), what) >= 90
            if smem_bytes > 0:  # more than 48 KiB with the static part needs this attribute
                limit = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                _check(cuda.cuFuncSetAttribute(self.function, limit, smem_bytes), what)


@functools.lru_cache(maxsize=4096)
def load_kernel(cubin: bytes, symbol: str, device_index: int, smem_bytes: int) -> LoadedKernel:
    """Return a loaded kernel, shared by planners of one configuration.

    Raises:
        DriverError: the cubin doesn't fit the device or the driver.
    """
    return LoadedKernel(cubin, symbol, device_index, smem_bytes)


class _LaunchAttribute(ctypes.Structure):
    """``CUlaunchAttribute`` of cuda.h with an int value."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


# The kernel may begin while its predecessor on the stream still runs (programmatic dependent
# launch): see wait_for_previous_kernel in templates/include/jitattn/ptx.cuh.
_BEGIN_EARLY = _LaunchAttribute(
    int(cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION),
    value=(1,),
)


class _LaunchConfig(ctypes.Structure):
    """``CUlaunchConfig`` of cuda.h."""

    _fields_ = (
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint),
        ("block_z", ctypes.c_uint),
        ("smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


# Launches share their configurations, which are never modified.
@functools.lru_cache(maxsize=1024)
def _config(
    grid: int, num_threads: int, smem_bytes: int, stream: int, begins_early: bool
) -> _LaunchConfig:
    config = _LaunchConfig(grid, 1, 1, num_threads, 1, 1, smem_bytes, stream)
    if begins_early:
        config.attributes, config.num_attributes = ctypes.addressof(_BEGIN_EARLY), 1
    return config


@functools.lru_cache(maxsize=1024)
def _binding_config(
    grid: int, num_threads: int, smem_bytes: int, stream: int, begins_early: bool
) -> Any:
    config = cuda.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = num_threads, 1, 1
    config.sharedMemBytes, config.hStream = smem_bytes, cuda.CUstream(stream)
    if begins_early:
        attribute = cuda.CUlaunchAttribute()
        attribute.id = cuda.CUlaunchAttributeID(_BEGIN_EARLY.id)
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
    return config


@functools.cache
def _launch_function() -> Callable[..., int]:
    """Return the driver's ``cuLaunchKernelEx``, for arguments prepared ahead.

    The binding has loaded the library already, since a kernel exists.
    """
    function: Callable[..., int] = ctypes.CDLL("libcuda.so.1")["cuLaunchKernelEx"]
    return function


def _by_ctypes(launch: Launch, stream: int) -> Callable[[], object]:
    """Return a launch through ctypes, which returns 0 on success."""
    config = ctypes.byref(_config(*launch.shape, stream, launch.kernel.begins_early))
    arguments = (config, launch.kernel.argument, ctypes.byref(launch.pointer), None)
    return functools.partial(_launch_function(), *arguments)


def _by_binding(launch: Launch, stream: int) -> Callable[[], object]:
    """Return a launch through the binding, which returns (CUDA_SUCCESS,)."""
    config = _binding_config(*launch.shape, stream, launch.kernel.begins_early)
    arguments = (config, launch.kernel.function, ctypes.addressof(launch.pointer), 0)
    return functools.partial(cuda.cuLaunchKernelEx, *arguments)


# The launch path, and its result on success; bench/probe_launch.py times both paths.
_prepare, LAUNCHED = _by_ctypes, 0


class Launch:
    """A kernel with its grid and parameter struct, prepared for cheap launches.

    ``params`` may change between launches; the driver copies it during the call. Not thread-safe.

    Attributes:
        kernel: the kernel.
        params: its parameter struct.
        pointer: array of one pointer to ``params``.
        shape: CTAs, threads of a CTA, and bytes of its dynamic shared memory.
    """

    __slots__ = ("_call", "_stream", "kernel", "params", "pointer", "shape")

    def __init__(
        self,
        kernel: LoadedKernel,
        params: ctypes.Structure | ctypes.Array[Any],
        grid: int,
        num_threads: int,
    ) -> None:
        """Prepare launches of ``grid`` CTAs of ``num_threads`` threads."""
        self.kernel = kernel
        self.params = params
        self.shape = grid, num_threads, kernel.smem_bytes
        # The driver takes an array of pointers to parameters, here of one.
        self.pointer = ctypes.c_void_p(ctypes.addressof(params))
        self._stream = -1
        self._call: Callable[[], object]

    def __call__(self, stream: int) -> None:
        """Launch on ``stream``, a raw handle of the kernel's device.

        Raises:
            DriverError: the driver refused the launch.
        """
        call = self._call if stream == self._stream else self.on(stream)
        answer = call()
        if answer != LAUNCHED:
            self.try_again(answer)

    def on(self, stream: int) -> Callable[[], object]:
        """Return the launch on ``stream``.

        Callers pass results other than ``LAUNCHED`` to ``try_again``.
        """
        if stream != self._stream:
            self._call = _prepare(self, stream)
            self._stream = stream
        return self._call

    def try_again(self, answer: object) -> None:
        """Launch again in the kernel's context if the last call failed for want of one.

        Raises:
            DriverError: the driver refused the launch.
        """
        # A thread without CUDA calls so far has no current context.
        status = _result(answer)
        no_context = (
            cuda.CUresult.CUDA_ERROR_INVALID_CONTEXT,
            cuda.CUresult.CUDA_ERROR_CONTEXT_IS_DESTROYED,
        )
        if status in no_context:
            with _context(self.kernel.device_index):
                status = _result(self._call())
        if status != _OK:
            raise DriverError(f"cannot launch {self.kernel.symbol}: {_describe(status)}")
