"""How splits are merged: the template of the kernels, compiled for the CPU, against float64.

The row tiles of 8 and 16 load splits in other numbers, and must give the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from jitattn.jit.sources import TEMPLATES
from tests.emulator.cuda_runtime import QUALIFIERS, WORDS, library_of

DIM = 8
HOST = (
    QUALIFIERS
    + WORDS
    + """
using std::isinf;
template <typename T> T __ldcg(const T* p) { return *p; }
namespace jitattn {
constexpr int kMergeSplits = SPLITS, kMergeLoads = LOADS, kValueDim = 8;
struct AttentionParams { const float2* partial_sums; const float* partials; };
struct PartialRows { int64_t row(int32_t split) const { return 3 * split + 1; } };
inline float neg_inf() { return -INFINITY; }
inline float exp2_approx(float x) { return exp2f(x); }
inline float finite_maximum(float m) { return m == neg_inf() ? 0.f : m; }
template <int kCount, typename Body> void for_each(Body body) {
  for (int i = 0; i < kCount; ++i) body(i);
}
constexpr bool kPacksPartials = false;
float4 unpack_partial(uint2 words);
inline float4 operator*(float4 v, float s) { return {v.x * s, v.y * s, v.z * s, v.w * s}; }
inline float4 fma(float4 a, float b, float4 c) {
  return {fmaf(a.x, b, c.x), fmaf(a.y, b, c.y), fmaf(a.z, b, c.z), fmaf(a.w, b, c.w)};
}
"""
)
CALL = """
}  // namespace jitattn
extern "C" void call(const float2* sums, const float* parts, int num_splits, int dim, float* out) {
  const jitattn::MergedSplits merged({sums, parts}, {}, num_splits, 1, dim);
  out[0] = merged.m, out[1] = merged.d;
  out[2] = merged.o.x, out[3] = merged.o.y, out[4] = merged.o.z, out[5] = merged.o.w;
}
"""

Merge = Callable[[Tensor, Tensor], Tensor]


def merged_splits() -> str:
    """The struct in its header, after that of a split's columns."""
    text = (TEMPLATES / "include/jitattn/attention/output.cuh").read_text()
    template = "template <bool kSkips = false, bool kLeads = false>\n"
    begins = map(text.index, ("struct PartialColumns {", f"{template}struct MergedSplits {{"))
    return "".join(text[begin : text.index("\n};\n", begin) + 4] for begin in begins)


@pytest.fixture(scope="module")
def merge_of() -> Callable[[int, int], Merge]:
    """Compile the template for so many splits and loads at a time."""

    def compiled(splits: int, loads: int) -> Merge:
        host = HOST.replace("SPLITS", str(splits)).replace("LOADS", str(loads))
        return caller(library_of(host + merged_splits() + CALL))

    return compiled


def caller(library: ctypes.CDLL) -> Merge:
    function = library.call

    def merge(sums: Tensor, parts: Tensor) -> Tensor:
        """Maximum, sum and columns from [num_splits, 2] and [num_splits, DIM]."""
        num_splits = len(sums)
        # Rows where PartialRows has them, NaN elsewhere.
        all_sums = torch.full((3 * num_splits + 2, 2), torch.nan)
        all_parts = torch.full((3 * num_splits + 2, DIM), torch.nan)
        all_sums[2::3][:num_splits], all_parts[2::3][:num_splits] = sums, parts
        found = []
        for dim in range(0, DIM, 4):
            out = torch.empty(6)
            function(
                ctypes.c_void_p(all_sums.data_ptr()),
                ctypes.c_void_p(all_parts.data_ptr()),
                num_splits,
                dim,
                ctypes.c_void_p(out.data_ptr()),
            )
            found.append(out)
        assert torch.equal(found[0][:2], found[1][:2])
        return torch.cat([found[0], found[1][2:]])

    return merge


def splits_of(num_splits: int, seed: int) -> tuple[Tensor, Tensor]:
    """Maxima of one scale or of many, some of splits that see nothing."""
    generator = torch.Generator().manual_seed(seed)
    sums = torch.rand(num_splits, 2, generator=generator) * 50 + 1
    sums[:, 0] = torch.randn(num_splits, generator=generator) * (3 if seed % 2 else 40)
    parts = torch.randn(num_splits, DIM, generator=generator)
    empty = torch.rand(num_splits, generator=generator) < (0.3 if seed % 3 else 0.0)
    sums[empty, 0], sums[empty, 1], parts[empty] = -torch.inf, 0.0, 0.0
    return sums, parts


def expected(sums: Tensor, parts: Tensor) -> Tensor:
    m, d = sums.double().T
    top = m.max()
    weights = torch.exp2(m - (0.0 if top.isinf() else top))
    return torch.cat([top[None], (weights * d).sum()[None], weights @ parts.double()])


@pytest.mark.parametrize(("splits", "loads"), [(16, 16), (16, 4), (8, 8), (8, 4), (4, 4), (2, 2)])
def test_merged_splits(merge_of: Callable[[int, int], Merge], splits: int, loads: int) -> None:
    merge = merge_of(splits, loads)
    whole = merge if splits == loads else merge_of(splits, splits)
    for seed, num_splits in enumerate((1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 31, 32, 33, 132, 264)):
        sums, parts = splits_of(num_splits, seed)
        found = merge(sums, parts)
        torch.testing.assert_close(found.double(), expected(sums, parts), rtol=2e-5, atol=2e-4)
        assert torch.equal(found, whole(sums, parts)), "loads have no say in the bits"
    nothing = torch.tensor([[-torch.inf, 0.0]] * 20)
    assert merge(nothing, torch.zeros(20, DIM)).tolist() == [-torch.inf] + [0.0] * (1 + DIM)
