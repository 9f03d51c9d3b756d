"""Names of rotary embeddings in models' configurations. Torch-free."""

from __future__ import annotations

INTERLEAVED_MODELS = frozenset(
    {
        *("codegen", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5"),
        *("ernie4_5_moe", "glm", "glm4", "gptj", "helium"),
    }
)
"""Model types that pair neighbours, which their configurations don't say."""

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
ROPE_TYPE_ALIASES = {"su": "longrope", "mrope": "default"}
