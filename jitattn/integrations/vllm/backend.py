"""vLLM's attention backend: the classes that vLLM asks for, over ``Layer`` and ``Builder``.

Written for the V1 interface of vLLM 0.26 to 0.33. Importing this imports vLLM.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import envs
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    MultipleOf,
)

from jitattn.integrations.steps import FP8
from jitattn.integrations.vllm.builder import Builder
from jitattn.integrations.vllm.context_parallel import Shards
from jitattn.integrations.vllm.layer import Combine, Gather, Layer
from jitattn.integrations.vllm.metadata import CACHE_DTYPES, Metadata, Tensors
from jitattn.kernels.registry import check_config
from jitattn.spec.arch import arch_for
from jitattn.spec.config import HEAD_DIMS

NAME = "CUSTOM"  # a member of vLLM's list of backends


class JitattnImpl(Layer, AttentionImpl):  # type: ignore[misc]
    """Attention of one of vLLM's layers; ``Layer`` says what it takes and refuses."""

    can_return_lse_for_decode = True
    lse_base_on_e = True
    supports_dcp = True
    supports_quant_query_input = False

    def _is_batch_invariant(self) -> bool:
        return bool(envs.VLLM_BATCH_INVARIANT)

    def _group(self) -> tuple[Gather, Combine]:
        from vllm.distributed.parallel_state import get_dcp_group

        try:
            from vllm.v1.attention.ops.dcp import cp_lse_ag_out_rs
        except ImportError:  # before 0.30 or so
            from vllm.v1.attention.ops.common import cp_lse_ag_out_rs
        group = get_dcp_group()

        def combine(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
            merged: tuple[Tensor, Tensor] = cp_lse_ag_out_rs(out, lse, group, return_lse=True)
            return merged

        return lambda q: group.all_gather(q.contiguous(), dim=1), combine


class JitattnMetadataBuilder(AttentionMetadataBuilder[Metadata]):  # type: ignore[misc]
    """Makes the metadata of a group of layers; ``Builder`` does the work."""

    # Batches whose requests have as many query tokens as others, padded with empty ones: vLLM
    # doesn't say of other graphs how many tokens a request may come to.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        """Load the kernels of the group's layers.

        Raises:
            ConfigError: with every reason why a layer's configuration has no kernel.
        """
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        found = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, layer_names)
        layers = [getattr(layer, "impl", None) for layer in found.values()]
        tensors = Tensors(
            head_dim_vo=getattr(kv_cache_spec, "head_size_v", None) or kv_cache_spec.head_size,
            q_dtype=vllm_config.model_config.dtype,
            kv_dtype=kv_cache_spec.dtype,
            page_size=kv_cache_spec.block_size,
            device=device,
        )
        self._builder = Builder(
            tensors,
            layers=tuple(layer for layer in layers if isinstance(layer, Layer)),
        )
        self._builder.shards = self._shards(vllm_config)
        self._builder.load()

    def _shards(self, vllm_config: Any) -> Shards | None:
        sizes = {layer.dcp_world_size for layer in self._builder.layers}
        if sizes <= {1}:
            return None
        (size,) = sizes
        layer: Any = self._builder.layers[0]
        return Shards.of(
            size=size,
            rank=layer.dcp_rank,
            interleave=vllm_config.parallel_config.cp_kv_cache_interleave_size,
            max_batch_size=vllm_config.scheduler_config.max_num_seqs,
            device=self.device,
        )

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Metadata:
        """Describe a batch; see ``Builder.build``."""
        return self._builder.build(common_prefix_len, common_attn_metadata, fast_build)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Metadata:
        """Describe a batch to be captured; see ``Builder.build_for_cudagraph_capture``."""
        return self._builder.build_for_cudagraph_capture(common_attn_metadata)

    def update_block_table(
        self, metadata: Metadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> Metadata:
        """Return the metadata for another table; see ``Builder.update_block_table``."""
        return self._builder.update_block_table(metadata, blk_table, slot_mapping)


class JitattnBackend(AttentionBackend):  # type: ignore[misc]
    """The attention backend ``"CUSTOM"`` of a vLLM that has jitattn's plugin."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(CACHE_DTYPES)
    forward_includes_kv_cache_update = False
    supports_kv_cache_update_bypass = True

    @staticmethod
    def get_name() -> str:
        """Return the name of the member of vLLM's list that this is registered as."""
        return NAME

    @staticmethod
    def get_impl_cls() -> type[JitattnImpl]:
        """Return the class of layers."""
        return JitattnImpl

    @staticmethod
    def get_builder_cls() -> type[JitattnMetadataBuilder]:
        """Return the class that makes metadata."""
        return JitattnMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Return the page sizes that vLLM may choose: kernels take others as well."""
        del kv_cache_spec
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return the sizes of heads that kernels exist for."""
        return list(HEAD_DIMS)

    # --- the cache of vLLM before 0.30, which asks for shapes; later ones take any layout ---------

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Return the shape of a layer's cache, K before V in the last dimension."""
        del cache_dtype_str
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Return the order in memory of the dimensions of that shape, as the user chose it.

        With layers, which come first in the shape, pages are outermost: one page of all layers.
        """
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        is_nhd = get_kv_cache_layout() == "NHD"
        if include_num_layers_dimension:
            return (1, 0, 3, 2, 4) if is_nhd else (1, 2, 0, 3, 4)
        return (0, 2, 1, 3) if is_nhd else (0, 1, 2, 3)

    # --- what is supported ------------------------------------------------------------------------

    @classmethod
    def supports_sink(cls) -> bool:
        """Sinks of each query head."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Windows that end at the query."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Without a window; see ``validate_configuration``."""
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """Scales of each KV head, read on the device."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Bits that depend on a request alone."""
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Whether kernels exist for a device."""
        return arch_for(capability.major, capability.minor) is not None

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Return why there are no kernels for a configuration, in jitattn's words, or None."""
        del use_mla, use_sparse, use_mm_prefix
        if device_capability is None or head_size not in HEAD_DIMS:
            return None  # said elsewhere
        arch = arch_for(device_capability.major, device_capability.minor)
        if arch is None:
            return None
        kv_dtype = FP8.get(kv_cache_dtype or "auto", dtype)
        found = check_config(
            arch,
            num_qo_heads=1,
            num_kv_heads=1,
            head_dim=head_size,
            q_dtype=dtype,
            kv_dtype=kv_dtype,
            page_size=block_size or 16,
            use_sinks=has_sink,
        )
        return None if found.supported else "; ".join(found.reasons)


def _validate(cls: type[JitattnBackend], /, **asked: Any) -> list[str]:
    """Return why a configuration is not supported: vLLM's reasons, and ours of pairs."""
    reasons: list[str] = AttentionBackend.validate_configuration.__func__(cls, **asked)
    if asked.get("use_non_causal") and asked.get("has_sliding_window"):
        reasons.append("sliding window without causality not supported")
    if asked.get("use_dcp") and (asked.get("has_sliding_window") or asked.get("has_sink")):
        reasons.append("DCP with sliding window or sinks not supported")
    return reasons


# vLLM asks by keywords, new ones in each release, which its own method knows.
JitattnBackend.validate_configuration = classmethod(_validate)
