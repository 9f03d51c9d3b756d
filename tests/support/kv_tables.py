"""Tables that a kernel makes of slots, against those that numpy makes of the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from jitattn import kv
from jitattn.kernels.pages.layer_tables import write_layer_tables
from jitattn.kv.page_ids import make_entries, spread_entries
from jitattn.kv.state import Scratch

GARBAGE = 77
LAYOUTS = ("dense", "transposed", "columns", "layers last")


@dataclass(frozen=True)
class Tables:
    """A call of the kernel: sizes; slots, changes and scratch follow from the seed."""

    batch_size: int
    num_blocks: int
    width: int
    pool_layers: tuple[int, ...]  # pages of the slots of each pool
    first_block: int
    layout: str
    seed: int


@st.composite
def table_calls(draw: st.DrawFn) -> Tables:
    return Tables(
        batch_size=draw(st.integers(0, 6)),
        num_blocks=draw(st.integers(1, 24)),
        width=draw(st.integers(1, 30)),
        pool_layers=tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))),
        first_block=draw(st.integers(0, 8)),
        layout=draw(st.sampled_from(LAYOUTS)),
        seed=draw(st.integers(0, 2**32)),
    )


def blank(shape: Sequence[int], layout: str, device: str) -> Tensor:
    """Garbage of a shape, with other strides than its own."""
    layers, rows, width = shape
    made = {
        "dense": (layers, rows, width),
        "transposed": (layers, width, rows),
        "columns": (layers, rows, 2 * width + 1),
        "layers last": (rows, width, layers),
    }[layout]
    whole = torch.full(made, GARBAGE, dtype=torch.int32, device=device)
    if layout == "transposed":
        return whole.transpose(1, 2)
    if layout == "layers last":
        return whole.permute(2, 0, 1)
    return whole[:, :, 1 : 2 * width : 2] if layout == "columns" else whole


def random_scratch(rng: random.Random, example: Tables) -> list[tuple[int, Scratch]]:
    """Scratch of some requests, in the columns of the tables."""
    found = []
    for i in range(example.batch_size):
        if rng.random() < 0.6:
            start = rng.randrange(example.width)
            stop = rng.randint(start, example.width)
            count = -(-(stop - start) // min(example.pool_layers))
            slots = tuple(rng.randrange(1000) for _ in range(count))
            found.append((i, Scratch(start, stop, slots)))
    return found


def check_layer_tables(example: Tables, device: str) -> None:
    """Tables, and slots after changes, are numpy's; nothing else is written."""
    rng = random.Random(example.seed)
    num_rows = example.batch_size + 3
    before = np.array(
        [[rng.randint(-1, 999) for _ in range(example.num_blocks)] for _ in range(num_rows)],
        np.int32,
    )
    rows = rng.sample(range(num_rows), example.batch_size)
    if example.batch_size > 1 and rng.random() < 0.3:
        rows[-1] = rows[0]  # one that is there twice
    table_rows = rng.sample(range(num_rows), example.batch_size)
    after = before.copy()
    for row in set(rows):
        for block in range(example.num_blocks):
            if rng.random() < 0.3:
                after[row, block] = rng.randint(-1, 999)
    scratches = random_scratch(rng, example)
    layers = [(size, o) for size in example.pool_layers for o in rng.sample(range(size), size)]
    requests, changes, scratch_slots = _arguments(before, after, rows, table_rows, scratches)

    def there(values: object, columns: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device).view(-1, columns)

    tables = blank((len(layers), num_rows, example.width), example.layout, device)
    slots = torch.from_numpy(before).to(device, copy=True)
    write_layer_tables(
        tables,
        slots,
        layers=there(layers, 2),
        requests=there(requests, 7),
        changes=there(changes, 2),
        scratch_slots=there(scratch_slots, 1)[:, 0].contiguous(),
        first_block=example.first_block,
    )
    assert np.array_equal(slots.cpu().numpy(), after)
    wanted = np.full(tables.shape, GARBAGE, np.int32)
    mine = np.full((example.batch_size, example.width), -1, np.int32)
    shared = min(example.width, example.num_blocks)
    mine[:, :shared] = after[rows, :shared]
    for index, (size, offset) in enumerate(layers):
        ids = np.empty_like(mine)
        entries = make_entries(mine, size, scratches)
        entries[:, : example.first_block] = -1
        spread_entries(entries, size, [offset], [ids], has_scratch=True)
        wanted[index, table_rows] = ids
    assert np.array_equal(tables.cpu().numpy(), wanted)


