"""Models of transformers give eager's tokens through jitattn; what they can't is refused.

Masks are compared with transformers' own, and attention with float64, over caches that hold NaN
wherever no query looks.
"""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from jitattn.integrations import transformers as integration
from jitattn.integrations.transformers import dense, masks, paged
from tests.support import hf_models

LENGTHS = (5, 40, 3, 23, 17)
NUM_NEW = 16
TIES = {torch.float16: 0.02, torch.bfloat16: 0.1}


@pytest.fixture(autouse=True)
def _registered() -> None:
    pytest.importorskip("transformers")
    if hf_models.version() < (5, 17):
        pytest.skip(f"transformers {hf_models.version()}: these tests are of 5.17 and up")
    integration.register()


@pytest.fixture
def _batches() -> None:
    pytest.importorskip("psutil", reason="generate_batch asks psutil for the memory of the CPU")


def check(model: Any, found: list[list[int]], dtype: torch.dtype) -> None:
    model.set_attn_implementation("eager")
    prompts = hf_models.prompts_of(LENGTHS)
    compared = hf_models.compare(model, prompts, found)
    assert compared.num_tokens == len(LENGTHS) * NUM_NEW
    assert compared.num_ties <= TIES[dtype] * compared.num_tokens
    assert len({token for tokens in found for token in tokens}) > 10, "tokens don't vary"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", hf_models.MODELS)
def test_tokens_of_generate(name: str, dtype: torch.dtype) -> None:
    model = hf_models.make_model(name, dtype=dtype)
    hf_models.through(model, "jitattn")
    prompts = hf_models.prompts_of(LENGTHS)
    dynamic = hf_models.generated(model, prompts, NUM_NEW)
    static = hf_models.generated(model, prompts, NUM_NEW, cache_implementation="static")
    assert static == dynamic
    check(model, dynamic, dtype)


@pytest.mark.usefixtures("_batches")
@pytest.mark.parametrize("name", hf_models.MODELS)
def test_tokens_of_generate_batch(name: str) -> None:
    """In batches of 24 tokens, so that prompts come in parts."""
    model = hf_models.make_model(name, dtype=torch.float16)
    hf_models.through(model, "jitattn")
    found = hf_models.generated_in_batches(model, hf_models.prompts_of(LENGTHS), NUM_NEW)
    check(model, found, torch.float16)


