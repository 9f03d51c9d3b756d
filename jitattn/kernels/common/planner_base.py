"""Base classes of planners and plans: arguments, batches, page tables, outputs."""

from __future__ import annotations

import functools
import math
import operator
import weakref
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from jitattn.base import knobs
from jitattn.base.errors import ConfigError
from jitattn.base.validate import check_count, shown, type_name
from jitattn.device.workspace import Workspace, canonical_device
from jitattn.spec.config import MAX_KV_LEN, Arguments, PagedConfig
from jitattn.spec.layout import LISTS, ListLayout
from jitattn.spec.variant import AttentionVariant
from jitattn.tensors.bound_cache import CacheForm, KnownForms
from jitattn.tensors.cache_views import view_of
from jitattn.tensors.device_checks import check_lengths, check_page_ids, check_queries
from jitattn.tensors.overlap import refuse_shared_bytes
from jitattn.tensors.page_table_base import PlannedTable
from jitattn.tensors.page_tables import check_page_table
from jitattn.tensors.quantization import cache_of, saturated
from jitattn.tensors.tensor_checks import (
    INTEGERS,
    check_device,
    check_indptr,
    check_last_stride,
    check_rows,
    check_tensor,
    check_vector,
    check_writable,
)
from jitattn.tensors.tensor_handles import new_handle
from jitattn.tensors.tensor_layouts import NO_BATCH, NO_LAYOUT, Batch, BatchLayout, RowLayout
from jitattn.tensors.token_lists import check_lists
from jitattn.tensors.variant_params import VariantParams, check_variant_params

if TYPE_CHECKING:
    from jitattn.kernels.common.kernel_launch import Replay
    from jitattn.kernels.common.kernel_loader import KernelInfo

CallT = TypeVar("CallT", contravariant=True)
CacheT = TypeVar("CacheT")
PlanT = TypeVar("PlanT")
BackendT = TypeVar("BackendT", covariant=True)

_BACKENDS = ("auto", "cuda", "reference")

MAX_LISTED_QUERIES = 16
"""The most query tokens of a request that lists of pages are for."""

# Kernels read q and write out in vectors of so many elements where rows begin at a multiple.
Q_VECTOR, OUT_VECTOR = 8, 4


class DtypedConfig(PagedConfig, Protocol):
    """What planners look at themselves, of any planner's arguments."""

    @property
    def q_dtype(self) -> str:
        """Of queries."""
        ...

    @property
    def kernel_q_dtype(self) -> str:
        """Of queries as kernels get them."""
        ...

    @property
    def kernel_out_dtype(self) -> str:
        """Of outputs."""
        ...

    def exact(self) -> DtypedConfig:
        """Return those of kernels that compute parts of a softmax."""
        ...

    @property
    def num_qo_heads(self) -> int:
        """Heads of queries."""
        ...

    @property
    def num_kv_heads(self) -> int:
        """Heads of K and V."""
        ...

    @property
    def variant(self) -> AttentionVariant | None:
        """What becomes of logits."""
        ...


class Kernels(Protocol[BackendT]):
    """What makes plans and knows their kernels: of a card, or of the reference backend."""

    def plan(self, workspace: Workspace | None, batch: Batch) -> BackendT:
        """Return a plan of a batch."""
        ...

    def plan_for_call(self, workspace: Workspace | None, batch: Batch) -> BackendT:
        """Return a plan that is run once, by the call that makes it, which may be captured."""
        ...

    def plan_bytes(self, batch_size: int, max_q_len: int) -> int:
        """Return the bytes of device memory that a plan takes."""
        ...

    def infos(self) -> list[KernelInfo]:
        """Return what is known of each kernel, once it is built."""
        ...

    def of(self, config: Any) -> Any:
        """Return the same of another configuration."""
        ...


class _Remembered(NamedTuple):
    """A cache that was bound on the spot: what a call compares, and the result."""

    tensors: tuple[weakref.ref[Tensor], ...]
    facts: tuple[object, ...]
    bound: Any


