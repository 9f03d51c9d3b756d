"""Compile kernels of latent attention for every architecture. Needs NVRTC and no GPU.

As in test_compile_all.py: no spills, no serialised products, tensor cores, shared memory that fits.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from jitattn.jit.cubin import resources_of
from jitattn.kernels.common.tile import PrefillTile, WarpgroupTile
from jitattn.kernels.mla.config import cache_specs
from jitattn.kernels.mla.spec import MLASpec
from jitattn.kernels.mla.tile import mla_tile
from jitattn.spec.arch import ARCHITECTURES, ARCHS
from jitattn.spec.config import MLAConfig
from jitattn.spec.layout import Loader
from tests.compile.test_compile_all import Job
from tests.support.compiler import advice, compile_kernel, opcodes

# Of 16 heads all three row tiles, of 17 to 32 those of 32 and 64 rows; of lists one each.
HOPPER = (
    "num_heads=16",
    "num_heads=32,page_size=1,page_table=separate",
    "num_heads=16,page_size=8,page_table=token,q_dtype=float16,kv_dtype=float16,out_dtype=float32",
    "num_heads=64,kv_lora_rank=256,qk_rope_head_dim=32,page_table=csr",
    "num_heads=32,kv_dtype=float8_e4m3fn",
    "num_heads=16,page_table=indices",
    "num_heads=64,page_table=indices",
    "num_heads=32,kv_dtype=float8_e4m3fn,page_table=indices",
    "num_heads=64,kv_dtype=float8_e4m3fn,page_table=indices",
    "num_heads=16,kv_lora_rank=256,qk_rope_head_dim=32,kv_dtype=float8_e4m3fn",
)
OTHERS = {
    "sm_80": ("num_heads=128", "num_heads=128,kv_dtype=float8_e4m3fn,page_size=1"),
    "sm_90a": HOPPER,
    "sm_100f": ("num_heads=128,page_table=ragged,page_size=None",),
    "sm_120f": ("num_heads=16,kv_dtype=float8_e4m3fn,page_table=csr",),
}


def is_sampled(spec: MLASpec) -> bool:
    """All but loads of single elements beside a k_pe of another type: both are there apart."""
    return spec.loader is not Loader.PLAIN or spec.k_pe_dtype is spec.kv_dtype


JOBS = [
    Job(spec, arch, disassemble=True)
    for arch, configs in OTHERS.items()
    for config in configs
    for spec in cache_specs(MLAConfig.parse(config), arch)
    if is_sampled(spec)
]
KIB = 1024


def product_dtype(spec: MLASpec, arch: str) -> str:
    """Warpgroups multiply what is FP8 throughout in float16."""
    is_narrow = spec.dequantises and spec.k_pe_dtype is spec.kv_dtype
    has_warpgroups = isinstance(mla_tile(spec, arch), WarpgroupTile)
    return "float16" if is_narrow and has_warpgroups else str(spec.q_dtype)


def has_product_types(spec: MLASpec, arch: str, ops: list[str]) -> bool:
    """Whether products are of one type; few rows multiply FP8 latents as float16."""
    is_bfloat16 = product_dtype(spec, arch) == "bfloat16"
    if spec.is_narrow(arch) and spec.dequantises and is_bfloat16:
        num_bfloat16 = sum(".BF16" in op for op in ops)
        return num_bfloat16 == spec.row_tile // 16 * (spec.head_dim - spec.head_dim_vo) // 16
    return all((".BF16" in op) == is_bfloat16 for op in ops)


def code_allowed(spec: MLASpec, arch: str) -> int:
    """KiB: conversions are unrolled over half a tile, and of lists some count as nothing.

    Maxima rise in either of two tiles. Merges of splits are unrolled over the vectors that a thread
    loads together, for four numbers of splits; products of few rows over all of them.
    """
    if spec.is_narrow(arch):
        return {16: 145, 32: 160}[spec.row_tile]
    return 204 if spec.page_table.is_list else 200


def spills_allowed(spec: MLASpec, arch: str) -> int:
    """Bytes: FP8 rows with scales spill, since the next tile's are brought to L2.

    With that spill lists of them take 3 to 7 % less time (docs/perf-log.md). Of 32 rows a
    thread holds the sums of a scaled latent's two blocks beside those of its k_pe. A merge of rows
    of FP8 whose requests' pages are counted spills on compute capability 12.0.
    """
    if arch == "sm_120f":
        return 8 if spec.page_table == "csr" and spec.kv_dtype is not spec.q_dtype else 0
    if arch != "sm_90a":
        return 0
    if spec.is_narrow(arch):
        return 16 if spec.row_tile == 32 and spec.has_scales and spec.head_dim_vo == 512 else 0
    return 8 if spec.has_scales and spec.loader is Loader.VECTOR else 0


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_kernel(job: Job, tmp_path: Path) -> None:
    spec = job.spec
    assert isinstance(spec, MLASpec)
    tile, result = mla_tile(spec, job.arch), compile_kernel(spec, job.arch)
    for symbol, smem_bytes in ((spec.symbol, tile.smem_bytes), (spec.merge_symbol, 0)):
        resources = resources_of(result.cubin, symbol, job.arch)
        assert resources.spill_bytes <= spills_allowed(spec, job.arch)
        assert resources.smem_bytes + smem_bytes <= ARCHS[job.arch].smem_bytes
        assert resources.code_bytes <= (code_allowed(spec, job.arch) if smem_bytes else 16) * KIB
    assert not advice(result.log)
    found = opcodes(result.cubin, tmp_path)
    products = {kind: [op for op in found if op.startswith(kind)] for kind in ("HGMMA.", "HMMA.")}
    assert all(has_product_types(spec, job.arch, ops) for ops in products.values() if ops)
    steps, tokens = spec.head_dim // 16, tile.tile_tokens
    if isinstance(tile, WarpgroupTile):
        # Of few rows a warp scores sixteen of them and of tokens, or 32 of these, with half of the
        # dims, and has an eighth of the columns of all rows. Others meet two tiles.
        columns = spec.head_dim_vo // tile.num_warps
        of_warps = spec.row_tile // 16 * (2 * steps // 2 + tokens // 16 * columns // 8)
        is_narrow = spec.is_narrow(job.arch)
        assert len(products["HGMMA."]) == (0 if is_narrow else steps + 2 * (tokens // 16))
        assert len(products["HMMA."]) == (of_warps if is_narrow else 0)
        # Who computes waits for the registers that others give: a CTA must have begun with all.
        registers = tile.producer_registers + 2 * tile.consumer_registers
        kernel = resources_of(result.cubin, spec.symbol, job.arch)
        assert registers <= kernel.registers * (tile.num_threads // 128)
    else:
        assert isinstance(tile, PrefillTile)
        # Scores: four warps share the dims of 16 tokens. Output: eight warps share the columns.
        row_tiles, columns = spec.row_tile // 16, spec.head_dim_vo // tile.num_warps
        scores = 2 * row_tiles * (spec.head_dim_vo // 64 + 1)
        assert len(products["HMMA."]) == scores + row_tiles * columns // 8 * (tokens // 16)
        assert not products["HGMMA."]
    assert any(op.startswith("UTMALDG") for op in found) == (spec.loader is Loader.TENSOR)


def test_every_architecture_and_loader_is_compiled() -> None:
    assert {job.arch for job in JOBS} == set(ARCHITECTURES)
    assert {job.spec.loader for job in JOBS if job.arch == "sm_90a"} == set(Loader)  # type: ignore[union-attr]


def test_every_row_tile_is_compiled_with_every_loader() -> None:
    """Of compute capability 9.0; a kernel once."""
    on_hopper = [job.spec for job in JOBS if job.arch == "sm_90a"]
    found = {(spec.row_tile, spec.loader) for spec in on_hopper if isinstance(spec, MLASpec)}
    assert found == set(itertools.product((16, 32, 64), Loader))
    assert len(set(on_hopper)) == len(on_hopper)
