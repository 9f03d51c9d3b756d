"""The example server over two ranks on the CPU: the answers of one."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
from torch import Tensor

from docs.examples.serve import PAGE_SIZE, Request, Scheduler
from docs.examples.serving.__main__ import make_server
from docs.examples.serving.models import RandomModel
from docs.examples.serving.text import ByteTokenizer
from jitattn.kv import KVCacheConfig, KVCacheManager
from tests.support.ranks import one_thread
from tests.support.serving import at_once, complete, options, running, text_of

PROMPTS = [f"question {i}: " + "lorem ipsum " * (i % 3) for i in range(8)]
NUM_TOKENS, CLEAR = 4, 0.05


class Clear(Scheduler):
    """Keeps by how much each request's tokens were better than the next: ranks round otherwise."""

    def __init__(self, model: RandomModel, requests: list[Request]) -> None:
        config = KVCacheConfig(page_size=PAGE_SIZE, gpu_bytes=400_000, layers=model.layers())
        super().__init__(model, KVCacheManager(config, device="cpu"), requests)
        self.gaps: dict[int, float] = {}

    def follow(self, request: Request, logits: Tensor) -> None:
        best = logits.topk(2).values
        gap = min(self.gaps.get(id(request), 1e9), float(best[0] - best[1]))
        self.gaps[id(request)] = gap
        super().follow(request, logits)


def clear_answers() -> dict[str, str]:
    """Return what the same model says in one process, by prompt, where it doesn't hesitate."""
    model, tokenizer = RandomModel([-1, -1, -1]), ByteTokenizer()
    prompts = {prompt: tokenizer.encode(prompt) for prompt in PROMPTS}
    requests = {prompt: Request(list(each), NUM_TOKENS) for prompt, each in prompts.items()}
    scheduler = Clear(model, list(requests.values()))
    scheduler.run()
    return {
        prompt: tokenizer.decode(request.tokens[len(prompts[prompt]) :])
        for prompt, request in requests.items()
        if scheduler.gaps[id(request)] > CLEAR
    }


@pytest.fixture
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize(
    "arguments", [["--context-parallel", "3"], ["--context-parallel", "2", "--model", "folder"]]
)
def test_refused(arguments: list[str]) -> None:
    with pytest.raises(OSError, match="--context-parallel"):
        make_server(options(*arguments))


@pytest.mark.usefixtures("_one_thread")
def test_two_ranks_answer_as_one() -> None:
    wanted = clear_answers()
    assert len(set(wanted.values())) >= 3
    with running("--context-parallel", "2", "--kv-bytes", "400000") as server:
        calls = [functools.partial(complete, server, p, max_tokens=NUM_TOKENS) for p in wanted]
        answers = [text_of(answer) for answer in at_once(calls)]
        assert dict(zip(wanted, answers, strict=True)) == wanted
        forks = complete(server, PROMPTS[0], max_tokens=4, n=2, temperature=1.0, seed=3)
        assert len({choice["text"] for choice in forks["choices"]}) == 2
