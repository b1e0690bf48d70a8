"""Hugging Face's own models (tests/goldens, see scripts/write_goldens.py) against ours, through their files.

The checkpoint loader reads the parameters and the checkpoint writer writes the gradients, so these tests repeat no
names and no layouts.
"""

import functools
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from ml_collections import FrozenConfigDict
from safetensors.numpy import load_file
from support import ALL_COMBINATIONS, pinned

from trainer.backends.registry import make_model
from trainer.config.resolve import resolve
from trainer.layers.attention import OPS
from trainer.leaves.source import Leaf, joined, names_of, parted
from trainer.objectives.next_token import NextToken
from trainer.ops.blockwise import blockwise_attention
from trainer.weights.huggingface.write import write_huggingface
from trainer.weights.load import load_parameters
from trainer.weights.model_keys import model_config
from trainer.weights.open import open_source

GOLDENS = Path(__file__).parents[2] / "goldens"
CASES = sorted(path.parent.name for path in GOLDENS.glob("*/config.json"))
WITH_EXPERTS = ("deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "granite-moe", "granite-moe-shared", "mistral4-small")
WITH_EXPERTS += ("mixtral", "qwen3-moe")
WHOLE = ("qwen2", "gemma", "olmo2", "phi3", "glm4", "granite", "granite4", "ministral3")
# One case for each kind of layer that computes gradients in another way. A gradient's program costs as much as six
# programs of logits alone.
OF_GRADIENTS = ("deepseek-v3", "gemma2", "glm4", "gpt-oss", "llama4", "qwen3-moe", "qwen3-next")
OF_A_GUIDE = {"exaone4": "docs.guides.exaone4.facts:FACTS"}  # docs/guides/extending.md
# rope_interleave of the cases that allow only one value.
FIXED = {
    **dict.fromkeys(("glm", "glm4", "llama4", "llama4-interleaved", "llama4-rest"), "true"),
    **dict.fromkeys(("phi4-mini", "glm4-moe", "glm4-moe-air", "qwen3-5", "qwen3-5-moe", "qwen3-next"), "false"),
}
BATCHES = ("rows", "packed")
# Tolerances relative to a tensor's largest entry. Measured rounding from another order of sums: 2.8e-6 (logits) and
# 1.4e-5 (gradients); 7.2e-5 for recurrent layers on an Intel Xeon. transformers in float32 differs from itself in
# float64 by 2.1e-6 and 5.1e-6.
LOGITS, GRADIENTS = 1e-5, 2e-4

# The five combinations are the same program (test_five_combinations), so one represents all.
COMBINATION = ALL_COMBINATIONS[0]


def ways(case):
    """Returns two (attention, rope_interleave) pairs that differ in both values. Two consecutive cases cover all four
    pairs."""
    ops, layouts = ("dot_product", "blockwise"), ("false", "true")
    return [(ops[i], FIXED.get(case, layouts[(CASES.index(case) + i) % 2])) for i in range(2)]


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    """Makes docs.guides importable, and blocks smaller, because the goldens' rows are shorter than a usual block."""
    monkeypatch.syspath_prepend(str(GOLDENS.parents[1]))
    monkeypatch.setitem(OPS, "blockwise", functools.partial(blockwise_attention, block=6))


@functools.cache
def expected(case):
    """Returns {batch: {name: array}} of a golden."""
    arrays = np.load(GOLDENS / case / "expected.npz")
    return {
        batch: {name.removeprefix(f"{batch}/"): arrays[name] for name in arrays.files if name.startswith(f"{batch}/")}
        for batch in BATCHES
    }


def model_of(case, **overrides):
    """Returns the configuration and the model of the golden's config.json. The model recomputes nothing."""
    length = expected(case)["rows"]["inputs"].shape[1]
    keys = {"max_target_length": length, "dtype": "float32", "remat_policy": "none", **pinned(COMBINATION), **overrides}
    words = [f"{key}={value}" for key, value in keys.items()]
    block = OF_A_GUIDE.get(case, "")
    source = open_source(str(GOLDENS / case), block)
    words += [f"decoder_block={block}"] if block else []
    config = resolve(model_config(source.keys, words, case), device_count=1, platform="cpu")
    return config, make_model(config)


def parameters(case, config, model):
    placed = functools.partial(jax.tree.map, lambda leaf: leaf.update(sharding=SingleDeviceSharding(jax.devices()[0])))
    params, rest = map(placed, model.abstract)
    return parted(load_parameters(str(GOLDENS / case), config, joined(params, rest), print), rest)


def inputs_of(batch):
    fields = {name: array for name, array in batch.items() if array.dtype == np.int32}
    return fields | {"row": np.arange(len(fields["inputs"]), dtype=np.int32)}


def logits_of(model, params, rest, batch):
    inputs = (batch[name] for name in ("inputs", "inputs_position", "inputs_segmentation", "row"))
    hidden, _, _ = model.apply(params, rest, *inputs)
    return model.apply(params, rest, hidden, method="head")[0]


def computed(case, config, model, *, gradients):
    """Returns {batch: (gradients as a canonical dict, logits)}, computed with the trainer's objective. Without
    `gradients`, their dict is empty."""
    params, rest = parameters(case, config, model)
    if not gradients:
        program = jax.jit(functools.partial(logits_of, model))
        return {name: ({}, program(params, rest, inputs_of(batch))) for name, batch in expected(case).items()}

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradients_and_logits(params, batch):
        outputs = []

        def apply(*args, **how):
            result = model.apply(*args, **how)
            outputs.append(result[0])
            return result

        objective = NextToken(apply)
        sums = objective.sums(params, rest, batch, None).minimized
        return sums["lm_loss"] / objective.weights(batch).tokens, outputs[-1]  # the head is called last

    return {name: gradients_and_logits(params, inputs_of(batch)) for name, batch in expected(case).items()}


def under_their_names(gradients, config, folder):
    """Returns a canonical dict of arrays under Hugging Face's tensor names, converted by the checkpoint writer."""
    arrays = {name: np.asarray(array) for name, array in names_of(gradients).items()}
    leaves = {name: Leaf(array.shape, array.dtype, [lambda array=array: array]) for name, array in arrays.items()}
    folder.mkdir()
    write_huggingface(folder, config, leaves, None)
    return load_file(folder / "model.safetensors")


def gradients_of(golden):
    """Returns the golden's gradients by tensor name."""
    return {name.removeprefix("gradient/"): golden[name] for name in golden if name.startswith("gradient/")}


def differences(case, config, model, folder, *, gradients):
    """Returns {(batch, "logits" or tensor name): (largest difference, golden's largest entry)}."""
    found = {}
    for batch, (gradient, logits) in computed(case, config, model, gradients=gradients).items():
        golden = expected(case)[batch]
        real = golden["inputs_segmentation"] != 0  # results at padding do not matter
        pairs = {"logits": (np.asarray(logits)[real], golden["logits"][real])}
        if gradients:
            ours = under_their_names(gradient, config, folder / batch)
            pairs |= {name: (ours[name], theirs) for name, theirs in gradients_of(golden).items()}
        for name, (one, other) in pairs.items():
            assert one.shape == other.shape, name
            found[batch, name] = np.abs(one - other).max(), np.abs(other).max()
    return found


@pytest.mark.rest(covered_by="the reference op; unit/ops/test_blockwise.py", cases=("blockwise",))
@pytest.mark.rest(covered_by="llama4, qwen3-moe", cases=("llama4-interleaved", "llama4-rest"))
@pytest.mark.parametrize(
    ("case", "attention", "interleave"),
    # Experts do not depend on the attention op, so one way suffices if it has gradients.
    [(case, *way) for case in CASES for way in ways(case)[: 1 if {case} <= {*WITH_EXPERTS} & {*OF_GRADIENTS} else 2]],
)
def test_logits_and_gradients_are_those_of_hugging_face(case, attention, interleave, tmp_path):
    """Gradients only of OF_GRADIENTS and with blockwise attention."""
    gradients = case in OF_GRADIENTS or attention == "blockwise"
    config, model = model_of(case, attention=attention, rope_interleave=interleave)
    assert (config.attention, config.rope_interleave) == (attention, interleave == "true")
    for (batch, name), (off, largest) in differences(case, config, model, tmp_path, gradients=gradients).items():
        assert off <= largest * (LOGITS if name == "logits" else GRADIENTS), (batch, name, off, largest)


@pytest.mark.parametrize("case", ["llama", "llama-tied", "mistral", "qwen3", "qwen3-tied", *WITH_EXPERTS, *WHOLE])
def test_these_goldens_have_the_gradient_of_every_tensor(case):
    tensors = load_file(GOLDENS / case / "model.safetensors").keys()
    tensors -= {name for name in tensors if name.endswith("e_score_correction_bias")}  # not a parameter
    for golden in expected(case).values():
        assert gradients_of(golden).keys() == tensors


@pytest.mark.rest(covered_by="nothing: it tests the goldens")
@pytest.mark.parametrize(
    ("case", "key", "value"),
    [
        ("llama", "normalization_layer_epsilon", 1e-6),
        ("llama", "rope_interleave", True),
        ("llama-linear", "rope_linear_scaling_factor", 3.0),
        ("llama-llama3", "rope_low_freq_factor", 1.5),
        ("llama-llama3", "rope_high_freq_factor", 3.0),
        ("llama-llama3", "rope_factor", 7.0),
        ("llama-yarn", "rope_attention_scaling", False),
        ("llama-yarn", "rope_truncate", False),
        ("llama-yarn-exact", "beta_fast", 3.5),
        ("llama-yarn-exact", "beta_slow", 0.6),
        ("llama4", "chunk_attn_window_size", 6),
        ("llama4", "temperature_tuning_floor_scale", 5),
        ("llama4", "temperature_tuning_scale", 0.4),
        ("llama4", "use_qk_norm", False),
        ("llama4-interleaved", "nope_layer_interval", -1),
        ("mistral", "sliding_window_size", 6),
        ("qwen3-moe", "norm_topk_prob", True),
        ("deepseek-v2", "mscale", 0.0),
        ("deepseek-v2", "routed_scaling_factor", 3.0),
        ("deepseek-v2", "topk_routing_group", 3),
        ("deepseek-v3", "topk_routing_group", 3),
        ("deepseek-v3", "norm_topk_prob", False),
        ("glm4-moe", "topk_routing_group", 3),
        ("glm4-moe", "partial_rotary_factor", 1.0),
        ("glm4-moe", "routed_scaling_factor", 1.0),
        ("gemma", "normalization_layer_epsilon", 1e-3),
        ("gemma2", "sliding_window_size", 6),
        ("gemma2", "attn_logits_soft_cap", 0.0),
        ("gemma2", "final_logits_soft_cap", 9.0),
        ("gemma2", "query_pre_attn_scalar", 0.0),
        ("gemma3", "sliding_window_size", 6),
        ("gemma3", "query_pre_attn_scalar", 0.0),
        ("gemma3", "local_rope_max_timescale", -1),
        ("gemma3", "rope_linear_scaling_factor", 1.0),
        ("phi3", "sliding_window_size", 6),
        ("phi3-short", "rope_short_factor", (0.5, 1.2, 1.7, 4.0)),
        ("phi3-short", "rope_factor", 5.0),
        ("phi4-mini", "rope_long_factor", (1.0, 2.5, 5.0)),
        ("phi4-mini", "original_max_position_embeddings", 32),  # selects the short factors and another scale
        ("phi4-mini", "rope_attention_scaling", False),
        ("granite", "embedding_multiplier", 2.0),
        ("granite", "residual_multiplier", 1.0),
        ("granite", "logits_multiplier", 1.0),
        ("granite", "query_pre_attn_scalar", 0.0),
        ("ministral3", "temperature_tuning", False),
        ("ministral3", "temperature_tuning_floor_scale", 7),
        ("ministral3", "rope_attention_scaling", True),
        ("mistral4", "topk_routing_group", 3),
        ("mistral4", "norm_topk_prob", False),
        ("mistral4", "temperature_tuning_floor_scale", 7),
        ("mistral4", "mscale", 0.0),
        ("mistral4", "routed_scaling_factor", 1.0),
        ("gpt-oss", "mlp_activations_limit", 1.0),
        ("gpt-oss", "sliding_window_size", 6),
        ("gpt-oss", "rope_truncate", True),
        ("olmo3", "sliding_window_size", 4),
        ("olmo3", "local_rope_max_timescale", -1),
        ("olmo3", "rope_factor", 3.0),
    ],
)
def test_the_goldens_notice_a_key_that_is_off(case, key, value):
    config, model = model_of(case)
    assert config[key] != value
    params, rest = parameters(case, config, model)
    other = make_model(FrozenConfigDict(dict(config.items()) | {key: value}))
    golden = expected(case)["rows"]
    logits = jax.jit(functools.partial(logits_of, other))(params, rest, inputs_of(golden))
    assert np.abs(logits - golden["logits"]).max() > 10 * LOGITS * np.abs(golden["logits"]).max()
