"""How engines find jitattn, where they are old or absent."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.mark.parametrize(
    ("engine", "version", "message"),
    [
        ("sglang", "0.4.1", "SGLang 0.4.1 takes no attention backend"),
        ("vllm", "0.8.5", "vLLM 0.8.5 takes no attention backend"),
    ],
)
def test_an_older_engine_is_left_alone(
    engine: str,
    version: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its servers start all the same."""
    integration = importlib.import_module(f"jitattn.integrations.{engine}")
    for name in [name for name in sys.modules if name.split(".")[0] == engine]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, engine, SimpleNamespace(__version__=version))
    with caplog.at_level("WARNING", logger="jitattn"):
        integration.register()
    assert message in caplog.text


@pytest.mark.parametrize(("engine", "constant"), [("sglang", "NAME"), ("vllm", "PATH")])
def test_an_engine_is_not_imported_before_it_is_asked_for(engine: str, constant: str) -> None:
    script = (
        f"import sys, jitattn, jitattn.integrations.{engine} as found\n"
        f"assert callable(found.register) and found.{constant}\n"
        f"assert not {{{engine!r}, 'torch'}} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_versions_of_transformers_that_are_known_are_those_tested() -> None:
    noxfile = Path(__file__).parents[2] / "noxfile.py"
    (listed,) = re.findall(r"^TRANSFORMERS = \((.*?)^\)", noxfile.read_text(), re.M | re.S)
    tested = {(int(a), int(b)) for a, b in re.findall(r'"(\d+)\.(\d+)\.\d+"', listed)}
    registry = importlib.import_module("jitattn.integrations.transformers.registry")
    assert tested == registry.TESTED_VERSIONS
