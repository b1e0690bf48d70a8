"""The shardings of a train state: structure, moments sharded like parameters, and shards created on their devices."""

import functools

import jax
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import ALL_COMBINATIONS, assert_equal_bits, copied, model_of, tiny_config

from trainer.backends.base import StateCodec
from trainer.optim.optimizer import make_optimizer
from trainer.sharding import make_mesh, make_rules
from trainer.state.init import init_state_fn
from trainer.state.shardings import state_shardings, tensors

AXES = {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}
MODEL = {"logits_via_embedding": True, "mlp_activations": "[silu, linear]", "opt_type": "adamw"}


def is_matrix(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def by_rank(params):
    return jax.tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "rest", params)


ADAM = optax.adamw(1e-3)
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "adamw": ADAM,
    "clipped, masked decay": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, mask=is_matrix)),
    "partition": optax.partition({"matrix": ADAM, "rest": optax.sgd(0.1, momentum=0.9)}, by_rank),
    "masked": optax.masked(ADAM, is_matrix),
    "multi steps": optax.MultiSteps(ADAM, 2).gradient_transformation(),
    "apply_if_finite": optax.apply_if_finite(ADAM, 3),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=8),
    "muon": optax.contrib.muon(1e-3),
}


@pytest.fixture(scope="module", params=ALL_COMBINATIONS)
def config(request):
    return tiny_config(request.param, devices=8, **AXES, **MODEL)


@functools.cache
def sharded(config, tx):
    """Returns the codec, its abstract native state, and the shardings of that state."""
    codec = StateCodec(model_of(config), tx)
    mesh = make_mesh(config, jax.devices())
    shardings = state_shardings(codec.model, codec.abstract, mesh, make_rules(config.logical_axis_rules))
    return codec, codec.abstract, shardings


def named(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_shardings_have_the_structure_of_the_state_and_fit_its_shapes(config, name):
    _, state, shardings = sharded(config, OPTIMIZERS[name])
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    assert all(isinstance(leaf, NamedSharding) for leaf in jax.tree.leaves(shardings))
    jax.tree.map(lambda leaf, sharding: sharding.shard_shape(leaf.shape), state, shardings)  # raises if it does not fit


HEADS = ("tensor", "tensor_sequence")
WIDE = (*HEADS, "fsdp_transpose")
WIDTH = ("fsdp", "expert", "context", "context_usp_ulysses")
EXPECTED = {
    "token_embedder/embedding": P(WIDE, WIDTH),
    "decoder/decoder_norm/scale": P(None),
    "decoder/layers/pre_self_attention_layer_norm/scale": P(None, None),
    "decoder/layers/post_self_attention_layer_norm/scale": P(None, None),
    "decoder/layers/self_attention/query/kernel": P(None, WIDTH, HEADS, "fsdp_transpose"),
    "decoder/layers/self_attention/key/kernel": P(None, WIDTH, HEADS, "fsdp_transpose"),
    "decoder/layers/self_attention/value/kernel": P(None, WIDTH, HEADS, "fsdp_transpose"),
    "decoder/layers/self_attention/out/kernel": P(None, HEADS, "fsdp_transpose", WIDTH),
    "decoder/layers/mlp/wi_0/kernel": P(None, WIDTH, WIDE),
    "decoder/layers/mlp/wi_1/kernel": P(None, WIDTH, WIDE),
    "decoder/layers/mlp/wo/kernel": P(None, WIDE, WIDTH),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_lie_where_their_parameters_lie_and_scalars_everywhere(config, name):
    codec, state, shardings = sharded(config, OPTIMIZERS[name])
    specs = codec.unpack(jax.tree.map(lambda sharding: sharding.spec, shardings))
    shapes = codec.unpack(state)
    assert named(specs.params) == EXPECTED
    assert specs.step == P()
    parameters = {path: leaf.shape for path, leaf in named(shapes.params).items()}
    moments = 0
    found = named(specs.opt_state)
    for path, leaf in named(shapes.opt_state).items():
        owner = next((parameter for parameter in parameters if path.endswith(parameter)), None)
        if leaf.ndim == 0:
            assert found[path] == P(), path
        elif owner is not None and leaf.shape == parameters[owner]:
            assert found[path] == EXPECTED[owner], path
            moments += 1
    assert bool(moments) == (name != "sgd")


def test_factored_moments_keep_the_axes_that_are_not_summed(config):
    """Adafactor sums over each of an array's two longest axes. Unfactored arrays have a dummy of size 1."""
    codec, state, shardings = sharded(config, OPTIMIZERS["adafactor"])
    kept = {path: tensor.axes for path, tensor in named(codec.unpack(tensors(codec.model, state)).opt_state).items()}
    specs = {path: sharding.spec for path, sharding in named(codec.unpack(shardings).opt_state).items()}

    def of(moment, parameter):
        (path,) = [path for path in kept if f"/{moment}/" in f"/{path}" and path.endswith(parameter)]
        return kept[path], specs[path]

    assert of("v_row", "embedding") == (("embed",), P(WIDTH))
    assert of("v_col", "embedding") == (("vocab",), P(WIDE))
    assert of("v", "embedding") == ((None,), P(None))
    # [layers, embed 16, q_heads 4, kv 8]
    assert of("v_row", "query/kernel") == (("layers", "q_heads", "kv"), P(None, HEADS, "fsdp_transpose"))
    assert of("v_col", "query/kernel") == (("layers", "embed", "q_heads"), P(None, WIDTH, HEADS))
    assert of("v_row", "decoder_norm/scale") == ((None,), P(None))
    assert of("v", "decoder_norm/scale") == (("norm",), P(None))


@pytest.mark.parametrize("layers", [2, 16])
def test_of_axes_of_one_length_rows_lack_the_last_and_nothing_lacks_layers(layers):
    keys = {"base_mlp_dim": 16, "base_num_decoder_layers": layers}
    config = tiny_config(ALL_COMBINATIONS[0], devices=8, **AXES, **MODEL | keys)
    codec, state, _ = sharded(config, OPTIMIZERS["adafactor"])
    kept = {path: tensor.axes for path, tensor in named(codec.unpack(tensors(codec.model, state)).opt_state).items()}
    found = {path.split("/")[1]: axes for path, axes in kept.items() if path.endswith("mlp/wo/kernel")}
    assert found["v_row"] == ("layers", "mlp")
    assert found["v_col"] == ("layers", "embed")


# The first and the last: one combination per native state, because initialization takes seconds to compile.
@pytest.mark.parametrize("combination", sorted({ALL_COMBINATIONS[0], ALL_COMBINATIONS[-1]}))
def test_the_state_is_made_sharded_and_is_that_of_one_device(combination):
    config = tiny_config(combination, devices=8, **AXES, **MODEL)
    codec, state, shardings = sharded(config, make_optimizer(config, model_of(config).param_axes))
    made = init_state_fn(codec, shardings, seed=5)()
    assert jax.tree.structure(made) == jax.tree.structure(state)

    def check(leaf, abstract, sharding):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        assert {shard.data.shape for shard in leaf.addressable_shards} == {sharding.shard_shape(abstract.shape)}

    jax.tree.map(check, made, state, shardings)
    assert_equal_bits(copied(codec.unpack(made)), state_of_one_device())


@functools.cache
def state_of_one_device():
    """Returns the canonical initial state, made without shardings."""
    config = tiny_config(ALL_COMBINATIONS[0], **MODEL)
    model = model_of(config)
    codec = StateCodec(model, make_optimizer(config, model.param_axes))
    return copied(codec.unpack(jax.jit(codec.init)(jax.random.key(5))))
