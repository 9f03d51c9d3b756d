"""Multi-head latent attention: planner, caches, kernels and the definition."""

from jitattn.kernels.mla.config import MLA_RANGES, mla_specs
from jitattn.kernels.mla.spec import MLASpec
from jitattn.spec.config import MLAConfig
from jitattn.spec.family import Family

FAMILY = Family(
    name="mla",
    specs=(MLASpec,),
    config=MLAConfig,
    selectors=(f"planner={MLAConfig.family}",),
    resolve=mla_specs,
    support={MLASpec.kernel: MLA_RANGES},
)
