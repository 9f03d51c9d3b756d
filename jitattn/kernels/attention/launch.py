"""A batch that the device schedules, and its launches: parameters written once, then patched."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import _C, Tensor

from jitattn.device.driver import LAUNCHED, Launch
from jitattn.device.workspace import SLICE_BYTES, Workspace
from jitattn.kernels.attention.loaded_kernels import AttentionKernel, BoundKernels
from jitattn.kernels.attention.schedule import Recipe, Recipes, schedule_offsets
from jitattn.kernels.common.params import (
    ATTENTION_OFFSET,
    MASK_BOOL,
    MASK_PACKED,
    MASK_RAGGED,
    AttentionParams,
    Schedule,
    ScheduleParams,
)
from jitattn.spec.dtype import DType
from jitattn.spec.params import FLOAT_CODES
from jitattn.tensors.cache_views import (
    NO_LAYOUT,
    Again,
    Batch,
    BoundCache,
    Call,
    Mask,
    RowLayout,
    Scale,
    recogniser,
)
from jitattn.tensors.page_table import PageTable
from jitattn.tensors.variant_params import VariantParams

if TYPE_CHECKING:
    from jitattn.kernels.attention.kernels import KernelSet
    from jitattn.kernels.mla.check import BoundMLACache, MLACall

# Plans of a size that a planner keeps when they are gone.
_MAX_IDLE = 16

_MASK_KINDS = {"bool": MASK_BOOL, "packed": MASK_PACKED, "ragged": MASK_RAGGED}
_ADDRESSES = struct.Struct("4P")  # q, k, v, out, with which AttentionParams begins
_SCALES = struct.Struct("PqfPqf")  # of K and V, which lie behind each other
_SCALES_AT = ATTENTION_OFFSET + AttentionParams.k_scale.offset
_FLOAT_CODES = {DType(name).torch_dtype: code for name, code in FLOAT_CODES.items()}


class CudaPlan:
    """The schedule of a batch on the device, and the launches that use it.

    It takes a while to make, so that one that is gone serves later batches: a launch, captured or
    not, has read its parameters when it returns, and the schedule's memory is read and written in
    the order of one stream.

    Attributes:
        idle: where it goes when it is gone; None where its memory can't be used again.
    """

    __slots__ = ("_index", "_is_empty", "_parts", "_streams", "idle")

    def __init__(
        self,
        kernels: KernelSet,
        buffers: tuple[Tensor, Tensor],
        recipes: Recipes,
        rooms: tuple[int, ...],
        stream: int | None = None,
    ) -> None:
        self._index = kernels.facts.index
        self._is_empty = True
        self.idle: list[CudaPlan] | None = None
        # Those that the allocator knows to use our memory.
        self._streams = set() if stream is None else {stream}
        # One after the other, the kernels of a plan have the same memory.
        self._parts = [
            kernels.part_type(recipe, room, buffers)
            for recipe, room in zip(recipes, rooms, strict=True)
        ]

    def begin(self, batch: Batch) -> None:
        """Schedule another batch, which there is room for."""
        self._is_empty = batch.batch_size == 0
        for part in self._parts:
            part.begin(batch)
        self.refresh()

    def give_back(self) -> None:
        """Leave this plan to batches to come: its own is gone."""
        # An idle one keeps nobody's tables, and not the list that keeps it.
        idle, self.idle = self.idle, None
        if idle is not None and len(idle) < _MAX_IDLE:
            for part in self._parts:
                part.forget_tables()
            idle.append(self)

    def has_buffers_of(self, workspace: Workspace) -> bool:
        """Whether all buffers are those that ``workspace`` has now."""
        for part in self._parts:
            partials, counters = part.buffers
            if partials is not workspace.partials or counters is not workspace.counters:
                return False
        return True

    def refresh(self) -> None:
        """Launch the schedule kernels."""
        if not self._is_empty:
            for part in self._parts:
                self._launch(part.schedule_launch)

    def run(self, call: Call | MLACall) -> None:
        """Patch the parameters of a call that was checked, and launch."""
        if self._is_empty:
            call.out.zero_()
            if call.lse is not None:
                call.lse.fill_(-math.inf)
            return
        kernels = call.kv.kernels
        if not isinstance(kernels, BoundKernels):
            raise ValueError("kv was bound by a planner of the reference backend")
        for part in self._parts:
            part.patch(call)
            for launch in part.launches_of(kernels):
                self._launch(launch)

    def again(self, call: Call) -> Again | None:
        """Return what repeats ``call``, the last one, with other addresses; None if nothing can.

        It allocates an out that is not given where that would lie like q.
        """
        stream, kernels = _C._cuda_getCurrentRawStream(self._index), call.kv.kernels
        if self._is_empty or stream not in self._streams or not call.is_aligned:
            return None
        assert isinstance(kernels, BoundKernels)
        steps = []
        for part in self._parts:
            launch = part.launch_of(kernels)
            steps.append((part, part.raw, launch, launch.on(stream)))
        return _repeater(call, self._index, stream, steps)

    def _launch(self, launch: Launch) -> None:
        stream = _C._cuda_getCurrentRawStream(self._index)
        if stream not in self._streams:
            self._lend_memory(stream)
        elif self.idle is not None and torch.cuda.is_current_stream_capturing():
            self.idle = None  # a graph uses our memory as long as it lives
        if _C._cuda_getDevice() == self._index:
            launch(stream)
        else:
            with torch.cuda.device(self._index):
                launch(stream)

    def _lend_memory(self, stream: int) -> None:
        """Keep our memory from others until ``stream``, the current one, is done with it.

        It was allocated on another stream, whose next tensor could get it when the plan is gone.
        """
        self.idle = None
        with torch.cuda.device(self._index):
            if torch.cuda.is_current_stream_capturing():
                return  # who replays the graph keeps the plan
            for part in self._parts:
                part.record_stream(torch.cuda.current_stream())
        self._streams.add(stream)


_Step = tuple["Part", bytearray, Launch, Callable[[], object]]


def _repeater(call: Call, index: int, stream: int, steps: list[_Step]) -> Again:
    """Return what launches ``steps`` again for what lies like the tensors of ``call``."""
    # Half of a call's time would go into looking these up.
    kind, has_scales = call.kv.kind, call.kv.k_scale is not None
    has_maps = call.kv.tensor_maps is not None
    lies_alike, lie_alike = recogniser((call.q,)), recogniser((call.q, call.out))
    out_is_like_q = call.out_layout.fits(call.q) and call.q.is_contiguous()
    # Where out may lie: beyond q on either side, or in it as it did in the call.
    low, high = -call.out_layout.span, call.q_layout.span
    known = call.out.data_ptr() - call.q.data_ptr()
    vectors = max(call.q_layout.alignment, call.out_layout.alignment) - 1
    current_stream, current_device = _C._cuda_getCurrentRawStream, _C._cuda_getDevice
    is_capturing = torch.cuda.is_current_stream_capturing
    write_addresses = _ADDRESSES.pack_into

    def again(q: Any, kv: Any, out: Any) -> Tensor | None:
        if type(kv) is not BoundCache or kv.kind is not kind:
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
        for part, raw, launch, call_driver in steps:
            k_at, v_at = kv.k_at(), kv.v_at()
            write_addresses(raw, ATTENTION_OFFSET, q_at, k_at, v_at, out_at)
            if has_maps:
                maps: Any = kv.tensor_maps
                raw[:ATTENTION_OFFSET] = maps.at(part.role, k_at, v_at)
            if has_scales:
                part.write_scales(kv)
            answer = call_driver()
            if answer != LAUNCHED:
                launch.try_again(answer)
        return result

    return again


class Part:
    """A kernel of a plan: its schedule, its parameters, and the launches with them.

    Attributes:
        buffers: partials and counters of its workspace.
        raw: the bytes of the kernel's parameters.
        role: what the kernel is for.
        schedule_launch: what makes the schedule.
    """

    __slots__ = (
        "_attention",
        "_cache_strides",
        "_grid",
        "_has_offsets",
        "_is_prefill",
        "_is_ragged",
        "_launches",
        "_lse_layout",
        "_memory",
        "_out_layout",
        "_pages",
        "_params",
        "_q_layout",
        "_schedule",
        "_sizes",
        "buffers",
        "raw",
        "role",
        "schedule_launch",
    )

    def __init__(self, recipe: Recipe, room: int, buffers: tuple[Tensor, Tensor]) -> None:
        self._grid, self._is_prefill = recipe.grid, recipe.is_prefill
        self.role = recipe.role
        self._is_ragged, self._has_offsets = recipe.is_ragged, recipe.has_offsets
        offsets, size = schedule_offsets(room, recipe.max_slots)
        self._memory = torch.empty(size, dtype=torch.uint8, device=recipe.device)
        self.buffers = buffers
        self.raw = bytearray(recipe.params)
        self._params = recipe.params_type.from_buffer(self.raw)
        self._attention: ctypes.Structure = self._params.attention
        self._schedule = ScheduleParams.from_buffer_copy(recipe.schedule_params)
        self.schedule_launch = Launch(
            recipe.schedule_kernel, self._schedule, 1, recipe.schedule_threads
        )
        self._launches: dict[AttentionKernel, Launch] = {}
        partials, counters = self.buffers
        self._attention.partials = pointer = partials.data_ptr()
        self._attention.partial_sums = pointer + 4 * recipe.num_values
        self._attention.num_claimed = pointer = counters.data_ptr()
        self._attention.counters = pointer + SLICE_BYTES
        base = self._memory.data_ptr()
        self._schedule.schedule = Schedule(*(base + offset for offset in offsets))
        self._attention.schedule = self._schedule.schedule
        # What the parameters say already.
        self._sizes: tuple[object, ...] = ()
        self._pages: PageTable | None = None
        self._cache_strides: tuple[int, ...] = ()
        self._q_layout = self._out_layout = self._lse_layout = NO_LAYOUT

    def begin(self, batch: Batch) -> None:
        """Have the schedule kernel's launch schedule another batch."""
        schedule = self._schedule
        self._attention.has_padding = batch.qo_indptr is not None
        sizes = batch.layout, batch.max_kv_len, batch.max_q_len, batch.qo_indptr is None
        if sizes != self._sizes or batch.qo_indptr is not None:
            _write_sizes(schedule, batch)
            self._sizes = sizes
        schedule.seq_lens = batch.seq_lens.data_ptr()
        if batch.qo_indptr is not None:
            schedule.qo_indptr = batch.qo_indptr.data_ptr()
        if self._has_offsets:
            schedule.kv_indptr = batch.pages.tensors[0].data_ptr()

    def forget_tables(self) -> None:
        """Let go of the tables of the last run."""
        self._pages = None

    def launch_of(self, kernels: BoundKernels) -> Launch:
        """Return the launch of this part's kernel, or of its twin with another loader."""
        kernel = kernels.of(self.role)
        launch = self._launches.get(kernel)
        if launch is None:
            launch = Launch(kernel.load(), self._params, self._grid, kernel.tile.num_threads)
            self._launches[kernel] = launch
        return launch

    def launches_of(self, kernels: BoundKernels) -> tuple[Launch, ...]:
        """Return what a run launches, one after the other."""
        return (self.launch_of(kernels),)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tell the allocator that ``stream`` uses the memory of this part."""
        for tensor in (self._memory, *self.buffers):
            tensor.record_stream(stream)

    def patch(self, call: Call | MLACall) -> None:
        """Write into the parameters what differs from the last call."""
        attention, kv = self._attention, call.kv
        if call.pages is not self._pages:
            call.pages.fill(self._params.pages)
            self._pages = call.pages
        if self._is_ragged:
            self._params.pages.num_entries = kv.k.tensor.shape[0]
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
        _ADDRESSES.pack_into(self.raw, ATTENTION_OFFSET, q_at, k_at, v_at, out_at)
        if kv.tensor_maps is not None:
            self.raw[:ATTENTION_OFFSET] = kv.tensor_maps.at(self.role, k_at, v_at)
        self.write_scales(kv)
        attention.lse = None if call.lse is None else call.lse.data_ptr()
        if call.sinks is not None:
            attention.sinks = call.sinks.data_ptr()
            attention.sink_stride = call.sinks.stride()[0]
            attention.sink_code = _FLOAT_CODES[call.sinks.dtype]
        if call.mask is not None:
            _write_mask(attention, call.mask)
        if call.variant_params is not None:
            _write_variant(self._params.variant, call.variant_params)

    def write_scales(self, kv: BoundCache | BoundMLACache) -> None:
        """Write the scales of K and V into the parameters, if they are quantised."""
        k, v = kv.k_scale, kv.v_scale
        if k is not None and v is not None:
            k_at = 0 if k.tensor is None else k.tensor.data_ptr()
            v_at = 0 if v.tensor is None else v.tensor.data_ptr()
            numbers = k_at, k.stride, k.value, v_at, v.stride, v.value
            _SCALES.pack_into(self.raw, _SCALES_AT, *numbers)

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


def _write_sizes(params: ScheduleParams, batch: Batch) -> None:
    pages, seq_lens, qo_indptr = batch.pages, batch.seq_lens, batch.qo_indptr
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
