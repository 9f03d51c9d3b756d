"""Attention over prefixes that requests share: ``CascadePlanner``, from planner and merge.

Keys lie in levels. A request of a level is a row of consecutive query tokens that see the same
keys there: at the first level those of all that share a prompt, at the last level those of one
request. Each level is attended by its own plan, so that shared keys are read once for all who share
them, and what the levels found is merged by lse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jitattn.base.errors import ConfigError
from jitattn.base.validate import check_flag
from jitattn.device.workspace import Workspace
from jitattn.kernels.attention.api import AttentionPlanner, Plan
from jitattn.kernels.common.planner_base import is_capturing
from jitattn.kernels.merge.api import merge_into
from jitattn.spec.config import PlannerConfig
from jitattn.spec.layout import LISTS
from jitattn.tensors.bound_cache import BoundCache
from jitattn.tensors.page_table_base import PageTable
from jitattn.tensors.quantization import KVCache
from jitattn.tensors.scales import ScaleLike
from jitattn.tensors.tensor_checks import check_rows, check_tensor, check_writable


@dataclass(frozen=True)
class CascadeLevel:
    """The keys of one level.

    Attributes:
        pages: those of each request of the level, in the planner's ``page_table`` layout.
        seq_lens: int32 or int64 [batch_size of the level], keys of each request; zero and less is
            none. At the last level this step's tokens are among them.
        qo_indptr: int32 [batch_size + 1], where the query tokens of each request begin in q; None
            is one a request.
        max_q_len: the most query tokens of a request of the level; needed with ``qo_indptr``.
        max_kv_len: the longest length that occurs; None is what the table can hold.
    """

    pages: PageTable
    seq_lens: Tensor
    qo_indptr: Tensor | None = None
    max_q_len: int | None = None
    max_kv_len: int | None = None


@dataclass(frozen=True, slots=True)
class BoundCascadeCache:
    """A cache that a ``CascadePlanner`` has checked, for each of its planners."""

    prefix: BoundCache
    last: BoundCache


class CascadePlanner:
    """Planners of one configuration: one for shared levels, one for the last. Thread-safe.

    Args:
        num_qo_heads: query heads, a multiple of ``num_kv_heads``.
        num_kv_heads: heads of K and V.
        head_dim: elements of a head.
        page_size: tokens of a page; None for ragged K and V.
        head_dim_vo: elements of a head of V and out; None is ``head_dim``.
        q_dtype: a torch dtype or its name.
        kv_dtype: likewise, of the cache.
        out_dtype: likewise, of out and of what levels find before it is merged; None is
            ``q_dtype``.
        kv_layout: the order of a page's dimensions, "NHD" or "HND".
        page_table: the layout of the tables of all levels.
        causal: at the last level query tokens see no later ones; shared levels are seen whole.
        window_left: refused unless -1: how much of a shared level a window reaches depends on
            lengths of the last.
        logits_soft_cap: score becomes cap * tanh(score / cap); 0 is off.
        sm_scale: multiplies q.k; None is ``head_dim ** -0.5``.
        use_sinks: ``run`` gets ``sinks``, which count once.
        use_custom_mask: refused: masks are over the last keys of requests, of any level.
        batch_invariant: refused: bits of a request depend on who shares its levels.
        early_kv: a promise, as there; of all levels.
        fp8_products: "exact" or "fast", as there.
        num_sms: multiprocessors to use; None is all.
        workspace: scratch memory; None is one for each device and stream.
        device: None is the current CUDA device, or the CPU without one.
        backend: "auto" is "cuda" on a CUDA device and "reference" on the CPU.

    Attributes:
        prefix: of the levels before the last, without causality and sinks.
        last: of the last level.
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
        batch_invariant: bool = False,
        early_kv: bool = False,
        fp8_products: str = "exact",
        num_sms: int | None = None,
        workspace: Workspace | None = None,
        device: torch.device | str | int | None = None,
        backend: str = "auto",
    ) -> None:
        """Choose and load the kernels; arguments as of ``AttentionPlanner``.

        Raises:
            ConfigError: with every reason why the configuration has no kernel or no cascade.
            CompileError, KernelNotFoundError: a kernel can't be had.
        """
        given = {name: value for name, value in locals().items() if name != "self"}
        arguments = {
            name: value
            for name, value in given.items()
            if name not in ("workspace", "device", "backend")
        }
        config = PlannerConfig.from_arguments(arguments)
        if reasons := _reasons(config):
            raise ConfigError(reasons)
        self.last = AttentionPlanner(**given)
        self.prefix = (
            AttentionPlanner(**given | {"causal": False, "use_sinks": False})
            if config.causal or config.use_sinks
            else self.last
        )
        self.config = self.last.config
        self.device = self.last.device
        self.backend = self.last.backend

    def bind(
        self,
        kv_cache: KVCache,
        *,
        k_scale: ScaleLike | None = None,
        v_scale: ScaleLike | None = None,
    ) -> BoundCascadeCache:
        """Check a cache, which holds the pages of all levels, once per layer.

        Args:
            kv_cache: as of ``AttentionPlanner.bind``.
            k_scale: likewise.
            v_scale: likewise.

        Raises:
            TypeError, ValueError: as there.
        """
        last = self.last.bind(kv_cache, k_scale=k_scale, v_scale=v_scale)
        if self.prefix is self.last:
            return BoundCascadeCache(last, last)
        prefix = self.prefix.bind(kv_cache, k_scale=k_scale, v_scale=v_scale)
        return BoundCascadeCache(prefix, last)

    def plan(self, levels: Sequence[CascadeLevel]) -> CascadePlan:
        """Split a batch over the card, level by level, on the device, once per step.

        Nothing is copied to the host. Requests of a level follow each other in q, as those of other
        levels do, so that each of a shared level has the query tokens of some requests of the last.

        Args:
            levels: at least one; those that more query tokens share come first.

        Raises:
            TypeError, ValueError: an argument that doesn't fit the planner, with its level; on the
                CPU also, with ``causal``, a request of several query tokens of which some are not
                among its keys of the last level: they would see keys of shared levels that come
                after them. On a device they do see them; ``JITATTN_CHECK=1`` raises there, too.
            CompileError, KernelNotFoundError: the batch needs a kernel that can't be had.
        """
        if not isinstance(levels, (list, tuple)) or not levels:
            raise TypeError("levels: expected a list of at least one CascadeLevel")
        plans = []
        for i, level in enumerate(levels):
            if not isinstance(level, CascadeLevel):
                raise TypeError(f"levels[{i}] is a {type(level).__name__}: expected CascadeLevel")
            plans.append(self._plan_level(i, level, self._planner_of(i, len(levels))))
        return CascadePlan(self, tuple(levels), plans)

    def _planner_of(self, index: int, num_levels: int) -> AttentionPlanner:
        return self.last if index == num_levels - 1 else self.prefix

    @staticmethod
    def _plan_level(index: int, level: CascadeLevel, planner: AttentionPlanner) -> Plan:
        try:
            return planner.plan(
                level.pages,
                level.seq_lens,
                level.qo_indptr,
                max_q_len=level.max_q_len,
                max_kv_len=level.max_kv_len,
            )
        except TypeError as error:
            raise TypeError(f"levels[{index}]: {error}") from error
        except ValueError as error:
            raise ValueError(f"levels[{index}]: {error}") from error


