"""The tree of PartitionSpecs of a state, derived from names and shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from trainer.state import table
from trainer.state.layout import pick_spec, state_layout, state_to_sharded_layout

HEADS = nnx.MultiHeadAttention


def leaf(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def state_of(make):
    return nnx.state(nnx.eval_shape(lambda: make(nnx.Rngs(0))))


def flat(specs):
    return {"/".join(path): variable.get_value() for path, variable in nnx.to_flat_state(specs)}


@pytest.mark.parametrize(
    ("shape", "path", "spec"),
    [
        ((), (), P()),
        ((16,), (), P("model")),
        ((4, 16), (), P(None, "model")),
        ((4, 16), ("out", "kernel"), P(None, "model")),  # a linear layer named `out`
        ((100, 16), ("embedder", "embedding"), P(None, "model")),
        ((3, 4, 16), (), P(None, None, "model")),
        ((3, 3, 4, 16), ("conv", "kernel"), P(None, None, None, "model")),
        ((16, 8, 2), ("attention", "query", "kernel"), P(None, "model", None)),
        ((16, 8, 2), ("value", "kernel"), P(None, "model", None)),
        ((8, 2), ("attention", "key", "bias"), P("model", None)),
        ((8, 2, 16), ("attention", "out", "kernel"), P("model", None, None)),
        ((16,), ("norm", "scale"), P("model")),
    ],
)
def test_a_leaf_goes_by_rank_and_name(shape, path, spec):
    assert pick_spec(leaf(*shape), path) == spec


def test_a_tree_of_specs_has_the_structure_of_its_state():
    state = state_of(lambda rngs: nnx.Linear(4, 16, rngs=rngs))
    specs = state_layout(state)
    assert jax.tree.structure(specs) == jax.tree.structure(state)
    assert specs == jax.tree.map(pick_spec, state)
    assert flat(specs) == {"kernel": P(None, "model"), "bias": P("model")}


class Net(nnx.Module):
    """A module with one layer of each kind."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(24, 16, rngs=rngs)
        self.conv = nnx.Conv(16, 16, (3,), rngs=rngs)
        self.attention = HEADS(8, 16, decode=False, rngs=rngs)
        self.out = nnx.Linear(16, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, ids):
        x = self.attention(self.conv(self.embed(ids)))
        return self.norm(self.out(x), use_running_average=True)


def test_biases_go_with_their_kernels():
    """The bias of attention's output is replicated, because its kernel's output axes follow the heads."""
    assert flat(state_layout(state_of(Net)))["attention/out/bias"] == P(None)
    assert flat(jax.tree.map(pick_spec, state_of(Net)))["attention/out/bias"] == P("model")
    specs = flat(state_layout(state_of(Net)))
    assert specs["attention/query/bias"] == P("model", None)
    assert specs["out/bias"] == specs["norm/bias"] == specs["norm/mean"] == specs["conv/bias"] == P("model")
    assert specs["dropout/rngs/count"] == P()


@pytest.mark.parametrize(("seed", "features"), [(0, 16), (3.0, 10.0), (np.float32(1), jnp.float32(8))])
def test_the_layout_of_a_linear_layer_has_two_leaves(seed, features):
    count = state_to_sharded_layout(seed, jnp.ones((2, 6)), features)
    assert (count.shape, count.dtype, count[0]) == ((1,), jnp.float32, 2)


def row(name, axes, spec):
    return {"name": name, "axes": axes, "spec": spec, "shape": [8] * len(axes)}


@pytest.mark.parametrize(
    ("kernel", "bias", "said"),
    [
        ([[], ["fsdp"], ["tensor"]], [[], ["tensor"]], None),
        ([[], ["fsdp"], []], [[], []], None),
        ([[], ["fsdp"], ["tensor"]], [[], []], "outputs [mlp] are sharded by [tensor], the bias [-] by [-]"),
        ([[], ["tensor"], ["fsdp"]], [[], ["tensor"]], "outputs [mlp] are sharded by [fsdp], the bias [-] by [tensor]"),
        ([[], ["tensor"], []], [[], ["tensor"]], "outputs [mlp] are sharded by [-], the bias [-] by [tensor]"),
    ],
)
def test_a_bias_that_is_split_otherwise_than_its_kernel_is_named(kernel, bias, said):
    rows = [
        row("params/layers/up/kernel", ["layers", "embed", "mlp"], kernel),
        row("params/layers/up/bias", ["layers", None], bias),
        row("opt_state/mu/layers/up/kernel", ["layers", "embed", "mlp"], kernel),
        row("opt_state/mu/layers/up/bias", ["layers", None], bias),
        row("params/layers/norm/scale", ["layers", "norm"], [[], []]),
        row("params/layers/norm/bias", ["layers", "norm"], [[], []]),
    ]
    found = table.disagreements(rows)
    assert len(found) == bool(said)
    assert all(sentence.startswith("params/layers/up: ") and said in sentence for sentence in found)


def test_heads_of_a_bias_are_compared_with_those_of_its_kernel():
    kernel = row("params/query/kernel", ["embed", "q_heads", "kv"], [["fsdp"], ["tensor"], []])
    agreeing = row("params/query/bias", ["q_heads", "kv"], [["tensor"], []])
    (named,) = table.disagreements([kernel, {**agreeing, "spec": [[], ["tensor"]]}])
    assert "[q_heads, kv] are sharded by [tensor, -], the bias [q_heads, kv] by [-, tensor]" in named
    assert table.disagreements([kernel, agreeing]) == []
