"""The command line: what it prints, what it returns, and that only the demo needs torch."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jitattn.base.errors import JitAttnError
from jitattn.jit.cache import KernelCache
from jitattn.kernels import registry
from jitattn.kernels.pages.spec import LayerTablesSpec
from jitattn.spec.arch import ARCHITECTURES
from jitattn.spec.config import PlannerConfig
from jitattn.tools import cli, configs_command
from jitattn.tools.arguments import byte_size
from tests.support.model_configs import write_config
from tests.support.shared_files import shared_file

CONFIG = "head_dim=64,page_size=16"
NUM_KERNELS = len(registry.specs_of(PlannerConfig.parse(CONFIG), "sm_90a"))
MODEL = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 2,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def made_without_torch() -> Path:
    """A bundle of the kernels of CONFIG, made once a run: it takes seconds."""

    def make(folder: Path) -> None:
        arguments = ["precompile", "--arch", "sm_90a", "--config", CONFIG, "-o", str(folder)]
        done = run_without("torch", arguments)
        assert done.returncode == 0, done.stderr

    return shared_file("bundle-of-test-cli", make)


@pytest.fixture
def bundle(made_without_torch: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made_without_torch, tmp_path / "bundle"))


def write_model(folder: Path, **changes: object) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(MODEL | changes))
    return str(path)


def usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what ``arguments`` print, which argparse or the command must refuse with status 2."""
    try:
        status = cli.main(arguments)
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        status = stop.code
    assert status == 2
    return capsys.readouterr().err


def test_configs_prints_the_support_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["configs"]) == 0
    printed = capsys.readouterr().out
    for config in registry.supported_configs():
        assert all(name in printed for name in config.fields)
    assert all(arch in printed for arch in ARCHITECTURES)


def test_configs_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["configs", "--json", "--arch", "sm_80,sm_90a"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["arch"] for row in rows} == {"sm_80", "sm_90a"}
    assert all({"kernel", "tested_on", "fields"} <= row.keys() for row in rows)


def test_configs_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(["configs", "--arch", "sm_90a", "--json", "--model", write_model(tmp_path)]) == 0
    )
    rows = json.loads(capsys.readouterr().out)
    assert rows
    assert all(row["supported"] and row["kernel"] and not row["reasons"] for row in rows)
    writers = [row["what"] for row in rows if "kernel=preprocess" in row["config"]]
    assert "heads of 128, NeoX pairs, bfloat16 into bfloat16 pages of 16, by slots" in writers
    assert cli.main(["configs", "--model", write_model(tmp_path)]) == 0
    assert rows[0]["kernel"] in capsys.readouterr().out


def test_configs_of_an_unsupported_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path, head_dim=1000)
    assert cli.main(["configs", "--arch", "sm_90a", "--model", model]) == 1
    assert "head_dim=1000" in capsys.readouterr().out


def test_tables_of_models_lose_nothing_on_a_narrow_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    def narrow() -> Console:
        return Console(width=60, force_terminal=True, no_color=True, highlight=False)

    model = write_model(tmp_path)
    cli.main(["configs", "--arch", "sm_90a", "--model", model])
    wide = capsys.readouterr().out
    monkeypatch.setattr(configs_command, "make_console", narrow)
    cli.main(["configs", "--arch", "sm_90a", "--model", model])
    lines = [line for line in capsys.readouterr().out.splitlines() if "│" in line]
    columns = [line.split("│")[4].strip() for line in lines]
    name = re.search(r"jitattn_decode\w+", wide)
    assert name is not None
    assert name[0] in "".join(columns)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("sm_100", "compute capability 10.0 runs code for sm_100f"),
        ("sm_89", "compute capability 8.9 runs code for sm_80"),
        ("9.0", "compute capability 9.0 runs code for sm_90a"),
        ("sm_121a", "compute capability 12.1 runs code for sm_120f"),
        ("sm_75", "compute capability 7.5 has no kernels"),
        ("hopper", "'hopper' is not one of sm_80, sm_90a, sm_100f, sm_120f\n"),
    ],
)
def test_an_unknown_architecture_is_told_the_one_that_is_meant(
    given: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in usage_error(["configs", "--arch", given], capsys)
    assert told in usage_error(["render", "--arch", given], capsys)
    (reason,) = registry.check_config(arch=given).reasons
    assert told.strip() in reason


def test_a_folder_that_is_not_there_is_no_empty_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for action in ("list", "verify"):
        assert cli.main(["cache", action, str(tmp_path / "nowhere")]) == 1
        assert "nowhere does not exist" in capsys.readouterr().err


def test_render_prints_a_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["render", "--config", CONFIG]) == 0
    source = capsys.readouterr().out
    assert 'extern "C"' in source
    assert "DecodeSpec: head_dim=64 " in source


