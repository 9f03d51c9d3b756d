"""pytest plugin of the runs: the import, devices, a limit a test, and what became of each.

It is loaded from a folder beside a package's own tests, which are called ``tests`` as ours are, so
that it imports nothing from this folder by that name.
"""

from __future__ import annotations

import collections
import hashlib
import importlib
import json
import math
import os
import re
import resource
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.overrides import TorchFunctionMode

import jitattn

PACKAGE = str(Path(jitattn.__file__).parent)
DOORS = {
    "flashinfer": (
        *("attention", "cascade", "decode", "mla", "page", "pod", "prefill", "quantization"),
        *("rope", "sparse", "xqa"),
    ),
    "flash_attn": ("bert_padding", "flash_attn_interface"),
}
SECONDS = int(os.environ.get("SUITES_SECONDS", "20"))
VALUES = 3
SAMPLE = int(os.environ.get("SUITES_SAMPLE", "0"))


class Nothing(ModuleType):
    """Stands for code that compiles kernels ahead: whatever is asked of it, nothing happens."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(name)

    def __call__(self, *args: object, **kwargs: object) -> list[object]:
        return []

    def __getitem__(self, key: object) -> Any:
        return Nothing(str(key))

    def __or__(self, other: object) -> Any:
        return Any

    __ror__ = __or__

    def __mro_entries__(self, bases: object) -> tuple[type, ...]:
        return (Exception,)


class NotOurs(Nothing):
    """Stands for modules that tests take references from: what calls it is skipped."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return NotOurs(name)

    def __call__(self, *args: object, **kwargs: object) -> list[object]:
        pytest.skip(f"{self.__name__} is of the package itself")


class Elsewhere(TorchFunctionMode):
    """Devices of CUDA are the CPU, for packages whose tests know no other."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if "device" in kwargs:
            kwargs["device"] = _here(kwargs["device"])
        name = getattr(func, "__name__", "")
        if name == "cuda":
            return args[0]
        if name == "pin_memory":
            return args[0]
        if name == "to":
            args = (args[0], *(_here(value, bare=True) for value in args[1:]))
        return func(*args, **kwargs)


def _here(device: Any, bare: bool = False) -> Any:
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("cpu")
    if isinstance(device, str) and device.startswith("cuda"):
        return "cpu"
    return "cpu" if type(device) is int else device


class HostGenerator(torch.Generator):
    """A generator of the CPU, whatever device is asked for."""

    def __new__(cls, device: object = "cpu") -> HostGenerator:
        return super().__new__(cls, "cpu")


def replace(package: str) -> None:
    """Have ``import`` of a package and its modules find ours."""
    door = importlib.import_module(f"jitattn.compat.{package}")
    sys.modules[package] = door
    for name in DOORS[package]:
        sys.modules[f"{package}.{name}"] = importlib.import_module(f"{door.__name__}.{name}")
    stand_ins = {"flashinfer": flashinfer_tools, "flash_attn": flash_attn_tools}[package]()
    for name, module in stand_ins.items():
        sys.modules[f"{package}.{name}"] = module
        if "." not in name:
            setattr(door, name, module)


# What its tests ask about a card, to skip what it hasn't: this one has everything.
_TOOLS = {
    "is_sm90a_supported": True,
    "is_sm100a_supported": True,
    "is_sm100f_supported": True,
    "is_fa3_backend_supported": True,
    "is_fa3_prefill_head_dim_supported": True,
    "has_flashinfer_jit_cache": True,
    "device_support_pdl": True,
    "get_trtllm_gen_multi_ctas_kv_counter_bytes": 4096,
    "is_sm110a_supported": False,
    "is_sm120a_supported": False,
    "is_sm121a_supported": False,
    "is_sm12x_supported": False,
    "is_cvt_rs_supported": False,
}
# Sizes of DeepSeek-V3, which tests take from the package.
_HEADS = SimpleNamespace(
    qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, kv_lora_rank=512
)


def _layer(head_dimensions: object, num_heads: int) -> SimpleNamespace:
    return SimpleNamespace(head_dimensions=head_dimensions, num_heads=num_heads)


_LAYER = _layer(_HEADS, 16)
_DIMENSIONS: dict[str, object] = {
    "MLAHeadDimensions": SimpleNamespace,
    "MLALayerDimensions": _layer,
    "deepseek_mla_dimensions": _HEADS,
    "smaller_mla_dimensions": _HEADS,
    "supported_mla_head_dimensions": [_HEADS],
    "supported_mla_layer_dimensions": [_LAYER],
}
_JIT = ("attention", "attention.variants", "core", "utils", "env", "xqa")
_BUILDERS = (
    *("gen_single_decode_module", "gen_batch_decode_module", "gen_batch_attention_module"),
    *("gen_single_prefill_module", "gen_batch_prefill_module", "gen_quantization_module"),
    "gen_page_module",
)


def flashinfer_tools() -> dict[str, ModuleType]:
    """What FlashInfer's tests ask of its tools: which card this is, and kernels ahead of time."""
    tools, jit = Nothing("utils"), Nothing("jit")
    tools.get_compute_capability = lambda device: (10, 0)  # type: ignore[attr-defined]
    tools.log2e = math.log2(math.e)  # type: ignore[attr-defined]
    for name, answer in _TOOLS.items():
        setattr(tools, name, lambda *args, answer=answer, **kwargs: answer)
    for module in ("decode", "prefill", "attention", "quantization", "page", "cascade"):
        for name in _BUILDERS:
            setattr(sys.modules[f"flashinfer.{module}"], name, jit)
    # Files of tests import these for a few of them.
    door, mla = sys.modules["flashinfer"], sys.modules["flashinfer.mla"]
    door.SfLayout = NotOurs("SfLayout")  # type: ignore[attr-defined]
    for name, value in _DIMENSIONS.items():
        setattr(mla, name, value)
    others = "quantization.nvfp4_quantization_utils", "fp4_quantization", "testing"
    modules = {"utils": tools, "jit": jit, **{name: NotOurs(name) for name in others}}
    return modules | {f"jit.{name}": jit for name in _JIT}


