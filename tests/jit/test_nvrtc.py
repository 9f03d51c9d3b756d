"""The compiler: what it is given, what it returns, and what is said when it is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import jinja2
import pytest

from jitattn.base.errors import CompileError, CompilerMissingError
from jitattn.jit import nvrtc

REPOSITORY = Path(__file__).parents[2]
OPTIONS = nvrtc.options("sm_90a")


def kernel(body: str, name: str = "k") -> str:
    return f'extern "C" __global__ void {name}(float* x) {{ {body} }}\n'


def test_a_kernel_compiles_to_a_cubin() -> None:
    source = kernel("__shared__ float s[64]; s[threadIdx.x] = *x; __syncthreads(); *x = s[0];")
    compiled = nvrtc.compile_cubin(source, name="k.cu", headers={}, options=OPTIONS)
    assert compiled.cubin.startswith(b"\x7fELF")


def test_generic_lambdas_are_device_code_to_every_compiler() -> None:
    """preprocess.cu.jinja has one, and NVRTC up to 13.0 takes it for a host function."""
    source = kernel("const auto twice = [&](auto y) { return y + y; }; *x = twice(*x);")
    nvrtc.compile_cubin(source, name="k.cu", headers={}, options=OPTIONS)


@pytest.mark.parametrize("home", [":/x", "/x:/y", "", "/missing", "older", "empty"])
def test_headers_come_from_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "older" / "include" / "a").mkdir(parents=True)
    (tmp_path / "older" / "include" / "a" / "one.cuh").write_text("#error an older header\n")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / home) if home.isalpha() else home)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / home) if home.isalpha() else home)
    source = '#include "a/one.cuh"\n' + kernel("*x = one();")
    headers = {"a/one.cuh": "__device__ float one() { return 1.f; }\n"}
    nvrtc.compile_cubin(source, name="k.cu", headers=headers, options=OPTIONS)


def test_the_cubin_depends_on_the_source_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = kernel("*x = 2.f;")
    first = nvrtc.compile_cubin(source, name="a.cu", headers={}, options=OPTIONS)
    monkeypatch.chdir(tmp_path)
    second = nvrtc.compile_cubin(source, name="b.cu", headers={}, options=OPTIONS)
    assert first.cubin == second.cubin


def test_errors_have_template_lines_and_keep_the_source() -> None:
    source = '#line 38 "decode.cu.jinja"\n' + kernel("*x = oops;")
    with pytest.raises(CompileError) as caught:
        nvrtc.compile_cubin(source, name="k.cu", headers={}, options=OPTIONS)
    error = caught.value
    assert error.first_error == 'decode.cu.jinja(38): error: identifier "oops" is undefined'
    assert error.source == source
    assert error.source_path is not None
    assert error.source_path.read_text() == source
    assert str(error.source_path) in str(error)


def test_an_unwritable_temporary_folder_does_not_hide_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/proc/nowhere")
    with pytest.raises(CompileError, match="oops") as caught:
        nvrtc.compile_cubin(kernel("oops"), name="k.cu", headers={}, options=OPTIONS)
    assert caught.value.source_path is None


def test_an_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(CompileError, match=r"arch.*sm_999.*compiles for 75, .*90, "):
        nvrtc.compile_cubin(
            kernel("*x = 1.f;"), name="k.cu", headers={}, options=nvrtc.options("sm_999")
        )


def test_options_change_with_lineinfo_only() -> None:
    assert nvrtc.options("sm_80", lineinfo=True) == (*nvrtc.options("sm_80"), "-lineinfo")
    assert "--gpu-architecture=sm_80" in nvrtc.options("sm_80")
    assert not [o for o in OPTIONS if o.startswith("-I") or "include" in o]


def test_the_toolchain_is_more_exact_than_the_version() -> None:
    major, minor = nvrtc.version()
    release, build = nvrtc.toolchain().split(" ")
    assert release.startswith(f"V{major}.{minor}.")
    assert build.startswith("CL-")
    assert {80, 90, 120} <= set(nvrtc.supported_archs())


def test_the_loaded_library_is_found_and_recognised(tmp_path: Path) -> None:
    nvrtc.version()
    libraries = nvrtc.loaded_libraries()
    assert libraries
    assert nvrtc.still_there(libraries)
    path = tmp_path / "libnvrtc|odd.so.13"
    path.write_text("one")
    fact = nvrtc._fact(str(path))
    assert nvrtc.still_there([fact])
    path.write_text("other")
    assert not nvrtc.still_there([fact])
    path.unlink()
    assert not nvrtc.still_there([fact])


def test_the_search_digest_sees_variables_and_wheels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = nvrtc.search_digest()
    assert before == nvrtc.search_digest()
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere/else")
    with_variable = nvrtc.search_digest()
    assert with_variable != before
    monkeypatch.syspath_prepend(tmp_path)
    library = tmp_path / "nvidia" / "cu13" / "lib" / "libnvrtc.so.13"
    library.parent.mkdir(parents=True)
    library.touch()
    assert nvrtc.search_digest() != with_variable


# ---------------------------------------------------------------------------- drivers


@pytest.mark.parametrize(
    ("driver", "compiler", "word"),
    [
        (None, "V13.5.37 CL-1", ""),
        ((13, 0), "V13.5.37 CL-1", ""),
        ((13, 0), "V12.9.86 CL-1", ""),
        ((12, 2), "V12.9.86 CL-1", ""),
        ((12, 8), "V13.0.88 CL-1", "pip install 'nvidia-cuda-nvrtc-cu12>=12.9,<13'"),
        ((12, 8), "V13.0.88-CL-1", "knows CUDA up to 12.8"),
        ((11, 8), "V12.9.86 CL-1", "update the driver"),
        ((13, 0), "V14.0.1 CL-1", "V14.0.1"),
    ],
)
def test_a_driver_loads_what_its_own_major_version_made(
    monkeypatch: pytest.MonkeyPatch, driver: tuple[int, int] | None, compiler: str, word: str
) -> None:
    monkeypatch.setattr(nvrtc, "driver_version", lambda: driver)
    assert word in nvrtc.why_refused(compiler)
    assert bool(word) == bool(nvrtc.why_refused(compiler))


# A libcuda and an NVRTC 12 that do nothing but say which they are.
DRIVER = "int cuDriverGetVersion(int* version) {{ *version = {version}; return {status}; }}"
NVRTC_12 = "int nvrtcVersion(int* major, int* minor) { *major = 12; *minor = 9; return 0; }"
CHOICE = """
from jitattn.jit import nvrtc
nvrtc._prefer_what_the_driver_accepts()
print(nvrtc.driver_version(), [path.split("|")[0] for path in nvrtc.loaded_libraries()])
"""


def library(path: Path, source: str) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler, to fake a library")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".c").write_text(source)
    command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-o", path]
    subprocess.run([*command, path.with_suffix(".c")], check=True)
    return path


@pytest.mark.parametrize(
    ("version", "status", "driver", "taken"),
    [
        (12080, 0, (12, 8), True),
        (12000, 0, (12, 0), True),
        (13000, 0, (13, 0), False),
        (0, 0, None, False),
        (12080, 100, None, False),
    ],
)
def test_nvrtc_12_is_taken_where_the_driver_is_old(
    tmp_path: Path, version: int, status: int, driver: tuple[int, int] | None, taken: bool
) -> None:
    source = DRIVER.format(version=version, status=status)
    folder = library(tmp_path / "driver" / "libcuda.so.1", source).parent
    nvrtc_12 = library(tmp_path / "site" / nvrtc._WHEEL_OF_12, NVRTC_12)
    search = os.pathsep.join([str(REPOSITORY), str(tmp_path / "site")])
    env = {**os.environ, "PYTHONPATH": search, "LD_LIBRARY_PATH": str(folder)}
    done = subprocess.run([sys.executable, "-c", CHOICE], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == f"{driver} {[str(nvrtc_12)] if taken else []}", done.stderr


# An NVRTC 13 whose cubins say which it is.
NVRTC_13 = r"""
#include <string.h>
static const char ptx[] =
    "// Cuda compilation tools, release 13.{minor}, V13.{minor}.1\n// Build ID: CL-{minor}\n";
