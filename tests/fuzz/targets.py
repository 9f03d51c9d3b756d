"""The public functions and methods, each with a valid call for a fuzzer to spoil."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import jitattn
from jitattn import cascade, pages, quant, variants
from jitattn.compat import flash_attn, flashinfer, trtllm
from jitattn.kv import KVCacheConfig, KVCacheManager, LayerConfig, PageIndexMode
from jitattn.parallel import ContextParallel

Arguments = dict[str, object]
B, HQ, HKV, D, PAGE, NUM_PAGES = 2, 4, 2, 16, 4, 6


@dataclass(frozen=True)
class Call:
    """A valid call."""

    function: Callable[..., object]
    arguments: Arguments
    state: object = None
    """What the call changes besides its outputs, if that is to be compared; see ``describe``."""


@dataclass(frozen=True)
class Target:
    """A public function, and what makes a valid call of it."""

    name: str
    make: Callable[[], Call]
    outputs: frozenset[str]
    """Arguments that are written."""
    synonyms: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """What errors may call an argument besides its name."""

    @functools.cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of all arguments, those without a value in the valid call too."""
        call = self.make()
        known = inspect.signature(call.function).parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return tuple(dict.fromkeys((*(p.name for p in known if p.kind in kinds), *call.arguments)))


TARGETS: dict[str, Target] = {}


def _target(
    name: str, *outputs: str, **synonyms: tuple[str, ...]
) -> Callable[[Callable[[], Call]], Callable[[], Call]]:
    def register(make: Callable[[], Call]) -> Callable[[], Call]:
        TARGETS[name] = Target(name, make, frozenset(outputs), synonyms)
        return make

    return register


# --- parts of calls -------------------------------------------------------------------------------


def _values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    numel = torch.Size(shape).numel()
    return (torch.arange(numel, dtype=torch.float32) % 7 - 3).div(4).view(shape).to(dtype)


def _ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def _table() -> Tensor:
    return torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32)


