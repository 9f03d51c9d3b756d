"""What reaches a kernel's source: checked numbers and names from lists, and a variant's text.

By construction: every template variable of every kernel of a configuration is one of those. And no
two kernels have one source, of 5,000 random pairs of configurations.
"""

from __future__ import annotations

import functools
import hashlib
import re
from random import Random

import pytest

import jitattn
from jitattn.jit.render import render
from jitattn.kernels.registry import config_of, specs_of
from jitattn.spec.family import KernelSpec
from tests.fuzz.values import NAMES, HostileStr

ARCHS = ("sm_80", "sm_90a")
# Identifiers, file names of templates, types as `convert.cuh` has them.
_NAME = re.compile(r"[A-Za-z0-9_]{1,200}")
_CHOICES: dict[str, tuple[object, ...]] = {
    "num_qo_heads": (1, 2, 4, 8, 12, 32, 64),
    "num_kv_heads": (1, 2, 4, 8),
    "head_dim": (16, 48, 64, 80, 128, 192, 256, 512),
    "head_dim_vo": (None, 64, 128),
    "page_size": (None, 1, 3, 16, 64, 2**20),
    "page_table": ("shared", "separate", "csr", "token", "ragged"),
    "q_dtype": ("bfloat16", "float16"),
    "kv_dtype": ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "nvfp4"),
    "out_dtype": (None, "bfloat16", "float16", "float32"),
    "kv_layout": ("NHD", "HND"),
    "causal": (True, False),
    "window_left": (-1, 0, 127, 2**40),
    "logits_soft_cap": (0.0, 30.0),
    "sm_scale": (None, 0.1, 1e30),
    "use_sinks": (False, True),
    "use_custom_mask": (False, True),
    "batch_invariant": (False, True),
    "early_kv": (False, True),
    "num_sms": (None, 4),
}
_MLA: dict[str, tuple[object, ...]] = {
    "num_heads": (1, 16, 128),
    "kv_lora_rank": (256, 512),
    "qk_rope_head_dim": (32, 64),
    "page_size": (1, 16, 64),
    "page_table": ("shared", "separate", "csr", "token"),
    "q_dtype": ("bfloat16", "float16"),
    "kv_dtype": ("bfloat16", "float16", "float8_e4m3fn"),
    "out_dtype": (None, "float32"),
    "causal": (True, False),
    "batch_invariant": (False, True),
}


def drawn(random: Random) -> tuple[KernelSpec, ...]:
    """The kernels of a random configuration that has some."""
    while True:
        choices, extra = (_MLA, {"planner": "mla"}) if random.random() < 0.2 else (_CHOICES, {})
        some = random.sample(sorted(choices), random.randrange(1, 7))
        arguments: dict[str, object] = {name: random.choice(choices[name]) for name in some}
        try:
            return specs_of(config_of(arguments | extra), random.choice(ARCHS))
        except jitattn.ConfigError:
            continue


@functools.cache
def digest(spec: KernelSpec, arch: str) -> str:
    return hashlib.sha256(render(spec, arch).encode()).hexdigest()


def test_no_two_kernels_share_a_source() -> None:
    random = Random(0)
    of_source: dict[str, KernelSpec] = {}
    num_pairs = num_different = 0
    while num_pairs < 5_000:
        arch = random.choice(ARCHS)
        try:
            a, b = random.choice(drawn(random)), random.choice(drawn(random))
            digests = digest(a, arch), digest(b, arch)
        except (jitattn.ConfigError, ValueError, KeyError, AssertionError):
            continue  # of a kernel that the architecture hasn't
        num_pairs += 1
        num_different += a != b
        assert (a == b) == (digests[0] == digests[1]), (a, b)
        assert (a == b) == ((a.symbol, type(a)) == (b.symbol, type(b))), (a, b)
        for spec, found in zip((a, b), digests, strict=True):
            assert of_source.setdefault(found, spec) == spec
    assert num_different > 1_000


@pytest.mark.parametrize("arch", ARCHS)
def test_template_variables_are_numbers_and_names(arch: str) -> None:
    random = Random(1)
    seen: set[KernelSpec] = set()
    while len(seen) < 150:
        seen.update(drawn(random))
    for spec in seen:
        for name, value in spec.context().items():
            is_plain = value is None or isinstance(value, (bool, int))
            assert is_plain or (isinstance(value, str) and _NAME.fullmatch(value)), (name, value)


@pytest.mark.parametrize("planner", [jitattn.AttentionPlanner, jitattn.MLAPlanner])
def test_texts_are_names_from_lists(planner: type) -> None:
    """Whatever stands for a name is refused, and none is rendered."""
    texts = [text for text in NAMES if isinstance(text, str)]
    texts += ['"; int x;', "bfloat16\n#define A", "$(symbol)", "shared)", HostileStr("a\nb")]
    for name in ("q_dtype", "kv_dtype", "out_dtype", "page_table", "kv_layout", "variant"):
        for text in texts:
            try:
                specs = specs_of(config_of({name: text} | _planner_of(planner)), "sm_90a")
            except jitattn.ConfigError:
                continue
            for spec in specs:
                assert str.__str__(text) in (*_names_of(name), "alibi", "relative_bias"), text
                assert spec.transform is None or name == "variant"


def _planner_of(planner: type) -> dict[str, object]:
    return {"planner": "mla"} if planner is jitattn.MLAPlanner else {}


def _names_of(name: str) -> tuple[object, ...]:
    return _CHOICES.get(name, ())
