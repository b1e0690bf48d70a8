"""Families with alternating windows, biases, norms after the layers: combinations, meshes, costs, early checks.

test_goldens.py proves their numbers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import ALL_COMBINATIONS, arguments, copied, packed_batch, state_from, tiny_config

from trainer.backends.registry import make_model
from trainer.config.capabilities.windows import windows
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.layers.dense import Embed
from trainer.layers.norm import RMSNorm
from trainer.maxtext.command_line import parse
from trainer.maxtext.convert import TRAIN, convert
from trainer.models.families import stacks
from trainer.models.flops import visible_keys
from trainer.models.patterns import repeated
from trainer.objectives.base import prepared
from trainer.objectives.registry import make_objective
from trainer.ops.random import seed_key
from trainer.training.batches import placed
from trainer.training.build import build
from trainer.weights.huggingface.config_json import config_json
from trainer.weights.maxtext.model_arguments import maxtext_keys

GATED = {"mlp_activations": "[gelu,linear]"}
POST_NORMS = {"use_post_attn_norm": True, "use_post_ffw_norm": True}
OF_GLM = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 12, "shared_experts": 1},
    **{"first_num_dense_layers": 1, "routed_score_func": "sigmoid", "routed_bias": True, "norm_topk_prob": True},
    "logits_via_embedding": False,
}
# One family per kind of block. Together they cover a pattern with and without a remainder, and a stack without a
# pattern.
FAMILIES = {
    "qwen2": {"attention_bias": True},
    "gemma": GATED,
    "gemma2": GATED
    | POST_NORMS
    | {"sliding_window_size": 5, "attn_logits_soft_cap": 4.0, "final_logits_soft_cap": 8.0},
    "gemma3": GATED
    | POST_NORMS
    | {"sliding_window_size": 5, "local_rope_max_timescale": 100, "base_num_decoder_layers": 7},
    "olmo2": {"use_qk_norm": True, "logits_via_embedding": False},
    "olmo3": {"use_qk_norm": True, "sliding_window_size": 5, "logits_via_embedding": False}
    | {"base_num_decoder_layers": 4},
    "smollm3": {"nope_layer_interval": 2, "base_num_decoder_layers": 3, "normalize_embedding_logits": False},
    "llama4": {
        **{"use_qk_norm": True, "nope_layer_interval": 2, "interleave_moe_layer_step": 2, "temperature_tuning": True},
        **{"chunk_attn_window_size": 5, "temperature_tuning_floor_scale": 3, "base_num_decoder_layers": 2},
        **{"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 16, "shared_experts": 1},
        "logits_via_embedding": False,
    },
    "gpt_oss": {
        **{"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 16, "mlp_activations_limit": 0.5},
        **{"attention_bias": True, "sliding_window_size": 5, "rope_type": "yarn", "rope_factor": 4.0},
        **{"original_max_position_embeddings": 8, "rope_truncate": False, "rope_attention_scaling": True},
    },
    "glm4": POST_NORMS | {"attention_bias": True, "partial_rotary_factor": 0.5, "logits_via_embedding": False},
    "glm4_moe": OF_GLM | {"attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5},
    "glm4_moe_lite": OF_GLM
    | {"attention_type": "mla", "base_num_kv_heads": 4, "q_lora_rank": 6, "kv_lora_rank": 8}
    | {"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "mtp_num_layers": 1},
    "ministral3": {
        **{"rope_type": "yarn", "rope_factor": 4.0, "original_max_position_embeddings": 8},
        **{"temperature_tuning": True, "temperature_tuning_scale": 0.5, "temperature_tuning_floor_scale": 8},
    },
    "granite4": {
        **{"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_multiplier": 0.3},
        **{"query_pre_attn_scalar": 9.0, "normalize_embedding_logits": False},
    },
    "phi3": {
        **{"rope_type": "longrope", "partial_rotary_factor": 0.5, "rope_factor": 4.0, "rope_attention_scaling": True},
        **{"rope_short_factor": "[1.0,1.5]", "rope_long_factor": "[1.0,4.0]", "original_max_position_embeddings": 8},
    },
}

# Patterns of two layers instead of the family's 6 or 4, because the cost of a whole step grows with the pattern: one
# repetition and a remainder, and two repetitions.
SHORT = {
    "gemma3": {"sliding_window_pattern": 2, "base_num_decoder_layers": 3},
    "olmo3": {"sliding_window_pattern": 2},
}


def keys_of(family, **more):
    return FAMILIES[family] | {"decoder_block": family} | more


@functools.cache
def program_text(family, combination):
    """Returns the text of the loss. Its gradient follows from it: integration/test_five_combinations.py."""
    keys = SHORT.get(family, {}) | {"dropout_rate": 0.1, "attention_dropout_rate": 0.1, "remat_policy": "full"}
    config = tiny_config(combination, **keys_of(family, scan_layers=family != "gemma2", **keys))
    model = make_model(config)
    objective = make_objective(config, model)
    loss = jax.jit(lambda params, rest, batch: objective.sums(params, rest, batch, seed_key(0)).minimized)
    return loss.lower(*model.abstract, prepared(objective, packed_batch(config, 2))).as_text()


# All combinations for the family with all features. The others compare only the first and the last, which differ most.
PROGRAMS = [(family, ALL_COMBINATIONS[-1]) for family in FAMILIES]
PROGRAMS += [("gemma3", combination) for combination in ALL_COMBINATIONS[1:-1]]


@pytest.mark.rest(covered_by="gemma2, olmo3, gemma3", cases=("gemma", "granite4", "ministral3", "olmo2", "smollm3"))
@pytest.mark.parametrize(("family", "combination"), PROGRAMS)
def test_the_program_is_the_same_in_every_combination(family, combination):
    expected = program_text(family, ALL_COMBINATIONS[0])
    assert "stablehlo.dot_general" in expected
    assert program_text(family, combination) == expected


def initial(run):
    """Returns a canonical state. Its optimizer, SGD, has no state except counters."""
    rng, abstract = np.random.default_rng(0), run.codec.unpack(run.codec.abstract)

    def one(path, leaf):
        normal = rng.normal(size=leaf.shape).astype(leaf.dtype)
        return 1 + normal / 8 if path[-1].key == "scale" else normal / 4

    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract)
    return zeros._replace(params=jax.tree_util.tree_map_with_path(one, abstract.params))


def losses(family, devices, **more):
    keys = SHORT.get(family, {}) | ({"base_num_decoder_layers": 2} if family == "olmo3" else {}) | more
    keys |= {"opt_type": "sgd", "learning_rate": 0.1, "remat_policy": "none"}
    words = arguments(ALL_COMBINATIONS[0], **keys_of(family, **keys))
    run = build(load(words).config, jax.devices()[:devices])
    state, found = state_from(run, initial(run)), []
    for i in range(2):
        state, row = run.step(state, placed(run, packed_batch(run.config, 16, seed=i)), ())
        found.append(run.computation.read(row, i)["loss"])
    return found, copied(run.codec.unpack(state).params)


@pytest.mark.rest(covered_by="olmo3; the rest of a pattern in unit/models/test_goldens.py", cases=("gemma3",))
@pytest.mark.rest(covered_by="olmo3; the shardings of biases", cases=("qwen2",))
@pytest.mark.rest(covered_by="olmo3; experts in unit/training/test_experts.py", cases=("glm4_moe", "glm4_moe_lite"))
@pytest.mark.rest(covered_by="olmo3; rotation is the same on every device", cases=("granite4", "phi3"))
@pytest.mark.rest(covered_by="unit/layers/test_across.py and integration tests of experts", cases=("llama4",))
@pytest.mark.parametrize(
    "family", ["qwen2", "gemma3", "olmo3", "phi3", "granite4", "glm4_moe", "glm4_moe_lite", "llama4"]
)
def test_eight_devices_and_other_loops_compute_what_one_device_does(family):
    """Covers norms over all heads, biases, and the remainder of a pattern, with tensor parallelism and Zero-1."""
    one, params = losses(family, 1, per_device_batch_size=16)
    mesh = dict.fromkeys(("ici_data_parallelism", "ici_fsdp_parallelism", "ici_tensor_parallelism"), 2)
    mesh |= {"sharding_tolerance": 1.0}
    how = {"shard_optimizer_over_data": True, "gradient_accumulation_steps": 2, "scan_layers": False}
    many, others = losses(family, 8, per_device_batch_size=1, attention="blockwise", **mesh, **how)
    np.testing.assert_allclose(many, one, rtol=2e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), others, params)


@pytest.mark.rest(covered_by="dropless", cases=("capacity",))
@pytest.mark.parametrize("experts", ["dropless", "capacity"])
def test_the_biases_of_experts_are_added_once_on_a_mesh(experts):
    """The mesh shards the experts and each expert's hidden units. One layer, without a window."""
    how = {"sliding_window_pattern": 1, "base_num_decoder_layers": 1}
    how |= {} if experts == "dropless" else {"sparse_matmul": False, "capacity_factor": 1.0}
    one, params = losses("gpt_oss", 1, per_device_batch_size=16, **how)
    mesh = {"ici_fsdp_parallelism": 2, "ici_expert_parallelism": 2, "ici_tensor_parallelism": 2}
    many, others = losses("gpt_oss", 8, per_device_batch_size=2, sharding_tolerance=1.0, **mesh, **how)
    np.testing.assert_allclose(many, one, rtol=2e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), others, params)


