"""Quantised caches: the value that holds one, the definition of what one stores, and rotations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitattn.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from jitattn.kernels.preprocess.hadamard import fold_hadamard, hadamard_transform
    from jitattn.tensors.quantization import QuantizedKV, dequantize_kv, quantize_kv

__all__ = ["QuantizedKV", "dequantize_kv", "fold_hadamard", "hadamard_transform", "quantize_kv"]

__getattr__ = lazy_names(
    __name__,
    {
        "QuantizedKV": "jitattn.tensors.quantization",
        "dequantize_kv": "jitattn.tensors.quantization",
        "fold_hadamard": "jitattn.kernels.preprocess.hadamard",
        "hadamard_transform": "jitattn.kernels.preprocess.hadamard",
        "quantize_kv": "jitattn.tensors.quantization",
    },
)