static const char cubin[] = "\x7f" "ELF of 13.{minor}";
int nvrtcVersion(int* major, int* minor) {{ *major = 13; *minor = {minor}; return 0; }}
int nvrtcCreateProgram(void** program) {{ *program = &program; return 0; }}
int nvrtcDestroyProgram(void** program) {{ return 0; }}
int nvrtcCompileProgram(void* program) {{ return 0; }}
int nvrtcGetProgramLogSize(void* program, size_t* size) {{ *size = 1; return 0; }}
int nvrtcGetProgramLog(void* program, char* log) {{ *log = 0; return 0; }}
int nvrtcGetPTXSize(void* program, size_t* size) {{ *size = sizeof ptx; return 0; }}
int nvrtcGetPTX(void* program, char* text) {{ memcpy(text, ptx, sizeof ptx); return 0; }}
int nvrtcGetCUBINSize(void* program, size_t* size) {{ *size = sizeof cubin - 1; return 0; }}
int nvrtcGetCUBIN(void* program, char* code) {{ memcpy(code, cubin, sizeof cubin - 1); return 0; }}
"""
TORCH_BEFORE = """
import ctypes, sys
ctypes.CDLL(sys.argv[1])  # as torch for CUDA 12 does when it is imported
"""


@pytest.mark.parametrize(
    ("version", "takes_13"), [(12080, False), (13000, True), (0, True)], ids=["old", "new", "none"]
)
def test_what_torch_has_loaded_does_not_decide(
    tmp_path: Path, version: int, takes_13: bool
) -> None:
    driver = library(tmp_path / "driver" / "libcuda.so.1", DRIVER.format(version=version, status=0))
    nvrtc_12 = library(tmp_path / "site" / nvrtc._WHEEL_OF_12, NVRTC_12)
    nvrtc_13 = library(tmp_path / "site" / nvrtc._WHEEL_OF_13, NVRTC_13.format(minor=5))
    search = os.pathsep.join([str(REPOSITORY), str(tmp_path / "site")])
    env = {**os.environ, "PYTHONPATH": search, "LD_LIBRARY_PATH": str(driver.parent)}
    command = [sys.executable, "-c", TORCH_BEFORE + CHOICE, str(nvrtc_12)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    loaded = sorted(map(str, [nvrtc_12, nvrtc_13] if takes_13 else [nvrtc_12]))
    assert done.stdout.strip().endswith(str(loaded)), done.stdout + done.stderr


BUILD = """
from jitattn.jit import build, cubin
from jitattn.base import knobs
from jitattn.jit.cubin import Resources
from jitattn.kernels.common.spec import ScheduleSpec
cubin.resources_of = lambda *arguments: Resources(
    registers=8, spill_bytes=0, smem_bytes=0, code_bytes=8
)
kernel = build.build(ScheduleSpec(), "sm_90a", knobs.load())
print(kernel.origin, kernel.compiler, kernel.cubin[1:])
"""


def test_c44_of_two_compilers_the_loaded_one_is_named(tmp_path: Path) -> None:
    """Which one LD_LIBRARY_PATH has first decides; neither is served what the other compiled."""
    python = [sys._base_executable, "-S", "-c"]
    where = "import site; print(*site.getsitepackages(), site.getusersitepackages(), sep='\\n')"
    places = subprocess.run([*python, where], capture_output=True, text=True).stdout.splitlines()
    if any((Path(place) / "nvidia").exists() for place in places):
        pytest.skip("the interpreter has an NVRTC of its own, which the binding would take")
    for minor in (0, 5):
        library(tmp_path / f"13.{minor}" / "libnvrtc.so.13", NVRTC_13.format(minor=minor))
    unwanted = ("CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH")
    env = {name: value for name, value in os.environ.items() if name not in unwanted}
    env["JITATTN_CACHE_DIR"] = str(tmp_path / "cache")
    env["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), str(site_without_nvidia(tmp_path))])
    for first, second, origin in ((0, 5, "compiled"), (5, 0, "compiled"), (0, 5, "disk")):
        folders = [str(tmp_path / f"13.{minor}") for minor in (first, second)]
        env["LD_LIBRARY_PATH"] = os.pathsep.join(folders)
        done = subprocess.run([*python, BUILD], env=env, capture_output=True, text=True)
        wanted = f"{origin} V13.{first}.1 CL-{first} {f'ELF of 13.{first}'.encode()}\n"
        assert done.stdout == wanted, done.stderr


def site_without_nvidia(folder: Path) -> Path:
    """A folder of all that is installed here, the binding included, but no NVRTC."""
    site = folder / "site"
    site.mkdir()
    for entry in Path(jinja2.__file__).parents[1].iterdir():
        if entry.name != "nvidia":
            (site / entry.name).symlink_to(entry)
    return site


def test_the_search_digest_sees_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    before = nvrtc.search_digest()
    monkeypatch.setattr(nvrtc, "driver_version", lambda: (11, 4))
    assert nvrtc.search_digest() != before


# ---------------------------------------------------------------------------- missing

BLOCK = """
import sys
sys.modules[{module!r}] = None
from jitattn.jit import nvrtc
from jitattn.base.errors import CompilerMissingError
try:
    nvrtc.toolchain()
