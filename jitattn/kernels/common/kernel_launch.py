"""The launches of a planned kernel: parameters written once, then patched, then replayed.

``KernelLaunch.patch`` writes all that differs from the last call. ``replay`` returns the fast path:
what launches again for a call that lies like the last one. Both write addresses, tensor maps and
scales through ``write_addresses``, ``write_maps`` and ``write_scales`` of the launch.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import _C, Tensor

from jitattn.device.driver import LAUNCHED, Launch
from jitattn.device.workspace import SLICE_BYTES
from jitattn.kernels.common.kernel_loader import BoundKernels, PlannedKernel
from jitattn.kernels.common.params import (
    ATTENTION_OFFSET,
    MASK_BOOL,
    MASK_PACKED,
    MASK_RAGGED,
    AttentionParams,
    ListScheduleParams,
    Schedule,
    ScheduleParams,
)
from jitattn.kernels.common.schedule_config import (
    ScheduleConfig,
    WorkspacePlace,
    schedule_offsets,
)
from jitattn.spec.dtype import DType
from jitattn.spec.params import FLOAT_CODES
from jitattn.tensors.masks import Mask
from jitattn.tensors.page_table_base import PlannedTable
from jitattn.tensors.scales import Scale
from jitattn.tensors.tensor_layouts import NO_LAYOUT, Batch, RowLayout, recogniser
from jitattn.tensors.variant_params import VariantParams

_MASK_KINDS = {"bool": MASK_BOOL, "packed": MASK_PACKED, "ragged": MASK_RAGGED}
_ADDRESSES = struct.Struct("4P")  # q, k, v, out, with which AttentionParams begins
_SCALES = struct.Struct("PqfPqf")  # of K and V, which lie behind each other
_SCALES_AT = ATTENTION_OFFSET + AttentionParams.k_scale.offset
_FLOAT_CODES = {DType(name).torch_dtype: code for name, code in FLOAT_CODES.items()}

Replay = Callable[[object, object, object], Tensor | None]
"""Repeats a call with another q, bound cache and out, or a new out for None.

