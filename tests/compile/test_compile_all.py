"""Compile a pairwise sample of the support table for every architecture. Needs NVRTC and no GPU.

A kernel must not spill, must multiply on tensor cores, must fit the shared memory of its
architecture, and must stay within a budget of machine code, since code costs time to compile.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from jitattn.jit import nvrtc
from jitattn.jit.cubin import resources_of
from jitattn.kernels.attention.spec import DecodeSpec, NarrowPrefillSpec, PrefillSpec
from jitattn.kernels.common.spec import AttentionSpec, ScheduleSpec
from jitattn.kernels.common.tile import DecodeTile, PrefillTile, WarpgroupTile
from jitattn.kernels.registry import specs_of
from jitattn.spec.arch import ARCHITECTURES, ARCHS
from jitattn.spec.config import HEAD_DIMS, PlannerConfig
from jitattn.spec.dtype import Q_DTYPES, DType
from jitattn.spec.family import KernelSpec
from jitattn.spec.layout import Layout, Loader
from tests.support.compiler import advice, compile_kernel, instructions, most_spilled, opcodes
from tests.support.sample_specs import SAMPLE, sample_specs
from tests.support.warpgroups import warpgroup_specs


@dataclass(frozen=True)
class Job:
    """A kernel to compile, and whether to read its machine code too."""

    spec: KernelSpec
    arch: str
    disassemble: bool = False

    def __str__(self) -> str:
        return f"{self.arch}-{self.spec.symbol.removeprefix('jitattn_')}"


# Of pages of 16 tokens, as engines have them: the kernels of every row tile, by their boxes.
EVERYDAY = (
    *(f"head_dim=64,num_qo_heads={8 * group}" for group in (4, 16, 32)),
    *(f"head_dim=128,num_qo_heads={8 * group}" for group in (4, 16)),
    "head_dim=128,num_qo_heads=128,kv_dtype=float8_e4m3fn",
    "head_dim=128,kv_dtype=float8_e5m2,page_table=separate",
    "head_dim=192,head_dim_vo=128,q_dtype=float16,kv_dtype=float16",
    "head_dim=256,page_table=csr",
    "head_dim=256,kv_dtype=float8_e4m3fn,use_custom_mask=true",
    "head_dim=256,logits_soft_cap=30,page_size=48",
    "head_dim=512,kv_dtype=float8_e5m2,page_size=64",
    "head_dim=64,num_qo_heads=256,kv_dtype=nvfp4,q_dtype=float16",
    "head_dim=128,kv_dtype=int8",
    "head_dim=128,kv_dtype=nvfp4",
    "head_dim=240,kv_dtype=nvfp4,use_custom_mask=true,logits_soft_cap=30",
    "head_dim=128,kv_dtype=int4_g32",
    "head_dim=64,kv_dtype=int4_g64,q_dtype=float16",
    "head_dim=128,num_qo_heads=128,page_table=page_lists",
    "head_dim=256,kv_dtype=float8_e4m3fn,page_table=indices,logits_soft_cap=30",
)


def jobs() -> Iterator[Job]:
    """A quarter of the sample for sm_90a, a sixteenth each of others; what needs most registers.

    Kernels of few rows are those of the fast loader. ALL_KERNELS=1 compiles all for sm_90a.
    """
    has_all = bool(os.environ.get("ALL_KERNELS"))
    step = 1 if has_all else 4
    for spec in warpgroup_specs():
        is_narrow = isinstance(spec, NarrowPrefillSpec)
        if has_all or not (is_narrow and spec.loader is Loader.PLAIN):
            yield Job(spec, "sm_90a", disassemble=not is_narrow)
    for config in EVERYDAY:
        for spec in specs_of(PlannerConfig.parse(config), "sm_90a"):
            if isinstance(spec, DecodeSpec) and spec.loader is not Loader.PLAIN:
                yield Job(spec, "sm_90a", disassemble=True)
    for i, arch in enumerate(ARCHITECTURES):
        yield Job(ScheduleSpec(), arch)
        yield Job(ScheduleSpec(has_lists=True), arch)
        for n, spec in enumerate(sample_specs(arch)):
            is_chosen = n % step == 0 if arch == "sm_90a" else n % 16 == i
            if is_chosen or is_heavy(spec):
                yield Job(spec, arch, disassemble=n % 9 == i)


def is_heavy(spec: AttentionSpec) -> bool:
    """Many accumulators, and several pages of a warp's slice to address at once."""
    if isinstance(spec, PrefillSpec):
        return spec.head_dim in (48, 96, 240)
    if isinstance(spec, DecodeSpec) and spec.row_tile == 32:
        return max(spec.head_dim, spec.head_dim_vo) == 64
    return spec.head_dim in (128, 224, 240, 256) and spec.page_size < 16


