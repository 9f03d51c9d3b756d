"""The toolchains that jitattn is tried with: ``nox -l`` lists them, ``nox -s compiler`` runs some.

Nothing here needs a GPU. What was run, and when, is in docs/support.md. Files behind ``--`` are run
instead of those below.
"""

from __future__ import annotations

import nox

nox.needs_version = ">=2025.2"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["compiler", "interpreter"]

RUN = ("jinja2", "filelock", "platformdirs", "rich", "nvidia-cutlass")
TEST = ("pytest", "hypothesis", "nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm")

# The binding and the compiler, which come from packages of their own.
COMPILERS = {
    "nvrtc13.5": ("cuda-python==13.4.4", "nvidia-cuda-nvrtc==13.5.37"),
    "nvrtc13.0": ("cuda-python==13.0.3", "nvidia-cuda-nvrtc==13.0.88"),  # torch's of CUDA 13
    "nvrtc12.9": ("cuda-python==12.9.10", "nvidia-cuda-nvrtc-cu12==12.9.86"),
    "nvrtc12.9-binding13.4": ("cuda-python==13.4.4", "nvidia-cuda-nvrtc-cu12==12.9.86"),
    "nvrtc13.5-binding12.9": ("cuda-python==12.9.10", "nvidia-cuda-nvrtc==13.5.37"),
}
# A few kernels of every family, for every architecture.
KERNELS = (
    "tests/compile/test_params.py",
    "tests/compile/test_compile_all.py",
    "tests/compile/test_compile_mla.py",
    "tests/compile/test_compile_transfers.py",
    "tests/compile/test_preprocess.py",
    "tests/compile/test_saturation.py",
    "-k",
    "not test_kernel or d64_p16 or d128_p16 or sm_100f",
)
# The reference, planners, what writes and moves tokens, and what becomes of a kernel.
UNIT = (
    *(f"tests/{folder}" for folder in ("kernels", "tensors", "kv", "device", "bundles", "jit")),
    *(
        "tests/compat/test_flash_attn.py",
        "tests/tools/test_explain.py",
        "tests/tools/test_doctor.py",
    ),
    *("-m", "not emulator"),
)
MODELS = (
    "tests/tensors/test_rope_models.py",
    "tests/tensors/test_rope.py",
    "tests/bundles/test_model_config.py",
)
FLASHINFER = (
    "tests/compat/test_flashinfer_names.py",
    "tests/compat/test_flashinfer.py",
    "-k",
    "sources or names",
)
ENGINES = (
    "tests/integrations/test_transformers.py",
    "tests/integrations/test_transformers_versions.py",
)
# The last release of every minor version that jitattn registers with unasked.
TRANSFORMERS = (
    "5.17.0",
    "5.18.0",
    "5.19.0",
    "5.20.2",
    "5.21.1",
    "5.22.2",
    "5.23.0",
    "5.24.0",
)
# What vLLM's releases want of torch and of what their code does not take in any version; their own
# pin of tvm-ffi does not go with every xgrammar that they allow.
VLLM = {
    "0.26.0": (
        *("torch==2.11.0", "torchvision==0.26.0", "transformers==5.17.0", "mcp<2"),
        *("apache-tvm-ffi==0.1.15.post2", "xgrammar==0.2.9"),
    ),
    "0.33.0": (
        *("torch==2.14.0", "torchvision==0.29.0", "transformers==5.20.2", "mcp<3", "orjson"),
        *("apache-tvm-ffi==0.1.11", "xgrammar==0.2.8", "oss-harmony"),
    ),
}
VLLM_TESTS = (
    "tests/integrations/test_vllm.py",
    "tests/integrations/test_vllm_mla.py",
    "tests/integrations/test_vllm_engine.py",
)
# What else is imported on the way to an engine. Triton's interpreter takes arrays of one element
# for numbers, as numpy did to 2.2.
VLLM_NEEDS = (
    *("numpy==2.2.*", "aiohttp", "anthropic<1", "blake3", "cachetools", "cbor2", "cloudpickle"),
    *("compressed-tensors==0.17.0", "depyf", "einops", "fastapi<0.137", "jsonschema"),
    *("llguidance<1.8", "lm-format-enforcer", "loguru", "mistral-common", "msgspec", "openai<3"),
    *("model-hosting-container-standards", "openai-harmony", "opencv-python-headless"),
    *("opentelemetry-sdk", "outlines-core", "partial-json-parser", "prometheus-client"),
    *("protobuf", "psutil", "py-cpuinfo", "pybase64", "pycountry", "pydantic<2.13"),
    *("pydantic-extra-types", "python-multipart", "pyzmq", "regex", "requests", "sentencepiece"),
    *("setproctitle", "tiktoken", "uvloop"),
)
# What SGLang's release wants of others, and what else is imported on the way to its engine. Python
# ends in a fault with the sentencepiece that it names, 0.2.1.
SGLANG = (
    *("torch==2.14.1", "torchvision==0.29.1", "transformers==5.19.0", "compressed-tensors==0.18.0"),
    *("apache-tvm-ffi==0.1.11", "xgrammar==0.2.7", "llguidance<2", "openai==2.8.0"),
    *("numba==0.65.1", "openai-harmony==0.0.4", "sentencepiece==0.2.3", "aiohttp", "anthropic"),
    *("dill", "distro", "einops", "fastapi", "gguf", "interegular", "ipython", "mistral-common"),
    *("msgspec", "nvidia-ml-py", "orjson", "partial-json-parser", "pillow", "prometheus-client"),
    *("psutil", "pybase64", "pydantic", "python-multipart", "pyzmq", "regex", "requests", "scipy"),
    *("setproctitle", "tiktoken", "uvicorn", "uvloop", "xxhash", "zstandard"),
)
SGLANG_TESTS = ("tests/integrations/test_sglang.py", "tests/integrations/test_sglang_engine.py")
TORCHES = {
    "torch2.6": ("torch==2.6.0", "numpy==1.26.4"),  # the oldest of each
    "torch2.13": ("torch==2.13.0",),
}


