"""Registration of ``"jitattn"`` and ``"paged|jitattn"`` with transformers."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from jitattn.integrations.transformers.dense import attend
from jitattn.integrations.transformers.masks import make_mask
from jitattn.integrations.transformers.paged import attend_paged

NAME = "jitattn"
_OLDEST_VERSION = (5, 0)


def register() -> None:
    """Make transformers know ``"jitattn"`` and ``"paged|jitattn"``; once is enough, twice no harm.

    Give ``attn_implementation="jitattn"`` to ``from_pretrained`` or ``set_attn_implementation`` for
    ``generate`` and plain forward passes, ``"paged|jitattn"`` for ``generate_batch``. Models have
    16 bits; docs/engines.md says what is supported, and the rest is refused when it occurs.

    Raises:
        ImportError: transformers is not installed, or is older than 5.0.
    """
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface

    found = tuple(int(n) for n in re.findall(r"\d+", transformers.__version__)[:2])
    if found < _OLDEST_VERSION:
        raise ImportError(
            f"transformers {transformers.__version__} is installed: jitattn registers with 5.0 and "
            "up"
        )
    # Compiled models call them as they are: planning and launching is nothing to trace.
    apart: Callable[[object], Callable[..., object]] = torch.compiler.disable
    AttentionInterface.register(NAME, apart(attend))
    AttentionInterface.register(f"paged|{NAME}", apart(attend_paged))
    AttentionMaskInterface.register(NAME, apart(make_mask))
