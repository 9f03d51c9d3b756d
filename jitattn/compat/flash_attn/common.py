"""The arguments that both functions of flash-attn share: windows, tables, planners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from jitattn.base.validate import INT32_MAX, check_count, check_number, shown
from jitattn.kernels.attention.api import AttentionPlanner
from jitattn.kernels.attention.functional import planner_of
from jitattn.tensors.page_table_base import PageTable
from jitattn.tensors.tensor_checks import INTEGERS, check_device, check_tensor

Q_DTYPES = (torch.float16, torch.bfloat16)
FLOATS = (*Q_DTYPES, torch.float32, torch.float64)


class Window(NamedTuple):
    """Which keys around its own a query sees; ``right`` is None where no mask is needed."""

    causal: bool
    left: int
    right: int | None

    @classmethod
    def of(cls, causal: bool, window_size: object, max_q_len: int) -> Window:
        """Check (left, right) of a call whose requests have at most ``max_q_len`` queries.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        if isinstance(window_size, Tensor):
            check_tensor("window_size", window_size, INTEGERS)
            window_size = window_size.tolist()  # as flash-attn's own tests give it
        if not isinstance(window_size, Sequence) or len(window_size) != 2:
            raise TypeError(f"window_size is {shown(window_size)}: expected a pair (left, right)")
        left, right = (check_count("window_size", n, least=-INT32_MAX) for n in window_size)
        # The last query's own key is the last one.
        is_limit = not causal and 0 < right < max_q_len - 1
        return cls(causal or right == 0, max(left, -1), right if is_limit else None)

    def mask_of_even(self, batch_size: int, q_len: int, device: torch.device) -> Tensor | None:
        """Return bool [batch_size * q_len, q_len] over a request's last keys, for ``run``."""
        if self.right is None:
            return None
        rows = torch.arange(q_len, device=device)
        return (rows <= rows[:, None] + self.right).repeat(batch_size, 1)

    def mask_of(self, indptr: Tensor, num_tokens: int, max_q_len: int) -> Tensor | None:
        """Return bool [num_tokens, max_q_len] for requests whose rows begin at ``indptr``."""
        if self.right is None:
            return None
        rows = torch.arange(num_tokens, dtype=indptr.dtype, device=indptr.device)
        request = torch.searchsorted(indptr[1:], rows, right=True)
        # Rows past the last request are as if they were its own.
        ends = torch.cat((indptr[1:], indptr[-1:]))[request]
        last = max_q_len - (ends - rows) + self.right
        return torch.arange(max_q_len, device=indptr.device) <= last[:, None]


def planner_for(
    q: Tensor, k: Tensor, v: Tensor, pages: PageTable, window: Window, **others: object
) -> AttentionPlanner:
    """Return the planner of a call's tensors; equal calls share it.

    Raises:
        ConfigError: there is no kernel for them.
    """
    arguments = {
        "num_qo_heads": q.shape[-2],
        "num_kv_heads": k.shape[-2],
        "head_dim": q.shape[-1],
        "head_dim_vo": v.shape[-1],
        "q_dtype": q.dtype,
        "kv_dtype": k.dtype,
        "page_table": pages.layout.value,
        "causal": window.causal,
        "window_left": window.left,
        "use_custom_mask": window.right is not None,
    }
    return planner_of(arguments | others, q.device)


def refuse_alibi(alibi_slopes: Tensor | None) -> None:
    """Raise ValueError where slopes are given."""
    if alibi_slopes is not None:
        raise ValueError(
            "alibi_slopes are given, expected None: AttentionPlanner(variant='alibi') has ALiBi"
        )


def check_keys(name: str, keys: Tensor, q: Tensor, table: str | None) -> None:
    """Raise unless ``keys`` fit q: tokens, or blocks of them with a ``table``."""
    check_tensor(name, keys, (q.dtype,))
    check_device(name, keys, q.device)
    wanted = "[num_blocks, block_size, nheads_k, head_dim]" if table else "[total_k, nheads_k, ..]"
    if keys.dim() != (4 if table else 3):
        with_table = f"with {table}" if table else "without block_table"
        raise ValueError(f"{name} has shape {list(keys.shape)}: expected {wanted} {with_table}")


def softmax_scale_of(value: object) -> float | None:
    """Return ``softmax_scale`` as planners take it."""
    return None if value is None else check_number("softmax_scale", value)


def even_indptr(batch_size: int, length: int, device: torch.device) -> Tensor:
    """Return int32 [batch_size + 1], the offsets of requests of one length."""
    return torch.arange(batch_size + 1, dtype=torch.int32, device=device) * length


def is_unsplit(num_splits: object) -> bool:
    """Return whether ``num_splits`` asks for bits that don't depend on the batch.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    count = check_count("num_splits", num_splits, least=0)
    if count > 1:
        raise ValueError(
            f"num_splits is {count}: expected 0 (the device decides) or 1 (bits that don't depend "
            "on the batch)"
        )
    return count == 1


def check_table(block_table: Tensor, batch_size: int) -> None:
    """Check int32 [batch_size, blocks_per_request].

    Raises:
        TypeError, ValueError: naming the argument.
    """
    check_tensor("block_table", block_table, (torch.int32,))
    if block_table.dim() != 2 or block_table.shape[0] != batch_size:
        raise ValueError(
            f"block_table has shape {list(block_table.shape)}: expected [{batch_size}, "
            "blocks_per_request]"
        )


def check_vector(name: str, value: Tensor | None, size: int, device: torch.device) -> None:
    """Check int32 or int64 [size] on a device, or None.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if value is None:
        return
    check_tensor(name, value, INTEGERS)
    if tuple(value.shape) != (size,):
        raise ValueError(f"{name} has shape {list(value.shape)}: expected [{size}]")
    check_device(name, value, device)
