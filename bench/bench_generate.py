"""``generate_batch`` of transformers through jitattn and its other attentions: tokens a second.

    python -m bench.bench_generate --json bench/results/generate.jsonl
    python -m bench.bench_generate --dry-run

Llama with random weights in bfloat16, 8 layers of the 8B model's shape, 192 prompts of 32 to 1,024
tokens and 96 new ones each. A contender is an ``attn_implementation``, with the manager of its
batches kept from a first run, so that kernels are loaded and graphs captured; then a run is timed
from the call to the last token. CUDA graphs are as transformers chooses for its own, on and off for
jitattn. First tokens must be the best of a forward pass through eager attention, or nearly so.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from bench import command, records, report
from bench.engines.llama import SIZES
from bench.options import make_parser
from bench.timing import summarize
from bench.turns import Result

Prompts = Sequence[list[int]]
BASELINE = "jitattn-graphs"
_AGREEING, _CLOSE = 0.98, 0.5
"""The least share of first tokens that are as good as eager's, and how far their logits may be from
the best ones, in standard deviations of logits: sdpa's are further than a tenth in one of seven."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model's sizes, and what is asked of it."""

    name: str
    sizes: Mapping[str, int]
    num_requests: int
    longest: int
    num_new: int
    batching: Mapping[str, object] = field(default_factory=dict)

    def prompts(self) -> list[list[int]]:
        """Return random tokens, 32 (or the half of ``longest``) to ``longest`` each."""
        generator = torch.Generator().manual_seed(0)
        vocabulary, shortest = self.sizes["vocab_size"], min(32, self.longest // 2)
        lengths = torch.randint(shortest, self.longest, (self.num_requests,), generator=generator)
        return [
            torch.randint(1, vocabulary, (n,), generator=generator).tolist()
            for n in lengths.tolist()
        ]


LLAMA = Workload(
    name="llama-8-layers",
    sizes={**SIZES["8b"], "vocab_size": 32000, "num_hidden_layers": 8},
    num_requests=192,
    longest=1024,
    num_new=96,
    batching={"block_size": 256, "num_blocks": 1200, "max_batch_tokens": 4096},
)
TINY = Workload(
    name="dry",
    sizes=SIZES["tiny"],
    num_requests=5,
    longest=20,
    num_new=4,
    batching={"block_size": 8, "num_blocks": 64, "max_batch_tokens": 24},
)


@dataclass(frozen=True)
class Contender:
    """An attention of transformers.

    Attributes:
        name: of records.
        attention: ``attn_implementation``.
        batching: arguments of ``ContinuousBatchingConfig``.
        package: that it needs.
    """

    name: str
    attention: str
    batching: Mapping[str, object] = field(default_factory=dict)
    package: str | None = None


CONTENDERS = (
    Contender(BASELINE, "jitattn", {"use_cuda_graph": True}),
    Contender("jitattn", "jitattn", {"use_cuda_graph": False}),
    Contender("sdpa", "paged|sdpa"),
    Contender("eager", "paged|eager"),
    Contender("flash-attn-2", "paged|flash_attention_2", package="flash_attn"),
)


def kernel_configs(workload: Workload) -> list[dict[str, object]]:
    """Return what `jitattn.precompile` takes."""
    sizes = workload.sizes
    heads = {
        "num_qo_heads": sizes["num_attention_heads"],
        "num_kv_heads": sizes["num_key_value_heads"],
        "head_dim": sizes["head_dim"],
    }
    return [
        {**heads, "page_size": workload.batching["block_size"]},
        {**heads, "page_size": None, "page_table": "ragged"},
    ]


def make_model(workload: Workload, device: torch.device) -> Any:
    """Return the model, random, in bfloat16."""
    import transformers

    config = transformers.LlamaConfig(
        **workload.sizes,
        max_position_embeddings=2 * (workload.longest + workload.num_new),
        pad_token_id=0,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2:  # so that tokens vary
                    parameter.normal_(std=2 * parameter.shape[1] ** -0.5)
    return model


@torch.no_grad()
def first_logits(model: Any, prompts: Prompts) -> Tensor:
    """Return the logits of each prompt's next token, through eager attention, on the CPU."""
    model.set_attn_implementation("eager")
    found = []
    for prompt in prompts:
        tokens = torch.tensor([prompt], device=model.device)
        logits = model(tokens, use_cache=False, logits_to_keep=1).logits
        found.append(logits[0, -1].float().cpu())
    return torch.stack(found)