class BoundTensors:
    """Caches that ``run`` bound on the spot, as long as their tensors live.

    Who passes the same tensors in every step pays for their checks once. Nothing is kept alive:
    what is bound are other views of the memory, and they go with the tensors.
    """

    def __init__(self) -> None:
        """Begin without any."""
        self._known: dict[tuple[int, ...], _Remembered] = {}

    def of(self, kv: object, bind: Callable[[Any], Any]) -> Any:
        """Return the bound cache of a tensor, or of a pair; others are bound anew.

        Raises:
            TypeError, ValueError: those of ``bind``.
        """
        tensors: tuple[Any, ...] = kv if type(kv) is tuple else (kv,)
        key = tuple([id(tensor) for tensor in tensors])
        known = self._known.get(key)
        if known is not None and known.facts == tuple([_facts_of(tensor) for tensor in tensors]):
            return known.bound
        is_plain = all(type(x) is Tensor and not x.requires_grad for x in tensors)
        if not is_plain or view_of(kv) is not None:
            return bind(kv)
        others = tuple([tensor.detach() for tensor in tensors])
        bound = bind(others if type(kv) is tuple else others[0])
        forget = functools.partial(_forget, self._known, key)
        refs = tuple([weakref.ref(tensor, forget) for tensor in tensors])
        facts = tuple([_facts_of(tensor) for tensor in tensors])
        self._known[key] = _Remembered(refs, facts, bound)
        return bound


def _facts_of(tensor: Any) -> tuple[object, ...]:
    # A tensor may be given other memory, or another shape.
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _forget(known: dict[tuple[int, ...], _Remembered], key: tuple[int, ...], _: object) -> None:
    known.pop(key, None)


class TensorDtypes(NamedTuple):
    """The dtypes of a planner's queries and outputs."""

    q: torch.dtype
    out: torch.dtype


class PlannerBase(Generic[PlanT]):
    """A configuration on a device, and the arguments of it, to be read under their names.

    Attributes:
        config: the arguments, with dtypes as names.
        device: where its tensors must be.
        backend: "cuda" or "reference".
        workspace: the workspace given, or None for one of each device and stream.
        kernels: what plans batches.
        tensor_dtypes: those of queries and outputs.
        out_row_shape: heads of out, and elements of a head.
        has_value_checks: whether JITATTN_CHECK asks to look at what tensors hold.
        has_lengths: whether plans have lengths, which lists of tokens have themselves.
        most_queries: the most query tokens of a request.
        make_plan: what a plan is made by, of a planner, a batch and what computes it.
        batch_layout: how the tensors of the last batch lay.
        known_forms: what ``bind`` found of the last caches.
        bound_tensors: caches that ``run`` bound on the spot.
        rebound: what it bound of caches that the planner has bound whose ``exact`` it is.
    """

    config: DtypedConfig
    kernels: Kernels[Any]

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> object: ...

    def __init__(
        self,
        config: DtypedConfig,
        *,
        make_plan: Callable[[Any, Batch, Any], PlanT],
        out_row_shape: tuple[int, int],
        device: torch.device | str | int | None,
        backend: str,
        workspace: Workspace | None,
    ) -> None:
        """Choose device and backend; loads nothing."""
        self.config = config
        self.device = canonical_device(device)
        self.backend = _choose_backend(backend, self.device)
        _check_reference(config.variant, self.backend)
        self.workspace = _check_workspace(workspace, self.device)
        self.tensor_dtypes = TensorDtypes(
            getattr(torch, config.kernel_q_dtype), getattr(torch, config.kernel_out_dtype)
        )
        self.out_row_shape = out_row_shape
        self.has_value_checks = knobs.load().check
        self.has_lengths = config.page_table != ListLayout.INDICES
        has_page_lists = config.page_table == ListLayout.PAGE_LISTS
        self.most_queries = MAX_LISTED_QUERIES if has_page_lists else MAX_KV_LEN
        self.make_plan = make_plan
        self.batch_layout = NO_BATCH
        self._exact: PlannerBase[PlanT] | None = None
        self.known_forms: KnownForms[CacheForm] = KnownForms()
        self.bound_tensors = BoundTensors()
        self.rebound: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a planner can't be copied or pickled: make another one with the same arguments, which "
            "planner.config holds"
        )

    def exact(self) -> PlannerBase[PlanT]:
        """Return a planner whose outputs are float32, of parts that are merged; this one, if it is.

        Raises:
            ValueError: its kernels are not loaded yet, in a capture.
        """
        if self.tensor_dtypes.out is torch.float32:
            return self
        if self._exact is None:  # who gets here at the same time makes another one
            exact = object.__new__(type(self))
            exact.__dict__.update(self.__dict__)
            exact.config = self.config.exact()
            exact.kernels = self.kernels.of(exact.config)
            exact.tensor_dtypes = self.tensor_dtypes._replace(out=torch.float32)
            exact.batch_layout, exact.rebound = NO_BATCH, WeakKeyDictionary()
            exact.known_forms, exact.bound_tensors = KnownForms(), BoundTensors()
            self._exact = exact
        return self._exact

    def workspace_bytes(self, batch_size: int, *, max_q_len: int = 1) -> int:
        """Return the device memory that a plan takes, before there is one.

        That is a workspace, which all plans on a stream share whatever their size, and the plan's
        own schedule. No tensor that ``run`` is given or returns counts, nor the 16-bit values of
        FP8 queries, which live as long as the call. Plans keep their memory for later ones of their
        size; nothing else is allocated, and nothing has to be cleared.

        Args:
            batch_size: requests of the batch.
            max_q_len: the most query tokens of a request.

        Returns:
            Bytes; 0 on the backend "reference".

        Raises:
            TypeError, ValueError: no count.
        """
        batch_size, max_q_len = _count("batch_size", batch_size), _count("max_q_len", max_q_len)
        return self.kernels.plan_bytes(batch_size, max_q_len)

    def plan(
        self,
        pages: PlannedTable,
        seq_lens: Tensor | int,
        qo_indptr: Tensor | None = None,
        *,
        max_q_len: int | None = None,
        max_kv_len: int | None = None,
    ) -> PlanT:
        """Split a batch over the card, on the device, once per step.

        The lengths are snapshot; the tables are read when ``run`` runs. Nothing is copied to the
        host, and nothing waits for the device.

        Args:
            pages: the pages of each request, in the planner's ``page_table`` layout.
            seq_lens: int32 or int64 [batch_size], KV tokens of each request, this step's included.
                Zero and less is padding. A request longer than its table or ``max_kv_len`` gets
                NaN (the reference backend on the CPU raises ValueError). With
                ``page_table="indices"`` it is num_tokens, the query tokens that have lists, and the
                arguments that follow are refused: a query token sees what its list has.
            qo_indptr: int32 [batch_size + 1], where the query tokens of each request begin in q;
                None is one query token a request. Rows of q past its last entry are padding.
            max_q_len: the most query tokens of a request; needed with ``qo_indptr``. A request
                with more gets NaN (ValueError on the CPU). No result depends on it.
            max_kv_len: the longest length that occurs; None is what the table can hold.

        Raises:
            TypeError, ValueError: an argument that doesn't fit the planner.
            CompileError, KernelNotFoundError: the batch needs a kernel that can't be had.
        """
        batch = _checked_batch(self, pages, seq_lens, qo_indptr, max_q_len, max_kv_len)
        return self.make_plan(self, batch, self.kernels.plan(self.workspace, batch))


