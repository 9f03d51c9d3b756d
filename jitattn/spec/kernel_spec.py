"""What a kernel is specialised on: frozen values, and nothing that a launch argument could say."""

from __future__ import annotations

from dataclasses import asdict
from enum import Enum
from typing import ClassVar

from jitattn.base.record import Value
from jitattn.spec.dtype import DType
from jitattn.spec.layout import Layout, Loader, Pairing
from jitattn.spec.variant import AttentionVariant


def _plain(value: object) -> object:
    return value.value if isinstance(value, Enum) else value


class AttentionSpec(Value):
    """What the decode and the prefill kernel are both specialised on.

    Batch size, lengths, head counts, strides, window, scales and sinks are launch arguments.
    """

    head_dim: int
    head_dim_vo: int
    page_size: int  # 1 for ragged K and V
    q_dtype: DType
    kv_dtype: DType
    out_dtype: DType
    page_table: Layout
    loader: Loader
    use_logits_soft_cap: bool
    use_custom_mask: bool
    variant: AttentionVariant | None = None  # without its reference

    @property
    def changes_scores(self) -> bool:
        """Whether scores are more than products, which takes registers."""
        return self.use_logits_soft_cap or self.variant is not None

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
        if self.variant is not None:
            parts.append(self.variant.label)
        return "_".join(parts)

    @property
    def symbol(self) -> str:
        """Name of the ``extern "C"`` kernel: unique per spec and readable in a profile."""
        raise NotImplementedError

    def context(self) -> dict[str, object]:
        """The template variables of this spec: its fields, a variant's label, its symbol."""
        values = {k: _plain(v) for k, v in vars(self).items() if k != "variant"}
        if self.variant is not None:
            values["variant"] = self.variant.label
        return values | {"symbol": self.symbol}


class DecodeSpec(AttentionSpec):
    """The kernel of requests with few query rows, which only select ``row_tile``."""

    family: ClassVar[str] = "decode"
    template: ClassVar[str] = "attention/decode.cu.jinja"

    row_tile: int  # query rows of one KV head that a CTA handles: 8, 16 or 32

    @property
    def symbol(self) -> str:
        """Name of the ``extern "C"`` kernel: unique per spec and readable in a profile."""
        return f"jitattn_decode_r{self.row_tile}_{self._suffix}"


class PrefillSpec(AttentionSpec):
    """The kernel of requests with many query rows."""

    family: ClassVar[str] = "prefill"
    template: ClassVar[str] = "attention/prefill_sm80.cu.jinja"

    @property
    def symbol(self) -> str:
        """Name of the ``extern "C"`` kernel: unique per spec and readable in a profile."""
        return f"jitattn_prefill_{self._suffix}"


class MLASpec(AttentionSpec):
    """The kernel of multi-head latent attention, for requests of any number of query rows.

    ``head_dim`` is that of a latent and a rope part together, ``head_dim_vo`` of a latent.
    """

    family: ClassVar[str] = "mla"
    template: ClassVar[str] = "mla/mla_sm80.cu.jinja"

    row_tile: int  # query rows that a CTA handles
    rope_dtype: DType
    has_scales: bool  # rows hold a float32 scale for each 128 elements of their latent

    @property
    def symbol(self) -> str:
        """Name of the ``extern "C"`` kernel: unique per spec and readable in a profile."""
        parts = [f"jitattn_mla_r{self.row_tile}_{self._suffix}"]
        parts += [f"rope{self.rope_dtype.short}"] * (self.rope_dtype is not self.kv_dtype)
        parts += ["scales"] * self.has_scales
        return "_".join(parts)

    @property
    def merge_symbol(self) -> str:
        """Name of the kernel that merges what this one leaves in parts."""
        return f"{self.symbol}_merge"

    def context(self) -> dict[str, object]:
        """The template variables of this spec: its fields and both symbols."""
        return super().context() | {"merge_symbol": self.merge_symbol}


class OnlySpec(Value):
    """A kernel of which there is one on an architecture, named after its family."""

    family: ClassVar[str]
    template: ClassVar[str]

    @property
    def symbol(self) -> str:
        """Name of the ``extern "C"`` kernel."""
        return f"jitattn_{self.family}"

    def context(self) -> dict[str, object]:
        """The template variables: the symbol only."""
        return {"symbol": self.symbol}


class ScheduleSpec(OnlySpec):
    """The kernel that splits the KV of a batch over the card; one serves every decode kernel."""

    family: ClassVar[str] = "schedule"
    template: ClassVar[str] = "attention/schedule.cu.jinja"