def _pair(dim: int = D, dim_vo: int = D, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [
        _values(NUM_PAGES, PAGE, HKV, dim, dtype=dtype),
        _values(NUM_PAGES, PAGE, HKV, dim_vo, dtype=dtype),
    ]


def _cache(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    k, v = _pair(dtype=dtype)
    return k, v


SHAPE: Arguments = {"num_qo_heads": HQ, "num_kv_heads": HKV, "head_dim": D, "page_size": PAGE}
MLA: Arguments = {
    "num_heads": HQ,
    "kv_lora_rank": 256,
    "qk_rope_head_dim": 32,
    "page_size": PAGE,
    "sm_scale": 0.25,
}


@functools.cache
def _planner(**arguments: object) -> jitattn.AttentionPlanner:
    return jitattn.AttentionPlanner(**(SHAPE | arguments), device="cpu")  # type: ignore[arg-type]


@functools.cache
def _mla_planner() -> jitattn.MLAPlanner:
    return jitattn.MLAPlanner(**MLA, device="cpu")  # type: ignore[arg-type]


def _block_table() -> pages.BlockTable:
    return pages.BlockTable(_table())


_PLANNER_NAMES = dict.fromkeys(
    ("pages", "qo_indptr", "seq_lens"),
    ("pages", "table", "qo_indptr", "seq_lens", "max_q_len", "max_kv_len"),
)
_SHAPES = ("num_qo_heads", "num_kv_heads", "head_dim", "page_size", "head_dim_vo", "kv_lora_rank")
_CONFIG = {
    "num_qo_heads": ("num_kv_heads",),
    "num_kv_heads": ("num_qo_heads",),
    "num_heads": ("num_qo_heads",),
    "kv_lora_rank": ("head_dim", "qk_rope_head_dim"),
    "qk_rope_head_dim": ("head_dim", "kv_lora_rank"),
    "page_table": ("page_size",),
    "page_size": ("page_table",),
    "device": ("backend",),
    "backend": ("device",),
    "kv_dtype": ("q_dtype",),
    "fp8_products": ("kv_dtype",),
    "q_dtype": ("kv_dtype", "out_dtype"),
    "variant": ("window_left", "logits_soft_cap", "use_sinks", "use_custom_mask"),
}

# --- planners -------------------------------------------------------------------------------------


@_target("AttentionPlanner", **_CONFIG)
def _() -> Call:
    return Call(jitattn.AttentionPlanner, SHAPE | {"device": "cpu"})


@_target("MLAPlanner", **_CONFIG)
def _() -> Call:
    return Call(jitattn.MLAPlanner, MLA | {"num_heads": 16, "device": "cpu"})


@_target("CascadePlanner", **_CONFIG)
def _() -> Call:
    return Call(cascade.CascadePlanner, SHAPE | {"device": "cpu"})


@_target("AttentionPlanner.bind", kv_cache=("k_cache", "v_cache", "kv"))
def _() -> Call:
    return Call(_planner().bind, {"kv_cache": _cache()})


@_target("AttentionPlanner.bind of int8", kv_cache=("k_cache", "v_cache", "kv"))
def _() -> Call:
    cache = tuple(torch.ones(NUM_PAGES, PAGE, HKV, D, dtype=torch.int8) for _ in range(2))
    scales: Arguments = {"k_scale": 0.5, "v_scale": _values(HKV, dtype=torch.float32)}
    return Call(_planner(kv_dtype="int8").bind, {"kv_cache": cache} | scales)


@_target("AttentionPlanner.plan", **_PLANNER_NAMES)
def _() -> Call:
    arguments: Arguments = {
        "pages": _block_table(),
        "seq_lens": _ints(5, 9),
        "qo_indptr": _ints(0, 2, 3),
        "max_q_len": 2,
        "max_kv_len": 12,
    }
    return Call(_planner().plan, arguments)


@_target("AttentionPlanner.workspace_bytes")
def _() -> Call:
    return Call(_planner().workspace_bytes, {"batch_size": 2, "max_q_len": 3})


_RUN = {
    "kv": ("k_cache", "v_cache", "kv_cache", "request"),
    "pages": ("kv", "request", "qo_indptr"),
    "q": ("out", "lse", "custom_mask"),
    "custom_mask": ("mask", "width"),
}


@_target("Plan.run", "out", "lse", **_RUN)
def _() -> Call:
    plan = _planner().plan(_block_table(), _ints(5, 9), _ints(0, 2, 3), max_q_len=2)
    arguments: Arguments = {
        "q": _values(3, HQ, D),
        "kv": _cache(),
        "pages": _block_table(),
        "out": _values(3, HQ, D),
        "lse": torch.zeros(3, HQ),
    }
    return Call(plan.run, arguments)


@_target("Plan.run with everything", **_RUN)
def _() -> Call:
    planner = _planner(use_sinks=True, use_custom_mask=True)
    plan = planner.plan(_block_table(), _ints(5, 9), _ints(0, 2, 3), max_q_len=2)
    arguments: Arguments = {
        "q": _values(3, HQ, D),
        "kv": planner.bind(_cache()),
        "sinks": _values(HQ, dtype=torch.float32),
        "custom_mask": torch.ones(3, 12, dtype=torch.bool),
        "return_lse": True,
    }
    return Call(plan.run, arguments)


@_target("Plan.run of a variant", variant_params=("slopes", "bias", "zero"), **_RUN)
def _() -> Call:
    planner = _planner(variant="relative_bias")
    plan = planner.plan(_block_table(), _ints(5, 9))
    params = {"bias": _values(HQ, 8, dtype=torch.float32), "zero": 3}
    arguments: Arguments = {"q": _values(2, HQ, D), "kv": _cache(), "variant_params": params}
    return Call(plan.run, arguments)


def _fp8_queries(**arguments: object) -> Call:
    fp8 = torch.float8_e4m3fn
    planner = _planner(q_dtype="float8_e4m3fn", kv_dtype="float8_e4m3fn", fp8_products="fast")
    plan = planner.plan(_block_table(), _ints(5, 9), _ints(0, 2, 3), max_q_len=2)
    cache = _cache(dtype=fp8)
    return Call(plan.run, {"q": _values(3, HQ, D, dtype=fp8), "kv": cache, **arguments})


@_target("Plan.run of FP8 queries", "out", "lse", **_RUN)
def _() -> Call:
    q_scale = _values(3, HQ, dtype=torch.float32)
    return _fp8_queries(q_scale=q_scale, out=_values(3, HQ, D), lse=torch.zeros(3, HQ))


@_target("Plan.run of FP8 queries with a scale a head", **_RUN)
def _() -> Call:
    return _fp8_queries(q_scale=_values(HQ, dtype=torch.float32), return_lse=True)


def _index_lists() -> pages.IndexLists:
    return pages.IndexLists(_ints(3, -1, 4, 0, 5, 6).view(2, 3), _ints(3, 1))


_LIST_NAMES = _PLANNER_NAMES | {
    "pages": ("num_tokens", "seq_lens", "numbers", "slots"),
    "seq_lens": ("num_tokens", "pages", "qo_indptr", "max_kv_len"),
}


@_target("AttentionPlanner.plan of lists", **_LIST_NAMES)
def _() -> Call:
    planner = _planner(page_table="indices")
    return Call(planner.plan, {"pages": _index_lists(), "seq_lens": 2})


@_target("AttentionPlanner.plan of lists of pages", **_LIST_NAMES)
def _() -> Call:
    numbers = torch.arange(2, dtype=torch.int32).expand(2, HKV, 2)
    lists = pages.PageLists(numbers.clone(), numbers)
    arguments: Arguments = {
        "pages": lists,
        "seq_lens": _ints(5, 9),
        "qo_indptr": _ints(0, 2, 3),
        "max_q_len": 2,
        "max_kv_len": 12,
    }
    return Call(_planner(page_table="page_lists").plan, arguments)


@_target("Plan.run of lists", "out", "lse", extra=("num_tokens", "kv", "kv_cache"), **_RUN)
def _() -> Call:
    plan = _planner(page_table="indices").plan(_index_lists(), 2)
    arguments: Arguments = {
        "q": _values(2, HQ, D),
        "kv": _cache(),
        "pages": _index_lists(),
        "out": _values(2, HQ, D),
        "lse": torch.zeros(2, HQ),
        "extra": (_index_lists(), _cache()),
    }
    return Call(plan.run, arguments)


@_target("MLAPlanner.bind", kv=("latent", "rope", "kv_cache"))
def _() -> Call:
    config = _mla_planner().config
    return Call(_mla_planner().bind, {"kv": _values(NUM_PAGES, PAGE, config.head_dim)})


@_target(
    "MLAPlan.run",
    "out",
    "lse",
    kv=("kv_cache", "latent", "rope", "request"),
    **{"pages": ("kv", "request"), "q_nope": ("q_pe", "out", "lse"), "q_pe": ("q_nope",)},
)
def _() -> Call:
    config = _mla_planner().config
    plan = _mla_planner().plan(_block_table(), _ints(5, 9))
    heads, latent = config.num_heads, config.kv_lora_rank
    arguments: Arguments = {
        "q_nope": _values(2, heads, latent),
        "q_pe": _values(2, heads, config.qk_rope_head_dim),
        "kv": _values(NUM_PAGES, PAGE, config.head_dim),
        "out": _values(2, heads, latent),
        "lse": torch.zeros(2, heads),
    }
    return Call(plan.run, arguments)


@_target("CascadeLevel", **_PLANNER_NAMES)
def _() -> Call:
    arguments: Arguments = {
        "pages": _block_table(),
        "seq_lens": _ints(5, 9),
        "qo_indptr": _ints(0, 1, 2),
        "max_q_len": 1,
        "max_kv_len": 12,
    }
    return Call(_level, arguments)


def _level(
    pages: object,
    seq_lens: object,
    qo_indptr: object = None,
    max_q_len: object = None,
    max_kv_len: object = None,
) -> object:
    level = cascade.CascadeLevel(pages, seq_lens, qo_indptr, max_q_len, max_kv_len)  # type: ignore[arg-type]
    _cascade_planner().plan([level])
    return None


@functools.cache
def _cascade_planner() -> cascade.CascadePlanner:
    return cascade.CascadePlanner(**SHAPE, device="cpu")  # type: ignore[arg-type]


def _levels() -> list[cascade.CascadeLevel]:
    shared = pages.BlockTable(torch.tensor([[0, 1]], dtype=torch.int32))
    own = pages.BlockTable(torch.tensor([[2, 3], [4, 5]], dtype=torch.int32))
    return [
        cascade.CascadeLevel(shared, _ints(8), _ints(0, 2), max_q_len=2),
        cascade.CascadeLevel(own, _ints(3, 5)),
    ]


@_target("CascadePlanner.plan", levels=("level",))
def _() -> Call:
    return Call(_cascade_planner().plan, {"levels": _levels()})


@_target("CascadePlan.run", "out", "lse", **_RUN)
def _() -> Call:
    plan = _cascade_planner().plan(_levels())
    arguments: Arguments = {
        "q": _values(2, HQ, D),
        "kv": _cache(),
        "out": _values(2, HQ, D),
        "lse": torch.zeros(2, HQ),
    }
    return Call(plan.run, arguments)


@_target(
    "attention",
    q=("head_dim", "num_qo_heads"),
    kv_cache=("k_cache", "v_cache", "kv", *_SHAPES, "kv_dtype", "q_dtype", "seq_lens", "request"),
    **{
        **_PLANNER_NAMES,
        "pages": ("kv_cache", "seq_lens", "table", "request", "page_table"),
        "custom_mask": ("mask",),
        "kv_layout": ("num_kv_heads", "page_size", "seq_lens"),
    },
)
def _() -> Call:
    arguments: Arguments = {
        "q": _values(3, HQ, D),
        "kv_cache": _cache(),
        "pages": _block_table(),
        "seq_lens": _ints(5, 9),
        "qo_indptr": _ints(0, 2, 3),
        "max_q_len": 2,
        "return_lse": True,
    }
    return Call(jitattn.attention, arguments)


# --- around the kernels ---------------------------------------------------------------------------

_TOKENS = ("pages", "seq_lens", "slots", "qo_indptr", "num_tokens")
_APPEND = {
    "pages": (*_TOKENS, "table", "request", "kv_cache"),
    "seq_lens": (*_TOKENS, "request"),
    "qo_indptr": _TOKENS,
    "slots": _TOKENS,
    "kv_cache": ("k_cache", "v_cache", "kv", "k", "slots", "pages", "kv_dtype", "cache"),
    "kv_layout": ("k_cache", "v_cache", "kv_cache", "slots", "pages", "seq_lens"),
    "kv_dtype": ("kv_cache", "k_cache"),
    "k": ("v", "kv_cache", "qo_indptr", "seq_lens"),
    "zero_tail": ("slots", "pages"),
}


@_target("append_kv", "kv_cache", **_APPEND)
def _() -> Call:
    arguments: Arguments = {
        "k": _values(3, HKV, D),
        "v": _values(3, HKV, D),
        "kv_cache": _cache(),
        "pages": _block_table(),
        "seq_lens": _ints(5, 9),
        "qo_indptr": _ints(0, 2, 3),
    }
    return Call(jitattn.append_kv, arguments)


@_target("append_kv at slots", "kv_cache", **_APPEND)
def _() -> Call:
    arguments: Arguments = {
        "k": _values(3, HKV, D),
        "v": _values(3, HKV, D),
        "kv_cache": _cache(torch.float8_e4m3fn),
        "slots": _ints(3, -1, 9),
        "k_scale": 0.5,
        "v_scale": _values(HKV, dtype=torch.float32).abs() + 1,
    }
    return Call(jitattn.append_kv, arguments)


_PREPROCESS = _APPEND | {
    "qkv": ("q", "k", "v", "num_qo_heads", "head_dim", "qo_indptr", "seq_lens", "bias"),
    "num_qo_heads": ("qkv", "q", "num_kv_heads"),
    "num_kv_heads": ("qkv", "k", "v", "num_qo_heads", "kv_cache", "k_cache"),
    "head_dim": ("qkv", "q", "rope", "q_norm"),
    "rope": ("positions", "head_dim"),
    "bias": ("q_bias", "k_bias", "v_bias"),
    "positions": ("rope", "position_delta"),
    "position_delta": ("positions", "rope"),
    "q_norm": ("k_norm",),
    "k_norm": ("q_norm",),
}


@_target("preprocess_qkv", "kv_cache", "q_out", **_PREPROCESS)
def _() -> Call:
    arguments: Arguments = {
        "qkv": _values(3, (HQ + 2 * HKV) * D),
        "kv_cache": _cache(),
        "num_qo_heads": HQ,
        "num_kv_heads": HKV,
        "head_dim": D,
        "pages": _block_table(),
        "seq_lens": _ints(5, 9),
        "qo_indptr": _ints(0, 2, 3),
        "rope": jitattn.Rope(D),
        "q_out": _values(3, HQ, D),
        "q_norm": _values(D),
        "k_norm": _values(D),
        "norm_eps": 1e-5,
        "bias": _values((HQ + 2 * HKV) * D),
        "qk_transform": "hadamard",
    }
    return Call(jitattn.preprocess_qkv, arguments)


@_target("preprocess_qkv of parts", "kv_cache", **_PREPROCESS)
def _() -> Call:
    arguments: Arguments = {
        "qkv": (_values(3, HQ, D), _values(3, HKV, D), _values(3, HKV, D)),
        "kv_cache": _cache(),
        "num_qo_heads": HQ,
        "num_kv_heads": HKV,
        "head_dim": D,
        "slots": _ints(3, -1, 9),
        "rope": jitattn.Rope(D),
        "positions": _ints(0, 5, 7, dtype=torch.int64),
        "v_transform": "hadamard",
    }
    return Call(jitattn.preprocess_qkv, arguments)


@_target("merge_states", outs=("lses",))
def _() -> Call:
    arguments: Arguments = {
        "outs": _values(2, 3, HQ, D),
        "lses": _values(2, 3, HQ, dtype=torch.float32),
        "base": 2,
    }
    return Call(jitattn.merge_states, arguments)


@_target(
    "gather_kv",
    "out",
    kv=("out", "k_cache", "v_cache", "kv_cache", "request", "kv_dtype"),
    **{
        "pages": ("request", "seq_lens", "kv", "table"),
        "seq_lens": ("request", "pages", "out"),
        "kv_layout": ("kv", "seq_lens", "request", "out"),
        "out_dtype": ("out",),
    },
)
def _() -> Call:
    arguments: Arguments = {
        "kv": _cache(),
        "pages": _block_table(),
        "seq_lens": _ints(5, 9),
        "out": (_values(14, HKV, D), _values(14, HKV, D), _ints(0, 0, 0)),
    }
    return Call(jitattn.gather_kv, arguments)


@_target(
    "gather_kv of int8",
    kv=("k_cache", "v_cache", "kv_cache", "request"),
    **{
        "pages": ("request", "seq_lens", "kv", "table"),
        "seq_lens": ("request", "pages"),
        "kv_layout": ("kv", "seq_lens", "request"),
    },
)
def _() -> Call:
    cache = tuple(torch.ones(NUM_PAGES, PAGE, HKV, D, dtype=torch.int8) for _ in range(2))
    arguments: Arguments = {
        "kv": cache,
        "pages": _block_table(),
        "seq_lens": _ints(5, 9),
        "k_scale": 0.5,
        "out_dtype": "float32",
    }
    return Call(jitattn.gather_kv, arguments)


@_target("copy_pages", "dst", src=("dst", "pairs"), dst=("src", "pairs"), pairs=("src", "dst"))
def _() -> Call:
    pairs = torch.tensor([[0, 1], [-1, 2], [3, 0]], dtype=torch.int64)
    arguments: Arguments = {"src": list(_cache()), "dst": list(_cache()), "pairs": pairs}
    return Call(jitattn.copy_pages, arguments)


@_target(
    "build_block_table",
    "out",
    seq_lens=("out", "slots", "request"),
    page_size=("request", "slots", "out"),
    slots=("request", "rows", "seq_lens", "slot_map"),
    kv_start=("out",),
    slot_map=("request", "slots"),
    rows=("slots", "request"),
)
def _() -> Call:
    slots = torch.arange(24).view(2, 12)
    arguments: Arguments = {
        "slots": slots,
        "seq_lens": _ints(5, 9),
        "page_size": PAGE,
        "rows": _ints(0, 1),
        "kv_start": _ints(0, 4),
        "slot_map": torch.arange(24),
        "out": _table(),
    }
    return Call(jitattn.build_block_table, arguments)


_BATCH_INFO = {
    "seq_lens": ("q_lens", "pages", "request"),
    "q_lens": ("num_tokens",),
    "num_tokens": ("q_lens", "out"),
    "pages": ("out", "page_size", "request", "seq_lens"),
    "page_size": ("pages", "seq_lens", "request"),
}


@_target("batch_info", **_BATCH_INFO)
def _() -> Call:
    arguments: Arguments = {
        "seq_lens": _ints(5, 9),
        "q_lens": _ints(2, 1),
        "num_tokens": 4,
        "pages": _block_table(),
        "page_size": PAGE,
    }
    return Call(jitattn.batch_info, arguments)


@_target("batch_info in place", "out", **_BATCH_INFO)
def _() -> Call:
    out = jitattn.batch_info(_ints(5, 9), _ints(2, 1), num_tokens=4)
    arguments: Arguments = {
        "seq_lens": _ints(5, 9),
        "q_lens": _ints(2, 1),
        "num_tokens": 4,
        "out": out,
    }
    return Call(jitattn.batch_info, arguments)


# --- choices of what is read ----------------------------------------------------------------------

_ROWS = {
    "pages": ("seq_lens", "request", "page_size", "q", "logits", "qo_indptr"),
    "seq_lens": ("pages", "request", "q"),
    "qo_indptr": ("q", "max_q_len", "out"),
    "max_q_len": ("qo_indptr",),
    "max_kv_len": ("seq_lens", "out"),
    "page_size": ("seq_lens", "logits", "bounds", "pages", "request"),
}


@_target(
    "index_logits",
    "out",
    **_ROWS
    | {
        "q": ("weights", "k_cache", "num_heads", "head_dim", "out"),
        "k_cache": ("request", "seq_lens"),
        "scale_layout": ("k_cache",),
    },
)
def _() -> Call:
    arguments: Arguments = {
        "q": _values(3, HQ, 32, dtype=torch.float8_e4m3fn),
        "weights": _values(3, HQ, dtype=torch.float32),
        "k_cache": torch.zeros(NUM_PAGES, PAGE, 36, dtype=torch.uint8),
        "pages": _block_table(),
        "seq_lens": _ints(5, 9),
        "qo_indptr": _ints(0, 2, 3),
        "max_q_len": 2,
        "max_kv_len": 12,
        "out": torch.zeros(3, 12),
    }
    return Call(jitattn.index_logits, arguments)


@_target(
    "select_tokens",
    "out",
    **_ROWS | {"logits": ("q", "seq_lens", "out", "page_size"), "k": ("out",)},
)
def _() -> Call:
    arguments: Arguments = {
        "logits": _values(3, 12, dtype=torch.float32),
        "pages": _block_table(),
        "seq_lens": _ints(5, 9),
        "k": 4,
        "qo_indptr": _ints(0, 2, 3),
        "max_q_len": 2,
        "page_size": PAGE,
        "out": pages.IndexLists(torch.zeros(3, 4, dtype=torch.int32), _ints(0, 0, 0)),
    }
    return Call(jitattn.select_tokens, arguments)


@_target(
    "page_bounds",
    "out",
    **_ROWS | {"kv_cache": ("request", "out"), "kv_layout": ("kv_cache", "seq_lens", "out")},
)
def _() -> Call:
    arguments: Arguments = {
        "kv_cache": _cache(),
        "pages": _block_table(),
        "seq_lens": _ints(5, 9),
        "qo_indptr": _ints(0, 2, 3),
        "max_q_len": 2,
        "max_kv_len": 12,
        "out": _values(NUM_PAGES, 2, HKV, D),
    }
    return Call(jitattn.page_bounds, arguments)


@_target(
    "select_pages",
    "out",
    **_ROWS | {"q": ("bounds", "head_dim"), "bounds": ("q", "request", "head_dim"), "k": ("out",)},
)
def _() -> Call:
    lists = torch.zeros(2, HKV, 3, dtype=torch.int32)
    numbers = torch.arange(3, dtype=torch.int32).expand(2, HKV, 3).clone()
    arguments: Arguments = {
        "q": _values(2, HQ, D),
        "bounds": _values(NUM_PAGES, 2, HKV, D),
        "pages": _block_table(),
        "seq_lens": _ints(5, 9),
        "k": 3,
        "page_size": PAGE,
        "max_kv_len": 12,
        "out": pages.PageLists(lists, numbers, torch.zeros(2, HKV, dtype=torch.int32)),
    }
    return Call(jitattn.select_pages, arguments)


@_target(
    "convert_pages",
    page_size=("pages", "seq_lens", "request", "slot"),
    layout=("pages",),
    **{"seq_lens": ("pages", "request"), "max_kv_len": ("seq_lens", "pages")},
)
def _() -> Call:
    arguments: Arguments = {
        "pages": _block_table(),
        "layout": "csr",
        "page_size": PAGE,
        "seq_lens": _ints(5, 9),
        "max_kv_len": 12,
    }
    return Call(pages.convert_pages, arguments)


@_target("BlockTable", table=("rows",))
def _() -> Call:
    return Call(pages.BlockTable, {"table": _table(), "rows": _ints(1, 0)})


@_target("CsrPages", kv_indptr=("kv_indices",))
def _() -> Call:
    return Call(pages.CsrPages, {"kv_indptr": _ints(0, 2, 5), "kv_indices": _ints(0, 1, 2, 3, 4)})


@_target("TokenTable", slots=("rows",))
def _() -> Call:
    return Call(pages.TokenTable, {"slots": _table(), "rows": _ints(1, 0)})


@_target("RaggedKV")
def _() -> Call:
    return Call(pages.RaggedKV, {"kv_indptr": _ints(0, 5, 9)})


@_target("IndexLists", slots=("counts",))
def _() -> Call:
    return Call(pages.IndexLists, {"slots": _table(), "counts": _ints(3, 1)})


@_target("PageLists", **dict.fromkeys(("pages", "numbers"), ("pages", "numbers", "counts")))
def _() -> Call:
    arguments: Arguments = {
        "pages": torch.tensor([[[3, 1, 2], [0, 5, 4]]], dtype=torch.int32),
        "numbers": torch.tensor([[[0, 2, 3], [0, 1, 6]]], dtype=torch.int32),
        "counts": torch.tensor([[3, 2]], dtype=torch.int32),
    }
    return Call(pages.PageLists, arguments)


@_target(
    "QuantizedKV",
    **dict.fromkeys(
        ("k", "v", "k_block_scales", "v_block_scales"),
        ("k", "v", "k_block_scales", "v_block_scales"),
    ),
)
def _() -> Call:
    stored, scales = quant.quantize_kv(_values(NUM_PAGES, PAGE, HKV, D), "nvfp4")
    arguments: Arguments = {
        "k": stored,
        "v": stored.clone(),
        "k_block_scales": scales,
        "v_block_scales": scales.clone(),
    }
    return Call(quant.QuantizedKV, arguments)


@_target("quantize_kv", values=("scale",), dtype=("scale", "values"))
def _() -> Call:
    arguments: Arguments = {"values": _values(3, HKV, D), "dtype": "float8_e4m3fn", "scale": 0.5}
    return Call(quant.quantize_kv, arguments)


@_target(
    "dequantize_kv",
    stored=("scale", "block_scales", "dtype"),
    dtype=("stored", "scale", "block_scales"),
    block_scales=("stored",),
    scale=("stored",),
)
def _() -> Call:
    stored = _values(3, HKV, D).to(torch.float8_e4m3fn).view(torch.uint8)
    scale = torch.ones(HKV)
    return Call(quant.dequantize_kv, {"stored": stored, "dtype": "float8_e4m3fn", "scale": scale})


@_target("Workspace")
def _() -> Call:
    return Call(jitattn.Workspace, {"device": "cpu"})


@_target("build_info")
def _() -> Call:
    return Call(jitattn.build_info, {"planner": _planner()})


# --- values ---------------------------------------------------------------------------------------


@_target(
    "Rope",
    rotary_dim=("head_dim", "mrope_section"),
    head_dim=("rotary_dim", "mrope_section"),
    scaling=("rope_type", "factor", "base"),
    base=("scaling", "frequencies"),
    max_position=("scaling",),
    mrope_interleaved=("mrope_section",),
    mrope_section=("mrope_",),
)
def _() -> Call:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    arguments: Arguments = {
        "head_dim": 64,
        "rotary_dim": 32,
        "base": 1e4,
        "scaling": yarn,
        "max_position": 16384,
        "mrope_section": [8, 4, 4],
    }
    return Call(jitattn.Rope, arguments)


def _rope(kind: str, key: str, value: object) -> object:
    """Make a Rope with one key of a scaling replaced."""
    scalings: dict[str, Arguments] = {
        "linear": {"factor": 2.0},
        "dynamic": {"factor": 2.0, "original_max_position_embeddings": 1024},
        "llama3": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "yarn": {
            "factor": 4.0,
            "original_max_position_embeddings": 4096,
            "truncate": True,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "attention_factor": 1.0,
        },
        "longrope": {
            "factor": 2.0,
            "original_max_position_embeddings": 4096,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "attention_factor": 1.0,
        },
    }
    scaling = {"rope_type": kind} | scalings[kind] | {key: value}
    return jitattn.Rope(16, scaling=scaling, max_position=8192)


_VALID: Arguments = {
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 512,
    "truncate": False,
    "high_freq_factor": 4.0,
    "beta_fast": 32,
}

for _kind, _keys in (
    ("linear", ("factor",)),
    ("llama3", ("factor", "low_freq_factor", "high_freq_factor")),
    ("dynamic", ("factor", "original_max_position_embeddings")),
    (
        "yarn",
        (
            "factor",
            "original_max_position_embeddings",
            "truncate",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "attention_factor",
        ),
    ),
    (
        "longrope",
        (
            "factor",
            "original_max_position_embeddings",
            "short_factor",
            "long_factor",
            "attention_factor",
        ),
    ),
):
    for _key in _keys:

        def _make(kind: str = _kind, key: str = _key) -> Call:
            valid: object = _VALID.get(key, 1.0)
            return Call(lambda value: _rope(kind, key, value), {"value": valid})

        _target(f"Rope of {_kind}, {_key}", value=(_key, "scaling"))(_make)


@_target(
    "Rope.from_hf_config",
    config=("head_dim", "hidden_size", "model_type", "rope", "num_"),
    layer_type=("config",),
)
def _() -> Call:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "rope_theta": 1e4,
        "max_position_embeddings": 4096,
    }
    return Call(jitattn.Rope.from_hf_config, {"config": config})


@_target("AttentionVariant", logits_transform=("variant",), params=("variant", "type"))
def _() -> Call:
    arguments: Arguments = {
        "name": "mine",
        "logits_transform": "logit * params.x",
        "params": {"x": "float"},
    }
    return Call(variants.AttentionVariant, arguments)


@_target("alibi_slopes")
def _() -> Call:
    return Call(variants.alibi_slopes, {"num_qo_heads": 6, "device": "cpu"})


@_target("t5_bias", weight=("max_distance",), max_distance=("weight", "bucket"))
def _() -> Call:
    arguments: Arguments = {
        "weight": _values(32, 4, dtype=torch.float32),
        "bidirectional": False,
        "max_distance": 128,
    }
    return Call(variants.t5_bias, arguments)


def _checked(**arguments: object) -> object:
    """``check_config``, whose answer says what an error would."""
    support = jitattn.check_config(**arguments)  # type: ignore[arg-type]
    if not support.supported:
        raise jitattn.ConfigError(support.reasons)
    return support


@_target("check_config", **_CONFIG, planner=("page_size", "head"))
def _() -> Call:
    return Call(
        _checked,
        SHAPE
        | {
            "arch": "sm_90a",
            "window_left": -1,
            "sm_scale": 1.0,
            "causal": True,
            "q_dtype": "float16",
            "kv_dtype": "float16",
            "variant": None,
            "kv_layout": "NHD",
            "page_table": "shared",
            "num_sms": 4,
            "logits_soft_cap": 0.0,
        },
    )


@_target("supported_configs")
def _() -> Call:
    return Call(jitattn.supported_configs, {"arch": "sm_90a"})


# --- the page manager -----------------------------------------------------------------------------


@_target("LayerConfig", dtype=("head dims",), head_dim=("head dims",), head_dim_vo=("head dims",))
def _() -> Call:
    arguments: Arguments = {
        "layer_id": 0,
        "num_kv_heads": 2,
        "head_dim": 16,
        "dtype": "nvfp4",
        "window_left": 7,
        "head_dim_vo": 32,
    }
    return Call(LayerConfig, arguments)


def _layers() -> list[LayerConfig]:
    windows = (-1, 7)
    return [
        LayerConfig(layer_id=i, num_kv_heads=2, head_dim=16, window_left=window)
        for i, window in enumerate(windows)
    ]


@_target("KVCacheConfig", page_size=("layer",))
def _() -> Call:
    arguments: Arguments = {
        "page_size": PAGE,
        "gpu_bytes": 2**16,
        "layers": _layers(),
        "host_bytes": 2**14,
        "reuse_scratch": True,
        "max_rewind_len": 2,
        "typical_len": 64,
    }
    return Call(KVCacheConfig, arguments)


def _config() -> KVCacheConfig:
    return KVCacheConfig(
        page_size=PAGE, gpu_bytes=2**16, layers=_layers(), host_bytes=2**14, reuse_scratch=True
    )


def _manager() -> KVCacheManager:
    return KVCacheManager(_config(), device="cpu")


@_target("KVCacheManager", config=("page", "bytes"))
def _() -> Call:
    return Call(KVCacheManager, {"config": _config(), "device": "cpu"})


@_target(
    "KVCacheManager of sizes",
    **dict.fromkeys(
        ("page_size", "gpu_bytes", "host_bytes", "typical_len", "max_rewind_len"),
        ("gpu_bytes", "layer", "page_size", "host_bytes"),
    ),
)
def _() -> Call:
    def make(
        page_size: object,
        gpu_bytes: object,
        host_bytes: object,
        typical_len: object,
        max_rewind_len: object,
    ) -> object:
        config = KVCacheConfig(
            page_size=page_size,
            gpu_bytes=gpu_bytes,
            host_bytes=host_bytes,
            layers=_layers(),  # type: ignore[arg-type]
            typical_len=typical_len,
            max_rewind_len=max_rewind_len,  # type: ignore[arg-type]
        )
        return KVCacheManager(config).stats()

    return Call(
        make,
        {
            "page_size": PAGE,
            "gpu_bytes": 2**16,
            "host_bytes": 2**14,
            "typical_len": 64,
            "max_rewind_len": 0,
        },
    )


def _active() -> tuple[KVCacheManager, list[object]]:
    manager = _manager()
    seqs = []
    for _ in range(2):
        seq = manager.create_sequence()
        assert seq.resume() and seq.resize(8)
        seqs.append(seq)
    return manager, seqs  # type: ignore[return-value]


@_target("KVCacheManager.create_sequence")
def _() -> Call:
    manager, _ = _active()
    arguments: Arguments = {
        "prompt": torch.arange(9),
        "priority": 35,
        "reuse_scratch": True,
        "reuse_scope": "a",
    }
    return Call(manager.create_sequence, arguments, manager)


@_target(
    "KVCacheManager.advance", new_tokens=("tokens", "sequence", "capacity"), seqs=("sequence",)
)
def _() -> Call:
    manager, seqs = _active()
    arguments: Arguments = {"seqs": seqs, "new_tokens": [[1], [2]], "num_inputs": 1}
    return Call(manager.advance, arguments, manager)


@_target("KVCacheManager.layer_view")
def _() -> Call:
    manager, _ = _active()
    return Call(manager.layer_view, {"layer_id": 0, "mode": PageIndexMode.PER_LAYER}, manager)


@_target("KVCacheManager.block_tables", "out", seqs=("sequence",))
def _() -> Call:
    manager, seqs = _active()
    out = torch.zeros(1, 3, 4, dtype=torch.int32)
    return Call(manager.block_tables, {"seqs": seqs, "group": 0, "out": out}, manager)


@_target("KVCacheManager.supports_index_mode")
def _() -> Call:
    return Call(_active()[0].supports_index_mode, {"mode": PageIndexMode.SHARED})


@_target("KVCacheManager.regions")
def _() -> Call:
    return Call(_active()[0].regions, {"group": 0})


@_target("LayerView.block_table", "out", seqs=("sequence", "out", "rows"), rows=("out",))
def _() -> Call:
    manager, seqs = _active()
    view = manager.layer_view(0, PageIndexMode.PER_LAYER)
    out = torch.zeros(3, 4, dtype=torch.int32)
    return Call(view.block_table, {"seqs": seqs, "rows": [2, 0], "out": out}, manager)


def _sequence_target(method: str, arguments: Arguments, **synonyms: tuple[str, ...]) -> None:
    def make() -> Call:
        manager, seqs = _active()
        return Call(getattr(seqs[0], method), dict(arguments), manager)

    _target(f"KVSequence.{method}", **synonyms)(make)


_sequence_target("base_page_ids", {"group": 0})
_sequence_target("scratch", {"group": 0})
_sequence_target("supports_index_mode", {"mode": PageIndexMode.SHARED})
_sequence_target(
    "resize",
    {"capacity": 9, "history_len": 3},
    capacity=("history",),
    history_len=("history", "capacity"),
)
_sequence_target("commit", {"tokens": [1, 2, 3]}, tokens=("sequence",))
_sequence_target("rewind", {"n": 2}, n=("sequence", "rewind"))
_sequence_target("pin", {"group": 0})

# --- as others call it ----------------------------------------------------------------------------


@_target(
    "flash_attn_varlen_func",
    **dict.fromkeys(
        ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
        (
            "q",
            "k",
            "v",
            "cu_seqlens_q",
            "cu_seqlens_k",
            "max_seqlen_q",
            "max_seqlen_k",
            "head_dim",
            "nheads",
            "request",
        ),
    ),
)
def _() -> Call:
    arguments: Arguments = {
        "q": _values(3, HQ, D),
        "k": _values(14, HKV, D),
        "v": _values(14, HKV, D),
        "cu_seqlens_q": _ints(0, 2, 3),
        "cu_seqlens_k": _ints(0, 5, 14),
        "max_seqlen_q": 2,
        "max_seqlen_k": 9,
        "causal": True,
    }
    return Call(flash_attn.flash_attn_varlen_func, arguments)


_FLASH = (
    "q",
    "k",
    "v",
    "k_cache",
    "v_cache",
    "cache_seqlens",
    "block_table",
    "head_dim",
    "nheads",
    "rotary_cos",
    "rotary_sin",
    "request",
    "pages",
    "cache_batch_idx",
)


@_target("flash_attn_with_kvcache", "k_cache", "v_cache", **dict.fromkeys(_FLASH, _FLASH))
def _() -> Call:
    k_cache, v_cache = _cache()
    arguments: Arguments = {
        "q": _values(2, 1, HQ, D),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "k": _values(2, 1, HKV, D),
        "v": _values(2, 1, HKV, D),
        "cache_seqlens": _ints(5, 9),
        "block_table": _table(),
        "causal": True,
        "return_softmax_lse": True,
    }
    return Call(flash_attn.flash_attn_with_kvcache, arguments)


@_target(
    "flashinfer.merge_state",
    **dict.fromkeys(("v_a", "s_a", "v_b", "s_b"), ("v_a", "s_a", "v_b", "s_b")),
)
def _() -> Call:
    v, s = _values(3, HQ, D), _values(3, HQ, dtype=torch.float32)
    return Call(flashinfer.merge_state, {"v_a": v, "s_a": s, "v_b": v.clone(), "s_b": s.clone()})


@_target(
    "flashinfer.merge_state_in_place",
    "v",
    "s",
    **dict.fromkeys(("v", "s", "v_other", "s_other"), ("v", "s", "v_other", "s_other", "mask")),
)
def _() -> Call:
    v, s = _values(3, HQ, D), _values(3, HQ, dtype=torch.float32)
    arguments: Arguments = {
        "v": v,
        "s": s,
        "v_other": v.clone() + 1,
        "s_other": s.clone() + 1,
        "mask": torch.tensor([True, False, True]),
    }
    return Call(flashinfer.merge_state_in_place, arguments)


@_target("flashinfer.merge_states", v=("s",))
def _() -> Call:
    v, s = _values(3, 2, HQ, D), _values(3, 2, HQ, dtype=torch.float32)
    return Call(flashinfer.merge_states, {"v": v, "s": s})


_CSR = (
    "kv_indices",
    "kv_indptr",
    "kv_last_page_len",
    "batch_indices",
    "positions",
    "indptr",
    "append_key",
    "append_value",
    "paged_kv_cache",
    "k_cache",
    "kv_layout",
    "v_cache",
    "slots",
    "append_ckv",
    "append_kpe",
    "ckv_cache",
    "kpe_cache",
)


@_target("flashinfer.append_paged_kv_cache", "paged_kv_cache", **dict.fromkeys(_CSR, _CSR))
def _() -> Call:
    arguments: Arguments = {
        "append_key": _values(3, HKV, D),
        "append_value": _values(3, HKV, D),
        "batch_indices": _ints(0, 0, 1),
        "positions": _ints(3, 4, 8),
        "paged_kv_cache": _cache(),
        "kv_indices": _ints(0, 1, 2, 3, 4),
        "kv_indptr": _ints(0, 2, 5),
        "kv_last_page_len": _ints(1, 1),
    }
    return Call(flashinfer.append_paged_kv_cache, arguments)


@_target(
    "flashinfer.append_paged_mla_kv_cache", "ckv_cache", "kpe_cache", **dict.fromkeys(_CSR, _CSR)
)
def _() -> Call:
    arguments: Arguments = {
        "append_ckv": _values(3, 32),
        "append_kpe": _values(3, 16),
        "batch_indices": _ints(0, 0, 1),
        "positions": _ints(3, 4, 8),
        "ckv_cache": _values(NUM_PAGES, PAGE, 32),
        "kpe_cache": _values(NUM_PAGES, PAGE, 16),
        "kv_indices": _ints(0, 1, 2, 3, 4),
        "kv_indptr": _ints(0, 2, 5),
        "kv_last_page_len": _ints(1, 1),
    }
    return Call(flashinfer.append_paged_mla_kv_cache, arguments)


@_target(
    "flashinfer.get_batch_indices_positions",
    "batch_indices",
    "positions",
    append_indptr=("seq_lens", "nnz"),
    nnz=("append_indptr", "batch_indices", "positions"),
)
def _() -> Call:
    arguments: Arguments = {
        "append_indptr": _ints(0, 2, 3),
        "seq_lens": _ints(5, 9),
        "nnz": 4,
        "batch_indices": _ints(0, 0, 0, 0),
        "positions": _ints(0, 0, 0, 0),
    }
    return Call(flashinfer.get_batch_indices_positions, arguments)


@_target("flashinfer.get_seq_lens", kv_indptr=("kv_last_page_len",))
def _() -> Call:
    arguments: Arguments = {
        "kv_indptr": _ints(0, 2, 5),
        "kv_last_page_len": _ints(1, 1),
        "page_size": PAGE,
    }
    return Call(flashinfer.get_seq_lens, arguments)


_DECODE = (
    "indptr",
    "indices",
    "last_page_len",
    "page_size",
    "num_qo_heads",
    "num_kv_heads",
    "head_dim",
    "seq_lens",
    "block_tables",
    "q_len_per_req",
    "is_causal",
    "q_data_type",
    "kv_data_type",
    "o_data_type",
    "data_type",
    "q_dtype",
    "kv_dtype",
    "out_dtype",
)


def _decode_wrapper() -> flashinfer.BatchDecodeWithPagedKVCacheWrapper:
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(16, dtype=torch.uint8))


