"""Muon's dimension numbers of a model, from every representation that a user may have."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx
from optax.contrib import MuonDimensionNumbers
from support import ALL_COMBINATIONS, arguments, tiny_config

from trainer.backends.registry import make_model
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.config.resolve import resolve
from trainer.ops.paths import by_name
from trainer.ops.random import seed_key
from trainer.state.muon import _ALONE, get_muon_weight_dimension_numbers

FLAT = MuonDimensionNumbers((1,), (2,))
TO_HEADS, FROM_HEADS = MuonDimensionNumbers((1,), (2, 3)), MuonDimensionNumbers((1, 2), (3,))
EXPECTED = {
    "decoder": {
        "decoder_norm": {"scale": None},
        "layers": {
            "mlp": {name: {"kernel": FLAT} for name in ("wi_0", "wi_1", "wo")},
            "post_self_attention_layer_norm": {"scale": None},
            "pre_self_attention_layer_norm": {"scale": None},
            "self_attention": {
                **{name: {"kernel": TO_HEADS} for name in ("key", "query", "value")},
                "out": {"kernel": FROM_HEADS},
            },
        },
        "logits_dense": {"kernel": None},
    },
    "token_embedder": {"embedding": None},
}


class OwnBlock(nnx.Module):
    """A block whose parameters the trainer does not know: some with axis names, some without."""

    def __init__(self, config, rngs):
        width = config.base_emb_dim
        self.mix = nnx.Param(jnp.zeros((width, 3, 5)), out_sharding=("embed", None, None), eager_sharding=False)
        self.plain = nnx.Linear(width, 7, rngs=rngs)

    def __call__(self, x, cache, context):
        return x, cache


# One combination per native state. Tests of the models show that all combinations have the same axes.
@pytest.mark.parametrize("combination", sorted({ALL_COMBINATIONS[0], ALL_COMBINATIONS[-1]}))
def test_every_source_says_the_same(combination):
    config = tiny_config(combination, logits_via_embedding=False)
    model = make_model(config)
    params, _ = jax.eval_shape(model.init, seed_key(0))
    native = model.abstract_train_state(optax.sgd(0.1))
    sources = {
        "resolved": (config,),
        "not resolved, for many devices": (
            load(arguments(combination, logits_via_embedding=False, ici_fsdp_parallelism=64)).config,
        ),
        "canonical": (params, config),
        "axes": (model.param_axes,),
        "native": (native.model,) if isinstance(native, nnx.State) else (native.params, config),
    }
    whole, at = ((native,), "model") if isinstance(native, nnx.State) else ((native, config), "params")
    assert get_muon_weight_dimension_numbers(*whole) == {at: EXPECTED}
    for name, source in sources.items():
        assert get_muon_weight_dimension_numbers(*source) == EXPECTED, name


def test_the_stages_of_a_pipeline_stack_matrices_too():
    keys = {"base_num_decoder_layers": 5, "ici_pipeline_parallelism": 2, "pipeline_parallel_layers": 4}
    config = tiny_config(ALL_COMBINATIONS[-1], devices=2, **keys)
    model = make_model(config)
    params, _ = jax.eval_shape(model.init, seed_key(0))
    for source in ((config,), (params, config), (model.param_axes,)):
        found = by_name(get_muon_weight_dimension_numbers(*source), lambda node: isinstance(node, MuonDimensionNumbers))
        assert found["decoder/layers/mlp/wo/kernel"] == MuonDimensionNumbers((3,), (4,))
        assert found["decoder/layers_outside_pipeline/mlp/wo/kernel"] == FLAT
    own = tiny_config(ALL_COMBINATIONS[0], devices=2, decoder_block=f"{__name__}:OwnBlock", ici_pipeline_parallelism=2)
    native = make_model(own).abstract_train_state(optax.sgd(0.1))
    mix = get_muon_weight_dimension_numbers(native, own)["model"]["decoder"]["layers"]["mix"]
    assert mix == MuonDimensionNumbers((3,), (4, 5))
    with pytest.raises(UserError, match=r"ici_pipeline_parallelism.* is -1: give the resolved configuration"):
        get_muon_weight_dimension_numbers(
            load(arguments(ALL_COMBINATIONS[0], ici_pipeline_parallelism=-1, ici_fsdp_parallelism=1)).config
        )


def test_linen_params_in_boxes_say_their_axes():
    def boxed(names, *shape):
        return linen.LogicallyPartitioned(jax.ShapeDtypeStruct(shape, jnp.float32), names)

    variables = {
        "params": {
            "kernel": boxed(("layers", "embed", "mlp"), 2, 4, 6),
            "scale": boxed(("layers", "norm"), 2, 4),
            "unnamed": jax.ShapeDtypeStruct((4, 6), jnp.float32),
        }
    }
    expected = {"kernel": FLAT, "scale": None, "unnamed": MuonDimensionNumbers((0,), (1,))}
    assert get_muon_weight_dimension_numbers(variables) == {"params": expected}
    assert get_muon_weight_dimension_numbers(variables["params"]) == expected


def test_a_block_of_a_users_own_needs_no_entry():
    config = tiny_config(ALL_COMBINATIONS[0], decoder_block=f"{__name__}:OwnBlock")
    expected = {"mix": MuonDimensionNumbers((1,), (2, 3)), "plain": {"kernel": FLAT, "bias": None}}
    model = make_model(config)
    native = model.abstract_train_state(optax.sgd(0.1))
    for source in (config, native.model):
        assert get_muon_weight_dimension_numbers(source)["decoder"]["layers"] == expected
    assert get_muon_weight_dimension_numbers(native)["model"]["decoder"]["layers"] == expected


def test_arrays_alone_do_not_say_their_axes():
    config = tiny_config(ALL_COMBINATIONS[0])
    params, _ = jax.eval_shape(make_model(config).init, seed_key(0))
    with pytest.raises(UserError, match="pass config="):
        get_muon_weight_dimension_numbers(params)
    with pytest.raises(UserError, match="no parameter other/kernel"):
        get_muon_weight_dimension_numbers({"other": {"kernel": jnp.zeros((2, 2))}}, config)


def test_a_configuration_says_its_axes_on_any_devices():
    """Also works for a configuration that does not fit this device; none of these keys fits a single device."""
    keys = {
        "eval_interval": 5,
        "ici_fsdp_parallelism": 4,
        "dcn_data_parallelism": 2,
        "hardware": "tpu",
        "per_device_batch_size": 0.125,
        "eval_per_device_batch_size": 0.125,
        "num_vocab_tiling": 32,
        "attention": "splash",
    }
    assert keys.keys() >= {key for key in _ALONE if "parallelism" not in key}
    given = load(arguments(ALL_COMBINATIONS[0], logits_via_embedding=False, **keys)).config
    assert get_muon_weight_dimension_numbers(given) == EXPECTED
    for key in keys.keys() & _ALONE.keys():
        alone = {**given, **_ALONE, key: given[key]}
        with pytest.raises(UserError):
            make_model(resolve(alone, device_count=1, platform="cpu"))