def flash_attn_tools() -> dict[str, ModuleType]:
    """What flash-attn's tests ask of other modules of it, in torch."""
    interface = importlib.import_module("jitattn.compat.flash_attn.flash_attn_interface")
    interface._get_block_size_n = lambda *args: 128  # type: ignore[attr-defined]
    interface.USE_TRITON_ROCM = False  # type: ignore[attr-defined]
    rotary, layers = ModuleType("rotary"), ModuleType("layers")
    rotary.apply_rotary_emb = _rotary  # type: ignore[attr-defined]
    layers.rotary = rotary  # type: ignore[attr-defined]
    return {"layers": layers, "layers.rotary": rotary}


def _rotary(x: Any, cos: Any, sin: Any, interleaved: bool = False, seqlen_offsets: Any = 0) -> Any:
    """Turn x [batch, length, heads, dim] by tables, from the offsets on: by definition."""
    places = torch.arange(x.shape[1]) + torch.as_tensor(seqlen_offsets).reshape(-1, 1)
    angles = torch.complex(cos.double(), sin.double())[places].unsqueeze(2)
    dim = 2 * cos.shape[1]
    part, rest = x[..., :dim].double(), x[..., dim:]
    if interleaved:
        pairs = torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous()) * angles
        turned = torch.view_as_real(pairs).flatten(-2)
    else:
        pairs = torch.complex(*part.chunk(2, -1)) * angles
        turned = torch.cat((pairs.real, pairs.imag), -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


_CARD = SimpleNamespace(
    name="card",
    major=9,
    minor=0,
    total_memory=141 << 30,
    multi_processor_count=132,
    shared_memory_per_multiprocessor=228 << 10,
    shared_memory_per_block_optin=227 << 10,
)


def pretend() -> None:
    """Answer what tests ask about a card before they begin; a capture is skipped."""
    cuda = torch.cuda
    cuda.get_device_capability = lambda *args: (9, 0)  # type: ignore[assignment]
    cuda.get_device_properties = lambda *args: _CARD  # type: ignore[assignment,return-value]
    for name in ("synchronize", "manual_seed", "empty_cache", "manual_seed_all", "set_device"):
        setattr(cuda, name, lambda *args: None)
    cuda.current_device = lambda: 0
    torch.Generator = HostGenerator  # type: ignore[misc]

    def skip(*args: object, **kwargs: object) -> None:
        pytest.skip("captures, streams and compiled calls need a card")

    for name in ("CUDAGraph", "graph", "Stream", "Event", "current_stream"):
        setattr(cuda, name, skip)
    torch.compile = skip  # type: ignore[assignment]
    grad = torch.autograd.grad

    def gradients(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return grad(outputs, inputs, *args, **kwargs)
        # Forward only: what is compared of these is counted as a backward pass, see below.
        tensors = [inputs] if isinstance(inputs, torch.Tensor) else inputs
        return tuple(torch.full_like(tensor, torch.nan) for tensor in tensors)

    def backward(*args: object, **kwargs: object) -> None:
        pytest.skip("there is no backward pass")

    torch.autograd.grad = gradients  # type: ignore[assignment]
    torch.Tensor.backward = backward  # type: ignore[assignment]


def limit_memory() -> None:
    """Have what takes half of the memory fail: a process that the system ends reports nothing."""
    half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = half if hard == resource.RLIM_INFINITY else min(half, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--replace", choices=sorted(DOORS), required=True)
    parser.addoption("--report", required=True, help="a file, for the counts as JSON")


def pytest_configure(config: pytest.Config) -> None:
    # A limit that ends an import would leave half a module.
    importlib.import_module("torch.fx.experimental.symbolic_shapes")
    limit_memory()
    pretend()
    replace(config.getoption("--replace"))
    if config.getoption("--replace") == "flash_attn":
        torch.set_grad_enabled(False)
    Elsewhere().__enter__()
    config.pluginmanager.register(Outcomes(Path(config.getoption("--report"))))


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Keep a few values of each parameter, the smaller ones: some suites have 100,000 cases."""
    if not SAMPLE:
        return
    marks = metafunc.definition.own_markers
    for i, mark in enumerate(marks):
        if mark.name == "parametrize" and isinstance(mark.args[1], list | tuple | range):
            values = sorted(mark.args[1], key=lambda value: (extent(value), repr(value)))
            names = mark.args[0]
            marks[i] = pytest.mark.parametrize(names, values[:VALUES], **mark.kwargs).mark


def extent(value: object) -> float:
    """Return the product of a parameter's numbers, in logarithms."""
    numbers = value if isinstance(value, list | tuple) else [value]
    return sum(math.log(n) for n in numbers if type(n) is int and n > 1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep some of each function's parameters, always the same ones."""
    if not SAMPLE:
        return
    by_function = collections.defaultdict(list)
    for item in items:
        by_function[item.nodeid.partition("[")[0]].append(item)
    kept: list[pytest.Item] = []
    for group in by_function.values():
        # Of the smaller ones: kernels are their definition here, in float64.
        group.sort(key=size_of)
        group = group[: max(SAMPLE, len(group) // 4)]
        group.sort(key=lambda item: hashlib.sha256(item.nodeid.encode()).digest())
        kept += group[:SAMPLE]
    config.hook.pytest_deselected(items=[i for i in items if i not in set(kept)])
    items[:] = kept


def size_of(item: pytest.Item) -> float:
    """Return about how much a test computes, by its parameters: lengths, heads, requests."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    return sum(map(extent, parameters.values()))


class TooSlowError(BaseException):
    """A test ran longer than it may."""


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    def stop(signum: int, frame: FrameType | None) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Outcomes:
    """What became of every test, and of files that don't import."""

    def __init__(self, report: Path) -> None:
        self.report = report
        self.counts: collections.Counter[str] = collections.Counter()
        self.why: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.failed: list[str] = []

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Iterator[None]:
        found = yield
        report = found.get_result()  # type: ignore[attr-defined]
        if call.excinfo is None:
            if call.when == "call":
                self._count("passed", item.nodeid, "")
            return
        kind, why = outcome_of(call.excinfo.value)
        self._count(kind, item.nodeid, why)
        if kind != "failed":
            report.outcome = "skipped"
            report.longrepr = (str(item.path), 0, f"{kind}: {why}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            text = str(report.longrepr)
            lines = [line[4:].strip() for line in text.splitlines() if line.startswith("E   ")]
            kind = (
                "refused files" if "jitattn.compat" in text or "flashinfer." in text else "failed"
            )
            self._count(kind, report.nodeid, lines[-1] if lines else text[-200:])

    def _count(self, kind: str, name: str, why: str) -> None:
        self.counts[kind] += 1
        if why:
            self.why[kind][re.sub(r"\d+", "N", why)[:140]] += 1
        if kind == "failed":
            self.failed.append(f"{name}: {why}")

    def pytest_sessionfinish(self) -> None:
        why = {kind: dict(counts.most_common()) for kind, counts in self.why.items()}
        found = {"counts": dict(self.counts), "why": why, "failed": self.failed}
        self.report.write_text(json.dumps(found, indent=1) + "\n")


def outcome_of(error: BaseException) -> tuple[str, str]:
    """Return what a test's end counts as, and why."""
    text = str(error).strip().splitlines()
    message = text[0] if text else type(error).__name__
    if isinstance(error, TooSlowError):
        return "too slow", f"longer than {SECONDS} s"
    if isinstance(error, pytest.skip.Exception | pytest.xfail.Exception):
        return "skipped", message
    # On the CPU torch raises an error of no class of its own.
    is_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if is_of_memory or "can't allocate memory" in message:
        return "too slow", "memory"
    if refused_by_name(error):
        return "refused by name", message
    if missing := re.search(r"No module named '(flashinfer|flash_attn)[\w.]*'", str(error)):
        return "skipped", f"{missing[0]}: a part of the package itself"
    if private := re.search(r"object has no attribute '(_\w+)'", str(error)):
        return "skipped", f"{private[1]} is a private part of the package"
    inner = error.__context__
    if "Regex pattern did not match" in str(error) and inner is not None and refused_by_name(inner):
        return "refused in other words", str(inner).splitlines()[0]
    if isinstance(error, pytest.fail.Exception) and "DID NOT RAISE" in message:
        return "does what the package refuses", message
    if isinstance(error, AssertionError | RuntimeError) and _is_of_gradients(error):
        return "forward passed", "there is no backward pass, which is compared after it"
    return "failed", f"{type(error).__name__}: {message}"


def refused_by_name(error: BaseException) -> bool:
    """Whether jitattn raised it of its own accord, naming an argument or a name to use."""
    frames = [f for f, _ in traceback.walk_tb(error.__traceback__)]
    ours = [f for f in frames if f.f_code.co_filename.startswith(PACKAGE)]
    if not ours or ours[-1] is not frames[-1]:
        return False
    if not isinstance(
        error, ValueError | TypeError | AttributeError | ImportError | jitattn.JitAttnError
    ):
        return False
    names = {"has no"} if isinstance(error, AttributeError | ImportError) else set[str]()
    for frame in ours:
        names |= {*frame.f_code.co_varnames}
        for value in frame.f_locals.values():
            if isinstance(value, dict):
                names |= {key for key in value if isinstance(key, str)}
            elif hasattr(value, "_fields"):
                names |= {*value._fields}
    return any(re.search(rf"\b{re.escape(name)}\b", str(error)) for name in names if len(name) > 0)


def _is_of_gradients(error: BaseException) -> bool:
    lines = [
        f.line or "" for f in traceback.extract_tb(error.__traceback__) if "test_" in f.filename
    ]
    return bool(lines and re.search(r"\bd(q|k|v|kv|qkv)\w*\b", lines[-1]))
