"""What the plans of a planner have in common: grids, memory, and parameters to begin with."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from typing import TYPE_CHECKING

from jitattn.device.workspace import SLICE_BYTES, aligned, workspace_bytes
from jitattn.kernels.attention.loaded_kernels import Role
from jitattn.kernels.common.params import (
    BOUNDARY_BYTES,
    COST_BYTES,
    HEADER_BYTES,
    REQUEST_BYTES,
    UNIT_BEGIN_BYTES,
    UNIT_BYTES,
    ScheduleParams,
    kernel_params,
)
from jitattn.kernels.common.tile import MAX_PIECES, DecodeTile
from jitattn.spec.config import MLAConfig, PlannerConfig
from jitattn.spec.layout import Layout
from jitattn.spec.params import Divisor

if TYPE_CHECKING:
    from jitattn.kernels.attention.kernels import KernelSet

# The sizes of plans that a planner keeps when they are gone.
MAX_IDLE_ROOM = 4096

_LOG2E = math.log2(math.e)

# The least that a split of a batch-invariant schedule holds.
_MIN_SPLIT_TOKENS = 512

# Rounds of slots: those after the first even out what the first leaves uneven, and are halved.
_MAX_ROUNDS = 6


AttentionArguments = PlannerConfig | MLAConfig
"""Of either planner."""


class Recipe:
    """What the plans of a planner have in common, of one of its kernels.

    Attributes:
        kernel: the kernel.
        role: what it is for.
        max_q_len: the most query tokens of a request that fill one row tile, at least 1.
        params_type, params: its parameters as a plan begins with them, and their type.
        schedule_params: likewise of the schedule kernel, a ``ScheduleParams``.
        num_partials, num_counters: what it needs of a workspace.
    """

    def __init__(self, kernels: KernelSet, role: Role) -> None:
        config = kernels.config
        kernel = kernels.kernels.of(role)
        is_prefill = role == "prefill"
        self.config = config
        self.device = kernels.device
        self.kernel = kernel
        self.role = role
        self.is_prefill = is_prefill
        self.max_q_len = max(1, kernel.row_tile // config.group_size)
        layout = Layout(config.page_table)
        self.is_ragged = not layout.has_pages
        self.has_offsets = layout.has_offsets
        self.schedule_kernel = kernels.schedule_kernel
        self.schedule_threads = kernels.schedule_threads
        max_splits = kernels.max_splits if config.batch_invariant else 0
        num_row_blocks = 1 if is_prefill else -(-config.group_size // kernel.row_tile)
        num_value_blocks = (config.head_dim_vo or config.head_dim) // kernel.tile.value_dim
        num_head_blocks = config.num_kv_heads * num_row_blocks * num_value_blocks
        num_ctas = kernels.facts.num_sms * kernel.tile.ctas_per_sm
        if config.num_sms is not None:
            # The card spreads CTAs over its SMs, so that each is one SM taken from others.
            num_ctas = min(config.num_sms, kernels.facts.num_sms)
        round_slots = max(1, num_ctas // num_head_blocks)
        # Pieces of whole units, which prefill may have, are dealt to any number of CTAs.
        self.grid = num_ctas if is_prefill else round_slots * num_head_blocks
        if config.num_sms is not None:
            self.grid = min(self.grid, num_ctas)
        # What CTAs claim has fixed splits, too: more than a batch-invariant plan has room for.
        max_rounds = 1
        if isinstance(kernel.tile, DecodeTile) and not config.batch_invariant:
            # A CTA notes one piece more than it may do: that there is none.
            most = (MAX_PIECES - 1) // (round_slots * num_head_blocks)
            max_rounds = max(1, min(_MAX_ROUNDS, most))
        self.max_slots = round_slots * max_rounds
        num_rows = self.max_slots * 2 * max(max_splits, 1) * num_head_blocks * kernel.row_tile
        # The sums of partial rows follow their values, and the counters what CTAs claimed.
        self.num_values = aligned(4 * num_rows * kernel.tile.value_dim) // 4
        self.num_partials = self.num_values + 2 * num_rows
        self.num_counters = SLICE_BYTES // 4 + self.max_slots * num_head_blocks
        self.params_type = kernel_params(layout, config.variant, is_latent=kernels.is_latent)
        params = self.params_type()
        params.attention.num_row_blocks = Divisor.of(num_row_blocks)
        params.attention.num_head_blocks = Divisor.of(num_head_blocks)
        params.attention.claims_pieces = max_rounds > 1
        params.attention.max_splits = max_splits
        _write_config(params.attention, config)
        self.params = bytes(params)
        # What doesn't fit the tile of a plan's decode kernel is for the prefill kernel.
        decode_rows = kernel.row_tile
        if is_prefill:
            decode_rows = kernels.wide_rows or kernels.kernels.decode.row_tile
        schedule = self._schedule_params(kernels, decode_rows)
        schedule.max_splits = max_splits
        schedule.round_slots, schedule.max_rounds = round_slots, max_rounds
        schedule.num_ctas, schedule.num_head_blocks = self.grid, num_head_blocks
        self.schedule_params = bytes(schedule)

    def _schedule_params(self, kernels: KernelSet, decode_rows: int) -> ScheduleParams:
        config, tile_tokens = self.config, self.kernel.tile.tile_tokens
        return ScheduleParams(
            is_causal=config.causal,
            window_left=config.window_left,
            group_size=config.group_size,
            decode_rows=decode_rows,
            prefill_rows=self.kernel.row_tile if self.is_prefill else 0,
            tile_tokens=tile_tokens,
            unit_cost=kernels.unit_cost,
            min_slot_cost=kernels.min_slot_cost,
            min_split_tiles=max(1, _MIN_SPLIT_TOKENS // tile_tokens),
            entry_tokens=config.page_size or 1,
        )

    def room_for(self, batch_size: int, max_q_len: int) -> int:
        """Return for how many requests and units the schedule of a batch gets room."""
        if not self.is_prefill:
            return _room(batch_size)
        num_rows = max_q_len * self.config.group_size
        return _room(batch_size * -(-num_rows // self.kernel.row_tile))

    def schedule_bytes(self, batch_size: int, max_q_len: int) -> int:
        """Return the bytes of the schedule of a batch."""
        return schedule_offsets(self.room_for(batch_size, max_q_len), self.max_slots)[1]


Recipes = tuple[Recipe, ...]
"""Those of the kernels of a plan."""


def workspace_size(recipes: Recipes) -> tuple[int, int]:
    """Return the floats and the counters of a workspace for the kernels of a plan."""
    return (
        max(recipe.num_partials for recipe in recipes),
        max(recipe.num_counters for recipe in recipes),
    )


def plan_bytes(recipes: Recipes, batch_size: int, max_q_len: int) -> int:
    """Return the bytes of a workspace for a plan and of its own schedules."""
    schedules = sum(aligned(recipe.schedule_bytes(batch_size, max_q_len)) for recipe in recipes)
    return workspace_bytes(*workspace_size(recipes)) + schedules


@functools.lru_cache(maxsize=1024)
def _room(count: int) -> int:
    # In powers of two, so that the next step's batch has the same.
    return count if count > MAX_IDLE_ROOM else 1 << max(count - 1, 15).bit_length()


def schedule_offsets(room: int, max_slots: int) -> tuple[tuple[int, ...], int]:
    """Return where the parts of ``struct Schedule`` begin, at multiples of 16, and their size.

    There is room for so many requests and units.
    """
    parts = (
        HEADER_BYTES,
        REQUEST_BYTES * room,
        UNIT_BYTES * room,
        BOUNDARY_BYTES * (max_slots + 1),
        UNIT_BEGIN_BYTES * (room + 1),
        COST_BYTES * (room + 1),
    )
    *offsets, size = itertools.accumulate((-(-part // 16) * 16 for part in parts), initial=0)
    return tuple(offsets), size


def _write_config(params: ctypes.Structure, config: AttentionArguments) -> None:
    params.num_qo_heads = config.num_qo_heads
    params.group_size = Divisor.of(config.group_size)
    params.is_causal = config.causal
    params.window_left = config.window_left
    params.early_kv = config.early_kv
    scale, cap = config.score_scale, config.logits_soft_cap
    params.score_scale = scale / cap if cap > 0 else scale * _LOG2E
    params.cap_log2 = cap * _LOG2E
