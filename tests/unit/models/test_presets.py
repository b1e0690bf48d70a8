"""Presets against the published models: the sizes in their config.json and their parameter counts."""

import fnmatch
import functools
import importlib
import math
import re

import jax
import pytest
from published import (
    FAMILIES,
    GLM,
    GPT3,
    GPT_OSS,
    GPT_OSS_20B_JSON,
    GRANITE3_8B,
    GRANITE4_MICRO,
    GRANITE_MOE,
    LARGEST,
    LATENT,
    LLAMA4,
    LONGROPE,
    MINISTRAL3_8B,
    MISTRAL4,
    OWN,
    OWN_OF_PRESETS,
    PHI4_MINI,
    PHI4_MINI_JSON,
    PUBLISHED,
    QWEN3_NEXT_JSON,
    RECURRENT,
    REPORTED,
    SCALES,
    SIZES,
    SIZES_OF_FAMILIES,
    SIZES_WITH_EXPERTS,
    SMOLLM3,
    TINY,
    VISION_OF_LLAMA4,
    WITH_EXPERTS,
    WITH_VISION,
    WITH_VISION_OF_LLAMA4,
    factors,
)
from support import pinned

from trainer.config.files import preset_names
from trainer.config.keys import Config
from trainer.config.load import Loaded, load
from trainer.config.resolve import resolve
from trainer.models.families import stacks
from trainer.objectives.registry import make_objective
from trainer.training.build import build
from trainer.weights.huggingface.config_json import model_keys
from trainer.weights.open import weight_shapes

OTHERS = (*LATENT, *GLM, *LLAMA4, *MISTRAL4, *RECURRENT)


@functools.cache
def loaded_preset(name: str, *words: str) -> Loaded:
    given = [f"{key}={value}" for key, value in pinned("nnx").items()]
    return load([f"model_name={name}", "dataset_type=synthetic", *given, *words])


@functools.cache
def preset(name: str) -> Config:
    loaded = loaded_preset(name)
    assert loaded.warnings == []
    assert [note for note in loaded.notes if note.startswith("model_name=")] == []  # no key of the preset is changed
    return resolve(loaded.config, device_count=1, platform="cpu")


def test_every_preset_is_here():
    assert list(preset_names()) == [
        "default",
        *sorted([*PUBLISHED, *WITH_EXPERTS, *GRANITE_MOE, *OTHERS, TINY, *GPT3, *GPT_OSS, *FAMILIES]),
    ]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_sizes_of_the_published_model(name):
    config = preset(name)
    assert tuple(config[key] for key in SIZES) == PUBLISHED[name][:-1]
    assert config.head_dim == 128
    assert config.mlp_activations == ("silu", "linear")
    assert config.decoder_block == {"l": "llama2", "m": "mistral", "q": "qwen3"}[name[0]]
    assert config.use_qk_norm == name.startswith("qwen3")
    assert config.attention_type == "global"
    assert not (config.logits_via_embedding and config.normalize_embedding_logits)
    assert not config.dropout_rate
    assert config.remat_policy == "full"


def test_dropout_is_off_where_maxtext_turns_it_off():
    """In the other presets, dropout_rate has an effect."""
    off = {name for name in preset_names()[1:] if not preset(name).enable_dropout}
    on = {"llama2-70b", "qwen3-14b", "qwen3-32b", *FAMILIES}
    assert off == {*PUBLISHED, *WITH_EXPERTS, *OTHERS, TINY, *GPT3, *GPT_OSS} - on