def _arguments(
    before: np.ndarray,
    after: np.ndarray,
    rows: list[int],
    table_rows: list[int],
    scratches: list[tuple[int, Scratch]],
) -> tuple[list[list[int]], list[tuple[int, int]], list[int]]:
    """What the kernel is told of requests."""
    requests, changes, scratch_slots = [], [], []
    own = dict(scratches)
    for i, (row, table_row) in enumerate(zip(rows, table_rows, strict=True)):
        scratch = own.get(i, Scratch(0, 0, ()))
        begins = len(scratch_slots), len(changes)
        scratch_slots += scratch.slot_ids
        blocks = np.flatnonzero(before[row] != after[row]).tolist()
        changes += [(block, int(after[row, block])) for block in blocks]
        whole = [row, table_row, scratch.start, scratch.stop, *begins, len(changes)]
        requests.append(whole)
    return requests, changes, scratch_slots


# --- managers that do the same


def make_manager(
    device: str | None, *, slots: int = 120, reuse_scratch: bool = True
) -> kv.KVCacheManager:
    """Layers with and without a window, in one pool and in two."""
    layers = [
        kv.LayerConfig(layer_id=i, num_kv_heads=heads, head_dim=16, window_left=window)
        for i, (heads, window) in enumerate(
            ((1, 9), (1, -1), (2, 9), (1, 9), (1, -1), (2, 9), (1, 9))
        )
    ]
    slot_bytes = sum(sum(layer.part_bytes(4)) for layer in layers)
    config = kv.KVCacheConfig(
        page_size=4, gpu_bytes=slots * slot_bytes, host_bytes=40 * slot_bytes, layers=layers,
        reuse_scratch=reuse_scratch, max_rewind_len=5, typical_len=48,
    )  # fmt: skip
    return kv.KVCacheManager(config, device=device)


