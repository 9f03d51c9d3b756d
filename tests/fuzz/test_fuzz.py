"""No input of a public function gives anything but a right result or an error that names it.

``FUZZ_INPUTS=20000`` tries more than a run of the tests does, and ``FUZZ_SEED=1`` others.
"""

from __future__ import annotations

import os

import pytest

from tests.fuzz.fuzzer import fuzz
from tests.fuzz.targets import TARGETS

_INPUTS = int(os.environ.get("FUZZ_INPUTS", "600"))
_SEED = int(os.environ.get("FUZZ_SEED", "0"))


@pytest.mark.parametrize("name", TARGETS)
def test_the_valid_call_of_each_target_is_valid(name: str) -> None:
    call = TARGETS[name].make()
    call.function(**call.arguments)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_spoiled_inputs_are_refused_by_name_or_right() -> None:
    tally = fuzz(_SEED, _INPUTS)
    assert tally.tried == _INPUTS
    assert not tally.failures, str(tally)
