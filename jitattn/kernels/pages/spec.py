"""Specs of kernels that move tokens and pages and make tables, and their arguments. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from jitattn.base.errors import ConfigError
from jitattn.base.record import Value
from jitattn.kernels.pages.tile import CopyPagesTile, GatherTile, TableTile
from jitattn.spec.arch import check_arch
from jitattn.spec.config import named_values
from jitattn.spec.dtype import BLOCK_DTYPES, KV_DTYPES, OUT_DTYPES, DType
from jitattn.spec.family import KernelSpec, OnlySpec, Tile
from jitattn.spec.layout import Layout


class GatherSpec(KernelSpec):
    """The kernel that gathers tokens out of pages of one dtype, as values of another.

    With equal dtypes it copies what is stored. Page tables, page sizes, heads and strides are
    launch arguments: what it costs to look at them hides behind the memory.
    """

    kernel: ClassVar[str] = "gather"
    path: ClassVar[str] = "pages/gather.cu.jinja"
    cta: ClassVar[Tile] = GatherTile()

    kv_dtype: DType
    out_dtype: DType

    @property
    def symbol(self) -> str:
        """Name of the ``extern "C"`` kernel."""
        return f"jitattn_gather_kv{self.kv_dtype.short}_o{self.out_dtype.short}"

    def config_text(self) -> str:
        """Return arguments that select the kernel."""
        return f"kernel={self.kernel},kv_dtype={self.kv_dtype},out_dtype={self.out_dtype}"


class CopyPagesSpec(OnlySpec):
    """The kernel that copies pages of any pools."""

    kernel: ClassVar[str] = "copy_pages"
    path: ClassVar[str] = "pages/copy_pages.cu.jinja"
    cta: ClassVar[Tile] = CopyPagesTile()


class BlockTableSpec(OnlySpec):
    """The kernel that makes block tables out of slots."""

    kernel: ClassVar[str] = "block_table"
    path: ClassVar[str] = "pages/block_table.cu.jinja"
    cta: ClassVar[Tile] = TableTile()


class BatchInfoSpec(OnlySpec):
    """The kernel that says of every query token whose it is and where it goes."""

    kernel: ClassVar[str] = "batch_info"
    path: ClassVar[str] = "pages/batch_info.cu.jinja"
    cta: ClassVar[Tile] = TableTile()


class LayerTablesSpec(OnlySpec):
    """The kernel that makes the tables of a group's layers out of slots."""

    kernel: ClassVar[str] = "layer_tables"
    path: ClassVar[str] = "pages/layer_tables.cu.jinja"
    cta: ClassVar[Tile] = TableTile()


TableSpec = BlockTableSpec | BatchInfoSpec | LayerTablesSpec
TransferSpec = GatherSpec | CopyPagesSpec | TableSpec
_SPECS: dict[str, type[CopyPagesSpec | TableSpec]] = {
    spec.kernel: spec for spec in (CopyPagesSpec, BlockTableSpec, BatchInfoSpec, LayerTablesSpec)
}
KERNELS = (GatherSpec.kernel, *_SPECS)
_FIELDS = ("kernel", "kv_dtype", "out_dtype")
_PAGED = ", ".join(layout.value for layout in Layout if layout.has_pages)
*_FIRST, _LAST = (
    layout.value for layout in Layout if layout.has_pages and layout is not Layout.SEPARATE
)
_ONE_ID = f"{', '.join(_FIRST)} and {_LAST}"

TRANSFER_RANGES: Mapping[str, str] = {
    "gather_kv: cache": ", ".join(KV_DTYPES) + "; any strides, any head_dim",
    "gather_kv: out_dtype": ", ".join(OUT_DTYPES) + ", the cache's own but for nvfp4 and int4",
    "gather_kv: pages": f"{_PAGED}; pages of 1 token and up",
    "copy_pages": "any dtype and strides, device and pinned host memory, at most four "
    "dimensions of a page that don't follow each other in memory",
    "build_block_table": "int32 and int64 slots, page sizes from 1 to 2**20",
    "convert_pages": f"{_ONE_ID} to any but ragged; separate to itself",
    "block_tables": "any number of layers, any strides; of a page manager",
    "batch_info": f"int32 and int64 lengths; slots of {_ONE_ID} tables",
}
"""What the functions take, for the support table."""


