"""Host arrays arrive on the devices of their shardings."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from trainer.runtime.place import place


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
