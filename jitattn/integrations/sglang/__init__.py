"""``--attention-backend jitattn`` of SGLang: the entry point ``sglang.srt.plugins``.

SGLang runs ``register`` in each of its processes; nothing but a name is stored then. The backend is
imported when a model asks for it by that name.
"""

from __future__ import annotations

from typing import Any

__all__ = ["register"]

NAME = "jitattn"


def register() -> None:
    """Make SGLang know the attention backend ``"jitattn"``; once is enough, twice no harm.

    SGLang calls it where jitattn is installed. Choose the backend with ``--attention-backend
    jitattn``; docs/other-packages.md says what it serves.

    Raises:
        ImportError: SGLang is not installed, or has no registry of attention backends.
    """
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    register_attention_backend(NAME)(_backend_of)
    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])


def _backend_of(runner: Any) -> object:
    from jitattn.integrations.sglang.backend import JitattnBackend

    return JitattnBackend(runner)
