"""Registration of jitattn's attention with transformers, and which versions of it take it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch

from jitattn.integrations.transformers.dense import attend
from jitattn.integrations.transformers.masks import make_mask
from jitattn.integrations.transformers.paged import attend_paged
from jitattn.integrations.transformers.trial import fault_of

NAME = "jitattn"
# Attention without masks, which a model has while it is in generate_batch; up to transformers 5.18,
# models were given the second name for that.
PAGED_NAME, OLD_PAGED_NAME = f"{NAME}_paged", f"paged|{NAME}"
_IS_OURS = "keeps_jitattn"
_passed_versions: set[str] = set()

_OLDEST_VERSION = (5, 0)
TESTED_VERSIONS = frozenset((5, minor) for minor in range(17, 25))


def register() -> None:
    """Make transformers know ``"jitattn"``; once is enough, twice no harm.

    Give ``attn_implementation="jitattn"`` to ``from_pretrained`` or ``set_attn_implementation`` for
    ``generate``, plain forward passes and ``generate_batch``. Models have 16 bits; docs/engines.md
    says what is supported, and the rest is refused when it occurs.

    With a version of transformers that jitattn was not tested with, models of two layers generate
    a few tokens on the CPU, once, which takes a second or two.

    Raises:
        ImportError: transformers is not installed, is older than 5.0, or is a version that jitattn
            was not tested with and that gives other tokens than eager attention's.
    """
    import transformers

    version = tuple(int(n) for n in re.findall(r"\d+", transformers.__version__)[:2])
    if version < _OLDEST_VERSION:
        raise ImportError(
            f"transformers {transformers.__version__} is installed: jitattn registers with 5.0 and "
            "up"
        )
    _register(attend, attend_paged, make_mask)
    if version not in TESTED_VERSIONS and transformers.__version__ not in _passed_versions:
        _try_out(transformers.__version__)


def _try_out(version: str) -> None:
    fault = fault_of(NAME)
    if fault is None:
        _passed_versions.add(version)
        return
    reason = (
        f"transformers {version} is installed, which jitattn was not tested with: {fault}; "
        "5.17 to 5.24 work"
    )
    refused = functools.partial(_refuse, reason)
    _register(refused, refused, refused)
    raise ImportError(reason)


def _register(
    dense: Callable[..., object], paged: Callable[..., object], mask: Callable[..., object]
) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    # Compiled models call them as they are: planning and launching is nothing to trace.
    apart: Callable[[object], Callable[..., object]] = torch.compiler.disable
    AttentionInterface.register(NAME, apart(dense))
    for name in (PAGED_NAME, OLD_PAGED_NAME):
        AttentionInterface.register(name, apart(paged))
    AttentionMaskInterface.register(NAME, apart(mask))
    _enter_batches()


def _refuse(reason: str, *_: object, **__: object) -> None:
    raise ImportError(reason)


def _enter_batches() -> None:
    """Let ``generate_batch`` keep jitattn's attention.

    Its managers have no registry for that: from 5.19 on they refuse names that they don't know, and
    all replace attention by an installed flash-attn's. So the method that does both leaves models
    alone that have jitattn's.
    """
    try:
        from transformers.generation.continuous_batching import continuous_api
    except ImportError:  # whether it works without shows when it is tried
        return
    manager_class = continuous_api.ContinuousBatchingManager
    switch = getattr(manager_class, "switch_to_cb_friendly_attn", None)
    if switch is None or hasattr(switch, _IS_OURS):
        return

    @functools.wraps(switch)
    def switch_attention(self: Any, model: Any, *others: Any, **named: Any) -> None:
        name = model.config._attn_implementation
        if name == NAME:
            model.set_attn_implementation(PAGED_NAME)
            self._original_attn_impl = name  # as for other attention: it is set again at the end
        elif name not in (PAGED_NAME, OLD_PAGED_NAME):
            switch(self, model, *others, **named)

    setattr(switch_attention, _IS_OURS, True)
    manager_class.switch_to_cb_friendly_attn = switch_attention
