"""Loss, gradients and sown values of a pipelined step, and of the same step without a pipeline."""

import functools

import jax
import numpy as np
from support import ALL_COMBINATIONS, arguments, packed_batch

from trainer.config.load import load
from trainer.layers.sown import MaxLogit, RouterCount
from trainer.models.families import stacks
from trainer.models.stages import division, named_by_layer, to_layers, to_stages
from trainer.ops.paths import by_name
from trainer.training.batches import placed
from trainer.training.build import build
from trainer.training.step import make_gradients

STAGES, M, R = "ici_pipeline_parallelism", "num_pipeline_microbatches", "num_pipeline_repeats"
PER_STAGE, LAYERS = "num_layers_per_pipeline_stage", "pipeline_parallel_layers"
DELAY = "pipeline_delay_activation_forwarding"
ONCE, PER_REPEAT = "pipeline_fsdp_ag_once", "pipeline_fsdp_ag_per_repeat"
BASE = {"base_num_decoder_layers": 4, "per_device_batch_size": 2, "ici_fsdp_parallelism": -1, "sharding_tolerance": 1}


def made(combination=ALL_COMBINATIONS[0], **keys):
    """Returns a run with a tiny configuration on the suite's eight devices."""
    return build(load(arguments(combination, **BASE | keys)).config, jax.devices())


def drawn(abstract):
    """Returns random values for all leaves, with scales around 1."""
    rng = np.random.default_rng(0)

    def one(path, leaf):
        offset = 1 if "scale" in jax.tree_util.keystr(path) else 0
        return (offset + 0.25 * rng.normal(size=leaf.shape)).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(one, abstract)


def measured(run):
    """Returns the run's loss and, by name and layer, its gradients and sown values.

    The parameters depend on the model only, not on its pipeline.
    """
    abstract = run.codec.unpack(run.abstract_args()[0])
    found = stacks(run.config)
    params = drawn(jax.eval_shape(functools.partial(to_layers, found), abstract.params))
    in_stages = jax.jit(functools.partial(to_stages, found))(params) if division(found) else params
    rest = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract.rest)
    given = abstract._replace(step=0, params=in_stages, rest=rest, opt_state=None)
    held = jax.tree.map(lambda x, of: jax.device_put(x, of.sharding), given, abstract._replace(opt_state=None))
    batch = placed(run, packed_batch(run.config, run.rows))
    types = (MaxLogit, RouterCount)
    fn = make_gradients(run.config, run.objective, run.param_shardings, types)
    got = jax.device_get(jax.jit(run.sharded(fn))(held, batch))

    def by_layer(grads, sown):
        return by_name(to_layers(found, grads)), [named_by_layer(found, sown[kind.__name__]) for kind in types]

    grads, sown = (jax.jit(by_layer) if division(found) else by_layer)(got.grads, got.sown)
    return float(got.loss), {name: np.asarray(x) for part in (grads, *sown) for name, x in part.items()}


@functools.cache
def _plain(items):
    return measured(made(**dict(items)))


def assert_equal_gradients(model, keys, *, rounded=(), tolerance=1e-6):
    """Checks that a pipelined run has the same loss and gradients as a run on fsdp without a pipeline.

    Args:
      model: keys of the model.
      keys: further keys, of the pipelined run only.
      rounded: parts of names of arrays that are 0 except for rounding; their tolerance is relative to the largest norm.
      tolerance: relative to each array's norm.
    """
    loss, found = measured(made(**model | keys))
    same, expected = _plain(tuple(sorted(model.items())))
    assert found.keys() == expected.keys()
    assert abs(loss - same) <= tolerance * abs(same)
    largest = max(map(np.linalg.norm, expected.values()))
    for name, array in expected.items():
        assert np.isfinite(found[name]).all(), name
        norm = largest if any(part in name for part in rounded) else np.linalg.norm(array)
        assert np.linalg.norm(found[name] - array) <= tolerance * norm, (
            name,
            np.linalg.norm(found[name] - array),
            norm,
        )
    return expected
