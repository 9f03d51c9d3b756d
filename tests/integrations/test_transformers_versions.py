"""Every way to generate gives eager's tokens, whichever version of transformers there is.

And a version that was not tested works, or ``register`` says why it does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from jitattn.integrations import transformers as integration
from jitattn.integrations.transformers import paged
from tests.support import hf_models

NUM_NEW = 8
PREFIX = 40
LENGTHS = (43, 41, 60, 47)


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    pytest.importorskip("transformers")
    if hf_models.version() < (5, 17):
        pytest.skip(f"transformers {hf_models.version()}: these tests are of 5.17 and up")
    integration.register()
    yield
    integration.register()  # what a test refused


def prompts_with_a_prefix() -> list[list[int]]:
    prompts = hf_models.prompts_of(LENGTHS)
    return [prompts[0][:PREFIX] + prompt[PREFIX:] for prompt in prompts]


def tokens_of_one(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Without padding."""
    return hf_models.generated(model, prompts[:1], NUM_NEW)


def tokens_behind_padding(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    return hf_models.generated(model, prompts, NUM_NEW)


def static_tokens_of_one(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    return hf_models.generated(model, prompts[:1], NUM_NEW, cache_implementation="static")


def static_tokens_behind_padding(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    return hf_models.generated(model, prompts, NUM_NEW, cache_implementation="static")


def tokens_of_batches(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    pytest.importorskip("psutil", reason="generate_batch asks psutil for the memory of the CPU")
    return hf_models.generated_in_batches(model, prompts, NUM_NEW, max_batch_tokens=48)


WAYS = (
    tokens_of_one,
    tokens_behind_padding,
    static_tokens_of_one,
    static_tokens_behind_padding,
    tokens_of_batches,
)


@pytest.mark.parametrize("window", [None, 4, 33])
@pytest.mark.parametrize("generate", WAYS, ids=lambda way: way.__name__)
def test_tokens_are_eagers(
    generate: Callable[[Any, list[list[int]]], list[list[int]]], window: int | None
) -> None:
    """Of prompts with the same beginning, with a window in every layer or none."""
    model = hf_models.make_model("mistral", dtype=torch.float16, sliding_window=window)
    prompts = prompts_with_a_prefix()
    wanted = generate(model, prompts)
    hf_models.through(model, "jitattn")
    found = generate(model, prompts)
    hf_models.through(model, "eager")
    compared = hf_models.compare(model, prompts[: len(found)], found)
    assert compared.num_tokens == len(found) * NUM_NEW > 0
    assert compared.num_ties == 0
    assert found == wanted


def test_blocks_of_a_prefix_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests behind the first one of a prefix bring what is theirs alone."""
    num_tokens: list[int] = []
    batch_of = paged.PagedBatch.of.__func__

    def counted(cls: Any, *given: Any) -> Any:
        batch = batch_of(cls, *given)
        num_tokens.append(int(batch.qo_indptr[-1]))
        return batch

    monkeypatch.setattr(paged.PagedBatch, "of", classmethod(counted))
    model = hf_models.make_model("llama", dtype=torch.float16, num_hidden_layers=1)
    hf_models.through(model, "jitattn")
    prompts = prompts_with_a_prefix()
    tokens_of_batches(model, prompts)
    new = sum(map(len, prompts)) + len(prompts) * (NUM_NEW - 1)
    assert PREFIX < new - sum(num_tokens) < len(prompts) * PREFIX


def test_tokens_of_a_compiled_model() -> None:
    """As ``generate`` compiles steps of static caches on CUDA: attention is between the graphs."""
    from torch._dynamo.utils import counters
    from transformers import CompileConfig

    config = CompileConfig(backend="eager", fullgraph=False, mode=None, dynamic=None)
    config._compile_all_devices = True
    model = hf_models.make_model("gemma3", dtype=torch.float16)
    hf_models.through(model, "jitattn")
    prompts = hf_models.prompts_of((5, 23, 17))
    wanted = hf_models.generated(model, prompts, NUM_NEW, cache_implementation="static")
    torch._dynamo.reset()
    counters.clear()
    found = hf_models.generated(
        model,
        prompts,
        NUM_NEW,
        cache_implementation="static",
        compile_config=config,
        disable_compile=False,
    )
    assert counters["stats"]["unique_graphs"] > model.config.num_hidden_layers
    assert found == wanted


@pytest.mark.filterwarnings("ignore:The `paged|` prefix:FutureWarning")
def test_the_name_of_batches_up_to_5_18() -> None:
    model = hf_models.make_model("llama", dtype=torch.float16)
    prompts = hf_models.prompts_of((5, 19))
    hf_models.through(model, "jitattn")
    wanted = tokens_of_batches(model, prompts)
    model.set_attn_implementation("paged|jitattn")
    assert tokens_of_batches(model, prompts) == wanted


def test_a_model_has_its_attention_again_after_batches() -> None:
    model = hf_models.make_model("llama", dtype=torch.float16)
    hf_models.through(model, "jitattn")
    tokens_of_batches(model, hf_models.prompts_of((5,)))
    assert model.config._attn_implementation == "jitattn"
    tokens_behind_padding(model, hf_models.prompts_of((5,)))


# --- other versions -------------------------------------------------------------------------------


UNKNOWN = (f"5.99.{patch}" for patch in itertools.count())


@pytest.fixture
def _unknown() -> Iterator[None]:
    import transformers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers, "__version__", next(UNKNOWN))
        yield


@contextmanager
def attention_called(wrap: Callable[..., Any]) -> Iterator[None]:
    """Have transformers call ``wrap(function, *arguments)`` of functions registered meanwhile."""
    from transformers import AttentionInterface

    register = AttentionInterface.register

    def register_wrapped(name: str, function: Callable[..., Any]) -> None:
        register(name, lambda *given, **named: wrap(function, *given, **named))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AttentionInterface, "register", register_wrapped)
        yield


@pytest.mark.usefixtures("_unknown")
def test_an_unknown_version_that_works() -> None:
    """And numbers drawn next are those that would have been."""
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    integration.register()
    assert torch.rand(3).equal(wanted)
    with attention_called(with_slopes):
        integration.register()  # it was tried


def with_slopes(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    return function(*given, **named, slopes=1.0)


def a_token_late(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    out, weights = function(*given, **named)
    return out.roll(1, dims=1), weights


def without_indices(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    named.pop("read_index", None)
    return function(*given, **named)


@pytest.mark.usefixtures("_unknown")
@pytest.mark.parametrize(
    ("wrap", "fault"),
    [
        (with_slopes, "generate fails: ValueError: slopes is given"),
        (a_token_late, "generate gives other tokens than with eager attention"),
        (without_indices, "generate_batch fails: "),
    ],
)
def test_an_unknown_version_that_does_not_work(wrap: Callable[..., Any], fault: str) -> None:
    """Attention says so again, if nobody listened."""
    pytest.importorskip("psutil", reason="generate_batch asks psutil for the memory of the CPU")
    model = hf_models.make_model("llama")
    refused = pytest.raises(ImportError, match=rf"transformers 5\.99\.\d .* tested with: {fault}")
    with attention_called(wrap), refused:
        integration.register()
    model.set_attn_implementation("jitattn")
    with pytest.raises(ImportError, match=fault), torch.no_grad():
        model(torch.arange(1, 9)[None])


@pytest.mark.usefixtures("_unknown")
def test_what_fails_without_jitattn_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import MistralForCausalLM

    monkeypatch.setattr(MistralForCausalLM, "generate_batch", None)
    with caplog.at_level("WARNING", logger="jitattn"):
        integration.register()
    assert "generate_batch was not tried with jitattn" in caplog.text
