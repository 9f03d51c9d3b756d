"""A cache of its own for every test, and the tests that a machine cannot run, named."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.shared_files import FOLDER

_ROOT = Path(__file__).parent
# Markers of everything in a folder; what builds kernels in C++ and runs them on the CPU is called
# ``test_*_emulated.py``, or has the marker ``emulator`` of its own.
_FOLDERS = {"tests/gpu": "gpu", "tests/compile": "compile", "tests/style": "style"}
# Take longest, the longest first: with --dist loadfile a process that began one of these at the end
# would be alone for as long.
_LONGEST = tuple(
    f"tests/{name}.py"
    for name in (
        "compile/test_compile_all",
        "compile/test_compile_mla",
        "compile/test_variants",
        "kernels/attention/test_prefill_emulated",
        "jit/test_cache_conduct",
        "spec/test_variant",
        "kernels/attention/test_untouched",
        "kernels/mla/test_mla_emulated",
        "kernels/attention/test_decode_emulated",
        "style/test_style",
        "compile/test_preprocess",
        "kernels/attention/test_variant_emulated",
        "tools/test_cli",
        "kernels/pages/test_transfers_emulated",
        "examples/test_serving",
        "bundles/test_precompile",
        "compile/test_reproducible",
        "compile/test_compile_budget",
        "compile/test_compile_transfers",
        "jit/test_cache_conduct_faults",
        "tools/test_demo",
        "kv/test_manager_model",
    )
)


# Tensors are small, and threads of tests that run side by side wait for each other in loops.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")


def pytest_configure(config: pytest.Config) -> None:
    """Give the workers of a run one folder: see `tests.support.shared_files`.

    They take files in the order below, not, as xdist would have it, those of most tests first.
    """
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False
    if FOLDER not in os.environ:
        os.environ[FOLDER] = folder = tempfile.mkdtemp(prefix="jitattn-tests-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@functools.cache
def _why_no_gpu() -> str:
    """Return why tests marked ``gpu`` cannot run here; empty when they can."""
    import torch  # costs a second, so only when a test asks

    if not torch.cuda.is_available():
        return "needs a CUDA device, and torch.cuda.is_available() is False"
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return f"needs compute capability 8.0 or newer, and this device has {major}.{minor}"
    return ""


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Function]) -> Iterator[None]:
    for item in items:
        for folder, marker in _FOLDERS.items():
            if item.path.is_relative_to(_ROOT / folder):
                item.add_marker(marker)
        if item.path.stem.endswith("_emulated") or "emulated_kernels" in item.fixturenames:
            item.add_marker("emulator")
    yield  # -k and -m choose
    places = {_ROOT / name: place for place, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    if any(item.get_closest_marker("gpu") for item in items) and (reason := _why_no_gpu()):
        items[:] = _one_of_each_function(items, reason)


def _one_of_each_function(items: list[pytest.Function], reason: str) -> list[pytest.Function]:
    """Return the items with one for each function that needs a card, skipped, for all its cases.

    They are thousands, and to skip a case takes a millisecond of each process. That the functions
    are imported and their cases made has been tested by then.
    """
    kept: list[pytest.Function] = []
    cases: dict[str, list[pytest.Function]] = {}
    for item in items:
        if item.get_closest_marker("gpu"):
            others = cases.setdefault(item.nodeid.partition("[")[0], [])
            others.append(item)
            if len(others) > 1:
                continue
        kept.append(item)
    for same in cases.values():
        said = f"{len(same)} cases: {reason}" if len(same) > 1 else reason
        same[0].add_marker(pytest.mark.skip(reason=said))
    return kept


def pytest_collection_finish() -> None:
    """Have the garbage collector pass over what was collected, which stays until the end."""
    gc.freeze()


@pytest.fixture(scope="session")
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that GPU tests share, so that each kernel is compiled once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Keep tests off the user's cache and settings.

    GPU tests keep ``JITATTN_PRECOMPILED`` and ``JITATTN_JIT``: a card is often given a bundle.
    """
    if request.node.get_closest_marker("gpu"):
        monkeypatch.setenv("JITATTN_CACHE_DIR", str(request.getfixturevalue("session_cache")))
        return
    for name in [name for name in os.environ if name.startswith("JITATTN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("JITATTN_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def bundled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that asks for kernels which tests/gpu/bundle.py lacks."""
    from tests.support.asked import Asked  # costs seconds, so only when a test asks

    asked = Asked(monkeypatch)
    yield
    assert asked.configs
    missing = sorted(spec.symbol for spec in asked.specs_beside_the_bundle())
    assert not missing, f"tests/gpu/bundle.py lacks {', '.join(missing)}"


@pytest.fixture
def new_tensors_are_nan() -> Iterator[None]:
    """``torch.empty`` gives NaN, so that what is not written is seen."""
    import torch

    torch.use_deterministic_algorithms(True)
    assert torch.isnan(torch.empty(3)).all()
    yield
    torch.use_deterministic_algorithms(False)