def test_the_biases_of_qwen2_are_sharded_like_their_kernels():
    mesh = {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 4, "sharding_tolerance": 1.0, "base_num_kv_heads": 4}
    words = arguments(ALL_COMBINATIONS[0], **keys_of("qwen2", per_device_batch_size=1, **mesh))
    table = build(load(words).config, jax.devices()[:8]).table()
    bias = next(row for row in table["tensors"] if row["name"].endswith("query/bias"))
    assert (bias["spec"], table["warnings"]) == ([[], ["tensor"], []], [])
    # The rule for the kernel's inputs takes the mesh axis first, so only the bias can use it for q_heads.
    taken = "override_logical_axis_rules=false logical_axis_rules=[[embed,[fsdp]],[q_heads,[fsdp]],[heads,[]]]"
    with pytest.raises(UserError, match="q_heads"):
        build(load([*words, *taken.split()]).config, jax.devices()[:8]).table()


# ---- Patterns


@pytest.mark.parametrize(
    ("layers", "sizes"), [(1, [(1, 1)]), (6, [(6, 1)]), (7, [(6, 1), (1, 1)]), (14, [(6, 2), (2, 1)]), (5, [(5, 1)])]
)
def test_the_rest_of_a_pattern_is_a_stack_of_its_own(layers, sizes):
    declared = [stack for stack in repeated([object] * 6, layers) if stack.layers]
    assert [(len(stack.blocks), stack.count) for stack in declared] == sizes