def _decode_arguments() -> Arguments:
    return {
        "indptr": _ints(0, 2, 5),
        "indices": _ints(0, 1, 2, 3, 4),
        "last_page_len": _ints(1, 1),
        "num_qo_heads": HQ,
        "num_kv_heads": HKV,
        "head_dim": D,
        "page_size": PAGE,
        "q_data_type": "bfloat16",
    }


@_target(
    "flashinfer decode plan",
    **dict.fromkeys(_DECODE, _DECODE),
    rope_scale=("rope",),
    rope_theta=("rope",),
)
def _() -> Call:
    return Call(_decode_wrapper().plan, _decode_arguments())


@_target(
    "flashinfer decode run",
    "out",
    "lse",
    paged_kv_cache=("kv", "k_cache", "v_cache"),
    q=("out", "lse"),
    window_left=("plan",),
)
def _() -> Call:
    wrapper = _decode_wrapper()
    wrapper.plan(**_decode_arguments())  # type: ignore[arg-type]
    arguments: Arguments = {
        "q": _values(2, HQ, D),
        "paged_kv_cache": _cache(),
        "out": _values(2, HQ, D),
        "lse": torch.zeros(2, HQ),
        "return_lse": True,
    }
    return Call(wrapper.run, arguments)


_TRTLLM = (
    "query",
    "out_dtype",
    "q",
    "kv_cache",
    "block_tables",
    "seq_lens",
    "max_seq_len",
    "kv_layout",
    "out",
    "q_len_per_req",
    "max_q_len",
    "cum_seq_lens_q",
    "head_dim",
    "num_qo_heads",
    "num_kv_heads",
    "page_size",
    "request",
    "k_cache",
    "v_cache",
    "bmm1_scale",
    "bmm2_scale",
    "uses_shared_paged_kv_idx",
)


