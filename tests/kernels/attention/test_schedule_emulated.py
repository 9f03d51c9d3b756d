"""The schedule kernel's arithmetic: a model of its waves, and the template itself on the host.

Where there is a C++ compiler, the template is compiled for the CPU, with one thread and with
several, and what it writes is held against the model and what the attention kernels rely on.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from jitattn.kernels.attention.kernels import TRAITS
from jitattn.kernels.common.params import Schedule, ScheduleParams
from jitattn.kernels.common.schedule_config import MAX_WAVES
from tests.emulator import launch_recorder
from tests.emulator.schedule import EmulatedSchedule, compile_schedule
from tests.gpu.test_claims import IN_WAVES
from tests.support.cases import Case
from tests.support.examples import examples

_VISIT_COST, _MIN_SLOT_COST = TRAITS.tile_visit_cost, TRAITS.min_slot_cost

random_examples = examples(300)


# --- the model ------------------------------------------------------------------------------------


MIN_CLAIM = 6
LATER = 8  # the part of the cost that later waves have
SPARE = 8  # the part of the slots that even query tiles may cost
NUM_BUCKETS = 6
MANY_WORK_TILES = 8
WHOLE_TILES = 4
MERGE_COST = 4
SECTION_TOKENS = 3000
NO_WORK, UNKNOWN_WORK = -1, -2


@dataclass(frozen=True)
class Waves:
    """``struct Waves``: how so many positions are dealt to slots."""

    total_cost: int
    width: int
    max_waves: int
    min_claim: int = MIN_CLAIM

    @property
    def count(self) -> int:
        count = 1
        while (
            count < self.max_waves
            and self.total_cost // LATER >> (count - 1) >= self.min_claim * self.width
        ):
            count += 1
        return count

    def begin(self, index: int) -> int:
        if index == 0:
            return 0
        if index == self.count:
            return self.total_cost
        return self.total_cost - (self.total_cost // LATER >> (index - 1))

    def position(self, slot: int) -> int:
        index, place = divmod(slot, self.width)
        first = self.begin(index)
        size = self.begin(min(index + 1, self.count)) - first
        return first + (place * size + self.width - 1) // self.width

    def slot(self, position: int) -> int:
        index = self.count - 1
        while position < self.begin(index):
            index -= 1
        first = self.begin(index)
        size = self.begin(index + 1) - first
        return index * self.width + (position - first) * self.width // size

    @property
    def num_slots(self) -> int:
        return self.width * self.count


def count_whole(num_query_tiles: int, most: int) -> int:
    """``count_whole()``: slots of whole query tiles, or whole query tiles of slots."""
    least = most - most // SPARE
    whole = most // num_query_tiles * num_query_tiles if most >= num_query_tiles else most
    while whole >= least and whole < num_query_tiles and num_query_tiles % whole:
        whole -= 1
    return whole if whole >= least else 0


def waves_of(costs: list[int], most: int, max_waves: int, max_splits: int) -> Waves:
    """The waves that the kernel deals query tiles of these costs to."""
    total, num_query_tiles = sum(costs), len(costs)
    is_alike = not max_splits and all(cost * num_query_tiles == total for cost in costs)
    whole = count_whole(num_query_tiles, most) if is_alike else 0
    tile_cost = total // num_query_tiles if whole else 0
    if visit_cost(costs, whole) == 0:
        total -= num_query_tiles * _VISIT_COST
    return Waves(total, whole or most, max_waves, max(tile_cost, MIN_CLAIM))


def visit_cost(costs: list[int], whole: int) -> int:
    """Visit cost of a query tile: 0 where as many slots share each, and all visit one."""
    sharing = whole // len(costs)
    return 0 if sharing > 1 and costs[0] - _VISIT_COST >= sharing else _VISIT_COST


def suits_whole_query_tiles(costs: list[int], num_ctas: int, num_head_blocks: int) -> bool:
    """``suits_whole_query_tiles()``, of a prefill schedule that is not batch-invariant."""
    if not costs:
        return False
    total, longest, work_tiles = sum(costs), max(costs), len(costs) * num_head_blocks
    even = total * num_head_blocks + MERGE_COST * num_ctas
    if 4 * total >= 3 * longest * len(costs):
        passes = -(-work_tiles // num_ctas)
        many = (
            100 * work_tiles >= 93 * passes * num_ctas or work_tiles >= MANY_WORK_TILES * num_ctas
        )
        return many or passes_cost(costs, num_ctas, num_head_blocks) * num_ctas <= even
    return longest * num_ctas <= even


def passes_cost(costs: list[int], num_ctas: int, num_head_blocks: int) -> int:
    """``passes_cost()``: the first of each pass, the costliest first, in sixteenths rounded up."""
    longest = max(costs)
    steps = sorted(((cost - 1) * 16 // longest for cost in costs), reverse=True)
    firsts = range(0, len(costs) * num_head_blocks, num_ctas)
    return sum(-(-(steps[i // num_head_blocks] + 1) * longest // 16) for i in firsts)


def bucket_of(cost: int, longest: int) -> int:
    """``bucket_of()``: how often the longest's cost is halved before it is below ``cost``."""
    return sum(cost <= longest >> halvings for halvings in range(1, NUM_BUCKETS))


