"""Where the templates are and what rendering depends on, without Jinja.

Importing Jinja and reading a template takes longer than loading a cached kernel, so who only needs
to recognise an earlier rendering asks here.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from pathlib import Path

from jitattn.spec.family import KernelSpec

# A wheel carries the templates inside the package, a checkout beside it. The checkout wins, so
# that an editable install never reads a stale copy.
_CHECKOUT = Path(__file__).parents[2] / "templates"
_IS_CHECKOUT = (_CHECKOUT / "attention/decode.cu.jinja").is_file()
TEMPLATES = _CHECKOUT if _IS_CHECKOUT else Path(__file__).parents[1] / "templates"


@functools.cache
def headers() -> tuple[tuple[str, str], ...]:
    """Return (name it is included by, text) of every header, which NVRTC gets in memory."""
    include = TEMPLATES / "include"
    paths = sorted(include.rglob("*.cuh"))
    return tuple((path.relative_to(include).as_posix(), path.read_text()) for path in paths)


def inputs(spec: KernelSpec, arch: str) -> dict[str, bytes]:
    """Return all that may change the text of ``render(spec, arch)``, and the headers.

    Equal inputs render to equal sources; the reverse need not hold.
    """
    values = {"spec": type(spec).__name__, **spec.context(), **spec.tile(arch)._asdict()}
    return {
        "values": repr(sorted(values.items())).encode(),
        "arch": arch.encode(),
        **_texts(),
    }


@functools.cache
def templates_digest() -> str:
    """Return the SHA-256 of all templates and headers, the same on every machine."""
    hasher = hashlib.sha256()
    for name, text in _template_texts().items():
        hasher.update(f"{name}\0{len(text)}\0".encode() + text)
    return hasher.hexdigest()


@functools.cache
def _template_texts() -> dict[str, bytes]:
    files = sorted(path for path in TEMPLATES.rglob("*") if path.is_file())
    return {
        f"template {path.relative_to(TEMPLATES).as_posix()}": path.read_bytes() for path in files
    }


@functools.cache
def _texts() -> dict[str, bytes]:
    texts = dict(_template_texts())
    for module in ("jitattn.jit.render", "jinja2"):
        texts[f"module {module}"] = _module_fact(module).encode()
    return texts


def _module_fact(name: str) -> str:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return "missing"
    info = Path(spec.origin).stat()
    return f"{spec.origin}|{info.st_size}|{info.st_mtime_ns}"
