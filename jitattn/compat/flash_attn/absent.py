"""flash-attn's names that jitattn doesn't have, and what to use instead of each."""

from __future__ import annotations

from collections.abc import Callable, Collection

from jitattn.compat.missing import refusals

_INSTEAD = (
    (r"combine", "use jitattn.merge_states, which merges states of disjoint keys"),
    (r"scheduler_metadata", "the device schedules: there is nothing to prepare"),
    (r"rotary", "use jitattn.preprocess_qkv with a jitattn.Rope, or rotary_cos and rotary_sin"),
    (r"backward|bwd|autograd|^FlashAttn", "jitattn is for inference: there is no backward pass"),
    (r"concatenated_sequences", "use unpad_input"),
    (r"blocksparse|block_sparse", "use jitattn.compat.flashinfer.BlockSparseAttentionWrapper"),
)
_ITSELF = "jitattn has attention alone, forward: take it from flash-attn itself"


def names_of(module: str, has: Collection[str]) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a module that stands for one of flash-attn's."""
    return refusals(module, has, _INSTEAD, _ITSELF)
