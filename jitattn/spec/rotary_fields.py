"""How a model rotates, from its configuration as transformers has it. Torch-free.

A configuration is the dictionary of a config.json or an object; ``rope_parameters`` and the older
``rope_theta``, ``rope_scaling`` and ``partial_rotary_factor`` are understood, those of the text
model where there are several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jitattn.base.validate import check_count, check_flag, check_number
from jitattn.spec.layout import Pairing
from jitattn.spec.model_types import MODEL_TYPES, ROTARY_DIM_UNREAD, ROTATED_OTHERWISE, Axes

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
ROPE_TYPE_ALIASES = {"su": "longrope", "mrope": "default"}
TEXT_PARTS = ("thinker_config", "vlm_config", "text_config", "language_config", "llm_config")
_PARTS = (*TEXT_PARTS, "decoder_config", "decoder")
# Other names of fields, of GPT-J, DBRX, Moonshine, Zamba2 and JetMoE.
_ALIASES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "n_heads", "decoder_num_attention_heads"),
    "head_dim": ("attention_head_dim", "kv_channels"),
}
# Of "yarn", and about q: a scale by position, which no rotation has.
_SCALES_OF_Q = ("llama_4_scaling_beta", "max_position_embeddings")


def scaling_type(parameters: Mapping[str, object]) -> str:
    """Return the type that rope parameters name."""
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    return ROPE_TYPE_ALIASES.get(kind, kind)


class RotaryFields:
    """The fields of a configuration's text model, read for the layers of one type."""

    def __init__(self, config: object, layer_type: str | None = None) -> None:
        self._config, self._text = config, _text_of(config)
        self._layer_type = layer_type
        name = _get(self._text, "model_type") or _get(config, "model_type")
        self.model_type = name if isinstance(name, str) else ""
        known = MODEL_TYPES.get(self.model_type)
        self._defaults: Mapping[str, object] = (known.defaults if known else None) or {}

    def get(self, name: str) -> object:
        """Return a field; None where there is none."""
        value = self._of_layer(name)
        for key in (name, *_ALIASES.get(name, ())) if value is None else ():
            value = _get(self._text, key) if value is None else value
        if value is None and not (isinstance(self._text, Mapping) and name in self._text):
            return self._defaults.get(name)
        return value

    def _of_layer(self, name: str) -> object:
        """Return what layers of the type have instead; None where it is the same for all."""
        if self._layer_type == "full_attention" and name == "head_dim":
            found = _get(self._text, "global_head_dim")
            if found is not None:
                return found
        layers, kinds = _get(self._text, "per_layer_config"), _get(self._text, "layer_types")
        if layers is None or not isinstance(kinds, Sequence) or self._layer_type not in kinds:
            return None
        if not isinstance(layers, Mapping):  # of a configuration object
            layers_of: Any = layers
            return _get(layers_of[kinds.index(self._layer_type)], name)
        for index, fields in layers.items():
            position = int(index) if str(index).isdecimal() else len(kinds)
            if position < len(kinds) and kinds[position] == self._layer_type:
                return fields.get(name) if isinstance(fields, Mapping) else None
        return None

    def parameters(self) -> dict[str, object]:
        """Return the rope parameters of a layer, ``rope_theta`` among them."""
        given = self.get("rope_parameters") or self.get("rope_scaling") or {}
        if not isinstance(given, Mapping):
            raise ValueError(f"config has rope parameters of type {type(given).__name__}")
        kind = self._layer_type
        layers = {name: value for name, value in given.items() if isinstance(value, Mapping)}
        theta, local = self.get("rope_theta"), self.get("rope_local_base_freq")
        if not layers and local is not None:  # Gemma 3, as it was stored at first
            layers = {
                "full_attention": {"rope_theta": theta, **given},
                "sliding_attention": {"rope_theta": local},
            }
        if layers:
            if kind not in layers:
                raise ValueError(
                    f"layer_type is {kind!r}: the layers of this model differ, choose one of "
                    f"{', '.join(sorted(layers))}"
                )
            chosen = dict(layers[kind])
        elif kind is not None:
            raise ValueError(f"layer_type is {kind!r}: all layers of this model are alike")
        else:
            chosen = dict(given)
        if chosen.get("rope_theta") is None:
            chosen["rope_theta"] = 10000.0 if theta is None else theta
        return chosen

    def head_dim(self) -> int:
        """Return the elements of what is rotated: a head, or the part beside a latent."""
        found = self.get("qk_rope_head_dim") or self._whole_head_dim()
        if found is None:
            raise ValueError("config has neither head_dim nor hidden_size and num_attention_heads")
        return check_count("head_dim of config", found)

    def _whole_head_dim(self) -> object:
        if (found := self.get("head_dim")) is not None:
            return found
        hidden_size, num_heads = self.get("hidden_size"), self.get("num_attention_heads")
        if not isinstance(hidden_size, int) or not isinstance(num_heads, int) or num_heads < 1:
            return None
        return hidden_size // num_heads

    def rotary_dim(self, parameters: dict[str, object]) -> int | None:
        """Return how many elements are turned, None for all; take that out of ``parameters``."""
        if scaling_type(parameters) == "proportional":
            return None  # whose pairs beyond the part have the frequency 0
        part = parameters.pop("partial_rotary_factor", None)
        for name in ("partial_rotary_factor", "rotary_pct"):
            part = self.get(name) if part is None else part
        if part is None:
            count = None if self.model_type in ROTARY_DIM_UNREAD else self.get("rotary_dim")
            return None if count is None else check_count("rotary_dim of config", count)
        share = check_number("partial_rotary_factor", part)
        if (rope_part := self.get("qk_rope_head_dim")) is None:
            return int(self.head_dim() * share)
        # A share of the head, of which the part beside a latent is one.
        whole = check_count("head_dim of config", self._whole_head_dim() or rope_part)
        return min(int(whole * share), check_count("qk_rope_head_dim", rope_part))

    def interleaved(self) -> bool:
        """Return whether pairs are neighbours.

        Raises:
            ValueError: nobody has verified how models of this type rotate, and the file is silent.
        """
        name = self.model_type
        if reason := ROTATED_OTHERWISE.get(name):
            raise ValueError(f"model_type {name!r} {reason}, which no Rope does")
        declared = self.get("rope_interleave")
        if declared is not None:
            return check_flag("rope_interleave", declared)
        if name in MODEL_TYPES:
            return MODEL_TYPES[name].pairing is Pairing.INTERLEAVED
        said = f"model_type {name!r} is not known" if name else "config has no model_type"
        raise ValueError(
            f"{said}: pass interleaved=True if its code rotates the elements 2 i and 2 i + 1, "
            "interleaved=False if i and i + rotary_dim / 2 (docs/models.md lists those that are)"
        )

    def axes(self, parameters: dict[str, object], num_pairs: int) -> Axes | None:
        """Return which positions turn the pairs; take that out of ``parameters``."""
        section = parameters.pop("mrope_section", None)
        declared = parameters.pop("mrope_interleaved", None)
        known = MODEL_TYPES.get(self.model_type)
        usual = known.axes if known else None
        if usual is not None and not usual.is_known:
            return None
        if declared is None:
            declared = usual is not None and usual.is_interleaved
        is_interleaved = check_flag("mrope_interleaved", declared)
        if section is None and usual is not None:
            section = _section_of(num_pairs, usual)
        return Axes(section=section, is_interleaved=is_interleaved)  # type: ignore[arg-type]

    def scaling(self, parameters: dict[str, object]) -> dict[str, object] | None:
        """Return the scaling, with what transformers takes from elsewhere."""
        kind = scaling_type(parameters)
        if kind == "default":
            # Some configurations carry keys of other types along.
            return None
        trained = self.get("max_position_embeddings")
        name = "original_max_position_embeddings"
        if kind in ("dynamic", "yarn", "longrope", "llama3") and parameters.get(name) is None:
            parameters[name] = self.get(name) or trained
        original = parameters.get(name)
        no_factor = parameters.get("factor") is None
        if kind in ("yarn", "longrope") and no_factor and trained and original:
            longest = check_number("max_position_embeddings", trained)
            parameters["factor"] = longest / check_number(name, original)
        if kind in ("linear", "proportional"):
            parameters.pop(name, None)
        for unused in _SCALES_OF_Q if kind == "yarn" else ():
            parameters.pop(unused, None)
        return parameters


def _section_of(num_pairs: int, usual: Axes) -> tuple[int, int, int] | None:
    """Return how many pairs each position turns where the file says nothing."""
    if usual.section is None or sum(usual.section) == num_pairs or not usual.is_interleaved:
        return usual.section if sum(usual.section or ()) == num_pairs else None
    # Height and width have every third pair as far as their counts go; time has the others.
    height, width = (min(usual.section[i], len(range(i, num_pairs, 3))) for i in (1, 2))
    return num_pairs - height - width, height, width


def _text_of(config: object) -> object:
    """Return the text model's part of a configuration, itself where it has none."""
    for name in _PARTS:
        part = _get(config, name)
        if isinstance(part, Mapping) or hasattr(part, "model_type"):
            return _text_of(part)
    return config


def _get(source: object, name: str) -> object:
    """Return a field, of objects whose attributes raise as of their dictionary."""
    if isinstance(source, Mapping):
        return source.get(name)
    try:
        return getattr(source, name, None)
    except Exception:
        fields: object = getattr(source, "to_dict", dict)()
        return fields.get(name) if isinstance(fields, Mapping) else None
