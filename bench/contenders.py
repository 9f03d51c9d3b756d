"""What every contender offers, jitattn and rivals alike, and jitattn as a contender."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

import jitattn
from bench import caches
from bench.timing import Call
from bench.workloads import Batch, Case, PlannerArguments


class SkipError(Exception):
    """A contender is not here, or doesn't do this case; the message says why."""


@dataclass(frozen=True)
class Prepared:
    """One contender set up on one batch: planned, compiled, ready to run.

    Attributes:
        runs: a call per copy of the batch; call i writes ``outs[i]``.
        outs: [num_copies, batch_size * q_len, num_qo_heads, head_dim], q_dtype.
        plan: the work of a step that the contender does on the device; a graph holds it once.
            None: it plans on the host or not at all, and no figure holds that.
        facts: what its records say besides.
        plan_is_a_call: whether ``plan`` does that work; else it makes the next of ``runs`` do it.
    """

    runs: tuple[Call, ...]
    outs: Tensor
    plan: Call | None = None
    facts: Mapping[str, object] = field(default_factory=dict)
    plan_is_a_call: bool = True


class Contender(Protocol):
    """One way to compute a case."""

    name: str

    def version(self) -> str:
        """Return its version, or raise SkipError with the reason why it can't run here."""

    def build_key(self, case: Case) -> Hashable | None:
        """Return what decides which module a case makes it compile; None: nothing worth noting."""

    def prepare(self, batch: Batch) -> Prepared:
        """Compile, plan and bind for ``batch``, or raise SkipError with the reason why it can't."""


class Ours:
    """One way to use jitattn; kernels take a second or two to compile."""

    def __init__(self, way_name: str) -> None:
        """Name it."""
        self.name = f"jitattn-{way_name}"

    def version(self) -> str:
        """Return the package's version."""
        return jitattn.__version__

    def build_key(self, case: object) -> Hashable | None:
        """Return None."""
        return None


@dataclass(frozen=True)
class Variant:
    """One way to use jitattn.

    Attributes:
        page_table: the planner's argument.
        cache: makes the cache of a copy in some memory layout.
        batch_invariant: the planner's argument.
        early_kv: the planner's argument.
        keeps_bits: whether outputs should be those of the shared table, bit for bit.
    """

    page_table: str = "shared"
    cache: Callable[[Batch, int], caches.Cache] = caches.whole
    batch_invariant: bool = False
    early_kv: bool = False
    keeps_bits: bool = True

    def planner_arguments(self, case: Case) -> PlannerArguments:
        """Return the planner's arguments for ``case``."""
        return case.planner_arguments(
            self.page_table, batch_invariant=self.batch_invariant, early_kv=self.early_kv
        )


VARIANTS = {
    "shared": Variant(),
    "separate": Variant(page_table="separate", cache=caches.separate),
    "cross-layer": Variant(cache=caches.cross_layer),
    "packed": Variant(cache=caches.packed),
    "unaligned": Variant(cache=caches.unaligned),
    "invariant": Variant(batch_invariant=True, keeps_bits=False),
    "early-kv": Variant(early_kv=True),
}


@dataclass(frozen=True)
class Setup:
    """jitattn on one batch: a planner, every copy bound, one plan."""

    planner: jitattn.AttentionPlanner
    caches: tuple[jitattn.types.BoundCache, ...]
    pages: jitattn.BlockTable
    plan: jitattn.types.Plan


def set_up(batch: Batch, variant_name: str) -> Setup:
    """Make all that jitattn needs; the pages are the same for every variant.

    Args:
        batch: the tensors.
        variant_name: of `VARIANTS`.

    Raises:
        SkipError: the case is not supported, with the reasons.
    """
    variant, case = VARIANTS[variant_name], batch.case
    arguments = variant.planner_arguments(case)
    try:
        planner = jitattn.AttentionPlanner(**arguments, device=batch.q.device)
    except jitattn.ConfigError as error:
        raise SkipError(str(error)) from error
    bound = tuple(planner.bind(variant.cache(batch, copy)) for copy in range(batch.num_copies))
    separate = variant.page_table == "separate"
    pages = jitattn.BlockTable(batch.separate_table() if separate else batch.block_table)
    if case.q_len == 1:
        plan = planner.plan(pages, batch.seq_lens)
    else:
        plan = planner.plan(pages, batch.seq_lens, batch.qo_indptr, max_q_len=case.q_len)
    jitattn.build_info(planner)  # waits for what would go on compiling while something is timed
    return Setup(planner, bound, pages, plan)


class JitAttn(Ours):
    """One variant of jitattn."""

    def __init__(self, variant_name: str) -> None:
        """Choose one of `VARIANTS`."""
        super().__init__(variant_name)
        self.variant_name = variant_name

    def prepare(self, batch: Batch) -> Prepared:
        """Make a planner, bind every copy and plan."""
        setup = set_up(batch, self.variant_name)
        outs = torch.empty_like(batch.q)
        runs = tuple(
            functools.partial(setup.plan.run, q, cache, out=out, sinks=batch.sinks)
            for q, cache, out in zip(batch.q, setup.caches, outs, strict=True)
        )
        kernels = [dataclasses.asdict(kernel) for kernel in jitattn.build_info(setup.planner)]
        facts = {"planned": "on the device", "kernels": kernels}
        return Prepared(runs=runs, outs=outs, plan=setup.plan.refresh, facts=facts)


def all_variants() -> tuple[JitAttn, ...]:
    """Return every variant as a contender."""
    return tuple(JitAttn(name) for name in VARIANTS)
