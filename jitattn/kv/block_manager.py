"""Pages of sequences that grow, commit, fork, sleep and end: ``BlockManager``.

Every operation first finds out what it needs, without changing anything; then, if that can be had,
it does all of it. Copies of pages are made at its end, in the order in which they were found to be
needed. Those that an error leaves are made before anything else that takes or shows pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from numbers import Integral
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from jitattn.base.errors import KVCacheError
from jitattn.kv.config import KVCacheConfig
from jitattn.kv.layout import LayerGroup, Layout, scratch_range, stale_end
from jitattn.kv.ledger import NEVER, Ledger
from jitattn.kv.pool import Copies, Page, PagePool
from jitattn.kv.prefix_cache import Match, Node, PrefixTree, Tokens, hash_block
from jitattn.kv.state import Change, Scratch, State, Status

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Copier(Protocol):
    """Copies what lies in slots, all of a call before any later work on the stream."""

    def copy(self, slots: int, copies: Copies) -> None:
        """Make copies of the set of slots with this index; after an error, the rest of them."""


def _change(
    method: Callable[Concatenate[BlockManager, _Arguments], _Result],
) -> Callable[Concatenate[BlockManager, _Arguments], _Result]:
    """Note a change while it is made, so that one that an error ends halfway is known."""

    @wraps(method)
    def run(
        self: BlockManager, /, *arguments: _Arguments.args, **options: _Arguments.kwargs
    ) -> _Result:
        outer = self.begin_change(method.__name__)
        found = method(self, *arguments, **options)
        self.begin_change(outer)
        return found

    return run


class BlockManager:
    """All pages, and the sequences that have them.

    Attributes:
        layout: groups and pools.
        pools: for each set of slots.
        ledger: lengths and ids.
        tree: what can be had again.
        states: the open sequences, by id.
        is_closed: whether its manager has ended.
        counts: tokens that new sequences asked for and had, pages copied, by name.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        layout: Layout,
        num_slots: Sequence[int],
        num_host_slots: Sequence[int],
        copier: Copier | None,
    ) -> None:
        """Begin without sequences; without a ``copier`` there is nothing to copy."""
        self.layout = layout
        self.tree = PrefixTree(layout)
        self.pools = [
            PagePool(n, host, self.tree.drop)
            for n, host in zip(num_slots, num_host_slots, strict=True)
        ]
        self.ledger = Ledger(len(layout.groups), layout.page_size)
        self.states: dict[int, State] = {}
        self.counts = {
            "prompt_tokens": 0, "reused_tokens": 0, "copied_pages": 0,
            "offloaded_pages": 0, "reloaded_pages": 0,
        }  # fmt: skip
        self.is_closed = False
        self._max_rewind_len = config.max_rewind_len
        self._page_size = layout.page_size
        self._windows = tuple(group.window_left for group in layout.groups)
        self._pool_of = [self.pools[slots] for slots in layout.slots_of]
        self._copier = copier
        self._owed: deque[tuple[int, Copies]] = deque()  # by index of a set of slots
        self._changing = ""
        self._next_id = 0

    # --- checks

    def check_open(self) -> None:
        """Raise KVCacheError once the manager is closed, or a change was made in part."""
        if self.is_closed:
            raise KVCacheError("the manager is closed")
        if self._changing:
            raise KVCacheError(
                f"an error has ended {self._changing!r} halfway, so that the manager can only be "
                "closed"
            )

    @property
    def is_broken(self) -> bool:
        """Whether an error has ended a change halfway."""
        return bool(self._changing) and not self.is_closed

    def begin_change(self, name: str) -> str:
        """Say what is being changed, "" for nothing; return what was before."""
        before, self._changing = self._changing, name
        return before

    def group_index(self, group: LayerGroup | int) -> int:
        """Return the index of a group, given itself or that.

        Raises:
            ValueError: it is not of this manager.
        """
        groups = self.layout.groups
        if isinstance(group, LayerGroup):
            if group.index < len(groups) and groups[group.index] == group:
                return group.index
        elif (
            isinstance(group, Integral) and not isinstance(group, bool) and 0 <= group < len(groups)
        ):
            return int(group)
        raise ValueError(f"group is {group!r}: the manager has {len(groups)} groups")

    # --- beginning and ending

    def create(self, prompt: Tokens, priority: int, reuse_scratch: bool, scope: str) -> State:
        """Begin a suspended sequence with the longest prefix of ``prompt`` that there is."""
        return self._create(prompt, self.tree.match(prompt, scope), priority, reuse_scratch)

    @_change
    def _create(self, prompt: Tokens, match: Match, priority: int, reuse_scratch: bool) -> State:
        state = self._new_state(match.tip, priority, reuse_scratch)
        for group, first in enumerate(match.first_blocks):
            pages: list[Page | None] = [None] * len(match.nodes)
            for block in range(first, len(match.nodes)):
                page = match.nodes[block].pages[group]
                assert page is not None
                page.holds += 1
                page.pool.raise_priority(page, priority)
                page.pool.settle(page)
                pages[block] = page
            state.pages[group] = pages
            state.first_blocks[group] = first
        self._set_lengths(state, match.length, match.length, match.length)
        part = match.length % self._page_size
        self.ledger.tail[state.row, :part] = prompt[match.length - part : match.length]
        self.counts["prompt_tokens"] += len(prompt)
        self.counts["reused_tokens"] += match.length
        return state

    def _new_state(self, tip: Node, priority: int, reuse_scratch: bool) -> State:
        tip.num_tips += 1
        state = State(
            self._next_id,
            self.ledger.add(),
            priority,
            reuse_scratch,
            tip,
            pages=[[] for _ in self._windows],
            first_blocks=[0] * len(self._windows),
            scratch=[None] * len(self._windows),
        )
        self._next_id += 1
        self.states[state.id] = state
        return state

    @_change
    def close(self, state: State) -> None:
        """End a sequence; what it committed stays for others while there is room."""
        self.stop(state)
        is_active = state.status is Status.ACTIVE
        self._free_scratch(state)
        for pages in state.pages:
            self._leave(reversed(pages), is_active)
        state.status = Status.CLOSED
        self.tree.leave(state.tip)
        del self.states[state.id]
        self.ledger.remove(state.row)
        state.row = -1

    def _leave(self, pages: Iterable[Page | None], is_active: bool) -> None:
        for page in pages:
            if page is not None:
                if is_active:
                    page.locks -= 1
                else:
                    page.holds -= 1
                page.pool.settle(page)

    @_change
    def fork(self, state: State) -> State:
        """Begin a sequence that shares the history of another, and is as active as it."""
        ledger, row = self.ledger, state.row
        child = self._new_state(state.tip, state.priority, state.reuse_scratch)
        history = int(ledger.history[row])
        num_blocks = -(-history // self._page_size)
        is_active = state.status is Status.ACTIVE
        for group, pages in enumerate(state.pages):
            child.pages[group] = shared = pages[:num_blocks]
            child.first_blocks[group] = state.first_blocks[group]
            for page in shared:
                if page is not None:
                    page.locks += is_active
                    page.holds += not is_active
                    page.pool.settle(page)
        child.status, child.is_stopped, child.is_cut = state.status, state.is_stopped, state.is_cut
        ledger.tail[child.row] = ledger.tail[row]
        self._set_lengths(child, int(ledger.committed[row]), history, history)
        if is_active:
            self._show(child)
        return child

    # --- running and sleeping

    def resume(self, state: State) -> bool:
        """Bring all pages to the device and keep them there; False where there is no room.

        Where a copy raises, it is suspended again.
        """
        self.make_copies()
        needed = [0] * len(self.pools)
        own = [0] * len(self.pools)
        reloads = [0] * len(self.pools)
        for group, pages in enumerate(state.pages):
            slots = self.layout.slots_of[group]
            needed[slots] += self._num_scratch(group, state.scratch[group])
            reloads[slots] += sum(page is not None and page.is_on_host for page in pages)
            own[slots] += sum(page is not None and page.queue is not None for page in pages)
        for pool, count, held, more in zip(self.pools, needed, own, reloads, strict=True):
            # Each page that is back has made room on the host for another to go.
            if more + count > pool.takeable_with(0, 0, -held, more):
                return False
            if more and not pool.takeable_with(0, 0, -held):
                return False  # not even the first
        self._resume(state)
        try:
            self.make_copies()
        except BaseException:
            self.suspend(state)
            raise
        return True

    @_change
    def _resume(self, state: State) -> None:
        for page in self._pages(state):
            page.locks += 1
            page.holds -= 1
            page.pool.settle(page)
        self._reload(state)
        for group, scratch in enumerate(state.scratch):
            if scratch is not None:
                ids = tuple(self._pool_of[group].take(self._num_scratch(group, scratch)))
                state.scratch[group] = Scratch(scratch.start, scratch.stop, ids)
        self._order_copies()
        state.status = Status.ACTIVE
        self._show(state)

    def _reload(self, state: State) -> None:
        """Bring the pages back, as many at a time as there is room for those that go instead."""
        waiting: list[list[Page]] = [[] for _ in self.pools]
        for page in self._pages(state):
            if page.is_on_host:
                waiting[self.layout.slots_of[page.group]].append(page)
        for pool, pages in zip(self.pools, waiting, strict=True):
            while pages:
                # All slots before any reload: what is evicted for them must not go where a page
                # comes from.
                for slot in pool.take(max(1, min(len(pages), pool.num_takeable))):
                    pool.reload(pages.pop(), slot)
                self._order_copies()

    def _pages(self, state: State) -> list[Page]:
        return [page for pages in state.pages for page in pages if page is not None]

    def _num_scratch(self, group: int, scratch: Scratch | None) -> int:
        if scratch is None:
            return 0
        return self.layout.num_scratch_slots(group, scratch.stop - scratch.start)

    def _show(self, state: State) -> None:
        """Write all ids of an active sequence into its row."""
        self.ledger.is_active[state.row] = True
        self.ledger.widen(max(len(pages) for pages in state.pages))
        for group, pages in enumerate(state.pages):
            slots = [-1 if page is None else page.slot for page in pages]
            self.ledger.set_ids(group, state.row, slice(len(pages)), slots)

    @_change
    def suspend(self, state: State) -> None:
        """Let the pages go to the host, if there is one, and scratch go."""
        self._free_scratch(state)
        for page in reversed(self._pages(state)):
            page.locks -= 1
            page.holds += 1
            page.pool.settle(page)
        state.status = Status.SUSPENDED
        self.ledger.is_active[state.row] = False
        self.ledger.clear_ids(state.row)

    def _free_scratch(self, state: State) -> None:
        for group, scratch in enumerate(state.scratch):
            if scratch is not None:
                self._pool_of[group].device.free(scratch.slot_ids)
                state.scratch[group] = Scratch(scratch.start, scratch.stop, ())

    def pin(self, state: State, group: int) -> None:
        """Keep the pages that a group now has where they are."""
        self.make_copies()
        self._pin(state, group)

    @_change
    def _pin(self, state: State, group: int) -> None:
        pages = [page for page in state.pages[group] if page is not None]
        for page in pages:
            page.locks += 1
        state.pins[group] = pages

    @_change
    def unpin(self, state: State, group: int) -> None:
        """Let them go their way."""
        for page in reversed(state.pins.pop(group)):
            page.locks -= 1
            page.pool.settle(page)

    # --- lengths

    def check_lengths(self, state: State, capacity: int, history: int) -> None:
        """Raise KVCacheError where pages would be needed that scratch has taken the place of."""
        row, size = state.row, self._page_size
        for group, scratch in enumerate(state.scratch):
            if scratch is None or stale_end(history, self._windows[group], size) >= scratch.stop:
                continue
            old = int(self.ledger.history[row]), int(self.ledger.capacity[row])
            is_seen = history > old[0] and -(-history // size) > scratch.start
            rewound = stale_end(capacity, self._windows[group], size) < scratch.stop
            if is_seen or capacity > old[1] or (capacity < old[1] and rewound):
                raise KVCacheError(
                    f"sequence {state.id} can't go from history {old[0]} and capacity {old[1]} to "
                    f"{history} and {capacity}: blocks {scratch.start} to {scratch.stop - 1} of "
                    f"group {group} are scratch until history has passed what sees them; "
                    f"max_rewind_len is {self._max_rewind_len}"
                )

    def set_lengths(self, state: State, capacity: int, history: int) -> bool:
        """Grow, shrink and evict in one; False, and nothing, where there is no room."""
        self.make_copies()
        if not self._change_lengths(state, capacity, history):
            return False
        self.make_copies([state])
        return True

    @_change
    def _change_lengths(self, state: State, capacity: int, history: int) -> bool:
        if self._is_beyond(state, capacity, history):
            return False
        changes = self._changes(state, capacity, history)
        if not self._fits(state, changes):
            return False
        self._apply(state, changes, capacity, history)
        return True

    def _is_beyond(self, state: State, capacity: int, history: int) -> bool:
        """Whether a group would need more slots than there are, before its blocks are listed."""
        num_new = -(-capacity // self._page_size)
        for group, window in enumerate(self._windows):
            first = stale_end(history, window, self._page_size) if window >= 0 else 0
            more = num_new - max(len(state.pages[group]), first)
            # Scratch takes the least.
            if self.layout.num_scratch_slots(group, more) > self._pool_of[group].device.total:
                return True
        return False

    def _changes(self, state: State, capacity: int, history: int) -> list[Change]:
        size = self._page_size
        num_new = -(-capacity // size)
        written = history // size if capacity > history else num_new
        changes = []
        for group, pages in enumerate(state.pages):
            window, num_old = self._windows[group], len(pages)
            first, start, stop = 0, 0, 0
            if window >= 0:
                first = stale_end(history, window, size)
                if state.reuse_scratch:
                    start, stop = self._scratch_after(state, group, capacity, history)
            gone: list[int] = []
            if first > state.first_blocks[group] or num_new < num_old or start < stop:
                gone = _blocks_that_go(state, group, first, num_new, start, stop)
            new: list[int] = []
            if num_new > num_old:
                new = [b for b in range(max(num_old, first), num_new) if not start <= b < stop]
            copies = [
                block
                for block in range(max(written, first), min(num_old, num_new))
                if not start <= block < stop and not _may_write(state, pages[block])
            ]
            changes.append(Change(gone, new, copies, (start, stop), first))
        return changes

    def _scratch_after(
        self, state: State, group: int, capacity: int, history: int
    ) -> tuple[int, int]:
        """Return the scratch blocks of a windowed group at these lengths, which were checked."""
        window, size = self._windows[group], self._page_size
        old = state.scratch[group]
        if old is not None and stale_end(history, window, size) < old.stop:
            # The step with scratch may have run, and its history is still to be declared.
            return max(old.start, -(-history // size)), old.stop
        start, stop = scratch_range(history, capacity, window, size, self._max_rewind_len)
        if history < int(self.ledger.capacity[state.row]) - self._max_rewind_len:
            start = max(start, len(state.pages[group]))  # pages that may have been written stay
        return start, max(start, stop)

    def _fits(self, state: State, changes: Sequence[Change]) -> bool:
        needed = [0] * len(self.pools)
        for group, change in enumerate(changes):
            more = self._more_scratch(state, group, change)
            needed[self.layout.slots_of[group]] += len(change.new) + len(change.copies) + more
        if all(n <= pool.device.num_free for n, pool in zip(needed, self.pools, strict=True)):
            return True
        freed, dropped, held = ([0] * len(self.pools) for _ in range(3))
        for group, change in enumerate(changes):
            slots = self.layout.slots_of[group]
            for block in change.releases:
                page = state.pages[group][block]
                if page is not None and page.locks == 1:
                    kept = held if page.holds else dropped if page.node is not None else freed
                    kept[slots] += 1
        return all(
            n <= pool.takeable_with(*more)
            for n, pool, *more in zip(needed, self.pools, freed, dropped, held, strict=True)
        )

    def _more_scratch(self, state: State, group: int, change: Change) -> int:
        """Return how many slots more the scratch of a group needs, or with - has left."""
        start, stop = change.scratch
        old = state.scratch[group]
        wanted = self.layout.num_scratch_slots(group, stop - start)
        return wanted - (0 if old is None else len(old.slot_ids))

    def _apply(self, state: State, changes: list[Change], capacity: int, history: int) -> None:
        self.ledger.widen(-(-capacity // self._page_size))
        for group, change in enumerate(changes):
            self._release(state, group, change)
        sources = [
            page
            for group, change in enumerate(changes)
            for page in self._grow(state, group, change)
        ]
        # What was copied may be evicted now, and not before all slots were taken.
        self._leave(sources, is_active=True)
        row = state.row
        self._set_lengths(state, int(self.ledger.committed[row]), history, capacity)
        self._order_copies()

    def _release(self, state: State, group: int, change: Change) -> None:
        """Give up pages, the last first, so that no block outlasts one before it."""
        state.first_blocks[group] = change.first_block
        scratch = state.scratch[group]
        if not change.releases and scratch is None:
            return
        pages = state.pages[group]
        for block in reversed(change.releases):
            page = pages[block]
            assert page is not None
            page.locks -= 1
            page.pool.settle(page)
            pages[block] = None
        if change.releases:
            self.ledger.set_ids(group, state.row, change.releases, -1)
        surplus = -self._more_scratch(state, group, change)
        if scratch is not None:
            kept = len(scratch.slot_ids) - max(surplus, 0)
            self._pool_of[group].device.free(scratch.slot_ids[kept:])
            state.scratch[group] = Scratch(*change.scratch, scratch.slot_ids[:kept])

    def _grow(self, state: State, group: int, change: Change) -> list[Page]:
        """Get the pages of a group; return those that were copied."""
        pool, pages = self._pool_of[group], state.pages[group]
        start, stop = change.scratch
        old = state.scratch[group]
        state.scratch[group] = None
        if start != stop:
            kept = () if old is None else old.slot_ids
            more = self.layout.num_scratch_slots(group, stop - start) - len(kept)
            state.scratch[group] = Scratch(start, stop, (*kept, *pool.take(more)))
        blocks = change.copies + change.new
        if not blocks:
            return []
        slots = pool.take(len(blocks))
        sources = []
        if change.new:
            pages.extend([None] * (change.new[-1] + 1 - len(pages)))
        for block, slot in zip(blocks, slots, strict=True):
            source = pages[block]
            if source is not None:
                pool.copies.duplicates[slot] = source.slot
                sources.append(source)
            pages[block] = Page(pool, group, slot, state.priority, state.id)
        self.ledger.set_ids(group, state.row, blocks, slots)
        return sources

    def _set_lengths(self, state: State, committed: int, history: int, capacity: int) -> None:
        ledger, row, size = self.ledger, state.row, self._page_size
        ledger.committed[row] = committed
        ledger.history[row] = history
        ledger.capacity[row] = capacity
        ledger.num_blocks[row] = num_blocks = -(-capacity // size)
        for pages in state.pages:
            if len(pages) > num_blocks:
                del pages[num_blocks:]
            else:
                pages.extend([None] * (num_blocks - len(pages)))
        next_stale: int = NEVER
        for first, window in zip(state.first_blocks, self._windows, strict=True):
            if window >= 0:
                next_stale = min(next_stale, (first + 1) * size + window)
        ledger.next_stale[row] = next_stale
        ledger.is_slow[row] = state.is_stopped or state.has_scratch

    def _order_copies(self) -> None:
        """Let the copies that were found to be needed follow those before."""
        for slots, pool in enumerate(self.pools):
            if pool.copies:
                copies = pool.take_copies()
                self.counts["offloaded_pages"] += len(copies.offloads)
                self.counts["reloaded_pages"] += len(copies.reloads)
                self.counts["copied_pages"] += len(copies.duplicates)
                if self._copier is not None:
                    self._owed.append((slots, copies))

    def make_copies(self, changed: Sequence[State] = ()) -> None:
        """Make all copies that are needed; those that an error leaves are made the next time.

        Args:
            changed: what an error is to name, as it has changed already.
        """
        while self._owed:
            assert self._copier is not None
            try:
                self._copier.copy(*self._owed[0])
            except BaseException as error:
                if changed:
                    error.add_note(
                        f"sequences {[state.id for state in changed]} have changed as asked; the "
                        "next call copies their pages first"
                    )
                raise
            self._owed.popleft()

    # --- committing

    def commit(self, state: State, tokens: Tokens) -> None:
        """Append final tokens, which fit; history follows."""
        self.make_copies()
        self._commit(state, tokens)

    @_change
    def _commit(self, state: State, tokens: Tokens) -> None:
        history = max(int(self.ledger.history[state.row]), self._after(state, tokens))
        self._append(state, tokens)
        grown = self._change_lengths(state, int(self.ledger.capacity[state.row]), history)
        assert grown, "commit takes no slots"

    def _after(self, state: State, tokens: Tokens) -> int:
        return int(self.ledger.committed[state.row]) + len(tokens)

    def advance(
        self,
        states: Sequence[State],
        rows: NDArray[np.int64],
        flat: NDArray[np.int64],
        counts: NDArray[np.int64],
        is_slow: NDArray[np.bool_],
        num_inputs: int,
    ) -> list[bool]:
        """Commit, evict and make room for many; of those without room nothing changes.

        Args:
            states: different ones.
            rows: theirs in the ledger.
            flat: their tokens, one after the other.
            counts: how many each has.
            is_slow: those whose pages may change.
            num_inputs: tokens that there is to be room for.
        """
        grown = self._advance(states, rows, flat, counts, is_slow, num_inputs)
        if self._owed:
            self.make_copies([state for state, ok in zip(states, grown, strict=True) if ok])
        return grown

    @_change
    def _advance(
        self,
        states: Sequence[State],
        rows: NDArray[np.int64],
        flat: NDArray[np.int64],
        counts: NDArray[np.int64],
        is_slow: NDArray[np.bool_],
        num_inputs: int,
    ) -> list[bool]:
        self.ledger.append(rows, flat, counts, ~is_slow, num_inputs)
        grown = [True] * len(states)
        slow = np.flatnonzero(is_slow).tolist()
        ends = np.cumsum(counts) if slow else counts
        for i in slow:
            tokens = flat[ends[i] - counts[i] : ends[i]]
            grown[i] = self._advance_one(states[i], tokens, num_inputs)
        return grown

    def _advance_one(self, state: State, tokens: Tokens, num_inputs: int) -> bool:
        """Advance one whose pages may change; False, and nothing, without room."""
        row = state.row
        old = int(self.ledger.history[row]), int(self.ledger.capacity[row])
        history = (
            old[0] + len(tokens) if state.is_stopped else max(old[0], self._after(state, tokens))
        )
        capacity = max(old[1], history + num_inputs)
        if self._only_evicts(state, old, capacity):
            self._append(state, tokens)
            self._evict(state, history)
            self._set_lengths(state, int(self.ledger.committed[row]), history, capacity)
            return True
        if self._is_beyond(state, capacity, history):
            return False
        # More than enough spares the first of two looks.
        blocks = (-(-capacity // self._page_size) - len(state.pages[0]) + 1) * len(self._windows)
        has_room = all(blocks <= pool.device.num_free for pool in self.pools)
        if (state.reuse_scratch or not has_room) and not self._fits(
            state, self._changes(state, capacity, history)
        ):
            return False
        if not state.is_stopped:
            self._append(state, tokens)
        # Committing takes no slots, so what was found before holds; which pages it is may not.
        self._apply(state, self._changes(state, capacity, history), capacity, history)
        return True

    def _only_evicts(self, state: State, old: tuple[int, int], capacity: int) -> bool:
        """Whether a step from ``old`` history and capacity needs no page and has no scratch."""
        return (
            not state.reuse_scratch
            and not state.is_stopped
            and old[0] < old[1]  # the last page is one's own
            and capacity <= len(state.pages[0]) * self._page_size
        )

    def _evict(self, state: State, history: int) -> None:
        """Give up the pages that have left a window."""
        for group, window in enumerate(self._windows):
            first = stale_end(history, window, self._page_size)
            begin = state.first_blocks[group]
            if first > begin:
                gone = [b for b in range(begin, first) if state.pages[group][b] is not None]
                self._release(state, group, Change(gone, [], [], (0, 0), first))

    def _append(self, state: State, tokens: Tokens) -> None:
        """Add to the committed tokens; blocks that they fill can be found from now on."""
        ledger, row, size = self.ledger, state.row, self._page_size
        committed, done = int(ledger.committed[row]), 0
        while done < len(tokens):
            at = committed % size
            count = min(size - at, len(tokens) - done)
            ledger.tail[row, at : at + count] = tokens[done : done + count]
            committed, done = committed + count, done + count
            if at + count == size and not state.is_cut:
                self._commit_block(state, committed // size - 1)
        ledger.committed[row] = committed

    def _commit_block(self, state: State, block: int) -> None:
        tokens = self.ledger.tail[state.row]
        key = hash_block(state.tip, tokens)
        node = state.tip.child(tokens, key)
        if node is None:
            node = self.tree.insert(state.tip, tokens, key, [p[block] for p in state.pages])
        else:
            self._rebase(state, block, node)
        if node is None:
            state.is_cut = True
            return
        node.num_tips += 1
        self.tree.leave(state.tip)
        state.tip = node

    def _rebase(self, state: State, block: int, node: Node) -> None:
        """Take the pages that another sequence has committed for the same tokens, or give own."""
        for group, pages in enumerate(state.pages):
            own, theirs = pages[block], node.pages[group]
            if own is None or own is theirs:
                continue
            if own.num_users > 1 and theirs is not None and not theirs.is_on_host:
                # Nothing would be saved, and theirs could be taken no more: committing takes no
                # slots, nor the room for some.
                continue
            if theirs is None or theirs.is_on_host:
                if own.node is None:
                    self.tree.give(node, own)
                continue
            theirs.locks += 1
            theirs.pool.raise_priority(theirs, state.priority)
            theirs.pool.settle(theirs)
            pages[block] = theirs
            self.ledger.set_ids(group, state.row, block, theirs.slot)
            own.locks -= 1
            own.pool.settle(own)

    @_change
    def stop(self, state: State) -> None:
        """Commit no more; the last block, if it isn't full, can be found from now on."""
        if state.is_stopped:
            return
        state.is_stopped = True
        self.ledger.is_slow[state.row] = True
        committed = int(self.ledger.committed[state.row])
        part = committed % self._page_size
        if part and not state.is_cut:
            block = committed // self._page_size
            tokens = self.ledger.tail[state.row, :part]
            self.tree.insert_part(state.tip, tokens, [pages[block] for pages in state.pages])

    @_change
    def clear(self) -> None:
        """Let nothing that was computed so far be found again."""
        self.tree.clear()
        for state in self.states.values():
            state.is_cut = True


def _blocks_that_go(
    state: State, group: int, first: int, num_new: int, start: int, stop: int
) -> list[int]:
    """Return the blocks with pages that are before ``first``, scratch, or after the last one."""
    pages = state.pages[group]
    num_old = len(pages)
    blocks = {
        *range(state.first_blocks[group], min(first, num_old)),
        *range(max(start, first), min(stop, num_old)),
        *range(max(num_new, first), num_old),
    }
    return sorted(block for block in blocks if pages[block] is not None)


def _may_write(state: State, page: Page | None) -> bool:
    if page is None or page.writer == state.id:
        return True
    if page.num_users > 1 or page.node is not None:
        return False
    page.writer = state.id
    return True


def as_int64(values: object) -> Tokens:
    """Return int64 [n] of integers in any container, tensors included.

    Raises:
        TypeError: no integers.
        ValueError: not one dimension, or beyond int64.
    """
    array = np.asarray(values)
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"tokens are {array.dtype}: expected integers")
    if array.ndim != 1:
        raise ValueError(f"tokens have shape {list(array.shape)}: expected one dimension")
    if array.dtype.kind == "u" and int(array.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"tokens have {int(array.max())}: expected numbers of 64 bits with a sign")
    return array.astype(np.int64, copy=False)