@pytest.mark.parametrize(
    ("family", "more", "expected"),
    [
        ("gemma2", {}, (5, 0)),
        ("gemma3", {}, (5, 5, 5, 5, 5, 0)),
        ("gemma3", {"sliding_window_pattern": 2}, (5, 0)),
        ("gemma3", {"sliding_window_pattern": 1}, (0,)),
        ("olmo3", {}, (5, 5, 5, 0)),
        ("llama4", {}, (5, 0)),
        ("llama4", {"nope_layer_interval": -1}, (5,)),
        ("qwen2", {}, (0,)),
        ("qwen2", {"attention_type": "local_sliding", "sliding_window_size": 3}, (3,)),
    ],
)
def test_windows(family, more, expected):
    config = tiny_config(ALL_COMBINATIONS[0], **keys_of(family, **more))
    assert windows(config) == expected
    made = [
        block.keywords["window"]
        for stack in stacks(config)
        for block in stack.blocks
        if "window" in getattr(block, "keywords", ())
    ]
    layers = config.base_num_decoder_layers
    if len(expected) > 1 and family != "llama4":
        assert made[: len(expected)] == list(expected)[:layers]


# ---- Early checks


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("decoder_block=gemma2", "a sliding window needs at least one token"),
        ("attention_bias=true", "this family does not read it; only glm4, glm4_moe, gpt_oss, qwen2 can have it"),
        ("sliding_window_pattern=2", "only gemma2, gemma3, gpt_oss, olmo3 can have it"),
        ("decoder_block=qwen3 nope_layer_interval=4", "only llama4, smollm3 can have it"),
        (
            "decoder_block=ministral3 temperature_tuning=true rope_type=yarn original_max_position_embeddings=9",
            "scales queries and RoPE beyond the same length: set both keys to the same number",
        ),
        ("mlp_activations_limit=7", "only gpt_oss can have it"),
        ("decoder_block=gpt_oss num_experts=4 sliding_window_size=4", "this family clamps its gated units"),
        (
            "decoder_block=gemma3 sliding_window_size=4 local_rope_max_timescale=2 rope_min_timescale=3",
            "the shortest wavelength must be less than the longest",
        ),
        ("decoder_block=gemma3 sliding_window_size=4 use_qk_clip=true", "use one of the two"),
    ],
)
def test_a_mistake_of_the_first_stage(words, message):
    with pytest.raises(UserError, match=message):
        load(["dataset_type=synthetic", *words.split()])