@st.composite
def waves(draw: st.DrawFn) -> Waves:
    width = draw(st.integers(1, 300))
    largest = draw(st.sampled_from((2 * width, 100 * width, 2**22, 2**40)))
    total = draw(st.integers(width, max(largest, width)))
    return Waves(total, width, draw(st.integers(1, MAX_WAVES)))


@random_examples
@given(waves())
def test_slots_of_waves(dealt: Waves) -> None:
    positions = [dealt.position(slot) for slot in range(dealt.num_slots)]
    ends = [*positions[1:], dealt.total_cost]
    assert positions[0] == 0
    for slot, (position, end) in enumerate(zip(positions, ends, strict=True)):
        assert end > position, "a slot has a position at least"
        # Both ends of a slot, and so all between them, lie in it.
        assert dealt.slot(position) == dealt.slot(end - 1) == slot
    costs = [end - position for position, end in zip(positions, ends, strict=True)]
    of_waves = [costs[i : i + dealt.width] for i in range(0, len(costs), dealt.width)]
    assert len(of_waves) == dealt.count <= dealt.max_waves
    for of_wave in of_waves:
        assert max(of_wave) - min(of_wave) <= 1
    if dealt.count > 1:
        assert min(costs) >= MIN_CLAIM
    assert 8 * sum(of_waves[0]) >= 7 * dealt.total_cost
    sums = [sum(of_wave) for of_wave in of_waves]
    assert sums == sorted(sums, reverse=True)


def test_more_work_has_more_waves() -> None:
    counts = [Waves(total, 132, 6).count for total in range(132, 200_000, 100)]
    assert counts == sorted(counts)
    assert set(counts) == {1, 2, 3, 4, 5, 6}
    # An eighth of the work is worth so many positions a slot.
    assert Waves(8 * MIN_CLAIM * 132 - 1, 132, 6).count == 1
    assert Waves(8 * MIN_CLAIM * 132, 132, 6).count == 2


