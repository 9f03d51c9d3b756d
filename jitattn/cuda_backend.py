"""Kernels on a CUDA device: load them, schedule a batch with one, run its layers with another."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jitattn import knobs, support
from jitattn.binding import Batch, BoundCache, CacheView, Call, Mask, Scale, is_aligned
from jitattn.build import Pending, start
from jitattn.config import PlannerConfig
from jitattn.driver import DeviceFacts, Launch, LoadedKernel, device_facts, load_kernel
from jitattn.errors import ConfigError
from jitattn.pages import BlockTable, CsrPages, Pages, RaggedKV, TokenTable
from jitattn.params import (
    BOUNDARY_BYTES,
    COST_BYTES,
    FLOAT_CODES,
    HEADER_BYTES,
    KERNEL_PARAMS,
    MASK_BOOL,
    MASK_PACKED,
    MASK_RAGGED,
    REQUEST_BYTES,
    UNIT_BEGIN_BYTES,
    UNIT_BYTES,
    Divisor,
    Schedule,
    ScheduleParams,
)
from jitattn.spec import DecodeSpec, KernelSpec, Loader, PageTable, PrefillSpec, ScheduleSpec
from jitattn.tiling import DecodeTile, PrefillTile, decode_tile_for, prefill_tile_for, tile_for
from jitattn.workspace import Workspace, default_workspace

_LOG2E = math.log2(math.e)
_INT32_MAX = 2**31 - 1

_MASK_KINDS = {"bool": MASK_BOOL, "packed": MASK_PACKED, "ragged": MASK_RAGGED}

# Batch-invariant schedules: the splits that a long request is cut into, and the least that a split
# holds. More and shorter splits balance better and merge longer.
_MAX_SPLITS = 16
_MIN_SPLIT_TOKENS = 256

# What a visit to a unit costs a CTA, and the least that is worth a CTA, in tiles. Measured:
# docs/perf-log.md.
_UNIT_COST = 1
_MIN_SLOT_COST = 3


@dataclass(frozen=True)
class KernelInfo:
    """One kernel of a planner: where it came from and what it costs.

    ``origin`` is "compiled", "disk", "precompiled" or "memory"; ``smem_bytes`` counts static and
    dynamic shared memory of a CTA.
    """

    name: str
    arch: str
    origin: str
    seconds: float
    registers: int
    spill_bytes: int
    smem_bytes: int
    compiler: str


class AttentionKernel:
    """An attention kernel on a device, and the tile it was rendered with; loaded when needed."""

    def __init__(
        self, pending: Pending, tile: DecodeTile | PrefillTile, row_tile: int, device_index: int
    ) -> None:
        """Hold a kernel that may still be compiling."""
        self.tile = tile
        self.row_tile = row_tile
        self.pending = pending
        self._device_index = device_index
        self._loaded: LoadedKernel | None = None

    def load(self) -> LoadedKernel:
        """Load the kernel, once it is built; raises what ``build`` raises, at every call."""
        if self._loaded is None:  # who gets here at the same time does the same
            kernel = self.pending.result()
            self._loaded = load_kernel(
                kernel.cubin, kernel.symbol, self._device_index, self.tile.smem_bytes
            )
        return self._loaded


@dataclass(frozen=True, slots=True)
class BoundKernels:
    """The kernels whose loader suits a bound cache."""

    decode: AttentionKernel
    prefill: AttentionKernel

    def load(self, *, with_prefill: bool) -> None:
        """Load the decode kernel, and the prefill kernel if that is wanted or takes no time."""
        self.decode.load()
        if with_prefill or self.prefill.pending.was_found:
            self.prefill.load()


class KernelSet:
    """The kernels of a configuration on a device; the plain loader's are built when needed.

    Nobody waits for a prefill kernel to compile before a plan needs one.
    """

    def __init__(self, config: PlannerConfig, device: torch.device) -> None:
        assert device.index is not None
        self.config = config
        self.device = device
        self.facts = device_facts(device.index)
        self.arch = arch_of(self.facts)
        self._lock = threading.Lock()
        self._started: list[tuple[KernelSpec, Pending]] = []
        self._needs_prefill = False
        self._specs = support.resolve(config, self.arch)
        decode, prefill = self._attention_specs(Loader.VECTOR)
        schedule = ScheduleSpec()
        # In this order: on few cores the prefill kernel takes the one that the schedule frees.
        pending = self._start((decode, schedule, prefill))
        self.kernels = self._attention_kernels((decode, prefill), pending[::2])
        self._bound = {Loader.VECTOR: self.kernels}
        tile = tile_for(schedule, self.arch)
        built = pending[1].result()
        self.schedule_kernel = load_kernel(
            built.cubin, built.symbol, self.facts.index, tile.smem_bytes
        )
        self.schedule_threads = tile.num_threads
        self.kernels.load(with_prefill=False)

    def kernels_for(self, k: CacheView, v: CacheView) -> BoundKernels:
        """Return the kernels whose loader the strides of ``k`` and ``v`` allow."""
        aligned = k.is_vector_aligned and v.is_vector_aligned
        loader = Loader.VECTOR if aligned else Loader.PLAIN
        with self._lock:
            if loader not in self._bound:
                specs = self._attention_specs(loader)
                self._bound[loader] = self._attention_kernels(specs, self._start(specs))
            kernels, with_prefill = self._bound[loader], self._needs_prefill
        kernels.load(with_prefill=with_prefill)
        return kernels

    def load_prefill(self) -> None:
        """Load the prefill kernels, those of caches still to be bound too, so that no run has to.

        A run may be captured, and nothing is loaded in a capture.
        """
        with self._lock:
            self._needs_prefill = True
            bound = tuple(self._bound.values())
        for kernels in bound:
            kernels.load(with_prefill=True)

    def infos(self) -> list[KernelInfo]:
        """Return the kernels asked for so far, and wait for those that still compile."""
        infos = []
        for spec, pending in tuple(self._started):
            kernel = pending.result()
            info = KernelInfo(
                name=kernel.symbol,
                arch=kernel.arch,
                origin=kernel.origin,
                seconds=kernel.seconds,
                registers=kernel.registers,
                spill_bytes=kernel.spill_bytes,
                smem_bytes=kernel.smem_bytes + tile_for(spec, self.arch).smem_bytes,
                compiler=kernel.compiler,
            )
            infos.append(info)
        return infos

    def _attention_specs(self, loader: Loader) -> tuple[DecodeSpec, PrefillSpec]:
        decode, prefill = (
            spec
            for spec in self._specs
            if isinstance(spec, DecodeSpec | PrefillSpec) and spec.loader is loader
        )
        assert isinstance(decode, DecodeSpec)
        assert isinstance(prefill, PrefillSpec)
        return decode, prefill

    def _start(self, specs: Sequence[KernelSpec]) -> tuple[Pending, ...]:
        pending = start(specs, self.arch, knobs.load(), hint=self.config.arguments_text())
        self._started += zip(specs, pending, strict=True)
        return pending

    def _attention_kernels(
        self, specs: tuple[DecodeSpec, PrefillSpec], pending: Sequence[Pending]
    ) -> BoundKernels:
        decode, prefill = specs
        decode_tile = decode_tile_for(decode, self.arch)
        prefill_tile = prefill_tile_for(prefill, self.arch)
        index = self.facts.index
        return BoundKernels(
            AttentionKernel(pending[0], decode_tile, decode.row_tile, index),
            AttentionKernel(pending[1], prefill_tile, prefill_tile.row_tile, index),
        )


class CudaPlan:
    """The schedule of a batch on the device, and the launches that use it."""

    def __init__(
        self, kernels: KernelSet, sm_scale: float, workspace: Workspace | None, batch: Batch
    ) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("plan() inside a capture: plan before it and capture plan.refresh()")
        self._index = kernels.facts.index
        self._is_empty = batch.pages.batch_size == 0
        self._streams: set[int] = set()  # those that the allocator knows to use our memory
        if workspace is None:
            stream = torch._C._cuda_getCurrentRawStream(self._index)
            workspace = default_workspace(kernels.device, stream)
            self._streams.add(stream)
        # Without requests of many rows the prefill kernel would have nothing to do.
        num_rows = batch.max_q_len * kernels.config.group_size
        has_prefill = batch.max_q_len > 1 and num_rows > kernels.kernels.decode.row_tile
        if has_prefill:
            kernels.load_prefill()
        self._parts = [
            _Part(kernels, workspace, batch, sm_scale, is_prefill=is_prefill)
            for is_prefill in ([False, True] if has_prefill else [False])
        ]
        self.refresh()

    def refresh(self) -> None:
        """Launch the schedule kernels."""
        if not self._is_empty:
            for part in self._parts:
                self._launch(part.schedule_launch)

    def check_num_tokens(self, num_tokens: int) -> None:
        """Accept any: only the device knows the offsets, and rows that q lacks are left out."""

    def run(self, call: Call) -> None:
        """Patch the parameters of a call that was checked, and launch."""
        if self._is_empty:
            call.out.zero_()
            if call.lse is not None:
                call.lse.fill_(-math.inf)
            return
        kernels = call.kv.kernels
        if not isinstance(kernels, BoundKernels):
            raise ValueError("kv was bound by a planner of the reference backend")
        for part, kernel in zip(self._parts, (kernels.decode, kernels.prefill), strict=False):
            part.patch(call)
            self._launch(part.launch_of(kernel))

    def _launch(self, launch: Launch) -> None:
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        if stream not in self._streams:
            self._lend_memory(stream)
        if torch.cuda.current_device() == self._index:
            launch(stream)
        else:
            with torch.cuda.device(self._index):
                launch(stream)

    def _lend_memory(self, stream: int) -> None:
        """Keep our memory from others until ``stream``, the current one, is done with it.

        It was allocated on another stream, whose next tensor could get it when the plan is gone.
        """
        with torch.cuda.device(self._index):
            if torch.cuda.is_current_stream_capturing():
                return  # who replays the graph keeps the plan
            for part in self._parts:
                part.record_stream(torch.cuda.current_stream())
        self._streams.add(stream)


class _Part:
    """One of the two kernels of a plan: its schedule, its parameters and its launches."""

    def __init__(
        self,
        kernels: KernelSet,
        workspace: Workspace,
        batch: Batch,
        sm_scale: float,
        *,
        is_prefill: bool,
    ) -> None:
        self._kernels = kernels
        self._batch = batch
        self._is_prefill = is_prefill
        config = kernels.config
        kernel = kernels.kernels.prefill if is_prefill else kernels.kernels.decode
        self._kernel = kernel
        self._max_splits = _MAX_SPLITS if config.batch_invariant else 0
        self._num_row_blocks = 1 if is_prefill else -(-config.group_size // kernel.row_tile)
        head_dim_vo = config.head_dim_vo or config.head_dim
        num_value_blocks = head_dim_vo // kernel.tile.value_dim
        self._num_head_blocks = config.num_kv_heads * self._num_row_blocks * num_value_blocks
        num_ctas = kernels.facts.num_sms * kernel.tile.ctas_per_sm
        if config.num_sms is not None:
            # The card spreads CTAs over its SMs, so that each is one SM taken from others.
            num_ctas = min(config.num_sms, kernels.facts.num_sms)
        self._max_slots = max(1, num_ctas // self._num_head_blocks)
        self._grid = self._max_slots * self._num_head_blocks
        if config.num_sms is not None:
            self._grid = min(self._grid, num_ctas)
        self._memory, schedule = self._allocate_schedule()
        rows = self._max_slots * 2 * max(self._max_splits, 1)
        self._num_partial_rows = rows * self._num_head_blocks * kernel.row_tile
        self._buffers = workspace.reserve(
            self._num_partial_rows * (kernel.tile.value_dim + 2),
            self._max_slots * self._num_head_blocks,
        )
        self._params = self._attention_params(schedule, sm_scale)
        self.schedule_launch = Launch(
            kernels.schedule_kernel, self._schedule_params(schedule), 1, kernels.schedule_threads
        )
        self._launches: dict[AttentionKernel, Launch] = {}
        self._pages: Pages | None = None

    def launch_of(self, kernel: AttentionKernel) -> Launch:
        """Return the launch of ``kernel``, this part's or its twin with another loader."""
        if kernel not in self._launches:
            self._launches[kernel] = Launch(
                kernel.load(), self._params, self._grid, kernel.tile.num_threads
            )
        return self._launches[kernel]

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tell the allocator that ``stream`` uses the memory of this part."""
        for tensor in (self._memory, *self._buffers):
            tensor.record_stream(stream)

    def patch(self, call: Call) -> None:
        """Write the tensors of a call into the parameters."""
        if call.pages is not self._pages:
            _write_pages(self._params.pages, call.pages)
            self._pages = call.pages
        if isinstance(call.pages, RaggedKV):
            self._params.pages.num_entries = call.kv.k.tensor.shape[0]
        params, q, out, lse = self._params.attention, call.q, call.out, call.lse
        _write_cache(params, call.kv)
        params.num_tokens = q.shape[0]
        params.q = q.data_ptr()
        params.q_token_stride, params.q_head_stride = q.stride()[:2]
        params.q_is_aligned = is_aligned(q, 8)
        params.out = out.data_ptr()
        params.out_token_stride, params.out_head_stride = out.stride()[:2]
        params.out_is_aligned = is_aligned(out, 4)
        params.lse = None if lse is None else lse.data_ptr()
        if lse is not None:
            params.lse_token_stride, params.lse_head_stride = lse.stride()
        if call.sinks is not None:
            params.sinks = call.sinks.data_ptr()
            params.sink_stride = call.sinks.stride(0)
            params.sink_code = FLOAT_CODES[str(call.sinks.dtype).removeprefix("torch.")]
        if call.mask is not None:
            _write_mask(params, call.mask)

    def _allocate_schedule(self) -> tuple[Tensor, Schedule]:
        """Allocate the parts of ``struct Schedule``, in order, each a multiple of 16 bytes."""
        batch_size = self._batch.pages.batch_size
        units_a_request = 1
        if self._is_prefill:
            num_rows = self._batch.max_q_len * self._kernels.config.group_size
            units_a_request = -(-num_rows // self._kernel.row_tile)
        max_units = batch_size * units_a_request
        parts = (
            HEADER_BYTES,
            REQUEST_BYTES * batch_size,
            UNIT_BYTES * max_units,
            BOUNDARY_BYTES * (self._max_slots + 1),
            UNIT_BEGIN_BYTES * (batch_size + 1),
            COST_BYTES * (max_units + 1),
        )
        offsets, total = [], 0
        for part in parts:
            offsets.append(total)
            total += -(-part // 16) * 16
        memory = torch.empty(total, dtype=torch.uint8, device=self._kernels.device)
        base = memory.data_ptr()
        return memory, Schedule(*(base + offset for offset in offsets))

    def _attention_params(self, schedule: Schedule, sm_scale: float) -> ctypes.Structure:
        config = self._kernels.config
        params = KERNEL_PARAMS[PageTable(config.page_table)]()
        attention = params.attention
        partials, counters = self._buffers
        num_values = self._num_partial_rows * self._kernel.tile.value_dim
        attention.partials = partials.data_ptr()
        attention.partial_sums = partials.data_ptr() + 4 * num_values
        attention.counters = counters.data_ptr()
        attention.schedule = schedule
        attention.num_qo_heads = config.num_qo_heads
        attention.group_size = Divisor.of(config.group_size)
        attention.num_row_blocks = Divisor.of(self._num_row_blocks)
        attention.num_head_blocks = Divisor.of(self._num_head_blocks)
        attention.max_splits = self._max_splits
        attention.is_causal = config.causal
        attention.window_left = config.window_left
        cap = config.logits_soft_cap
        attention.score_scale = sm_scale / cap if cap > 0 else sm_scale * _LOG2E
        attention.cap_log2 = cap * _LOG2E
        return params

    def _schedule_params(self, schedule: Schedule) -> ScheduleParams:
        config, batch = self._kernels.config, self._batch
        pages, seq_lens, qo_indptr = batch.pages, batch.seq_lens, batch.qo_indptr
        tile_tokens = self._kernel.tile.tile_tokens
        params = ScheduleParams(
            seq_lens=seq_lens.data_ptr(),
            schedule=schedule,
            seq_lens_stride=seq_lens.stride(0),
            max_kv_len=batch.max_kv_len,
            seq_lens_are_int64=seq_lens.dtype == torch.int64,
            batch_size=pages.batch_size,
            max_q_len=batch.max_q_len,
            is_causal=config.causal,
            window_left=config.window_left,
            group_size=config.group_size,
            decode_rows=self._kernels.kernels.decode.row_tile,
            prefill_rows=self._kernel.row_tile if self._is_prefill else 0,
            max_slots=self._max_slots,
            tile_tokens=tile_tokens,
            unit_cost=_UNIT_COST,
            min_slot_cost=_MIN_SLOT_COST,
            max_splits=self._max_splits,
            min_split_tiles=max(1, _MIN_SPLIT_TOKENS // tile_tokens),
        )
        if qo_indptr is not None:
            params.qo_indptr = qo_indptr.data_ptr()
            params.qo_indptr_stride = qo_indptr.stride(0)
        if isinstance(pages, CsrPages | RaggedKV):
            params.kv_indptr = pages.kv_indptr.data_ptr()
            params.kv_indptr_stride = pages.kv_indptr.stride(0)
            params.num_entries, params.entry_tokens = _INT32_MAX, 1
        if isinstance(pages, CsrPages):
            params.num_entries = pages.kv_indices.shape[0]
            params.entry_tokens = config.page_size
        return params


def _write_pages(params: ctypes.Structure, pages: Pages) -> None:
    if isinstance(pages, BlockTable | TokenTable):
        table = pages.table if isinstance(pages, BlockTable) else pages.slots
        _write_table(params, table, pages.rows)
    else:
        params.kv_indptr = pages.kv_indptr.data_ptr()
        params.indptr_stride = pages.kv_indptr.stride(0)
        if isinstance(pages, CsrPages):
            params.kv_indices = pages.kv_indices.data_ptr()
            params.indices_stride = pages.kv_indices.stride(0)
            params.num_entries = pages.kv_indices.shape[0]


def _write_table(params: ctypes.Structure, table: Tensor, rows: Tensor | None) -> None:
    params.table = table.data_ptr()
    params.row_stride = table.stride(0)
    params.column_stride = table.stride(-1)
    if table.dim() == 3:
        params.kv_stride = table.stride(1)
    params.rows = None if rows is None else rows.data_ptr()
    if rows is not None:
        params.rows_stride = rows.stride(0)
        params.rows_are_int64 = rows.dtype == torch.int64


def _write_cache(params: ctypes.Structure, kv: BoundCache) -> None:
    k, v = kv.k, kv.v
    params.k = k.tensor.data_ptr()
    params.k_page_stride = k.page_stride
    params.k_token_stride = k.token_stride
    params.k_head_stride = k.head_stride
    params.v = v.tensor.data_ptr()
    params.v_page_stride = v.page_stride
    params.v_token_stride = v.token_stride
    params.v_head_stride = v.head_stride
    if kv.k_scale is not None and kv.v_scale is not None:
        _write_scale(params.k_scale, kv.k_scale)
        _write_scale(params.v_scale, kv.v_scale)


def _write_scale(params: ctypes.Structure, scale: Scale) -> None:
    params.values = None if scale.tensor is None else scale.tensor.data_ptr()
    params.stride = scale.stride
    params.value = scale.value


def _write_mask(params: ctypes.Structure, mask: Mask) -> None:
    params.mask = mask.values.data_ptr()
    params.mask_kind = _MASK_KINDS[mask.layout]
    if mask.indptr is not None:
        params.mask_bytes = mask.values.shape[0]
        params.mask_indptr = mask.indptr.data_ptr()
        params.mask_indptr_stride = mask.indptr.stride(0)
    else:
        params.mask_row_stride = mask.values.stride(0)
        params.mask_width = mask.width


def arch_of(facts: DeviceFacts) -> str:
    """Return the architecture whose code a device runs.

    Raises:
        ConfigError: no kernel runs on it.
    """
    major, minor = facts.compute_capability
    arch = support.arch_for(major, minor)
    if arch is None:
        raise ConfigError(
            [
                f"{facts.name} has compute capability {major}.{minor}: kernels exist for 8.x, 9.0, "
                "10.x and 12.x"
            ]
        )
    return arch
