"""flash-attn 2's functions, forward only, with keywords of flash-attn 3 and vLLM.

The signatures are flash-attn's, and so are shapes, alignment of queries and keys, and what rotary
tables mean. Planners are cached by their configuration, and every call makes a plan. A name that is
not here raises an error that says what to use instead.
"""

from __future__ import annotations

from jitattn.compat.flash_attn import bert_padding as bert_padding
from jitattn.compat.flash_attn import flash_attn_interface as flash_attn_interface
from jitattn.compat.flash_attn.absent import names_of
from jitattn.compat.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

__getattr__ = names_of(__name__, __all__)