def test_a_kernel_without_sinks_is_refused():
    with pytest.raises(UserError, match="the sinks of decoder_block=gpt_oss"):
        tiny_config(ALL_COMBINATIONS[0], **keys_of("gpt_oss", attention="cudnn_flash_jax"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "decoder_block=gemma normalize_embedding_logits=true",
            "decoder_block=gemma always has normalize_embedding_logits=false",
        ),
        (
            "decoder_block=gemma2 sliding_window_size=4 attention_type=local_sliding",
            'decoder_block=gemma2 always has attention_type="global"',
        ),
        ("local_rope_max_timescale=100", "no layer has a window"),
        ("decoder_block=gemma3 sliding_window_pattern=1 sliding_window_size=4", "no layer has a window"),
    ],
)
def test_a_key_without_effect(words, said):
    (line,) = load(["dataset_type=synthetic", *words.split()]).warnings
    assert f"has no effect: {said}" in line


@pytest.mark.parametrize("missing", ["use_post_attn_norm", "use_post_ffw_norm"])
def test_a_block_of_gemma_may_lack_an_outer_norm(missing):
    """As in MaxText. Hugging Face's models have both norms."""
    config = tiny_config(ALL_COMBINATIONS[0], **keys_of("gemma2", **{missing: False}))
    block = stacks(config)[0].blocks[0](config, nnx.Rngs(0))
    norms = [getattr(block, name) is not None for name in ("post_self_attention_norm", "post_ffw_norm")]
    assert norms == [missing != "use_post_attn_norm", missing != "use_post_ffw_norm"]
    with pytest.raises(UserError, match=f"{missing}=False"):
        config_json(config, "float32", {})


TRAINED = "base.yml decoder_block=gemma2 sliding_window_size=4096 run_name=x dataset_type=synthetic "
PROGRAM = "python3 -m maxtext.trainers.pre_train.train "


@pytest.mark.parametrize(
    ("line", "layers"),
    [
        (f"{PROGRAM}{TRAINED} base_num_decoder_layers=13", 26),
        (f"{PROGRAM}{TRAINED} base_num_decoder_layers=1e1", 20),
        (f"M_BASE_NUM_DECODER_LAYERS=13 {PROGRAM}{TRAINED}", 26),
        (f"{PROGRAM}{TRAINED}", 32),  # MaxText's default
        (f"{PROGRAM}base.yml model_name=gemma2-2b run_name=x dataset_type=synthetic", 26),
    ],
)
def test_the_converter_doubles_the_layers_of_gemma2(line, layers):
    found = convert(parse([line]), TRAIN)
    assert found.runs
    assert found.loaded.config.base_num_decoder_layers == layers
    assert sum(word.startswith("base_num_decoder_layers=") for word in found.words) == ("model_name" not in line)


def test_the_converter_does_not_guess_the_layers_of_gemma2(tmp_path):
    (tmp_path / "own.yml").write_text("base_config: maxtext.yml\ndecoder_block: gemma2\nbase_num_decoder_layers: 13\n")
    own = f"{PROGRAM}{tmp_path / 'own.yml'} sliding_window_size=4096 run_name=x dataset_type=synthetic"
    for line in (own, f"{PROGRAM}{TRAINED} base_num_decoder_layers=$N"):
        found = convert(parse([line]), TRAIN)
        assert not found.runs
        assert "MaxText counts 2 of them as one: give 2 times it" in found.problems[-1]