def test_render_prints_the_kernel_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["render", "--symbol", "jitattn_schedule"]) == 0
    assert "jitattn_schedule" in capsys.readouterr().out
    message = usage_error(["render", "--symbol", "jitattn_nothing"], capsys)
    assert "jitattn_nothing" in message
    assert "jitattn_schedule" in message


def test_cache_list_as_json(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert cli.main(["cache", "list", "--json", str(bundle)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == NUM_KERNELS
    fields = {"name", "path", "arch", "symbol", "compiler", "size_bytes", "age_s", "idle_s"}
    assert all(set(row) == fields for row in rows)
    assert all(Path(row["path"]).is_dir() and row["arch"] == "sm_90a" for row in rows)


def test_explain_takes_a_kernel_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--config", CONFIG]) == 0
    printed = capsys.readouterr().out
    for words in ("registers", "occupancy on 9.0", "CTAs an SM", "head_dim=64", "V13"):
        assert words in printed
    assert cli.main(["explain", "--config", CONFIG, "--symbol", "jitattn_schedule", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["symbol"] == "jitattn_schedule"
    assert found["occupancy"][0]["max_warps"] == 64
    assert "jitattn_schedule" in usage_error(["explain", "--symbol", "nothing"], capsys)


def test_explain_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("jitattn.tools.explain.disassembler", lambda: None)
    assert cli.main(["explain", "--config", CONFIG, "--symbol", "jitattn_schedule"]) == 0
    assert "pip install nvidia-cuda-nvdisasm" in capsys.readouterr().out


def test_render_writes_every_kernel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["render", "-o", str(tmp_path / "sources")]) == 0
    paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert len(paths) == len(registry.specs_of(PlannerConfig(), "sm_90a"))
    assert all('extern "C"' in path.read_text() for path in paths)


@pytest.mark.parametrize(
    ("config", "word"),
    [("head_dim=10", "head_dim=10"), ("head_dimm=64", "head_dimm"), ("head_dim", "name=value")],
)
def test_a_bad_config_is_one_message(
    config: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["render", "--config", config]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("jitattn: ")
    assert word in printed.err
    assert "Traceback" not in printed.err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["configs", "--arch", "sm_99"],
        ["configs", "--arch", ","],
        ["precompile", "--arch", "sm_90a", "-o", "x"],
        ["precompile", "--config", CONFIG, "-o", "x"],
        ["precompile", "--arch", "sm_90a", "--config", CONFIG],
        ["precompile", "--arch", "sm_90a", "--config", CONFIG, "--preset", "y", "-o", "x"],
        ["precompile", "--arch", "sm_90a", "--preset", "nonsense", "-o", "x"],
        ["precompile", "--arch", "sm_90a", "--config", CONFIG, "-j", "0", "-o", "x"],
        ["cache"],
        ["cache", "prune"],
        ["cache", "prune", "--max-size", "much"],
        ["bundle"],
        ["bundle", "wheel", "x"],
        ["bundle", "sha256"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert usage_error(arguments, capsys)


def test_a_missing_model_is_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["configs", "--model", str(tmp_path / "none.json")]) == 1
    assert "none.json" in capsys.readouterr().err


def test_a_bad_setting_is_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JITATTN_JIT", "perhaps")
    assert "JITATTN_JIT='perhaps'" in usage_error(["doctor"], capsys)


def test_precompile_then_look_after_the_bundle(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    num_entries = len(list(bundle.glob("*/kernel.cubin")))
    assert num_entries == NUM_KERNELS

    capsys.readouterr()
    again = ["precompile", "--arch", "sm_90a", "--config", CONFIG, "-o", str(bundle)]
    assert cli.main(again) == 0
    assert f"0 compiled and {NUM_KERNELS} there before" in capsys.readouterr().out

    assert cli.main(["cache", "list", str(bundle)]) == 0
    assert "jitattn_schedule" in capsys.readouterr().out
    assert cli.main(["cache", "verify", str(bundle)]) == 0
    assert f"{NUM_KERNELS} kernels, 0 damaged" in capsys.readouterr().out

    damaged = next(bundle.glob("*schedule*/kernel.cubin"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    assert cli.main(["cache", "verify", str(bundle)]) == 1
    assert damaged.parent.name in capsys.readouterr().err

    assert cli.main(["cache", "prune", "--max-size", "1G", str(bundle)]) == 0
    assert "removed 0 kernels" in capsys.readouterr().out
    assert cli.main(["cache", "clear", str(bundle)]) == 0
    assert f"removed {NUM_KERNELS} kernels" in capsys.readouterr().out
    assert not list(bundle.glob("*/kernel.cubin"))


def test_cache_commands_default_to_the_users_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JITATTN_CACHE_DIR", str(tmp_path / "mine"))
    assert cli.main(["cache", "path"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'mine'}\n"
    for action in (["list"], ["verify"], ["prune", "--max-size", "0"], ["clear"]):
        assert cli.main(["cache", *action]) == 0
    assert not (tmp_path / "mine").exists()


def test_verify_of_a_folder_that_is_not_there_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["cache", "verify", str(tmp_path / "nothing")]) == 1
    assert "nothing" in capsys.readouterr().err


def test_a_file_is_no_folder_of_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["cache", "verify", str(tmp_path / "file")]) == 1
    assert "is not a folder" in capsys.readouterr().err


def test_an_unsafe_cache_is_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o777)
    assert cli.main(["cache", "list", str(tmp_path)]) == 1
    assert "refused" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("1000", 1000), ("1k", 1024), ("1.5M", 3 * 2**19), ("2GiB", 2**31), ("1tb", 2**40)],
)
def test_sizes(text: str, size: int) -> None:
    assert byte_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1", "1x", "1e99999", "nan", "one"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        byte_size(text)


def test_every_failure_of_a_command_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arch: str) -> list[registry.Config]:
        raise JitAttnError(f"nothing for {arch}")

    monkeypatch.setattr(registry, "supported_configs", fail)
    assert cli.main(["configs", "--arch", "sm_80"]) == 1
    assert capsys.readouterr().err == "jitattn: nothing for sm_80\n"


def run_without(module: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process in which importing ``module`` fails."""
    script = f"""
import sys
sys.modules[{module!r}] = None
from jitattn.tools.cli import main
sys.exit(main(sys.argv[1:]))
"""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], env=environ, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["configs"], ["render"], ["cache", "list"], ["doctor"]],
    ids=" ".join,
)
def test_commands_need_no_torch(arguments: list[str]) -> None:
    done = run_without("torch", arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_precompile_needs_no_torch(made_without_torch: Path) -> None:
    assert len(list(made_without_torch.glob("*/kernel.cubin"))) == NUM_KERNELS


def test_the_demo_says_that_it_needs_torch() -> None:
    done = run_without("torch", ["demo"])
    assert done.returncode == 2
    assert "torch" in done.stderr
    assert "Traceback" not in done.stderr


def test_configs_loads_little() -> None:
    # What makes `jitattn configs` quick: none of the heavy packages, and no compiler.
    script = """
import sys
from jitattn.tools.cli import main
main(["configs", "--json"])
heavy = {"torch", "cuda", "jinja2", "numpy", "filelock"} & set(sys.modules)
assert not heavy, heavy
"""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(
        [sys.executable, "-c", script], env=environ, stdout=subprocess.DEVNULL, check=True
    )


def test_a_reader_may_stop_early() -> None:
    command = f"{sys.executable} -m jitattn render | head -n 1"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, shell=True, env=environ, capture_output=True, text=True)
    assert done.stdout.startswith("// Rendered by jitattn")
    assert done.stderr == ""


# ---------------------------------------------------------------------------- models, wheels


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every configuration need one kernel that compiles quickly."""
    bundles = importlib.import_module("jitattn.bundles.precompile")
    monkeypatch.setattr(
        bundles,
        "_kernels",
        lambda configs, archs: {(LayerTablesSpec(), arch): None for arch in archs},
    )


@pytest.mark.usefixtures("quick")
def test_precompile_of_a_model_tells_what_it_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_config(tmp_path, "gemma-2-9b")
    command = ["precompile", "--arch", "sm_80", "--arch", "sm_90a,sm_80", "--model", str(tmp_path)]
    command += ["-o", str(tmp_path / "bundle"), "-j", "1"]
    assert cli.main(command) == 0
    printed = capsys.readouterr()
    assert "note: the file's dtype is float32: taken as bfloat16" in printed.err
    for words in ("sm_80", "sm_90a", "MB", "2 kernels, 2 compiled and 0 there before"):
        assert words in printed.out
    assert cli.main([*command[:-2], "--model", str(model)]) == 0
    assert "0 compiled and 2 there before" in capsys.readouterr().out


def test_configs_of_a_model_as_it_is_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config(tmp_path, "qwen2.5-7b")
    command = ["configs", "--arch", "sm_90a", "--json", "--model", str(tmp_path)]
    options = ["--tensor-parallel", "4", "--kv-dtype", "int8,auto", "--page-size", "32,8"]
    options += ["--page-table", "csr", "--dtype", "float16"]
    assert cli.main([*command, *options]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["use"] for row in rows} == {"attention", "preprocess", "append"}
    texts = [row["config"] for row in rows if row["use"] == "attention"]
    assert len(texts) == 4
    for words in ("num_qo_heads=7,num_kv_heads=1", "q_dtype=float16", "page_table=csr"):
        assert all(words in text for text in texts)
    assert sum("kv_dtype=int8" in text for text in texts) == 2


def test_configs_of_a_model_say_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(tmp_path, "deepseek-v2-lite")
    command = ["configs", "--arch", "sm_90a", "--json", "--model", str(tmp_path)]
    assert cli.main([*command, "--kv-dtype", "int8"]) == 1
    rows = json.loads(capsys.readouterr().out)
    reasons = [reason for row in rows for reason in row["reasons"]]
    assert any("kv_dtype=int8 is neither q_dtype nor float8_e4m3fn" in text for text in reasons)
    assert any(row["supported"] for row in rows)
    out = tmp_path / "bundle"
    command = ["precompile", "--arch", "sm_90a", "--model", str(tmp_path), "-o", str(out)]
    assert cli.main([*command, "--kv-dtype", "int8"]) == 1
    assert "kv_dtype=int8 is neither" in capsys.readouterr().err
    write_config(tmp_path, "phi-2", partial_rotary_factor=0.5)
    assert cli.main([*command, "--kv-dtype", "nvfp4"]) == 1
    assert "this model turns 40" in capsys.readouterr().err
    assert cli.main([*command, "--tensor-parallel", "5"]) == 1
    assert "tensor_parallel=5 does not divide num_attention_heads=32" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("option", [["--page-size", "16"], ["--dtype", "float16"]], ids=" ".join)
def test_how_a_model_is_served_is_about_a_model(
    option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["precompile", "--arch", "sm_90a", "--config", CONFIG, "-o", "x"]
    for arguments in (["configs"], command):
        assert f"{option[0]} is about --model" in usage_error([*arguments, *option], capsys)


@pytest.mark.parametrize(
    "option",
    [
        *(["--tensor-parallel", "0"], ["--tensor-parallel", "two"], ["--dtype", "float32"]),
        *(["--page-size", "16,x"], ["--page-size", ""], ["--kv-dtype", ","], ["--page-table", ""]),
    ],
    ids=" ".join,
)
def test_wrong_values_are_wrong_usage(
    option: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config(tmp_path, "qwen3-8b")
    assert option[0] in usage_error(["configs", "--model", str(tmp_path), *option], capsys)


def test_models_need_no_torch(tmp_path: Path) -> None:
    write_config(tmp_path, "gpt-oss-20b")
    done = run_without("torch", ["configs", "--model", str(tmp_path)])
    assert done.returncode == 0, done.stderr
    assert "use_sinks=true" in done.stdout.replace("\n", "")


@pytest.mark.usefixtures("quick")
def test_a_bundle_becomes_a_wheel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "bundle"
    command = ["precompile", "--arch", "sm_90a", "--config", CONFIG, "-j", "1", "-o", str(folder)]
    assert cli.main(command) == 0
    capsys.readouterr()
    assert cli.main(["bundle", "sha256", str(folder)]) == 0
    digest = capsys.readouterr().out.strip()
    assert len(digest) == 64
    out = str(tmp_path / "dist")
    assert cli.main(["bundle", "wheel", str(folder), "-o", out]) == 0
    assert digest[:12] in Path(capsys.readouterr().out.strip()).name
    named = ["--name", "acme", "--version", "2.0"]
    assert cli.main(["bundle", "wheel", str(folder), "-o", out, *named]) == 0
    assert Path(capsys.readouterr().out.strip()).name == "acme-2.0-py3-none-any.whl"
    for arguments in (["sha256", out], ["wheel", out, "-o", out]):
        assert cli.main(["bundle", *arguments]) == 1
        assert "holds no kernels" in capsys.readouterr().err
    assert cli.main(["bundle", "wheel", str(folder), "-o", out, "--version", "new"]) == 1
    assert "is no version" in capsys.readouterr().err


# The first kernel is made as ever. The next one takes for ever, after a word.
SLOW = """
import signal, sys, time
from pathlib import Path
from jitattn.bundles import precompile
from jitattn.jit import build

real = build.fill_bundle

def fill(spec, arch, folder):
    if list(folder.glob("[!.]*/kernel.cubin")):
        (folder.parent / ("waits-" + arch)).touch()
        time.sleep(1000)
    return real(spec, arch, folder)

build.fill_bundle = fill
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background ignores
"""
MAIN = """
from jitattn.__main__ import main
precompile._WORKER = sys.argv.pop(1)
sys.exit(main())
"""
WORKER = "import sys; sys.path[:] = {path!r}\n" + SLOW + "precompile.serve()"


def interrupted(folder: Path, jobs: int, *signals: signal.Signals) -> subprocess.Popen[bytes]:
    """Interrupt a command that has made a kernel and will never make the next one."""
    command = [sys.executable, "-c", SLOW + MAIN, WORKER, "precompile", "-j", str(jobs)]
    command += ["--arch", "sm_80,sm_90a", "--config", CONFIG, "-o", str(folder)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    # In a group of its own, all of which a terminal's Ctrl-C would reach.
    process = subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
    )
    while not list(folder.parent.glob("waits-*")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    for number in signals:
        os.killpg(process.pid, number)
        time.sleep(0.5)  # a second one that comes at once is the same one
    return process


def test_an_interruption_leaves_whole_entries(tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    process = interrupted(folder, 1, signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert b"the same command goes on" in err
    assert b"Traceback" not in err
    cache = KernelCache(folder)
    kept = {entry.name for entry in cache.entries()}
    assert 0 < len(kept) < 2 * NUM_KERNELS
    assert not cache.verify()
    assert {path.name for path in folder.iterdir()} == kept


def test_a_second_interruption_waits_for_no_worker(tmp_path: Path) -> None:
    process = interrupted(tmp_path / "bundle", 2, signal.SIGINT, signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert not KernelCache(tmp_path / "bundle").verify()


WHILE_IMPORTING = """
import os, signal, sys
class Finder:
    def find_spec(self, name, *rest):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)
module = sys.argv.pop(1)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Finder())
from jitattn.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize("module", ["argparse", "jitattn.tools.cli", "jitattn.kernels.registry"])
def test_an_interruption_while_it_imports(module: str) -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WHILE_IMPORTING, module, "configs", "--json"]
    done = subprocess.run(command, env=environ, capture_output=True)
    assert (done.returncode, done.stderr) == (130, b"")
