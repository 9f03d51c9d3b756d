"""Paged-attention kernels for LLM serving on NVIDIA GPUs that compile themselves.

Importing this module imports neither torch nor CUDA: names are resolved when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from jitattn.version import __version__

if TYPE_CHECKING:
    from jitattn.batches import BatchInfo, batch_info
    from jitattn.binding import BoundCache
    from jitattn.bundles import Report, precompile
    from jitattn.cascade import BoundCascadeCache, CascadeLevel, CascadePlan, CascadePlanner
    from jitattn.cuda_backend import KernelInfo
    from jitattn.errors import (
        CacheError,
        CompileError,
        ConfigError,
        DriverError,
        JitAttnError,
        KernelNotFoundError,
    )
    from jitattn.functional import attention
    from jitattn.gather import gather_kv
    from jitattn.merge import merge_states
    from jitattn.mla_cache import BoundMLACache
    from jitattn.mla_planner import MLAPlan, MLAPlanner
    from jitattn.page_copies import copy_pages
    from jitattn.pages import BlockTable, CsrPages, RaggedKV, TokenTable
    from jitattn.planner import AttentionPlanner, Plan, build_info
    from jitattn.position_bias import alibi_slopes, t5_bias
    from jitattn.preprocess import append_kv, preprocess_qkv
    from jitattn.quantization import QuantizedKV, dequantize_kv, quantize_kv
    from jitattn.rotary import Rope
    from jitattn.support import Config, Support, check_config, supported_configs
    from jitattn.tables import build_block_table, convert_pages
    from jitattn.variant import ALIBI, RELATIVE_BIAS, AttentionVariant
    from jitattn.workspace import Workspace

_HOME = {
    "ALIBI": "variant",
    "AttentionPlanner": "planner",
    "AttentionVariant": "variant",
    "BatchInfo": "batches",
    "BlockTable": "pages",
    "BoundCache": "binding",
    "BoundCascadeCache": "cascade",
    "BoundMLACache": "mla_cache",
    "CacheError": "errors",
    "CascadeLevel": "cascade",
    "CascadePlan": "cascade",
    "CascadePlanner": "cascade",
    "CompileError": "errors",
    "Config": "support",
    "ConfigError": "errors",
    "CsrPages": "pages",
    "DriverError": "errors",
    "JitAttnError": "errors",
    "KernelInfo": "cuda_backend",
    "KernelNotFoundError": "errors",
    "MLAPlan": "mla_planner",
    "MLAPlanner": "mla_planner",
    "Plan": "planner",
    "QuantizedKV": "quantization",
    "RELATIVE_BIAS": "variant",
    "RaggedKV": "pages",
    "Report": "bundles",
    "Rope": "rotary",
    "Support": "support",
    "TokenTable": "pages",
    "Workspace": "workspace",
    "alibi_slopes": "position_bias",
    "append_kv": "preprocess",
    "attention": "functional",
    "batch_info": "batches",
    "build_block_table": "tables",
    "build_info": "planner",
    "check_config": "support",
    "convert_pages": "tables",
    "copy_pages": "page_copies",
    "dequantize_kv": "quantization",
    "gather_kv": "gather",
    "merge_states": "merge",
    "precompile": "bundles",
    "preprocess_qkv": "preprocess",
    "quantize_kv": "quantization",
    "supported_configs": "support",
    "t5_bias": "position_bias",
}

__all__ = [
    "ALIBI",
    "RELATIVE_BIAS",
    "AttentionPlanner",
    "AttentionVariant",
    "BatchInfo",
    "BlockTable",
    "BoundCache",
    "BoundCascadeCache",
    "BoundMLACache",
    "CacheError",
    "CascadeLevel",
    "CascadePlan",
    "CascadePlanner",
    "CompileError",
    "Config",
    "ConfigError",
    "CsrPages",
    "DriverError",
    "JitAttnError",
    "KernelInfo",
    "KernelNotFoundError",
    "MLAPlan",
    "MLAPlanner",
    "Plan",
    "QuantizedKV",
    "RaggedKV",
    "Report",
    "Rope",
    "Support",
    "TokenTable",
    "Workspace",
    "__version__",
    "alibi_slopes",
    "append_kv",
    "attention",
    "batch_info",
    "build_block_table",
    "build_info",
    "check_config",
    "convert_pages",
    "copy_pages",
    "dequantize_kv",
    "gather_kv",
    "merge_states",
    "precompile",
    "preprocess_qkv",
    "quantize_kv",
    "supported_configs",
    "t5_bias",
]


def __getattr__(name: str) -> object:
    """Import the module that holds ``name``, the first time it is used."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"jitattn.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, those not imported yet too."""
    return sorted(__all__)