JOBS = tuple(dict.fromkeys(jobs()))


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> Iterator[dict[Job, Future[nvrtc.Compiled]]]:
    """Compile what is asked for ahead of the tests; NVRTC works outside the GIL.

    On this process's share of the cores: more threads take a fifth longer for the same kernels.
    """
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    jobs = dict.fromkeys(call.params["job"] for call in calls if call and "job" in call.params)
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // processes)) as pool:
        yield {job: pool.submit(compile_kernel, job.spec, job.arch) for job in jobs}
        pool.shutdown(cancel_futures=True)


def code_budget(spec: KernelSpec, arch: str) -> int:
    """Bytes of machine code a kernel may have: some 10 % above what the largest ones have.

    Machine code grows with the unrolled products, which a decode kernel has for each head_dim, and
    costs about 10 ms of ptxas per KiB. Raise it knowingly.
    """
    if isinstance(spec, ScheduleSpec):
        return 59 * 1024
    if isinstance(spec.tile(arch), WarpgroupTile):
        return 130 * 1024
    if isinstance(spec, PrefillSpec):
        return 90 * 1024
    return 78 * 1024 + 288 * spec.head_dim


def spills_allowed(spec: KernelSpec) -> int:
    """Bytes that a thread may spill besides.

    Sums of a tile's 8-bit products beside the output's leave the widest kernel too few registers
    for some numbers. Tiles of 96 tokens need none, and take 9 % longer (docs/perf-log.md).

    Rows of 16 over four bits have slices as long as rows of 8, whose bits they have: with wide
    heads, masks, soft caps or pages that no slice begins with leave them too few.
    """
    if isinstance(spec, DecodeSpec):
        is_long = spec.row_tile == 16 and spec.kv_dtype.blocks is not None
        return 80 if is_long and max(spec.head_dim, spec.head_dim_vo) > 96 else 0
    has_sums = isinstance(spec, PrefillSpec) and spec.has_fp8_queries
    return 24 if has_sums and spec.head_dim_vo == 128 else 0


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_kernel(job: Job, compiled: dict[Job, Future[nvrtc.Compiled]], tmp_path: Path) -> None:
    result = compiled[job].result()
    resources = resources_of(result.cubin, job.spec.symbol, job.arch)
    assert resources.spill_bytes <= most_spilled() + spills_allowed(job.spec)
    assert resources.registers <= 255
    smem_bytes = resources.smem_bytes + job.spec.tile(job.arch).smem_bytes
    assert smem_bytes <= ARCHS[job.arch].smem_bytes
    assert resources.code_bytes <= code_budget(job.spec, job.arch)
    assert not advice(result.log)
    if job.disassemble:
        assert isinstance(job.spec, AttentionSpec)
        check_machine_code(job.spec, job.arch, opcodes(result.cubin, tmp_path))


def check_machine_code(spec: AttentionSpec, arch: str, found: list[str]) -> None:
    has_warpgroups = isinstance(spec.tile(arch), WarpgroupTile)
    kind, other = ("HGMMA", "HMMA") if has_warpgroups else ("HMMA", "HGMMA")
    if isinstance(spec, PrefillSpec) and spec.has_fp8_queries:
        kind = "QGMMA"
    products = [op for op in found if op.startswith(kind)]
    is_bfloat16 = spec.q_dtype == "bfloat16" and not multiplies_in_float16(spec)
    if isinstance(spec, PrefillSpec) and has_warpgroups:
        is_bfloat16 = spec.tile(arch).product_dtype == "bfloat16"
    assert all(".F32" in op and (".BF16" in op) == is_bfloat16 for op in products)
    assert len(products) >= num_products(spec, arch)
    spills = () if most_spilled() + spills_allowed(spec) else ("LDL", "STL")
    assert not [op for op in found if op.startswith((other, *spills))]
    # Boxes and vectors go around the registers into shared memory; single elements can't.
    assert any(op.startswith("UTMALDG") for op in found) == (spec.loader is Loader.TENSOR)
    copies_vectors = spec.loader is Loader.VECTOR or has_warpgroups  # theirs is Q
    assert any(op.startswith("LDGSTS") for op in found) == copies_vectors


