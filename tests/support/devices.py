"""Where tests run that hold on every device: on the CPU always, on a GPU with `pytest -m gpu`."""

from __future__ import annotations

import pytest

EVERYWHERE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
