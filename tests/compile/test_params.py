"""The launch structs of the host and of the kernels agree, as the compiler lays them out."""

from __future__ import annotations

import ctypes
import re

import pytest

from jitattn.jit import nvrtc, render
from jitattn.jit.build import headers_of
from jitattn.kernels import registry
from jitattn.kernels.attention import params as attention_params
from jitattn.kernels.attention.spec import DequantizeQueriesSpec
from jitattn.kernels.common import params as common_params
from jitattn.kernels.common.spec import ScheduleSpec
from jitattn.kernels.mla import params as mla_params
from jitattn.kernels.mla.config import cache_specs
from jitattn.kernels.pages import params as pages_params
from jitattn.kernels.pages.spec import (
    BatchInfoSpec,
    BlockTableSpec,
    CopyPagesSpec,
    GatherSpec,
    LayerTablesSpec,
)
from jitattn.kernels.select import params as select_params
from jitattn.kernels.select.spec import (
    ChoiceSpec,
    PageBoundsSpec,
    PageScoresSpec,
    index_logits_spec,
)
from jitattn.spec import params
from jitattn.spec.config import MLAConfig, PlannerConfig
from jitattn.spec.dtype import DType
from jitattn.spec.family import KernelSpec
from jitattn.spec.layout import Layout, ListLayout
from tests.support.variants import VARIANTS

ARCH = "sm_90a"


def _has_offsetof() -> bool:
    """Whether the compiler can tell where fields lie; older ones compare sizes alone."""
    return nvrtc.version() >= (13, 5)


def _asserts(cuda_type: str, struct: type[ctypes.Structure], prefix: str = "") -> list[str]:
    """One static_assert for the size of ``struct`` and one for the offset of each field."""
    lines = []
    for name, kind, *_ in struct._fields_:
        if name == "_padding":  # the compiler's has no name
            continue
        if _has_offsetof():
            offset = getattr(struct, name).offset
            lines.append(
                f"static_assert(__builtin_offsetof({cuda_type}, {prefix}{name}) == {offset},"
                f' "{cuda_type}::{name}");'
            )
        lines.append(
            f"static_assert(sizeof((({cuda_type}*)0)->{name}) == {ctypes.sizeof(kind)},"
            f' "size of {cuda_type}::{name}");'
        )
    lines.append(f'static_assert(sizeof({cuda_type}) == {ctypes.sizeof(struct)}, "{cuda_type}");')
    return lines


def _compile(source: str) -> None:
    """Check assertions; newer compilers end there, which takes a tenth of the time."""
    options = [f"--gpu-architecture={ARCH}", "--std=c++17"]
    if nvrtc.version() >= (13, 5):
        options.append("-fdevice-syntax-only")
    nvrtc.compile_cubin(source, name="params.cu", headers=headers_of(source), options=options)


def _source(layout: Layout, family: str, kv_dtype: str) -> str:
    config = PlannerConfig(
        page_table=layout.value,
        page_size=None if layout is Layout.RAGGED else 16,
        kv_dtype=kv_dtype,
    )
    specs = registry.specs_of(config, ARCH)
    return render.render(next(spec for spec in specs if spec.kernel == family), ARCH)


@pytest.mark.parametrize("layout", list(ListLayout))
def test_params_of_lists_agree(layout: ListLayout) -> None:
    struct = common_params.KERNEL_PARAMS[layout]
    lines = _asserts("jitattn::KernelParams", struct)
    lines += _asserts("jitattn::PageTable", dict(struct._fields_)["pages"])
    config = PlannerConfig(page_table=layout.value)
    _compile(render.render(registry.specs_of(config, ARCH)[0], ARCH) + "\n".join(lines) + "\n")


def test_params_of_lists_of_latent_attention_agree() -> None:
    struct = mla_params.MLA_PARAMS[ListLayout.INDICES]
    config = MLAConfig(page_table="indices")
    source = render.render(cache_specs(config, ARCH)[0], ARCH)
    _compile(source + "\n".join(_asserts("jitattn::KernelParams", struct)) + "\n")


# Prefill of FP8 caches is another template.
@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    [
        *(("decode", "bfloat16"), ("prefill", "bfloat16"), ("prefill", "float8_e4m3fn")),
        *(("decode", "nvfp4"), ("prefill", "nvfp4")),
    ],
)
@pytest.mark.parametrize("layout", list(Layout))
def test_attention_params_agree(layout: Layout, family: str, kv_dtype: str) -> None:
    struct = common_params.KERNEL_PARAMS[layout]
    lines = _asserts("jitattn::KernelParams", struct)
    lines += _asserts("jitattn::AttentionParams", common_params.AttentionParams)
    lines += _asserts("jitattn::BlockScales", params.BlockScales)
    lines += _asserts("jitattn::Schedule", common_params.Schedule)
    lines += _asserts("jitattn::PageTable", dict(struct._fields_)["pages"])
    _compile(_source(layout, family, kv_dtype) + "\n".join(lines) + "\n")


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])  # of two templates
@pytest.mark.parametrize("layout", list(Layout))
def test_params_of_latent_attention_agree(layout: Layout, kv_dtype: str) -> None:
    struct = mla_params.MLA_PARAMS[layout]
    lines = _asserts("jitattn::KernelParams", struct)
    lines += _asserts("jitattn::MLAParams", mla_params.MLAParams)
    page_size = None if layout is Layout.RAGGED else 64
    config = MLAConfig(page_table=layout.value, page_size=page_size, kv_dtype=kv_dtype)
    source = render.render(cache_specs(config, ARCH)[0], ARCH)
    _compile(source + "\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        *((layout, "everything") for layout in Layout),
        *((Layout.SHARED, name) for name in VARIANTS if name != "everything"),
    ],
)
def test_params_of_variants_agree(layout: Layout, name: str) -> None:
    """In front of those of latent attention, and of a kernel without them."""
    page_size = None if layout is Layout.RAGGED else 16
    common = {"page_table": layout.value, "page_size": page_size, "variant": VARIANTS[name]}
    for config in (PlannerConfig(**common), MLAConfig(**common, kv_dtype="float8_e4m3fn")):
        is_latent = isinstance(config, MLAConfig)
        others = mla_params.MLA_FIELDS if is_latent else ()
        struct = common_params.kernel_params(layout, config.variant, others)
        lines = _asserts("jitattn::VariantParams", params.variant_params(VARIANTS[name]))
        offset = struct.variant.offset
        place = "__builtin_offsetof(jitattn::KernelParams, pages.variant)"
        lines.append(f'static_assert({place} == {offset}, "variant");')
        lines.append(f"static_assert(sizeof(jitattn::KernelParams) == {ctypes.sizeof(struct)});")
        if is_latent:
            mla = "__builtin_offsetof(jitattn::KernelParams, mla)"
            lines.append(f'static_assert({mla} == {struct.mla.offset}, "mla");')
        _compile(render.render(registry.specs_of(config, ARCH)[0], ARCH) + "\n".join(lines) + "\n")