class CascadePlan:
    """A batch of several levels. For one thread at a time, and one stream."""

    __slots__ = ("_levels", "_planner", "_plans")

    def __init__(
        self, planner: CascadePlanner, levels: tuple[CascadeLevel, ...], plans: list[Plan]
    ) -> None:
        """Made by ``plan``."""
        self._planner = planner
        self._levels = levels
        self._plans = plans
        self._check_levels()

    def refresh(self) -> None:
        """Recompute the schedules from the tensors the plan was given, on the current stream.

        Who captures this or ``run`` keeps the plan as long as the graph.

        Raises:
            ValueError: on the CPU, lengths that ``plan`` refuses.
        """
        self._check_levels()
        for plan in self._plans:
            plan.refresh()

    def run(
        self,
        q: Tensor,
        kv: BoundCascadeCache | KVCache,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        sinks: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend each query token to the keys of all levels, on the current stream.

        That is attention over the keys of its request at the first level, then those at the second
        and so on; scores, soft cap and lse as of ``Plan.run``. Allocates what levels find.

        Args:
            q: [num_tokens, num_qo_heads, head_dim], q_dtype; the last dimension contiguous.
            kv: from ``bind``, or a cache, which is bound on the spot.
            out: [num_tokens, num_qo_heads, head_dim_vo], out_dtype; allocated when None.
            lse: float32 [num_tokens, num_qo_heads], any strides; filled when given.
            return_lse: return lse as well, allocated when None.
            sinks: [num_qo_heads], any float dtype and stride, with ``use_sinks``.

        Returns:
            out, or (out, lse) with ``return_lse``. A row without keys at any level has out 0 and
            lse -inf, or its sink; rows past the last request of every level have out 0 and -inf.

        Raises:
            TypeError, ValueError: an argument that doesn't fit the planner, before any launch.

        Defined by: jitattn/kernels/attention/reference.py::attention, over the keys of all levels.
        """
        check_flag("return_lse", return_lse)
        planner, plans = self._planner, self._plans
        bound = kv if isinstance(kv, BoundCascadeCache) else planner.bind(kv)
        if len(plans) == 1:
            return plans[0].run(q, bound.last, out=out, lse=lse, return_lse=return_lse, sinks=sinks)
        check_tensor("q", q, (planner.last.tensor_dtypes.q,))
        config = planner.config
        shape = *q.shape[:2], config.head_dim_vo or config.head_dim
        dtype = planner.last.tensor_dtypes.out
        out = self._output("out", out, shape, dtype)
        lse = self._output("lse", lse, shape[:2], torch.float32)
        outs = torch.empty((len(plans), *shape), dtype=dtype, device=planner.device)
        lses = torch.empty((len(plans), *shape[:2]), dtype=torch.float32, device=planner.device)
        # The last level first: it refuses what doesn't fit any, sinks too.
        plans[-1].run(q, bound.last, out=outs[-1], lse=lses[-1], sinks=sinks)
        for i, plan in enumerate(plans[:-1]):
            plan.run(q, bound.prefix, out=outs[i], lse=lses[i])
        merge_into(outs, lses, out, lse)
        return (out, lse) if return_lse else out

    def _output(
        self, name: str, given: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        device = self._planner.device
        if given is None:
            return torch.empty(shape, dtype=dtype, device=device)
        check_rows(name, given, shape, dtype, device)
        check_writable(name, given)
        return given

    def _check_levels(self) -> None:
        """Refuse query tokens that come before keys of a shared level, where lengths are known."""
        planner = self._planner
        is_checked = planner.device.type == "cpu" or planner.last.has_value_checks
        if not is_checked or not planner.config.causal or is_capturing(planner.device):
            return
        shared = [_rows(level) for level in self._levels[:-1]]
        for request, (begin, end, kv_len) in enumerate(_rows(self._levels[-1])):
            if end - begin <= max(kv_len, 1):
                continue
            for i, rows in enumerate(shared):
                if any(n > 0 and start < end and stop > begin for start, stop, n in rows):
                    raise ValueError(
                        f"request {request} has {end - begin} query tokens and {kv_len} keys at "
                        f"the last level: the others would see keys of levels[{i}] after them"
                    )


def _rows(level: CascadeLevel) -> list[tuple[int, int, int]]:
    """Return for each request of a level where its query tokens begin and end, and its keys."""
    lens = level.seq_lens.tolist()
    ends = list(range(len(lens) + 1)) if level.qo_indptr is None else level.qo_indptr.tolist()
    return [(ends[i], ends[i + 1], n) for i, n in enumerate(lens)]


def _reasons(config: PlannerConfig) -> list[str]:
    """Why a configuration can't be attended in levels."""
    reasons = []
    if config.has_fp8_queries:
        reasons.append(
            f"q_dtype={config.q_dtype} is refused in a cascade: every level would dequantise them"
        )
    if config.page_table in LISTS:
        reasons.append(
            f"page_table={config.page_table} is refused in a cascade: levels have all tokens of "
            "their requests"
        )
    if config.window_left != -1:
        reasons.append(
            f"window_left={config.window_left} is refused in a cascade: how much of a shared level "
            "a window reaches depends on the lengths of the last one"
        )
    if config.use_custom_mask:
        reasons.append(
            "use_custom_mask=True is refused in a cascade: a mask is over the last keys of a "
            "request, which may be of several levels"
        )
    if config.batch_invariant:
        reasons.append(
            "batch_invariant=True is refused in a cascade: bits depend on which requests share a "
            "level"
        )
    return reasons
