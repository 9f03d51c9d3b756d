"""What a call gives the parameters of a variant, checked; and the variant's definition in torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace

import torch
from torch import Tensor

from jitattn.base.validate import INT32_MAX, check_count, check_number
from jitattn.spec.variant import ELEMENTS, AttentionVariant, ParamType
from jitattn.tensors.tensor_checks import check_device, check_tensor

VariantParams = Mapping[str, float | int | Tensor]
"""Numbers and tensors by the names of a variant's parameters."""
Transform = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Of a request, its scores [num_rows, num_qo_heads, num_keys], and positions that broadcast."""

_DTYPES = {name: getattr(torch, element.dtype) for name, element in ELEMENTS.items()}


def check_variant_params(
    variant: AttentionVariant | None,
    given: object,
    device: torch.device,
    *,
    num_qo_heads: int,
    num_kv_heads: int,
) -> VariantParams | None:
    """Return the values of a variant's parameters; None where it has none.

    Raises:
        TypeError: no mapping, or a value of another type or dtype than declared.
        ValueError: given without a use, a name that is missing or unknown, a number beyond its
            type, or a tensor of another shape, layout or device than declared.
    """
    types = {} if variant is None else variant.types
    if not types:
        if given is not None:
            whose = "no variant" if variant is None else f"the variant {variant} without params"
            raise ValueError(f"variant_params is given, but the planner has {whose}")
        return None
    if given is None:
        raise ValueError(f"variant_params is not given: {variant} has {', '.join(types)}")
    if not isinstance(given, Mapping):
        raise TypeError(f"variant_params is a {type(given).__name__}: expected a mapping")
    if missing := [name for name in types if name not in given]:
        raise ValueError(f"variant_params lacks {', '.join(missing)}, which {variant} has")
    if unknown := [str(name) for name in given if name not in types]:
        raise ValueError(
            f"variant_params has {', '.join(unknown)}: {variant} has {', '.join(types)} only"
        )
    sizes = {"qo_heads": num_qo_heads, "kv_heads": num_kv_heads}
    return {
        name: _checked_value(f"variant_params[{name!r}]", given[name], kind, sizes, device)
        for name, kind in types.items()
    }


def refuse_compiled(given: object) -> None:
    """Raise ValueError for parameters of a call inside a compiled function."""
    if given is not None:
        raise ValueError(
            "variant_params is given inside a compiled function, whose operators don't have it: "
            "run the plan outside (torch.compiler.disable)"
        )


def _checked_value(
    name: str, value: object, kind: ParamType, sizes: Mapping[str, int], device: torch.device
) -> float | int | Tensor:
    if not kind.is_scalar:
        return _checked_tensor(name, value, kind, sizes, device)
    if kind.element == "int":
        return check_count(name, value, least=-INT32_MAX - 1, most=INT32_MAX)
    return check_number(name, value)


def _checked_tensor(
    name: str, value: object, kind: ParamType, sizes: Mapping[str, int], device: torch.device
) -> Tensor:
    check_tensor(name, value, (_DTYPES[kind.element],))
    assert isinstance(value, Tensor)
    check_device(name, value, device)
    if kind.is_pointer:
        if not value.is_contiguous():
            raise ValueError(
                f"{name} has strides {list(value.stride())}: expected a contiguous tensor"
            )
        return value
    wanted = [sizes.get(size, size) if isinstance(size, str) else size for size in kind.sizes]
    if value.dim() != len(wanted) or any(
        want not in ("*", size) for want, size in zip(wanted, value.shape, strict=True)
    ):
        raise ValueError(
            f"{name} has shape {list(value.shape)}: expected [{', '.join(map(str, wanted))}]"
        )
    return value


def transform_of(
    variant: AttentionVariant | None,
    values: VariantParams | None,
    *,
    lengths: Callable[[int], tuple[int, int]],
    num_qo_heads: int,
    num_kv_heads: int,
) -> Transform | None:
    """Return what the definitions of attention do to scores; None without a variant.

    Args:
        variant: one that has a reference.
        values: as ``check_variant_params`` returns them.
        lengths: of a request: its query tokens and keys.
        num_qo_heads: heads of scores.
        num_kv_heads: a divisor of that.
    """
    if variant is None:
        return None
    assert variant.reference is not None
    reference = variant.reference
    params = SimpleNamespace(**{k: _widened(v) for k, v in (values or {}).items()})

    def transform(request: int, scores: Tensor, positions: Tensor, keys: Tensor) -> Tensor:
        heads = torch.arange(num_qo_heads, device=scores.device)[None, :, None]
        qo_len, kv_len = lengths(request)
        at = SimpleNamespace(
            qo_idx=positions,
            kv_idx=keys,
            qo_len=qo_len,
            kv_len=kv_len,
            qo_head=heads,
            kv_head=heads // (num_qo_heads // num_kv_heads),
            request=request,
            params=params,
        )
        changed = reference(scores.clone(), at)
        if not isinstance(changed, Tensor) or changed.shape != scores.shape:
            raise ValueError(f"the reference of {variant} returns no logits of the shape it gets")
        changed = changed.to(torch.float64)
        # As in kernels: what is masked stays so, and infinity has no meaning.
        changed = changed.masked_fill(changed == math.inf, math.nan)
        return torch.where(scores == -math.inf, scores, changed)

    return transform


def _widened(value: float | int | Tensor) -> float | int | Tensor:
    if not isinstance(value, Tensor):
        return value
    return value.to(torch.float64 if value.dtype.is_floating_point else torch.int64)
