"""bench_decoder without a card: requests, contenders over stand-ins, what is wrong, a table."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import jitattn
from bench import bench_decoder, bundle, rivals
from bench.bench_decoder import BASELINE, HostTimer, Loop, answer, bench_case, print_case
from bench.decoder_contenders import (
    DecoderContender,
    Definition,
    JitAttnDecoder,
    _rotate,
    all_decoder_contenders,
    kernel_configs,
    planner_arguments,
)
from bench.decoder_model import (
    DRY_CASE,
    LLAMA_8B,
    TINY,
    Attention,
    Decoder,
    DecoderCase,
    Requests,
    make_weights,
    with_layers,
)
from bench.oracle import attend
from bench.turns import Result
from jitattn.compat import flashinfer as compat
from jitattn.kernels.common.reference_plan import gather

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(make_weights(TINY, CPU), DRY_CASE, 8)


def test_shapes_of_the_model() -> None:
    weights = make_weights(dataclasses.replace(TINY, num_layers=1), CPU)
    (layer,) = weights.layers
    assert layer.qkv.shape == ((4 + 2 * 2) * 16, 64)
    assert layer.out.shape == (64, 4 * 16)
    assert layer.gate_up.shape == (2 * 96, 64)
    assert layer.down.shape == (64, 96)
    assert weights.embedding.shape == weights.head.shape == (128, 64)
    assert float(weights.embedding.float().std()) == pytest.approx(1, rel=0.1)
    assert torch.equal(make_weights(TINY, CPU).head, make_weights(TINY, CPU).head)
    assert with_layers(LLAMA_8B, None) is LLAMA_8B
    assert with_layers(LLAMA_8B, 3).num_layers == 3


def test_requests_get_pages_when_they_need_them() -> None:
    case = DecoderCase(name="small", prompt_lens=(4, 1, 7), page_size=4)
    requests = Requests(case, 3)
    assert requests.num_pages == 2 + 1 + 3
    assert sorted(requests.pages[requests.pages > 0].tolist()) == [1, 2, 3, 4, 5]
    rows = requests.pages
    assert requests.table.tolist() == [
        [rows[0, 0], 0, 0],
        [rows[1, 0], 0, 0],
        [rows[2, 0], rows[2, 1], 0],
    ]
    grown, starts = [], []
    for _ in range(3):
        requests.advance()
        grown.append(requests.has_grown)
        starts.append([t.tolist() for t in requests.fill_starts()])
    assert grown == [True, True, False]  # the first step, then the third request
    assert requests.lens.tolist() == [7, 4, 10]
    assert starts == [
        [[0, 2, 3, 5], [1, 2, 4]],
        [[0, 2, 3, 6], [2, 3, 1]],
        [[0, 2, 3, 6], [3, 4, 2]],
    ]
    assert requests.indices().tolist() == [*rows[0, :2], rows[1, 0], *rows[2, :3]]
    assert requests.fill_table().tolist() == rows.tolist()
    requests.begin()
    assert requests.lens.tolist() == [4, 1, 7]
    assert requests.table[2].tolist() == [rows[2, 0], rows[2, 1], 0]
    requests.advance()
    assert requests.has_grown


# --- contenders -----------------------------------------------------------------------------------


def rope_in_place(
    q: Tensor, k: Tensor, positions: Tensor, *, interleave: bool, rope_theta: float
) -> None:
    assert not interleave
    assert rope_theta == 500000.0
    for part in (q, k):
        part.copy_(_rotate(part, positions))


class Fa3:
    """What stands in for FlashAttention-3: it plans for the lengths of that moment."""

    def schedule(self, step: rivals.Fa3Step) -> Tensor:
        return step.seq_lens.clone()

    def forward(
        self,
        step: rivals.Fa3Step,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        sinks: Tensor | None,
        metadata: Tensor,
    ) -> None:
        assert sinks is None
        assert step.block_table is not None
        for b, length in enumerate(metadata.tolist()):
            assert length <= step.max_kv_len
            keys, values = (gather(side, step.block_table[b], length) for side in (k, v))
            out[b] = attend(q[b : b + 1], keys, values)[0]


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(
        __version__="stand-in",
        BatchDecodeWithPagedKVCacheWrapper=compat.BatchDecodeWithPagedKVCacheWrapper,
        append_paged_kv_cache=compat.append_paged_kv_cache,
        apply_rope_pos_ids_inplace=rope_in_place,
    )
    fa3 = Fa3()
    monkeypatch.setattr(rivals, "flashinfer", lambda: module)
    monkeypatch.setattr(rivals, "load_fa3", lambda: "stand-in")
    monkeypatch.setattr(rivals.Fa3Step, "schedule", lambda step: fa3.schedule(step))
    monkeypatch.setattr(rivals.Fa3Step, "forward", lambda step, *given: fa3.forward(step, *given))


@pytest.mark.usefixtures("stand_ins")
def test_all_contenders_give_the_same_and_are_timed(decoder: Decoder) -> None:
    contenders = all_decoder_contenders()
    results = bench_case(decoder, contenders, HostTimer(), rounds=2, num_steps=3)
    for result in results:
        assert result.status == "timed", (result.contender, result.reason)
        assert result.error is not None
        assert result.error <= result.facts["limit"] / 4  # type: ignore[operator]
        assert result.timing is not None
        assert result.timing.num_samples == 2
        assert set(result.facts) == {
            *("differing_tokens", "limit", "tokens_per_s", "waiting_s", "host_s", "replay_s"),
            *("attention_s", "rest_s"),
        }
    assert [r.contender for r in results] == [
        *("jitattn", "jitattn-early-kv", "flashinfer", "fa3", "fa3-one-launch")
    ]


class Spoiled(JitAttnDecoder):
    """jitattn with something left out."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def prepare(self, decoder: Decoder) -> Attention:
        made = super().prepare(decoder)
        if self.fault == "table":
            decoder.table.zero_()
            made.before = lambda requests: None  # type: ignore[method-assign]
        elif self.fault == "plan":
            made.plan = lambda: None  # type: ignore[method-assign]
        elif self.fault == "rope":
            rope = jitattn.Rope(TINY.head_dim, base=10000.0)
            made._tokens._rope = rope  # type: ignore[attr-defined]
        elif self.fault == "append":
            tokens = made._tokens  # type: ignore[attr-defined]
            take = tokens.take
            tokens.take = lambda layer, qkv: take(0, qkv)
        return made


