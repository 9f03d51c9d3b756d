"""What a model's attention is, from its ``config.json`` as Hugging Face writes it. Torch-free.

A file says shapes; what it leaves to the model's code, such as biases or norms of every head, is in
the table below. A field that may change attention is understood, refused or reported by its name.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from jitattn.base.errors import ConfigError
from jitattn.base.record import Value
from jitattn.spec.dtype import Q_DTYPES
from jitattn.spec.layout import Pairing
from jitattn.spec.model_types import MODEL_TYPES, ROTARY_DIM_UNREAD, ROTATED_OTHERWISE, Attention
from jitattn.spec.rotary_fields import ROPE_TYPES, TEXT_PARTS, scaling_type


class Latent(Value):
    """The dimensions of multi-head latent attention, in elements."""

    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int


class Indexer(Value):
    """What chooses the tokens that latents are read of: heads, their elements, tokens a query."""

    num_heads: int
    head_dim: int
    num_tokens: int


class Model(Value):
    """The attention of a model.

    ``windows`` are the values of ``window_left`` among its layers. ``pairings``, ``biases`` and
    ``norms`` say what becomes of Q and K before: more than one where layers differ or where an
    engine may have done it already. ``rotary_dim`` is the part of a head that is turned.
    """

    model_type: str
    dtype: str
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int, ...]
    logits_soft_cap: float
    sm_scale: float | None
    use_sinks: bool
    pairings: tuple[Pairing, ...]
    rotary_dim: int
    use_mrope: bool
    biases: tuple[bool, ...]
    norms: tuple[bool, ...]
    latent: Latent | None
    indexer: Indexer | None
    notes: tuple[str, ...]
    """What a user should know: what was assumed, and fields that are not understood."""


_NO_KERNEL = "which no kernel computes"
_VARIANT = "which is not read from a model; there are kernels with variant="
_ALIBI = f"ALiBi, {_VARIANT}alibi"
_ENCODERS = ("bert", "roberta", "xlm-roberta", "distilbert", "electra", "deberta-v2")
_REFUSED_TYPES = {
    **dict.fromkeys(_ENCODERS, "queries that see later tokens, which is not understood"),
    "bloom": _ALIBI,
    "mpt": _ALIBI,
    "t5": f"relative position bias, {_VARIANT}relative_bias",
}
# Fields that change attention, wherever they are on.
_REFUSED_FIELDS = {
    "alibi": _ALIBI,
    "use_alibi": _ALIBI,
    "attention_chunk_size": f"attention within chunks, {_NO_KERNEL}",
    "dual_chunk_attention_config": f"attention within chunks, {_NO_KERNEL}",
    "sparse_attention_config": f"sparse attention, {_NO_KERNEL}",
    "attn_temperature_tuning": "a scale of q by position, which is not understood",
    "use_bidirectional_attention": "queries that see later tokens, which is not understood",
    "is_encoder_decoder": "attention to an encoder's tokens, which is not understood",
    "cross_attention_layers": "attention to an encoder's tokens, which is not understood",
    "global_head_dim": "head dims that differ between layers, which is not understood",
    "per_layer_config": "shapes that differ between layers, which is not understood",
    "block_configs": "heads that differ between layers, which is not understood",
    "multi_query": "heads of K and V that other fields count, which is not understood",
    "new_decoder_architecture": "heads of K and V that other fields count, which is not understood",
}
_NOTED_FIELDS = {
    "clip_qkv": "clamp q, k and v before preprocess_qkv, which does not",
    "qk_layernorm": "normalise q and k before preprocess_qkv, which has RMS norms only",
}
# Words in the names of fields that may be about attention, and such fields that are not.
_WORDS = re.compile(
    r"attn|attention|alibi|rope|rotary|window|sink|soft_?cap|head|sparse|chunk|"
    r"(^|_)(qk|kv|swa|nope|pos)(_|$)"
)
_HARMLESS = frozenset(
    {
        *("attention_dropout", "attention_probs_dropout_prob", "attn_dropout", "attn_pdrop"),
        *("attn_implementation", "_attn_implementation", "_attn_implementation_autoset"),
        *("attention_output_bias", "attention_out_bias", "attn_output_gate", "output_attentions"),
        *("chunk_size_feed_forward", "decoder_sparse_step", "final_logit_softcapping"),
        *("pruned_heads", "lm_head_bias", "qk_head_dim", "rope_interleave", "rope_theta"),
        *("rotary_emb_base", "rope_local_base_freq", "use_flash_attn", "use_flash_attention"),
        *("sliding_window_pattern", "_sliding_window_pattern", "max_window_layers"),
        *("no_rope_layer_interval", "num_kv_shared_layers", "indexer_rope_interleave"),
    }
)
_OTHER_PARTS = re.compile(
    r"(linear|mamba|ssm|conv|vision|audio|image|mlp|lm_head)_|(?!.*(attn|attention|rope)).*_config$"
)
_ROPE_FIELDS = (
    *("rope_theta", "rope_parameters", "rope_scaling", "rope_local_base_freq"),
    *("rotary_emb_base", "rotary_pct", "rotary_dim", "partial_rotary_factor"),
)


def read_model(path: str | os.PathLike[str]) -> Model:
    """Return the attention of the model that ``path``, a config.json or its folder, describes.

    Raises:
        ConfigError: the file describes no model, or attention that is not understood: with a reason
            for each field.
        OSError: the file cannot be read.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    if not file.exists():
        advice = "No such file (nothing is downloaded: give a config.json or its folder)"
        raise FileNotFoundError(errno.ENOENT, advice, str(file))
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError([f"{file} is not JSON: {error}"]) from error
    if not isinstance(fields, dict):
        raise ConfigError([f"{file} holds no JSON object"])
    try:
        return model_of(fields)
    except ConfigError as error:
        raise ConfigError([f"{file}: {reason}" for reason in error.reasons]) from None


