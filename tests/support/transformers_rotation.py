"""How transformers rotates queries and keys: its own rotary modules and functions, by model type.

Every model type that ``transformers`` has a configuration for is looked at: the rotary class of its
text model, built from the configuration's defaults, and the function that its attention calls.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_OTHERS = re.compile(
    r"Vision|Audio|Video|Image|Encoder|Indexer|Cross|Mimi|DiT|Conformer|ViT|SaProt|LoFTR|Eomt"
)
# Where transformers' own modules refuse its defaults, or heads have no size that a kernel has.
_GLM4V = {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}
_COMPASS = {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}
_CHANGES: dict[str, dict[str, Any]] = {
    "glm4v_text": _GLM4V,
    **{name: {"text_config": _GLM4V} for name in ("glm4v", "glm46v", "glmga")},
    "glm_image_text": _GLM4V,
    "glm_image": {"text_config": _GLM4V},
    "glm4_moe": {"head_dim": 128},
    "qwen3_omni_moe_text": {"head_dim": 128},
    "qwen3_omni_moe_thinker": {"text_config": {"head_dim": 128}},
    "qwen3_omni_moe": {"thinker_config": {"text_config": {"head_dim": 128}}},
    "cohere_compass_text": _COMPASS,
    "cohere_compass": {"text_config": _COMPASS},
    "glm4v_moe_text": {"head_dim": 128},
    "glm4v_moe": {"text_config": {"head_dim": 128}},
}
# Whose defaults transformers builds no rotary module from.
_NOT_BUILT = {"blt", "clvp_decoder", "gemma4_assistant", "moshi_depth"}
_ROTATIONS = re.compile(r"rotary|rope")


@dataclass(frozen=True)
class Rotation:
    """One model type and one kind of its layers.

    Attributes:
        model_type: of the configuration.
        layer_type: as ``Rope.from_hf_config`` takes it.
        config: the configuration object, with its defaults.
        rotary: transformers' module.
        apply: what its attention calls with queries and keys.
        num_axes: positions of a token.
    """

    model_type: str
    layer_type: str | None
    config: Any
    text: Any
    rotary: Any = field(repr=False)
    apply: Callable[..., Any] = field(repr=False)
    num_axes: int

    def file(self) -> dict[str, Any]:
        """What a config.json of these defaults holds."""
        found: dict[str, Any] = json.loads(self.config.to_json_string(use_diff=False))
        return found

    @property
    def frequencies(self) -> Tensor | None:
        """Radians a token, or None where the module has cosines and sines only."""
        name = f"{self.layer_type}_inv_freq" if self.layer_type else "inv_freq"
        found = getattr(self.rotary, name, getattr(self.rotary, "inv_freq", None))
        return None if found is None else torch.as_tensor(found).float()

    @property
    def amplitude(self) -> float:
        name = f"{self.layer_type}_attention_scaling" if self.layer_type else "attention_scaling"
        found = getattr(self.rotary, name, getattr(self.rotary, "attention_scaling", 1.0))
        return float(found[self.layer_type] if isinstance(found, dict) else found)

    def pairing(self) -> str:
        """Which element turns into element 0, as the configuration's defaults have it."""
        width = 2 * self.turned_pairs()
        x = torch.zeros(1, 1, width)
        x[..., 0] = 1.0
        turned = self.rotate(x, torch.ones(3, 1, dtype=torch.int64))[0, 0]
        others = turned[1:].nonzero().flatten() + 1
        (other,) = others.tolist()
        name = "interleaved" if other == 1 else "neox" if other == width // 2 else f"0 and {other}"
        return name if turned[other] > 0 else f"{name}, backwards"

    def turned_pairs(self) -> int:
        """How many pairs there are."""
        ids = torch.ones(3 if self.num_axes > 1 else 1, 1, dtype=torch.int64)
        (turns, *_) = self.turns(torch.zeros(1, 1, 2), ids)
        width = int(turns.shape[-1])
        frequencies = self.frequencies
        if frequencies is not None:
            return frequencies.numel()
        return width

    def turns(self, x: Tensor, positions: Tensor) -> tuple[Any, ...]:
        """Return what the rotary module gives the function: cosines and sines, or both in one."""
        ids = positions[:, None] if self.num_axes > 1 else positions[0][None]
        kinds = () if self.layer_type is None else (self.layer_type,)
        try:
            turns = self.rotary(x[None], ids, *kinds)
        except TypeError:
            turns = self.rotary(x[None], ids)
        return turns if isinstance(turns, tuple) else (turns,)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return float32 x, [num_tokens, heads, dim], turned by ``positions``, [axes, num_tokens].

        Elements that the function wants cut off beforehand come back as they are.
        """
        turns = self.turns(x, positions)
        names = [p for p in inspect.signature(self.apply).parameters if p not in ("q", "k", "v")]
        width = 2 * turns[0].shape[-1]
        tried: Exception | None = None
        for size in dict.fromkeys((x.shape[-1], width // 2, width)):
            try:
                turned = self._call(x[..., :size], turns, names)
            except (RuntimeError, TypeError, ValueError) as error:
                tried = error
                continue
            return torch.cat((turned, x[..., size:]), dim=-1)
        raise AssertionError(f"{self.model_type}: {tried}")

    def _call(self, x: Tensor, turns: tuple[Any, ...], names: list[str]) -> Tensor:
        token_first = self.apply.__name__ == "apply_rotary_emb" and self.model_type.startswith(
            "llama4"
        )
        token_first |= names[0] == "tensor"
        given = x[None] if token_first else x.transpose(0, 1)[None]
        takes_both = "k" in inspect.signature(self.apply).parameters or names[0] == "xq"
        out = self.apply(*((given, given) if takes_both else (given,)), *turns)
        out = out[0] if isinstance(out, tuple) else out
        if out.dtype.is_complex:
            out = torch.view_as_real(out).flatten(-2)
        out = out[0] if token_first else out[0].transpose(0, 1)
        if "interleave" in self.apply.__name__:  # which leaves evens first
            halves = out.unflatten(-1, (2, -1))
            out = halves.transpose(-1, -2).flatten(-2)
        return out


def model_types() -> list[str]:
    """Return the model types that transformers knows; none where it is not installed."""
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    except ImportError:
        return []
    return sorted(CONFIG_MAPPING_NAMES)


def rotations_of(model_type: str) -> Iterator[Rotation]:
    """Yield a model type's kinds of layers; nothing where there is no rotary class of text."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type in _NOT_BUILT:
        return
    try:
        config = CONFIG_MAPPING[model_type](**_CHANGES.get(model_type, {}))
        text = config.get_text_config()
    except (AttributeError, ValueError, TypeError):  # of parts that have to be given
        return
    if not hasattr(text, "max_position_embeddings") or not _is_decoder(text):
        return
    found = _module_of(text)
    rotary_class = found and _rotary_class(*found, text)
    if not found or not rotary_class:
        return
    rotary = rotary_class(config=text)
    apply = _function(found[0], rotary_class.__name__, text)
    if apply is None:
        return
    parameters = getattr(text, "rope_parameters", None) or {}
    layers = [name for name, part in parameters.items() if isinstance(part, dict)]
    used = getattr(rotary, "layer_types", layers)
    layers = [name for name in layers if name in used]
    section = getattr(rotary, "mrope_section", None)
    for layer_type in layers or [None]:
        yield Rotation(model_type, layer_type, config, text, rotary, apply, 3 if section else 1)


