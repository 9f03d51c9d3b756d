"""Which kernels a serving step of a model launches, as configurations. Torch-free."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace

from jitattn.base.errors import ConfigError
from jitattn.base.record import Value
from jitattn.bundles.model_config import Model, read_model
from jitattn.kernels.pages.spec import TransferConfig
from jitattn.kernels.preprocess.spec import SLOTS, PreprocessConfig
from jitattn.kernels.registry import AnyConfig
from jitattn.kernels.select.spec import SelectConfig
from jitattn.spec.config import MLAConfig, PlannerConfig
from jitattn.spec.dtype import KV_DTYPES, DType
from jitattn.spec.layout import PAGE_TABLES, Layout, ListLayout, Pairing


class Serving(Value):
    """How a model is served, which its file does not say.

    ``tensor_parallel`` is over how many devices its heads are divided. ``dtype`` None is the
    file's, ``"auto"`` among ``kv_dtypes`` the model's; ``page_sizes`` None is the default of the
    model's planner: 16 tokens, and 64 for latent attention.
    """

    tensor_parallel: int = 1
    dtype: str | None = None
    kv_dtypes: tuple[str, ...] = ("auto",)
    page_sizes: tuple[int, ...] | None = None
    page_tables: tuple[str, ...] = ("shared", "separate")


class Need(Value):
    """One configuration that a model needs, and what for."""

    use: str
    config: AnyConfig
    reasons: tuple[str, ...] = ()
    """Why no kernel serves it, where the configuration alone does not tell."""


def needs_of(model: Model, serving: Serving) -> list[Need]:
    """Return what a serving step of a model needs, each configuration once.

    Raises:
        ConfigError: its heads cannot be divided as ``serving`` asks, or a name there is unknown.
    """
    _check_names(serving)
    dtype = serving.dtype or model.dtype
    kv_dtypes = [dtype if name == "auto" else name for name in serving.kv_dtypes]
    heads = _heads_of_a_device(model, serving.tensor_parallel)
    found = {
        need.config: need
        for kv_dtype, (page_size, page_table) in itertools.product(
            dict.fromkeys(kv_dtypes), _caches(serving, model)
        )
        for need in (_latent_needs if model.latent else _needs)(
            model, heads, _Cache(dtype, kv_dtype, page_size, page_table)
        )
    }
    return list(found.values())


def from_model(path: str | os.PathLike[str], serving: Serving | None = None) -> list[Need]:
    """Return what a serving step of the model in a ``config.json``, or its folder, needs.

    Raises:
        ConfigError: its attention is not understood, or its heads cannot be divided.
        OSError: the file cannot be read.
    """
    return needs_of(read_model(path), serving or Serving())


def _check_names(serving: Serving) -> None:
    """Refuse what no model has, once, and not once for each configuration."""
    lists = (
        ("page_table", serving.page_tables, PAGE_TABLES),
        ("kv_dtype", serving.kv_dtypes, ("auto", *KV_DTYPES)),
    )
    reasons = [
        f"{argument}={name} is not one of {', '.join(known)}"
        for argument, names, known in lists
        for name in dict.fromkeys(names)
        if name not in known
    ]
    if reasons:
        raise ConfigError(reasons)


class _Cache:
    """One kind of cache."""

    def __init__(self, dtype: str, kv_dtype: str, page_size: int | None, page_table: str) -> None:
        self.dtype, self.kv_dtype = dtype, kv_dtype
        self.page_size, self.page_table = page_size, page_table

    @property
    def tables(self) -> tuple[str, ...]:
        """How those who write tokens into pages find them; without pages nobody does."""
        return () if self.page_size is None else (self.page_table, SLOTS)


def _caches(serving: Serving, model: Model) -> Iterator[tuple[int | None, str]]:
    usual = MLAConfig.page_size if model.latent else PlannerConfig.page_size
    page_sizes = (usual,) if serving.page_sizes is None else serving.page_sizes
    for page_table in dict.fromkeys(serving.page_tables):
        if page_table == Layout.RAGGED:
            yield None, page_table
        else:
            yield from ((page_size, page_table) for page_size in dict.fromkeys(page_sizes))


def _heads_of_a_device(model: Model, count: int) -> tuple[int, int]:
    """Return the query and the KV heads that each of ``count`` devices has."""
    num_qo_heads, num_kv_heads = model.num_qo_heads, model.num_kv_heads
    if count < 1:
        raise ConfigError([f"tensor_parallel={count} is not at least 1"])
    reasons = []
    if num_qo_heads % count:
        most = min(num_qo_heads, 1024)
        fitting = ", ".join(str(n) for n in range(1, most + 1) if num_qo_heads % n == 0)
        reasons.append(
            f"tensor_parallel={count} does not divide num_attention_heads={num_qo_heads}; "
            f"{fitting} do"
        )
    # With more devices than KV heads, each has a copy of one.
    if not model.latent and num_kv_heads % count and count % num_kv_heads:
        reasons.append(
            f"tensor_parallel={count} is neither a divisor nor a multiple of "
            f"num_key_value_heads={num_kv_heads}"
        )
    if reasons:
        raise ConfigError(reasons)
    return num_qo_heads // count, max(1, num_kv_heads // count)


def _needs(model: Model, heads: tuple[int, int], cache: _Cache) -> Iterator[Need]:
    for window in model.windows:
        config = PlannerConfig(
            num_qo_heads=heads[0], num_kv_heads=heads[1], head_dim=model.head_dim,
            page_size=cache.page_size, q_dtype=cache.dtype, kv_dtype=cache.kv_dtype,
            page_table=cache.page_table, window_left=window, logits_soft_cap=model.logits_soft_cap,
            sm_scale=model.sm_scale, use_sinks=model.use_sinks,
        )  # fmt: skip
        yield Need(use="attention", config=config)
    for table in cache.tables:
        kinds = itertools.product(model.pairings, model.biases, model.norms)
        for pairing, use_bias, use_norm in kinds:
            # Three positions have no meaning where nothing is turned.
            writer = _writer(
                cache,
                table,
                model.head_dim,
                pairing=pairing.value,
                use_mrope=model.use_mrope and pairing is not Pairing.NONE,
                use_bias=use_bias,
                use_norm=use_norm,
            )
            yield Need(use="preprocess", config=writer, reasons=_why_not(model, writer))
        yield Need(use="append", config=_writer(cache, table, model.head_dim))


def _why_not(model: Model, writer: PreprocessConfig) -> tuple[str, ...]:
    """Return what the kernel, whose launches get ``rotary_dim``, does not tell."""
    is_neox, blocks = writer.pairing == Pairing.NEOX, DType(writer.kv_dtype).blocks
    if blocks is not None and is_neox and model.rotary_dim % blocks.neox_multiple:
        return (
            f"kv_dtype={writer.kv_dtype} takes NeoX pairs where a multiple of "
            f"{blocks.neox_multiple} elements is turned, and this model turns {model.rotary_dim}",
        )
    return ()


def _latent_needs(model: Model, heads: tuple[int, int], cache: _Cache) -> Iterator[Need]:
    latent = model.latent
    assert latent is not None
    config = MLAConfig(
        num_heads=heads[0], kv_lora_rank=latent.kv_lora_rank,
        qk_rope_head_dim=latent.qk_rope_head_dim, page_size=cache.page_size,
        sm_scale=model.sm_scale, q_dtype=cache.dtype, kv_dtype=cache.kv_dtype,
        page_table=cache.page_table,
    )  # fmt: skip
    yield Need(use="latent attention", config=config)
    if model.indexer is not None:
        # Every device has the whole indexer: it chooses for all heads.
        indexer = SelectConfig(
            kernel="index_logits",
            head_dim=model.indexer.head_dim,
            num_heads=model.indexer.num_heads,
        )
        lists = replace(config, page_table=ListLayout.INDICES.value)
        yield Need(use="indexer", config=indexer)
        yield Need(use="choice of tokens", config=SelectConfig(kernel="select_tokens"))
        yield Need(use="attention to chosen tokens", config=lists)
    # A prompt may have its latents multiplied out to K and V of every head.
    prompt = PlannerConfig(
        num_qo_heads=heads[0],
        num_kv_heads=heads[0],
        head_dim=latent.qk_nope_head_dim + latent.qk_rope_head_dim,
        head_dim_vo=latent.v_head_dim,
        page_size=None,
        q_dtype=cache.dtype,
        kv_dtype=cache.dtype,
        page_table=Layout.RAGGED.value,
        sm_scale=model.sm_scale,
    )
    yield Need(use="prompt attention", config=prompt)
    for out_dtype in dict.fromkeys((cache.dtype, cache.kv_dtype)):
        gather = TransferConfig(kv_dtype=cache.kv_dtype, out_dtype=out_dtype)
        yield Need(use="gather", config=gather)
    for table in cache.tables:
        # Latents stand in the place of K, rope parts of V.
        writer = _writer(cache, table, latent.kv_lora_rank, head_dim_vo=latent.qk_rope_head_dim)
        yield Need(use="append", config=writer)
        # What rotates takes rope parts as K, and latents, which it leaves as they are, as V.
        for pairing in model.pairings:
            rotating = _writer(
                cache,
                table,
                latent.qk_rope_head_dim,
                head_dim_vo=latent.kv_lora_rank,
                pairing=pairing.value,
                use_mrope=model.use_mrope and pairing is not Pairing.NONE,
            )
            yield Need(use="preprocess", config=rotating, reasons=_why_not(model, rotating))


def _writer(cache: _Cache, table: str, head_dim: int, **others: object) -> PreprocessConfig:
    """Return what puts tokens into pages, without rotation where ``others`` name none."""
    assert cache.page_size is not None
    return PreprocessConfig(
        head_dim=head_dim,
        page_size=cache.page_size,
        qkv_dtype=cache.dtype,
        kv_dtype=cache.kv_dtype,
        page_table=table,
        **({"pairing": Pairing.NONE.value} | others),  # type: ignore[arg-type]
    )