@nox.session(python="3.11")
@nox.parametrize("packages", [nox.param(COMPILERS[name], id=name) for name in COMPILERS])
def compiler(session: nox.Session, packages: tuple[str, ...]) -> None:
    """Compile a sample of kernels with one binding and one NVRTC, without torch."""
    session.install(*packages, *RUN, *TEST)
    session.install("--no-deps", "-e", ".")
    session.run("pytest", "-q", *(session.posargs or KERNELS))


@nox.session(python="3.11")
@nox.parametrize("packages", [nox.param(TORCHES[name], id=name) for name in TORCHES])
def torch(session: nox.Session, packages: tuple[str, ...]) -> None:
    """Run planners and the reference with one torch, on the CPU."""
    session.install(*packages, "-e", ".[test]")
    # Its Dynamo takes no plan as an argument; eager calls are tried.
    compiled = ("--deselect", "tests/kernels/attention/test_cascade.py::test_it_compiles")
    old = compiled if "torch==2.6.0" in packages else ()
    session.run("pytest", "-q", *(session.posargs or UNIT), *old)


@nox.session(python=["3.11", "3.12", "3.13"])
def interpreter(session: nox.Session) -> None:
    """Run the same with one Python and the versions of constraints.txt."""
    session.install("-c", "constraints.txt", "-e", ".[test]")
    session.run("pytest", "-q", *(session.posargs or UNIT))


@nox.session(python="3.11")
def models(session: nox.Session) -> None:
    """Compare the rotation of every model type with transformers' own modules."""
    session.install("-c", "constraints.txt", "-e", ".[test]", "transformers==5.24.*")
    session.run("pytest", "-q", *(session.posargs or MODELS))


@nox.session(python="3.11")
def flashinfer(session: nox.Session) -> None:
    """Compare the table of FlashInfer's names and parameters with the newest release's sources."""
    session.install("-c", "constraints.txt", "-e", ".[test]")
    session.install("--no-deps", "flashinfer-python")
    session.run("python", "-m", "tests.support.flashinfer_table", "--check")
    session.run("pytest", "-q", *(session.posargs or FLASHINFER))


@nox.session(python="3.11")
@nox.parametrize("package", ["flashinfer", "flash_attn"])
def suites(session: nox.Session, package: str) -> None:
    """Run another package's own tests over the functions of jitattn that stand for its."""
    session.install("-c", "constraints.txt", "-e", ".[test]", "einops")
    session.run("python", "-m", "tests.suites", package, *session.posargs)


@nox.session(python="3.11")
@nox.parametrize("version", [nox.param(version, id=version) for version in TRANSFORMERS])
def transformers(session: nox.Session, version: str) -> None:
    """Compare tokens through jitattn with eager's, with one transformers, on the CPU."""
    session.install("-c", "constraints.txt", "-e", ".[test]", f"transformers=={version}", "psutil")
    session.run("pytest", "-q", *(session.posargs or ENGINES))


@nox.session(python="3.11")
def newest_transformers(session: nox.Session) -> None:
    """Likewise with the newest one, whichever that is."""
    session.install("-c", "constraints.txt", "-e", ".[test]", "transformers", "psutil")
    session.run("pytest", "-q", *(session.posargs or ENGINES))


@nox.session(python="3.12")
@nox.parametrize("version", [nox.param(version, id=version) for version in VLLM])
def vllm(session: nox.Session, version: str) -> None:
    """Decode with vLLM's engine on the CPU, from its wheel for CUDA, with both of its runners."""
    session.install(*VLLM[version], *VLLM_NEEDS, "-e", ".[test]")
    session.install("--no-deps", f"vllm=={version}")
    session.run("pytest", "-q", *(session.posargs or VLLM_TESTS))


@nox.session(python="3.11")
def sglang(session: nox.Session) -> None:
    """Decode with SGLang's engine on the CPU, from its wheel for CUDA."""
    session.install(*SGLANG, "-e", ".[test]")
    session.install("--no-deps", "sglang==0.5.23")
    session.run("pytest", "-q", *(session.posargs or SGLANG_TESTS))


@nox.session(python="3.11")
def nano_vllm(session: nox.Session) -> None:
    """Decode with nano-vllm's engine on the CPU, with its functions compiled and without."""
    session.install("-c", "constraints.txt", "-e", ".[test]", "nano-vllm-fork==20260210")
    session.run("pytest", "-q", *(session.posargs or ("tests/integrations/test_nano_vllm.py",)))