def _is_decoder(text: Any) -> bool:
    """Whether ``text`` is of a model of text; pictures and sounds have other positions."""
    kind = (getattr(text, "rope_parameters", None) or {}).get("rope_type")
    return kind != "axial" and not _OTHERS.search(type(text).__name__.removeprefix("GlmImageT"))


def _module_of(text: Any) -> tuple[ModuleType, list[str]] | None:
    """Return the module with the code of a model, and its classes."""
    names = [type(text).__module__.replace("configuration_", "modeling_")]
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    kinds = MODEL_MAPPING_NAMES.get(text.model_type, ())
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    import transformers

    names += [
        getattr(transformers, kind).__module__ for kind in kinds if hasattr(transformers, kind)
    ]
    for name in names:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        return module, [node.name for node in _tree(module).body if isinstance(node, ast.ClassDef)]
    return None


@functools.cache
def _tree(module: ModuleType) -> ast.Module:
    assert module.__file__ is not None
    return ast.parse(Path(module.__file__).read_text())


def _rotary_class(module: ModuleType, names: list[str], text: Any) -> Any:
    """Return the class of the text model."""
    fitting = _classes_made_of(module, type(text).__name__)
    for name in names if not fitting else ():
        if "Rotary" not in name or "Attention" in name:
            continue
        kind = getattr(module, name)
        parameter = inspect.signature(kind.__init__).parameters.get("config")
        if parameter is None:
            continue
        expected = parameter.annotation
        if isinstance(expected, str):
            expected = getattr(module, expected, None)
        if expected is type(text):
            return kind
        if not _OTHERS.search(name):
            fitting.append(kind)
    return fitting[0] if fitting else None


def _classes_made_of(module: ModuleType, config: str) -> list[Any]:
    """Return the rotary classes of models whose constructor takes a configuration of a class."""
    found = []
    for node in _tree(module).body:
        if not isinstance(node, ast.ClassDef) or "Rotary" in node.name:
            continue
        for method in node.body:
            if not isinstance(method, ast.FunctionDef) or method.name != "__init__":
                continue
            if any(a.annotation and ast.unparse(a.annotation) == config for a in method.args.args):
                names = (ast.unparse(n.func) for n in ast.walk(method) if isinstance(n, ast.Call))
                found += [getattr(module, name) for name in names if "Rotary" in name]
    return found


def _function(module: ModuleType, rotary: str, text: Any) -> Callable[..., Any] | None:
    """Return the rotation that the attention beside the rotary class calls."""
    prefix = rotary.partition("Rotary")[0]
    chosen: list[str] = []
    for start in (prefix, prefix.removesuffix("Text"), ""):
        for node in _tree(module).body:
            is_attention = isinstance(node, ast.ClassDef) and re.search("Attention|MLA", node.name)
            if is_attention and node.name.startswith(start) and not _OTHERS.search(node.name):
                chosen += _rotations_called(module, node)
        if chosen:
            break
    chosen = list(dict.fromkeys(chosen))
    if len(chosen) > 1:
        interleaved = bool(getattr(text, "rope_interleave", True))
        chosen = [name for name in chosen if ("interleave" in name) == interleaved]
    return getattr(module, chosen[0]) if chosen else None


def _rotations_called(module: ModuleType, node: ast.AST) -> list[str]:
    called = (n.func.id for n in ast.walk(node) if isinstance(n, ast.Call) and _is_name(n.func))
    return [
        name
        for name in called
        if _ROTATIONS.search(name) and "vision" not in name and callable(getattr(module, name, 0))
    ]


def _is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Name)
