"""Launch arguments that families share, as kernels lay them out: tables, lists of pages, scales.

Twins: the headers of templates/ that name this module. tests/compile/test_params.py has the
compiler compare both.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_float, c_int32, c_int64, c_uint32, c_void_p
from typing import Any

from jitattn.spec.dtype import DType
from jitattn.spec.layout import AnyLayout, Layout, ListLayout
from jitattn.spec.variant import AttentionVariant, ParamType

# Codes of floating-point types that a caller may choose at launch: FloatCode in types.cuh.
FLOAT_CODES = {d.value: d.float_code for d in DType if d.float_code is not None}


class Divisor(ctypes.Structure):
    """A number to divide by, and what makes that one multiplication and one shift."""

    _fields_ = (("value", c_int32), ("magic", c_uint32), ("shift", c_int32))

    @classmethod
    def of(cls, value: int) -> Divisor:
        """Return ``value``, at least 1, as a divisor of numbers below 2**31."""
        shift = (value - 1).bit_length()
        return cls(value, -(-(1 << (31 + shift)) // value), shift)


class ScaleParams(ctypes.Structure):
    """What a stored value of a KV head is multiplied with: one of ``values``, or ``value``."""

    _fields_ = (("values", c_void_p), ("stride", c_int64), ("value", c_float))


class QueryScaleParams(ctypes.Structure):
    """What a stored query of a token and a head is multiplied with."""

    _fields_ = (
        ("values", c_void_p),
        ("token_stride", c_int64),
        ("head_stride", c_int64),
        ("value", c_float),
    )


class BlockScales(ctypes.Structure):
    """The scales of the blocks of K or V, with the strides of pages, tokens and heads."""

    _fields_ = (
        ("scales", c_void_p),
        ("page_stride", c_int64),
        ("token_stride", c_int64),
        ("head_stride", c_int64),
        ("unused", c_int64 * 12),
    )


class PageList(ctypes.Structure):
    """Where the tokens of requests lie, of any page table layout."""

    _fields_ = (
        ("entries", c_void_p),
        ("rows", c_void_p),
        ("indptr", c_void_p),
        ("row_stride", c_int64),
        ("value_stride", c_int64),
        ("entry_stride", c_int64),
        ("rows_stride", c_int64),
        ("indptr_stride", c_int64),
        ("num_rows", c_int64),
        ("num_entries", c_int64),
        ("page_size", Divisor),
        ("entries_are_int64", c_int32),
        ("rows_are_int64", c_int32),
        ("are_slots", c_int32),
    )


class Lengths(ctypes.Structure):
    """A length of each request."""

    _fields_ = (
        ("values", c_void_p),
        ("stride", c_int64),
        ("are_int64", c_int32),
        ("batch_size", c_int32),
    )


_TABLE_ROWS = (
    ("table", c_void_p),
    ("rows", c_void_p),
    ("row_stride", c_int64),
    ("column_stride", c_int64),
    ("rows_stride", c_int64),
    ("rows_are_int64", c_int32),
)


class RowTableParams(ctypes.Structure):
    """``struct PageTable`` of the layouts "shared" and "token"."""

    _fields_ = _TABLE_ROWS


class SeparateTableParams(ctypes.Structure):
    """``struct PageTable`` of the layout "separate"."""

    _fields_ = (*_TABLE_ROWS, ("kv_stride", c_int64))


class CsrTableParams(ctypes.Structure):
    """``struct PageTable`` of the layout "csr"."""

    _fields_ = (
        ("kv_indptr", c_void_p),
        ("kv_indices", c_void_p),
        ("indptr_stride", c_int64),
        ("indices_stride", c_int64),
        ("num_entries", c_int64),
    )


class RaggedTableParams(ctypes.Structure):
    """``struct PageTable`` of the layout "ragged"."""

    _fields_ = (
        ("kv_indptr", c_void_p),
        ("indptr_stride", c_int64),
        ("num_entries", c_int64),
    )


_LISTS = (
    ("counts", c_void_p),
    ("row_stride", c_int64),
    ("head_stride", c_int64),
    ("count_stride", c_int64),
    ("count_head_stride", c_int64),
    ("num_entries", c_int64),
    ("width", c_int32),
    ("num_count_heads", c_int32),
)


class IndexListParams(ctypes.Structure):
    """``struct PageTable`` of lists of tokens."""

    _fields_ = (*_LISTS, ("slots", c_void_p))


class PageListParams(ctypes.Structure):
    """``struct PageTable`` of lists of pages."""

    _fields_ = (
        *_LISTS,
        ("page_ids", c_void_p),
        ("numbers", c_void_p),
        ("number_row_stride", c_int64),
        ("number_head_stride", c_int64),
    )


PAGE_PARAMS: dict[AnyLayout, type[ctypes.Structure]] = {
    Layout.SHARED: RowTableParams,
    Layout.SEPARATE: SeparateTableParams,
    Layout.CSR: CsrTableParams,
    Layout.TOKEN: RowTableParams,
    Layout.RAGGED: RaggedTableParams,
    ListLayout.INDICES: IndexListParams,
    ListLayout.PAGE_LISTS: PageListParams,
}
TENSOR_MAP_BYTES = 128
"""Of a ``TensorMap``, or of ``BlockScales`` in its place, at a multiple of 64."""


@functools.cache
def table_type(rank: int) -> type[ctypes.Structure]:
    """Return ``VariantTable`` of so many sizes: a tensor that a variant reads."""
    fields = (("values", c_void_p), ("strides", c_int64 * rank), ("sizes", c_int64 * rank))
    return type(f"VariantTable{rank}", (ctypes.Structure,), {"_fields_": fields})


def _variant_field(kind: ParamType) -> type[Any]:
    if kind.sizes:
        return table_type(len(kind.sizes))
    if kind.is_pointer:
        return c_void_p
    return {"float": c_float, "int": c_int32}[kind.element]


@functools.lru_cache(maxsize=256)
def variant_params(variant: AttentionVariant) -> type[ctypes.Structure]:
    """Return ``VariantParams`` of a variant."""
    fields = [(name, _variant_field(kind)) for name, kind in variant.types.items()]
    # An empty struct has a size of its own in C++.
    return type("VariantParams", (ctypes.Structure,), {"_fields_": fields or [("unused", c_int32)]})
