"""What a run of tests/gpu/run.py came to, in the form of RESULTS.md; from its files alone.

A folder of results holds ``facts.json``, and for each part of the run ``NAME.xml`` (junit),
``NAME.json`` (how the process ended) and ``NAME.log``. What was cut off has counts up to there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")


@dataclass(frozen=True)
class Part:
    """A file of tests, or a tool of compute-sanitizer.

    Attributes:
        name: of the file without ``.py``, or of the tool.
        passed, skipped: counts.
        failed: names of tests that failed, in their setup or teardown, too.
        problem: why there may be more to say, such as "cut off after 600 s"; else empty.
        findings: what a sanitizer counted, such as "0 errors"; empty for tests.
    """

    name: str
    passed: int = 0
    skipped: int = 0
    failed: tuple[str, ...] = ()
    problem: str = ""
    findings: str = ""

    @property
    def is_clean(self) -> bool:
        """Whether all that was to run did, without a fault."""
        is_silent = self.name not in SANITIZERS or self.findings.startswith("0 ")
        return not self.failed and not self.problem and is_silent

    @property
    def row(self) -> str:
        what = f"`{self.name}.py`"
        if self.name in SANITIZERS:
            cases = self.passed + len(self.failed)
            what = f"`compute-sanitizer` {self.name}, {cases} cases: {self.findings}"
        elif self.name == "unit":
            what = "`gpu` tests outside `tests/gpu`"
        what += f"; {self.problem}" if self.problem else ""
        return f"| {what} | {self.passed} | {len(self.failed)} | {self.skipped} |"


def read_part(name: str, folder: Path) -> Part:
    """Return what the files of a part say."""
    ended = json.loads((folder / f"{name}.json").read_text())
    log = folder / f"{name}.log"
    findings = findings_in(log.read_text(errors="replace")) if name in SANITIZERS else ""
    passed, skipped, failed = _counts(folder / f"{name}.xml")
    problem = ""
    if ended["cut_off"]:
        problem = f"cut off after {ended['seconds']:.0f} s"
    elif passed + skipped + len(failed) == 0:
        problem = f"no test ran, exit status {ended['status']}"
    elif ended["status"] != 0 and not failed:
        problem = f"exit status {ended['status']}"
    return Part(name, passed, skipped, tuple(failed), problem, findings)


def _counts(path: Path) -> tuple[int, int, list[str]]:
    if not path.exists():
        return 0, 0, []
    passed, skipped, failed = 0, 0, []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        tags = {child.tag for child in case}
        if tags & {"failure", "error"}:
            failed.append(f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}")
        elif "skipped" in tags:
            skipped += 1
        else:
            passed += 1
    # A test that fails and whose teardown does, too, is there twice.
    return passed, skipped, list(dict.fromkeys(failed))


def findings_in(log: str) -> str:
    """Return what the last summary of compute-sanitizer in ``log`` counts."""
    if "control: FAILED" in log:
        return "the planted fault was not found"
    found = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+ (?:errors?|hazards?))", log)
    return found[-1] if found else "no summary"


def summary_of(folders: Sequence[Path]) -> str:
    """Return a section of RESULTS.md: facts, a row for each part, and what failed."""
    facts = json.loads((folders[0] / "facts.json").read_text())
    parts = [
        read_part(path.stem, folder)
        for folder in folders
        for path in sorted(folder.glob("*.json"))
        if path.stem != "facts"
    ]
    parts.sort(key=lambda part: (part.name in SANITIZERS, part.name == "unit", part.name))
    lines = [
        f"## {facts['date']}, commit {facts['commit']}",
        "",
        f"{facts['cards']}, driver {facts['driver']}, torch {facts['torch']}, Python "
        f"{facts['python']}; {facts['jobs']} processes at once.",
        "",
        "| what | passed | failed | skipped |",
        "| -- | -- | -- | -- |",
        *(part.row for part in parts),
        _total(parts),
        "",
        *_failures(parts),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _total(parts: Iterable[Part]) -> str:
    tests = [part for part in parts if part.name not in SANITIZERS]
    counts = [
        sum(part.passed for part in tests),
        sum(len(part.failed) for part in tests),
        sum(part.skipped for part in tests),
    ]
    return f"| all tests | {' | '.join(map(str, counts))} |"


def _failures(parts: Iterable[Part]) -> Iterable[str]:
    unclean = [part for part in parts if not part.is_clean]
    if not unclean:
        yield "Nothing failed, and nothing was cut off."
    for part in unclean:
        why = part.problem or (part.findings if part.name in SANITIZERS else "")
        yield f"- `{part.name}`: {why or f'{len(part.failed)} failed'}"
        yield from (f"  - `{name}`" for name in part.failed)
