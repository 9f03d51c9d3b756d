"""The wrappers of wgmma that nvidia-cutlass has, for the kernels that include them.

A source that names ``cute/arch/mma_sm90_gmma.hpp`` is compiled with that header, those it reaches
and stand-ins for what CUTLASS takes from CCCL and the toolkit. NVRTC gets all of them in memory, as
it gets ours, so no cubin knows where the package lies. Other sources need no nvidia-cutlass, and
neither does who reads compiled kernels.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

from jitattn.base.errors import CompilerMissingError

PACKAGE = "nvidia-cutlass"
WRAPPERS = ("cute/arch/mma_sm90_gmma.hpp", "cutlass/arch/reg_reconfig.h")
# Products of more shapes, which the first header takes in when it is told to.
_MORE = "cute/arch/mma_sm90_gmma_ext.hpp"

# The macro, which does not expand again in its own text, is for CUTLASS' one function without an
# execution space. NVRTC's -default-device would be for all of a kernel's own functions, too.
_INTEGERS = """#pragma once
typedef signed char int8_t; typedef unsigned char uint8_t;
typedef short int16_t; typedef unsigned short uint16_t;
typedef int int32_t; typedef unsigned int uint32_t;
typedef long long int64_t; typedef unsigned long long uint64_t;
typedef unsigned long long uintptr_t;
namespace cuda { namespace std {
using ::int8_t; using ::uint8_t; using ::int16_t; using ::uint16_t;
using ::int32_t; using ::uint32_t; using ::int64_t; using ::uint64_t;
} }
#define synclog_setup __device__ synclog_setup
"""
_STAND_INS = {
    "cuda/std/cassert": "#pragma once\n#ifndef assert\n#define assert(x) ((void)0)\n#endif\n",
    "cuda/std/cstdint": _INTEGERS,
    "cccl/cuda/std/cstdint": _INTEGERS,  # as CUTLASS names it for NVRTC 13
    "cuda_runtime_api.h": "#pragma once\n",
}
_INCLUDE = re.compile(r'#\s*include\s*[<"]([^">]+)[">]')
_PRODUCT = re.compile(
    r"^(?:template <[^>]*>\s*)?struct (MMA_\w+)\s*\{.*?^\};\n", re.MULTILINE | re.DOTALL
)
_NAME = re.compile(r"\bMMA_\w+")


def uses_wrappers(source: str) -> bool:
    """Say whether ``source`` includes the wrappers of wgmma, which is where it names them."""
    return WRAPPERS[0] in source


def wrapper_headers(source: str) -> tuple[tuple[str, str], ...]:
    """Return (name it is included by, text) of what ``source`` includes and is not ours.

    That is nothing, or the package's headers with the products that ``source`` names: a compiler
    takes 100 ms for all of them.

    Args:
        source: a rendered kernel.

    Raises:
        CompilerMissingError: it includes the wrappers, and nvidia-cutlass is not installed.
    """
    if not uses_wrappers(source):
        return ()
    return _headers_with(frozenset(_NAME.findall(source)))


def wrapper_package(source: str) -> tuple[str, ...]:
    """Return what ``wrapper_headers`` come from, for example ``("nvidia-cutlass 4.2.0.0",)``."""
    return (f"{PACKAGE} {_version()}",) if uses_wrappers(source) else ()


@functools.cache
def _headers_with(products: frozenset[str]) -> tuple[tuple[str, str], ...]:
    """Return the headers, with no other product than these."""
    texts = dict(_headers())
    wanted = {m[1]: m[0] for m in _PRODUCT.finditer(texts[WRAPPERS[0]]) if m[1] in products}
    rest = _PRODUCT.sub("", texts[WRAPPERS[0]])
    if not products <= wanted.keys():
        more = (_include_folder() / _MORE).read_text(encoding="utf-8")
        wanted |= {m[1]: m[0] for m in _PRODUCT.finditer(more) if m[1] in products}
    body = "\n".join(wanted.values())
    texts[WRAPPERS[0]] = f"{rest}\nnamespace cute::SM90::GMMA {{\n{body}}}\n"
    return tuple(sorted(texts.items()))


@functools.cache
def _headers() -> tuple[tuple[str, str], ...]:
    root = _include_folder()
    texts: dict[str, str] = {}
    waiting = list(WRAPPERS)
    while waiting:
        name = waiting.pop()
        # What is not there is the host's, ours to stand in for, or switched off by a macro.
        if name not in texts and (root / name).is_file():
            texts[name] = (root / name).read_text(encoding="utf-8")
            waiting += _INCLUDE.findall(texts[name])
    return tuple(sorted((texts | _STAND_INS).items()))


def _include_folder() -> Path:
    """Find the package's headers without importing it, which would take 30 ms."""
    try:
        found = importlib.util.find_spec("cutlass_library")
    except (ImportError, ValueError):  # a finder refuses, or somebody's module has no spec
        found = None
    if found is not None and found.origin is not None:
        folder = Path(found.origin).parent / "source" / "include"
        if all((folder / name).is_file() for name in WRAPPERS):
            return folder
    raise CompilerMissingError(
        f"{PACKAGE}, whose wrappers of wgmma this kernel includes, is missing: "
        f"pip install '{PACKAGE}>=4.2' (a precompiled kernel needs none)"
    )


@functools.cache
def _version() -> str:
    import importlib.metadata  # 10 ms, and only a compilation needs it

    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
