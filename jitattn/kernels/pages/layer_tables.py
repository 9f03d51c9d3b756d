"""Tables of a group's layers, made on a device of slots that stay there: ``write_layer_tables``."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from jitattn.kernels.common import device_kernels
from jitattn.kernels.pages.params import LayerTablesParams, SlotChange, TableLayer, TableRequest
from jitattn.kernels.pages.spec import LayerTablesSpec
from jitattn.tensors.tensor_checks import check_device, check_tensor, check_writable

_COLUMNS = {
    "requests": ctypes.sizeof(TableRequest) // 4,
    "changes": ctypes.sizeof(SlotChange) // 4,
    "layers": ctypes.sizeof(TableLayer) // 4,
}


def has_kernel(device: torch.device) -> bool:
    """Whether tables can be made there."""
    return device_kernels.card_of(device) is not None


def write_layer_tables(
    tables: Tensor,
    slots: Tensor,
    *,
    layers: Tensor,
    requests: Tensor,
    changes: Tensor,
    scratch_slots: Tensor,
    first_block: int = 0,
    num_changed_blocks: int | None = None,
) -> None:
    """Bring slots up to date and write the tables of all layers, in one launch.

    In slots of L pages, the layer at ``offset`` has page slot * L + offset; block j of scratch has
    page slot_j * L + (j % L + offset) % L, where slot_j is scratch slot j // L of its request.

    Args:
        tables: int32 [num_layers, num_table_rows, width], any strides. All columns of the rows
            that requests name are written, those without a page with -1.
        slots: int32 [num_rows, num_blocks], contiguous, negative where there is none; changes are
            written into it.
        layers: int32 [num_layers, 2], contiguous, a ``TableLayer`` each.
        requests: int32 [batch_size, 7], contiguous, a ``TableRequest`` each. What they say is not
            checked, nor what follows: no two of different rows have one row of the tables, and
            equal ones have equal changes.
        changes: int32 [num_changes, 2], contiguous, a ``SlotChange`` each.
        scratch_slots: int32 [n], contiguous.
        first_block: the columns before it are -1.
        num_changed_blocks: changes are of blocks before it; None is any block.

    Raises:
        TypeError, ValueError: an argument doesn't fit.
    """
    device = tables.device
    _check(tables, slots, layers, requests, changes, scratch_slots)
    card = device_kernels.card_of(device)
    if card is None:
        raise ValueError(f"tables is on {device}: expected a device with kernels")
    width, num_blocks = tables.shape[2], slots.shape[1]
    params = LayerTablesParams(
        tables=tables.data_ptr(), slots=slots.data_ptr(), requests=requests.data_ptr(),
        changes=changes.data_ptr(), scratch_slots=scratch_slots.data_ptr(),
        layers=layers.data_ptr(), batch_size=requests.shape[0], num_layers=layers.shape[0],
        width=width, num_blocks=num_blocks, first_block=min(first_block, width),
        span=max(width, num_blocks if num_changed_blocks is None else num_changed_blocks),
    )  # fmt: skip
    params.layer_stride, params.row_stride, params.column_stride = tables.stride()
    _launch(params, card)


def _launch(params: LayerTablesParams, card: int) -> None:
    num_threads = device_kernels.tile_of(LayerTablesSpec(), card).num_threads
    grid = -(-params.batch_size * params.span // num_threads)
    if grid:
        from jitattn.device.driver import Launch

        kernel = device_kernels.load(LayerTablesSpec(), card)
        device_kernels.launch_on(card, Launch(kernel, params, grid, num_threads))


def _check(tables: Tensor, slots: Tensor, *records: Tensor) -> None:
    layers, requests, changes, scratch_slots = records
    check_tensor("tables", tables, (torch.int32,))
    if tables.dim() != 3:
        raise ValueError(f"tables has shape {list(tables.shape)}: expected three dimensions")
    check_writable("tables", tables)
    for name, tensor, dims in (
        ("slots", slots, 2),
        ("layers", layers, 2),
        ("requests", requests, 2),
        ("changes", changes, 2),
        ("scratch_slots", scratch_slots, 1),
    ):
        check_tensor(name, tensor, (torch.int32,))
        check_device(name, tensor, tables.device)
        columns = _COLUMNS.get(name, tensor.shape[-1] if dims == tensor.dim() else 0)
        if tensor.dim() != dims or tensor.shape[-1] != columns or not tensor.is_contiguous():
            raise ValueError(
                f"{name} has shape {list(tensor.shape)} and strides {list(tensor.stride())}: "
                f"expected {dims} dimensions, {columns or 'any'} columns, contiguous"
            )
    if tables.shape[0] != layers.shape[0]:
        raise ValueError(f"tables has {tables.shape[0]} layers: expected {layers.shape[0]}")
