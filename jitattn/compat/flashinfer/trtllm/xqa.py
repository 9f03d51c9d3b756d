"""FlashInfer's XQA functions: decode over block tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jitattn.base.validate import check_count, check_number, shown
from jitattn.compat.flashinfer.common.arguments import (
    check_layout,
    check_workspace,
    refuse_unbuilt,
)
from jitattn.compat.flashinfer.trtllm.attention import trtllm_batch_decode_with_kv_cache
from jitattn.compat.flashinfer.trtllm.latents import trtllm_batch_decode_with_kv_cache_mla
from jitattn.tensors.scales import ScaleLike
from jitattn.tensors.tensor_checks import check_tensor, check_writable


def xqa_batch_decode_with_kv_cache(
    query: Tensor, kv_cache: Tensor | tuple[Tensor, Tensor], workspace_buffer: Tensor,
    block_tables: Tensor, seq_lens: Tensor, max_seq_len: int, bmm1_scale: ScaleLike = 1.0,
    bmm2_scale: ScaleLike = 1.0, window_left: int = -1, out: Tensor | None = None,
    sinks: Tensor | None = None, kv_layout: str = "NHD", enable_pdl: bool | None = None,
    q_len_per_req: int | None = 1, o_scale: float | None = 1.0, mask: Tensor | None = None,
    kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
    q_cu_seq_lens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Do what ``trtllm_batch_decode_with_kv_cache`` does: arguments are as there.

    With ``q_cu_seq_lens``, int32 [batch_size + 1], ``q_len_per_req`` is the most of a request.

    Returns:
        out like ``query``.

    Raises:
        TypeError, ValueError, ConfigError: naming the argument, before any launch.
    """
    ragged: dict[str, Any] = {"q_len_per_req": q_len_per_req}
    if q_cu_seq_lens is not None:
        ragged = {"cum_seq_lens_q": q_cu_seq_lens, "max_q_len": q_len_per_req or 1}
    found = trtllm_batch_decode_with_kv_cache(
        query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale,
        bmm2_scale, window_left, out, sinks=sinks, kv_layout=kv_layout, enable_pdl=enable_pdl,
        o_scale=o_scale, mask=mask, kv_cache_sf=_pair(kv_cache_sf),
        **ragged,
    )  # fmt: skip
    assert isinstance(found, Tensor)
    return found


def xqa_batch_decode_with_kv_cache_mla(
    query: Tensor, kv_cache: Tensor, workspace_buffer: Tensor, qk_nope_head_dim: int,
    kv_lora_rank: int, qk_rope_head_dim: int, block_tables: Tensor, seq_lens: Tensor,
    max_seq_len: int, out: Tensor | None = None, bmm1_scale: ScaleLike = 1.0,
    bmm2_scale: ScaleLike = 1.0, sinks: list[Tensor] | None = None,
    enable_pdl: bool | None = None,
) -> Tensor:  # fmt: skip
    """Do what ``trtllm_batch_decode_with_kv_cache_mla`` does: arguments are as there."""
    found = trtllm_batch_decode_with_kv_cache_mla(
        query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim,
        block_tables, seq_lens, max_seq_len, 0, out, bmm1_scale, bmm2_scale, sinks,
        enable_pdl=enable_pdl,
    )  # fmt: skip
    assert isinstance(found, Tensor)
    return found


def xqa(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, seq_lens: Tensor,
    output: Tensor, workspace_buffer: Tensor, semaphores: Tensor, num_kv_heads: int,
    page_size: int, sinks: Tensor | None = None, q_scale: ScaleLike = 1.0,
    kv_scale: ScaleLike = 1.0, sliding_win_size: int = 0, kv_layout: str = "NHD",
    sm_count: int | None = None, enable_pdl: bool | None = None, rcp_out_scale: float = 1.0,
    q_seq_len: int = 1, mask: Tensor | None = None, *, q_cu_seq_lens: Tensor | None = None,
    k_sf_cache: Tensor | None = None, v_sf_cache: Tensor | None = None,
) -> None:  # fmt: skip
    """Attend a few queries of each request to its pages, and write ``output``.

    ``q`` and ``output`` are [batch_size, 1, num_heads, head_dim], [batch_size, 1, q_seq_len, ..]
    or with ``q_cu_seq_lens`` (int32 [batch_size + 1]) [num_tokens, num_heads, head_dim], float16 or
    bfloat16. ``k_cache`` and ``v_cache`` are [num_pages, page_size, num_kv_heads, head_dim] ("HND":
    heads before tokens), like ``q`` or FP8, ``page_table`` int32 [batch_size, max_pages] and
    ``seq_lens`` [batch_size, 1]. Scores are divided by sqrt(head_dim), besides the scales. Of
    ``sliding_win_size`` keys the last is the query's own; 0 is all. ``sinks`` has a number for each
    head. ``mask``, the scales of NVFP4 and a ``rcp_out_scale`` other than 1 are refused;
    ``workspace_buffer`` and ``semaphores`` are not written, ``sm_count`` has no effect.

    Raises:
        TypeError, ValueError, ConfigError: naming the argument, before any launch.
    """
    refuse_unbuilt({"mask": mask, "enable_pdl": enable_pdl, "kv_cache_sf": k_sf_cache})
    refuse_unbuilt({"kv_cache_sf": v_sf_cache})
    _check_shared(q, output, semaphores, sm_count)
    if (factor := check_number("rcp_out_scale", rcp_out_scale)) != 1.0:
        raise ValueError(f"rcp_out_scale is {factor}: outputs have no scale, expected 1")
    sizes = [page_size, num_kv_heads]
    if check_layout(kv_layout) == "HND":
        sizes.reverse()
    if list(k_cache.shape[1:3]) != sizes:
        raise ValueError(f"k_cache has pages of {list(k_cache.shape[1:3])}: expected {sizes}")
    rows = q.flatten(0, -3)
    window = check_count("sliding_win_size", sliding_win_size, least=0)
    scale = _product(q_scale, kv_scale, q.shape[-1] ** -0.5, k_cache)
    found = xqa_batch_decode_with_kv_cache(
        rows, (k_cache, v_cache), workspace_buffer, page_table, _lens(seq_lens),
        page_table.shape[1] * page_size, *scale, window - 1, sinks=sinks,
        kv_layout=kv_layout, q_len_per_req=q_seq_len, q_cu_seq_lens=q_cu_seq_lens,
    )  # fmt: skip
    output.copy_(found.view(q.shape))


