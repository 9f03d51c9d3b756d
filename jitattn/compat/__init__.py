"""Other packages' functions, over jitattn's kernels: ``flash_attn``, ``flashinfer``, ``trtllm``.

Each module has the names, signatures and conventions of the package it is called after. What isn't
covered raises an error that names the argument.
"""

from __future__ import annotations
