"""Which kernels move tokens and pages and make tables, as ``--config`` names them: torch-free."""

from __future__ import annotations

from collections.abc import Mapping

from jitattn.base.errors import ConfigError
from jitattn.base.record import Value
from jitattn.spec.arch import check_arch
from jitattn.spec.dtype import KV_DTYPES, OUT_DTYPES, DType
from jitattn.spec.kernel_spec import (
    BatchInfoSpec,
    BlockTableSpec,
    CopyPagesSpec,
    GatherSpec,
    LayerTablesSpec,
    TableSpec,
)
from jitattn.spec.kernel_spec import TransferSpec as Spec

_SPECS: dict[str, type[CopyPagesSpec | TableSpec]] = {
    spec.family: spec for spec in (CopyPagesSpec, BlockTableSpec, BatchInfoSpec, LayerTablesSpec)
}
KERNELS = (GatherSpec.family, *_SPECS)
_FIELDS = ("kernel", "kv_dtype", "out_dtype")

TRANSFER_RANGES: Mapping[str, str] = {
    "gather_kv: cache": ", ".join(KV_DTYPES) + "; any strides, any head_dim",
    "gather_kv: out_dtype": ", ".join(OUT_DTYPES) + ", the cache's own but for nvfp4",
    "gather_kv: pages": "shared, separate, csr, token; pages of 1 token and up",
    "copy_pages": "any dtype and strides, device and pinned host memory, at most four "
    "dimensions of a page that don't follow each other in memory",
    "build_block_table": "int32 and int64 slots, page sizes from 1 to 2**20",
    "convert_pages": "shared, csr and token to any but ragged; separate to itself",
    "block_tables": "any number of layers, any strides; of a page manager",
    "batch_info": "int32 and int64 lengths; slots of shared, csr and token tables",
}
"""What the functions take, for the support table."""


class TransferConfig(Value):
    """What selects such a kernel. Dtypes are those of "gather"; ``out_dtype`` None is bfloat16."""

    kernel: str = GatherSpec.family
    kv_dtype: str | None = None
    out_dtype: str | None = None

    @classmethod
    def parse(cls, text: str) -> TransferConfig:
        """Return the configuration of ``"kernel=gather,kv_dtype=nvfp4,out_dtype=bfloat16"``.

        Raises:
            ConfigError: a part is unknown or has a value that is not supported.
        """
        given: dict[str, str] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals or name not in _FIELDS or name in given:
                raise ConfigError([f"{part!r} is not one of {', '.join(_FIELDS)}=value, once"])
            given[name] = value
        config = cls(**given)
        if reasons := config.reasons():
            raise ConfigError(reasons)
        return config

    def reasons(self) -> list[str]:
        """Return why there is no kernel; nothing where there is one."""
        if self.kernel not in KERNELS:
            return [f"kernel={self.kernel} is not one of preprocess, {', '.join(KERNELS)}"]
        if self.kernel != GatherSpec.family:
            wrong = (name for name in _FIELDS[1:] if getattr(self, name) is not None)
            return [f"{name} is given, which kernel={self.kernel} has not" for name in wrong]
        found = []
        if self.kv_dtype not in KV_DTYPES:
            found.append(f"kv_dtype={self.kv_dtype} is not one of {', '.join(KV_DTYPES)}")
        copies_bits = self.out_dtype == self.kv_dtype != DType.NVFP4
        if self.out_dtype not in (None, *OUT_DTYPES) and not copies_bits:
            found.append(
                f"out_dtype={self.out_dtype} is not one of {', '.join(OUT_DTYPES)} or, but for "
                "nvfp4, kv_dtype"
            )
        return found

    def arguments_text(self) -> str:
        """Return the arguments as ``parse`` reads them."""
        given = ((name, getattr(self, name)) for name in _FIELDS)
        return ",".join(f"{name}={value}" for name, value in given if value is not None)

    def specs(self, arch: str) -> tuple[Spec]:
        """Return the kernel.

        Raises:
            ConfigError: ``arch`` is unknown, or there is none.
        """
        check_arch(arch)
        if self.kernel != GatherSpec.family:
            return (_SPECS[self.kernel](),)
        if reasons := self.reasons():
            raise ConfigError(reasons)
        kv_dtype, out_dtype = str(self.kv_dtype), self.out_dtype or DType.BFLOAT16.value
        return (GatherSpec(kv_dtype=DType(kv_dtype), out_dtype=DType(out_dtype)),)


def config_of(spec: Spec) -> TransferConfig:
    """Return what selects ``spec``."""
    if isinstance(spec, GatherSpec):
        return TransferConfig(kv_dtype=spec.kv_dtype.value, out_dtype=spec.out_dtype.value)
    return TransferConfig(kernel=spec.family)


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
