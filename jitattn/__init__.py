"""Paged-attention kernels for LLM serving on NVIDIA GPUs that compile themselves.

Importing this module imports neither torch nor CUDA: names are resolved when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from jitattn.version import __version__

if TYPE_CHECKING:
    from jitattn.base.errors import (
        CacheError,
        CompileError,
        ConfigError,
        DriverError,
        JitAttnError,
        KernelNotFoundError,
    )
    from jitattn.bundles.precompile import Report, precompile
    from jitattn.device.workspace import Workspace
    from jitattn.kernels.attention.api import AttentionPlanner, Plan
    from jitattn.kernels.attention.functional import attention
    from jitattn.kernels.cascade import (
        BoundCascadeCache,
        CascadeLevel,
        CascadePlan,
        CascadePlanner,
    )
    from jitattn.kernels.common.kernel_loader import KernelInfo
    from jitattn.kernels.common.planner_base import build_info
    from jitattn.kernels.merge.api import merge_states
    from jitattn.kernels.mla.api import MLAPlan, MLAPlanner
    from jitattn.kernels.mla.check import BoundMLACache
    from jitattn.kernels.pages.batch_info import BatchInfo, batch_info
    from jitattn.kernels.pages.block_table import build_block_table, convert_pages
    from jitattn.kernels.pages.copy_pages import copy_pages
    from jitattn.kernels.pages.gather import gather_kv
    from jitattn.kernels.preprocess.api import append_kv, preprocess_qkv
    from jitattn.spec.support import Config, Support, check_config, supported_configs
    from jitattn.spec.variant import ALIBI, RELATIVE_BIAS, AttentionVariant
    from jitattn.tensors.cache_views import BoundCache
    from jitattn.tensors.page_tables import BlockTable, CsrPages, RaggedKV, TokenTable
    from jitattn.tensors.position_bias import alibi_slopes, t5_bias
    from jitattn.tensors.quantization import QuantizedKV, dequantize_kv, quantize_kv
    from jitattn.tensors.rope import Rope

_HOME = {
    "ALIBI": "spec.variant",
    "AttentionPlanner": "kernels.attention.api",
    "AttentionVariant": "spec.variant",
    "BatchInfo": "kernels.pages.batch_info",
    "BlockTable": "tensors.page_tables",
    "BoundCache": "tensors.cache_views",
    "BoundCascadeCache": "kernels.cascade",
    "BoundMLACache": "kernels.mla.check",
    "CacheError": "base.errors",
    "CascadeLevel": "kernels.cascade",
    "CascadePlan": "kernels.cascade",
    "CascadePlanner": "kernels.cascade",
    "CompileError": "base.errors",
    "Config": "spec.support",
    "ConfigError": "base.errors",
    "CsrPages": "tensors.page_tables",
    "DriverError": "base.errors",
    "JitAttnError": "base.errors",
    "KernelInfo": "kernels.common.kernel_loader",
    "KernelNotFoundError": "base.errors",
    "MLAPlan": "kernels.mla.api",
    "MLAPlanner": "kernels.mla.api",
    "Plan": "kernels.attention.api",
    "QuantizedKV": "tensors.quantization",
    "RELATIVE_BIAS": "spec.variant",
    "RaggedKV": "tensors.page_tables",
    "Report": "bundles.precompile",
    "Rope": "tensors.rope",
    "Support": "spec.support",
    "TokenTable": "tensors.page_tables",
    "Workspace": "device.workspace",
    "alibi_slopes": "tensors.position_bias",
    "append_kv": "kernels.preprocess.api",
    "attention": "kernels.attention.functional",
    "batch_info": "kernels.pages.batch_info",
    "build_block_table": "kernels.pages.block_table",
    "build_info": "kernels.common.planner_base",
    "check_config": "spec.support",
    "convert_pages": "kernels.pages.block_table",
    "copy_pages": "kernels.pages.copy_pages",
    "dequantize_kv": "tensors.quantization",
    "gather_kv": "kernels.pages.gather",
    "merge_states": "kernels.merge.api",
    "precompile": "bundles.precompile",
    "preprocess_qkv": "kernels.preprocess.api",
    "quantize_kv": "tensors.quantization",
    "supported_configs": "spec.support",
    "t5_bias": "tensors.position_bias",
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
