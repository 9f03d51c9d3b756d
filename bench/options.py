"""Command lines of the benches."""

from __future__ import annotations

import argparse
import sys

import torch


def make_parser(program: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of ``python -m program``, described by its module's docstring."""
    return argparse.ArgumentParser(
        prog=f"python -m {program}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def cuda_device(program: str) -> torch.device:
    """Return the current CUDA device; without one, say so and exit with status 2."""
    if not torch.cuda.is_available():
        print(f"{program} needs a CUDA device", file=sys.stderr)
        raise SystemExit(2)
    return torch.device("cuda", torch.cuda.current_device())
