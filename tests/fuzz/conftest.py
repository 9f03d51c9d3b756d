"""What every test of the fuzzer needs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True, scope="module")
def one_process() -> Iterator[None]:
    """A group of torch.distributed that is this process, for `jitattn.parallel`."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