def make_readable(planner: type[PlannerBase[Any]], arguments: type[Arguments]) -> None:
    """Give ``planner`` a property for each of the ``arguments`` of its configuration."""
    for field in fields(arguments):
        # A __getattr__ would slow down the reading of every attribute.
        setattr(planner, field.name, property(operator.attrgetter(f"config.{field.name}")))


def plan_for_call(
    planner: PlannerBase[PlanT],
    pages: PlannedTable,
    seq_lens: Tensor | int,
    qo_indptr: Tensor | None = None,
    *,
    max_q_len: int | None = None,
    max_kv_len: int | None = None,
) -> PlanT:
    """Return a plan that is run by the call that makes it and dropped then.

    So it may be captured: each replay plans anew, from what is at the tensors' addresses then.

    Args:
        planner: the planner.
        pages: as of its ``plan``, like the arguments that follow.
        seq_lens: likewise.
        qo_indptr: likewise.
        max_q_len: likewise.
        max_kv_len: likewise.

    Raises:
        TypeError, ValueError: as ``plan``, or a kernel is not loaded in a capture.
    """
    batch = _checked_batch(planner, pages, seq_lens, qo_indptr, max_q_len, max_kv_len)
    return planner.make_plan(
        planner, batch, planner.kernels.plan_for_call(planner.workspace, batch)
    )


