"""Parameters of the variants of tests, and what they make of scores: not by their references."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Params = dict[str, float | int | Tensor]


def params_of(
    name: str | None, num_qo_heads: int, num_kv_heads: int, seed: int, device: torch.device | str
) -> Params | None:
    """Values for the parameters of a variant of tests/support/variants.py."""
    rng = torch.Generator().manual_seed(7 + seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=rng)

    match name:
        case None:
            return None
        case "alibi":
            # Every other number of a vector.
            return {"slopes": uniform(num_qo_heads, 2).to(device)[:, 1]}
        case "relative_bias":
            size = 1 + seed % 40
            bias = 4 * uniform(size, num_qo_heads).to(device) - 2
            return {"bias": bias.T, "zero": seed % 7 - 3}
        case "everything":
            return {
                "masked": seed % 6,  # 5: none
                "alpha": 0.25 + float(uniform(1)),
                "shift": uniform(num_qo_heads).bfloat16().to(device),
                "kind": torch.randint(0, 4, (2, num_kv_heads), generator=rng).to(device).byte().T,
                "table": (8 * uniform(3, 5)).half().to(device)[:, 1:4],
            }
    raise ValueError(name)


def changed(
    name: str,
    params: Params,
    scores: Tensor,
    qo_idx: Tensor,
    kv_idx: Tensor,
    *,
    qo_len: int,
    kv_len: int,
    request: int,
    group_size: int,
) -> Tensor:
    """Scores [num_rows, num_qo_heads, num_keys] of positions that broadcast, changed: head by head.

    Those of keys that a row doesn't see may be anything.
    """
    distance = (qo_idx - kv_idx).expand(scores.shape[0], 1, scores.shape[2])[:, 0]
    kv_idx = kv_idx.expand(scores.shape[0], 1, scores.shape[2])[:, 0]
    given = {k: v.double() if isinstance(v, Tensor) else v for k, v in params.items()}
    heads = []
    for head in range(scores.shape[1]):
        logit = scores[:, head].double()
        if name == "alibi":
            new = logit - given["slopes"][head] * distance.abs()
        elif name == "relative_bias":
            row = given["bias"][head]
            places = (given["zero"] + distance).clamp(0, len(row) - 1)
            new = logit + row[places]
        else:
            odd = (qo_idx[:, 0] % 2).expand_as(logit)
            kind = given["kind"][head // group_size][odd]
            slope = given["table"][head % 3][1]
            new = given["alpha"] * logit + slope * distance / (qo_len + kv_len)
            new = new + given["shift"][head] + kind
            new[(kv_idx + request + head) % 5 == given["masked"]] = -math.inf
        heads.append(new)
    return torch.stack(heads, dim=1)


Change = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def sharpened(change: Change, sharpness: float) -> Change:
    """The same of scores that are multiplied, before and after."""

    def transform(request: int, scores: Tensor, qo_idx: Tensor, kv_idx: Tensor) -> Tensor:
        new = change(request, scores / sharpness if sharpness else scores, qo_idx, kv_idx)
        return torch.where(new == -math.inf, new, sharpness * new)

    return transform
