"""New tokens into a cache: rotary embedding, norms, quantisation."""

from jitattn.kernels.preprocess.spec import (
    PREFIX,
    PREPROCESS_RANGES,
    PreprocessConfig,
    PreprocessSpec,
)
from jitattn.spec.family import Family

FAMILY = Family(
    name="preprocess",
    specs=(PreprocessSpec,),
    config=PreprocessConfig,
    selectors=(PREFIX,),
    resolve=PreprocessConfig.specs,
    support={PreprocessSpec.kernel: PREPROCESS_RANGES},
)
