"""Errors of attention over quantised caches, by the definition, in float64 on the CPU.

    python -m bench.quantisation_error -o docs/images/quantisation-error.svg

Prints the table of docs/quantisation.md, and plots it with `-o`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import jitattn
from bench.options import make_parser
from jitattn.kernels.attention.reference import attention
from jitattn.spec.dtype import DType

NUM_HEADS, NUM_QUERIES, NUM_KEYS, HEAD_DIM = 8, 64, 4096, 128
DTYPES = (*("bfloat16", "int8", "float8_e4m3fn", "int4_g32", "int4_g64", "nvfp4", "int4"),)
KIVI = "K by channel"
"""K of int4 in blocks of a channel and 32 tokens, which no kernel reads, beside V of "int4_g32"."""
ROTATED = " rotated"
"""Ends the name of a cache whose K and V have the Hadamard transform, as q has."""
CACHES = (*DTYPES, KIVI, *(f"{kv_dtype}{ROTATED}" for kv_dtype in DTYPES[1:]))
INPUTS = ("gaussian", "heavy tails", "channel outliers")
_ALL: dict[str, Any] = {
    "causal": False,
    "window_left": -1,
    "logits_soft_cap": 0.0,
    "sm_scale": HEAD_DIM**-0.5,
}
_LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0}


class Error(NamedTuple):
    """Root mean square errors over those of the right values."""

    keys: float
    values: float
    out: float


def inputs_of(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return Q [queries, heads, dim], and K and V [keys, heads, dim], float32.

    "heavy tails" are of Student's t with three degrees of freedom. Of "channel outliers" four
    channels of K have a mean of 8 and four times the deviation, as models have them.
    """
    rng = torch.Generator().manual_seed(0)

    def normal(count: int) -> Tensor:
        return torch.randn(count, NUM_HEADS, HEAD_DIM, generator=rng)

    q, k, v = normal(NUM_QUERIES), normal(NUM_KEYS), normal(NUM_KEYS)
    if kind == "heavy tails":
        k, v = (x / _chi(x.shape, rng) for x in (k, v))
    if kind == "channel outliers":
        channels = torch.randperm(HEAD_DIM, generator=rng)[:4]
        k[..., channels] = 4 * k[..., channels] + 8
    return q, k, v


def _chi(shape: torch.Size, rng: torch.Generator) -> Tensor:
    squares = torch.randn(3, *shape, generator=rng).square()
    return squares.mean(0).sqrt()


def stored_values(x: Tensor, kv_dtype: str) -> Tensor:
    """Return the values of a cache of ``x``; of 8 bits with the scale of each head's largest."""
    if DType(kv_dtype).blocks is not None:
        data, scales = jitattn.quant.quantize_kv(x, kv_dtype)
        return jitattn.quant.dequantize_kv(data, dtype=kv_dtype, block_scales=scales)
    scale = None
    if kv_dtype in _LARGEST:
        scale = x.abs().amax(dim=(0, 2)) / _LARGEST[kv_dtype]
    stored = jitattn.quant.quantize_kv(x, kv_dtype, scale=scale)
    assert isinstance(stored, Tensor)
    return jitattn.quant.dequantize_kv(stored, dtype=kv_dtype, scale=scale)


