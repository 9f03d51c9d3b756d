"""Small models of transformers with random weights, and greedy tokens through two attentions.

Weights are scaled so that tokens vary. Tokens of another attention are compared one by one: eager's
are fed to both, and another best token counts as the same only where eager's logits of the two are
closer than rounding makes them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jitattn.kernels.preprocess.spec import PreprocessConfig
from jitattn.spec.config import PlannerConfig

WINDOW = 16
VOCABULARY = 256
BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": 1,
    "tie_word_embeddings": False,  # else the best next token is the last one
}
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
# Class, arguments of the configuration besides those above.
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"num_attention_heads": 6}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 5.0,
            "layer_types": TYPES,
        },
    ),
    "gemma3": (
        "Gemma3",
        {"sliding_window": WINDOW, "query_pre_attn_scalar": 16, "layer_types": TYPES},
    ),
    "gpt_oss": (
        "GptOss",
        {
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 4,  # all: a choice would make jumps of roundings
            "layer_types": TYPES,
        },
    ),
}


def version() -> tuple[int, ...]:
    """Major and minor version of the installed transformers."""
    import transformers

    return tuple(int(part) for part in transformers.__version__.split(".")[:2])


def make_model(
    name: str, *, device: str = "cpu", dtype: torch.dtype = torch.bfloat16, **changes: object
) -> Any:
    """A model whose attention is eager, with ``changes`` of its configuration."""
    import transformers

    kind, others = MODELS[name]
    others = others | changes
    config_class = "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config"
    config = getattr(transformers, config_class)(**(BASE | others), attn_implementation="eager")
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "sinks" in parameter_name:
                parameter.normal_()
            elif parameter.dim() >= 2:
                parameter.mul_(6)
    return model.to(device, dtype)


def prompts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    """Random tokens, none of which is padding."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def padded(prompts: list[list[int]], device: str) -> tuple[Tensor, Tensor]:
    """Tokens behind padding, and which are no padding."""
    width = max(len(p) for p in prompts)
    rows = [[0] * (width - len(p)) + p for p in prompts]
    mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
    return torch.tensor(rows, device=device), torch.tensor(mask, device=device)


def through(model: Any, attention: str) -> None:
    """Set the attention of a model."""
    model.set_attn_implementation(attention)
    assert model.config._attn_implementation == attention


@torch.no_grad()
def logit_errors(model: Any, lengths: tuple[int, ...], device: str) -> dict[str, float]:
    """How far jitattn's and eager's logits are from those of the same model in float32.

    Teacher-forced, of a whole batch with padding. The model is in float32 afterwards.
    """
    tokens, mask = padded(prompts_of(lengths), device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    given = {"attention_mask": mask, "position_ids": positions, "use_cache": False}
    logits = {}
    for attention in ("jitattn", "eager"):
        through(model, attention)
        logits[attention] = model(tokens, **given).logits[mask.bool()].float()
    wanted = model.float()(tokens, **given).logits[mask.bool()]
    return {
        attention: float((found - wanted).square().mean().sqrt())
        for attention, found in logits.items()
    }


def generated(
    model: Any, prompts: list[list[int]], num_new: int, **others: object
) -> list[list[int]]:
    """Greedy tokens of one batch with padding."""
    tokens, mask = padded(prompts, str(model.device))
    given = {"do_sample": False, "disable_compile": True} | others
    out = model.generate(tokens, attention_mask=mask, max_new_tokens=num_new, **given)
    return out[:, tokens.shape[1] :].tolist()


def gpu_configs() -> list[PlannerConfig | PreprocessConfig]:
    """What tests/gpu/test_transformers.py launches, for a bundle."""
    found: list[PlannerConfig | PreprocessConfig] = []
    for dtype in ("float16", "bfloat16"):
        for soft_cap in (0.0, 5.0):
            for page_size, page_table in ((None, "ragged"), (8, "shared")):
                found.append(
                    PlannerConfig(
                        num_qo_heads=4, num_kv_heads=2, head_dim=16, page_size=page_size,
                        page_table=page_table, q_dtype=dtype, kv_dtype=dtype,
                        logits_soft_cap=soft_cap,
                    )
                )  # fmt: skip
        found.append(
            PreprocessConfig(
                head_dim=16, page_size=8, pairing="none", qkv_dtype=dtype, kv_dtype=dtype
            )
        )
    return found


def generated_in_batches(
    model: Any, prompts: list[list[int]], num_new: int, **others: object
) -> list[list[int]]:
    """Greedy tokens of continuous batching."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    given = {"block_size": 8, "num_blocks": 128, "max_batch_tokens": 24, "use_cuda_graph": False}
    given |= others
    if hasattr(ContinuousBatchingConfig, "page_size"):  # from 5.18 on
        given["page_size"] = given.pop("block_size")
    out = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(
            max_new_tokens=num_new, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(**given),
        progress_bar=False,
    )
    results = [out[key] for key in sorted(out, key=lambda k: int(k.rsplit("_", 1)[-1]))]
    assert all(result.error is None for result in results)
    return [list(result.generated_tokens) for result in results]


@dataclass(frozen=True)
class Compared:
    """How many tokens were compared, and how many of them differ where logits are too close.

    And how many are not the best ones of the same weights in float32, and how many of eager's.
    """

    num_tokens: int
    num_ties: int
    num_inexact: int
    num_inexact_of_eager: int


@torch.no_grad()
def compare(model: Any, prompts: list[list[int]], found: list[list[int]]) -> Compared:
    """Compare tokens with eager's, from eager's logits behind the tokens found before each.

    A token found must be eager's best, or its logit must lie closer to the best one than rounding
    moves logits: that is how far eager's are from those of the same weights in float32, twice for
    each of the two logits.
    """
    assert model.config._attn_implementation == "eager"
    exact = copy.deepcopy(model).float()
    num_tokens = num_ties = num_inexact = num_inexact_of_eager = 0
    for prompt, tokens in zip(prompts, found, strict=True):
        row = torch.tensor([prompt + tokens], device=model.device)
        logits, wanted = (
            m(row, use_cache=False).logits[0, len(prompt) - 1 : -1].double() for m in (model, exact)
        )
        rounding = float((logits - wanted).abs().max())
        for step, token in enumerate(tokens):
            gap = float(logits[step].max() - logits[step, token])
            assert gap <= 4 * rounding, (prompt, step, token, gap, rounding)
            num_ties += gap > 0
        best = wanted.argmax(-1).tolist()
        num_tokens += len(tokens)
        num_inexact += sum(a != b for a, b in zip(tokens, best, strict=True))
        of_eager = logits.argmax(-1).tolist()
        num_inexact_of_eager += sum(a != b for a, b in zip(of_eager, best, strict=True))
    return Compared(num_tokens, num_ties, num_inexact, num_inexact_of_eager)
