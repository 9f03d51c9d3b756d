"""Support rules: the supported range of an argument, and the reason for a refusal. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

from jitattn.spec.config import MAX_PAGE_SIZE, MLAConfig, PagedConfig, PlannerConfig
from jitattn.spec.layout import LISTS, Layout
from jitattn.spec.variant import READY

ConfigT = TypeVar("ConfigT")
PagedT = TypeVar("PagedT", bound=PagedConfig)
QuantisedT = TypeVar("QuantisedT", bound=PlannerConfig | MLAConfig)

_FP8_PRODUCTS = ("exact", "fast")
VARIANT_RANGE = f"None, any AttentionVariant, {', '.join(READY)}"


class Rule(NamedTuple, Generic[ConfigT]):
    """One row of a support table: the range of an argument, and the reason for a refusal."""

    argument: str
    allowed: str  # the range, as the support table prints it
    holds: Callable[[ConfigT], bool]
    reason: Callable[[ConfigT], str]


def rule(
    argument: str, allowed: str, holds: Callable[[ConfigT], bool], wanted: str
) -> Rule[ConfigT]:
    """Return a rule whose reason is the argument, its value and ``wanted``."""

    def reason(config: ConfigT) -> str:
        return f"{argument}={getattr(config, argument)} {wanted}"

    return Rule(argument, allowed, holds, reason)


def one_of(argument: str, choices: tuple[str, ...], why: str = "") -> Rule[ConfigT]:
    """Return the rule for an argument with these choices."""
    return rule(
        argument,
        ", ".join(choices),
        lambda config: getattr(config, argument) in choices,
        f"is not one of {', '.join(choices)}{why}",
    )


def not_with_lists(argument: str, *, default: object, choices: str) -> Rule[PagedT]:
    """Return the rule for an argument that lists of tokens or pages have no use for."""
    lists = " or ".join(LISTS)
    return rule(
        argument,
        f"{choices}; {default} with page_table={lists}",
        lambda config: config.page_table not in LISTS or getattr(config, argument) == default,
        f"does not fit page_table={lists}: leave it {default}",
    )


def page_size_rule() -> Rule[PagedT]:
    """Return the rule for page sizes."""
    return rule(
        "page_size",
        "1 and up, any integer; None with page_table=ragged",
        _page_size_fits,
        "does not fit page_table: ragged K/V have page_size=None, pages 1 to 2**20 tokens",
    )


def _page_size_fits(config: PagedConfig) -> bool:
    if config.page_table == Layout.RAGGED:
        return config.page_size is None
    return config.page_size is not None and 1 <= config.page_size <= MAX_PAGE_SIZE


def broken(rules: Iterable[Rule[ConfigT]], config: ConfigT) -> list[str]:
    """Return the reasons of violated rules."""
    return [rule.reason(config) for rule in rules if not rule.holds(config)]


def fp8_products_rule(kv_dtypes: tuple[str, ...], difference: str) -> Rule[QuantisedT]:
    """Return the rule for products with caches of 8 bits.

    Args:
        kv_dtypes: of these caches.
        difference: which of them "fast" is another kernel for.
    """
    fitting = " or ".join(kv_dtypes)

    def reason(config: QuantisedT) -> str:
        given = f"fp8_products={config.fp8_products}"
        if config.fp8_products not in _FP8_PRODUCTS:
            return f"{given} is not one of {', '.join(_FP8_PRODUCTS)}"
        return f"{given} does not fit: it is for caches of 8 bits, {fitting}"

    return Rule(
        "fp8_products",
        f"exact, fast ({difference}); exact unless kv_dtype is {fitting}",
        lambda c: c.fp8_products in (_FP8_PRODUCTS if c.kv_dtype in kv_dtypes else ("exact",)),
        reason,
    )