@_target(
    "flashinfer.trtllm_batch_decode_with_kv_cache", "out", "lse", **dict.fromkeys(_TRTLLM, _TRTLLM)
)
def _() -> Call:
    arguments: Arguments = {
        "query": _values(2, HQ, D),
        "kv_cache": _cache(),
        "workspace_buffer": torch.zeros(8, dtype=torch.uint8),
        "block_tables": _table(),
        "seq_lens": _ints(5, 9),
        "max_seq_len": 12,
        "kv_layout": "NHD",
        "out": _values(2, HQ, D),
        "bmm1_scale": 0.25,
    }
    return Call(flashinfer.trtllm_batch_decode_with_kv_cache, arguments)


@_target(
    "trtllm.block_table",
    block_offsets=("pool_idx", "seq_offset", "batch_size"),
    seq_offset=("batch_size",),
)
def _() -> Call:
    arguments: Arguments = {
        "block_offsets": torch.zeros(2, 3, 2, 4, dtype=torch.int32),
        "pool_idx": 1,
        "seq_offset": 1,
        "batch_size": 2,
    }
    return Call(trtllm.block_table, arguments)


@_target(
    "trtllm.check_block_offsets",
    **dict.fromkeys(
        (
            "block_offsets",
            "seq_lens",
            "tokens_per_block",
            "num_blocks",
            "kv_start",
            "uses_shared_paged_kv_idx",
        ),
        ("block_offsets", "seq_lens", "sequence"),
    ),
)
def _() -> Call:
    offsets = torch.tensor([[[0, 2, 4], [1, 3, 5]], [[6, 8, 9], [7, 9, 10]]], dtype=torch.int32)
    arguments: Arguments = {
        "block_offsets": offsets,
        "seq_lens": _ints(5, 9),
        "tokens_per_block": PAGE,
        "num_blocks": 12,
        "kv_start": _ints(0, 4),
    }
    return Call(trtllm.check_block_offsets, arguments)


