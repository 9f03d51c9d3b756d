"""Page tables made of others: ``build_block_table`` of slots, ``convert_pages`` of any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from jitattn.base.validate import INT32_MAX, check_count, check_name, type_name
from jitattn.kernels.common import device_kernels
from jitattn.kernels.common.launch_cache import (
    CallParams,
    CallTensors,
    LaunchCache,
    address_of,
    new_call,
)
from jitattn.kernels.common.page_lists import lengths_of, page_sources
from jitattn.kernels.common.value_checks import asks_for_checks, checking
from jitattn.kernels.pages.params import BlockTableParams
from jitattn.kernels.pages.spec import BlockTableSpec
from jitattn.spec.config import MAX_PAGE_SIZE
from jitattn.spec.layout import Layout
from jitattn.spec.params import Lengths
from jitattn.tensors.overlap import Apart, refuse_shared_bytes
from jitattn.tensors.page_table_base import PageTable
from jitattn.tensors.page_tables import (
    BlockTable,
    CsrPages,
    TokenTable,
    has_pages,
    is_page_table,
    slot_table,
    table_class,
    table_names,
)
from jitattn.tensors.tensor_checks import (
    check_device,
    check_per_request,
    check_tensor,
    check_vector,
    check_writable,
)

if TYPE_CHECKING:
    from jitattn.device.driver import Launch

_LAYOUTS = tuple(layout.value for layout in Layout if layout.has_pages)


# --- slots to a block table


def build_block_table(
    slots: Tensor | TokenTable | CsrPages,
    seq_lens: Tensor,
    page_size: int,
    *,
    rows: Tensor | None = None,
    kv_start: Tensor | None = None,
    slot_map: Tensor | None = None,
    out: Tensor | BlockTable | None = None,
) -> BlockTable:
    """Make a block table out of the slots of all tokens: one launch on the current stream.

    Args:
        slots: int32 or int64 [num_rows, width], page * page_size + place of every token (a
            request-to-token pool), any strides; or a TokenTable; or CsrPages whose entries are
            slots, one a token.
        seq_lens: int32 or int64 [batch_size], all tokens of each request; zero and less is none.
            Slots past them are never read.
        page_size: tokens of a page, any number up to 2**20.
        rows: int32 or int64 [batch_size], the row of ``slots`` of each request; None is its own.
        kv_start: int32 or int64 [batch_size], the first token of each request that counts, as a
            sliding window leaves it; None is 0. Slots before it are not read and pages wholly
            before it become -1; the others keep their columns.
        slot_map: int32 or int64 [num_slots], the slot to use instead of each, as where layers with
            a sliding window have a pool of their own.
        out: int32 [batch_size, width], or a shared BlockTable of it without rows, to fill; any
            strides. Then nothing is allocated, and the call can be captured. None has the columns
            that ``slots`` has room for; of CsrPages those that the longest request needs, which the
            device is waited for.

    Returns:
        [batch_size, width] with -1 in every column that is not a page of the request.

    Raises:
        TypeError, ValueError: an argument that doesn't fit. On the CPU also a request with more
            tokens than its slots or ``out`` hold, a slot that is negative or outside ``slot_map``,
            and tokens that don't follow each other inside a page; on the device their page is -1.
    """
    given = slots, seq_lens, page_size, rows, kv_start, slot_map, out
    table = LAUNCHES.run(new_call(TableCall, given))
    return BlockTable(table) if out is None or isinstance(out, Tensor) else out


class TableCall(NamedTuple):
    """The arguments of ``build_block_table``, as they were given."""

    slots: Tensor | TokenTable | CsrPages
    seq_lens: Tensor
    page_size: int
    rows: Tensor | None
    kv_start: Tensor | None
    slot_map: Tensor | None
    out: Tensor | BlockTable | None


@dataclass(frozen=True, slots=True)
class _Slots:
    """What a block table is made of, checked; an entry of ``slots`` is a token's."""

    slots: PageTable
    seq_lens: Tensor
    page_size: int
    kv_start: Tensor | None
    slot_map: Tensor | None
    out: Tensor | None

    @property
    def device(self) -> torch.device:
        return self.seq_lens.device

    @property
    def batch_size(self) -> int:
        return int(self.seq_lens.shape[0])


