"""KV memory of long prompts with and without scratch, counted from the page manager's pools.

    python -m bench.kv_memory -o docs/images/kv-memory.svg

Needs no card and allocates nothing: managers without storage take and give back the slots that a
prompt takes. Prints the table of docs/page-manager.md, and plots it with `-o`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.options import make_parser
from jitattn.kv import KVCacheConfig, KVCacheManager, LayerConfig

PAGE_SIZE = 32
K, GIB = 1024, 1 << 30


@dataclass(frozen=True)
class Model:
    """The attention layers of a model.

    Attributes:
        name: for the table.
        windows: ``window_left`` of each layer.
        num_kv_heads: of each.
        head_dim: of each.
    """

    name: str
    windows: tuple[int, ...]
    num_kv_heads: int
    head_dim: int

    def layers(self) -> list[LayerConfig]:
        """Return the configuration of its layers, bfloat16."""
        return [
            LayerConfig(
                layer_id=i,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                window_left=window,
            )
            for i, window in enumerate(self.windows)
        ]


GEMMA = Model("Gemma-3-27B", tuple(-1 if i % 6 == 5 else 1023 for i in range(62)), 16, 128)
GPT_OSS = Model("gpt-oss-120b", tuple(-1 if i % 2 else 127 for i in range(36)), 8, 64)
EXAMPLE = Model("worked example", (127,) * 32, 8, 128)
PROMPTS = (
    (EXAMPLE, K, K),
    (GEMMA, 8 * K, 8 * K),
    (GEMMA, 128 * K, 8 * K),
    (GEMMA, 128 * K, 128 * K),
    (GPT_OSS, 8 * K, 8 * K),
    (GPT_OSS, 128 * K, 8 * K),
    (GPT_OSS, 128 * K, 128 * K),
)


@dataclass(frozen=True)
class Peak:
    """The most that a prompt took at a time.

    Attributes:
        windowed: slots of the windowed group.
        num_bytes: of the windowed layers.
        full_bytes: of the others.
    """

    windowed: int
    num_bytes: int
    full_bytes: int


def peak_of(
    model: Model, prompt: int, chunk: int, *, reuse_scratch: bool, max_rewind_len: int = 0
) -> Peak:
    """Run a prompt in chunks through a manager without storage; count slots that are used."""
    windowed = _most_slots(model, prompt, chunk, reuse_scratch, max_rewind_len, full=False)
    full = _most_slots(model, prompt, chunk, reuse_scratch, max_rewind_len, full=True)
    return Peak(windowed[0], windowed[0] * windowed[1], full[0] * full[1])


def _most_slots(
    model: Model, prompt: int, chunk: int, reuse_scratch: bool, max_rewind_len: int, *, full: bool
) -> tuple[int, int]:
    """Return slots and bytes of one for the windowed layers or the others, in a pool of theirs."""
    layers = [layer for layer in model.layers() if (layer.window_left < 0) is full]
    if not layers:
        return 0, 0
    slot_bytes = sum(sum(layer.part_bytes(PAGE_SIZE)) for layer in layers)
    manager = KVCacheManager(
        KVCacheConfig(
            page_size=PAGE_SIZE,
            gpu_bytes=slot_bytes * (prompt // PAGE_SIZE + 1),
            layers=layers,
            reuse_scratch=reuse_scratch,
            max_rewind_len=max_rewind_len,
        )
    )
    seq = manager.create_sequence()
    seq.resume()
    # What earlier chunks leave behind for others is not used: the pool may have it back.
    most = 0
    for begin in range(0, prompt, chunk):
        if not seq.resize(min(begin + chunk, prompt)):
            raise RuntimeError("the pool is too small")
        most = max(most, manager.stats().pools[0].used)
        seq.commit(range(begin, min(begin + chunk, prompt)))
    return most, slot_bytes


def rows() -> list[tuple[str, ...]]:
    """Return the table, a row for each prompt."""
    found = []
    for model, prompt, chunk in PROMPTS:
        plain = peak_of(model, prompt, chunk, reuse_scratch=False)
        shared = peak_of(model, prompt, chunk, reuse_scratch=True)
        whole = plain.num_bytes + plain.full_bytes, shared.num_bytes + shared.full_bytes
        found.append(
            (
                model.name,
                _tokens(prompt),
                _tokens(chunk),
                f"{plain.windowed:,}",
                f"{shared.windowed:,}",
                f"{whole[0] / GIB:.2f}",
                f"{whole[1] / GIB:.2f}",
                f"{1 - whole[1] / whole[0]:.0%}",
            )
        )
    return found


HEADING = (
    "model",
    "prompt",
    "chunk",
    "windowed slots",
    "with scratch",
    "GiB",
    "with scratch",
    "less",
)


def table() -> str:
    """Return the table in Markdown."""
    lines = [HEADING, ("--",) + ("--:",) * (len(HEADING) - 1), *rows()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _tokens(count: int) -> str:
    return f"{count // K}k"


def plot(path: Path) -> None:
    """Draw the GiB of each prompt, windowed and other layers, without and with scratch."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "jitattn"
    figure = Figure(figsize=(8.5, 3.6), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, model in zip(panels, (GEMMA, GPT_OSS), strict=True):
        shown = [(p, c) for m, p, c in PROMPTS if m is model]
        for i, (prompt, chunk) in enumerate(shown):
            for side, reuse_scratch in ((-0.2, False), (0.2, True)):
                peak = peak_of(model, prompt, chunk, reuse_scratch=reuse_scratch)
                full, windowed = peak.full_bytes / GIB, peak.num_bytes / GIB
                axes.bar(i + side, full, 0.36, color="#999999")
                color = "#D55E00" if reuse_scratch else "#0072B2"
                axes.bar(i + side, windowed, 0.36, bottom=full, color=color)
                whole = full + windowed
                axes.text(i + side, whole, f"{whole:.1f}", ha="center", va="bottom", fontsize=8)
        labels = [f"{_tokens(p)}, chunks {_tokens(c)}" for p, c in shown]
        axes.set_xticks(range(len(shown)), labels, fontsize=8)
        axes.margins(y=0.12)
        axes.set_title(model.name, fontsize=10)
        axes.set_ylabel("GiB at the peak")
    panels[0].bar(0, 0, color="#999999", label="layers that keep all")
    panels[0].bar(0, 0, color="#0072B2", label="windowed layers")
    panels[0].bar(0, 0, color="#D55E00", label="windowed layers, with scratch")
    panels[0].legend(fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; draw it with ``-o``."""
    parser = make_parser("bench.kv_memory", __doc__)
    parser.add_argument("-o", type=Path, metavar="FILE", help="an .svg or .png to draw")
    options = parser.parse_args(argv)
    print(table(), end="")
    if options.o is not None:
        plot(options.o)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