@pytest.mark.parametrize("name", PUBLISHED)
def test_rope_is_scaled_where_it_was_published_so(name):
    config = preset(name)
    scaled = name.startswith(("llama3.1", "llama3.3"))
    assert config.rope_type == ("llama3.1" if scaled else "default")
    if scaled:
        assert (config.rope_factor, config.original_max_position_embeddings) == (8, 8192)
        assert (config.rope_low_freq_factor, config.rope_high_freq_factor) == (1, 4)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_as_many_parameters_as_the_published_model(name):
    """Counted from its config.json, and from the abstract model."""
    width, heads, kv_heads, hidden, layers, vocab, _, _, tied, published = PUBLISHED[name]
    query, key = heads * 128, kv_heads * 128
    block = width * query + 2 * width * key + query * width + 3 * width * hidden + 2 * width
    if name.startswith("qwen3"):
        block += 2 * 128
    assert vocab * width * (1 if tied else 2) + layers * block + width == published

    check_count(preset(name), published)


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_a_preset_with_experts_is_the_published_model(name):
    config = preset(name)
    *sizes, published = WITH_EXPERTS[name]
    assert [config[key] for key in SIZES_WITH_EXPERTS] == sizes
    width, heads, kv_heads, hidden, experts, _, layers, vocab, _, _ = sizes
    block = 2 * width * 128 * (heads + kv_heads) + width * experts + 3 * experts * width * hidden + 2 * width
    qwen = name.startswith("qwen3")
    assert config.decoder_block == ("qwen3_moe" if qwen else "mixtral")
    assert config.use_qk_norm == config.norm_topk_prob == qwen
    assert config.head_dim == 128
    assert 2 * vocab * width + layers * (block + 2 * 128 * qwen) + width == published
    assert config.remat_policy == "full"
    check_count(config, published)


@pytest.mark.parametrize("name", GRANITE_MOE)
def test_a_preset_of_granite_with_experts_is_the_published_model(name):
    config = preset(name)
    *sizes, published = GRANITE_MOE[name]
    assert [config[key] for key in SIZES_WITH_EXPERTS] == sizes
    width, heads, kv_heads, hidden, experts, _, layers, vocab, _, _ = sizes
    block = 2 * width * 64 * (heads + kv_heads) + width * experts + 3 * experts * width * hidden + 2 * width
    assert vocab * width + layers * block + width == published
    own = factors(0.015625, 6)
    assert {key: config[key] for key in own} == pytest.approx(own, rel=1e-14)
    assert (config.decoder_block, config.head_dim, config.remat_policy) == ("granite_moe", 64, "full")
    check_count(config, published)


@pytest.mark.parametrize("name", LLAMA4)
def test_a_preset_of_llama_4_is_the_published_model(name):
    config = preset(name)
    *sizes, normed, published = LLAMA4[name]
    *_, mlp, step = sizes
    if step > 1:
        assert config.base_mlp_dim == mlp
    assert [config[key] for key in SIZES_WITH_EXPERTS] == sizes[:-2]
    assert (config.interleave_moe_layer_step, config.use_qk_norm, config.shared_experts) == (step, normed, 1)
    assert (config.nope_layer_interval, config.chunk_attn_window_size, config.temperature_tuning) == (4, 8192, True)
    assert (config.temperature_tuning_scale, config.temperature_tuning_floor_scale) == (0.1, 8192)
    assert config.rope_type == ("llama3.1" if normed else "default")
    width, heads, kv_heads, hidden, experts, _, layers, vocab, *_ = sizes
    sparse = layers // step
    shared = 2 * width * 128 * (heads + kv_heads) + 2 * width
    of_experts = width * experts + 3 * (experts + 1) * width * hidden
    blocks = layers * shared + sparse * of_experts + (layers - sparse) * 3 * width * mlp
    assert 2 * vocab * width + blocks + width == published == WITH_VISION_OF_LLAMA4[name] - VISION_OF_LLAMA4
    check_count(config, published)


@pytest.mark.parametrize("name", GPT_OSS)
def test_a_preset_of_gpt_oss_is_the_published_model(name):
    config = preset(name)
    layers, experts, published = GPT_OSS[name]
    assert (config.base_num_decoder_layers, config.num_experts) == (layers, experts)
    width, query, key = 2880, 64 * 64, 8 * 64
    attention = 2 * width * (query + key) + query + 2 * key + width + 64
    expert = 3 * width * width + 3 * width
    assert 2 * 201088 * width + layers * (attention + (width + 1 + expert) * experts + 2 * width) + width == published
    check_count(config, published)


