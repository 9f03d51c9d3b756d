"""``jitattn cache``: entries listed, verified, pruned and removed."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from jitattn.base.errors import CacheError

if TYPE_CHECKING:
    from jitattn.jit.cache import Entry, KernelCache
from jitattn.tools.console import load_knobs, make_console, make_table, print_json


def run_cache_path(args: argparse.Namespace) -> int:
    """Print the folder."""
    # As bytes, so that a script can use whatever path it is.
    sys.stdout.flush()
    sys.stdout.buffer.write(os.fsencode(_cache(args).root) + b"\n")
    return 0


def run_cache_list(args: argparse.Namespace) -> int:
    """List the entries."""
    cache = _existing_cache(args)
    entries = cache.entries()
    if args.json:
        print_json([_entry_record(entry) for entry in entries])
        return 0
    console = make_console()
    table = make_table(
        console, f"{cache.root}", "arch", "kernel", "compiler", "bytes", "age", "idle"
    )
    for entry in entries:
        size, age, idle = f"{entry.size_bytes:,}", _days(entry.age_s), _days(entry.idle_s)
        table.add_row(entry.arch, entry.symbol, entry.compiler, size, age, idle)
    console.print(table)
    console.print(f"{len(entries)} kernels, {sum(e.size_bytes for e in entries):,} bytes")
    return 0


def _entry_record(entry: Entry) -> dict[str, object]:
    unknown = entry.idle_s == float("inf")  # which JSON cannot say
    return asdict(entry) | {"path": str(entry.path), "idle_s": None if unknown else entry.idle_s}


def _days(seconds: float) -> str:
    return "?" if seconds == float("inf") else f"{seconds / 86400:.1f} d"


def run_cache_verify(args: argparse.Namespace) -> int:
    """Check every digest; 1 if an entry is damaged."""
    cache = _existing_cache(args)
    damaged = cache.verify()
    for found in damaged:
        sys.stderr.write(f"jitattn: {found.path}: {found.damage}\n")
    sys.stdout.write(f"{len(cache.entries())} kernels, {len(damaged)} damaged\n")
    return 1 if damaged else 0


def run_cache_prune(args: argparse.Namespace) -> int:
    """Remove the least recently used entries."""
    return _say_removed(_cache(args).prune(args.max_size))


def run_cache_clear(args: argparse.Namespace) -> int:
    """Remove every entry."""
    return _say_removed(_cache(args).clear())


def _say_removed(removed: Sequence[Entry]) -> int:
    num_bytes = sum(entry.size_bytes for entry in removed)
    sys.stdout.write(f"removed {len(removed)} kernels, {num_bytes:,} bytes\n")
    return 0


def _existing_cache(args: argparse.Namespace) -> KernelCache:
    """Return what to look at; a folder that is named, and not the user's, has to be there."""
    cache = _cache(args)
    if args.folder is not None and not cache.root.exists():
        raise CacheError(f"{cache.root} does not exist")
    return cache


def _cache(args: argparse.Namespace) -> KernelCache:
    from jitattn.jit.cache import KernelCache

    folder = args.folder or load_knobs().cache_dir
    if folder is None:
        raise CacheError("this user has no home folder: set JITATTN_CACHE_DIR, or name a folder")
    return KernelCache(folder)