def _check(call: TableCall) -> _Slots:
    slots, seq_lens, page_size, rows, kv_start, slot_map, out = call
    page_size = check_page_size(page_size)
    listed = slot_table(slots, rows)
    batch_size, device = listed.batch_size, listed.device
    check_per_request("seq_lens", seq_lens, batch_size, device)
    if kv_start is not None:
        check_per_request("kv_start", kv_start, batch_size, device)
    if slot_map is not None:
        check_vector("slot_map", slot_map, device=device)
    table = None if out is None else _checked_out(out, batch_size, device)
    if table is not None:
        others = (t for t in (seq_lens, kv_start, slot_map) if t is not None)
        _refuse_shared_bytes([*listed.tensors, *others], table)
    return _Slots(listed, seq_lens, page_size, kv_start, slot_map, table)


def check_page_size(page_size: object) -> int:
    """Return ``page_size``; raise unless it is an integer from 1 to 2**20."""
    return check_count("page_size", page_size, most=MAX_PAGE_SIZE)


def check_offsets(name: str, indptr: Tensor, batch_size: int, device: torch.device) -> None:
    """Raise unless ``indptr`` is contiguous int32 [batch_size + 1] on ``device``: an output."""
    check_tensor(name, indptr, (torch.int32,))
    if tuple(indptr.shape) != (batch_size + 1,):
        raise ValueError(f"{name} has shape {list(indptr.shape)}: expected [{batch_size + 1}]")
    if not indptr.is_contiguous():
        raise ValueError(f"{name} has the stride {indptr.stride(0)}: expected a contiguous tensor")
    check_writable(name, indptr)
    check_device(name, indptr, device)


