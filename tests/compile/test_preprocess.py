"""Compile kernels of preprocess_qkv and append_kv for every architecture. Needs NVRTC and no GPU.

None may spill, nor have more machine code than compiles in a second.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from jitattn.jit.cubin import resources_of
from jitattn.jit.render import render
from jitattn.kernels.preprocess.params import (
    PREPROCESS_PARAMS,
    CacheStrides,
    PreprocessParams,
    RowStrides,
)
from jitattn.kernels.preprocess.spec import PreprocessConfig, PreprocessSpec
from jitattn.spec.arch import ARCHITECTURES
from jitattn.spec.config import HEAD_DIMS
from jitattn.spec.dtype import KV_DTYPES, DType, row_multiple
from jitattn.spec.layout import Layout, Loader
from tests.compile.test_params import _asserts, _compile
from tests.support.compiler import compile_kernel, instructions

_FIELDS: dict[str, tuple[object, ...]] = {
    "head_dim": HEAD_DIMS,
    "page_size": (1, 3, 16, 64),
    "qkv_dtype": ("bfloat16", "float16"),
    "out_dtype": (None, "float8_e4m3fn", "float8_e5m2"),
    "kv_dtype": tuple(name for name in KV_DTYPES if row_multiple(name) == 16),
    "page_table": ("shared", "separate", "csr", "token", "slots"),
    "pairing": ("none", "neox", "interleaved"),
    "use_mrope": (False, True),
    "use_bias": (False, True),
    "use_norm": (False, True),
}
# What models have, and what needs most registers.
_ALWAYS = (
    "kernel=preprocess",
    "kernel=preprocess,kv_dtype=float8_e4m3fn,out_dtype=float8_e4m3fn",
    "kernel=preprocess,kv_dtype=nvfp4,use_norm=true,use_bias=true,use_mrope=true",
    "kernel=preprocess,kv_dtype=nvfp4,use_norm=true,use_bias=true,out_dtype=float8_e5m2",
    "kernel=preprocess,kv_dtype=int4_g32,use_norm=true,use_bias=true,use_mrope=true",
    "kernel=preprocess,kv_dtype=int8,pairing=interleaved,use_norm=true,use_bias=true,page_table=csr",
    "kernel=preprocess,head_dim=512,head_dim_vo=64,pairing=none,page_table=slots",
    "kernel=preprocess,kv_dtype=int4,head_dim=112,head_dim_vo=64,use_norm=true,use_bias=true,"
    "use_mrope=true,use_qk_hadamard=true,use_v_hadamard=true",
)


def specs_of(arch: str) -> Iterator[PreprocessSpec]:
    place = ARCHITECTURES.index(arch)
    for n, text in enumerate(_ALWAYS):
        if arch == "sm_90a" or n % 2 == place % 2:
            yield from PreprocessConfig.parse(text).specs(arch)
    rng = random.Random(arch)
    columns = [itertools.cycle(rng.sample(values, len(values))) for values in _FIELDS.values()]
    for i in range(6):
        chosen = {name: next(column) for name, column in zip(_FIELDS, columns, strict=True)}
        chosen["use_bias"], chosen["use_norm"] = rng.random() < 0.5, rng.random() < 0.5
        chosen["use_mrope"] = chosen["pairing"] != "none" and rng.random() < 0.5
        config = PreprocessConfig(**chosen)  # type: ignore[arg-type]
        assert config.reasons() == []
        yield config.specs(arch)[i % 2]


JOBS = [(spec, arch) for arch in ARCHITECTURES for spec in specs_of(arch)]


@pytest.mark.parametrize(
    ("spec", "arch"), JOBS, ids=[f"{arch}-{spec.symbol[19:]}" for spec, arch in JOBS]
)
def test_kernel(spec: PreprocessSpec, arch: str) -> None:
    kernel = compile_kernel(spec, arch)
    assert "warning" not in kernel.log, kernel.log
    resources = resources_of(kernel.cubin, spec.symbol, arch)
    assert resources.spill_bytes == 0
    assert resources.registers <= (128 if spec.loader is Loader.VECTOR else 255)
    # What a product with a Hadamard matrix moves between the threads of rows.
    assert resources.smem_bytes <= (9 * 1024 if spec.use_qk_hadamard else 0)
    assert resources.code_bytes <= 90 * 1024


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_loads_are_on_their_way_together(kv_dtype: str, tmp_path: Path) -> None:
    """Before the wait nothing is loaded, and after it nothing is waited for until all is asked for.

    That is the end and two neighbours of qo_indptr, a length and a position (which may have two
    halves), two vectors of a row, and what turns eight pairs.
    """
    config = PreprocessConfig.parse(f"kernel=preprocess,kv_dtype={kv_dtype}")
    kernel = compile_kernel(config.specs("sm_90a")[0], "sm_90a")
    found = instructions(kernel.cubin, tmp_path)
    wait = next(i for i, line in enumerate(found) if "ACQBULK" in line)
    before, after = found[:wait], found[wait + 1 :]
    assert not any(re.search(r"\b(LDG|STG|LD|ST)\b", line) for line in before)
    assert sum("CCTL.E.PF2" in line for line in before) == 1
    arriving: set[int] = set()
    num_loads = 0
    for line in after:
        registers = [int(number) for number in re.findall(r"\bR(\d+)", line)]
        is_load = re.search(r"\bLDG\b", line) is not None
        if arriving.intersection(registers[1:]):
            break
        if is_load:
            num_loads += 1
            width = 4 if ".128" in line else 2 if "LDG.E.64" in line else 1
            arriving.update(range(registers[0], registers[0] + width))
    assert num_loads >= 3 + 1 + 1 + 2 + 8


def test_sample_has_every_value() -> None:
    specs = [spec for spec, _ in JOBS]
    assert {spec.kv_dtype for spec in specs} == set(KV_DTYPES) - {DType.INT4_G64}
    assert {spec.page_table for spec in specs} == {None, *Layout} - {Layout.RAGGED}
    assert len({spec.head_dim for spec in specs}) > 12
    assert len({spec.symbol for spec in specs}) == len(set(specs))


@pytest.mark.parametrize("layout", PREPROCESS_PARAMS, ids=str)
def test_params_agree(layout: Layout | None) -> None:
    config = PreprocessConfig(page_table=layout.value if layout else "slots")
    struct = PREPROCESS_PARAMS[layout]
    lines = _asserts("jitattn::KernelParams", struct)
    lines += _asserts("jitattn::PreprocessParams", PreprocessParams)
    lines += _asserts("jitattn::RowStrides", RowStrides)
    lines += _asserts("jitattn::CacheStrides", CacheStrides)
    if layout:
        lines += _asserts("jitattn::PageTable", dict(struct._fields_)["pages"])
    _compile(render(config.specs("sm_90a")[0], "sm_90a") + "\n".join(lines) + "\n")
