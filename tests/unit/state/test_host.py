"""Parts of the train state in host memory. CPU devices have this memory kind, so only the savings are untestable."""

import jax
import pytest
from support import ALL_COMBINATIONS, arguments, assert_equal_bits, copied, first_tree, packed_batch, state_from

from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.state.host import check_host_memory
from trainer.training.batches import placed
from trainer.training.build import build

BOTH = {"optimizer_memory_host_offload": True, "parameter_memory_host_offload": True}
MESH = {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "per_device_batch_size": 2}


def trained(combination, **overrides):
    """Returns the run, and the state after two steps.

    Compiled without EXACT: then programs that differ only in copies to another memory have the same fusions.
    """
    config = load(arguments(combination, **MESH, **overrides)).config
    run = build(config, jax.devices()[:4])
    step, state = run.compile(), state_from(run, first_tree(run))
    for i in range(2):
        state, _ = step(state, placed(run, packed_batch(run.config, run.rows, seed=i)), ())
    return run, state


def kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim}


@pytest.mark.rest(covered_by="muon, for which more is offloaded", cases=("adafactor",))
@pytest.mark.parametrize(
    ("combination", "zero1", "opt_type"),
    [(ALL_COMBINATIONS[0], False, "muon"), (ALL_COMBINATIONS[-1], True, "adafactor")],
)
def test_the_same_bits_and_the_state_waits_on_the_host(combination, zero1, opt_type):
    keys = {"shard_optimizer_over_data": zero1, "opt_type": opt_type, "adafactor_min_dim_size_to_factor": 4}
    run, state = trained(combination, **keys, **BOTH)
    tree = run.codec.unpack(state)
    assert kinds(tree.params) == kinds(tree.opt_state) == {"pinned_host"}
    assert tree.step.sharding.memory_kind == "device"
    plain_run, plain = trained(combination, **keys)
    assert kinds(plain_run.codec.unpack(plain).params) == {"device"}
    assert_equal_bits(copied(tree), copied(plain_run.codec.unpack(plain)))

    again = run.codec.unpack(run.init(jax.tree.map(lambda x: x.copy(), tree.params)))
    assert kinds(again.params) == {"pinned_host"}
    assert_equal_bits(copied(again.params), copied(tree.params))


@pytest.mark.parametrize("opt_type", ["adamw", "muon", "adafactor"])
def test_one_part_alone(opt_type):
    config = load(arguments("nnx", optimizer_memory_host_offload=True, opt_type=opt_type)).config
    run = build(config, jax.devices()[:1])
    state, *_ = run.abstract_args()
    tree = run.codec.unpack(state)
    assert (kinds(tree.params), kinds(tree.opt_state)) == ({"device"}, {"pinned_host"})


def test_refused_without_such_a_memory():
    config = load(arguments("nnx", optimizer_memory_host_offload=True)).config
    check_host_memory(config, ["device", "pinned_host"])
    message = r"optimizer_memory_host_offload=true: these devices have no pinned_host memory \(they have device\)"
    with pytest.raises(UserError, match=message):
        check_host_memory(config, ["device"])
