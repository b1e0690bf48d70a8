"""The Python in the guides runs, block after block, as a reader would type it."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

GUIDES = Path(__file__).parents[3] / "docs" / "guides"


def run(name):
    blocks = re.findall(r"^```python\n(.*?)^```$", (GUIDES / name).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    names = {"__name__": name}
    exec("\n".join(blocks), names)
    return names


@pytest.mark.default_combination
def test_the_guide_to_the_trees_beside_a_state():
    names = run("state-sharding.md")
    count = names["state_to_sharded_layout"](3.0, jnp.ones((2, 6)), 10.0)
    assert (count.shape, count.dtype, count[0]) == ((1,), jnp.float32, 2)


def test_the_guide_to_sharding():
    names = run("sharding.md")
    assert names["y"].shape == (8, 4)
    assert len(names["y"].sharding.device_set) == jax.device_count() == 8


def test_the_guide_to_migration_names_where_the_train_state_is_imported():
    (line,) = re.findall(r"^from trainer\.state import .*$", (GUIDES / "migrating.md").read_text(), re.MULTILINE)
    names = {}
    exec(line, names)
    assert issubclass(names["TrainStateNNX"], nnx.Module)
    assert callable(names["init_state_fn"])
