"""flash-attn's module of functions, from which flash-attn 3's users import them, too."""

from __future__ import annotations

from jitattn.compat.flash_attn.absent import names_of
from jitattn.compat.flash_attn.dense import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from jitattn.compat.flash_attn.kvcache import flash_attn_with_kvcache
from jitattn.compat.flash_attn.varlen import flash_attn_varlen_func

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
