"""Page tables, and the kernels that build, convert, read and copy pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitattn.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from jitattn.kernels.pages.batch_info import BatchInfo, batch_info
    from jitattn.kernels.pages.block_table import build_block_table, convert_pages
    from jitattn.kernels.pages.copy_pages import copy_pages
    from jitattn.kernels.pages.gather import gather_kv
    from jitattn.tensors.page_tables import BlockTable, CsrPages, RaggedKV, TokenTable
    from jitattn.tensors.token_lists import IndexLists, PageLists

__all__ = [
    "BatchInfo",
    "BlockTable",
    "CsrPages",
    "IndexLists",
    "PageLists",
    "RaggedKV",
    "TokenTable",
    "batch_info",
    "build_block_table",
    "convert_pages",
    "copy_pages",
    "gather_kv",
]

__getattr__ = lazy_names(
    __name__,
    {
        "BatchInfo": "jitattn.kernels.pages.batch_info",
        "BlockTable": "jitattn.tensors.page_tables",
        "CsrPages": "jitattn.tensors.page_tables",
        "IndexLists": "jitattn.tensors.token_lists",
        "PageLists": "jitattn.tensors.token_lists",
        "RaggedKV": "jitattn.tensors.page_tables",
        "TokenTable": "jitattn.tensors.page_tables",
        "batch_info": "jitattn.kernels.pages.batch_info",
        "build_block_table": "jitattn.kernels.pages.block_table",
        "convert_pages": "jitattn.kernels.pages.block_table",
        "copy_pages": "jitattn.kernels.pages.copy_pages",
        "gather_kv": "jitattn.kernels.pages.gather",
    },
)
