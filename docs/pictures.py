"""Draw what sparse attention reads: ``python docs/pictures.py`` writes docs/images/sparse.svg.

It takes nothing but Python, and a test compares the file with what this draws now.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

SPARSE = Path(__file__).parent / "images/sparse.svg"
PAGES, PAGE_SIZE, LENGTH = 8, 8, 61  # the last page has 5 tokens
_LEFT, _CELL, _GAP = 170, 8, 10
_PAGE = PAGE_SIZE * _CELL + _GAP
_STYLE = """\
    text { font: 14px sans-serif; fill: #1f2933; }
    .head { font-weight: bold; }
    .small { font-size: 13px; fill: #52606d; }
    rect { stroke: #52606d; stroke-width: 0.5; }
    .a { fill: #f5b971; }
    .b { fill: #8ec5e8; }
    .unread { fill: #eef1f4; stroke: #b8c2cc; }
    .none { fill: #ffffff; stroke: #b8c2cc; stroke-dasharray: 1 2; }"""


class Row(NamedTuple):
    """Who reads, the tokens that it reads, and the class of their colour."""

    name: str
    tokens: Collection[int]
    colour: str


class Panel(NamedTuple):
    """A way to attend, and what is to be said of it."""

    title: str
    note: str
    rows: Sequence[Row]


def _pages(*numbers: int) -> list[int]:
    """The tokens of pages."""
    tokens = (n * PAGE_SIZE + i for n in numbers for i in range(PAGE_SIZE))
    return [token for token in tokens if token < LENGTH]


PANELS = (
    Panel(
        "dense",
        "every token, once for all query heads of a KV head",
        [Row("each KV head", range(LENGTH), "a")],
    ),
    Panel(
        "lists of tokens",
        "k tokens for each query token (here 12), wherever they lie",
        [
            Row("query token 0", (0, 3, 9, 10, 22, 29, 30, 37, 45, 52, 58, 59), "a"),
            Row("query token 1", (1, 3, 10, 17, 18, 29, 38, 40, 46, 58, 59, 60), "b"),
        ],
    ),
    Panel(
        "lists of pages",
        "k pages for each KV head (here 4), whole but for what lies beyond the request",
        [
            Row("KV head 0", _pages(0, 2, 5, 7), "a"),
            Row("KV head 1", _pages(0, 1, 5, 7), "b"),
        ],
    ),
)


def sparse_svg() -> str:
    """Return the picture: a row of tokens for each reader, cut into pages."""
    lines, y = [], 30
    for number in range(PAGES):
        x = _LEFT + number * _PAGE + PAGE_SIZE * _CELL / 2
        lines.append(
            f'  <text x="{x:g}" y="{y}" class="small" text-anchor="middle">{number}</text>'
        )
    lines.append(f'  <text x="24" y="{y}" class="small">page</text>')
    for panel in PANELS:
        y += 30
        lines.append(f'  <text x="24" y="{y}" class="head">{panel.title}</text>')
        lines.append(f'  <text x="{_LEFT}" y="{y}" class="small">{panel.note}</text>')
        for row in panel.rows:
            y += 24
            lines.append(f'  <text x="24" y="{y}">{row.name}</text>')
            lines += _cells(row, y - 12)
    y += 34
    lines += _legend(y)
    width, height = _LEFT + PAGES * _PAGE + 14, y + 18
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            "  <title>What is read of a request: all tokens, listed tokens, listed pages</title>",
            f"  <style>\n{_STYLE}\n  </style>",
            f'  <rect width="{width}" height="{height}" rx="6" style="fill: #fff; stroke: none"/>',
            *lines,
            "</svg>\n",
        )
    )


def _cells(row: Row, y: int) -> list[str]:
    cells = []
    for token in range(PAGES * PAGE_SIZE):
        x = _LEFT + token // PAGE_SIZE * _PAGE + token % PAGE_SIZE * _CELL
        kind = row.colour if token in row.tokens else "unread" if token < LENGTH else "none"
        cells.append(f'  <rect class="{kind}" x="{x}" y="{y}" width="{_CELL}" height="14"/>')
    return cells


def _legend(y: int) -> list[str]:
    lines, x = [], _LEFT
    for kinds, text in ((("a", "b"), "read"), (("unread",), "not read"), (("none",), "no token")):
        for kind in kinds:
            lines.append(f'  <rect class="{kind}" x="{x}" y="{y - 12}" width="14" height="14"/>')
            x += 18
        lines.append(f'  <text x="{x + 2}" y="{y}" class="small">{text}</text>')
        x += 90
    return lines


if __name__ == "__main__":
    SPARSE.write_text(sparse_svg())
