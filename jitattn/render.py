"""Turn a spec into CUDA source: the only module that imports Jinja."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jinja2
from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream

from jitattn.errors import TemplateError
from jitattn.sources import TEMPLATES, headers
from jitattn.spec import KernelSpec
from jitattn.tiling import tile_for

__all__ = ["TEMPLATES", "LineMarkers", "environment", "headers", "render"]

_CUDA_TYPE = {
    "float16": "Half",
    "bfloat16": "BFloat16",
    "float32": "Float",
    "float8_e4m3fn": "Float8E4M3",
    "float8_e5m2": "Float8E5M2",
}


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
    env.globals = {"cuda_type": _CUDA_TYPE.__getitem__}
    return env


def render(spec: KernelSpec, arch: str) -> str:
    """Return the CUDA source of ``spec`` for ``arch``: same arguments and templates, same bytes.

    Raises:
        TemplateError: a template uses a name that is a field of neither the spec nor its tile.
    """
    context = spec.context() | tile_for(spec, arch)._asdict()
    try:
        return _banner(spec) + environment().get_template(spec.template).render(context)
    except jinja2.TemplateError as error:
        raise TemplateError(f"cannot render {spec}: {error}") from error


def _banner(spec: KernelSpec) -> str:
    # A function of the spec alone: a version, date or path here would move the cache key.
    fields = " ".join(f"{k}={v}" for k, v in spec.context().items() if k != "symbol")
    return (
        f"// Rendered by jitattn from templates/{spec.template}. Edit the template, not this.\n"
        f"// {type(spec).__name__}: {fields}\n"
    )
