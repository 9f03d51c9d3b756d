"""The kernel families, a line each, and what is supported of all of them. Torch-free.

The one table behind validation, precompiling, tests and docs.
"""

from __future__ import annotations

from collections.abc import Mapping

from jitattn.base.errors import ConfigError
from jitattn.base.record import Value
from jitattn.kernels import attention, common, merge, mla, pages, preprocess, select
from jitattn.kernels.merge.spec import MergeSpec
from jitattn.kernels.pages.spec import TransferConfig, cache_specs
from jitattn.kernels.preprocess.spec import PreprocessConfig
from jitattn.kernels.select.spec import SelectConfig
from jitattn.spec.arch import ARCHS, check_arch
from jitattn.spec.config import MLAConfig, PlannerConfig
from jitattn.spec.dtype import DType
from jitattn.spec.family import KernelSpec
from jitattn.spec.layout import ListLayout

AnyConfig = PlannerConfig | MLAConfig | PreprocessConfig | TransferConfig | SelectConfig

FAMILIES = (
    attention.FAMILY,
    common.FAMILY,
    mla.FAMILY,
    preprocess.FAMILY,
    merge.FAMILY,
    pages.FAMILY,
    select.FAMILY,
)


class Support(Value):
    """The answer to "is this supported?": the kernel that serves it, or every reason why not."""

    supported: bool
    kernel: str | None
    reasons: list[str]


class Config(Value):
    """A range of supported planner arguments, the kernel that serves it, and where it was run."""

    kernel: str
    tested_on: str
    fields: dict[str, str]


def check_config(arch: str = "sm_90a", **planner_arguments: object) -> Support:
    """Say whether a planner with these arguments is supported on ``arch``, and why not.

    Args:
        arch: one of ``ARCHITECTURES``.
        **planner_arguments: what would be given to ``AttentionPlanner``, or with ``planner="mla"``
            to ``MLAPlanner``; dtypes or their names.
    """
    try:
        specs = specs_of(config_of(planner_arguments), arch)
    except ConfigError as error:
        return Support(supported=False, kernel=None, reasons=list(error.reasons))
    return Support(supported=True, kernel=specs[0].symbol, reasons=[])


def supported_configs(arch: str = "sm_90a") -> list[Config]:
    """Return the supported ranges on ``arch``, one row a kernel family.

    Raises:
        ConfigError: ``arch`` is unknown.
    """
    check_arch(arch)
    return [
        Config(kernel=kernel, tested_on=ARCHS[arch].tested_on[family.name], fields=dict(ranges))
        for family in FAMILIES
        for kernel, ranges in family.support.items()
    ]


def parse_config(text: str) -> AnyConfig:
    """Return a configuration as the command line takes it.

    Raises:
        ConfigError: an argument is unknown or has a value that is not supported.
    """
    first = text.partition(",")[0].replace(" ", "")
    name, _, value = first.partition("=")
    if name == "planner":
        _check_planner(value)
    selector = first if name in ("planner", "kernel") else ""
    for family in FAMILIES:
        if selector in family.selectors and family.config is not None:
            config: AnyConfig = family.config.parse(text)
            return config
    known = [s.partition("=")[2] for f in FAMILIES for s in f.selectors if s.startswith("kernel=")]
    raise ConfigError([f"kernel={value} is not one of {', '.join(known)}"])


def config_of(arguments: Mapping[str, object]) -> PlannerConfig | MLAConfig:
    """Return the configuration of a planner's arguments and ``planner``, which says of which one.

    Raises:
        ConfigError: an argument is unknown or of a wrong type.
    """
    if "planner" not in arguments:
        return PlannerConfig.from_arguments(arguments)
    _check_planner(arguments["planner"])
    return MLAConfig.from_arguments({k: v for k, v in arguments.items() if k != "planner"})


def _check_planner(name: object) -> None:
    if name != MLAConfig.family:
        raise ConfigError([f"planner={name} is not {MLAConfig.family}; leave it out for attention"])


def specs_of_text(text: str, arch: str) -> tuple[KernelSpec, ...]:
    """Return the kernels of a configuration as the command line takes it.

    Raises:
        ConfigError: it has none.
    """
    return specs_of(parse_config(text), arch)


def specs_of(config: AnyConfig, arch: str) -> tuple[KernelSpec, ...]:
    """Return every kernel that users of a configuration launch, the main one first.

    Raises:
        ConfigError: with every reason why there is none.
    """
    family = next(family for family in FAMILIES if family.config is type(config))
    assert family.resolve is not None
    specs = family.resolve(config, arch)
    if not isinstance(config, PlannerConfig | MLAConfig):
        return specs
    q_dtype, kv_dtype = DType(config.kernel_q_dtype), DType(config.kv_dtype)
    out_dtype = DType(config.kernel_out_dtype)
    if config.page_table == ListLayout.INDICES and out_dtype is not DType.FLOAT32:
        # Two lists are attended to in parts, which are exact.
        exact = family.resolve(config.exact(), arch)
        specs = tuple(dict.fromkeys((*specs, *exact)))
    specs = (*specs, MergeSpec(dtype=out_dtype))
    if isinstance(config, MLAConfig):
        return specs
    return (*specs, *cache_specs(kv_dtype, q_dtype, out_dtype))
