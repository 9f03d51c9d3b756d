"""The cases of latent attention by name, in groups; a group says who is measured on its cases."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypedDict

from bench.cases import BASELINE, Group, pick, ragged_lens
from bench.ceilings import TensorCeilings

Q_DTYPE = "bfloat16"
LATENT_DIM, ROPE_DIM = 512, 64  # DeepSeek's
SM_SCALE = (128 + 64) ** -0.5  # heads of 128 before projections are multiplied in
SCALE_BLOCK = 128  # elements of a latent that share a scale, where rows hold their scales

Form = Literal["bfloat16", "e4m3", "rows656"]
"""A cache: 16 bits; all FP8 with one scale; FP8 latents with scales and a bfloat16 rope part."""
TOKEN_BYTES: dict[Form, int] = {
    "bfloat16": 2 * (LATENT_DIM + ROPE_DIM),
    "e4m3": LATENT_DIM + ROPE_DIM,
    "rows656": LATENT_DIM + 4 * (LATENT_DIM // SCALE_BLOCK) + 2 * ROPE_DIM,
}

# What no card of today exceeds: floors under these choose the method, and nothing else.
_FLOP_PER_S = 1e15
_BYTES_PER_S = 3.5e12

MLA_RIVALS = ("fa2", "flashinfer-fa3", "flashmla")
_BESIDE_RIVALS = (*MLA_RIVALS, BASELINE, "jitattn-separate")
_LAYOUTS = ("separate", "pair", "cross-layer", "invariant")
MLA_GROUPS = {
    "figures": Group("the cases that decide", _BESIDE_RIVALS),
    "heads": Group("32 and 64 heads", _BESIDE_RIVALS),
    "middling": Group("batches between these, and one with empty requests", _BESIDE_RIVALS),
    "ragged": Group("lengths from 128 to 16k", _BESIDE_RIVALS),
    "pages": Group("other page sizes", _BESIDE_RIVALS),
    "forms": Group("FP8 caches", _BESIDE_RIVALS),
    "queries": Group("several query tokens a request", _BESIDE_RIVALS),
    "layouts": Group(
        "one batch, other strides and tables", (BASELINE, *(f"jitattn-{way}" for way in _LAYOUTS))
    ),
}


class MLAArguments(TypedDict):
    """What a planner is given for a case, besides the device."""

    sm_scale: float
    num_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    page_size: int
    q_dtype: str
    kv_dtype: str
    page_table: str
    batch_invariant: bool


@dataclass(frozen=True, kw_only=True)
class MLACase:
    """Query tokens and KV tokens of each request; causal, queries in bfloat16."""

    name: str
    q_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_heads: int
    page_size: int = 64
    form: Form = "bfloat16"
    group: str = "figures"  # of `MLA_GROUPS`

    @property
    def kv_dtype(self) -> str:
        """What latents are stored as."""
        return Q_DTYPE if self.form == "bfloat16" else "float8_e4m3fn"

    @property
    def num_tokens(self) -> int:
        """Query tokens of all requests."""
        return sum(self.q_lens)

    @property
    def pages_per_seq(self) -> tuple[int, ...]:
        """Pages of each request."""
        return tuple(-(-length // self.page_size) for length in self.seq_lens)

    @property
    def kv_bytes(self) -> int:
        """Bytes of latents and rope parts that must be read, once for all heads."""
        return sum(self.seq_lens) * TOKEN_BYTES[self.form]

    @property
    def num_bytes(self) -> int:
        """Bytes that any implementation must move: latents, rope parts and q read, out written."""
        row = (LATENT_DIM + ROPE_DIM) + LATENT_DIM
        return self.kv_bytes + 2 * row * self.num_heads * self.num_tokens

    @property
    def flop(self) -> int:
        """Operations of both products over the keys that each query token sees."""
        pairs = zip(self.q_lens, self.seq_lens, strict=True)
        num_scores = sum(q * n - q * (q - 1) // 2 for q, n in pairs)
        return 2 * (LATENT_DIM + ROPE_DIM + LATENT_DIM) * self.num_heads * num_scores

    @property
    def method_floor_s(self) -> float:
        """Seconds that no card of today stays under: the same choice of method on every card."""
        return max(self.flop / _FLOP_PER_S, self.num_bytes / _BYTES_PER_S)

    def floor_s(self, limits: TensorCeilings) -> float:
        """Return the seconds that its bytes or its products alone take, whichever is more."""
        return max(self.num_bytes / limits.read, self.flop / limits.product)

    def is_bound_by_bytes(self, limits: TensorCeilings) -> bool:
        """Return which of both that is."""
        return self.num_bytes / limits.read >= self.flop / limits.product

    def planner_arguments(
        self, page_table: str = "shared", *, batch_invariant: bool = False
    ) -> MLAArguments:
        """Return the arguments of `jitattn.MLAPlanner` for this case."""
        return MLAArguments(
            sm_scale=SM_SCALE,
            num_heads=self.num_heads,
            kv_lora_rank=LATENT_DIM,
            qk_rope_head_dim=ROPE_DIM,
            page_size=self.page_size,
            q_dtype=Q_DTYPE,
            kv_dtype=self.kv_dtype,
            page_table=page_table,
            batch_invariant=batch_invariant,
        )

    def tiny(self) -> MLACase:
        """Return the smallest batch that makes a contender compile what this case needs."""
        return dataclasses.replace(self, q_lens=(2,), seq_lens=(max(2, 2 * self.page_size),))


_BATCHES: dict[str, tuple[int, ...]] = {
    "B1x4k": (4096,),
    "B64x4k": (4096,) * 64,
    "B128x8k": (8192,) * 128,
    "B16x4k": (4096,) * 16,
    "B33x8k": (8192,) * 33,
    "B40x3000": (3000,) * 40,
    "B200x500": (500,) * 200,
    "B96x4k-two-of-three-empty": (4096, 0, 0) * 32,
    "B64ragged": ragged_lens(64),
}


def _case(
    batch: str,
    num_heads: int,
    page_size: int = 64,
    *,
    form: Form = "bfloat16",
    q_len: int = 1,
    group: str = "figures",
) -> MLACase:
    """Name a case after its shape and what isn't a default."""
    marks = {form: form != "bfloat16", f"q{q_len}": q_len > 1}
    shape = f"{batch}-h{num_heads}-p{page_size}"
    seq_lens = _BATCHES[batch]
    return MLACase(
        name="-".join((shape, *(mark for mark, is_set in marks.items() if is_set))),
        q_lens=(q_len,) * len(seq_lens),
        seq_lens=seq_lens,
        num_heads=num_heads,
        page_size=page_size,
        form=form,
        group=group,
    )


