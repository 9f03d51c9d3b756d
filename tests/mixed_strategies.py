"""Random batches of mixed query lengths for hypothesis, over a fixed list of configurations.

A planner is made once for each of `VARIANTS`; query and KV lengths, padding, caches, strides,
masks and what the tokens probe are drawn freely. Most batches are small: the reference takes the
requests one by one, on the device.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.cases import (
    CACHES_SEPARATE,
    CACHES_SHARED,
    GROUPS,
    KERNELS,
    MASKED_KERNELS,
    Case,
    Kernel,
)
from tests.harness import attend, check, expected, planner_for, target_rows
from tests.inputs import (
    ROW_VIEWS,
    Inputs,
    address_probe,
    make_inputs,
    random_tokens,
    uniform_probe,
)
from tests.queries import Rows
from tests.strategies import Example


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
        num_kv_heads=rng.choice((1, 1, 2, 3)) if group_size < 13 else 1,
        kv_layout=rng.choice(("NHD", "HND") if kernel.page_table != "ragged" else ("NHD",)),
        window_left=rng.choice((-1, -1, -1, 0, 1, 16, 100, 1000)),
        causal=rng.random() < 0.75,
        sm_scale=rng.choice((None, None, 0.05, 0.4)),
        sinks=rng.choice((None, None, "float32", "bfloat16", "float16-column", "float64")),
        batch_invariant=rng.random() < 0.3,
        mask="bool" if kernel.mask else None,
    )


def _variants() -> tuple[Case, ...]:
    """Every second kernel, the widest, and all with masks: 55 or so."""
    rng = random.Random(5)
    kernels = [kernel for kernel in KERNELS[::2] if kernel.head_dim < 512]
    kernels += [kernel for kernel in KERNELS if kernel.head_dim == 512]
    return tuple(_variant(kernel, rng) for kernel in (*kernels, *MASKED_KERNELS))


VARIANTS = _variants()

_EDGES = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129)
_Q_LENS = st.one_of(
    st.just(1),
    st.integers(0, 16),
    st.sampled_from(_EDGES),
    st.integers(0, 200),
)
_KV_LENS = st.one_of(
    st.sampled_from((*_EDGES, 256, 257, 513)),
    st.integers(0, 300),
    st.integers(1, 1500),
    st.sampled_from([0, -1, -(2**31)]),
)
_PAIRS = st.one_of(
    st.tuples(_Q_LENS, _KV_LENS),
    st.tuples(_Q_LENS, st.integers(0, 100)).map(lambda pair: (pair[0], pair[0] + pair[1])),
    st.tuples(st.integers(1, 20), st.integers(1000, 5000)),  # few over many: split
    st.tuples(st.integers(200, 900), st.integers(0, 900)),
)


@st.composite
def examples(draw: st.DrawFn) -> Example:
    """A mixed batch of a configuration on the list."""
    case = draw(st.sampled_from(VARIANTS))
    caches = CACHES_SEPARATE if case.page_table == "separate" else CACHES_SHARED
    q_lens, lengths = zip(*draw(st.lists(_PAIRS, min_size=1, max_size=7)), strict=True)
    case = replace(
        case,
        q_lens=q_lens,
        lengths=lengths,
        spare_rows=draw(st.sampled_from([0, 0, 1, 30])),
        mask=draw(st.sampled_from(["bool", "packed", "ragged"])) if case.mask else None,
        mask_width=draw(st.sampled_from([8, 64, 136, 1024])),
        cache=draw(st.sampled_from([c for c in caches if c != "size_1" or case.num_kv_heads == 1])),
        q_view=draw(st.sampled_from([view for view in ROW_VIEWS if view != "heads_outside"])),
        out_view=draw(st.sampled_from([view for view in ROW_VIEWS if view != "qkv"])),
        rows=draw(st.sampled_from([None, "int32", "int64"])) if case.has_rows else None,
        lengths_dtype=draw(st.sampled_from(["int32", "int64"])),
        call=draw(st.sampled_from(["buffers", "returned"])),
        seed=draw(st.integers(0, 2**16)),
    )
    probes = ["random", "random", "random", "uniform"]
    if case.logits_soft_cap == 0.0 and case.mask is None and min(case.lengths) > 0:
        probes.append("address")
    return Example(case, draw(st.sampled_from(probes)))


def inputs_of(example: Example, device: str) -> tuple[Inputs, list[int] | None]:
    """Inputs, and the targets of an address probe: keys that each request's last row sees."""
    case = example.case
    if example.probe == "address":
        rng = random.Random(case.seed)
        targets = []
        for q_len, kv_len in zip(case.queries, case.lengths, strict=True):
            first = kv_len - q_len - case.window_left if case.window_left >= 0 else 0
            targets.append(rng.randint(min(max(0, first), kv_len - 1), kv_len - 1))
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
        rows = Rows.of(case, inputs.device)
        target = torch.tensor(targets, device=inputs.device)[rows.request]
        sees = (target >= rows.first) & (target < rows.last)
        want = target_rows(inputs, targets)[rows.request]
        owned = out[: len(want)]
        assert torch.equal(owned[sees], want[sees]), "a target's address is wrong"
    kernels = planner.bind(inputs.cache).kernels
    if reached is not None and kernels is not None:
        reached[kernels.prefill.load().symbol] += 1


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