class TransferConfig(Value):
    """What selects such a kernel. Dtypes are those of "gather"; ``out_dtype`` None is bfloat16."""

    kernel: str = GatherSpec.kernel
    kv_dtype: str | None = None
    out_dtype: str | None = None

    @classmethod
    def parse(cls, text: str) -> TransferConfig:
        """Return the configuration of ``"kernel=gather,kv_dtype=nvfp4,out_dtype=bfloat16"``.

        Raises:
            ConfigError: a part is unknown or has a value that is not supported.
        """
        config = cls(**named_values(text, _FIELDS))
        if reasons := config.reasons():
            raise ConfigError(reasons)
        return config

    def reasons(self) -> list[str]:
        """Return why there is no kernel; nothing where there is one."""
        if self.kernel not in KERNELS:
            return [f"kernel={self.kernel} is not one of preprocess, {', '.join(KERNELS)}"]
        if self.kernel != GatherSpec.kernel:
            wrong = (name for name in _FIELDS[1:] if getattr(self, name) is not None)
            return [f"{name} is given, which kernel={self.kernel} has not" for name in wrong]
        found = []
        if self.kv_dtype not in KV_DTYPES:
            found.append(f"kv_dtype={self.kv_dtype} is not one of {', '.join(KV_DTYPES)}")
        copies_bits = self.out_dtype == self.kv_dtype and self.kv_dtype not in BLOCK_DTYPES
        if self.out_dtype not in (None, *OUT_DTYPES) and not copies_bits:
            found.append(
                f"out_dtype={self.out_dtype} is not one of {', '.join(OUT_DTYPES)} or, but for "
                f"{', '.join(BLOCK_DTYPES)}, kv_dtype"
            )
        return found

    def arguments_text(self) -> str:
        """Return the arguments as ``parse`` reads them."""
        given = ((name, getattr(self, name)) for name in _FIELDS)
        return ",".join(f"{name}={value}" for name, value in given if value is not None)

    def specs(self, arch: str) -> tuple[TransferSpec]:
        """Return the kernel.

        Raises:
            ConfigError: ``arch`` is unknown, or there is none.
        """
        check_arch(arch)
        if self.kernel != GatherSpec.kernel:
            return (_SPECS[self.kernel](),)
        if reasons := self.reasons():
            raise ConfigError(reasons)
        kv_dtype, out_dtype = str(self.kv_dtype), self.out_dtype or DType.BFLOAT16.value
        return (GatherSpec(kv_dtype=DType(kv_dtype), out_dtype=DType(out_dtype)),)


def config_of(spec: TransferSpec) -> TransferConfig:
    """Return what selects ``spec``."""
    if isinstance(spec, GatherSpec):
        return TransferConfig(kv_dtype=spec.kv_dtype.value, out_dtype=spec.out_dtype.value)
    return TransferConfig(kernel=spec.kernel)


def every_config() -> list[TransferConfig]:
    """Return all of them."""
    gathers = [
        TransferConfig(kv_dtype=kv_dtype, out_dtype=out_dtype)
        for kv_dtype in KV_DTYPES
        for out_dtype in dict.fromkeys((*OUT_DTYPES, kv_dtype))
    ]
    return [
        *(config for config in gathers if not config.reasons()),
        *(TransferConfig(kernel=kernel) for kernel in _SPECS),
    ]


def cache_specs(kv_dtype: DType, *out_dtypes: DType) -> tuple[KernelSpec, ...]:
    """Return the kernels that move tokens and pages of a cache, and make tables of a batch."""
    # Dequantised for attention elsewhere, or copied as they are stored.
    own = () if kv_dtype.blocks is not None else (kv_dtype,)
    wanted = dict.fromkeys((*out_dtypes, *own))
    gathers = (GatherSpec(kv_dtype=kv_dtype, out_dtype=dtype) for dtype in wanted)
    return (*gathers, CopyPagesSpec(), BlockTableSpec(), BatchInfoSpec(), LayerTablesSpec())
