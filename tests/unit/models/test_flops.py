"""Closed forms against sums by hand, the model itself and published sizes."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from trainer.models.flops import flops_per_token, forward_flops_per_token, parameter_count

TINY = {
    "base_emb_dim": 8,
    "base_num_query_heads": 6,
    "base_num_kv_heads": 2,
    "head_dim": 4,
    "base_mlp_dim": 10,
    "base_num_decoder_layers": 3,
    "vocab_size": 11,
    "mlp_activations": ["silu", "linear"],
    "max_target_length": 16,
    "logits_via_embedding": True,
}
LLAMA2_7B = {
    "base_emb_dim": 4096,
    "base_num_query_heads": 32,
    "base_num_kv_heads": 32,
    "head_dim": 128,
    "base_mlp_dim": 11008,
    "base_num_decoder_layers": 32,
    "vocab_size": 32000,
    "mlp_activations": ["silu", "linear"],
    "max_target_length": 4096,
    "logits_via_embedding": False,
}
LLAMA3_8B = LLAMA2_7B | {"base_num_kv_heads": 8, "base_mlp_dim": 14336, "vocab_size": 128256, "max_target_length": 8192}

# One tiny block: query 8 x 24, key and value 8 x 8 each, out 24 x 8, gate, up and down 8 x 10 each.
BLOCK = 192 + 64 + 64 + 192 + 80 + 80 + 80


def tiny(**changes):
    return SimpleNamespace(**TINY | changes)


def test_parameters_of_a_tied_head():
    assert parameter_count(tiny()) == 3 * (BLOCK + 8 + 8) + 8 + 11 * 8


def test_a_separate_head_adds_a_second_table():
    assert parameter_count(tiny(logits_via_embedding=False)) == 3 * (BLOCK + 8 + 8) + 8 + 2 * 11 * 8


def test_an_ungated_mlp_has_one_input_projection():
    assert parameter_count(tiny()) - parameter_count(tiny(mlp_activations=["gelu"])) == 3 * 80


@pytest.mark.parametrize(("sizes", "count"), [(LLAMA2_7B, 6738415616), (LLAMA3_8B, 8030261248)])
def test_published_sizes(sizes, count):
    assert parameter_count(SimpleNamespace(**sizes)) == count


@pytest.mark.parametrize("tied", [True, False])
def test_forward_flops(tied):
    # Products with parameters, head included, then scores and values: 2 x 2 x 6 heads x 4 x 16 tokens, half of it.
    expected = 2 * (3 * BLOCK + 8 * 11) + 3 * (2 * 2 * 6 * 4 * 16) / 2
    assert forward_flops_per_token(tiny(logits_via_embedding=tied)) == expected


def test_training_is_three_forward_passes():
    assert flops_per_token(tiny()) == 6 * (3 * BLOCK + 8 * 11) + 6 * 3 * 6 * 4 * 16


def test_llama2_7b_flops():
    # 6 x (all parameters - embedding table - norms) + 6 x 32 layers x 4096 x 4096 tokens
    expected = 6 * (6738415616 - 32000 * 4096 - 65 * 4096) + 6 * 32 * 4096 * 4096
    assert flops_per_token(SimpleNamespace(**LLAMA2_7B)) == expected


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("activations", [["silu", "linear"], ["gelu"]])
def test_count_equals_that_of_the_model(tied, activations):
    import jax
    from flax import nnx

    from trainer.models.transformer import Transformer

    config = tiny(
        logits_via_embedding=tied,
        mlp_activations=activations,
        decoder_block="llama2",
        dtype="float32",
        weight_dtype="float32",
        normalization_layer_epsilon=1e-5,
        attention="dot_product",
        rope_min_timescale=1,
        rope_max_timescale=10000,
        enable_dropout=False,
        dropout_rate=0.0,
        attention_dropout_rate=0.0,
    )
    with nnx.use_eager_sharding(False):
        params = nnx.eval_shape(lambda: nnx.state(Transformer(config, nnx.Rngs(0)), nnx.Param))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == parameter_count(config)


def test_importing_it_loads_no_jax():
    subprocess.run(
        [sys.executable, "-c", "import trainer.models.flops, sys; assert 'jax' not in sys.modules"], check=True
    )
