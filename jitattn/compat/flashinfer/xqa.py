"""FlashInfer's XQA functions."""

from __future__ import annotations

from jitattn.compat.flashinfer.absent import names_of
from jitattn.compat.flashinfer.trtllm.xqa import xqa, xqa_mla

__all__ = ["xqa", "xqa_mla"]

__getattr__ = names_of(__name__, __all__)
