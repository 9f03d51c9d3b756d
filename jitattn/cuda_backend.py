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
from jitattn.binding import BoundCache, CacheView, is_aligned
from jitattn.build import Kernel, build_all
from jitattn.config import PlannerConfig
from jitattn.driver import DeviceFacts, Launch, LoadedKernel, device_facts
from jitattn.errors import ConfigError
from jitattn.pages import BlockTable, CsrPages, Pages, RaggedKV, TokenTable
from jitattn.params import (
    BOUNDARY_BYTES,
    COST_BYTES,
    FLOAT_CODES,
    HEADER_BYTES,
    KERNEL_PARAMS,
    REQUEST_BYTES,
    Schedule,
    ScheduleParams,
)
from jitattn.spec import DecodeSpec, Loader, PageTable, ScheduleSpec
from jitattn.tiling import DecodeTile, ScheduleTile, tile_for
from jitattn.workspace import Workspace, default_workspace

_LOG2E = math.log2(math.e)
_INT32_MAX = 2**31 - 1

# Batch-invariant schedules: the splits that a long request is cut into, and the least that a split
# holds. More and shorter splits balance better and merge longer.
_MAX_SPLITS = 16
_MIN_SPLIT_TOKENS = 256

# What a visit to a request costs a CTA, and the least that is worth a CTA, in tiles. Measured:
# docs/perf-log.md.
_REQUEST_COST = 1
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


@dataclass(frozen=True, slots=True)
class DecodeKernel:
    """A decode kernel on a device, and the tile it was rendered with."""

    kernel: LoadedKernel
    tile: DecodeTile


class KernelSet:
    """The kernels of a configuration on a device; the plain loader's is loaded when needed."""

    def __init__(self, config: PlannerConfig, device: torch.device) -> None:
        assert device.index is not None
        self.config = config
        self.device = device
        self.facts = device_facts(device.index)
        self.arch = arch_of(self.facts)
        self._lock = threading.Lock()
        self._built: list[tuple[Kernel, int]] = []
        self._decode: dict[Loader, DecodeKernel] = {}
        specs = support.resolve(config, self.arch)
        self._specs = {spec.loader: spec for spec in specs if isinstance(spec, DecodeSpec)}
        decode_spec, schedule_spec = self._specs[Loader.VECTOR], ScheduleSpec()
        decode, schedule = self._build([decode_spec, schedule_spec])
        self._decode[Loader.VECTOR] = decode_kernel = self._load_decode(decode, decode_spec)
        self.tile = decode_kernel.tile
        schedule_tile = tile_for(schedule_spec, self.arch)
        assert isinstance(schedule_tile, ScheduleTile)
        self.schedule_threads = schedule_tile.num_threads
        self.schedule_kernel = self._load(schedule, schedule_tile.smem_bytes)
        self.spec = decode_spec

    def decode_for(self, k: CacheView, v: CacheView) -> DecodeKernel:
        """Return the decode kernel whose loader the strides of ``k`` and ``v`` allow."""
        aligned = k.is_vector_aligned and v.is_vector_aligned
        loader = Loader.VECTOR if aligned else Loader.PLAIN
        with self._lock:
            if loader not in self._decode:
                spec = self._specs[loader]
                self._decode[loader] = self._load_decode(self._build([spec])[0], spec)
            return self._decode[loader]

    def infos(self) -> list[KernelInfo]:
        """Return the kernels built so far."""
        return [
            KernelInfo(
                name=kernel.symbol,
                arch=kernel.arch,
                origin=kernel.origin,
                seconds=kernel.seconds,
                registers=kernel.registers,
                spill_bytes=kernel.spill_bytes,
                smem_bytes=kernel.smem_bytes + dynamic_bytes,
                compiler=kernel.compiler,
            )
            for kernel, dynamic_bytes in self._built
        ]

    def _build(self, specs: Sequence[DecodeSpec | ScheduleSpec]) -> tuple[Kernel, ...]:
        return build_all(specs, self.arch, knobs.load(), hint=self.config.arguments_text())

    def _load_decode(self, kernel: Kernel, spec: DecodeSpec) -> DecodeKernel:
        tile = tile_for(spec, self.arch)
        assert isinstance(tile, DecodeTile)
        return DecodeKernel(self._load(kernel, tile.smem_bytes), tile)

    def _load(self, kernel: Kernel, smem_bytes: int) -> LoadedKernel:
        self._built.append((kernel, smem_bytes))
        return LoadedKernel(kernel.cubin, kernel.symbol, self.facts.index, smem_bytes)


