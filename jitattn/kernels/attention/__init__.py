"""Attention: planners, plans, the decode and the prefill kernel, cascades, and the definition."""

from jitattn.kernels.attention.config import SUPPORT, attention_specs
from jitattn.kernels.attention.spec import DecodeSpec, DequantizeQueriesSpec, PrefillSpec
from jitattn.spec.config import PlannerConfig
from jitattn.spec.family import Family

FAMILY = Family(
    name="attention",
    specs=(DecodeSpec, PrefillSpec, DequantizeQueriesSpec),
    config=PlannerConfig,
    selectors=("",),
    resolve=attention_specs,
    support=SUPPORT,
)
