"""What the driver is handed by a launch, and what becomes of its answer, without a driver."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cuda.bindings import driver as binding

from jitattn.base.errors import DriverError
from jitattn.device import driver
from jitattn.device.driver import Launch
from tests.emulator.launch_recorder import FakeKernel

KERNEL = FakeKernel("jitattn_any", 3, 1234)


class Params(ctypes.Structure):
    """Parameters of a kernel."""

    _fields_ = (("values", ctypes.c_int64 * 20),)


class FakeFunction:
    """Stands for ``cuLaunchKernelEx``: answers in turn, and keeps what it saw."""

    def __init__(self) -> None:
        self.answers: list[int] = []
        self.configs: list[bytes] = []
        self.params: list[bytes] = []
        self.contexts: list[int] = []  # those that are current
        self.seen_contexts: list[list[int]] = []

    def __call__(self, config: object, kernel: object, pointer: object, extra: object) -> int:
        assert (kernel, extra) == (KERNEL.argument, None)
        self.configs.append(bytes(config._obj))
        self.params.append(ctypes.string_at(pointer._obj.value, ctypes.sizeof(Params)))
        self.seen_contexts.append(list(self.contexts))
        return self.answers.pop(0) if self.answers else 0


@pytest.fixture
def function(monkeypatch: pytest.MonkeyPatch) -> FakeFunction:
    fake = FakeFunction()

    @contextmanager
    def context(index: int) -> Iterator[None]:
        fake.contexts.append(index)
        yield
        fake.contexts.pop()

    monkeypatch.setattr(driver, "_launch_function", lambda: fake)
    monkeypatch.setattr(driver, "_context", context)
    texts = {binding.CUresult.CUDA_ERROR_INVALID_VALUE: b"invalid argument"}
    ok = binding.CUresult.CUDA_SUCCESS
    monkeypatch.setattr(
        binding, "cuGetErrorString", lambda status: (ok, texts.get(status, b"some text"))
    )
    return fake


def test_the_configuration_is_that_of_the_binding(function: FakeFunction) -> None:
    launch = Launch(KERNEL, Params(), 132, 160)
    for stream in (0, 0, 2**47 + 16, 1, 0):
        launch(stream)
        config = binding.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = 132, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = 160, 1, 1
        config.sharedMemBytes = 1234
        config.hStream = binding.CUstream(stream)
        wanted = ctypes.string_at(config.getPtr(), ctypes.sizeof(driver._LaunchConfig))
        assert function.configs[-1] == wanted


@pytest.mark.parametrize("begins_early", [False, True])
def test_the_binding_is_given_the_same(monkeypatch: pytest.MonkeyPatch, begins_early: bool) -> None:
    ok = (binding.CUresult.CUDA_SUCCESS,)
    seen = []
    monkeypatch.setattr(KERNEL, "begins_early", begins_early)
    monkeypatch.setattr(KERNEL, "function", "function", raising=False)
    monkeypatch.setattr(binding, "cuLaunchKernelEx", lambda *given: seen.append(given) or ok)
    params = Params()
    launch = Launch(KERNEL, params, 132, 160)
    assert driver._by_binding(launch, 2**47 + 16)() == ok
    ((config, kernel, pointer, extra),) = seen
    assert (kernel, extra) == ("function", 0)
    assert ctypes.c_void_p.from_address(pointer).value == ctypes.addressof(params)
    own = driver._config(*launch.shape, 2**47 + 16, begins_early)
    size = ctypes.sizeof(driver._LaunchConfig)
    given = driver._LaunchConfig.from_buffer_copy(ctypes.string_at(config.getPtr(), size))
    size = ctypes.sizeof(driver._LaunchAttribute)
    if begins_early:
        assert ctypes.string_at(given.attributes, size) == ctypes.string_at(own.attributes, size)
    given.attributes = own.attributes
    assert bytes(given) == bytes(own)


def test_a_kernel_that_waits_itself_begins_early(
    function: FakeFunction, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KERNEL, "begins_early", True)
    Launch(KERNEL, Params(), 7, 32)(0)
    config = driver._LaunchConfig.from_buffer_copy(function.configs[-1])
    assert config.num_attributes == 1
    attribute = binding.CUlaunchAttribute()
    attribute.id = binding.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    size = ctypes.sizeof(driver._LaunchAttribute)
    assert ctypes.string_at(config.attributes, size) == ctypes.string_at(attribute.getPtr(), size)


def test_the_parameters_are_those_of_the_moment(function: FakeFunction) -> None:
    params = Params()
    launch = Launch(KERNEL, params, 1, 32)
    for value in (5, -7):
        params.values[19] = value
        launch(0)
        assert function.params[-1] == bytes(params)


def test_launches_keep_what_they_point_to(function: FakeFunction) -> None:
    launches = []
    for value in range(50):
        params = Params()
        params.values[0] = value
        launches.append(Launch(KERNEL, params, value + 1, 32))
        del params
    for value, launch in enumerate(launches):
        launch(value % 3)
        assert int.from_bytes(function.params[-1][:8], "little") == value
        assert int.from_bytes(function.configs[-1][:4], "little") == value + 1


@pytest.mark.parametrize("answer", [201, 709])
def test_a_thread_without_a_context_gets_one(function: FakeFunction, answer: int) -> None:
    function.answers = [answer]
    Launch(KERNEL, Params(), 1, 32)(0)
    assert function.seen_contexts == [[], [3]]
    assert function.contexts == []


def test_a_refusal_is_an_error(function: FakeFunction) -> None:
    launch = Launch(KERNEL, Params(), 1, 32)
    for answers, message in (
        ([1], r"jitattn_any: CUDA_ERROR_INVALID_VALUE \(invalid argument\)"),
        ([201, 1], "CUDA_ERROR_INVALID_VALUE"),
        ([201, 201], "CUDA_ERROR_INVALID_CONTEXT"),
        ([123456], "cannot launch jitattn_any: error 123456"),
    ):
        function.answers = answers
        with pytest.raises(DriverError, match=message):
            launch(0)
        assert function.contexts == []
    launch(0)
