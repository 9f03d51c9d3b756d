"""The decode kernel of a wider row tile: which plans have it, when it is loaded, and its maps.

And what it shares with the narrow one, so that rows have the same bits in both.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import jitattn
from jitattn.device.driver import DeviceFacts
from jitattn.kernels import registry
from jitattn.kernels.attention.kernels import AttentionKernels
from jitattn.kernels.attention.spec import DecodeSpec
from jitattn.kernels.attention.tile import decode_tile
from jitattn.kernels.common import cuda_kernels, kernel_loader, tma
from jitattn.kernels.common.cuda_plan import CudaPlan
from jitattn.kernels.common.params import ScheduleParams
from jitattn.kernels.common.schedule_config import ScheduleConfig
from jitattn.spec.arch import ARCHITECTURES
from jitattn.spec.config import PlannerConfig
from jitattn.spec.family import KernelSpec
from jitattn.spec.layout import Loader
from tests.emulator import launch_recorder
from tests.emulator.launch_recorder import LaunchRecorder
from tests.kernels.common.test_tma import Map, maps_of
from tests.support.sample_specs import sample_specs

B, HKV = 3, 2
LENS = torch.tensor([5, 9, 0], dtype=torch.int32)
OFFSETS = torch.tensor([0, 3, 4, 6], dtype=torch.int32)
TABLE = jitattn.BlockTable(torch.zeros(B, 5, dtype=torch.int32))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> LaunchRecorder:
    return launch_recorder.install(monkeypatch)


def config_of(**arguments: object) -> PlannerConfig:
    return PlannerConfig.from_arguments(arguments)


def planner_of(
    cuda: LaunchRecorder, group_size: int = 4, **arguments: object
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


def plan_of(planner: jitattn.AttentionPlanner, max_q_len: int) -> jitattn.types.Plan:
    return planner.plan(TABLE, LENS, OFFSETS, max_q_len=max_q_len)


def backend_of(plan: jitattn.types.Plan) -> CudaPlan:
    assert isinstance(plan.backend, CudaPlan)
    return plan.backend


LETTERS = {"decode": "d", "decode_multi_token": "w", "prefill_narrow": "n", "prefill": "p"}


def roles_of(plan: jitattn.types.Plan) -> list[str]:
    return [part.role for part in backend_of(plan).launches]


# --- what there is --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "group_size", "row_tiles"),
    [
        ({"head_dim": 128}, 4, [8, 16]),
        ({"head_dim": 128}, 8, [8, 16]),
        ({"head_dim": 128}, 9, [16]),
        ({"head_dim": 128}, 17, [16]),
        ({"head_dim": 64}, 1, [8, 16]),
        ({"head_dim": 64}, 8, [8, 16]),
        ({"head_dim": 64}, 9, [16]),
        ({"head_dim": 64}, 16, [16]),
        ({"head_dim": 64}, 17, [32]),
        ({"head_dim": 16}, 4, [8, 16]),
        ({"head_dim": 64, "head_dim_vo": 128}, 4, [8, 16]),
        ({"head_dim": 128, "head_dim_vo": 64}, 4, [8, 16]),
        ({"head_dim": 64, "head_dim_vo": 192}, 4, [8]),
        ({"head_dim": 192, "head_dim_vo": 64}, 4, [8]),
        ({"head_dim": 256}, 4, [8]),
        ({"head_dim": 128, "batch_invariant": True}, 4, [8]),
        ({"head_dim": 64, "batch_invariant": True}, 4, [8]),
    ],
)
def test_which_kernels_a_configuration_has(
    arguments: dict[str, object], group_size: int, row_tiles: list[int]
) -> None:
    config = config_of(num_qo_heads=2 * group_size, num_kv_heads=2, **arguments)
    specs = [spec for spec in registry.specs_of(config, "sm_90a") if isinstance(spec, DecodeSpec)]
    assert [spec.row_tile for spec in specs] == [rows for rows in row_tiles for _ in "fp"]
    fast = Loader.TENSOR if config.head_dim % 64 == 0 else Loader.VECTOR
    assert [spec.loader for spec in specs] == [fast, Loader.PLAIN] * len(row_tiles)
    checked = registry.check_config(num_qo_heads=2 * group_size, num_kv_heads=2, **arguments)
    assert checked.kernel == specs[0].symbol


@pytest.mark.parametrize(
    ("arguments", "roles"),
    [
        ({}, {1: "d", 2: "d", 3: "w", 4: "w", 5: "pw", 100: "pw"}),
        ({"group_size": 1}, {8: "d", 9: "w", 16: "w", 17: "pw"}),
        ({"group_size": 8}, {1: "d", 2: "w", 3: "pw"}),
        ({"group_size": 5}, {1: "d", 2: "w", 3: "w", 4: "pw"}),
        ({"group_size": 9}, {1: "d", 2: "pd"}),
        ({"group_size": 16}, {1: "d", 2: "pd"}),
        ({"group_size": 71}, {1: "d", 2: "pd"}),
        ({"head_dim": 64}, {2: "d", 3: "w", 4: "w", 5: "nw", 16: "nw", 17: "pw"}),
        ({"head_dim": 64, "group_size": 16}, {1: "d", 2: "nd", 4: "nd", 5: "pd"}),
        ({"head_dim": 64, "group_size": 17}, {1: "d", 2: "nd", 3: "nd", 4: "pd"}),
        ({"head_dim": 256}, {2: "d", 3: "pd"}),
        ({"batch_invariant": True}, {0: "pd", 1: "pd", 2: "pd", 3: "pd", 5: "pd"}),
    ],
)
def test_which_kernels_a_plan_has(
    cuda: LaunchRecorder, arguments: dict[str, object], roles: dict[int, str]
) -> None:
    planner = planner_of(cuda, **arguments)  # type: ignore[arg-type]
    for max_q_len, wanted in roles.items():
        plan = plan_of(planner, max_q_len)
        assert "".join(LETTERS[role] for role in roles_of(plan)) == wanted
        (schedule,) = cuda.launches
        assert schedule.grid == len(wanted), "a CTA for each"
        del cuda.launches[:]


GROUP_SIZES = (*range(1, 10), 16, 17, 32, 71)
CONFIGS = (
    *({"group_size": size} for size in GROUP_SIZES),
    *({"group_size": size, "head_dim": 64} for size in GROUP_SIZES),
    {"head_dim": 256},
    {"batch_invariant": True},
)


@pytest.mark.parametrize("arguments", CONFIGS, ids=str)
def test_one_kernel_takes_a_request_whatever_a_plan_is_for(
    cuda: LaunchRecorder, arguments: dict[str, object]
) -> None:
    planner = planner_of(cuda, **arguments)  # type: ignore[arg-type]
    group_size = planner.config.num_qo_heads // HKV
    taken: dict[int, set[str]] = {}
    for max_q_len in (*range(1, 19), 200):
        plan_of(planner, max_q_len)
        for q_len in range(1, max_q_len + 1):
            (is_prefill,) = (
                bool(params.prefill_rows)
                for params in cuda.launches[-1].parts
                if (q_len == 1 or q_len * group_size <= params.decode_rows)
                is not bool(params.prefill_rows)
            )
            taken.setdefault(q_len, set()).add("prefill" if is_prefill else "decode")
        del cuda.launches[:]
    assert all(len(kinds) == 1 for kinds in taken.values())
    assert (taken[1], taken[200]) == ({"decode"}, {"prefill"})


@pytest.mark.parametrize("early_kv", [False, True])
@pytest.mark.parametrize("num_sms", [None, 5])
def test_what_its_launches_are_given(
    cuda: LaunchRecorder, num_sms: int | None, early_kv: bool
) -> None:
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
    (part,) = backend_of(plan).launches
    partials, counters = part.buffers
    slots = schedule.params.wave_slots * schedule.params.max_waves
    rows = slots * 2 * HKV * 16
    assert partials.numel() >= rows * (128 + 2)
    assert counters.numel() >= 1 + slots * HKV


def test_idle_plans_are_those_of_their_kernels(cuda: LaunchRecorder) -> None:
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
        decode = ["jitattn_decode_r16" if max_q_len > 2 else "jitattn_decode_r8"]
        assert names == (["jitattn_prefill"] * (max_q_len == 40) + decode) * 3
        kind = min(max_q_len, 3) if max_q_len < 40 else 40
        seen.setdefault(2 if kind == 1 else kind, set()).add(id(plan.backend))
        del plan
    assert all(len(plans) <= 2 for plans in seen.values()), "they are used again"


# --- what both kernels share ----------------------------------------------------------------------

CAPABILITIES = {"sm_80": (8, 0), "sm_90a": (9, 0), "sm_100f": (10, 0), "sm_120f": (12, 0)}


def narrow_specs(arch: str) -> list[DecodeSpec]:
    """The sample's kernels of narrow tiles whose head dims allow a wide one, with both loaders."""
    return [
        replace(spec, loader=loader)
        for spec in sample_specs(arch)
        if isinstance(spec, DecodeSpec)
        if spec.row_tile == 8 and max(spec.head_dim, spec.head_dim_vo) <= 128
        for loader in dict.fromkeys((spec.loader, Loader.PLAIN))
    ]


