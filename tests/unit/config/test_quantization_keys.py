"""Keys of quantized training: what is refused, by name and with the reason, and what has no effect."""

import pytest
from support import ALL_COMBINATIONS, arguments

from trainer.config.capabilities.quantization_keys import METHODS, RECIPES, asks_for_floats
from trainer.config.effects import no_effect_of
from trainer.config.errors import UserError
from trainer.config.load import load

FIRST = ALL_COMBINATIONS[0]
INT8 = {"quantization": "int8"}
STORED = INT8 | {"checkpoint_is_quantized": True}
CACHE = {"quantize_kvcache": True}


def loaded(**keys):
    return load(arguments(FIRST, **keys)).config


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"quantization": "int7"}, "nearest: int"),
        ({"quantization": "intmp"}, "unquantized_modules keeps matrices float"),
        ({"quantization": "fp4"}, "CPU compiler fails on products of fp4"),
        ({"quantization": "fp4_e2m1"}, "CPU compiler fails on products of fp4"),
        ({"quantization": "te_mxfp8"}, "TransformerEngine is not used"),
        ({"quantization": "te_fp8_delayedscaling"}, "with scales computed from the current values"),
        ({"quantization": "serve_fp8_weight"}, "checkpoint_is_quantized=true quantization=fp8"),
        ({"quantization": "nf4"}, "nf4 is for stored weights"),
        ({"checkpoint_is_quantized": True}, "quantization must specify how"),
        (STORED | {"quantization": "fp8_full"}, "quantization must specify how .*int8, int4, fp8"),
        (STORED | {"weight_quantization_calibration_method": "fixed,1"}, "one scale for all layers"),
        (STORED | {"weight_quantization_calibration_method": "minmax", "quantization": "fp8"}, "only int8 and int4"),
        (STORED | {"weight_block_size": [32]}, r"must be \[inputs, outputs\]"),
        (STORED | {"weight_block_size": [0, 1]}, r"must be \[inputs, outputs\]"),
        (STORED | {"quantize_logits_proj": True, "logits_via_embedding": True}, "a tied head is also the table"),
        (STORED | {"weight_quantization_algorithm": "gptq", "quantization": "nf4"}, "evenly spaced"),
        (
            STORED | {"weight_quantization_algorithm": "gptq", "weight_block_size": [8, 8]},
            "separate scales for each output",
        ),
        (
            INT8 | {"quantize_mtp": True},
            "quantize_mtp=true .*mtp_num_layers=0 .*there are no modules of multi-token prediction",
        ),
        (
            INT8 | {"bwd_stochastic_rounding": "uniform", "quantize_logits_proj": True},
            "the output head has no random key",
        ),
        ({"quantization": "fp8", "bwd_stochastic_rounding": "uniform"}, "only int8 and int4"),
        (INT8 | {"bwd_stochastic_rounding": "normal"}, "allowed: .*low_bit_uniform"),
        (INT8 | {"unquantized_modules": "[(]"}, "not a regular expression"),
        (CACHE | {"kv_quant_dtype": "int4"}, "use int8 or fp8"),
        (CACHE | {"kv_quant_axis": "heads"}, "allowed: dkv, heads_and_dkv"),
        (INT8 | {"quantization_local_shard_count": 0}, r"allowed: an integer in \[1, "),
    ],
)
def test_refused(keys, message):
    with pytest.raises(UserError, match=message):
        loaded(**keys)


@pytest.mark.parametrize("key", METHODS)
def test_methods(key):
    for method in ("absmax", "absmax,0.5", "RMS,3", "fixed,1", "fixed,-2,2", "fixed,224"):
        loaded(**INT8, **{key: method})
    for method in ("minmax", "absmax,0", "absmax,x", "rms", "fixed", "fixed,-1,2", "fixed,inf", "fixed,-1", "max", ","):
        with pytest.raises(UserError, match="zero point" if method == "minmax" else "must be absmax"):
            loaded(**INT8, **{key: method})


def test_what_has_no_effect():
    assert no_effect_of(loaded(), "act_quantization_calibration_method") == "nothing is quantized"
    assert no_effect_of(loaded(**INT8), "act_quantization_calibration_method") is None
    assert no_effect_of(loaded(**INT8), "quantize_router_proj") == "num_experts=1"
    assert no_effect_of(loaded(**INT8), "weight_block_size") == "checkpoint_is_quantized=false"
    assert no_effect_of(loaded(**STORED), "act_quantization_calibration_method") == "only stored weights are quantized"
    assert no_effect_of(loaded(), "kv_quant_dtype") == "quantize_kvcache=false"
    text = CACHE | {"dataset_type": "stdlib", "vocab_size": 512}
    assert no_effect_of(loaded(**text), "kv_quant_axis") is None
    latents = {"decoder_block": "deepseek", "attention_type": "mla", "base_num_kv_heads": 4, "num_experts": 4}
    latents |= {"shared_experts": 1, "base_moe_mlp_dim": 8}
    assert no_effect_of(loaded(**text, **latents), "kv_quant_axis") == "latents have no heads"


def test_maxtexts_words_load():
    """MaxText writes null for no value, and needs use_qwix_quantization."""
    words = ["use_qwix_quantization=true", "quantization=fp8_full", "drhs_grad_quantization_calibration_method=null"]
    config = load([*arguments(FIRST), *words]).config
    assert config.quantization in RECIPES
    assert config.drhs_grad_quantization_calibration_method == ""


def test_words_that_ask_for_floats():
    for word in ("false", "False", "no", "0"):
        assert asks_for_floats(["quantization=int8", f"checkpoint_is_quantized={word}"])
    for words in ([], ["checkpoint_is_quantized=TRUE"], ["checkpoint_is_quantized=maybe"]):
        assert not asks_for_floats(words)
