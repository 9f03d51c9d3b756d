"""Tiles: what the launches of a plan rely on."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from jitattn.config import PlannerConfig
from jitattn.spec import DecodeSpec, Loader, PrefillSpec
from jitattn.support import ARCHITECTURES, HEAD_DIMS, resolve
from jitattn.tiling import tile_for


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_both_loaders_of_a_configuration_have_one_tile(arch: str) -> None:
    """A plan is made for one of them, and its parameters serve the other."""
    for head_dim, head_dim_vo, cap, mask in itertools.product(
        HEAD_DIMS, HEAD_DIMS, (0.0, 30.0), (False, True)
    ):
        config = PlannerConfig(
            head_dim=head_dim, head_dim_vo=head_dim_vo, logits_soft_cap=cap, use_custom_mask=mask
        )
        for spec in resolve(config, arch):
            if isinstance(spec, DecodeSpec | PrefillSpec):
                twin = tile_for(replace(spec, loader=Loader.PLAIN), arch)
                # Boxes leave no padding between rows.
                twin = twin._replace(smem_bytes=tile_for(spec, arch).smem_bytes)
                assert tile_for(spec, arch) == twin, spec.symbol
