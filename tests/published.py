"""Sizes and parameter counts of published models, with their sources, for unit/models/test_presets.py."""

# hidden_size, num_attention_heads, num_key_value_heads, intermediate_size, num_hidden_layers, vocab_size, rms_norm_eps,
# rope_theta and tie_word_embeddings of each model's config.json, and the parameter count of its published weights (a
# tied table counts once).
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
# hidden_size, num_attention_heads, num_key_value_heads, width of an expert, number of experts, experts per token,
# num_hidden_layers, vocab_size, rms_norm_eps, rope_theta, and the parameter count as above.
WITH_EXPERTS = {
    "mixtral-8x7b": (4096, 32, 8, 14336, 8, 2, 32, 32000, 1e-5, 1000000, 46_702_792_704),
    "mixtral-8x22b": (6144, 48, 8, 16384, 8, 2, 56, 32768, 1e-5, 1000000, 140_630_071_296),
    "qwen3-30b-a3b": (2048, 32, 4, 768, 128, 8, 48, 151936, 1e-6, 10000000, 30_532_122_624),
    "qwen3-235b-a22b": (4096, 64, 4, 1536, 128, 8, 94, 151936, 1e-6, 5000000, 235_093_634_560),
    "qwen3-480b-a35b": (6144, 96, 8, 2560, 160, 8, 62, 151936, 1e-6, 10000000, 480_154_875_392),
}
# Numbers of layers and of experts, and the parameter count as above.
GPT_OSS = {"gpt-oss-20b": (24, 32, 20_914_757_184), "gpt-oss-120b": (36, 128, 116_829_156_672)}
# decoder_block, hidden_size, num_attention_heads, num_key_value_heads, head_dim, intermediate_size, num_hidden_layers,
# vocab_size, rms_norm_eps, rope_theta and tie_word_embeddings of each model's config.json, and the parameter count of
# its published weights (a tied table counts once). A family's sources are above its rows. Where base and instruct
# models differ, these are the base model's values: the instruct models of qwen2-72b, qwen2.5-14b, -32b and -72b have an
# epsilon of 1e-6.
FAMILIES = {
    # Parameter counts: the Hub's metadata of the safetensors files.
    "qwen2-0.5b": ("qwen2", 896, 14, 2, 64, 4864, 24, 151936, 1e-6, 1000000, True, 494_032_768),
    "qwen2-1.5b": ("qwen2", 1536, 12, 2, 128, 8960, 28, 151936, 1e-6, 1000000, True, 1_543_714_304),
    "qwen2-7b": ("qwen2", 3584, 28, 4, 128, 18944, 28, 152064, 1e-6, 1000000, False, 7_615_616_512),
    "qwen2-72b": ("qwen2", 8192, 64, 8, 128, 29568, 80, 152064, 1e-5, 1000000, False, 72_706_203_648),
    "qwen2.5-0.5b": ("qwen2", 896, 14, 2, 64, 4864, 24, 151936, 1e-6, 1000000, True, 494_032_768),
    "qwen2.5-1.5b": ("qwen2", 1536, 12, 2, 128, 8960, 28, 151936, 1e-6, 1000000, True, 1_543_714_304),
    "qwen2.5-3b": ("qwen2", 2048, 16, 2, 128, 11008, 36, 151936, 1e-6, 1000000, True, 3_085_938_688),
    "qwen2.5-7b": ("qwen2", 3584, 28, 4, 128, 18944, 28, 152064, 1e-6, 1000000, False, 7_615_616_512),
    "qwen2.5-14b": ("qwen2", 5120, 40, 8, 128, 13824, 48, 152064, 1e-5, 1000000, False, 14_770_033_664),
    "qwen2.5-32b": ("qwen2", 5120, 40, 8, 128, 27648, 64, 152064, 1e-5, 1000000, False, 32_763_876_352),
    "qwen2.5-72b": ("qwen2", 8192, 64, 8, 128, 29568, 80, 152064, 1e-5, 1000000, False, 72_706_203_648),
    # The Hub's metadata, and Keras Hub's presets of the same files. The reports count other tables, see REPORTED.
    "gemma-2b": ("gemma", 2048, 8, 1, 256, 16384, 18, 256000, 1e-6, 10000, True, 2_506_172_416),
    "gemma-7b": ("gemma", 3072, 16, 16, 256, 24576, 28, 256000, 1e-6, 10000, True, 8_537_680_896),
    "gemma2-2b": ("gemma2", 2304, 8, 4, 256, 9216, 26, 256000, 1e-6, 10000, True, 2_614_341_888),
    "gemma2-9b": ("gemma2", 3584, 16, 8, 256, 14336, 42, 256000, 1e-6, 10000, True, 9_241_705_984),
    "gemma2-27b": ("gemma2", 4608, 32, 16, 128, 36864, 46, 256000, 1e-6, 10000, True, 27_227_128_320),
    "gemma3-270m": ("gemma3", 640, 4, 1, 256, 2048, 18, 262144, 1e-6, 1000000, True, 268_098_176),
    "gemma3-1b": ("gemma3", 1152, 4, 1, 256, 6912, 26, 262144, 1e-6, 1000000, True, 999_885_952),
    # The metadata counts text and vision parameters together, see WITH_VISION.
    "gemma3-4b": ("gemma3", 2560, 8, 4, 256, 10240, 34, 262208, 1e-6, 1000000, True, 3_880_263_168),
    "gemma3-12b": ("gemma3", 3840, 16, 8, 256, 15360, 48, 262208, 1e-6, 1000000, True, 11_766_034_176),
    "gemma3-27b": ("gemma3", 5376, 32, 16, 128, 21504, 62, 262208, 1e-6, 1000000, True, 27_009_346_304),
    # The Hub's metadata.
    "olmo2-1b": ("olmo2", 2048, 16, 16, 128, 8192, 16, 100352, 1e-6, 500000, False, 1_484_916_736),
    "olmo2-7b": ("olmo2", 4096, 32, 32, 128, 11008, 32, 100352, 1e-6, 500000, False, 7_298_617_344),
    "olmo2-13b": ("olmo2", 5120, 40, 40, 128, 13824, 40, 100352, 1e-6, 500000, False, 13_716_198_400),
    "olmo2-32b": ("olmo2", 5120, 40, 8, 128, 27648, 64, 100352, 1e-6, 500000, False, 32_234_279_936),
    "olmo3-7b": ("olmo3", 4096, 32, 32, 128, 11008, 32, 100278, 1e-6, 500000, False, 7_298_011_136),
    "olmo3-7b-pt": ("olmo3", 4096, 32, 32, 128, 11008, 32, 100278, 1e-6, 500000, False, 7_298_011_136),
    "olmo3-32b": ("olmo3", 5120, 40, 8, 128, 27648, 64, 100278, 1e-6, 500000, False, 32_233_522_176),
    # Parameter counts of the Hub and of Keras Hub; LongRoPE factors of torchao and of Keras Hub.
    "phi3-mini-4k": ("phi3", 3072, 32, 32, 96, 8192, 32, 32064, 1e-5, 10000, False, 3_821_079_552),
    "phi3-medium-4k": ("phi3", 5120, 40, 10, 128, 17920, 40, 32064, 1e-5, 10000, False, 13_960_238_080),
    "phi3.5-mini": ("phi3", 3072, 32, 32, 96, 8192, 32, 32064, 1e-5, 10000, False, 3_821_079_552),
    "phi4": ("phi3", 5120, 40, 10, 128, 17920, 40, 100352, 1e-5, 250000, False, 14_659_507_200),
    "phi4-mini": ("phi3", 3072, 24, 8, 128, 8192, 32, 200064, 1e-5, 10000, True, 3_836_021_760),
    # transformers' defaults of Glm4Config and GlmConfig, and published parameter counts.
    "glm4-9b": ("glm4", 4096, 32, 2, 128, 13696, 40, 151552, 1e-5, 10000, False, 9_400_279_040),
    "glm4-9b-chat": ("glm4", 4096, 32, 2, 128, 13696, 40, 151552, 1.5625e-7, 10000, False, 9_399_951_360),
    "glm4-32b": ("glm4", 6144, 48, 2, 128, 23040, 61, 151552, 1e-5, 10000, False, 32_566_081_536),
    # config.json of the Hub's folders; for Granite 4, the fields of the published GGUF files instead. These are the
    # instruct models, whose vocabularies have 3 tokens more than those of some base models.
    "granite3-2b": ("granite", 2048, 32, 8, 64, 8192, 40, 49155, 1e-5, 10000, True, 2_533_531_648),
    "granite3-8b": ("granite", 4096, 32, 8, 128, 12800, 40, 49155, 1e-5, 10000, True, 8_170_848_256),
    "granite3.1-2b": ("granite", 2048, 32, 8, 64, 8192, 40, 49155, 1e-5, 5000000, True, 2_533_531_648),
    "granite3.1-8b": ("granite", 4096, 32, 8, 128, 12800, 40, 49155, 1e-5, 10000000, True, 8_170_848_256),
    # Copies of the instruct models' config.json in other projects.
    "granite3.3-2b": ("granite", 2048, 32, 8, 64, 8192, 40, 49159, 1e-5, 10000000, True, 2_533_539_840),
    "granite3.3-8b": ("granite", 4096, 32, 8, 128, 12800, 40, 49159, 1e-5, 10000000, True, 8_170_864_640),
    "granite4-350m": ("granite4", 1024, 16, 4, 64, 2048, 28, 100352, 1e-5, 10000000, True, 352_379_904),
    "granite4-1b": ("granite4", 2048, 16, 4, 128, 4096, 40, 100352, 1e-5, 10000000, True, 1_631_750_144),
    "granite4-micro": ("granite4", 2560, 40, 8, 64, 8192, 40, 100352, 1e-5, 10000000, True, 3_402_836_480),
    # config.json of the text models in the Hub's folders.
    "ministral3-3b": ("ministral3", 3072, 32, 8, 128, 9216, 26, 131072, 1e-5, 1000000, True, 3_429_006_336),
    "ministral3-8b": ("ministral3", 4096, 32, 8, 128, 14336, 34, 131072, 1e-5, 1000000, False, 8_489_553_920),
    "devstral-small-2-24b": ("ministral3", 5120, 32, 8, 128, 32768, 40, 131072, 1e-5, 10**8, False, 23_572_403_200),
    # A third party's table of the published model, and the YaRN settings of the smaller ones. The published count is
    # 13.5 billion.
    "ministral3-14b": ("ministral3", 5120, 32, 8, 128, 16384, 40, 131072, 1e-5, 10**9, False, 13_506_073_600),
    "smollm3-3b": ("smollm3", 2048, 16, 4, 128, 11008, 36, 128256, 1e-6, 5000000, True, 3_075_098_624),
}
# The same columns as in WITH_EXPERTS. Heads have 64 entries, and the output head is the embedding. Sources as above.
GRANITE_MOE = {
    "granite3-1b-a400m": (1024, 16, 8, 512, 32, 8, 24, 49155, 1e-6, 10000, 1_334_628_352),
    "granite3-3b-a800m": (1536, 24, 8, 512, 40, 8, 32, 49155, 1e-6, 10000, 3_298_793_472),
    "granite3.1-1b-a400m": (1024, 16, 8, 512, 32, 8, 24, 49155, 1e-6, 1500000, 1_334_628_352),
    "granite3.1-3b-a800m": (1536, 24, 8, 512, 40, 8, 32, 49155, 1e-6, 10000000, 3_298_793_472),
}
# Embedding and other parameters in table 2 of the reports of Gemma and of Gemma 2. Their embedding has 256128 rows.
REPORTED = {
    "gemma-2b": (524_550_144, 1_981_884_416),
    "gemma-7b": (786_825_216, 7_751_248_896),
    "gemma2-2b": (590_118_912, 2_024_517_888),
    "gemma2-9b": (917_962_752, 8_324_201_984),
    "gemma2-27b": (1_180_237_824, 26_047_480_320),
}
# Millions of non-embedding parameters, from table 1 of the Gemma 3 report, and all parameters of the published weights
# by the Hub's metadata, including the vision encoder (SigLIP) and the projection of its output.
WITH_VISION = {
    "gemma3-1b": (698, 999_885_952),
    "gemma3-4b": (3_209, 4_300_079_472),
    "gemma3-12b": (10_759, 12_187_325_040),
    "gemma3-27b": (25_600, 27_432_406_640),
}
# Keys outside SIZES_OF_FAMILIES that the presets of a family set, with their values.
POST_NORMS = {"use_post_attn_norm": True, "use_post_ffw_norm": True}
OWN = {
    "qwen2": {"attention_bias": True},
    "gemma": {},
    "gemma2": {**POST_NORMS, "sliding_window_size": 4096, "attn_logits_soft_cap": 50, "final_logits_soft_cap": 30},
    "gemma3": {
        **POST_NORMS,
        "sliding_window_size": 1024,
        "local_rope_max_timescale": 10000,
        "rope_linear_scaling_factor": 8,
    },
    "olmo2": {"use_qk_norm": True},
    "olmo3": {
        **{"use_qk_norm": True, "sliding_window_size": 4096, "local_rope_max_timescale": 500000},
        **{"rope_type": "yarn", "rope_factor": 8, "original_max_position_embeddings": 8192},
        **{"rope_attention_scaling": True},
    },
    "smollm3": {"nope_layer_interval": 4},
    "granite": {},
    "granite4": {},
    "ministral3": {
        **{"rope_type": "yarn", "rope_factor": 16, "original_max_position_embeddings": 16384},
        **{"temperature_tuning": True, "temperature_tuning_scale": 0.1, "temperature_tuning_floor_scale": 16384},
    },
    "phi3": {},
    "glm4": {**POST_NORMS, "attention_bias": True, "partial_rotary_factor": 0.5},
}
SMALL_GEMMA3 = {**POST_NORMS, "sliding_window_size": 512, "local_rope_max_timescale": 10000}
LONGROPE = {
    **{"rope_type": "longrope", "rope_factor": 32, "original_max_position_embeddings": 4096},
    **{"rope_attention_scaling": True},
}
# Phi-4-mini's factors for long texts: 1, 1.118, ... 28.6 is a geometric sequence, and the rest are tuned. Factors for
# short texts are 1.
LONG_PHI4_MINI = (
    *(1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898),
    *(2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424),
    *(6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252),
    *(16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6),
    *(32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77),
)
PHI4_MINI = {"rope_short_factor": (1,) * 48, "rope_long_factor": LONG_PHI4_MINI}
PHI_WINDOW = {"attention_type": "local_sliding", "sliding_window_size": 2047}


