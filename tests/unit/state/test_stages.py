"""Converting sharded train states of a pipeline between layout by stage and layout by layer."""

import math

import jax
import numpy as np
from support import ALL_COMBINATIONS, arguments, assert_equal_bits

from trainer.config.load import load
from trainer.models.families import stacks
from trainer.models.stages import to_layers
from trainer.ops.paths import by_name
from trainer.state.stages import abstract_layers, in_layers, in_stages
from trainer.training.build import build

KEYS = {
    "base_num_decoder_layers": 8,
    "per_device_batch_size": 2,
    "sharding_tolerance": 1,
    "opt_type": "lion",
}


def filled(abstract):
    """Returns arrays whose entries are all different."""
    numbers = iter(range(10**6))

    def one(leaf):
        first = next(numbers)
        values = np.arange(first, first + math.prod(leaf.shape)).reshape(leaf.shape).astype(leaf.dtype)
        return jax.device_put(values, leaf.sharding)

    return jax.tree.map(one, abstract)


def converted(**keys):
    """Returns a configuration, its train state by stage, and the state by layer.

    Checks the conversion back, and the shardings.
    """
    run = build(load(arguments(ALL_COMBINATIONS[0], **KEYS | keys)).config, jax.devices())
    abstract = run.codec.unpack(run.abstract_args()[0])
    tree = filled(abstract)
    before = jax.tree.map(np.asarray, tree)
    found, wanted = in_layers(run.config, tree), abstract_layers(run.config, abstract)
    by_layer = jax.tree.map(np.asarray, found)
    assert jax.tree.map(np.shape, by_layer) == jax.tree.map(np.shape, wanted)
    jax.tree.map(lambda leaf, of: np.testing.assert_equal(leaf.sharding.spec, of.sharding.spec), found, wanted)
    back = in_stages(run.config, found, abstract)
    # While converting, a device holds at most one leaf in both forms.
    same = {id(leaf) for leaf in jax.tree.leaves(tree)}
    assert len(same.difference(map(id, jax.tree.leaves(found)))) > 5
    for name, leaf in by_name(found).items():
        assert leaf.is_deleted() == (id(leaf) not in same), name
    assert_equal_bits(jax.tree.map(np.asarray, back), before)
    jax.tree.map(lambda leaf, of: np.testing.assert_equal(leaf.sharding, of.sharding), back, abstract)
    return run.config, before, by_layer, {name: leaf.sharding.spec for name, leaf in by_name(wanted).items()}


def held(abstract):
    """Returns the bytes of a train state on one device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(abstract))


KERNEL = "params/decoder/layers/mlp/wo/kernel"


def test_a_state_by_layer_and_back():
    """Six layers in the pipeline and two others: eight, which are split over the two stages."""
    factored = {"opt_type": "adafactor", "adafactor_min_dim_size_to_factor": 16}
    config, before, by_layer, specs = converted(ici_pipeline_parallelism=2, **factored, pipeline_parallel_layers=6)
    assert_equal_bits(by_layer, to_layers(stacks(config), before))
    assert specs[KERNEL][0] == "stage"


def test_layers_that_the_stages_do_not_divide():
    """Another axis is sharded over the stages, so that a device holds about as much as with the layout by stage."""
    keys = {"ici_pipeline_parallelism": 4, "base_num_decoder_layers": 5, "pipeline_parallel_layers": 4}
    config, _, by_layer, specs = converted(**keys)
    assert by_name(by_layer)[KERNEL].shape == (5, 32, 16)
    assert specs[KERNEL][0] is None
    assert specs[KERNEL][1][-1] == "stage"
    for zero1 in ({}, {"ici_fsdp_parallelism": 1, "ici_data_parallelism": 2, "shard_optimizer_over_data": True}):
        run = build(load(arguments(ALL_COMBINATIONS[0], **KEYS | keys | zero1)).config, jax.devices())
        abstract = run.codec.unpack(run.abstract_args()[0])
        assert held(abstract_layers(config, abstract)) <= 1.05 * held(abstract)


def test_islands():
    islands = {"enable_diloco": True, "ici_diloco_parallelism": 2}
    _, _, by_layer, specs = converted(ici_pipeline_parallelism=4, **islands)
    kernel = by_name(by_layer)[f"inner_state/{KERNEL}"]
    assert kernel.shape == (2, 8, 32, 16)
    assert np.all(np.diff(kernel.ravel()) == 1)
    assert specs[f"inner_state/{KERNEL}"][:2] == ("diloco", "stage")


def test_without_a_pipeline_nothing_is_done():
    run = build(load(arguments(ALL_COMBINATIONS[0], **KEYS)).config, jax.devices())
    tree = run.codec.unpack(run.abstract_args()[0])
    assert in_layers(run.config, tree) is tree
    assert in_stages(run.config, tree, tree) is tree
    assert abstract_layers(run.config, tree) is tree
