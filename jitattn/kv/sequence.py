"""A request of the page manager, as its user sees it: ``KVSequence``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jitattn.base.errors import KVCacheError
from jitattn.base.validate import check_count
from jitattn.kv.block_manager import BlockManager, as_int64
from jitattn.kv.layout import LayerGroup
from jitattn.kv.mode import PageIndexMode
from jitattn.kv.state import Scratch, State, Status
from jitattn.spec.config import MAX_KV_LEN


class KVSequence:
    """A request: its tokens in order, and the pages that hold them.

    ``num_committed_tokens <= history_len <= capacity``: committed tokens are final and can be found
    by later sequences; the history has no query in the next step; the capacity has room for the
    tokens of the next step, which are [history_len, capacity).

    A sequence is suspended, active or closed. Made by ``KVCacheManager.create_sequence``; for one
    thread at a time, like its manager.
    """

    __slots__ = ("blocks", "state")  # the manager's own; users need neither

    def __init__(self, blocks: BlockManager, state: State) -> None:
        """Made by a manager or by ``fork``."""
        self.blocks = blocks
        self.state = state

    def __repr__(self) -> str:
        """Show the number, the status and the lengths."""
        state = self.state
        if state.status is Status.CLOSED:
            return f"KVSequence({state.id}, closed)"
        return (
            f"KVSequence({state.id}, {state.status.value}, committed={self.num_committed_tokens}, "
            f"history={self.history_len}, capacity={self.capacity})"
        )

    # --- reading

    @property
    def id(self) -> int:
        """Its number, which no other sequence of the manager has."""
        return self.state.id

    @property
    def is_active(self) -> bool:
        """Whether its pages are on the device, and stay there."""
        return self.state.status is Status.ACTIVE

    @property
    def is_closed(self) -> bool:
        """Whether it has ended."""
        return self.state.status is Status.CLOSED

    @property
    def num_committed_tokens(self) -> int:
        """Tokens that are final."""
        return int(self.blocks.ledger.committed[self._open().row])

    @property
    def history_len(self) -> int:
        """Tokens that have no query in the next step."""
        return int(self.blocks.ledger.history[self._open().row])

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""
        return int(self.blocks.ledger.capacity[self._open().row])

    def base_page_ids(self, group: LayerGroup | int) -> NDArray[np.int32]:
        """Return the slot of each block, int32 [num_pages]; -1 where there is none.

        None is there before the window, in scratch, and while the sequence is suspended.
        """
        state = self._open()
        index = self.blocks.group_index(group)
        ledger = self.blocks.ledger
        ids: NDArray[np.int32] = ledger.ids[index][state.row, : ledger.num_blocks[state.row]]
        return ids.copy()

    def scratch(self, group: LayerGroup | int) -> Scratch | None:
        """Return the scratch blocks and slots of a group, if it has any now."""
        state = self._open()
        scratch = state.scratch[self.blocks.group_index(group)]
        return scratch if state.status is Status.ACTIVE else None

    def supports_index_mode(self, mode: PageIndexMode) -> bool:
        """Say whether tables of ``mode`` can list its pages as they are now."""
        state = self._open()
        if PageIndexMode(mode) is PageIndexMode.PER_LAYER:
            return True
        return not (state.status is Status.ACTIVE and state.has_scratch)

    # --- running and sleeping

    def resume(self) -> bool:
        """Bring its pages to the device and keep them there.

        Returns:
            False where there is no room; nothing has changed then.

        Raises:
            KVCacheError: it is not suspended.
            Exception: what a copy of pages raised; it is suspended then.
        """
        state = self._open()
        if state.status is Status.ACTIVE:
            raise KVCacheError(f"sequence {state.id} is active already: resume one suspended")
        return self.blocks.resume(state)

    def suspend(self) -> None:
        """Let its pages go to the host when others need the room, and its scratch now.

        A step with scratch that has run and whose history isn't declared has to run again.

        Raises:
            KVCacheError: it is not active.
        """
        self.blocks.suspend(self._active("suspend"))

    def close(self) -> None:
        """End it. What it committed can be found by later sequences while there is room.

        Raises:
            KVCacheError: it is closed already.
        """
        self.blocks.close(self._open())

    def fork(self) -> KVSequence:
        """Return a sequence with the same history, as active as this one.

        Pages are shared. The last one, where it isn't full, is copied for the one of the two that
        didn't have it first, when that one makes room for its next token. Its capacity is the
        history: the tokens of this one's next step are not its own.
        """
        return KVSequence(self.blocks, self.blocks.fork(self._open()))

    # --- lengths

    def resize(self, capacity: int | None, history_len: int | None = None) -> bool:
        """Set both lengths at once, and let pages come and go accordingly.

        Args:
            capacity: tokens that there is to be room for; None leaves it.
            history_len: tokens without a query in the next step; None leaves it.

        Returns:
            False where there is no room; nothing has changed then.

        Raises:
            KVCacheError: it is not active, the history shrinks or exceeds the capacity, or pages
                are needed that scratch has taken the place of.
            Exception: what a copy of pages raised, as ``KVCacheManager.advance`` describes.
        """
        state = self._active("resize")
        old = self.history_len, self.capacity
        history = old[0] if history_len is None else _tokens("history_len", history_len)
        capacity = old[1] if capacity is None else _tokens("capacity", capacity)
        if history < old[0]:
            raise KVCacheError(
                f"sequence {state.id} has a history of {old[0]} tokens, which can't shrink to "
                f"{history}"
            )
        if capacity < history:
            raise KVCacheError(
                f"sequence {state.id}: a capacity of {capacity} tokens is less than the history "
                f"of {history}"
            )
        self.blocks.check_lengths(state, capacity, history)
        return self.blocks.set_lengths(state, capacity, history)

    def commit(self, tokens: object) -> None:
        """Say which tokens follow the committed ones: their K and V are written, and are final.

        Blocks that become full can be found by later sequences. History follows.

        Args:
            tokens: integers, [n]: a list, an array or a tensor on the CPU.

        Raises:
            KVCacheError: it is not active, has stopped committing, or there are more tokens than
                capacity.
            TypeError, ValueError: ``tokens`` is something else.
        """
        state = self._active("commit to")
        array = as_int64(tokens)
        committed, capacity = self.num_committed_tokens, self.capacity
        if state.is_stopped:
            raise KVCacheError(f"sequence {state.id} has stopped committing at {committed} tokens")
        after = committed + len(array)
        if after > capacity:
            raise KVCacheError(
                f"sequence {state.id} can't commit {len(array)} tokens after {committed}: its "
                f"capacity is {capacity}"
            )
        self.blocks.check_lengths(state, capacity, max(self.history_len, after))
        self.blocks.commit(state, array)

    def rewind(self, n: int) -> None:
        """Take back the last ``n`` tokens of the capacity, such as drafts that were refused.

        Raises:
            KVCacheError: it is not active, fewer tokens come after the history, or, after a step
                with scratch, ``n`` exceeds ``max_rewind_len``.
        """
        state = self._active("rewind")
        count = _tokens("n", n)
        history, capacity = self.history_len, self.capacity
        if capacity - count < history:
            raise KVCacheError(
                f"sequence {state.id} can't rewind {count} tokens: {capacity - history} of its "
                f"{capacity} come after the history"
            )
        self.blocks.check_lengths(state, capacity - count, history)
        self.blocks.set_lengths(state, capacity - count, history)

    def stop_committing(self) -> None:
        """Commit no more. A last block that isn't full can be found from now on, too."""
        self.blocks.stop(self._open())

    # --- transfers

    def pin(self, group: LayerGroup | int) -> NDArray[np.int32]:
        """Keep the pages that a group has now where they are, until ``unpin``.

        They stay as they are while the window moves on, and when the sequence is suspended or
        closed, so that they can be read by others meanwhile. Scratch is not among them.

        Returns:
            Their slots, int32; ``KVCacheManager.regions`` says where those lie.

        Raises:
            KVCacheError: it is not active, or the group is pinned already.
        """
        state = self._active("pin")
        index = self.blocks.group_index(group)
        if index in state.pins:
            raise KVCacheError(f"sequence {state.id} has pinned group {index} already")
        self.blocks.pin(state, index)
        return np.array([page.slot for page in state.pins[index]], np.int32)

    def unpin(self, group: LayerGroup | int) -> None:
        """Let the pinned pages of a group go their way; the sequence may be closed.

        Raises:
            KVCacheError: the group is not pinned.
        """
        self.blocks.check_open()
        index = self.blocks.group_index(group)
        if index not in self.state.pins:
            raise KVCacheError(f"sequence {self.state.id} has not pinned group {index}")
        self.blocks.unpin(self.state, index)

    # --- what it may do

    def _open(self) -> State:
        self.blocks.check_open()
        if self.state.status is Status.CLOSED:
            raise KVCacheError(f"sequence {self.state.id} is closed")
        return self.state

    def _active(self, what: str) -> State:
        state = self._open()
        if state.status is not Status.ACTIVE:
            raise KVCacheError(f"can't {what} sequence {state.id}: it is suspended")
        return state


def active_states(seqs: Sequence[KVSequence], blocks: BlockManager) -> list[State]:
    """Return the states of sequences that are a manager's own, open and active.

    Raises:
        KVCacheError: one that isn't.
        TypeError: one that is no sequence.
        Exception: what a copy raised that an earlier call had to leave.
    """
    blocks.check_open()
    blocks.make_copies()
    states: list[State] = []
    append, active = states.append, Status.ACTIVE
    for seq in seqs:
        if not isinstance(seq, KVSequence):
            raise TypeError(f"seqs has a {type(seq).__name__}: expected KVSequence")
        state = seq.state
        append(state)
        if state.status is not active or seq.blocks is not blocks:
            whose = "of another manager" if seq.blocks is not blocks else state.status.value
            raise KVCacheError(f"sequence {state.id} is {whose}")
    return states


def _tokens(name: str, value: object) -> int:
    return check_count(name, value, least=0, most=MAX_KV_LEN)
