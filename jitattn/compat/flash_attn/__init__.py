"""flash-attn 2's ``flash_attn_with_kvcache`` and ``flash_attn_varlen_func``, forward only.

The signatures are flash-attn's, and so are shapes, alignment of queries and keys, and what rotary
tables mean. Planners are cached by their configuration, and every call makes a plan.
"""

from jitattn.compat.flash_attn.kvcache import flash_attn_with_kvcache
from jitattn.compat.flash_attn.varlen import flash_attn_varlen_func

__all__ = ["flash_attn_varlen_func", "flash_attn_with_kvcache"]
