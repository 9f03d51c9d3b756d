"""Specs of kernels that choose what sparse attention reads, and their arguments. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from jitattn.base.errors import ConfigError
from jitattn.base.record import Value
from jitattn.base.validate import shown
from jitattn.kernels.select.tile import (
    ChoiceTile,
    IndexLogitsTile,
    PageBoundsTile,
    PageScoresTile,
    choice_tile,
)
from jitattn.spec.arch import ARCHS, check_arch
from jitattn.spec.config import named_values
from jitattn.spec.dtype import BYTE_DTYPES, Q_DTYPES, DType
from jitattn.spec.family import KernelSpec, Tile
from jitattn.spec.layout import Layout

HEAD_TILES = (8, 16, 32, 64, 128)
"""Heads of an indexer that kernels have; others are filled up."""
INDEX_HEAD_DIMS = (32, 64, 96, 128)
MAX_HEADS = HEAD_TILES[-1]
_QUERY_TOKENS = (1, 2, 4)
_QUERY_BYTES = 32 * 1024  # of shared memory, for the queries of a CTA without warpgroups
KEY_DTYPES = tuple(map(DType, (*Q_DTYPES, *BYTE_DTYPES)))
"""Of caches whose pages have bounds."""
BOUND_DTYPES = tuple(map(DType, Q_DTYPES))
_ROW_BYTES = 128  # of a key in shared memory


class IndexLogitsSpec(KernelSpec):
    """The kernel that scores keys for an indexer.

    ``num_heads`` is one of ``HEAD_TILES``; ``query_tokens`` of a request share the keys of a CTA.
    """

    kernel: ClassVar[str] = "index_logits"

    head_dim: int
    num_heads: int
    query_tokens: int

    @property
    def symbol(self) -> str:
        """Name of the ``extern "C"`` kernel."""
        return f"jitattn_index_logits_d{self.head_dim}_h{self.num_heads}_t{self.query_tokens}"

    def tile(self, arch: str) -> IndexLogitsTile:
        """Return the shape of a CTA on ``arch``."""
        rows = self.query_tokens * self.num_heads
        if not ARCHS[arch].has_wgmma:
            tile = IndexLogitsTile(tile_tokens=128, num_stages=3, head_tile=8, smem_bytes=0)
            query_bytes = rows * self.head_dim * 2
        else:
            tile = self._warpgroup_tile()
            query_bytes = rows * _ROW_BYTES
        groups = tile.num_threads // 128
        # Scales lie in the stages of keys, or, of a warpgroup with one product, with the places.
        has_own_scales = bool(tile.product) and not tile.keys_in_registers
        row_bytes = _ROW_BYTES + (0 if has_own_scales else 4)
        smem_bytes = groups * tile.num_stages * tile.tile_tokens * row_bytes
        smem_bytes += query_bytes + 4 * rows + 12 * tile.num_places
        return tile._replace(smem_bytes=smem_bytes)

    def _warpgroup_tile(self) -> IndexLogitsTile:
        """Return the tile of warpgroups, as measured, without its shared memory."""
        head_tile = min(self.num_heads, 64)
        num_parts = self.query_tokens * self.num_heads // head_tile
        # One product reads keys of shared memory once; for several, they are in registers.
        in_registers = num_parts > 1
        product = f"MMA_64x{head_tile}x32_F32E4M3E4M3_{'RS' if in_registers else 'SS'}_TN"
        tile = IndexLogitsTile(64, 3, head_tile, 0, product, 256, 3, in_registers)
        if not in_registers:
            # A warpgroup holds the places of the tiles in its stages and of the next.
            num_places = tile.num_threads // 128 * (tile.num_stages + 1) * tile.tile_tokens
            return tile._replace(max_chunk_tokens=4096, num_places=num_places)
        # Queries of more rows leave memory for one CTA.
        ctas_per_sm = 2 if self.query_tokens * self.num_heads <= 256 else 1
        return tile._replace(ctas_per_sm=ctas_per_sm, max_chunk_tokens=2048, num_places=2048)

    def template(self, arch: str) -> str:
        """Return the template on ``arch``."""
        return f"select/index_logits_{'sm90' if ARCHS[arch].has_wgmma else 'sm80'}.cu.jinja"

    def config_text(self) -> str:
        """Return arguments that select the kernel."""
        return f"kernel={self.kernel},head_dim={self.head_dim},num_heads={self.num_heads}"


class ChoiceSpec(KernelSpec):
    """The kernel that chooses tokens of a query token, or pages of a KV head."""

    kernel: ClassVar[str] = "choose"
    path: ClassVar[str] = "select/choose.cu.jinja"

    chooses_pages: bool

    @property
    def symbol(self) -> str:
        """Name of the ``extern "C"`` kernel."""
        return f"jitattn_select_{'pages' if self.chooses_pages else 'tokens'}"

    def tile(self, arch: str) -> ChoiceTile:
        """Return the shape of a CTA on ``arch``."""
        # Rows of pages are short and many: smaller CTAs of an SM hide each other's barriers.
        return choice_tile(num_threads=256) if self.chooses_pages else choice_tile()

    def context(self) -> dict[str, object]:
        """Return the template variables of this spec: its fields and its symbol."""
        return super().context() | {"chooses_pages": "true" if self.chooses_pages else "false"}

    def config_text(self) -> str:
        """Return arguments that select the kernel."""
        return f"kernel=select_{'pages' if self.chooses_pages else 'tokens'}"


class PageBoundsSpec(KernelSpec):
    """The kernel that keeps the least and largest keys of pages."""

    kernel: ClassVar[str] = "page_bounds"
    path: ClassVar[str] = "select/page_bounds.cu.jinja"
    cta: ClassVar[Tile] = PageBoundsTile()

    kv_dtype: DType

    @property
    def bounds_dtype(self) -> DType:
        """What bounds are kept in: that of keys of 16 bits."""
        return self.kv_dtype if self.kv_dtype.num_bytes == 2 else DType.BFLOAT16

    @property
    def symbol(self) -> str:
        """Name of the ``extern "C"`` kernel."""
        return f"jitattn_page_bounds_kv{self.kv_dtype.short}"

    def context(self) -> dict[str, object]:
        """Return the template variables of this spec: its fields, their type and its symbol."""
        return super().context() | {"bounds_dtype": self.bounds_dtype.value}

    def config_text(self) -> str:
        """Return arguments that select the kernel."""
        return f"kernel={self.kernel},kv_dtype={self.kv_dtype}"


class PageScoresSpec(KernelSpec):
    """The kernel that bounds the scores of pages; ``kv_dtype`` is that of their bounds."""

    kernel: ClassVar[str] = "page_scores"
    path: ClassVar[str] = "select/page_scores.cu.jinja"

    kv_dtype: DType
    head_dim: int

    @property
    def symbol(self) -> str:
        """Name of the ``extern "C"`` kernel."""
        return f"jitattn_page_scores_d{self.head_dim}_kv{self.kv_dtype.short}"

    def tile(self, arch: str) -> PageScoresTile:
        """Return the shape of a CTA on ``arch``."""
        return PageScoresTile(warp_pages=8 if self.head_dim <= 128 else 4)

    def config_text(self) -> str:
        """Return arguments that select the kernel."""
        return f"kernel=select_pages,kv_dtype={self.kv_dtype},head_dim={self.head_dim}"


def index_logits_spec(head_dim: int, num_heads: int, max_q_len: int, arch: str) -> IndexLogitsSpec:
    """Return the kernel for so many heads, and query tokens of a request."""
    padded = next(tile for tile in HEAD_TILES if tile >= num_heads)
    wanted = next((count for count in _QUERY_TOKENS if count >= max_q_len), _QUERY_TOKENS[-1])
    if not ARCHS[arch].has_wgmma:
        wanted = min(wanted, max(1, _QUERY_BYTES // (padded * head_dim * 2)))
    return IndexLogitsSpec(head_dim=head_dim, num_heads=padded, query_tokens=min(wanted, 4))


_FIELDS: Mapping[str, tuple[str, ...]] = {
    "index_logits": ("head_dim", "num_heads"),
    "select_tokens": (),
    "page_bounds": ("kv_dtype",),
    "select_pages": ("kv_dtype", "head_dim"),
}
KERNELS = tuple(_FIELDS)
_PAGED = ", ".join(layout.value for layout in Layout if layout.has_pages)
_LISTING = ", ".join(
    layout.value for layout in Layout if layout.lists_pages and layout is not Layout.SEPARATE
)

SELECT_RANGES: Mapping[str, str] = {
    "index_logits: keys": "float8_e4m3fn with a float32 scale each, by page or by token",
    "index_logits: head_dim": ", ".join(map(str, INDEX_HEAD_DIMS)),
    "index_logits: num_heads": f"1 to {MAX_HEADS}",
    "index_logits: pages": f"{_PAGED}; pages of 1 token and up",
    "select_tokens": f"any k, any width; slots of {_PAGED.replace('separate, ', '')} tables",
    "page_bounds: keys": ", ".join(KEY_DTYPES) + "; any strides, any head_dim",
    "select_pages: bounds": "float16, bfloat16; a head_dim that is a multiple of 4, up to 512",
    "page_bounds, select_pages: pages": _LISTING,
}
"""What the functions take, for the support table."""


class SelectConfig(Value):
    """What selects such kernels: the function that launches them, and what it is given."""

    kernel: str = "select_tokens"
    head_dim: int | None = None
    num_heads: int | None = None
    kv_dtype: str | None = None

    @classmethod
    def parse(cls, text: str) -> SelectConfig:
        """Return the configuration of ``"kernel=index_logits,head_dim=128,num_heads=64"``.

        Raises:
            ConfigError: a part is unknown or has a value that is not supported.
        """
        given = named_values(text, ("kernel", "head_dim", "num_heads", "kv_dtype"))
        numbers: dict[str, int] = {}
        for name in ("head_dim", "num_heads"):
            value = given.pop(name, "")
            if value and not (value.isascii() and value.isdigit() and len(value) < 9):
                raise ConfigError([f"{name}={shown(value)} is not a number"])
            if value:
                numbers[name] = int(value)
        config = cls(**given, **numbers)  # type: ignore[arg-type]
        if reasons := config.reasons():
            raise ConfigError(reasons)
        return config

    def reasons(self) -> list[str]:
        """Return why there is no kernel; nothing where there is one."""
        if self.kernel not in _FIELDS:
            return [f"kernel={self.kernel} is not one of {', '.join(KERNELS)}"]
        fields = _FIELDS[self.kernel]
        found = [
            f"{name} is given, which kernel={self.kernel} has not"
            for name in ("head_dim", "num_heads", "kv_dtype")
            if getattr(self, name) is not None and name not in fields
        ]
        found += [f"{name} is missing" for name in fields if getattr(self, name) is None]
        if found:
            return found
        if self.kernel == "index_logits":
            return index_reasons(self.head_dim or 0, self.num_heads or 0)
        dtypes = KEY_DTYPES if self.kernel == "page_bounds" else BOUND_DTYPES
        if "kv_dtype" in fields and self.kv_dtype not in dtypes:
            found.append(f"kv_dtype={self.kv_dtype} is not one of {', '.join(dtypes)}")
        if self.head_dim is not None and (self.head_dim % 4 or not 4 <= self.head_dim <= 512):
            found.append(f"head_dim={self.head_dim} is not a multiple of 4 from 4 to 512")
        return found

    def arguments_text(self) -> str:
        """Return the arguments as ``parse`` reads them."""
        given = ((name, getattr(self, name)) for name in ("kernel", *_FIELDS[self.kernel]))
        return ",".join(f"{name}={value}" for name, value in given)

    def specs(self, arch: str) -> tuple[KernelSpec, ...]:
        """Return the kernels that the function launches.

        Raises:
            ConfigError: ``arch`` is unknown, or there is none.
        """
        check_arch(arch)
        if reasons := self.reasons():
            raise ConfigError(reasons)
        if self.kernel == "select_tokens":
            return (ChoiceSpec(chooses_pages=False),)
        if self.kernel == "index_logits":
            head_dim, num_heads = self.head_dim or 0, self.num_heads or 0
            return tuple(
                dict.fromkeys(
                    index_logits_spec(head_dim, num_heads, count, arch) for count in _QUERY_TOKENS
                )
            )
        kv_dtype = DType(str(self.kv_dtype))
        if self.kernel == "page_bounds":
            return (PageBoundsSpec(kv_dtype=kv_dtype),)
        scores = PageScoresSpec(kv_dtype=kv_dtype, head_dim=self.head_dim or 0)
        return ChoiceSpec(chooses_pages=True), scores


def index_reasons(head_dim: int, num_heads: int) -> list[str]:
    """Return why ``index_logits`` has no kernel of these sizes; nothing where it has one."""
    found = []
    if head_dim not in INDEX_HEAD_DIMS:
        dims = ", ".join(map(str, INDEX_HEAD_DIMS))
        found.append(f"head_dim={head_dim} is not one of {dims}")
    if not 1 <= num_heads <= MAX_HEADS:
        found.append(f"num_heads={num_heads} is not from 1 to {MAX_HEADS}")
    return found


def every_config() -> list[SelectConfig]:
    """Return what stands for all of them."""
    return [
        *(
            SelectConfig(kernel="index_logits", head_dim=head_dim, num_heads=num_heads)
            for head_dim in INDEX_HEAD_DIMS
            for num_heads in HEAD_TILES
            if head_dim == 128 or num_heads in (32, 64)
        ),
        SelectConfig(kernel="select_tokens"),
        *(SelectConfig(kernel="page_bounds", kv_dtype=dtype.value) for dtype in KEY_DTYPES),
        *(
            SelectConfig(kernel="select_pages", kv_dtype=dtype.value, head_dim=head_dim)
            for dtype in BOUND_DTYPES
            for head_dim in (64, 128, 256)
        ),
    ]
