"""A model of Llama's shape with random weights, which an engine makes and this fills."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

SIZES: Mapping[str, Mapping[str, int]] = {
    "8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "tiny": {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
}
"""Of Llama-3.1-8B, and of a model for machines without a card."""


def write_config(folder: Path, sizes: Mapping[str, int], max_length: int) -> None:
    """Write what an engine reads of a model without weights and without a tokenizer.

    Args:
        folder: made if it is not there.
        sizes: one of ``SIZES``.
        max_length: positions.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        **sizes,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": max_length,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


@torch.no_grad()
def fill(model: Any) -> int:
    """Fill a model's parameters in place with what is the same in each engine.

    Matrices are normal, with variances of 1 over their inputs' number, so that residuals neither
    vanish nor burst; queries and keys, and logits, have twice that deviation, so that tokens attend
    to some keys more than to others and have a best successor. Norms are 1.

    Args:
        model: on any device.

    Returns:
        elements that were written.
    """
    num_written = 0
    for number, (name, parameter) in enumerate(sorted(model.named_parameters())):
        if not parameter.is_floating_point():
            continue
        if parameter.dim() < 2:
            if "norm" in name:
                parameter.fill_(1.0)
            continue
        generator = torch.Generator(parameter.device).manual_seed(number)
        deviation = parameter.shape[1] ** -0.5
        if "embed" in name:
            deviation = 1.0
        elif "qkv" in name or "lm_head" in name:
            deviation *= 2
        parameter.normal_(std=deviation, generator=generator)
        num_written += parameter.numel()
    return num_written
