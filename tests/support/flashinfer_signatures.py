"""The defaults of FlashInfer's parameters, from its sources; names are in ``flashinfer_table``.

The sources are read, not imported: importing them wants CUDA libraries.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

VERSION = "0.7"

# Where each is defined; a method that ``plan`` hands everything to stands for it.
HOME = {
    "BatchDecodeWithPagedKVCacheWrapper.__init__": "decode.py",
    "BatchDecodeWithPagedKVCacheWrapper.plan": "decode.py:_plan_impl",
    "BatchDecodeWithPagedKVCacheWrapper.run": "decode.py",
    "BatchDecodeWithPagedKVCacheWrapper.forward": "decode.py",
    "BatchDecodeWithPagedKVCacheWrapper.forward_return_lse": "decode.py",
    "BatchDecodeWithPagedKVCacheWrapper.reset_workspace_buffer": "decode.py",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper.__init__": "decode.py",
    "BatchPrefillWithPagedKVCacheWrapper.__init__": "prefill.py",
    "BatchPrefillWithPagedKVCacheWrapper.plan": "prefill.py",
    "BatchPrefillWithPagedKVCacheWrapper.run": "prefill.py",
    "BatchPrefillWithPagedKVCacheWrapper.forward": "prefill.py",
    "BatchPrefillWithPagedKVCacheWrapper.forward_return_lse": "prefill.py",
    "BatchPrefillWithRaggedKVCacheWrapper.__init__": "prefill.py",
    "BatchPrefillWithRaggedKVCacheWrapper.plan": "prefill.py",
    "BatchPrefillWithRaggedKVCacheWrapper.run": "prefill.py",
    "BatchPrefillWithRaggedKVCacheWrapper.forward": "prefill.py",
    "BatchPrefillWithRaggedKVCacheWrapper.forward_return_lse": "prefill.py",
    "BatchMLAPagedAttentionWrapper.__init__": "mla/_batch_mla/_wrapper.py",
    "BatchMLAPagedAttentionWrapper.plan": "mla/_batch_mla/_wrapper.py",
    "BatchMLAPagedAttentionWrapper.run": "mla/_batch_mla/_wrapper.py",
    "MLAPlanMetadata.csr": "mla/_batch_mla/_contracts.py",
    "MLAPlanMetadata.dense": "mla/_batch_mla/_contracts.py",
    "append_paged_kv_cache": "page.py",
    "append_paged_mla_kv_cache": "page.py",
    "get_batch_indices_positions": "page.py",
    "get_seq_lens": "page.py",
    "merge_state": "cascade.py",
    "merge_state_in_place": "cascade.py",
    "merge_states": "cascade.py",
    "trtllm_batch_context_with_kv_cache": "prefill.py",
    "trtllm_batch_decode_with_kv_cache": "decode.py",
    "trtllm_batch_decode_with_kv_cache_mla": "mla/_core.py",
}


def sources() -> Path | None:
    """The folder of the installed package, if it is of the version that is meant."""
    found = importlib.util.find_spec("flashinfer")
    if found is None or not found.submodule_search_locations:
        return None
    try:
        version = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return None
    return Path(found.submodule_search_locations[0]) if version.startswith(VERSION) else None


def of_source(root: Path, name: str) -> dict[str, object]:
    """Names and defaults of a function in the sources."""
    file, _, stand_in = HOME[name].partition(":")
    tree: ast.AST = ast.parse((root / file).read_text())
    owner, _, method = name.rpartition(".")
    if owner:
        tree = next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == owner)
    # Overloads come before what they are of.
    *_, found = (
        n
        for n in ast.iter_child_nodes(tree)
        if isinstance(n, ast.FunctionDef) and n.name == (stand_in or method)
    )
    return dict(_arguments(found.args))


def _arguments(arguments: ast.arguments) -> Iterator[tuple[str, object]]:
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    missing = [None] * (len(names) - len(arguments.defaults))
    pairs = [*zip(names, [*missing, *arguments.defaults], strict=True)]
    pairs += zip([a.arg for a in arguments.kwonlyargs], arguments.kw_defaults, strict=True)
    for name, default in pairs:
        if name not in ("self", "cls"):
            yield name, inspect.Parameter.empty if default is None else ast.literal_eval(default)


def of_function(function: Callable[..., object]) -> dict[str, object]:
    """Names and defaults of a function of ours."""
    parameters = inspect.signature(function).parameters
    stars = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return {
        name: p.default
        for name, p in parameters.items()
        if name not in ("self", "cls") and p.kind not in stars
    }