def factors(attention: float, logits: float, residual: float = 0.22) -> dict[str, float]:
    """Returns the keys for these values of attention_multiplier and logits_scaling, and Granite's other factors."""
    own = {"embedding_multiplier": 12.0, "residual_multiplier": residual, "logits_multiplier": 1 / logits}
    return own | {"query_pre_attn_scalar": attention**-2}


SMALL_DEVSTRAL = {"rope_factor": 48, "original_max_position_embeddings": 8192, "temperature_tuning_floor_scale": 8192}
OWN_OF_PRESETS = {
    "devstral-small-2-24b": OWN["ministral3"] | SMALL_DEVSTRAL,
    **{f"{version}-2b": factors(0.015625, 8) for version in ("granite3", "granite3.1", "granite3.3")},
    **{f"{version}-8b": factors(0.0078125, 16) for version in ("granite3", "granite3.1", "granite3.3")},
    "granite4-350m": factors(0.015625, 4, 0.263),
    "granite4-1b": factors(0.0078125, 8),
    "granite4-micro": factors(0.015625, 10),
    "glm4-9b-chat": {"attention_bias": True, "partial_rotary_factor": 0.5},
    "glm4-32b": {**POST_NORMS, "partial_rotary_factor": 0.5},
    "phi3-mini-4k": PHI_WINDOW,
    "phi3-medium-4k": PHI_WINDOW,
    "phi4-mini": LONGROPE | PHI4_MINI | {"partial_rotary_factor": 0.75},
    "gemma2-27b": {**OWN["gemma2"], "query_pre_attn_scalar": 144},
    "gemma3-270m": SMALL_GEMMA3,
    "gemma3-1b": SMALL_GEMMA3,
    "gemma3-27b": {**OWN["gemma3"], "query_pre_attn_scalar": 168},
    "olmo3-7b-pt": {"use_qk_norm": True, "sliding_window_size": 4096},
}
# config.json as published.
SMOLLM3 = {
    **{"architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0},
    **{"bos_token_id": 128000, "eos_token_id": 128012, "hidden_act": "silu", "hidden_size": 2048},
    **{"initializer_range": 0.02, "intermediate_size": 11008, "layer_types": ["full_attention"] * 36},
    **{"max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": False, "model_type": "smollm3"},
    **{"no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16},
    **{"num_hidden_layers": 36, "num_key_value_heads": 4, "pad_token_id": 128004, "pretraining_tp": 2},
    **{"rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None},
    **{"torch_dtype": "bfloat16", "transformers_version": "4.54.0.dev0", "use_cache": False},
    **{"use_sliding_window": False, "vocab_size": 128256},
}
# As published, without its quantization.
GPT_OSS_20B_JSON = {
    **{"architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0},
    **{"eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880},
    **{"initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880},
    **{"layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072},
    **{"model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24},
    **{"num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096},
        **{"rope_type": "yarn", "truncate": False},
    },
    **{"rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0},
    **{"tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": 201088},
}
# As published; the windows are longer than the longest text.
PHI4_MINI_JSON = {
    **{"architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 199999},
    **{"embd_pdrop": 0.0, "eos_token_id": 199999, "full_attn_mod": 1, "hidden_act": "silu", "hidden_size": 3072},
    **{"initializer_range": 0.02, "intermediate_size": 8192, "interpolate_factor": 1, "lm_head_bias": False},
    **{"max_position_embeddings": 131072, "mlp_bias": False, "model_type": "phi3", "num_attention_heads": 24},
    **{"num_hidden_layers": 32, "num_key_value_heads": 8, "original_max_position_embeddings": 4096},
    **{"pad_token_id": 199999, "partial_rotary_factor": 0.75, "resid_pdrop": 0.0, "rms_norm_eps": 1e-5},
    "rope_scaling": {"long_factor": list(LONG_PHI4_MINI), "short_factor": [1.0] * 48, "type": "longrope"},
    **{"rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True, "torch_dtype": "bfloat16"},
    **{"transformers_version": "4.45.0", "use_cache": True, "vocab_size": 200064},
}
# As published; MaxText 0.2.5 has the same values in its hf_model_configs.py.
QWEN3_NEXT_JSON = {
    **{"architectures": ["Qwen3NextForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643},
    **{"decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4, "head_dim": 256},
    **{"hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5120},
    **{"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16},
    **{"linear_num_value_heads": 32, "linear_value_head_dim": 128, "max_position_embeddings": 262144},
    **{"mlp_only_layers": [], "model_type": "qwen3_next", "moe_intermediate_size": 512, "norm_topk_prob": True},
    **{"num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48},
    **{"num_key_value_heads": 2, "output_router_logits": False, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06},
    **{"rope_scaling": None, "rope_theta": 10000000, "router_aux_loss_coef": 0.001, "torch_dtype": "bfloat16"},
    **{"shared_expert_intermediate_size": 512, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 151936},
    "transformers_version": "4.57.0.dev0",
}
_QWEN3_5_TEXT = {
    **{"attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16"},
    **{"eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu"},
    **{"initializer_range": 0.02, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16},
    **{"linear_value_head_dim": 128, "max_position_embeddings": 262144, "mtp_num_hidden_layers": 1},
    **{"mtp_use_dedicated_embeddings": False, "rms_norm_eps": 1e-06, "use_cache": True, "vocab_size": 248320},
    "mamba_ssm_dtype": "float32",
    "rope_parameters": {
        **{"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 10000000},
        "partial_rotary_factor": 0.25,
    },
}
_QWEN3_5_OUTER = {
    **{"image_token_id": 248056, "video_token_id": 248057, "vision_start_token_id": 248053},
    **{"vision_end_token_id": 248054, "tie_word_embeddings": False, "vision_config": {"depth": 27}},
}
QWEN3_5_397B_JSON = _QWEN3_5_OUTER | {
    **{"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"},
    "transformers_version": "4.57.0.dev0",
    "text_config": _QWEN3_5_TEXT
    | {
        **{"hidden_size": 4096, "layer_types": [*["linear_attention"] * 3, "full_attention"] * 15},
        **{"linear_num_value_heads": 64, "mlp_only_layers": [], "model_type": "qwen3_5_moe_text"},
        **{"moe_intermediate_size": 1024, "num_attention_heads": 32, "num_experts": 512, "num_experts_per_tok": 10},
        **{"num_hidden_layers": 60, "num_key_value_heads": 2, "router_aux_loss_coef": 0.001},
        "shared_expert_intermediate_size": 1024,
    },
}
QWEN3_6_27B_JSON = _QWEN3_5_OUTER | {
    **{"architectures": ["Qwen3_5ForConditionalGeneration"], "language_model_only": False, "model_type": "qwen3_5"},
    "text_config": _QWEN3_5_TEXT
    | {
        **{"bos_token_id": 248044, "hidden_size": 5120, "intermediate_size": 17408, "linear_num_value_heads": 48},
        **{"layer_types": [*["linear_attention"] * 3, "full_attention"] * 16, "model_type": "qwen3_5_text"},
        **{"num_attention_heads": 24, "num_hidden_layers": 64, "num_key_value_heads": 4, "output_gate_type": "swish"},
        **{"pad_token_id": None, "partial_rotary_factor": 0.25, "tie_word_embeddings": False},
    },
}
GRANITE = {
    **{"attention_bias": False, "attention_dropout": 0.0, "embedding_multiplier": 12, "hidden_act": "silu"},
    **{"residual_multiplier": 0.22, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 1e7},
    **{"max_position_embeddings": 131072, "num_hidden_layers": 40, "num_key_value_heads": 8, "use_cache": True},
    **{"tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.47.0"},
}
GRANITE3_8B = GRANITE | {
    **{"architectures": ["GraniteForCausalLM"], "attention_multiplier": 0.0078125, "bos_token_id": 0},
    **{"eos_token_id": 0, "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12800},
    **{"logits_scaling": 16.0, "mlp_bias": False, "model_type": "granite", "num_attention_heads": 32},
    **{"pad_token_id": 0, "vocab_size": 49155},
}
GRANITE4_MICRO = GRANITE | {
    **{"architectures": ["GraniteMoeHybridForCausalLM"], "attention_multiplier": 0.015625, "bos_token_id": 100257},
    **{"eos_token_id": 100257, "hidden_size": 2560, "init_method": "mup", "initializer_range": 0.1},
    **{"intermediate_size": 8192, "layer_types": ["attention"] * 40, "logits_scaling": 10, "mamba_chunk_size": 256},
    **{"mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 40, "mamba_d_state": 256, "mamba_expand": 2},
    **{"mamba_n_groups": 1, "mamba_n_heads": 128, "mamba_proj_bias": False, "model_type": "granitemoehybrid"},
    **{"normalization_function": "rmsnorm", "num_attention_heads": 40, "num_experts_per_tok": 0},
    **{"num_local_experts": 0, "output_router_logits": False, "pad_token_id": 100256, "router_aux_loss_coef": 0.01},
    **{"position_embedding_type": "rope", "shared_intermediate_size": 8192, "vocab_size": 100352},
}
MINISTRAL3_8B = {
    **{"attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02},
    **{"intermediate_size": 14336, "max_position_embeddings": 262144, "model_type": "ministral3"},
    **{"num_attention_heads": 32, "num_hidden_layers": 34, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    "rope_parameters": {
        **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0},
        **{"mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0},
        **{"rope_type": "yarn", "type": "yarn"},
    },
    **{"sliding_window": None, "use_cache": True, "vocab_size": 131072},
}
LARGEST = (
    "qwen2.5-72b",
    "gemma-7b",
    "gemma2-27b",
    "gemma3-27b",
    "olmo2-32b",
    "olmo3-32b",
    "smollm3-3b",
    "phi4",
    "glm4-32b",
    "granite3-8b",
    "granite4-micro",
    "devstral-small-2-24b",
)
GPT3 = ("gpt3-52k", "gpt3-6b", "gpt3-22b", "gpt3-175b")  # in test_gpt3.py
# The columns of WITH_EXPERTS up to rope_theta, then n_shared_experts, first_k_dense_replace, intermediate_size,
# q_lora_rank, the number of expert groups, the number of groups that a token may use, and the parameter count.
LATENT = {
    "deepseek2-16b": (2048, 16, 16, 1408, 64, 6, 27, 102400, 1e-6, 10000, 2, 1, 10944, 0, -1, -1, 15_706_484_224),
    "deepseek2-236b": (5120, 128, 128, 1536, 160, 6, 60, 102400, 1e-6, 10000, 2, 1, 12288, 1536, 8, 3, 235_741_434_880),
    "deepseek3-671b": (7168, 128, 128, 2048, 256, 8, 61, 129280, 1e-6, 10000, 1, 3, 18432, 1536, 8, 4, 671_026_419_200),
    "kimi-k2-1t": (7168, 64, 64, 2048, 384, 8, 61, 163840, 1e-6, 50000, 1, 1, 18432, 1536, -1, -1, 1_026_408_232_448),
}
# routed_scaling_factor, and YaRN's mscale, factor, beta_fast and beta_slow.
SCALES = {
    "deepseek2-16b": (1, 0.707, 40, 32, 1),
    "deepseek2-236b": (16, 0.707, 40, 32, 1),
    "deepseek3-671b": (2.5, 1, 40, 32, 1),
    "kimi-k2-1t": (2.827, 1, 32, 1, 1),
}
# GLM with experts. The counts include the module of multi-token prediction, which repeats the embedding and the head.
# The counts of GLM-4.5 (and 4.7, which is equal) and 4.5-Air are from other projects' tables. No source was found for
# that of 4.7-Flash, so it is computed from the sizes. The sizes of the two smaller models are transformers' defaults,
# except for rope_theta; those of the largest are Megatron Bridge's.
GLM = {
    "glm4.5-355b": (5120, 96, 8, 1536, 160, 8, 92, 151552, 1e-5, 1000000, 1, 3, 12288, 358_337_791_296),
    "glm4.5-air-106b": (4096, 96, 8, 1408, 128, 8, 46, 151552, 1e-5, 1000000, 1, 1, 10944, 110_468_824_832),
    "glm4.7-flash-30b": (2048, 20, 20, 1536, 64, 4, 47, 154880, 1e-5, 1000000, 1, 1, 10240, 31_221_488_576),
}
# The columns of WITH_EXPERTS up to rope_theta, then base_mlp_dim, interleave_moe_layer_step, use_qk_norm, and the
# parameter count of the text model. Sizes: transformers' Llama4TextConfig and MaxText's presets. WITH_VISION_OF_LLAMA4
# has all parameters by the Hub's metadata.
LLAMA4 = {
    "llama4-17b-16e": (5120, 40, 8, 8192, 16, 1, 48, 202048, 1e-5, 500000, -1, 1, True, 107_769_861_120),
    "llama4-17b-128e": (5120, 40, 8, 8192, 128, 1, 48, 202048, 1e-5, 500000, 16384, 2, False, 400_711_848_960),
}
VISION_OF_LLAMA4 = 871_932_416
WITH_VISION_OF_LLAMA4 = {"llama4-17b-16e": 108_641_793_536, "llama4-17b-128e": 401_583_781_376}
# transformers' Mistral4Config names this model. The published count is 119.4 billion, including the vision tower.
MISTRAL4 = {
    "mistral-small-4-119b": (4096, 32, 32, 2048, 128, 4, 36, 131072, 1e-6, 10000, 1, 1024, 256, 118_972_826_624),
}
# Qwen3-Next, 3.5 and 3.6: decoder_block, hidden_size, num_attention_heads, num_key_value_heads, linear_num_value_heads,
# the width of the MLP or of an expert, number of experts and experts per token (1 and 1 for dense models),
# num_hidden_layers, vocab_size, rope_theta, tie_word_embeddings; whether the published files have a module of
# multi-token prediction; depth, width and MLP width of the vision tower; and the count of all parameters by the Hub's
# metadata. The presets name the sources of the sizes.
_NEXT, _TOWER = ("qwen3_next", 2048, 16, 2, 32, 512, 512, 10, 48, 151936), (27, 1152, 4304)
_DENSE_27B = ("qwen3_5", 5120, 24, 4, 48, 17408, 1, 1, 64, 248320, 10**7, False, True, _TOWER, 27_781_427_952)
_35B = ("qwen3_5_moe", 2048, 16, 2, 32, 512, 256, 8, 40, 248320, 10**7, False, True, _TOWER, 35_951_822_704)
RECURRENT = {
    "qwen3-next-80b-a3b": (*_NEXT, 10**7, False, True, None, 81_324_862_720),
    "qwen3-coder-next-80b-a3b": (*_NEXT, 5 * 10**6, False, False, None, 79_674_391_296),
    **{
        f"qwen3.5-{size}": ("qwen3_5", *sizes, True, (depth, width, 4 * width), count)
        for size, sizes, (depth, width), count in (
            ("0.8b", (1024, 8, 2, 16, 3584, 1, 1, 24, 248320, 10**7, True), (12, 768), 873_438_784),
            ("2b", (2048, 8, 2, 16, 6144, 1, 1, 24, 248320, 10**7, True), (24, 1024), 2_274_069_824),
            ("4b", (2560, 16, 4, 32, 9216, 1, 1, 32, 248320, 10**7, True), (24, 1024), 4_659_865_088),
        )
    },
    "qwen3.5-9b": ("qwen3_5", 4096, 16, 4, 32, 12288, 1, 1, 32, 248320, 10**7, False, True, _TOWER, 9_653_104_368),
    **{"qwen3.5-27b": _DENSE_27B, "qwen3.6-27b": _DENSE_27B, "qwen3.5-35b-a3b": _35B, "qwen3.6-35b-a3b": _35B},
    **{
        f"qwen3.5-{size}": ("qwen3_5_moe", *sizes, 248320, 10**7, False, True, _TOWER, count)
        for size, sizes, count in (
            ("122b-a10b", (3072, 32, 2, 64, 1024, 256, 8, 48), 125_086_497_008),
            ("397b-a17b", (4096, 32, 2, 64, 1024, 512, 10, 60), 403_397_928_944),
        )
    },
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
# The keys of FAMILIES, in the order of its columns.
SIZES_OF_FAMILIES = ("decoder_block", *SIZES[:3], "head_dim", *SIZES[3:])