@pytest.mark.parametrize("name", LATENT)
def test_a_preset_with_latent_attention_is_the_published_model(name):
    config = preset(name)
    *sizes, published = LATENT[name]
    own = ("shared_experts", "first_num_dense_layers", "base_mlp_dim", "q_lora_rank")
    own += ("n_routing_groups", "topk_routing_group")
    assert [config[key] for key in (*SIZES_WITH_EXPERTS, *own)] == sizes
    width, heads, _, hidden, experts, _, layers, vocab, _, _, shared, dense, mlp, q_rank, _, _ = sizes
    queries = width * q_rank + q_rank + q_rank * heads * 192 if q_rank else width * heads * 192
    attention = queries + width * (512 + 64) + 512 + 512 * heads * 256 + heads * 128 * width
    biased = not name.startswith("deepseek2")
    sparse = width * experts + biased * experts + 3 * (experts + shared) * width * hidden
    blocks = layers * (attention + 2 * width) + dense * 3 * width * mlp + (layers - dense) * sparse
    assert 2 * vocab * width + blocks + width == published
    scales = ("routed_scaling_factor", "mscale", "rope_factor", "beta_fast", "beta_slow")
    assert tuple(config[key] for key in scales) == SCALES[name]
    assert (config.rope_type, config.original_max_position_embeddings, config.remat_policy) == ("yarn", 4096, "full")
    assert (config.routed_score_func == "sigmoid") == config.routed_bias == config.norm_topk_prob == biased
    check_count(config, published)


@pytest.mark.parametrize("name", MISTRAL4)
def test_a_preset_of_mistral_4_has_the_sizes_of_transformers_class(name):
    config = preset(name)
    *sizes, shared, q_rank, kv_rank, published = MISTRAL4[name]
    assert [config[key] for key in (*SIZES_WITH_EXPERTS, "shared_experts", "q_lora_rank", "kv_lora_rank")] == [
        *sizes,
        *(shared, q_rank, kv_rank),
    ]
    width, heads, _, hidden, experts, _, layers, vocab, _, _ = sizes
    queries = width * q_rank + q_rank + q_rank * heads * 128
    attention = queries + width * (kv_rank + 64) + kv_rank + kv_rank * heads * 192 + heads * 128 * width
    block = attention + width * experts + 3 * (experts + shared) * width * hidden + 2 * width
    assert 2 * vocab * width + layers * block + width == published
    assert (config.rope_type, config.rope_factor, config.mscale, config.temperature_tuning) == ("yarn", 128, 1, True)
    check_count(config, published)


@pytest.mark.parametrize("name", GLM)
def test_a_preset_of_glm_with_experts_is_the_published_model(name):
    *sizes, published = GLM[name]
    config = resolve(loaded_preset(name, "mtp_num_layers=1").config, device_count=1, platform="cpu")
    own = ("shared_experts", "first_num_dense_layers", "base_mlp_dim")
    assert [config[key] for key in (*SIZES_WITH_EXPERTS, *own)] == sizes
    large, flash = name == "glm4.5-355b", name.startswith("glm4.7-flash")
    assert (config.routed_scaling_factor, config.use_qk_norm) == (2.5 if large else 1.8 if flash else 1, large)
    assert (config.attention_bias, config.partial_rotary_factor) == ((False, 1) if flash else (True, 0.5))
    assert (config.routed_score_func, config.routed_bias, config.norm_topk_prob) == ("sigmoid", True, True)
    assert (config.rope_type, config.n_routing_groups, config.remat_policy) == ("default", -1, "full")
    assert preset(name).mtp_num_layers == 0
    check_count(config, published - 2 * config.vocab_size * config.base_emb_dim)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_preset_of_a_newer_family_is_the_published_model(name):
    config = preset(name)
    *sizes, published = FAMILIES[name]
    assert [config[key] for key in SIZES_OF_FAMILIES] == sizes
    family, tied = sizes[0], sizes[-1]
    own = OWN_OF_PRESETS.get(name, OWN[family])
    if name == "phi3.5-mini":
        own = LONGROPE | {key: config[key] for key in PHI4_MINI}
        assert [len(config[key]) for key in PHI4_MINI] == [48, 48]
        assert [sum(config[key]) for key in PHI4_MINI] == pytest.approx([83.47, 1828.04], abs=1e-4)
    own = own | ({"normalize_embedding_logits": False} if tied else {}) | {"remat_policy": "full"}
    own["mlp_activations"] = ("gelu" if family.startswith("gemma") else "silu", "linear")
    assert {key: config[key] for key in own} == own
    # The preset sets no other key. The RoPE base of Gemma 1 and 2 is the default.
    given = {key for key, source in loaded_preset(name).sources.items() if source.startswith("preset")}
    assert given | {"rope_max_timescale"} == {*SIZES_OF_FAMILIES, *own}
    assert table(name) + not_embedded(name) == published
    check_count(config, published)


