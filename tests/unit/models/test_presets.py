"""Compares presets with the published models: the sizes in their config.json and their numbers of parameters."""

import jax
import ml_collections
import pytest
from flax import nnx
from support import pinned

from trainer.config import load, resolve
from trainer.config.files import preset_names
from trainer.layers.param import Buffer
from trainer.models.transformer import Transformer

# hidden_size, num_attention_heads, num_key_value_heads, intermediate_size, num_hidden_layers, vocab_size, rms_norm_eps,
# rope_theta, tie_word_embeddings of each model's config.json, and the parameters of its published weights (a tied
# table counts once).
PUBLISHED = {
    "llama2-7b": (4096, 32, 32, 11008, 32, 32000, 1e-5, 10000, False, 6_738_415_616),
    "llama2-13b": (5120, 40, 40, 13824, 40, 32000, 1e-5, 10000, False, 13_015_864_320),
    "llama2-70b": (8192, 64, 8, 28672, 80, 32000, 1e-5, 10000, False, 68_976_648_192),
    "llama3-8b": (4096, 32, 8, 14336, 32, 128256, 1e-5, 500000, False, 8_030_261_248),
    "llama3-70b": (8192, 64, 8, 28672, 80, 128256, 1e-5, 500000, False, 70_553_706_496),
    "llama3.1-8b": (4096, 32, 8, 14336, 32, 128256, 1e-5, 500000, False, 8_030_261_248),
    "llama3.1-70b": (8192, 64, 8, 28672, 80, 128256, 1e-5, 500000, False, 70_553_706_496),
    "llama3.1-405b": (16384, 128, 8, 53248, 126, 128256, 1e-5, 500000, False, 405_853_388_800),
    "llama3.3-70b": (8192, 64, 8, 28672, 80, 128256, 1e-5, 500000, False, 70_553_706_496),
    "mistral-7b": (4096, 32, 8, 14336, 32, 32000, 1e-5, 1000000, False, 7_241_732_096),
    "qwen3-0.6b": (1024, 16, 8, 3072, 28, 151936, 1e-6, 1000000, True, 596_049_920),
    "qwen3-1.7b": (2048, 16, 8, 6144, 28, 151936, 1e-6, 1000000, True, 1_720_574_976),
    "qwen3-4b": (2560, 32, 8, 9728, 36, 151936, 1e-6, 1000000, True, 4_022_468_096),
    "qwen3-8b": (4096, 32, 8, 12288, 36, 151936, 1e-6, 1000000, False, 8_190_735_360),
    "qwen3-14b": (5120, 40, 8, 17408, 40, 151936, 1e-6, 1000000, False, 14_768_307_200),
    "qwen3-32b": (5120, 64, 8, 25600, 64, 151936, 1e-6, 1000000, False, 32_762_123_264),
}
# hidden_size, num_attention_heads, num_key_value_heads, width of an expert, number of experts, experts of a token,
# num_hidden_layers, vocab_size, rms_norm_eps, rope_theta, and the parameters, as above.
WITH_EXPERTS = {
    "mixtral-8x7b": (4096, 32, 8, 14336, 8, 2, 32, 32000, 1e-5, 1000000, 46_702_792_704),
    "mixtral-8x22b": (6144, 48, 8, 16384, 8, 2, 56, 32768, 1e-5, 1000000, 140_630_071_296),
    "qwen3-30b-a3b": (2048, 32, 4, 768, 128, 8, 48, 151936, 1e-6, 10000000, 30_532_122_624),
    "qwen3-235b-a22b": (4096, 64, 4, 1536, 128, 8, 94, 151936, 1e-6, 5000000, 235_093_634_560),
    "qwen3-480b-a35b": (6144, 96, 8, 2560, 160, 8, 62, 151936, 1e-6, 10000000, 480_154_875_392),
}
GPT3 = ("gpt3-52k", "gpt3-6b", "gpt3-22b", "gpt3-175b")  # in test_gpt3.py
# The same with n_shared_experts, first_k_dense_replace, intermediate_size, q_lora_rank, the number of expert groups,
# and the number of groups among which a token chooses.
LATENT = {
    "deepseek2-16b": (2048, 16, 16, 1408, 64, 6, 27, 102400, 1e-6, 10000, 2, 1, 10944, 0, -1, -1, 15_706_484_224),
    "deepseek2-236b": (5120, 128, 128, 1536, 160, 6, 60, 102400, 1e-6, 10000, 2, 1, 12288, 1536, 8, 3, 235_741_434_880),
    "deepseek3-671b": (7168, 128, 128, 2048, 256, 8, 61, 129280, 1e-6, 10000, 1, 3, 18432, 1536, 8, 4, 671_026_419_200),
    "kimi-k2-1t": (7168, 64, 64, 2048, 384, 8, 61, 163840, 1e-6, 50000, 1, 1, 18432, 1536, -1, -1, 1_026_408_232_448),
}
# routed_scaling_factor, mscale, and factor, beta_fast and beta_slow of YaRN.
SCALES = {
    "deepseek2-16b": (1, 0.707, 40, 32, 1),
    "deepseek2-236b": (16, 0.707, 40, 32, 1),
    "deepseek3-671b": (2.5, 1, 40, 32, 1),
    "kimi-k2-1t": (2.827, 1, 32, 1, 1),
}
TINY = "deepseek3-tiny"  # MaxText's sizes; no published model
SIZES_WITH_EXPERTS = (
    "base_emb_dim",
    "base_num_query_heads",
    "base_num_kv_heads",
    "base_moe_mlp_dim",
    "num_experts",
    "num_experts_per_tok",
    "base_num_decoder_layers",
    "vocab_size",
    "normalization_layer_epsilon",
    "rope_max_timescale",
)
SIZES = (
    "base_emb_dim",
    "base_num_query_heads",
    "base_num_kv_heads",
    "base_mlp_dim",
    "base_num_decoder_layers",
    "vocab_size",
    "normalization_layer_epsilon",
    "rope_max_timescale",
    "logits_via_embedding",
)


