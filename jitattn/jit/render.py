"""Turn a spec into CUDA source: the only module that imports Jinja."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jinja2
from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream

from jitattn.base.errors import TemplateError
from jitattn.jit.sources import TEMPLATES, headers
from jitattn.spec.dtype import DType
from jitattn.spec.family import KernelSpec
from jitattn.spec.variant import ELEMENTS, AttentionVariant, ParamType

__all__ = ["TEMPLATES", "LineMarkers", "environment", "headers", "render"]


class LineMarkers(Extension):
    """Write ``#line N "file"`` after every statement, so that NVRTC reports template lines."""

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        """Put a marker in front of the first text after each block."""
        fresh = True
        for token in stream:
            if token.type == "data" and fresh:
                marker = f'#line {token.lineno} "{stream.name}"\n'
                token, fresh = Token(token.lineno, "data", marker + token.value), False
            elif token.type == "block_end":
                fresh = True
            yield token


@functools.cache
def environment() -> jinja2.Environment:
    """Return the Jinja environment, whose delimiters leave a template valid C++ to other tools."""
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        line_statement_prefix="//%",
        line_comment_prefix="//#",
        variable_start_string="$(",
        variable_end_string=")",
        block_start_string="/*%",
        block_end_string="%*/",
        comment_start_string="/*#",
        comment_end_string="#*/",
        keep_trailing_newline=True,
        extensions=[LineMarkers],
    )
    env.globals = {
        "cuda_type": _cuda_type,
        "warpgroup_product": _warpgroup_product,
        **_WITHOUT_VARIANT,
    }
    return env


def render(spec: KernelSpec, arch: str) -> str:
    """Return the CUDA source of ``spec`` for ``arch``: same arguments and templates, same bytes.

    Raises:
        TemplateError: a template uses a name that is a field of neither the spec nor its tile.
    """
    context = spec.context() | spec.tile(arch)._asdict()
    if (variant := spec.transform) is not None:
        context |= _with_variant(variant)
    try:
        return _banner(spec, arch) + environment().get_template(spec.template(arch)).render(context)
    except jinja2.TemplateError as error:
        raise TemplateError(f"cannot render {spec}: {error}") from error


def _cuda_type(dtype: str) -> str:
    """Return the struct that stands for elements of a type."""
    return DType(dtype).cuda_type


def _warpgroup_product(operands: str, columns: int, dtype: str) -> str:
    """Return the wrapper in nvidia-cutlass of m64n(columns) with float accumulators.

    ``operands`` is "SS" with both in shared memory, "RS" with the left one in registers.
    """
    if dtype == DType.FLOAT8_E4M3FN:
        return f"MMA_64x{columns}x32_F32E4M3E4M3_{operands}_TN"
    short = {"bfloat16": "BF16", "float16": "F16"}[dtype]
    return f"MMA_64x{columns}x16_F32{short}{short}_{operands}"


# What templates ask of variants. Statements among other statements leave no trace where there is
# none, and neither do these names: a kernel without a variant is what it would be without them.
_WITHOUT_VARIANT = {
    "variant": None,
    "table_type": "PageTable",
    "to_logits": "to_logits",
    "vary": lambda arguments: "s",
}


def _with_variant(variant: AttentionVariant) -> dict[str, object]:
    return {
        "variant": {"fields": _variant_fields(variant), "body": _variant_body(variant)},
        "table_type": "TableAndVariant",
        "to_logits": "to_varied_logits",
        "vary": lambda arguments: f"vary(s, {arguments})",
    }


def _variant_body(variant: AttentionVariant) -> str:
    """Return the statements of the transform, where compilers count the user's lines."""
    text = variant.logits_transform
    if variant.is_expression:
        text = f"return ({text}\n);"
    return f"#line 1 \"variant '{variant.name}'\"\n{text}"


def _variant_fields(variant: AttentionVariant) -> str:
    lines = [f"{_variant_type(kind)} {name};" for name, kind in variant.types.items()]
    first = f"#line 1 \"params of variant '{variant.name}'\""
    return "\n".join((first, *(lines or ["int32_t unused;"])))


def _variant_type(kind: ParamType) -> str:
    element = ELEMENTS[kind.element].cuda_type
    if kind.is_pointer:
        return f"VariantPointer<{element}>"
    return f"VariantTable<{element}, {len(kind.sizes)}>" if kind.sizes else element


def _banner(spec: KernelSpec, arch: str) -> str:
    # A function of the spec alone: a version, date or path here would move the cache key.
    fields = " ".join(f"{k}={v}" for k, v in spec.context().items() if k != "symbol")
    template = spec.template(arch)
    return (
        f"// Rendered by jitattn from templates/{template}. Edit the template, not this.\n"
        f"// {type(spec).__name__}: {fields}\n"
    )