def _checked_batch(
    planner: PlannerBase[Any],
    pages: PlannedTable,
    seq_lens: Tensor | int,
    qo_indptr: Tensor | None,
    max_q_len: int | None,
    max_kv_len: int | None,
) -> Batch:
    """Check what a plan is made of."""
    layout = planner.batch_layout
    if planner.has_lengths:
        pass
    elif qo_indptr is None and max_q_len is None and max_kv_len is None:
        return _batch_of_lists(planner, pages, seq_lens)
    else:
        _refuse_lengths(qo_indptr=qo_indptr, max_q_len=max_q_len, max_kv_len=max_kv_len)
    if not isinstance(seq_lens, Tensor):
        check_tensor("seq_lens", seq_lens, INTEGERS)
        raise AssertionError
    if not layout.fits(pages, seq_lens):
        # One that is read and replaced whole, since other threads plan, too.
        layout = planner.batch_layout = _batch_layout(planner, pages, seq_lens)
    batch = Batch(
        pages,
        layout.batch_size,
        seq_lens,
        qo_indptr,
        _kv_limit(layout.capacity, max_kv_len),
        query_limit(layout.batch_size, planner.device, qo_indptr, max_q_len),
        layout,
    )
    if batch.max_q_len > planner.most_queries:
        raise ValueError(
            f"max_q_len is {batch.max_q_len}: a request has at most {planner.most_queries} query "
            f"tokens with page_table={planner.config.page_table!r}"
        )
    if planner.has_value_checks and not is_capturing(planner.device):
        check_lengths(batch, planner.config)
    return batch


def _batch_of_lists(planner: PlannerBase[Any], pages: PlannedTable, num_tokens: object) -> Batch:
    layout = planner.batch_layout
    if not layout.fits_lists(pages):
        _check_pages(pages, planner.config, planner.device)
        layout = BatchLayout(pages, None, pages.capacity(planner.config.page_size or 1))
        planner.batch_layout = layout
    if type(num_tokens) is not int and isinstance(num_tokens, Tensor):
        raise TypeError(
            f"seq_lens is a tensor: with page_table={planner.config.page_table!r} give num_tokens, "
            "an integer, in its place"
        )
    count = check_count("num_tokens", num_tokens, least=0)
    if count != layout.batch_size:
        raise ValueError(f"num_tokens is {count}: pages is {pages!r}")
    return Batch(pages, layout.batch_size, None, None, layout.capacity, 1, layout)


def _refuse_lengths(**arguments: object) -> NoReturn:
    name = next(name for name, value in arguments.items() if value is not None)
    raise ValueError(
        f"{name} is given: with page_table='indices' each query token has a list, of what it sees"
    )


def _batch_layout(planner: PlannerBase[Any], pages: PlannedTable, seq_lens: Tensor) -> BatchLayout:
    _check_pages(pages, planner.config, planner.device)
    check_vector("seq_lens", seq_lens, device=planner.device)
    batch_size = pages.batch_size
    if seq_lens.shape[0] != batch_size:
        raise ValueError(
            f"seq_lens has {seq_lens.shape[0]} entries: expected {batch_size}, one for each "
            "request of pages"
        )
    return BatchLayout(pages, seq_lens, pages.capacity(planner.config.page_size or 1))


def build_info(planner: PlannerBase[Any]) -> list[KernelInfo]:
    """Return what is known of each kernel of ``planner``; none on "reference".

    Waits for those that still compile in the background.

    Raises:
        CompileError: one of them doesn't compile.
        TypeError: no planner.
    """
    if not isinstance(planner, PlannerBase):
        raise TypeError(f"planner is a {type_name(planner)}: expected a planner")
    return planner.kernels.infos()


class PlanBackend(Protocol[CallT]):
    """What a plan needs of the code that computes."""

    def run(self, call: CallT) -> None:
        """Compute a call that was checked."""
        ...

    def replay_of(self, call: CallT) -> Replay | None:
        """Return what repeats the last call with other addresses; None if nothing can."""
        ...

    def refresh(self) -> None:
        """Read lengths and offsets anew."""
        ...

    def give_back(self) -> None:
        """Let later plans have the memory."""
        ...