Returns out; does nothing and returns None where something differs that is not an address.
"""


class PlannedCall(Protocol):
    """What launches read of a checked call of any family."""

    @property
    def q(self) -> Tensor:
        """The queries."""
        ...

    @property
    def q_layout(self) -> RowLayout:
        """How they lie."""
        ...

    @property
    def kv(self) -> Any:
        """The bound cache."""
        ...

    @property
    def pages(self) -> PlannedTable:
        """The page table."""
        ...

    @property
    def out(self) -> Tensor:
        """The output."""
        ...

    @property
    def out_layout(self) -> RowLayout:
        """How it lies."""
        ...

    @property
    def lse(self) -> Tensor | None:
        """The lse, if it is asked for."""
        ...

    @property
    def lse_layout(self) -> RowLayout:
        """How it lies."""
        ...

    @property
    def sinks(self) -> Tensor | None:
        """The sinks, if there are any."""
        ...

    @property
    def mask(self) -> Mask | None:
        """The custom mask, if there is one."""
        ...

    @property
    def variant_params(self) -> VariantParams | None:
        """Those of a variant that has some."""
        ...


class KernelLaunch:
    """One kernel of a plan: its schedule, its parameters, and the launches with them.

    Attributes:
        role: what the kernel is for.
        buffers: partials and counters of its workspace.
        memory: its schedule.
        params: the kernel's parameters.
        schedule_params: what the kernel that makes the schedule is told.
        write_addresses: writes those of q, K, V and out into the parameters.
        write_maps: writes the bytes of tensor maps into the parameters.
    """

    __slots__ = (
        "_attention",
        "_bounds_requests",
        "_cache_strides",
        "_grid",
        "_launches",
        "_lse_layout",
        "_out_layout",
        "_pages",
        "_pool_entries",
        "_q_layout",
        "_raw",
        "_sizes",
        "buffers",
        "memory",
        "params",
        "role",
        "schedule_params",
        "write_addresses",
        "write_maps",
    )

    def __init__(
        self,
        config: ScheduleConfig,
        capacity: int,
        buffers: tuple[Tensor, Tensor],
        device: torch.device,
        place: WorkspacePlace,
        schedule_params: ScheduleParams | ListScheduleParams,
    ) -> None:
        """Allocate a schedule of ``capacity`` requests and query tiles on ``device``.

        ``schedule_params`` are those of ``config`` in the launch that makes the schedule.
        """
        self.role = config.role
        self.buffers = buffers
        self._grid = config.grid
        self._pool_entries = config.pool_entries
        self._bounds_requests = config.bounds_requests
        offsets, size = schedule_offsets(capacity, config.max_slots, config.num_first_items)
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        base = self.memory.data_ptr()
        schedule_params.schedule = Schedule(*(base + offset for offset in offsets))
        self.schedule_params: Any = schedule_params
        self._raw = bytearray(config.params)
        self.params: Any = config.params_type.from_buffer(self._raw)
        self._attention: Any = self.params.attention
        # Beside each other they would take more SMs than they may.
        self._attention.is_second = place.number > 0 and not config.limits_sms
        self._point_at_workspace(config.num_values, place)
        self._attention.schedule = schedule_params.schedule
        self.write_addresses: Callable[..., None] = functools.partial(
            _ADDRESSES.pack_into, self._raw, ATTENTION_OFFSET
        )
        self.write_maps: Callable[[bytes], None] = functools.partial(
            self._raw.__setitem__, slice(ATTENTION_OFFSET)
        )
        self._launches: dict[PlannedKernel, Launch] = {}
        # What the parameters say already.
        self._sizes: tuple[object, ...] = ()
        self._pages: PlannedTable | None = None
        self._cache_strides: tuple[int, ...] = ()
        self._q_layout = self._out_layout = self._lse_layout = NO_LAYOUT

    def _point_at_workspace(self, num_values: int, place: WorkspacePlace) -> None:
        attention = self._attention
        partials, counters = self.buffers
        attention.partials = pointer = partials.data_ptr() + 4 * place.partial
        attention.partial_sums = pointer + 4 * num_values
        attention.num_claimed = pointer = counters.data_ptr() + 4 * place.counter
        attention.counters = pointer + SLICE_BYTES

    def begin(self, batch: Batch) -> None:
        """Have the schedule kernel's launch schedule another batch."""
        schedule = self.schedule_params
        self._attention.has_padding = batch.qo_indptr is not None
        sizes = batch.layout, batch.max_kv_len, batch.max_q_len, batch.qo_indptr is None
        if sizes != self._sizes or batch.qo_indptr is not None:
            _write_sizes(schedule, batch)
            self._sizes = sizes
        schedule.seq_lens = None if batch.seq_lens is None else batch.seq_lens.data_ptr()
        if batch.qo_indptr is not None:
            schedule.qo_indptr = batch.qo_indptr.data_ptr()
        if self._bounds_requests:
            batch.pages.point_schedule(schedule)

    def forget_tables(self) -> None:
        """Let go of the tables of the last run."""
        self._pages = None

    def launch_of(self, kernels: BoundKernels) -> Launch:
        """Return the launch of the role's kernel, whichever loader it has."""
        kernel = kernels.of(self.role)
        launch = self._launches.get(kernel)
        if launch is None:
            launch = Launch(kernel.load(), self.params, self._grid, kernel.tile.num_threads)
            self._launches[kernel] = launch
        return launch

    def steps_of(self, kernels: BoundKernels) -> tuple[Launch, ...]:
        """Return what a run launches, one after the other."""
        return (self.launch_of(kernels),)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tell the allocator that ``stream`` uses the memory of this kernel."""
        for tensor in (self.memory, *self.buffers):
            tensor.record_stream(stream)

    def patch(self, call: PlannedCall) -> None:
        """Write into the parameters what differs from the last call."""
        params, kv = self.params, call.kv
        attention = params.attention
        if call.pages is not self._pages:
            call.pages.fill(params.pages)
            self._pages = call.pages
        if self._pool_entries:
            params.pages.num_entries = kv.k.tensor.shape[0] * self._pool_entries
        if kv.strides != self._cache_strides:
            self._write_cache_strides(kv.strides)
        q_layout, out_layout = call.q_layout, call.out_layout
        if (
            q_layout is not self._q_layout
            or out_layout is not self._out_layout
            or call.lse_layout is not self._lse_layout
        ):
            self._write_layouts(q_layout, out_layout, call.lse_layout)
        q_at, out_at = call.q.data_ptr(), call.out.data_ptr()
        attention.q_is_aligned = q_layout.is_aligned(q_at)
        attention.out_is_aligned = out_layout.is_aligned(out_at)
        k_at, v_at = kv.k_at(), kv.v_at()
        self.write_addresses(q_at, k_at, v_at, out_at)
        if kv.tensor_maps is not None:
            self.write_maps(kv.tensor_maps.at(self.role, k_at, v_at))
        if kv.k_scale is not None:
            self.write_scales(kv)
        attention.lse = None if call.lse is None else call.lse.data_ptr()
        if call.sinks is not None:
            attention.sinks = call.sinks.data_ptr()
            attention.sink_stride = call.sinks.stride()[0]
            attention.sink_code = _FLOAT_CODES[call.sinks.dtype]
        if call.mask is not None:
            _write_mask(attention, call.mask)
        if call.variant_params is not None:
            _write_variant(params.variant, call.variant_params)

    def write_scales(self, kv: Any) -> None:
        """Write the scales of a quantised K and V into the parameters."""
        k, v = kv.k_scale, kv.v_scale
        if v is not None:
            k_at = 0 if k.tensor is None else k.tensor.data_ptr()
            v_at = 0 if v.tensor is None else v.tensor.data_ptr()
            numbers = k_at, k.stride, k.value, v_at, v.stride, v.value
            _SCALES.pack_into(self._raw, _SCALES_AT, *numbers)

    def write_query_scale(self, scale: Any) -> None:
        """Write the scale of FP8 queries into the parameters of kernels that read them."""
        queries = self.params.queries
        queries.values = None if scale.tensor is None else scale.tensor.data_ptr()
        queries.token_stride, queries.head_stride = scale.strides
        queries.value = scale.value

    def _write_layouts(self, q: RowLayout, out: RowLayout, lse: RowLayout) -> None:
        attention = self._attention
        attention.num_tokens = q.shape[0]
        attention.q_token_stride, attention.q_head_stride = q.strides[:2]
        attention.out_token_stride, attention.out_head_stride = out.strides[:2]
        attention.lse_token_stride, attention.lse_head_stride = lse.strides or (0, 0)
        self._q_layout, self._out_layout, self._lse_layout = q, out, lse

    def _write_cache_strides(self, strides: tuple[int, ...]) -> None:
        attention = self._attention
        attention.k_page_stride, attention.k_token_stride, attention.k_head_stride = strides[:3]
        attention.v_page_stride, attention.v_token_stride, attention.v_head_stride = strides[3:]
        self._cache_strides = strides


class _Step(NamedTuple):
    """A launch of a replay: what writes its parameters, and the driver's call on a stream."""

    kernel: KernelLaunch
    write_addresses: Callable[..., None]
    launch: Launch
    call_driver: Callable[[], object]


