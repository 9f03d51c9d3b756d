"""``--attention-backend CUSTOM`` of vLLM: the entry point ``vllm.general_plugins``.

vLLM runs ``register`` in each of its processes; nothing but a name is stored then. The backend is
imported when an engine asks for it by that name.
"""

from __future__ import annotations

import logging

__all__ = ["register"]

PATH = "jitattn.integrations.vllm.choice.Backend"
PREFILL_PATH = "jitattn.integrations.vllm.mla.JitattnMLAPrefillBackend"

logger = logging.getLogger("jitattn")


def register() -> None:
    """Make vLLM know the attention backend ``"CUSTOM"``; once is enough, twice no harm.

    vLLM calls it where jitattn is installed. Choose the backend with ``--attention-backend CUSTOM``
    or ``LLM(attention_config={"backend": "CUSTOM"})``; docs/engines.md says what it serves.
    Another package's backend of that name stays, with a warning; so does a vLLM that knows no
    backends of others as it is.

    Raises:
        ImportError: vLLM is not installed.
    """
    import vllm

    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        custom = AttentionBackendEnum.CUSTOM
    except (ImportError, AttributeError) as error:
        # A server that never asks for the backend is to start all the same.
        logger.warning(
            "vLLM %s takes no attention backend of jitattn, which is written for 0.26 to 0.33: %s",
            getattr(vllm, "__version__", ""),
            error,
        )
        return
    if custom.is_overridden() and custom.get_path() != PATH:
        logger.warning(
            "vLLM's attention backend CUSTOM is %s: jitattn leaves it; name other plugins than "
            "that one's in VLLM_PLUGINS",
            custom.get_path(),
        )
        return
    register_backend(custom, PATH)
    _register_prefill()


def _register_prefill() -> None:
    """Make vLLM know the backend ``"CUSTOM"`` of prompts of models with latents."""
    try:
        from vllm.v1.attention.backends.mla.prefill import registry

        custom = registry.MLAPrefillBackendEnum.CUSTOM
    except (ImportError, AttributeError) as error:
        logger.warning("vLLM takes no MLA prefill backend of jitattn: %s", error)
        return
    if custom.is_overridden() and custom.get_path() != PREFILL_PATH:
        logger.warning(
            "vLLM's MLA prefill backend CUSTOM is %s: jitattn leaves it, and vLLM chooses what "
            "prompts go through",
            custom.get_path(),
        )
        return
    registry.register_mla_prefill_backend(custom, PREFILL_PATH)
