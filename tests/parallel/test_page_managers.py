"""Page managers of ranks: the same calls give the same ids, and each rank keeps its tokens."""

from __future__ import annotations

import pytest
import torch

from jitattn.kv import KVCacheConfig, KVCacheManager, LayerConfig
from tests.support.rank_managers import LAYER, serve_alone, serve_on_ranks
from tests.support.ranks import run_ranks, values


def test_sequences_with_shared_prefixes_over_three_ranks() -> None:
    num_steps, seed = 14, 3
    results = values(run_ranks(3, serve_on_ranks, 3, seed, num_steps))
    wanted = serve_alone(3, seed, num_steps)
    assert all(reused > 20 for _, reused in results)
    for i, want in enumerate(wanted):
        out = torch.cat([outs[i] for outs, _ in results], dim=1)
        torch.testing.assert_close(out.double(), want, rtol=2**-6, atol=2**-6)


def test_a_rank_has_memory_for_more_tokens() -> None:
    sizes = {"page_size": 4, "gpu_bytes": 2**16, "layers": [LAYER]}
    room = []
    for num_ranks in (1, 3):
        config = KVCacheConfig(**sizes, num_ranks=num_ranks)  # type: ignore[arg-type]
        assert config.block_len == 4 * num_ranks
        seq = KVCacheManager(config, device=None).create_sequence()
        assert seq.resume()
        length = 0
        while seq.resize(length + config.block_len):
            length += config.block_len
        room.append(length)
    assert room[1] == 3 * room[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_ranks": 0}, "num_ranks is 0"),
        ({"num_ranks": 2**19}, "page_size \\* num_ranks is 2097152"),
        (
            {
                "num_ranks": 2,
                "layers": [LayerConfig(layer_id=5, num_kv_heads=2, head_dim=16, window_left=7)],
            },
            "layer 5 has window_left=7: a window is not shared",
        ),
    ],
)
def test_refused(changes: dict[str, object], message: str) -> None:
    sizes: dict[str, object] = {"page_size": 4, "gpu_bytes": 2**16, "layers": [LAYER]}
    with pytest.raises(ValueError, match=message):
        KVCacheConfig(**sizes | changes)  # type: ignore[arg-type]
