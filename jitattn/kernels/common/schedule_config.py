"""The scheduling policy: CTAs of a planned kernel, work slots, and memory for both."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

from jitattn.device.workspace import SLICE_BYTES, aligned, workspace_bytes
from jitattn.kernels.common.kernel_loader import PlannedKernel, Role, ScheduleKernel
from jitattn.kernels.common.params import (
    BOUNDARY_BYTES,
    COST_BYTES,
    FIRST_ITEM_BYTES,
    HEADER_BYTES,
    QUERY_TILE_BEGIN_BYTES,
    QUERY_TILE_BYTES,
    REQUEST_BYTES,
    ListScheduleParams,
    ParamFields,
    ScheduleParams,
    kernel_params,
)
from jitattn.kernels.common.tile import MAX_WORK_TILES, DecodeTile, WarpgroupTile
from jitattn.spec.config import MLAConfig, PlannerConfig
from jitattn.spec.layout import LISTS, ListLayout, layout_of
from jitattn.spec.params import Divisor

# The largest capacity whose plans a planner keeps when they are gone.
MAX_IDLE_CAPACITY = 4096

_LOG2E = math.log2(math.e)

# K and V of a head that stay in the L2 cache while many CTAs read them.
_SECTION_BYTES = 16 << 20

# Of a family whose splits a kernel of their own merges, in KV tiles.
_MERGE_COST = 4

# Waves of work slots: those after the first even out what the first leaves uneven, and are halved.
MAX_WAVES = 6


AttentionArguments = PlannerConfig | MLAConfig
"""Of either planner."""


@dataclass(frozen=True)
class FamilyTraits:
    """Properties of a kernel family that schedules and parameters depend on.

    Attributes:
        max_splits: the most splits of a request that a batch-invariant plan makes.
        min_split_tokens: the least tokens of such a split.
        head_split_tokens: the same for each KV head, if that is more: their CTAs fill the card.
        max_split_tokens: but no more than this, so that few requests do as well.
        tile_visit_cost: what a CTA's visit to a query tile costs, in KV tiles.
        min_slot_cost: the least work that is worth a CTA, in KV tiles.
        has_one_kernel: whether the decode kernel is the prefill kernel, too.
        merges_in_kernel: whether a CTA of the prefill kernel merges the splits of a query tile.
        skips_empty_tiles: whether kernels write the rows of empty query tiles apart.
        params: what its kernels get besides the parameters of attention.
    """

    max_splits: int
    min_split_tokens: int
    head_split_tokens: int
    max_split_tokens: int
    tile_visit_cost: int
    min_slot_cost: int
    has_one_kernel: bool = False
    merges_in_kernel: bool = True
    skips_empty_tiles: bool = False
    params: ParamFields = ()


@dataclass(frozen=True, eq=False)
class ScheduleConfig:
    """What the plans of a planner have in common, of one of its kernels.

    Attributes:
        role: what the kernel is for.
        kernel: the kernel.
        schedule_kernel: the kernel that makes its schedules.
        max_q_len: the most query tokens of a request that fill one row tile, at least 1.
        group_size: query heads of a KV head.
        grid: CTAs.
        max_slots: work slots of a schedule, of all waves.
        num_first_items: CTAs whose first work item is in the schedule.
        num_values: floats of partial rows, which their sums follow.
        num_partials: floats that it needs of a workspace.
        num_counters: counters that it needs of a workspace.
        pool_entries: entries of a page, where kernels are told how many the pool has; else 0.
        has_lists: whether tables are lists of what is seen.
        bounds_requests: whether tensors of tables say how much each request has.
        limits_sms: whether the planner leaves multiprocessors to others.
        class_tokens: query tokens of a request between two changes of its fixed splits' length, at
            least; 0 where splits are not fixed.
        params_type: the type of its parameters.
        params: its parameters as a plan begins with them.
        schedule_params: likewise of the schedule kernel, a ``ScheduleParams``.
    """

    role: Role
    kernel: PlannedKernel
    schedule_kernel: ScheduleKernel
    max_q_len: int
    group_size: int
    grid: int
    max_slots: int
    num_first_items: int
    num_values: int
    num_partials: int
    num_counters: int
    pool_entries: int
    has_lists: bool
    bounds_requests: bool
    limits_sms: bool
    class_tokens: int
    params_type: type[ctypes.Structure]
    params: bytes
    schedule_params: bytes

    def capacity_for(self, batch_size: int, max_q_len: int) -> int:
        """Return for how many requests and query tiles the schedule of a batch has room."""
        if not is_prefill(self.role):
            return _capacity(batch_size)
        count = -(-max_q_len * self.group_size // self.kernel.row_tile)
        if self.class_tokens and max_q_len > 1:  # a query tile ends where the length changes
            count += -(-max_q_len // self.class_tokens)
        return _capacity(batch_size * count)

    def schedule_bytes(self, batch_size: int, max_q_len: int) -> int:
        """Return the bytes of the schedule of a batch."""
        capacity = self.capacity_for(batch_size, max_q_len)
        return schedule_offsets(capacity, self.max_slots, self.num_first_items)[1]


def is_prefill(role: Role) -> bool:
    """Return whether a kernel computes query tiles: blocks of the rows of a request."""
    return role in ("prefill", "prefill_narrow")


ScheduleConfigs = tuple[ScheduleConfig, ...]
"""Those of the kernels of a plan."""


def schedule_config(
    config: AttentionArguments,
    traits: FamilyTraits,
    role: Role,
    kernel: PlannedKernel,
    schedule_kernel: ScheduleKernel,
    *,
    num_sms: int,
    decode_rows: int,
    num_row_blocks: int | None = None,
) -> ScheduleConfig:
    """Return what the plans of a planner have in common, of one of its kernels.

    Args:
        config: the planner's arguments.
        traits: those of the kernel's family.
        role: what the kernel is for.
        kernel: the kernel.
        schedule_kernel: the kernel that makes schedules.
        num_sms: multiprocessors of the device.
        decode_rows: rows of requests of the decode kernel; 0: none but invalid ones; -1: none.
        num_row_blocks: row tiles of a request; None: those of a query token.
    """
    has_query_tiles, layout = is_prefill(role), layout_of(config.page_table)
    blocks = _head_blocks(config, kernel, num_row_blocks, is_prefill=has_query_tiles)
    work = _work_slots(config, kernel, blocks.num_head_blocks, num_sms, is_prefill=has_query_tiles)
    fixed = _fixed_splits(config, traits, kernel, has_query_tiles or layout.is_list)
    num_rows = kernel.row_tile * fixed.num_places(work, blocks.num_head_blocks)
    num_values = _partial_values(num_rows, kernel)
    params_type = kernel_params(layout, config.variant, traits.params)
    return ScheduleConfig(
        role=role,
        kernel=kernel,
        schedule_kernel=schedule_kernel,
        max_q_len=max(1, kernel.row_tile // config.group_size),
        group_size=config.group_size,
        grid=work.grid,
        max_slots=work.max_slots,
        num_first_items=work.num_first_items,
        num_values=num_values,
        num_partials=num_values + 2 * num_rows,
        num_counters=SLICE_BYTES // 4 + work.max_slots * blocks.num_head_blocks,
        pool_entries=_pool_entries(config),
        has_lists=layout.is_list,
        bounds_requests=layout.has_offsets or layout.is_list,
        limits_sms=config.num_sms is not None,
        class_tokens=fixed.class_tiles * kernel.tile.tile_tokens,
        params_type=params_type,
        params=_kernel_params(params_type, config, blocks, work, fixed.most),
        schedule_params=_schedule_params(
            config,
            traits,
            kernel,
            blocks,
            work,
            decode_rows=decode_rows,
            prefill_rows=kernel.row_tile if has_query_tiles else 0,
            fixed=fixed,
        ),
    )


def _partial_values(num_rows: int, kernel: PlannedKernel) -> int:
    """Return the floats of partial rows. Their sums follow, in front of what CTAs have claimed."""
    return aligned(4 * num_rows * kernel.tile.value_dim) // 4


class _FixedSplits(NamedTuple):
    """Splits of a batch-invariant plan: the most of a query tile, and tiles of the shortest."""

    most: int
    least_tiles: int

    @property
    def class_tiles(self) -> int:
        """The least between two changes of the splits' length; 0 where splits are not fixed."""
        # Lengths grow by a quarter of a power of two of the least.
        return self.most * max(1, self.least_tiles // 4)

    def num_places(self, work: _WorkSlots, num_head_blocks: int) -> int:
        """Return how many row tiles of partial rows there are."""
        # Two a slot and head block; of fixed splits one there and one a CTA, of so many splits.
        num_slot_places = work.max_slots * num_head_blocks
        return (num_slot_places + work.grid) * self.most if self.most else 2 * num_slot_places


def _fixed_splits(
    config: AttentionArguments, traits: FamilyTraits, kernel: PlannedKernel, has_requests: bool
) -> _FixedSplits:
    # The prefill kernel has all requests of a batch-invariant planner, but for those with lists.
    most = traits.max_splits if config.batch_invariant and has_requests else 0
    least = max(traits.min_split_tokens, traits.head_split_tokens * config.num_kv_heads)
    least = min(least, traits.max_split_tokens)
    return _FixedSplits(most, max(1, least // kernel.tile.tile_tokens))


class _HeadBlocks(NamedTuple):
    """Blocks of rows and of values that a query tile is split into."""

    num_row_blocks: int
    num_head_blocks: int


def _head_blocks(
    config: AttentionArguments,
    kernel: PlannedKernel,
    num_row_blocks: int | None,
    *,
    is_prefill: bool,
) -> _HeadBlocks:
    if num_row_blocks is None:
        num_row_blocks = 1 if is_prefill else -(-config.group_size // kernel.row_tile)
    num_value_blocks = (config.head_dim_vo or config.head_dim) // kernel.tile.value_dim
    return _HeadBlocks(num_row_blocks, config.num_kv_heads * num_row_blocks * num_value_blocks)


class _WorkSlots(NamedTuple):
    """CTAs, and the work slots that they are dealt."""

    grid: int
    wave_slots: int
    max_waves: int
    num_first_items: int

    @property
    def max_slots(self) -> int:
        """Of all waves."""
        return self.wave_slots * self.max_waves


def _work_slots(
    config: AttentionArguments,
    kernel: PlannedKernel,
    num_head_blocks: int,
    num_sms: int,
    *,
    is_prefill: bool,
) -> _WorkSlots:
    num_ctas = num_sms * kernel.tile.ctas_per_sm
    if config.num_sms is not None:
        # The card spreads CTAs over its SMs, so that each is one SM taken from others.
        num_ctas = min(config.num_sms, num_sms)
    wave_slots = max(1, num_ctas // num_head_blocks)
    # Work tiles of whole query tiles, which prefill may have, are dealt to any number of CTAs.
    grid = num_ctas if is_prefill else wave_slots * num_head_blocks
    if config.num_sms is not None:
        grid = min(grid, num_ctas)
    # A work queue has fixed splits, too: more than a batch-invariant plan has room for.
    max_waves = 1
    if isinstance(kernel.tile, DecodeTile) and not config.batch_invariant:
        # A CTA notes one work tile more than it may do: that there is none.
        most = (MAX_WORK_TILES - 1) // (wave_slots * num_head_blocks)
        max_waves = max(1, min(MAX_WAVES, most))
    is_read = isinstance(kernel.tile, WarpgroupTile)
    return _WorkSlots(grid, wave_slots, max_waves, num_first_items=grid if is_read else 0)


def _kernel_params(
    params_type: type[ctypes.Structure],
    config: AttentionArguments,
    blocks: _HeadBlocks,
    work: _WorkSlots,
    max_splits: int,
) -> bytes:
    params = params_type()
    attention = params.attention
    attention.num_row_blocks = Divisor.of(blocks.num_row_blocks)
    attention.num_head_blocks = Divisor.of(blocks.num_head_blocks)
    attention.claims_work_tiles = work.max_waves > 1
    attention.max_splits = max_splits
    attention.max_slots = work.max_slots
    attention.num_qo_heads = config.num_qo_heads
    attention.group_size = Divisor.of(config.group_size)
    attention.is_causal = config.causal
    attention.window_left = config.window_left
    attention.early_kv = config.early_kv
    scale, cap = config.score_scale, config.logits_soft_cap
    attention.score_scale = scale / cap if cap > 0 else scale * _LOG2E
    attention.cap_log2 = cap * _LOG2E
    return bytes(params)


def _schedule_params(
    config: AttentionArguments,
    traits: FamilyTraits,
    kernel: PlannedKernel,
    blocks: _HeadBlocks,
    work: _WorkSlots,
    *,
    decode_rows: int,
    prefill_rows: int,
    fixed: _FixedSplits,
) -> bytes:
    kind = ListScheduleParams if config.page_table in LISTS else ScheduleParams
    merge_cost = _merge_cost(kernel)
    return bytes(
        kind(
            is_causal=config.causal,
            window_left=config.window_left,
            group_size=config.group_size,
            decode_rows=decode_rows,
            prefill_rows=prefill_rows,
            tile_tokens=kernel.tile.tile_tokens,
            tile_visit_cost=traits.tile_visit_cost,
            min_slot_cost=traits.min_slot_cost,
            merge_cost=merge_cost if traits.merges_in_kernel else _MERGE_COST,
            split_cost=merge_cost if traits.merges_in_kernel else 0,
            min_split_tiles=fixed.least_tiles,
            splits_go_by_rows=config.causal and not getattr(config, "use_custom_mask", False),
            skips_empty_tiles=traits.skips_empty_tiles,
            entry_tokens=_entry_tokens(config),
            max_splits=fixed.most,
            wave_slots=work.wave_slots,
            max_waves=work.max_waves,
            num_ctas=work.grid,
            num_first_items=work.num_first_items,
            section_tokens=_SECTION_BYTES // (2 * (config.head_dim + kernel.tile.value_dim)),
            num_head_blocks=blocks.num_head_blocks,
        )
    )


def _merge_cost(kernel: PlannedKernel) -> int:
    """Return what a CTA's part in publishing and merging splits costs, in KV tiles.

    Measured: about eight tiles for 128 rows of 128, and in proportion to the bytes of a split.
    """
    return max(3, round(8 * kernel.row_tile * kernel.tile.value_dim / 128**2))


def _pool_entries(config: AttentionArguments) -> int:
    layout = layout_of(config.page_table)
    if layout.is_list:
        return 1 if layout.lists_pages else config.page_size or 1
    return 0 if layout.has_pages else 1


def _entry_tokens(config: AttentionArguments) -> int:
    """Return what offsets and lists count: the tokens of a page, or of lists of tokens one."""
    if config.page_table == ListLayout.INDICES:
        return 1
    return config.page_size or 1


class WorkspacePlace(NamedTuple):
    """Where the part of a kernel begins in a workspace, whose kernels may run beside each other.

    Attributes:
        number: of the kernel in its plan.
        partial: of its floats.
        counter: of its counters.
    """

    number: int
    partial: int
    counter: int


def workspace_places(configs: ScheduleConfigs) -> list[WorkspacePlace]:
    """Return the place of each kernel of a plan, and behind these the end of the last."""
    partials = itertools.accumulate((aligned(4 * c.num_partials) // 4 for c in configs), initial=0)
    counters = itertools.accumulate((aligned(4 * c.num_counters) // 4 for c in configs), initial=0)
    return list(map(WorkspacePlace, itertools.count(), partials, counters))


def workspace_size(configs: ScheduleConfigs) -> tuple[int, int]:
    """Return the floats and the counters of a workspace for the kernels of a plan."""
    end = workspace_places(configs)[-1]
    return end.partial, end.counter


def plan_bytes(configs: ScheduleConfigs, batch_size: int, max_q_len: int) -> int:
    """Return the bytes of a workspace for a plan and of its own schedules."""
    schedules = sum(aligned(config.schedule_bytes(batch_size, max_q_len)) for config in configs)
    return workspace_bytes(*workspace_size(configs)) + schedules


@functools.lru_cache(maxsize=1024)
def _capacity(count: int) -> int:
    # In powers of two, so that the next step's batch has the same.
    return count if count > MAX_IDLE_CAPACITY else 1 << max(count - 1, 15).bit_length()


def schedule_offsets(
    capacity: int, max_slots: int, num_first_items: int
) -> tuple[tuple[int, ...], int]:
    """Return where the parts of ``struct Schedule`` begin, at multiples of 16, and their size.

    It has room for ``capacity`` requests and query tiles.
    """
    parts = (
        HEADER_BYTES,
        REQUEST_BYTES * capacity,
        QUERY_TILE_BYTES * capacity,
        BOUNDARY_BYTES * (max_slots + 1),
        QUERY_TILE_BEGIN_BYTES * (capacity + 1),
        COST_BYTES * (capacity + 1),
        FIRST_ITEM_BYTES * num_first_items,
    )
    *offsets, size = itertools.accumulate((-(-part // 16) * 16 for part in parts), initial=0)
    return tuple(offsets), size
