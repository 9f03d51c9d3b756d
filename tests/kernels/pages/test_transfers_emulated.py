"""The kernels that move tokens and pages and make tables, run on the CPU with the real host code.

What a launch is given and what its threads compute from it is the real thing; only instructions
are another machine's. Calls repeat, so that launches are found again and patched.
"""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.emulator.pages import emulated_kernels
from tests.support import transfers
from tests.support.examples import examples

__all__ = ["emulated_kernels"]  # a fixture


@pytest.mark.usefixtures("emulated_kernels")
class TestKernels:
    @examples(120)
    @given(transfers.gathers())
    def test_gathers(self, example: transfers.Gather) -> None:
        transfers.check_gather(example, "cpu")

    @pytest.mark.parametrize("scale", [None, "number", "heads"])
    @pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
    @pytest.mark.parametrize("name", ["int8", "nvfp4", "int4"])
    def test_gathers_of_quantised_caches(
        self, name: str, out_dtype: str, scale: str | None
    ) -> None:
        transfers.check_quantised_gather(name, out_dtype, scale, "cpu")

    @pytest.mark.parametrize(("kv_dtype", "out_dtype"), transfers.SATURATIONS)
    def test_gathers_saturate(self, kv_dtype: str, out_dtype: str) -> None:
        transfers.check_saturation(kv_dtype, out_dtype, "cpu")

    @examples(120)
    @given(transfers.copies())
    def test_copies(self, example: transfers.Copy) -> None:
        transfers.check_copy(example, "cpu")

    @examples(120)
    @given(transfers.slot_tables(may_break=True))
    def test_block_tables(self, example: transfers.Slots) -> None:
        transfers.check_block_table(example, "cpu")

    @examples(80)
    @given(transfers.token_batches())
    def test_batch_infos(self, example: transfers.Tokens) -> None:
        transfers.check_batch_info(example, "cpu")
