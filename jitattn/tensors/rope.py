"""Rotary embeddings: ``Rope``, which knows frequencies and pairing, and what models call them.

Pair i of a head is turned by ``position * inv_freq[i]``. It is made of the elements i and
i + rotary_dim / 2 ("NeoX"), or of 2 i and 2 i + 1 ("GPT-J", ``interleaved``); elements from
rotary_dim on stay as they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from jitattn.base.validate import check_count, check_flag
from jitattn.spec.rotary_fields import RotaryFields, scaling_type
from jitattn.tensors.tensor_handles import new_handle

_MISSING = object()
Scaling = Mapping[str, object]


class Rope:
    """How a model turns pairs of elements of q and K by their positions.

    Angles are computed where they are needed, from float32 frequencies, exactly enough for every
    position below 2**31: there is no table that a long context could leave. A token's keys stay in
    the cache as they were turned, so all tokens have one set of frequencies.

    Attributes:
        head_dim: elements of a head.
        rotary_dim: the first so many are turned: even, at most head_dim.
        base: the wavelength of pair i is 2 pi base ** (2 i / rotary_dim).
        scaling: what extends the context, as transformers names it, or None:
            {"rope_type": "linear", "factor"};
            {"rope_type": "dynamic", "factor", "original_max_position_embeddings"}, with the base
            that contexts of ``max_position`` tokens have;
            {"rope_type": "llama3", "factor", "low_freq_factor", "high_freq_factor",
            "original_max_position_embeddings"};
            {"rope_type": "yarn", "factor", "original_max_position_embeddings"}, and if wanted
            "attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate";
            {"rope_type": "longrope", "short_factor", "long_factor", "factor",
            "original_max_position_embeddings"}, and if wanted "attention_factor": the long factors
            where ``max_position`` is above the original maximum;
            {"rope_type": "proportional"}, and if wanted "partial_rotary_factor" and "factor": of
            all pairs only the fastest are turned (Gemma 4).
        interleaved: pairs are neighbours.
        max_position: the most tokens of a request. It chooses the frequencies of "dynamic" and
            "longrope", which need it; others don't depend on it. Given, it bounds positions:
            larger ones are refused on the CPU and undefined on the device.
        mrope_section: for models whose tokens have a temporal position, a height and a width: how
            many pairs use each, in this order. None: one position. ``positions`` are then
            [3, num_tokens]; where they are 1-D or follow from lengths, all three are the same, as
            they are of text.
        mrope_interleaved: the sections take turns pair by pair (Qwen3-VL); otherwise they follow
            each other (Qwen2-VL).
        inv_freq: float32 [rotary_dim / 2] on the CPU, radians a token.
        attention_factor: cos and sin are multiplied with this.
        handle: int64 [] on the CPU, what stands for it in calls of ``torch.ops.jitattn``.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        rotary_dim: int | None = None,
        base: float = 10000.0,
        scaling: Scaling | None = None,
        interleaved: bool = False,
        max_position: int | None = None,
        mrope_section: Sequence[int] | None = None,
        mrope_interleaved: bool = False,
    ) -> None:
        """Compute the frequencies.

        Raises:
            TypeError: an argument is of another type.
            ValueError: an argument is out of range, frequencies are not finite, or ``scaling`` has
                an unknown type, misses a key or has one that its type doesn't use.
        """
        self.head_dim = check_count("head_dim", head_dim)
        self.rotary_dim = (
            self.head_dim if rotary_dim is None else check_count("rotary_dim", rotary_dim)
        )
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"rotary_dim is {self.rotary_dim}: expected an even number up to head_dim, "
                f"{self.head_dim}"
            )
        self.base = _number("base", base)
        if scaling is not None and not isinstance(scaling, Mapping):
            raise TypeError(f"scaling is a {type(scaling).__name__}: expected a dictionary")
        self.scaling = None if scaling is None else dict(scaling)
        self.interleaved = check_flag("interleaved", interleaved)
        self.max_position = (
            None if max_position is None else check_count("max_position", max_position)
        )
        self.mrope_section = _sections(mrope_section, self.rotary_dim)
        self.mrope_interleaved = check_flag("mrope_interleaved", mrope_interleaved)
        if mrope_interleaved and mrope_section is None:
            raise ValueError("mrope_interleaved is True: it needs mrope_section")
        self.inv_freq, self.attention_factor = _frequencies(self)
        self._identity = (
            (self.head_dim, self.rotary_dim, self.interleaved, self.attention_factor),
            (self.mrope_section, self.mrope_interleaved, self.max_position),
            tuple(self.inv_freq.tolist()),
        )
        self._arguments: dict[str, object] = {
            "rotary_dim": self.rotary_dim,
            "base": self.base,
            "scaling": self.scaling,
            "interleaved": self.interleaved,
            "max_position": self.max_position,
            "mrope_section": self.mrope_section,
            "mrope_interleaved": self.mrope_interleaved,
        }
        # What kernels read, by device.
        self._turns: dict[torch.device, Tensor] = {}
        self._axes: dict[torch.device, Tensor] = {}
        self.handle = new_handle(self)
        self._hash = hash(self._identity)

    @classmethod
    def from_hf_config(
        cls,
        config: object,
        *,
        layer_type: str | None = None,
        interleaved: bool | None = None,
        max_position: int | None = None,
    ) -> Rope:
        """Return the rotary embedding of a transformers configuration.

        Args:
            config: a configuration object, or the dictionary of a config.json. ``rope_parameters``
                and the older ``rope_theta``, ``rope_scaling`` and ``partial_rotary_factor`` are
                understood, those of the text model where there are several.
            layer_type: for models whose layers differ (Gemma 3): "full_attention",
                "sliding_attention" or as the configuration names them. Refused for others.
            interleaved: None: as the file's ``rope_interleave`` says, or else the model's code, as
                docs/models.md has it. Models that are not listed there need a flag.
            max_position: the most tokens of a request, if other than ``max_position_embeddings``.

        Raises:
            ValueError: a model, scaling or layer type is unknown, or something is missing.
        """
        fields = RotaryFields(config, layer_type)
        parameters = fields.parameters()
        head_dim, rotary_dim = fields.head_dim(), fields.rotary_dim(parameters)
        axes = fields.axes(parameters, (rotary_dim or head_dim) // 2)
        base = parameters.pop("rope_theta")
        trained = fields.get("max_position_embeddings")
        return cls(
            head_dim,
            rotary_dim=rotary_dim,
            base=base,  # type: ignore[arg-type]
            scaling=fields.scaling(parameters),
            interleaved=fields.interleaved() if interleaved is None else interleaved,
            max_position=trained if max_position is None else max_position,  # type: ignore[arg-type]
            mrope_section=axes.section if axes else None,
            mrope_interleaved=axes.is_interleaved if axes else False,
        )

    def __repr__(self) -> str:
        """Show what was given."""
        parts = [f"{self.head_dim}", f"rotary_dim={self.rotary_dim}", f"base={self.base}"]
        parts += [f"scaling={self.scaling}"] * (self.scaling is not None)
        parts += ["interleaved=True"] * self.interleaved
        parts += [f"mrope_section={list(self.mrope_section)}"] if self.mrope_section else []
        return f"Rope({', '.join(parts)})"

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Rope) and self._identity == other._identity

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Callable[..., Rope], tuple[int, dict[str, object]]]:
        # What kernels read stays with its process.
        return _restore, (self.head_dim, self._arguments)

    def __setattr__(self, name: str, value: object) -> None:
        if "_hash" in self.__dict__:
            raise AttributeError(f"Rope.{name} can't be changed: make another Rope")
        object.__setattr__(self, name, value)

    @functools.cached_property
    def axes(self) -> tuple[int, ...]:
        """For each pair which of the three positions turns it; empty with one position."""
        if self.mrope_section is None:
            return ()
        if not self.mrope_interleaved:
            t, h, w = self.mrope_section
            return (0,) * t + (1,) * h + (2,) * w
        pairs = range(self.rotary_dim // 2)
        return tuple(i % 3 if i < 3 * self.mrope_section[i % 3] else 0 for i in pairs)

    def is_on(self, device: torch.device) -> bool:
        """Whether kernels on ``device`` have what they read."""
        return device in self._turns

    def turns_on(self, device: torch.device) -> Tensor:
        """Return int64 [rotary_dim / 2]: turns a token, in units of 2**-64, modulo a turn.

        A product with a position that wraps around is exact, whatever the position.
        """
        turns = self._turns.get(device)
        if turns is None:
            turns = torch.tensor([turns_of(f) for f in self.inv_freq.tolist()], device=device)
            self._turns[device] = turns
        return turns

    def axes_on(self, device: torch.device) -> Tensor | None:
        """Return ``axes`` as int32 on ``device``; None with one position."""
        if not self.axes:
            return None
        axes = self._axes.get(device)
        if axes is None:
            axes = torch.tensor(self.axes, dtype=torch.int32, device=device)
            self._axes[device] = axes
        return axes


def _restore(head_dim: int, arguments: dict[str, Any]) -> Rope:
    return Rope(head_dim, **arguments)


def turns_of(inv_freq: float) -> int:
    """Return the turns of ``inv_freq`` radians in units of 2**-64, wrapped to 64 signed bits."""
    numerator, denominator = inv_freq.as_integer_ratio()
    guard = 160  # bits of 1 / (2 pi)
    product = numerator * _inverse_two_pi(guard) // denominator
    turns = (product >> (guard - 65)) + 1 >> 1  # to the nearest
    return (turns + 2**63) % 2**64 - 2**63


@functools.cache
def _inverse_two_pi(bits: int) -> int:
    """Return 2**bits / (2 pi), from Machin's formula."""
    one = 1 << (bits + 32)

    def arctan_of_inverse(n: int) -> int:
        total, power, k = 0, one // n, 0
        while power:
            total += -power // (2 * k + 1) if k % 2 else power // (2 * k + 1)
            power //= n * n
            k += 1
        return total

    pi = 16 * arctan_of_inverse(5) - 4 * arctan_of_inverse(239)
    return (one << bits) // (2 * pi)


# --- arguments ------------------------------------------------------------------------------------


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is a {type(value).__name__}: expected a number")
    number = float(value)
    if not 0 < number < math.inf:
        raise ValueError(f"{name} is {number}: expected a positive number")
    return number


def _sections(section: Sequence[int] | None, rotary_dim: int) -> tuple[int, ...] | None:
    if section is None:
        return None
    if not isinstance(section, Sequence):
        raise TypeError(f"mrope_section is a {type(section).__name__}: expected three counts")
    counts = tuple(section)
    if len(counts) != 3 or any(type(n) is not int or n < 0 for n in counts):
        raise ValueError(f"mrope_section is {list(counts)}: expected three counts of pairs")
    if sum(counts) != rotary_dim // 2:
        raise ValueError(
            f"mrope_section is {list(counts)}, {sum(counts)} pairs: expected rotary_dim / 2 = "
            f"{rotary_dim // 2}"
        )
    return counts


# --- frequencies: float32, in the order of transformers, so that both have the same bits ----------

Frequencies = tuple[Tensor, float]


class _Keys:
    """The keys of a scaling, each of which must be asked for."""

    def __init__(self, scaling: Scaling) -> None:
        self._left = dict(scaling)
        self.kind = scaling_type(scaling)
        for name in ("rope_type", "type"):  # some configurations say it twice
            self._left.pop(name, None)

    def number(self, name: str, default: object = _MISSING) -> float:
        return _number(f"scaling[{name!r}]", self.value(name, default))

    def optional(self, name: str) -> float | None:
        value = self.value(name, None)
        return None if value is None else _number(f"scaling[{name!r}]", value)

    def nonzero(self, name: str) -> float | None:
        """Return a number, None where it is 0, which stands for an absent one."""
        value = self.value(name, None)
        is_zero = isinstance(value, (int, float)) and not isinstance(value, bool) and value == 0
        return None if value is None or is_zero else _number(f"scaling[{name!r}]", value)

    def value(self, name: str, default: object = _MISSING) -> object:
        value = self._left.pop(name, None)
        if value is None:
            if default is _MISSING:
                raise ValueError(f"scaling has no {name!r}: {self.kind!r} needs it")
            return default
        return value

    def finish(self) -> None:
        unused = [name for name, value in self._left.items() if value is not None]
        if unused:
            raise ValueError(f"scaling has {', '.join(unused)}: {self.kind!r} has no use for that")


def _frequencies(rope: Rope) -> Frequencies:
    keys = _Keys(rope.scaling or {})
    compute = _SCALINGS.get(keys.kind)
    if compute is None:
        raise ValueError(
            f"scaling has the type {keys.kind!r}: expected one of {', '.join(_SCALINGS)}"
        )
    try:
        inv_freq, attention_factor = compute(rope, keys)
    except ZeroDivisionError:
        inv_freq, attention_factor = torch.tensor(math.nan, device="cpu"), 1.0
    keys.finish()
    if not bool(inv_freq.isfinite().all()) or not math.isfinite(attention_factor):
        raise ValueError(
            f"base is {rope.base} and scaling {rope.scaling}: they give frequencies that aren't "
            "finite"
        )
    return inv_freq, attention_factor


def _unscaled(base: float, dim: int) -> Tensor:
    return 1.0 / (base ** (torch.arange(0, dim, 2, device="cpu").float() / dim))


def _default(rope: Rope, keys: _Keys) -> Frequencies:
    del keys
    return _unscaled(rope.base, rope.rotary_dim), 1.0


def _linear(rope: Rope, keys: _Keys) -> Frequencies:
    return _unscaled(rope.base, rope.rotary_dim) / keys.number("factor"), 1.0


def _dynamic(rope: Rope, keys: _Keys) -> Frequencies:
    factor, trained = keys.number("factor"), keys.number("original_max_position_embeddings")
    if rope.max_position is None:
        raise ValueError("max_position is None: 'dynamic' computes its base from it")
    if rope.rotary_dim <= 2:
        raise ValueError(f"rotary_dim is {rope.rotary_dim}: 'dynamic' needs at least 4")
    length = max(rope.max_position, trained)
    growth = (factor * length / trained) - (factor - 1)
    base = rope.base * growth ** (rope.rotary_dim / (rope.rotary_dim - 2))
    return _unscaled(base, rope.rotary_dim), 1.0


def _llama3(rope: Rope, keys: _Keys) -> Frequencies:
    factor = keys.number("factor")
    low, high = keys.number("low_freq_factor"), keys.number("high_freq_factor")
    trained = keys.number("original_max_position_embeddings")
    if low >= high:
        raise ValueError(
            f"scaling has low_freq_factor {low} and high_freq_factor {high}: the latter is larger"
        )
    fast = _unscaled(rope.base, rope.rotary_dim)
    wavelength = 2 * math.pi / fast
    share = (trained / wavelength - low) / (high - low)
    between = (1 - share) * fast / factor + share * fast
    slow = torch.where(wavelength > trained / low, fast / factor, between)
    return torch.where(wavelength < trained / high, fast, slow), 1.0


def _yarn(rope: Rope, keys: _Keys) -> Frequencies:
    dim, base = rope.rotary_dim, rope.base
    trained = keys.number("original_max_position_embeddings")
    factor = keys.number("factor")
    low_mscale, high_mscale = keys.nonzero("mscale_all_dim"), keys.nonzero("mscale")
    attention_factor = keys.optional("attention_factor")
    bounds = [
        dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(base))
        for rotations in (keys.number("beta_fast", 32), keys.number("beta_slow", 1))
    ]
    if keys.value("truncate", True):
        bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
    first, last = max(bounds[0], 0), min(bounds[1], dim - 1)
    last += 0.001 if first == last else 0
    ramp = ((torch.arange(dim // 2, device="cpu").float() - first) / (last - first)).clamp(0, 1)
    powers = base ** (torch.arange(0, dim, 2, device="cpu").float() / dim)
    keep = 1 - ramp
    inv_freq = 1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep
    if attention_factor is None:
        both = high_mscale and low_mscale
        attention_factor = (
            _mscale(factor, high_mscale) / _mscale(factor, low_mscale) if both else _mscale(factor)
        )
    return inv_freq, attention_factor


def _mscale(factor: float, mscale: float | None = 1.0) -> float:
    return 1.0 if factor <= 1 or mscale is None else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(rope: Rope, keys: _Keys) -> Frequencies:
    trained, factor = keys.number("original_max_position_embeddings"), keys.optional("factor")
    attention_factor = keys.optional("attention_factor")
    if rope.max_position is None:
        raise ValueError("max_position is None: 'longrope' chooses its factors by it")
    both = {name: keys.value(name) for name in ("short_factor", "long_factor")}
    name = "long_factor" if rope.max_position > trained else "short_factor"
    factors = {key: _factors(key, value, rope.rotary_dim // 2) for key, value in both.items()}[name]
    if attention_factor is None:
        factor = rope.max_position / trained if factor is None else factor
        attention_factor = (
            1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
        )
    exponents = torch.arange(0, rope.rotary_dim, 2, device="cpu").float() / rope.rotary_dim
    return 1.0 / (factors * rope.base**exponents), attention_factor


def _proportional(rope: Rope, keys: _Keys) -> Frequencies:
    dim, share = rope.rotary_dim, keys.number("partial_rotary_factor", 1.0)
    if share > 1:
        raise ValueError(f"scaling['partial_rotary_factor'] is {share}: expected at most 1")
    count = int(share * dim // 2)
    fast = 1.0 / (rope.base ** (torch.arange(0, 2 * count, 2, device="cpu").float() / dim))
    still = torch.zeros(dim // 2 - count, device="cpu")
    return torch.cat((fast, still)) / keys.number("factor", 1.0), 1.0


def _factors(name: str, values: object, count: int) -> Tensor:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise TypeError(f"scaling[{name!r}] is a {type(values).__name__}: expected numbers")
    if len(values) != count:
        raise ValueError(
            f"scaling[{name!r}] has {len(values)} factors: expected rotary_dim / 2 = {count}"
        )
    numbers = [_number(f"scaling[{name!r}][{i}]", value) for i, value in enumerate(values)]
    return torch.tensor(numbers, dtype=torch.float32, device="cpu")


_SCALINGS: dict[str, Callable[[Rope, _Keys], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
