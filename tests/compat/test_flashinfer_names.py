"""Every public name of FlashInfer's release is here, with its parameters, or says what to use."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys

import pytest

from jitattn.compat import flashinfer
from jitattn.compat.missing import MissingNameError
from tests.support import flashinfer_table

DOOR = "jitattn.compat.flashinfer"
TABLE = json.loads(flashinfer_table.TABLE.read_text())
MODULES = TABLE["modules"]
NAMES = [(module, name) for module, names in MODULES.items() for name in names]
# What says nothing about a replacement would not do.
SAYS = ("use ", "jitattn has attention alone", "not built")


def ours(module: str) -> str:
    return DOOR + module.removeprefix("flashinfer")


def test_the_release_is_that_of_the_table() -> None:
    assert flashinfer.__version__ == TABLE["version"]


@pytest.mark.parametrize("module", MODULES)
def test_every_name_is_there_or_says_what_to_use(module: str) -> None:
    door = importlib.import_module(ours(module))
    for name in MODULES[module]:
        if name in door.__all__ or hasattr(door, name):
            continue
        with pytest.raises(MissingNameError, match=name) as caught:
            getattr(door, name)
        assert isinstance(caught.value, AttributeError)
        assert any(word in str(caught.value) for word in SAYS), str(caught.value)
        with pytest.raises(ImportError) as refused:
            exec(f"from {ours(module)} import {name}", {})
        assert str(refused.value) == str(caught.value)


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_parameters_are_those_of_the_release(module: str, name: str) -> None:
    door, entry = importlib.import_module(ours(module)), MODULES[module][name]
    if name not in getattr(door, "__all__", ()) or entry is None:
        return
    if isinstance(entry, str):
        assert differences(getattr(door, name), entry) == []
        return
    for method, parameters in entry.items():
        found = inspect.getattr_static(getattr(door, name), method)
        if isinstance(found, property):
            assert parameters == ""
            continue
        assert differences(getattr(getattr(door, name), method), parameters) == [], method


def differences(function: object, theirs: str) -> list[str]:
    """Parameters that only one of both has, or the order; of custom kernels' both have stars."""
    own, wanted = flashinfer_table.of_function(function), theirs.split()
    if wanted == ["*args", "**kwargs"]:
        return []  # a method that hands on all it is given
    if sorted(own) == sorted(wanted) and "q_len_per_req" in own:
        return []  # the release takes these by name alone, and the order says nothing
    return [] if own == wanted else [*set(own) ^ set(wanted)] or own


def test_every_module_has_all_that_it_says() -> None:
    for module in MODULES:
        door = importlib.import_module(ours(module))
        assert {name for name in door.__all__ if not hasattr(door, name)} == set()
        unknown = set(door.__all__) - {*MODULES[module], "__version__", *ROOT_TOO}
        assert unknown == set(), module


# Here the package has them, too.
ROOT_TOO = {
    *("MLAPlanMetadata", "trtllm_batch_context_with_kv_cache", "trtllm_batch_decode_with_kv_cache"),
    "trtllm_batch_decode_with_kv_cache_mla",
}


def test_a_mistyped_name_is_shown_the_right_one() -> None:
    with pytest.raises(AttributeError, match="is BatchDecodeWithPagedKVCacheWrapper meant"):
        flashinfer.BatchDecodeWithPagedKVCacheWraper  # noqa: B018
    assert not hasattr(flashinfer, "SegmentGEMMWrapper")
    assert getattr(flashinfer, "rmsnorm", None) is None


@pytest.mark.parametrize(
    "line",
    [
        "from {} import BatchAttention, merge_states, packbits, xqa",
        "from {}.decode import trtllm_batch_decode_with_kv_cache, fast_decode_plan",
        "from {}.prefill import trtllm_batch_context_with_kv_cache, single_prefill_with_kv_cache",
        "from {}.mla import trtllm_batch_decode_with_kv_cache_mla, BatchMLAPagedAttentionWrapper",
        "from {}.quantization import packbits, segment_packbits",
        "from {}.cascade import MultiLevelCascadeAttentionWrapper",
        "import {0}.rope; {0}.rope.apply_rope_inplace",
        "import {0} as f; f.decode.single_decode_with_kv_cache; f.page.append_paged_kv_cache",
    ],
)
def test_imports_of_users_work(line: str) -> None:
    exec(line.format(DOOR), {})


def test_the_table_is_that_of_an_installed_release() -> None:
    root = flashinfer_table.installed()
    if root is None:
        pytest.skip("flashinfer-python is not installed")
    command = [sys.executable, "-m", "tests.support.flashinfer_table", "--check"]
    assert subprocess.run(command, check=False).returncode == 0
