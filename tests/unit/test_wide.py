"""The decode kernel of a wider row tile: which plans have it, when it is loaded, and its maps."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import jitattn
from jitattn import attention_kernels, cuda_backend, support, tensor_maps
from jitattn.config import PlannerConfig
from jitattn.cuda_backend import KernelSet
from jitattn.cuda_plan import CudaPlan
from jitattn.spec import DecodeSpec, KernelSpec, Loader
from tests.unit import fake_cuda
from tests.unit.fake_cuda import FakeCuda
from tests.unit.test_tensor_maps import Map, maps_of

B, HKV = 3, 2
LENS = torch.tensor([5, 9, 0], dtype=torch.int32)
OFFSETS = torch.tensor([0, 3, 4, 6], dtype=torch.int32)
TABLE = jitattn.BlockTable(torch.zeros(B, 5, dtype=torch.int32))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return fake_cuda.install(monkeypatch)


def config_of(**arguments: object) -> PlannerConfig:
    return PlannerConfig.from_arguments(arguments)


def planner_of(
    cuda: FakeCuda, group_size: int = 4, **arguments: object
) -> jitattn.AttentionPlanner:
    return cuda.planner(
        **{"num_qo_heads": HKV * group_size, "num_kv_heads": HKV, "head_dim": 128} | arguments
    )


def cache(page_size: int = 16, head_dim: int = 128, *, room: int = 0) -> Tensor:
    """A pool whose rows are ``room`` elements apart."""
    shape = (6, 2, page_size, HKV, head_dim + room)
    return torch.zeros(shape, dtype=torch.bfloat16)[..., :head_dim]


def queries(planner: jitattn.AttentionPlanner) -> Tensor:
    config = planner.config
    return torch.zeros(6, config.num_qo_heads, config.head_dim, dtype=torch.bfloat16)


def plan_of(planner: jitattn.AttentionPlanner, max_q_len: int) -> jitattn.Plan:
    return planner.plan(TABLE, LENS, OFFSETS, max_q_len=max_q_len)


def backend_of(plan: jitattn.Plan) -> CudaPlan:
    assert isinstance(plan._backend, CudaPlan)
    return plan._backend


def roles_of(plan: jitattn.Plan) -> list[str]:
    return [part.role for part in backend_of(plan)._parts]


# --- what there is --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "group_size", "row_tiles"),
    [
        ({"head_dim": 128}, 4, [8, 16]),
        ({"head_dim": 128}, 8, [8, 16]),
        ({"head_dim": 128}, 9, [16]),
        ({"head_dim": 64}, 4, [8, 32]),
        ({"head_dim": 64}, 16, [16, 32]),
        ({"head_dim": 64}, 17, [32]),
        ({"head_dim": 64, "head_dim_vo": 128}, 4, [8, 16]),
        ({"head_dim": 256}, 4, [8]),
        ({"head_dim": 128, "batch_invariant": True}, 4, [8]),
    ],
)
def test_which_kernels_a_configuration_has(
    arguments: dict[str, object], group_size: int, row_tiles: list[int]
) -> None:
    config = config_of(num_qo_heads=2 * group_size, num_kv_heads=2, **arguments)
    specs = [spec for spec in support.resolve(config, "sm_90a") if isinstance(spec, DecodeSpec)]
    assert [spec.row_tile for spec in specs] == [rows for rows in row_tiles for _ in "fp"]
    assert [spec.loader for spec in specs] == [Loader.TENSOR, Loader.PLAIN] * len(row_tiles)
    checked = support.check_config(num_qo_heads=2 * group_size, num_kv_heads=2, **arguments)
    assert checked.kernel == specs[0].symbol


@pytest.mark.parametrize(
    ("arguments", "roles"),
    [
        ({}, {1: "d", 2: "d", 3: "w", 4: "w", 5: "dp", 100: "dp"}),
        ({"group_size": 8}, {1: "d", 2: "w", 3: "dp"}),
        ({"group_size": 5}, {1: "d", 2: "w", 3: "w", 4: "dp"}),
        ({"group_size": 16}, {1: "d", 2: "dp"}),
        ({"group_size": 71}, {1: "d", 2: "dp"}),
        ({"head_dim": 64}, {2: "d", 3: "w", 8: "w", 9: "dp"}),
        ({"head_dim": 64, "group_size": 16}, {1: "d", 2: "w", 3: "dp"}),
        ({"head_dim": 256}, {2: "d", 3: "dp"}),
        ({"batch_invariant": True}, {2: "d", 3: "dp", 4: "dp", 5: "dp"}),
    ],
)
def test_which_kernels_a_plan_has(
    cuda: FakeCuda, arguments: dict[str, object], roles: dict[int, str]
) -> None:
    planner = planner_of(cuda, **arguments)  # type: ignore[arg-type]
    for max_q_len, wanted in roles.items():
        plan = plan_of(planner, max_q_len)
        assert "".join(role[0] for role in roles_of(plan)) == wanted
        assert len(cuda.launches) == len(wanted), "a schedule for each"
        del cuda.launches[:]


@pytest.mark.parametrize("early_kv", [False, True])
@pytest.mark.parametrize("num_sms", [None, 5])
def test_what_its_launches_are_given(cuda: FakeCuda, num_sms: int | None, early_kv: bool) -> None:
    planner = planner_of(cuda, early_kv=early_kv, num_sms=num_sms)
    plan = plan_of(planner, 4)
    kv = planner.bind(cache())
    plan.run(queries(planner), kv)
    schedule, launch = cuda.launches
    assert launch.symbol.startswith("jitattn_decode_r16_d128")
    wanted = {"decode_rows": 16, "prefill_rows": 0, "max_q_len": 4, "group_size": 4}
    assert {name: getattr(schedule.params, name) for name in wanted} == wanted
    attention = launch.params.attention
    assert attention.early_kv == early_kv
    assert (attention.num_row_blocks.value, attention.num_head_blocks.value) == (1, HKV)
    (part,) = backend_of(plan)._parts
    partials, counters = part.buffers
    slots = schedule.params.round_slots * schedule.params.max_rounds
    rows = slots * 2 * HKV * 16
    assert partials.numel() >= rows * (128 + 2)
    assert counters.numel() >= 1 + slots * HKV


def test_idle_plans_are_those_of_their_kernels(cuda: FakeCuda) -> None:
    """Plans of one room, of which each has other kernels."""
    planner = planner_of(cuda)
    kv, q = planner.bind(cache()), queries(planner)
    seen: dict[int, set[int]] = {}
    for max_q_len in (2, 4, 40, 4, 2, 40, 4, 2, 3, 1) * 2:
        plan = plan_of(planner, max_q_len)
        del cuda.launches[:]
        for _ in range(3):
            plan.run(q, kv)
        names = [launch.symbol.split("_d128")[0] for launch in cuda.launches]
        decode = ["jitattn_decode_r16" if max_q_len in (3, 4) else "jitattn_decode_r8"]
        assert names == (decode + ["jitattn_prefill"] * (max_q_len == 40)) * 3
        kind = min(max_q_len, 3) if max_q_len < 40 else 40
        seen.setdefault(2 if kind == 1 else kind, set()).add(id(plan._backend))
        del plan
    assert all(len(plans) <= 2 for plans in seen.values()), "they are used again"


# --- tensor maps ----------------------------------------------------------------------------------


def boxes(cuda: FakeCuda) -> list[Map]:
    return list(maps_of(cuda.last()))


@pytest.mark.parametrize(
    ("page_size", "head_dim", "narrow", "wide"),
    [(16, 128, 16, 16), (64, 128, 16, 16), (16, 64, 16, 16), (32, 64, 32, 16), (96, 64, 32, 16)],
)
def test_boxes_are_those_of_the_tile(
    cuda: FakeCuda, page_size: int, head_dim: int, narrow: int, wide: int
) -> None:
    """Layers in turn, through the repeated call of each plan, and memory that moves."""
    planner = planner_of(cuda, page_size=page_size, head_dim=head_dim)
    pools = [cache(page_size, head_dim) for _ in range(3)]
    layers = [planner.bind(pool) for pool in pools]
    plans = {narrow: plan_of(planner, 2)} if narrow == wide else {}
    plans |= {wide: plan_of(planner, 4)}
    if narrow != wide:
        plans[narrow] = plan_of(planner, 2)
    q = queries(planner)
    for turn, (box_tokens, plan) in itertools.product(range(4), plans.items()):
        for pool, kv in zip(pools, layers, strict=True):
            plan.run(q, kv)
            places = [pool.data_ptr(), pool[:, 1].data_ptr()]
            assert [found.pointer for found in boxes(cuda)] == places
            assert {found.box[1] for found in boxes(cuda)} == {box_tokens}
        if turn == 2:
            storage = pools[0].untyped_storage()
            storage.resize_(storage.nbytes() + 4096)


def test_one_encoding_serves_both_where_boxes_are_alike(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[object] = []

    def encode(*given: object, **named: object) -> bytes | None:
        encoded.append(given)
        return fake_cuda.encode_tensor_map(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(tensor_maps, "encode_tensor_map", encode)
    for page_size, head_dim, count in ((16, 128, 2), (64, 64, 4)):
        planner = planner_of(cuda, page_size=page_size, head_dim=head_dim)
        kv = planner.bind(cache(page_size, head_dim))
        for max_q_len in (2, 4):
            plan = plan_of(planner, max_q_len)
            for _ in range(3):
                plan.run(queries(planner), kv)
        assert len(encoded) == count
        encoded.clear()


def test_a_cache_that_is_not_aligned_has_the_plain_kernel(cuda: FakeCuda) -> None:
    planner = planner_of(cuda)
    plan = plan_of(planner, 4)
    for room, loader in ((0, "tensor"), (1, "plain"), (0, "tensor")):
        kv = planner.bind(cache(room=room))
        for _ in range(3):
            plan.run(queries(planner), kv)
            assert cuda.last().symbol.startswith("jitattn_decode_r16")
            assert cuda.last().symbol.endswith(f"_{loader}")


# --- when it is built and loaded ------------------------------------------------------------------


@pytest.fixture
def log(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was started and what was loaded, of decode kernels, in order."""
    events: list[str] = []

    def note(what: str, symbol: str) -> None:
        if symbol.startswith("jitattn_decode"):
            events.append(f"{what} {symbol.split('_')[2]} {symbol.rsplit('_', 1)[1]}")

    def start(
        specs: list[KernelSpec], arch: str, knobs: object, *, hint: str
    ) -> tuple[fake_cuda.FakePending, ...]:
        for spec in specs:
            note("start", spec.symbol)
        return tuple(fake_cuda.FakePending(spec) for spec in specs)

    def load(cubin: bytes, symbol: str, *rest: int) -> fake_cuda.FakeKernel:
        note("load", symbol)
        return fake_cuda.FakeKernel(symbol, *rest)

    monkeypatch.setattr(cuda_backend, "start", start)
    for module in (attention_kernels, cuda_backend):
        monkeypatch.setattr(module, "load_kernel", load)
    return events


