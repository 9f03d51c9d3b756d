"""``preprocess_qkv`` and ``append_kv`` on a CUDA device.

A model calls them once a layer, with tensors that lie like those of the layer before: such a call
writes addresses into parameters that are there, and launches. Where all of them have been before,
as in the step before, it copies the parameters of that time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from jitattn.base import knobs
from jitattn.base.validate import INT32_MAX
from jitattn.device.driver import Launch, LoadedKernel, device_facts
from jitattn.kernels.common import device_kernels
from jitattn.kernels.common.launch_cache import CallParams, CallTensors, Source, address_of
from jitattn.kernels.common.value_checks import checking
from jitattn.kernels.preprocess.check import PreprocessCall, TokenCall, check, memory_pairs
from jitattn.kernels.preprocess.check_cache import divisor_value
from jitattn.kernels.preprocess.check_values import check_values
from jitattn.kernels.preprocess.launch_params import (
    address_sources,
    alignment,
    scales_of,
    spec_of,
    write_call,
    write_rope,
)
from jitattn.kernels.preprocess.params import PREPROCESS_PARAMS
from jitattn.kernels.preprocess.reference import places_of
from jitattn.kernels.preprocess.spec import PreprocessSpec
from jitattn.kernels.preprocess.tile import preprocess_tile
from jitattn.spec.layout import Loader
from jitattn.spec.params import Divisor
from jitattn.tensors.cache_views import view_of
from jitattn.tensors.overlap import Apart
from jitattn.tensors.page_tables import check_view

# Rows of a token that a group of threads takes one after the other, so that it computes angles
# once; fewer where that leaves SMs without work.
_MAX_ROWS = 4
_CTAS_PER_SM = 16


class PreprocessLauncher:
    """Launches for calls that are alike. Holds none of their tensors."""

    def __init__(self, call: TokenCall, given: CallTensors, card: int) -> None:
        """Fill the parameters, but for addresses and numbers."""
        arguments = call.given
        self._device, self._card = call.device, card
        self._num_tokens, self._dtype = call.num_tokens, call.k.dtype
        self._new_shape = None if call.q is None or arguments.q_out is not None else call.q.shape
        self._rope = arguments.rope  # owns what the parameters point to
        # A new q_out comes last.
        names = given.names if self._new_shape is None else [*given.names, "q_out"]
        sources = address_sources(call, given, names)
        self._params = _new_params(call)
        self._op: Any = self._params.struct.op
        self._params.connect(
            {f"op.{field}": source for field, source in sources.items()}
            | _page_sources(self._params.struct, names),
            names,
        )
        # Scales that are numbers.
        self._numbers = [
            (PreprocessCall._fields.index(name), name)
            for name in scales_of(call)
            if isinstance(getattr(arguments, name), Real)
        ]
        self._can_be_aligned, self._aligned = alignment(call, sources, names)
        # Both loaders' kernels, of which the addresses choose.
        layout = None if arguments.pages is None else arguments.pages.layout
        self._specs = {
            True: spec_of(call, layout, Loader.VECTOR),
            False: spec_of(call, layout, Loader.PLAIN),
        }
        self._launches: dict[bool, Launch] = {}
        self._apart = Apart(given.tensors, memory_pairs(given.names, arguments.pages))
        self._apart.learn(given.pointers())
        self._has_view = hasattr(arguments.pages, "view")
        self._verifies = knobs.load().check

    def __call__(self, call: PreprocessCall, tensors: list[Tensor]) -> Tensor | None:
        """Launch on the current stream of the tensors' device, and return q."""
        if self._has_view:
            check_view(call.pages, view_of(call.kv_cache))
        if self._verifies and not torch.cuda.is_current_stream_capturing():
            verify(call)
        pointers = tuple(map(address_of, tensors))
        out = call.q_out
        if self._new_shape is not None:
            out = torch.empty(self._new_shape, dtype=self._dtype, device=self._device)
            pointers = (*pointers, out.data_ptr())
        key: tuple[Any, ...] = pointers
        if self._numbers:
            key = (*key, *[call[i] for i, _ in self._numbers])
        params = self._params
        image = params.images.get(key)
        if image is None:
            params.keep(key, self._fill(call, pointers))
            image = params.images[key]
        launch, params.image[:] = image
        if launch is not None:
            device_kernels.launch_on(self._card, launch)
        return out

    def _fill(self, call: PreprocessCall, pointers: Sequence[int]) -> Launch | None:
        """Fill the parameters for these addresses and numbers, and return the launch."""
        if not self._apart.holds(pointers):
            check(call)  # which refuses those that share bytes
            self._apart.learn(pointers)
        if self._num_tokens == 0:
            return None
        self._params.write(pointers)
        for i, name in self._numbers:
            getattr(self._op, name).value = divisor_value(name, call[i])
        is_aligned = self._can_be_aligned and not any(pointers[i] & m for i, m in self._aligned)
        return self._launches.get(is_aligned) or self._new_launch(is_aligned=is_aligned)

    def _new_launch(self, *, is_aligned: bool) -> Launch:
        spec = self._specs[is_aligned]
        kernel = _load(spec, self._card)
        tile = preprocess_tile(spec)
        op = self._op
        num_rows = op.num_qo_heads + 2 * op.num_kv_heads
        num_sms = device_facts(self._card).num_sms
        num_items = groups_per_token(num_rows, self._num_tokens, tile.groups, num_sms)
        op.groups_per_token = Divisor.of(num_items)
        grid = -(-self._num_tokens * num_items // tile.groups)
        launch = self._launches[is_aligned] = Launch(
            kernel, self._params.struct, grid, tile.num_threads
        )
        return launch


def _new_params(call: TokenCall) -> CallParams[Any]:
    """Return parameters that are filled but for addresses and numbers."""
    given = call.given
    params: CallParams[Any] = CallParams(
        PREPROCESS_PARAMS[None if given.pages is None else given.pages.layout]
    )
    write_call(params.struct.op, call)
    if given.rope is not None:
        write_rope(params.struct.op, given.rope, call.device)
    if given.pages is not None:
        given.pages.fill(params.struct.pages)
    return params


def _page_sources(params: Any, names: Sequence[str]) -> dict[str, Source | None]:
    """Return which tensors the two addresses are of with which every page table begins."""
    if not hasattr(params, "pages"):
        return {}
    fields = [name for name, _ in type(params.pages)._fields_[:2]]
    places = [(name, 0) for name in names if name.startswith("pages[")]
    return {f"pages.{field}": place for field, place in zip_longest(fields, places)}


def verify(given: PreprocessCall) -> None:
    """Wait for the device and raise ValueError for what a kernel would skip: JITATTN_CHECK."""
    names = ("seq_lens", "qo_indptr", "slots", "positions", "position_delta")
    values = {name: getattr(given, name) for name in names}
    copies: dict[str, Any] = {
        name: None if value is None else value.cpu() for name, value in values.items()
    }
    call = check(given)
    with checking():
        pages = given.pages
        if pages is not None:
            pages = pages.to_cpu()
        call = replace(call, given=given._replace(pages=pages, **copies))
        check_values(call)
        places_of(call)


def groups_per_token(num_rows: int, num_tokens: int, groups: int, num_sms: int) -> int:
    """Return to how many groups of threads the rows of a token are dealt.

    ``groups`` are those of a CTA. Launches of few tokens deal each row to one.
    """
    ctas = num_tokens * num_rows // groups
    rows = max(1, min(_MAX_ROWS, ctas // (num_sms * _CTAS_PER_SM)))
    num_items = -(-num_rows // rows)
    if num_tokens * num_items + groups > INT32_MAX:
        raise ValueError(f"qkv has {num_tokens} tokens of {num_rows} heads: too many for a launch")
    return num_items


def _load(spec: PreprocessSpec, card: int) -> LoadedKernel:
    if not device_kernels.is_loaded(spec, card) and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"{spec.symbol} is not loaded, and a capture can't load it: make such a call before it"
        )
    return device_kernels.load(spec, card)
