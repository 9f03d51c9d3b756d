"""Command lines of the benches."""

from __future__ import annotations

import argparse


def make_parser(program: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of ``python -m program``, described by its module's docstring."""
    return argparse.ArgumentParser(
        prog=f"python -m {program}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
