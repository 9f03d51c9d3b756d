"""Who attends in bench_decoder.py: jitattn, FlashInfer, FlashAttention-3, and the definition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

import jitattn
from bench import oracle, rivals
from bench.decoder_model import ROPE_BASE, Attention, Decoder, Requests, Shape
from jitattn.kernels.common.reference_plan import gather


class DecoderContender(Protocol):
    """One way to decode."""

    name: str

    def version(self) -> str:
        """Return its version, or raise SkipError with the reason why it can't run here."""

    def prepare(self, decoder: Decoder) -> Attention:
        """Compile and bind for ``decoder``, or raise SkipError with the reason why it can't."""


def _heads(shape: Shape, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of q, K and V, [batch_size, heads, head_dim]."""
    heads = (shape.num_qo_heads, shape.num_kv_heads, shape.num_kv_heads)
    q, k, v = qkv.unflatten(1, (-1, shape.head_dim)).split(heads, dim=1)
    return q, k, v


def _new_out(decoder: Decoder) -> Tensor:
    shape = decoder.weights.shape
    return decoder.kv.new_empty((decoder.case.batch_size, shape.num_qo_heads, shape.head_dim))


# --- jitattn --------------------------------------------------------------------------------------


def planner_arguments(shape: Shape, page_size: int, *, early_kv: bool = False) -> dict[str, Any]:
    """Return the arguments of `jitattn.AttentionPlanner` besides the device."""
    return {
        "num_qo_heads": shape.num_qo_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "page_size": page_size,
        "early_kv": early_kv,
    }


def kernel_configs(shape: Shape, page_size: int) -> list[Mapping[str, object] | str]:
    """Return what `jitattn.precompile` takes for all of jitattn's ways."""
    return [
        *(planner_arguments(shape, page_size, early_kv=early_kv) for early_kv in (False, True)),
        f"kernel=preprocess,head_dim={shape.head_dim},page_size={page_size},pairing=neox",
    ]


class JitAttnDecoder:
    """Rotary embedding and append in one launch, then a plan's run; the plan is in the graph."""

    def __init__(self, *, early_kv: bool = False) -> None:
        """Choose whether older pages may be loaded before the append has ended."""
        self.early_kv = early_kv
        self.name = "jitattn-early-kv" if early_kv else "jitattn"

    def version(self) -> str:
        """Return the package's version."""
        return jitattn.__version__

    def prepare(self, decoder: Decoder) -> Attention:
        """Make a planner, bind every layer and plan."""
        return _JitAttn(decoder, early_kv=self.early_kv)


def _send_table(decoder: Decoder, requests: Requests) -> None:
    """Copy the table to the device where it has changed."""
    if requests.has_grown:
        decoder.table.copy_(requests.fill_table(), non_blocking=True)


class _OneLaunch:
    """``preprocess_qkv``."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._rope = jitattn.Rope(decoder.weights.shape.head_dim, base=ROPE_BASE)
        self.pages = jitattn.BlockTable(decoder.table)
        self._q = _new_out(decoder)

    def take(self, layer: int, qkv: Tensor) -> Tensor:
        shape = self._decoder.weights.shape
        return jitattn.preprocess_qkv(
            qkv,
            self._decoder.kv[layer],
            num_qo_heads=shape.num_qo_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            pages=self.pages,
            seq_lens=self._decoder.seq_lens,
            rope=self._rope,
            q_out=self._q,
        )


class _JitAttn:
    def __init__(self, decoder: Decoder, *, early_kv: bool) -> None:
        self._tokens = _OneLaunch(decoder)
        arguments = planner_arguments(
            decoder.weights.shape, decoder.case.page_size, early_kv=early_kv
        )
        planner = jitattn.AttentionPlanner(**arguments, device=decoder.kv.device)
        self._caches = [planner.bind(kv) for kv in decoder.kv]
        self._plan = planner.plan(self._tokens.pages, decoder.seq_lens)
        self._out = _new_out(decoder)
        self._decoder = decoder
        self.plan = self._plan.refresh
        jitattn.build_info(planner)  # waits for what would go on compiling while something is timed

    def before(self, requests: Requests) -> None:
        _send_table(self._decoder, requests)

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        q = self._tokens.take(layer, qkv)
        self._plan.run(q, self._caches[layer], out=self._out)
        return self._out.flatten(1)


# --- FlashInfer -----------------------------------------------------------------------------------


class _TwoLaunches:
    """FlashInfer's rotary embedding, in place, and its append."""

    def __init__(self, decoder: Decoder, table: tuple[Tensor, Tensor, Tensor]) -> None:
        """Hold where tokens go.

        Args:
            decoder: the decoder.
            table: indices, indptr and last_page_len on the device, read at every step.
        """
        self._decoder, self._table = decoder, table
        self._flashinfer: Any = rivals.flashinfer()
        self._requests = torch.arange(decoder.case.batch_size, device=decoder.kv.device).int()
        self._positions = torch.zeros_like(decoder.seq_lens)
        self.places = self._positions
        """Places of the new tokens among the pages of ``table``; positions, unless replaced."""

    def plan(self) -> None:
        torch.sub(self._decoder.seq_lens, 1, out=self._positions)

    def take(self, layer: int, qkv: Tensor) -> Tensor:
        q, k, v = _heads(self._decoder.weights.shape, qkv)
        self._flashinfer.apply_rope_pos_ids_inplace(
            q, k, self._positions, interleave=False, rope_theta=ROPE_BASE
        )
        self._flashinfer.append_paged_kv_cache(
            k, v, self._requests, self.places, self._decoder.kv[layer], *self._table, "NHD"
        )
        return q


class FlashInferDecoder:
    """The decode wrapper on tensor cores, planned on the host before each replay."""

    name = "flashinfer"

    def version(self) -> str:
        """Return FlashInfer's version."""
        return str(rivals.flashinfer().__version__)

    def prepare(self, decoder: Decoder) -> Attention:
        """Plan; the first run compiles."""
        return _FlashInfer(decoder)


class _FlashInfer:
    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        device, table = decoder.kv.device, decoder.table
        # The wrapper's own, which its plan fills.
        indptr, last = (
            torch.zeros(decoder.case.batch_size + more, dtype=torch.int32, device=device)
            for more in (1, 0)
        )
        indices = torch.zeros_like(table.flatten())
        self._wrapper: Any = rivals.flashinfer().BatchDecodeWithPagedKVCacheWrapper(
            rivals.workspace(FlashInferDecoder.name, device),
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=indptr,
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=last,
            backend="fa2",
        )
        self._tokens = _TwoLaunches(decoder, (indices, indptr, last))
        self.plan = self._tokens.plan
        self._indices = torch.zeros_like(indices)
        self._num_indices = 0
        self._out = _new_out(decoder)
        self.before(decoder.requests)

    def before(self, requests: Requests) -> None:
        """Plan from tensors on the CPU, so that nothing waits; indices are on the device."""
        shape, dtype = self._decoder.weights.shape, self._decoder.kv.dtype
        if requests.has_grown:
            indices = requests.indices()
            self._num_indices = len(indices)
            self._indices[: self._num_indices].copy_(indices, non_blocking=True)
        indptr, last_page_len = requests.fill_starts()
        self._wrapper.plan(
            indptr,
            self._indices[: self._num_indices],
            last_page_len,
            shape.num_qo_heads,
            shape.num_kv_heads,
            shape.head_dim,
            self._decoder.case.page_size,
            q_data_type=dtype,
            kv_data_type=dtype,
            seq_lens=requests.lens,
        )

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        q = self._tokens.take(layer, qkv)
        self._wrapper.run(q, self._decoder.kv[layer], out=self._out)
        return self._out.flatten(1)


# --- FlashAttention-3 -----------------------------------------------------------------------------


class Fa3Decoder:
    """FlashAttention-3 of vLLM, its schedule in the graph; tokens are taken in by others.

    Those are FlashInfer's two launches, or jitattn's one: what attention alone makes of a step.
    """

    def __init__(self, *, one_launch: bool = False) -> None:
        """Choose who takes tokens in."""
        self.one_launch = one_launch
        self.name = "fa3-one-launch" if one_launch else "fa3"

    def version(self) -> str:
        """Return vLLM's version, or the library's digest where only the library is here."""
        return rivals.load_fa3()

    def prepare(self, decoder: Decoder) -> Attention:
        """Load it."""
        return _Fa3(decoder, one_launch=self.one_launch)


class _Fa3:
    def __init__(self, decoder: Decoder, *, one_launch: bool) -> None:
        shape, batch_size = decoder.weights.shape, decoder.case.batch_size
        rivals.load_fa3()
        self._tokens = _OneLaunch(decoder) if one_launch else _LastPages(decoder)
        self._caches = [(kv[:, 0], kv[:, 1]) for kv in decoder.kv]
        self._out = _new_out(decoder)
        self._decoder = decoder
        self._step = rivals.Fa3Step(
            q_dtype=decoder.kv.dtype,
            num_qo_heads=shape.num_qo_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            max_q_len=1,
            max_kv_len=decoder.max_kv_len,
            qo_indptr=torch.arange(batch_size + 1, device=decoder.kv.device).int(),
            seq_lens=decoder.seq_lens,
            page_size=decoder.case.page_size,
            block_table=decoder.table,
        )
        self._schedule = self._step.schedule()

    def before(self, requests: Requests) -> None:
        _send_table(self._decoder, requests)

    def plan(self) -> None:
        if isinstance(self._tokens, _LastPages):
            self._tokens.plan()
        self._schedule = self._step.schedule()

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        q = self._tokens.take(layer, qkv)
        self._step.forward(q, *self._caches[layer], self._out, None, self._schedule)
        return self._out.flatten(1)


class _LastPages(_TwoLaunches):
    """FlashInfer's launches beside a block table: they know the last page of each request only."""

    def __init__(self, decoder: Decoder) -> None:
        starts = torch.arange(decoder.case.batch_size + 1, device=decoder.kv.device).int()
        self._pages = torch.zeros_like(decoder.seq_lens)
        self._lens = torch.zeros_like(decoder.seq_lens)
        super().__init__(decoder, (self._pages, starts, self._lens))
        self.places = torch.zeros_like(decoder.seq_lens)

    def plan(self) -> None:
        super().plan()
        size = self._decoder.case.page_size
        torch.remainder(self._positions, size, out=self.places)
        torch.add(self.places, 1, out=self._lens)
        columns = self._positions[:, None] // size
        self._pages.copy_(self._decoder.table.gather(1, columns.long()).squeeze(1))


# --- the definition -------------------------------------------------------------------------------


class Definition:
    """Attention in float64, a request at a time; its tokens take no way of anyone else's.

    Args:
        decoder: the decoder.
        noise: the standard deviation of random relative errors of every output.
    """

    def __init__(self, decoder: Decoder, *, noise: float = 0.0) -> None:
        """Hold the decoder."""
        self._decoder, self._noise = decoder, noise
        self._generator = torch.Generator(device=decoder.kv.device).manual_seed(3)
        self._lens: list[int] = []

    def before(self, requests: Requests) -> None:
        """Copy the table."""
        self._decoder.table.copy_(requests.fill_table())

    def plan(self) -> None:
        """Read the lengths."""
        self._lens = self._decoder.seq_lens.tolist()

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """Take the tokens in and attend."""
        q, k, v = _heads(self._decoder.weights.shape, qkv)
        positions = self._decoder.seq_lens - 1
        q, k = _rotate(q, positions), _rotate(k, positions)
        cache, size = self._decoder.kv[layer], self._decoder.case.page_size
        outs = []
        for b, length in enumerate(self._lens):
            pages = self._decoder.table[b]
            page, place = int(pages[(length - 1) // size]), (length - 1) % size
            cache[page, 0, place], cache[page, 1, place] = k[b], v[b]
            keys, values = (gather(cache[:, side], pages, length) for side in (0, 1))
            outs.append(oracle.attend(q[b : b + 1], keys, values))
        out = torch.cat(outs)
        if self._noise:
            shape = out.shape
            errors = torch.randn(
                shape, generator=self._generator, dtype=out.dtype, device=out.device
            )
            out = out * (1 + self._noise * errors)
        return out.flatten(1).to(qkv.dtype)


def _rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Turn pairs of elements half a head apart, [tokens, heads, head_dim]."""
    half = x.shape[-1] // 2
    steps = torch.arange(half, device=x.device, dtype=torch.float64) / half
    angles = (positions.double()[:, None] * ROPE_BASE**-steps)[:, None]
    a, b = x.double().split(half, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def all_decoder_contenders() -> tuple[DecoderContender, ...]:
    """Return everyone, here or not."""
    return (
        JitAttnDecoder(),
        JitAttnDecoder(early_kv=True),
        FlashInferDecoder(),
        Fa3Decoder(),
        Fa3Decoder(one_launch=True),
    )
