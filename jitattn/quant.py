"""Quantised caches: the value that holds one, and the definition of what one stores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitattn.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from jitattn.tensors.quantization import QuantizedKV, dequantize_kv, quantize_kv

__all__ = ["QuantizedKV", "dequantize_kv", "quantize_kv"]

__getattr__ = lazy_names(
    __name__,
    {
        "QuantizedKV": "jitattn.tensors.quantization",
        "dequantize_kv": "jitattn.tensors.quantization",
        "quantize_kv": "jitattn.tensors.quantization",
    },
)
