"""Tables of a group's layers, by the kernel that is run on the CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from jitattn.base.errors import KernelNotFoundError
from jitattn.kernels.pages.layer_tables import has_kernel, write_layer_tables
from jitattn.kv import device_block_tables
from tests.emulator.pages import emulate_kernels, emulated_kernels
from tests.support import kv_tables
from tests.support.examples import examples

__all__ = ["emulated_kernels"]  # a fixture


@pytest.mark.usefixtures("emulated_kernels")
class TestKernel:
    @examples(150)
    @given(kv_tables.table_calls())
    def test_random_tables(self, example: kv_tables.Tables) -> None:
        kv_tables.check_layer_tables(example, "cpu")


def twins(
    monkeypatch: pytest.MonkeyPatch, seed: int, counts: list[int] | None = None
) -> kv_tables.Twins:
    on_host = kv_tables.make_manager("cpu")
    on_host.block_tables([], 0)  # what makes its tables is settled here
    emulate_kernels(monkeypatch, 1, counts)
    return kv_tables.Twins(kv_tables.make_manager("cpu"), on_host, seed)


@pytest.mark.parametrize("seed", range(12))
def test_tables_after_random_operations(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[int] = []
    both = twins(monkeypatch, seed, launches)
    both.run(200)
    assert len(launches) > 100
    assert both.counts["scratch"] > 10
    assert set(both.counts) >= {"advance", "resize", "rewind", "suspend", "resume", "close"}


def test_tables_with_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    kv_tables.check_scratch(twins(monkeypatch, 0))


def test_a_call_is_one_launch_and_brings_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[int] = []
    sizes: list[int] = []
    upload = device_block_tables._upload

    def counted(parts: list[torch.Tensor], device: torch.device) -> torch.Tensor:
        if len(parts) > 1:  # else layers, once
            sizes.append(sum(len(part) for part in parts[1:]))
        return upload(parts, device)  # type: ignore[arg-type]

    emulate_kernels(monkeypatch, 1, launches)
    monkeypatch.setattr(device_block_tables, "_upload", counted)
    manager = kv_tables.make_manager("cpu", reuse_scratch=False)
    seqs = [manager.create_sequence() for _ in range(3)]
    for seq, length in zip(seqs, (39, 60, 22), strict=True):
        assert seq.resume()
        assert seq.resize(length)
    group = next(group for group in manager.layer_groups if group.window_left < 0)
    out = torch.empty(2, 3, 20, dtype=torch.int32)
    brought = []
    for _ in range(2):
        manager.block_tables(seqs, group, out=out)
        brought.append(sizes[-1])
    assert seqs[0].resize(41)  # a block more
    manager.block_tables(seqs, group, out=out)
    brought.append(sizes[-1])
    seqs[1].rewind(60 - 9)  # twelve less, beyond the table
    manager.block_tables([seqs[1]], group, out=out[:, :, :3])
    brought.append(sizes[-1])
    assert len(launches) == len(brought) == 4
    assert brought == [2 * (10 + 15 + 6), 0, 2, 2 * 12]
    assert seqs[1].resize(30)
    assert (manager.block_tables([seqs[1]], group)[0, 0] >= 0).tolist() == [True] * 8


def test_a_launch_that_failed_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    both = twins(monkeypatch, 3)
    for one, two in [[manager.create_sequence() for manager in both.managers]]:
        assert one.resume()
        assert two.resume()
        assert one.resize(50)
        assert two.resize(50)

        def fail(*arguments: object, **others: object) -> None:
            raise KernelNotFoundError("none")

        with monkeypatch.context() as patch:
            patch.setattr(device_block_tables, "write_layer_tables", fail)
            with pytest.raises(KernelNotFoundError):
                both.managers[0].block_tables([one], 0)
        both.check_group([(one, two)], 0)


def test_without_a_card_there_is_no_kernel() -> None:
    assert not has_kernel(torch.device("cpu"))
    ints = torch.zeros(1, 1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="tables is on cpu"):
        write_layer_tables(ints, ints[0], **arguments())


def arguments(**changed: torch.Tensor) -> dict[str, torch.Tensor]:
    sizes = {"layers": (1, 2), "requests": (1, 7), "changes": (0, 2), "scratch_slots": (0,)}
    made = {name: torch.ones(size, dtype=torch.int32) for name, size in sizes.items()}
    return made | changed


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("layers", torch.ones(2, 2, dtype=torch.int32), "tables has 1 layers: expected 2"),
        ("layers", torch.ones(1, 3, dtype=torch.int32), "layers has shape"),
        ("requests", torch.ones(2, 14, dtype=torch.int32)[:, ::2], "requests has shape"),
        ("requests", torch.ones(1, 7), "requests has dtype float32"),
        ("changes", torch.ones(2, dtype=torch.int32), "changes has shape"),
        ("scratch_slots", torch.ones(1, 1, dtype=torch.int32), "scratch_slots has shape"),
        ("scratch_slots", torch.ones(1, dtype=torch.int64), "scratch_slots has dtype int64"),
        ("tables", torch.ones(1, 1, dtype=torch.int32), "tables has shape"),
        ("tables", torch.ones(1, 1, 1, dtype=torch.int32).expand(1, 4, 4), "share memory"),
        ("slots", torch.ones(1, dtype=torch.int32), "slots has shape"),
    ],
)
def test_arguments_that_are_refused(name: str, value: torch.Tensor, error: str) -> None:
    given = {"tables": torch.zeros(1, 1, 1, dtype=torch.int32)}
    given["slots"] = torch.zeros(1, 1, dtype=torch.int32)
    given |= arguments() | {name: value}
    tables, slots = given.pop("tables"), given.pop("slots")
    with pytest.raises((TypeError, ValueError), match=error):
        write_layer_tables(tables, slots, **given)  # type: ignore[arg-type]
