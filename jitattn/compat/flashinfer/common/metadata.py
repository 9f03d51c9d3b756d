"""The tables of a batch of latent attention: FlashInfer's metadata, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from torch import Tensor

from jitattn.base.validate import check_count
from jitattn.compat.flashinfer.common.arguments import as_lengths
from jitattn.compat.flashinfer.common.batch import (
    FixedBuffers,
    check_block_tables,
    check_indices,
    check_offsets,
)


@dataclass(frozen=True)
class MLAPlanMetadata:
    """The tables of a batch: CSR, or a block table.

    Attributes:
        qo_indptr: int32 [batch_size + 1], where the queries of each request begin.
        kv_indptr: int32 [batch_size + 1], where its pages begin.
        kv_indices: int32 [>= kv_indptr[-1]], page ids.
        kv_len_arr: int32 [batch_size], KV tokens of each request.
        cum_seq_lens_q: what ``qo_indptr`` is, for a block table.
        block_tables: int32 [batch_size, max_pages].
        seq_lens: what ``kv_len_arr`` is, for a block table.
        max_q_len: the most queries of a request; None: the device is waited for.
    """

    qo_indptr: Tensor | None = None
    kv_indptr: Tensor | None = None
    kv_indices: Tensor | None = None
    kv_len_arr: Tensor | None = None
    cum_seq_lens_q: Tensor | None = None
    block_tables: Tensor | None = None
    seq_lens: Tensor | None = None
    max_q_len: int | None = None

    @classmethod
    def csr(
        cls, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor
    ) -> MLAPlanMetadata:
        """Return those of a CSR table."""
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    @classmethod
    def dual(
        cls,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        cum_seq_lens_q: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        max_q_len: int | None = None,
    ) -> MLAPlanMetadata:
        """Refuse two tables of one batch.

        Raises:
            ValueError: always.
        """
        raise ValueError("dual metadata has two tables: expected csr(...) or dense(...) of one")

    @classmethod
    def dense(
        cls,
        cum_seq_lens_q: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        max_q_len: int | None = None,
    ) -> MLAPlanMetadata:
        """Return those of a block table."""
        return cls(
            cum_seq_lens_q=cum_seq_lens_q,
            block_tables=block_tables,
            seq_lens=seq_lens,
            max_q_len=max_q_len,
        )


CSR_FIELDS = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
DENSE_FIELDS = ("cum_seq_lens_q", "block_tables", "seq_lens")


class CheckedTables(NamedTuple):
    """Tables that passed their checks, wherever they lie; lengths are the last of them."""

    layout: str
    tensors: tuple[Tensor, ...]
    max_q_len: int
    num_rows: int

    @classmethod
    def of(
        cls,
        tables: Mapping[str, Any],
        arguments: Mapping[str, object],
        fixed: FixedBuffers | None,
    ) -> CheckedTables:
        """Check the fields of an ``MLAPlanMetadata``.

        Raises:
            TypeError, ValueError: naming the first that doesn't fit.
        """
        is_csr = tables["block_tables"] is None
        names = CSR_FIELDS if is_csr else DENSE_FIELDS
        offsets_name, lens_name = names[0], names[-1]
        offsets, lens = tables[offsets_name], as_lengths(lens_name, tables[lens_name])
        check_offsets(offsets_name, offsets)
        batch_size = offsets.shape[0] - 1
        if lens.shape[0] != batch_size:
            raise ValueError(f"{lens_name} has {lens.shape[0]} entries: expected {batch_size}")
        if is_csr:
            _check_csr(tables, batch_size, int(str(arguments["page_size"])), fixed)
        else:
            check_block_tables(tables["block_tables"], batch_size, fixed)
        longest = tables["max_q_len"]
        if longest is not None:
            longest = check_count("max_q_len", longest, least=0)
        if longest is None or offsets.device.type == "cpu" or fixed is not None:
            found = max(offsets.diff().tolist(), default=0)  # waits for the device
            if longest is not None and found > longest:
                raise ValueError(f"max_q_len is {longest}: a request has {found} queries")
            longest = found if longest is None else longest
        num_rows = int(offsets[-1]) if fixed is not None else 0
        middle = tuple(tables[name] for name in names[1:-1])
        layout = "csr" if is_csr else "shared"
        return cls(layout, (offsets, *middle, lens), int(longest), num_rows)


def _check_csr(
    tables: Mapping[str, Any], batch_size: int, page_size: int, fixed: FixedBuffers | None
) -> None:
    indptr, lens = tables["kv_indptr"], tables["kv_len_arr"]
    offsets = check_offsets("kv_indptr", indptr)
    if indptr.shape[0] != batch_size + 1:
        raise ValueError(f"kv_indptr has {indptr.shape[0]} entries: expected {batch_size + 1}")
    check_indices("kv_indices", tables["kv_indices"], "kv_indptr", offsets)
    if offsets is not None and lens.device.type == "cpu":
        for b, n in enumerate(lens.tolist()):
            room = (offsets[b + 1] - offsets[b]) * page_size
            if n > room:
                raise ValueError(f"kv_len_arr[{b}] is {n}: its pages hold {room} tokens")
    if fixed is not None:
        for name in CSR_FIELDS:
            fixed.check_room(name, name, tables[name], exact=name != "kv_indices")


def tables_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``MLAPlanMetadata``, from an object or from arguments of ``plan``.

    Raises:
        TypeError, ValueError: naming the one that is missing, or beside another.
    """
    names = [field.name for field in fields(MLAPlanMetadata)]
    metadata = given["metadata"]
    if metadata is None:
        tables = {name: given[name] for name in names}
    else:
        for name in names:
            if given[name] is not None:
                raise ValueError(f"{name} is given, and so is metadata: expected one of them")
            if not hasattr(metadata, name):
                raise TypeError(
                    f"metadata is a {type(metadata).__name__}: expected an MLAPlanMetadata"
                )
        tables = {name: getattr(metadata, name) for name in names}
    is_csr = any(tables[name] is not None for name in CSR_FIELDS)
    is_dense = any(tables[name] is not None for name in (*DENSE_FIELDS, "max_q_len"))
    if is_csr and is_dense:
        name = next(n for n in (*DENSE_FIELDS, "max_q_len") if tables[n] is not None)
        raise ValueError(f"{name} is given beside a CSR table: expected one table")
    needed = DENSE_FIELDS if is_dense else CSR_FIELDS
    for name in needed:
        if tables[name] is None:
            raise ValueError(f"{name} is None: a table needs {', '.join(needed)}")
    return tables
