"""Prefix cache of committed blocks: ``PrefixTree``.

A node is a block of committed tokens after those of its parents, with a page for each group, where
there still is one. A block that is full has ``page_size`` tokens; a last one may have fewer. Nodes
are found by SHA-256 over all tokens up to theirs, so that two that differ don't meet.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jitattn.kv.layout import Layout, stale_end
from jitattn.kv.pool import Page

Tokens = NDArray[np.int64]


class Node:
    """A committed block.

    Attributes:
        tokens: int64 [at most page_size].
        key: hash of all tokens up to the last of these.
        parent: the block before; None where it was taken out of the tree.
        pages: for each group, or None where there is none.
        num_tips: open sequences whose last committed full block it is.
    """

    __slots__ = ("_by_first", "is_root", "key", "num_tips", "pages", "parent", "tokens")

    def __init__(self, key: bytes, parent: Node | None, tokens: Tokens, num_groups: int) -> None:
        """Begin without pages and children, not yet found by its parent."""
        self.key = key
        self.parent = parent
        self.tokens = tokens
        self.pages: list[Page | None] = [None] * num_groups
        self.num_tips = 0
        self.is_root = parent is None
        # Few blocks that follow one another begin with the same token.
        self._by_first: dict[int, dict[bytes, Node]] = {}

    def child(self, tokens: Tokens, key: bytes) -> Node | None:
        """Return the child with these tokens."""
        return self._by_first.get(int(tokens[0]), {}).get(key)

    def add(self, node: Node) -> None:
        """Let ``node`` be found."""
        self._by_first.setdefault(int(node.tokens[0]), {})[node.key] = node

    def remove(self, node: Node) -> None:
        """Let ``node`` not be found."""
        first = int(node.tokens[0])
        alike = self._by_first[first]
        del alike[node.key]
        if not alike:
            del self._by_first[first]

    @property
    def has_children(self) -> bool:
        """Whether there is a block after it."""
        return bool(self._by_first)

    def children(self) -> Iterator[Node]:
        """Go through the blocks after it."""
        for alike in self._by_first.values():
            yield from alike.values()

    def alike(self, first: int) -> Iterator[Node]:
        """Go through the blocks after it that begin with a token."""
        yield from self._by_first.get(first, {}).values()


@dataclass(frozen=True, slots=True)
class Match:
    """How much of a prompt the tree has.

    Attributes:
        length: tokens.
        nodes: the block of each page_size tokens of them, the last maybe with more tokens.
        first_blocks: for each group, the first block that is needed after them.
        tip: the last node whose tokens are all among them, or the root.
    """

    length: int
    nodes: tuple[Node, ...]
    first_blocks: tuple[int, ...]
    tip: Node


def hash_block(parent: Node, tokens: Tokens) -> bytes:
    """Return the key of a block after ``parent``."""
    return hashlib.sha256(parent.key + tokens.tobytes()).digest()


class PrefixTree:
    """All blocks that can be had again."""

    def __init__(self, layout: Layout) -> None:
        """Begin empty."""
        self._page_size = layout.page_size
        self._windows = tuple(group.window_left for group in layout.groups)
        self._is_full = tuple(window < 0 for window in self._windows)
        self._roots: dict[bytes, Node] = {}  # by key

    def root(self, scope: str) -> Node:
        """Return the node before the first block, of sequences that may share pages."""
        key = hashlib.sha256(b"scope " + scope.encode()).digest()
        if key not in self._roots:
            self._roots[key] = Node(key, None, np.empty(0, np.int64), len(self._windows))
        return self._roots[key]

    # --- matching

    def match(self, prompt: Tokens, scope: str) -> Match:
        """Return the longest prefix of ``prompt`` whose needed pages are all there."""
        node = self.root(scope)
        nodes: list[Node] = []
        length = 0
        while length + self._page_size <= len(prompt):
            tokens = prompt[length : length + self._page_size]
            child = node.child(tokens, hash_block(node, tokens))
            if child is None:
                break
            nodes.append(child)
            node, length = child, length + self._page_size
        partial, common = _most_alike(node, prompt[length : length + self._page_size])
        if partial is not None:
            nodes.append(partial)
            length += common
        return self._prune(nodes, length, self.root(scope))

    def _prune(self, nodes: list[Node], length: int, root: Node) -> Match:
        """Shorten a match until each group has a page for every block it needs."""
        missing = True
        while missing:
            missing = False
            for group, window in enumerate(self._windows):
                if window < 0:
                    continue  # such a group has a page in every node
                first = stale_end(length, window, self._page_size)
                end = -(-length // self._page_size)
                hole = next((b for b in range(first, end) if nodes[b].pages[group] is None), end)
                if hole < end:
                    length, missing = hole * self._page_size, True
        end, full = -(-length // self._page_size), length // self._page_size
        first_blocks = (stale_end(length, window, self._page_size) for window in self._windows)
        tip = nodes[full - 1] if full else root
        return Match(length, tuple(nodes[:end]), tuple(first_blocks), tip)

    # --- growing

    def insert(
        self, parent: Node, tokens: Tokens, key: bytes, pages: Sequence[Page | None]
    ) -> Node | None:
        """Add a block that isn't there, with those of ``pages`` that no other node has.

        Shorter blocks whose tokens it begins with go.

        Returns:
            Its node, or None where it could never be found: ``parent`` was taken out, or a group
            that keeps all tokens has no page for it.
        """
        own = [None if page is None or page.node is not None else page for page in pages]
        if any(full and page is None for full, page in zip(self._is_full, own, strict=True)):
            return None
        if parent.parent is None and not parent.is_root:
            return None
        node = Node(key, parent, tokens.copy(), len(own))
        self._replace_parts(parent, node)
        parent.add(node)
        for group, page in enumerate(own):
            if page is not None:
                node.pages[group] = page
                page.node = node
        return node

    def insert_part(self, parent: Node, tokens: Tokens, pages: Sequence[Page | None]) -> None:
        """Add a last block that isn't full, unless a block has all of its tokens already."""
        if _most_alike(parent, tokens)[1] < len(tokens):
            node = self.insert(parent, tokens, hash_block(parent, tokens), pages)
            if node is not None:
                self._prune_up(node)  # it may have no pages

    def give(self, node: Node, page: Page) -> None:
        """Let a node have another page, of the same tokens, or one where it had none."""
        old = node.pages[page.group]
        node.pages[page.group] = page
        page.node = node
        if old is not None:
            old.node = None
            old.pool.settle(old)

    def _replace_parts(self, parent: Node, node: Node) -> None:
        """Take out the shorter blocks whose tokens ``node`` begins with."""
        for other in list(parent.alike(int(node.tokens[0]))):
            size = len(other.tokens)
            if size < len(node.tokens) and np.array_equal(other.tokens, node.tokens[:size]):
                self.take_out(other)

    # --- shrinking

    def drop(self, page: Page) -> None:
        """Take a page out of its node, and with it all that can't be found without it."""
        node = page.node
        assert isinstance(node, Node)
        if self._is_full[page.group]:
            self.take_out(node)
            return
        _release(node, page.group)
        self._prune_up(node)

    def leave(self, tip: Node) -> None:
        """Note that a sequence whose last block was ``tip`` goes on or has closed."""
        tip.num_tips -= 1
        self._prune_up(tip)

    def clear(self) -> None:
        """Take out everything; pages that sequences have stay theirs."""
        for root in list(self._roots.values()):
            for node in list(root.children()):
                self.take_out(node)
            root.is_root = False  # what open sequences commit after it is not found either
        self._roots.clear()

    def take_out(self, node: Node) -> None:
        """Take out a node and all after it."""
        parent = node.parent
        below = [node]
        for each in below:
            below.extend(each.children())
        for each in reversed(below):
            assert each.parent is not None
            each.parent.remove(each)
            each.parent = None
            for group in range(len(each.pages)):
                _release(each, group)
        assert parent is not None
        self._prune_up(parent)

    def _prune_up(self, node: Node) -> None:
        """Take out blocks without pages, without blocks after them, and at no one's end."""
        while node.parent is not None and not node.has_children and not node.num_tips:
            if any(page is not None for page in node.pages):
                return
            parent = node.parent
            parent.remove(node)
            node.parent = None
            node = parent
        is_unused = not node.has_children and not node.num_tips
        if is_unused and self._roots.get(node.key) is node:
            del self._roots[node.key]  # else each scope that there ever was would stay


def _release(node: Node, group: int) -> None:
    page = node.pages[group]
    if page is not None:
        node.pages[group] = None
        page.node = None
        page.pool.settle(page)


def _most_alike(parent: Node, tokens: Tokens) -> tuple[Node | None, int]:
    """Return the block after ``parent`` that shares most first tokens, and how many."""
    best: Node | None = None
    most = 0
    if len(tokens):
        for node in parent.alike(int(tokens[0])):
            size = min(len(tokens), len(node.tokens))
            differ = np.flatnonzero(node.tokens[:size] != tokens[:size])
            common = int(differ[0]) if len(differ) else size
            if common > most:
                best, most = node, common
    return best, most
