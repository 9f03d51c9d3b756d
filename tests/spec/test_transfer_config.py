"""What ``--config kernel=...`` selects of the kernels that move tokens and pages."""

from __future__ import annotations

import pytest

from jitattn.base.errors import ConfigError
from jitattn.kernels.pages.spec import (
    BatchInfoSpec,
    GatherSpec,
    TransferConfig,
    config_of,
    every_config,
)
from jitattn.spec.arch import ARCHITECTURES
from jitattn.spec.dtype import DType


def test_texts_are_read_back() -> None:
    assert len(set(every_config())) == len(every_config()) == 34
    for config in every_config():
        assert TransferConfig.parse(config.arguments_text()) == config
        for arch in ARCHITECTURES:
            (spec,) = config.specs(arch)
            assert config_of(spec) == config


def test_spaces_and_defaults() -> None:
    config = TransferConfig.parse(" kernel = gather , kv_dtype=int8 ")
    assert config.specs("sm_80") == (GatherSpec(kv_dtype=DType.INT8, out_dtype=DType.BFLOAT16),)
    assert TransferConfig.parse("kernel=batch_info").specs("sm_90a") == (BatchInfoSpec(),)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("kernel=scatter", "kernel=scatter is not one of preprocess, gather, copy_pages"),
        ("kernel=gather", "kv_dtype=None is not one of"),
        ("kernel=gather,kv_dtype=float32", "kv_dtype=float32"),
        ("kernel=gather,kv_dtype=int8,out_dtype=float64", "out_dtype=float64"),
        ("kernel=gather,kv_dtype=nvfp4,out_dtype=nvfp4", "out_dtype=nvfp4"),
        ("kernel=gather,kv_dtype=int8,out_dtype=float8_e5m2", "out_dtype=float8_e5m2"),
        ("kernel=copy_pages,kv_dtype=int8", "kv_dtype is given, which kernel=copy_pages has not"),
        ("kernel=gather,kernel=gather", "once"),
        ("kernel=gather,head_dim=128", "'head_dim=128' is not one of"),
        ("kernel", "'kernel' is not one of"),
    ],
)
def test_refused(text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        TransferConfig.parse(text)


def test_an_unknown_architecture() -> None:
    with pytest.raises(ConfigError, match="sm_70"):
        TransferConfig(kernel="copy_pages").specs("sm_70")