def by_channel(k: Tensor) -> Tensor:
    """Return K as KIVI quantises it: a scale and a zero of a channel and 32 tokens."""
    data, scales = jitattn.quant.quantize_kv(k.permute(1, 2, 0).contiguous(), "int4_g32")
    values = jitattn.quant.dequantize_kv(data, dtype="int4_g32", block_scales=scales)
    return values.permute(2, 0, 1)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention of all queries to all keys, float64."""
    rows, keys = [0, len(q)], [0, len(k)]
    return attention(q, k.double(), v.double(), rows, keys, **_ALL)[0]


def error_of(kind: str, cache: str) -> Error:
    """Return the errors of a cache, of K and V after what takes a rotation back."""
    q, k, v = inputs_of(kind)
    if cache == KIVI:
        stored = by_channel(k), stored_values(v, "int4_g32")
    else:
        stored = kept_values(k, cache), kept_values(v, cache)
    return Error(
        relative_error(stored[0], k),
        relative_error(stored[1], v),
        relative_error(attend(q, *stored), attend(q, k, v)),
    )


def kept_values(x: Tensor, cache: str) -> Tensor:
    """Return the values of a cache of ``x``; those of a rotated one are rotated back, in float64.

    Scores of q and such K are those of rotated q and K.
    """
    kv_dtype = cache.removesuffix(ROTATED)
    if kv_dtype == cache:
        return stored_values(x, kv_dtype)
    stored = stored_values(jitattn.quant.hadamard_transform(x), kv_dtype)
    return jitattn.quant.hadamard_transform(stored.double(), inverse=True)


def relative_error(found: Tensor, right: Tensor) -> float:
    """Return the root mean square of the difference over that of ``right``."""
    difference = (found.double() - right.double()).square().mean().sqrt()
    return float(difference / right.double().square().mean().sqrt())


def bytes_of(cache: str) -> int:
    """Return the bytes of K and V of a token and head."""
    kind = DType("int4_g32" if cache == KIVI else cache.removesuffix(ROTATED))
    scales = 0 if kind.blocks is None else kind.blocks.row_bytes(HEAD_DIM)
    return 2 * (kind.bits * HEAD_DIM // 8 + scales)


def title_of(cache: str) -> str:
    """Return a cache's name in a table, types as code."""
    kv_dtype = cache.removesuffix(ROTATED)
    return cache if cache == KIVI else f"`{kv_dtype}`{', rotated' * (kv_dtype != cache)}"


def table(errors: dict[tuple[str, str], Error]) -> str:
    """Return the table in Markdown: errors of K, V and out, in percent."""
    heading = ["`kv_dtype`", "bytes", *(f"{kind}: K, V, out" for kind in INPUTS)]
    lines = [heading, ["--", "--:", *("--:" for _ in INPUTS)]]
    for cache in CACHES:
        cells = [", ".join(f"{100 * part:.2g}" for part in errors[kind, cache]) for kind in INPUTS]
        lines.append([title_of(cache), str(bytes_of(cache)), *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def plot(errors: dict[tuple[str, str], Error], path: Path) -> None:
    """Draw the error of out over the bytes of a token and head."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "jitattn"
    figure = Figure(figsize=(8.5, 3.4), layout="constrained")
    colors = ("#999999", "#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#009E73", "#CC79A7")
    color_of = dict(zip(DTYPES, colors, strict=True)) | {KIVI: "#D55E00"}
    for axes, kind in zip(figure.subplots(1, 3, sharey=True), INPUTS, strict=True):
        for cache in CACHES:
            kv_dtype = cache.removesuffix(ROTATED)
            marker = "x" if cache == KIVI else "o"
            axes.plot(
                *(bytes_of(cache), 100 * errors[kind, cache].out, marker),
                color=color_of[kv_dtype],
                fillstyle="full" if kv_dtype == cache else "none",
                label=cache if kv_dtype == cache else None,
            )
        axes.set_xscale("log", base=2)
        axes.set_xlim(112, 600)
        axes.set_yscale("log")
        axes.set_xticks([128, 256, 512], ["128", "256", "512"])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.set_title(kind, fontsize=10)
        axes.set_xlabel("bytes of a token and head")
    figure.axes[0].set_ylabel("error of out, percent")
    figure.axes[2].plot([], [], "o", color="black", fillstyle="none", label="rotated")
    figure.axes[2].legend(fontsize=7, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; draw it with ``-o``."""
    parser = make_parser("bench.quantisation_error", __doc__)
    parser.add_argument("-o", type=Path, metavar="FILE", help="an .svg or .png to draw")
    options = parser.parse_args(argv)
    errors = {(kind, cache): error_of(kind, cache) for kind in INPUTS for cache in CACHES}
    print(table(errors), end="")
    if options.o is not None:
        plot(errors, options.o)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
