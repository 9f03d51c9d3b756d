"""Parameters of variants: what a call gives, checked, and values for the ready ones.

Beside them the definition of a variant in torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace

import torch
from torch import Tensor

from jitattn.base.validate import INT32_MAX, MAX_DIM, check_count, check_flag, check_number
from jitattn.spec.variant import ELEMENTS, AttentionVariant, ParamType
from jitattn.tensors.tensor_checks import as_device, check_device, check_tensor

VariantParams = Mapping[str, float | int | Tensor]
"""Numbers and tensors by the names of a variant's parameters."""
Transform = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Of a request, its scores [num_rows, num_qo_heads, num_keys], and positions that broadcast."""

_DTYPES = {name: getattr(torch, element.dtype) for name, element in ELEMENTS.items()}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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


# --- values of the ready variants


def alibi_slopes(num_qo_heads: int, *, device: torch.device | str | None = None) -> Tensor:
    """Return the slopes of the ALiBi paper (arXiv 2108.12409), for ``ALIBI``.

    They are 2 ** (-8 i / n) of head i from 1 on where n heads are a power of two. Of another number
    the first heads have those of the next lower power, the others every other one of its double.

    Args:
        num_qo_heads: query heads of the model; a part of them takes its part of the slopes.
        device: where to.

    Returns:
        float32 [num_qo_heads].

    Raises:
        TypeError, ValueError: no count.
    """
    num_qo_heads = check_count("num_qo_heads", num_qo_heads, most=MAX_DIM)
    power = 1 << num_qo_heads.bit_length() - 1
    exponents = [-8 * i / power for i in range(1, power + 1)]
    exponents += [-4 * i / power for i in range(1, 2 * power + 1, 2)]
    slopes = torch.tensor(exponents[:num_qo_heads], dtype=torch.float64, device="cpu").exp2()
    return slopes.to(torch.float32).to("cpu" if device is None else as_device("device", device))


def t5_bias(
    weight: Tensor, *, bidirectional: bool, max_distance: int = 128
) -> dict[str, Tensor | int]:
    """Return the learned biases of T5's buckets by distance, as ``RELATIVE_BIAS`` takes them.

    Args:
        weight: [num_buckets, num_qo_heads], any float dtype: ``relative_attention_bias.weight``.
        bidirectional: whether half of the buckets are for later keys: in encoders, not in decoders.
        max_distance: from which on keys share the last bucket.

    Returns:
        variant_params: ``bias`` float32 [num_qo_heads, 2 * max_distance + 1], ``zero`` its middle.

    Raises:
        TypeError, ValueError: a weight of another form, or fewer distances than buckets have.
    """
    check_tensor("weight", weight, _FLOATS)
    check_flag("bidirectional", bidirectional)
    if weight.dim() != 2 or weight.shape[0] < 4:
        raise ValueError(
            f"weight has shape {list(weight.shape)}: expected [num_buckets, num_qo_heads], 4 "
            "buckets at least"
        )
    num_buckets = weight.shape[0] // 2 if bidirectional else weight.shape[0]
    num_exact = num_buckets // 2
    max_distance = check_count("max_distance", max_distance, least=num_exact + 1, most=MAX_DIM)
    distance = torch.arange(-max_distance, max_distance + 1, device="cpu")  # to earlier keys
    size = distance.abs() if bidirectional else distance.clamp(min=0)
    # In float32, as the model was trained.
    ratio = torch.log(size.clamp(min=1).float() / num_exact) / math.log(max_distance / num_exact)
    wide = (num_exact + (ratio * (num_buckets - num_exact)).long()).clamp(max=num_buckets - 1)
    bucket = torch.where(size < num_exact, size, wide)
    if bidirectional:
        bucket = bucket + num_buckets * (distance < 0)
    bias = weight.detach().float()[bucket.to(weight.device)]
    return {"bias": bias.T, "zero": max_distance}