class CudaPlan:
    """The schedule of a batch on the device, and the launches that use it."""

    def __init__(
        self,
        kernels: KernelSet,
        sm_scale: float,
        workspace: Workspace | None,
        pages: Pages,
        seq_lens: Tensor,
        limit: int,
    ) -> None:
        config = kernels.config
        self._kernels = kernels
        self._index = kernels.facts.index
        self._batch_size = pages.batch_size
        self._max_splits = _MAX_SPLITS if config.batch_invariant else 0
        self._num_row_blocks = -(-config.group_size // kernels.spec.row_tile)
        self._num_head_blocks = config.num_kv_heads * self._num_row_blocks
        num_sms = min(config.num_sms or kernels.facts.num_sms, kernels.facts.num_sms)
        self._max_slots = max(1, num_sms * kernels.tile.ctas_per_sm // self._num_head_blocks)
        self._memory, schedule = self._allocate_schedule()
        if workspace is None:
            stream = torch._C._cuda_getCurrentRawStream(self._index)
            workspace = default_workspace(kernels.device, stream)
        self._buffers = self._reserve(workspace)
        self._params = self._decode_params(schedule, sm_scale)
        self._seq_lens = seq_lens  # refresh() reads it again
        self._schedule_launch = Launch(
            kernels.schedule_kernel,
            self._schedule_params(schedule, pages, seq_lens, limit),
            1,
            kernels.schedule_threads,
        )
        self._launches: dict[DecodeKernel, Launch] = {}
        self._pages: Pages | None = None
        self.refresh()

    def refresh(self) -> None:
        """Launch the schedule kernel."""
        if self._batch_size > 0:
            self._launch(self._schedule_launch)

    def run(
        self,
        q: Tensor,
        kv: BoundCache,
        pages: Pages,
        out: Tensor,
        lse: Tensor | None,
        sinks: Tensor | None,
    ) -> None:
        """Patch the parameters of a call that was checked, and launch."""
        if self._batch_size == 0:
            return
        if pages is not self._pages:
            _write_pages(self._params.pages, pages)
            self._pages = pages
        decode = self._params.decode
        _write_cache(decode, kv)
        decode.q = q.data_ptr()
        decode.q_token_stride, decode.q_head_stride = q.stride()[:2]
        decode.q_is_aligned = is_aligned(q, 2)
        decode.out = out.data_ptr()
        decode.out_token_stride, decode.out_head_stride = out.stride()[:2]
        decode.out_is_aligned = is_aligned(out, 4)
        decode.lse = None if lse is None else lse.data_ptr()
        if lse is not None:
            decode.lse_token_stride, decode.lse_head_stride = lse.stride()
        if sinks is not None:
            decode.sinks = sinks.data_ptr()
            decode.sink_stride = sinks.stride(0)
            decode.sink_code = FLOAT_CODES[str(sinks.dtype).removeprefix("torch.")]
        assert isinstance(kv.decode, DecodeKernel)  # bound by a planner of this backend
        self._launch(self._launch_of(kv.decode))

    def _launch_of(self, decode: DecodeKernel) -> Launch:
        if decode not in self._launches:
            grid = self._max_slots * self._num_head_blocks
            self._launches[decode] = Launch(
                decode.kernel, self._params, grid, decode.tile.num_threads
            )
        return self._launches[decode]

    def _launch(self, launch: Launch) -> None:
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        if torch.cuda.current_device() == self._index:
            launch(stream)
        else:
            with torch.cuda.device(self._index):
                launch(stream)

    def _allocate_schedule(self) -> tuple[Tensor, Schedule]:
        """Allocate the parts of ``struct Schedule``, in order, each a multiple of 16 bytes."""
        batch_size, max_slots = self._batch_size, self._max_slots
        parts = (
            HEADER_BYTES,
            REQUEST_BYTES * batch_size,
            BOUNDARY_BYTES * (max_slots + 1),
            COST_BYTES * (batch_size + 1),
        )
        offsets, total = [], 0
        for part in parts:
            offsets.append(total)
            total += -(-part // 16) * 16
        memory = torch.empty(total, dtype=torch.uint8, device=self._kernels.device)
        base = memory.data_ptr()
        return memory, Schedule(*(base + offset for offset in offsets))

    @property
    def _num_partial_rows(self) -> int:
        rows = self._max_slots * 2 * self._num_head_blocks * self._kernels.spec.row_tile
        return rows * max(self._max_splits, 1)

    def _reserve(self, workspace: Workspace) -> tuple[Tensor, Tensor]:
        return workspace.reserve(
            self._num_partial_rows * (self._kernels.spec.head_dim_vo + 2),
            self._max_slots * self._num_head_blocks,
        )

    def _decode_params(self, schedule: Schedule, sm_scale: float) -> ctypes.Structure:
        config = self._kernels.config
        params = KERNEL_PARAMS[PageTable(config.page_table)]()
        decode = params.decode
        partials, counters = self._buffers
        num_values = self._num_partial_rows * self._kernels.spec.head_dim_vo
        decode.partials = partials.data_ptr()
        decode.partial_sums = partials.data_ptr() + 4 * num_values
        decode.counters = counters.data_ptr()
        decode.schedule = schedule
        decode.group_size = config.group_size
        decode.num_row_blocks = self._num_row_blocks
        decode.num_head_blocks = self._num_head_blocks
        decode.max_splits = self._max_splits
        cap = config.logits_soft_cap
        decode.score_scale = sm_scale / cap if cap > 0 else sm_scale * _LOG2E
        decode.cap_log2 = cap * _LOG2E
        return params

    def _schedule_params(
        self, schedule: Schedule, pages: Pages, seq_lens: Tensor, limit: int
    ) -> ScheduleParams:
        tile_tokens = self._kernels.tile.tile_tokens
        params = ScheduleParams(
            seq_lens=seq_lens.data_ptr(),
            schedule=schedule,
            seq_lens_stride=seq_lens.stride(0),
            max_kv_len=limit,
            seq_lens_are_int64=seq_lens.dtype == torch.int64,
            batch_size=self._batch_size,
            max_slots=self._max_slots,
            window_left=self._kernels.config.window_left,
            tile_tokens=tile_tokens,
            request_cost=_REQUEST_COST,
            min_slot_cost=_MIN_SLOT_COST,
            max_splits=self._max_splits,
            min_split_tiles=max(1, _MIN_SPLIT_TOKENS // tile_tokens),
        )
        if isinstance(pages, CsrPages | RaggedKV):
            params.kv_indptr = pages.kv_indptr.data_ptr()
            params.kv_indptr_stride = pages.kv_indptr.stride(0)
            params.num_entries, params.entry_tokens = _INT32_MAX, 1
        if isinstance(pages, CsrPages):
            params.num_entries = pages.kv_indices.shape[0]
            params.entry_tokens = self._kernels.config.page_size
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


def _write_cache(decode: ctypes.Structure, kv: BoundCache) -> None:
    k, v = kv.k, kv.v
    decode.k = k.tensor.data_ptr()
    decode.k_page_stride = k.page_stride
    decode.k_token_stride = k.token_stride
    decode.k_head_stride = k.head_stride
    decode.v = v.tensor.data_ptr()
    decode.v_page_stride = v.page_stride
    decode.v_token_stride = v.token_stride
    decode.v_head_stride = v.head_stride


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