def multiplies_in_float16(spec: AttentionSpec) -> bool:
    """Whether decode converts K and V to float16, for which it needs some registers."""
    return (
        isinstance(spec, DecodeSpec)
        and spec.kv_dtype is not spec.q_dtype
        and spec.head_dim <= 256
        and spec.row_tile <= 16
    )


def num_products(spec: AttentionSpec, arch: str) -> int:
    """The least that the products of a kernel come to, each 16 x 8 x 16, or 64 rows by 16.

    The accumulator of the second product lives in registers, so its products are unrolled. The
    first product is a loop over head_dim.
    """
    tile = spec.tile(arch)
    if isinstance(tile, WarpgroupTile):
        return spec.head_dim // 16 + tile.tile_tokens // 16
    assert isinstance(tile, DecodeTile | PrefillTile)
    if isinstance(spec, PrefillSpec):  # O += P V: columns by 8, tokens by 16; S = Q K^T
        return (tile.value_dim // 8) * (tile.tile_tokens // 16) + tile.tile_tokens // 8
    assert isinstance(spec, DecodeSpec)  # O^T += V^T P: columns by 16, rows by 8
    return (tile.value_dim // 16 + 1) * (spec.row_tile // 8)


def test_sample_has_every_pair() -> None:
    specs = sample_specs("sm_90a")
    assert len(set(specs)) == len(specs)
    for head_dim in HEAD_DIMS:
        of_dim = [spec for spec in specs if spec.head_dim == head_dim]
        # TMA brings rows of whole segments in decode, too.
        least = {Loader.TENSOR} if head_dim % 64 == 0 else set()
        assert {spec.loader for spec in of_dim} >= {Loader.VECTOR, Loader.PLAIN} | least
        assert {spec.page_table for spec in of_dim} == set(Layout)
        assert {spec.use_custom_mask for spec in of_dim} == {False, True}
        assert {type(spec) for spec in of_dim} == {DecodeSpec, PrefillSpec}
    assert {spec.row_tile for spec in specs if isinstance(spec, DecodeSpec)} == {8, 16, 32}
    prefill = [spec for spec in specs if isinstance(spec, PrefillSpec)]
    assert {spec.page_table for spec in prefill} == set(Layout)
    for some in (specs, prefill):
        assert {spec.page_size for spec in some} >= {1, 3, 16, 64, 128}


def test_softmax_runs_beside_products(tmp_path: Path) -> None:
    """Of a warpgroup: while one tile is multiplied with V, the next becomes probabilities.

    Otherwise the tensor cores would wait for each softmax of a warpgroup that has its turn.
    """
    symbol = "jitattn_prefill_d128_p16_qbf16_kvbf16_obf16_shared_tensor"
    job = next(job for job in JOBS if job.spec.symbol == symbol)
    tile = job.spec.tile(job.arch)
    assert isinstance(tile, WarpgroupTile)
    code = instructions(compile_kernel(job.spec, job.arch).cubin, tmp_path)
    waits = [i for i, what in enumerate(code) if what.startswith("WARPGROUP.DEPBAR.LE gsb0")]
    # From "the scores are there" on, products with V are under way until the wait for all.
    spans = [
        code[begin:end]
        for begin, end in itertools.pairwise(waits)
        if code[begin].endswith("0x1") and code[end].endswith("0x0")
    ]
    exponentials = [sum(what.startswith("MUFU.EX2") for what in span) for span in spans]
    assert max(exponentials, default=0) >= tile.tile_tokens // 2, exponentials


def test_every_kind_of_box_is_compiled() -> None:
    found = [job.spec for job in JOBS if isinstance(job.spec, DecodeSpec)]
    boxes = [spec for spec in found if spec.loader is Loader.TENSOR]
    assert {spec.page_size for spec in boxes} == {8, 16, 48, 64, 128}
    assert {spec.page_table for spec in boxes} == {"shared", "separate", "csr", "page_lists"}
    without = {None, DType.NVFP4, DType.INT4}  # the scales of blocks
    assert {spec.kv_dtype for spec in boxes} == set(SAMPLE["kv_dtype"]) - without | set(Q_DTYPES)
    assert {spec.row_tile for spec in boxes} == {8, 16, 32}
    assert {spec.use_custom_mask for spec in boxes} == {False, True}
    assert {spec.use_logits_soft_cap for spec in boxes} == {False, True}
    assert {spec.head_dim for spec in boxes} == {64, 128, 192, 256, 512}
