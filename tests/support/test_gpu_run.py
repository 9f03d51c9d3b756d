"""tests/gpu/run.py without a card: what it runs, how it ends what takes long, what it sums up."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.gpu import run as module
from tests.gpu.run import FOLDER, Job, file_names, jobs_of, main, run, run_job
from tests.gpu.summary import SANITIZERS, findings_in, read_part, summary_of

FACTS = {
    **{"date": "2026-01-02", "commit": "abc", "cards": "2 x NVIDIA H100 80GB HBM3", "jobs": 6},
    **{"driver": "580.1", "torch": "2.11.0", "python": "3.12.3"},
}


def write_part(
    folder: Path,
    name: str,
    cases: dict[str, str] | None,
    *,
    status: int = 0,
    cut_off: bool = False,
    log: str = "",
) -> None:
    """Write the files of a part; ``cases`` says of each test "" or the tags of what befell it."""
    ended = {"status": status, "cut_off": cut_off, "seconds": 12.3}
    (folder / f"{name}.json").write_text(json.dumps(ended))
    (folder / f"{name}.log").write_text(log)
    if cases is None:
        return
    rows = "".join(
        f'<testcase classname="tests.gpu.{name}" name="{case.partition("@")[0]}">'
        + "".join(f'<{tag} message="m">text</{tag}>' for tag in tags.split())
        + "</testcase>"
        for case, tags in cases.items()
    )
    (folder / f"{name}.xml").write_text(
        f'<?xml version="1.0"?><testsuites><testsuite name="pytest">{rows}</testsuite></testsuites>'
    )


@pytest.fixture
def results(tmp_path: Path) -> Path:
    (tmp_path / "facts.json").write_text(json.dumps(FACTS))
    write_part(tmp_path, "test_append", {"a": "", "b": "", "c": "skipped"})
    failed = {"a": "", "b[1-x]": "failure", "b[1-x]@again": "error", "c": "error"}
    write_part(tmp_path, "test_fp8", failed, status=1)
    write_part(tmp_path, "test_decode", {"a": "", "b": ""}, status=2, cut_off=True)
    write_part(tmp_path, "test_jit", None, status=-11)
    write_part(tmp_path, "unit", {"a": "skipped", "b": ""})
    clean = "control\n= ERROR SUMMARY: 1 error\nmemcheck:\n= ERROR SUMMARY: 0 errors\n"
    write_part(tmp_path, "memcheck", {"a": "", "b": ""}, log=clean)
    hazards = "= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)\n"
    write_part(tmp_path, "racecheck", {"a": "", "b": ""}, status=1, log=hazards)
    return tmp_path


def test_summary(results: Path) -> None:
    assert summary_of([results]) == (
        """\
## 2026-01-02, commit abc

2 x NVIDIA H100 80GB HBM3, driver 580.1, torch 2.11.0, Python 3.12.3; 6 processes at once.

| what | passed | failed | skipped |
| -- | -- | -- | -- |
| `test_append.py` | 2 | 0 | 1 |
| `test_decode.py`; cut off after 12 s | 2 | 0 | 0 |
| `test_fp8.py` | 1 | 2 | 0 |
| `test_jit.py`; no test ran, exit status -11 | 0 | 0 | 0 |
| `gpu` tests of `tests/unit` | 1 | 0 | 1 |
| `compute-sanitizer` memcheck, 2 cases: 0 errors | 2 | 0 | 0 |
| `compute-sanitizer` racecheck, 2 cases: 3 hazards; exit status 1 | 2 | 0 | 0 |
| all tests | 6 | 2 | 2 |

- `test_decode`: cut off after 12 s
- `test_fp8`: 2 failed
  - `test_fp8::b[1-x]`
  - `test_fp8::c`
