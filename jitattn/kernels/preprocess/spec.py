"""What ``preprocess_qkv`` and ``append_kv`` support, and the spec of their kernels. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import ClassVar

from jitattn.base.errors import ConfigError
from jitattn.base.record import Value
from jitattn.base.validate import shown
from jitattn.kernels.preprocess.tile import PreprocessTile, preprocess_tile
from jitattn.spec.arch import check_arch
from jitattn.spec.config import HEAD_DIMS, MAX_PAGE_SIZE
from jitattn.spec.dtype import FP8_DTYPES, KV_DTYPES, Q_DTYPES, DType, row_multiple
from jitattn.spec.family import KernelSpec, plain
from jitattn.spec.hadamard import hadamard_of, no_hadamard
from jitattn.spec.layout import Layout, Loader, Pairing


class PreprocessSpec(KernelSpec):
    """The kernel that puts Q, K and V of new tokens where attention reads them.

    Head counts, strides, lengths, rotary_dim, frequencies and scales are launch arguments, as is
    whether there is a q.
    """

    kernel: ClassVar[str] = "preprocess"
    path: ClassVar[str] = "preprocess/preprocess.cu.jinja"

    head_dim: int
    head_dim_vo: int
    page_size: int
    qkv_dtype: DType
    out_dtype: DType  # of q; qkv_dtype where there is none
    kv_dtype: DType
    page_table: Layout | None  # None: a slot for each token
    pairing: Pairing
    use_mrope: bool  # pairs may have positions of their own
    use_bias: bool
    use_norm: bool
    use_qk_hadamard: bool
    use_v_hadamard: bool
    loader: Loader  # VECTOR where all rows begin at multiples of their vectors, else PLAIN

    @property
    def symbol(self) -> str:
        """Name of the ``extern "C"`` kernel: unique per spec and readable in a profile."""
        same = self.head_dim == self.head_dim_vo
        parts = [
            f"jitattn_preprocess_d{self.head_dim}" + ("" if same else f"x{self.head_dim_vo}"),
            f"p{self.page_size}",
            f"{self.qkv_dtype.short}_q{self.out_dtype.short}_kv{self.kv_dtype.short}",
            self.page_table.value if self.page_table else "slots",
            self.loader.value,
        ]
        parts += [self.pairing.value] * (self.pairing is not Pairing.NONE)
        parts += ["mrope"] * self.use_mrope + ["bias"] * self.use_bias + ["norm"] * self.use_norm
        parts += ["hqk"] * self.use_qk_hadamard + ["hv"] * self.use_v_hadamard
        return "_".join(parts)

    def context(self) -> dict[str, object]:
        """Return the template variables: fields, symbol, the pairing's name and matrices."""
        fields = {name: plain(value) for name, value in vars(self).items()}
        fields["page_table"] = self.page_table.value if self.page_table else "slots"
        pairing_name = f"k{self.pairing.value.capitalize()}"
        del fields["pairing"]
        used = {
            "KeyHadamard": hadamard_of(self.head_dim) if self.use_qk_hadamard else None,
            "ValueHadamard": hadamard_of(self.head_dim_vo) if self.use_v_hadamard else None,
        }
        matrices = {name: matrix for name, matrix in used.items() if matrix is not None}
        names = {"symbol": self.symbol, "pairing_name": pairing_name}
        return fields | names | {"hadamard_matrices": matrices}

    def tile(self, arch: str) -> PreprocessTile:
        """Return the shape of a CTA on ``arch``."""
        return preprocess_tile(self)

    def config_text(self) -> str:
        """Return arguments that select the kernel and its twin with the other loader."""
        return config_of(self).arguments_text()


