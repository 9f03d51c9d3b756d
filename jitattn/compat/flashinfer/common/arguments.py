"""FlashInfer's arguments, checked: what is not built is refused by name, and why is said once."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from jitattn.base.validate import check_flag, check_name, shown, type_name
from jitattn.compat.gradients import refuse_gradients
from jitattn.spec.dtype import FP8_DTYPES, dtype_name
from jitattn.tensors.quantization import KVCache, QuantizedKV
from jitattn.tensors.scales import ScaleLike
from jitattn.tensors.tensor_checks import INTEGERS, check_device, check_memory, check_tensor

Pair = Tensor | tuple[Tensor, Tensor]  # both of K and V in one, or one tensor each

BACKENDS = frozenset(
    (
        *("auto", "cake", "cudnn", "cute-dsl", "cute-dsl-modular", "cute-dsl-monolithic"),
        *("cute-dsl-prims", "cutile", "cutlass", "fa2", "fa3", "trtllm-gen", "xqa"),
    )
)
"""Names of implementations, all of which mean jitattn's kernels here."""

Q_DTYPES = ("float16", "bfloat16")
LOG2_E = math.log2(math.e)

_ROTARY = "there is no rotary embedding in attention: preprocess_qkv applies it before"
_ITEMS = "multi-item scoring is not built"
_CODE = "kernels are jitattn's own"
_SKIP = "every tile counts: skipping some is not built"
_OUT = "outputs are float16, bfloat16 or float32, without a scale"
_CUDNN = "offsets are those of K and of q"
_RANKS = "jitattn.parallel has context parallelism, and merge_states merges what ranks have"
_RANGES = "the paged prefill wrapper takes a custom_mask, of any ranges"
_HALF = "scores and sums are float32"

# What an argument may be, and why not something else.
_ALLOWED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "pos_encoding_mode": (("NONE",), f"{_ROTARY}, and AttentionPlanner(variant='alibi') has ALiBi"),
    "rope_scale": ((None,), _ROTARY),
    "rope_theta": ((None,), _ROTARY),
    "window_right": ((0,), "a query's own key is the last that it sees"),
    "args": (((),), "they are for kernels of jit_args, and kernels are jitattn's own"),
    "use_token_head_sf": ((False,), "a scale is of a cache or of a head, not of a token"),
    "sparse_top_k": ((0,), "sparse attention is not built"),
    "variable_window_token_starts": ((None,), _RANGES),
    "variable_window_token_ends": ((None,), _RANGES),
    "use_fp16_qk_reduction": ((False,), _HALF),
    "use_fp16_softmax": ((None, False), _HALF),
    "uses_spcompress": ((None, False), _SKIP),
    "prefix_len_ptr": ((None,), _ITEMS),
    "token_pos_in_items_ptr": ((None,), _ITEMS),
    "token_pos_in_items_len": ((0,), _ITEMS),
    "max_item_len_ptr": ((None,), _ITEMS),
    "jit_args": ((None,), _CODE),
    "jit_kwargs": ((None,), _CODE),
    "variant_owns_mask": ((False,), _CODE),
    "skip_softmax_threshold_scale_factor": ((None,), _SKIP),
    "skip_softmax": ((False,), _SKIP),
    "v_indptr": ((None,), _CUDNN),
    "o_indptr": ((None,), _CUDNN),
    "o_scale": ((None, 1.0), _OUT),
    "o_sf_scale": ((None,), _OUT),
    "o_sf_vec_size": ((None,), _OUT),
    "output_scale": (("none",), _OUT),
    "mask": ((None,), "queries of a request are causal; the paged prefill wrapper takes masks"),
    "bmm1_scale_log2": ((None,), "bmm1_scale is the scale"),
    "enable_block_sparse_attention": ((False,), "all KV heads have the pages of their request"),
    "sparse_mla_top_k": ((0,), "sparse attention is not built"),
    "sparse_mla_top_k_lens": ((None,), "sparse attention is not built"),
    "kv_scale_format": (("auto",), "sparse attention is not built"),
    "cp_world": ((1,), _RANKS),
    "cp_rank": ((0,), _RANKS),
    "causal_seqlens_kv_global": ((None,), _RANKS),
    "enable_dcp": ((False,), _RANKS),
    "request_order": ((None,), "the device orders requests itself"),
    "request_order_plan": ((None,), "the device orders requests itself"),
    "use_profiler": ((False,), "kernels have no profiler"),
    "profiler_buffer": ((None,), "kernels have no profiler"),
    "ckv_scale_arr": ((None,), "a cache has one scale: ckv_scale"),
    "kv_len": ((None,), "lengths are those given to plan"),
    "page_table": ((None,), "pages are those given to plan"),
    "kv_cache_sf": ((None,), "TensorRT-LLM's order of the scales of NVFP4 is not built"),
}
# What says how FlashInfer computes, and changes nothing here.
_CHOICES: Mapping[str, tuple[object, ...]] = {
    "enable_pdl": (None, True, False),
    "use_tensor_cores": (True, False),
    "is_var_seq": (True, False),
    "length_aware_schedule": (True, False),
    "cute_dsl_impl": ("auto", "modular", "monolithic"),
    "bf16q_fp8kv_transform_mode": (None, "k_only", "separate_kv"),
}


