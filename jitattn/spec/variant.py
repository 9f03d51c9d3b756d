"""Attention variants: the user's CUDA C++ that transforms each logit. Torch-free.

A variant is a value. Kernels are specialised on its text and the types of its parameters; the
parameters themselves are launch arguments.
"""

from __future__ import annotations

import functools
import hashlib
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from jitattn.base.record import Value
from jitattn.base.validate import shown


class Element(NamedTuple):
    """The type of a number or of a tensor's elements."""

    cuda_type: str
    dtype: str  # of the tensors that hold it, in torch


ELEMENTS = {
    "float": Element("float", "float32"),
    "float16": Element("Half", "float16"),
    "bfloat16": Element("BFloat16", "bfloat16"),
    "int": Element("int32_t", "int32"),
    "uint8": Element("uint8_t", "uint8"),
}
"""Element types of tensors; 16-bit floats are read as float."""
SCALARS = ("float", "int")
NAMED_SIZES = ("qo_heads", "kv_heads")
MAX_PARAMS, MAX_RANK = 16, 4

_MAX_NAME = 32
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_POINTER = re.compile(r"(\w+)\s*\*")
_TABLE = re.compile(r"(\w+)\s*\[([^\[\]]*)\]")
_SIZE = re.compile(r"[1-9][0-9]{0,17}")  # int64 holds it
_OPEN = {")": "(", "]": "[", "}": "{"}
# Comments and literals, terminated or not, which may contain brackets and `return`.
_HIDDEN = re.compile(
    r"//(?:\\[ \t\r]*\n|[^\n])*"
    r"|/\*.*?(?:\*/|(?P<comment>\Z))"
    r'|"(?:\\.|[^"\\\n])*(?:"|(?P<string>\n|\Z))'
    r"|(?<![0-9A-Za-z_])'(?:\\.|[^'\\\n])*(?:'|(?P<character>\n|\Z))",
    re.DOTALL,
)


class ParamType(NamedTuple):
    """The declared type of a parameter: a number, a pointer, or a table with sizes."""

    element: str
    is_pointer: bool = False
    sizes: tuple[int | str, ...] = ()
    """Sizes of a table: integers, ``"qo_heads"``, ``"kv_heads"``, or ``"*"`` for any."""

    @property
    def is_scalar(self) -> bool:
        """Whether the parameter is passed by value."""
        return not self.is_pointer and not self.sizes


def parse_type(text: str) -> ParamType | None:
    """Return the declared type: ``"float"``, ``"float*"`` or ``"float[qo_heads, *]"``."""
    text = text.strip()
    if text in SCALARS:
        return ParamType(text)
    if (found := _POINTER.fullmatch(text)) and found[1] in ELEMENTS:
        return ParamType(found[1], is_pointer=True)
    if not (found := _TABLE.fullmatch(text)) or found[1] not in ELEMENTS:
        return None
    sizes = [_parse_size(size.strip()) for size in found[2].split(",")]
    if None in sizes or len(sizes) > MAX_RANK:
        return None
    return ParamType(found[1], sizes=tuple(size for size in sizes if size is not None))


def _parse_size(text: str) -> int | str | None:
    if text == "*" or text in NAMED_SIZES:
        return text
    return int(text) if _SIZE.fullmatch(text) else None


Reference = Callable[[Any, Any], Any]