def _extend(num_heads: int) -> MLACase:
    """Return a chunk of a prompt on what its request has already."""
    return MLACase(
        name=f"4x512-on-8k-h{num_heads}-p64",
        q_lens=(512,) * 4,
        seq_lens=(8192,) * 4,
        num_heads=num_heads,
        group="queries",
    )


def _cases() -> Iterator[MLACase]:
    uniform, few_and_many = ("B1x4k", "B64x4k", "B128x8k"), (16, 128)
    for group, heads in (("figures", few_and_many), ("heads", (32, 64))):
        yield from (_case(batch, n, group=group) for n in heads for batch in uniform)
    middling = {
        "B16x4k": (8, 16, 24, 64, 128),
        "B200x500": few_and_many,
        "B40x3000": (64,),
        "B33x8k": (128,),
        "B96x4k-two-of-three-empty": few_and_many,
    }
    for batch, counts in middling.items():
        yield from (_case(batch, n, group="middling") for n in counts)
    for n in few_and_many:
        yield from (_case("B16x4k", n, q_len=q_len, group="middling") for q_len in (2, 4))
    yield from (_case("B64ragged", n, group="ragged") for n in few_and_many)
    for n in few_and_many:
        yield from (_case("B64x4k", n, page, group="pages") for page in (1, 16, 32, 128))
    forms: tuple[Form, ...] = ("e4m3", "rows656")
    for form in forms:
        for n in few_and_many:
            yield from (_case(batch, n, form=form, group="forms") for batch in uniform[1:])
    for n in few_and_many:
        yield from (_case("B64x4k", n, q_len=q_len, group="queries") for q_len in (2, 4))
        yield _extend(n)
    yield from (_case("B64x4k", n, group="layouts") for n in few_and_many)


MLA_CASES = tuple(_cases())


def select_mla(patterns: str) -> list[MLACase]:
    """Return the cases that `pick` picks."""
    return pick(patterns, MLA_CASES, MLA_GROUPS)