class Twins:
    """A manager whose tables a kernel makes and one whose tables numpy makes."""

    def __init__(self, on_card: kv.KVCacheManager, on_host: kv.KVCacheManager, seed: int) -> None:
        self.managers = on_card, on_host
        self.device = on_card.block_tables([], 0).device
        self.seqs: list[tuple[kv.KVSequence, kv.KVSequence]] = []
        self.rng = random.Random(seed)
        self.counts: dict[str, int] = {}

    def run(self, num_operations: int) -> None:
        for _ in range(num_operations):
            name = self.rng.choice(
                ("create", "create", "resume", "resume", "resize", "resize", "resize", "advance",
                 "advance", "rewind", "fork", "suspend", "close")
            )  # fmt: skip
            if getattr(self, name)():
                self.counts[name] = self.counts.get(name, 0) + 1
            if self.rng.random() < 0.6:
                self.check()

    def pick(self, *, is_active: bool | None) -> int | None:
        fit = [i for i, (seq, _) in enumerate(self.seqs) if is_active in (None, seq.is_active)]
        return self.rng.choice(fit) if fit else None

    def both(self, what: str, *arguments: object, is_active: bool | None = None) -> bool:
        """Do something with a random sequence's two; whether it was done."""
        index = self.pick(is_active=is_active)
        return index is not None and self.both_of(index, what, *arguments)

    def both_of(self, index: int, what: str, *arguments: object) -> bool:
        results = []
        for seq in self.seqs[index]:
            try:
                results.append(getattr(seq, what)(*arguments))
            except kv.KVCacheError as error:
                results.append(str(error))
        if isinstance(results[0], kv.KVSequence):
            self.seqs.append((results[0], results[1]))
            return True
        assert results[0] == results[1]
        if what == "close":
            del self.seqs[index]
        return not isinstance(results[0], str) and results[0] is not False

    def create(self) -> bool:
        if len(self.seqs) > 9:
            return False
        prompt = list(range(self.rng.randrange(40)))
        one, two = (manager.create_sequence(prompt) for manager in self.managers)
        self.seqs.append((one, two))
        return True

    def resume(self) -> bool:
        return self.both("resume", is_active=False)

    def resize(self) -> bool:
        index = self.pick(is_active=True)
        if index is None:
            return False
        more = self.rng.randrange(self.rng.choice((9, 60, 150)))
        return self.both_of(index, "resize", self.seqs[index][0].history_len + more)

    def rewind(self) -> bool:
        return self.both("rewind", self.rng.randrange(6), is_active=True)

    def fork(self) -> bool:
        return len(self.seqs) < 10 and self.both("fork")

    def suspend(self) -> bool:
        return self.both("suspend", is_active=True)

    def close(self) -> bool:
        return self.rng.random() < 0.5 and self.both("close")

    def advance(self) -> bool:
        """Commit all that there is room for, or a token."""
        chosen = [pair for pair in self.seqs if pair[0].is_active and self.rng.random() < 0.7]
        done = False
        for one, two in chosen:
            begin = one.num_committed_tokens
            room = one.capacity - max(begin, one.history_len)
            tokens = [*range(begin, begin + self.rng.choice((0, min(room, 1), room)))]
            results = []
            for manager, seq in zip(self.managers, (one, two), strict=True):
                try:
                    results.append(manager.advance([seq], [tokens]))
                except kv.KVCacheError as error:
                    results.append(str(error))
            assert results[0] == results[1]
            done = done or results[0] == [True]
        return done

    # --- tables

    def check(self) -> None:
        """Compare the tables of some sequences, of a group and of a layer of it."""
        active = [pair for pair in self.seqs if pair[0].is_active]
        chosen = [pair for pair in active if self.rng.random() < 0.7]
        self.rng.shuffle(chosen)
        if chosen and self.rng.random() < 0.1:
            chosen.append(chosen[0])
        group = self.rng.choice(self.managers[0].layer_groups)
        self.check_group(chosen, group.index)
        for layer in group.layer_ids:
            if self.rng.random() < 0.5:
                self.check_layer(chosen, layer)

    def check_group(self, chosen: list[tuple[kv.KVSequence, kv.KVSequence]], group: int) -> None:
        ours, theirs = [one for one, _ in chosen], [two for _, two in chosen]
        found, wanted = (
            manager.block_tables(seqs, group)
            for manager, seqs in zip(self.managers, (ours, theirs), strict=True)
        )
        assert torch.equal(found.cpu(), wanted)
        layers, rows, width = wanted.shape
        shape = layers, rows + self.rng.randrange(3), width + self.rng.randrange(20)
        layout = self.rng.choice(LAYOUTS)
        out, other = blank(shape, layout, str(self.device)), blank(shape, layout, "cpu")
        assert self.managers[0].block_tables(ours, group, out=out) is out
        self.managers[1].block_tables(theirs, group, out=other)
        assert torch.equal(out.cpu(), other)
        self.counts["scratch"] = self.counts.get("scratch", 0) + any(
            seq.scratch(group) is not None for seq in ours
        )

    def check_layer(self, chosen: list[tuple[kv.KVSequence, kv.KVSequence]], layer: int) -> None:
        ours, theirs = [one for one, _ in chosen], [two for _, two in chosen]
        mode = kv.PageIndexMode.PER_LAYER
        if all(seq.supports_index_mode(kv.PageIndexMode.SHARED) for seq in ours):
            mode = self.rng.choice(tuple(kv.PageIndexMode))
        views = [manager.layer_view(layer, mode) for manager in self.managers]
        wanted = views[1].block_table(theirs).table
        assert torch.equal(views[0].block_table(ours).table.cpu(), wanted)
        rows = self.rng.sample(range(len(ours) + 2), len(ours))
        found, wanted = (
            view.block_table(seqs, rows=rows)
            for view, seqs in zip(views, (ours, theirs), strict=True)
        )
        assert torch.equal(found.table.cpu(), wanted.table)
        assert found.rows is not None
        assert found.rows.tolist() == rows
        shape = 1, len(ours) + 2, wanted.table.shape[1] + self.rng.randrange(20)
        layout = self.rng.choice(LAYOUTS)
        out, other = blank(shape, layout, str(self.device))[0], blank(shape, layout, "cpu")[0]
        views[0].block_table(ours, rows=rows, out=out)
        views[1].block_table(theirs, rows=rows, out=other)
        assert torch.equal(out.cpu(), other)


def check_scratch(twins: Twins) -> None:
    """A prompt in chunks: scratch comes, moves, sleeps, returns and goes."""
    for lengths in ((90, 7, 130), (33,)):
        for _ in lengths:
            assert twins.create()
        for pair, length in zip(twins.seqs[-len(lengths) :], lengths, strict=True):
            for seq in pair:
                assert seq.resume()
                assert seq.resize(length)
        for _ in range(3):
            twins.check()
    index = 2
    for what, *arguments in (("rewind", 2), ("suspend",), ("resume",), ("resize", 128, 128)):
        assert twins.both_of(index, what, *arguments) or what in ("rewind", "suspend")
        for group in range(2):
            active = [pair for pair in twins.seqs if pair[0].is_active]
            twins.check_group(active, group)
    assert twins.counts["scratch"] > 4