class AttentionVariant(Value):
    """A transform of each logit of a query token and a visible key.

    Variants of equal name, text and parameters share kernels and cache entries, in any
    process; others never share a kernel.

    Attributes:
        name: part of kernels' symbols and of compiler messages.
        logits_transform: the CUDA C++.
        params: names and types, in order.
        reference: the definition in torch, or None.
    """

    name: str
    logits_transform: str
    params: tuple[tuple[str, str], ...]
    reference: Reference | None

    def __init__(
        self,
        name: str,
        logits_transform: str,
        params: Mapping[str, str] | tuple[tuple[str, str], ...] = (),
        reference: Reference | None = None,
    ) -> None:
        """Check a variant; a planner or ``precompile`` compiles it later.

        Args:
            name: letters, digits and underscores, 32 at most.
            logits_transform: an expression, or statements that ``return`` a float. It sees
                ``logit`` (float, natural units: sm_scale * q.k after the soft cap); int32
                positions in the request ``qo_idx`` and ``kv_idx``, and its lengths ``qo_len`` and
                ``kv_len``; ``qo_head``, ``kv_head``, ``request``; and ``params.<name>``. It is
                evaluated for keys that the query token sees by length, causality, window and mask,
                and for no others. -inf masks a key; +inf and NaN make the row's out and lse NaN.
            params: types by name: ``"float"``, ``"int"``; ``"T*"``, a contiguous tensor of any
                shape, read as ``params.name[i]``; ``"T[..]"``, a tensor of these sizes (integers,
                ``qo_heads``, ``kv_heads``, ``*`` for any) and any strides, read as
                ``params.name(i, ..)``, with ``params.name.size(d)``. T is float, float16,
                bfloat16, int (int32) or uint8; float16 and bfloat16 are read as float.
            reference: the definition in torch, for the backend "reference" and for tests:
                ``reference(logit, at)`` returns new logits of the shape of ``logit``, float64
                [num_rows, num_qo_heads, num_keys]. ``at`` has the names above: qo_idx, kv_idx,
                qo_head and kv_head are tensors that broadcast with it, qo_len, kv_len and request
                integers, and ``at.params`` has numbers and tensors (float64, integers as int64).

        Raises:
            TypeError, ValueError: an argument of another type or form, or brackets in the text that
                don't match.
        """
        _check_name(name)
        lines = _checked_text(name, logits_transform)
        if reference is not None and not callable(reference):
            raise TypeError(f"reference is a {type(reference).__name__}: expected a function")
        super().__init__(
            name=name,
            logits_transform=lines,
            params=_checked_params(name, params),
            reference=reference,
        )

    def __str__(self) -> str:
        """Return the name."""
        return self.name

    @property
    def types(self) -> dict[str, ParamType]:
        """Types of the parameters, by name."""
        return {name: _known_type(text) for name, text in self.params}

    @property
    def is_expression(self) -> bool:
        """Whether the text is an expression, without ``return``."""
        return not re.search(r"\breturn\b", _HIDDEN.sub(" ", self.logits_transform))

    @property
    def label(self) -> str:
        """Name and digest of text and parameters, for symbols."""
        hasher = hashlib.sha256()
        for part in (self.name, self.logits_transform, *(x for pair in self.params for x in pair)):
            data = part.encode()
            hasher.update(len(data).to_bytes(8, "little"))
            hasher.update(data)
        return f"{self.name}_{hasher.hexdigest()[:12]}"

    @property
    def code(self) -> AttentionVariant:
        """The variant without its reference, for specs."""
        return AttentionVariant(self.name, self.logits_transform, self.params)


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"name is a {type(name).__name__}: expected a string")
    if not _NAME.fullmatch(name) or len(name) > _MAX_NAME:
        raise ValueError(
            f"name={shown(name)}: expected letters, digits and underscores, a letter first, "
            f"{_MAX_NAME} at most"
        )


def _checked_text(name: str, text: object) -> str:
    """Return the text, its indentation removed; lines keep their numbers."""
    if not isinstance(text, str):
        raise TypeError(f"logits_transform is a {type(text).__name__}: expected CUDA C++")
    lines = textwrap.dedent(text).rstrip()
    if "\0" in lines:
        raise ValueError(f"variant {name!r}: logits_transform holds a NUL character")
    if any("\ud800" <= character <= "\udfff" for character in lines):
        raise ValueError(f"variant {name!r}: logits_transform holds half of a surrogate pair")
    visible = _HIDDEN.sub(_blank, lines)
    if not visible.strip():
        raise ValueError(f"variant {name!r}: logits_transform is empty")
    for hidden in _HIDDEN.finditer(lines):
        if hidden.lastgroup is not None:
            line = lines.count("\n", 0, hidden.start()) + 1
            raise ValueError(f"variant {name!r}:{line}: a {hidden.lastgroup} that doesn't end")
    # The compiler only warns, and the result is undefined.
    for found in re.finditer(r"\breturn\s*;", visible):
        line = visible.count("\n", 0, found.start()) + 1
        raise ValueError(f"variant {name!r}:{line}: a return without a float")
    # Else the compiler would report the lines around the user's.
    for line, what in _loose_brackets(visible):
        raise ValueError(f"variant {name!r}:{line}: {what}")
    if lines.endswith("\\"):  # even in a comment: the next line would continue it
        raise ValueError(f"variant {name!r}: logits_transform ends with a backslash")
    return lines


