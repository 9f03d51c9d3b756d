"""``--attention-backend jitattn`` of SGLang: the entry point ``sglang.srt.plugins``.

SGLang runs ``register`` in each of its processes; nothing but a name is stored then. The backend is
imported when a model asks for it by that name.
"""

from __future__ import annotations

import logging
from typing import Any

__all__ = ["register"]

NAME = "jitattn"

logger = logging.getLogger("jitattn")


def register() -> None:
    """Make SGLang know the attention backend ``"jitattn"``; once is enough, twice no harm.

    SGLang calls it where jitattn is installed. Choose the backend with ``--attention-backend
    jitattn``; docs/engines.md says what it serves. An SGLang that knows no backends of
    others stays as it is, with a warning.

    Raises:
        ImportError: SGLang is not installed.
    """
    import sglang

    try:
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
        from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    except ImportError as error:
        # A server that never asks for the backend is to start all the same.
        logger.warning(
            "SGLang %s takes no attention backend of jitattn, which is written for 0.5.23: %s",
            getattr(sglang, "__version__", ""),
            error,
        )
        return
    register_attention_backend(NAME)(_backend_of)
    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])


def _backend_of(runner: Any) -> object:
    from jitattn.integrations.sglang.backend import JitattnBackend

    return JitattnBackend(runner)
