"""Arguments of the wrappers' ``plan``, ``run`` and ``forward``, as named records."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

from torch import Tensor

from jitattn.base.validate import INT32_MAX, check_count, check_flag, check_number
from jitattn.compat.flashinfer.common.arguments import LseForm, Pair, data_types
from jitattn.spec.config import HEAD_DIMS
from jitattn.tensors.scales import ScaleLike

if TYPE_CHECKING:
    import torch

Results = Tensor | tuple[Tensor, Tensor]


class ScoreArguments(NamedTuple):
    """Window, soft cap and scale: what turns a product of q and k into a score."""

    window_left: int
    logits_soft_cap: float | None
    sm_scale: float | None

    def checked(self) -> dict[str, object]:
        """Return the planner's arguments.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        window_left = check_count("window_left", self.window_left, least=-INT32_MAX)
        cap, scale = self.logits_soft_cap, self.sm_scale
        return {
            "window_left": max(window_left, -1),
            "logits_soft_cap": 0.0
            if cap is None
            else check_number("logits_soft_cap", cap, least=0.0),
            "sm_scale": None if scale is None else check_number("sm_scale", scale),
        }


class PlanArguments(NamedTuple):
    """The arguments of every ``plan`` besides its tables; ``page_size`` None is no pages."""

    num_qo_heads: int
    num_kv_heads: int
    page_size: int | None
    q_data_type: str | torch.dtype | None
    kv_data_type: str | torch.dtype | None
    o_data_type: str | torch.dtype | None
    scores: ScoreArguments
    fixed_split_size: int | None
    disable_split_kv: bool

    def checked(self, kv_layout: str) -> dict[str, object]:
        """Return the planner's arguments, those of heads' sizes and masks left out.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        num_qo_heads = check_count("num_qo_heads", self.num_qo_heads)
        num_kv_heads = check_count("num_kv_heads", self.num_kv_heads)
        page_size = None if self.page_size is None else check_count("page_size", self.page_size)
        if num_qo_heads % num_kv_heads:
            raise ValueError(
                f"num_qo_heads is {num_qo_heads}: expected a multiple of num_kv_heads, "
                f"{num_kv_heads}"
            )
        return {
            "num_qo_heads": num_qo_heads,
            "num_kv_heads": num_kv_heads,
            "page_size": page_size,
            **data_types(self.q_data_type, self.kv_data_type, self.o_data_type),
            **self.scores.checked(),
            "kv_layout": kv_layout,
            "batch_invariant": self._is_unsplit(),
        }

    def _is_unsplit(self) -> bool:
        """Whether the caller wants bits that don't depend on the rest of the batch."""
        is_fixed = False
        if self.fixed_split_size is not None:
            # FlashInfer's own default inside is -1.
            is_fixed = check_count("fixed_split_size", self.fixed_split_size, least=-1) > 0
        return check_flag("disable_split_kv", self.disable_split_kv) or is_fixed


class RunArguments(NamedTuple):
    """The arguments of every ``run`` besides its cache."""

    q: Tensor
    q_scale: ScaleLike | None = None
    k_scale: ScaleLike | None = None
    v_scale: ScaleLike | None = None
    out: Tensor | None = None
    lse: Tensor | None = None
    return_lse: bool = False
    sinks: Tensor | None = None
    kv_cache_sf: Pair | None = None
    form: LseForm = LseForm()


class ForwardArguments(NamedTuple):
    """The arguments of a ``forward``: a run, its cache, and what it changes of the plan."""

    run: RunArguments
    kv_cache: Pair
    scores: ScoreArguments
    causal: bool | None  # None: as planned


class _Forwards(Protocol):
    def _forward(self, given: ForwardArguments) -> Results: ...


_W = TypeVar("_W", bound=_Forwards)
_S = TypeVar("_S")
_P = ParamSpec("_P")


def forward_of(
    read: Callable[Concatenate[_W, _P], ForwardArguments], doc: str, *, return_lse: bool
) -> Callable[Concatenate[_W, _P], Results]:
    """Return a method with the signature of ``read``, whose result it runs.

    FlashInfer's ``forward`` and ``forward_return_lse`` have the same arguments.
    """

    def _call(self: _W, /, *args: _P.args, **kwargs: _P.kwargs) -> Results:
        given = read(self, *args, **kwargs)
        return self._forward(given._replace(run=given.run._replace(return_lse=return_lse)))

    functools.update_wrapper(_call, read)
    _call.__name__ = "forward_return_lse" if return_lse else "forward"
    _call.__qualname__ = f"{read.__qualname__.rpartition('.')[0]}.{_call.__name__}"
    _call.__doc__ = doc
    signature = inspect.signature(read).replace(return_annotation="Tensor | tuple[Tensor, Tensor]")
    _call.__signature__ = signature  # type: ignore[attr-defined]
    return _call


def sizes_of(plan: Callable[Concatenate[_S, _P], None], *without: str) -> Callable[..., object]:
    """Return FlashInfer's ``workspace_size``: a method with the arguments of ``plan``.

    Plans have workspaces of their own, and tensors of no elements do for those of the caller.

    Args:
        plan: the method.
        without: names of its arguments that ``workspace_size`` doesn't have.
    """
    signature = inspect.signature(plan)
    kept = [p for name, p in signature.parameters.items() if name not in without]
    signature = signature.replace(parameters=kept, return_annotation="tuple[int, int]")

    def workspace_size(*args: object, **kwargs: object) -> tuple[int, int]:
        """Return bytes of the float and the int workspace that ``plan`` needs: none."""
        signature.bind(*args, **kwargs)
        return 0, 0

    workspace_size.__signature__ = signature  # type: ignore[attr-defined]
    return workspace_size


def check_head_dim(name: str, value: object) -> int:
    """Return a head dim that there are kernels for.

    Raises:
        TypeError, ValueError: naming it.
    """
    head_dim = check_count(name, value)
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"{name} is {head_dim}: expected a multiple of 16 up to 256, or 512")
    return head_dim


def window_change(window_left: int | None) -> dict[str, object]:
    """Return what a window of one call changes in its planner's arguments."""
    if window_left is None:
        return {}
    return {"window_left": max(check_count("window_left", window_left, least=-INT32_MAX), -1)}