def _blank(hidden: re.Match[str]) -> str:
    return "\n" * hidden[0].count("\n") or (" " if hidden[0].startswith("/") else "0")


def _loose_brackets(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and message of the first unmatched bracket."""
    open_ones: list[tuple[str, int]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        for character in line:
            if character in _OPEN.values():
                open_ones.append((character, number))
            elif character in _OPEN and (not open_ones or open_ones.pop()[0] != _OPEN[character]):
                yield number, f"{character!r} closes nothing"
                return
    for character, number in open_ones[-1:]:
        yield number, f"{character!r} is never closed"


def _checked_params(name: str, params: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(params, Mapping) and not isinstance(params, tuple):
        raise TypeError(f"params is a {type(params).__name__}: expected a mapping, name to type")
    pairs = tuple(params.items() if isinstance(params, Mapping) else params)
    if len(pairs) > MAX_PARAMS:
        raise ValueError(f"variant {name!r} has {len(pairs)} params: {MAX_PARAMS} at most")
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(f"params has {shown(pair)}: expected a tuple, name and type")
        param, kind = pair
        if not isinstance(param, str) or not isinstance(kind, str):
            raise TypeError(f"params has {shown(param)}: {shown(kind)}: expected a name and a type")
        if not _NAME.fullmatch(param) or len(param) > _MAX_NAME:
            raise ValueError(f"params has {shown(param)}: expected letters, digits and underscores")
        _known_type(kind)
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"variant {name!r} has two params of one name")
    return pairs


@functools.lru_cache(maxsize=256)  # each run of a plan reads its parameters' types
def _known_type(text: str) -> ParamType:
    found = parse_type(text)
    if found is None:
        raise ValueError(
            f"params has type {shown(text)}: expected float, int, T* or T[..] with T one of "
            f"{', '.join(ELEMENTS)} "
            f"and 1 to {MAX_RANK} sizes: positive integers, {', '.join(NAMED_SIZES)} or *"
        )
    return found


def _alibi(logit: Any, at: Any) -> Any:
    return logit - at.params.slopes[at.qo_head] * (at.qo_idx - at.kv_idx).abs()


def _relative_bias(logit: Any, at: Any) -> Any:
    bias = at.params.bias
    column = (at.params.zero + at.qo_idx - at.kv_idx).clamp(0, bias.shape[1] - 1)
    return logit + bias[at.qo_head, column]


ALIBI = AttentionVariant(
    "alibi",
    "logit - params.slopes(qo_head) * fabsf(float(qo_idx - kv_idx))",
    {"slopes": "float[qo_heads]"},
    reference=_alibi,
)
"""Attention with linear biases: ``slopes`` float32 [num_qo_heads]; see ``alibi_slopes``."""

RELATIVE_BIAS = AttentionVariant(
    "relative_bias",
    """
    const int column = params.zero + qo_idx - kv_idx;
    return logit + params.bias(qo_head, max(0, min(column, int(params.bias.size(1)) - 1)));
    """,
    {"bias": "float[qo_heads, *]", "zero": "int"},
    reference=_relative_bias,
)
"""A learned bias by distance: ``bias`` float32 [num_qo_heads, num_distances], clamped
column ``zero + qo_idx - kv_idx``; see ``t5_bias``."""

READY = {variant.name: variant for variant in (ALIBI, RELATIVE_BIAS)}
"""Ready variants, by name."""