def replay(call: PlannedCall, launches: Sequence[KernelLaunch], index: int, stream: int) -> Replay:
    """Return the fast path: what launches again for what lies like the tensors of ``call``.

    It allocates an out that is not given where that would lie like q. Rows of q and out begin at
    multiples of their vectors, in ``call`` as in what it launches.
    """
    q, out, q_layout, out_layout = call.q, call.out, call.q_layout, call.out_layout
    q_at, out_at, kernels = q.data_ptr(), out.data_ptr(), call.kv.kernels
    steps = [
        _Step(
            launch,
            launch.write_addresses,
            launch.launch_of(kernels),
            launch.launch_of(kernels).on(stream),
        )
        for launch in launches
    ]
    # Half of a call's time would go into looking these up.
    cache_type, layout_key = type(call.kv), call.kv.layout_key
    has_maps, has_scales = call.kv.tensor_maps is not None, call.kv.k_scale is not None
    lies_alike, lie_alike = recogniser((q,)), recogniser((q, out))
    out_is_like_q = out_layout.fits(q) and q.is_contiguous()
    # Where out may lie: beyond q on either side, or in it as it did in the call.
    low, high, known = -out_layout.span, q_layout.span, out_at - q_at
    vectors = max(q_layout.alignment, out_layout.alignment) - 1
    current_stream, current_device = _C._cuda_getCurrentRawStream, _C._cuda_getDevice
    is_capturing = torch.cuda.is_current_stream_capturing

    def run_again(q: Any, kv: Any, out: Any) -> Tensor | None:
        if type(kv) is not cache_type or kv.layout_key is not layout_key:
            return None
        if not (lie_alike(q, out) if out is not None else out_is_like_q and lies_alike(q)):
            return None
        result: Tensor = torch.empty_like(q) if out is None else out
        q_at, out_at = q.data_ptr(), result.data_ptr()
        ahead = out_at - q_at
        if (q_at | out_at) & vectors or (low < ahead < high and ahead != known):
            return None
        if current_stream(index) != stream or current_device() != index or is_capturing():
            return None
        k_at, v_at = kv.k_at(), kv.v_at()
        for kernel, write_addresses, launch, call_driver in steps:
            write_addresses(q_at, k_at, v_at, out_at)
            if has_maps:
                kernel.write_maps(kv.tensor_maps.at(kernel.role, k_at, v_at))
            if has_scales:
                kernel.write_scales(kv)
            answer = call_driver()
            if answer != LAUNCHED:
                launch.try_again(answer)
        return result

    return run_again


