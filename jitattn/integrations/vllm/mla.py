"""vLLM's attention backend of models with latents: its common classes, over ``LatentLayer``.

Written for the V1 interface of vLLM 0.26 to 0.33. Importing this imports vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, MultipleOf
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

from jitattn.device.workspace import canonical_device
from jitattn.integrations.steps import Step
from jitattn.integrations.vllm import PREFILL_PATH
from jitattn.integrations.vllm.latents import (
    CACHE_DTYPES,
    LatentLayer,
    Latents,
    Prompts,
    cache_dtype,
)
from jitattn.kernels.registry import check_config
from jitattn.spec.arch import arch_for
from jitattn.tensors.page_tables import BlockTable

NAME = "CUSTOM"  # a member of both of vLLM's lists
# Elements of a latent and of a rope part, by the sum that vLLM asks for.
RANKS = {320: (256, 64), 576: (512, 64)}


@dataclass
class JitattnMLADecodeMetadata(MLACommonDecodeMetadata):  # type: ignore[misc]
    """The decode steps of a batch, and the plans that layers share."""

    step: Step
    pages: BlockTable


class JitattnMLAImpl(LatentLayer, MLACommonImpl[MLACommonMetadata]):  # type: ignore[misc]
    """Latent attention of one of vLLM's layers; ``LatentLayer`` attends in decode steps."""

    can_return_lse_for_decode = True
    lse_base_on_e = True
    supports_dcp = True
    supports_pcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **latent: Any,
    ) -> None:
        """Hold what a layer is; no kernel is loaded.

        It makes jitattn attend in prompts as well, where the user has named no backend for them.

        Args:
            num_heads: query heads of this rank.
            head_size: kv_lora_rank + qk_rope_head_dim.
            scale: multiplies scores.
            num_kv_heads: 1.
            alibi_slopes: refused.
            sliding_window: refused.
            kv_cache_dtype: one of ``CACHE_DTYPES``.
            logits_soft_cap: refused.
            attn_type: "decoder"; others are refused.
            kv_sharing_target_layer_name: refused by vLLM.
            latent: what vLLM says of latent attention besides; an ``indexer`` is refused.

        Raises:
            ValueError: naming what is not supported.
        """
        _refuse_layer(
            attn_type,
            kv_cache_dtype,
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            indexer=latent.get("indexer"),
        )
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **latent,
        )
        self.supports_quant_query_input = False
        _choose_prefill()


def _refuse_layer(attn_type: str, kv_cache_dtype: str, **unsupported: object) -> None:
    for name, given in unsupported.items():
        if given:
            raise ValueError(f"{name} is given: it is not supported with latent attention")
    kind = getattr(attn_type, "value", attn_type)
    if kind != "decoder":
        raise ValueError(f"attn_type is {kind!r}: only 'decoder' is supported")
    if kv_cache_dtype not in CACHE_DTYPES:
        raise ValueError(
            f"kv_cache_dtype is {kv_cache_dtype!r}: expected one of {', '.join(CACHE_DTYPES)}"
        )


def _choose_prefill() -> None:
    """Let prompts go through jitattn, too, before the layer asks what they go through."""
    attention = get_current_vllm_config().attention_config
    custom = MLAPrefillBackendEnum.CUSTOM
    is_ours = custom.is_overridden() and custom.get_path() == PREFILL_PATH
    if attention.mla_prefill_backend is None and is_ours:
        attention.mla_prefill_backend = custom


class JitattnMLAMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):  # type: ignore[misc]
    """Makes the metadata of a group of layers, with plans that all of them share."""

    # Decode steps of as many tokens a request, padded with empty ones; vLLM captures no others.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        """Load the kernels of the group's layers.

        Raises:
            ConfigError: with every reason why a layer's configuration has no kernel.
        """
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = self.compilation_config.static_forward_context
        self._impls = [layers[name].impl for name in layer_names]
        self._captured: dict[object, MLACommonMetadata] = {}
        dtype, device = self.model_config.dtype, canonical_device(device)
        num_heads = self.num_heads * self.dcp_world_size
        self._latents = Latents(num_heads, dtype, self.page_size, device)
        for impl in self._impls:
            impl.planner(self._latents)
        if isinstance(self._prefill_backend, Prompts):
            for causal in (True, False):
                self._prefill_backend.planner(dtype, device, causal=causal)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> MLACommonMetadata:
        """Describe a batch as vLLM does, and its decode steps for plans; the device is not read."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        context: Any = None if metadata.prefill is None else metadata.prefill.chunked_context
        if getattr(context, "prefill_tokens_with_context", None) is not None:
            # vLLM 0.26 takes prompts with tokens in the cache for the first of a batch, but its
            # newer runner sorts by new tokens. None merges every row; lse is -inf without context.
            context.prefill_tokens_with_context = None
        decode = metadata.decode
        if decode is not None:
            starts = metadata.query_start_loc[: metadata.num_decodes + 1]
            most = min(int(metadata.max_query_len), self.reorder_batch_threshold)
            metadata.decode = JitattnMLADecodeMetadata(
                block_table=decode.block_table,
                seq_lens=decode.seq_lens,
                dcp_tot_seq_lens=decode.dcp_tot_seq_lens,
                step=Step(decode.seq_lens, starts, most),
                pages=BlockTable(decode.block_table),
            )
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> MLACommonMetadata:
        """Describe decode steps that are about to be captured, with their plans.

        They live as long as the builder, and so does what graphs read. Steps of the same buffers
        and sizes get the same plans again. The graph makes their schedules itself: replays need
        nothing of the host but the buffers' contents.
        """
        metadata = super().build_for_cudagraph_capture(common_attn_metadata)
        decode = metadata.decode
        buffers = decode.seq_lens, decode.step.qo_indptr, decode.block_table
        key = (
            *((buffer.data_ptr(), buffer.shape, buffer.stride()) for buffer in buffers),
            *(metadata.num_decode_tokens, decode.step.max_q_len),
        )
        kept = self._captured.setdefault(key, metadata)
        for impl in self._impls:
            impl.plan(kept.decode, self._latents)
        return kept


class JitattnMLABackend(MLACommonBackend):  # type: ignore[misc]
    """The attention backend ``"CUSTOM"`` of models with latents."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(CACHE_DTYPES)
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """Return the name of the member of vLLM's list that this is registered as."""
        return NAME

    @staticmethod
    def get_impl_cls() -> type[JitattnMLAImpl]:
        """Return the class of layers."""
        return JitattnMLAImpl

    @staticmethod
    def get_builder_cls() -> type[JitattnMLAMetadataBuilder]:
        """Return the class that makes metadata."""
        return JitattnMLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Return the page sizes that vLLM may choose: kernels take others as well."""
        del kv_cache_spec
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return the elements of a token in the cache that vLLM and kernels know."""
        return list(RANKS)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Return the order in memory of the cache's dimensions, for vLLM before 0.30.

        With layers, which come first in the shape, pages are outermost: one page of all layers.
        """
        return (1, 0, 2, 3) if include_num_layers_dimension else (0, 1, 2)

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
        del use_mla, has_sink, use_sparse, use_mm_prefix
        if device_capability is None or head_size not in RANKS:
            return None  # said elsewhere
        arch = arch_for(device_capability.major, device_capability.minor)
        if arch is None:
            return None
        rank, rope = RANKS[head_size]
        found = check_config(
            arch,
            planner="mla",
            num_heads=1,
            kv_lora_rank=rank,
            qk_rope_head_dim=rope,
            sm_scale=1.0,
            q_dtype=dtype,
            kv_dtype=cache_dtype(kv_cache_dtype or "auto", dtype),
            page_size=block_size or 16,
        )
        return None if found.supported else "; ".join(found.reasons)


class JitattnMLAPrefillBackend(Prompts, MLAPrefillBackend):  # type: ignore[misc]
    """The backend ``"CUSTOM"`` of prompts with latents; ``Prompts`` attends."""

    @staticmethod
    def get_name() -> str:
        """Return the name of the member of vLLM's list that this is registered as."""
        return NAME

    @classmethod
    def supports_compute_capability(cls, device_capability: Any) -> bool:
        """Whether kernels exist for a device; without one the reference attends."""
        capability = device_capability
        return capability is None or arch_for(capability.major, capability.minor) is not None

    @classmethod
    def supports_mla_dimensions(cls, mla_dimensions: Any) -> bool:
        """Whether kernels exist for heads of these sizes."""
        found = check_config(
            num_qo_heads=1,
            num_kv_heads=1,
            head_dim=mla_dimensions.qk_nope_head_dim + mla_dimensions.qk_rope_head_dim,
            head_dim_vo=mla_dimensions.v_head_dim,
            page_size=None,
            page_table="ragged",
        )
        return found.supported

    def supports_out(self) -> bool:
        """Results are written where vLLM wants them."""
        return True
