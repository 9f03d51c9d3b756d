"""Random examples for hypothesis: batch x layout x strides x features over a fixed list of kernels.

Planners are drawn from `VARIANTS`, a few for each kernel of `cases.py`, so that a carried bundle
holds every kernel and equal planners are made once; everything else is drawn freely.
`examples` has one query token a request, tests/support/mixed_strategies.py any number.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.support.cases import (
    BLOCK_KERNELS,
    BYTE_KERNELS,
    CACHES_SEPARATE,
    CACHES_SHARED,
    GROUPS,
    KERNELS,
    SCALES,
    Case,
    Kernel,
)
from tests.support.harness import attend, check, check_addresses, expected, planner_for
from tests.support.inputs import (
    ROW_VIEWS,
    Inputs,
    address_probe,
    first_visible,
    make_inputs,
    random_tokens,
    uniform_probe,
)

VARIANTS_PER_KERNEL = 4
NUM_SHARDS = 20
NUM_EXAMPLES = int(os.environ.get("JITATTN_TEST_EXAMPLES", "3000"))
"""Of a test on a GPU; the environment may ask for fewer, or more."""


@dataclass(frozen=True)
class Example:
    """A case and the probe of its tokens: "random", "uniform" or "address" (`inputs.py`)."""

    case: Case
    probe: str


def variant(kernel: Kernel, rng: random.Random) -> Case:
    """Planner arguments for a kernel of the list."""
    group_size = rng.choice(GROUPS[kernel.band])
    return kernel.case(
        logits_soft_cap=rng.choice((0.5, 5.0, 30.0)) if kernel.soft_cap else 0.0,
        group_size=group_size,
        num_kv_heads=rng.choice((1, 1, 2, 3)) if group_size < 13 else 1,
        kv_layout=rng.choice(("NHD", "HND") if kernel.page_table != "ragged" else ("NHD",)),
        window_left=rng.choice((-1, -1, -1, 0, 1, 16, 100, 1000)),
        causal=rng.random() < 0.8,
        sm_scale=rng.choice((None, None, 0.05, 0.4)),
        sinks=rng.choice((None, None, "float32", "bfloat16", "float16-column", "float64")),
        batch_invariant=rng.random() < 0.4,
        mask="bool" if kernel.mask else None,
        scales=rng.choice(SCALES) if kernel.kv_dtype else None,
    )


def _variants() -> tuple[Case, ...]:
    rng = random.Random(80)
    kernels = (*KERNELS, *BYTE_KERNELS, *BLOCK_KERNELS)
    return tuple(variant(kernel, rng) for kernel in kernels for _ in range(VARIANTS_PER_KERNEL))


VARIANTS = _variants()


def lengths(longest: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Batches: padding, borders of pages, tiles and splits, and anything between."""
    edges = [n for n in (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 256, 257, 513) if n <= longest]
    one = st.one_of(
        st.sampled_from(edges),
        st.integers(0, min(300, longest)),
        st.integers(1, longest),
        st.sampled_from([0, -1, -(2**31)]),
    )
    return st.lists(one, min_size=1, max_size=9).map(tuple)


@st.composite
def examples(draw: st.DrawFn, longest: int = 3000) -> Example:
    """An example of a kernel on the list."""
    case = draw(st.sampled_from(VARIANTS))
    return placed(draw, replace(case, lengths=draw(lengths(longest))))


def placed(draw: st.DrawFn, case: Case) -> Example:
    """An example of the case: how it lies in memory, how it is called, and what it probes."""
    caches = CACHES_SEPARATE if case.page_table == "separate" else CACHES_SHARED
    case = replace(
        case,
        cache=draw(st.sampled_from([c for c in caches if c != "size_1" or case.num_kv_heads == 1])),
        q_view=draw(st.sampled_from([view for view in ROW_VIEWS if view != "heads_outside"])),
        out_view=draw(st.sampled_from([view for view in ROW_VIEWS if view != "qkv"])),
        rows=draw(st.sampled_from([None, "int32", "int64"])) if case.has_rows else None,
        lengths_dtype=draw(st.sampled_from(["int32", "int64"])),
        call=draw(st.sampled_from(["buffers", "returned"])),
        seed=draw(st.integers(0, 2**16)),
    )
    probes = ["random", "random", "uniform"]
    plain = case.logits_soft_cap == 0.0 and case.mask is case.variant is None
    if plain and min(case.lengths) > 0:
        probes.append("address")
    return Example(case, draw(st.sampled_from(probes)))


def inputs_of(example: Example, device: str) -> tuple[Inputs, list[int] | None]:
    """Inputs, and the targets of an address probe: keys that each request's last row sees."""
    case = example.case
    if example.probe == "address":
        rng = random.Random(case.seed)
        first = first_visible(case, torch.device("cpu")).tolist()
        last = [length - 1 for length in case.lengths]
        targets = [rng.randint(min(f, n), n) for f, n in zip(first, last, strict=True)]
        return make_inputs(case, device, address_probe(case, device, targets)), targets
    tokens = (uniform_probe if example.probe == "uniform" else random_tokens)(case, device)
    return make_inputs(case, device, tokens), None


def run_example(example: Example, device: str, reached: Counter[str] | None = None) -> None:
    """Compare an example with the reference, and bit for bit where a probe says what is right."""
    inputs, targets = inputs_of(example, device)
    case = example.case
    planner = planner_for(case, device)
    out, lse = attend(inputs, planner)
    check(case, out, lse, expected(inputs))
    if targets is not None:
        check_addresses(inputs, out, targets)
    kernels = planner.bind(inputs.given).kernels
    if reached is not None and kernels is not None:
        kernel = kernels.decode if case.q_lens is None else kernels.prefill
        reached[kernel.load().symbol] += 1


@dataclass
class Shards:
    """Examples in shards, each drawn from its number as the seed, and the kernels they reached."""

    examples: st.SearchStrategy[Example]
    device: str
    num_examples: int = NUM_EXAMPLES
    num_run: int = 0
    reached: Counter[str] = field(default_factory=Counter)

    def run(self, number: int) -> None:
        """Run one of `NUM_SHARDS`."""
        before, start = self.num_run, time.monotonic()

        @seed(number)
        @settings(
            max_examples=-(-self.num_examples // NUM_SHARDS),
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=False,
        )
        @given(self.examples)
        def shard(example: Example) -> None:
            self.num_run += 1
            run_example(example, self.device, self.reached)

        shard()
        count, seconds = self.num_run - before, time.monotonic() - start
        sys.stdout.write(f"seed {number}: {count} examples in {seconds:.1f} s\n")

    def check_reached(self, num_kernels: int) -> None:
        """What the shards that ran before in this process reached together."""
        sys.stdout.write(f"{self.num_run} examples over {len(self.reached)} kernels\n")
        if self.num_run < 3000:
            pytest.skip(f"{self.num_run} examples are too few to tell")
        assert len(self.reached) >= num_kernels
