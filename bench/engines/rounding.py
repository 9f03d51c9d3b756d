"""How far rounding inside of attention alone moves the tokens of a model with random weights.

    python -m bench.engines.rounding

A Llama of 32 layers with the weights of `llama.fill` and everything in bfloat16 but for attention:
in float32 ("exact"), or with probabilities rounded to bfloat16 before they multiply V, as kernels
do, over tiles of 64 or 128 keys with a running maximum. Prints the differences of the logarithmic
probabilities of the exact one's best tokens, between each two.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from bench.options import make_parser

WAYS = ("exact", "64", "128")
MODEL = {"layers": 32, "hidden": 1024, "inner": 3584, "vocab": 32000, "heads": 8, "kv_heads": 2}
HEAD_DIM = 128


class Llama:
    """A model, on the CPU; ``sizes`` as ``MODEL``."""

    def __init__(self, sizes: Mapping[str, int], seed: int = 0) -> None:
        """Draw the weights."""
        self.sizes = sizes
        self._generator = torch.Generator().manual_seed(seed)
        hidden, inner = sizes["hidden"], sizes["inner"]
        q_size, kv_size = (sizes[name] * HEAD_DIM for name in ("heads", "kv_heads"))
        self._layers = [
            {
                "q": self._draw(q_size, hidden, 2),
                "k": self._draw(kv_size, hidden, 2),
                "v": self._draw(kv_size, hidden, 2),
                "o": self._draw(hidden, q_size),
                "gate_up": self._draw(2 * inner, hidden),
                "down": self._draw(hidden, inner),
            }
            for _ in range(sizes["layers"])
        ]
        self._embedding = self._draw(sizes["vocab"], hidden, hidden**0.5)
        self._head = self._draw(sizes["vocab"], hidden, 2)

    def _draw(self, rows: int, columns: int, factor: float = 1.0) -> Tensor:
        drawn = torch.randn(rows, columns, generator=self._generator)
        # Products are faster in float32; their values are bfloat16's.
        return (drawn * (factor * columns**-0.5)).bfloat16().float()

    def log_probabilities(self, tokens: Tensor, way: str) -> Tensor:
        """Return those of each next token, float32 [num_tokens, vocabulary]."""
        x = self._embedding[tokens].bfloat16()
        for layer in self._layers:
            q, k, v = (
                multiply(normalise(x), layer[name]).view(len(x), -1, HEAD_DIM) for name in "qkv"
            )
            x = x + multiply(attend(rotate(q), rotate(k), v, way), layer["o"])
            gate, up = multiply(normalise(x), layer["gate_up"]).chunk(2, -1)
            x = x + multiply(functional.silu(gate) * up, layer["down"])
        return multiply(normalise(x), self._head).float().log_softmax(-1)


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """Return a product, rounded to bfloat16."""
    return (x.float() @ weight.T).bfloat16()


def normalise(x: Tensor) -> Tensor:
    """Return x over its root mean square."""
    return functional.rms_norm(x.float(), x.shape[-1:], eps=1e-5).bfloat16()


def rotate(x: Tensor) -> Tensor:
    """Rotate [num_tokens, heads, head_dim] by positions."""
    frequencies = 500000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.arange(len(x))[:, None, None] * frequencies
    a, b = x.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).bfloat16()


def attend(q: Tensor, k: Tensor, v: Tensor, way: str) -> Tensor:
    """Return causal attention as ``way`` rounds it, bfloat16 [num_tokens, heads * head_dim]."""
    num_tokens = len(q)
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.float().transpose(0, 1) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    hidden = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    scores = ((q @ k.transpose(1, 2)) * HEAD_DIM**-0.5).masked_fill(hidden, -torch.inf)
    out = scores.softmax(-1) @ v if way == "exact" else in_tiles(scores, v, int(way))
    return out.transpose(0, 1).flatten(1).bfloat16()


def in_tiles(scores: Tensor, v: Tensor, size: int) -> Tensor:
    """Return softmax(scores) @ v over tiles of keys, probabilities in bfloat16 for the product."""
    maximum = torch.full((*scores.shape[:-1], 1), -1e30)
    total, out = torch.zeros_like(maximum), torch.zeros_like(v)
    for begin in range(0, scores.shape[-1], size):
        tile = scores[..., begin : begin + size]
        larger = torch.maximum(maximum, tile.amax(-1, keepdim=True))
        factor, exponentials = (maximum - larger).exp(), (tile - larger).exp()
        total = total * factor + exponentials.sum(-1, keepdim=True)
        product = exponentials.bfloat16().float() @ v[:, begin : begin + size]
        out, maximum = out * factor + product, larger
    return out / total


def differences(sizes: Mapping[str, int], num_tokens: int) -> dict[tuple[str, str], Tensor]:
    """Return those of each two ways, of the second half of a random prompt's tokens."""
    model = Llama(sizes)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(sizes["vocab"], (num_tokens,), generator=generator)
    found = {way: model.log_probabilities(tokens, way)[num_tokens // 2 :] for way in WAYS}
    best = found["exact"].argmax(-1, keepdim=True)
    return {
        (a, b): (found[a].gather(1, best) - found[b].gather(1, best)).abs()
        for a, b in itertools.combinations(WAYS, 2)
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the differences of each two ways."""
    parser = make_parser("bench.engines.rounding", __doc__)
    parser.add_argument("--layers", type=int, default=MODEL["layers"])
    parser.add_argument("--tokens", type=int, default=256, help="of the prompt")
    options = parser.parse_args(argv)
    for (a, b), apart in differences({**MODEL, "layers": options.layers}, options.tokens).items():
        p99 = apart.quantile(0.99).item()
        print(f"{a} and {b}: mean {apart.mean().item():.3f}, 99th percentile {p99:.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