@pytest.mark.parametrize("name", REPORTED)
def test_parameters_are_those_of_the_reports_of_gemma(name):
    embedding, others = REPORTED[name]
    assert (256128 * FAMILIES[name][1], not_embedded(name)) == (embedding, others)


@pytest.mark.parametrize("name", WITH_VISION)
def test_parameters_are_those_of_the_report_and_the_files_of_gemma_3(name):
    millions, published = WITH_VISION[name]
    assert round(not_embedded(name) / 1e6) == millions
    # SigLIP So400m: each layer has four matrices with biases, an MLP with biases, and two norms.
    layer = 4 * (1152 * 1152 + 1152) + 2 * 1152 * 4304 + 4304 + 1152 + 4 * 1152
    encoder = 14 * 14 * 3 * 1152 + 1152 + 4096 * 1152 + 27 * layer + 2 * 1152
    vision = 0 if name == "gemma3-1b" else encoder + 1152 * FAMILIES[name][1] + 1152
    assert table(name) + not_embedded(name) + vision == published


LEFT = [name for name in LARGEST if not name.startswith(("gemma3", "olmo3"))]


@pytest.mark.rest(covered_by="gemma3, olmo3", cases=LEFT)
@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_preset_of_a_family_can_be_trained(name):
    """Traces the loss of a training step; nothing is allocated."""
    config = resolve(loaded_preset(name, "max_target_length=64").config, device_count=1, platform="cpu")
    run = build(config, jax.devices()[:1])
    sums = functools.partial(make_objective(config, run.model).sums, key=None)
    losses = jax.eval_shape(lambda *args: sums(*args).minimized, *run.model.abstract, run.abstract_batch(run.rows))
    assert losses["lm_loss"].shape == ()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("smollm3-3b", SMOLLM3),
        ("phi4-mini", PHI4_MINI_JSON),
        ("granite3.1-8b", GRANITE3_8B),
        ("granite4-micro", GRANITE4_MICRO),
        ("ministral3-8b", MINISTRAL3_8B),
        ("gpt-oss-20b", GPT_OSS_20B_JSON),
        ("qwen3-next-80b-a3b", QWEN3_NEXT_JSON),
    ],
)
def test_a_published_config_json_is_its_preset(name, data):
    keys = model_keys(data, "config.json")
    config = preset(name)
    assert {key: config[key] for key in keys} == keys | {"mlp_activations": ("silu", "linear")}


@pytest.mark.parametrize("name", RECURRENT)
def test_a_preset_with_recurrent_layers_is_the_published_model(name):
    """The published parameter count includes the multi-token-prediction module and the image tower."""
    config = preset(name)
    block, *sizes, tied, has_module, tower, published = RECURRENT[name]
    width, heads, kv_heads, value_heads, hidden, experts, _, layers, vocab, _ = sizes
    sparse = experts > 1
    kind = "base_moe_mlp_dim" if sparse else "base_mlp_dim"
    keys = (*SIZES[:3], "gdn_num_value_heads", kind, "num_experts", "num_experts_per_tok", *SIZES[4:6], SIZES[7])
    assert [config[key] for key in keys] == sizes
    assert (config.decoder_block, config.logits_via_embedding, config.remat_policy) == (block, tied, "full")
    same = {"head_dim": 256, "gdn_num_key_heads": 16, "gdn_key_head_dim": 128, "gdn_value_head_dim": 128}
    same |= {"gdn_conv_kernel_dim": 4, "inhomogeneous_layer_cycle_interval": 4, "partial_rotary_factor": 0.25}
    same |= {"normalization_layer_epsilon": 1e-6, "mlp_activations": ("silu", "linear"), "use_qk_norm": True}
    same |= {"shared_experts": 1, "norm_topk_prob": True} if sparse else {"normalize_embedding_logits": not tied}
    assert {key: config[key] for key in same} == same
    values, both = value_heads * 128, 2 * 16 * 128 + value_heads * 128
    attention = width * 256 * (3 * heads + 2 * kv_heads) + 2 * 256
    recurrent = width * (both + 2 * values + 2 * value_heads) + 4 * both + 2 * value_heads + 128
    mlp = width * experts + 3 * (experts + 1) * width * hidden + width if sparse else 3 * width * hidden
    layer = mlp + 2 * width
    text = vocab * width * (1 if tied else 2) + layers * layer + layers // 4 * (attention + 3 * recurrent) + width
    check_count(config, text)
    module = 2 * width * width + 3 * width + attention + layer
    with_module = loaded_preset(name, "mtp_num_layers=1").config
    check_count(resolve(with_module, device_count=1, platform="cpu"), text + module)
    assert text + has_module * module + (image_tower(*tower, width) if tower else 0) == published