SLOTS = "slots"
"""Stands for a page table where each token has a slot."""
_TABLES = (*(table.value for table in Layout if table is not Layout.RAGGED), SLOTS)
_CHOICES: dict[str, tuple[str, ...]] = {
    "qkv_dtype": Q_DTYPES,
    "kv_dtype": KV_DTYPES,
    "page_table": _TABLES,
    "pairing": tuple(pairing.value for pairing in Pairing),
}
PREFIX = "kernel=preprocess"
PREPROCESS_RANGES: Mapping[str, str] = {
    "head_dim": "multiples of 16 from 16 to 256, and 512",
    "head_dim_vo": "None (head_dim), multiples of 16 from 16 to 256, and 512; append_kv",
    "page_size": "1 and up, any integer",
    "qkv_dtype": f"{', '.join(Q_DTYPES)}; float32 is refused: who makes it rounds it",
    "q_out": "qkv_dtype, " + ", ".join(FP8_DTYPES),
    "kv_dtype": ", ".join(KV_DTYPES),
    "kv_layout": "NHD, HND; any strides",
    "pages": ", ".join(_TABLES),
    "rope": "None, NeoX or interleaved pairs, any even rotary_dim (NeoX pairs into nvfp4 without "
    "qk_transform: multiples of 32, into int4: of 16), sections of three positions",
    "bias": "None, or in qkv_dtype",
    "q_norm, k_norm": "None, float16, bfloat16, float32",
    "qk_transform, v_transform": "None, hadamard (not with a head dim of 208); preprocess_qkv",
}
"""What each argument may be, for the support table."""


