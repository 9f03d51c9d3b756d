"""The command line: what it prints, what it returns, and that only the demo needs torch."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jitattn import cli, support
from jitattn.config import PlannerConfig
from jitattn.errors import JitAttnError

CONFIG = "head_dim=64,page_size=16"
NUM_KERNELS = len(support.resolve(PlannerConfig.parse(CONFIG), "sm_90a"))
MODEL = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 2,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    done = cli.main(["precompile", "--arch", "sm_90a", "--config", CONFIG, "-o", str(folder)])
    assert done == 0
    return folder


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
    for config in support.supported_configs():
        assert all(name in printed for name in config.fields)
    assert all(arch in printed for arch in support.ARCHITECTURES)


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
    assert cli.main(["configs", "--model", write_model(tmp_path)]) == 0
    assert rows[0]["kernel"] in capsys.readouterr().out


def test_configs_of_an_unsupported_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path, head_dim=1000)
    assert cli.main(["configs", "--arch", "sm_90a", "--model", model]) == 1
    assert "head_dim=1000" in capsys.readouterr().out


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
    monkeypatch.setattr("jitattn.explain.disassembler", lambda: None)
    assert cli.main(["explain", "--config", CONFIG, "--symbol", "jitattn_schedule"]) == 0
    assert "pip install nvidia-cuda-nvdisasm" in capsys.readouterr().out


def test_render_writes_every_kernel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["render", "-o", str(tmp_path / "sources")]) == 0
    paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert len(paths) == NUM_KERNELS
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


def test_an_unsafe_cache_is_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o777)
    assert cli.main(["cache", "list", str(tmp_path)]) == 1
    assert "refused" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("1000", 1000), ("1k", 1024), ("1.5M", 3 * 2**19), ("2GiB", 2**31), ("1tb", 2**40)],
)
def test_sizes(text: str, size: int) -> None:
    assert cli._size(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1", "1x", "1e99999", "nan", "one"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        cli._size(text)


def test_every_failure_of_a_command_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arch: str) -> list[support.Config]:
        raise JitAttnError(f"nothing for {arch}")

    monkeypatch.setattr(support, "supported_configs", fail)
    assert cli.main(["configs", "--arch", "sm_80"]) == 1
    assert capsys.readouterr().err == "jitattn: nothing for sm_80\n"


def run_without(module: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process in which importing ``module`` fails."""
    script = f"""
import sys
sys.modules[{module!r}] = None
from jitattn.cli import main
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


def test_precompile_needs_no_torch(tmp_path: Path) -> None:
    arguments = ["precompile", "--arch", "sm_90a", "--config", CONFIG, "-o", str(tmp_path / "b")]
    done = run_without("torch", arguments)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "b").glob("*/kernel.cubin"))) == NUM_KERNELS


def test_the_demo_says_that_it_needs_torch() -> None:
    done = run_without("torch", ["demo"])
    assert done.returncode == 2
    assert "torch" in done.stderr
    assert "Traceback" not in done.stderr


def test_configs_loads_little() -> None:
    # What makes `jitattn configs` quick: none of the heavy packages, and no compiler.
    script = """
import sys
from jitattn.cli import main
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
