"""``Backend``, which vLLM's ``CUSTOM`` is registered as: the backend of the model at hand.

vLLM looks the name up when a layer asks for its backend. It has one name for backends of models
with latents and of others, and wants a class of either.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "Backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    model = None if config is None else config.model_config
    if model is not None and model.use_mla:
        from jitattn.integrations.vllm.mla import JitattnMLABackend

        return JitattnMLABackend
    from jitattn.integrations.vllm.backend import JitattnBackend

    return JitattnBackend