def image_tower(depth: int, width: int, hidden: int, text: int) -> int:
    """Returns the parameter count of Qwen's tower: patches of 2 x 16 x 16 pixels, 48 x 48 positions, layers with
    biases, and two matrices that map 2 x 2 patches to the width of the text."""
    layer = 4 * width * width + 4 * width + 2 * width * hidden + hidden + width + 4 * width
    ends = (3 * 512 + 1 + 48 * 48) * width + 2 * width + 4 * width * (4 * width + 1) + (4 * width + 1) * text
    return depth * layer + ends


def test_every_newer_family_has_a_preset_whose_step_is_traced():
    assert sorted(FAMILIES[name][0] for name in LARGEST) == sorted(OWN) == sorted({row[0] for row in FAMILIES.values()})


def test_the_tiny_preset_is_maxtexts():
    config = preset(TINY)
    attention = 64 * 32 + 32 + 32 * 4 * 192 + 64 * (16 + 64) + 16 + 16 * 4 * 256 + 4 * 128 * 64
    blocks = 61 * (attention + 2 * 64) + 3 * 3 * 64 * 64 + 58 * (64 * 16 + 16 + 3 * 17 * 64 * 64)
    assert config.num_experts_per_tok == 8
    assert config.routed_score_func == "sigmoid"
    check_count(config, 2 * 129280 * 64 + blocks + 64)


def table(name: str) -> int:
    """Returns the parameter count of the embedding table and, if untied, of the output head."""
    _, width, *_, vocab, _, _, tied, _ = FAMILIES[name]
    return vocab * width * (1 if tied else 2)


def not_embedded(name: str) -> int:
    """Returns the parameter count of the blocks and the final norm, from the sizes in config.json."""
    family, width, heads, kv_heads, head_dim, hidden, layers, *_ = FAMILIES[name]
    query, key = heads * head_dim, kv_heads * head_dim
    own = OWN_OF_PRESETS.get(name, OWN[family])
    biases = query + 2 * key if own.get("attention_bias") else 0
    norms = (4 if own.get("use_post_attn_norm") else 2) * width
    norms += {"gemma3": 2 * head_dim, "olmo2": query + key, "olmo3": query + key}.get(family, 0)
    return layers * (2 * width * (query + key) + biases + 3 * width * hidden + norms) + width


# Keys that cannot change which parameters a model has, and keys whose effect on their number is in a caller's formula.
NO_EFFECT = {"model_name", "rope_type", "original_max_position_embeddings", "query_pre_attn_scalar", *factors(1, 1)}
NO_EFFECT |= {"enable_dropout", "normalize_embedding_logits", "load_balance_loss_weight", "sliding_window_size"}
COMPARED = {*SIZES, *SIZES_WITH_EXPERTS, *SIZES_OF_FAMILIES, "q_lora_rank", "gdn_num_value_heads"}
COMPARED -= {"decoder_block", "logits_via_embedding"}
counted: set[str] = set()


def check_count(config: Config, published: int) -> None:
    """Counts the parameters of the abstract model. Models that differ only in sizes, which each test compares, are
    traced once."""
    keys = {key: bool(value) if key in COMPARED else value for key, value in config.items() if key not in NO_EFFECT}
    keys = {key: value for key, value in keys.items() if not key.startswith("rope_")}
    kind = str((keys, [len(stack.blocks) for stack in stacks(config)], config.num_experts > 1))
    if kind not in counted:
        assert sum(map(math.prod, weight_shapes(config).values())) == published
        counted.add(kind)


def test_a_familys_folder_says_where_its_sizes_are():
    for name in sorted({*preset_names()} - {"default"}):
        family = load([f"model_name={name}"]).config.decoder_block
        said = importlib.import_module(f"trainer.models.{family}").__doc__ or ""
        patterns = re.findall(r"`(\S+)\.yml`", said.partition("Sizes: ")[2])
        assert any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns), (name, said)
