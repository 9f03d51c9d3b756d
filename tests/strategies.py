"""Random examples for hypothesis: batch x layout x strides x features over a fixed list of kernels.

Planners are drawn from `VARIANTS`, a few for each kernel of tests/cases.py, so that a carried
bundle holds every kernel and equal planners are made once; everything else is drawn freely.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import dataclass, replace

import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.cases import CACHES_SEPARATE, CACHES_SHARED, GROUPS, KERNELS, Case, Kernel
from tests.harness import attend, check, expected, planner_for, target_rows
from tests.inputs import (
    ROW_VIEWS,
    Inputs,
    address_probe,
    first_visible,
    make_inputs,
    random_tokens,
    uniform_probe,
)

VARIANTS_PER_KERNEL = 4
NUM_EXAMPLES = int(os.environ.get("JITATTN_TEST_EXAMPLES", "3000"))
"""Of the test on a GPU; the environment may ask for fewer, or more."""


@dataclass(frozen=True)
class Example:
    """A case, and what its tokens probe: "random", "uniform" or "address" (tests/inputs.py)."""

    case: Case
    probe: str


def _variant(kernel: Kernel, rng: random.Random) -> Case:
    group_size = rng.choice(GROUPS[kernel.band])
    return Case(
        head_dim=kernel.head_dim,
        head_dim_vo=kernel.head_dim_vo,
        page_size=kernel.page_size,
        dtype=kernel.dtype,
        out_dtype=kernel.out_dtype,
        page_table=kernel.page_table,
        logits_soft_cap=rng.choice((0.5, 5.0, 30.0)) if kernel.soft_cap else 0.0,
        group_size=group_size,
        num_kv_heads=rng.choice((1, 1, 2, 3)) if group_size < 20 else 1,
        kv_layout=rng.choice(("NHD", "HND") if kernel.page_table != "ragged" else ("NHD",)),
        window_left=rng.choice((-1, -1, -1, 0, 1, 16, 100, 1000)),
        causal=rng.random() < 0.8,
        sm_scale=rng.choice((None, None, 0.05, 0.4)),
        sinks=rng.choice((None, None, "float32", "bfloat16", "float16-column", "float64")),
        batch_invariant=rng.random() < 0.4,
    )


def _variants() -> tuple[Case, ...]:
    rng = random.Random(80)
    return tuple(_variant(kernel, rng) for kernel in KERNELS for _ in range(VARIANTS_PER_KERNEL))


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
    caches = CACHES_SEPARATE if case.page_table == "separate" else CACHES_SHARED
    case = replace(
        case,
        lengths=draw(lengths(longest)),
        cache=draw(st.sampled_from([c for c in caches if c != "size_1" or case.num_kv_heads == 1])),
        q_view=draw(st.sampled_from([view for view in ROW_VIEWS if view != "heads_outside"])),
        out_view=draw(st.sampled_from([view for view in ROW_VIEWS if view != "qkv"])),
        rows=draw(st.sampled_from([None, "int32", "int64"])) if case.has_rows else None,
        lengths_dtype=draw(st.sampled_from(["int32", "int64"])),
        call=draw(st.sampled_from(["buffers", "returned"])),
        seed=draw(st.integers(0, 2**16)),
    )
    probes = ["random", "random", "uniform"]
    if case.logits_soft_cap == 0.0 and min(case.lengths) > 0:
        probes.append("address")
    return Example(case, draw(st.sampled_from(probes)))


def inputs_of(example: Example, device: str) -> tuple[Inputs, list[int] | None]:
    """Inputs, and the targets of an address probe."""
    case = example.case
    if example.probe == "address":
        rng = random.Random(case.seed)
        first = first_visible(case, torch.device("cpu")).tolist()
        targets = [rng.randint(f, n - 1) for f, n in zip(first, case.lengths, strict=True)]
        return make_inputs(case, device, address_probe(case, device, targets)), targets
    tokens = (uniform_probe if example.probe == "uniform" else random_tokens)(case, device)
    return make_inputs(case, device, tokens), None


def run_example(example: Example, device: str, reached: Counter[str] | None = None) -> None:
    """Compare an example with the reference, and bit for bit where a probe says what is right."""
    inputs, targets = inputs_of(example, device)
    planner = planner_for(example.case, device)
    out, lse = attend(inputs, planner)
    check(example.case, out, lse, expected(inputs))
    if targets is not None:
        assert torch.equal(out, target_rows(inputs, targets)), "a target's address is wrong"
    kernels = planner.bind(inputs.cache).kernels
    if reached is not None and kernels is not None:
        reached[kernels.decode.load().symbol] += 1


def run_shard(number: int, num_examples: int, device: str, reached: Counter[str]) -> None:
    """Run ``num_examples`` examples drawn from the seed ``number``."""

    @seed(number)
    @settings(
        max_examples=num_examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(examples())
    def shard(example: Example) -> None:
        reached["examples"] += 1
        run_example(example, device, reached)

    shard()