class MergeSpec(Value):
    """The kernel that merges attention states of one dtype."""

    family: ClassVar[str] = "merge"
    template: ClassVar[str] = "merge/merge.cu.jinja"

    dtype: DType

    @property
    def symbol(self) -> str:
        """Name of the ``extern "C"`` kernel."""
        return f"jitattn_merge_{self.dtype.short}"

    def context(self) -> dict[str, object]:
        """The template variables of this spec: its fields and its symbol."""
        return {"dtype": self.dtype.value, "symbol": self.symbol}


class PreprocessSpec(Value):
    """The kernel that puts Q, K and V of new tokens where attention reads them.

    Head counts, strides, lengths, rotary_dim, frequencies and scales are launch arguments, as is
    whether there is a q.
    """

    family: ClassVar[str] = "preprocess"
    template: ClassVar[str] = "preprocess/preprocess.cu.jinja"

    head_dim: int
    head_dim_vo: int
    page_size: int
    qkv_dtype: DType
    out_dtype: DType  # of q; qkv_dtype where there is none
    kv_dtype: DType
    page_table: Layout | None  # None: a slot for each token
    pairing: Pairing
    use_mrope: bool  # pairs may have positions of their own
    use_bias: bool
    use_norm: bool
    loader: Loader  # VECTOR where all rows begin at multiples of their vectors, else PLAIN

    @property
    def symbol(self) -> str:
        """Name of the ``extern "C"`` kernel: unique per spec and readable in a profile."""
        same = self.head_dim == self.head_dim_vo
        parts = [
            f"jitattn_preprocess_d{self.head_dim}" + ("" if same else f"x{self.head_dim_vo}"),
            f"p{self.page_size}",
            f"{self.qkv_dtype.short}_q{self.out_dtype.short}_kv{self.kv_dtype.short}",
            self.page_table.value if self.page_table else "slots",
            self.loader.value,
        ]
        parts += [self.pairing.value] * (self.pairing is not Pairing.NONE)
        parts += ["mrope"] * self.use_mrope + ["bias"] * self.use_bias + ["norm"] * self.use_norm
        return "_".join(parts)

    def context(self) -> dict[str, object]:
        """The template variables of this spec: its fields, its symbol and the pairing's name."""
        fields = {name: _plain(value) for name, value in asdict(self).items()}
        fields["page_table"] = self.page_table.value if self.page_table else "slots"
        pairing_name = f"k{self.pairing.value.capitalize()}"
        del fields["pairing"]
        return fields | {"symbol": self.symbol, "pairing_name": pairing_name}


class GatherSpec(Value):
    """The kernel that gathers tokens out of pages of one dtype, as values of another.

    With equal dtypes it copies what is stored. Page tables, page sizes, heads and strides are
    launch arguments: what it costs to look at them hides behind the memory.
    """

    family: ClassVar[str] = "gather"
    template: ClassVar[str] = "pages/gather.cu.jinja"

    kv_dtype: DType
    out_dtype: DType

    @property
    def symbol(self) -> str:
        """Name of the ``extern "C"`` kernel."""
        return f"jitattn_gather_kv{self.kv_dtype.short}_o{self.out_dtype.short}"

    def context(self) -> dict[str, object]:
        """The template variables of this spec: its fields and its symbol."""
        return {k: _plain(v) for k, v in asdict(self).items()} | {"symbol": self.symbol}


class CopyPagesSpec(OnlySpec):
    """The kernel that copies pages of any pools."""

    family: ClassVar[str] = "copy_pages"
    template: ClassVar[str] = "pages/copy_pages.cu.jinja"


class BlockTableSpec(OnlySpec):
    """The kernel that makes block tables out of slots."""

    family: ClassVar[str] = "block_table"
    template: ClassVar[str] = "pages/block_table.cu.jinja"


class BatchInfoSpec(OnlySpec):
    """The kernel that says of every query token whose it is and where it goes."""

    family: ClassVar[str] = "batch_info"
    template: ClassVar[str] = "pages/batch_info.cu.jinja"


class LayerTablesSpec(OnlySpec):
    """The kernel that makes the tables of a group's layers out of slots."""

    family: ClassVar[str] = "layer_tables"
    template: ClassVar[str] = "pages/layer_tables.cu.jinja"


TableSpec = BlockTableSpec | BatchInfoSpec | LayerTablesSpec
TransferSpec = GatherSpec | CopyPagesSpec | TableSpec
PlannedSpec = DecodeSpec | PrefillSpec | MLASpec
"""Of the kernels that plans schedule and launch."""
KernelSpec = PlannedSpec | ScheduleSpec | MergeSpec | PreprocessSpec | TransferSpec
