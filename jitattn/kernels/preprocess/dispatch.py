"""Where a call of ``preprocess_qkv`` or ``append_kv`` is computed: on a card, or by definition."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from jitattn.kernels.preprocess.check import Arguments, check
from jitattn.kernels.preprocess.check_values import check_values
from jitattn.kernels.preprocess.reference import preprocess as preprocess_by_definition


def dispatch(given: tuple[Any, ...], first: object) -> Tensor | None:
    """Take ``given``, in the order of ``Arguments``, to the device of ``first``; return q.

    Raises:
        TypeError, ValueError: naming the argument, before any launch.
    """
    if not isinstance(first, Tensor) or not first.is_cuda:
        call = check(Arguments(*given))
        check_values(call)
        return preprocess_by_definition(call)
    return _preprocess_of_cuda()(given)


@functools.cache
def _preprocess_of_cuda() -> Callable[[tuple[Any, ...]], Tensor | None]:
    """Return what launches. An import takes half a microsecond each time that it is met."""
    from jitattn.kernels.preprocess.launch import preprocess

    return preprocess
