"""What SGLang's indexers choose, as ``IndexLists``, without SGLang.

Written for ``topk_indices`` of the sparse attention of SGLang 0.5.8 to 0.5.23 (``nsa``, later
``dsa``). With SGLANG_NSA_FUSE_TOPK, or SGLANG_DSA_FUSE_TOPK, an indexer returns slots; without, it
returns positions in the request. In prompts over a gathered K both count from where that begins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jitattn.integrations.sparse import lists_of_places, lists_of_positions
from jitattn.tensors.tensor_checks import check_tensor
from jitattn.tensors.token_lists import IndexLists


def slot_lists(topk_indices: Tensor) -> IndexLists:
    """Return what a fused indexer chose: its slots, as they are.

    Args:
        topk_indices: int32 [num_tokens, topk], slots of the pool; -1 is nothing.

    Raises:
        TypeError, ValueError: as ``IndexLists``.
    """
    return IndexLists(topk_indices)


def index_lists(
    topk_indices: Tensor,
    page_table: Tensor,
    rows: Tensor | None = None,
    *,
    out: IndexLists | None = None,
) -> IndexLists:
    """Return what an indexer chose by positions, as slots.

    It waits for nothing, and can be captured with ``out``.

    Args:
        topk_indices: int32 [num_tokens, topk], positions in the request; -1 is nothing.
        page_table: int32 [num_rows, width], the slot of every token: ``page_table_1`` of the
            metadata, or ``req_to_token``.
        rows: int32 or int64 [num_tokens], the row of each query token. None is one row each, as
            decode steps have them and ``page_table_1`` of verified tokens.
        out: what an earlier call of these sizes returned, to be written again.

    Raises:
        TypeError, ValueError: as ``lists_of_positions``.
    """
    return lists_of_positions(topk_indices, page_table, rows, 1, out=out)


def flat_lists(
    topk_indices: Tensor,
    page_table_1_flattened: Tensor,
    topk_indices_offset: Tensor | None = None,
    *,
    out: IndexLists | None = None,
) -> IndexLists:
    """Return what an indexer chose of the K of all requests, one after the other, as slots.

    So the pool is read where it is, and nothing has to be gathered.

    Args:
        topk_indices: int32 [num_tokens, topk]: places in ``page_table_1_flattened``, or with
            ``topk_indices_offset`` positions in the request; -1 is nothing.
        page_table_1_flattened: int32 or int64 [n], the slots of the tokens of all requests.
        topk_indices_offset: int32 [num_tokens] or [num_tokens, 1], where the request of each query
            token begins there.
        out: what an earlier call of these sizes returned, to be written again.

    Raises:
        TypeError, ValueError: as ``lists_of_positions``.
    """
    if topk_indices_offset is not None:
        check_tensor("topk_indices", topk_indices, (torch.int32,))
        check_tensor("topk_indices_offset", topk_indices_offset, (torch.int32,))
        begins = topk_indices_offset.reshape(-1, 1)
        if begins.shape[0] != topk_indices.shape[0]:
            raise ValueError(
                f"topk_indices_offset has shape {list(topk_indices_offset.shape)}: expected "
                f"[{topk_indices.shape[0]}]"
            )
        topk_indices = torch.where(topk_indices < 0, topk_indices, topk_indices + begins)
    return lists_of_places(topk_indices, page_table_1_flattened, out=out)


def request_rows(qo_indptr: Tensor, num_tokens: int, *, rows: Tensor | None = None) -> Tensor:
    """Return the row of each query token, for ``index_lists`` of an ``EXTEND`` batch.

    It waits for nothing. Query tokens behind the last request, of a padded step, get the last row.

    Args:
        qo_indptr: int32 [batch_size + 1], where the query tokens of each request begin.
        num_tokens: query tokens of the step, padding included.
        rows: int32 or int64 [batch_size], the row of each request in ``req_to_token``; None is
            0, 1 and so on, as ``page_table_1`` has them.
    """
    token = torch.arange(num_tokens, dtype=qo_indptr.dtype, device=qo_indptr.device)
    request = torch.searchsorted(qo_indptr[1:].contiguous(), token, right=True)
    request = request.clamp(max=max(qo_indptr.shape[0] - 2, 0))
    return request if rows is None else rows[request]
