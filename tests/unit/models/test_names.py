"""Maps a block's parameter names to those of another block."""

import numpy as np

from trainer.models.names import Names

LAYERS = "decoder/layers/"
NAMES = Names({f"{LAYERS}attend/q/kernel": f"{LAYERS}self_attention/query/kernel", f"{LAYERS}norm": f"{LAYERS}ln_1"})


def test_names_of_parameters_and_of_what_belongs_to_them():
    assert NAMES.common("decoder/layers/attend/q/kernel") == "decoder/layers/self_attention/query/kernel"
    assert NAMES.common("0/mu/decoder/layers/attend/q/kernel") == "0/mu/decoder/layers/self_attention/query/kernel"
    assert NAMES.common("decoder/layers/attend/k/kernel") == "decoder/layers/attend/k/kernel"
    assert NAMES.common("decoder/layers/norm/scale") == "decoder/layers/ln_1/scale"
    assert NAMES.common("decoder/layers/norm_2/scale") == "decoder/layers/norm_2/scale"
    assert NAMES.common("token_embedder/norm/scale") == "token_embedder/norm/scale"
    assert NAMES.unused(["decoder/layers/norm/scale", "attend/q/kernel"]) == [f"{LAYERS}attend/q/kernel"]


def test_only_what_has_a_name_of_its_own_takes_another_shape():
    merged = np.arange(24).reshape(2, 3, 4)
    arrays = {"decoder/layers/self_attention/query/kernel": merged, "decoder/layers/other": merged}
    like = {name: np.zeros((2, 3, 2, 2)) for name in arrays}
    shaped = NAMES.shaped(arrays, like)
    assert shaped["decoder/layers/self_attention/query/kernel"].shape == (2, 3, 2, 2)
    assert shaped["decoder/layers/other"].shape == (2, 3, 4)
