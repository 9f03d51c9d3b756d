"""SGLang's attention backend: what it asks of the class of layers.py.

Written for the interface of SGLang 0.5.23. Importing this imports SGLang.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds

from jitattn.integrations.sglang.layers import Backend

_apart: Callable[[Any], Any] = torch.compiler.disable


class JitattnBackend(Backend, AttentionBackend):  # type: ignore[misc]
    """The attention backend ``"jitattn"``; ``Backend`` says what it takes and refuses."""

    # Compiled models call them as they are: planning and launching is nothing to trace.
    forward_decode = _apart(Backend.forward_decode)
    forward_extend = _apart(Backend.forward_extend)

    def __init__(self, runner: Any) -> None:
        """Hold the pools of a ``ModelRunner``.

        Raises:
            ValueError: naming what is not supported.
        """
        AttentionBackend.__init__(self)
        super().__init__(runner, batch_invariant=_is_deterministic())
        # Models read them from the backend of the step, as to let rotation write K and V.
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.kv_index_translator = getattr(runner, "kv_index_translator", None)
        if _context_parallel_size() > 1:
            raise ValueError(
                'decode context parallelism is not supported by the attention backend "jitattn"'
            )

    def shared_read_ends(self, fm: Any) -> Any:
        """Return when what the scheduler may change is read no more.

        Block tables and schedules are made before layers run. Slots of pages of one token are read
        where they are, in all layers.
        """
        if self.pools.has_tokens:
            return SharedReadEnds.UNKNOWN
        return AttentionBackend.shared_read_ends(self, fm)


def _is_deterministic() -> bool:
    from sglang.srt.runtime_context import get_exec

    return bool(get_exec().deterministic.enable_deterministic_inference)


def _context_parallel_size() -> int:
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().attn_dcp_size)
