"""Environment variables: defaults, values, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import platformdirs
import pytest

from jitattn.base import knobs

REPOSITORY = Path(__file__).parents[2]


def test_defaults() -> None:
    settings = knobs.load({})
    assert settings == knobs.Knobs(cache_dir=platformdirs.user_cache_path("jitattn"))
    assert (settings.jit, settings.lock_timeout, settings.precompiled) == (True, 120.0, ())
    assert not settings.lineinfo
    assert not settings.check


def test_every_variable_is_read() -> None:
    settings = knobs.load(
        {
            "JITATTN_CACHE_DIR": "/cache",
            "JITATTN_PRECOMPILED": "/a::/b:",
            "JITATTN_BUNDLE_SHA256": "0123456789ABCDEF" * 4,
            "JITATTN_JIT": "0",
            "JITATTN_LOCK_TIMEOUT": "2.5",
            "JITATTN_LINEINFO": "1",
            "JITATTN_CHECK": "1",
        }
    )
    assert settings == knobs.Knobs(
        cache_dir=Path("/cache"),
        precompiled=(Path("/a"), Path("/b")),
        bundle_sha256="0123456789abcdef" * 4,
        jit=False,
        lock_timeout=2.5,
        lineinfo=True,
        check=True,
    )


def test_empty_means_default() -> None:
    names = [f"JITATTN_{field.name.upper()}" for field in fields(knobs.Knobs)]
    names.remove("JITATTN_BUNDLE_SHA256")
    assert knobs.load(dict.fromkeys(names, "")) == knobs.load({})


def test_an_empty_pin_is_none_that_a_failed_command_may_take_away() -> None:
    with pytest.raises(ValueError, match="JITATTN_BUNDLE_SHA256='': expected the 64 hex"):
        knobs.load({"JITATTN_BUNDLE_SHA256": ""})


def test_what_nobody_reads_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs, "_named", set())
    mistyped = {"JITATTN_JTI": "0", "JITATTN_BENCH_FA3": "x", "JIT": "0", "JITATTN_JIT": "0"}
    with pytest.warns(RuntimeWarning, match=r"does not know JITATTN_JTI: it reads .*JITATTN_JIT,"):
        assert not knobs.load(mistyped).jit
    assert not knobs.load(mistyped).jit
    assert knobs.unknown_variables(mistyped) == ["JITATTN_JTI"]


@pytest.mark.parametrize("name", ["JITATTN_JIT", "JITATTN_LINEINFO", "JITATTN_CHECK"])
def test_flags_accept_0_and_1_only(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='no': expected 0 or 1"):
        knobs.load({name: "no"})


@pytest.mark.parametrize("value", ["0" * 63, "0" * 65, "g" * 64, "sha256:" + "0" * 57])
def test_a_digest_has_64_hexadecimal_digits(value: str) -> None:
    with pytest.raises(ValueError, match=r"JITATTN_BUNDLE_SHA256=.*: expected the 64 hex"):
        knobs.load({"JITATTN_BUNDLE_SHA256": value})


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "soon"])
def test_the_timeout_is_a_number_of_seconds(value: str) -> None:
    with pytest.raises(ValueError, match=r"JITATTN_LOCK_TIMEOUT=.*: expected a number of seconds"):
        knobs.load({"JITATTN_LOCK_TIMEOUT": value})


def test_paths_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    settings = knobs.load({"JITATTN_CACHE_DIR": "cache", "JITATTN_PRECOMPILED": "~/bundle"})
    assert settings.cache_dir == tmp_path / "cache"
    assert settings.precompiled == (Path("/home/someone/bundle"),)


def test_an_unknown_home_is_refused() -> None:
    with pytest.raises(ValueError, match="JITATTN_CACHE_DIR='~nobody-here/x': expected a path"):
        knobs.load({"JITATTN_CACHE_DIR": "~nobody-here/x"})


@pytest.mark.parametrize("failure", [RuntimeError("no home"), KeyError("uid"), OSError("denied")])
def test_without_a_home_there_is_no_cache(
    monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def fail(*args: object, **kwargs: object) -> Path:
        raise failure

    monkeypatch.setattr(platformdirs, "user_cache_path", fail)
    assert knobs.load({}).cache_dir is None
    assert knobs.load({"JITATTN_CACHE_DIR": "/cache"}).cache_dir == Path("/cache")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without an entry")
def test_without_home_and_passwd_entry() -> None:
    # The user changes after the imports: the interpreter may lie where only root can read it.
    code = (
        "import os, platformdirs, platformdirs.unix; from jitattn.base import knobs; "
        "os.setuid(54321); "
        "print(knobs.load({}).cache_dir)"
    )
    environment = {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == "None", done.stderr


@pytest.mark.parametrize("value", ["", "relative"])
def test_a_meaningless_xdg_cache_home_is_ignored(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert knobs.load({}).cache_dir == Path("/home/someone/.cache/jitattn")


def test_loading_creates_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    knobs.load({})
    assert not list(tmp_path.iterdir())


def test_library_search_reads_what_decides_the_compiler() -> None:
    first = knobs.library_search({"LD_LIBRARY_PATH": "/a"})
    assert first != knobs.library_search({"CUDA_PATH": "/a"})
    assert len(first) == len(knobs.library_search({}))
