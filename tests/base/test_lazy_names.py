"""Modules with lazy names list them, those not imported yet too."""

from __future__ import annotations

import subprocess
import sys

MODULES = ("cascade", "errors", "pages", "parallel", "quant", "types", "variants")


def test_dir_lists_them() -> None:
    code = (
        "import importlib, sys, jitattn\n"
        "loaded = {*sys.modules}\n"
        f"for name in {MODULES}:\n"
        "    module = importlib.import_module(f'jitattn.{name}')\n"
        "    assert {*dir(module)} == {*module.__all__}, name\n"
        "assert 'torch' not in {*sys.modules} - loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
