"""Other packages' functions, over jitattn's kernels: ``jitattn.compat.flash_attn``.

Each module has the names, signatures and conventions of the package it is called after. What isn't
covered raises an error that names the argument.
"""

from __future__ import annotations