@random_examples
@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 10**6))
def test_even_query_tiles_get_whole_slots(most: int, num_query_tiles: int, cost: int) -> None:
    found = count_whole(num_query_tiles, most)
    possible = [
        n
        for n in range(most - most // 8, most + 1)
        if n % num_query_tiles == 0 or (n < num_query_tiles and num_query_tiles % n == 0)
    ]
    assert found == max(possible, default=0)
    costs = [cost] * num_query_tiles
    dealt = waves_of(costs, most, 6, 0)
    assert dealt.width == (found or most)
    if found and dealt.count > 1:
        ends = [dealt.position(slot) for slot in range(found, dealt.num_slots + 1)]
        sizes = [end - begin for begin, end in itertools.pairwise(ends)]
        assert min(sizes) >= cost, "who claims gets as much as a query tile at least"
    assert waves_of(costs, most, 6, 16).width == most
    assert waves_of([*costs, cost + 1], most, 6, 0).width == most


# --- the template on the host ---------------------------------------------------------------------

UNWRITTEN = -77
MAX_KV_LEN = 2**30


@pytest.fixture(scope="module")
def on_host() -> EmulatedSchedule:
    """The schedule kernel, compiled for the CPU, with one thread."""
    return compile_schedule(1)


@pytest.fixture(scope="module", params=[1, 7], ids=["one thread", "seven threads"])
def on_threads(request: pytest.FixtureRequest) -> EmulatedSchedule:
    """The same with one thread and with several."""
    return compile_schedule(request.param)


@dataclass(frozen=True)
class Batch:
    """What is scheduled, and for how many slots; ``prefill_rows`` is 0 for the decode kernel."""

    lengths: tuple[int, ...]
    q_lens: tuple[int, ...] | None = None
    wave_slots: int = 132
    max_waves: int = 6
    tile_tokens: int = 64
    max_splits: int = 0
    window_left: int = -1
    is_causal: bool = True
    group_size: int = 4
    decode_rows: int = 8
    prefill_rows: int = 0
    num_ctas: int = 132
    num_head_blocks: int = 1

    def is_valid(self, request: int) -> bool:
        """Whether no length of a request exceeds what was planned."""
        return self.lengths[request] <= MAX_KV_LEN

    @property
    def min_split_tiles(self) -> int:
        """The least that a fixed split holds."""
        return max(1, 512 // self.tile_tokens)

    def split_tiles(self, position: int) -> int:
        """``split_tiles_at()``: tiles of a fixed split of rows whose last key is there."""
        lengths = (
            (self.min_split_tiles * (4 + step % 4) << step // 4) // 4 for step in itertools.count()
        )
        most = math.inf
        if self.is_causal and self.window_left >= 0:
            most = (self.window_left + self.prefill_rows) // self.tile_tokens + 2
        return next(
            n
            for n in lengths
            if position // self.tile_tokens < self.max_splits * n
            or most <= (self.max_splits - 1) * n
        )

    def first_rows(self, request: int) -> list[int]:
        """Where the query tiles of a request of the prefill kernel begin."""
        q_len = self.q_lens[request] if self.q_lens else 1
        kv_len = max(self.lengths[request], 0) if self.is_valid(request) else 0
        if self.q_lens and self.decode_rows < 0 and not self.is_valid(request):
            return [0]
        offset = kv_len - q_len
        found, class_end = [], 0
        for row in range(q_len * self.group_size):
            if row == class_end or (row - found[-1]) == self.prefill_rows:
                found.append(row)
            if row == class_end:
                class_end = q_len * self.group_size
                position = max(offset + row // self.group_size, 0)
                if self.max_splits and self.is_causal:
                    tokens = self.split_tiles(position) * self.max_splits * self.tile_tokens
                    if tokens > position:
                        class_end = min(class_end, (tokens - offset) * self.group_size)
        return found


@dataclass(frozen=True)
class QueryTile:
    """An entry of the schedule: see schedule.cuh."""

    request: int
    first_row: int
    kv_begin: int
    kv_end: int
    first_slot: int
    last_slot: int
    num_splits: int
    fixed_splits: int

    @property
    def split_tiles(self) -> int:
        """Tiles of a fixed split; 0 where splits are not fixed."""
        return self.fixed_splits // 256

    def tiles(self, tile_tokens: int) -> range:
        """Those that hold a token which it sees."""
        if self.kv_end <= 0:
            return range(0)
        return range(self.kv_begin // tile_tokens, (self.kv_end - 1) // tile_tokens + 1)


@dataclass(frozen=True)
class Scheduled:
    """What the kernel wrote, and what ``TileRange`` makes of it."""

    num_slots: int
    is_whole: bool
    query_tiles: list[QueryTile]
    boundaries: list[tuple[int, int]]
    costs: list[int]  # with what a visit costs
    tile_cost: int  # of a visit, where it counts
    found: list[list[int]]


def schedule(call: EmulatedSchedule, batch: Batch) -> Scheduled:
    count = len(batch.lengths)
    q_lens = batch.q_lens or (1,) * count
    rows = [q_len * batch.group_size for q_len in q_lens]
    most_query_tiles = count
    if batch.prefill_rows:
        most_query_tiles = sum(-(-n // batch.prefill_rows) for n in rows)
        if batch.max_splits:
            least = batch.max_splits * max(1, batch.min_split_tiles // 4) * batch.tile_tokens
            most_query_tiles += sum(-(-q_len // least) for q_len in q_lens if q_len > 1)
    most_slots = batch.wave_slots * batch.max_waves
    seq_lens = torch.tensor(batch.lengths, dtype=torch.int64)
    starts = torch.tensor([0, *q_lens], dtype=torch.int64).cumsum(0).int()
    parts = [
        torch.full(shape, UNWRITTEN, dtype=dtype)
        for shape, dtype in (
            ((4,), torch.int32),
            ((count, 4), torch.int32),
            ((most_query_tiles + 1, 8), torch.int32),
            ((most_slots + 1, 2), torch.int32),
            ((count + 1,), torch.int32),
            ((most_query_tiles + 1,), torch.int64),
            ((batch.num_ctas, 20), torch.int32),
        )
    ]
    params = params_of(batch, seq_lens, starts, parts, max(q_lens))
    call(params)
    header, _, query_tiles, boundaries, _, cost_begin, _ = parts
    num_slots, num_query_tiles, q_end, section_heads = header.tolist()
    assert q_end == sum(q_lens)
    assert section_heads >= 0
    is_whole = section_heads > 0
    assert not is_whole or batch.num_head_blocks % section_heads == 0
    assert set(query_tiles[num_query_tiles:].flatten().tolist()) == {UNWRITTEN}
    found = [QueryTile(*query_tile) for query_tile in query_tiles[:num_query_tiles].tolist()]
    begins = cost_begin[:num_query_tiles].tolist()
    counts = [len(query_tile.tiles(batch.tile_tokens)) for query_tile in found]
    costs = [count + (_VISIT_COST if count else min(_VISIT_COST, 1)) for count in counts]
    # The scan is of the query tiles as requests list them.
    listed = costs if not is_whole else [costs[i] for i in as_requests_list(found)]
    tile_cost = _VISIT_COST
    if found and not is_whole and not batch.max_splits and len(set(costs)) == 1:
        most = most_slots_of(costs, batch)
        tile_cost = visit_cost(costs, count_whole(len(costs), most))
    listed = [cost - _VISIT_COST + tile_cost for cost in listed]
    assert begins == list(itertools.accumulate(listed, initial=0))[:-1]
    most_parts = 2 * (num_slots + num_query_tiles) + 1
    slot_parts = call.find(params.schedule, batch.tile_tokens, most_parts)
    check_first_items(batch, num_slots, section_heads, slot_parts, parts)
    return Scheduled(
        num_slots,
        is_whole,
        found,
        [(u, t) for u, t in boundaries.tolist()],
        costs,
        tile_cost,
        slot_parts,
    )


def check_first_items(
    batch: Batch,
    num_slots: int,
    section_heads: int,
    slot_parts: list[list[int]],
    parts: list[Tensor],
) -> None:
    """Assert that what CTAs begin with is the first part of their slot, or found by themselves."""
    _, requests, query_tiles, *_, first_items = (part.tolist() for part in parts)
    heads, sections = batch.num_head_blocks, section_heads or batch.num_head_blocks
    # A section's heads of all slots come before the next section's.
    order = [
        slot * heads + begin + head
        for begin in range(0, heads, sections)
        for slot in range(num_slots)
        for head in range(sections)
    ]
    first_parts: dict[int, list[int]] = {}
    for part in slot_parts:
        first_parts.setdefault(part[0], part)
    for cta, (work, slot, index, last, first, begin, end, _, *facts) in enumerate(first_items):
        if cta >= len(order):
            assert work == NO_WORK
            continue
        part = first_parts.get(order[cta] // heads)
        if work == UNKNOWN_WORK:
            # What it begins with has no tiles.
            assert (
                part is None
                or part[2] >= part[3]
                or query_tiles[part[1]][3] <= 0
                or (part[1] != index)
            )
            continue
        assert part is not None
        assert (work, slot, index, begin, end) == (order[cta], *part[:4])
        assert begin < end
        assert index <= last
        query_tile = query_tiles[index]
        assert first == query_tile[2] // batch.tile_tokens
        assert facts == [*query_tile, *requests[query_tile[0]]]


def as_requests_list(query_tiles: list[QueryTile]) -> list[int]:
    """The query tiles in order of their requests, and of one with its last rows first."""
    return sorted(
        range(len(query_tiles)), key=lambda i: (query_tiles[i].request, -query_tiles[i].first_row)
    )


def params_of(
    batch: Batch, seq_lens: Tensor, starts: Tensor, parts: list[Tensor], max_q_len: int
) -> ScheduleParams:
    return ScheduleParams(
        seq_lens=seq_lens.data_ptr(),
        seq_lens_stride=1,
        seq_lens_are_int64=True,
        qo_indptr=starts.data_ptr() if batch.q_lens else None,
        qo_indptr_stride=1,
        schedule=Schedule(*(part.data_ptr() for part in parts)),
        max_kv_len=MAX_KV_LEN,
        batch_size=len(batch.lengths),
        max_q_len=max_q_len,
        is_causal=batch.is_causal,
        window_left=batch.window_left,
        group_size=batch.group_size,
        decode_rows=batch.decode_rows,
        prefill_rows=batch.prefill_rows,
        wave_slots=batch.wave_slots,
        max_waves=batch.max_waves,
        num_ctas=batch.num_ctas,
        num_first_items=batch.num_ctas,
        section_tokens=SECTION_TOKENS,
        num_head_blocks=batch.num_head_blocks,
        tile_tokens=batch.tile_tokens,
        tile_visit_cost=_VISIT_COST,
        min_slot_cost=_MIN_SLOT_COST,
        merge_cost=MERGE_COST,
        split_cost=MERGE_COST,
        max_splits=batch.max_splits,
        min_split_tiles=batch.min_split_tiles,
        splits_go_by_rows=batch.is_causal,
    )


def check(batch: Batch, found: Scheduled) -> None:
    """Assert what the attention kernels rely on, and that the model says the same."""
    num_query_tiles, tile_tokens = len(found.query_tiles), batch.tile_tokens
    check_rows(batch, found)
    parts = parts_of(found)
    for query_tile, tile_parts in zip(found.query_tiles, parts, strict=True):
        # Every tile once; and one slot answers for what sees nothing.
        assert tile_parts
        tiles = query_tile.tiles(tile_tokens)
        assert [tile for _, part in tile_parts for tile in part] == list(tiles)
        assert tiles or len(tile_parts) == 1
    few = batch.max_splits and max(batch.q_lens or (1,)) * batch.group_size <= 64
    may_be_whole = batch.prefill_rows and not few
    assert found.is_whole == bool(
        may_be_whole and suits_whole_query_tiles(found.costs, batch.num_ctas, batch.num_head_blocks)
    )
    if found.is_whole:
        check_whole(batch, found)
        return
    assert found.boundaries[found.num_slots :] == [(num_query_tiles, 0)] * (
        len(found.boundaries) - found.num_slots
    )
    if num_query_tiles == 0:
        assert found.num_slots == 0
        return
    assert found.boundaries[: found.num_slots] == sorted(found.boundaries[: found.num_slots])
    check_rounds(batch, found)
    places: set[tuple[int, bool]] = set()
    for query_tile, found_parts in zip(found.query_tiles, parts, strict=True):
        tiles = query_tile.tiles(tile_tokens)
        if not tiles:
            continue
        slots = [slot for slot, _ in found_parts]
        assert (slots[0], slots[-1]) == (query_tile.first_slot, query_tile.last_slot)
        if batch.max_splits:
            check_splits(batch, query_tile, tiles, found_parts)
        else:
            # Split i lies in slot first_slot + i, and none between is empty.
            assert slots == [*range(query_tile.first_slot, query_tile.last_slot + 1)]
            assert (query_tile.num_splits, query_tile.split_tiles) == (len(slots), 0)
        if len(slots) > 1:
            # Where a query tile's counter and partial rows are: nobody else's.
            kept = {(query_tile.first_slot, True), *((slot, False) for slot in slots[1:])}
            assert not places & kept
            places |= kept


def parts_of(found: Scheduled) -> list[list[tuple[int, range]]]:
    """Slots and tiles of each query tile's parts."""
    parts: list[list[tuple[int, range]]] = [[] for _ in found.query_tiles]
    for slot, index, begin, end, num_splits in found.found:
        # What sees nothing has one split, which is not merged.
        assert num_splits == max(1, found.query_tiles[index].num_splits)
        assert begin <= end
        parts[index].append((slot, range(begin, end)))
    return parts


def check_rows(batch: Batch, found: Scheduled) -> None:
    """Assert that one query tile answers for each row of a request that this kernel serves."""
    want = []
    if not batch.prefill_rows:
        # The decode kernel has one of each request, or none if all rows are the other kernel's.
        q_lens = batch.q_lens or (1,) * len(batch.lengths)
        is_idle = all(
            q_len == 0
            or (q_len > 1 and q_len * batch.group_size > batch.decode_rows and batch.is_valid(i))
            for i, q_len in enumerate(q_lens)
        )
        want = [] if is_idle else [(request, 0) for request in range(len(batch.lengths))]
        assert [(tile.request, tile.first_row) for tile in found.query_tiles] == want
        return
    for request, q_len in enumerate(batch.q_lens or (1,) * len(batch.lengths)):
        is_long = q_len * batch.group_size > batch.decode_rows and (
            q_len > 1 or batch.decode_rows == 0
        )
        if batch.decode_rows < 0 or (is_long and batch.is_valid(request)):
            rows = batch.first_rows(request)
            want += [(request, row) for row in reversed(rows)]
    order = as_requests_list(found.query_tiles) if found.is_whole else range(len(found.query_tiles))
    assert [(found.query_tiles[i].request, found.query_tiles[i].first_row) for i in order] == want


def check_whole(batch: Batch, found: Scheduled) -> None:
    """Assert that slots are query tiles, in the order of their buckets and inside one as listed."""
    assert found.num_slots == len(found.query_tiles)
    assert set(found.boundaries) == {(UNWRITTEN, UNWRITTEN)}
    for slot, query_tile in enumerate(found.query_tiles):
        assert (query_tile.first_slot, query_tile.last_slot) == (slot, slot)
        if batch.max_splits and query_tile.kv_end > 0:
            check_splits(batch, query_tile, query_tile.tiles(batch.tile_tokens), [])
        else:
            assert query_tile.num_splits == 1
    longest = max(found.costs)
    buckets = [bucket_of(cost, longest) for cost in found.costs]
    places = {index: place for place, index in enumerate(as_requests_list(found.query_tiles))}
    order = [(buckets[i], places[i]) for i in range(len(found.query_tiles))]
    assert order == sorted(order)


def check_splits(
    batch: Batch, query_tile: QueryTile, tiles: range, parts: list[tuple[int, range]]
) -> None:
    """Batch-invariant: split lengths go by the position alone, and slots hold whole splits."""
    size = query_tile.split_tiles
    assert query_tile.num_splits == tiles[-1] // size - tiles[0] // size + 1 <= batch.max_splits
    offset = (
        batch.lengths[query_tile.request]
        - (batch.q_lens or {query_tile.request: 1})[query_tile.request]
    )
    last_key = offset + query_tile.first_row // batch.group_size
    if not batch.is_causal:
        last_key = batch.lengths[query_tile.request] - 1
    assert size == batch.split_tiles(max(last_key, 0))
    for _, part in parts[1:]:
        assert part.start % size == 0


def check_rounds(batch: Batch, found: Scheduled) -> None:
    most = most_slots_of(found.costs, batch)
    model = waves_of(found.costs, most, batch.max_waves, batch.max_splits)
    assert found.num_slots == model.num_slots <= batch.wave_slots * batch.max_waves
    if batch.max_splits:
        return
    begins, tile_cost = [0], found.tile_cost
    slot_cost = model.begin(1) // model.width
    whole_tiles = min(WHOLE_TILES, slot_cost // 2) if batch.max_waves > 1 else 0
    for cost in found.costs:
        begins.append(begins[-1] + cost - _VISIT_COST + tile_cost)
    for slot in range(found.num_slots):
        index, tile = found.boundaries[slot]
        position = model.position(slot)
        # A boundary is where its position lies, or the tile after a query tile's fixed cost.
        at = begins[min(index, len(found.query_tiles))]
        if index < len(found.query_tiles):
            tiles = found.query_tiles[index].tiles(batch.tile_tokens)
            if tiles and len(tiles) <= whole_tiles:  # not cut: any of its positions means its begin
                assert tile == tiles.start
                assert at <= position < at + tile_cost + len(tiles)
                continue
            at += (tile - tiles.start + tile_cost) if tile > tiles.start else 0
        assert 0 <= at - position <= tile_cost or (
            at <= position <= at + tile_cost and found.costs[index] > _VISIT_COST
        )


def most_slots_of(costs: list[int], batch: Batch) -> int:
    """The most slots of a wave: of prefill no more than pay for what merging their splits costs."""
    least = _MIN_SLOT_COST
    if batch.prefill_rows and not batch.max_splits:
        least = max(least, math.isqrt(MERGE_COST * max(costs)) // 4)
    return max(1, min(sum(costs) // least, batch.wave_slots))


LENGTHS = st.one_of(
    st.lists(st.integers(-2, 3000), min_size=1, max_size=40),
    st.lists(st.sampled_from((0, 0, 0, 1, 70_000)), min_size=1, max_size=40),
    st.lists(st.sampled_from((100, 3000, MAX_KV_LEN + 1)), min_size=1, max_size=10),
    st.builds(lambda n, count: [n] * count, st.integers(1, 20_000), st.integers(1, 200)),
)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    lengths = tuple(draw(LENGTHS))
    q_lens, prefill_rows, max_splits, decode_rows = None, 0, draw(st.sampled_from((0, 0, 8, 16))), 8
    if draw(st.booleans()):
        sizes = st.sampled_from((0, 1, 2, 3, 40, 100))
        q_lens = tuple(draw(sizes) for _ in lengths)
        prefill_rows = draw(st.sampled_from((0, 64)))
    if max_splits:  # the prefill kernel has all requests, or all that are valid
        prefill_rows = 64
        decode_rows = draw(st.sampled_from((-1, 0))) if q_lens else -1
    has_rounds = not max_splits and not prefill_rows
    return Batch(
        lengths,
        q_lens,
        wave_slots=draw(st.sampled_from((1, 2, 5, 16, 33, 132, 264))),
        max_waves=draw(st.integers(1, MAX_WAVES)) if has_rounds else 1,
        tile_tokens=draw(st.sampled_from((16, 64, 128))),
        max_splits=max_splits,
        window_left=draw(st.sampled_from((-1, -1, 0, 100, 1000))),
        is_causal=draw(st.booleans()),
        group_size=draw(st.sampled_from((1, 4, 8))),
        decode_rows=decode_rows,
        prefill_rows=prefill_rows,
        num_ctas=draw(st.sampled_from((1, 3, 16, 132, 264))),
        num_head_blocks=draw(st.sampled_from((1, 2, 8, 40))),
    )


@random_examples
@given(batches())
def test_every_tile_has_its_slot(on_threads: EmulatedSchedule, batch: Batch) -> None:
    check(batch, schedule(on_threads, batch))


@st.composite
def prefill_batches(draw: st.DrawFn) -> Batch:
    """Of the prefill kernel, whose slots may be whole query tiles."""
    lengths = st.sampled_from((-1, 0, 100, 2000, 2001, 9000, MAX_KV_LEN + 1))
    q_lens = st.sampled_from((0, 1, 2, 40, 100, 100, 1000))
    max_splits = draw(st.sampled_from((0, 0, 2, 16)))
    requests = draw(st.lists(st.tuples(lengths, q_lens), min_size=1, max_size=30))
    if draw(st.booleans()):
        requests = requests[:1] * draw(st.integers(1, 60))
    return Batch(
        tuple(kv_len for kv_len, _ in requests),
        tuple(q_len for _, q_len in requests),
        wave_slots=draw(st.sampled_from((1, 16, 132))),
        max_waves=1,
        max_splits=max_splits,
        decode_rows=draw(st.sampled_from((-1, 0))) if max_splits else 8,
        window_left=draw(st.sampled_from((-1, -1, 100, 1000))),
        is_causal=draw(st.booleans()),
        prefill_rows=draw(st.sampled_from((64, 128))),
        num_ctas=draw(st.sampled_from((1, 16, 132))),
        num_head_blocks=draw(st.sampled_from((1, 8))),
    )


@random_examples
@given(prefill_batches())
def test_every_row_has_its_unit(on_threads: EmulatedSchedule, batch: Batch) -> None:
    check(batch, schedule(on_threads, batch))


@pytest.mark.parametrize(
    ("batch", "num_slots"),
    [
        # Requests that are worth all waves, and some.
        (Batch((10**6, 10**5), wave_slots=16), 16 * 6),
        (Batch((100_000, 90_000), wave_slots=16), 16 * 3),
        # One that is cut evenly.
        (Batch((10**6,), wave_slots=16), 16),
        # Whole ones, claimed one by one at the end.
        (Batch((1000,) * 256, wave_slots=16), 16 * 3),
        # Too little to claim.
        (Batch((3000,), wave_slots=16), 16),
        # Short ones, which are not cut, between others.
        (Batch((500, 300, 130, 1000) * 20, wave_slots=5), 5 * 3),
        (Batch((260, 200) * 50, wave_slots=16, window_left=100), 16),
        (Batch((70_000,) * 3, wave_slots=5), 5 * 5),
        # Requests of one tile: whole ones in each slot, at most a slot each.
        (Batch((17,) * 264, wave_slots=132), 132),
        (Batch((17,) * 120, wave_slots=132), 120),
        (Batch((1000,) * 43, wave_slots=132), 129),
        # Nobody sees anything, but each has to be answered for.
        (Batch((0,) * 300, wave_slots=132), 132),
        (Batch((0, -5, 0)), 3),
        (Batch((10**6, *[0] * 299), wave_slots=132), 132 * 3),
        # All rows fit a wider tile, and one tile of rows has too many for the narrower.
        (Batch((100_000, 90_000), (4, 2), wave_slots=16, decode_rows=16), 16 * 3),
        (Batch((100_000, 90_000), (4, 2), wave_slots=16), 16 * 2),
        (Batch((100_000, 90_000), (4, 4), wave_slots=16), 0),
        # No request is for this kernel.
        (Batch((100, 100), (1, 1), prefill_rows=64, max_waves=1), 0),
    ],
)
def test_some_batches(on_threads: EmulatedSchedule, batch: Batch, num_slots: int) -> None:
    found = schedule(on_threads, batch)
    check(batch, found)
    assert found.num_slots == num_slots


PREFILL = Batch((), wave_slots=16, max_waves=1, prefill_rows=64, num_head_blocks=8)


def prefill(lengths: tuple[int, ...], q_lens: tuple[int, ...], **changes: object) -> Batch:
    return replace(PREFILL, lengths=lengths, q_lens=q_lens, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batch", "is_whole"),
    [
        # Alike: 16 query tiles of a CTA's work_tiles make one pass, which 128 of 132 CTAs fill.
        (prefill((20_000,) * 16, (16,) * 16), True),
        # A pass is filled to 93 % and no less.
        (prefill((20_000,) * 93, (16,) * 93, num_ctas=100, num_head_blocks=1), True),
        (prefill((20_000,) * 92, (16,) * 92, num_ctas=100, num_head_blocks=1), False),
        # The second one is nearly empty.
        (prefill((20_000,) * 17, (16,) * 17), False),
        # Eight full passes make up for it.
        (prefill((20_000,) * 132, (16,) * 132), True),
        (prefill((20_000,) * 133, (16,) * 133), True),
        # A causal prompt, long enough for its longest query tiles to be a part of a CTA's share.
        (prefill((8000,), (8000,)), True),
        (prefill((8000,), (8000,), num_ctas=10**6), False),
        # One query tile takes longer than all CTAs together, however many work tiles there are.
        (prefill((10**6, *[64] * 200), (16,) * 201), False),
        # More query tiles than there is room for boundaries.
        (prefill((1000,) * 300, (100,) * 300), True),
        # Nobody sees anything, but each has to be answered for.
        (prefill((0,) * 16, (16,) * 16), True),
        (prefill((0, -3, 0), (16, 16, 5000), num_ctas=30, num_head_blocks=1), True),
        # Those that the other kernel answers for leave nothing.
        (prefill((100, MAX_KV_LEN + 1), (1, 100)), False),
        # Splits that are fixed do not matter; those of the decode kernel are never whole.
        (prefill((20_000,) * 16, (17,) * 16, max_splits=16, decode_rows=0), True),
        (prefill((20_000,) * 16, (16,) * 16, max_splits=16, decode_rows=0), False),
        (prefill((20_000,) * 16, (2,) * 16, prefill_rows=0), False),
    ],
)
def test_whole_units(on_threads: EmulatedSchedule, batch: Batch, is_whole: bool) -> None:
    found = schedule(on_threads, batch)
    check(batch, found)
    assert found.is_whole == is_whole


def test_whole_units_of_a_causal_prompt_get_shorter(on_host: EmulatedSchedule) -> None:
    found = schedule(on_host, prefill((8000,), (8000,)))
    assert found.costs == sorted(found.costs, reverse=True)


def test_short_units_come_last(on_threads: EmulatedSchedule) -> None:
    lengths = (300, 9000, 20, 9000, 0, 1000)
    found = schedule(on_threads, prefill(lengths, (16,) * 6, num_ctas=2, window_left=-1))
    assert found.is_whole
    assert [query_tile.request for query_tile in found.query_tiles] == [1, 3, 5, 0, 2, 4]


@pytest.mark.parametrize(("case", "changes", "at_least"), IN_WAVES, ids=str)
def test_what_is_run_in_rounds_has_them(
    on_host: EmulatedSchedule,
    monkeypatch: pytest.MonkeyPatch,
    case: Case,
    changes: dict[str, object],
    at_least: int,
) -> None:
    """The decode schedules of tests/gpu/test_claims.py, on a card like an H100."""
    planner = launch_recorder.install(monkeypatch).planner(**case.planner_arguments() | changes)
    kernels = planner.kernels
    config = kernels.schedule_configs(max(case.queries))[-1]
    params = ScheduleParams.from_buffer_copy(config.schedule_params)
    batch = Batch(
        case.lengths,
        case.q_lens,
        wave_slots=params.wave_slots,
        max_waves=params.max_waves,
        tile_tokens=params.tile_tokens,
        window_left=case.window_left,
        group_size=case.group_size,
        decode_rows=params.decode_rows,
    )
    found = schedule(on_host, batch)
    check(batch, found)
    assert found.num_slots == at_least * params.wave_slots


# Offsets as a caller may overwrite them, and of each request its rows, and whether they are NaN.
OUT_OF_ORDER = {
    (5, 2, 3, 6): [(range(2), True), (range(2, 3), True), (range(3, 6), False)],
    (1, 2, 3, 6): [(range(2), True), (range(2, 3), False), (range(3, 6), False)],
    (-1, 2, 3, 6): [(range(2), True), (range(2, 3), False), (range(3, 6), False)],
    (0, 3, 2, 5): [(range(3), False), (range(0), False), (range(2, 5), True)],
    (0, -3, 2, 5): [(range(0), False), (range(2), True), (range(2, 5), False)],
    (0, 2, 4, -6): [(range(2), False), (range(2, 4), False), (range(0), False)],
    (-(2**31), 2**31 - 1, -(2**31), 2**31 - 1): [
        (range(2**31 - 1), True), (range(0), False), (range(2**31 - 1), True)
    ],
    (0, 2**30, 2**30 + 2, 2**30 + 3): [
        (range(2**30), True), (range(0), False), (range(0), False)
    ],
}  # fmt: skip


@pytest.mark.parametrize("offsets", OUT_OF_ORDER, ids=str)
def test_offsets_out_of_order(on_host: EmulatedSchedule, offsets: tuple[int, ...]) -> None:
    """Rows of requests that begin before the one before are NaN, and none lies outside of q."""
    batch = Batch(lengths=(5, 9, 7), q_lens=(2, 2, 2), decode_rows=12)
    parts = [
        torch.full(shape, UNWRITTEN, dtype=dtype)
        for shape, dtype in (
            ((4,), torch.int32), ((3, 4), torch.int32), ((4, 8), torch.int32),
            ((batch.wave_slots * batch.max_waves + 1, 2), torch.int32), ((4,), torch.int32),
            ((4,), torch.int64), ((batch.num_ctas, 20), torch.int32),
        )
    ]  # fmt: skip
    starts = torch.tensor(offsets, dtype=torch.int32)
    seq_lens = torch.tensor(batch.lengths)
    on_host(params_of(batch, seq_lens, starts, parts, 3))
    assert parts[0][2] == max(offsets[-1], 0)
    for (begin, count, _, is_invalid), (rows, is_nan) in zip(
        parts[1].tolist(), OUT_OF_ORDER[offsets], strict=True
    ):
        assert begin >= 0
        assert count == len(rows)
        if count:
            assert (begin, bool(is_invalid)) == (rows.start, is_nan)