@pytest.mark.parametrize("fault", ["table", "plan", "rope", "append"])
def test_what_is_wrong_is_not_timed(decoder: Decoder, fault: str) -> None:
    (result,) = bench_case(decoder, [Spoiled(fault)], HostTimer(), rounds=1, num_steps=2)
    assert result.status == "wrong"
    assert "of logits" in result.reason
    assert result.timing is None


def test_noise_is_as_large_as_a_rounding(decoder: Decoder) -> None:
    expected = answer(decoder)
    assert 3e-3 < expected.limit < 0.1
    loop = Loop(decoder, Definition(decoder, noise=0.3))
    with pytest.raises(bench_decoder.WrongError, match="relative error of logits"):
        bench_decoder.check(loop, expected)


def test_new_tokens_are_spoiled_before_a_check(decoder: Decoder) -> None:
    decoder.spoil(2)
    places = decoder.kv[:, :, 0].isnan().any(-1).any(-1)  # [layers, pages, tokens]
    assert int(places.sum()) == 2 * len(DRY_CASE.prompt_lens) * TINY.num_layers
    page = int(decoder.requests.pages[1, 0])
    assert places[0, page].nonzero().flatten().tolist() == [5, 6]


def test_the_host_writes_nothing_that_is_still_read(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies to a card are under way until somebody waits: for the step, or for its copies."""
    loop = Loop(decoder, Definition(decoder))
    events: list[str] = []
    before, replay = loop.before, loop.replay

    def noted(name: str, call: Callable[[], object] | None = None) -> Callable[..., None]:
        def note(*_: object) -> None:
            events.append(name)
            if call is not None:
                call()

        return note

    monkeypatch.setattr(loop, "before", noted("write", before))
    monkeypatch.setattr(loop, "replay", noted("replay", replay))
    for owner in (Loop, bench_decoder.Mark):
        monkeypatch.setattr(owner, "wait", noted("wait"))
    monkeypatch.setattr(bench_decoder.Mark, "record", noted("record"))
    monkeypatch.setattr(decoder.tokens.__class__, "cpu", lambda tensor: events.append("wait"))
    answer(decoder)
    loop.turn(3, bench_decoder.Steps())
    bench_decoder._first_steps(loop)
    writes = [i for i, name in enumerate(events) if name == "write"]
    assert len(writes) == 4 + 3 + 3 + 2
    for one, other in itertools.pairwise(writes):
        assert "wait" in events[one:other]


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("contender", all_decoder_contenders(), ids=lambda each: each.name)
def test_prompts_stay_as_they_are(contender: DecoderContender) -> None:
    """Steps write behind them alone, whatever pages requests get on the way."""
    decoder = Decoder(make_weights(TINY, CPU), DRY_CASE, 40)

    def prompts() -> list[Tensor]:
        return [
            gather(decoder.kv[layer, :, side], decoder.requests.pages[b], length)
            for b, length in enumerate(DRY_CASE.prompt_lens)
            for layer in range(TINY.num_layers)
            for side in (0, 1)
        ]

    want = prompts()
    Loop(decoder, contender.prepare(decoder)).turn(36, bench_decoder.Steps())
    assert all(map(torch.equal, prompts(), want))


def test_its_kernels_are_in_its_bundle() -> None:
    configs = bundle.decoder_configurations()
    assert configs == kernel_configs(LLAMA_8B, 64)
    assert planner_arguments(LLAMA_8B, 64)["page_size"] == 64
    assert len(configs) == 3


def test_table_has_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    timing = bench_decoder.summarize([8e-3, 8e-3])
    slower = bench_decoder.summarize([10e-3, 10e-3])
    facts: dict[str, object] = dict.fromkeys(
        ("limit", "waiting_s", "host_s", "replay_s", "attention_s", "rest_s"), 1e-3
    )
    facts |= {"tokens_per_s": 8000.0, "differing_tokens": 1}
    results = [
        Result(BASELINE, "timed", timing=timing, error=0.01, facts=facts),
        Result("fa3", "timed", timing=slower, error=0.01, facts=facts),
        Result("flashinfer", "failed", "no compiler"),
    ]
    print_case(DRY_CASE, results)
    out = capsys.readouterr().out
    for cell in ("1.250", "8.000", "8000", "failed", "flashinfer: no compiler"):
        assert cell in out
