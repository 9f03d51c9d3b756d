"""What every contender offers, jitattn and rivals alike, and jitattn as a contender."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

import jitattn
from bench.timing import Call
from bench.workloads import Batch, Case


class SkipError(Exception):
    """A contender is not here, or doesn't do this case; the message says why."""


@dataclass(frozen=True)
class Prepared:
    """One contender set up on one batch: planned, compiled, ready to run.

    Attributes:
        runs: a call per copy of the batch; call i writes ``outs[i]``.
        outs: [num_copies, batch_size, num_qo_heads, head_dim], q_dtype.
        plan: the work of a step that the contender does on the device; a graph holds it once.
            None: it plans on the host or not at all, and no figure holds that.
        facts: what its records say besides.
    """

    runs: tuple[Call, ...]
    outs: Tensor
    plan: Call | None = None
    facts: Mapping[str, object] = field(default_factory=dict)


class Contender(Protocol):
    """One way to compute a case."""

    name: str

    def version(self) -> str:
        """Return its version, or raise SkipError with the reason why it can't run here."""

    def build_key(self, case: Case) -> Hashable | None:
        """Return what decides which module a case makes it compile; None: nothing worth noting."""

    def prepare(self, batch: Batch) -> Prepared:
        """Compile, plan and bind for ``batch``, or raise SkipError with the reason why it can't."""


@dataclass(frozen=True)
class Setup:
    """jitattn on one batch: a planner, every copy bound, one plan."""

    planner: jitattn.AttentionPlanner
    caches: tuple[jitattn.BoundCache, ...]
    pages: jitattn.BlockTable
    plan: jitattn.Plan


def set_up(batch: Batch, page_table: str) -> Setup:
    """Make all that jitattn needs; the pages are the same for both layouts.

    Args:
        batch: the tensors.
        page_table: "shared" or "separate".

    Raises:
        SkipError: the case is not supported, with the reasons.
    """
    arguments = batch.case.planner_arguments(page_table)
    try:
        planner = jitattn.AttentionPlanner(**arguments, device=batch.q.device)
    except jitattn.ConfigError as error:
        raise SkipError(str(error)) from error
    jitattn.build_info(planner)  # waits for what would go on compiling while something is timed
    separate = page_table == "separate"
    caches = []
    for copy in range(batch.num_copies):
        pool = batch.separate_pool(copy) if separate else batch.kv[copy]
        caches.append(planner.bind((pool, pool) if separate else pool))
    pages = jitattn.BlockTable(batch.separate_table() if separate else batch.block_table)
    return Setup(planner, tuple(caches), pages, planner.plan(pages, batch.seq_lens))


class JitAttn:
    """jitattn with a shared or a separate page table."""

    def __init__(self, page_table: str) -> None:
        """Choose "shared" or "separate"."""
        self.page_table = page_table
        self.name = f"jitattn-{page_table}"

    def version(self) -> str:
        """Return the package's version."""
        return jitattn.__version__

    def build_key(self, case: Case) -> Hashable | None:
        """Return None: it compiles in less than a second."""
        return None

    def prepare(self, batch: Batch) -> Prepared:
        """Make a planner, bind every copy and plan."""
        setup = set_up(batch, self.page_table)
        outs = torch.empty_like(batch.q)
        runs = tuple(
            functools.partial(setup.plan.run, q, cache, out=out)
            for q, cache, out in zip(batch.q, setup.caches, outs, strict=True)
        )
        kernels = [dataclasses.asdict(kernel) for kernel in jitattn.build_info(setup.planner)]
        facts = {"planned": "on the device", "kernels": kernels}
        return Prepared(runs=runs, outs=outs, plan=setup.plan.refresh, facts=facts)