def model_of(config: Mapping[str, object]) -> Model:
    """Return the attention of the model with the fields ``config``; of several, the text model.

    Raises:
        ConfigError: as ``read_model`` does.
    """
    fields = _Fields(_text_fields(config))
    fields.refuse_models_without()
    fields.refuse_the_unknown()
    latent = _latent(fields)
    indexer = _indexer(fields, latent)
    num_qo_heads = fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", num_qo_heads)
    head_dim = latent.qk_rope_head_dim if latent else _head_dim(fields, num_qo_heads)
    fields.check()  # what follows would only repeat what is wrong with the shapes
    rotary_dim, use_mrope = _rope(fields, head_dim)
    scale = _sm_scale(fields, latent)
    model = Model(
        model_type=fields.model_type,
        dtype=_dtype(fields),
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        windows=_windows(fields),
        logits_soft_cap=fields.number("attn_logit_softcapping") or 0.0,
        sm_scale=scale,
        use_sinks=fields.attention.use_sinks,
        pairings=_pairings(fields),
        rotary_dim=rotary_dim,
        use_mrope=use_mrope,
        biases=_biases(fields),
        norms=_norms(fields),
        latent=latent,
        indexer=indexer,
        notes=fields.finish(),
    )
    if latent and model.windows != (-1,):
        raise ConfigError(["sliding_window is set beside kv_lora_rank: latents have no window"])
    return model


