"""Specs that attention and MLA share: fields of attention kernels, and the schedule kernel."""

from __future__ import annotations

from dataclasses import fields
from typing import ClassVar

from jitattn.kernels.common.tile import AttentionTile, ScheduleTile
from jitattn.spec.config import PlannerConfig
from jitattn.spec.dtype import DType
from jitattn.spec.family import KernelSpec, OnlySpec, Tile, plain
from jitattn.spec.layout import AnyLayout, Loader
from jitattn.spec.variant import AttentionVariant


class AttentionSpec(KernelSpec):
    """What every attention kernel is specialised on.

    Batch size, lengths, head counts, strides, window, scales and sinks are launch arguments.
    """

    head_dim: int
    head_dim_vo: int
    page_size: int  # 1 for ragged K and V
    q_dtype: DType
    kv_dtype: DType
    out_dtype: DType
    page_table: AnyLayout
    loader: Loader
    use_logits_soft_cap: bool
    use_custom_mask: bool
    variant: AttentionVariant | None = None  # without its reference
    fixed_maximum: bool = False  # a soft cap is so low that softmax needs no maximum of scores

    @property
    def changes_scores(self) -> bool:
        """Whether scores are more than products, which takes registers."""
        return self.use_logits_soft_cap or self.variant is not None

    @property
    def dequantises(self) -> bool:
        """Whether K and V have another type than q, and are converted before products."""
        return self.kv_dtype is not self.q_dtype

    @property
    def has_fp8_queries(self) -> bool:
        """Whether the kernel reads FP8 queries and their scales."""
        return self.q_dtype is DType.FLOAT8_E4M3FN

    @property
    def _suffix(self) -> str:
        """The part of the symbol that follows the kernel's own."""
        same = self.head_dim == self.head_dim_vo
        parts = [
            f"d{self.head_dim}" if same else f"d{self.head_dim}x{self.head_dim_vo}",
            f"p{self.page_size}",
            f"q{self.q_dtype.short}_kv{self.kv_dtype.short}_o{self.out_dtype.short}",
            self.page_table.value,
            self.loader.value,
        ]
        parts += ["softcap"] * self.use_logits_soft_cap + ["mask"] * self.use_custom_mask
        parts += ["fixedmax"] * self.fixed_maximum
        if self.variant is not None:
            parts.append(self.variant.label)
        return "_".join(parts)

    @property
    def transform(self) -> AttentionVariant | None:
        """The variant."""
        return self.variant

    def tile(self, arch: str) -> AttentionTile:
        """Return the shape of a CTA on ``arch``."""
        raise NotImplementedError

    def config_text(self) -> str:
        """Return arguments that select the kernel."""
        known = {field.name for field in fields(PlannerConfig)}
        chosen = {name: value for name, value in self.context().items() if name in known}
        if self.variant is not None:
            chosen["variant"] = self.variant.name
        if self.has_fp8_queries:
            chosen["fp8_products"] = "fast"
        return ",".join(f"{name}={value}" for name, value in chosen.items())

    def context(self) -> dict[str, object]:
        """Return the template variables of this spec: its fields, a variant's label, its symbol."""
        values = {k: plain(v) for k, v in vars(self).items() if k != "variant"}
        if self.variant is not None:
            values["variant"] = self.variant.label
        return values | {"symbol": self.symbol}


class ScheduleSpec(OnlySpec):
    """The kernel that splits the KV of a batch over the card; one serves every decode kernel."""

    kernel: ClassVar[str] = "schedule"
    path: ClassVar[str] = "attention/schedule.cu.jinja"
    cta: ClassVar[Tile] = ScheduleTile()

    has_lists: bool = False  # KV tiles are those of lists

    @property
    def symbol(self) -> str:
        """Name of the ``extern "C"`` kernel."""
        return f"jitattn_{self.kernel}{'_lists' if self.has_lists else ''}"

    def config_text(self) -> str:
        """Return arguments that select the kernel: those of any planner."""
        return "page_table=indices" if self.has_lists else "head_dim=128"
