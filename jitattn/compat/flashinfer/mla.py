"""FlashInfer's wrapper of multi-head latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jitattn.base.validate import check_count, check_flag, check_number, shown
from jitattn.compat.flashinfer.absent import names_of
from jitattn.compat.flashinfer.common.arguments import (
    Q_DTYPES,
    LseForm,
    check_workspace,
    refuse_unbuilt,
)
from jitattn.compat.flashinfer.common.batch import (
    FixedBuffers,
    refuse_buffers,
    refuse_changes,
)
from jitattn.compat.flashinfer.common.latents import check_dims, latent_planner
from jitattn.compat.flashinfer.common.metadata import (
    CSR_FIELDS,
    CheckedTables,
    MLAPlanMetadata,
    tables_of,
)
from jitattn.compat.flashinfer.trtllm.latents import (
    trtllm_batch_decode_with_kv_cache_mla,
    trtllm_prefill_with_kv_cache_mla,
)
from jitattn.compat.flashinfer.trtllm.xqa import xqa_batch_decode_with_kv_cache_mla
from jitattn.compat.gradients import refuse_gradients
from jitattn.kernels.mla.api import MLAPlan, MLAPlanner
from jitattn.kernels.mla.config import KV_LORA_RANKS, QK_ROPE_HEAD_DIMS
from jitattn.spec.config import MLAConfig
from jitattn.spec.dtype import dtype_name
from jitattn.tensors.page_table_base import PageTable
from jitattn.tensors.page_tables import BlockTable, CsrPages
from jitattn.tensors.scales import ScaleLike
from jitattn.tensors.tensor_checks import check_tensor

__all__ = [
    "BatchMLAPagedAttentionWrapper",
    "MLAPlanMetadata",
    "trtllm_batch_decode_with_kv_cache_mla",
    "trtllm_prefill_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache_mla",
]

__getattr__ = names_of(__name__, __all__)

_FP8 = torch.float8_e4m3fn
_NO_SINKS = "latent attention has no sinks"


class BatchMLAPagedAttentionWrapper:
    """Latent attention over pages, for decode and prefill.

    Query i of a request with n queries and m latents sits at m - n + i. What differs from
    FlashInfer: docs/from-flashinfer.md.
    """

    _planned: _Planned | None = None

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        """Remember the device and the buffers.

        Args:
            float_workspace_buffer: any tensor on the device of all others; nothing is written
                there.
            use_cuda_graph: runs are captured: the batch size and ``plan``'s arguments stay, and
                ``plan``, outside the graph, brings captured runs up to date.
            qo_indptr: int32 [batch_size + 1], with ``use_cuda_graph`` as all of these.
            kv_indptr: int32 [batch_size + 1].
            kv_indices: int32, room for the most pages.
            kv_len_arr: int32 [batch_size].
            backend: a name that FlashInfer knows; all mean the same kernels.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        refuse_unbuilt({"backend": backend})
        check_workspace("float_workspace_buffer", float_workspace_buffer)
        self.device = float_workspace_buffer.device
        self._fixed: FixedBuffers | None = None
        self._most = 0, 0
        buffers = dict(zip(CSR_FIELDS, (qo_indptr, kv_indptr, kv_indices, kv_len_arr), strict=True))
        if check_flag("use_cuda_graph", use_cuda_graph):
            self._fixed = FixedBuffers(self.device, **buffers)
            size = self._fixed["kv_len_arr"].shape[0]
            for name in ("qo_indptr", "kv_indptr"):
                self._fixed.check_size(name, size + 1)
        else:
            refuse_buffers(buffers)

    def plan(
        self, qo_indptr: Tensor | None = None, kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None, kv_len_arr: Tensor | None = None,
        num_heads: int | None = None, head_dim_ckv: int | None = None,
        head_dim_kpe: int | None = None, page_size: int | None = None,
        causal: bool | None = None, sm_scale: float | None = None,
        q_data_type: torch.dtype | None = None, kv_data_type: torch.dtype | None = None,
        use_profiler: bool = False, *, metadata: MLAPlanMetadata | None = None,
        cum_seq_lens_q: Tensor | None = None, block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None, max_q_len: int | None = None,
        query_layout: str | None = None, kv_cache_layout: str | None = None,
        lse_mode: str = "none", output_dtype: torch.dtype | None = None,
        output_scale: str = "none", scale_mode: str = "default", skip_softmax: bool = False,
        enable_pdl: bool | None = None, use_sinks: bool = False,
    ) -> None:  # fmt: skip
        """Plan a batch. Without ``max_q_len`` it waits for the device to learn it.

        Tables, on the device or the CPU, are CSR (the first four) or a block table
        (``cum_seq_lens_q``, ``block_tables``, ``seq_lens``, ``max_q_len``), each as in
        ``MLAPlanMetadata``, or ``metadata``: that or FlashInfer's own. All of ``num_heads``,
        ``head_dim_ckv`` (elements of a latent), ``head_dim_kpe`` (of a rope part), ``page_size``,
        ``causal``, ``sm_scale``, ``q_data_type`` (float16 or bfloat16) and ``kv_data_type`` (the
        same, or float8_e4m3fn) are needed.

        ``query_layout`` and ``kv_cache_layout`` say what ``run`` gets, "packed" tensors or "split"
        pairs; None is any. With ``lse_mode`` "base2" or "basee" ``run`` returns lse of that base
        and must be asked for it; "none" leaves that to ``run`` where tables were given one by one.
        ``output_dtype`` is that of ``q_data_type`` or another of 16 or 32 bits. ``enable_pdl`` has
        no effect. Profilers, scales of outputs and of products, skipped tiles and sinks are
        refused.

        Raises:
            TypeError, ValueError, ConfigError: naming the argument.
        """
        given = dict(locals())
        refuse_unbuilt(given)
        arguments = _arguments(given)
        tables = tables_of(given)
        contract = _Contract.of(given, is_open=metadata is None)
        self._adopt(CheckedTables.of(tables, arguments, self._fixed), arguments, contract)

    def _adopt(
        self, checked: CheckedTables, arguments: dict[str, object], contract: _Contract
    ) -> None:
        """Copy what was checked to the device, and plan it or refresh the plan."""
        arguments = {**arguments, "page_table": checked.layout}
        kept = self._planned if self._fixed is not None else None
        if kept is not None:
            refuse_changes(kept.arguments, arguments)
            if checked.num_rows > self._most[0] or checked.max_q_len > self._most[1]:
                raise ValueError(
                    f"qo_indptr has {checked.num_rows} queries, {checked.max_q_len} of one request:"
                    " with use_cuda_graph=True the first plan's are the most, "
                    f"{self._most[0]} and {self._most[1]}"
                )
        planner = latent_planner(arguments, self.device)
        if self._fixed is not None:
            offsets, indptr, indices, lens = (
                self._fixed.fill(name, tensor, non_blocking=True)
                for name, tensor in zip(CSR_FIELDS, checked.tensors, strict=True)
            )
            if kept is not None:
                self._planned = kept._replace(contract=contract)
                kept.plan.refresh()
                return
            self._most = checked.num_rows, checked.max_q_len
            pages: PageTable = CsrPages(indptr, indices)
        else:
            moved = [tensor.to(self.device, non_blocking=True) for tensor in checked.tensors]
            offsets, lens = moved[0], moved[-1]
            pages = CsrPages(*moved[1:3]) if len(moved) == 4 else BlockTable(moved[1])
        plan = planner.plan(pages, lens, offsets, max_q_len=checked.max_q_len)
        self._planned = _Planned(planner, plan, arguments, contract)

    def run(
        self, q_nope: Tensor | None = None, q_pe: Tensor | None = None,
        ckv_cache: Tensor | None = None, kpe_cache: Tensor | None = None,
        out: Tensor | None = None, lse: Tensor | None = None, return_lse: bool = False,
        profiler_buffer: Tensor | None = None, kv_len: Tensor | None = None,
        page_table: Tensor | None = None, return_lse_base_on_e: bool = False,
        o_scale: float | None = None, *, query: object = None, kv_cache: object = None,
        ckv_scale: float | None = None, ckv_scale_arr: Tensor | None = None,
        kpe_scale: float | None = None, sinks: Tensor | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        bmm1_scale: ScaleLike | None = None, bmm2_scale: ScaleLike | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Attend the queries of each request to its latents, on the current stream.

        Args:
            q_nope: [num_tokens, num_heads, head_dim_ckv], with the projection of keys multiplied
                in.
            q_pe: [num_tokens, num_heads, head_dim_kpe], after the rotary embedding.
            ckv_cache: [num_pages, page_size, head_dim_ckv], any strides but the last.
            kpe_cache: [num_pages, page_size, head_dim_kpe], likewise.
            out: [num_tokens, num_heads, head_dim_ckv], filled and returned where given.
            lse: float32 [num_tokens, num_heads], filled where given.
            return_lse: return lse, too.
            profiler_buffer: refused unless None.
            kv_len: likewise, and so is ``page_table``: ``plan`` has them.
            page_table: see there.
            return_lse_base_on_e: lse is natural; else base 2.
            o_scale: refused unless None or 1.
            query: (q_nope, q_pe), or one tensor of both.
            kv_cache: (ckv_cache, kpe_cache), or one tensor of both.
            ckv_scale: of an FP8 cache, which needs it.
            ckv_scale_arr: refused unless None.
            kpe_scale: of an FP8 cache, which needs it, too: the same number as ``ckv_scale``.
            sinks: refused unless None.
            skip_softmax_threshold_scale_factor: likewise.
            bmm1_scale: likewise: the scale is ``plan``'s.
            bmm2_scale: likewise.

        Returns:
            out, or (out, lse). A row that sees no latent has out 0 and lse -inf.

        Raises:
            TypeError, ValueError: naming the argument, before any launch.
        """
        given = dict(locals())
        refuse_unbuilt(given, but=("ckv_scale_arr",))
        for name in ("sinks", "bmm1_scale", "bmm2_scale"):
            if given[name] is not None:
                why = _NO_SINKS if name == "sinks" else "the scale is plan's sm_scale"
                raise ValueError(f"{name} is given: {why}, expected None")
        if self._planned is None:
            raise RuntimeError("run was called before plan")
        return self._planned.run(given)


class _Contract(NamedTuple):
    """What ``plan`` said of ``run``'s arguments."""

    query_layout: str | None
    kv_cache_layout: str | None
    lse_mode: str
    is_open: bool  # whether lse_mode "none" leaves it to run

    @classmethod
    def of(cls, given: Mapping[str, Any], *, is_open: bool) -> _Contract:
        for name in ("query_layout", "kv_cache_layout"):
            if given[name] not in (None, "packed", "split"):
                raise ValueError(
                    f"{name} is {shown(given[name])}: expected 'packed', 'split' or None"
                )
        if given["lse_mode"] not in ("none", "base2", "basee"):
            raise ValueError(
                f"lse_mode is {shown(given['lse_mode'])}: expected 'none', 'base2' or 'basee'"
            )
        return cls(given["query_layout"], given["kv_cache_layout"], given["lse_mode"], is_open)

    def lse_form(self, given: Mapping[str, Any]) -> LseForm:
        """Return the base that ``run`` asks for, which must be the one planned."""
        natural = check_flag("return_lse_base_on_e", given["return_lse_base_on_e"])
        wants = check_flag("return_lse", given["return_lse"]) or given["lse"] is not None
        asked = ("basee" if natural else "base2") if wants or natural else "none"
        if asked != self.lse_mode and not (self.lse_mode == "none" and self.is_open):
            name = "return_lse_base_on_e" if {asked, self.lse_mode} > {"none"} else "return_lse"
            raise ValueError(
                f"{name} asks for lse {shown(asked)}: plan was given lse_mode={self.lse_mode!r}"
            )
        return LseForm("ln" if natural else "log2")


class _Planned(NamedTuple):
    """A plan, and what ``run`` must agree with."""

    planner: MLAPlanner
    plan: MLAPlan
    arguments: dict[str, object]
    contract: _Contract

    def run(self, given: Mapping[str, Any]) -> Tensor | tuple[Tensor, Tensor]:
        """Run for the arguments of the wrapper, which are looked at one by one."""
        planner, plan, _, contract = self
        form = contract.lse_form(given)
        q = _structure(given, "query", ("q_nope", "q_pe"), contract.query_layout)
        kv = _structure(given, "kv_cache", ("ckv_cache", "kpe_cache"), contract.kv_cache_layout)
        for name, value in (("query", q), ("kv_cache", kv)):
            for part in (value,) if isinstance(value, Tensor) else value:
                refuse_gradients({name: part})
        q_nope, q_pe = _split_query(q, planner)
        cache = _checked_cache(kv, planner)
        bound = planner.bind(cache, k_scale=_kv_scale(given, planner))
        lse = form.new(q_nope, given["lse"], given["return_lse"])
        out = plan.run(q_nope, q_pe, bound, out=given["out"], lse=lse)
        assert isinstance(out, Tensor)
        return form.results(out, lse, return_lse=given["return_lse"])


def _structure(
    given: Mapping[str, Any], whole: str, parts: tuple[str, str], layout: str | None
) -> Tensor | tuple[Tensor, Tensor]:
    """Return a tensor or a pair, given as one argument or as two."""
    value: object = given[whole]
    for name in parts:
        part = given[name]
        if value is not None and part is not None:
            raise ValueError(f"{name} is given, and so is {whole}: expected one of them")
        if value is None and not isinstance(part, Tensor):
            kind = "None" if part is None else f"a {type(part).__name__}"
            raise TypeError(
                f"{name} is {kind}: expected tensors {parts[0]} and {parts[1]}, or {whole}"
            )
    if value is None:
        value = tuple(given[name] for name in parts)
    result = value if isinstance(value, Tensor) else _as_pair(whole, value)
    found = "packed" if isinstance(value, Tensor) else "split"
    if layout not in (None, found):
        name = "query_layout" if whole == "query" else "kv_cache_layout"
        raise ValueError(f"{whole} is {found}: plan was given {name}={layout!r}")
    return result


def _as_pair(name: str, value: object) -> tuple[Tensor, Tensor]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise TypeError(f"{name} is a {type(value).__name__}: expected a tensor or a pair of them")
    for part in value:
        if not isinstance(part, Tensor):
            raise TypeError(f"{name} has a {type(part).__name__}: expected tensors")
    return value[0], value[1]


def _split_query(q: Tensor | tuple[Tensor, Tensor], planner: MLAPlanner) -> tuple[Tensor, Tensor]:
    rank, rope = planner.config.kv_lora_rank, planner.config.qk_rope_head_dim
    if isinstance(q, Tensor):
        if q.dim() != 3 or q.shape[-1] != rank + rope:
            raise ValueError(
                f"query has shape {list(q.shape)}: expected [num_tokens, num_heads, {rank + rope}]"
            )
        return q[..., :rank], q[..., rank:]
    for name, part, dim in zip(("q_nope", "q_pe"), q, (rank, rope), strict=True):
        if part.dim() != 3 or part.shape[-1] != dim:
            raise ValueError(
                f"{name} has shape {list(part.shape)}: expected [num_tokens, num_heads, {dim}]"
            )
    return q


def _checked_cache(
    kv: Tensor | tuple[Tensor, Tensor], planner: MLAPlanner
) -> Tensor | tuple[Tensor, Tensor]:
    config = planner.config
    rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
    names = ("kv_cache",) if isinstance(kv, Tensor) else ("ckv_cache", "kpe_cache")
    parts = (kv,) if isinstance(kv, Tensor) else kv
    dims = (rank + rope,) if isinstance(kv, Tensor) else (rank, rope)
    for name, part, dim in zip(names, parts, dims, strict=True):
        check_tensor(name, part, (getattr(torch, config.kv_dtype),))
        if part.dim() != 3 or tuple(part.shape[1:]) != (config.page_size, dim):
            raise ValueError(
                f"{name} has shape {list(part.shape)}: expected [num_pages, {config.page_size}, "
                f"{dim}]"
            )
    return kv


def _refuse_group_scales(given: Mapping[str, Any], config: MLAConfig, *, is_fp8: bool) -> None:
    """Raise for scales of 128 elements each of a latent, in the words of FlashInfer's checks."""
    scales = given["ckv_scale_arr"]
    if is_fp8:
        if (given["ckv_scale"] is None) is (scales is None):
            raise ValueError(
                "Exactly one of ckv_scale or ckv_scale_arr is needed for a cache of "
                f"{config.kv_dtype}: ckv_scale, since scales of groups are not built"
            )
        wanted = [config.page_size, config.kv_lora_rank // 128]
        if isinstance(scales, Tensor) and list(scales.shape[1:]) != wanted:
            raise ValueError(
                f"Invalid shape of ckv_scale_arr: {list(scales.shape)} is not [num_pages, "
                f"{wanted[0]}, {wanted[1]}], and a cache has one scale here: ckv_scale"
            )
    refuse_unbuilt({"ckv_scale_arr": scales})


def _kv_scale(given: Mapping[str, Any], planner: MLAPlanner) -> float | None:
    """Return the scale of an FP8 cache: latents and rope parts have one here."""
    names = ("ckv_scale", "kpe_scale")
    is_fp8 = planner.config.kv_dtype == dtype_name(_FP8)
    _refuse_group_scales(given, planner.config, is_fp8=is_fp8)
    if is_fp8 and given["kpe_scale"] is None:
        raise ValueError("kpe_scale is None: a cache of float8_e4m3fn needs it")
    for name in names:
        if not is_fp8 and given[name] is not None:
            raise ValueError(
                f"{name} is given, but the cache is {planner.config.kv_dtype}, not FP8"
            )
    if not is_fp8:
        return None
    ckv_scale, kpe_scale = (check_number(name, given[name]) for name in names)
    if ckv_scale != kpe_scale:
        raise ValueError(
            f"kpe_scale is {kpe_scale}: latents and rope parts have one scale here, ckv_scale, "
            f"{ckv_scale}"
        )
    return ckv_scale


def _arguments(given: Mapping[str, Any]) -> dict[str, object]:
    """Return the planner's arguments of what ``plan`` was given, but for the table's layout."""
    needed = ("num_heads", "head_dim_ckv", "head_dim_kpe", "page_size", "causal", "sm_scale")
    for name in (*needed, "q_data_type", "kv_data_type"):
        if given[name] is None:
            raise TypeError(f"{name} is None: plan needs it")
    if check_flag("use_sinks", given["use_sinks"]):
        raise ValueError(f"use_sinks is True: {_NO_SINKS}")
    if given["scale_mode"] not in ("default", "kv-per-tensor"):
        raise ValueError(
            f"scale_mode is {shown(given['scale_mode'])}: expected 'default' or 'kv-per-tensor'"
        )
    check_dims("head_dim_ckv", given["head_dim_ckv"], KV_LORA_RANKS)
    check_dims("head_dim_kpe", given["head_dim_kpe"], QK_ROPE_HEAD_DIMS)
    q_dtype, kv_dtype = _dtypes("q_data_type", "kv_data_type", given)
    out_dtype = given["output_dtype"]
    if out_dtype is not None and out_dtype not in _outputs():
        raise ValueError(f"output_dtype is {out_dtype}: expected float16, bfloat16 or float32")
    return {
        "num_heads": check_count("num_heads", given["num_heads"]),
        "kv_lora_rank": given["head_dim_ckv"],
        "qk_rope_head_dim": given["head_dim_kpe"],
        "page_size": check_count("page_size", given["page_size"]),
        "causal": check_flag("causal", given["causal"]),
        "sm_scale": check_number("sm_scale", given["sm_scale"]),
        "q_dtype": q_dtype,
        "kv_dtype": kv_dtype,
        "out_dtype": q_dtype if out_dtype is None else dtype_name(out_dtype, "output_dtype"),
    }


def _dtypes(q_name: str, kv_name: str, given: Mapping[str, Any]) -> tuple[str, str]:
    q, kv = given[q_name], given[kv_name]
    for name, value in ((q_name, q), (kv_name, kv)):
        if not isinstance(value, torch.dtype):
            raise TypeError(f"{name} is {shown(value)}: expected a torch.dtype")
    if dtype_name(q) not in Q_DTYPES:
        raise ValueError(f"{q_name} is {dtype_name(q)}: expected float16 or bfloat16")
    if kv not in (q, _FP8):
        raise ValueError(
            f"{kv_name} is {dtype_name(kv)}: expected {dtype_name(q)} like {q_name}, or "
            "float8_e4m3fn"
        )
    return dtype_name(q), dtype_name(kv)


def _outputs() -> tuple[torch.dtype, ...]:
    return torch.float16, torch.bfloat16, torch.float32