_POOL = (
    "pool",
    "num_blocks",
    "layer_idx",
    "num_kv_heads",
    "tokens_per_block",
    "head_dim",
    "kv_factor",
    "dtype",
    "device",
)


@_target(
    "trtllm.layer_pool",
    **dict.fromkeys(_POOL, _POOL),
    scale_layout=("scale",),
    scale_pool=("scale",),
)
def _() -> Call:
    arguments: Arguments = {
        "pool": _values(2 * 3 * 2 * HKV * PAGE * D),
        "layer_idx": 1,
        "num_kv_heads": HKV,
        "tokens_per_block": PAGE,
        "head_dim": D,
    }
    return Call(trtllm.layer_pool, arguments)


_MAPPING = ("host_kv_cache_pool_pointers", "host_kv_cache_pool_mapping", "layer_idx", "pool")


@_target("trtllm.pool_of_layer", **dict.fromkeys(_MAPPING, _MAPPING))
def _() -> Call:
    arguments: Arguments = {
        "host_kv_cache_pool_pointers": torch.tensor([[4096, 0]], dtype=torch.int64),
        "host_kv_cache_pool_mapping": torch.tensor([[0, 0], [0, 1]], dtype=torch.int32),
        "layer_idx": 1,
    }
    return Call(trtllm.pool_of_layer, arguments)