def preset(name: str, platform: str = "cpu") -> ml_collections.FrozenConfigDict:
    loaded = load([f"model_name={name}", "dataset_type=synthetic", *(f"{k}={v}" for k, v in pinned("nnx").items())])
    assert loaded.warnings == []
    assert [note for note in loaded.notes if note.startswith("model_name=")] == []  # no key of the preset is changed
    return resolve(loaded.config, device_count=1, platform=platform)


def test_every_preset_is_here():
    assert preset_names() == ["default", *sorted([*PUBLISHED, *WITH_EXPERTS, *LATENT, TINY, *GPT3])]


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
    assert not config.enable_dropout
    assert config.remat_policy == "full"


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
    """Computed from its config.json, and from the model itself, which is not allocated."""
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


def test_the_tiny_preset_is_maxtexts():
    config = preset(TINY)
    attention = 64 * 32 + 32 + 32 * 4 * 192 + 64 * (16 + 64) + 16 + 16 * 4 * 256 + 4 * 128 * 64
    blocks = 61 * (attention + 2 * 64) + 3 * 3 * 64 * 64 + 58 * (64 * 16 + 16 + 3 * 17 * 64 * 64)
    assert config.num_experts_per_tok == 8
    assert config.routed_score_func == "sigmoid"
    check_count(config, 2 * 129280 * 64 + blocks + 64)


def check_count(config: ml_collections.FrozenConfigDict, published: int) -> None:
    with nnx.use_eager_sharding(False):
        weights = nnx.eval_shape(lambda: nnx.state(Transformer(config, nnx.Rngs(0)), nnx.Any(nnx.Param, Buffer)))
    assert sum(leaf.size for leaf in jax.tree.leaves(weights)) == published