@pytest.mark.usefixtures("_batches")
@pytest.mark.parametrize("is_padded", [False, True])
def test_tokens_of_block_tables(is_padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of decoding with the tables that transformers makes on CUDA; with rows of -1, too."""
    if hf_models.version() >= (5, 24):
        pytest.skip("from 5.24 on, tables come without the cache, and for flash-attn alone")
    from transformers import CompileConfig
    from transformers.generation.continuous_batching import initialization

    monkeypatch.setattr(
        initialization, "ensure_decode_fast_path_is_available", lambda *_, **__: None
    )
    seen: list[list[int]] = []
    append = paged.append_kv

    def append_kv(*args: object, seq_lens: Tensor, **others: object) -> None:
        seen.append(seq_lens.tolist())
        append(*args, seq_lens=seq_lens, **others)

    monkeypatch.setattr(paged, "append_kv", append_kv)
    others: dict[str, object] = {"max_blocks_per_request": 16, "max_requests_per_batch": 8}
    if is_padded:
        others["decode_compile_config"] = CompileConfig(
            backend="eager", fullgraph=False, dynamic=None, mode=None
        )
    model = hf_models.make_model("llama", dtype=torch.float16)
    hf_models.through(model, "jitattn")
    prompts = hf_models.prompts_of(LENGTHS)
    found = hf_models.generated_in_batches(model, prompts, NUM_NEW, **others)
    assert seen
    assert any(0 in lens for lens in seen) == is_padded
    check(model, found, torch.float16)


@pytest.mark.parametrize("name", hf_models.MODELS)
def test_logits_are_as_good_as_eager_ones(name: str) -> None:
    model = hf_models.make_model(name, dtype=torch.float16)
    errors = hf_models.logit_errors(model, LENGTHS, "cpu")
    assert errors["jitattn"] <= 1.25 * errors["eager"], errors


# --- masks ----------------------------------------------------------------------------------------


def random_mask_call(rng: random.Random) -> dict[str, Any]:
    from transformers import masking_utils

    batch_size, q_length = rng.randint(1, 3), rng.choice([1, 1, 4, 7])
    q_offset = rng.choice([0, 0, rng.randint(1, 12)])
    kv_offset = rng.choice([0, 0, rng.randint(0, q_offset)])
    spare = rng.choice([0, 5])  # a static cache's
    kv_length = q_offset + q_length - kv_offset + spare
    total = q_offset + q_length
    kind = rng.choice(["none", "left", "right", "holes", "short"])
    padding = torch.ones(batch_size, total, dtype=torch.bool)
    for row in range(batch_size):
        n = rng.randint(0, total)
        if kind == "left":
            padding[row, :n] = False
        elif kind == "right":
            padding[row, total - n :] = False
        elif kind == "holes":
            padding[row] = torch.rand(total) < 0.6
    window = rng.choice([None, 1, 3, 50])
    function = masking_utils.causal_mask_function
    if window is not None:
        function = masking_utils.sliding_window_causal_mask_function(window)
    odd = rng.choice([None, None, "bidirectional", "chunked", "packed", "or"])
    if odd == "bidirectional":
        function = masking_utils.bidirectional_mask_function
    elif odd == "chunked":
        left = torch.zeros(batch_size, dtype=torch.long)
        function = masking_utils.chunked_causal_mask_function(3, left)
    elif odd == "packed":
        ids = torch.arange(total + spare).expand(batch_size, -1) // 3
        packed = masking_utils.packed_sequence_mask_function(ids)
        function = masking_utils.and_masks(function, packed)
    elif odd == "or":
        function = masking_utils.or_masks(function, lambda b, h, q, kv: kv < 2)
    return {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": rng.choice([q_offset, torch.tensor(q_offset)]),
        "kv_offset": kv_offset,
        "mask_function": function,
        "attention_mask": None if kind == "none" else padding,
    }


@pytest.mark.parametrize("seed", range(200))
def test_attention_sees_what_the_mask_says(seed: int) -> None:
    """As transformers' own mask for sdpa says it, in float64; unseen keys are NaN."""
    from transformers import masking_utils

    rng = random.Random(seed)
    torch.manual_seed(seed)
    call = random_mask_call(rng)
    seen = masking_utils.sdpa_mask(**call, allow_is_causal_skip=False)
    mask = masks.make_mask(**call, device="cpu")
    batch_size, q_length, kv_length = (call[n] for n in ("batch_size", "q_length", "kv_length"))
    query, key, value = random_tensors(rng, batch_size, q_length, kv_length)
    unseen = ~seen.expand(batch_size, 1, -1, -1).any(dim=2)[:, 0]  # by every query
    key.masked_fill_(unseen[:, None, :, None], math.nan)
    value.masked_fill_(unseen[:, None, :, None], math.nan)
    sinks = torch.randn(query.shape[1]) if rng.random() < 0.3 else None
    softcap = rng.choice([None, 2.0])
    given = {"scaling": 0.3, "softcap": softcap, "s_aux": sinks}
    for shown in (mask, as_given(seen, rng)):
        out, weights = dense.attend(module(), query, key, value, shown, **given)
        assert weights is None
        want, size = defined(query, key, value, seen, 0.3, softcap, sinks)
        # Rows that see nothing may be anything finite elsewhere; here they are 0.
        assert bool(((out.double() - want).abs() <= 2.0**-8 * size + 2.0**-20).all())


def as_given(seen: Tensor, rng: random.Random) -> Tensor:
    """What a caller may give instead: bits, or numbers that are added."""
    if rng.random() < 0.5:
        return seen.clone()
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)


def random_tensors(
    rng: random.Random, batch_size: int, q_length: int, kv_length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens before heads in memory or after them, in tensors of their own or in larger ones."""
    heads_k = rng.choice([1, 2])
    heads, dims = heads_k * rng.choice([1, 3]), (16, 16, rng.choice([16, 32]))
    found = []
    counts, lengths = (heads, heads_k, heads_k), (q_length, kv_length, kv_length)
    for n, length, dim in zip(counts, lengths, dims, strict=True):
        kind = rng.choice(["heads first", "tokens first", "part"])
        if kind == "heads first":
            tensor = torch.randn(batch_size, n, length, dim).half()
        elif kind == "tokens first":
            tensor = torch.randn(batch_size, length, n, dim).half().transpose(1, 2)
        else:
            tensor = torch.full((batch_size, n + 1, length + 3, dim), math.nan).half()
            tensor = tensor[:, 1:, 2 : 2 + length].copy_(torch.randn(batch_size, n, length, dim))
        found.append(tensor)
    return found[0], found[1], found[2]


def defined(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Out and the sum of p * |v|, [batch_size, q_length, heads, dim]."""
    group = query.shape[1] // key.shape[1]
    k, v = (x.double().nan_to_num(0.0).repeat_interleave(group, dim=1) for x in (key, value))
    scores = query.double() @ k.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        column = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=-1)
    p = torch.softmax(scores, dim=-1).nan_to_num(0.0)[..., : key.shape[2]]
    return (p @ v).transpose(1, 2), (p @ v.abs()).transpose(1, 2)


def module(**attributes: object) -> Any:
    return SimpleNamespace(**({"is_causal": True, "layer_idx": 0} | attributes))


