"""Page-table layouts, pairings of rotary embeddings, and loaders of K and V."""

from __future__ import annotations

from enum import StrEnum


class Layout(StrEnum):
    """Layout of a page table."""

    SHARED = "shared"  # [rows, width]: one page id for K and V
    SEPARATE = "separate"  # [rows, 2, width]: row 0 K ids, row 1 V ids
    CSR = "csr"  # kv_indptr and kv_indices: one page id for K and V
    TOKEN = "token"  # [rows, width]: the slot of every token
    RAGGED = "ragged"  # kv_indptr: no pages, the tokens of a request are contiguous

    @property
    def is_list(self) -> bool:
        """Whether only what is listed is seen: never."""
        return False

    @property
    def has_pages(self) -> bool:
        """Whether K and V lie in pages."""
        return self is not Layout.RAGGED

    @property
    def lists_pages(self) -> bool:
        """Whether an entry is a page: those of others are tokens."""
        return self not in (Layout.TOKEN, Layout.RAGGED)

    @property
    def has_offsets(self) -> bool:
        """Whether offsets say where the entries of a request begin, instead of a row."""
        return self in (Layout.CSR, Layout.RAGGED)


class ListLayout(StrEnum):
    """What a list has that query tokens see instead of all tokens of a request."""

    INDICES = "indices"  # [num_tokens, k]: the slots of the tokens that a query token sees
    PAGE_LISTS = "page_lists"  # [batch_size, num_kv_heads, k]: pages, and their numbers

    @property
    def is_list(self) -> bool:
        """Whether only what is listed is seen: always."""
        return True

    @property
    def has_pages(self) -> bool:
        """Whether K and V lie in pages: always."""
        return True

    @property
    def lists_pages(self) -> bool:
        """Whether an entry is a page: those of others are tokens."""
        return self is ListLayout.PAGE_LISTS

    @property
    def has_offsets(self) -> bool:
        """Whether offsets say where the entries of a request begin: never."""
        return False


AnyLayout = Layout | ListLayout
PAGE_TABLES = tuple(layout.value for layout in Layout)
LISTS = tuple(layout.value for layout in ListLayout)


def layout_of(page_table: str) -> AnyLayout:
    """Return the layout that a planner's ``page_table`` names.

    Raises:
        ValueError: it is none.
    """
    return ListLayout(page_table) if page_table in LISTS else Layout(page_table)


class Pairing(StrEnum):
    """Element pairs of a rotary embedding."""

    NONE = "none"  # no embedding
    NEOX = "neox"  # elements i and i + rotary_dim / 2
    INTERLEAVED = "interleaved"  # elements 2 i and 2 i + 1


# Bytes of the segments into which tensor maps cut a row.
SEGMENT_BYTES = 128


class Loader(StrEnum):
    """Loader of K and V into shared memory."""

    TENSOR = "tensor"  # TMA tiles
    VECTOR = "vector"  # 16-byte asynchronous copies; bases and strides are multiples of 16 bytes
    PLAIN = "plain"  # element by element; any alignment
