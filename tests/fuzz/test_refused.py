"""Inputs that once slipped through, each one of a kind: refused by name, with nothing written."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal

import numpy as np
import pytest
import torch
from torch import Tensor

import jitattn
from jitattn.base.validate import FLOAT32_MAX, check_count, check_name, check_number, shown
from jitattn.compat.flashinfer import get_batch_indices_positions, merge_state_in_place
from jitattn.kv import KVCacheConfig, KVCacheManager, LayerConfig, PageIndexMode
from jitattn.tensors.tensor_layouts import RowLayout
from tests.fuzz import values
from tests.fuzz.targets import TARGETS

LENS = torch.tensor([5, 9], dtype=torch.int32)
TABLE = jitattn.BlockTable(torch.arange(6, dtype=torch.int32).view(2, 3))
PLANNER = jitattn.AttentionPlanner(
    num_qo_heads=4, num_kv_heads=2, head_dim=16, page_size=4, device="cpu"
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LONGROPE = {
    "rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 0.5,
    "short_factor": [1.0] * 8, "long_factor": [1.0] * 8,
}  # fmt: skip
LAYER = LayerConfig(layer_id=0, num_kv_heads=2, head_dim=16)


def config(**changes: object) -> KVCacheConfig:
    sizes: dict[str, object] = {"page_size": 4, "gpu_bytes": 2**16, "layers": [LAYER]}
    return KVCacheConfig(**(sizes | changes))  # type: ignore[arg-type]


def manager() -> KVCacheManager:
    return KVCacheManager(config())


def bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def appended(k: Tensor) -> None:
    cache = bf16(6, 4, 2, 16), bf16(6, 4, 2, 16)
    jitattn.append_kv(k, bf16(2, 2, 16), cache, pages=TABLE, seq_lens=LENS)


def lists(num_tokens: int) -> object:
    planner = jitattn.AttentionPlanner(
        num_qo_heads=4, num_kv_heads=2, head_dim=16, page_size=4, page_table="indices", device="cpu"
    )
    return planner.plan(jitattn.IndexLists(LENS.view(2, 1)), num_tokens)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    # Numbers have bounds.
    "head_dim": (lambda: jitattn.Rope(2**31), "head_dim is 2147483648: expected 1 to"),
    "base": (lambda: jitattn.Rope(64, base=10**400), "base is beyond floats"),
    "factor": (
        lambda: jitattn.Rope(64, scaling=YARN | {"factor": 1e300}, max_position=9),
        r"scaling\['factor'\] is 1e\+300: expected a finite float32",
    ),
    "trained": (
        lambda: jitattn.Rope(16, scaling=LONGROPE, max_position=9),
        r"scaling\['original_max_position_embeddings'\] is 0.5",
    ),
    "truncate": (
        lambda: jitattn.Rope(64, scaling=YARN | {"truncate": "False"}),
        r"scaling\['truncate'\] is a str",
    ),
    "host_bytes": (lambda: config(host_bytes=10**400), "host_bytes is of 1329 bits"),
    "page_size": (lambda: config(page_size=10**400), "page_size is of 1329 bits"),
    "sm_scale": (
        lambda: jitattn.AttentionPlanner(sm_scale=1e300, device="cpu"),
        r"sm_scale=1e\+300: expected a finite float32",
    ),
    "num_tokens": (
        lambda: jitattn.batch_info(LENS, LENS, num_tokens=2**31 - 1),
        r"num_tokens asks for \d+ bytes",
    ),
    "nnz": (
        lambda: get_batch_indices_positions(LENS.new_tensor([0, 1]), LENS[:1], 2**31),
        "nnz is 2147483648",
    ),
    # The page manager's arguments.
    "seqs": (lambda: manager().advance(0, []), "seqs is a int"),  # type: ignore[arg-type]
    "mode": (lambda: manager().layer_view(0, 1), "mode is 1: expected 'shared' or"),  # type: ignore[arg-type]
    "layers": (lambda: config(layers=0), "layers is 0: expected a list"),
    "device": (lambda: KVCacheManager(config(), device=1.5), "device is 1.5"),  # type: ignore[arg-type]
    "no card": (lambda: KVCacheManager(config(), device="cuda:99"), "device is cuda:99: this"),
    "surrogate": (lambda: manager().create_sequence(reuse_scope="\ud800"), "reuse_scope holds"),
    "tables": (lambda: manager().block_tables("", 0), "seqs is a str"),  # type: ignore[arg-type]
    "prompt": (lambda: manager().create_sequence([[1], [2, 3]]), "prompt is a list"),
    "meta prompt": (
        lambda: manager().create_sequence(torch.empty(2, dtype=torch.int64, device="meta")),
        "prompt is a Tensor",
    ),
    # Names and scalars.
    "arch": (lambda: jitattn.supported_configs(3), "arch=3 is not one of"),  # type: ignore[arg-type]
    "sNaN": (
        lambda: jitattn.AttentionPlanner(sm_scale=Decimal("sNaN"), device="cpu"),  # type: ignore[arg-type]
        "sm_scale=nan",
    ),
    "array": (
        lambda: jitattn.AttentionPlanner(backend=np.array([1, 2]), device="cpu"),  # type: ignore[arg-type]
        "backend=a ndarray",
    ),
    "dtype": (lambda: appended(bf16(2, 2, 16).float()), "k has dtype float32.*round it first"),
    "kv_dtype": (
        lambda: jitattn.AttentionPlanner(kv_dtype=2**31, device="cpu"),  # type: ignore[arg-type]
        "kv_dtype is 2147483648: expected a torch.dtype",
    ),
    "listed": (lambda: lists(values.HostileInt(3)), "num_tokens is 3: pages is"),
    "parts": (
        lambda: jitattn.preprocess_qkv(
            (bf16(2, 4, 16), bf16(2, 2, 16), bf16(2, 2, 16)), bf16(6, 2, 4, 2, 16), pages=TABLE,
            seq_lens=LENS, num_qo_heads=None, num_kv_heads=2, head_dim=16,  # type: ignore[arg-type]
        ),
        "num_qo_heads is None: expected an int",
    ),
    # Tensors whose memory is not what they say.
    "negative bit": (lambda: appended(torch._neg_view(bf16(2, 2, 16))), "k has the negative bit"),
    "nested": (
        lambda: appended(torch.nested.nested_tensor([bf16(2, 16), bf16(2, 16)])), "k is a nested"
    ),
    "sparse": (lambda: jitattn.RaggedKV(LENS.to_sparse()), "kv_indptr has the layout"),
    "meta": (lambda: jitattn.RaggedKV(LENS.to("meta")), "kv_indptr is on meta"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, match = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=match):
        call()


@pytest.mark.parametrize("arch", [3, None, b"sm_90a", values.HostileStr("sm_1")])
def test_no_architecture(arch: object) -> None:
    values.shown.clear()
    support = jitattn.check_config(arch=arch)  # type: ignore[arg-type]
    assert not support.supported
    assert support.reasons[0].startswith("arch=")
    assert not values.shown


OVERWRITTEN = ([5, 2, 3, 6], [1, 2, 3, 6], [-1, 2, 3, 6], [0, 3, 2, 5])


@pytest.mark.parametrize("offsets", OVERWRITTEN, ids=str)
def test_offsets_that_were_overwritten(offsets: list[int]) -> None:
    """`refresh` says what `plan` would have said, and the plan stays as it was."""
    qo_indptr = torch.tensor([0, 1, 3, 6], dtype=torch.int32)
    table = jitattn.BlockTable(torch.arange(9, dtype=torch.int32).view(3, 3))
    lens = torch.tensor([5, 9, 7], dtype=torch.int32)
    plan = PLANNER.plan(table, lens, qo_indptr, max_q_len=6)
    q, cache = torch.randn(6, 4, 16).bfloat16(), (torch.randn(9, 4, 2, 16).bfloat16(),) * 2
    before = plan.run(q, cache)
    qo_indptr.copy_(torch.tensor(offsets))
    with pytest.raises(ValueError, match=r"qo_indptr\[\d\] is") as refused:
        plan.refresh()
    with pytest.raises(ValueError, match=re.escape(str(refused.value))):
        PLANNER.plan(table, lens, qo_indptr, max_q_len=6)
    assert isinstance(before, Tensor)
    assert torch.equal(plan.run(q, cache), before)  # type: ignore[arg-type]


@pytest.mark.parametrize("spoil", [lambda s: s[:1].expand(s.shape), lambda s: s.requires_grad_()])
def test_a_state_in_place_is_refused_before_it_is_written(
    spoil: Callable[[Tensor], Tensor],
) -> None:
    v, s = torch.ones(3, 4, 16), spoil(torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"s (has strides|requires grad)"):
        merge_state_in_place(v, s, v + 1, torch.ones(3, 4))
    assert torch.equal(v, torch.ones(3, 4, 16))


def test_a_negated_tensor_does_not_lie_like_its_base() -> None:
    q = bf16(2, 4, 16)
    layout = RowLayout(q)
    for _ in range(2):  # by its strides, and by what they are recognised with
        assert layout.fits(q)
        assert not layout.fits(torch._neg_view(q))
        assert not layout.fits([q])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_of_lengths_is_refused_after_a_plan() -> None:
    """Torch's guards end the process at the sight of one."""
    for _ in range(2):
        PLANNER.plan(TABLE, LENS)
        for lens in (torch.nested.nested_tensor([LENS]), [5, 9]):
            with pytest.raises(TypeError, match="seq_lens is a"):
                PLANNER.plan(TABLE, lens)  # type: ignore[arg-type]


def test_values_are_shown_in_few_letters_without_being_asked() -> None:
    values.shown.clear()
    for value in (
        *values.NUMBERS, *values.NAMES, values.HostileStr("a"), values.HostileInt(3),
        values.HostileObject(), values.HostileList([1]), values.HostileFloat(1.5), bf16(3),
        np.zeros(3), torch.float32, object,
    ):  # fmt: skip
        assert 0 < len(shown(value)) < 120
    assert not values.shown
    assert shown(values.HostileInt(3)) == "3"
    assert shown(values.HostileStr("a")) == "'a'"
    assert type(check_count("a", values.HostileInt(3))) is int
    assert type(check_number("a", values.HostileFloat(0.5))) is float
    assert type(check_name("a", values.HostileStr("x"), ("x",))) is str
    with pytest.raises(ValueError, match="a is 'y': expected 'x' or 'z'"):
        check_name("a", "y", ("x", "z"))
    assert check_number("a", FLOAT32_MAX) == torch.finfo(torch.float32).max


def test_modes_may_be_names() -> None:
    assert manager().layer_view(0, "shared").mode is PageIndexMode.SHARED  # type: ignore[arg-type]


def test_every_target_has_arguments() -> None:
    assert all(target.parameters for target in TARGETS.values())