def config_for(
    spec: DecodeSpec, num_kv_heads: int, group_size: int, **more: object
) -> PlannerConfig:
    """A configuration whose narrow kernel is ``spec``."""
    return config_of(
        num_qo_heads=num_kv_heads * group_size,
        num_kv_heads=num_kv_heads,
        head_dim=spec.head_dim,
        head_dim_vo=spec.head_dim_vo,
        page_size=None if spec.page_table == "ragged" else spec.page_size,
        q_dtype=spec.q_dtype.value,
        kv_dtype=spec.kv_dtype.value,
        out_dtype=spec.out_dtype.value,
        page_table=spec.page_table.value,
        logits_soft_cap=3.0 if spec.use_logits_soft_cap else 0.0,
        use_custom_mask=spec.use_custom_mask,
        **more,
    )


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tiles_differ_in_their_rows_only(arch: str) -> None:
    """In nothing that says in which order a row's products and sums are added."""
    specs = narrow_specs(arch)
    assert len(specs) > 20
    assert {spec.loader for spec in specs} >= {Loader.VECTOR, Loader.PLAIN}
    names = ("num_warps", "tile_tokens", "ctas_per_sm", "value_dim", "tma_tokens", "merge_splits")
    for spec in specs:
        narrow, wide = (decode_tile(replace(spec, row_tile=rows), arch) for rows in (8, 16))
        for name in names:
            assert getattr(narrow, name) == getattr(wide, name), (spec.symbol, name)