def refuse_unbuilt(given: Mapping[str, object], *, but: tuple[str, ...] = ()) -> None:
    """Raise for arguments that ask for what is not built, and for choices that are none.

    Args:
        given: arguments by name; others than those known here are not looked at.
        but: names that the caller looks at itself.

    Raises:
        ValueError: naming the first of them.
    """
    for name, value in given.items():
        if name in _ALLOWED and name not in but:
            allowed, why = _ALLOWED[name]
            if not _is_among(value, allowed):
                wanted = " or ".join(map(repr, allowed))
                raise ValueError(f"{name} is {_shown(value)}: {why}, expected {wanted}")
        if name in _CHOICES and not _is_among(value, _CHOICES[name]):
            wanted = ", ".join(map(repr, _CHOICES[name]))
            raise ValueError(f"{name} is {_shown(value)}: expected one of {wanted}")
        if name == "backend" and not (isinstance(value, str) and value in BACKENDS):
            raise ValueError(
                f"backend is {shown(value)}: expected one of {', '.join(sorted(BACKENDS))}, all of "
                "which mean jitattn's kernels"
            )


def _is_among(value: object, allowed: tuple[object, ...]) -> bool:
    # A tensor compares element by element, and 0 is equal to False.
    return any(
        value is one
        or (isinstance(one, str | float | int) and type(value) in (type(one), int) and value == one)
        for one in allowed
        if isinstance(one, bool) is isinstance(value, bool)
    )


def _shown(value: object) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else shown(value)


def check_layout(kv_layout: str) -> str:
    """Return "NHD" or "HND".

    Raises:
        ValueError: it is neither.
    """
    return check_name("kv_layout", kv_layout, ("NHD", "HND"))


def check_workspace(name: str, workspace: Tensor, device: torch.device | None = None) -> None:
    """Raise unless a workspace is a tensor; nothing is written there, since plans have their own.

    Raises:
        TypeError, ValueError: it is no tensor, or on another device.
    """
    if not isinstance(workspace, Tensor):
        raise TypeError(f"{name} is a {type(workspace).__name__}: expected a tensor")
    if device is not None:
        check_device(name, workspace, device)


def data_types(q: object, kv: object, out: object) -> dict[str, str]:
    """Return ``q_dtype``, ``kv_dtype`` and ``out_dtype`` of a planner.

    uint8 is NVFP4, as in FlashInfer.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    q_dtype = check_dtype("q_data_type", q)
    if q_dtype not in Q_DTYPES:
        raise ValueError(f"q_data_type is {q_dtype}: expected float16 or bfloat16")
    kv_dtype = q_dtype if kv is None else check_dtype("kv_data_type", kv)
    if kv_dtype not in (q_dtype, *FP8_DTYPES, "uint8"):
        raise ValueError(
            f"kv_data_type is {kv_dtype}: expected {q_dtype} like q_data_type, "
            f"{', '.join(FP8_DTYPES)}, or uint8 for NVFP4"
        )
    out_dtype = q_dtype if out is None else check_dtype("o_data_type", out)
    if out_dtype not in (*Q_DTYPES, "float32"):
        raise ValueError(f"o_data_type is {out_dtype}: {_OUT}")
    kv_dtype = "nvfp4" if kv_dtype == "uint8" else kv_dtype
    return {"q_dtype": q_dtype, "kv_dtype": kv_dtype, "out_dtype": out_dtype}


def check_dtype(name: str, value: object) -> str:
    """Return the name of a dtype, or of the name of one.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(value, str):
        value = str.__str__(value)
        if isinstance(getattr(torch, value, None), torch.dtype):
            return value
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{name} is {shown(value)}: expected a torch.dtype or its name")
    return dtype_name(value)


