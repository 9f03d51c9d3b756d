"""FlashInfer's other wrappers and functions against their definition in float64, on the CPU."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from jitattn.compat import flashinfer
from jitattn.compat.flashinfer.decode import xqa_batch_decode_with_kv_cache
from jitattn.compat.flashinfer.prefill import trtllm_ragged_attention_deepseek

WORKSPACE = torch.empty(0)
HEADS, DIM, PAGE = (4, 2), 64, 4


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# Two requests of 2 and 3 queries over 7 and 9 keys, after 12 that both share.
QO_INDPTR, KV_INDPTR, LAST = ints(0, 2, 5), ints(0, 2, 5), ints(3, 1)
INDICES = ints(0, 2, 3, 5, 6)
TABLES = QO_INDPTR, KV_INDPTR, INDICES, LAST
SIZES = *HEADS, DIM, PAGE
REQUESTS = ((0, 2, [0, 2], 7), (2, 5, [3, 5, 6], 9))
SHARED = [4, 1, 7]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape).half()


def defined(q: Tensor, k: Tensor, v: Tensor, sees: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Out, and lse in base 2: q [n, heads, dim], k and v [m, heads_k, dim], sees [.., n, m]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.double(), k) * scale
    scores = scores.masked_fill(~sees, -math.inf)
    out = torch.einsum("hnm,mhd->nhd", scores.softmax(-1).nan_to_num(0.0), v)
    return out, (scores.logsumexp(-1) / math.log(2)).T


def check(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    assert (found.double() - wanted.double()).abs().max() < 2e-3


def tokens(pages: Tensor, ids: list[int], n: int) -> tuple[Tensor, Tensor]:
    return pages[ids, 0].flatten(0, 1)[:n], pages[ids, 1].flatten(0, 1)[:n]


def of_requests(q: Tensor, pages: Tensor, shared: list[int], scale: float = 0.125) -> Tensor:
    """Out of the two requests, causal, over shared pages and their own."""
    outs = []
    for a, b, ids, n in REQUESTS:
        parts = zip(tokens(pages, shared, 12), tokens(pages, ids, n), strict=True)
        k, v = (torch.cat(both) if shared else both[1] for both in parts)
        sees = torch.arange(len(k)) <= len(k) - (b - a) + torch.arange(b - a)[:, None]
        outs.append(defined(q[a:b], k, v, sees, scale)[0])
    return torch.cat(outs)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_single_requests(kv_layout: str) -> None:
    q, k, v = normal(7, 4, DIM), normal(20, 2, DIM), normal(20, 2, DIM)
    turned = [x if kv_layout == "NHD" else x.transpose(0, 1).contiguous() for x in (k, v)]
    mask = torch.rand(7, 20) > 0.3
    causal = torch.arange(20) <= 13 + torch.arange(7)[:, None]
    prefill = flashinfer.single_prefill_with_kv_cache
    out, lse = prefill(q, *turned, kv_layout=kv_layout, causal=True, return_lse=True)
    wanted, wanted_lse = defined(q, k, v, causal, 0.125)
    check(out, wanted)
    check(lse, wanted_lse)
    packed = flashinfer.packbits(mask.flatten(), "little")
    for masks in ({"custom_mask": mask}, {"packed_custom_mask": packed}):
        out = prefill(q, *turned, kv_layout=kv_layout, **masks)
        check(out, defined(q, k, v, mask, 0.125)[0])
    out, lse = flashinfer.single_decode_with_kv_cache(
        q[-1], *turned, kv_layout=kv_layout, return_lse=True
    )
    check(out, wanted[-1])
    check(lse, wanted_lse[-1])
    same = flashinfer.single_prefill_with_kv_cache_return_lse(q, k, v, causal=True)
    check(same[1], wanted_lse)


def test_shared_prefixes_and_levels() -> None:
    q, pages = normal(5, 4, DIM), normal(12, 2, PAGE, 2, DIM)
    wanted = of_requests(q, pages, SHARED)
    cascade = flashinfer.MultiLevelCascadeAttentionWrapper(2, WORKSPACE)
    levels = zip((ints(0, 5), ints(0, 3), ints(*SHARED), ints(4)), TABLES, strict=True)
    cascade.plan(*map(list, levels), *SIZES, causal=True)
    check(cascade.run(q, pages), wanted)
    prefill = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(WORKSPACE)
    prefill.begin_forward(*TABLES, *SIZES)
    shared = tokens(pages, SHARED, 12)
    check(prefill.forward(q, *shared, pages, causal=True), wanted)
    last = wanted[[1, 4]]  # the last query of each request
    decode = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(WORKSPACE)
    decode.begin_forward(*TABLES[1:], *SIZES)
    check(decode.forward(q[[1, 4]], *shared, pages), last)
    with pytest.raises(ValueError, match="window_left is 3"):
        levels = zip((ints(0, 5), ints(0, 3), ints(*SHARED), ints(4)), TABLES, strict=True)
        cascade.plan(*map(list, levels), *SIZES, window_left=3)
    with pytest.raises(ValueError, match="qo_indptr_arr has 1"):
        cascade.plan(*([x] for x in TABLES), *SIZES)


def test_mixed_batches_and_sinks() -> None:
    q, pages, sinks = normal(5, 4, DIM), normal(12, 2, PAGE, 2, DIM), torch.randn(4)
    half = {"q_data_type": torch.float16, "kv_data_type": torch.float16}
    batch = flashinfer.BatchAttention(device="cpu")
    sizes = *HEADS, DIM, DIM, PAGE
    batch.plan(QO_INDPTR, KV_INDPTR, INDICES, ints(7, 9), *sizes, causal=True, **half)
    out, lse = batch.run(q, pages)
    check(out, of_requests(q, pages, []))
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(*TABLES, *SIZES, causal=True)
    assert torch.equal(lse, wrapper.run(q, pages, return_lse=True)[1])
    built = {**half, "head_dim_qk": DIM, "head_dim_vo": DIM}
    with_sinks = flashinfer.BatchAttentionWithAttentionSinkWrapper(WORKSPACE, **built)
    with_sinks.plan(*TABLES, *SIZES, causal=True)
    found = with_sinks.run(q, pages, sinks, 0.1, return_lse=True)
    wrapper.plan(*TABLES, *SIZES, causal=True, sm_scale=0.1)
    for one, other in zip(found, wrapper.run(q, pages, sinks=sinks, return_lse=True), strict=True):
        assert torch.equal(one, other)
    decode = flashinfer.BatchDecodeWithAttentionSinkWrapper(WORKSPACE, **built)
    decode.plan(*TABLES[1:], *SIZES)
    assert torch.equal(decode.run(q[[1, 4]], pages, sinks, 0.1), found[0][[1, 4]])
    with pytest.raises(ValueError, match="head_dim is 32: the constructor was given 64"):
        decode.plan(*TABLES[1:], *HEADS, 32, PAGE)
    with pytest.raises(ValueError, match="logits_soft_cap is 2"):
        batch.run(q, pages, logits_soft_cap=2.0)


def test_prefill_beside_decode() -> None:
    q, pages = normal(5, 4, DIM), normal(12, 2, PAGE, 2, DIM)
    k, v = tokens(pages, [8, 9, 10], 10)
    last = q[[1, 4]]
    pod = flashinfer.PODWithPagedKVCacheWrapper(WORKSPACE)
    pod.plan(*TABLES[1:], *SIZES)
    out_p, out_d = pod.run(q, k, v, last, pages, causal_p=True)
    sees = torch.arange(10) <= 5 + torch.arange(5)[:, None]
    check(out_p, defined(q, k, v, sees, 0.125)[0])
    check(out_d, of_requests(q, pages, [])[[1, 4]])
    with pytest.raises(ValueError, match="sm_scale_d is given"):
        pod.run(q, k, v, last, pages, sm_scale_d=0.5)
    both = flashinfer.BatchPODWithPagedKVCacheWrapper(WORKSPACE)
    with pytest.raises(RuntimeError, match="before plan"):
        both.run(q, pages, last, pages)
    both.plan(*TABLES, ints(0, 1, 2), *TABLES[1:], *SIZES)
    outs, lses = both.run(q, pages, last, pages, causal_p=True, return_lse=True)
    check(outs[0], of_requests(q, pages, []))
    check(outs[1], of_requests(q, pages, [])[[1, 4]])
    assert [x.shape for x in lses] == [(5, 4), (2, 4)]


def test_sparse_blocks() -> None:
    q, k, v = normal(10, 4, DIM), normal(20, 2, DIM), normal(20, 2, DIM)
    blocks = torch.rand(3, 4) > 0.4
    blocks[1] = False
    indptr = ints(0, *blocks.sum(1).cumsum(0).tolist())
    indices = blocks.nonzero()[:, 1].int()
    wrapper = flashinfer.BlockSparseAttentionWrapper(WORKSPACE)
    shape = 10, 20, 4, 5
    wrapper.plan(indptr, indices, *shape, *HEADS, DIM)
    sees = blocks.repeat_interleave(4, 0)[:10].repeat_interleave(5, 1)
    out, lse = wrapper.run(q, k, v, return_lse=True)
    wanted, wanted_lse = defined(q, k, v, sees, 0.125)
    check(out, wanted)
    assert torch.equal(lse.isinf(), wanted_lse.isinf())
    mask = torch.rand(int(indptr[-1]), 4, 5) > 0.3
    wrapper.plan(indptr, indices, *shape, *HEADS, DIM, mask=mask)
    sees = torch.zeros(12, 20, dtype=torch.bool)
    for n, (i, j) in enumerate(blocks.nonzero().tolist()):
        sees[i * 4 : i * 4 + 4, j * 5 : j * 5 + 5] = mask[n]
    check(wrapper.run(q, k, v), defined(q, k, v, sees[:10], 0.125)[0])
    with pytest.raises(ValueError, match="causal is True"):
        wrapper.plan(indptr, indices, *shape, *HEADS, DIM, causal=True)
    with pytest.raises(ValueError, match="block_mask is given"):
        wrapper.plan(indptr, indices, *shape, *HEADS, DIM, block_mask=blocks)


def test_blocks_of_any_size_for_each_head() -> None:
    q, k, v = normal(4, 10, DIM), normal(2, 20, DIM), normal(2, 20, DIM)
    masks = torch.rand(2, 3, 4) > 0.4
    rows, columns = ints(3, 3, 4, 5, 0, 5).view(2, 3), ints(5, 5, 5, 5, 1, 9, 3, 7).view(2, 4)
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(WORKSPACE)
    wrapper.plan(masks, rows, columns, *HEADS, DIM)
    out, lse = wrapper.run(q, k, v, return_lse=True)
    sees = torch.stack(
        [
            m.repeat_interleave(r, 0).repeat_interleave(c, 1)
            for m, r, c in zip(masks, rows, columns, strict=True)
        ]
    ).repeat_interleave(2, 0)
    flat = (x.transpose(0, 1) for x in (q, k, v))
    wanted, wanted_lse = defined(*flat, sees, 0.125)
    check(out.transpose(0, 1), wanted)
    assert torch.equal(lse.T.isinf(), wanted_lse.isinf())


def test_functions_of_tensorrt_llm() -> None:
    q, pages = normal(5, 4, DIM), normal(12, 2, PAGE, 2, DIM)
    table, last = ints(0, 2, 0, 3, 5, 6).view(2, 3), q[[1, 4]]
    wanted = of_requests(q, pages, [])[[1, 4]]
    out = torch.empty(2, 1, 4, DIM).half()
    lens = torch.tensor([[7], [9]], dtype=torch.uint32)
    flashinfer.xqa(
        last[:, None], pages[:, 0], pages[:, 1], table, lens, out, WORKSPACE, WORKSPACE, 2, PAGE
    )
    check(out[:, 0], wanted)
    found = xqa_batch_decode_with_kv_cache(last, pages, WORKSPACE, table, ints(7, 9), 12, 0.125)
    check(found, wanted)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    flashinfer.fast_decode_plan(wrapper, *TABLES[1:], *SIZES, global_override_indptr_cpu=KV_INDPTR)
    check(wrapper.run(last, pages), wanted)
    assert wrapper.workspace_size(*TABLES[1:], *SIZES) == (0, 0)
    k, v = (
        torch.cat(part) for part in zip(*(tokens(pages, r[2], r[3]) for r in REQUESTS), strict=True)
    )
    ragged = trtllm_ragged_attention_deepseek(
        q, k, v, WORKSPACE, ints(7, 9), 3, 9, 0.125, 1.0, -1, 2, -1, QO_INDPTR, ints(0, 7, 16),
        None, True, False,
    )  # fmt: skip
    check(ragged, of_requests(q, pages, []))


@pytest.mark.parametrize("order", ["big", "little"])
def test_bits_are_packed_as_numpy_does(order: str) -> None:
    x = torch.rand(37) > 0.5
    bits = x.numpy()
    assert flashinfer.packbits(x, order).tolist() == np.packbits(bits, bitorder=order).tolist()
    packed, indptr = flashinfer.segment_packbits(x, ints(0, 4, 4, 20, 37), order)
    parts = [np.packbits(bits[a:b], bitorder=order) for a, b in ((0, 4), (4, 4), (4, 20), (20, 37))]
    assert indptr.tolist() == [0, 1, 1, 3, 6]
    assert packed.tolist() == np.concatenate(parts).tolist()
    with pytest.raises(ValueError, match="bitorder"):
        flashinfer.packbits(x, "middle")


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 32])
def test_rotary_embeddings(interleave: bool, rotary_dim: int | None) -> None:
    q, k = torch.randn(9, 4, DIM), torch.randn(9, 2, DIM)
    offsets, indptr = ints(5, 100), ints(0, 4, 7)
    positions = torch.tensor([5, 6, 7, 8, 100, 101, 102, 0, 0])  # two rows of no request
    dim = rotary_dim or DIM
    frequencies = 1e4 ** (-torch.arange(0, dim, 2).double() / dim)
    angles = positions.double()[:, None] * frequencies / 2
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def turned(x: Tensor) -> Tensor:
        part, rest = x[..., :dim].double(), x[..., dim:].double()
        if interleave:
            pairs = torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous()) * turn
            return torch.cat((torch.view_as_real(pairs).flatten(-2), rest), -1)
        pairs = torch.complex(*part.chunk(2, -1)) * turn
        return torch.cat((pairs.real, pairs.imag, rest), -1)

    how = {"rotary_dim": rotary_dim, "interleave": interleave, "rope_scale": 2}
    by_offset = flashinfer.apply_rope(q, k, indptr, offsets, **how)
    by_position = flashinfer.apply_rope_pos_ids(q, k, positions, **how)
    cache = torch.cat((turn.real, turn.imag), -1)[:, 0].float()
    rows = torch.arange(9)
    by_table = flashinfer.apply_rope_with_cos_sin_cache(
        rows, q.flatten(1), k.flatten(1), DIM, cache, is_neox=not interleave
    )
    for found in (by_offset, by_position, by_table):
        check(found[0].view(q.shape), turned(q))
        check(found[1].view(k.shape), turned(k))
    wanted = turned(q)
    flashinfer.apply_rope_inplace(q, k, indptr, offsets, **how)
    check(q, wanted)


def test_llama_31_keeps_high_frequencies_and_divides_low_ones() -> None:
    q = k = torch.randn(3, 1, 128)
    positions = torch.tensor([0, 10, 3000])
    found = flashinfer.apply_llama31_rope_pos_ids(q, k, positions, interleave=True)[0]
    inv_freq = 5e5 ** (-torch.arange(0, 128, 2).double() / 128)
    wavelength = 2 * math.pi / inv_freq
    smooth = ((8192 / wavelength - 1) / 3).clamp(0, 1)
    inv_freq = (1 - smooth) * inv_freq / 8 + smooth * inv_freq
    angles = positions.double()[:, None] * inv_freq
    pairs = torch.view_as_complex(q.double().unflatten(-1, (-1, 2)))
    wanted = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    check(found, torch.view_as_real(wanted).flatten(-2))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jit_kwargs", {}),
        ("use_token_head_sf", True),
        ("sparse_top_k", 4),
        ("window_right", 3),
        ("variable_window_token_starts", QO_INDPTR),
        ("variable_window_token_ends", QO_INDPTR),
    ],
)
def test_new_keywords_are_refused_by_name(name: str, value: object) -> None:
    q, pages, table = normal(2, 4, DIM), normal(12, 2, 2, PAGE, DIM), ints(0, 2, 3, 5).view(2, 2)
    with pytest.raises(ValueError, match=f"{name} is"):
        if name == "jit_kwargs":
            flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, **{name: value})
        elif name == "use_token_head_sf":
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
            wrapper.plan(*TABLES, *SIZES, **{name: value})
        elif name == "sparse_top_k":
            flashinfer.trtllm_batch_decode_with_kv_cache(
                q, pages, WORKSPACE, table, ints(7, 8), 8, **{name: value}
            )
        else:
            flashinfer.trtllm_batch_context_with_kv_cache(
                q, pages, WORKSPACE, table, ints(7, 8), 1, 8, 1.0, 1.0, 2, ints(0, 1, 2),
                ints(0, 7, 15), **{name: value},
            )  # fmt: skip


def test_copies_on_the_host_must_be_copies() -> None:
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    kv_indptr = ints(0, 7, 16)
    wrapper.plan(
        QO_INDPTR, kv_indptr, *HEADS, DIM, qo_indptr_cpu=QO_INDPTR, kv_indptr_cpu=kv_indptr
    )
    with pytest.raises(ValueError, match="kv_indptr_cpu is"):
        wrapper.plan(QO_INDPTR, kv_indptr, *HEADS, DIM, kv_indptr_cpu=QO_INDPTR)
    with pytest.raises(ValueError, match="max_total_num_rows is given"):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, max_total_num_rows=5)
    with pytest.raises(ValueError, match="args is"):
        wrapper.run(normal(5, 4, DIM), normal(16, 2, DIM), normal(16, 2, DIM), normal(1))
