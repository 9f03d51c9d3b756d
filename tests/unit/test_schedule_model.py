"""The schedule kernel's arithmetic: a model of its rounds, and the template itself on the host.

The model takes its constants from the template and is tied to it by the lines that it transcribes.
Where there is a C++ compiler, templates/schedule.cu.jinja is compiled for the CPU, with one thread,
and what it writes is held against the model and against what the attention kernels rely on.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from jitattn.cuda_plan import _MAX_ROUNDS, _MIN_SLOT_COST, _MIN_SPLIT_TOKENS, _UNIT_COST
from jitattn.params import Schedule, ScheduleParams
from tests.cases import Case
from tests.gpu.test_claims import IN_ROUNDS
from tests.unit import fake_cuda

TEMPLATES = Path(__file__).parents[2] / "templates"
SOURCE = (TEMPLATES / "schedule.cu.jinja").read_text()
random_examples = settings(
    max_examples=300,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


# --- the model ------------------------------------------------------------------------------------


def constants(pattern: str) -> int:
    """The number that ``pattern`` finds in the template, the same wherever it does."""
    (value,) = set(re.findall(pattern, SOURCE))
    return int(value)


MIN_CLAIM = constants(r"kMinClaim = (\d+);")
LATER = constants(r"total_cost / (\d+) >>")  # the part of the cost that later rounds have
SPARE = constants(r"most - most / (\d+);")  # the part of the slots that even units may cost


@dataclass(frozen=True)
class Rounds:
    """``struct Rounds``: how so many positions are dealt to slots."""

    total_cost: int
    width: int
    max_rounds: int
    min_claim: int = MIN_CLAIM

    @property
    def count(self) -> int:
        count = 1
        while (
            count < self.max_rounds
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


def count_whole(num_units: int, most: int) -> int:
    """``count_whole()``: slots of whole units, or whole units of slots."""
    least = most - most // SPARE
    whole = most // num_units * num_units if most >= num_units else most
    while whole >= least and whole < num_units and num_units % whole:
        whole -= 1
    return whole if whole >= least else 0


def rounds_of(costs: list[int], most: int, max_rounds: int, max_splits: int) -> Rounds:
    """The rounds that the kernel deals units of these costs to."""
    total, num_units = sum(costs), len(costs)
    is_alike = not max_splits and all(cost * num_units == total for cost in costs)
    whole = count_whole(num_units, most) if is_alike else 0
    unit_cost = total // num_units if whole else 0
    return Rounds(total, whole or most, max_rounds, max(unit_cost, MIN_CLAIM))


# Who changes one of these in the template has the model to change, too.
TRANSCRIBED = """
while (count < max_count && total_cost / 8 >> (count - 1) >= min_claim * width) {
return width * count;
if (round == 0) return 0;
return round == count ? total_cost : total_cost - (total_cost / 8 >> (round - 1));
const int32_t round = slot / width;
const int64_t first = begin(round), size = begin(min(round + 1, count)) - first;
return first + (slot % width * size + width - 1) / width;
int32_t round = count - 1;
while (position < begin(round)) --round;
const int64_t first = begin(round), size = begin(round + 1) - first;
return round * width + static_cast<int32_t>((position - first) * width / size);
is_same &= (end - cost_begin[index]) * num_units == total_cost;
return __syncthreads_and(is_same);
const int32_t least = most - most / 8;
int32_t whole = most >= num_units ? most / num_units * num_units : most;
while (whole >= least && whole < num_units && num_units % whole != 0) --whole;
return whole >= least ? whole : 0;
const bool is_alike =
    params.max_splits == 0 && num_units > 0 && is_uniform(params, num_units, total_cost);
const int32_t whole = is_alike ? count_whole(num_units, most) : 0;
const int64_t unit_cost = whole ? total_cost / num_units : 0;
const Rounds rounds(total_cost, whole ? whole : most, params.max_rounds,
                    unit_cost > kMinClaim ? unit_cost : kMinClaim);
"""


def test_the_model_is_that_of_the_template() -> None:
    text = " ".join(SOURCE.split())
    for statement in re.split(r"(?<=[;{])\n", TRANSCRIBED.strip()):
        numbers = {"total_cost / 8": f"total_cost / {LATER}", "most / 8": f"most / {SPARE}"}
        wanted = " ".join(statement.split())
        for given_number, number in numbers.items():
            wanted = wanted.replace(given_number, number)
        assert wanted in text, wanted


@st.composite
def rounds(draw: st.DrawFn) -> Rounds:
    width = draw(st.integers(1, 300))
    largest = draw(st.sampled_from((2 * width, 100 * width, 2**22, 2**40)))
    total = draw(st.integers(width, max(largest, width)))
    return Rounds(total, width, draw(st.integers(1, _MAX_ROUNDS)))


@random_examples
@given(rounds())
def test_slots_of_rounds(dealt: Rounds) -> None:
    positions = [dealt.position(slot) for slot in range(dealt.num_slots)]
    ends = [*positions[1:], dealt.total_cost]
    assert positions[0] == 0
    for slot, (position, end) in enumerate(zip(positions, ends, strict=True)):
        assert end > position, "a slot has a position at least"
        # Both ends of a slot, and so all between them, lie in it.
        assert dealt.slot(position) == dealt.slot(end - 1) == slot
    costs = [end - position for position, end in zip(positions, ends, strict=True)]
    of_rounds = [costs[i : i + dealt.width] for i in range(0, len(costs), dealt.width)]
    assert len(of_rounds) == dealt.count <= dealt.max_rounds
    for of_round in of_rounds:
        assert max(of_round) - min(of_round) <= 1
    if dealt.count > 1:
        assert min(costs) >= MIN_CLAIM
    assert 8 * sum(of_rounds[0]) >= 7 * dealt.total_cost
    sums = [sum(of_round) for of_round in of_rounds]
    assert sums == sorted(sums, reverse=True)


def test_more_work_has_more_rounds() -> None:
    counts = [Rounds(total, 132, 6).count for total in range(132, 200_000, 100)]
    assert counts == sorted(counts)
    assert set(counts) == {1, 2, 3, 4, 5, 6}
    # An eighth of the work is worth four positions a slot.
    assert Rounds(8 * 4 * 132 - 1, 132, 6).count == 1
    assert Rounds(8 * 4 * 132, 132, 6).count == 2


@random_examples
@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 10**6))
def test_even_units_get_whole_slots(most: int, num_units: int, cost: int) -> None:
    found = count_whole(num_units, most)
    possible = [
        n
        for n in range(most - most // 8, most + 1)
        if n % num_units == 0 or (n < num_units and num_units % n == 0)
    ]
    assert found == max(possible, default=0)
    costs = [cost] * num_units
    dealt = rounds_of(costs, most, 6, 0)
    assert dealt.width == (found or most)
    if found and dealt.count > 1:
        ends = [dealt.position(slot) for slot in range(found, dealt.num_slots + 1)]
        sizes = [end - begin for begin, end in itertools.pairwise(ends)]
        assert min(sizes) >= cost, "who claims gets as much as a unit at least"
    assert rounds_of(costs, most, 6, 16).width == most
    assert rounds_of([*costs, cost + 1], most, 6, 0).width == most


# --- the template on the host ---------------------------------------------------------------------

# One thread is a warp and a block. What else the template includes is of no device.
HOST = """
#include <cstdint>
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(n)
#define __grid_constant__
#define __shared__ static
struct { int x = 0; } threadIdx;
inline void __syncthreads() {}
inline void __threadfence() {}
inline int __syncthreads_and(int is_so) { return is_so; }
inline int64_t __shfl_up_sync(unsigned, int64_t value, int) { return value; }
inline int32_t min(int32_t a, int32_t b) { return a < b ? a : b; }
inline int32_t max(int32_t a, int32_t b) { return a < b ? b : a; }
namespace jitattn {
constexpr int kWarpSize = 1;
inline void wait_for_previous_kernel() {}
"""
CALL = """
extern "C" void call(const jitattn::ScheduleParams* params) { schedule(*params); }
"""

Call = Callable[[ScheduleParams], None]


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> Call:
    """The schedule kernel, compiled for the CPU."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler, to run the schedule kernel on the CPU")
    types = (TEMPLATES / "include/jitattn/types.cuh").read_text()
    load_integer = types[types.index("__device__ __forceinline__ int64_t load_integer") :]
    headers = [
        (TEMPLATES / f"include/jitattn/{name}.cuh").read_text()
        for name in ("schedule", "schedule_params")
    ]
    kernel = SOURCE.replace("$(num_threads)", "1").replace("$(symbol)", "schedule")
    parts = (HOST, load_integer, *headers, kernel, CALL)
    text = "\n".join(re.sub(r"#include \"|#pragma", r"// \g<0>", part) for part in parts)
    folder = tmp_path_factory.mktemp("schedule")
    source, library = folder / "schedule.cpp", folder / "schedule.so"
    source.write_text(text)
    done = subprocess.run(
        [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-o", library, source],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    function = ctypes.CDLL(str(library)).call

    def call(params: ScheduleParams) -> None:
        function(ctypes.byref(params))

    return call


@dataclass(frozen=True)
class Batch:
    """What is scheduled, and for how many slots; ``prefill_rows`` is 0 for the decode kernel."""

    lengths: tuple[int, ...]
    q_lens: tuple[int, ...] | None = None
    round_slots: int = 132
    max_rounds: int = 6
    tile_tokens: int = 64
    max_splits: int = 0
    window_left: int = -1
    is_causal: bool = True
    group_size: int = 4
    decode_rows: int = 8
    prefill_rows: int = 0


@dataclass(frozen=True)
class Unit:
    """An entry of the schedule: see schedule.cuh."""

    request: int
    first_row: int
    kv_begin: int
    kv_end: int
    first_slot: int
    last_slot: int
    num_splits: int
    split_tiles: int

    def tiles(self, tile_tokens: int) -> range:
        """Those that hold a token which it sees."""
        if self.kv_end <= 0:
            return range(0)
        return range(self.kv_begin // tile_tokens, (self.kv_end - 1) // tile_tokens + 1)


@dataclass(frozen=True)
class Scheduled:
    """What the kernel wrote."""

    num_slots: int
    units: list[Unit]
    boundaries: list[tuple[int, int]]
    costs: list[int]

    def part(self, slot: int, index: int, tile_tokens: int) -> range | None:
        """The tiles of unit ``index`` in ``slot``, as TileRange has them; None: not its business.

        Empty where it answers for a unit without tiles.
        """
        (first_unit, first_tile), (end_unit, end_tile) = self.boundaries[slot : slot + 2]
        unit = self.units[index]
        tiles = unit.tiles(tile_tokens)
        if not tiles:
            return None if index == end_unit else tiles
        begin = first_tile if index == first_unit else tiles.start
        end = end_tile if index == end_unit else tiles.stop
        return range(begin, end) if begin < end else None


def schedule(call: Call, batch: Batch) -> Scheduled:
    count = len(batch.lengths)
    q_lens = batch.q_lens or (1,) * count
    rows = [q_len * batch.group_size for q_len in q_lens]
    most_units = count
    if batch.prefill_rows:
        most_units = sum(-(-n // batch.prefill_rows) for n in rows)
    most_slots = batch.round_slots * batch.max_rounds
    seq_lens = torch.tensor(batch.lengths, dtype=torch.int64)
    starts = torch.tensor([0, *q_lens], dtype=torch.int64).cumsum(0).int()
    parts = [
        torch.full(shape, -77, dtype=dtype)
        for shape, dtype in (
            ((4,), torch.int32),
            ((count, 4), torch.int32),
            ((most_units + 1, 8), torch.int32),
            ((most_slots + 1, 2), torch.int32),
            ((count + 1,), torch.int32),
            ((most_units + 1,), torch.int64),
        )
    ]
    call(params_of(batch, seq_lens, starts, parts, max(q_lens)))
    header, _, units, boundaries, _, cost_begin = parts
    num_slots, num_units, q_end, _ = header.tolist()
    assert q_end == sum(q_lens)
    found = [Unit(*unit) for unit in units[:num_units].tolist()]
    begins = cost_begin[:num_units].tolist()
    costs = [_UNIT_COST + len(unit.tiles(batch.tile_tokens)) for unit in found]
    assert begins == [sum(costs[:i]) for i in range(num_units)]
    return Scheduled(num_slots, found, [(u, t) for u, t in boundaries.tolist()], costs)


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
        max_kv_len=2**30,
        batch_size=len(batch.lengths),
        max_q_len=max_q_len,
        is_causal=batch.is_causal,
        window_left=batch.window_left,
        group_size=batch.group_size,
        decode_rows=batch.decode_rows,
        prefill_rows=batch.prefill_rows,
        round_slots=batch.round_slots,
        max_rounds=batch.max_rounds,
        tile_tokens=batch.tile_tokens,
        unit_cost=_UNIT_COST,
        min_slot_cost=_MIN_SLOT_COST,
        max_splits=batch.max_splits,
        min_split_tiles=max(1, _MIN_SPLIT_TOKENS // batch.tile_tokens),
    )


def check(batch: Batch, found: Scheduled) -> None:
    """Assert what the attention kernels rely on, and that the model says the same."""
    num_units, tile_tokens = len(found.units), batch.tile_tokens
    assert found.boundaries[found.num_slots :] == [(num_units, 0)] * (
        len(found.boundaries) - found.num_slots
    )
    if num_units == 0:
        assert found.num_slots == 0
        return
    assert found.boundaries[: found.num_slots] == sorted(found.boundaries[: found.num_slots])
    check_rounds(batch, found)
    parts: list[list[tuple[int, range]]] = [[] for _ in found.units]
    for slot in range(found.num_slots):
        first, last = found.boundaries[slot][0], found.boundaries[slot + 1][0]
        for index in range(first, min(last, num_units - 1) + 1):
            part = found.part(slot, index, tile_tokens)
            if part is not None:
                parts[index].append((slot, part))
    places: set[tuple[int, bool]] = set()
    for unit, found_parts in zip(found.units, parts, strict=True):
        tiles = unit.tiles(tile_tokens)
        if not tiles:
            assert len(found_parts) == 1, "one slot answers for what sees nothing"
            continue
        assert [tile for _, part in found_parts for tile in part] == list(tiles)
        slots = [slot for slot, _ in found_parts]
        assert (slots[0], slots[-1]) == (unit.first_slot, unit.last_slot)
        if batch.max_splits:
            check_splits(unit, tiles, found_parts)
        else:
            # Split i lies in slot first_slot + i, and none between is empty.
            assert slots == [*range(unit.first_slot, unit.last_slot + 1)]
            assert (unit.num_splits, unit.split_tiles) == (len(slots), 0)
        if len(slots) > 1:
            # Where a unit's counter and partial rows are: nobody else's.
            kept = {(unit.first_slot, True), *((slot, False) for slot in slots[1:])}
            assert not places & kept
            places |= kept


def check_splits(unit: Unit, tiles: range, parts: list[tuple[int, range]]) -> None:
    """Batch-invariant: the lengths of splits go by the unit alone, and slots hold whole ones."""
    size = unit.split_tiles
    assert unit.num_splits == -(-len(tiles) // size) <= 16
    for _, part in parts:
        assert (part.start - tiles.start) % size == 0


def check_rounds(batch: Batch, found: Scheduled) -> None:
    total = sum(found.costs)
    most = max(1, min(total // _MIN_SLOT_COST, batch.round_slots))
    model = rounds_of(found.costs, most, batch.max_rounds, batch.max_splits)
    assert found.num_slots == model.num_slots <= batch.round_slots * batch.max_rounds
    if batch.max_splits:
        return
    begins = [0]
    for cost in found.costs:
        begins.append(begins[-1] + cost)
    for slot in range(found.num_slots):
        index, tile = found.boundaries[slot]
        position = model.position(slot)
        # A boundary is where its position lies, or the tile after a unit's fixed cost.
        at = begins[min(index, len(found.units))]
        if index < len(found.units):
            tiles = found.units[index].tiles(batch.tile_tokens)
            at += (tile - tiles.start + _UNIT_COST) if tile > tiles.start else 0
        assert 0 <= at - position <= _UNIT_COST or (
            at <= position <= at + _UNIT_COST and found.costs[index] > _UNIT_COST
        )


LENGTHS = st.one_of(
    st.lists(st.integers(-2, 3000), min_size=1, max_size=40),
    st.lists(st.sampled_from((0, 0, 0, 1, 70_000)), min_size=1, max_size=40),
    st.builds(lambda n, count: [n] * count, st.integers(1, 20_000), st.integers(1, 200)),
)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    lengths = tuple(draw(LENGTHS))
    q_lens, prefill_rows, max_splits = None, 0, draw(st.sampled_from((0, 0, 16)))
    if draw(st.booleans()):
        sizes = st.sampled_from((0, 1, 2, 3, 40, 100))
        q_lens = tuple(draw(sizes) for _ in lengths)
        prefill_rows = draw(st.sampled_from((0, 64)))
    has_rounds = not max_splits and not prefill_rows
    return Batch(
        lengths,
        q_lens,
        round_slots=draw(st.sampled_from((1, 2, 5, 16, 33, 132, 264))),
        max_rounds=draw(st.integers(1, _MAX_ROUNDS)) if has_rounds else 1,
        tile_tokens=draw(st.sampled_from((16, 64, 128))),
        max_splits=max_splits,
        window_left=draw(st.sampled_from((-1, -1, 0, 100, 1000))),
        is_causal=draw(st.booleans()),
        group_size=draw(st.sampled_from((1, 4, 8))),
        prefill_rows=prefill_rows,
    )


@random_examples
@given(batches())
def test_every_tile_has_its_slot(on_host: Call, batch: Batch) -> None:
    check(batch, schedule(on_host, batch))


@pytest.mark.parametrize(
    ("batch", "num_slots"),
    [
        # Requests that are worth all rounds, and some.
        (Batch((10**6, 10**5), round_slots=16), 16 * 6),
        (Batch((100_000, 90_000), round_slots=16), 16 * 4),
        # One that is cut evenly.
        (Batch((10**6,), round_slots=16), 16),
        # Whole ones, claimed one by one at the end.
        (Batch((1000,) * 256, round_slots=16), 16 * 3),
        # Too little to claim.
        (Batch((3000,), round_slots=16), 16),
        (Batch((70_000,) * 3, round_slots=5), 5 * 6),
        # Requests of one tile: whole ones in each slot, at most a slot each.
        (Batch((17,) * 264, round_slots=132), 132),
        (Batch((17,) * 120, round_slots=132), 120),
        (Batch((1000,) * 43, round_slots=132), 129),
        # Nobody sees anything, but each has to be answered for.
        (Batch((0,) * 300, round_slots=132), 132),
        (Batch((0, -5, 0)), 3),
        (Batch((10**6, *[0] * 299), round_slots=132), 132 * 3),
        # All rows fit a wider tile, and one tile of rows has too many for the narrower.
        (Batch((100_000, 90_000), (4, 2), round_slots=16, decode_rows=16), 16 * 4),
        (Batch((100_000, 90_000), (4, 2), round_slots=16), 16 * 3),
        # No request is for this kernel.
        (Batch((100, 100), (1, 1), prefill_rows=64, max_rounds=1), 0),
    ],
)
def test_some_batches(on_host: Call, batch: Batch, num_slots: int) -> None:
    found = schedule(on_host, batch)
    check(batch, found)
    assert found.num_slots == num_slots


@pytest.mark.parametrize(("case", "changes", "at_least"), IN_ROUNDS, ids=str)
def test_what_is_run_in_rounds_has_them(
    on_host: Call,
    monkeypatch: pytest.MonkeyPatch,
    case: Case,
    changes: dict[str, object],
    at_least: int,
) -> None:
    """The decode schedules of tests/gpu/test_claims.py, on a card like an H100."""
    planner = fake_cuda.install(monkeypatch).planner(**case.planner_arguments() | changes)
    kernels = planner._kernels
    assert kernels is not None
    recipe = kernels.recipes_for(max(case.queries))[0]
    params = ScheduleParams.from_buffer_copy(recipe.schedule_params)
    batch = Batch(
        case.lengths,
        case.q_lens,
        round_slots=params.round_slots,
        max_rounds=params.max_rounds,
        tile_tokens=params.tile_tokens,
        window_left=case.window_left,
        group_size=case.group_size,
        decode_rows=params.decode_rows,
    )
    found = schedule(on_host, batch)
    check(batch, found)
    assert found.num_slots == at_least * params.round_slots