def xqa_mla(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, seq_lens: Tensor,
    output: Tensor, workspace_buffer: Tensor, semaphores: Tensor, page_size: int,
    q_scale: ScaleLike = 1.0, kv_scale: ScaleLike = 1.0, sm_count: int | None = None,
    enable_pdl: bool | None = None,
) -> None:  # fmt: skip
    """Attend a query of each request to its latents of 512 and 64, and write ``output``.

    ``q`` is [batch_size, 1, num_heads, 576], float16 or bfloat16 (FP8 is refused), ``k_cache``
    [num_pages, page_size, 576] or with one head before the last dimension; ``v_cache`` must be the
    first 512 elements of the same memory. Others are as of ``xqa``.

    Raises:
        TypeError, ValueError, ConfigError: naming the argument, before any launch.
    """
    refuse_unbuilt({"enable_pdl": enable_pdl})
    _check_shared(q, output, semaphores, sm_count)
    cache = k_cache.view(-1, page_size, k_cache.shape[-1])
    if v_cache.data_ptr() != k_cache.data_ptr():
        raise ValueError("v_cache is other memory than k_cache: a latent is both")
    numbers = (check_number("q_scale", q_scale), check_number("kv_scale", kv_scale))
    found = xqa_batch_decode_with_kv_cache_mla(
        q, cache, workspace_buffer, 128, 512, 64, page_table, _lens(seq_lens),
        page_table.shape[1] * page_size, None, numbers[0] * numbers[1] * 192**-0.5,
        numbers[1] if cache.dtype == torch.float8_e4m3fn else 1.0,
    )  # fmt: skip
    output.copy_(found.view(output.shape))


def _pair(scales: Tensor | tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
    return (scales[:, 0], scales[:, 1]) if isinstance(scales, Tensor) else scales


def _check_shared(q: Tensor, output: Tensor, semaphores: Tensor, sm_count: int | None) -> None:
    check_tensor("q", q, (torch.float16, torch.bfloat16))
    check_tensor("output", output, (q.dtype,))
    check_writable("output", output)
    check_workspace("semaphores", semaphores, q.device)
    if sm_count is not None:
        check_count("sm_count", sm_count)
    if q.dim() not in (3, 4, 5) or (q.dim() > 3 and q.shape[1] != 1):
        raise ValueError(
            f"q has shape {list(q.shape)}: expected [batch_size, 1, num_heads, head_dim], with "
            "q_seq_len before heads where it is more than 1, or [num_tokens, ..]"
        )


def _lens(seq_lens: Tensor) -> Tensor:
    """Return [batch_size] of [batch_size, 1], the lengths of one beam each."""
    if not isinstance(seq_lens, Tensor):
        raise TypeError(f"seq_lens is {shown(seq_lens)}: expected a tensor")
    return seq_lens.squeeze(1) if seq_lens.dim() == 2 and seq_lens.shape[1] == 1 else seq_lens


def _product(
    q_scale: ScaleLike, kv_scale: ScaleLike, factor: float, cache: Tensor
) -> tuple[ScaleLike, ScaleLike]:
    """Return what multiplies scores, and what multiplies values."""
    if cache.dtype.itemsize > 1:
        numbers = check_number("q_scale", q_scale), check_number("kv_scale", kv_scale)
        return numbers[0] * numbers[1] * factor, numbers[1]
    return q_scale * kv_scale * factor, kv_scale