# --- several ranks --------------------------------------------------------------------------------


def _context() -> ContextParallel:
    """Of the one process whose group a test has initialised."""
    return ContextParallel(page_size=PAGE)


@_target("ContextParallel")
def _context_parallel() -> Call:
    return Call(ContextParallel, {"interleave": 2, "page_size": PAGE})


@_target("ContextParallel.local_lens")
def _local_lens() -> Call:
    return Call(_context().local_lens, {"seq_lens": _ints(9, 5)})


@_target("ContextParallel.local_slots")
def _local_slots() -> Call:
    return Call(_context().local_slots, {"slots": _ints(3, 17, -1)})


@_target("ContextParallel.local_table")
def _local_table() -> Call:
    return Call(_context().local_table, {"table": pages.BlockTable(_table())})


@_target("ContextParallel.plan")
def _context_plan() -> Call:
    arguments = {
        "planner": _planner(),
        "local_pages": pages.BlockTable(_table()),
        "seq_lens": _ints(9, 5),
    }
    return Call(_context().plan, arguments)


@_target("ContextPlan.run", "out", "lse", **_RUN)
def _context_run() -> Call:
    plan = _context().plan(_planner(), pages.BlockTable(_table()), _ints(9, 5))
    out = _values(B, HQ, D)
    lse = torch.zeros(B, HQ)
    return Call(plan.run, {"q": _values(B, HQ, D), "kv": _cache(), "out": out, "lse": lse})
