"""FlashInfer's wrappers of block-sparse attention: rows of blocks are requests over pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jitattn.base.validate import check_count, check_flag
from jitattn.compat.flashinfer.absent import names_of
from jitattn.compat.flashinfer.common.arguments import refuse_unbuilt
from jitattn.compat.flashinfer.common.calls import Results
from jitattn.compat.flashinfer.common.wrapper import OverAnother
from jitattn.compat.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from jitattn.tensors.tensor_checks import INTEGERS, check_indptr, check_tensor

__all__ = ["BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper"]

__getattr__ = names_of(__name__, __all__)

_BITS = (torch.bool, torch.uint8, torch.int32, torch.int64)


class BlockSparseAttentionWrapper(OverAnother):
    """Attention of rows to columns whose blocks a sparse matrix names, the same for all heads."""

    _inner: BatchPrefillWithPagedKVCacheWrapper

    def __init__(self, float_workspace_buffer: Tensor, backend: str = "auto") -> None:
        """Remember the device.

        Args:
            float_workspace_buffer: any tensor on the device of all others.
            backend: a name that FlashInfer knows; all mean the same kernels.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        refuse_unbuilt(locals())
        self._inner = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer)
        self._shape: tuple[int, int, int] | None = None

    def plan(
        self, indptr: Tensor | None, indices: Tensor | None, M: int, N: int, R: int, C: int,  # noqa: N803
        num_qo_heads: int, num_kv_heads: int, head_dim: int, mask: Tensor | None = None,
        packed_mask: Tensor | None = None, causal: bool = False, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, logits_soft_cap: float | None = None,
        sm_scale: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype = "float16", non_blocking: bool = True,
        block_mask: Tensor | None = None, kv_block_lens: Tensor | None = None,
        q2k_indices: Tensor | None = None, q2k_num: Tensor | None = None,
        kv_splits: int | str | None = None, use_clc: bool | None = None,
        q_scale: Tensor | None = None, k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Plan a matrix of ``M`` rows, queries, and ``N`` columns, keys. It waits for the device.

        Blocks have ``R`` rows, the last of them maybe fewer, and ``C`` columns, of which ``N`` is a
        multiple and which are kernels' page size. ``indptr`` int32 [ceil(M / R) + 1] says where the
        blocks of each row of blocks begin in ``indices``, int32 [>= indptr[-1]], their columns.
        ``mask`` bool [indptr[-1], R, C] says what is seen inside of each block; or ``packed_mask``
        uint8, the bits of each row of blocks from a byte of its own on, rows first.

        Arguments that ``BatchPrefillWithPagedKVCacheWrapper.plan`` has, too, are the same there,
        but for ``causal``, which is refused: chosen blocks follow each other without their places.
        Those of one of FlashInfer's backends are refused unless None: ``block_mask``,
        ``kv_block_lens``, ``q2k_indices``, ``q2k_num``, ``kv_splits``, ``use_clc`` and scales.

        Raises:
            TypeError, ValueError, ConfigError: naming the argument.
        """
        refuse_unbuilt(locals(), but=("mask",))
        _refuse(
            block_mask=block_mask, kv_block_lens=kv_block_lens, q2k_indices=q2k_indices,
            q2k_num=q2k_num, kv_splits=kv_splits, use_clc=use_clc, q_scale=q_scale,
            k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
        _refuse_causal(causal)
        pages, qo_indptr, bits = self._blocks(indptr, indices, (M, N, R, C), mask, packed_mask)
        assert indices is not None
        last = (pages.diff() > 0).int() * C
        self._inner.plan(
            qo_indptr, pages, indices, last, num_qo_heads, num_kv_heads, head_dim, C,
            custom_mask=bits, packed_custom_mask=packed_mask, sm_scale=sm_scale,
            logits_soft_cap=logits_soft_cap, q_data_type=q_data_type, kv_data_type=kv_data_type,
            o_data_type=o_data_type, non_blocking=non_blocking,
        )  # fmt: skip

    begin_forward = plan

    def _blocks(
        self,
        indptr: Tensor | None,
        indices: Tensor | None,
        shape: tuple[int, int, int, int],
        mask: Tensor | None,
        packed_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return where rows of blocks begin in ``indices`` and in q, and the bits of a mask."""
        sizes = [check_count(n, v, least=1) for n, v in zip("MNRC", shape, strict=True)]
        rows, columns, block_rows, block_columns = sizes
        if columns % block_columns:
            raise ValueError(f"N is {columns}: expected a multiple of C, {block_columns}")
        starts = _starts(indptr, indices, -(-rows // block_rows), columns // block_columns)
        begins = torch.arange(len(starts), device="cpu") * block_rows
        qo_indptr = begins.clamp(max=rows).int()
        bits = None if packed_mask is not None else _bits(mask, starts, qo_indptr, sizes[2:])
        self._shape = rows, columns, block_columns
        return torch.tensor(starts, dtype=torch.int32, device="cpu"), qo_indptr, bits

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, scale_q: Tensor | None = None,
        scale_k: Tensor | None = None, scale_v: Tensor | None = None, out: Tensor | None = None,
        lse: Tensor | None = None, return_lse: bool = False, enable_pdl: bool | None = None,
    ) -> Results:  # fmt: skip
        """Attend the rows to the columns of their blocks, on the current stream.

        Args:
            q: [M, num_qo_heads, head_dim].
            k: [N, num_kv_heads, head_dim].
            v: likewise.
            scale_q: refused unless None.
            scale_k: of FP8: float32 [num_kv_heads].
            scale_v: likewise.
            out: filled and returned where given.
            lse: float32 [M, num_qo_heads], filled where given.
            return_lse: return lse, too.
            enable_pdl: no effect.

        Returns:
            out, or (out, lse), base 2. A row without blocks has out 0 and lse -inf.

        Raises:
            TypeError, ValueError, ConfigError: naming the argument, before any launch.
        """
        refuse_unbuilt(locals())
        if self._shape is None:
            raise RuntimeError("run was called before plan")
        if scale_q is not None:
            raise ValueError("scale_q is given: q is not quantised, expected None")
        rows, columns, block_columns = self._shape
        for name, tensor, tokens in (("q", q, rows), ("k", k, columns), ("v", v, columns)):
            _check_shape(name, tensor, f"[{tokens}, num_heads, head_dim]", 0, tokens)
        pages = _split(k, -1, block_columns), _split(v, -1, block_columns)
        return self._inner.run(
            q, pages, k_scale=scale_k, v_scale=scale_v, out=out, lse=lse, return_lse=return_lse,
            enable_pdl=enable_pdl,
        )  # fmt: skip

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale_q: Tensor | None = None,
        scale_k: Tensor | None = None, scale_v: Tensor | None = None,
        pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None, sm_scale: float | None = None,
        rope_scale: float | None = None, rope_theta: float | None = None,
    ) -> Results:  # fmt: skip
        """Call ``run``; a scale or cap is that of ``plan``, and others are refused."""
        refuse_unbuilt(locals())
        _refuse(logits_soft_cap=logits_soft_cap, sm_scale=sm_scale)
        return self.run(q, k, v, scale_q, scale_k, scale_v)


class VariableBlockSparseAttentionWrapper(OverAnother):
    """Attention of rows to columns in blocks of any sizes, which each KV head has of its own."""

    _inner: BatchPrefillWithPagedKVCacheWrapper

    def __init__(self, float_workspace_buffer: Tensor, backend: str = "auto") -> None:
        """Remember the device: arguments as of ``BlockSparseAttentionWrapper``."""
        refuse_unbuilt(locals())
        self._inner = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer)
        self._shape: tuple[int, int, int] | None = None

    def plan(
        self, block_mask_map: Tensor, block_row_sz: Tensor, block_col_sz: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim: int, causal: bool = False,
        pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None, sm_scale: float | None = None,
        rope_scale: float | None = None, rope_theta: float | None = None,
        non_blocking: bool = True, q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None, q_scale: Tensor | None = None,
        k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Plan a matrix of blocks for each KV head. It waits for the device.

        ``block_mask_map`` is bool [num_kv_heads, row blocks, column blocks], ``block_row_sz``
        [num_kv_heads, row blocks] and ``block_col_sz`` [num_kv_heads, column blocks] are the sizes
        of blocks, int32 or int64, with the same sum for all heads. Scales are refused unless None,
        and others are as of ``BlockSparseAttentionWrapper.plan``.

        Raises:
            TypeError, ValueError, ConfigError: naming the argument.
        """
        refuse_unbuilt(locals())
        _refuse(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        _refuse_causal(causal)
        heads = check_count("num_kv_heads", num_kv_heads, least=1)
        check_tensor("block_mask_map", block_mask_map, _BITS)
        if block_mask_map.dim() != 3 or block_mask_map.shape[0] != heads:
            raise ValueError(
                f"block_mask_map has shape {list(block_mask_map.shape)}: expected [{heads}, row "
                "blocks, column blocks]"
            )
        num_rows, num_columns = block_mask_map.shape[1:]
        q_lens = _sizes("block_row_sz", block_row_sz, heads, num_rows)
        widths = _sizes("block_col_sz", block_col_sz, heads, num_columns)
        rows, columns = int(q_lens[0].sum()), int(widths[0].sum())
        # Whether a row of blocks sees each key: all keys of a head follow each other.
        masks = block_mask_map.cpu().bool()
        sees = torch.stack(
            [mask.repeat_interleave(w, dim=1) for mask, w in zip(masks, widths, strict=True)]
        )
        counts = sees.sum(-1).flatten()
        keys = sees.nonzero()
        num_qo_heads = check_count("num_qo_heads", num_qo_heads, least=1)
        if num_qo_heads % heads:
            raise ValueError(f"num_qo_heads is {num_qo_heads}: expected a multiple of {heads}")
        self._shape = heads, rows, columns
        self._inner.plan(
            _offsets(q_lens.flatten()), _offsets(counts), (keys[:, 0] * columns + keys[:, 2]).int(),
            (counts > 0).int(), num_qo_heads // heads, 1, head_dim, 1, sm_scale=sm_scale,
            logits_soft_cap=logits_soft_cap, q_data_type=q_data_type, kv_data_type=kv_data_type,
            non_blocking=non_blocking,
        )  # fmt: skip

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None,
        lse: Tensor | None = None, return_lse: bool = False, enable_pdl: bool | None = None,
    ) -> Results:  # fmt: skip
        """Attend the rows to the columns of their blocks, on the current stream.

        ``q`` is [num_qo_heads, rows, head_dim], which is copied, ``k`` and ``v`` are [num_kv_heads,
        columns, head_dim]; ``out`` like ``q`` and ``lse``, float32 [num_qo_heads, rows], are
        filled where given.

        Returns:
            out like ``q``, or (out, lse), base 2. A row without blocks has out 0 and lse -inf.

        Raises:
            TypeError, ValueError, ConfigError: naming the argument, before any launch.
        """
        refuse_unbuilt(locals())
        if self._shape is None:
            raise RuntimeError("run was called before plan")
        heads, rows, columns = self._shape
        for name, tensor, tokens in (("q", q, rows), ("k", k, columns), ("v", v, columns)):
            _check_shape(name, tensor, f"[num_heads, {tokens}, head_dim]", 1, tokens)
        for name, tensor in (("k", k), ("v", v)):
            if tensor.shape[0] != heads:
                raise ValueError(f"{name} has {tensor.shape[0]} heads: plan was given {heads}")
        by_head = _split(q, heads, -1).transpose(1, 2).flatten(0, 1)
        pages = tuple(part.reshape(heads * columns, 1, 1, part.shape[2]) for part in (k, v))
        found, found_lse = self._inner.run(by_head, pages, return_lse=True)  # type: ignore[arg-type]
        result = _by_head(found, heads)
        result_lse = _by_head(found_lse, heads)
        if out is not None:
            result = out.copy_(result)
        if lse is not None:
            result_lse = lse.copy_(result_lse)
        return (result, result_lse) if check_flag("return_lse", return_lse) else result

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, logits_soft_cap: float | None = None,
        sm_scale: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Results:  # fmt: skip
        """Call ``run``; a scale or cap is that of ``plan``, and others are refused."""
        refuse_unbuilt(locals())
        _refuse(logits_soft_cap=logits_soft_cap, sm_scale=sm_scale)
        return self.run(q, k, v)


def _refuse(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} is given: it is of one of FlashInfer's backends, or of plan")


def _refuse_causal(causal: bool) -> None:
    if check_flag("causal", causal):
        raise ValueError("causal is True: chosen blocks follow each other, mask says what is seen")


def _check_shape(name: str, tensor: Tensor, wanted: str, dim: int, tokens: int) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}: expected a tensor")
    if tensor.dim() != 3 or tensor.shape[dim] != tokens:
        raise ValueError(f"{name} has shape {list(tensor.shape)}: expected {wanted}")


def _starts(
    indptr: Tensor | None, indices: Tensor | None, num_rows: int, num_columns: int
) -> list[int]:
    """Check the blocks of a matrix, and return where those of each row of blocks begin."""
    if indptr is None or indices is None:
        raise ValueError("indptr and indices are None: they say which blocks there are")
    check_indptr("indptr", indptr)
    check_tensor("indices", indices, (torch.int32,))
    if indptr.shape[0] != num_rows + 1:
        raise ValueError(f"indptr has {indptr.shape[0]} entries: expected {num_rows + 1}")
    starts = [int(n) for n in indptr.tolist()]
    chosen = indices[: starts[-1]]
    if chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < num_columns:
        raise ValueError(f"indices are of blocks that aren't there: there are {num_columns}")
    return starts


def _bits(
    mask: Tensor | None, starts: list[int], qo_indptr: Tensor, block: list[int]
) -> Tensor | None:
    """Return the custom mask of rows of blocks, each row of it over all their columns."""
    if mask is None:
        return None
    check_tensor("mask", mask, _BITS)
    if tuple(mask.shape) != (starts[-1], *block):
        raise ValueError(f"mask has shape {list(mask.shape)}: expected {[starts[-1], *block]}")
    parts = [
        mask[a:b].bool().transpose(0, 1)[:rows].reshape(-1)
        for a, b, rows in zip(starts, starts[1:], qo_indptr.diff().tolist(), strict=False)
    ]
    return torch.cat(parts) if parts else mask.new_zeros(0, dtype=torch.bool)


def _sizes(name: str, sizes: Tensor, heads: int, blocks: int) -> Tensor:
    """Check the sizes of blocks, and return them on the host."""
    check_tensor(name, sizes, INTEGERS)
    if tuple(sizes.shape) != (heads, blocks):
        raise ValueError(f"{name} has shape {list(sizes.shape)}: expected {[heads, blocks]}")
    sizes = sizes.cpu()
    totals = sizes.sum(1).tolist()
    if bool((sizes < 0).any()) or len(set(totals)) > 1:
        raise ValueError(
            f"{name} has sums {totals}: expected the same for all heads, of sizes >= 0"
        )
    return sizes


def _offsets(sizes: Tensor) -> Tensor:
    return torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).int()


def _by_head(tensor: Tensor, heads: int) -> Tensor:
    """Return [num_qo_heads, rows, ..] of [num_kv_heads * rows, group, ..]."""
    return _split(tensor, heads, -1).transpose(1, 2).flatten(0, 1)


def _split(tensor: Tensor, outer: int, inner: int) -> Tensor:
    """Return a view whose first dimension is two."""
    parts: Tensor = tensor.unflatten(0, (outer, inner))  # type: ignore[no-untyped-call]
    return parts
