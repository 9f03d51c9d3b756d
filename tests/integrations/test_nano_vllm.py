"""nano-vllm's engine with jitattn in flash-attn's place, on the CPU: transformers' tokens.

With its functions compiled by ``torch.compile``, as it comes, and without.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.support import hf_models, nano, nano_cpu

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("nanovllm") is None, reason="nano-vllm-fork is not installed"
    ),
    pytest.mark.filterwarnings("ignore"),  # of the engine
]

NUM_NEW = 6


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_tokens_are_those_of_transformers(compiled: bool, tmp_path: Path) -> None:
    """Of prompts, of one behind a block in the cache, and of batches of decode."""
    import transformers
    from torch._dynamo.utils import counters

    nano.make_checkpoint(tmp_path, "float16")
    first, second, third = hf_models.prompts_of((nano.BLOCK + 9, nano.BLOCK + 30, 17))
    prompts = [first, first[: nano.BLOCK] + second[nano.BLOCK :], third]
    torch._dynamo.reset()
    counters.clear()
    run = nano_cpu.decode(tmp_path, prompts, NUM_NEW, compiled=compiled)
    layers = nano.NUM_LAYERS
    # The engine measures a prefill first.
    wanted = {"prefill": layers, "prefix": layers, "decode": layers * (NUM_NEW - 1)}
    assert {kind: run.counts[kind] for kind in wanted} == wanted
    # Its functions became graphs, which nothing broke.
    assert (counters["stats"]["unique_graphs"] > 0) == compiled
    assert not counters["graph_break"]

    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float16
    )
    compared = hf_models.compare(model, prompts, run.tokens)
    assert compared.num_tokens == len(prompts) * NUM_NEW
    assert compared.num_ties <= 1
    assert len({token for tokens in run.tokens for token in tokens}) > 5