def as_lengths(name: str, value: Tensor) -> Tensor:
    """Return int32 or int64 [batch_size]; uint32 is read as int32.

    Raises:
        TypeError, ValueError: naming it.
    """
    check_tensor(name, value, (*INTEGERS, torch.uint32))
    if value.dim() != 1:
        raise ValueError(f"{name} has shape {list(value.shape)}: expected [batch_size]")
    return value.view(torch.int32) if value.dtype == torch.uint32 else value


def check_scales(
    is_quantised: bool, *, q_scale: object, k_scale: ScaleLike | None, v_scale: ScaleLike | None
) -> dict[str, ScaleLike | None]:
    """Return the scales that ``bind`` takes.

    Raises:
        ValueError: a scale other than 1 of a tensor that is not quantised.
    """
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    for name, scale in scales.items():
        if is_quantised and name != "q_scale":
            continue
        if not _is_among(scale, (None, 1.0)):
            raise ValueError(
                f"{name} is {_shown(scale)}: {name[0]} is not quantised, expected None or 1"
            )
    return {"k_scale": k_scale, "v_scale": v_scale} if is_quantised else {}


def check_queries(name: str, q: Tensor) -> None:
    """Raise unless ``q`` is [num_tokens, num_qo_heads, head_dim]; planners check the rest.

    Raises:
        TypeError, ValueError: naming it.
    """
    if not isinstance(q, Tensor):
        raise TypeError(f"{name} is a {type_name(q)}: expected a tensor")
    check_memory(name, q)
    if q.dim() != 3:
        raise ValueError(
            f"{name} has shape {list(q.shape)}: expected [num_tokens, num_qo_heads, head_dim]"
        )


def paged_cache(
    name: str, cache: Pair, kv_layout: str, kv_dtype: str, kv_cache_sf: Pair | None
) -> KVCache:
    """Return a cache as ``bind`` takes it; without a dimension for it, pages have one token.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if kv_dtype != "nvfp4":
        if kv_cache_sf is not None:
            raise ValueError(f"kv_cache_sf is given, but {name} is {kv_dtype}, not NVFP4 (uint8)")
        if isinstance(cache, Tensor):
            _check_cache(name, cache, kv_dtype)
            whole = _with_pages(name, cache, kv_layout, 5)
            _check_both(name, whole)
            return whole
        return _pair(name, cache, kv_layout, kv_dtype)
    if kv_cache_sf is None:
        raise ValueError(f"kv_cache_sf is None: {name} is NVFP4 (uint8), whose blocks have scales")
    k, v = _pair(name, cache, kv_layout, "uint8")
    return QuantizedKV(k, v, *_pair("kv_cache_sf", kv_cache_sf, kv_layout, "float8_e4m3fn"))


def ragged_cache(
    kv: tuple[Tensor, Tensor], kv_layout: str, kv_dtype: str, kv_cache_sf: Pair | None
) -> KVCache:
    """Return K and V without pages as ``bind`` takes them, tokens first.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    is_nvfp4 = kv_dtype == "nvfp4"
    k, v = (
        _tokens(name, part, kv_layout, "uint8" if is_nvfp4 else kv_dtype)
        for name, part in zip("kv", kv, strict=True)
    )
    if (kv_cache_sf is not None) != is_nvfp4:
        given = "given" if kv_cache_sf is not None else "None"
        raise ValueError(f"kv_cache_sf is {given}, and k is {kv_dtype}: NVFP4 has scales, alone")
    if kv_cache_sf is None:
        return k, v
    if not isinstance(kv_cache_sf, tuple | list) or len(kv_cache_sf) != 2:
        raise TypeError("kv_cache_sf: expected a pair (k_scales, v_scales)")
    k_scales, v_scales = (
        _tokens("kv_cache_sf", part, kv_layout, "float8_e4m3fn") for part in kv_cache_sf
    )
    return QuantizedKV(k, v, k_scales, v_scales)


def _tokens(name: str, part: Tensor, kv_layout: str, dtype: str) -> Tensor:
    _check_cache(name, part, dtype)
    if part.dim() != 3:
        raise ValueError(
            f"{name} has shape {list(part.shape)}: expected [num_kv_tokens, num_kv_heads, ..]"
        )
    return part if kv_layout == "NHD" else part.transpose(0, 1)


