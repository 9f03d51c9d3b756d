"""vLLM's metadata builder over plans, without vLLM: backend.py gives it the base class."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from jitattn.device.workspace import canonical_device
from jitattn.integrations.steps import Step
from jitattn.integrations.vllm.context_parallel import Shards
from jitattn.integrations.vllm.layer import Layer
from jitattn.integrations.vllm.metadata import Metadata, Tensors
from jitattn.tensors.page_tables import BlockTable


@dataclass
class Builder:
    """Makes the ``Metadata`` of a group of layers that share a block table.

    Attributes:
        tensors: what the group's caches and queries are.
        layers: those of the group, which plans are made for before a capture.
        shards: this rank's part of the keys, with decode context parallelism.
    """

    tensors: Tensors
    layers: tuple[Layer, ...] = ()
    shards: Shards | None = None
    _captured: dict[object, Metadata] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Say where tensors are as they say it themselves, with an index."""
        self.tensors = replace(self.tensors, device=canonical_device(self.tensors.device))

    def load(self) -> None:
        """Load the kernels of all layers.

        Raises:
            ConfigError: with every reason why a configuration has no kernel.
        """
        for layer in self.layers:
            layer.load(self.tensors)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Metadata:
        """Describe a batch; the device is not waited for.

        Args:
            common_prefix_len: refused unless 0: cascade attention is not supported.
            common_attn_metadata: vLLM's ``CommonAttentionMetadata``. Lengths and offsets are read
                on the device, when the first layer attends; of the host's numbers
                ``max_query_len`` alone counts.
            fast_build: means nothing here: there is nothing to leave out.

        Raises:
            TypeError, ValueError: naming what is not supported or doesn't fit.
        """
        del fast_build
        common = common_attn_metadata
        _refuse_batch(common_prefix_len, common)
        num_reqs = common.num_reqs
        seq_lens = common.seq_lens[:num_reqs]
        qo_indptr = common.query_start_loc[: num_reqs + 1]
        max_q_len = int(common.max_query_len)
        context = None
        if self.shards is not None:
            context = self.shards.context(seq_lens, qo_indptr, max_q_len)
        return Metadata(
            num_actual_tokens=common.num_actual_tokens,
            causal=common.causal,
            pages=BlockTable(common.block_table_tensor[:num_reqs]),
            slot_mapping=common.slot_mapping,
            step=Step(seq_lens, qo_indptr, max_q_len),
            context=context,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Metadata:
        """Describe a batch that is about to be captured, with its plans.

        They live as long as the builder, and so does what graphs read. A batch of the same buffers
        and sizes gets the same plans again. The graph makes their schedules itself: replays need
        nothing of the host but the buffers' contents.

        Args:
            common_attn_metadata: as of ``build``; its buffers are those that replays read.

        Raises:
            TypeError, ValueError, ConfigError: as ``build``, or a layer's configuration.
        """
        common = common_attn_metadata
        buffers = (
            common.seq_lens,
            common.query_start_loc,
            common.block_table_tensor,
            common.slot_mapping,
        )
        key = (
            *((buffer.data_ptr(), buffer.shape, buffer.stride()) for buffer in buffers),
            *(common.num_reqs, common.num_actual_tokens, common.max_query_len, common.causal),
        )
        metadata = self.build(0, common)
        kept = self._captured.get(key)
        if kept is not None:
            return kept  # build has written what it is made of
        self._captured[key] = metadata
        for layer in self.layers:
            layer.plan(metadata, self.tensors)
        return metadata

    def update_block_table(
        self, metadata: Metadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> Metadata:
        """Return ``metadata`` for the same requests in another group's pages, with its plans.

        Args:
            metadata: of the first group.
            blk_table: int32 [at least num_reqs, width], page ids.
            slot_mapping: int64 [num_tokens].

        Raises:
            TypeError, ValueError: a table that doesn't fit.
        """
        pages = BlockTable(blk_table[: metadata.pages.batch_size])
        changed = replace(metadata, pages=pages, slot_mapping=slot_mapping)
        if pages.table.shape == metadata.pages.table.shape:
            return changed
        # A schedule is for a table of its width.
        step, context = metadata.step, metadata.context
        changed = replace(changed, step=Step(step.seq_lens, step.qo_indptr, step.max_q_len))
        if context is None:
            return changed
        cached = Step(context.cached.seq_lens, step.qo_indptr, step.max_q_len)
        return replace(changed, context=replace(context, cached=cached))


def _refuse_batch(common_prefix_len: int, common: Any) -> None:
    if common_prefix_len:
        raise ValueError(
            f"common_prefix_len is {common_prefix_len}: cascade attention is not supported"
        )
    if not isinstance(common.causal, bool):
        raise ValueError("causal is a tensor: causality of each request is not supported")
    # None, or absent from older versions.
    for name, what in (
        ("mm_req_doc_ranges", "ranges that see both ways"),
        ("rswa_prefix_lens", "reference sliding window attention"),
        ("encoder_seq_lens", "cross attention"),
    ):
        if getattr(common, name, None) is not None:
            raise ValueError(f"{name} is given: {what} is not supported")
