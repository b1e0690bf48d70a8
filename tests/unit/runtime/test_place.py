"""Host arrays arrive on the devices of their shardings."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from trainer.config import UserError
from trainer.runtime.place import place, share_of_rows


def test_each_array_arrives_whole_and_split_by_its_own_sharding():
    mesh = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("rows", "columns"))
    shardings = {
        "inputs": NamedSharding(mesh, P("rows", "columns")),
        "row": NamedSharding(mesh, P("rows")),
        "unused": NamedSharding(mesh, P()),
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


def test_an_array_without_a_sharding_is_an_error():
    with pytest.raises(KeyError, match="targets"):
        place({"targets": np.zeros((8, 4), np.int32)}, {})


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
        monkeypatch.setattr(jax, "process_count", lambda processes=processes: processes)
        for process, (index, count) in enumerate(expected):
            own = np.split(devices.ravel(), processes)[process]
            only = SimpleNamespace(
                addressable_devices_indices_map=lambda shape, own=own: {
                    device: index for device, index in sharding.devices_indices_map(shape).items() if device in own
                }
            )
            assert share_of_rows(only, 16) == {"process_index": index, "process_count": count}


def test_rows_that_are_no_share(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    every_other = SimpleNamespace(addressable_devices_indices_map=lambda shape: {0: (slice(0, 2),), 1: (slice(4, 6),)})
    with pytest.raises(UserError, match="rows 0 to 5 of 8, but not all of them"):
        share_of_rows(every_other, 8)