@pytest.mark.parametrize("num_sms", [None, 7])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_schedules_and_parameters_are_the_same(
    cuda: LaunchRecorder, monkeypatch: pytest.MonkeyPatch, arch: str, num_sms: int | None
) -> None:
    facts = DeviceFacts(0, "card", CAPABILITIES[arch], num_sms=132, max_smem_bytes=232448)
    monkeypatch.setattr(cuda_kernels, "device_facts", lambda index: facts)
    for spec in narrow_specs(arch):
        for num_kv_heads, group_size in ((1, 4), (8, 1), (3, 8)):
            config = config_for(spec, num_kv_heads, group_size, num_sms=num_sms)
            kernels = AttentionKernels(config, torch.device("cuda", 0))
            assert spec in kernels.specs
            (narrow,) = kernels.schedule_configs(8 // group_size)
            (wide,) = kernels.schedule_configs(16 // group_size)
            assert (narrow.role, wide.role) == ("decode", "decode_multi_token")
            assert (narrow.grid, narrow.max_slots) == (wide.grid, wide.max_slots)
            assert narrow.params == wide.params
            ours, theirs = numbers_of(narrow), numbers_of(wide)
            assert (ours.pop("decode_rows"), theirs.pop("decode_rows")) == (8, 16)
            assert ours == theirs
            assert ours["tile_tokens"] == wide.kernel.tile.tile_tokens
            assert ours["wave_slots"] * ours["max_waves"] == wide.max_slots
            assert ours["num_head_blocks"] == num_kv_heads


def numbers_of(given: ScheduleConfig) -> dict[str, object]:
    """What the schedules of a kernel are given, by name."""
    params = ScheduleParams.from_buffer_copy(given.schedule_params)
    return {
        name: value
        for name, *_ in params._fields_
        if isinstance(value := getattr(params, name), int | None)
    }


# --- tensor maps ----------------------------------------------------------------------------------


def boxes(cuda: LaunchRecorder) -> list[Map]:
    return list(maps_of(cuda.last()))


@pytest.mark.parametrize(
    ("page_size", "head_dim", "tma_tokens"),
    [(16, 128, 16), (64, 128, 16), (16, 64, 16), (32, 64, 32), (96, 64, 32)],
)
def test_boxes_are_those_of_the_tile(
    cuda: LaunchRecorder, page_size: int, head_dim: int, tma_tokens: int
) -> None:
    """Layers in turn, through the repeated call of each plan, and memory that moves."""
    planner = planner_of(cuda, page_size=page_size, head_dim=head_dim)
    pools = [cache(page_size, head_dim) for _ in range(3)]
    layers = [planner.bind(pool) for pool in pools]
    plans = [plan_of(planner, 4), plan_of(planner, 2)]
    q = queries(planner)
    for turn, plan in itertools.product(range(4), plans):
        for pool, kv in zip(pools, layers, strict=True):
            plan.run(q, kv)
            places = [pool.data_ptr(), pool[:, 1].data_ptr()]
            assert [found.pointer for found in boxes(cuda)] == places
            assert {found.box[1] for found in boxes(cuda)} == {tma_tokens}
        if turn == 2:
            storage = pools[0].untyped_storage()
            storage.resize_(storage.nbytes() + 4096)


def test_one_encoding_serves_both(cuda: LaunchRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[object] = []

    def encode(*given: object, **named: object) -> bytes | None:
        encoded.append(given)
        return launch_recorder.encode_tensor_map(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(tma, "encode_tensor_map", encode)
    for page_size, head_dim in ((16, 128), (64, 64), (96, 64)):
        planner = planner_of(cuda, page_size=page_size, head_dim=head_dim)
        kv = planner.bind(cache(page_size, head_dim))
        for max_q_len in (2, 4):
            plan = plan_of(planner, max_q_len)
            for _ in range(3):
                plan.run(queries(planner), kv)
        assert len(encoded) == 2
        encoded.clear()


def test_a_cache_that_is_not_aligned_has_the_plain_kernel(cuda: LaunchRecorder) -> None:
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
def log(cuda: LaunchRecorder, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was started and what was loaded, of decode kernels, in order."""
    events: list[str] = []

    def note(what: str, symbol: str) -> None:
        if symbol.startswith("jitattn_decode"):
            events.append(f"{what} {symbol.split('_')[2]} {symbol.rsplit('_', 1)[1]}")

    def start(
        specs: list[KernelSpec], arch: str, knobs: object, *, hint: str
    ) -> tuple[launch_recorder.FakePending, ...]:
        for spec in specs:
            note("start", spec.symbol)
        return tuple(launch_recorder.FakePending(spec, was_found=False) for spec in specs)

    def load(cubin: bytes, symbol: str, *rest: int) -> launch_recorder.FakeKernel:
        note("load", symbol)
        return launch_recorder.FakeKernel(symbol, *rest)

    monkeypatch.setattr(kernel_loader, "start", start)
    monkeypatch.setattr(kernel_loader, "load_kernel", load)
    return events


@pytest.mark.parametrize("first", [3, 4, 40])
def test_the_first_plan_that_needs_it_waits_for_it(
    cuda: LaunchRecorder, log: list[str], first: int
) -> None:
    planner = planner_of(cuda)
    kv = planner.bind(cache())
    for max_q_len in (1, 2):
        plan_of(planner, max_q_len).run(queries(planner), kv)
    assert log == ["start r8 tensor", "start r16 tensor", "load r8 tensor"]
    del log[:]
    plan = plan_of(planner, first)
    assert log == ["load r16 tensor"]
    del log[:]
    for _ in range(3):
        plan.run(queries(planner), kv)
        for max_q_len in (3, 4, 40):
            plan_of(planner, max_q_len)
    assert log == []


@pytest.mark.parametrize("max_q_len", [4, 40])
def test_it_is_loaded_for_every_cache(cuda: LaunchRecorder, log: list[str], max_q_len: int) -> None:
    """So that a captured run, of a cache bound before or after the plan, loads nothing."""
    planner = planner_of(cuda)
    planner.bind(cache(room=1))
    del log[:]
    plan_of(planner, max_q_len)
    assert sorted(log) == ["load r16 plain", "load r16 tensor"]
    other = planner_of(cuda)
    plan_of(other, max_q_len)
    del log[:]
    other.bind(cache(room=1))
    assert log == ["start r8 plain", "start r16 plain", "load r8 plain", "load r16 plain"]


@pytest.mark.parametrize("max_q_len", [2, 3, 4, 40])
@pytest.mark.parametrize("room", [0, 1])
def test_a_cache_that_another_planner_bound(
    cuda: LaunchRecorder, max_q_len: int, room: int
) -> None:
    """Planners of one configuration share what they bind, whichever of them made plans."""
    binder, planner = planner_of(cuda), planner_of(cuda)
    kv = binder.bind(cache(room=room))
    plan = plan_of(planner, max_q_len)
    for _ in range(3):
        plan.run(queries(planner), kv)
    assert len(roles_of(plan)) == (2 if max_q_len == 40 else 1)


def test_what_was_built_is_told(cuda: LaunchRecorder) -> None:
    planner = planner_of(cuda)
    kernels = planner.kernels
    assert isinstance(kernels, AttentionKernels)
    names = [info.name.split("_d128")[0] for info in kernels.infos()]
    assert names[0] == "jitattn_decode_r8"
    assert names[-1] == "jitattn_decode_r16"
    plan_of(planner, 4)
    assert len(kernels.infos()) == len(names)
