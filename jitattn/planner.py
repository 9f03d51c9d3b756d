"""Plan a batch on the device, then run its layers: ``AttentionPlanner``, ``BoundCache``, ``Plan``.

``AttentionPlanner`` chooses and loads kernels; ``bind`` checks a cache once; ``plan`` asks the
device to split the batch; ``run`` patches a struct and launches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from jitattn import knobs, support
from jitattn.binding import (
    BoundCache,
    check_last_stride,
    check_rows,
    check_writable,
    view_caches,
)
from jitattn.checks import check_lengths, check_page_ids
from jitattn.config import PlannerConfig
from jitattn.errors import ConfigError
from jitattn.pages import Pages, check_device, check_tensor, check_vector
from jitattn.reference_backend import ReferencePlan
from jitattn.workspace import Workspace, canonical_device

if TYPE_CHECKING:
    from jitattn.cuda_backend import KernelInfo, KernelSet

KVCache = Tensor | tuple[Tensor, Tensor]
Scale = float | Tensor

_BACKENDS = ("auto", "cuda", "reference")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class AttentionPlanner:
    """The kernels of one attention configuration on one device.

    Constructing it compiles or loads every kernel that a plan launches. Thread-safe.

    Attributes:
        config: the arguments, with dtypes as names.
        device: where its tensors must be.
        backend: "cuda" or "reference".
    """

    def __init__(
        self,
        *,
        num_qo_heads: int = 32,
        num_kv_heads: int = 8,
        head_dim: int = 128,
        page_size: int | None = 16,
        head_dim_vo: int | None = None,
        q_dtype: torch.dtype | str = "bfloat16",
        kv_dtype: torch.dtype | str = "bfloat16",
        out_dtype: torch.dtype | str | None = None,
        kv_layout: str = "NHD",
        page_table: str = "shared",
        causal: bool = True,
        window_left: int = -1,
        logits_soft_cap: float = 0.0,
        sm_scale: float | None = None,
        use_sinks: bool = False,
        use_custom_mask: bool = False,
        variant: str | None = None,
        batch_invariant: bool = False,
        early_kv: bool = False,
        num_sms: int | None = None,
        workspace: Workspace | None = None,
        device: torch.device | str | int | None = None,
        backend: str = "auto",
    ) -> None:
        """Choose and load the kernels.

        Args:
            num_qo_heads: query heads, a multiple of ``num_kv_heads``.
            num_kv_heads: heads of K and V.
            head_dim: elements of a head.
            page_size: tokens of a page; None for ragged K and V.
            head_dim_vo: elements of a head of V and out; None is ``head_dim``.
            q_dtype: a torch dtype or its name.
            kv_dtype: likewise, of the cache.
            out_dtype: likewise, of out; None is ``q_dtype``.
            kv_layout: the order of a page's dimensions, "NHD" (token, head) or "HND".
            page_table: "shared", "separate", "csr", "token" or "ragged": the layout of the tables
                that plans get.
            causal: with one query token a request, which is its last, both values mean the same.
            window_left: earlier tokens that a query sees besides itself; -1 is all.
            logits_soft_cap: score becomes cap * tanh(score / cap); 0 is off.
            sm_scale: multiplies q.k; None is ``head_dim ** -0.5``.
            use_sinks: ``run`` gets ``sinks``.
            use_custom_mask: not built yet.
            variant: not built yet.
            batch_invariant: a request's bits depend on nothing but its own values and length.
            early_kv: not built yet.
            num_sms: multiprocessors to use; None is all.
            workspace: scratch memory; None is one for each device and stream.
            device: None is the current CUDA device, or the CPU without one.
            backend: "auto" is "cuda" on a CUDA device and "reference" on the CPU.

        Raises:
            ConfigError: with every reason why the configuration has no kernel.
            CompileError, KernelNotFoundError: a kernel can't be had (jitattn.errors).
        """
        self.config = PlannerConfig.from_arguments(
            {
                "num_qo_heads": num_qo_heads,
                "num_kv_heads": num_kv_heads,
                "head_dim": head_dim,
                "page_size": page_size,
                "head_dim_vo": head_dim_vo,
                "q_dtype": q_dtype,
                "kv_dtype": kv_dtype,
                "out_dtype": out_dtype,
                "kv_layout": kv_layout,
                "page_table": page_table,
                "causal": causal,
                "window_left": window_left,
                "logits_soft_cap": logits_soft_cap,
                "sm_scale": sm_scale,
                "use_sinks": use_sinks,
                "use_custom_mask": use_custom_mask,
                "variant": variant,
                "batch_invariant": batch_invariant,
                "early_kv": early_kv,
                "num_sms": num_sms,
            }
        )
        support.check_rules(self.config)
        self.device = canonical_device(device)
        self.backend = _choose_backend(backend, self.device)
        self._workspace = _check_workspace(workspace, self.device)
        self._q_dtype: torch.dtype = getattr(torch, self.config.q_dtype)
        self._out_dtype: torch.dtype = getattr(torch, self.config.out_dtype or self.config.q_dtype)
        self._sm_scale = head_dim**-0.5 if self.config.sm_scale is None else self.config.sm_scale
        self._checks = knobs.load().check
        self._kernels: KernelSet | None = None
        if self.backend == "cuda":
            from jitattn.cuda_backend import KernelSet

            self._kernels = KernelSet(self.config, self.device)

    def __getattr__(self, name: str) -> object:
        """Read an argument of the configuration under its name."""
        if name in PlannerConfig.__slots__ and "config" in self.__dict__:
            return getattr(self.config, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def workspace(self) -> Workspace | None:
        """The workspace given, or None for one of each device and stream."""
        return self._workspace

    def bind(
        self, kv_cache: KVCache, *, k_scale: Scale | None = None, v_scale: Scale | None = None
    ) -> BoundCache:
        """Check a cache and reduce it to pointers and strides, once per layer.

        Args:
            kv_cache: [num_pages, 2, page_size, num_kv_heads, head_dim] ("HND": heads before
                tokens), or a pair of such tensors without the second dimension, or for "ragged" a
                pair of [num_kv_tokens, num_kv_heads, head_dim]. Any strides with a contiguous
                last dimension.
            k_scale: for quantised caches, which are not built yet.
            v_scale: likewise.

        Raises:
            TypeError, ValueError: the cache doesn't fit the planner, or has a scale.
        """
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            if scale is not None:
                raise ValueError(
                    f"{name} is given, but a cache of {self.config.kv_dtype} is not quantised"
                )
        k, v = view_caches(kv_cache, self.config, self.device)
        decode = None if self._kernels is None else self._kernels.decode_for(k, v)
        return BoundCache(self.config, k, v, decode)

    def plan(
        self,
        pages: Pages,
        seq_lens: Tensor,
        qo_indptr: Tensor | None = None,
        *,
        max_q_len: int | None = None,
        max_kv_len: int | None = None,
    ) -> Plan:
        """Split a batch over the card, on the device, once per step.

        The lengths are snapshot; the tables are read when ``run`` runs. Nothing is copied to the
        host, and nothing waits for the device.

        Args:
            pages: the pages of each request, in the planner's ``page_table`` layout.
            seq_lens: int32 or int64 [batch_size], KV tokens of each request, this step's included.
                Zero and less is padding. A request longer than its table or ``max_kv_len`` gets
                NaN (the reference backend on the CPU raises ValueError).
            qo_indptr: not built yet: every request has one query token.
            max_q_len: None or 1.
            max_kv_len: the longest length that occurs; None is what the table can hold.

        Raises:
            TypeError, ValueError: an argument that doesn't fit the planner.
            ConfigError: ``qo_indptr`` or another ``max_q_len``.
        """
        if qo_indptr is not None or max_q_len not in (None, 1):
            raise ConfigError(
                ["qo_indptr is refused: more than one query token a request is not built yet"]
            )
        _check_pages(pages, self.config, self.device)
        check_vector("seq_lens", seq_lens, device=self.device)
        if seq_lens.shape[0] != pages.batch_size:
            raise ValueError(
                f"seq_lens has {seq_lens.shape[0]} entries: expected {pages.batch_size}, one for "
                "each request of pages"
            )
        limit = _kv_limit(pages, self.config, max_kv_len)
        if self._checks:
            check_lengths(pages, seq_lens, limit, self.config)
        backend: _Backend
        if self._kernels is None:
            backend = ReferencePlan(self.config, self._sm_scale, pages, seq_lens, limit)
        else:
            from jitattn.cuda_backend import CudaPlan

            backend = CudaPlan(
                self._kernels, self._sm_scale, self._workspace, pages, seq_lens, limit
            )
        return Plan(self, pages, seq_lens, backend)


class Plan:
    """A batch, split over the card. For one thread at a time, and one stream."""

    def __init__(
        self, planner: AttentionPlanner, pages: Pages, seq_lens: Tensor, backend: _Backend
    ) -> None:
        """Made by ``AttentionPlanner.plan``."""
        self._planner = planner
        self._pages = pages
        # The lengths that the schedule was made from, while the caller's may move on.
        self._checked_lens = seq_lens.clone() if planner._checks else None
        self._seq_lens = seq_lens
        self._backend = backend
        config = planner.config
        self._q_shape = (pages.batch_size, config.num_qo_heads, config.head_dim)
        self._out_shape = (*self._q_shape[:2], config.head_dim_vo or config.head_dim)

    def refresh(self) -> None:
        """Recompute the schedule from the length tensor the plan was given, on the stream."""
        if self._checked_lens is not None:
            self._checked_lens = self._seq_lens.clone()
        self._backend.refresh()

    def run(
        self,
        q: Tensor,
        kv: BoundCache | KVCache,
        *,
        pages: Pages | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        q_scale: Scale | None = None,
        out_scale: Scale | None = None,
        sinks: Tensor | None = None,
        custom_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend each request's query token to its pages, on the current stream.

        Args:
            q: [batch_size, num_qo_heads, head_dim], q_dtype; the last dimension contiguous.
            kv: from ``bind``, or a cache, which is bound on the spot.
            pages: a table to read instead of the plan's, of the same layout and size.
            out: [batch_size, num_qo_heads, head_dim_vo], out_dtype; allocated when None.
            lse: float32 [batch_size, num_qo_heads], any strides; filled when given.
            return_lse: return lse as well, allocated when None.
            q_scale: for quantised queries, which are not built yet.
            out_scale: for quantised outputs, which are not built yet.
            sinks: [num_qo_heads], any float dtype and stride, with ``use_sinks``.
            custom_mask: not built yet.

        Returns:
            out, or (out, lse) with ``return_lse``. lse is the natural logarithm of the sum of
            exp(score) over visible keys, plus exp(sink). A request without keys has out 0 and lse
            -inf, or its sink.

        Raises:
            TypeError, ValueError: an argument that doesn't fit the planner, before any launch.

        Defined by: jitattn/reference.py::attention.
        """
        planner = self._planner
        self._refuse(q_scale=q_scale, out_scale=out_scale, custom_mask=custom_mask)
        self._check_sinks(sinks)
        check_rows("q", q, self._q_shape, planner._q_dtype, planner.device)
        check_last_stride("q", q)
        bound = kv if isinstance(kv, BoundCache) else planner.bind(kv)
        if bound.config is not planner.config and bound.config != planner.config:
            raise ValueError("kv was bound by a planner of another configuration")
        if bound.k.tensor.device != planner.device:
            raise ValueError(f"kv is on {bound.k.tensor.device}: expected {planner.device}")
        if pages is not None and pages is not self._pages:
            self._check_same_size(pages)
        out = self._output("out", out, self._out_shape, planner._out_dtype)
        check_last_stride("out", out)
        if lse is not None or return_lse:
            lse = self._output("lse", lse, self._q_shape[:2], torch.float32)
        pages = self._pages if pages is None else pages
        if self._checked_lens is not None and not _is_capturing(planner.device):
            check_page_ids(pages, self._checked_lens, bound, planner.config)
        self._backend.run(q, bound, pages, out, lse, sinks)
        if return_lse:
            assert lse is not None
            return out, lse
        return out

    def _refuse(self, **arguments: object) -> None:
        for name, value in arguments.items():
            if value is not None:
                raise ValueError(
                    f"{name} is given, but this planner's configuration has no use for it"
                )

    def _check_sinks(self, sinks: Tensor | None) -> None:
        config = self._planner.config
        if (sinks is not None) != config.use_sinks:
            given = "given" if sinks is not None else "not given"
            raise ValueError(f"sinks are {given}, but the planner has use_sinks={config.use_sinks}")
        if sinks is None:
            return
        check_tensor("sinks", sinks, _FLOATS)
        if tuple(sinks.shape) != (config.num_qo_heads,):
            raise ValueError(
                f"sinks has shape {list(sinks.shape)}: expected [{config.num_qo_heads}]"
            )
        check_device("sinks", sinks, self._planner.device)

    def _check_same_size(self, pages: Pages) -> None:
        planned = self._pages
        _check_pages(pages, self._planner.config, self._planner.device)
        page_size = self._planner.config.page_size or 1
        given, wanted = (
            (table.batch_size, table.capacity(page_size)) for table in (pages, planned)
        )
        if given != wanted:
            raise ValueError(
                f"pages has {given[0]} requests of at most {given[1]} tokens: expected {wanted[0]} "
                f"of at most {wanted[1]}, like the plan's"
            )

    def _output(
        self, name: str, given: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        if given is None:
            return torch.empty(shape, dtype=dtype, device=self._planner.device)
        check_rows(name, given, shape, dtype, self._planner.device)
        check_writable(name, given)
        return given


def build_info(planner: AttentionPlanner) -> list[KernelInfo]:
    """Return what is known of each kernel that ``planner`` has loaded; none on "reference"."""
    return [] if planner._kernels is None else planner._kernels.infos()


class _Backend(Protocol):
    """What a plan needs of the code that computes."""

    def refresh(self) -> None: ...

    def run(
        self,
        q: Tensor,
        kv: BoundCache,
        pages: Pages,
        out: Tensor,
        lse: Tensor | None,
        sinks: Tensor | None,
    ) -> None: ...


def _is_capturing(device: torch.device) -> bool:
    # A capture can't wait for the device, so JITATTN_CHECK sees eager calls only.
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# --- checks of arguments


def _choose_backend(backend: str, device: torch.device) -> str:
    if backend not in _BACKENDS:
        raise ConfigError([f"backend={backend!r} is not one of {', '.join(_BACKENDS)}"])
    if device.type not in ("cpu", "cuda"):
        raise ConfigError([f"device={device} is neither a CUDA device nor the CPU"])
    if backend == "auto":
        return "cuda" if device.type == "cuda" else "reference"
    if backend == "cuda" and device.type != "cuda":
        raise ConfigError([f"backend='cuda' needs a CUDA device: device={device}"])
    return backend


def _check_workspace(workspace: Workspace | None, device: torch.device) -> Workspace | None:
    if workspace is not None:
        if not isinstance(workspace, Workspace):
            raise TypeError(
                f"workspace is a {type(workspace).__name__}: expected jitattn.Workspace"
            )
        if workspace.device != device:
            raise ValueError(f"workspace is on {workspace.device}: expected {device}")
    return workspace


def _check_pages(pages: Pages, config: PlannerConfig, device: torch.device) -> None:
    if not isinstance(pages, Pages):
        raise TypeError(
            f"pages is a {type(pages).__name__}: expected a BlockTable, CsrPages, TokenTable or "
            "RaggedKV"
        )
    if pages.layout.value != config.page_table:
        raise ValueError(
            f"pages is {pages!r} of the layout {pages.layout.value!r}: the planner has "
            f"page_table={config.page_table!r}"
        )
    check_device("pages", pages, device)


def _kv_limit(pages: Pages, config: PlannerConfig, max_kv_len: int | None) -> int:
    capacity = pages.capacity(config.page_size or 1)
    if max_kv_len is None:
        return capacity
    if isinstance(max_kv_len, bool) or not isinstance(max_kv_len, int):
        raise TypeError(f"max_kv_len is a {type(max_kv_len).__name__}: expected an int")
    if max_kv_len < 0:
        raise ValueError(f"max_kv_len is {max_kv_len}: expected at least 0")
    return min(capacity, max_kv_len)
