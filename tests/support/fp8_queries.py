"""Batches of FP8 queries, scales of every form, and what is right: float64, of values.

``expected`` multiplies each stored query with its scale, one head of one token at a time, and
attends by the definition.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import jitattn
from jitattn.kernels.attention import reference
from jitattn.spec.config import PlannerConfig
from tests.support.harness import tolerance

FP8 = torch.float8_e4m3fn
FORMS = ("none", "number", "negative", "0-d", "[1]", "heads", "heads-column", "rows", "rows-column")
"""How a scale is given; "column" is a strided one."""
K_SCALE, V_SCALE = 0.25, 0.5


@dataclass(frozen=True, kw_only=True)
class FP8Case:
    """One call.

    Attributes:
        form: of the scale of queries.
        view: how q lies: "whole", "packed" between others, or "odd", whose rows allow no vectors.
        q_lens: query tokens of each request.
        kv_lens: tokens of each request.
        value_mean: mean of V, which is normal otherwise.
    """

    form: str = "rows"
    view: str = "whole"
    q_lens: tuple[int, ...] = (1, 1, 1)
    kv_lens: tuple[int, ...] = (40, 1, 133)
    num_kv_heads: int = 2
    group_size: int = 4
    head_dim: int = 64
    head_dim_vo: int | None = None
    value_mean: float = 0.0
    page_size: int = 16
    out_dtype: str | None = None
    fp8_products: str = "exact"
    use_sinks: bool = False
    window_left: int = -1
    early_kv: bool = False
    seed: int = 0

    @property
    def num_qo_heads(self) -> int:
        return self.num_kv_heads * self.group_size

    def planner_arguments(self) -> dict[str, object]:
        return {
            "q_dtype": "float8_e4m3fn",
            "kv_dtype": "float8_e4m3fn",
            **{name: getattr(self, name) for name in ("num_qo_heads", "num_kv_heads", "head_dim")},
            **{name: getattr(self, name) for name in ("head_dim_vo", "page_size", "out_dtype")},
            "fp8_products": self.fp8_products,
            **{name: getattr(self, name) for name in ("use_sinks", "window_left", "early_kv")},
        }

    @property
    def config(self) -> PlannerConfig:
        return PlannerConfig.from_arguments(self.planner_arguments())


class FP8Inputs:
    """The tensors of a case on a device."""

    def __init__(self, case: FP8Case, device: str) -> None:
        self.case = case
        make = torch.Generator().manual_seed(case.seed)
        num_tokens, batch_size = sum(case.q_lens), len(case.q_lens)
        shape = num_tokens, case.num_qo_heads, case.head_dim
        wide = torch.randn(num_tokens, case.num_qo_heads + 3, case.head_dim + 16, generator=make)
        self.q = self._viewed(wide.to(device).to(FP8), shape)
        width = -(-max(case.kv_lens) // case.page_size)
        pool = batch_size * width, 2, case.page_size, case.num_kv_heads, case.head_dim
        cache = torch.randn(pool, generator=make)
        cache[:, 1] += case.value_mean
        ids = torch.randperm(batch_size * width, generator=make).view(batch_size, width)
        for request, length in enumerate(case.kv_lens):  # no one's tokens are NaN
            for page, entry in enumerate(ids[request].tolist()):
                cache[entry, :, max(length - page * case.page_size, 0) :] = torch.nan
        self.cache = cache.to(FP8).to(device)
        self.table = ids.int().to(device)
        self.seq_lens = torch.tensor(case.kv_lens, dtype=torch.int32, device=device)
        begins = torch.tensor([0, *case.q_lens]).cumsum(0)
        self.qo_indptr = begins.int().to(device) if max(case.q_lens) > 1 else None
        sinks = torch.randn(case.num_qo_heads, generator=make)
        self.sinks = sinks.to(device) if case.use_sinks else None
        self.q_scale = self._scale(make, device)  # the others are the same whatever its form

    def _viewed(self, wide: Tensor, shape: tuple[int, int, int]) -> Tensor:
        _, num_heads, dim = shape
        if self.case.view == "whole":
            return wide[:, :num_heads, :dim].contiguous()
        begin = 16 if self.case.view == "packed" else 3
        return wide[:, 1 : num_heads + 1, begin : begin + dim]

    def _scale(self, make: torch.Generator, device: str) -> Any:
        form, case = self.case.form, self.case
        if form in ("none", "number", "negative"):
            numbers = {
                "number": torch.tensor(0.37).item(),
                "negative": -1.3,
            }  # of float32, one of them
            return numbers.get(form)
        num_tokens, num_heads = sum(case.q_lens), case.num_qo_heads
        shape = {"0-d": (), "[1]": (1,), "heads": (num_heads,), "rows": (num_tokens, num_heads)}
        wanted = shape[form.removesuffix("-column")]
        values = torch.rand(wanted, generator=make) * 1.5 - 0.5
        if form.endswith("column"):
            values = torch.stack((values, values + 9), dim=-1).to(device)[..., 0]
        return values.to(device)

    def values(self) -> Tensor:
        """Queries times their scales, in float64."""
        scale = self.q_scale
        if not isinstance(scale, Tensor):
            return self.q.double() * (1.0 if scale is None else scale)
        values = self.q.double()
        for token in range(values.shape[0]):
            for head in range(values.shape[1]):
                one = scale[token, head] if scale.dim() == 2 else scale
                one = one[head] if one.numel() > 1 else one
                values[token, head] *= float(one)
        return values

    def planner(self, **changes: Any) -> jitattn.AttentionPlanner:
        return jitattn.AttentionPlanner(
            **{**self.case.planner_arguments(), **changes}, device=self.q.device
        )

    def plan(self, planner: jitattn.AttentionPlanner) -> jitattn.types.Plan:
        pages, case = jitattn.BlockTable(self.table), self.case
        if self.qo_indptr is None:
            return planner.plan(pages, self.seq_lens)
        return planner.plan(pages, self.seq_lens, self.qo_indptr, max_q_len=max(case.q_lens))

    def bind(self, planner: jitattn.AttentionPlanner) -> jitattn.types.BoundCache:
        columns = self.case.head_dim_vo
        cache = (
            self.cache if columns is None else (self.cache[:, 0], self.cache[:, 1, ..., :columns])
        )
        return planner.bind(cache, k_scale=K_SCALE, v_scale=V_SCALE)

    def attend(self, planner: jitattn.AttentionPlanner | None = None) -> tuple[Tensor, Tensor]:
        planner = planner or self.planner()
        found = self.plan(planner).run(
            self.q, self.bind(planner), q_scale=self.q_scale, sinks=self.sinks, return_lse=True
        )
        assert isinstance(found, tuple)
        return found

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """Out, lse, and the sum of p * |v|."""
        case = self.case
        k, v = (
            torch.cat(
                [
                    self.cache.view(torch.uint8)[self.table[b].long(), side]
                    .view(FP8)
                    .flatten(0, 1)[:length]
                    .double()
                    for b, length in enumerate(case.kv_lens)
                ]
            )
            for side in (0, 1)
        )
        columns = case.head_dim_vo or case.head_dim
        v = v[..., :columns] * V_SCALE
        out, lse = reference.attention(
            self.values(),
            k * K_SCALE,
            torch.cat((v, v.abs()), dim=-1),
            [0, *torch.tensor(case.q_lens).cumsum(0).tolist()],
            [0, *torch.tensor(case.kv_lens).cumsum(0).tolist()],
            causal=True,
            window_left=case.window_left,
            logits_soft_cap=0.0,
            sm_scale=case.head_dim**-0.5,
            sinks=self.sinks,
        )
        return out[..., :columns], lse, out[..., columns:]

    def check(self, found: tuple[Tensor, Tensor]) -> None:
        """Compare with what is right: as close as with queries of 16 bits and these values."""
        want, want_lse, magnitude = self.expected()
        out, lse = found
        assert out.dtype == getattr(torch, self.case.out_dtype or "bfloat16")
        # Rounding a query to float16 moves a score, of up to 2**4 here, by 2**-8 at the very most.
        limits = tolerance("float16", self.case.out_dtype or "bfloat16")
        allowed = (limits.out_relative + 2.0**-9) * magnitude + 2.0**-20
        error = (out.double() - want).abs()
        if self.case.fp8_products == "fast":
            # Probabilities may be rounded to three bits. Errors of many tokens cancel: docs say
            # 0.025 of out.
            allowed += 2.0**-4 * magnitude
            assert bool((error.norm(dim=(1, 2)) <= 0.05 * want.norm(dim=(1, 2)) + 1e-4).all())
            if self.case.value_mean:  # sums that lose digits are too small, all of them
                bias = ((out.double() - want) * want.sign()).mean() / want.abs().mean()
                assert abs(bias) <= 0.004
        assert bool((error <= allowed).all())
        assert bool(((lse.double() - want_lse).abs() <= limits.lse_absolute).all())


MIXED = FP8Case(q_lens=(1, 5, 40, 2), kv_lens=(300, 6, 777, 2), seed=5)
LONG = FP8Case(q_lens=(1,) * 5, kv_lens=(9000, 1, 17, 4096, 333), head_dim=128, seed=6)
FAST = replace(MIXED, fp8_products="fast", head_dim=128)
FILLED = replace(FAST, q_lens=(700, 1, 300, 129), kv_lens=(700, 900, 5000, 1024))
GPU_CASES = {
    **{f"scale {form}": replace(MIXED, form=form) for form in FORMS},
    **{f"q {view}": replace(MIXED, view=view) for view in ("packed", "odd")},
    "float16": replace(MIXED, out_dtype="float16"),
    **{f"fast, scale {form}": replace(FAST, form=form) for form in FORMS},
    "fast, 64": replace(FILLED, head_dim=64, page_size=64),
    "fast, 128": FILLED,
    "fast, 192": replace(FILLED, head_dim=192, page_size=8),
    "fast, 224 x 128": replace(FILLED, head_dim=224, head_dim_vo=128, page_size=64, group_size=8),
    "fast, 192 x 96": replace(FILLED, head_dim=192, head_dim_vo=96),
    "fast, V has a mean": replace(FILLED, q_lens=(2000, 300), kv_lens=(9000, 5000), value_mean=1.0),
    "fast, V has a mean, 64": replace(FILLED, head_dim=64, value_mean=1.0),
    "fast, small pages": replace(FILLED, page_size=4),
    "fast, odd": replace(FILLED, view="odd", out_dtype="float16"),
    "fast, sinks and a window": replace(FILLED, use_sinks=True, window_left=100),
    "fast, early": replace(FILLED, early_kv=True),
    "sinks and a window": replace(MIXED, use_sinks=True, window_left=100),
    "long": LONG,
    "long, odd": replace(LONG, view="odd", form="heads"),
    "early": replace(LONG, early_kv=True),
    "wide": replace(MIXED, head_dim=256, group_size=8),
}


def gpu_configs() -> list[PlannerConfig]:
    """The arguments of the planners of tests/gpu/test_fp8_queries.py, for a bundle."""
    lists = replace(MIXED.config, page_table="indices")
    return [*dict.fromkeys((*(case.config for case in GPU_CASES.values()), lists))]