- `test_jit`: no test ran, exit status -11
- `racecheck`: exit status 1
"""
    )


def test_parts_of_several_runs(results: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    more = tmp_path_factory.mktemp("more")
    write_part(more, "test_wide", {"a": ""})
    assert "| `test_wide.py` | 1 | 0 | 0 |\n| `gpu` tests" in summary_of([results, more])


def test_a_clean_run_says_so(tmp_path: Path) -> None:
    (tmp_path / "facts.json").write_text(json.dumps(FACTS))
    write_part(tmp_path, "test_append", {"a": ""})
    assert summary_of([tmp_path]).endswith("\n\nNothing failed, and nothing was cut off.\n")


def test_what_sanitizers_say() -> None:
    assert findings_in("") == "no summary"
    assert findings_in("ERROR SUMMARY: 1 error\nERROR SUMMARY: 12 errors") == "12 errors"
    assert "planted" in findings_in(
        "control: FAILED, nothing was reported\nERROR SUMMARY: 0 errors"
    )


def test_a_tool_without_a_clean_summary_is_not_clean(tmp_path: Path) -> None:
    for log in ("", "control: FAILED\nERROR SUMMARY: 0 errors", "ERROR SUMMARY: 2 errors"):
        write_part(tmp_path, "memcheck", {"a": ""}, log=log)
        assert not read_part("memcheck", tmp_path).is_clean
    write_part(tmp_path, "memcheck", {"a": ""}, log="ERROR SUMMARY: 0 errors")
    assert read_part("memcheck", tmp_path).is_clean


def test_every_file_is_run(tmp_path: Path) -> None:
    jobs = jobs_of([*file_names(), "unit"], SANITIZERS, tmp_path)
    names = [job.name for job in jobs]
    wanted = {path.stem for path in FOLDER.glob("test_*.py")}
    apart = {name for name in wanted if name.startswith("test_sanitizer_")}
    script = (FOLDER / "sanitize.sh").read_text()
    assert all(name.removeprefix("test_sanitizer_") in script for name in apart)
    assert {*names} == wanted - apart | {"unit", *SANITIZERS}
    assert len(names) == len({*names})
    assert names[0] == "test_decode"
    for job in jobs:
        (report,) = [x for x in (*job.command, *job.environ.values()) if "--junitxml" in x]
        assert report == f"--junitxml={tmp_path / job.name}.xml"


def python(name: str, script: str) -> Job:
    return Job(name, (sys.executable, "-c", script), {"MARK": name})


WAITS = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, {then})
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
time.sleep(600)
"""


@pytest.mark.parametrize("then", ["lambda *_: sys.exit(2)", "signal.SIG_IGN"])
def test_what_takes_too_long_is_ended(
    then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its children, too; who writes a report when interrupted has time for it."""
    monkeypatch.setattr(module, "GRACE", 1.0)
    run_job(python("test_a", WAITS.format(then=then)), tmp_path, 1.0)
    part = read_part("test_a", tmp_path)
    assert part.problem.startswith("cut off after")
    assert not part.is_clean


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "facts.json").write_text(json.dumps(FACTS))
    script = "import os; print('ran', os.environ['MARK']); raise SystemExit({status})"
    jobs = [python(f"test_{i}", script.format(status=i)) for i in range(2)]
    assert not run(jobs, tmp_path, at_once=2, limit=60)
    assert (tmp_path / "test_1.log").read_text() == "ran test_1\n"
    assert "no test ran, exit status 1" in (tmp_path / "summary.md").read_text()
    assert "test_0" in capsys.readouterr().out


def test_the_command(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--summary", str(results)]) == 0
    assert capsys.readouterr().out == summary_of([results])
    with pytest.raises(SystemExit):
        main(["-o", str(results), "--files", "nothing"])
    assert "unknown: nothing; there are decode" in capsys.readouterr().err


def test_the_whole_of_it_on_tests_without_a_card(tmp_path: Path) -> None:
    """Where there is no card every test is skipped, which is said and is no failure."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("for machines without a card")
    given = ["-o", str(tmp_path), "--files", "claims", "--tools", "none", "--commit", "abc"]
    assert main(given) == 0
    text = (tmp_path / "summary.md").read_text()
    assert "commit abc" in text
    assert "| `test_claims.py` | 0 | 0 | " in text


def test_nothing_starts_without_the_kernels_of_the_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("JITATTN_PRECOMPILED", "JITATTN_JIT"):
        monkeypatch.setenv(name, "")  # main sets them; both are as before after the test
    monkeypatch.setenv("JITATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "configs_of", lambda arch: ["kernel=copy_pages"])
    (tmp_path / "bundle").mkdir()
    with pytest.raises(SystemExit):
        main(["--bundle", str(tmp_path / "bundle"), "-o", str(tmp_path / "out")])
    assert "1 kernels are in no bundle, jitattn_copy_pages" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
