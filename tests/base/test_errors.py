"""The exception tree: bases, messages, and survival of pickling."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from jitattn.base import errors
from jitattn.base.errors import CompileError, CompilerMissingError, ConfigError

LOG = """decode.cu.jinja(38): error: identifier "oops" is undefined
   int f(){ return oops; }
                   ^
1 error detected in the compilation of "k.cu".
"""


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.CompileError, RuntimeError),
        (errors.CompilerMissingError, RuntimeError),
        (errors.KernelNotFoundError, LookupError),
        (errors.CacheError, OSError),
        (errors.DriverError, RuntimeError),
        (errors.KVCacheError, RuntimeError),
        (errors.TemplateError, Exception),
    ],
)
def test_every_error_is_ours_and_a_builtin(error: type, builtin: type) -> None:
    assert issubclass(error, errors.JitAttnError)
    assert issubclass(error, builtin)


def test_the_tree_in_the_docstring_is_complete() -> None:
    ours = [
        c
        for c in vars(errors).values()
        if isinstance(c, type) and c.__module__ == "jitattn.base.errors"
    ]
    assert ours
    for error in ours:
        assert error.__name__ in (errors.__doc__ or "")


def test_config_error_keeps_every_reason() -> None:
    error = ConfigError(["head_dim=100 is odd", "page_size=0 is too small"])
    assert error.reasons == ("head_dim=100 is odd", "page_size=0 is too small")
    assert str(error) == "head_dim=100 is odd; page_size=0 is too small"
    assert ConfigError("one reason").reasons == ("one reason",)


def test_compile_error_begins_and_ends_with_the_first_error() -> None:
    error = CompileError("k.cu", LOG, "source", Path("/tmp/k.cu"))
    lines = str(error).splitlines()
    first = 'decode.cu.jinja(38): error: identifier "oops" is undefined'
    assert error.first_error == first
    assert lines[0] == f"k.cu does not compile: {first}"
    assert lines[-1] == first
    assert "rendered source: /tmp/k.cu" in lines


def test_compile_error_shortens_the_message_but_not_the_log() -> None:
    log = "\n".join(f"k.cu({n}): error: bad" for n in range(1000))
    error = CompileError("k.cu", log, "source")
    assert error.log == log
    assert len(str(error).splitlines()) < 50
    assert "(960 more lines)" in str(error)
    assert "not saved" in str(error)


def test_compile_error_without_a_log() -> None:
    assert CompileError("k.cu", "", "source").first_error == "no log"


@pytest.mark.parametrize(
    "error",
    [
        ConfigError(["a", "b"]),
        CompileError("k.cu", LOG, "source", Path("/tmp/k.cu")),
        CompilerMissingError("install it"),
        errors.CacheError("/cache is refused"),
        errors.KernelNotFoundError("k"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_pickling(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
