"""A Llama-shaped decoder with random weights. Its attention is left to whoever takes part.

Weights are scaled so that attention matters: scores vary by 2, and what attention adds to the
residual stream is about as large as what the MLP does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from bench.cases import ragged_lens

ROPE_BASE = 500000.0
_NORM_EPS = 1e-5
_Q_SCALE, _OUT_SCALE = 2.0, 3.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a decoder."""

    hidden: int
    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int

    @property
    def qkv_width(self) -> int:
        """Elements of a token's packed q, K and V."""
        return (self.num_qo_heads + 2 * self.num_kv_heads) * self.head_dim


LLAMA_8B = Shape(
    hidden=4096, num_layers=32, num_qo_heads=32, num_kv_heads=8, head_dim=128, intermediate=14336,
    vocabulary=128256,
)  # fmt: skip
TINY = Shape(
    hidden=64, num_layers=2, num_qo_heads=4, num_kv_heads=2, head_dim=16, intermediate=96,
    vocabulary=128,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DecoderCase:
    """Requests that are decoded together, a token a step each."""

    name: str
    prompt_lens: tuple[int, ...]
    page_size: int = 64

    @property
    def batch_size(self) -> int:
        """Requests."""
        return len(self.prompt_lens)


DECODER_CASES = (
    DecoderCase(name="B64x2k-p64", prompt_lens=(2048,) * 64),
    DecoderCase(name="B64ragged-p64", prompt_lens=ragged_lens(64)),
)
DRY_CASE = DecoderCase(name="dry", prompt_lens=(16, 5, 37), page_size=16)


class Requests:
    """What the host of an engine knows: lengths, and the pages that requests have so far.

    Tensors are pinned where there is a CUDA device: copies from them don't wait for it.

    Attributes:
        lens: [batch_size] int32 on the CPU, tokens of each request, this step's included.
        has_grown: whether pages differ from those of the step before: true of a first step.
        pages: [batch_size, max_pages] int32 on the CPU, those that each will have, in order.
        num_pages: of all.
        table: likewise of those so far, 0 behind them, as ``fill_table`` left it.
    """

    def __init__(self, case: DecoderCase, num_steps: int) -> None:
        """Give pages, in a random order, that last ``num_steps`` steps."""
        self.case = case
        self._prompts = _host(torch.tensor(case.prompt_lens))
        wanted = self._pages_of(self._prompts + num_steps)
        self.num_pages = int(wanted.sum())
        order = torch.randperm(self.num_pages, generator=torch.Generator().manual_seed(0))
        self._columns = torch.arange(int(wanted.max()))
        self.pages = torch.zeros(case.batch_size, len(self._columns), dtype=torch.int32)
        self.pages[self._columns < wanted[:, None]] = order.int()
        self.lens = _host(self._prompts)
        self.table = _host(self.pages)
        self._indptr = _host(torch.zeros(case.batch_size + 1))
        self._last_page_len = _host(self._prompts)
        self.begin()

    def begin(self) -> None:
        """Go back to the prompts."""
        self.lens.copy_(self._prompts)
        self._counts = self._pages_of(self.lens)
        self._is_first = self.has_grown = True
        self.fill_table()

    def advance(self) -> None:
        """Give each request a token more, and a page where it needs one."""
        self.lens += 1
        counts = self._pages_of(self.lens)
        self.has_grown = self._is_first or not torch.equal(counts, self._counts)
        self._counts, self._is_first = counts, False

    def fill_table(self) -> Tensor:
        """Return ``table``, brought up to date."""
        self.table.copy_(self.pages).masked_fill_(self._columns >= self._counts[:, None], 0)
        return self.table

    def fill_starts(self) -> tuple[Tensor, Tensor]:
        """Return where the pages of each request begin, without gaps, and lengths of the last.

        Returns:
            int32 [batch_size + 1] and [batch_size], on the CPU, written anew by the next call.
        """
        torch.cumsum(self._counts, 0, out=self._indptr[1:])
        self._last_page_len.copy_((self.lens - 1) % self.case.page_size + 1)
        return self._indptr, self._last_page_len

    def indices(self) -> Tensor:
        """Return the pages so far without gaps, int32 on the CPU."""
        return _host(self.pages[self._columns < self._counts[:, None]])

    def _pages_of(self, lens: Tensor) -> Tensor:
        return -(-lens // self.case.page_size)


def _host(values: Tensor) -> Tensor:
    """Return a copy, int32, on the CPU."""
    copy = torch.empty(values.shape, dtype=torch.int32, pin_memory=torch.cuda.is_available())
    return copy.copy_(values)


@dataclass(frozen=True)
class Layer:
    """Weights of a layer, each [out, in]."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    norms: Tensor  # [2, hidden]


@dataclass(frozen=True)
class Weights:
    """Weights of a decoder in bfloat16."""

    shape: Shape
    embedding: Tensor
    layers: Sequence[Layer]
    norm: Tensor
    head: Tensor


def make_weights(shape: Shape, device: torch.device, *, seed: int = 0) -> Weights:
    """Return random weights; a seed fixes them on one device type."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def random(out: int, size: int, scale: float = 1.0) -> Tensor:
        weight = torch.empty((out, size), dtype=torch.bfloat16, device=device)
        return weight.normal_(std=scale * size**-0.5, generator=generator)

    def layer() -> Layer:
        qkv = random(shape.qkv_width, shape.hidden)
        qkv[: shape.num_qo_heads * shape.head_dim] *= _Q_SCALE
        return Layer(
            qkv=qkv,
            out=random(shape.hidden, shape.num_qo_heads * shape.head_dim, _OUT_SCALE),
            gate_up=random(2 * shape.intermediate, shape.hidden),
            down=random(shape.hidden, shape.intermediate),
            norms=torch.ones((2, shape.hidden), dtype=torch.bfloat16, device=device),
        )

    return Weights(
        shape=shape,
        embedding=random(shape.vocabulary, shape.hidden, shape.hidden**0.5),
        layers=[layer() for _ in range(shape.num_layers)],
        norm=torch.ones(shape.hidden, dtype=torch.bfloat16, device=device),
        head=random(shape.vocabulary, shape.hidden),
    )


class Attention(Protocol):
    """One way to take a step's tokens into the cache and to attend."""

    def before(self, requests: Requests) -> None:
        """Do the host's work of a step; its copies to the device don't wait."""

    def plan(self) -> None:
        """Do the device's work of a step for all layers; a graph holds it."""

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """Write K and V of the new tokens, attend, and return what the next product takes.

        Args:
            layer: its number.
            qkv: [batch_size, qkv_width], packed; may be changed.

        Returns:
            [batch_size, num_qo_heads * head_dim].
        """


class Decoder:
    """Weights, caches and the tensors of a step, which all who take part share.

    Attributes:
        kv: [num_layers, num_pages, 2, page_size, num_kv_heads, head_dim] bfloat16.
        tokens: [batch_size] int64, the last token of each request.
        seq_lens: [batch_size] int32; a step begins with adding 1.
        table: [batch_size, max_pages] int32, on the device.
        logits: [batch_size, vocabulary], of the step before.
    """

    def __init__(self, weights: Weights, case: DecoderCase, num_steps: int) -> None:
        """Fill the caches with random numbers; lengths and pages are those of the prompts.

        Args:
            weights: say the device.
            case: the requests.
            num_steps: that pages last for.
        """
        self.weights, self.case, self.num_steps = weights, case, num_steps
        self.requests = Requests(case, num_steps)
        shape, device = weights.shape, weights.head.device
        generator = torch.Generator(device=device).manual_seed(1)
        page = (2, case.page_size, shape.num_kv_heads, shape.head_dim)
        size = (shape.num_layers, self.requests.num_pages, *page)
        self.kv = torch.empty(size, dtype=torch.bfloat16, device=device)
        for of_layer in self.kv:
            of_layer.normal_(generator=generator)
        first = torch.randint(shape.vocabulary, (case.batch_size,), generator=_cpu_generator())
        self._first = first.to(device)
        self.tokens = self._first.clone()
        self.seq_lens = torch.empty(case.batch_size, dtype=torch.int32, device=device)
        self.table = torch.empty_like(self.requests.table, device=device, pin_memory=False)
        self.logits = self.kv.new_empty((case.batch_size, shape.vocabulary))
        self.begin()

    @property
    def max_kv_len(self) -> int:
        """The most tokens that a request will have."""
        return max(self.case.prompt_lens) + self.num_steps

    def begin(self) -> None:
        """Go back to the prompts, on the host and on the device."""
        self.requests.begin()
        self.tokens.copy_(self._first)
        self.seq_lens.copy_(self.requests.lens)
        self.table.copy_(self.requests.table)

    def spoil(self, num_steps: int) -> None:
        """Put NaN where the tokens of the first steps will go."""
        pages, size = self.requests.pages.to(self.kv.device), self.case.page_size
        for step in range(num_steps):
            places = torch.tensor(self.case.prompt_lens, device=self.kv.device) + step
            page = pages.gather(1, places[:, None] // size).squeeze(1).long()
            self.kv[:, page, :, places % size] = float("nan")

    def forward(self, attention: Attention) -> None:
        """Decode one token of each request."""
        shape, weights = self.weights.shape, self.weights
        self.seq_lens.add_(1)
        attention.plan()
        hidden = functional.embedding(self.tokens, weights.embedding)
        for i, layer in enumerate(weights.layers):
            qkv = functional.linear(_norm(hidden, layer.norms[0]), layer.qkv)
            hidden = torch.addmm(hidden, attention.attend(i, qkv), layer.out.t())
            gate, up = functional.linear(_norm(hidden, layer.norms[1]), layer.gate_up).split(
                shape.intermediate, dim=1
            )
            hidden = torch.addmm(hidden, functional.silu(gate).mul_(up), layer.down.t())
        torch.mm(_norm(hidden, weights.norm), weights.head.t(), out=self.logits)
        self.tokens.copy_(self.logits.argmax(dim=1))


def _norm(hidden: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(hidden, weight.shape, weight, _NORM_EPS)


def _cpu_generator() -> torch.Generator:
    return torch.Generator().manual_seed(2)


def with_layers(shape: Shape, num_layers: int | None) -> Shape:
    """Return ``shape`` with so many layers, or as it is."""
    return shape if num_layers is None else dataclasses.replace(shape, num_layers=num_layers)
