"""A naive model of the page manager, which writes what it should hold and reads it back.

Every token's K and V are numbers that depend on the layer and on all tokens up to it, so that a
page of other tokens, a stale one, one overwritten or copied too late is seen when it is read. The
model shares no code with the manager: what is visible follows from lengths and windows alone.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jitattn import kv
from tests.support.faulty_storage import WHERE, CopyError, faulty

SEED = 1


def chain(before: int, token: int) -> int:
    """What stands for all tokens up to ``token``."""
    return (before * 1_000_003 + token * 7919 + 12345) % (1 << 16)


@dataclass
class Twin:
    """What a sequence should be."""

    seq: kv.KVSequence
    tokens: list[int]  # of the whole history
    committed: int
    capacity: int
    has_scratch: bool
    is_active: bool = False
    is_stopped: bool = False
    inputs: list[int] = field(default_factory=list)  # of the step that was run, after the history
    pins: dict[int, list[tuple[int, np.ndarray]]] = field(default_factory=dict)

    @property
    def history(self) -> int:
        return len(self.tokens)

    def sums(self, upto: int) -> list[int]:
        found, value = [], SEED
        for token in (self.tokens + self.inputs)[:upto]:
            value = chain(value, token)
            found.append(value)
        return found


def shapes(windows: list[int], heads: list[int]) -> list[kv.LayerConfig]:
    return [
        kv.LayerConfig(layer_id=i, num_kv_heads=h, head_dim=1, dtype="float32", window_left=window)
        for i, (window, h) in enumerate(zip(windows, heads, strict=True))
    ]


class Model:
    """A manager on the CPU, and what its sequences should hold."""

    def __init__(
        self,
        layers: list[kv.LayerConfig],
        *,
        page_size: int,
        slots: int,
        host_slots: int,
        reuse_scratch: bool = False,
        max_rewind_len: int = 0,
        kv_layout: str = "NHD",
        fault_rate: float = 0.0,
    ) -> None:
        slot_bytes = sum(2 * 4 * page_size * layer.num_kv_heads for layer in layers)
        self.config = kv.KVCacheConfig(
            page_size=page_size,
            gpu_bytes=slots * slot_bytes,
            host_bytes=host_slots * slot_bytes,
            layers=layers,
            reuse_scratch=reuse_scratch,
            max_rewind_len=max_rewind_len,
            kv_layout=kv_layout,
            typical_len=4 * page_size,
        )
        self.fault_rate = fault_rate
        self.faults = random.Random(SEED)
        with faulty(self.next_fault):
            self.manager = kv.KVCacheManager(self.config, device="cpu")
        self.twins: list[Twin] = []
        self.closed: list[Twin] = []  # with pins
        self.reusable: list[list[int]] = []  # all that was ever committed
        self.page_size = page_size
        self.caches = {
            (layer.layer_id, mode): self.manager.layer_view(layer.layer_id, mode).kv_cache.numpy()
            for layer in layers
            for mode in kv.PageIndexMode
        }
        self.group_of = {i: g for g in self.manager.layer_groups for i in g.layer_ids}
        for cache in self.caches.values():
            cache[...] = -1.0
        self.counts: dict[str, int] = {}

    # --- copies that fail

    def next_fault(self) -> str:
        if not self.fault_rate or self.faults.random() >= self.fault_rate:
            return ""
        self.counts["faults"] = self.counts.get("faults", 0) + 1
        return self.faults.choice(WHERE)

    def attempt(self, call: Callable[[], Any], seqs: list[kv.KVSequence] | None = None) -> Any:
        """Call until no copy fails; return what it returned, or had done when one failed then.

        Args:
            call: an operation.
            seqs: those that may have changed where a copy fails, so that an error names them.
        """
        while True:
            before = [self.snapshot(twin) for twin in self.twins]
            try:
                return call()
            except CopyError as error:
                notes = getattr(error, "__notes__", None)
                if notes is None:
                    assert [self.snapshot(twin) for twin in self.twins] == before
                    continue
                assert seqs is not None
                listed = re.findall(r"\d+", notes[0].partition("]")[0])
                named = {int(number) for number in listed}
                assert named <= {seq.id for seq in seqs}
                self.counts["named"] = self.counts.get("named", 0) + 1
                return [seq.id in named for seq in seqs]

    # --- operations: each takes a source of choices

    def do(self, code: int) -> None:
        """Do the operation that a number stands for, and check everything; 0 is none."""
        if code == 0:
            return
        rng = random.Random(code)
        names = [
            "create", "create", "resume", "resume", "step", "step", "step", "step", "advance",
            "advance", "advance", "grow", "fork", "suspend", "rewind", "stop", "close", "close",
            "pin", "unpin", "misuse", "declare", "declare", "catch_up", "catch_up",
        ]  # fmt: skip
        name = rng.choice(names)
        if rng.random() < 0.004:
            name = "clear"
        done = getattr(self, name)(rng)
        if done is not False:
            self.counts[name] = self.counts.get(name, 0) + 1
        self.check_all()

    def pick(self, rng: random.Random, *, active: bool | None = None) -> Twin | None:
        found = [t for t in self.twins if active is None or t.is_active is active]
        return rng.choice(found) if found else None

    def new_tokens(self, rng: random.Random, count: int) -> list[int]:
        return [rng.randrange(2) for _ in range(count)]

    def create(self, rng: random.Random) -> bool:
        if len(self.twins) >= 8:
            return False
        prompt: list[int] = []
        if self.reusable and rng.random() < 0.8:
            base = rng.choice(self.reusable[-12:])
            prompt = base[: rng.randrange(len(base) + 1)]
        prompt = prompt + self.new_tokens(rng, rng.randrange(self.page_size * 3))
        switch = rng.choice([None, None, None, False]) if self.config.reuse_scratch else None
        seq = self.manager.create_sequence(
            prompt, priority=rng.choice([0, 35, 35, 100]), reuse_scratch=switch
        )
        found = seq.num_committed_tokens
        assert found == seq.history_len == seq.capacity
        assert found <= self.longest_prefix(prompt)
        scratch = self.config.reuse_scratch and switch is None
        self.twins.append(Twin(seq, prompt[:found], found, found, scratch))
        return True

    def longest_prefix(self, prompt: list[int]) -> int:
        longest = 0
        for tokens in self.reusable:
            common = 0
            for a, b in zip(tokens, prompt, strict=False):
                if a != b:
                    break
                common += 1
            longest = max(longest, common)
        return longest

    def resume(self, rng: random.Random) -> bool:
        twin = self.pick(rng, active=False)
        if twin is None:
            return False
        twin.is_active = self.attempt(twin.seq.resume)
        if twin.is_active:
            self.read(twin, twin.history)
        return twin.is_active

    def suspend(self, rng: random.Random) -> bool:
        twin = self.pick(rng, active=True)
        if twin is None:
            return False
        twin.seq.suspend()
        twin.is_active = False
        if twin.has_scratch:
            twin.inputs = []  # has to run again
        assert (twin.seq.base_page_ids(0) == -1).all()
        return True

    def grow(self, rng: random.Random) -> bool:
        twin = self.pick(rng, active=True)
        if twin is None or twin.inputs:
            return False
        target = twin.history + rng.randrange(self.page_size * 8)
        return self.resize(twin, target, twin.history)

    def resize(self, twin: Twin, capacity: int, history: int) -> bool:
        before = self.snapshot(twin)
        stats = self.manager.stats()
        room = [pool.free + pool.reusable for pool in stats.pools]
        try:
            grown = self.attempt(lambda: twin.seq.resize(capacity, history), [twin.seq])
            assert grown != [False]
        except kv.KVCacheError:
            assert twin.has_scratch
            assert self.snapshot(twin) == before
            return False
        if grown:
            twin.capacity = capacity
        else:
            assert self.snapshot(twin) == before
            more = -(-capacity // self.page_size) - -(-twin.capacity // self.page_size) + 1
            assert min(room) < more * len(self.manager.layer_groups), "refused without need"
        return grown

    def snapshot(self, twin: Twin) -> object:
        seq = twin.seq
        ids = [tuple(seq.base_page_ids(group)) for group in self.manager.layer_groups]
        scratch = [seq.scratch(group) for group in self.manager.layer_groups]
        return seq.num_committed_tokens, seq.history_len, seq.capacity, ids, scratch

    def step(self, rng: random.Random) -> bool:
        """Run the tokens after the history; take some of them."""
        twin = self.pick(rng, active=True)
        if twin is None:
            return False
        if not twin.inputs:
            if twin.capacity == twin.history and not self.resize(
                twin, twin.history + 1 + rng.randrange(self.page_size * 10), twin.history
            ):
                return False
            self.run(twin, self.new_tokens(rng, twin.capacity - twin.history))
        taken = len(twin.inputs)
        if rng.random() < 0.3:
            taken = rng.randrange(len(twin.inputs) + 1)
        return self.take(twin, taken)

    def run(self, twin: Twin, inputs: list[int]) -> None:
        """What the kernels of a step do: layer by layer write the inputs and read what is seen."""
        twin.inputs = inputs
        if any(map(twin.seq.scratch, self.manager.layer_groups)):
            self.counts["scratch"] = self.counts.get("scratch", 0) + 1
        mode = kv.PageIndexMode.PER_LAYER
        if twin.seq.supports_index_mode(kv.PageIndexMode.SHARED) and len(inputs) % 2:
            mode = kv.PageIndexMode.SHARED
        sums = twin.sums(twin.capacity)
        for layer in self.config.layers:
            self.write(twin, layer, mode, sums)
            self.read_layer(twin, layer, mode, sums)

    def take(self, twin: Twin, count: int) -> bool:
        """Commit or declare the first inputs."""
        new = twin.inputs[:count]
        before = self.snapshot(twin)
        try:
            if twin.is_stopped or twin.committed < twin.history:
                grown = self.resize(twin, twin.capacity, twin.history + count)
                if not grown:
                    return False
            else:
                self.attempt(lambda: twin.seq.commit(new))
                twin.committed += count
        except kv.KVCacheError:
            assert twin.has_scratch
            assert count < len(twin.inputs)
            assert self.snapshot(twin) == before
            return False
        twin.tokens += new
        twin.inputs = twin.inputs[count:]
        if twin.has_scratch and count:
            twin.inputs = []
        if count and not twin.is_stopped:
            self.reusable.append(twin.tokens[: twin.committed])
        return True

    def declare(self, rng: random.Random) -> bool:
        """Let the history pass inputs that are not committed yet."""
        twin = self.pick(rng, active=True)
        if twin is None or not twin.inputs or twin.is_stopped:
            return False
        before = self.snapshot(twin)
        try:
            history = twin.history + len(twin.inputs)
            assert self.attempt(lambda: twin.seq.resize(None, history), [twin.seq])
        except kv.KVCacheError:
            assert self.snapshot(twin) == before
            return False
        twin.tokens += twin.inputs
        twin.inputs = []
        return True

    def catch_up(self, rng: random.Random) -> bool:
        """Commit what was declared history before."""
        late = [t for t in self.twins if t.is_active and t.committed < t.history]
        late = [t for t in late if not t.is_stopped]
        if not late:
            return False
        twin = rng.choice(late)
        before = self.snapshot(twin)
        new = twin.tokens[twin.committed : twin.committed + rng.randrange(1, 4)]
        try:
            if rng.random() < 0.5:
                self.attempt(lambda: twin.seq.commit(new))
            else:
                (grown,) = self.advance_all([twin.seq], [new], 1)
                if not grown:
                    assert self.snapshot(twin) == before
                    return False
                if twin.capacity == twin.history:
                    twin.capacity += 1
                    twin.inputs = []
        except kv.KVCacheError:
            assert twin.has_scratch
            assert self.snapshot(twin) == before
            return False
        twin.committed += len(new)
        self.reusable.append(twin.tokens[: twin.committed])
        return True

    def advance(self, rng: random.Random) -> bool:
        """Decode steps of many sequences at once."""
        chosen = [
            twin
            for twin in self.twins
            if twin.is_active
            and (twin.committed == twin.history or twin.is_stopped)
            and not (twin.has_scratch and any(map(twin.seq.scratch, self.manager.layer_groups)))
            and rng.random() < 0.8
        ]
        chosen = [t for t in chosen if t.inputs or self.prepare(t, rng)]
        if not chosen:
            return False
        rng.shuffle(chosen)
        width = rng.choice([1, 1, 1, 2])
        if min(len(twin.inputs) for twin in chosen) < width:
            width = 1
        news = [twin.inputs[:width] for twin in chosen]
        given: object = [new[0] for new in news] if width == 1 else news
        num_inputs = rng.choice([1, 1, 3])
        before = [self.snapshot(twin) for twin in chosen]
        grown = self.advance_all([twin.seq for twin in chosen], given, num_inputs)
        for twin, new, old, done in zip(chosen, news, before, grown, strict=True):
            if not done:
                assert self.snapshot(twin) == old
                continue
            twin.tokens += new
            twin.inputs = twin.inputs[width:]
            if not twin.is_stopped:
                twin.committed += width
                self.reusable.append(twin.tokens[: twin.committed])
            twin.capacity = max(twin.capacity, twin.history + num_inputs)
            if twin.capacity > twin.history + len(twin.inputs):
                twin.inputs = []
        return any(grown)

    def advance_all(self, seqs: list[kv.KVSequence], new: object, num_inputs: int) -> list[bool]:
        found = self.attempt(lambda: self.manager.advance(seqs, new, num_inputs=num_inputs), seqs)
        assert isinstance(found, list)
        return found

    def prepare(self, twin: Twin, rng: random.Random) -> bool:
        if twin.capacity == twin.history and not self.resize(
            twin, twin.history + 1 + rng.randrange(2), twin.history
        ):
            return False
        self.run(twin, self.new_tokens(rng, twin.capacity - twin.history))
        return True

    def fork(self, rng: random.Random) -> bool:
        twin = self.pick(rng)
        if twin is None or len(self.twins) >= 8:
            return False
        child = Twin(
            twin.seq.fork(), list(twin.tokens), twin.committed, twin.history, twin.has_scratch,
            is_active=twin.is_active, is_stopped=twin.is_stopped,
        )  # fmt: skip
        self.twins.append(child)
        if child.is_active:
            self.read(child, child.history)
        return True

    def rewind(self, rng: random.Random) -> bool:
        twin = self.pick(rng, active=True)
        if twin is None or twin.capacity == twin.history:
            return False
        count = rng.randrange(twin.capacity - twin.history + 1)
        before = self.snapshot(twin)
        try:
            self.attempt(lambda: twin.seq.rewind(count), [twin.seq])
        except kv.KVCacheError:
            assert twin.has_scratch
            assert count > self.config.max_rewind_len
            assert self.snapshot(twin) == before
            return False
        twin.capacity -= count
        twin.inputs = twin.inputs[: twin.capacity - twin.history]
        return True

    def stop(self, rng: random.Random) -> bool:
        twin = self.pick(rng)
        if twin is None or rng.random() < 0.5:
            return False
        twin.seq.stop_committing()
        twin.is_stopped = True
        return True

    def close(self, rng: random.Random) -> bool:
        twin = self.pick(rng)
        if twin is None:
            return False
        self.finish(twin)
        return True

    def finish(self, twin: Twin) -> None:
        twin.seq.close()
        self.twins.remove(twin)
        if twin.pins:
            self.closed.append(twin)

    def pin(self, rng: random.Random) -> bool:
        twin = self.pick(rng, active=True)
        group = rng.choice(self.manager.layer_groups)
        if twin is None or group.index in twin.pins:
            return False
        blocks = [b for b, i in enumerate(twin.seq.base_page_ids(group)) if i >= 0]
        ids = self.attempt(lambda: twin.seq.pin(group))
        full = [
            i for i, b in zip(ids, blocks, strict=True) if (b + 1) * self.page_size <= twin.history
        ]
        layer = group.layer_ids[0]
        cache = self.caches[layer, kv.PageIndexMode.SHARED]
        twin.pins[group.index] = [(int(i), cache[i].copy()) for i in full]
        return True

    def unpin(self, rng: random.Random) -> bool:
        pinned = [t for t in (*self.twins, *self.closed) if t.pins]
        if not pinned:
            return False
        self.unpin_one(rng.choice(pinned))
        return True

    def unpin_one(self, twin: Twin) -> None:
        index, pages = twin.pins.popitem()
        layer = self.manager.layer_groups[index].layer_ids[0]
        for i, content in pages:
            np.testing.assert_array_equal(self.caches[layer, kv.PageIndexMode.SHARED][i], content)
        twin.seq.unpin(index)
        if not twin.pins and twin in self.closed:
            self.closed.remove(twin)

    def clear(self, rng: random.Random) -> bool:
        self.manager.clear_reusable()
        self.reusable.clear()
        # What the open ones commit from now on isn't found.
        for twin in self.twins:
            twin.is_stopped = True
            twin.seq.stop_committing()
        return True

    def misuse(self, rng: random.Random) -> bool:
        """Each is refused, and nothing changes."""
        twin = self.pick(rng)
        if twin is None:
            return False
        before = self.snapshot(twin)
        seq = twin.seq
        wrongs = [
            lambda: seq.commit([0] * (twin.capacity - twin.committed + 1)),
            lambda: seq.rewind(twin.capacity - twin.history + 1),
            lambda: seq.resize(twin.capacity, twin.capacity + 1),
            lambda: self.manager.advance([seq], [[0] * (twin.capacity + 1)]),
            lambda: self.manager.advance([seq, seq], [0, 0]),
        ]
        if twin.history:
            wrongs.append(lambda: seq.resize(twin.capacity, twin.history - 1))
        wrongs.append(seq.resume if twin.is_active else seq.suspend)
        try:
            self.attempt(rng.choice(wrongs))
        except kv.KVCacheError as error:
            assert str(seq.id) in str(error) or "twice" in str(error)
        else:
            raise AssertionError("not refused")
        assert self.snapshot(twin) == before
        return True

    # --- contents

    def table(self, twin: Twin, layer: int, mode: kv.PageIndexMode) -> np.ndarray:
        view = self.manager.layer_view(layer, mode)
        return self.attempt(lambda: view.block_table([twin.seq])).table.numpy()[0]

    def values(self, layer: kv.LayerConfig, sums: list[int], first: int, end: int) -> np.ndarray:
        heads = np.arange(layer.num_kv_heads)
        base = np.array(sums[first:end], np.float32) * 32 + layer.layer_id * 4
        return base[:, None] + heads[None] / 4  # [tokens, heads]

    def where(self, table: np.ndarray, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        at = np.arange(first, end)
        pages = table[at // self.page_size]
        assert (pages >= 0).all(), "a token that is seen has no page"
        return pages, at % self.page_size

    def cells(self, cache: np.ndarray, which: int, pages: np.ndarray, places: np.ndarray) -> tuple:
        if self.config.kv_layout == "NHD":
            return (pages, which, places, slice(None), 0)
        return (pages, which, slice(None), places, 0)

    def write(
        self, twin: Twin, layer: kv.LayerConfig, mode: kv.PageIndexMode, sums: list[int]
    ) -> None:
        table = self.table(twin, layer.layer_id, mode)
        pages, places = self.where(table, twin.history, twin.capacity)
        values = self.values(layer, sums, twin.history, twin.capacity)
        cache = self.caches[layer.layer_id, mode]
        for which in (0, 1):
            cache[self.cells(cache, which, pages, places)] = values + which

    def read_layer(
        self, twin: Twin, layer: kv.LayerConfig, mode: kv.PageIndexMode, sums: list[int]
    ) -> None:
        """Read all that a query at the end of history or later can see of what is written."""
        first = 0
        if layer.window_left >= 0:
            first = max(0, twin.history - layer.window_left)
        end = len(sums)
        if end <= first:
            return
        table = self.table(twin, layer.layer_id, mode)
        pages, places = self.where(table, first, end)
        cache = self.caches[layer.layer_id, mode]
        for which in (0, 1):
            found = cache[self.cells(cache, which, pages, places)]
            np.testing.assert_array_equal(found, self.values(layer, sums, first, end) + which)

    def read(self, twin: Twin, end: int) -> None:
        sums = twin.sums(end)
        for layer in self.config.layers:
            self.read_layer(twin, layer, kv.PageIndexMode.PER_LAYER, sums)

    # --- what holds always

    def check_all(self) -> None:
        stats = self.manager.stats()
        owners: dict[tuple[object, int], tuple[int, int, list[int]]] = {}
        scratch: set[tuple[object, int]] = set()
        sizes = self.set_of_group()
        for twin in self.twins:
            seq = twin.seq
            assert seq.num_committed_tokens == twin.committed
            assert seq.history_len == twin.history
            assert seq.capacity == twin.capacity
            assert seq.is_active is twin.is_active
            for group in self.manager.layer_groups:
                self.check_blocks(twin, group, sizes[group.index], owners, scratch)
        assert not scratch & set(owners), "a page is scratch, too"
        pinned = {
            (sizes[g], i)
            for t in (*self.twins, *self.closed)
            for g, pages in t.pins.items()
            for i, _ in pages
        }
        for index, pool in enumerate(stats.pools):
            assert pool.total == pool.used + pool.held + pool.reusable + pool.free
            seen = {key for key in set(owners) | scratch | pinned if key[0] == index}
            assert pool.used >= len(seen)
            if not pinned and not any(t.pins for t in (*self.twins, *self.closed)):
                assert pool.used == len(seen), "a slot is owned by none"
        assert stats.num_sequences == len(self.twins)

    def set_of_group(self) -> list[int]:
        """Which set of slots each group has: by the bytes of its slots."""
        keys = []
        for group in self.manager.layer_groups:
            keys.append(tuple(region.slot_bytes for region in self.manager.regions(group)))
        order = list(dict.fromkeys(keys))
        return [order.index(key) for key in keys]

    def check_blocks(self, twin, group, which, owners, scratch) -> None:  # type: ignore[no-untyped-def]
        ids = twin.seq.base_page_ids(group)
        assert len(ids) == -(-twin.capacity // self.page_size)
        if not twin.is_active:
            assert (ids == -1).all()
            return
        first = 0
        if group.window_left >= 0:
            first = max(0, twin.history - group.window_left) // self.page_size
        turns = twin.seq.scratch(group)
        own: set[int] = set()
        for block, slot in enumerate(ids.tolist()):
            is_turn = turns is not None and turns.start <= block < turns.stop
            assert (slot >= 0) == (block >= first and not is_turn)
            if slot < 0:
                continue
            assert slot not in own, "a page twice in one sequence"
            own.add(slot)
            past = twin.tokens[: (block + 1) * self.page_size]
            other = owners.setdefault((which, slot), (group.index, block, past))
            assert other[:2] == (group.index, block), "a page has two owners"
            common = min(len(other[2]), len(past))
            assert other[2][:common] == past[:common], "a page of other tokens"
        if turns is not None:
            for slot in turns.slot_ids:
                assert (which, slot) not in scratch, "scratch has two owners"
                scratch.add((which, slot))

    def end(self) -> None:
        """Close everything: nothing may be left."""
        for twin in list(self.twins):
            self.finish(twin)
        while self.closed:
            self.unpin_one(self.closed[-1])
        stats = self.manager.stats()
        for pool in stats.pools:
            assert pool.used == pool.held == pool.host_held == 0
        self.manager.clear_reusable()
        for pool in self.manager.stats().pools:
            assert pool.free == pool.total, "a slot leaked"
            assert pool.host_reusable == pool.host_held == 0, "a slot of the host leaked"
        self.manager.close()
