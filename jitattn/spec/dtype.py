"""Element types: one row for each, with its bits, names and codes. Torch-free."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from jitattn.base.validate import shown

if TYPE_CHECKING:
    import torch


_LONGEST_NAME = 80


class BlockFormat(NamedTuple):
    """Blocks along head_dim of four-bit elements, and what each block has in memory of its own."""

    dims: int | None
    """Elements of a block; None is all of a row."""
    has_zeros: bool
    """Whether a block has a zero beside its scale, both float16; else its scale is e4m3."""
    neox_multiple: int
    """What ``rotary_dim`` is a multiple of where NeoX pairs are turned and stored."""

    @property
    def multiple(self) -> int:
        """What head dims are multiples of."""
        return self.dims or 16

    def count(self, dim: int) -> int:
        """Return the blocks of a row of ``dim`` elements."""
        return 1 if self.dims is None else dim // self.dims

    def row_bytes(self, dim: int) -> int:
        """Return the bytes of the scales of a row."""
        return (4 if self.has_zeros else 1) * self.count(dim)


class DType(StrEnum):
    """Element type of a tensor, named as in torch.

    A new one is a row here, a struct and a conversion in templates/include/jitattn, and the
    definition in ``jitattn.tensors.quantization``: docs/add-dtype.md.
    """

    _value_: str
    bits: int
    short: str
    """Abbreviation in a kernel's symbol."""
    cuda_type: str
    """Struct in CUDA; empty for types that no kernel reads."""
    is_quantised: bool
    """Whether values are stored divided by a scale."""
    float_code: int | None
    """``FloatCode`` of types.cuh, a launch argument of kernels that read the type at run time."""
    blocks: BlockFormat | None
    """What elements of four bits share."""

    #                name             bits short    struct        quantised code blocks
    FLOAT16 = ("float16", 16, "f16", "Half", False, 0, None)
    BFLOAT16 = ("bfloat16", 16, "bf16", "BFloat16", False, 1, None)
    FLOAT32 = ("float32", 32, "f32", "Float", False, 2, None)
    FLOAT64 = ("float64", 64, "f64", "", False, 3, None)
    FLOAT8_E4M3FN = ("float8_e4m3fn", 8, "e4m3", "Float8E4M3", True, None, None)
    FLOAT8_E5M2 = ("float8_e5m2", 8, "e5m2", "Float8E5M2", True, None, None)
    INT8 = ("int8", 8, "i8", "Int8", True, None, None)
    UINT8 = ("uint8", 8, "u8", "", False, None, None)
    # Blocks of 16 4-bit numbers with a shared scale.
    NVFP4 = ("nvfp4", 4, "nvfp4", "Float4E2M1", True, None, BlockFormat(16, False, 32))
    # 4-bit codes with a shared scale and zero: of a row, or of 64 or 32 elements.
    INT4 = ("int4", 4, "i4", "Int4<0>", True, None, BlockFormat(None, True, 16))
    INT4_G64 = ("int4_g64", 4, "i4g64", "Int4<64>", True, None, BlockFormat(64, True, 16))
    INT4_G32 = ("int4_g32", 4, "i4g32", "Int4<32>", True, None, BlockFormat(32, True, 16))

    def __new__(cls, name: str, *row: Any) -> DType:
        """Make a member from its row."""
        member = str.__new__(cls, name)
        member._value_ = name
        member.bits, member.short, member.cuda_type, *rest = row
        member.is_quantised, member.float_code, member.blocks = rest
        return member

    @classmethod
    def of(cls, dtype: torch.dtype) -> DType:
        """Return the type of a tensor's elements."""
        return cls(str(dtype).removeprefix("torch."))

    @property
    def num_bytes(self) -> int:
        """Bytes of an element.

        Raises:
            ValueError: two elements share a byte.
        """
        if self.bits % 8:
            raise ValueError(f"an element of {self} has {self.bits} bits")
        return self.bits // 8

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype of the same name; uint8 where two elements share a byte."""
        import torch

        name = DType.UINT8 if self.bits < 8 else self
        found = getattr(torch, name.value)
        assert isinstance(found, torch.dtype)
        return found


def dtype_name(value: object, name: str = "dtype") -> str:
    """Return ``"bfloat16"`` for ``torch.bfloat16`` or its name, without importing torch.

    Raises:
        TypeError: another object; ``name`` is the argument's.
        ValueError: a text that is too long for a name.
    """
    kind = type(value)
    if isinstance(value, str):
        text = str.__str__(value)
    elif kind.__module__ == "torch" and kind.__name__ == "dtype":
        text = str(value)
    else:
        raise TypeError(f"{name} is {shown(value)}: expected a torch.dtype or its name")
    if len(text) > _LONGEST_NAME:
        raise ValueError(f"{name} is {shown(text)}: expected a torch.dtype or its name")
    return text.removeprefix("torch.")


# Names, in the order of error messages.
Q_DTYPES = (DType.BFLOAT16.value, DType.FLOAT16.value)
FP8_QUERIES = DType.FLOAT8_E4M3FN.value
"""Of queries besides, over a cache of the same type."""
OUT_DTYPES = (*Q_DTYPES, DType.FLOAT32.value)
FP8_DTYPES = (DType.FLOAT8_E4M3FN.value, DType.FLOAT8_E5M2.value)
QUANTISED_DTYPES = tuple(dtype.value for dtype in DType if dtype.is_quantised)
KV_DTYPES = (*Q_DTYPES, *QUANTISED_DTYPES)
"""Types of caches."""
BYTE_DTYPES = tuple(name for name in QUANTISED_DTYPES if DType(name).bits == 8)
"""Quantised types that a uint8 tensor may hold."""
BLOCK_DTYPES = tuple(name for name in QUANTISED_DTYPES if DType(name).blocks is not None)
"""Those of a ``QuantizedKV``."""


def row_multiple(kv_dtype: str) -> int:
    """Return what head dims of a cache are multiples of: of 16, or of its blocks."""
    blocks = DType(kv_dtype).blocks if kv_dtype in BLOCK_DTYPES else None
    return 16 if blocks is None else blocks.multiple
