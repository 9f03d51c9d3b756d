"""Argument types of the command line: architectures, counts, names, sizes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, TypeAlias

from jitattn.spec.arch import why_no_arch

if TYPE_CHECKING:
    pass


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
_SIZE_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def add_command(commands: Commands, name: str, text: str) -> argparse.ArgumentParser:
    """Add a command whose line in the list of commands is also what its --help begins with."""
    return commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")


def arch_list(text: str) -> tuple[str, ...]:
    """Read architectures, separated by commas."""
    archs = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for arch in archs:
        arch_name(arch)
    if not archs:
        raise argparse.ArgumentTypeError("no architecture given")
    return archs


def arch_name(text: str) -> str:
    """Read an architecture."""
    if reason := why_no_arch(text):
        raise argparse.ArgumentTypeError(reason)
    return text


def positive_int(text: str) -> int:
    """Read a positive integer."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def name_list(text: str) -> tuple[str, ...]:
    """Read names, separated by commas."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return names


def count_list(text: str) -> tuple[int, ...]:
    """Read positive integers, separated by commas."""
    return tuple(positive_int(part) for part in name_list(text))


def byte_size(text: str) -> int:
    """Read a number of bytes, with a unit or without."""
    lowered = text.strip().lower().removesuffix("ib").removesuffix("b")
    number, unit = (lowered[:-1], lowered[-1:]) if lowered[-1:].isalpha() else (lowered, "")
    try:
        size = int(float(number) * _SIZE_UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        size = -1
    if size < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size, such as 1000000, 500M or 2G")
    return size