def test_schedule_params_agree() -> None:
    lines = _asserts("jitattn::ScheduleParams", common_params.ScheduleParams)
    sizes = {
        "ScheduleHeader": common_params.HEADER_BYTES,
        "Request": common_params.REQUEST_BYTES,
        "QueryTile": common_params.QUERY_TILE_BYTES,
        "SlotBoundary": common_params.BOUNDARY_BYTES,
    }
    lines += [f'static_assert(sizeof(jitattn::{k}) == {v}, "{k}");' for k, v in sizes.items()]
    _compile(render.render(ScheduleSpec(), ARCH) + "\n".join(lines) + "\n")
    lines = _asserts("jitattn::ListScheduleParams", common_params.ListScheduleParams)
    _compile(render.render(ScheduleSpec(has_lists=True), ARCH) + "\n".join(lines) + "\n")


def _struct(name: str) -> type[ctypes.Structure]:
    name = {"Scale": "ScaleParams"}.get(name, name)
    homes = (pages_params, select_params, attention_params, params)
    found: type[ctypes.Structure] = next(getattr(m, name) for m in homes if hasattr(m, name))
    return found


BF16 = DType.BFLOAT16
TRANSFERS = {
    "GatherParams": (
        GatherSpec(kv_dtype=BF16, out_dtype=BF16),
        ("GatherParams", "GatherSide", "PageList", "Lengths", "Divisor", "Scale"),
    ),
    "CopyParams": (CopyPagesSpec(), ("CopyParams", "CopyPool", "CopyDim")),
    "BlockTableParams": (BlockTableSpec(), ("BlockTableParams", "PageList", "Lengths")),
    "BatchInfoParams": (BatchInfoSpec(), ("BatchInfoParams", "PageList", "Lengths")),
    "LayerTablesParams": (
        LayerTablesSpec(),
        ("LayerTablesParams", "TableRequest", "SlotChange", "TableLayer"),
    ),
    "IndexLogitsParams": (
        index_logits_spec(128, 64, 1, ARCH),
        ("IndexLogitsParams", "IndexCache", "QueryRows", "PageList", "Lengths"),
    ),
    "ChoiceParams": (ChoiceSpec(chooses_pages=False), ("ChoiceParams", "QueryRows")),
    "PageBoundsParams": (PageBoundsSpec(kv_dtype=BF16), ("PageBoundsParams", "QueryRows")),
    "QueryParams": (DequantizeQueriesSpec(), ("QueryParams",)),
    "PageScoresParams": (PageScoresSpec(kv_dtype=BF16, head_dim=128), ("PageScoresParams",)),
}


@pytest.mark.parametrize("name", TRANSFERS)
def test_params_of_transfers_agree(name: str) -> None:
    spec: KernelSpec
    spec, structs = TRANSFERS[name]
    lines = [line for s in structs for line in _asserts(f"jitattn::{s}", _struct(s))]
    if name == "CopyParams":
        lines += [
            f"static_assert(jitattn::kMaxPools == {pages_params.MAX_POOLS});",
            f"static_assert(jitattn::kPageDims == {pages_params.PAGE_DIMS});",
        ]
    _compile(render.render(spec, ARCH) + "\n".join(lines) + "\n")


def test_float_codes_agree() -> None:
    (header,) = (text for name, text in render.headers() if name == "jitattn/types.cuh")
    (names,) = re.findall(r"enum class FloatCode : int32_t \{(.*?)\};", header, re.DOTALL)
    codes = dict(re.findall(r"k(\w+) = (\d)", names))
    assert {k.lower(): int(v) for k, v in codes.items()} == params.FLOAT_CODES


def test_a_moved_field_is_seen() -> None:
    if not _has_offsetof():
        pytest.skip("NVRTC before 13.5 has no offsetof")

    class Moved(ctypes.Structure):
        _fields_ = (("header", ctypes.c_void_p), ("boundaries", ctypes.c_void_p))

    from jitattn.base.errors import CompileError

    with pytest.raises(CompileError, match="boundaries"):
        _compile(
            render.render(ScheduleSpec(), ARCH) + "\n".join(_asserts("jitattn::Schedule", Moved))
        )
