"""Planner configs: the arguments as a value. Torch-free, so that build machines can use them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from decimal import Decimal
from typing import ClassVar, Protocol, Self

from jitattn.base.errors import ConfigError
from jitattn.base.record import Value
from jitattn.base.validate import FLOAT32_MAX, INT64_MAX, as_float, as_int, shown
from jitattn.spec.dtype import FP8_QUERIES, DType, dtype_name
from jitattn.spec.variant import READY, AttentionVariant

# Longest request, so that kernels may add to a position in 32 bits. Larger windows act alike.
MAX_KV_LEN = 2**30
MAX_PAGE_SIZE = 2**20
_LONGEST_NAME = 80
HEAD_DIMS = (*range(16, 257, 16), 512)
_OPTIONAL = frozenset(
    (
        *("page_size", "head_dim_vo", "out_dtype", "sm_scale"),
        *("variant", "skip_softmax_threshold", "num_sms"),
    )
)
_DTYPES = {"q_dtype", "kv_dtype", "out_dtype"}


def named_values(text: str, names: Sequence[str]) -> dict[str, str]:
    """Return the values of ``"name=value,name=value"``.

    Raises:
        ConfigError: a part is not one of ``names`` and a value, or its name is given twice.
    """
    given: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in names or name in given:
            raise ConfigError([f"{shown(part)} is not one of {', '.join(names)}=value, once"])
        given[name] = value
    return given


class Arguments(Value):
    """Normalised arguments of a planner, without device objects; subclasses have the fields.

    Dtypes are names (``"bfloat16"``). Construct them with ``from_arguments`` or ``parse``, which
    check types.
    """

    optional: ClassVar[frozenset[str]] = _OPTIONAL
    """Names of arguments that may be None."""

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, object]) -> Self:
        """Return the configuration of keyword arguments.

        Raises:
            ConfigError: with one reason for each unknown argument and each value of a wrong type.
        """
        kinds = {f.name: str(f.type) for f in fields(cls)}
        values: dict[str, object] = {}
        reasons: list[str] = []
        for name, value in arguments.items():
            if name not in kinds:
                reasons.append(
                    f"{name[:80]}={shown(value)} is no planner argument; known: {', '.join(kinds)}"
                )
                continue
            try:
                if value is not None or name not in cls.optional:
                    value = _normalise(name, kinds[name], value)
                values[name] = value
            except (TypeError, ValueError) as error:
                reasons.append(str(error))
        if reasons:
            raise ConfigError(reasons)
        return cls(**values)

    @classmethod
    def among(cls, values: Mapping[str, object]) -> Self:
        """Return the configuration of a caller's ``locals()``, with a value for each field.

        Raises:
            ConfigError: with one reason for each value of a wrong type.
        """
        return cls.from_arguments({field.name: values[field.name] for field in fields(cls)})

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the configuration of ``"head_dim=128,page_size=16,page_table=separate"``.

        Raises:
            ConfigError: a part is not ``name=value``, is unknown, repeated or of a wrong type.
        """
        arguments: dict[str, object] = {}
        kinds = {f.name: str(f.type) for f in fields(cls)}
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, equals, value = (x.strip() for x in part.partition("="))
            if not equals:
                raise ConfigError([f"{shown(part)} is not name=value"])
            if name in arguments:
                raise ConfigError([f"{name} is given twice"])
            arguments[name] = _from_text(kinds.get(name, "str"), value)
        return cls.from_arguments(arguments)

    def arguments_text(self) -> str:
        """Return the arguments that differ from the defaults as ``parse`` reads them."""
        parts = []
        for field in fields(self):
            value = getattr(self, field.name)
            assert field.default is not MISSING  # every argument has a default
            if value != field.default:
                parts.append(
                    f"{field.name}={str(value).lower() if isinstance(value, bool) else value}"
                )
        return ",".join(parts)


class PlannerConfig(Arguments):
    """The arguments of ``AttentionPlanner`` that are not objects of a device.

    Which of them have kernels, ``jitattn.kernels.attention.config`` says.
    """

    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int | None = 16
    head_dim_vo: int | None = None
    q_dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    out_dtype: str | None = None
    kv_layout: str = "NHD"
    page_table: str = "shared"
    causal: bool = True
    window_left: int = -1
    logits_soft_cap: float = 0.0
    sm_scale: float | None = None
    use_sinks: bool = False
    use_custom_mask: bool = False
    variant: AttentionVariant | None = None
    skip_softmax_threshold: float | None = None
    batch_invariant: bool = False
    early_kv: bool = False
    fp8_products: str = "exact"
    num_sms: int | None = None

    def arguments_text(self) -> str:
        """Return the arguments that differ from the defaults, at least one, for ``parse``."""
        return super().arguments_text() or f"head_dim={self.head_dim}"

    @property
    def has_fp8_queries(self) -> bool:
        """Whether queries are dequantised before attention."""
        return self.q_dtype == FP8_QUERIES

    @property
    def kernel_q_dtype(self) -> str:
        """What attention kernels get for queries: of FP8 ones float16, which holds more digits."""
        return DType.FLOAT16.value if self.has_fp8_queries else self.q_dtype

    @property
    def kernel_out_dtype(self) -> str:
        """``out_dtype``, or what None stands for."""
        return self.out_dtype or (DType.BFLOAT16.value if self.has_fp8_queries else self.q_dtype)

    def exact(self) -> PlannerConfig:
        """Return the configuration of kernels that compute parts of a softmax, in float32."""
        return replace(self, q_dtype=self.kernel_q_dtype, out_dtype=DType.FLOAT32.value)

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def score_scale(self) -> float:
        """What multiplies q.k: ``sm_scale`` or its default."""
        return self.head_dim**-0.5 if self.sm_scale is None else self.sm_scale


