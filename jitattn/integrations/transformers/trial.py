"""Whether jitattn works with a version of transformers that it was not tested with."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch

# Of weights with which every best token's logit is 0.1 above the next one's, 25 roundings.
_SEED = 19
_NUM_NEW = 6
_WINDOW = 5
_PROMPTS = ([7, 3, 20, 11, 2, 9, 14, 30, 8], [5, 12], [25, 1, 17, 6])
_SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_LOG = logging.getLogger("jitattn")
Tokens = list[list[int]]


def fault_of(attention: str) -> str | None:
    """Generate greedy tokens on the CPU, through eager attention and through ``attention``.

    Two small models with random weights do, one of them with a window: with dynamic and static
    caches, behind padding, and in ``generate_batch``. What fails with eager attention, too, is not
    tried, with a warning. The states of torch's generators stay as they are.

    Returns:
        What is wrong; None: nothing.
    """
    with (
        warnings.catch_warnings(),
        torch.random.fork_rng(devices=[]),
        torch.device("cpu"),
        torch.no_grad(),
    ):
        warnings.simplefilter("ignore")  # what is deprecated still works
        for window in (None, _WINDOW):
            fault = _fault_with_window(window, attention)
            if fault is not None:
                return fault
    return None


def _fault_with_window(window: int | None, attention: str) -> str | None:
    try:
        model = _small_model(window)
    except Exception as error:
        return f"a small Mistral fails: {type(error).__name__}: {error}"
    for name, generate in _WAYS.items():
        fault = _fault_of_way(name, generate, model, attention)
        if fault is not None:
            return fault
    return None


def _fault_of_way(
    name: str, generate: Callable[[Any], Tokens], model: Any, attention: str
) -> str | None:
    model.set_attn_implementation("eager")
    try:
        wanted = generate(model)
    except Exception as error:
        _LOG.warning("%s was not tried with jitattn: it fails with eager, too: %s", name, error)
        return None
    try:
        model.set_attn_implementation(attention)
        found = generate(model)
    except Exception as error:
        return f"{name} fails: {type(error).__name__}: {error}"
    return None if found == wanted else f"{name} gives other tokens than with eager attention"


def _small_model(window: int | None) -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(**_SIZES, sliding_window=window, attn_implementation="eager")
    model = MistralForCausalLM(config).eval().to(torch.float16)
    generator = torch.Generator().manual_seed(_SEED)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.normal_(std=0.5, generator=generator)
    return model


def _generate(model: Any, **others: object) -> Tokens:
    width = max(map(len, _PROMPTS))
    rows = [[0] * (width - len(prompt)) + prompt for prompt in _PROMPTS]
    tokens = torch.tensor(rows, device=model.device)
    out = model.generate(
        tokens, attention_mask=(tokens != 0).long(), max_new_tokens=_NUM_NEW, do_sample=False,
        disable_compile=True, **others,
    )  # fmt: skip
    found: Tokens = out[:, width:].tolist()
    return found


def _generate_static(model: Any) -> Tokens:
    return _generate(model, cache_implementation="static")


def _generate_batch(model: Any) -> Tokens:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    # Batches of 8 tokens at most: the first prompt comes in two parts.
    sizes = {"num_blocks": 64, "max_batch_tokens": 8, "use_cuda_graph": False}
    results = model.generate_batch(
        _PROMPTS,
        generation_config=GenerationConfig(
            max_new_tokens=_NUM_NEW, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(**sizes),
        progress_bar=False,
    )
    by_number = sorted(results.items(), key=lambda item: int(item[0].rsplit("_", 1)[-1]))
    errors = [result.error for _, result in by_number if result.error is not None]
    if errors or len(by_number) != len(_PROMPTS):
        raise RuntimeError(errors[0] if errors else f"{len(by_number)} requests were answered")
    return [list(result.generated_tokens) for _, result in by_number]


_WAYS: dict[str, Callable[[Any], Tokens]] = {
    "generate": _generate,
    "generate_batch": _generate_batch,
    'generate(cache_implementation="static")': _generate_static,
}
