"""Models of transformers on a card: eager's tokens through jitattn, of 64 requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from jitattn.integrations import transformers as integration
from tests.gpu.device import DEVICE
from tests.support import hf_models

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.skipif(
        hf_models.version() < (5, 17),
        reason=f"transformers {transformers.__version__}: these tests are of 5.17 and up",
    ),
    pytest.mark.filterwarnings("ignore"),  # of transformers
]

LENGTHS = tuple(torch.randint(1, 90, (64,), generator=torch.Generator().manual_seed(7)).tolist())
NUM_NEW = 16
TIES = 0.01
"""The most tokens that may differ where two logits are closer than rounding moves them."""
# Every request is there at once, and prompts come in parts.
BATCHES = {"block_size": 8, "num_blocks": 1200, "max_batch_tokens": 256}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
Note = Callable[[str, object], None]


@pytest.fixture(autouse=True)
def _registered() -> None:
    integration.register()


@pytest.fixture(
    params=[(name, dtype) for name in hf_models.MODELS for dtype in DTYPES], ids="-".join
)
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    name, dtype = request.param
    made = hf_models.make_model(name, device=DEVICE, dtype=DTYPES[dtype])
    yield made
    if hasattr(made, "destroy_cached_continuous_batching_manager"):
        made.destroy_cached_continuous_batching_manager()


def check(model: Any, found: list[list[int]], note: Note) -> None:
    """Compare with eager's tokens.

    Where bfloat16 itself gives other tokens than float32, ours may be others, too: about as many.
    """
    hf_models.through(model, "eager")
    compared = hf_models.compare(model, hf_models.prompts_of(LENGTHS), found)
    assert compared.num_tokens == len(LENGTHS) * NUM_NEW
    assert len({token for tokens in found for token in tokens}) > 10, "tokens don't vary"
    note("differing tokens", f"{model.config.model_type} {model.dtype} {compared}")
    most = TIES * compared.num_tokens
    if model.dtype == torch.float16:
        assert compared.num_ties <= most
    assert compared.num_inexact <= 1.25 * compared.num_inexact_of_eager + most


def test_tokens_of_generate(model: Any, record_property: Note) -> None:
    hf_models.through(model, "jitattn")
    prompts = hf_models.prompts_of(LENGTHS)
    dynamic = hf_models.generated(model, prompts, NUM_NEW)
    static = hf_models.generated(model, prompts, NUM_NEW, cache_implementation="static")
    check(model, dynamic, record_property)
    check(model, static, record_property)


def test_tokens_of_generate_batch(model: Any, record_property: Note) -> None:
    hf_models.through(model, "jitattn")
    prompts = hf_models.prompts_of(LENGTHS)
    found = hf_models.generated_in_batches(model, prompts, NUM_NEW, **BATCHES)
    check(model, found, record_property)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_tokens_of_graphs(name: str, record_property: Note) -> None:
    """Batches whose steps are captured: each call of attention plans in the graph."""
    made = hf_models.make_model(name, device=DEVICE, dtype=torch.float16)
    hf_models.through(made, "jitattn")
    prompts = hf_models.prompts_of(LENGTHS)
    replays: list[object] = []
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        replays.append(graph)
        replay(graph)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda.CUDAGraph, "replay", counted)
        found = hf_models.generated_in_batches(
            made, prompts, NUM_NEW, **(BATCHES | {"use_cuda_graph": True})
        )
    assert replays
    check(made, found, record_property)


def test_logits_are_as_good_as_eagers(model: Any) -> None:
    errors = hf_models.logit_errors(model, LENGTHS, DEVICE)
    assert errors["jitattn"] <= 1.25 * errors["eager"], errors
