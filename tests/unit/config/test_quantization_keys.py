"""Keys of quantized training: what is refused, by name and with the reason, and what has no effect."""

import pytest
from support import ALL_COMBINATIONS, arguments

from trainer.config import UserError, load
from trainer.config.effects import no_effect_of
from trainer.config.quantization_keys import METHODS, RECIPES

FIRST = ALL_COMBINATIONS[0]
INT8 = {"quantization": "int8"}


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
        ({"quantization": "te_fp8_delayedscaling"}, "with scales from the values at hand"),
        ({"quantization": "serve_fp8_weight"}, "not served yet"),
        (INT8 | {"quantize_mtp": True}, "quantize_mtp=true .*mtp_num_layers=0 .*there are no such modules"),
        (
            INT8 | {"bwd_stochastic_rounding": "uniform", "quantize_logits_proj": True},
            "the output head has no random key",
        ),
        ({"quantization": "fp8", "bwd_stochastic_rounding": "uniform"}, "only int8 and int4"),
        (INT8 | {"bwd_stochastic_rounding": "normal"}, "allowed: .*low_bit_uniform"),
        (INT8 | {"unquantized_modules": "[(]"}, "not a regular expression"),
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


def test_maxtexts_words_load():
    """MaxText writes null for no value, and needs a key to use Qwix."""
    words = ["use_qwix_quantization=true", "quantization=fp8_full", "drhs_grad_quantization_calibration_method=null"]
    config = load([*arguments(FIRST), *words]).config
    assert config.quantization in RECIPES
    assert config.drhs_grad_quantization_calibration_method == ""
