"""The arguments of ``MLAPlanner`` as a value, and what they may be: torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Self

from jitattn.base.errors import ConfigError
from jitattn.spec.arch import check_arch
from jitattn.spec.config import Arguments
from jitattn.spec.constraint import VARIANT_RANGE, Rule, broken, one_of, page_size_rule, rule
from jitattn.spec.dtype import OUT_DTYPES, Q_DTYPES, DType
from jitattn.spec.kernel_spec import KernelSpec, MergeSpec, MLASpec, ScheduleSpec
from jitattn.spec.layout import PAGE_TABLES, Layout, Loader
from jitattn.spec.tile import latent_row_tile, takes_latent_boxes
from jitattn.spec.variant import AttentionVariant

KV_LORA_RANKS = (256, 512)
QK_ROPE_HEAD_DIMS = (32, 64)
MAX_HEADS = 128
SCALE_BLOCK = 128
"""Elements of the latent that share a float32 scale, where rows hold their scales."""


class MLAConfig(Arguments):
    """The arguments of ``MLAPlanner`` that are not objects of a device.

    The planner wants ``sm_scale``; kernels don't depend on it, so a configuration may lack it.
    """

    family: ClassVar[str] = "mla"
    optional: ClassVar[frozenset[str]] = Arguments.optional - {"sm_scale"}

    num_heads: int = 128
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    page_size: int | None = 64
    sm_scale: float | None = None
    q_dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    out_dtype: str | None = None
    page_table: str = "shared"
    causal: bool = True
    variant: AttentionVariant | None = None
    batch_invariant: bool = False
    num_sms: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the configuration of ``"planner=mla,num_heads=16,page_size=64"``.

        Raises:
            ConfigError: a part is not ``name=value``, is unknown, repeated or of a wrong type.
        """
        first, _, others = text.partition(",")
        is_named = first.replace(" ", "") == f"planner={cls.family}"
        return super().parse(others if is_named else text)

    def arguments_text(self) -> str:
        """Return ``planner=mla`` and the arguments that differ from the defaults, for ``parse``."""
        return ",".join(filter(None, (f"planner={self.family}", super().arguments_text())))

    @property
    def window_left(self) -> int:
        """There is no window."""
        return -1

    @property
    def num_qo_heads(self) -> int:
        """Heads of q and out: all share one latent a token."""
        return self.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Latents of a token."""
        return 1

    @property
    def group_size(self) -> int:
        """Heads that share a latent."""
        return self.num_heads

    @property
    def head_dim(self) -> int:
        """Elements of a key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def head_dim_vo(self) -> int:
        """Elements of a value."""
        return self.kv_lora_rank

    @property
    def logits_soft_cap(self) -> float:
        """There is no soft cap."""
        return 0.0

    @property
    def early_kv(self) -> bool:
        """Nothing is read before the previous kernel's end."""
        return False

    @property
    def score_scale(self) -> float:
        """What scores are multiplied with."""
        return 1.0 if self.sm_scale is None else self.sm_scale

    def reasons(self) -> list[str]:
        """Return why a planner has no meaning; nothing where it has one."""
        return broken(RULES, self)

    def specs(self, arch: str) -> tuple[KernelSpec, ...]:
        """Return every kernel that users of a planner launch, the main one first.

        Raises:
            ConfigError: with every reason why there are none.
        """
        check_arch(arch)
        if reasons := self.reasons():
            raise ConfigError(reasons)
        out_dtype = DType(self.out_dtype or self.q_dtype)
        return (*self.attention_specs(arch), ScheduleSpec(), MergeSpec(dtype=out_dtype))

    def attention_specs(self, arch: str) -> tuple[MLASpec, ...]:
        """Return the kernels of every cache that ``bind`` takes, aligned ones before others."""
        q_dtype, kv_dtype = DType(self.q_dtype), DType(self.kv_dtype)
        forms = [(kv_dtype, False)]
        if kv_dtype is not q_dtype:
            forms.append((q_dtype, False))
            if q_dtype is DType.BFLOAT16:
                forms.append((q_dtype, True))
        base = MLASpec(
            head_dim=self.head_dim,
            head_dim_vo=self.head_dim_vo,
            page_size=self.page_size or 1,
            q_dtype=q_dtype,
            kv_dtype=kv_dtype,
            out_dtype=DType(self.out_dtype or self.q_dtype),
            page_table=Layout(self.page_table),
            loader=Loader.VECTOR,
            use_logits_soft_cap=False,
            use_custom_mask=False,
            variant=None if self.variant is None else self.variant.code,
            row_tile=latent_row_tile(self.num_heads, q_dtype, kv_dtype, arch),
            rope_dtype=kv_dtype,
            has_scales=False,
        )
        fast = Loader.TENSOR if takes_latent_boxes(base, arch) else Loader.VECTOR
        return tuple(
            replace(base, loader=loader, rope_dtype=rope_dtype, has_scales=has_scales)
            for rope_dtype, has_scales in forms
            for loader in (fast, Loader.PLAIN)
        )


RULES: tuple[Rule[MLAConfig], ...] = (
    rule(
        "num_heads",
        f"1 to {MAX_HEADS}",
        lambda c: 1 <= c.num_heads <= MAX_HEADS,
        f"is not from 1 to {MAX_HEADS}",
    ),
    rule(
        "kv_lora_rank",
        ", ".join(map(str, KV_LORA_RANKS)),
        lambda c: c.kv_lora_rank in KV_LORA_RANKS,
        f"is not one of {', '.join(map(str, KV_LORA_RANKS))}",
    ),
    rule(
        "qk_rope_head_dim",
        ", ".join(map(str, QK_ROPE_HEAD_DIMS)),
        lambda c: c.qk_rope_head_dim in QK_ROPE_HEAD_DIMS,
        f"is not one of {', '.join(map(str, QK_ROPE_HEAD_DIMS))}",
    ),
    page_size_rule(),
    one_of("q_dtype", Q_DTYPES, " (FP8 queries are not built yet)"),
    rule(
        "kv_dtype",
        "the same as q_dtype, float8_e4m3fn",
        lambda c: c.kv_dtype in (c.q_dtype, "float8_e4m3fn"),
        "is neither q_dtype nor float8_e4m3fn",
    ),
    rule(
        "out_dtype",
        "None (q_dtype), " + ", ".join(OUT_DTYPES),
        lambda c: c.out_dtype is None or c.out_dtype in OUT_DTYPES,
        f"is not one of {', '.join(OUT_DTYPES)}",
    ),
    one_of("page_table", PAGE_TABLES),
    rule(
        "num_sms",
        "None (all), 1 and up",
        lambda c: c.num_sms is None or c.num_sms >= 1,
        "is not at least 1",
    ),
)

MLA_RANGES: Mapping[str, str] = {
    "planner": f"{MLAConfig.family}: jitattn.MLAPlanner",
    **{rule.argument: rule.allowed for rule in RULES},
    "causal": "True, False",
    "variant": VARIANT_RANGE,
    "sm_scale": "any finite number; the planner has no default",
    "batch_invariant": "True, False",
    "query tokens per request": "1 and up",
}
"""What planners take, for the support table."""
