"""Attention specs that stand for all: every pair of field values that can meet does."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from jitattn.kernels.attention.config import specs_of_loaders
from jitattn.kernels.attention.spec import DecodeSpec, PrefillSpec
from jitattn.kernels.attention.tile import row_tile_for
from jitattn.spec.arch import ARCHS, check_arch
from jitattn.spec.config import HEAD_DIMS
from jitattn.spec.dtype import BYTE_DTYPES, DType
from jitattn.spec.layout import Layout, Loader

# The values from which the compile tests draw. Page sizes stand for their kind: one token, odd,
# smaller than a warp's slice, a multiple of it that is no power of two, powers of two.
SAMPLE: dict[str, tuple[object, ...]] = {
    "head_dim": HEAD_DIMS,
    "head_dim_vo": (None, 64, 128, 256),  # None: head_dim
    "page_size": (1, 3, 8, 16, 48, 64, 128),
    "row_tile": (8, 16, 32, None),  # None: the prefill kernel
    "q_dtype": (DType.BFLOAT16, DType.FLOAT16),
    # None: q_dtype. Blocks of int4 stand for those of 32 and 64 elements.
    "kv_dtype": (None, *map(DType, (*BYTE_DTYPES, DType.NVFP4, DType.INT4))),
    "out_dtype": (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32),
    "page_table": tuple(Layout),
    "is_aligned": (True, False),
    "use_logits_soft_cap": (False, True),
    "use_custom_mask": (False, True),
}


def sample_specs(arch: str) -> list[DecodeSpec | PrefillSpec]:
    """Return attention specs in which every pair of field values that can meet does meet."""
    check_arch(arch)
    names = list(SAMPLE)
    wanted = {
        pair
        for a, b in itertools.combinations(names, 2)
        for pair in itertools.product(((a, x) for x in SAMPLE[a]), ((b, y) for y in SAMPLE[b]))
        if _can_meet(dict(pair))
    }
    rows = []
    while wanted:
        row = _greedy_row(wanted)
        wanted -= set(_pairs(row))
        rows.append(_spec_of(row, arch))
    return rows + _missing_tensor_loaders(rows, arch)


def _missing_tensor_loaders(
    specs: list[DecodeSpec | PrefillSpec], arch: str
) -> list[DecodeSpec | PrefillSpec]:
    """Return specs whose caches TMA loads, of head dims without one: three fields decide it."""
    plain = {name: values[0] for name, values in SAMPLE.items()}
    plain |= {"page_size": 16, "row_tile": None, "page_table": Layout.SHARED}
    found = [_spec_of(plain | {"head_dim": dim}, arch) for dim in HEAD_DIMS if dim % 64 == 0]
    known = {spec.head_dim for spec in specs if spec.loader is Loader.TENSOR}
    return [s for s in found if s.loader is Loader.TENSOR and s.head_dim not in known]


def _greedy_row(wanted: set[tuple[tuple[str, object], tuple[str, object]]]) -> dict[str, object]:
    # Start from a missing pair, then give each other field the value that meets most missing ones.
    row = dict(min(wanted, key=repr))
    for name in SAMPLE:
        if name in row:
            continue
        choices = [v for v in SAMPLE[name] if _can_meet(row | {name: v})]
        row[name] = max(
            choices,
            key=lambda v, name=name: sum(p in wanted for p in _pairs(row | {name: v})),  # type: ignore[misc]
        )
    return row


def _pairs(row: dict[str, object]) -> Iterator[tuple[tuple[str, object], tuple[str, object]]]:
    items = [(name, row[name]) for name in SAMPLE if name in row]
    yield from itertools.combinations(items, 2)


def _can_meet(row: dict[str, object]) -> bool:
    head_dim, row_tile = row.get("head_dim", 16), row.get("row_tile", 8)
    dims = head_dim, row.get("head_dim_vo") or head_dim
    if row.get("page_table") == Layout.RAGGED and row.get("page_size", 1) != 1:
        return False
    return row_tile is None or row_tile_for(*dims, row_tile) == row_tile  # type: ignore[arg-type]


def _spec_of(row: dict[str, object], arch: str) -> DecodeSpec | PrefillSpec:
    fields = row | {
        "head_dim_vo": row["head_dim_vo"] or row["head_dim"],
        "kv_dtype": row["kv_dtype"] or row["q_dtype"],
    }
    row_tile, is_aligned = fields.pop("row_tile"), fields.pop("is_aligned")
    fields["loader"] = Loader.VECTOR
    if row_tile is None and ARCHS[arch].has_wgmma and fields["q_dtype"] is DType.BFLOAT16:
        is_masked = fields["use_custom_mask"]
        fields["fixed_maximum"] = fields["use_logits_soft_cap"] and not is_masked
    spec = PrefillSpec(**fields) if row_tile is None else DecodeSpec(row_tile=row_tile, **fields)  # type: ignore[arg-type]
    return specs_of_loaders(spec, arch)[not is_aligned]