def _width_of(slots: PageTable, seq_lens: Tensor, page_size: int) -> int:
    """Return the columns of a new table."""
    num_entries = slots.capacity(1)
    if not slots.layout.has_offsets:
        return -(-num_entries // page_size)
    if device_kernels.is_capturing(seq_lens.device):
        raise ValueError(
            "out is None in a capture: only the device knows the longest request; give out"
        )
    longest = max(int(seq_lens.max()), 0) if seq_lens.shape[0] else 0
    if longest > num_entries:
        b = int(seq_lens.argmax())
        raise ValueError(f"seq_lens[{b}] is {longest}: slots has {num_entries} entries")
    return -(-longest // page_size)


def _checked_out(out: Tensor | BlockTable, batch_size: int, device: torch.device) -> Tensor:
    if is_page_table(out):
        if out.layout != "shared" or len(out.tensors) > 1:
            raise ValueError(f"out is {out!r}: expected a shared table without rows")
        out = out.tensors[0]
    check_tensor("out", out, (torch.int32,))
    assert isinstance(out, Tensor)
    if out.dim() != 2 or out.shape[0] != batch_size:
        raise ValueError(f"out has shape {list(out.shape)}: expected [{batch_size}, width]")
    check_writable("out", out)
    check_device("out", out, device)
    return out


def _refuse_shared_bytes(read: Sequence[Tensor], out: Tensor) -> None:
    refuse_shared_bytes([("out", out)], [("an argument that it is made of", t) for t in read])


def _table_by_definition(batch: _Slots) -> Tensor:
    table = batch.out
    if table is None:
        width = _width_of(batch.slots, batch.seq_lens, batch.page_size)
        table = torch.empty((batch.batch_size, width), dtype=torch.int32, device="cpu")
    _fill(batch, table)
    return table


def _fill(batch: _Slots, table: Tensor) -> None:
    size = batch.page_size
    filled = torch.full_like(table, -1)
    starts = [0] * batch.batch_size if batch.kv_start is None else batch.kv_start.tolist()
    for b, (kv_len, start) in enumerate(zip(batch.seq_lens.tolist(), starts, strict=True)):
        kv_len, start = max(kv_len, 0), max(start, 0)
        if kv_len > table.shape[1] * size:
            raise ValueError(
                f"seq_lens[{b}] is {kv_len}: out holds {table.shape[1]} pages of {size} tokens"
            )
        if start >= kv_len:
            continue
        slots = _slots_of_request(batch, b, kv_len, start)
        for column in range(start // size, -(-kv_len // size)):
            first = max(column * size, start)
            page = _page_of(slots[first : (column + 1) * size], first % size, size)
            if page is None:
                raise ValueError(
                    f"request {b}: the slots of tokens {first} to "
                    f"{min((column + 1) * size, kv_len) - 1} are not those of a page of {size} "
                    "tokens, one after the other"
                )
            if page > INT32_MAX:
                raise ValueError(f"request {b}: token {first} is in page {page}: ids are int32")
            filled[b, column] = page
    table.copy_(filled)


def _slots_of_request(batch: _Slots, request: int, kv_len: int, start: int) -> list[int]:
    """The slots of a request's tokens, mapped; those before ``start`` are not looked at."""
    entries = batch.slots.entries(request)
    if kv_len > entries.shape[0]:
        raise ValueError(f"seq_lens[{request}] is {kv_len}: it has {entries.shape[0]} slots")
    slots = [-1] * start + [int(slot) for slot in entries[start:kv_len].tolist()]
    if batch.slot_map is None:
        return slots
    size = batch.slot_map.shape[0]
    for token, slot in enumerate(slots[start:], start):
        if not 0 <= slot < size:
            raise ValueError(
                f"request {request}: token {token} has slot {slot}: slot_map has {size} entries"
            )
    return slots[:start] + [int(batch.slot_map[slot]) for slot in slots[start:]]


def _page_of(slots: list[int], place: int, page_size: int) -> int | None:
    """The page that holds ``slots`` one after the other from ``place`` on."""
    page, found = divmod(slots[0], page_size)
    follows = slots == list(range(slots[0], slots[0] + len(slots)))
    return page if page >= 0 and found == place and follows else None


class _TableLauncher:
    """Launches for slots that lie alike."""

    def __init__(self, batch: _Slots, given: CallTensors, card: int) -> None:
        self._card, self._device = card, batch.device
        self._checks = asks_for_checks()
        self._batch_size, self._page_size = batch.batch_size, batch.page_size
        names = ["out" if name == "out[0]" else name for name in given.names]
        self._out = names.index("out") if batch.out is not None else None
        others = [i for i in range(len(names)) if i != self._out]
        pairs = [] if self._out is None else [(self._out, i) for i in others]
        self._apart = Apart(given.tensors, pairs)
        self._apart.learn(given.pointers())
        # A new table comes last.
        names += ["out"] if self._out is None else []
        self._params = CallParams(BlockTableParams)
        params = self._params.struct
        self._params.connect(_write_slots(params, batch, names), names)
        # Threads for the tokens of a page, as far as a warp goes.
        params.lanes_log2 = lanes_log2(batch.page_size)
        # A new table is as wide as its slots, or as the longest request.
        self._width = None
        if not batch.slots.layout.has_offsets:
            self._width = _width_of(batch.slots, batch.seq_lens, batch.page_size)
        self._launch: Launch | None = None
        self._strides: tuple[int, ...] = ()

    def __call__(self, call: TableCall, tensors: list[Tensor]) -> Tensor:
        """Launch for these, which lie like those it was made with, and return the table."""
        if self._out is None:
            tensors.append(self._new_table(call))
        table = tensors[-1 if self._out is None else self._out]
        if self._checks and not device_kernels.is_capturing(self._device):
            _verify(call, table)
        pointers = tuple(map(address_of, tensors))
        # A new table may be of another width than the one that was there.
        key = pointers if self._out is not None else (*pointers, table.shape[1])
        params = self._params
        image = params.images.get(key)
        if image is None:
            params.keep(key, self._fill(tensors, pointers, table))
            image = params.images[key]
        launch, params.image[:] = image
        if launch is not None:
            device_kernels.launch_on(self._card, launch)
        return table

    def _fill(self, tensors: list[Tensor], pointers: Sequence[int], table: Tensor) -> Launch | None:
        """Fill the parameters for these addresses, and return the launch."""
        if not self._apart.holds(pointers):
            _refuse_shared_bytes([one for one in tensors if one is not table], table)
            self._apart.learn(pointers)
        if self._strides != (*table.stride(), table.shape[1]):
            self._take(table)
        self._params.write(pointers)
        return self._launch

    def _new_table(self, call: TableCall) -> Tensor:
        width = self._width
        if width is None:
            width = _width_of(slot_table(call.slots, None), call.seq_lens, self._page_size)
        return torch.empty((self._batch_size, width), dtype=torch.int32, device=self._device)

    def _take(self, table: Tensor) -> None:
        """Make the launch for a table of other strides and columns."""
        from jitattn.device.driver import Launch

        params = self._params.struct
        params.row_stride, params.column_stride = table.stride()
        params.width = table.shape[1]
        self._strides = (*table.stride(), table.shape[1])
        num_threads = table.numel() << params.lanes_log2
        self._launch = None
        if num_threads:
            tile = device_kernels.tile_of(BlockTableSpec(), self._card)
            kernel = device_kernels.load(BlockTableSpec(), self._card)
            grid = -(-num_threads // tile.num_threads)
            self._launch = Launch(kernel, params, grid, tile.num_threads)


def lanes_log2(page_size: int) -> int:
    """Return the logarithm of the lanes that look at the tokens of a page."""
    return min((page_size - 1).bit_length(), 5)


def _write_slots(params: BlockTableParams, batch: _Slots, names: Sequence[str]) -> dict[str, str]:
    """Write all but the addresses and the table; return which tensors' the addresses are."""
    sources = {"seq_lens.values": "seq_lens", "table": "out"}
    params.slots = batch.slots.page_list(batch.page_size)
    sources |= page_sources("slots", batch.slots)
    if "slots" in names:  # a tensor, and rows if any
        sources["slots.entries"] = "slots"
    if "rows" in names:
        sources["slots.rows"] = "rows"
    params.seq_lens = lengths_of(batch.seq_lens)
    params.kv_start = Lengths()
    if batch.kv_start is not None:
        params.kv_start = lengths_of(batch.kv_start)
        sources["kv_start.values"] = "kv_start"
    if batch.slot_map is not None:
        sources["slot_map"] = "slot_map"
        params.slot_map_stride = batch.slot_map.stride(0)
        params.num_slots = batch.slot_map.shape[0]
        params.slot_map_is_int64 = batch.slot_map.dtype is torch.int64
    return sources


def _verify(call: TableCall, table: Tensor) -> None:
    """Refuse what would be -1 in the table or not fit it."""
    slots = call.slots
    with checking():
        rows, kv_start, slot_map = (
            t if t is None else t.cpu() for t in (call.rows, call.kv_start, call.slot_map)
        )
        on_host = TableCall(
            slots.cpu() if isinstance(slots, Tensor) else slots.to_cpu(),  # type: ignore[arg-type]
            call.seq_lens.cpu(),
            call.page_size,
            rows,
            kv_start,
            slot_map,
            None,
        )
        _fill(_check(on_host), torch.empty(table.shape, dtype=torch.int32, device="cpu"))


LAUNCHES = LaunchCache(_check, _table_by_definition, _TableLauncher)


# --- from one layout to another


def convert_pages(
    pages: PageTable,
    layout: str,
    *,
    page_size: int,
    seq_lens: Tensor,
    max_kv_len: int | None = None,
) -> PageTable:
    """Return the same pages in another layout, as new tensors; any strides and ``rows`` are gone.

    Args:
        pages: a BlockTable, CsrPages or TokenTable. Only a token table whose tokens follow each
            other inside pages has another layout. Separate ids of K and V have no other layout.
        layout: "shared", "separate", "csr" or "token".
        page_size: tokens of a page.
        seq_lens: int32 or int64 [batch_size], tokens of each request; what lies past them becomes
            -1, or is left out of "csr".
        max_kv_len: the most tokens of a request: what lies past them is left out. None is what the
            width of a table has room for; of CsrPages the longest, which the device is waited for.

    Returns:
        A table of that layout. That of "csr" has room for all columns, and -1 past its last page.

    Raises:
        TypeError, ValueError: an argument that doesn't fit, or on the CPU a request longer than its
            table, a row that the table hasn't, slots beyond int32 (on a device they are -1), or
            tokens that don't follow each other.
    """
    page_size = check_page_size(page_size)
    if not has_pages(pages):
        names = table_names(without=[Layout.RAGGED])
        raise TypeError(f"pages is a {type_name(pages)}: expected a {names}")
    layout = check_name("layout", layout, _LAYOUTS)
    if pages.layout == "separate" and layout != "separate":
        raise ValueError(f"pages has ids of its own for V, which layout={layout!r} has no room for")
    check_per_request("seq_lens", seq_lens, pages.batch_size, pages.device)
    lens = seq_lens.clamp(min=0).long()
    if max_kv_len is not None:
        max_kv_len = check_count("max_kv_len", max_kv_len, least=0)
        pages = pages.narrowed(max_kv_len, page_size)
    ids = _live_ids(pages, lens, page_size, max_kv_len)
    wanted = Layout(layout)
    return table_class(wanted).of_page_ids(ids, lens, page_size, wanted)


def _live_ids(pages: PageTable, lens: Tensor, page_size: int, max_kv_len: int | None) -> Tensor:
    """Return page ids [batch_size, width] or [batch_size, 2, width], -1 past each request."""
    if not pages.layout.lists_pages:
        return build_block_table(pages, lens, page_size).table  # type: ignore[arg-type]
    ids, capacity = pages.columns(lens, page_size, max_kv_len=max_kv_len)
    num_pages = lens // page_size + (lens % page_size > 0)
    if lens.device.type == "cpu" and bool((num_pages > capacity).any()):
        b = int((num_pages > capacity).int().argmax())
        raise ValueError(
            f"seq_lens[{b}] is {int(lens[b])}: the table has {int(capacity[b])} pages of it"
        )
    columns = torch.arange(ids.shape[-1], device=ids.device)
    is_live = columns < torch.minimum(num_pages, capacity)[:, None]
    return ids.where(is_live if ids.dim() == 2 else is_live[:, None], -1)
