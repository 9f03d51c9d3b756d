"""Rope against transformers' own rotary modules, for every model type that has one.

Frequencies, amplitude, pairing and rotated vectors of every kind of layer, read from the
configuration object and from the file that it would write. ``nox -s models`` runs this.
"""

from __future__ import annotations

import pytest
import torch

import jitattn
from jitattn.kernels.preprocess.reference import rotate
from jitattn.spec.layout import Pairing
from jitattn.spec.model_types import MODEL_TYPES, ROTATED_OTHERWISE
from tests.support.transformers_rotation import Rotation, model_types, rotations_of

pytest.importorskip("transformers", reason="transformers is compared with, and not installed")


@pytest.mark.parametrize("model_type", model_types())
def test_rotation_is_that_of_transformers(model_type: str) -> None:
    found = list(rotations_of(model_type))
    if not found:
        pytest.skip("transformers builds no rotary class of a text model from its defaults")
    for rotation in found:
        check(rotation)


def check(rotation: Rotation) -> None:
    kind = rotation.text.model_type
    for config in (rotation.config, rotation.file()):
        if kind in ROTATED_OTHERWISE:
            with pytest.raises(ValueError, match=f"model_type {kind!r} .*, which no Rope does"):
                jitattn.Rope.from_hf_config(config, layer_type=rotation.layer_type)
            continue
        rope = jitattn.Rope.from_hf_config(config, layer_type=rotation.layer_type)
        known = MODEL_TYPES[kind]
        assert rope.interleaved is (known.pairing is Pairing.INTERLEAVED)
        assert rope.attention_factor == pytest.approx(rotation.amplitude, rel=1e-9)
        # Where a model has an order of its own, positions of text are compared.
        is_text = known.axes is not None and not known.axes.is_known
        frequencies = rotation.frequencies
        if frequencies is not None:
            own = frequencies.sort(descending=True).values if is_text else frequencies
            assert torch.equal(rope.inv_freq, own)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(9, 2, rope.head_dim, generator=generator)
        positions = torch.randint(0, 60, (3, 9), generator=generator)
        if rotation.num_axes == 1 or is_text:
            positions = positions[:1].expand(3, -1)
        wanted = rotation.rotate(x, positions)
        found = rotate(x.double(), rope, positions).float()
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