def _write_sizes(params: Any, batch: Batch) -> None:
    pages, seq_lens, qo_indptr = batch.pages, batch.seq_lens, batch.qo_indptr
    if seq_lens is not None:
        params.seq_lens_stride = seq_lens.stride()[0]
        params.seq_lens_are_int64 = seq_lens.dtype is torch.int64
    params.batch_size = batch.batch_size
    params.max_kv_len = batch.max_kv_len
    params.max_q_len = batch.max_q_len
    params.qo_indptr = None
    params.qo_indptr_stride = 0 if qo_indptr is None else qo_indptr.stride()[0]
    pages.fill_schedule(params)


def write_scale(params: ctypes.Structure, scale: Scale) -> None:
    """Write a scale into its place in the parameters."""
    params.values = None if scale.tensor is None else scale.tensor.data_ptr()
    params.stride = scale.stride
    params.value = scale.value


def _write_mask(params: ctypes.Structure, mask: Mask) -> None:
    params.mask = mask.values.data_ptr()
    params.mask_kind = _MASK_KINDS[mask.layout]
    is_ragged = mask.indptr is not None
    params.mask_row_stride = 0 if is_ragged else mask.values.stride(0)
    params.mask_width = mask.width
    params.mask_bytes = mask.values.shape[0] if is_ragged else 0
    params.mask_indptr = None if mask.indptr is None else mask.indptr.data_ptr()
    params.mask_indptr_stride = 0 if mask.indptr is None else mask.indptr.stride(0)


def _write_variant(params: ctypes.Structure, values: VariantParams) -> None:
    for name, value in values.items():
        if not isinstance(value, Tensor):
            setattr(params, name, value)
        elif isinstance(table := getattr(params, name), ctypes.Structure):
            table.values = value.data_ptr()
            table.strides[:] = value.stride()
            table.sizes[:] = value.shape
        else:
            setattr(params, name, value.data_ptr())
