"""Paged-attention kernels for LLM serving on NVIDIA GPUs that compile themselves.

Importing this module imports neither torch nor CUDA: names are resolved when they are used. What
is not listed here lives in ``jitattn.pages``, ``quant``, ``variants``, ``cascade``, ``types`` and
``errors``, which come with it, and in ``jitattn.kv``, ``compat`` and ``integrations``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitattn.base.lazy_names import lazy_names
from jitattn.version import __version__

if TYPE_CHECKING:
    from jitattn import cascade as cascade
    from jitattn import errors as errors
    from jitattn import pages as pages
    from jitattn import quant as quant
    from jitattn import types as types
    from jitattn import variants as variants
    from jitattn.bundles.precompile import precompile
    from jitattn.device.workspace import Workspace
    from jitattn.errors import (
        CacheError,
        CompileError,
        ConfigError,
        JitAttnError,
        KernelNotFoundError,
    )
    from jitattn.kernels.attention.api import AttentionPlanner
    from jitattn.kernels.attention.functional import attention
    from jitattn.kernels.common.planner_base import build_info
    from jitattn.kernels.merge.api import merge_states
    from jitattn.kernels.mla.api import MLAPlanner
    from jitattn.kernels.preprocess.api import append_kv, preprocess_qkv
    from jitattn.kernels.registry import check_config, supported_configs
    from jitattn.kernels.select.index_logits import index_logits
    from jitattn.kernels.select.page_bounds import page_bounds
    from jitattn.kernels.select.select_pages import select_pages
    from jitattn.kernels.select.select_tokens import select_tokens
    from jitattn.pages import (
        BlockTable,
        CsrPages,
        IndexLists,
        PageLists,
        RaggedKV,
        TokenTable,
        batch_info,
        build_block_table,
        copy_pages,
        gather_kv,
    )
    from jitattn.quant import QuantizedKV
    from jitattn.tensors.rope import Rope

__all__ = [
    "AttentionPlanner",
    "BlockTable",
    "CacheError",
    "CompileError",
    "ConfigError",
    "CsrPages",
    "IndexLists",
    "JitAttnError",
    "KernelNotFoundError",
    "MLAPlanner",
    "PageLists",
    "QuantizedKV",
    "RaggedKV",
    "Rope",
    "TokenTable",
    "Workspace",
    "__version__",
    "append_kv",
    "attention",
    "batch_info",
    "build_block_table",
    "build_info",
    "check_config",
    "copy_pages",
    "gather_kv",
    "index_logits",
    "merge_states",
    "page_bounds",
    "precompile",
    "preprocess_qkv",
    "select_pages",
    "select_tokens",
    "supported_configs",
]

_HOMES = {
    "AttentionPlanner": "jitattn.kernels.attention.api",
    "BlockTable": "jitattn.pages",
    "CacheError": "jitattn.errors",
    "CompileError": "jitattn.errors",
    "ConfigError": "jitattn.errors",
    "CsrPages": "jitattn.pages",
    "IndexLists": "jitattn.pages",
    "JitAttnError": "jitattn.errors",
    "KernelNotFoundError": "jitattn.errors",
    "MLAPlanner": "jitattn.kernels.mla.api",
    "PageLists": "jitattn.pages",
    "QuantizedKV": "jitattn.quant",
    "RaggedKV": "jitattn.pages",
    "Rope": "jitattn.tensors.rope",
    "TokenTable": "jitattn.pages",
    "Workspace": "jitattn.device.workspace",
    "append_kv": "jitattn.kernels.preprocess.api",
    "attention": "jitattn.kernels.attention.functional",
    "batch_info": "jitattn.pages",
    "build_block_table": "jitattn.pages",
    "build_info": "jitattn.kernels.common.planner_base",
    "check_config": "jitattn.kernels.registry",
    "copy_pages": "jitattn.pages",
    "gather_kv": "jitattn.pages",
    "index_logits": "jitattn.kernels.select.index_logits",
    "merge_states": "jitattn.kernels.merge.api",
    "page_bounds": "jitattn.kernels.select.page_bounds",
    "precompile": "jitattn.bundles.precompile",
    "preprocess_qkv": "jitattn.kernels.preprocess.api",
    "select_pages": "jitattn.kernels.select.select_pages",
    "select_tokens": "jitattn.kernels.select.select_tokens",
    "supported_configs": "jitattn.kernels.registry",
}
_MODULES = ("cascade", "errors", "pages", "quant", "types", "variants")
# Names of earlier versions, which resolve, and are documented where they live now.
_MOVED = {
    "ALIBI": "jitattn.variants",
    "AttentionVariant": "jitattn.variants",
    "BatchInfo": "jitattn.pages",
    "BoundCache": "jitattn.types",
    "BoundCascadeCache": "jitattn.cascade",
    "BoundMLACache": "jitattn.types",
    "CascadeLevel": "jitattn.cascade",
    "CascadePlan": "jitattn.cascade",
    "CascadePlanner": "jitattn.cascade",
    "Config": "jitattn.types",
    "DriverError": "jitattn.errors",
    "KernelInfo": "jitattn.types",
    "MLAPlan": "jitattn.types",
    "Plan": "jitattn.types",
    "RELATIVE_BIAS": "jitattn.variants",
    "Report": "jitattn.types",
    "Support": "jitattn.types",
    "alibi_slopes": "jitattn.variants",
    "convert_pages": "jitattn.pages",
    "dequantize_kv": "jitattn.quant",
    "quantize_kv": "jitattn.quant",
    "t5_bias": "jitattn.variants",
}

__getattr__ = lazy_names(__name__, {**_HOMES, **_MOVED}, _MODULES)


def __dir__() -> list[str]:
    """List the public names, those not imported yet too."""
    return sorted((*__all__, *_MODULES))