def test_lengths_and_windows_are_no_masks_of_bits() -> None:
    from transformers import masking_utils

    window = masking_utils.sliding_window_causal_mask_function(7)
    for function, window_left in ((masking_utils.causal_mask_function, -1), (window, 6)):
        mask = masks.make_mask(2, 3, 9, 6, 0, function, torch.ones(2, 9).bool())
        step = mask.jitattn_step
        assert (step.causal, step.window_left, step.bits) == (True, window_left, None)
        assert mask.untyped_storage().nbytes() == 1
        assert mask.contiguous() is mask  # as generate asks for static caches
    like = masking_utils.and_masks(masking_utils.causal_mask_function, window)
    assert masks.make_mask(2, 3, 9, 6, 0, like).jitattn_step.bits is not None


def test_layers_of_a_step_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    plan = dense._plan
    monkeypatch.setattr(dense, "_plan", lambda *args: made.append(0) or plan(*args))
    model = hf_models.make_model("gemma3")
    hf_models.through(model, "jitattn")
    with torch.no_grad():
        model(torch.arange(1, 9)[None], use_cache=False)
    assert len(made) == 2  # layers with a window, layers without


# --- what is refused ------------------------------------------------------------------------------


def attend(**changes: Any) -> None:
    tensors = random_tensors(random.Random(0), 2, 3, 3)
    given: dict[str, Any] = dict(zip(("query", "key", "value"), tensors, strict=True))
    given |= {"module": module(), "attention_mask": None, "scaling": 0.25}
    dense.attend(**(given | changes))


MARKED = torch.zeros((), dtype=torch.uint8).expand(2, 1, 3, 3)
BIAS = torch.full((2, 1, 3, 3), -0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dropout": 0.1}, "dropout is 0.1"),
        ({"position_bias": torch.zeros(1)}, "position_bias is given"),
        ({"output_attentions": True}, "output_attentions is given"),
        ({"head_mask": torch.ones(4)}, "head_mask is given"),
        ({"cu_seq_lens_q": torch.zeros(2)}, "cu_seq_lens_q is given"),
        ({"attention_mask": MARKED}, "attention_mask has dtype torch.uint8"),
        ({"attention_mask": BIAS}, "attention_mask has other numbers"),
        ({"attention_mask": BIAS[0]}, "attention_mask has shape"),
        ({"attention_mask": torch.ones(2, 3).bool()}, "attention_mask has shape"),
        ({"attention_mask": torch.ones(2, 4, 3, 3).bool()}, "attention_mask has shape"),
        ({"query": torch.randn(2, 3, 2, 16).half()}, "attention_mask is None: 2 queries"),
        ({"query": torch.randn(2, 3, 3, 16)}, "q_dtype"),
        ({"query": torch.randn(2, 3, 3, 16).half().requires_grad_()}, "requires a gradient"),
        ({"is_causal": False, "sliding_window": 4}, "sliding_window is 4"),
        ({"softcap": -1.0}, "logits_soft_cap"),
    ],
    ids=lambda x: x if type(x) is str else "",
)
def test_what_attention_does_not_take(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        attend(**changes)


def test_a_mask_of_other_lengths_is_refused() -> None:
    with pytest.raises(ValueError, match="attention_mask is for"):
        attend(attention_mask=masks.make_mask(2, 3, 4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "cache is None"),
        ({"cache": 1, "attention_mask": BIAS}, "attention_mask is given"),
        ({"cache": 1, "is_causal": False}, "is_causal is False"),
        ({"cache": 1}, "cache is a int"),
        ({"read_index": []}, "cu_seq_lens_q is None"),
    ],
    ids=lambda x: x if type(x) is str else "",
)
def test_what_paged_attention_does_not_take(changes: dict[str, Any], message: str) -> None:
    tensors = random_tensors(random.Random(0), 1, 3, 3)
    given: dict[str, Any] = dict(zip(("query", "key", "value"), tensors, strict=True))
    given |= {"module": module(), "attention_mask": None}
    with pytest.raises(ValueError, match=message):
        paged.attend_paged(**(given | changes))


def test_a_model_in_float32_is_refused() -> None:
    model = hf_models.make_model("llama", dtype=torch.float32)
    hf_models.through(model, "jitattn")
    with pytest.raises(ValueError, match="q_dtype"), torch.no_grad():
        model(torch.arange(1, 9)[None])


def test_training_is_refused() -> None:
    model = hf_models.make_model("llama")
    hf_models.through(model, "jitattn")
    with pytest.raises(ValueError, match="requires a gradient"):
        model(torch.arange(1, 9)[None])


def test_an_old_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    monkeypatch.setattr(transformers, "__version__", "4.57.3")
    with pytest.raises(ImportError, match=r"transformers 4\.57\.3 is installed"):
        integration.register()
