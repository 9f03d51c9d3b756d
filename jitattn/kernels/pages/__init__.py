"""Gathering, copying and converting pages, and tables made of batches and of layers."""

from jitattn.kernels.pages.spec import (
    KERNELS,
    TRANSFER_RANGES,
    BatchInfoSpec,
    BlockTableSpec,
    CopyPagesSpec,
    GatherSpec,
    LayerTablesSpec,
    TransferConfig,
)
from jitattn.spec.family import Family

FAMILY = Family(
    name="pages",
    specs=(GatherSpec, CopyPagesSpec, BlockTableSpec, BatchInfoSpec, LayerTablesSpec),
    config=TransferConfig,
    selectors=tuple(f"kernel={kernel}" for kernel in KERNELS),
    resolve=TransferConfig.specs,
    support={"transfers": TRANSFER_RANGES},
)