def test_the_first_plan_that_needs_it_builds_it(cuda: FakeCuda, log: list[str]) -> None:
    planner = planner_of(cuda)
    kv = planner.bind(cache())
    for max_q_len in (1, 2, 40):
        plan_of(planner, max_q_len).run(queries(planner), kv)
    assert log == ["start r8 tensor", "load r8 tensor"]
    del log[:]
    plan = plan_of(planner, 4)
    assert log == ["start r16 tensor", "load r16 tensor"]
    del log[:]
    for _ in range(3):
        plan.run(queries(planner), kv)
        plan_of(planner, 3)
    assert log == []


def test_it_is_loaded_for_every_cache(cuda: FakeCuda, log: list[str]) -> None:
    """So that a captured run, of a cache bound before or after the plan, loads nothing."""
    planner = planner_of(cuda)
    planner.bind(cache(room=1))
    del log[:]
    plan_of(planner, 4)
    assert log[:2] == ["start r16 tensor", "start r16 plain"], "both before either is waited for"
    assert sorted(log[2:]) == ["load r16 plain", "load r16 tensor"]
    other = planner_of(cuda)
    plan_of(other, 4)
    del log[:]
    other.bind(cache(room=1))
    assert log == ["start r8 plain", "start r16 plain", "load r8 plain", "load r16 plain"]


def test_what_was_built_is_told(cuda: FakeCuda) -> None:
    planner = planner_of(cuda)
    kernels = planner._kernels
    assert isinstance(kernels, KernelSet)
    names = [info.name for info in kernels.infos()]
    plan_of(planner, 4)
    more = [info.name for info in kernels.infos()]
    assert more[: len(names)] == names
    assert [name.split("_d128")[0] for name in more[len(names) :]] == ["jitattn_decode_r16"]
