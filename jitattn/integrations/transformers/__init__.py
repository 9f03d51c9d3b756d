"""``attn_implementation="jitattn"`` for models of transformers.

It reads the caches of ``generate`` where they lie: keys of a row follow each other, so
that a head's row is a request of a "ragged" planner, whatever the cache's length. Which of them a
query sees is decided once per step, where transformers makes its masks: rows of tokens behind
padding, with or without a window, are lengths, and everything else is a mask of bits. What was
decided hangs on the tensor that transformers hands on, and so do the plans of the step.
"""

from jitattn.integrations.transformers.registry import register

__all__ = ["register"]
