"""What quantised caches do to the next-token logits of a small decoder, on the CPU.

    python -m bench.quantisation_logits

A Llama-shaped decoder with random weights reads one request, all tokens given. Its queries, keys
and values go through ``preprocess_qkv``, K and V are what a cache stores of them by definition, and
all else is float64. Prints a table of docs/quantisation.md.

With p the float64 model's distribution of a next token and q that over a cache, the mean of
sum(p log(p / q)) is by how much the logarithm of the perplexity grows of text that the model wrote.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import jitattn
from bench.decoder_model import ROPE_BASE, Layer, Shape, Weights, make_weights
from bench.options import make_parser
from bench.quantisation_error import (
    DTYPES,
    ROTATED,
    bytes_of,
    relative_error,
    stored_values,
    title_of,
)
from jitattn.kernels.attention.reference import attention
from jitattn.kernels.preprocess.reference import rotate

SHAPE = Shape(
    hidden=512, num_layers=4, num_qo_heads=8, num_kv_heads=2, head_dim=128, intermediate=1024,
    vocabulary=2048,
)  # fmt: skip
NUM_TOKENS = 1024
CACHES = (*DTYPES, *(f"{kv_dtype}{ROTATED}" for kv_dtype in DTYPES))
MODELS = ("random weights", "channel outliers")
_LOGIT_SCALE = 3.0  # some tokens are likely then
_PAGE_SIZE = 16

Heads = tuple[Tensor, Tensor, Tensor]
"""Q, K and V, each [num_tokens, heads, head_dim]."""


class Change(NamedTuple):
    """What a cache changes of next tokens."""

    logits: float  # the root mean square error over the deviation of the right logits
    divergence: float  # of the distributions, in nats a token
    disagreements: float  # the share of tokens with another most likely one


class Model:
    """A decoder whose attention is given, and the tokens that it reads."""

    def __init__(self, kind: str, shape: Shape = SHAPE, num_tokens: int = NUM_TOKENS) -> None:
        """Make random weights; of "channel outliers" K is as in ``bench.quantisation_error``."""
        self.weights: Weights = make_weights(shape, torch.device("cpu"))
        self.rope = jitattn.Rope(shape.head_dim, base=ROPE_BASE)
        rng = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(shape.vocabulary, (num_tokens,), generator=rng)
        self.bias = torch.zeros(shape.qkv_width, dtype=torch.bfloat16)
        if kind == "channel outliers":
            channels = torch.randperm(shape.head_dim, generator=rng)[:4]
            begin = shape.num_qo_heads * shape.head_dim
            end = begin + shape.num_kv_heads * shape.head_dim
            self.bias[begin:end].view(-1, shape.head_dim)[:, channels] = 8.0
            for layer in self.weights.layers:
                layer.qkv[begin:end].view(-1, shape.head_dim, shape.hidden)[:, channels] *= 4.0

    def logits(self, heads_of: Callable[[Tensor], Heads], *, is_rotated: bool = False) -> Tensor:
        """Return float64 [num_tokens, vocabulary]; ``heads_of`` takes packed Q, K and V."""
        weights = self.weights
        hidden = weights.embedding[self.tokens].double()
        for layer in weights.layers:
            packed = _normalised(hidden) @ layer.qkv.double().T
            q, k, v = heads_of(packed)
            rows = [0, len(q)]
            out = attention(
                *(q.double(), k.double(), v.double(), rows, rows),
                causal=True,
                window_left=-1,
                logits_soft_cap=0.0,
                sm_scale=weights.shape.head_dim**-0.5,
            )[0].double()
            if is_rotated:
                out = jitattn.quant.hadamard_transform(out, inverse=True)
            hidden = hidden + out.flatten(1) @ layer.out.double().T
            hidden = hidden + _fed_forward(_normalised(hidden), layer)
        return _LOGIT_SCALE * _normalised(hidden) @ weights.head.double().T

    def logits_of(self, cache: str) -> Tensor:
        """Return those over a cache."""
        heads_of = functools.partial(self.cached_heads, cache=cache)
        return self.logits(heads_of, is_rotated=cache.endswith(ROTATED))

    def exact_heads(self, packed: Tensor) -> Heads:
        """Return Q, K and V in float64."""
        q, k, v = self._split(packed + self.bias.double())
        positions = torch.arange(len(packed)).expand(3, -1)
        return rotate(q, self.rope, positions), rotate(k, self.rope, positions), v

    def cached_heads(self, packed: Tensor, cache: str) -> Heads:
        """Return Q as ``preprocess_qkv`` does, and K and V as they are read from a cache."""
        shape = self.weights.shape
        num_tokens = len(packed)
        pages = torch.zeros(
            -(-num_tokens // _PAGE_SIZE), 2, _PAGE_SIZE, shape.num_kv_heads, shape.head_dim
        ).bfloat16()
        transform = "hadamard" if cache.endswith(ROTATED) else None
        q = jitattn.preprocess_qkv(
            packed.bfloat16(),
            pages,
            num_qo_heads=shape.num_qo_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            slots=torch.arange(num_tokens),
            positions=torch.arange(num_tokens),
            rope=self.rope,
            bias=self.bias,
            qk_transform=transform,
            v_transform=transform,
        )
        kv_dtype = cache.removesuffix(ROTATED)
        k, v = (
            stored_values(pages[:, side].flatten(0, 1)[:num_tokens].float(), kv_dtype)
            for side in range(2)
        )
        return q, k, v

    def _split(self, packed: Tensor) -> Heads:
        shape = self.weights.shape
        heads = packed.view(len(packed), -1, shape.head_dim)
        end = shape.num_qo_heads + shape.num_kv_heads
        return heads[:, : shape.num_qo_heads], heads[:, shape.num_qo_heads : end], heads[:, end:]


def _normalised(hidden: Tensor) -> Tensor:
    return functional.rms_norm(hidden, hidden.shape[-1:])


def _fed_forward(hidden: Tensor, layer: Layer) -> Tensor:
    gate, up = (hidden @ layer.gate_up.double().T).chunk(2, dim=1)
    return (functional.silu(gate) * up) @ layer.down.double().T


def change_of(found: Tensor, right: Tensor) -> Change:
    """Compare logits [num_tokens, vocabulary]."""
    log_p, log_q = (logits.log_softmax(dim=-1) for logits in (right, found))
    divergence = (log_p.exp() * (log_p - log_q)).sum(dim=-1).mean()
    others = found.argmax(dim=-1) != right.argmax(dim=-1)
    return Change(relative_error(found, right), float(divergence), float(others.double().mean()))


def table(changes: dict[tuple[str, str], Change]) -> str:
    """Return the table in Markdown."""
    said = "logits %, divergence, other first %"
    heading = ["`kv_dtype`", "bytes", *(f"{kind}: {said}" for kind in MODELS)]
    lines = [heading, ["--", "--:", *("--:" for _ in MODELS)]]
    for cache in CACHES:
        cells = [
            f"{100 * change.logits:.2g}, {change.divergence:.2g}, {100 * change.disagreements:.2g}"
            for change in (changes[kind, cache] for kind in MODELS)
        ]
        lines.append([title_of(cache), str(bytes_of(cache)), *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    make_parser("bench.quantisation_logits", __doc__).parse_args(argv)
    changes = {}
    for kind in MODELS:
        model = Model(kind)
        right = model.logits(model.exact_heads)
        for cache in CACHES:
            changes[kind, cache] = change_of(model.logits_of(cache), right)
    print(table(changes), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
