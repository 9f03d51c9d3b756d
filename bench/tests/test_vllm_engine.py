"""What runs vLLM's engine, without vLLM: prompts, weights, differences, fallbacks, tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bench.bundle import engine_configurations
from bench.engines import agreement, llama, prompts, rounding, vllm_engine, vllm_pair
from bench.engines.agreement import Greedy
from bench.engines.log import Log
from bench.engines.vllm_engine import Attempt, attempts_of
from bench.engines.vllm_session import Session, Setting
from jitattn.bundles.precompile import kernels_of


@pytest.mark.parametrize("model", llama.SIZES)
def test_prompts_are_fixed_and_fit(model: str) -> None:
    vocab_size = llama.SIZES[model]["vocab_size"]
    asked, num_new = prompts.compared(model, vocab_size)
    assert (asked, num_new) == prompts.compared(model, vocab_size)
    longest = prompts.LIMITS[model][0]
    assert max(map(len, asked)) + num_new <= longest
    half, common = len(asked) // 2, prompts.COMPARED[model][1]
    assert len({tuple(prompt[:common]) for prompt in asked[half:]}) == 1
    for workload in prompts.WORKLOADS[model]:
        assert max(workload.lengths) + workload.num_new <= longest
        drawn = prompts.draw(workload.lengths, vocab_size, seed=3)
        assert tuple(map(len, drawn)) == workload.lengths
        assert all(3 <= token < vocab_size for prompt in drawn for token in prompt)


def test_differences_end_where_tokens_part() -> None:
    ours = [
        Greedy([5, 6, 7], [-1.0, -1.0, -2.0], [-3.0, -3.0, -2.5]),
        Greedy([5], [-1.0], [-2.0]),
    ]
    theirs = [
        Greedy([5, 6, 9], [-1.5, -1.0, -2.0], [-3.0, -3.0, -2.25]),
        Greedy([5], [-1.0], [-2.0]),
    ]
    found = agreement.of_greedy(ours, theirs)
    assert found["equal_requests"] == 1
    assert found["equal_tokens"] == 3
    assert found["gaps_where_they_part"] == [0.25]
    assert found["greedy_max"] == 0.5
    assert agreement.of_forced([[1.0, 2.0]], [[1.0, 2.25]])["forced_mean"] == 0.125
    assert agreement.of_forced([[]], [[]]) == {"forced_tokens": 0}


def test_weights_are_the_same_wherever_they_are_filled() -> None:
    def make() -> nn.Module:
        model = nn.ModuleDict(
            {"embed_tokens": nn.Embedding(30, 16), "qkv_proj": nn.Linear(16, 48, bias=False)}
        )
        model["norm"] = nn.RMSNorm(16)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        return model

    a, b = make(), make()
    assert llama.fill(a) == llama.fill(b) == 30 * 16 + 48 * 16
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(x, y)
    assert a["norm"].weight.eq(1).all()
    assert a["qkv_proj"].weight.std().item() == pytest.approx(2 / 4, rel=0.1)


def test_its_kernels_exist() -> None:
    assert len(kernels_of(engine_configurations(), "sm_90a")) > 10


class FakeLLM:
    """The next token is the sum of those before, in which the second best is one more."""

    def __init__(self, vocab_size: int, fails: bool = False) -> None:
        self.vocab_size, self.fails = vocab_size, fails
        config = SimpleNamespace(
            compilation_config=SimpleNamespace(cudagraph_mode="NONE", mode=0),
            cache_config=SimpleNamespace(block_size=16, num_gpu_blocks=9),
            use_v2_model_runner=True,
        )
        self.llm_engine = SimpleNamespace(vllm_config=config)

    def apply_model(self, work: Any) -> list[Any]:
        return [work(nn.Linear(2, 2))]

    def reset_prefix_cache(self) -> None:
        pass

    def generate(self, asked: Sequence[Any], params: Any, use_tqdm: bool) -> list[Any]:
        if self.fails:
            raise RuntimeError("an illegal address")
        return [self._one(prompt["prompt_token_ids"], params) for prompt in asked]

    def _one(self, prompt: list[int], params: Any) -> Any:
        def row(token: int) -> dict[int, Any]:
            return {
                token: SimpleNamespace(logprob=-0.5),
                token + 1: SimpleNamespace(logprob=-2.0),
            }

        tokens: list[int] = []
        for _ in range(params.max_tokens):
            tokens.append(sum(prompt + tokens) % self.vocab_size)
        new = SimpleNamespace(token_ids=tokens, logprobs=[row(token) for token in tokens])
        rows = [None, *(row(token) for token in prompt[1:])]
        return SimpleNamespace(outputs=[new], num_cached_tokens=0, prompt_logprobs=rows)


@pytest.fixture
def sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(SamplingParams=lambda **given: SimpleNamespace(**given))
    monkeypatch.setitem(__import__("sys").modules, "vllm", fake)


NAMES = ["CUSTOM", "FLASH_ATTN", "EXACT"]


def run_pair(folder: Path, phases: Sequence[str], fails: tuple[str, ...] = ()) -> list[Any]:
    setting = Setting(model="tiny", folder=folder / "model", graphs="none")
    path = folder / "out.jsonl"
    log = Log(path, 100, {"model": "tiny", "graphs": "none"})
    engines = vllm_pair.Engines(log, setting)
    for name in NAMES:
        llm = FakeLLM(setting.sizes()["vocab_size"], name in fails)
        engines.sessions[name] = Session(name, setting, llm)
    given = ["--engines", ",".join(NAMES), "--phases", ",".join(phases), "--folder", str(folder)]
    vllm_pair.go(log, engines, vllm_pair.options_of(given))
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.usefixtures("sampling")
def test_engines_are_compared_and_race_in_turns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = run_pair(tmp_path, vllm_pair.PHASES)
    assert all(line["status"] == "done" for line in lines)
    races = [(line["workload"], line["engine"]) for line in lines if line["phase"] == "race"]
    ours, theirs, exact = NAMES
    turns = [ours, theirs, theirs, ours]
    assert races == [(name, engine) for name in ("decode", "ragged") for engine in turns]
    assert {line["phase"] for line in lines if line.get("engine") == exact} == {"judge"}
    pairs = {tuple(line["engines"]): line for line in lines if line["phase"] == "agreement"}
    assert set(pairs) == {(ours, theirs), (ours, exact), (theirs, exact)}
    assert pairs[ours, theirs]["equal_requests"] == 3
    assert pairs[theirs, exact]["forced_tokens"] == 15
    assert "equal_requests" not in pairs[theirs, exact]
    capsys.readouterr()
    vllm_engine.print_tables(lines)
    table = capsys.readouterr().out
    assert "FLASH_ATTN" in table
    assert "0.0000" in table


@pytest.mark.usefixtures("sampling")
def test_an_engine_that_failed_is_left_alone(tmp_path: Path) -> None:
    lines = run_pair(tmp_path, ["decode", "race", "judge"], fails=("CUSTOM",))
    failed = [line for line in lines if line["engine"] == "CUSTOM"]
    assert [(line["phase"], line["status"]) for line in failed] == [("decode", "failed")]
    assert "an illegal address" in failed[0]["reason"]
    theirs = [line for line in lines if line["engine"] == "FLASH_ATTN"]
    assert {line["phase"] for line in theirs} == {"decode", "warm", "race", "judge"}


def test_phases_end_with_the_time(tmp_path: Path) -> None:
    log = Log(tmp_path / "out.jsonl", 0, {})
    assert not log.phase("race", dict)
    (line,) = (json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines())
    assert line["status"] == "skipped"


def test_an_engine_is_a_backend_and_a_dtype_of_caches(tmp_path: Path) -> None:
    setting = Setting(model="8b", folder=tmp_path, num_layers=3)
    assert setting.sizes()["num_hidden_layers"] == 3
    given = {name: setting.arguments(name) for name in ("CUSTOM", "FLASH_ATTN:fp8", "EXACT")}
    assert [one["kv_cache_dtype"] for one in given.values()] == ["auto", "fp8", "auto"]
    backends = [one["attention_config"]["backend"] for one in given.values()]
    assert backends == ["CUSTOM", "FLASH_ATTN", "NO_ATTENTION"]
    assert given["CUSTOM"]["compilation_config"]["cudagraph_capture_sizes"][-1] == 64


class FakeRunner:
    def __init__(self, statuses: Sequence[int], seconds: float = 1000.0) -> None:
        self.statuses, self.seconds = list(statuses), seconds
        self.asked: list[tuple[Attempt, list[str]]] = []

    def left(self) -> float:
        return self.seconds

    def run(self, attempt: Attempt, arguments: Sequence[str]) -> int:
        self.asked.append((attempt, list(arguments)))
        self.seconds -= 100
        return self.statuses.pop(0)


def measure(runner: FakeRunner, tmp_path: Path) -> bool:
    options = SimpleNamespace(
        **{"graphs": "decode", "out": tmp_path, "model": "8b", "rounds": 1, "layers": None},
        **{"kv_gib": 20.0, "racers": None, "phases": "decode,race"},
    )
    return vllm_engine.measure(runner, options, vllm_engine.ENGINES[0])  # type: ignore[arg-type]


def test_less_is_tried_after_failures(tmp_path: Path) -> None:
    runner = FakeRunner([0])
    assert measure(runner, tmp_path)
    assert runner.asked[0][0] == Attempt(graphs="decode")
    runner = FakeRunner([3, 124, 1, 0, 0, 0, 0])
    assert measure(runner, tmp_path)
    assert [attempt for attempt, _ in runner.asked[:3]] == attempts_of("decode")[:3]
    apart = [vllm_pair.options_of(arguments) for _, arguments in runner.asked[3:]]
    assert [one.engines for one in apart] == ["CUSTOM", "FLASH_ATTN", "FLASH_ATTN", "CUSTOM"]
    assert {one.reference for one in apart} == {"CUSTOM"}
    assert len({one.folder for one in apart}) == 1
    assert not measure(FakeRunner([3], seconds=120), tmp_path)


def test_rounding_is_seen_and_small_in_one_layer() -> None:
    sizes = {"layers": 1, "hidden": 64, "inner": 96, "vocab": 50, "heads": 2, "kv_heads": 1}
    found = rounding.differences(sizes, 200)
    assert all(0 < apart.mean().item() < 0.05 for apart in found.values())
    scores, v = torch.randn(2, 9, 9), torch.randn(2, 9, 4)
    wanted = scores.softmax(-1) @ v
    torch.testing.assert_close(rounding.in_tiles(scores, v, 4), wanted, atol=2e-2, rtol=0)