class PlanBase(Generic[CallT]):
    """A batch, split over the card, and how the tensors of its last ``run`` lay.

    Attributes:
        planner: the planner that made it.
        backend: the schedule, and what computes by it.
        batch: what it was made of.
        handle: int64 [] on the CPU, what stands for the plan in calls of ``torch.ops.jitattn``.
    """

    __slots__ = (
        "__weakref__",
        "_checked_lens",
        "_checked_queries",
        "_exact",
        "_lse_layout",
        "_new_lse_layout",
        "_new_out_layout",
        "_out_is_like_q",
        "_out_layout",
        "_pages",
        "_q_layout",
        "_replay",
        "backend",
        "batch",
        "handle",
        "planner",
    )

    def __init__(
        self, planner: PlannerBase[Any], batch: Batch, backend: PlanBackend[CallT]
    ) -> None:
        """Made by ``plan``."""
        self.backend = backend
        self.planner = planner
        self.handle = new_handle(self)
        self.batch = batch
        # The last table that passed its checks, how the last tensors lay that did, and those that
        # run allocated. Outputs go by the number of tokens of q: a new q layout forgets theirs.
        self._pages = batch.pages
        # Of the planner of exact outputs, for a part that is merged with another.
        self._exact: Any = None
        self._replay: Replay | None = None
        self._q_layout = NO_LAYOUT
        self._out_is_like_q = False
        self._out_layout = self._new_out_layout = NO_LAYOUT
        self._lse_layout = self._new_lse_layout = NO_LAYOUT
        # The lengths that the schedule was made from, while the caller's may move on.
        self._checked_lens: Tensor | None = None
        self._checked_queries: Tensor | None = None
        if planner.has_value_checks:
            self._keep_checked()

    def __del__(self) -> None:
        self.backend.give_back()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a plan can't be copied or pickled: make another one with planner.plan")

    def refresh(self) -> None:
        """Recompute the schedule from the tensors the plan was given, on the current stream.

        Who captures this or ``run`` keeps the plan as long as the graph.
        """
        if self._checked_lens is not None and not is_capturing(self.planner.device):
            check_lengths(self.batch, self.planner.config)
            self._keep_checked()
        self.backend.refresh()
        if self._exact is not None:
            self._exact.refresh()

    def _keep_checked(self) -> None:
        """Copy the lengths and offsets that the schedule is made from."""
        batch = self.batch
        lens = batch.pages.tensors[0][:0] if batch.seq_lens is None else batch.seq_lens
        self._checked_lens = lens.clone()
        if batch.qo_indptr is not None:
            self._checked_queries = batch.qo_indptr.clone()

    def _forget_outputs(self) -> None:
        self._out_is_like_q = False
        self._out_layout = self._new_out_layout = NO_LAYOUT
        self._lse_layout = self._new_lse_layout = NO_LAYOUT

    def _refuse(self, **arguments: object) -> None:
        for name, value in arguments.items():
            if value is not None:
                raise ValueError(
                    f"{name} is given, but this planner's configuration has no use for it"
                )

    def _checked_params(self, given: object) -> VariantParams | None:
        planner, config = self.planner, self.planner.config
        return check_variant_params(
            config.variant,
            given,
            planner.device,
            num_qo_heads=config.num_qo_heads,
            num_kv_heads=config.num_kv_heads,
        )

    def _checked_pages(self, pages: PlannedTable) -> PlannedTable:
        if pages is not self._pages:
            self._check_same_size(pages)
            self._pages = pages
        return pages

    def _check_same_size(self, pages: PlannedTable) -> None:
        planned = self.batch.pages
        _check_pages(pages, self.planner.config, self.planner.device)
        page_size = self.planner.config.page_size or 1
        given, wanted = (
            (table.batch_size, table.capacity(page_size)) for table in (pages, planned)
        )
        if given != wanted:
            raise ValueError(
                f"pages has {given[0]} requests of at most {given[1]} tokens: expected {wanted[0]} "
                f"of at most {wanted[1]}, like the plan's"
            )

    def _check_rows_of(self, name: str, q: Tensor, num_heads: int, dim: int) -> RowLayout:
        """Return how queries lie; without offsets there is a row for each request."""
        batch, dtype = self.batch, self.planner.tensor_dtypes.q
        check_tensor(name, q, (dtype,))
        rows = q.shape[0] if q.dim() else 0
        num_tokens = batch.batch_size if batch.qo_indptr is None else rows
        check_rows(name, q, (num_tokens, num_heads, dim), dtype, self.planner.device)
        check_last_stride(name, q)
        return RowLayout(q, vector=Q_VECTOR)

    def _new_out(self, q: Tensor) -> tuple[Tensor, RowLayout]:
        if self._out_is_like_q:
            return torch.empty_like(q), self._new_out_layout  # takes half the time
        planner = self.planner
        out = torch.empty(self._out_shape(), dtype=planner.tensor_dtypes.out, device=planner.device)
        if self._new_out_layout is NO_LAYOUT:
            self._new_out_layout = RowLayout(out, vector=OUT_VECTOR)
            self._out_is_like_q = self._new_out_layout.fits(q)
        return out, self._new_out_layout

    def _checked_out(self, name: str, q: Tensor, out: Tensor) -> tuple[Tensor, RowLayout]:
        if not self._out_layout.fits(out):
            planner = self.planner
            check_rows("out", out, self._out_shape(), planner.tensor_dtypes.out, planner.device)
            check_writable("out", out)
            check_last_stride("out", out)
            self._out_layout = RowLayout(out, vector=OUT_VECTOR)
        # Few calls get as far as the second question.
        if -self._out_layout.span < out.data_ptr() - q.data_ptr() < self._q_layout.span:
            refuse_shared_bytes([("out", out)], [(name, q)])
        return out, self._out_layout

    def _lse(self, lse: Tensor | None) -> tuple[Tensor, RowLayout]:
        device = self.planner.device
        if lse is not None and self._lse_layout.fits(lse):
            return lse, self._lse_layout
        shape = self._out_shape()[:2]
        if lse is not None:
            check_rows("lse", lse, shape, torch.float32, device)
            check_writable("lse", lse)
            self._lse_layout = RowLayout(lse)
            return lse, self._lse_layout
        lse = torch.empty(shape, dtype=torch.float32, device=device)
        if self._new_lse_layout is NO_LAYOUT:
            self._new_lse_layout = RowLayout(lse)
        return lse, self._new_lse_layout

    def _out_shape(self) -> tuple[int, int, int]:
        return self._q_layout.shape[0], *self.planner.out_row_shape

    def _bound(self, kv: object, cache_type: type[CacheT]) -> CacheT:
        """Return ``kv`` as a cache that a planner of this configuration bound, if none has yet."""
        planner: Any = self.planner
        bound: Any = kv
        if not isinstance(kv, cache_type):
            bound = planner.bound_tensors.of(kv, planner.bind)
        if bound.config is not planner.config and bound.config != planner.config:
            raise ValueError(
                "kv was bound by a planner of another configuration: bind it with this one"
            )
        if bound.device != planner.device:
            raise ValueError(f"kv is on {bound.device}: expected {planner.device}")
        return bound  # type: ignore[no-any-return]

    def _run_both(
        self,
        queries: tuple[Tensor, ...],
        kv: Any,
        extra: Any,
        pages: PlannedTable | None,
        out: Tensor,
        lse: Tensor | None,
        sinks: Tensor | None = None,
    ) -> None:
        """Attend to the lists of the plan over ``kv`` and to ``extra``, with one softmax.

        Args:
            queries: those of ``run``, checked.
            kv: a cache that the planner has bound.
            extra: further lists, and a cache for them.
            pages: lists to read instead of the plan's, or None.
            out: checked.
            lse: checked, or None.
            sinks: of the softmax of both.
        """
        lists, extra_kv = self._checked_extra(extra)
        exact: Any = self.planner.exact()
        if self._exact is None:
            self._exact = exact.plan(self.batch.pages, self.batch.batch_size)
        last = plan_for_call(exact, lists, self.batch.batch_size)
        caches = [_rebound(exact, given) for given in (kv, self._bound(extra_kv, type(kv)))]
        shape = (2, *self._out_shape())
        outs = torch.empty(shape, dtype=torch.float32, device=out.device)
        lses = torch.empty(shape[:3], dtype=torch.float32, device=out.device)
        own = {} if sinks is None else {"sinks": sinks}
        none = {} if sinks is None else {"sinks": torch.full_like(sinks, -math.inf)}
        self._exact.run(*queries, caches[0], pages=pages, out=outs[0], lse=lses[0], **own)
        last.run(*queries, caches[1], out=outs[1], lse=lses[1], **none)
        _merge_both(outs, lses, out, lse)

    def _checked_extra(self, extra: Any) -> tuple[PlannedTable, Any]:
        planner = self.planner
        if planner.has_lengths:
            self._refuse(extra=extra)
        if not isinstance(extra, tuple) or len(extra) != 2:
            raise TypeError(f"extra is {shown(extra)}: expected (IndexLists, cache)")
        check_lists(extra[0], ListLayout.INDICES, "extra[0]")
        return extra

    def _check_values(self, pages: PlannedTable, pools: Mapping[str, int], num_tokens: int) -> None:
        """Refuse what tensors hold, where JITATTN_CHECK asks for it."""
        planner = self.planner
        if self._checked_lens is not None and not is_capturing(planner.device):
            check_queries(self._checked_queries, num_tokens)
            check_page_ids(pages, self._checked_lens, self._checked_queries, pools, planner.config)