def generate(model: Any, workload: Workload, contender: Contender, prompts: Prompts) -> list[Any]:
    """Decode greedily, and keep what is set up for the next call; outputs in the prompts' order."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    out = model.generate_batch(
        list(prompts),
        generation_config=GenerationConfig(
            max_new_tokens=workload.num_new, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            **workload.batching, **contender.batching
        ),
        progress_bar=False,
        persistent_manager=True,
    )
    return [out[key] for key in sorted(out, key=lambda key: int(key.rsplit("_", 1)[-1]))]


def measure(
    model: Any,
    workload: Workload,
    contender: Contender,
    first: Tensor,
    rounds: int,
    wait: Callable[[], object],
) -> Result:
    """Time a contender; whatever it raises becomes the result."""
    name, prompts = contender.name, workload.prompts()
    if contender.package and importlib.util.find_spec(contender.package) is None:
        return Result(name, "skipped", f"{contender.package} is not installed")
    samples = []
    try:
        with through(model, contender.attention):
            for round_ in range(rounds + 1):
                wait()
                start = time.perf_counter()
                outputs = generate(model, workload, contender, prompts)
                wait()
                if round_ > 0:
                    samples.append(time.perf_counter() - start)
            agreeing = share_of_first(workload, outputs, first)
    except WrongTokensError as reason:
        return Result(name, "wrong", str(reason))
    except Exception as reason:  # an attention may raise anything, and the others have their turn
        return Result(name, "failed", f"{type(reason).__name__}: {reason}")
    timing = summarize(samples)
    facts = {
        "tokens_per_s": workload.num_requests * workload.num_new / timing.median_s,
        "good_first_tokens": agreeing,
    }
    return Result(name, "timed", timing=timing, facts=facts)


class WrongTokensError(Exception):
    """Outputs are not what was asked for."""


def share_of_first(workload: Workload, outputs: Sequence[Any], first: Tensor) -> float:
    """Return how many first tokens are as good as eager's, or raise WrongTokensError.

    Args:
        workload: what was asked for.
        outputs: of ``generate_batch``.
        first: [num_requests, vocabulary], see `first_logits`.
    """
    tokens = [list(output.generated_tokens) for output in outputs if output.error is None]
    if [len(of_one) for of_one in tokens] != [workload.num_new] * workload.num_requests:
        raise WrongTokensError(f"{len(tokens)} of {workload.num_requests} requests were decoded")
    found = first.gather(1, torch.tensor([[of_one[0]] for of_one in tokens])).squeeze(1)
    good = int((first.amax(1) - found <= _CLOSE * first.std(1)).sum())
    if good < _AGREEING * len(first):
        raise WrongTokensError(f"{good} of {len(first)} first tokens are as good as eager's")
    return good / len(first)


@contextmanager
def through(model: Any, attention: str) -> Iterator[None]:
    """Set the attention of a model, and let go of what its batches took in the end."""
    model.set_attn_implementation(attention)
    try:
        yield
    finally:
        model.destroy_cached_continuous_batching_manager()


def print_table(workload: Workload, results: Sequence[Result]) -> None:
    """Print a row for each contender."""
    table = Table(title=f"generate_batch, {workload.name}: {workload.num_requests} requests")
    for name in ("contender", "s", "tokens/s", f"/ {BASELINE}", "good first tokens"):
        table.add_column(name, justify="left" if name == "contender" else "right")
    medians = {r.contender: r.timing.median_s for r in results if r.timing}
    ours = medians.get(BASELINE)
    for result in results:
        if result.timing is None:
            table.add_row(result.contender, result.status)
            continue
        seconds, good = result.timing.median_s, result.facts["good_first_tokens"]
        table.add_row(
            result.contender,
            f"{seconds:.3f}",
            f"{result.facts['tokens_per_s']:.0f}",
            "-" if ours is None else f"{seconds / ours:.3f}",
            f"{good:.3f}",
        )
    report.console().print(table)
    for result in results:
        report.print_reason(result)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table and append the records; the exit status is 1 when one was wrong."""
    parser = make_parser("bench.bench_generate", __doc__)
    names = [contender.name for contender in CONTENDERS]
    parser.add_argument("--contenders", default=",".join(names), help=f"of {','.join(names)}")
    parser.add_argument("--rounds", type=int, default=3, help="timed runs, at least 2")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--json", type=Path, help="file to which records are appended")
    options = parser.parse_args(argv)
    command.check_names(parser, "contender", options.contenders, names)
    if options.rounds < 2:
        parser.error("expected at least 2 rounds")
    if not options.dry_run and not torch.cuda.is_available():
        print("bench_generate needs a CUDA device", file=sys.stderr)
        return 2
    if importlib.util.find_spec("transformers") is None:
        print("bench_generate needs transformers", file=sys.stderr)
        return 2
    return _measure_all(options)


def _measure_all(options: argparse.Namespace) -> int:
    import transformers

    from jitattn.integrations import transformers as integration

    integration.register()
    for name in ("transformers", "ContinuousBatchingLogger"):
        logging.getLogger(name).setLevel(logging.ERROR)
    workload = TINY if options.dry_run else LLAMA
    device = torch.device("cpu" if options.dry_run else "cuda")
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    env = records.environment({"transformers": transformers.__version__})
    report.print_head(env)
    model = make_model(workload, device)
    first = first_logits(model, workload.prompts())
    chosen = [c for c in CONTENDERS if c.name in options.contenders.split(",")]
    results = [measure(model, workload, c, first, options.rounds, wait) for c in chosen]
    lines = [
        records.of_result(
            "generate",
            env,
            workload.name,
            result,
            median_s=None if result.timing is None else result.timing.median_s,
            **result.facts,
        )
        for result in results
    ]
    records.append_json(options.json, lines)
    print_table(workload, results)
    return command.status_of([results])


if __name__ == "__main__":
    raise SystemExit(main())
