"""Transfers of host arrays to devices with given shardings."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from trainer.config.errors import UserError
from trainer.runtime.place import place, share_of_rows


def test_each_array_arrives_whole_and_split_by_its_own_sharding():
    mesh = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("rows", "columns"))
    shardings = {
        "inputs": NamedSharding(mesh, P("rows", "columns")),
        "row": NamedSharding(mesh, P("rows")),
    }
    batch = {"inputs": np.arange(32, dtype=np.int32).reshape(8, 4), "row": np.arange(8, dtype=np.int32)}
    placed = place(batch, shardings)
    assert list(placed) == ["inputs", "row"]
    for name, array in placed.items():
        assert array.sharding == shardings[name]
        assert array.dtype == np.int32
        np.testing.assert_array_equal(array, batch[name])
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, batch[name][shard.index])
    assert {shard.data.shape for shard in placed["inputs"].addressable_shards} == {(2, 2)}


def test_an_array_that_a_batch_lacks_is_an_error_and_what_nobody_reads_stays():
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    array = np.zeros((8, 4), np.int32)
    assert list(place({"inputs": array, "targets": array}, {"inputs": here})) == ["inputs"]
    with pytest.raises(KeyError, match="targets"):
        place({"inputs": array}, {"targets": here})


@pytest.mark.parametrize(
    ("shape", "of_two", "of_four"),
    [
        ((8, 1), [(0, 2), (1, 2)], [(0, 4), (1, 4), (2, 4), (3, 4)]),
        ((2, 4), [(0, 2), (1, 2)], [(0, 2), (0, 2), (1, 2), (1, 2)]),  # two processes hold the same rows
        ((1, 8), [(0, 1)] * 2, [(0, 1)] * 4),
    ],
)
def test_shares_of_rows(monkeypatch, shape, of_two, of_four):
    devices = np.asarray(jax.devices()).reshape(shape)
    sharding = NamedSharding(Mesh(devices, ("data", "tensor")), P("data"))
    assert share_of_rows(sharding, 16) == {"process_index": 0, "process_count": 1}
    for expected, processes in ((of_two, 2), (of_four, 4)):
        process_of = {device: i * processes // 8 for i, device in enumerate(devices.ravel())}
        among = of_processes(sharding.devices_indices_map((16,)), process_of)
        monkeypatch.setattr(jax, "process_count", lambda processes=processes: processes)
        for process, (index, count) in enumerate(expected):
            monkeypatch.setattr(jax, "process_index", lambda process=process: process)
            assert share_of_rows(among, 16) == {"process_index": index, "process_count": count}


class Device:
    def __init__(self, process_index):
        self.process_index = process_index


def of_processes(indices, process_of):
    """Returns a simulated sharding over devices of several processes. Only its row indices are used."""
    rows = {Device(process_of[device]): index for device, index in indices.items()}
    return SimpleNamespace(devices_indices_map=lambda shape: rows)


def test_parts_need_not_lie_side_by_side(monkeypatch):
    """On a TPU torus, the mesh follows the network: process 0 has the first and the last two rows."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    indices = {i: (slice(2 * i, 2 * i + 2),) for i in range(4)}
    among = of_processes(indices, {0: 0, 1: 1, 2: 1, 3: 0})
    for process in range(2):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        assert share_of_rows(among, 8) == {"process_index": process, "process_count": 2}


def test_rows_that_are_no_share(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    overlapping = of_processes({0: (slice(0, 6),), 1: (slice(4, 8),)}, {0: 0, 1: 1})
    with pytest.raises(UserError, match="parts of the 8 rows that overlap or differ in size"):
        share_of_rows(overlapping, 8)