def _rebound(planner: Any, kv: Any) -> Any:
    """Return what ``planner`` binds of a bound cache."""
    if kv.config is planner.config:
        return kv
    found = planner.rebound.get(kv)
    if found is None:
        given = {name: getattr(kv, name) for name in ("k_scale", "v_scale")}
        scales = {
            name: scale.value if scale.tensor is None else scale.tensor
            for name, scale in given.items()
            if scale is not None
        }
        found = planner.rebound[kv] = planner.bind(cache_of(kv.source), **scales)
    return found


def _merge_both(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor | None) -> None:
    """Merge float32 [2, num_tokens, ...] of two disjoint sets of keys into ``out`` and ``lse``."""
    weights = torch.sigmoid(lses[1] - lses[0])
    # Of two that see nothing the difference is NaN.
    weights = weights.masked_fill(lses[1] == -math.inf, 0.0)
    merged = torch.lerp(outs[0], outs[1], weights[..., None])
    out.copy_(saturated(merged, out.dtype))
    if lse is not None:
        lse.copy_(torch.logaddexp(lses[0], lses[1]))


def is_capturing(device: torch.device) -> bool:
    """Whether a graph is being captured, which can't wait: JITATTN_CHECK sees eager calls only."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _choose_backend(backend: str, device: torch.device) -> str:
    if not isinstance(backend, str) or backend not in _BACKENDS:
        raise ConfigError([f"backend={shown(backend)} is not one of {', '.join(_BACKENDS)}"])
    if backend == "auto":
        return "cuda" if device.type == "cuda" else "reference"
    if backend == "cuda" and device.type != "cuda":
        raise ConfigError([f"backend='cuda' needs a CUDA device: device={device}"])
    return backend


def _check_reference(variant: AttentionVariant | None, backend: str) -> None:
    if backend == "reference" and variant is not None and variant.reference is None:
        raise ConfigError(
            [
                f"variant={variant} has no reference, which backend='reference' runs: give "
                "AttentionVariant(..., reference=...), or a CUDA device"
            ]
        )


def _check_workspace(workspace: Workspace | None, device: torch.device) -> Workspace | None:
    if workspace is not None:
        if not isinstance(workspace, Workspace):
            raise TypeError(
                f"workspace is a {type(workspace).__name__}: expected jitattn.Workspace"
            )
        if workspace.device != device:
            raise ValueError(f"workspace is on {workspace.device}: expected {device}")
    return workspace


def _check_pages(pages: PlannedTable, config: DtypedConfig, device: torch.device) -> None:
    if config.page_table in LISTS:
        check_lists(pages, ListLayout(config.page_table))
        pages.check_heads(config.num_kv_heads)
    else:
        check_page_table(pages)
    if pages.layout != config.page_table:
        raise ValueError(
            f"pages is {pages!r} of the layout {pages.layout.value!r}: the planner has "
            f"page_table={config.page_table!r}"
        )
    check_device("pages", pages, device)


def _kv_limit(capacity: int, max_kv_len: int | None) -> int:
    if max_kv_len is None:
        return capacity
    return min(capacity, _count("max_kv_len", max_kv_len))


def query_limit(
    batch_size: int, device: torch.device, qo_indptr: Tensor | None, max_q_len: int | None
) -> int:
    """Check where query tokens begin, and return the most that a request has.

    Raises:
        TypeError, ValueError: naming ``qo_indptr`` or ``max_q_len``.
    """
    if max_q_len is not None:
        max_q_len = _count("max_q_len", max_q_len)
    if qo_indptr is None:
        if max_q_len not in (None, 1):
            raise ValueError(f"max_q_len is {max_q_len}: without qo_indptr a request has one token")
        return 1
    check_indptr("qo_indptr", qo_indptr)
    check_device("qo_indptr", qo_indptr, device)
    if qo_indptr.shape[0] != batch_size + 1:
        raise ValueError(f"qo_indptr has {qo_indptr.shape[0]} entries: expected {batch_size + 1}")
    if max_q_len is None:
        raise ValueError("max_q_len is None: qo_indptr needs the most tokens of a request")
    return max_q_len


def _count(name: str, value: object) -> int:
    return min(check_count(name, value, least=0), MAX_KV_LEN)