@pytest.mark.parametrize(
    ("model", "word"),
    [
        ("gemma3-4b", "vocab_size=262144"),
        ("gemma-2b", "vocab_size=256128"),
        ("olmo3-7b", "local_rope_max_timescale=-1"),
        ("qwen2.5-14b", "normalization_layer_epsilon=1.0e-6"),
    ],
)
def test_the_converter_adds_what_maxtexts_preset_has(model, word):
    line = f"{PROGRAM}base.yml model_name={model} run_name=x dataset_type=synthetic"
    assert word in convert(parse([line]), TRAIN).words
    own = f"{word.partition('=')[0]}=100"
    assert word not in convert(parse([f"{line} {own}"]), TRAIN).words


# ---- MaxText


@pytest.mark.parametrize(
    ("family", "more", "named"),
    [
        ("gemma", {}, "normalization_layer_epsilon=1e-05: MaxText always uses 1e-6"),
        ("gemma2", {"base_num_decoder_layers": 3}, "MaxText requires an even number"),
        ("gemma2", {"sliding_window_pattern": 4}, "MaxText always uses 2"),
        ("gemma2", {"local_rope_max_timescale": 100, "rope_linear_scaling_factor": 2}, "in these layers, too"),
        ("gemma3", {"sliding_window_pattern": 3}, "MaxText always uses 6"),
        ("gemma3", {"query_pre_attn_scalar": 5}, "only head_dim or base_emb_dim"),
        ("gemma3", {"local_rope_max_timescale": -1, "rope_linear_scaling_factor": 2}, "MaxText never scales RoPE"),
        ("gemma3", {"rope_type": "yarn"}, "all of its layers rotate alike"),
        ("gpt_oss", {"sliding_window_pattern": 3}, "MaxText always uses 2"),
        ("gpt_oss", {"base_num_decoder_layers": 5}, "MaxText requires a multiple of 2"),
        ("olmo3", {"sliding_window_pattern": 2}, "MaxText always uses 4"),
        ("olmo3", {"base_num_decoder_layers": 5}, "MaxText requires a multiple of 4"),
        ("qwen2", {"query_pre_attn_scalar": 5}, "it always divides scores"),
        (
            "qwen2",
            {"attention_type": "local_sliding", "sliding_window_size": 3, "local_rope_max_timescale": 9},
            "its block has no layers with a window",
        ),
    ],
)
def test_what_maxtexts_block_cannot_compute(family, more, named):
    with pytest.raises(UserError, match=named):
        maxtext_keys(tiny_config(ALL_COMBINATIONS[0], **keys_of(family, **more)))


# ---- Initial values, FLOPs


def test_norms_are_the_identity_and_embeddings_are_standard_at_first():
    dtypes = {"dtype": jnp.float32, "weight_dtype": jnp.float32}
    x = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)

    @jax.jit
    def found():
        embed = Embed(500, 16, scale=4.0, rngs=nnx.Rngs(0), **dtypes)
        normed = [RMSNorm(64, epsilon=1e-6, offset=offset, **dtypes)(x) for offset in (0.0, 1.0)]
        return *normed, embed(jnp.arange(500)[None]), embed.embedding[...]

    plain, shifted, embedded, table = map(np.asarray, found())
    np.testing.assert_array_equal(plain, shifted)
    assert np.abs(plain).max() > 1
    assert embedded.std() == pytest.approx(1, rel=0.05)
    assert table.std() == pytest.approx(1 / 4, rel=0.05)


def test_a_module_of_multi_token_prediction_has_the_window_of_the_last_layer():
    keys = {"max_target_length": 16, "mtp_num_layers": 1}
    config = tiny_config(ALL_COMBINATIONS[0], **keys_of("gemma3", base_num_decoder_layers=6, **keys))
    local, whole = 5 - 25 / 32, 8.0
    assert visible_keys(config) == pytest.approx((5 * local + 2 * whole) / 7)


def test_latent_attention_does_not_read_the_scalar():
    keys = {"decoder_block": "deepseek", "attention_type": "mla", "base_num_kv_heads": 4, "num_experts": 2}
    words = arguments(ALL_COMBINATIONS[0], query_pre_attn_scalar=3, base_moe_mlp_dim=8, shared_experts=1, **keys)
    assert any("query_pre_attn_scalar=3.0" in line for line in load(words).warnings)
