"""What a test on the CPU would launch on a card: the kernels of its planners, and of its tokens."""

from __future__ import annotations

import functools

import pytest
from torch import Tensor

from jitattn.kernels.common.planner_base import DtypedConfig, PlannerBase
from jitattn.kernels.preprocess import api
from jitattn.kernels.preprocess.check import TokenCall
from jitattn.kernels.preprocess.launch_params import spec_of
from jitattn.kernels.preprocess.spec import config_of
from jitattn.kernels.registry import specs_of
from jitattn.spec.family import KernelSpec
from jitattn.spec.layout import Loader
from tests.gpu.bundle import Config, configs_of

ARCH = "sm_90a"


@functools.cache
def _bundle() -> frozenset[KernelSpec]:
    return frozenset(spec for config in configs_of(ARCH) for spec in specs_of(config, ARCH))


class Asked:
    """Notes the configurations of planners that are made, and of tokens that are written.

    Copies of pages and tables need none: a bundle has all of their kernels.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.configs: list[Config] = []
        make, write = PlannerBase.__init__, api.preprocess_by_definition

        def noting_make(planner: PlannerBase, config: DtypedConfig, **others: object) -> None:
            make(planner, config, **others)
            self.configs.append(config)

        def noting_write(call: TokenCall) -> Tensor | None:
            pages = call.given.pages
            spec = spec_of(call, None if pages is None else pages.layout, Loader.VECTOR)
            self.configs.append(config_of(spec))
            return write(call)

        monkeypatch.setattr(PlannerBase, "__init__", noting_make)
        monkeypatch.setattr(api, "preprocess_by_definition", noting_write)

    def specs_beside_the_bundle(self) -> set[KernelSpec]:
        configs = dict.fromkeys(self.configs)
        return {spec for config in configs for spec in specs_of(config, ARCH)} - _bundle()
