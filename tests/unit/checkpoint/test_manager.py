"""Train states on disk, for every optimizer and every combination."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from manager_cases import SIDECAR, abstract, saved, settings, small_tree
from optimizers import OPTIMIZERS
from support import ALL_COMBINATIONS, assert_equal_bits, copied, model_of, tiny_config

from trainer.backends.base import StateCodec, TrainTree
from trainer.checkpoint.manager import CheckpointManager, inspect, newest, restore
from trainer.checkpoint.sidecar import SidecarFiles, read_sidecar
from trainer.config.errors import UserError


def random_like(tree, seed):
    """Returns arrays with random contents, so that no two can be confused."""
    rng = np.random.default_rng(seed)

    def one(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.key(rng.integers(1 << 30))
        if x.dtype == bool:
            return jax.device_put(rng.integers(0, 2, x.shape).astype(bool))
        return jax.device_put(rng.normal(0, 1e3, x.shape).astype(x.dtype))

    return jax.tree.map(one, tree)


@pytest.mark.parametrize("index", range(len(OPTIMIZERS)), ids=list(OPTIMIZERS))
def test_every_optimizers_state_comes_back(index, tmp_path):
    """Saves each state in one combination, and restores it into the native state of the next combination."""
    one, other = (ALL_COMBINATIONS[(index + i) % len(ALL_COMBINATIONS)] for i in range(2))
    tx = list(OPTIMIZERS.values())[index]
    codec, into = (StateCodec(model_of(tiny_config(c, weight_dtype="bfloat16")), tx) for c in (one, other))
    tree = random_like(codec.unpack(codec.abstract), seed=index)
    path = saved(tmp_path, 7, tree)
    wanted = into.unpack(into.abstract)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), wanted)
    found = into.unpack(into.pack(restore(path, wanted)))
    raw = [jax.tree.map(_bits, copied_tree) for copied_tree in (tree, found)]
    assert_equal_bits(*raw)
    assert inspect(path) == SIDECAR


def _bits(x):
    return np.array(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, copy=True)


def test_a_state_on_eight_devices_comes_back_on_another_mesh(tmp_path):
    devices = np.asarray(jax.devices())
    spec = jax.sharding.PartitionSpec("a", "b")
    meshes = [jax.sharding.Mesh(devices.reshape(shape), ("a", "b")) for shape in ((4, 2), (2, 4), (1, 8))]
    value = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    first, *others = [jax.sharding.NamedSharding(mesh, spec) for mesh in meshes]
    path = saved(tmp_path, tree=TrainTree(jnp.zeros((), jnp.int32), {"k": jax.device_put(value, first)}, (), {}))
    for sharding in others:
        wanted = {"k": jax.ShapeDtypeStruct((8, 8), "float32", sharding=sharding)}
        tree = restore(path, TrainTree(None, wanted, (), {}))
        assert tree.params["k"].sharding == sharding
        np.testing.assert_array_equal(tree.params["k"], value)


def test_a_part_that_is_not_wanted_is_not_read(tmp_path):
    path = saved(tmp_path)
    tree = restore(path, abstract(small_tree())._replace(opt_state=None))
    assert tree.opt_state is None
    assert_equal_bits(copied(tree.params), copied(small_tree().params))


def test_arrays_may_be_donated_while_they_are_written(tmp_path):
    tree = small_tree(1.0, width=512)
    with CheckpointManager(tmp_path, settings(), say=print) as manager:
        manager.save(1, tree, SIDECAR, {})
        overwritten = jax.jit(lambda x: x * 0, donate_argnums=0)(tree.params["layer"]["kernel"])
        jax.block_until_ready(overwritten)
    assert np.all(
        restore(tmp_path / "checkpoints/1", abstract(small_tree(1.0, width=512))).params["layer"]["kernel"] == 1
    )


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            small_tree(width=5),
            "has another model: params/layer/kernel is float32[4, 4] there and float32[5, 5] in",
        ),
        (
            small_tree()._replace(opt_state=optax.sgd(0.1, momentum=0.9).init(small_tree().params)),
            "has another optimizer: opt_state/0/trace/layer/kernel is absent there and float32[4, 4] in this run",
        ),
        (
            small_tree()._replace(params={"other": jnp.zeros(2)}),
            "params/other is absent there and float32[2] in",
        ),
        (
            small_tree()._replace(opt_state=(*small_tree().opt_state, optax.EmptyState())),
            "has another optimizer: opt_state/2 is absent there and empty in this run; give",
        ),
        (small_tree()._replace(step=jnp.zeros((), jnp.uint32)), "step is int32[] there and uint32[] in this run"),
    ],
)
def test_another_model_or_optimizer_names_the_first_leaf(tmp_path, wanted, message):
    with pytest.raises(UserError) as error:
        restore(saved(tmp_path), abstract(wanted))
    assert message in str(error.value)


def test_a_save_that_never_committed_is_cleared_away(tmp_path):
    path = saved(tmp_path)
    leftover = path.with_name("9.orbax-checkpoint-tmp")
    (leftover / "state").mkdir(parents=True)
    lines = []
    with CheckpointManager(tmp_path, settings(), say=lines.append) as manager:
        assert manager.latest == 3
    assert lines == [f"{leftover} was never committed: removed"]
    assert not leftover.exists()
    assert newest(tmp_path) == path == newest(path) == newest(path.parent)
    assert newest(tmp_path / "nothing") is None


def test_other_files_in_the_folder_of_checkpoints_are_left_alone(tmp_path):
    path = saved(tmp_path)
    (path.parent / "notes.txt").write_text("mine")
    (path.parent / "17").write_text("a file")
    (path.parent / "backup").mkdir()
    with CheckpointManager(tmp_path, settings(), say=print) as manager:
        assert manager.latest == 3
    assert newest(tmp_path) == path


def test_latest_knows_of_a_save_that_is_under_way(tmp_path):
    with CheckpointManager(tmp_path, settings(), say=print) as manager:
        assert manager.latest is None
        manager.save(5, small_tree(width=512), SIDECAR, {})
        assert manager.latest == 5
        manager.wait()
        assert newest(tmp_path) == manager.path(5)
        manager.wait()


def test_a_synchronous_save_is_committed_when_it_returns(tmp_path):
    with CheckpointManager(tmp_path, settings(async_checkpointing=False), say=print) as manager:
        manager.save(5, small_tree(), SIDECAR, {})
        assert inspect(manager.path(5)) == SIDECAR


def test_each_process_has_a_position_of_its_own(tmp_path, monkeypatch):
    for process in (0, 1):
        monkeypatch.setattr("trainer.checkpoint.sidecar._process_index", lambda process=process: process)
        write = SidecarFiles(SIDECAR._replace(position={"row": process}))._write(Created(tmp_path))
        asyncio.run(write)
    for process, row in ((0, 0), (1, 1), (2, 0)):
        monkeypatch.setattr("trainer.checkpoint.sidecar._process_index", lambda process=process: process)
        assert read_sidecar(tmp_path) == SIDECAR._replace(position={"row": row})


class Created:
    """A folder as Orbax passes it to items that are saved in it."""

    def __init__(self, path):
        self.path = path

    async def await_creation(self):
        return self.path