def _text_fields(config: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of the language half of a multimodal model, others where it has none."""
    fields = dict(config)
    for name in TEXT_PARTS:
        part = fields.pop(name, None)
        if part is None:
            continue
        if not isinstance(part, dict):
            raise ConfigError([f"{name} is a {type(part).__name__}: expected an object"])
        fields |= part
    return fields


class _Fields:
    """The fields of a model, with what was asked for and what is wrong with them."""

    def __init__(self, fields: dict[str, object]) -> None:
        self._asked: set[str] = set()
        self._reasons: list[str] = []
        self.notes: list[str] = []
        name = fields.get("model_type")
        self.model_type = name if isinstance(name, str) else ""
        known = MODEL_TYPES.get(self.model_type)
        attention = known.attention if known else None
        self.is_known = attention is not None
        self.attention = attention or Attention()
        # What is null in a file is off, and no default then.
        self._fields = {**((known.defaults if known else None) or {}), **fields}

    def get(self, name: str) -> object:
        self._asked.add(name)
        return self._fields.get(name)

    def has(self, name: str) -> bool:
        return name in self._fields

    def refuse(self, reason: str) -> None:
        self._reasons.append(reason)

    def count(self, name: str, default: int | None = None) -> int:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if value is None and not self.has(name):
            self.refuse(f"{name} is missing: expected a positive integer")
            return 1
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.refuse(f"{name} is {value!r}: expected a positive integer")
            return 1
        return value

    def number(self, name: str) -> float | None:
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
            self.refuse(f"{name} is {value!r}: expected a number, at least 0")
            return None
        if not math.isfinite(value):
            self.refuse(f"{name} is {value!r}: expected a finite number")
            return None
        return float(value)

    def refuse_models_without(self) -> None:
        """Refuse models without attention, before what is missing is told of each field."""
        if self.get("num_attention_heads") is None and (kind := _state_space(self._fields)):
            raise ConfigError(
                [f"{kind}: the model has no attention, and needs no kernel of this package"]
            )

    def refuse_the_unknown(self) -> None:
        if reason := _REFUSED_TYPES.get(self.model_type):
            self.refuse(f"model_type {self.model_type!r} has {reason}")
        for name, meaning in _REFUSED_FIELDS.items():
            if value := self.get(name):
                self.refuse(f"{name} is {_short(value)}: {meaning}")
        kind = self.get("position_embedding_type")
        if isinstance(kind, str) and ("relative" in kind or "alibi" in kind):
            meaning = _ALIBI if "alibi" in kind else f"biases of scores, {_NO_KERNEL}"
            self.refuse(f"position_embedding_type is {kind!r}: {meaning}")
        if self.get("is_causal") is False:
            self.refuse("is_causal is False: queries that see later tokens, not understood")
        quantization = self.get("quantization_config")
        if isinstance(quantization, Mapping) and quantization.get("kv_cache_scheme"):
            self.notes.append("kv_cache_scheme: a quantised cache is chosen with --kv-dtype")
        for name, advice in _NOTED_FIELDS.items():
            if value := self.get(name):
                self.notes.append(f"{name} is {_short(value)}: {advice}")

    def finish(self) -> tuple[str, ...]:
        """Return the notes; raise ConfigError where something was refused."""
        for name in self._not_understood():
            text = f"{name} is {_short(self._fields[name])}, which is not understood"
            if self.is_known:
                self.notes.append(f"{text}: kernels are those of models without it")
            else:
                self.refuse(
                    f"{text} and may change the attention of model_type {self.model_type!r}; a "
                    "copy of the file without it is read if it does not"
                )
        self.check()
        if not self.is_known:
            name = repr(self.model_type) if self.model_type else "missing"
            known = "only the rotation" if self.model_type in MODEL_TYPES else "nothing"
            self.notes.append(
                f"model_type is {name}, of which {known} is known: it is read from its fields, "
                "which need not say whether q and k have biases or norms"
            )
        return tuple(self.notes)

    def check(self) -> None:
        """Raise ConfigError where something was refused."""
        if self._reasons:
            raise ConfigError(self._reasons)

    def _not_understood(self) -> Iterator[str]:
        for name, value in self._fields.items():
            is_known = name in self._asked or name in _HARMLESS or _OTHER_PARTS.match(name)
            if value and not is_known and _WORDS.search(name):
                yield name


def _state_space(fields: Mapping[str, object]) -> str:
    """Return what says that layers keep a state and no tokens; nothing where nothing does."""
    kind = fields.get("model_type")
    if isinstance(kind, str) and re.match(r"(falcon_)?mamba2?$|rwkv|xlstm|retnet", kind):
        return f"model_type is {kind!r}"
    given = next((name for name in ("state_size", "ssm_cfg", "d_state") if name in fields), None)
    return f"{given} is {_short(fields[given])} and num_attention_heads is missing" if given else ""


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _head_dim(fields: _Fields, num_qo_heads: int) -> int:
    if fields.get("head_dim") is not None:
        return fields.count("head_dim")
    hidden_size = fields.count("hidden_size")
    if hidden_size % num_qo_heads and hidden_size > 1:
        fields.refuse(
            f"head_dim is missing, and hidden_size {hidden_size} is not a multiple of "
            f"num_attention_heads {num_qo_heads}"
        )
    return max(1, hidden_size // num_qo_heads)


def _latent(fields: _Fields) -> Latent | None:
    if fields.get("kv_lora_rank") is None:
        if fields.attention.has_latents and not fields.has("kv_lora_rank"):
            fields.refuse(
                f"kv_lora_rank is missing: a {fields.model_type} has latents, or null for none"
            )
        return None
    fields.get("head_dim")  # of the rotary part, where there is one
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    return Latent(**{name: fields.count(name) for name in names})


def _indexer(fields: _Fields, latent: Latent | None) -> Indexer | None:
    num_tokens = fields.get("index_topk")
    if not num_tokens:
        return None
    if latent is None:
        meaning = f"attention over chosen tokens without latents, {_NO_KERNEL}"
        fields.refuse(f"index_topk is {_short(num_tokens)}: {meaning}")
        return None
    names = {"num_heads": "index_n_heads", "head_dim": "index_head_dim", "num_tokens": "index_topk"}
    return Indexer(**{name: fields.count(field) for name, field in names.items()})


def _sm_scale(fields: _Fields, latent: Latent | None) -> float | None:
    if latent is not None:
        return _latent_scale(fields, latent)
    scalar = fields.number("query_pre_attn_scalar")
    multiplier = fields.number("attention_multiplier")
    if multiplier:
        return multiplier
    return scalar**-0.5 if scalar else None


def _latent_scale(fields: _Fields, latent: Latent) -> float:
    scale = float((latent.qk_nope_head_dim + latent.qk_rope_head_dim) ** -0.5)
    for parameters in _rope_parameters(fields):
        mscale, factor = parameters.get("mscale_all_dim"), parameters.get("factor")
        is_given = isinstance(mscale, (int, float)) and isinstance(factor, (int, float))
        if is_given and mscale and factor > 1:  # type: ignore[operator]
            scale *= (0.1 * mscale * math.log(factor) + 1.0) ** 2  # type: ignore[operator, arg-type]
    return scale


def _dtype(fields: _Fields) -> str:
    value = fields.get("torch_dtype") or fields.get("dtype")
    name = str(value).removeprefix("torch.")
    if name in Q_DTYPES:
        return name
    said = f"the file's dtype is {name}" if value else "the file names no dtype"
    fields.notes.append(f"{said}: taken as bfloat16, unless --dtype says otherwise")
    return "bfloat16"


def _windows(fields: _Fields) -> tuple[int, ...]:
    """Return the values of ``window_left`` among the layers; -1 is full attention."""
    size, kinds = _window_size(fields), fields.get("layer_types")
    is_asked = fields.get("use_sliding_window")
    if fields.attention.windows == "asked" and not is_asked and not kinds:
        return (-1,)
    has_window = size and is_asked is not False
    # A model's window counts the token itself.
    window = size - 1 if has_window else -1
    if isinstance(kinds, list) and kinds:
        return _windows_of_kinds(fields, kinds, window)
    is_mixed = fields.attention.windows != "all" or fields.get("sliding_window_pattern")
    return tuple(sorted({-1, window} if is_mixed else {window}))


def _window_size(fields: _Fields) -> int:
    """Return how many tokens a query sees, itself included; 0: there is no window."""
    sizes = {
        name: fields.count(name)
        for name in ("sliding_window", "sliding_window_size")  # some files have both
        if fields.get(name)
    }
    if len(set(sizes.values())) > 1:
        given = " and ".join(f"{name} is {size}" for name, size in sizes.items())
        fields.refuse(f"{given}: expected one window")
    return next(iter(sizes.values()), 0)


def _windows_of_kinds(fields: _Fields, kinds: list[object], window: int) -> tuple[int, ...]:
    found = set()
    for kind in dict.fromkeys(map(str, kinds)):
        if kind in ("full_attention", "attention", "indexed_attention"):
            found.add(-1)
            if kind == "indexed_attention" and not fields.get("index_topk"):
                fields.refuse("layer_types has 'indexed_attention', and index_topk is not set")
        elif kind == "sliding_attention":
            found.add(window)
            if window < 0:
                fields.refuse("layer_types has 'sliding_attention', and sliding_window is not set")
        elif "attention" in kind and kind != "linear_attention":
            fields.refuse(f"layer_types has {kind!r}, {_NO_KERNEL}")
        else:
            fields.notes.append(f"layers of type {kind!r} have no attention over pages: no kernels")
    if not found:
        fields.refuse("layer_types has no layer with attention over pages")
    return tuple(sorted(found))


def _rope_parameters(fields: _Fields) -> list[Mapping[str, object]]:
    """Return the parameters of rotary embeddings, those of each kind of layer."""
    given = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        fields.refuse(f"rope_scaling is {_short(given)}: expected an object")
        return []
    parts = [value for value in given.values() if isinstance(value, Mapping)]
    return parts or [given]


def _rope(fields: _Fields, head_dim: int) -> tuple[int, bool]:
    """Return how much of a head is turned, and whether by three positions."""
    part, use_mrope = None, False
    for parameters in _rope_parameters(fields):
        kind = scaling_type(parameters)
        if kind not in ROPE_TYPES:
            fields.refuse(f"rope type {kind!r} is not one of {', '.join(ROPE_TYPES)}")
        use_mrope |= bool(parameters.get("mrope_section"))
        if kind != "proportional":  # which turns whole heads, some pairs by nothing
            part = part or parameters.get("partial_rotary_factor")
    part = part or fields.number("partial_rotary_factor") or fields.number("rotary_pct")
    given = fields.get("rotary_dim")
    if part is None and (given is None or fields.model_type in ROTARY_DIM_UNREAD):
        return head_dim, use_mrope  # whole heads; what sizes they may have is the planner's rule
    rotary_dim = given
    if part is not None:
        # A share of the head, of which the part beside a latent is one.
        found = fields.get("head_dim") if fields.get("qk_rope_head_dim") else None
        whole = found if isinstance(found, int) else head_dim
        is_part = isinstance(part, (int, float)) and 0 < part <= 1
        rotary_dim = min(int(whole * part), head_dim) if is_part else 0  # type: ignore[operator]
    if not isinstance(rotary_dim, int) or not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        fields.refuse(
            f"rotary embeddings turn {_short(rotary_dim)} of {head_dim} elements "
            "(partial_rotary_factor, rotary_dim): expected an even number, at least 2"
        )
        return head_dim, use_mrope
    return rotary_dim, use_mrope


def _pairings(fields: _Fields) -> tuple[Pairing, ...]:
    pairings = _pairings_of_rotation(fields)
    given = [name for name in _ROPE_FIELDS if fields.get(name) is not None]
    has_rope = bool(given)
    if not has_rope and not fields.is_known:
        fields.notes.append("no rope_theta: kernels with and without rotary embedding")
    # Zeros are layers without, in the files that list them.
    listed = fields.get("no_rope_layers")
    has_nope = isinstance(listed, list) and 0 in listed
    has_nope |= bool(fields.get("no_rope_layer_interval")) or fields.attention.has_nope_layers
    is_without = has_nope or not (has_rope or fields.is_known)
    return (*pairings, Pairing.NONE) if is_without else pairings


def _pairings_of_rotation(fields: _Fields) -> tuple[Pairing, ...]:
    """Return the pairing of rotated layers; both where nobody has verified which it is."""
    declared = fields.get("rope_interleave")
    if isinstance(declared, bool):
        return (Pairing.INTERLEAVED if declared else Pairing.NEOX,)
    if reason := ROTATED_OTHERWISE.get(fields.model_type):
        fields.refuse(f"model_type {fields.model_type!r} {reason}, which no kernel does")
    known = MODEL_TYPES.get(fields.model_type)
    if known is not None:
        return (known.pairing,)
    fields.notes.append(
        "whether pairs of rotary embeddings are neighbours is not known: kernels for both"
    )
    return (Pairing.NEOX, Pairing.INTERLEAVED)


def _biases(fields: _Fields) -> tuple[bool, ...]:
    declared = [bool(fields.get(name)) for name in ("attention_bias", "qkv_bias", "use_qkv_bias")]
    bias = fields.attention.bias
    has_bias = bias if isinstance(bias, bool) else bool(fields.get(bias)) or any(declared)
    # Most engines add it in the matrix product before, and then there is none left to add.
    return (True, False) if has_bias else (False,)


def _norms(fields: _Fields) -> tuple[bool, ...]:
    declared = [name for name in ("use_qk_norm", "qk_norm") if fields.get(name)]
    if fields.attention.use_norm:
        return (True,)
    if declared:
        fields.notes.append(
            f"{declared[0]}: kernels with RMS norms of each head, and without for others"
        )
        return (True, False)
    return (False,)