class MLAConfig(Arguments):
    """The arguments of ``MLAPlanner`` that are not objects of a device.

    The planner wants ``sm_scale``; kernels don't depend on it, so a configuration may lack it.
    """

    family: ClassVar[str] = "mla"
    optional: ClassVar[frozenset[str]] = Arguments.optional - {"sm_scale"}

    num_heads: int = 128
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    page_size: int | None = 64
    sm_scale: float | None = None
    q_dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    out_dtype: str | None = None
    page_table: str = "shared"
    causal: bool = True
    variant: AttentionVariant | None = None
    batch_invariant: bool = False
    fp8_products: str = "exact"
    num_sms: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the configuration of ``"planner=mla,num_heads=16,page_size=64"``.

        Raises:
            ConfigError: a part is not ``name=value``, is unknown, repeated or of a wrong type.
        """
        first, _, others = text.partition(",")
        is_named = first.replace(" ", "") == f"planner={cls.family}"
        return super().parse(others if is_named else text)

    def arguments_text(self) -> str:
        """Return ``planner=mla`` and the arguments that differ from the defaults, for ``parse``."""
        return ",".join(filter(None, (f"planner={self.family}", super().arguments_text())))

    @property
    def kernel_q_dtype(self) -> str:
        """What kernels get for queries."""
        return self.q_dtype

    @property
    def kernel_out_dtype(self) -> str:
        """``out_dtype``, or what None stands for."""
        return self.out_dtype or self.q_dtype

    def exact(self) -> MLAConfig:
        """Return the configuration of kernels that compute parts of a softmax, in float32."""
        return replace(self, out_dtype=DType.FLOAT32.value)

    @property
    def window_left(self) -> int:
        """There is no window."""
        return -1

    @property
    def num_qo_heads(self) -> int:
        """Heads of q and out: all share one latent a token."""
        return self.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Latents of a token."""
        return 1

    @property
    def group_size(self) -> int:
        """Heads that share a latent."""
        return self.num_heads

    @property
    def head_dim(self) -> int:
        """Elements of a key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def head_dim_vo(self) -> int:
        """Elements of a value."""
        return self.kv_lora_rank

    @property
    def logits_soft_cap(self) -> float:
        """There is no soft cap."""
        return 0.0

    @property
    def early_kv(self) -> bool:
        """Nothing is read before the previous kernel's end."""
        return False

    @property
    def score_scale(self) -> float:
        """What scores are multiplied with."""
        return 1.0 if self.sm_scale is None else self.sm_scale


class PagedConfig(Protocol):
    """What lengths, tables and pages are checked against, of any planner."""

    @property
    def page_size(self) -> int | None:
        """Tokens of a page; None for ragged K and V."""
        ...

    @property
    def page_table(self) -> str:
        """The layout of the tables."""
        ...

    @property
    def window_left(self) -> int:
        """Earlier tokens that a query sees besides itself; -1 is all."""
        ...


def _normalise(name: str, kind: str, value: object) -> object:
    if name in _DTYPES:
        return dtype_name(value, name)
    if kind.startswith("bool"):
        if not isinstance(value, bool):
            raise TypeError(f"{name}={shown(value)}: expected True or False")
        return value
    if kind.startswith("int"):
        return _integer(name, value)
    if kind.startswith("float"):
        return _number(name, value)
    if kind.startswith("AttentionVariant"):
        return _variant(name, value)
    if not isinstance(value, str):
        raise TypeError(f"{name}={shown(value)}: expected a string")
    text = str.__str__(value)
    if len(text) > _LONGEST_NAME:
        raise ValueError(f"{name}={shown(text)}: expected a name")
    return text


def _integer(name: str, value: object) -> int:
    number = as_int(value)
    if number is None:
        raise TypeError(f"{name}={shown(value)}: expected an integer")
    if name == "window_left":
        number = min(number, MAX_KV_LEN)
    if abs(number) > INT64_MAX:
        raise ValueError(f"{name}={shown(number)}: expected a number of 64 bits")
    return number


def _number(name: str, value: object) -> float:
    number = as_float(_number_of(value))
    if number is None:
        raise TypeError(f"{name}={shown(value)}: expected a number")
    if not math.isfinite(number):
        raise ValueError(f"{name}={number}: expected a finite number")
    if abs(number) > FLOAT32_MAX:
        raise ValueError(f"{name}={number}: expected a finite float32")
    return number


def _number_of(value: object) -> object:
    """Return the number of a tensor or an array that holds just that, or of a Decimal."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        with contextlib.suppress(RuntimeError, NotImplementedError):  # such as of a meta tensor
            return value.item()
    if isinstance(value, Decimal):
        return math.nan if value.is_snan() else float(value)
    return value


def _variant(name: str, value: object) -> AttentionVariant:
    if isinstance(value, AttentionVariant):
        return value
    if not isinstance(value, str) or value not in READY:
        raise TypeError(
            f"{name}={shown(value)}: expected an AttentionVariant or one of {', '.join(READY)}"
        )
    return READY[value]


def _from_text(kind: str, text: str) -> object:
    lowered = text.lower()
    if lowered == "none" and "None" in kind:
        return None
    if kind.startswith("bool"):
        return {"true": True, "1": True, "false": False, "0": False}.get(lowered, text)
    for prefix, convert in (("int", int), ("float", float)):
        if kind.startswith(prefix):
            try:
                return convert(text)
            except ValueError:
                return text  # from_arguments says what was expected
    return text
