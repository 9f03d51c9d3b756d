"""Plan a batch on the device, then run its layers: ``AttentionPlanner``, ``BoundCache``, ``Plan``.

``AttentionPlanner`` chooses and loads kernels; ``bind`` checks a cache once; ``plan`` asks the
device to split the batch; ``run`` patches a struct and launches.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from jitattn import knobs, support
from jitattn.binding import (
    CacheView,
    check_last_stride,
    check_rows,
    check_writable,
    is_aligned,
    row_strides,
    view_caches,
)
from jitattn.config import PlannerConfig
from jitattn.errors import ConfigError
from jitattn.pages import BlockTable, check_device, check_tensor, check_vector
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
from jitattn.reference import attention, first_visible, gather
from jitattn.spec import DecodeSpec, Loader, PageTable, ScheduleSpec
from jitattn.tiling import DecodeTile, ScheduleTile, tile_for
from jitattn.workspace import Workspace, canonical_device, default_workspace

if TYPE_CHECKING:
    import ctypes

    from jitattn.build import Kernel
    from jitattn.driver import DeviceFacts, LoadedKernel

KVCache = Tensor | tuple[Tensor, Tensor]
Scale = float | Tensor

_BACKENDS = ("auto", "cuda", "reference")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LOG2E = math.log2(math.e)
_INT32_MAX = 2**31 - 1

# What a visit to a request costs a CTA, and the least that is worth a CTA, in tiles. Measured:
# docs/perf-log.md.
_REQUEST_COST = 1
_MIN_SLOT_COST = 3


class AttentionPlanner:
    """The kernels of one attention configuration on one device.

    Constructing it compiles or loads every kernel that a plan launches. Thread-safe.

    Attributes:
        config: the arguments, with dtypes as names.
        device: where its tensors must be.
        backend: "cuda" or "reference".
    """

    def __init__(
        self,
        *,
        num_qo_heads: int = 32,
        num_kv_heads: int = 8,
        head_dim: int = 128,
        page_size: int | None = 16,
        head_dim_vo: int | None = None,
        q_dtype: torch.dtype | str = "bfloat16",
        kv_dtype: torch.dtype | str = "bfloat16",
        out_dtype: torch.dtype | str | None = None,
        kv_layout: str = "NHD",
        page_table: str = "shared",
        causal: bool = True,
        window_left: int = -1,
        logits_soft_cap: float = 0.0,
        sm_scale: float | None = None,
        use_sinks: bool = False,
        use_custom_mask: bool = False,
        variant: str | None = None,
        batch_invariant: bool = False,
        early_kv: bool = False,
        num_sms: int | None = None,
        workspace: Workspace | None = None,
        device: torch.device | str | int | None = None,
        backend: str = "auto",
    ) -> None:
        """Choose and load the kernels.

        Args:
            num_qo_heads: query heads, a multiple of ``num_kv_heads``.
            num_kv_heads: heads of K and V.
            head_dim: elements of a head.
            page_size: tokens of a page.
            head_dim_vo: elements of a head of V and out; None is ``head_dim``.
            q_dtype: a torch dtype or its name.
            kv_dtype: likewise, of the cache.
            out_dtype: likewise, of out; None is ``q_dtype``.
            kv_layout: the order of a page's dimensions, "NHD" (token, head) or "HND".
            page_table: "shared" or "separate", the layout of the tables that plans get.
            causal: with one query token a request, which is its last, both values mean the same.
            window_left: earlier tokens that a query sees besides itself; -1 is all.
            logits_soft_cap: score becomes cap * tanh(score / cap); 0 is off.
            sm_scale: multiplies q.k; None is ``head_dim ** -0.5``.
            use_sinks: ``run`` gets ``sinks``.
            use_custom_mask: not built yet.
            variant: not built yet.
            batch_invariant: not built yet.
            early_kv: not built yet.
            num_sms: multiprocessors to use; None is all.
            workspace: scratch memory; None is one for each device and stream.
            device: None is the current CUDA device, or the CPU without one.
            backend: "auto" is "cuda" on a CUDA device and "reference" on the CPU.

        Raises:
            ConfigError: with every reason why the configuration has no kernel.
            CompileError, KernelNotFoundError: a kernel can't be had (jitattn.errors).
        """
        self.config = PlannerConfig.from_arguments(
            {
                "num_qo_heads": num_qo_heads,
                "num_kv_heads": num_kv_heads,
                "head_dim": head_dim,
                "page_size": page_size,
                "head_dim_vo": head_dim_vo,
                "q_dtype": q_dtype,
                "kv_dtype": kv_dtype,
                "out_dtype": out_dtype,
                "kv_layout": kv_layout,
                "page_table": page_table,
                "causal": causal,
                "window_left": window_left,
                "logits_soft_cap": logits_soft_cap,
                "sm_scale": sm_scale,
                "use_sinks": use_sinks,
                "use_custom_mask": use_custom_mask,
                "variant": variant,
                "batch_invariant": batch_invariant,
                "early_kv": early_kv,
                "num_sms": num_sms,
            }
        )
        support.check_rules(self.config)
        self.device = canonical_device(device)
        self.backend = _choose_backend(backend, self.device)
        self._workspace = _check_workspace(workspace, self.device)
        self._q_dtype: torch.dtype = getattr(torch, self.config.q_dtype)
        self._out_dtype: torch.dtype = getattr(torch, self.config.out_dtype or self.config.q_dtype)
        self._sm_scale = head_dim**-0.5 if self.config.sm_scale is None else self.config.sm_scale
        self._kernels = _KernelSet(self.config, self.device) if self.backend == "cuda" else None

    def bind(
        self, kv_cache: KVCache, *, k_scale: Scale | None = None, v_scale: Scale | None = None
    ) -> BoundCache:
        """Check a cache and reduce it to pointers and strides, once per layer.

        Args:
            kv_cache: [num_pages, 2, page_size, num_kv_heads, head_dim] ("HND": heads before
                tokens), or a pair of such tensors without the second dimension. Any strides with
                a contiguous last dimension.
            k_scale: for quantised caches, which are not built yet.
            v_scale: likewise.

        Raises:
            TypeError, ValueError: the cache doesn't fit the planner, or has a scale.
        """
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            if scale is not None:
                raise ValueError(
                    f"{name} is given, but a cache of {self.config.kv_dtype} is not quantised"
                )
        k, v = view_caches(kv_cache, self.config, self.device)
        decode = None if self._kernels is None else self._kernels.decode_for(k, v)
        return BoundCache(self.config, k, v, decode)

    def plan(
        self,
        pages: BlockTable,
        seq_lens: Tensor,
        qo_indptr: Tensor | None = None,
        *,
        max_q_len: int | None = None,
        max_kv_len: int | None = None,
    ) -> Plan:
        """Split a batch over the card, on the device, once per step.

        The lengths are snapshot; the tables are read when ``run`` runs. Nothing is copied to the
        host, and nothing waits for the device.

        Args:
            pages: the pages of each request, in the planner's ``page_table`` layout.
            seq_lens: int32 or int64 [batch_size], KV tokens of each request, this step's included.
                Zero and less is padding. A request longer than its table or ``max_kv_len`` gets
                NaN (the reference backend on the CPU raises ValueError).
            qo_indptr: not built yet: every request has one query token.
            max_q_len: None or 1.
            max_kv_len: the longest length that occurs; None is what the table can hold.

        Raises:
            TypeError, ValueError: an argument that doesn't fit the planner.
            ConfigError: ``qo_indptr`` or another ``max_q_len``.
        """
        if qo_indptr is not None or max_q_len not in (None, 1):
            raise ConfigError(
                ["qo_indptr is refused: more than one query token a request is not built yet"]
            )
        _check_pages(pages, self.config, self.device)
        check_vector("seq_lens", seq_lens, device=self.device)
        if seq_lens.shape[0] != pages.batch_size:
            raise ValueError(
                f"seq_lens has {seq_lens.shape[0]} entries: expected {pages.batch_size}, one for "
                "each request of pages"
            )
        limit = _kv_limit(pages, self.config, max_kv_len)
        backend: _Backend
        if self._kernels is None:
            backend = _ReferencePlan(self.config, self._sm_scale, pages, seq_lens, limit)
        else:
            backend = _CudaPlan(
                self._kernels, self._sm_scale, self._workspace, pages, seq_lens, limit
            )
        return Plan(self, pages, backend)


class BoundCache:
    """A cache that a planner has checked; ``run`` takes it without looking again.

    Attributes:
        config: the configuration it was checked against.
        k: K as [num_pages, page_size, num_kv_heads, head_dim].
        v: V likewise.
    """

    __slots__ = ("config", "decode", "k", "v")

    def __init__(
        self, config: PlannerConfig, k: CacheView, v: CacheView, decode: _DecodeKernel | None
    ) -> None:
        """Made by ``AttentionPlanner.bind``."""
        self.config = config
        self.k = k
        self.v = v
        self.decode = decode


class Plan:
    """A batch, split over the card. For one thread at a time, and one stream."""

    def __init__(self, planner: AttentionPlanner, pages: BlockTable, backend: _Backend) -> None:
        """Made by ``AttentionPlanner.plan``."""
        self._planner = planner
        self._pages = pages
        self._backend = backend
        config = planner.config
        self._q_shape = (pages.batch_size, config.num_qo_heads, config.head_dim)

    def refresh(self) -> None:
        """Recompute the schedule from the length tensor the plan was given, on the stream."""
        self._backend.refresh()

    def run(
        self,
        q: Tensor,
        kv: BoundCache | KVCache,
        *,
        pages: BlockTable | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        q_scale: Scale | None = None,
        out_scale: Scale | None = None,
        sinks: Tensor | None = None,
        custom_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend each request's query token to its pages, on the current stream.

        Args:
            q: [batch_size, num_qo_heads, head_dim], q_dtype; the last dimension contiguous.
            kv: from ``bind``, or a cache, which is bound on the spot.
            pages: a table to read instead of the plan's, of the same layout and size.
            out: like q in out_dtype; allocated when None.
            lse: float32 [batch_size, num_qo_heads], any strides; filled when given.
            return_lse: return lse as well, allocated when None.
            q_scale: for quantised queries, which are not built yet.
            out_scale: for quantised outputs, which are not built yet.
            sinks: [num_qo_heads], any float dtype and stride, with ``use_sinks``.
            custom_mask: not built yet.

        Returns:
            out, or (out, lse) with ``return_lse``. lse is the natural logarithm of the sum of
            exp(score) over visible keys, plus exp(sink). A request without keys has out 0 and lse
            -inf, or its sink.

        Raises:
            TypeError, ValueError: an argument that doesn't fit the planner, before any launch.

        Defined by: jitattn/reference.py::attention.
        """
        planner = self._planner
        self._refuse(q_scale=q_scale, out_scale=out_scale, custom_mask=custom_mask)
        self._check_sinks(sinks)
        check_rows("q", q, self._q_shape, planner._q_dtype, planner.device)
        check_last_stride("q", q)
        bound = kv if isinstance(kv, BoundCache) else planner.bind(kv)
        if bound.config is not planner.config and bound.config != planner.config:
            raise ValueError("kv was bound by a planner of another configuration")
        if bound.k.tensor.device != planner.device:
            raise ValueError(f"kv is on {bound.k.tensor.device}: expected {planner.device}")
        if pages is not None and pages is not self._pages:
            self._check_same_size(pages)
        out = self._output("out", out, self._q_shape, planner._out_dtype)
        check_last_stride("out", out)
        if lse is not None or return_lse:
            lse = self._output("lse", lse, self._q_shape[:2], torch.float32)
        self._backend.run(q, bound, self._pages if pages is None else pages, out, lse, sinks)
        if return_lse:
            assert lse is not None
            return out, lse
        return out

    def _refuse(self, **arguments: object) -> None:
        for name, value in arguments.items():
            if value is not None:
                raise ValueError(f"{name} is given, but this planner's configuration has no use for it")

    def _check_sinks(self, sinks: Tensor | None) -> None:
        config = self._planner.config
        if (sinks is not None) != config.use_sinks:
            given = "given" if sinks is not None else "not given"
            raise ValueError(f"sinks are {given}, but the planner has use_sinks={config.use_sinks}")
        if sinks is None:
            return
        check_tensor("sinks", sinks, _FLOATS)
        if tuple(sinks.shape) != (config.num_qo_heads,):
            raise ValueError(f"sinks has shape {list(sinks.shape)}: expected [{config.num_qo_heads}]")
        check_device("sinks", sinks, self._planner.device)

    def _check_same_size(self, pages: BlockTable) -> None:
        planned = self._pages
        _check_pages(pages, self._planner.config, self._planner.device)
        if (pages.batch_size, pages.width) != (planned.batch_size, planned.width):
            raise ValueError(
                f"pages has {pages.batch_size} requests of {pages.width} pages: expected "
                f"{planned.batch_size} of {planned.width}, like the plan's"
            )

    def _output(
        self, name: str, given: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        if given is None:
            return torch.empty(shape, dtype=dtype, device=self._planner.device)
        check_rows(name, given, shape, dtype, self._planner.device)
        check_writable(name, given)
        return given


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


def build_info(planner: AttentionPlanner) -> list[KernelInfo]:
    """Return what is known of each kernel that ``planner`` has loaded; none on "reference"."""
    return [] if planner._kernels is None else planner._kernels.infos()


class _Backend(Protocol):
    """What a plan needs of the code that computes."""

    def refresh(self) -> None: ...

    def run(
        self,
        q: Tensor,
        kv: BoundCache,
        pages: BlockTable,
        out: Tensor,
        lse: Tensor | None,
        sinks: Tensor | None,
    ) -> None: ...


# --- reference backend


class _ReferencePlan:
    """Plans and runs by the definition, in float64 torch."""

    def __init__(
        self,
        config: PlannerConfig,
        sm_scale: float,
        pages: BlockTable,
        seq_lens: Tensor,
        limit: int,
    ) -> None:
        self._config = config
        self._sm_scale = sm_scale
        self._seq_lens = seq_lens
        self._limit = limit
        self._lens: list[int] = []
        self.refresh()

    def refresh(self) -> None:
        lens = [int(n) for n in self._seq_lens.tolist()]
        if self._seq_lens.device.type == "cpu":
            for b, kv_len in enumerate(lens):
                if kv_len > self._limit:
                    raise ValueError(
                        f"seq_lens[{b}] is {kv_len}: the table or max_kv_len ends at {self._limit}"
                    )
        self._lens = lens

    def run(
        self,
        q: Tensor,
        kv: BoundCache,
        pages: BlockTable,
        out: Tensor,
        lse: Tensor | None,
        sinks: Tensor | None,
    ) -> None:
        table = pages.table if pages.rows is None else pages.table[pages.rows.long()]
        for b, kv_len in enumerate(self._lens):
            if kv_len > self._limit:
                out[b] = math.nan
                if lse is not None:
                    lse[b] = math.nan
                continue
            row_out, row_lse = self._attend(q[b : b + 1], kv, table[b], max(kv_len, 0), sinks)
            out[b] = row_out[0].to(out.dtype)
            if lse is not None:
                lse[b] = row_lse[0].to(lse.dtype)

    def _attend(
        self, q: Tensor, kv: BoundCache, row: Tensor, kv_len: int, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        k_ids, v_ids = (row, row) if row.dim() == 1 else (row[0], row[1])
        start = first_visible(kv_len, 1, self._config.window_left)
        return attention(
            q,
            gather(kv.k.tensor, k_ids, kv_len, start=start),
            gather(kv.v.tensor, v_ids, kv_len, start=start),
            [0, 1],
            [0, kv_len],
            causal=self._config.causal,
            window_left=self._config.window_left,
            logits_soft_cap=self._config.logits_soft_cap,
            sm_scale=self._sm_scale,
            sinks=sinks,
        )


# --- cuda backend


@dataclass(frozen=True, slots=True)
class _DecodeKernel:
    kernel: LoadedKernel
    tile: DecodeTile


class _KernelSet:
    """The kernels of a configuration on a device; the plain loader's is loaded when needed."""

    def __init__(self, config: PlannerConfig, device: torch.device) -> None:
        from jitattn.driver import device_facts

        assert device.index is not None
        self.config = config
        self.device = device
        self.facts: DeviceFacts = device_facts(device.index)
        self.arch = _arch_of(self.facts)
        self._lock = threading.Lock()
        self._built: list[tuple[Kernel, int]] = []
        self._decode: dict[Loader, _DecodeKernel] = {}
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

    def decode_for(self, k: CacheView, v: CacheView) -> _DecodeKernel:
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
        from jitattn.build import build_all

        return build_all(specs, self.arch, knobs.load(), hint=self.config.arguments_text())

    def _load_decode(self, kernel: Kernel, spec: DecodeSpec) -> _DecodeKernel:
        tile = tile_for(spec, self.arch)
        assert isinstance(tile, DecodeTile)
        return _DecodeKernel(self._load(kernel, tile.smem_bytes), tile)

    def _load(self, kernel: Kernel, smem_bytes: int) -> LoadedKernel:
        from jitattn.driver import LoadedKernel

        self._built.append((kernel, smem_bytes))
        return LoadedKernel(kernel.cubin, kernel.symbol, self.facts.index, smem_bytes)


class _CudaPlan:
    """The schedule of a batch on the device, and the launches that use it."""

    def __init__(
        self,
        kernels: _KernelSet,
        sm_scale: float,
        workspace: Workspace | None,
        pages: BlockTable,
        seq_lens: Tensor,
        limit: int,
    ) -> None:
        from jitattn.driver import Launch

        config = kernels.config
        self._kernels = kernels
        self._index = kernels.facts.index
        self._batch_size = pages.batch_size
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
            self._schedule_params(schedule, seq_lens, limit),
            1,
            kernels.schedule_threads,
        )
        self._launches: dict[_DecodeKernel, Launch] = {}
        self._pages: BlockTable | None = None
        self.refresh()

    def refresh(self) -> None:
        if self._batch_size > 0:
            self._launch(self._schedule_launch)

    def run(
        self,
        q: Tensor,
        kv: BoundCache,
        pages: BlockTable,
        out: Tensor,
        lse: Tensor | None,
        sinks: Tensor | None,
    ) -> None:
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
        assert kv.decode is not None
        self._launch(self._launch_of(kv.decode))

    def _launch_of(self, decode: _DecodeKernel) -> Launch:  # type: ignore[name-defined]  # noqa: F821
        from jitattn.driver import Launch

        if decode not in self._launches:
            grid = self._max_slots * self._num_head_blocks
            self._launches[decode] = Launch(
                decode.kernel, self._params, grid, decode.tile.num_threads
            )
        return self._launches[decode]

    def _launch(self, launch: Launch) -> None:  # type: ignore[name-defined]  # noqa: F821
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

    def _reserve(self, workspace: Workspace) -> tuple[Tensor, Tensor]:
        rows = self._max_slots * 2 * self._num_head_blocks * self._kernels.spec.row_tile
        return workspace.reserve(
            rows * (self._kernels.config.head_dim + 2), self._max_slots * self._num_head_blocks
        )

    def _decode_params(self, schedule: Schedule, sm_scale: float) -> ctypes.Structure:
        config = self._kernels.config
        params = KERNEL_PARAMS[PageTable(config.page_table)]()
        decode = params.decode  # type: ignore[attr-defined]
        partials, counters = self._buffers
        rows = self._max_slots * 2 * self._num_head_blocks * self._kernels.spec.row_tile
        decode.partials = partials.data_ptr()
        decode.partial_sums = partials.data_ptr() + 4 * rows * config.head_dim
        decode.counters = counters.data_ptr()
        decode.schedule = schedule
        decode.group_size = config.group_size
        decode.num_row_blocks = self._num_row_blocks
        decode.num_head_blocks = self._num_head_blocks
        cap = config.logits_soft_cap
        decode.score_scale = sm_scale / cap if cap > 0 else sm_scale * _LOG2E
        decode.cap_log2 = cap * _LOG2E
        return params

    def _schedule_params(self, schedule: Schedule, seq_lens: Tensor, limit: int) -> ScheduleParams:
        return ScheduleParams(
            seq_lens=seq_lens.data_ptr(),
            schedule=schedule,
            seq_lens_stride=seq_lens.stride(0),
            max_kv_len=limit,
            seq_lens_are_int64=seq_lens.dtype == torch.int64,
            batch_size=self._batch_size,
            max_slots=self._max_slots,
            window_left=self._kernels.config.window_left,
            tile_tokens=self._kernels.tile.tile_tokens,
            request_cost=_REQUEST_COST,
            min_slot_cost=_MIN_SLOT_COST,
        )


def _write_pages(params: ctypes.Structure, pages: BlockTable) -> None:
    table, rows = pages.table, pages.rows
    params.table = table.data_ptr()  # type: ignore[attr-defined]
    params.row_stride = table.stride(0)  # type: ignore[attr-defined]
    params.column_stride = table.stride(-1)  # type: ignore[attr-defined]
    if pages.layout is PageTable.SEPARATE:
        params.kv_stride = table.stride(1)  # type: ignore[attr-defined]
    params.rows = None if rows is None else rows.data_ptr()  # type: ignore[attr-defined]
    if rows is not None:
        params.rows_stride = rows.stride(0)  # type: ignore[attr-defined]
        params.rows_are_int64 = rows.dtype == torch.int64  # type: ignore[attr-defined]


def _write_cache(decode: ctypes.Structure, kv: BoundCache) -> None:
    k, v = kv.k, kv.v
    decode.k = k.tensor.data_ptr()  # type: ignore[attr-defined]
    decode.k_page_stride = k.page_stride  # type: ignore[attr-defined]
    decode.k_token_stride = k.token_stride  # type: ignore[attr-defined]
    decode.k_head_stride = k.head_stride  # type: ignore[attr-defined]
    decode.v = v.tensor.data_ptr()  # type: ignore[attr-defined]
    decode.v_page_stride = v.page_stride  # type: ignore[attr-defined]
    decode.v_token_stride = v.token_stride  # type: ignore[attr-defined]
    decode.v_head_stride = v.head_stride  # type: ignore[attr-defined]


# --- checks of arguments


def _choose_backend(backend: str, device: torch.device) -> str:
    if backend not in _BACKENDS:
        raise ConfigError([f"backend={backend!r} is not one of {', '.join(_BACKENDS)}"])
    if device.type not in ("cpu", "cuda"):
        raise ConfigError([f"device={device} is neither a CUDA device nor the CPU"])
    if backend == "auto":
        return "cuda" if device.type == "cuda" else "reference"
    if backend == "cuda" and device.type != "cuda":
        raise ConfigError([f"backend='cuda' needs a CUDA device: device={device}"])
    return backend


def _check_workspace(workspace: Workspace | None, device: torch.device) -> Workspace | None:
    if workspace is not None:
        if not isinstance(workspace, Workspace):
            raise TypeError(f"workspace is a {type(workspace).__name__}: expected jitattn.Workspace")
        if workspace.device != device:
            raise ValueError(f"workspace is on {workspace.device}: expected {device}")
    return workspace


def _arch_of(facts: DeviceFacts) -> str:
    major, minor = facts.compute_capability
    arch = support.arch_for(major, minor)
    if arch is None:
        raise ConfigError(
            [f"{facts.name} has compute capability {major}.{minor}: kernels exist for 8.x, 9.0, "
             "10.x and 12.x"]
        )
    return arch


def _check_pages(pages: BlockTable, config: PlannerConfig, device: torch.device) -> None:
    if not isinstance(pages, BlockTable):
        raise TypeError(f"pages is a {type(pages).__name__}: expected jitattn.BlockTable")
    if pages.layout.value != config.page_table:
        raise ValueError(
            f"pages has a table of shape {list(pages.table.shape)}, layout {pages.layout.value!r}: "
            f"the planner has page_table={config.page_table!r}"
        )
    check_device("pages.table", pages.table, device)


def _kv_limit(pages: BlockTable, config: PlannerConfig, max_kv_len: int | None) -> int:
    assert config.page_size is not None
    capacity = min(pages.width * config.page_size, _INT32_MAX)
    if max_kv_len is None:
        return capacity
    if isinstance(max_kv_len, bool) or not isinstance(max_kv_len, int):
        raise TypeError(f"max_kv_len is a {type(max_kv_len).__name__}: expected an int")
    if max_kv_len < 0:
        raise ValueError(f"max_kv_len is {max_kv_len}: expected at least 0")
    return min(capacity, max_kv_len)