def cache_pair(
    name: str, cache: Tensor | tuple[Tensor, Tensor], kv_layout: str
) -> tuple[Tensor, Tensor]:
    """Return (K, V) of 4-D tensors, of one tensor with both or with one that is both.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if isinstance(cache, Tensor) and cache.dim() == 5 and cache.shape[1] == 1:
        refuse_gradients({name: cache})
        return cache[:, 0], cache[:, 0]
    return _pair(name, cache, kv_layout, None)


def _pair(
    name: str, cache: Tensor | tuple[Tensor, Tensor], kv_layout: str, dtype: str | None
) -> tuple[Tensor, Tensor]:
    if isinstance(cache, Tensor):
        _check_cache(name, cache, dtype)
        whole = _with_pages(name, cache, kv_layout, 5)
        _check_both(name, whole)
        return whole[:, 0], whole[:, 1]
    if not isinstance(cache, tuple | list) or len(cache) != 2:
        raise TypeError(f"{name} is a {type(cache).__name__}: expected a tensor or a pair of them")
    for part in cache:
        _check_cache(name, part, dtype)
    k, v = (_with_pages(name, part, kv_layout, 4) for part in cache)
    return k, v


def _check_both(name: str, cache: Tensor) -> None:
    if cache.shape[1] != 2:
        raise ValueError(
            f"{name} has shape {list(cache.shape)}: expected 2, K and V, as the second dimension"
        )


def _check_cache(name: str, cache: Tensor, dtype: str | None) -> None:
    if not isinstance(cache, Tensor):
        raise TypeError(f"{name} is a {type(cache).__name__}: expected a tensor")
    if dtype is not None:
        check_tensor(name, cache, (getattr(torch, dtype),))
    refuse_gradients({name: cache})


def _with_pages(name: str, cache: Tensor, kv_layout: str, num_dims: int) -> Tensor:
    if cache.dim() == num_dims - 1:
        return cache.unsqueeze(-3 if kv_layout == "NHD" else -2)
    if cache.dim() != num_dims:
        raise ValueError(
            f"{name} has shape {list(cache.shape)}: expected {num_dims} dimensions, or "
            f"{num_dims - 1} with pages of one token"
        )
    return cache


class LseForm:
    """In which base and order a wrapper returns lse, and where it goes."""

    def __init__(self, lse_base: str = "log2", lse_layout: str = "NH") -> None:
        """Check both.

        Raises:
            ValueError: naming the one that is unknown.
        """
        if lse_base not in ("log2", "ln"):
            raise ValueError(f"lse_base is {shown(lse_base)}: expected 'log2' or 'ln'")
        if lse_layout not in ("NH", "HN"):
            raise ValueError(f"lse_layout is {shown(lse_layout)}: expected 'NH' or 'HN'")
        self._is_base_2 = lse_base == "log2"
        self._is_turned = lse_layout == "HN"

    def new(self, q: Tensor, lse: Tensor | None, return_lse: bool) -> Tensor | None:
        """Return a tensor for the lse of ``q``, [num_tokens, heads, ..], if any is wanted."""
        check_flag("return_lse", return_lse)
        shape = q.shape[:2] if not self._is_turned else (q.shape[1], q.shape[0])
        if lse is None:
            if not return_lse:
                return None
            return torch.empty(tuple(shape), dtype=torch.float32, device=q.device)
        check_tensor("lse", lse, (torch.float32,))
        if tuple(lse.shape) != tuple(shape):
            raise ValueError(f"lse has shape {list(lse.shape)}: expected {list(shape)}")
        return lse

    def view(self, lse: Tensor | None) -> Tensor | None:
        """Return ``lse`` as [num_tokens, heads], for ``run`` to fill."""
        return lse.t() if lse is not None and self._is_turned else lse

    def results(
        self, out: Tensor, lse: Tensor | None, *, return_lse: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Finish ``lse``, and return what a run does: out, or (out, lse)."""
        self.finish(lse)
        if not return_lse:
            return out
        assert lse is not None
        return out, lse

    def finish(self, lse: Tensor | None) -> None:
        """Turn natural logarithms, in place."""
        if lse is not None and self._is_base_2:
            lse.mul_(LOG2_E)