except CompilerMissingError as error:
    print(error)
"""


@pytest.mark.parametrize("module", ["cuda.bindings.nvrtc", "cuda.bindings", "cuda"])
def test_a_missing_binding_says_what_to_install(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCK.format(module=module)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert 'pip install cuda-python "nvidia-cuda-nvrtc>=13,<14"' in done.stdout, done.stderr


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import nvrtc as binding

    def fail() -> None:
        raise RuntimeError('Failure finding "libnvrtc.so": searched\n  here\n  there')

    monkeypatch.setattr(binding, "nvrtcVersion", fail)
    nvrtc._binding.cache_clear()
    try:
        with pytest.raises(CompilerMissingError, match=r"libnvrtc\.so.*searched\): pip install"):
            nvrtc._binding()
    finally:
        nvrtc._binding.cache_clear()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_waits_for_those_who_compile_and_the_child_can_compile() -> None:
    codes: list[int] = []

    def fork() -> None:
        child = os.fork()
        if child == 0:
            try:
                nvrtc.compile_cubin(kernel("*x = 3.f;"), name="k", headers={}, options=OPTIONS)
            finally:
                os._exit(0 if sys.exc_info()[0] is None else 1)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    forking = threading.Thread(target=fork)
    with nvrtc._gate.no_fork():
        forking.start()
        forking.join(0.2)
        assert forking.is_alive()
        assert not codes
    forking.join(60)
    assert codes == [0]
    nvrtc.compile_cubin(kernel("*x = 4.f;"), name="k", headers={}, options=OPTIONS)


HANDLER = """
import os, signal
from jitattn.jit import nvrtc
from tests.jit.test_nvrtc import OPTIONS, kernel

def compiles(text):
    nvrtc.compile_cubin(kernel(text), name="k", headers={}, options=OPTIONS)
    return True

children = []
def fork(*signal):
    child = os.fork()
    if child == 0:
        os._exit(not compiles("*x = 5.f;"))
    children.append(child)

signal.signal(signal.SIGALRM, fork)
compiles("*x = 1.f;")
with nvrtc._gate.no_fork():
    signal.raise_signal(signal.SIGALRM)
signal.setitimer(signal.ITIMER_REAL, 0.001)
number = 0
while len(children) < 2:
    number += 1
    compiles(f"*x = {number}.f + 7.f;")
print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


def test_a_signal_handler_may_fork_while_its_thread_compiles() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HANDLER],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.stdout == "0 0\n", done.stderr


def test_importing_does_not_load_the_compiler() -> None:
    code = "import sys, jitattn.jit.nvrtc, jitattn.jit.build; print('cuda.bindings' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.stdout == "False\n", done.stderr