class PreprocessConfig(Value):
    """What selects the kernels that take tokens in; all else is a launch argument.

    ``pairing`` is "none" without a Rope, "neox" or "interleaved"; ``use_mrope`` is for a Rope with
    sections, ``use_norm`` for q_norm, k_norm or both; ``use_qk_hadamard`` and ``use_v_hadamard``
    for ``qk_transform`` and ``v_transform``; ``page_table`` is "slots" for slots.
    """

    head_dim: int = 128
    head_dim_vo: int | None = None  # head_dim
    page_size: int = 16
    qkv_dtype: str = "bfloat16"
    out_dtype: str | None = None  # of q_out: qkv_dtype
    kv_dtype: str = "bfloat16"
    page_table: str = "shared"
    pairing: str = "neox"
    use_mrope: bool = False
    use_bias: bool = False
    use_norm: bool = False
    use_qk_hadamard: bool = False
    use_v_hadamard: bool = False

    @classmethod
    def parse(cls, text: str) -> PreprocessConfig:
        """Return the configuration of ``"kernel=preprocess,head_dim=128,kv_dtype=float8_e4m3fn"``.

        Raises:
            ConfigError: a part is unknown or has a value that is not supported.
        """
        kernel, *parts = (part.strip() for part in text.split(",") if part.strip())
        if kernel.replace(" ", "") != PREFIX:
            raise ConfigError([f"kernel={shown(kernel)} names no kernel: there is {PREFIX}"])
        kinds = {field.name: str(field.type) for field in fields(cls)}
        given: dict[str, object] = {}
        for part in parts:
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals or name not in kinds or name in given:
                raise ConfigError(
                    [f"{shown(part)} is not one of {', '.join(kinds)}=value, given once"]
                )
            given[name] = _from_text(kinds[name], value)
        config = cls(**given)  # type: ignore[arg-type]
        if reasons := config.reasons():
            raise ConfigError(reasons)
        return config

    def reasons(self) -> list[str]:
        """Return why there is no kernel; nothing where there is one."""
        found = [
            f"{name}={getattr(self, name)} is not one of {', '.join(choices)}"
            for name, choices in _CHOICES.items()
            if getattr(self, name) not in choices
        ]
        found += [
            f"{field.name}={getattr(self, field.name)} is neither true nor false"
            for field in fields(self)
            if field.type == "bool" and not isinstance(getattr(self, field.name), bool)
        ]
        for name in ("head_dim", "head_dim_vo"):
            dim = getattr(self, name)
            is_same = name == "head_dim_vo" and dim is None
            if dim not in HEAD_DIMS and not is_same:
                found.append(f"{name}={dim} is not a multiple of 16 from 16 to 256, nor 512")
            elif not is_same and dim % row_multiple(self.kv_dtype):
                found.append(
                    f"{name}={dim} is not a multiple of {row_multiple(self.kv_dtype)}, as "
                    f"kv_dtype={self.kv_dtype} wants"
                )
        if not isinstance(self.page_size, int) or not 1 <= self.page_size <= MAX_PAGE_SIZE:
            found.append(f"page_size={self.page_size} is not 1 to 2**20")
        outputs = (None, self.qkv_dtype, *FP8_DTYPES)
        if self.out_dtype not in outputs:
            found.append(f"out_dtype={self.out_dtype} is neither qkv_dtype nor an FP8 type")
        if self.use_mrope and self.pairing == Pairing.NONE:
            found.append("use_mrope=True has no meaning with pairing=none")
        return found + self._hadamard_reasons()

    def _hadamard_reasons(self) -> list[str]:
        value_dim = self.head_dim if self.head_dim_vo is None else self.head_dim_vo
        dims = (("use_qk_hadamard", self.head_dim), ("use_v_hadamard", value_dim))
        return [
            f"{name}=True: {no_hadamard(dim)}"
            for name, dim in dims
            if getattr(self, name) and dim in HEAD_DIMS and hadamard_of(dim) is None
        ]

    def arguments_text(self) -> str:
        """Return the arguments that differ from the defaults as ``parse`` reads them."""
        parts = [PREFIX]
        for field in fields(self):
            value = getattr(self, field.name)
            assert field.default is not MISSING
            if value != field.default:
                parts.append(
                    f"{field.name}={str(value).lower() if isinstance(value, bool) else value}"
                )
        return ",".join(parts)

    def specs(self, arch: str) -> tuple[PreprocessSpec, PreprocessSpec]:
        """Return the kernels of tensors that are aligned and of others.

        Raises:
            ConfigError: ``arch`` is unknown, or there are none.
        """
        check_arch(arch)
        if reasons := self.reasons():
            raise ConfigError(reasons)
        vector, plain = (
            PreprocessSpec(
                head_dim=self.head_dim,
                head_dim_vo=self.head_dim_vo or self.head_dim,
                page_size=self.page_size,
                qkv_dtype=DType(self.qkv_dtype),
                out_dtype=DType(self.out_dtype or self.qkv_dtype),
                kv_dtype=DType(self.kv_dtype),
                page_table=None if self.page_table == SLOTS else Layout(self.page_table),
                pairing=Pairing(self.pairing),
                use_mrope=self.use_mrope,
                use_bias=self.use_bias,
                use_norm=self.use_norm,
                use_qk_hadamard=self.use_qk_hadamard,
                use_v_hadamard=self.use_v_hadamard,
                loader=loader,
            )
            for loader in (Loader.VECTOR, Loader.PLAIN)
        )
        return vector, plain


def config_of(spec: PreprocessSpec) -> PreprocessConfig:
    """Return what selects ``spec`` and its twin with the other loader."""
    return PreprocessConfig(
        head_dim=spec.head_dim,
        head_dim_vo=None if spec.head_dim_vo == spec.head_dim else spec.head_dim_vo,
        page_size=spec.page_size,
        qkv_dtype=spec.qkv_dtype.value,
        out_dtype=None if spec.out_dtype is spec.qkv_dtype else spec.out_dtype.value,
        kv_dtype=spec.kv_dtype.value,
        page_table=spec.page_table.value if spec.page_table else SLOTS,
        pairing=spec.pairing.value,
        use_mrope=spec.use_mrope,
        use_bias=spec.use_bias,
        use_norm=spec.use_norm,
        use_qk_hadamard=spec.use_qk_hadamard,
        use_v_hadamard=spec.use_v_hadamard,
    )


def _from_text(kind: str, text: str) -> object:
    lowered = text.lower()
    if kind.startswith("bool"):
        return {"true": True, "1": True, "false": False, "0": False}.get(lowered, text)
    if "None" in kind and lowered == "none":
        return None
    if kind.startswith("int") and text.isdecimal():
        return int(text)
    return text
